"""A worker with `--async`: many async jobs or nodes at once, on one event loop in one executor."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from queue_workflows import db, dispatcher, history, jobs, node_queue, run_store
from tests.support import slot_app
from tests.support.commands import Command, Commands
from tests.support.wait import patience, until
from tests.support.worker_views import (
    begun,
    charges,
    enqueued,
    node,
    node_row,
    row,
    status,
    stopped,
)

pytestmark = pytest.mark.usefixtures("slot_tasks")

APP = "tests.support.slot_app:setup"
MANY = 100


def worker(
    cli: Commands, slots: int, *more: str, queue: str = slot_app.QUEUE, app: str = APP
) -> Command:
    options = ("--queue", queue, "--slots", str(slots), "--async", "--app", app)
    return cli.start("queue-claim-worker", *options, *more)


def in_folder(tmp_path: Path, task: str, name: str = "", **more: Any) -> tuple[str, Path]:
    """A job with a folder of its own; `timeout_s` is for the job, the rest are args."""
    folder = tmp_path / (name or task)
    folder.mkdir()
    args = {"folder": str(folder)} | {key: more[key] for key in more if key != "timeout_s"}
    options = {key: more[key] for key in more if key == "timeout_s"}
    found = jobs.enqueue(task_name=task, queue=slot_app.QUEUE, args=args, **options)
    return found, folder


def reasons(job_id: str) -> list[str]:
    """Why a job was queued again."""
    with db.connect() as conn:
        found = conn.execute(
            "SELECT detail ->> 'reason' AS reason FROM ingest_job_events"
            " WHERE job_id = %s AND event_type = 'requeued' ORDER BY id",
            [job_id],
        ).fetchall()
    return [each["reason"] for each in found]


# --- together ----------------------------------------------------------------------------------


def test_a_hundred_async_nodes_run_at_once_in_one_process(cli: Commands) -> None:
    ids = [node("node_meets", number=number, everyone=MANY) for number in range(MANY)]
    running = worker(cli, MANY, queue="cpu")
    until(lambda: all(node_row(each)["status"] == "completed" for each in ids))
    stopped(running)
    found = [node_row(each) for each in ids]
    assert [each["context_delta"]["number"] for each in found] == list(range(MANY))
    assert len({each["context_delta"]["pid"] for each in found}) == 1
    assert all(each["context_delta"]["out"] for each in found)
    assert {each["claim_no"] for each in found} == {1}


@pytest.mark.parametrize("app_of", ["setup", "setup_logs"])
def test_the_output_of_each_of_many_jobs_is_in_its_own_log(cli: Commands, app_of: str) -> None:
    ids = [enqueued("meets", everyone=20, number=number) for number in range(20)]
    running = worker(cli, 20, app=f"tests.support.slot_app:{app_of}")
    until(lambda: all(status(each, "completed") for each in ids))
    stopped(running)
    for number, job_id in enumerate(ids):
        assert row(job_id)["result"]["id"] == job_id
        found = history.get_job(job_id)
        assert found is not None
        lines = found["attempts"][0]["log"]["text"].splitlines()
        assert sorted(lines) == [f"logs {number}", f"prints {number} of {number}"]
    assert all(f" of {number}\n" in running.out for number in range(20))


def test_runs_go_on_from_async_node_to_async_node(cli: Commands, tmp_path: Path) -> None:
    run_id = run_store.insert_run(workflow_name="async", out_dir=str(tmp_path))["id"]
    dispatcher.start_run(run_id)
    running = worker(cli, 4, queue="cpu", app="tests.support.slot_app:setup_hooks")
    until(lambda: (run_store.get_run(run_id) or {}).get("status") == "completed")
    until(lambda: (tmp_path / "announced").read_text().count("\n") == 2)
    stopped(running)
    found = {
        each["node_id"]: each["context_delta"] for each in node_queue.list_jobs_for_run(run_id)
    }
    assert found == {
        "s/a": {"sum": 2, "seen": ["s/a", "async"]},
        "s/b": {"sum": 3, "seen": ["s/b", "async"]},
    }


def test_a_handler_that_is_not_async_runs_beside_them_one_at_a_time(
    cli: Commands, tmp_path: Path
) -> None:
    slow, first = in_folder(tmp_path, "waits")
    waits, second = in_folder(tmp_path, "says")
    running = worker(cli, 3)
    until(lambda: begun(first))
    quick = [enqueued("meets", everyone=1, number=n) for n in range(3)]
    until(lambda: all(status(each, "completed") for each in quick))
    assert not begun(second)
    slot_app.let_go(first)
    until(lambda: status(slow, "completed") and begun(second))
    until(lambda: row(waits)["progress"] == 0.5)
    slot_app.let_go(second)
    until(lambda: status(waits, "completed"))
    assert {charges(each) for each in (slow, waits)} == {(1, 0, 0)}
    stopped(running)


def test_a_cancelled_job_that_waits_for_its_turn_ends_at_once(
    cli: Commands, tmp_path: Path
) -> None:
    slow, first = in_folder(tmp_path, "waits")
    waits, second = in_folder(tmp_path, "says")
    running = worker(cli, 3)
    until(lambda: begun(first) and status(waits, "running"))
    jobs.cancel(waits)
    until(lambda: status(waits, "cancelled"))
    assert not begun(second)
    slot_app.let_go(first)
    until(lambda: status(slow, "completed"))
    assert charges(slow) == (1, 0, 0)
    stopped(running)


def test_a_generators_progress_is_stored_while_it_runs(cli: Commands, tmp_path: Path) -> None:
    job_id = node("node_streams", folder=str(tmp_path))
    running = worker(cli, 2, queue="cpu")
    until(lambda: node_row(job_id)["progress"] == 0.25)
    slot_app.let_go(tmp_path)
    until(lambda: node_row(job_id)["status"] == "completed")
    assert node_row(job_id)["context_delta"] == {"pid": slot_app.starts_of(tmp_path)[0]}
    stopped(running)


def test_a_failure_is_that_of_its_job_alone(cli: Commands, tmp_path: Path) -> None:
    job_id, folder = in_folder(tmp_path, "async_waits")
    failed, _ = in_folder(tmp_path, "fails")
    running = worker(cli, 4)
    until(lambda: begun(folder) and status(failed, "failed"))
    assert row(failed)["error"] == "ValueError: as it was asked to"
    slot_app.let_go(folder)
    until(lambda: status(job_id, "completed"))
    stopped(running)


def test_a_handler_that_blocks_the_event_loop_is_named(cli: Commands, tmp_path: Path) -> None:
    job_id, folder = in_folder(tmp_path, "async_blocks")
    running = worker(cli, 2)
    until(lambda: "has blocked the event loop" in running.err)
    assert f"task 'async_blocks' (job {job_id})" in running.err
    assert "in _until_go" in running.err
    slot_app.let_go(folder)
    until(lambda: status(job_id, "completed"))
    stopped(running)


# --- one must end ------------------------------------------------------------------------------


def test_a_cancel_ends_one_job_and_its_neighbours_go_on(cli: Commands, tmp_path: Path) -> None:
    cancelled, first = in_folder(tmp_path, "async_waits", "first")
    other, second = in_folder(tmp_path, "async_waits", "second")
    running = worker(cli, 4)
    until(lambda: begun(first, second))
    jobs.cancel(cancelled)
    until(lambda: status(cancelled, "cancelled"))
    assert (first / "tidied").exists()
    slot_app.let_go(second)
    until(lambda: status(other, "completed"))
    assert charges(other) == (1, 0, 0)
    assert row(other)["result"]["pid"] == slot_app.starts_of(first)[0]
    stopped(running)


def test_a_job_that_is_late_ends_at_its_await_and_its_neighbours_go_on(
    cli: Commands, tmp_path: Path
) -> None:
    other, second = in_folder(tmp_path, "async_waits")
    late, first = in_folder(tmp_path, "async_waits_once", timeout_s=1)
    running = worker(cli, 4)
    until(lambda: status(late, "failed"))
    assert "ran longer than its budget" in row(late)["error"]
    assert charges(late) == (1, 0, 0)
    slot_app.let_go(second)
    until(lambda: status(other, "completed"))
    assert charges(other) == (1, 0, 0)
    assert slot_app.starts_of(first) == slot_app.starts_of(second)
    stopped(running)


@pytest.mark.parametrize("task", ["async_deaf", "async_blocks"])
def test_a_late_job_that_does_not_react_is_killed_and_alone_charged(
    cli: Commands, tmp_path: Path, task: str
) -> None:
    other, second = in_folder(tmp_path, "async_waits_once")
    running = worker(cli, 4)
    until(lambda: begun(second))
    late, first = in_folder(tmp_path, task, timeout_s=1)
    until(lambda: status(late, "failed"))
    assert "ran longer than its budget" in row(late)["error"]
    assert charges(late) == (1, 0, 0)
    until(lambda: status(other, "completed"))
    assert charges(other) == (2, 0, 0)
    assert reasons(other) == [f"its executor was stopped with job {late}"]
    (pid,) = slot_app.starts_of(first)
    assert not Path(f"/proc/{pid}").exists()
    assert row(other)["result"]["pid"] != pid
    stopped(running)


def test_a_cancelled_job_that_does_not_react_is_killed_after_its_grace(
    cli: Commands, tmp_path: Path
) -> None:
    cli.env["QUEUE_WORKFLOWS_CANCEL_GRACE_S"] = "0.2"
    other, second = in_folder(tmp_path, "async_waits_once")
    deaf, first = in_folder(tmp_path, "async_deaf")
    running = worker(cli, 4)
    until(lambda: begun(first, second))
    jobs.cancel(deaf)
    until(lambda: status(deaf, "cancelled"))
    until(lambda: status(other, "completed"))
    assert charges(other) == (2, 0, 0)
    stopped(running)


def test_a_job_whose_claim_is_lost_ends_and_its_neighbours_go_on(
    cli: Commands, tmp_path: Path
) -> None:
    lost, first = in_folder(tmp_path, "async_waits_once")
    other, second = in_folder(tmp_path, "async_waits")
    running = worker(cli, 2, "--lease-seconds", "6")
    until(lambda: begun(first, second))
    with db.connect() as conn:
        conn.execute(
            "UPDATE ingest_jobs SET claim_no = claim_no + 1, worker_id = 'another' WHERE id = %s",
            [lost],
        )
    until(lambda: "the claim was lost" in running.err)
    following = enqueued("meets", everyone=1, number=1)
    until(lambda: status(following, "completed"))
    slot_app.let_go(second)
    until(lambda: status(other, "completed"))
    assert charges(other) == (1, 0, 0)
    assert row(other)["result"]["pid"] == row(following)["result"]["pid"]
    stopped(running)
    with db.connect() as conn:
        conn.execute("DELETE FROM ingest_jobs WHERE id = %s", [lost])


# --- all end -----------------------------------------------------------------------------------


def test_a_killed_executor_charges_what_ran_and_not_what_waited(
    cli: Commands, tmp_path: Path
) -> None:
    ran = [in_folder(tmp_path, "async_waits_once", f"{number}") for number in range(2)]
    sync, third = in_folder(tmp_path, "waits_once")
    waited, fourth = in_folder(tmp_path, "waits")
    running = worker(cli, 4)
    until(lambda: begun(third, *(folder for _, folder in ran)) and status(waited, "running"))
    slot_app.let_go(fourth)
    os.kill(slot_app.starts_of(third)[0], signal.SIGKILL)
    ids = [sync, *(job_id for job_id, _ in ran)]
    until(lambda: all(status(each, "completed") for each in [*ids, waited]))
    assert [charges(each) for each in ids] == [(2, 0, 1)] * 3
    assert charges(waited)[1:] == (0, 0)
    assert "killed by SIGKILL" in running.err
    assert "it ran 2 other jobs at the same time" in running.err
    stopped(running)


def test_at_sigterm_jobs_that_end_are_recorded_and_others_are_handed_back(
    cli: Commands, tmp_path: Path
) -> None:
    ends, first = in_folder(tmp_path, "async_waits", "ends")
    awaits, second = in_folder(tmp_path, "async_waits", "awaits")
    deaf, third = in_folder(tmp_path, "async_deaf")
    sync, fourth = in_folder(tmp_path, "waits")
    behind, fifth = in_folder(tmp_path, "says")
    running = worker(cli, 8, "--shutdown-timeout", str(patience(10)))
    until(lambda: begun(first, second, third, fourth) and status(behind, "running"))
    running.send(signal.SIGTERM)
    until(lambda: status(behind, "queued"))
    slot_app.let_go(first)
    assert running.wait() == 0, running.err
    assert status(ends, "completed"), running.err
    assert (second / "tidied").exists()
    for job_id in (awaits, deaf, sync, behind):
        assert row(job_id)["status"] == "queued"
        assert charges(job_id) == (1, 0, 0)
    assert not begun(fifth)


def test_an_executor_is_replaced_after_so_many_jobs_while_others_of_it_go_on(
    cli: Commands, tmp_path: Path
) -> None:
    long, folder = in_folder(tmp_path, "async_waits")
    running = worker(cli, 2, "--max-jobs", "3")
    until(lambda: begun(folder))
    ids = [enqueued("meets", everyone=1, number=number) for number in range(6)]
    until(lambda: all(status(each, "completed") for each in ids))
    slot_app.let_go(folder)
    until(lambda: status(long, "completed"))
    pids = [row(each)["result"]["pid"] for each in ids]
    assert [pids.count(each) for each in dict.fromkeys(pids)] == [2, 3, 1]
    assert row(long)["result"]["pid"] == pids[0]
    assert charges(long) == (1, 0, 0)
    stopped(running)


def test_the_class_runs_async_jobs_too(cli: Commands, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from tests.support import slot_app\n"
        "from queue_workflows.claim_worker import ClaimWorker\n"
        "slot_app.setup()\n"
        f"ClaimWorker(queue={slot_app.QUEUE!r}, slots=5, async_jobs=True).run_forever()\n"
    )
    ids = [enqueued("meets", everyone=5, number=number) for number in range(5)]
    started = cli.start("python", str(tmp_path / "own.py"))
    until(lambda: all(status(each, "completed") for each in ids))
    started.send(signal.SIGKILL)
    started.wait()
