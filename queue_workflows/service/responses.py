"""Encode rows as JSON responses with an ETag."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from queue_workflows.runtime import display

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
