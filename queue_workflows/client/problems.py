"""Turn the service's problem documents (RFC 9457) into the errors of this package."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any, Final, cast

import httpx

from queue_workflows import errors
from queue_workflows.runtime import masking

_PREFIX: Final = "urn:queue-workflows:"
DETAIL_CHARACTERS: Final = 2000
_OTHERS: Final[Mapping[str, type[errors.QueueWorkflowsError]]] = {
    "not-retried": errors.InvalidConfig,
    "not-ready": errors.ServiceUnavailable,
    "too-far-behind": errors.EventsLost,
    "invalid": errors.RequestRefused,
    "internal-error": errors.ServiceFailed,
}
"""Types of problems that are no class of `errors`."""
_STATUSES: Final[Mapping[int, type[errors.QueueWorkflowsError]]] = {
    **dict.fromkeys((401, 403), errors.AccessDenied),
    **dict.fromkeys((408, 429, 502, 503, 504), errors.ServiceUnavailable),
}


def of_response(response: httpx.Response) -> errors.QueueWorkflowsError:
    """Return the error that a response reports; its body was read.

    The class is that which the service raised, if the response names it, else one by the status.
    """
    document = _document(response)
    given = str(document.get("detail") or document.get("title") or response.reason_phrase)
    shown = masking.mask(given)[:DETAIL_CHARACTERS] or "no reason given"
    text = f"{shown} (HTTP {response.status_code})"
    kind = document.get("type")
    name = kind.removeprefix(_PREFIX) if isinstance(kind, str) else ""
    status = response.status_code
    default = errors.ServiceFailed if status >= 500 or status < 400 else errors.RequestRefused
    found = _leaves().get(name) or _OTHERS.get(name) or _STATUSES.get(status, default)
    if issubclass(found, errors.IdempotencyClash):
        existing = document.get("existing")
        members = cast("dict[str, Any]", existing) if isinstance(existing, dict) else {}
        return found(text, str(members.get("job_id") or ""))
    return found(text)


def _document(response: httpx.Response) -> dict[str, Any]:
    try:
        found = json.loads(response.content)
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


@functools.cache
def _leaves() -> dict[str, type[errors.QueueWorkflowsError]]:
    """Return the classes of errors by the name that the service gives them."""
    base = errors.QueueWorkflowsError
    return {
        re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower(): kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, base) and kind is not base
        and not issubclass(kind, errors.JobSignal)
    }  # fmt: skip


def of_transport(error: httpx.HTTPError | httpx.InvalidURL) -> errors.QueueWorkflowsError:
    """Return the error of a request that got no response."""
    text = masking.mask(str(error) or type(error).__name__)[:DETAIL_CHARACTERS]
    if isinstance(error, httpx.InvalidURL):
        text = text.partition(": ")[0]  # What httpx takes for a port may be a password.
    if isinstance(error, (httpx.InvalidURL, httpx.UnsupportedProtocol)):
        return errors.InvalidConfig(f"the service's URL cannot be used: {text}")
    return errors.ServiceUnavailable(f"the service does not answer: {text}")
