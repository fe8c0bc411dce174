"""Log in with a token or a one-time link, log out, and choose the time zone."""

from __future__ import annotations

from collections.abc import Mapping

import fastapi
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from queue_workflows import acts
from queue_workflows.service.dashboard import forms, session, view
from queue_workflows.service.routes import endpoints

router = fastapi.APIRouter()


@router.get("/login")
async def login(request: Request) -> Response:
    """Show the form."""
    return _form(request, request.query_params)


def _form(
    request: Request, given: Mapping[str, object], text: str = "", status: int = 200
) -> Response:
    asks_name = not endpoints.user(request)  # some proxies send an empty header for nobody
    return view.Page(
        request, "login.html", title="Log in", command="", status=status, text=text,
        asks_name=asks_name, given={name: given.get(name, "") for name in ("link", "name", "next")},
    )  # fmt: skip


@router.post("/login")
async def logged_in(request: Request) -> Response:
    """Open a session for a token or a one-time link."""
    doors: session.Doors = request.app.state.doors
    given = {name: str(text) for name, text in (await forms.fields(request)).items()}
    if doors.must_wait(request):
        return _form(request, given, "Too many wrong tries from your address: wait a minute.", 429)
    name = (endpoints.user(request) or given.get("name", "")).strip()
    if not name or len(name) > acts.MOST_ACTOR:
        text = "Enter your name: it stands beside everything that you change."
        return _form(request, given, text, 422)
    found = doors.scope_of(request, given.get("token", "").strip(), given.get("link", ""))
    if found is None:
        text = "This link has been used, or is over 5 minutes old: log in with a token."
        text = text if given.get("link") else "This token is not known."
        return _form(request, given | {"link": ""}, text, 403)
    answer = RedirectResponse(session.url(request, forms.local(given.get("next", ""))), 303)
    doors.open(answer, request, found, name)
    return answer


@router.post("/logout")
async def logout(request: Request) -> Response:
    """End the session of this browser."""
    await forms.act(request, "look")
    answer = RedirectResponse(session.url(request, "/login"), 303)
    doors: session.Doors = request.app.state.doors
    answer.delete_cookie(doors.cookie, **doors.attributes(request))
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
    more = request.app.state.doors.attributes(request) | {"httponly": False}
    answer.set_cookie(session.ZONE, name, max_age=365 * 86_400, **more)
    return answer
