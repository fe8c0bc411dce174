"""Handlers that break their process, and signals to worker, launcher and executor."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from queue_workflows import db, history, jobs
from tests.support import constants, slot_app
from tests.support.commands import Command, Commands
from tests.support.wait import until
from tests.support.worker_views import alive, begun, row, state, status, stopped

pytestmark = pytest.mark.usefixtures("slot_tasks")

APP = "tests.support.slot_app:setup"
SCRIPT = "queue-claim-worker"
Row = dict[str, Any]


def worker(cli: Commands, slots: int = 2, *more: str) -> Command:
    options = ("--queue", slot_app.QUEUE, "--slots", str(slots), "--app", APP)
    return cli.start(SCRIPT, *options, *more)


def enqueued(tmp_path: Path, task: str, **more: Any) -> tuple[str, Path]:
    """A job with a folder of its own."""
    folder = tmp_path / task
    folder.mkdir()
    args = {"folder": str(folder)} | more
    return jobs.enqueue(task_name=task, queue=slot_app.QUEUE, args=args), folder


def lease_end(job_id: str) -> float:
    """When the lease of a running job ends, in seconds."""
    found = row(job_id)["lease_expires_at"]
    assert found is not None
    return found.timestamp()


def attempts(job_id: str) -> list[Row]:
    found = history.get_job(job_id)
    assert found is not None
    return found["attempts"]


def deaths(job_id: str) -> list[Row]:
    """The `death` events of a job, oldest first."""
    with db.connect() as conn:
        return conn.execute(
            "SELECT error, detail FROM ingest_job_events"
            " WHERE job_id = %s AND event_type = 'death' ORDER BY id",
            [job_id],
        ).fetchall()


DEATHS = {
    "segfaults": ("killed by SIGSEGV", {"signal": signal.SIGSEGV, "exit_code": None}),
    "exits_at_once": ("ended with exit code 3", {"signal": None, "exit_code": 3}),
    "kills_itself": ("killed by SIGKILL", {"signal": signal.SIGKILL, "exit_code": None}),
    "closes_all": ("ended with exit code 70", {"exit_code": 70}),
    "leaves_child": ("killed by SIGKILL", {"signal": signal.SIGKILL}),
}
"""Tasks that end their process, and the death record of each."""


@pytest.mark.parametrize("task", DEATHS)
def test_a_handler_that_ends_its_process_is_charged_alone_with_the_cause(
    cli: Commands, tmp_path: Path, task: str
) -> None:
    words, detail = DEATHS[task]
    neighbour, folder = enqueued(tmp_path, "waits")
    cli.env |= constants.env({"claim.recovery.MAX_CRASHES": 1})
    running = worker(cli, 2)
    until(lambda: begun(folder))
    job_id, broken = enqueued(tmp_path, task)
    until(lambda: status(job_id, "failed"))
    found = row(job_id)
    assert found["crash_count"] == 1
    assert found["error"].startswith("poison: ")
    assert words in found["error"]
    (death,) = deaths(job_id)
    assert words in death["error"]
    assert death["detail"].items() >= detail.items()
    if task == "segfaults":
        assert death["detail"]["last_lines"] == ["last words"]
        until(lambda: attempts(job_id)[0]["log"] is not None)
        assert "last words" in attempts(job_id)[0]["log"]["text"]
    if task == "leaves_child":
        child = int((broken / "child").read_text())
        until(lambda: not alive(child))
    assert status(neighbour, "running")
    assert slot_app.starts_of(folder)
    slot_app.let_go(folder)
    until(lambda: status(neighbour, "completed"))
    assert (row(neighbour)["claim_no"], row(neighbour)["crash_count"]) == (1, 0)
    stopped(running)


@pytest.mark.parametrize(
    ("task", "error"),
    [
        ("exits", "the handler called sys.exit('enough')"),
        ("interrupts", "KeyboardInterrupt"),
    ],
)
def test_a_handler_that_raises_an_exit_fails_and_its_executor_goes_on(
    cli: Commands, tmp_path: Path, task: str, error: str
) -> None:
    job_id, folder = enqueued(tmp_path, task)
    running = worker(cli, 1)
    until(lambda: status(job_id, "failed"))
    assert row(job_id)["error"] == error
    after = jobs.enqueue(task_name="quick", queue=slot_app.QUEUE, args={"number": 1})
    until(lambda: status(after, "completed"))
    assert row(after)["result"]["pid"] == slot_app.starts_of(folder)[0]
    stopped(running)


def test_a_handler_that_holds_the_gil_longer_than_its_lease_is_renewed(
    cli: Commands, tmp_path: Path
) -> None:
    job_id, folder = enqueued(tmp_path, "holds_gil", seconds=7)
    neighbour, other = enqueued(tmp_path, "waits")
    running = worker(cli, 2, "--lease-seconds", "3")
    until(lambda: begun(folder) and begun(other))
    until(lambda: status(job_id, "completed"))
    assert (row(job_id)["claim_no"], row(job_id)["crash_count"]) == (1, 0)
    slot_app.let_go(other)
    until(lambda: status(neighbour, "completed"))
    assert row(neighbour)["claim_no"] == 1
    stopped(running)


def test_a_handler_that_replaces_json_breaks_neither_its_own_nor_the_next_result(
    cli: Commands, tmp_path: Path
) -> None:
    job_id, folder = enqueued(tmp_path, "breaks_json")
    running = worker(cli, 1)
    until(lambda: status(job_id, "completed"))
    after = jobs.enqueue(task_name="quick", queue=slot_app.QUEUE, args={"number": 7})
    until(lambda: status(after, "completed"))
    assert row(after)["result"] == {"number": 7, "pid": slot_app.starts_of(folder)[0]}
    stopped(running)


def test_a_handler_that_prints_a_hundred_megabytes_disturbs_nobody(
    cli: Commands, tmp_path: Path
) -> None:
    job_id, _ = enqueued(tmp_path, "floods", megabytes=100)
    neighbour = jobs.enqueue(task_name="quick", queue=slot_app.QUEUE, args={"number": 1})
    running = worker(cli, 2)
    until(lambda: status(job_id, "completed") and status(neighbour, "completed"))
    stopped(running)
    log = attempts(job_id)[0]["log"]
    assert log["cut_bytes"] > 99 * slot_app.CHUNK
    assert len(log["text"]) < 2 * slot_app.CHUNK


def test_output_of_a_process_that_outlives_its_executor_does_not_end_the_worker(
    cli: Commands, tmp_path: Path
) -> None:
    job_id, folder = enqueued(tmp_path, "leaves_printer")
    running = worker(cli, 1)
    left = folder / "left"
    until(lambda: left.exists() and left.read_text().endswith(" "))
    launcher, (executor,) = int(left.read_text()), slot_app.starts_of(folder)
    running.send(signal.SIGSTOP)  # so that it finds the death and then the output in one turn
    os.kill(executor, signal.SIGKILL)
    until(lambda: state(executor) == "X")
    until(lambda: state(launcher) == "S")  # it has told the worker
    (folder / "say").touch()
    until((folder / "said").exists)
    running.send(signal.SIGCONT)
    until(lambda: status(job_id, "completed"))
    assert (row(job_id)["claim_no"], row(job_id)["crash_count"]) == (2, 1)
    stopped(running)


def test_a_reader_of_its_log_that_sleeps_delays_no_job(cli: Commands) -> None:
    reader, writer = os.pipe()
    try:
        options = ("--queue", slot_app.QUEUE, "--slots", "1", "--app", APP)
        running = cli.start(SCRIPT, *options, terminal=writer)
        args = {"lines": 300}
        ids = [jobs.enqueue(task_name="logs_much", queue=slot_app.QUEUE, args=args) for _ in "12"]
        until(lambda: all(status(each, "completed") for each in ids))
        stopped(running)
    finally:
        os.close(reader)
        os.close(writer)


def test_a_row_that_no_message_can_carry_fails_and_its_worker_goes_on(cli: Commands) -> None:
    cli.env |= constants.env({"run.wire.MAX_BYTES": 100_000})
    args = {"text": "x" * 200_000}
    large = jobs.enqueue(task_name="answers", queue=slot_app.QUEUE, args=args, max_attempts=3)
    running = worker(cli, 1)
    until(lambda: status(large, "failed"))
    assert "bytes as JSON, more than 100000" in row(large)["error"]
    after = jobs.enqueue(task_name="quick", queue=slot_app.QUEUE, args={"number": 1})
    until(lambda: status(after, "completed"))
    stopped(running)


def test_a_stopped_executor_keeps_its_claim_and_goes_on(cli: Commands, tmp_path: Path) -> None:
    job_id, folder = enqueued(tmp_path, "waits")
    running = worker(cli, 1, "--lease-seconds", "2")
    until(lambda: begun(folder))
    (pid,) = slot_app.starts_of(folder)
    first = lease_end(job_id)
    os.kill(pid, signal.SIGSTOP)
    until(lambda: lease_end(job_id) - first > 4)
    os.kill(pid, signal.SIGCONT)
    slot_app.let_go(folder)
    until(lambda: status(job_id, "completed"))
    assert row(job_id)["claim_no"] == 1
    stopped(running)


@pytest.mark.parametrize("launcher_too", [False, True])
def test_a_stopped_workers_handlers_end_before_their_lease_does(
    cli: Commands, tmp_path: Path, launcher_too: bool
) -> None:
    job_id, folder = enqueued(tmp_path, "ticks_once")
    running = worker(cli, 1, "--lease-seconds", "4")
    until(lambda: begun(folder))
    (pid,) = slot_app.starts_of(folder)
    launcher = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    if launcher_too:
        os.kill(launcher, signal.SIGSTOP)
    running.send(signal.SIGSTOP)
    until(lambda: not alive(pid))
    assert Path(folder, "tick").stat().st_mtime < lease_end(job_id)
    running.send(signal.SIGCONT)
    if launcher_too:
        assert running.wait() == 1, running.err
        again = worker(cli, 1)
        until(lambda: status(job_id, "completed"))
        stopped(again)
    else:
        until(lambda: status(job_id, "completed"))
        stopped(running)
    assert row(job_id)["crash_count"] == 0


def test_with_its_launcher_a_worker_ends_and_its_jobs_are_charged(
    cli: Commands, tmp_path: Path
) -> None:
    job_id, folder = enqueued(tmp_path, "waits_once")
    running = worker(cli, 2)
    until(lambda: begun(folder))
    (pid,) = slot_app.starts_of(folder)
    launcher = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert launcher != running.process.pid
    os.kill(launcher, signal.SIGKILL)
    assert running.wait() == 1
    assert "launcher" in running.err
    assert not alive(pid)
    found = row(job_id)
    assert (found["status"], found["crash_count"], found["attempts"]) == ("queued", 1, 0)


def test_a_worker_whose_app_loads_for_ever_can_be_stopped(cli: Commands, tmp_path: Path) -> None:
    pids = tmp_path / "pid"
    loads = f"import os, time, pathlib; pathlib.Path({str(pids)!r}).write_text(f'{{os.getpid()}} ')"
    (tmp_path / "endless_app.py").write_text(f"{loads}\nwhile True: time.sleep(1)\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    options = ("--queue", slot_app.QUEUE, "--app", "endless_app")
    running = cli.start(SCRIPT, *options, PYTHONPATH=path)
    until(lambda: pids.exists() and pids.read_text().endswith(" "))
    running.send(signal.SIGTERM)
    running.wait()
    until(lambda: not alive(int(pids.read_text())))


def test_executors_die_with_their_worker(cli: Commands, tmp_path: Path) -> None:
    job_id, folder = enqueued(tmp_path, "holds_gil", seconds=50)
    running = worker(cli, 2)
    until(lambda: begun(folder))
    (pid,) = slot_app.starts_of(folder)
    running.send(signal.SIGKILL)
    until(lambda: not alive(pid))
    assert status(job_id, "running")


def test_a_supervised_worker_that_is_killed_charges_what_it_holds(
    cli: Commands, tmp_path: Path
) -> None:
    job_id, folder = enqueued(tmp_path, "waits_once")
    parent = worker(cli, 2, "--supervise")
    until(lambda: begun(folder))
    (pid,) = slot_app.starts_of(folder)
    launcher = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    own = int(Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[1])
    assert own != parent.process.pid
    os.kill(own, signal.SIGKILL)
    until(lambda: status(job_id, "completed"))
    assert (row(job_id)["claim_no"], row(job_id)["crash_count"]) == (2, 1)
    stopped(parent)
