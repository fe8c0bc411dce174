"""Serve the frame of all pages: the login, the time zone, the head, and hints about changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Final

import fastapi
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from queue_workflows import acts
from queue_workflows.service import changes, state
from queue_workflows.service.dashboard import forms, session, view
from queue_workflows.service.routes import endpoints, sent_events

router = fastapi.APIRouter()


# --- sessions ----------------------------------------------------------------------------------


@router.get("/login")
async def login(request: Request) -> Response:
    """Show the form."""
    return _form(request, request.query_params)


def _form(
    request: Request, given: Mapping[str, object], text: str = "", status: int = 200
) -> Response:
    asks_name = not endpoints.user(request)  # some proxies send an empty header
    return view.Page(
        request, "login.html", title="Log in", command="", status=status, text=text,
        asks_name=asks_name, given={name: given.get(name, "") for name in ("link", "name", "next")},
    )  # fmt: skip


@router.post("/login")
async def logged_in(request: Request) -> Response:
    """Open a session for a token or a one-time link."""
    sessions: session.Sessions = request.app.state.sessions
    given = {name: str(text) for name, text in (await forms.fields(request)).items()}
    if sessions.must_wait(request):
        return _form(request, given, "Too many wrong tries from your address: wait a minute.", 429)
    name = (endpoints.user(request) or given.get("name", "")).strip()
    if not name or len(name) > acts.MOST_ACTOR:
        text = "Enter your name: it stands beside everything that you change."
        return _form(request, given, text, 422)
    found = sessions.scope_of(request, given.get("token", "").strip(), given.get("link", ""))
    if found is None:
        text = "This link has been used, or is over 5 minutes old: log in with a token."
        text = text if given.get("link") else "This token is not known."
        return _form(request, given | {"link": ""}, text, 403)
    answer = RedirectResponse(session.url(request, forms.local(given.get("next", ""))), 303)
    sessions.open(answer, request, found, name)
    return answer


@router.post("/logout")
async def logout(request: Request) -> Response:
    """End the session of this browser."""
    await forms.act(request, "look")
    answer = RedirectResponse(session.url(request, "/login"), 303)
    sessions: session.Sessions = request.app.state.sessions
    answer.delete_cookie(sessions.cookie, **sessions.attributes(request))
    return answer


@router.post("/zone")
async def choose_zone(request: Request) -> Response:
    """Choose the time zone in which times are shown."""
    form = await forms.act(request, "look")
    name = form.values.get("zone", "").strip()
    if session.zone_of(name) is None:
        text = f"no time zone {name[:60]!r}: a name such as Europe/Berlin, or UTC"
        raise forms.Refused(422, text)
    answer = form.done(f"Times are shown in {name}.", back=form.back)
    more = request.app.state.sessions.attributes(request) | {"httponly": False}
    answer.set_cookie(session.ZONE, name, max_age=365 * 86_400, **more)
    return answer


# --- changes -----------------------------------------------------------------------------------

HINT_S: Final = view.FRAGMENT_S
"""At most one hint in this time, so that a page fetches at most once a second."""
NAMED: Final = 200
"""Runs that a hint names; with more it stands for all."""


@router.get("/live")
async def live(request: Request) -> Response:
    """Return hints as long as the tab is open: ids of runs that changed, and whether jobs did.

    They have no values, so that every scope gets the same.
    """

    async def begin(reader: changes.Reader) -> AsyncIterator[bytes]:
        return _hints(reader)

    return sent_events.Stream(state.of(request), begin)


async def _hints(reader: changes.Reader) -> AsyncIterator[bytes]:
    hint: dict[str, object] = {"all": True, "jobs": True, "ids": []}
    repeats = True
    yield sent_events.retry()
    while True:
        # `sent_events.event` would set members to null that are not states, for the scope look.
        yield f"event: hint\ndata: {json.dumps(hint)}\n\n".encode()
        await asyncio.sleep(HINT_S)
        # Each is sent twice: at the first, the service may have kept a part from before the change.
        found = await reader.next(0 if repeats else sent_events.BEAT_S)
        if repeats and not found:
            repeats = False
            continue
        while not found:
            if reader.closed:
                return
            yield b": alive\n\n"
            found = await reader.next(sent_events.BEAT_S)
        repeats = True
        ids = sorted({str(run) for one in found if (run := one.data.get("run_id")) is not None})
        is_jobs = any(one.kind == "job" for one in found)
        hint = {"all": len(ids) > NAMED, "jobs": is_jobs, "ids": ids[:NAMED]}


@router.get("/head")
async def head(request: Request) -> Response:
    """Return the count beside the link Now, and the warning if no orchestrator runs."""
    pages: view.Pages = request.app.state.pages

    async def values() -> dict[str, object]:
        return {"head": await pages.head(request)}

    return await view.fragment(request, "head.html", values)
