"""Show schedules with their next and last fires, pause and resume them, and fire them now."""

from __future__ import annotations

import contextlib
import shlex
from datetime import timezone
from typing import Final, Literal
from urllib.parse import urlencode

import fastapi
from starlette.requests import Request
from starlette.responses import Response

from queue_workflows import db, errors, schedules
from queue_workflows.db import statements
from queue_workflows.runtime import display
from queue_workflows.service.dashboard import forms, session, view
from queue_workflows.types import JsonDict, Rows

router = fastapi.APIRouter()
MOST: Final = 200


@router.get("/schedules")
async def listed(request: Request) -> Response:
    """Show all schedules, the next to fire first."""

    def read(conn: db.Connection) -> Rows:
        return schedules.list(conn=conn)

    rows = await view.read(request, read)
    return view.page(
        request, "schedules.html", title="Schedules", command="queue-workflows schedules list",
        schedules=rows[:MOST], left_out=max(0, len(rows) - MOST), problem=schedules.problem,
    )  # fmt: skip


@router.get("/schedules/{name}")
async def one(request: Request, name: view.Segment) -> Response:
    """Show a schedule with its next fires, and the last ones with their jobs or runs."""
    found = await view.read(request, _one, name)
    return view.page(
        request, "schedule.html", title=f"Schedule {display.line(name, 120)}",
        command=f"queue-workflows schedules preview {shlex.quote(name)}", **found,
    )  # fmt: skip


def _one(conn: db.Connection, name: str) -> JsonDict:
    row = next((each for each in schedules.list(conn=conn) if each["name"] == name), None)
    if row is None:
        text = f"no schedule {display.line(name, 80)}: it never was here, or it was removed"
        raise view.NotFound(text, near=[("all schedules", "/schedules")])
    zone, coming = session.zone_of(row["tz"]) or timezone.utc, list[schedules.Occurrence]()
    with contextlib.suppress(errors.QueueWorkflowsError):  # a role may have stored anything
        coming = schedules.preview(name, days=366, limit=5, conn=conn)
    target = display.line(row["task_name"] or row["workflow_name"], 120)
    text = f"Start {target} now, beside the instants of the schedule."
    run = view.path("/schedules/", name, "run")
    # An entry of the code that no scheduler has stored cannot be changed.
    actions = [
        _switch(name, "resume" if row["paused"] else "pause"),
        forms.Action(run, "Run now", "operate", {}, "makes", text, asks_reason=True),
    ] if "ended" in row else []  # fmt: skip
    return {
        "schedule": row, "problem": schedules.problem(row), "actions": actions, "target": target,
        "coming": [(each, each.at.astimezone(zone)) for each in coming],
        "fires": statements.pages.fires(conn, name=name, limit=20),
    }  # fmt: skip


def _switch(name: str, verb: str, label: str = "") -> forms.Action:
    to, shown = view.path("/schedules/", name, verb), label or verb.capitalize()
    text = f"{shown} schedule {display.line(name, 120)}."
    return forms.Action(to, shown, "operate", text=text, asks_reason=not label)


@router.post("/schedules/{name}/{verb}")
async def change(
    request: Request, name: view.Segment, verb: Literal["pause", "resume", "run"]
) -> Response:
    """Pause, resume or fire a schedule; Undo of the first two does the other."""
    form = await forms.act(request, "operate")
    back, shown = view.path("/schedules/", name), f"Schedule {display.line(name, 120)}"
    if verb != "run":
        await form.run(schedules.pause if verb == "pause" else schedules.resume, name)
        undo = _switch(name, "resume" if verb == "pause" else "pause", "Undo")
        return form.done(f"{shown} is {verb}d.", back=back, undo=undo)
    fired = await form.run(schedules.fire_now, name)
    if fired.id is None:
        return form.done(f"{shown} made nothing: {fired.skipped}.", back=back)
    links = [(fired.id, f"/search?{urlencode({'q': fired.id})}")]
    return form.done(f"{shown} has fired.", back=back, links=links)
