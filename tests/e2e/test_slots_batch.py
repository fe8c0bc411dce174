"""A worker with `--slots` and `--batch`: executors get several short jobs at once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from queue_workflows import history, jobs
from tests.support import slot_app
from tests.support.commands import Command, Commands
from tests.support.wait import until
from tests.support.worker_views import begun, enqueued, row, stopped

pytestmark = pytest.mark.usefixtures("slot_tasks")

SHORT = 40
BATCH = 20


def worker(cli: Commands, slots: int, *more: str, batch: int = BATCH) -> Command:
    return cli.start(
        "queue-claim-worker", "--queue", slot_app.QUEUE, "--slots", str(slots),
        "--batch", str(batch), "--app", "tests.support.slot_app:setup", *more,
    )  # fmt: skip


def short(count: int) -> list[str]:
    return [enqueued("quick", number=number) for number in range(count)]


def in_folder(tmp_path: Path, task: str, timeout_s: float | None = None) -> tuple[str, Path]:
    """A job with a folder of its own."""
    folder = tmp_path / task
    folder.mkdir()
    args = {"folder": str(folder)}
    return jobs.enqueue(
        task_name=task, queue=slot_app.QUEUE, args=args, timeout_s=timeout_s
    ), folder


def charges(job_id: str) -> tuple[int, int]:
    """The failed attempts and crashes of a job."""
    found = row(job_id)
    return found["attempts"], found["crash_count"]


def status(wanted: str, *ids: str) -> bool:
    return all(row(each)["status"] == wanted for each in ids)


def claimed_behind(folder: Path, ids: list[str]) -> bool:
    """Whether a handler runs, and jobs behind it are claimed."""
    return begun(folder) and any(row(each)["claim_no"] for each in ids)


def test_what_each_job_prints_is_in_its_own_log(cli: Commands) -> None:
    first = short(SHORT)
    ids = [enqueued("meets", everyone=1, number=number) for number in range(SHORT)]
    running = worker(cli, 1)
    until(lambda: status("completed", *first, *ids))
    stopped(running)
    for number, job_id in enumerate(ids):
        found = history.get_job(job_id)
        assert found is not None
        lines = found["attempts"][0]["log"]["text"].splitlines()
        assert lines == [f"prints {number} of {number}", f"logs {number}"]


def test_what_waits_behind_a_long_handler_is_run_by_the_other_executor(
    cli: Commands, tmp_path: Path
) -> None:
    first = short(SHORT)
    long, folder = in_folder(tmp_path, "waits")
    behind = short(30)
    running = worker(cli, 2)
    until(lambda: begun(folder))
    until(lambda: status("completed", *first, *behind))
    assert status("running", long)
    assert {charges(each) for each in behind} == {(0, 0)}
    slot_app.let_go(folder)
    until(lambda: status("completed", long))
    assert row(long)["claim_no"] == 1
    stopped(running)


def test_a_killed_executor_charges_the_job_that_ran_alone(cli: Commands, tmp_path: Path) -> None:
    first = short(SHORT)
    dies, folder = in_folder(tmp_path, "waits_once")
    behind = short(10)
    running = worker(cli, 1)
    until(lambda: claimed_behind(folder, behind))
    os.kill(slot_app.starts_of(folder)[0], signal.SIGKILL)
    until(lambda: status("completed", *first, dies, *behind))
    assert (row(dies)["claim_no"], *charges(dies)) == (2, 0, 1)
    assert {charges(each) for each in behind} == {(0, 0)}
    stopped(running)
