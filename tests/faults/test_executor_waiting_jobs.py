"""Short jobs wait in an executor: each has its own output, and only what ran is charged."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from queue_workflows.run import executors as run_executors
from tests.support import executors
from tests.support.wait import until

UNREAD = "its executor ended before it read this job"


@pytest.fixture(autouse=True)
def queues(worker: executors.Worker) -> None:
    """Let each job wait behind those that the executor has."""
    worker.executors.queues = True


def send_blocked(worker: executors.Worker) -> executors.Job:
    """Send a job that ends on a cancel, so that others wait behind it."""
    job = worker.send_task("until_cancelled")
    worker.until(lambda: len(job.reports) == 2)
    return job


def test_each_of_many_jobs_has_its_own_output(worker: executors.Worker) -> None:
    jobs: list[executors.Job] = []
    for number in range(60):
        worker.until(lambda: worker.executors.room)
        name = "prints" if number % 3 else "add"
        jobs.append(worker.send_task(name, {"n": number, "a": 1, "b": 1}))
    for number, job in enumerate(jobs):
        assert worker.outcome(job).kind == "completed"
        found = re.findall(rb"on std(?:out|err) (\d+)\n", job.printed)
        assert found == ([b"%d" % number] * 2 if number % 3 else [])
        assert job.printed.count(b"from a child\n") == bool(number % 3)


def test_a_record_comes_after_what_its_job_has_printed_before_it(
    worker: executors.Worker, tmp_path: Path
) -> None:
    jobs = [
        worker.send_task("prints_and_logs", {"n": number, "folder": str(tmp_path)})
        for number in range(3)
    ]
    until((tmp_path / "0").exists)  # the worker has read neither of both yet
    for number, job in enumerate(jobs):
        worker.outcome(job)
        assert job.printed == b"prints %d\nlogs %d\n" % (number, number)


def test_only_so_many_wait(worker: executors.Worker) -> None:
    jobs = [send_blocked(worker)]
    for _ in range(run_executors.DEPTH - 1):
        assert worker.executors.room == 1
        jobs.append(worker.send_task("prints", {"n": 1}))
    assert worker.executors.room == 0
    worker.interrupt(jobs[3], "shutdown")
    assert worker.outcome(jobs[3]).error == "shutdown"
    assert worker.executors.room == 1
    worker.interrupt(jobs[0], "cancelled")
    kinds = [worker.outcome(job).kind for job in jobs]
    assert kinds == ["cancelled", *["completed"] * 2, "cancelled", *["completed"] * 4]
    assert not jobs[3].printed


def test_a_request_without_a_reason_is_not_the_end_of_a_handler_that_runs(
    worker: executors.Worker,
) -> None:
    job = send_blocked(worker)
    worker.interrupt(job, "")
    worker.interrupt(job, "cancelled")
    outcome = worker.outcome(job)
    assert (outcome.kind, outcome.seconds > 0) == ("cancelled", True)


def deaths(worker: executors.Worker, jobs: list[executors.Job]) -> list[str]:
    """Wait for the end of the executor; return why it was killed, as each of its jobs learns."""
    worker.until(lambda: jobs[-1].death)
    found: list[Any] = [job.death for job in jobs]
    return [death.killed_for for death in found]


def test_only_the_job_that_ran_is_charged(worker: executors.Worker) -> None:
    """The executor had read all of them."""
    worker.task("add", {"a": 1, "b": 1})
    os.kill(worker.pid, signal.SIGSTOP)
    names = ("add", "segfaults", "prints", "add")
    jobs = [worker.send_task(name, {"a": 1, "b": 1, "n": 1}) for name in names]
    os.kill(worker.pid, signal.SIGCONT)
    assert deaths(worker, jobs[1:]) == ["", UNREAD, UNREAD]
    assert jobs[0].outcome is not None
    assert jobs[1].death is not None
    assert jobs[1].death.evidence.startswith("killed by SIGSEGV")
    assert jobs[1].printed == b"about to fall\n"


def test_a_waiting_job_that_goes_back_costs_no_output_of_the_one_that_runs(
    worker: executors.Worker,
) -> None:
    job = worker.send_task("prints_and_waits")
    worker.until(lambda: b"it waits" in job.printed)
    waiting = worker.send_task("add", {"a": 1, "b": 1})
    worker.interrupt(waiting, "shutdown")
    assert worker.outcome(waiting).error == "shutdown"
    os.kill(worker.pid, signal.SIGKILL)
    worker.until(lambda: job.death)
    assert job.printed == b"it waits\n"


def test_a_killed_executor_charges_none_that_waited(worker: executors.Worker) -> None:
    jobs = [send_blocked(worker), *(worker.send_task("add", {"a": 1, "b": 1}) for _ in range(3))]
    os.kill(worker.pid, signal.SIGKILL)
    assert deaths(worker, jobs) == ["", UNREAD, UNREAD, UNREAD]
