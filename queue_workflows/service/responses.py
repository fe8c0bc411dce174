"""Encode rows as JSON responses with an ETag, and name the states of jobs as the service does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from queue_workflows import errors
from queue_workflows.runtime import display
from queue_workflows.types import JsonDict, Row

MEDIA_TYPE = "application/json"


def body(content: Any) -> bytes:
    """Return content as JSON: times in ISO 8601 (UTC), NaN and infinite numbers as texts."""
    try:
        return json.dumps(content, allow_nan=False, default=_time, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError, OverflowError):
        return display.strict_json(content).encode()


def _time(value: object) -> str:
    if isinstance(value, datetime):
        offset = value.utcoffset()
        if offset is not None and not offset:
            return value.isoformat()
    raise TypeError(type(value).__name__)  # `strict_json` encodes everything


def etag(text: bytes) -> str:
    """Return the entity tag of a response's body."""
    return f'"{hashlib.sha256(text).hexdigest()[:32]}"'


def matches(request: Request, tag: str) -> bool:
    """Return whether the request has this entity tag in If-None-Match."""
    given = ",".join(request.headers.getlist("if-none-match"))
    return any(each.strip().removeprefix("W/") in (tag, "*") for each in given.split(","))


def reply(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response."""
    return Response(body(content), status, headers, MEDIA_TYPE)


def tagged(request: Request, content: Any) -> Response:
    """Return a JSON response with its ETag, or 304 if the request has that tag."""
    text = body(content)
    tag = etag(text)
    if matches(request, tag):
        return Response(status_code=304, headers={"etag": tag})
    return Response(text, 200, {"etag": tag}, MEDIA_TYPE)


# --- states of jobs ----------------------------------------------------------------------------

_NAMES: Final = {"completed": "succeeded", "cancelled": "canceled"}
"""The service's names of statuses, where the engine has others."""
_ENGINE: Final = ("queued", "running", "completed", "failed", "cancelled")


def state_name(status: str, *, lost: bool = False) -> str:
    """Return the name of a status of the engine; `lost`: the job's lease has lapsed."""
    return "lost" if lost else _NAMES.get(status, status)


def named(row: Row | JsonDict) -> JsonDict:
    """Return a row of a job with the name of its state as `status`, without `lost` and `seq`."""
    shown = {key: value for key, value in row.items() if key not in ("lost", "seq")}
    return shown | {"status": state_name(row["status"], lost=row["lost"])}


def wanted_states(names: Sequence[str] | None) -> dict[str, Any]:
    """Return the filters `status` and `lost` of `jobs.list` for these names of states, or for all.

    The engine's names are accepted too. Raises `InvalidConfig` for any other name.
    """
    if names is None:
        return {}
    of_engine = {state_name(status): status for status in _ENGINE} | {"lost": "running"}
    for one in names:
        if one not in of_engine and one not in _ENGINE:
            raise errors.InvalidConfig(f"status {one!r:.80}: it is one of {', '.join(of_engine)}")
    found = [of_engine.get(one, one) for one in names]
    both = "running" in names and "lost" in names
    return {"status": found, "lost": None if both else "lost" in names}
