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
from pydantic import Field
from starlette.responses import Response

from queue_workflows import acts, errors
from queue_workflows.requests import catalog, request
from queue_workflows.service import problems, request_parts, responses, state

R = TypeVar("R", bound=request.Request[Any])
Kind = type[request.Request[Any]]
REF: Final = "#/components/schemas/{model}"
_AT = "2026-03-01T09:30:00+00:00"
_JOB = "0198f3a2-5b1c-7d3e-8f90-000000000001"


class Body(pydantic.BaseModel):
    """A request's body: an unknown member is refused."""

    model_config = pydantic.ConfigDict(extra="forbid")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _few(cls, given: Any) -> Any:
        """Refuse many unknown members at once: an error for each of 100,000 takes a second."""
        members = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
        known = cls.model_fields
        if len(members) > len(known):
            unknown = [name for name in members if name not in known]
            named = ", ".join(f"{name[:80]!r}" for name in unknown[:3])
            more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
            raise ValueError(f"unknown members: {named}{more}")
        return cast("Any", given)


TRIGGER: Final[dict[str, Any]] = {
    "queue": "load.cbr", "task": "load.rates", "args": {"day": "2026-03-01"},
    "idempotency_key": "rates 2026-03-01", "lock_key": "rates",
}  # fmt: skip
"""The example of a job."""


class Triggered(pydantic.BaseModel):
    """The job of a trigger."""

    job_id: str = Field(examples=[_JOB])
    status: catalog.JobState = Field(examples=["queued"])


class JobStatus(pydantic.BaseModel):
    """How far a job is."""

    job_id: str = Field(examples=[_JOB])
    status: catalog.JobState = Field(examples=["running"])
    attempt: int = Field(examples=[1])
    started_at: str | None = Field(default=None, examples=[_AT])
    finished_at: str | None = None
    heartbeat_at: str | None = Field(default=None, examples=[_AT])
    error: str | None = None
    progress: Any = Field(examples=[0.5])


class Page(pydantic.BaseModel):
    """A page of a list; `next` is the `cursor` of the next page, null on the last one."""

    items: list[dict[str, Any]]
    next: str | None = None


class Part(pydantic.BaseModel):
    """A part of a stream, or with `reset` the mark that an attempt begins."""

    id: str = Field(examples=["1-20"])
    reset: bool
    claim_no: int
    seq: int
    name: str = Field(examples=["text"])
    value: Any = Field(examples=["word"])
    created_at: str | None = Field(examples=[_AT])


class PartsPage(pydantic.BaseModel):
    """Parts of a stream; `next`: the `cursor` of the next page, null where no more are stored.

    `over`: the job has ended, so that no more will come. Without it, go on later with the id of the
    last item as the cursor.
    """

    items: list[Part]
    next: str | None = None
    over: bool


class Problem(pydantic.BaseModel):
    """An error, as RFC 9457 defines it."""

    type: str = Field(examples=["urn:queue-workflows:unknown-job"])
    title: str = Field(examples=["Not found"])
    status: int = Field(examples=[404])
    detail: str = Field(examples=["no job 'x'"])


def refusals(method: str, *statuses: int, public: bool = False) -> dict[int | str, dict[str, Any]]:
    """Return these error responses, and the guard's, for the OpenAPI document."""
    every = {400, 414, 431, *statuses}
    if not public:
        every |= {401, 403, 421, 503}
    if method not in request_parts.SAFE:
        every |= {408, 413, 415}
    schema = {"application/problem+json": {"schema": {"$ref": REF.format(model="Problem")}}}
    return {
        code: {"content": schema, "description": problems.TITLES[code]} for code in sorted(every)
    }


# --- endpoints ---------------------------------------------------------------------------------

_DESCRIBED = {
    catalog.ListJobs: Page, catalog.ListRuns: Page, catalog.ListActs: Page,
    catalog.GetJobStatus: JobStatus, catalog.CancelJob: JobStatus,
    catalog.GetJobParts: PartsPage, catalog.GetNodeParts: PartsPage,
    catalog.Enqueue: Triggered,
}  # fmt: skip
"""The answers that the OpenAPI document describes."""
_TAGGED = (catalog.GetJob, catalog.GetJobStatus, catalog.GetRun, catalog.ListNodes)
"""Whose answers have an ETag."""
_CURSOR: Final = {
    "cursor": Annotated[
        str | None, fastapi.Query(max_length=2000, description="`next` of the page before")
    ]
}
_WAIT: Final = {
    "wait": Annotated[
        float | None,
        fastapi.Query(
            ge=0,
            le=request_parts.LONGEST_WAIT_S,
            allow_inf_nan=False,
            description="seconds to wait until the state is another than that of If-None-Match; "
            "without this header, until it is final",
        ),
    ]
}
_BESIDE: Final[dict[Kind, dict[str, Any]]] = {
    catalog.ListJobs: _CURSOR, catalog.ListRuns: _CURSOR, catalog.ListNodes: _CURSOR,
    catalog.ListActs: _CURSOR,
    catalog.GetJobStatus: _WAIT, catalog.GetRun: _WAIT,
}  # fmt: skip
"""Parameters that are not fields of the request: clients follow pages and wait by themselves."""
_NEEDED: Any = inspect.Parameter.empty
_STRICT: dict[Any, Any] = {int: pydantic.StrictInt, int | None: pydantic.StrictInt | None}
_AWARE: dict[Any, Any] = {datetime | None: pydantic.AwareDatetime | None}
"""The types of a body in the place of these."""


def add(router: fastapi.APIRouter, kind: Kind, answer: Callable[..., Any], **more: Any) -> None:
    """Add the endpoint of a request, with its documentation; `more`: of the route.

    `answer` takes the request of the catalog, the HTTP request, and what `_BESIDE` names; a plain
    function is called on a thread, which also encodes its answer, as a large one takes long. A
    queue in the path that is unknown is not found. An answer with an ETag may be 304.
    """
    beside = _BESIDE.get(kind, {})
    on_loop = inspect.iscoroutinefunction(answer)

    async def endpoint(request: fastapi.Request, **given: Any) -> Response:
        further = {name: given.pop(name) for name in beside}
        request.state.body = await _read(request, kind) if kind.route.body else None
        asked = _made(kind, given, request)

        def encoded(found: Any) -> Response:
            if isinstance(found, Response):
                return found
            return responses.tagged(request, found) if kind in _TAGGED else responses.reply(found)

        try:
            with acts.acting(user(request) or _token(request), via="http"):
                if on_loop:
                    return encoded(await answer(asked, request, **further))
                call = state.of(request).calls.run
                return await call(lambda: encoded(answer(asked, request, **further)))
        except errors.UnknownQueue as error:
            if "{queue}" not in kind.route.path:
                raise
            return problems.problem(404, str(error), kind="UnknownQueue")

    signed: Any = endpoint
    signed.__signature__ = _signature(kind, beside)
    chosen = kind.route
    path = chosen.path if chosen.path.startswith("/") else request.PREFIX + chosen.path
    is_public = path in request_parts.PUBLIC
    statuses = [*chosen.refuses, *([404] if "{" in chosen.path else [])]
    statuses += [422] if chosen.body or len(signed.__signature__.parameters) > 1 else []
    replies = refusals(chosen.method, *statuses, public=is_public)
    if kind in _DESCRIBED:
        replies[200] = {"model": _DESCRIBED[kind]}
    if issubclass(kind, catalog.Stream):
        what = "Parts of the stream" if kind.ends else "Changes"
        replies[200] = {"content": {"text/event-stream": {}}, "description": what}
    if kind in _TAGGED:
        replies[304] = {"description": "The state is that of If-None-Match"}
    router.add_api_route(
        path,
        endpoint,
        methods=[chosen.method],
        name=chosen.name,
        tags=["infrastructure" if is_public else chosen.path.partition("/")[0]],
        description=kind.summary(),
        responses=replies | more.pop("responses", {}),
        openapi_extra={"security": []} if is_public else _document(kind),
        **more,
    )


def user(http: fastapi.Request) -> str | None:
    """Return the person whom a proxy names; None without one.

    Raises `RequestValidationError` for a header that came twice or is not UTF-8.
    """
    name = state.of(http).settings.app_user_header
    found = http.headers.getlist(name) if name else []
    if len(found) > 1:
        raise _invalid("it came twice; send it once", "header", name)
    try:
        return found[0].encode("latin-1").decode() if found else None
    except UnicodeDecodeError:
        raise _invalid("it must be UTF-8", "header", name) from None


def _token(http: fastapi.Request) -> str:
    """Return the actor if the request names none, which is the scope of its token."""
    return f"http ({http.scope.get('queue_workflows.scope', 'operate')} token)"


def _made(kind: type[R], given: dict[str, Any], http: fastapi.Request) -> R:
    """Return the request of parameters and a body; an absent field has its default."""
    marks, sent = request.marks(kind), cast("pydantic.BaseModel | None", http.state.body)
    for name, mark in marks.items():
        if sent is None:
            break
        member = mark.name or name
        # A default that is another one over HTTP counts there.
        if member in sent.model_fields_set or (
            mark.default is not request.SAME and name not in given
        ):
            given[name] = getattr(sent, member)
    if "by" in marks and user(http):
        given["by"] = None  # the proxy knows better
    if _KEY in marks:
        given[_KEY] = _key(given.get(_KEY), http.headers.get("idempotency-key"))
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
    own = inspect.Parameter
    return inspect.Signature(
        [own(n, own.KEYWORD_ONLY, default=default, annotation=hint) for n, hint, default in found]
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


# --- bodies ------------------------------------------------------------------------------------


@functools.cache
def body(kind: Kind) -> type[pydantic.BaseModel]:
    """Return the model of the body of a request."""
    chosen: dict[str, Any] = {}
    for name, (hint, default) in _members(kind).items():
        mark = request.marks(kind)[name]
        if name in request.placed(kind):
            continue
        is_needed = default is _NEEDED
        how = "default_factory" if callable(default) and not is_needed else "default"
        options: dict[str, Any] = {**mark.bounds, how: ... if is_needed else default}
        hint = _STRICT.get(hint, hint) if mark.strict else _AWARE.get(hint, hint)
        chosen[mark.name or name] = hint, Field(description=mark.help or None, **options)
    made: Any = pydantic.create_model
    return made(kind.route.body, __base__=Body, __doc__=kind.summary(), **chosen)


def _is_needed(kind: Kind) -> bool:
    """Return whether a request has no effect without a body."""
    keeps = any(each.default is request.KEEP for each in fields(kind))
    return keeps or any(each.is_required() for each in body(kind).model_fields.values())


def _document(kind: Kind) -> dict[str, Any]:
    """Return the OpenAPI document of the body of a request, and of its key header."""
    if not kind.route.body:
        return {}
    schema: dict[str, Any] = {"$ref": REF.format(model=kind.route.body)}
    described: dict[str, Any] = {"required": True} if _is_needed(kind) else {}
    if not described:
        schema = {"anyOf": [schema, {"type": "null"}], "title": "Body"}
    found = {"requestBody": {"content": {"application/json": {"schema": schema}}} | described}
    return found | ({"parameters": [_KEY_HEADER]} if _KEY in request.marks(kind) else {})


async def _read(http: fastapi.Request, kind: Kind) -> pydantic.BaseModel | None:
    """Return the body of a request; None if it is absent and not needed.

    Raises `RequestValidationError` (422) for another body, `HTTPException` (400) if it is not
    Unicode text, or nests too deep.
    """
    text = await http.body()
    try:
        content = json.loads(text) if text else None
    except json.JSONDecodeError as error:
        raise _invalid(f"JSON decode error: {error.msg}", "body", error.pos) from None
    except (ValueError, RecursionError):
        raise fastapi.HTTPException(400, "There was an error parsing the body") from None
    if content is None:
        if _is_needed(kind):
            raise _invalid("Field required", "body")
        return None
    try:
        return body(kind).model_validate(content)
    except pydantic.ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        raise exceptions.RequestValidationError(
            [{**fault, "loc": ("body", *fault["loc"])} for fault in found]
        ) from None


def _invalid(why: str, *where: object) -> exceptions.RequestValidationError:
    return exceptions.RequestValidationError([{"loc": where, "msg": why}])


# --- idempotency keys --------------------------------------------------------------------------

_KEY: Final = "idempotency_key"
KEY_LENGTH: Final = 1000
_KEY_HEADER: Final[dict[str, Any]] = {
    "name": "idempotency-key",
    "in": "header",
    "required": False,
    "description": "the same key: the same job or run",
    "schema": {
        "anyOf": [{"type": "string", "minLength": 1, "maxLength": KEY_LENGTH}, {"type": "null"}]
    },
}
"""The header Idempotency-Key in the OpenAPI document."""


def _key(of_body: str | None, of_header: str | None) -> str | None:
    """Return the key of a request; the bytes of the header are UTF-8, and not latin-1.

    Raises `RequestValidationError` for a header that is not a key, `InvalidJob` if they differ.
    """
    if of_header is None:
        return of_body
    try:
        found = of_header.encode("latin-1").decode()
    except UnicodeDecodeError:
        raise _invalid("it must be UTF-8", "header", "idempotency-key") from None
    if not 1 <= len(of_header) <= KEY_LENGTH:
        why = f"a key has 1 to {KEY_LENGTH:,} bytes"
        raise _invalid(why, "header", "idempotency-key")
    if of_body is not None and of_body != found:
        raise errors.InvalidJob("the header Idempotency-Key and `idempotency_key` differ")
    return found
