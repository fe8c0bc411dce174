"""Read idempotency keys and cursors, name actors, and describe the problems of endpoints."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Annotated, Any, Final, TypeVar, cast

import fastapi
import pydantic
from fastapi import exceptions

from queue_workflows import errors
from queue_workflows.service import problems as service_problems
from queue_workflows.service import schemas

T = TypeVar("T")


def _utf8(value: str | None) -> str | None:
    """Return the text of a header, whose bytes are UTF-8 and not the latin-1 of ASGI servers."""
    try:
        return None if value is None else value.encode("latin-1").decode()
    except UnicodeDecodeError:
        raise ValueError("it must be UTF-8") from None


NO_CURSOR: Final = "cursor: it is `next` of the page before, of the same list"
KEY_LENGTH: Final = 1000
_KEY_MEANING: Final = "the same key: the same job or run"
_KEY: Final[pydantic.TypeAdapter[str]] = pydantic.TypeAdapter(
    Annotated[
        str,
        pydantic.Field(min_length=1, max_length=KEY_LENGTH),
        pydantic.AfterValidator(_utf8),
    ]
)
KEY_HEADER: Final[dict[str, Any]] = {
    "name": "idempotency-key",
    "in": "header",
    "required": False,
    "description": _KEY_MEANING,
    "schema": {
        "anyOf": [{"type": "string", "minLength": 1, "maxLength": KEY_LENGTH}, {"type": "null"}]
    },
}
"""The header Idempotency-Key in the OpenAPI document."""

_PROBLEM = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the description of these error responses for the OpenAPI document."""
    return {
        code: {
            "model": schemas.Problem,
            "content": _PROBLEM,
            "description": service_problems.TITLES[code],
        }
        for code in statuses
    }


def actor(asked: fastapi.Request) -> str:
    """Return who changes something, for the history: the scope of the request's token."""
    return f"http ({asked.scope.get('queue_workflows.scope', 'operate')} token)"


def key_header(asked: fastapi.Request) -> str | None:
    """Return the header Idempotency-Key; raise `RequestValidationError` for one that is none."""
    given = asked.headers.get("idempotency-key")
    if given is None:
        return None
    try:
        return _KEY.validate_python(given)
    except pydantic.ValidationError as error:
        raise exceptions.RequestValidationError(
            [
                {"loc": ("header", "idempotency-key"), "msg": fault["msg"]}
                for fault in error.errors(include_url=False)
            ]
        ) from None


def idempotency_key(of_body: str | None, of_header: str | None) -> str | None:
    """Return the key of a request; raise `InvalidJob` if its body and its header differ."""
    if of_body is not None and of_header is not None and of_body != of_header:
        raise errors.InvalidJob("the header Idempotency-Key and `idempotency_key` differ")
    return of_header if of_body is None else of_body


def encode_cursor(*place: Any) -> str:
    """Return the place after which the next page begins, as text."""
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode().rstrip("=")


def decode_cursor(text: str | None, *kinds: type) -> list[Any] | None:
    """Return the place of a cursor, or None without one.

    Raises `InvalidConfig` for what is no cursor of this list.
    """
    if text is None:
        return None
    try:
        padded = text + "=" * (-len(text) % 4)
        place = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, RecursionError):
        place = None
    if isinstance(place, list):
        parts = cast("list[Any]", place)
        if [type(each) for each in parts] == [*kinds]:
            return parts
    raise errors.InvalidConfig(NO_CURSOR)


def found(value: T | None, what: str, name: str) -> T:
    """Return the value; raise `UnknownJob` if there is none."""
    if value is None:
        raise errors.UnknownJob(f"there is no {what} {name!r:.80}")
    return value
