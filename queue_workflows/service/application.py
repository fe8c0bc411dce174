"""Put the service together: its routes, its guard and its errors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import fastapi
from fastapi import exceptions
from starlette import exceptions as starlette_exceptions
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

import queue_workflows
from queue_workflows.requests import request
from queue_workflows.service import guard, missing, problems, request_parts, state, tokens
from queue_workflows.service import settings as service_settings
from queue_workflows.service.routes import endpoints, operations
from queue_workflows.tasks import registry


def build(settings: service_settings.Settings, *, upkeep: bool = True) -> fastapi.FastAPI:
    """Return the application. Its lifespan starts the parts that `settings` name.

    Without `upkeep` it leaves the schema and the maintenance to other processes.
    """
    service = state.Service(settings, upkeep=upkeep)
    known = tokens.load(settings)
    made = _Application(
        title="queue_workflows",
        version=queue_workflows.__version__,
        description="Jobs, runs, workers, queues and schedules.",
        lifespan=lambda _: service.running(),
        # The pages of these load their code from another site.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    made.state.service = service
    made.state.token_path = known.path
    # include_router() would read the signatures again, for each application.
    made.router.routes.extend(operations.router.routes)
    if settings.app_dashboard:
        _mount_pages(made, service, known)
    made.add_middleware(guard.Guard, settings=settings, known=known, own=service)
    for kind, handler in _HANDLERS:
        made.add_exception_handler(kind, handler)
    return made


def _mount_pages(made: fastapi.FastAPI, service: state.Service, known: tokens.Tokens) -> None:
    """Mount the dashboard, or a page with the pip command if its extra is not installed."""
    try:
        from queue_workflows.service import dashboard
    except ModuleNotFoundError as error:
        text = str(missing(error))

        async def absent(_: Request) -> Response:
            return Response(text, 404, media_type="text/plain")

        made.add_route(f"{request_parts.PAGES}/", absent)
        made.add_route(request_parts.PAGES, absent)
        return

    async def first(request: Request) -> Response:
        return RedirectResponse(f"{request.scope['root_path']}{request_parts.PAGES}/", 307)

    made.add_route(request_parts.PAGES, first)
    pages = dashboard.build(service, known)
    made.state.link = pages.state.sessions.link
    made.mount(request_parts.PAGES, pages)
    mounted: Any = made.routes[-1]
    # An id may hold a line end, which the dot of the mount's pattern does not match.
    mounted.path_regex = re.compile(mounted.path_regex.pattern, re.DOTALL)


class _Application(fastapi.FastAPI):
    """An application whose document names the token; the guard checks it."""

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document."""
        if self.openapi_schema is None:
            document = super().openapi()
            named = document.setdefault("components", {}).setdefault("schemas", {})
            models = [endpoints.body(kind) for kind in request.OPERATIONS if kind.route.body]
            for model in (*models, endpoints.Problem):
                named[model.__name__] = model.model_json_schema(ref_template=endpoints.REF)
            scheme = {"type": "http", "scheme": "bearer", "description": "a token of the service"}
            document["components"]["securitySchemes"] = {"HTTPBearer": scheme}
            document["security"] = [{"HTTPBearer": []}]
            named["Trigger"]["example"] = _trigger_example()
        return super().openapi()


def _trigger_example() -> dict[str, Any]:
    """Return a job, one that this service takes if there is one."""
    config = queue_workflows.get_config()
    for name, task in sorted(config.ingest_task_map.items()) if config.ingest_queues else ():
        given = {"day": "2026-03-01"} if registry.caller_of(task).args else {}
        try:
            registry.check_args(name, given)
        except queue_workflows.errors.ArgsRefused:
            continue
        queue = config.ingest_task_queues.get(name) or min(config.ingest_queues)
        return {"queue": queue, "task": name, "args": given, "lock_key": "rates"}
    return endpoints.TRIGGER


async def _invalid(_: Request, error: Exception) -> Response:
    found: Sequence[Any] = (
        error.errors() if isinstance(error, exceptions.RequestValidationError) else ()
    )
    faults = [
        {"where": ".".join(map(str, fault["loc"]))[:200], "what": str(fault["msg"])[:500]}
        for fault in [*found][:20]
    ]
    detail = "; ".join(f"{fault['where']}: {fault['what']}" for fault in faults[:3])
    return problems.problem(
        422, detail or "the request is not valid", kind="Invalid", errors=faults
    )


async def _http(_: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 500)
    detail = str(getattr(error, "detail", error))
    return problems.problem(status, detail, headers=getattr(error, "headers", None))


async def _failed(_: Request, error: Exception) -> Response:
    return problems.of_error(error)


_HANDLERS: Sequence[tuple[type[Exception], Any]] = (
    (exceptions.RequestValidationError, _invalid),
    (starlette_exceptions.HTTPException, _http),
    (queue_workflows.errors.QueueWorkflowsError, _failed),
    (queue_workflows.db.Error, _failed),
    (Exception, _failed),
)
