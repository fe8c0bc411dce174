"""Show queues with their waiting jobs, limits and partitions, pause, resume and limit them."""

from __future__ import annotations

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
LIMITS: Final = ("max_running", "rate", "partition_max_running", "partition_rate")


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
    for row in every[:QUEUES]:
        row["is_dag"] = row["queue"] in config.DAG_QUEUES
        row["action"] = _switch(row["queue"], None, row)
        row["left_out"] = max(0, len(row["partitions"]) - PARTITIONS)
        row["partitions"] = row["partitions"][:PARTITIONS]
        for part in row["partitions"]:
            part["action"] = _switch(row["queue"], part["partition"], part)
    return {"queues": every[:QUEUES], "left_out": max(0, len(every) - QUEUES)}


def _words(queue: str, partition: str | None) -> str:
    words = f"queue {display.line(queue, 80)}"
    return words if partition is None else f"{words}, partition {display.line(partition, 80)}"


def _switch(queue: str, partition: str | None, row: Row) -> forms.Action:
    """Return the action that resumes a paused queue or partition, or pauses an open one."""
    to, label = ("open", "Resume") if row["state"] == "paused" else ("paused", "Pause")
    fields = {"queue": queue, "partition": partition or "", "to": to}
    text = f"{label} {_words(queue, partition)}. Running jobs continue."
    return forms.Action("/queues/switch", label, "operate", fields, text=text, asks_reason=True)


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
    did = "Paused" if to == "paused" else "Resumed"
    return form.done(f"{did} {_words(queue, partition)}.", back="/queues", undo=undo)


@router.post("/queues/limit")
async def limit(request: Request) -> Response:
    """Set the limits of a queue that its form has; an empty field removes a limit."""
    form = await forms.act(request, "operate")
    queue, texts = (
        form.values.get("queue", ""),
        [form.values.get(each, "").strip() for each in LIMITS],
    )
    values: list[Any] = [
        int(text) if text.isdecimal() and len(text) < 10 else text or None for text in texts
    ]
    await form.run(queues.limit, queue, **dict(zip(LIMITS, values, strict=True)))
    return form.done(f"Set the limits of {_words(queue, None)}.", back="/queues")
