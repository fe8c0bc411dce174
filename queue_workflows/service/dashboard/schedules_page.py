"""Show schedules with their next and last fires, pause and resume them, and fire them now."""

from __future__ import annotations

import contextlib
import shlex
from datetime import timezone
from typing import Literal

import fastapi
from starlette.requests import Request
from starlette.responses import Response

from queue_workflows import db, errors, schedules
from queue_workflows.db import statements
from queue_workflows.runtime import display
from queue_workflows.service.dashboard import forms, session, view
from queue_workflows.types import JsonDict

router = fastapi.APIRouter()


@router.get("/schedules")
async def listed(request: Request, name: view.Text = None, start: view.Start = 0) -> Response:
    """Show all schedules, the next to fire first, or the one of a name, which may be `..`."""
    if name is not None:
        return await one(request, name)
    command = "queue-workflows schedules list"
    return await view.live(
        request, "schedules.html", _read, start, title="Schedules", command=command
    )


@router.get("/schedules/{name}")
async def one(request: Request, name: view.Segment) -> Response:
    """Show a schedule with its next fires, and the last ones with their jobs or runs."""
    title = f"Schedule {display.line(name, 120)}"
    command = f"queue-workflows schedules preview {shlex.quote(name)}"
    return await view.live(request, "schedule.html", _one, name, title=title, command=command)


def _read(conn: db.Connection, start: int) -> JsonDict:
    rows, pages = view.paged(schedules.list(conn=conn), start, "/schedules")
    return {"schedules": rows, "pages": pages, "problem": schedules.problem}


def _one(conn: db.Connection, name: str) -> JsonDict:
    row = schedules.get(name, conn=conn)
    if row is None:
        text = f"no schedule {display.line(name, 80)}: it never was here, or it was removed"
        raise view.NotFound(text, near=[("all schedules", "/schedules")])
    zone, coming = session.zone_of(row["tz"]) or timezone.utc, list[schedules.Occurrence]()
    with contextlib.suppress(errors.QueueWorkflowsError):  # a role may have stored anything
        coming = schedules.preview(name, days=366, limit=5, conn=conn)
    return {
        "schedule": row,
        "problem": schedules.problem,
        "coming": [(each, each.at.astimezone(zone)) for each in coming],
        "fires": statements.pages.fires(conn, name=name, limit=20),
    }


@router.post("/schedules/{verb}")
async def change(request: Request, verb: Literal["pause", "resume", "run"]) -> Response:
    """Pause, resume or fire a schedule; Undo of the first two does the other."""
    form = await forms.act(request, "operate")
    name = form.values.get("name", "")
    back = view.path("/schedules", name=name)
    shown = f"Schedule {display.line(name, 120)}"
    if verb != "run":
        await form.run(schedules.pause if verb == "pause" else schedules.resume, name)
        other = "resume" if verb == "pause" else "pause"
        undo = forms.Action(f"/schedules/{other}", "Undo", "operate", {"name": name})
        return form.done(f"{shown} is {verb}d.", back=back, undo=undo)
    fired = await form.run(schedules.fire_now, name)
    if fired.id is None:
        return form.done(f"{shown} made nothing: {fired.skipped}.", back=back)
    links = [(fired.id, view.path("/search", q=fired.id))]
    return form.done(f"{shown} has fired.", back=back, links=links)
