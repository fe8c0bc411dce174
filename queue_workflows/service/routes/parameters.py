"""Define the parameters that several endpoints share, and the cursors of pages."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Annotated, Any, Final, TypeVar, cast

import fastapi
import pydantic
from starlette.responses import Response

from queue_workflows import errors
from queue_workflows.service import paths, request_parts, responses, schemas, state
from queue_workflows.service import problems as service_problems

T = TypeVar("T")
_Segment = Annotated[str, pydantic.AfterValidator(paths.unescaped)]
JobId = Annotated[_Segment, fastapi.Path(max_length=1000, description="the id of a job")]
RunId = Annotated[_Segment, fastapi.Path(max_length=1000, description="the id of a run")]
NodeId = Annotated[
    _Segment, fastapi.Path(max_length=1000, description="the id of a node of the run")
]
QueueName = Annotated[_Segment, fastapi.Path(max_length=200, description="the name of a queue")]
HostLabel = Annotated[_Segment, fastapi.Path(max_length=400, description="the label of a machine")]
ScheduleName = Annotated[
    _Segment, fastapi.Path(max_length=1000, description="the name of a schedule")
]
Limit = Annotated[int, fastapi.Query(ge=1, le=1000, description="items of a page")]
Cursor = Annotated[
    str | None, fastapi.Query(max_length=2000, description="`next` of the page before")
]
Filter = Annotated[str | None, fastapi.Query(max_length=1000)]
LastEventId = Annotated[str | None, fastapi.Header(max_length=100)]
Wait = Annotated[
    float | None,
    fastapi.Query(
        ge=0,
        le=request_parts.LONGEST_WAIT_S,
        allow_inf_nan=False,
        description="seconds to wait until the state is another than that of If-None-Match; "
        "without this header, until it is final",
    ),
]


def _utf8(value: str | None) -> str | None:
    """Return the text of a header, whose bytes are UTF-8 and not the latin-1 of ASGI servers."""
    try:
        return None if value is None else value.encode("latin-1").decode()
    except UnicodeDecodeError:
        raise ValueError("it must be UTF-8") from None


KEY_LENGTH: Final = 1000
_KEY_MEANING: Final = "the same key: the same job or run"
IdempotencyKey = Annotated[
    str | None,
    fastapi.Header(min_length=1, max_length=KEY_LENGTH, description=_KEY_MEANING),
    pydantic.AfterValidator(_utf8),
]
KEY: Final[pydantic.TypeAdapter[str]] = pydantic.TypeAdapter(
    Annotated[
        str,
        pydantic.Field(min_length=1, max_length=KEY_LENGTH),
        pydantic.AfterValidator(_utf8),
    ]
)
"""Checks the header Idempotency-Key where FastAPI does not."""
KEY_HEADER: Final[dict[str, Any]] = {
    "name": "idempotency-key",
    "in": "header",
    "required": False,
    "description": _KEY_MEANING,
    "schema": {
        "anyOf": [{"type": "string", "minLength": 1, "maxLength": KEY_LENGTH}, {"type": "null"}]
    },
}
"""The same header in the OpenAPI document."""

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


UNCHANGED: Final[dict[int | str, dict[str, Any]]] = {
    304: {"description": "The state is that of If-None-Match"}
}


def actor(request: fastapi.Request) -> str:
    """Return who changes something, for the history: the scope of the request's token."""
    return f"http ({request.scope.get('queue_workflows.scope', 'operate')} token)"


def idempotency_key(of_body: str | None, of_header: str | None) -> str | None:
    """Return the key of a request; raise `InvalidJob` if its body and its header differ."""
    if of_body is not None and of_header is not None and of_body != of_header:
        raise errors.InvalidJob("the header Idempotency-Key and `idempotency_key` differ")
    return of_header if of_body is None else of_body


def encode_cursor(*place: Any) -> str:
    """Return the place after which the next page begins, as text."""
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode().rstrip("=")


def decode_cursor(cursor: str | None, *kinds: type) -> list[Any] | None:
    """Return the place of a cursor, or None without one.

    Raises `InvalidConfig` for what is no cursor of this list.
    """
    if cursor is None:
        return None
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        place = json.loads(text)
    except (binascii.Error, ValueError, RecursionError):
        place = None
    if isinstance(place, list):
        parts = cast("list[Any]", place)
        if [type(each) for each in parts] == [*kinds]:
            return parts
    raise errors.InvalidConfig("cursor: it is `next` of the page before, of the same list")


def found(value: T | None, what: str, name: str) -> T:
    """Return the value; raise `UnknownJob` if there is none."""
    if value is None:
        raise errors.UnknownJob(f"there is no {what} {name!r:.80}")
    return value


def span(seconds: float | None) -> timedelta | None:
    """Return a number of seconds as a time span."""
    return None if seconds is None else timedelta(seconds=seconds)


async def of_queue(
    request: fastapi.Request, call: Callable[..., Any], *args: Any, **keywords: Any
) -> Response:
    """Return what the function returns; a queue in the path that is unknown is not found."""
    try:
        return responses.reply(await state.of(request).calls.run(call, *args, **keywords))
    except errors.UnknownQueue as error:
        return service_problems.problem(404, str(error), kind="UnknownQueue")
