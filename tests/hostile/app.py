"""Define the app of the sweep's processes: `--app tests.hostile.app:setup`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import queue_workflows
from queue_workflows.scheduler import ScheduleEntry
from tests.support import frequent_schedule

SOLO, NOTES, FEEDS, CALLS, OTHER = "solo", "notes", "feeds", "calls", "other"
"""Served by a worker of one job at a time, by one that takes batches, and by a pool.

`OTHER` is of the pool too; settings of queues are swept on it, as those of another's queue stop it
by right.
"""
QUEUES = (SOLO, NOTES, FEEDS, CALLS, OTHER)
LOCK_KEY, PARTITION = "key-of-normal-work", "partition-of-normal-work"
FAILS = "fails"


class Every(frequent_schedule.Every):
    """Fires every two seconds."""

    SECONDS = 2


def quick(out: Path, said: Any = None) -> dict[str, Any]:
    """Create a file in the folder that the engine gives this node."""
    (out / "written").touch()
    return {"said": str(said)[:40]}


def note(reason: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"reason": reason[:40]}


async def fetch(args: dict[str, Any]) -> dict[str, Any]:
    await asyncio.sleep(0.01)
    return {"fetched": True}


def fails(args: dict[str, Any]) -> None:
    raise ValueError("this handler always fails")


def _node(name: str, *after: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "node": "quick", "depends_on": list(after), **more}


def _step(name: str, pipeline: str, *after: str, **more: Any) -> dict[str, Any]:
    own = {"id": name, "kind": "pipeline", "pipeline": pipeline, "depends_on": list(after)}
    return {**own, **more}


def _ask(*after: str) -> dict[str, Any]:
    return {
        "id": "ask", "kind": "input", "widget": "turnout", "prompt": "Which way?", "target": "way",
        "turnout_options": [{"label": "Left", "value": "l"}], "depends_on": list(after),
    }  # fmt: skip


PIPELINES = {
    "one": [_node("n")],
    "diamond": [_node("a"), _node("b", "a"), _node("c", "a"), _node("d", "b", "c")],
    "hear": [_node("n", inputs=[{"name": "said", "from": "pipeline.said"}])],
}
WORKFLOWS = {
    "short": [_step("work", "one")],
    "parks": [_ask()],
    "normal": [
        _step("work", "diamond"),
        _ask("work"),
        _step("end", "hear", "ask", inputs={"said": {"$from": "ask.way"}}),
    ],
}


def setup() -> None:
    """Register everything."""
    queue_workflows.configure(ingest_queues={*QUEUES})
    queue_workflows.register_node("quick", quick)
    queue_workflows.set_workflow_provider(
        lambda name: {"name": name, "steps": WORKFLOWS[name]},
        lambda name: {"name": name, "nodes": PIPELINES[name]},
    )
    for task in (note, fetch, fails):
        queue_workflows.register_ingest_task(task.__name__, task)
    every_two_s = Every("every", 0, "note", SOLO)
    entries: list[ScheduleEntry] = [every_two_s]
    queue_workflows.set_ingest_schedule(entries)
