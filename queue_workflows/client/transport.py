"""Describe a request to the service, decide whether it is repeated, and read its response."""

from __future__ import annotations

import functools
import json
import os
import random
import re
from collections.abc import Generator, Mapping
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar, cast

import httpx

import queue_workflows
from queue_workflows import errors
from queue_workflows.client import events
from queue_workflows.requests.request import Call, Request
from queue_workflows.runtime import masking, trace_context

T = TypeVar("T")
Got: TypeAlias = "httpx.Response | httpx.HTTPError | httpx.InvalidURL"
"""A response, or why there is none."""
TOKEN: Final = "QUEUE_WORKFLOWS_TOKEN"  # noqa: S105  the name of a variable
TIMEOUT_S: Final = 10.0
RETRIES: Final = 3
PAUSE_FIRST_S: Final = 0.2
PAUSE_MAX_S: Final = 10.0
_UNSENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
"""Errors of requests that the service has not seen."""
_AGAIN: Final = frozenset({408, 429, 502, 503, 504})


class Connection(NamedTuple):
    """Where the service is and how it is called."""

    url: str
    headers: Mapping[str, str]
    timeout_s: float
    retries: int


def connection(url: str, token: str | None, timeout_s: float, retries: int) -> Connection:
    """Return the checked arguments of a client; `token` None: that of QUEUE_WORKFLOWS_TOKEN.

    Raises `InvalidConfig`.
    """
    if timeout_s <= 0 or retries < 0:
        raise errors.InvalidConfig("timeout_s must be above 0, and retries at least 0")
    agent = f"queue_workflows/{queue_workflows.__version__}"
    headers = {"accept": "application/json", "user-agent": agent}
    chosen = os.environ.get(TOKEN) if token is None else token
    if chosen:
        if not chosen.isascii() or not chosen.isprintable() or " " in chosen:
            raise errors.InvalidConfig("the token has characters that no token has")
        headers["authorization"] = f"Bearer {chosen}"
    return Connection(url.rstrip("/"), headers, timeout_s, retries)


def exchange(
    conn: Connection, client: Any, asked: Request[T]
) -> Generator[httpx.Request | float, Got | None, T]:
    """Yield the requests to make, which get what came of each, and the seconds to wait between.

    Returns the result. A call is repeated if that is safe.
    """
    steps, found = asked.steps(), None
    while True:
        try:
            call = steps.send(found)
        except StopIteration as end:
            return end.value
        tries, after_s = 0, 0.0
        got: Any = None
        while after_s is not None:
            tries += 1
            got = yield request(conn, client, call)
            if (after_s := pause_s(conn, call, tries, got)) is not None:
                yield after_s
        found = read(call, got)


def request(conn: Connection, client: Any, call: Call[Any]) -> httpx.Request:
    """Return the request of a call. Raises `InvalidPayload` for a body that is no JSON."""
    headers = {**conn.headers}
    headers |= trace_context.with_current(None) or {}
    content = None
    if call.body is not None:
        try:
            content = json.dumps(call.body, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise errors.InvalidPayload(f"it cannot be sent as JSON: {error}") from None
        headers["content-type"] = "application/json"
    query = {name: value for name, value in call.query.items() if value is not None}
    timeout = httpx.Timeout(conn.timeout_s, read=conn.timeout_s + call.wait_s)
    try:
        return client.build_request(
            call.method,
            conn.url + call.path,
            params=query,
            content=content,
            headers=headers,
            timeout=timeout,
        )
    except httpx.InvalidURL as error:
        raise of_transport(error) from None


def read(call: Call[T], got: Got) -> T:
    """Return what a response holds; raise the error that it reports, or why there is none."""
    if not isinstance(got, httpx.Response):
        raise of_transport(got)
    if not got.is_success:
        error = of_response(got)
        if call.missing and isinstance(error, errors.UnknownJob):
            return call.read(None)
        raise error
    try:
        return call.read(json.loads(got.content))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise errors.ServiceFailed(
            f"{call.method} {call.path}: the response is not that of the service: "
            f"{type(error).__name__}"
        ) from None


def pause_s(conn: Connection, call: Call[Any], tries: int, got: Got) -> float | None:
    """Return after how many seconds a call is repeated; None: its result counts.

    A request that the service may have carried out is repeated only if it is `repeatable`.
    """
    if tries > conn.retries:
        return None
    if isinstance(got, httpx.Response):
        if got.status_code not in _AGAIN or not call.repeatable:
            return None
        given = got.headers.get("retry-after", "")
        if given.isascii() and given.isdigit() and len(given) < 6:
            return min(float(given), PAUSE_MAX_S)
    elif isinstance(got, (httpx.UnsupportedProtocol, httpx.InvalidURL)) or (
        not call.repeatable and not isinstance(got, _UNSENT)
    ):
        return None
    longest = min(PAUSE_MAX_S, PAUSE_FIRST_S * 2**tries)
    return longest * random.uniform(0.5, 1.0)  # noqa: S311  jitter


def opened(conn: Connection, follow: events.Follower) -> dict[str, Any]:
    """Return the request with which a stream is opened."""
    follow.opened()
    return {
        "method": "GET",
        "url": conn.url + follow.path,
        "params": follow.query,
        "headers": {**conn.headers, **follow.headers},
        "timeout": httpx.Timeout(conn.timeout_s, read=events.SILENCE_S),
        "follow_redirects": False,
    }


def reopen(conn: Connection, follow: events.Follower, error: Exception) -> None:
    """Note that a stream could not be read; raise the reason unless it is opened again."""
    if isinstance(error, (httpx.HTTPError, httpx.InvalidURL)):
        error = of_transport(error)
    follow.failures += 1
    if not isinstance(error, errors.ServiceUnavailable) or follow.failures > conn.retries:
        raise error from None


# --- errors ------------------------------------------------------------------------------------

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
