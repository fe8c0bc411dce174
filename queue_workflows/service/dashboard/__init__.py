"""Show runs, failures, workers and questions as pages of the service (extra: dashboard)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import fastapi
import python_multipart
from fastapi import exceptions
from starlette import exceptions as starlette_exceptions
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from queue_workflows import db, errors
from queue_workflows.service import problems, state, tokens
from queue_workflows.service import settings as service_settings
from queue_workflows.service.dashboard import (
    acts_page,
    failures_page,
    forms,
    health_page,
    inbox_page,
    jobs_page,
    live,
    login_page,
    machines_page,
    map_page,
    now_page,
    queues_page,
    run_files,
    run_page,
    runs_page,
    schedules_page,
    session,
    view,
    waiting_page,
)

assert python_multipart.__name__  # without it starlette reads no forms
ROUTERS: Final = (
    acts_page.router,
    failures_page.router,
    health_page.router,
    inbox_page.router,
    jobs_page.router,
    live.router,
    login_page.router,
    machines_page.router,
    map_page.router,
    now_page.router,
    queues_page.router,
    run_files.router,
    run_page.router,
    runs_page.router,
    schedules_page.router,
    waiting_page.router,
)
YEAR: Final = "public, max-age=31536000, immutable"


def build(
    settings: service_settings.Settings, service: state.Service, known: tokens.Tokens
) -> fastapi.FastAPI:
    """Return the application of the pages, which `serve` mounts at `/ui`."""
    made = fastapi.FastAPI(openapi_url=None, redirect_slashes=False)
    made.state.service = service
    made.state.doors = session.Doors(settings, known)
    made.state.posts = forms.Posts()
    made.state.pages = pages = view.Pages()
    made.state.results = {}
    made.add_api_route("/static/{name}", _static, methods=["GET"])
    for router in ROUTERS:
        made.include_router(router, dependencies=[fastapi.Depends(view.heading)])
    served = {getattr(route, "path", "") for router in ROUTERS for route in router.routes}
    pages.navigation = [each for each in view.NAVIGATION if each[0] in served]
    made.add_middleware(session.Gate)
    for kind, answer in _ANSWERS:
        made.add_exception_handler(kind, answer)
    return made


async def _static(request: Request, name: str) -> Response:
    found = request.app.state.pages.files.get(name)
    if found is None:
        return Response("there is no such file", 404, media_type="text/plain")
    content, media = found
    return Response(content, headers={"cache-control": YEAR}, media_type=media)


# --- pages about errors ------------------------------------------------------------------------


def _message(
    request: Request, status: int, title: str, text: str, near: Sequence[tuple[str, str]] = ()
) -> Response:
    """Return a page with a sentence, or plain text for a fragment, which is then not replaced."""
    if "hx-request" in request.headers:
        return Response(text, status, media_type="text/plain")
    return view.page(
        request, "message.html", title=title, command="", status=status, text=text, near=near
    )


async def _slow(request: Request, _: Exception) -> Response:
    return _message(request, 503, "Took too long", "This took too long: narrow the filter.")


async def _missing(request: Request, error: view.NotFound) -> Response:
    return _message(request, 404, "Not found", error.text, error.near)


async def _refused(request: Request, error: forms.Refused) -> Response:
    return _message(request, error.status, "Not done", error.text)


async def _repeated(_: Request, error: forms.Repeated) -> Response:
    return RedirectResponse(error.where, 303)


async def _failed(request: Request, error: Exception) -> Response:
    status, text, _ = problems.described(error)
    return _message(request, status, problems.TITLES.get(status, "The request was refused"), text)


async def _invalid(request: Request, error: exceptions.RequestValidationError) -> Response:
    faults = [f"{fault['loc'][-1]}: {fault['msg']}" for fault in error.errors()]
    return _message(request, 422, "Not understood", "; ".join(faults[:3]))


async def _http(request: Request, error: starlette_exceptions.HTTPException) -> Response:
    text = "There is no such page." if error.status_code == 404 else str(error.detail)
    return _message(request, error.status_code, problems.TITLES.get(error.status_code, ""), text)


_ANSWERS: Final[Sequence[tuple[type[Exception], Any]]] = (
    (view.TooSlow, _slow),
    (view.NotFound, _missing),
    (forms.Refused, _refused),
    (forms.Repeated, _repeated),
    (exceptions.RequestValidationError, _invalid),
    (starlette_exceptions.HTTPException, _http),
    (errors.QueueWorkflowsError, _failed),
    (db.Error, _failed),
    (Exception, _failed),
)
