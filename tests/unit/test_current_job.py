"""The running job of a worker: progress, cancellation, failures found by guards."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from queue_workflows.engine import job_tables
from queue_workflows.worker import current_job, guards


def work() -> current_job.Work:
    job = {"id": "j", "queue": "load", "task_name": "t", "worker_id": "w", "claim_no": 1}
    return current_job.Work(
        job_tables.INGEST_JOBS, job, guards.LeaseEnd(0.0, 600.0), now_fn=lambda: 0.0
    )


def watched() -> tuple[current_job.Work, list[float]]:
    """A job, and when its guards are told of a beat."""
    subject, beats = work(), list[float]()
    subject.guards.append(mock.Mock(beat=beats.append))
    return subject, beats


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (0.4, "0.4"),
        (1, "1"),
        ("parsing", '"parsing"'),
        ({"rows": 3}, '{"rows": 3}'),
        (None, None),
        (True, None),
        (40, None),
        (-0.1, None),
        ([1], None),
        ("x" * 9000, None),
        ({"rows": {1}}, None),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_a_task_yields_is_progress_or_a_beat(value: Any, stored: str | None) -> None:
    subject, beats = watched()
    subject.report_progress(value)
    assert (subject.unsaved, beats) == (stored, [0.0])


def test_a_text_of_a_nodes_status_callback_is_a_beat() -> None:
    subject, beats = watched()
    subject.status("at work")
    subject.status(rows=3)
    assert (subject.unsaved, beats) == ('{"rows": 3}', [0.0, 0.0])


def test_a_handler_is_interrupted_once_and_at_each_check() -> None:
    subject, calls = work(), list[str]()
    subject.when_interrupted(lambda: calls.append("told"))
    subject.interrupt("shutdown")
    subject.cancelled_by(5.0)
    assert (subject.interrupted, subject.cancel_requested, calls) == ("shutdown", True, ["told"])
    subject.when_interrupted(lambda: calls.append("told late"))
    assert calls == ["told", "told late"]


def test_a_handler_that_has_ended_is_not_interrupted() -> None:
    subject, calls = work(), list[str]()
    subject.when_interrupted(lambda: calls.append("told"))
    subject.when_interrupted(None)
    subject.cancelled_by(5.0)
    assert (subject.interrupted, calls) == ("cancelled", [])


@pytest.mark.parametrize("stopped", [False, True])
def test_a_stopped_process_is_idle_for_that_reason(stopped: bool) -> None:
    subject = work()
    stall = guards.Failure(guards.EXIT_STALL, "stall_trip", "no beat")
    for kind in (guards.Stall, guards.GpuHealth):
        subject.guards.append(mock.Mock(spec=kind, check=lambda _: stall))
    assert subject.verdict(stopped=stopped) == (None if stopped else stall)
    over = guards.Failure(guards.EXIT_BUDGET, "budget_trip", "ran too long")
    subject.guards.insert(1, mock.Mock(spec=guards.Budget, check=lambda _: over))
    assert subject.verdict(stopped=stopped) == over
