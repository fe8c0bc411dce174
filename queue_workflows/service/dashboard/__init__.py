"""Show runs, failures, workers and questions as pages of the service (extra: dashboard)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import fastapi
import python_multipart
from fastapi import exceptions
from starlette import exceptions as starlette_exceptions
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from queue_workflows import db, errors
from queue_workflows.service import problems, state, tokens
from queue_workflows.service.dashboard import (
    controls_page,
    failures_page,
    forms,
    frame,
    inbox_page,
    jobs_page,
    machines_page,
    map_page,
    run_files,
    run_page,
    runs_page,
    session,
    system_page,
    view,
)

assert python_multipart.__name__  # without it starlette reads no forms
_PAGES: Final = (
    controls_page, failures_page, frame, inbox_page, jobs_page, machines_page, map_page, run_files,
    run_page, runs_page, system_page,
)  # fmt: skip
_ERRORS: Final[Sequence[type[Exception]]] = (
    forms.Refused, exceptions.RequestValidationError, starlette_exceptions.HTTPException,
    errors.QueueWorkflowsError, db.Error, Exception,
)  # fmt: skip
"""Errors that become a page."""
TYPED: Final = ("inputs", "args", "value")
"""Fields with a long text, which a page about an error shows, so that it is not lost."""
YEAR: Final = "public, max-age=31536000, immutable"
OPEN: Final = re.compile(r"/(?:login|static/[^/]+)")
"""Paths below the mount that need no session."""


def build(service: state.Service, known: tokens.Tokens) -> fastapi.FastAPI:
    """Return the application of the pages, which `serve` mounts at `/ui`."""
    made = fastapi.FastAPI(openapi_url=None, redirect_slashes=False)
    made.state.service = service
    made.state.sessions = session.Sessions(known)
    made.state.posts = forms.Posts()
    made.state.pages = view.Pages()
    made.state.results, made.state.checking = {}, {}
    made.add_api_route("/static/{name}", _static, methods=["GET"])
    for module in _PAGES:
        made.router.routes.extend(module.router.routes)
    made.add_middleware(_Gate)
    for kind in _ERRORS:
        made.add_exception_handler(kind, _answer)
    return made


async def _static(request: Request, name: str) -> Response:
    found = request.app.state.pages.files.get(name)
    if found is None:
        return Response("there is no such file", 404, media_type="text/plain")
    content, media = found
    return Response(content, headers={"cache-control": YEAR}, media_type=media)


class _Gate:
    """Let requests with a session through, and send all others to the login."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; its `state.session` is its session, None on the open paths."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)  # which has no websocket
            return
        request = Request(scope, receive)
        sessions: session.Sessions = request.app.state.sessions
        request.state.session, request.state.answer = sessions.session(request), None
        is_open = OPEN.fullmatch(scope["path"][len(scope["root_path"]) :]) is not None
        if request.state.session is not None or is_open:
            await self._app(scope, receive, send)
            # A form without an answer has not changed anything, unless its request was cancelled.
            if request.state.answer is not None:
                request.state.answer.cancel()
            sent = getattr(request.state, "sent", None)
            if sent is not None:
                await sent.close()  # its files
            return
        if request.method in ("GET", "HEAD") and "hx-request" not in request.headers:
            there = view.here(request)
            login = session.url(request, "/login", next=None if there == "/" else there)
            answer: Response = RedirectResponse(login, 303)
        else:
            answer = _message(request, 401, "Nothing was changed: log in again.", "Not logged in")
        await answer(scope, receive, send)


# --- pages about errors ------------------------------------------------------------------------


def _message(
    request: Request, status: int, text: str, title: str = "", near: Sequence[Any] = ()
) -> Response:
    """Return a page with a sentence, or plain text for a fragment, which is then not replaced."""
    if "hx-request" in request.headers:
        return Response(text, status, media_type="text/plain")
    title = title or problems.TITLES.get(status, "The request was refused")
    sent: Mapping[str, Any] = getattr(request.state, "sent", {})
    texts = [given for name in TYPED if isinstance(given := sent.get(name), str) and given]
    return view.Page(
        request, "message.html", title=title, command="", status=status, text=text, near=near,
        typed=[given.encode(errors="replace").decode() for given in texts],  # of any characters
    )  # fmt: skip


async def _answer(request: Request, error: Exception) -> Response:
    """Return the page about an error."""
    if isinstance(error, forms.Refused):
        title = {404: "Not found", 503: "Took too long"}.get(error.status, "Not done")
        return _message(request, error.status, error.text, title, error.near)
    if isinstance(error, exceptions.RequestValidationError):
        faults = [f"{fault['loc'][-1]}: {fault['msg']}" for fault in error.errors()]
        return _message(request, 422, "; ".join(faults[:3]), "Not understood")
    if not isinstance(error, starlette_exceptions.HTTPException):
        status, text, _ = problems.described(error)
        return _message(request, status, text)
    if error.status_code < 400:
        return Response(status_code=error.status_code, headers=error.headers)
    text = "There is no such page." if error.status_code == 404 else str(error.detail)
    return _message(request, error.status_code, text)
