"""Show queues and schedules, pause and resume them, set limits, and fire schedules now."""

from __future__ import annotations

import contextlib
import shlex
from datetime import timezone
from typing import Any, Final, Literal

import fastapi
from starlette.requests import Request
from starlette.responses import Response

from queue_workflows import config, db, errors, queues, schedules
from queue_workflows.db import statements
from queue_workflows.runtime import clock, display
from queue_workflows.service.dashboard import forms, session, view
from queue_workflows.types import JsonDict, Row

router = fastapi.APIRouter()


# --- queues ------------------------------------------------------------------------------------

LIMITS: Final = ("max_running", "rate", "partition_max_running", "partition_rate")


@router.get("/queues")
async def listed_queues(
    request: Request, queue: view.Text = None, start: view.Start = 0
) -> Response:
    """Show the queues that are used, or one with its limits and partitions."""
    title = "Queues" if queue is None else f"Queue {display.line(queue, 120)}"
    command = "queue-workflows queues list"
    return await view.live(
        request, "queues.html", _queues, queue, start, title=title, command=command
    )


def _queues(conn: db.Connection, queue: str | None, start: int) -> JsonDict:
    """Return a page of the queues that are used; or one as `chosen`, with a page of partitions."""
    if queue is None:
        page, pages = view.paged(queues.list(used_only=True, conn=conn), start, "/queues")
        return {"queues": page, "queue_pages": pages, "chosen": None}
    try:
        one = queues.get(queue, conn=conn)
    except errors.UnknownQueue:
        text = f"no queue {display.line(queue, 80)} has jobs, settings or workers"
        raise view.NotFound(text, near=[("all queues", "/queues")]) from None
    parts, pages = view.paged(one["partitions"], start, "/queues", queue=queue)
    return {
        "queues": [one], "partitions": parts, "queue_pages": pages, "chosen": queue,
        "is_limited": queue not in config.DAG_QUEUES,
    }  # fmt: skip


def _words(queue: str, partition: str | None) -> str:
    words = f"queue {display.line(queue, 80)}"
    return words if partition is None else f"{words}, partition {display.line(partition, 80)}"


@router.post("/queues/switch")
async def switch(request: Request) -> Response:
    """Pause or resume a queue or a partition; Undo restores its state."""
    form = await forms.act(request, "operate")
    queue, partition = form.values.get("queue", ""), form.values.get("partition") or None
    to, until = form.values.get("to", ""), form.values.get("until")
    if to not in ("paused", "open"):
        raise forms.Refused(422, "Choose to pause or to resume it. Nothing was changed.")

    def change() -> Row:
        with db.transaction() as conn:
            before = queues.get(queue, conn=conn)
            if to == "open":
                queues.resume(queue, partition=partition, conn=conn)
            else:
                ends = clock.parse_until(until) if until else None
                queues.pause(queue, partition=partition, until=ends, conn=conn)
            own = [each for each in before["partitions"] if each["partition"] == partition]
            return before if partition is None else (own or [{"state": "open"}])[0]

    before = await form.run(change)
    fields = {"queue": queue, "partition": partition or "", "to": before["state"]}
    if ends_at := before.get("paused_until"):
        fields["until"] = ends_at.isoformat()
    undo = forms.Action("/queues/switch", "Undo", "operate", fields)
    text = f"{'Paused' if to == 'paused' else 'Resumed'} {_words(queue, partition)}."
    return form.done(text, back=view.path("/queues", queue=queue), undo=undo)


@router.post("/queues/limit")
async def limit(request: Request) -> Response:
    """Set the limits of a queue; an empty field removes one, and Undo restores them."""
    form = await forms.act(request, "operate")
    queue = form.values.get("queue", "")
    given: dict[str, Any] = {}
    for name in LIMITS:
        text = form.values.get(name, "").strip()
        given[name] = int(text) if text.isdecimal() and len(text) < 10 else text or None

    def change() -> Row:
        with db.transaction() as conn:
            before = queues.get(queue, conn=conn)
            queues.limit(queue, conn=conn, **given)
            return before

    before = await form.run(change)
    fields = {"queue": queue} | {name: str(before[name] or "") for name in LIMITS}
    undo = forms.Action("/queues/limit", "Undo", "operate", fields)
    text = f"Set the limits of {_words(queue, None)}."
    return form.done(text, back=view.path("/queues", queue=queue), undo=undo)


# --- schedules ---------------------------------------------------------------------------------


@router.get("/schedules")
async def listed_schedules(
    request: Request, name: view.Text = None, start: view.Start = 0
) -> Response:
    """Show all schedules, the next to fire first, or the one of a name, which may be `..`."""
    if name is not None:
        return await schedule(request, name)
    command = "queue-workflows schedules list"
    return await view.live(
        request, "schedules.html", _schedules, start, title="Schedules", command=command
    )


@router.get("/schedules/{name}")
async def schedule(request: Request, name: view.Segment) -> Response:
    """Show a schedule with its next fires, and the last ones with their jobs or runs."""
    title = f"Schedule {display.line(name, 120)}"
    command = f"queue-workflows schedules preview {shlex.quote(name)}"
    return await view.live(request, "schedule.html", _schedule, name, title=title, command=command)


def _schedules(conn: db.Connection, start: int) -> JsonDict:
    rows, pages = view.paged(schedules.list(conn=conn), start, "/schedules")
    return {"schedules": rows, "pages": pages, "problem": schedules.problem}


def _schedule(conn: db.Connection, name: str) -> JsonDict:
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
async def change_schedule(request: Request, verb: Literal["pause", "resume", "run"]) -> Response:
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
