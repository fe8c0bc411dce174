"""Make endpoints from the requests of `requests.catalog`: parameters, bodies and documentation.

Bodies are read without FastAPI's parameters, which parse the type of the content, each header and
the body again for every request: that takes as long as the rest of an endpoint. The OpenAPI
document and the errors are the same.
"""

from __future__ import annotations

import functools
import inspect
import json
import typing
from collections.abc import Callable
from dataclasses import MISSING, fields
from datetime import datetime
from typing import Annotated, Any, Final, TypeVar, cast

import fastapi
import pydantic
from fastapi import exceptions
from starlette.responses import Response

from queue_workflows import errors
from queue_workflows.requests import catalog, request
from queue_workflows.service import problems, request_parts, responses, schemas, state
from queue_workflows.service.routes import parameters

R = TypeVar("R", bound=request.Request[Any])
Kind = type[request.Request[Any]]
_DESCRIBED = {
    catalog.ListJobs: schemas.Page, catalog.ListRuns: schemas.Page,
    catalog.GetJobStatus: schemas.JobStatus, catalog.CancelJob: schemas.JobStatus,
    catalog.GetJobParts: schemas.PartsPage, catalog.GetNodeParts: schemas.PartsPage,
    catalog.Enqueue: schemas.Triggered,
}  # fmt: skip
"""The answers that the OpenAPI document describes."""
_TAGGED = (catalog.GetJob, catalog.GetJobStatus, catalog.GetRun, catalog.ListNodes)
"""Whose answers have an ETag."""
_CURSOR: Final = Annotated[
    str | None, fastapi.Query(max_length=2000, description="`next` of the page before")
]
_WAIT: Final = Annotated[
    float | None,
    fastapi.Query(
        ge=0,
        le=request_parts.LONGEST_WAIT_S,
        allow_inf_nan=False,
        description="seconds to wait until the state is another than that of If-None-Match; "
        "without this header, until it is final",
    ),
]
_BESIDE: Final[dict[Kind, dict[str, Any]]] = {
    catalog.ListJobs: {"cursor": _CURSOR},
    catalog.ListRuns: {"cursor": _CURSOR},
    catalog.ListNodes: {"cursor": _CURSOR},
    catalog.GetJobStatus: {"wait": _WAIT},
    catalog.GetRun: {"wait": _WAIT},
}
"""Parameters that are no fields of the request: clients follow pages and wait by themselves."""
_KEY: Final = "idempotency_key"
_REF: Final = "#/components/schemas/{model}"
_NEEDED: Any = inspect.Parameter.empty
_STRICT: dict[Any, Any] = {int: pydantic.StrictInt, int | None: pydantic.StrictInt | None}
_AWARE: dict[Any, Any] = {datetime | None: pydantic.AwareDatetime | None}
"""What a body has in the place of these types."""


def add(router: fastapi.APIRouter, kind: Kind, answer: Callable[..., Any], **more: Any) -> None:
    """Add the endpoint of a request, with its documentation; `more`: of the route.

    `answer` takes the request of the catalog, that of HTTP, and what `_BESIDE` names; it is called
    on a thread if it is no coroutine function. A queue in the path that is unknown is not found. An
    answer with an ETag may be 304.
    """
    beside = _BESIDE.get(kind, {})
    on_loop = inspect.iscoroutinefunction(answer)

    async def endpoint(request: fastapi.Request, **given: Any) -> Response:
        further = {name: given.pop(name) for name in beside}
        request.state.body = await _read(request, kind) if kind.route.body else None
        asked = made(kind, given, request)
        try:
            if on_loop:
                found = await answer(asked, request, **further)
            else:
                found = await state.of(request).calls.run(answer, asked, request, **further)
        except errors.UnknownQueue as error:
            if "{queue}" not in kind.route.path:
                raise
            return problems.problem(404, str(error), kind="UnknownQueue")
        if isinstance(found, Response):
            return found
        return responses.tagged(request, found) if kind in _TAGGED else responses.reply(found)

    signed: Any = endpoint
    signed.__signature__ = _signature(kind, beside)
    chosen = kind.route
    statuses = {401, 403, 422, 503, *chosen.refuses, *([404] if "{" in chosen.path else [])}
    replies = dict(parameters.problems(*sorted(statuses)))
    if kind in _DESCRIBED:
        replies[200] = {"model": _DESCRIBED[kind]}
    if kind in _TAGGED:
        replies[304] = {"description": "The state is that of If-None-Match"}
    router.add_api_route(
        request.PREFIX + chosen.path,
        endpoint,
        methods=[chosen.method],
        name=chosen.name,
        tags=[chosen.path.partition("/")[0]],
        description=kind.summary(),
        responses=replies | more.pop("responses", {}),
        openapi_extra=_document(kind) if chosen.body else None,
        **more,
    )


def made(kind: type[R], given: dict[str, Any], http: fastapi.Request) -> R:
    """Return the request of parameters and a body; what is absent has its default."""
    marks, body = request.marks(kind), cast("pydantic.BaseModel | None", http.state.body)
    for name, mark in marks.items():
        sent = mark.name or name
        # A default that is another one over HTTP counts there.
        if body is None:
            break
        if sent in body.model_fields_set or (
            mark.default is not request.SAME and name not in given
        ):
            given[name] = getattr(body, sent)
    if _KEY in marks:
        given[_KEY] = parameters.idempotency_key(given.get(_KEY), parameters.key_header(http))
    taken = {name: marks[name].take for name in given}
    return kind(
        **{name: take(given[name]) if take else given[name] for name, take in taken.items()}
    )


def _signature(kind: Kind, beside: dict[str, Any]) -> inspect.Signature:
    """Return the parameters of the endpoint, as FastAPI reads them."""
    found: list[tuple[str, Any, Any]] = [("request", fastapi.Request, _NEEDED)]
    for name, (hint, default) in _members(kind).items():
        mark = request.marks(kind)[name]
        named: dict[str, Any] = {
            "alias": mark.name or None,
            "description": mark.help or None,
            **mark.bounds,
        }
        if name in request.placed(kind):
            segment = pydantic.AfterValidator(request_parts.unescaped)
            found.append((name, Annotated[str, segment, fastapi.Path(**named)], _NEEDED))
        elif kind.route.method == "GET":
            where = fastapi.Header if mark.header else fastapi.Query
            found.append((name, Annotated[hint, where(**named)], default))
    found += [(name, hint, None) for name, hint in beside.items()]
    kind_ = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [
            inspect.Parameter(n, kind_, default=default, annotation=hint)
            for n, hint, default in found
        ]
    )


def _members(kind: Kind) -> dict[str, tuple[Any, Any]]:
    """Return the type and the default of each field over HTTP."""
    hints = typing.get_type_hints(kind)
    found: dict[str, tuple[Any, Any]] = {}
    for each in fields(kind):
        mark = request.marks(kind)[each.name]
        default = each.default if mark.default is request.SAME else mark.default
        if default is MISSING:
            default = _NEEDED
        elif isinstance(default, request.Keep):
            default = None
        found[each.name] = hints[each.name] if mark.kind is None else mark.kind, default
    return found


@functools.cache
def body(kind: Kind) -> type[pydantic.BaseModel]:
    """Return the model of the body of a request."""
    chosen: dict[str, Any] = {}
    for name, (hint, default) in _members(kind).items():
        mark = request.marks(kind)[name]
        if name in request.placed(kind):
            continue
        is_needed = default is _NEEDED
        made = "default_factory" if callable(default) and not is_needed else "default"
        options: dict[str, Any] = {**mark.bounds, made: ... if is_needed else default}
        hint = _STRICT.get(hint, hint) if mark.strict else _AWARE.get(hint, hint)
        chosen[mark.name or name] = hint, pydantic.Field(description=mark.help or None, **options)
    return schemas.body(kind.route.body, kind.summary(), chosen)


def _is_needed(kind: Kind) -> bool:
    """Return whether a request has no effect without a body."""
    keeps = any(each.default is request.KEEP for each in fields(kind))
    return keeps or any(each.is_required() for each in body(kind).model_fields.values())


def _document(kind: Kind) -> dict[str, Any]:
    """Return what the OpenAPI document says about the body of a request, and its key header."""
    schema: dict[str, Any] = {"$ref": _REF.format(model=kind.route.body)}
    described: dict[str, Any] = {"required": True} if _is_needed(kind) else {}
    if not described:
        schema = {"anyOf": [schema, {"type": "null"}], "title": "Body"}
    found = {"requestBody": {"content": {"application/json": {"schema": schema}}} | described}
    return found | ({"parameters": [parameters.KEY_HEADER]} if _KEY in request.marks(kind) else {})


def bodies() -> dict[str, Any]:
    """Return the schemas of all bodies for the OpenAPI document, by name."""
    found: dict[str, Any] = {}
    for kind in request.OPERATIONS:
        if kind.route.body:
            found[kind.route.body] = body(kind).model_json_schema(ref_template=_REF)
    return found


async def _read(http: fastapi.Request, kind: Kind) -> pydantic.BaseModel | None:
    """Return the body of a request; None if there is none, and none is needed.

    Raises `RequestValidationError` (422) for what is no such body, `HTTPException` (400) for what
    is no text in Unicode, or nests too deep.
    """
    text = await http.body()
    try:
        content = json.loads(text) if text else None
    except json.JSONDecodeError as error:
        raise exceptions.RequestValidationError(
            [{"loc": ("body", error.pos), "msg": f"JSON decode error: {error.msg}"}]
        ) from None
    except (ValueError, RecursionError):
        raise fastapi.HTTPException(400, "There was an error parsing the body") from None
    if content is None:
        if _is_needed(kind):
            raise exceptions.RequestValidationError([{"loc": ("body",), "msg": "Field required"}])
        return None
    try:
        return body(kind).model_validate(content)
    except pydantic.ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        raise exceptions.RequestValidationError(
            [{**fault, "loc": ("body", *fault["loc"])} for fault in found]
        ) from None
