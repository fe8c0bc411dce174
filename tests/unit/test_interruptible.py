"""What a handler reports and how it is requested to end, the same in a worker and an executor."""

from __future__ import annotations

import threading
from concurrent import futures
from typing import Any
from unittest import mock

import pytest

from queue_workflows.claim import claims
from queue_workflows.run import running, wire
from queue_workflows.runtime import exit_codes
from queue_workflows.tasks import attempt_requests, control
from queue_workflows.types import JsonDict
from queue_workflows.worker import claimed_job, guards, queue_state, shapes
from tests.support import tabled


def test_what_a_task_yields_is_progress_or_a_beat() -> None:
    cases: list[Any] = [
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
    ]
    for value, stored in cases:
        with tabled.case(value, stored):
            assert running.progress_text(value) == stored


class Reporting(running.Running):
    """Keeps what a handler reports."""

    def __init__(self) -> None:
        super().__init__(1, lambda *_: None, lambda: None)
        self.reports: list[Any] = []

    def report_progress(self, value: Any) -> None:
        self.reports.append(value)


def test_a_text_of_a_nodes_status_callback_is_a_beat() -> None:
    subject = Reporting()
    subject.status("at work")
    subject.status(rows=3)
    subject.status(0.5)
    assert subject.reports == [None, {"rows": 3}, 0.5]


def test_a_handler_is_interrupted_once_and_at_each_check() -> None:
    subject, calls = Reporting(), list[str]()
    subject.when_interrupted(lambda: calls.append("told"))
    subject.interrupt("shutdown")
    subject.request("cancelled")
    assert (subject.interrupted, subject.cancel_requested, calls) == ("shutdown", True, ["told"])
    assert subject.cancel.is_set()
    subject.when_interrupted(lambda: calls.append("told late"))
    assert calls == ["told", "told late"]


def test_a_handler_that_has_ended_is_not_interrupted() -> None:
    subject, calls = Reporting(), list[str]()
    subject.when_interrupted(lambda: calls.append("told"))
    subject.when_interrupted(None)
    subject.request("cancelled")
    assert (subject.interrupted, calls) == ("cancelled", [])


def test_parts_that_are_sent_later_come_before_the_next_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch that came first would be refused, because the parts before it would be missing."""
    monkeypatch.setattr(attempt_requests, "EVERY_S", 60.0)
    sent: list[int] = []

    def ask(request: JsonDict) -> futures.Future[JsonDict]:
        sent.append(request["first"])
        return control.answered(lambda: {"state": "done"})

    def send(kind: int, _: int, body: bytes) -> None:
        rest.start()
        rest.join(0.2)  # it has to wait until these parts are sent
        sent.append(wire.checked(kind, body)["request"]["first"])

    subject = running.Running(1, send)
    parts = attempt_requests.StreamParts(ask, subject)
    rest = threading.Thread(target=parts.rest)
    for part in (1, 2):
        parts.add("out", part)
    assert subject.flush()
    rest.join()
    assert sent == [1, 2, 3]


def test_parts_whose_sending_met_the_handler_at_work_are_sent_a_moment_later() -> None:
    sent: list[int] = []

    def send(kind: int, _: int, body: bytes) -> None:
        sent.append(wire.checked(kind, body)["request"]["first"])

    subject = running.Running(1, send)
    done = control.answered(lambda: {"state": "done"})
    parts: Any = attempt_requests.StreamParts(lambda _: done, subject)
    for part in (1, 2):
        parts.add("out", part)
    with parts._lock:
        assert subject.flush()
    assert sent == []
    assert subject.flush()
    assert sent == [2]


@pytest.mark.parametrize("stopped", [False, True])
def test_a_stopped_process_is_idle_for_that_reason(stopped: bool) -> None:
    runner: Any = None
    who = claims.Claimant("w:1:0:ex-1", "box", "load", 600.0)
    own = queue_state.Queue(who, shapes.Shape(1), runner)
    texts = (b"j", b"1", b"0", None, b"t", None, None, None, None, b"{}", None, None, b"0")
    subject = claimed_job.ClaimedJob(own, texts, 0.0, 0.0)
    subject.start(0.0)
    stall = guards.Failure(exit_codes.STALL, "stall_trip", "no beat")
    for kind in (guards.Stall, guards.GpuHealth):
        subject.guards.append(mock.Mock(spec=kind, check=lambda _: stall))
    assert subject.verdict(1.0, stopped=stopped) == (None if stopped else stall)
    over = guards.Failure(exit_codes.BUDGET, "budget_trip", "ran too long")
    subject.guards.insert(0, mock.Mock(spec=guards.Budget, check=lambda _: over))
    assert subject.verdict(1.0, stopped=stopped) == over
