"""Executors run handlers of every kind, and report what they do."""

from __future__ import annotations

import array
import datetime
import fcntl
import json
import os
import socket
import termios
from pathlib import Path

import pytest

from tests.support import constants, executors
from tests.support.wait import until


@pytest.mark.parametrize(
    ("name", "args", "result"),
    [
        ("add", {"a": 1, "b": 2}, {"sum": 3, "reason": "tick"}),
        ("counting", {"to": 3}, {"steps": 3}),
        ("coroutine", {"a": "é\ud83d\ude00"[:1]}, {"async": "é"}),
        ("stream", {}, {"streamed": 3}),
    ],
)
def test_each_kind_of_task_runs(
    worker: executors.Worker, name: str, args: dict[str, object], result: dict[str, object]
) -> None:
    outcome = worker.task(name, args)
    assert (outcome.kind, json.loads(outcome.result)) == ("completed", result)


def test_a_handler_learns_of_its_job(worker: executors.Worker) -> None:
    facts = json.loads(worker.task("job_facts", id="j7", claim_no=4, attempts=2).result)
    assert facts == {"id": "j7", "claim": 4, "attempt": 3, "pid": worker.pid}
    assert worker.pid != os.getpid()


def test_the_time_limit_of_an_executors_first_job_counts_from_its_start(
    worker: executors.Worker,
) -> None:
    for starts in (1, 0):
        job = worker.send_task("add", {"a": 1, "b": 2})
        worker.outcome(job)
        assert job.starts == starts


def test_an_error_is_an_outcome_with_its_traceback(worker: executors.Worker) -> None:
    outcome = worker.task("fails")
    assert outcome.kind == "failed"
    assert outcome.error == "ValueError: no \N{REPLACEMENT CHARACTER} such thing"
    assert "in fails" in json.loads(outcome.detail or "")["traceback"]
    assert {"builtins.ValueError", "ValueError"} & outcome.raised.names


def test_retry_and_snooze_are_outcomes(worker: executors.Worker) -> None:
    retry = worker.task("retries")
    assert (retry.kind, retry.raised.wish, retry.raised.after_s) == ("failed", "retry", 7)
    snooze = worker.task("snoozes")
    assert (snooze.kind, snooze.raised.after_s) == ("snoozed", 9)


def test_an_unknown_task_is_a_failure_that_names_it(worker: executors.Worker) -> None:
    assert "'nobody'" in worker.task("nobody").error


def test_progress_is_sent_and_the_last_value_arrives(worker: executors.Worker) -> None:
    job = worker.send_task("counting", {"to": 20_000})
    outcome, sent = worker.outcome(job), job.reports
    assert json.loads(sent[0] or "") == {"step": 0}
    assert json.loads(sent[-1] or "") == {"step": 19_999}
    assert len(sent) <= 3 + outcome.seconds / 0.04


def test_a_report_that_came_too_early_is_sent_while_the_handler_runs(
    worker: executors.Worker,
) -> None:
    job = worker.send_task("until_cancelled")
    worker.until(lambda: '"started"' in job.reports)
    worker.interrupt(job, "cancelled")
    assert worker.outcome(job).kind == "cancelled"


@pytest.mark.parametrize("name", ["endless", "endless_await", "until_cancelled"])
def test_a_cancel_ends_a_handler(worker: executors.Worker, name: str) -> None:
    job = worker.send_task(name)
    worker.interrupt(job, "cancelled")
    outcome = worker.outcome(job)
    assert (outcome.kind, outcome.error) == ("cancelled", "cancelled")
    assert worker.task("add", {"a": 1, "b": 1}).kind == "completed"


def test_a_shutdown_interrupts_and_is_the_reason(worker: executors.Worker) -> None:
    job = worker.send_task("endless")
    worker.until(lambda: job.reports)
    worker.interrupt(job, "shutdown")
    assert worker.outcome(job).error == "shutdown"


def test_a_cancel_of_another_job_changes_nothing(worker: executors.Worker) -> None:
    worker.place.requests.send(b"99 cancelled")
    assert worker.task("counting", {"to": 100}).kind == "completed"


def test_a_cancel_that_overtakes_its_job_is_remembered(worker: executors.Worker) -> None:
    worker.place.requests.send(f"{worker.place.count + 1} cancelled".encode())
    until(lambda: not waiting_in(worker.place.requests))
    outcome = worker.task("endless")
    assert (outcome.kind, outcome.error) == ("cancelled", "cancelled")


def waiting_in(end: socket.socket) -> int:
    """Return how much of what was sent nobody has received."""
    found = array.array("i", [0])
    fcntl.ioctl(end.fileno(), termios.TIOCOUTQ, found)
    return found[0]


def test_an_executor_that_is_let_go_ends_after_its_job(worker: executors.Worker) -> None:
    job = worker.send_task("add", {"a": 1, "b": 2})
    worker.executors.let_go(worker.place)
    assert worker.outcome(job).kind == "completed"
    died = worker.death()
    assert (died["code"], died["signal"], died["by_deadline"]) == (0, None, False)


def test_nodes_run_with_their_arguments(worker: executors.Worker) -> None:
    assert json.loads(worker.node("sums", {"a": 1}).result) == {"sum": 3}
    outcome = worker.node("echo", {"x": [1, {"y": None}]})
    assert json.loads(outcome.result) == {"got": {"x": [1, {"y": None}]}}
    assert outcome.resolved_inputs is None


def test_refs_are_resolved_from_the_context_that_the_row_has(worker: executors.Worker) -> None:
    template = {"x": {"$from": "first.value"}}
    outcome = worker.node(
        "echo", {"x": None}, input_template=template, ref_heads=["first"],
        context={"first": {"value": 5}},
    )  # fmt: skip
    assert json.loads(outcome.result) == {"got": {"x": 5}}
    assert json.loads(outcome.resolved_inputs or "") == {"x": 5}


def test_a_context_that_the_row_lacks_is_requested(worker: executors.Worker) -> None:
    worker.answers = {"context": {"first": {"value": 6}}}
    outcome = worker.node(
        "echo", {"x": None}, input_template={"x": {"$from": "first.value"}}, ref_heads=["first"]
    )
    assert json.loads(outcome.result) == {"got": {"x": 6}}


def test_folders_are_made_below_the_folder_of_the_run(
    worker: executors.Worker, tmp_path: Path
) -> None:
    worker.answers = {"out_dir": str(tmp_path)}
    job = worker.send_node("folders")
    outcome = worker.outcome(job)
    assert json.loads(outcome.result) == {"out": str(tmp_path / "step" / "folders"), "s": True}
    assert job.asked == ["out_dir"]
    known = worker.send_node("folders", run={"id": "run", "out_dir": str(tmp_path)})
    assert worker.outcome(known).kind == "completed"
    assert not known.asked


def test_an_answer_that_is_an_error_fails_the_node(worker: executors.Worker) -> None:
    outcome = worker.node("folders")
    assert outcome.kind == "failed"
    assert "nothing is known of it" in outcome.error


def test_an_unknown_node_names_the_age_of_its_run(worker: executors.Worker) -> None:
    at = datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc)
    worker.answers = {
        "rows": {
            "job": {},
            "run": {"created_at": {constants.value("run.wire.TIME"): at.isoformat()}},
        }
    }
    assert "the run exists since 2026-01-02 00:00:00 UTC" in worker.node("nobody").error


def test_an_unknown_node_whose_run_cannot_be_read_is_left_to_other_workers(
    worker: executors.Worker,
) -> None:
    outcome = worker.node("nobody")
    assert outcome.error.startswith("NodeNotFound: ")
    assert outcome.raised.wish == "elsewhere"


def test_only_a_node_that_cannot_be_resolved_is_left_to_other_workers(
    worker: executors.Worker,
) -> None:
    worker.answers = {"rows": {"job": {}, "run": {}}}
    for name, wish in (("nobody", "elsewhere"), ("looks_up", "")):
        outcome = worker.node(name)
        assert outcome.error.startswith("NodeNotFound: ")
        assert outcome.raised.wish == wish


def test_an_answer_that_comes_too_late_is_dropped(worker: executors.Worker) -> None:
    worker.answers = None
    job = worker.send_node("alarmed")
    outcome = worker.outcome(job)
    assert (outcome.kind, outcome.error) == ("failed", "TimeoutError: no answer")
    worker.answer(1, {})
    assert worker.node("sums", {"a": 1}).kind == "completed"


def test_a_thread_that_waits_for_an_answer_receives_no_later_job(
    worker: executors.Worker,
) -> None:
    worker.answers = None
    job = worker.send_task("leaves_a_question")
    worker.until(lambda: job.asked)
    worker.interrupt(job, "cancelled")
    assert worker.outcome(job).kind == "cancelled"
    worker.until(lambda: worker.place.full)
    worker.answer(1, {"state": "lost"})
    assert worker.death()["code"] == 0


def test_a_cancelled_node_sees_its_event(worker: executors.Worker) -> None:
    job = worker.send_node("cancelled")
    worker.interrupt(job, "cancelled")
    assert worker.outcome(job).kind == "cancelled"


def test_a_node_reports_its_status(worker: executors.Worker) -> None:
    job = worker.send_node("reports")
    worker.outcome(job)
    assert job.reports == ["0.5", '{"phase": "two"}']


def test_a_model_that_nobody_can_load_fails_the_node(worker: executors.Worker) -> None:
    assert "no model cache" in worker.node("modelled", required_model="m").error


def test_the_peak_memory_is_that_of_each_job_alone(worker: executors.Worker) -> None:
    large = worker.node("takes_memory", {"mb": 60}).vm_rss_mb_peak
    small = worker.node("sums", {"a": 1}).vm_rss_mb_peak
    assert large is not None and small is not None
    assert large > small + 50


def test_the_peak_memory_of_a_killed_job_is_its_own(worker: executors.Worker) -> None:
    large = worker.node("takes_memory", {"mb": 120})
    worker.send_task("takes_memory", {"mb": 20, "dies": True})
    died = worker.death()
    assert died["signal"] == 9
    # Relative to each other, since a forked process starts with the pages of this one.
    assert died["max_rss_mb"] < (large.vm_rss_mb_peak or 0) - 60
