"""What the engine does around a handler in Python: counted, since times vary with the machine."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import queue_workflows
from queue_workflows.run import running, task_call
from queue_workflows.tasks import handlers
from queue_workflows.types import Row

MOST_CALLS = 52
"""Calls of functions, those in C too, for one job: 49 are made."""


def noop() -> dict[str, Any]:
    return {}


def row() -> Row:
    return {
        "id": "j", "task_name": "noop", "queue": "load", "reason": "tick", "args": {},
        "headers": None, "claim_no": 1, "worker_id": "w", "attempts": 0,
    }  # fmt: skip


def test_a_short_task_costs_few_calls() -> None:
    queue_workflows.register_ingest_task("noop", noop)
    runner, nobody, job = handlers.Runner(), running.Running(), row()
    assert task_call.call(job, nobody, runner).kind == "completed"
    made: list[str] = []

    def count(frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "c_call"):
            made.append(frame.f_code.co_name)

    sys.setprofile(count)
    try:
        task_call.call(job, nobody, runner)
    finally:
        sys.setprofile(None)
    assert len(made) <= MOST_CALLS, made
