"""Show queues with what waits in them, their limits and partitions, and change these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import fastapi
from starlette.requests import Request
from starlette.responses import Response

from queue_workflows import config, db, queues
from queue_workflows.runtime import clock, display
from queue_workflows.service.dashboard import forms, view
from queue_workflows.types import JsonDict, Row

router = fastapi.APIRouter()
QUEUES: Final = 200
PARTITIONS: Final = 50
"""Partitions of a queue that have settings of their own."""
NUMBERS: Final = frozenset({"max_running", "partition_max_running"})
LIMITS: Final = (*NUMBERS, "rate", "partition_rate")


@router.get("/queues")
async def listed(request: Request) -> Response:
    """Show all queues that are used."""
    found = await view.read(request, _read)
    command = "queue-workflows queues list"
    return view.page(request, "queues.html", title="Queues", command=command, **found)


@router.get("/queues-rows")
async def rows(request: Request) -> Response:
    """Return the queues alone."""
    return await view.fragment(request, "queues_rows.html", lambda: view.read(request, _read))


def _read(conn: db.Connection) -> JsonDict:
    every = queues.list(used_only=True, conn=conn)
    shown = [
        row
        | {
            "is_dag": row["queue"] in config.DAG_QUEUES,
            "action": _switch(row["queue"], None, row["state"]),
            "partitions": [
                part | {"action": _switch(row["queue"], part["partition"], part["state"])}
                for part in row["partitions"][:PARTITIONS]
            ],
            "left_out": max(0, len(row["partitions"]) - PARTITIONS),
        }
        for row in every[:QUEUES]
    ]
    return {"queues": shown, "left_out": len(every) - len(shown)}


# --- actions -----------------------------------------------------------------------------------


def _switch(
    queue: str, partition: str | None, state: str, label: str = "", **more: str
) -> forms.Action:
    """Return the action that resumes a paused queue or partition, or pauses an open one."""
    verb = "resume" if state == "paused" else "pause"
    fields = {"queue": queue, **more, **({} if partition is None else {"partition": partition})}
    return forms.Action(
        f"/queues/{verb}", label or verb.capitalize(), "operate", fields,
        text=f"{verb.capitalize()} queue {display.line(queue, 80)}. Running jobs continue.",
        asks_reason=not label,
    )  # fmt: skip


def _named(form: forms.Form) -> tuple[str, str | None, str]:
    """Return the queue and the partition of a form, and both as words."""
    queue, partition = form.values.get("queue", ""), form.values.get("partition") or None
    words = f"Queue {display.line(queue, 80)}"
    return (
        queue,
        partition,
        words + ("" if partition is None else f", partition {display.line(partition, 80)}"),
    )


@router.post("/queues/pause")
async def pause(request: Request) -> Response:
    """Pause a queue or a partition; Undo resumes it."""
    form = await forms.act(request, "operate")
    queue, partition, words = _named(form)
    until = form.values.get("until", "").strip()
    ends = clock.parse_until(until) if until else None
    await form.run(queues.pause, queue, partition=partition, until=ends)
    undo = _switch(queue, partition, "paused", "Undo")
    return form.done(f"{words} is paused.", back="/queues", undo=undo)


@router.post("/queues/resume")
async def resume(request: Request) -> Response:
    """Resume a queue or a partition; Undo pauses it until the same time."""
    form = await forms.act(request, "operate")
    queue, partition, words = _named(form)

    def change() -> tuple[bool, Row]:
        with db.transaction() as conn:
            before = queues.get(queue, conn=conn)
            return queues.resume(queue, partition=partition, conn=conn), before

    done, before = await form.run(change)
    if not done:
        return form.done(f"{words} was not paused.", back="/queues")
    parts: Mapping[str, Row] = {part["partition"]: part for part in before["partitions"]}
    until = (before if partition is None else parts.get(partition, {})).get("paused_until")
    more = {} if until is None else {"until": until.isoformat()}
    undo = _switch(queue, partition, "open", "Undo", **more)
    return form.done(f"{words} is resumed.", back="/queues", undo=undo)


@router.post("/queues/limit")
async def limit(request: Request) -> Response:
    """Set the limits of a queue that its form has; an empty field removes a limit."""
    form = await forms.act(request, "operate")
    queue, partition, words = _named(form)
    given: dict[str, Any] = {
        name: form.values[name].strip() or None for name in LIMITS if name in form.values
    }
    for name in NUMBERS & given.keys():
        if given[name] is not None:
            given[name] = int(given[name]) if given[name].isdecimal() else 0  # 0 is refused
    await form.run(queues.limit, queue, partition=partition, **given)
    return form.done(f"{words}: the limits are set.", back="/queues")
