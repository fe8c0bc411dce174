"""A worker below a parent ends the executor of a handler that keeps the GIL, and goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from queue_workflows import config, db, jobs, node_queue, run_store, workers
from tests.support import constants, hanging_app, proxy
from tests.support.commands import Command, Commands
from tests.support.wait import patience, until

APP = "tests.support.hanging_app:setup"
WITHIN_S = 5.0
"""How much later than due the handler may be gone."""
BUSY_S = 1.5
"""What a busy machine takes to notice."""
CONFIRM_S = 0.4
FAKE_GPU = """#!/bin/sh
case "$1" in
pmon) printf '# gpu pid type sm mem enc dec command\n# Idx # C/G %% %% %% %% name\n' ;;
--query-gpu=utilization.gpu) echo '0 %' ;;
*) exit 2 ;;
esac
"""
"""It shows no process of the GPU, as in a container, and the GPU as idle."""
IDLE_GPU = {
    # The RAM may be that of a container in which other tests run.
    **constants.env({"worker.guards.STALL_TIMEOUT_S": 1, "worker.guards.STATIC_RAM_MB": 1e6}),
    "QUEUE_WORKFLOWS_STALL_CONFIRM_POLL_S": str(CONFIRM_S / 2),
    "QUEUE_WORKFLOWS_GPU_HEALTH_LOAD_GRACE_S": "3",
}


def node(folder: Path, name: str, queue: str, **inputs: object) -> str:
    """The id of a job whose handler works in that folder."""
    folder.mkdir(exist_ok=True)
    run = run_store.insert_run(workflow_name="w", status="running", context={})
    return node_queue.enqueue_node_job(
        run_id=run["id"],
        node_id="n",
        node_module=name,
        queue=queue,
        inputs={"folder": str(folder), **inputs},
    )


def job(job_id: str) -> dict[str, Any]:
    found = node_queue.get_node_job(job_id) or node_queue.get_ingest_job(job_id)
    assert found is not None
    return found


def is_done(job_id: str, status: str = "completed") -> Callable[[], bool]:
    return lambda: job(job_id)["status"] == status


def has_reported() -> bool:
    """Whether a worker has its row; one whose handler takes the GIL at once writes none."""
    with db.connect() as conn:
        return conn.execute("SELECT FROM workers").fetchone() is not None


def events(job_id: str) -> dict[str, dict[str, Any]]:
    """Of the first claim, by type."""
    with db.connect() as conn:
        rows = conn.execute(
            "SELECT * FROM (SELECT job_id, claim_no, event_type, detail, elapsed_s"
            " FROM workflow_node_events UNION ALL SELECT job_id, claim_no, event_type, detail,"
            " elapsed_s FROM ingest_job_events) e WHERE job_id = %s AND claim_no = 1",
            (job_id,),
        ).fetchall()
    return {row["event_type"]: row for row in rows}


def supervised(cli: Commands, queue: str, **env: str) -> Command:
    return cli.start("queue-claim-worker", "--supervise", "--queue", queue, "--app", APP, **env)


def gone(folder: Path) -> bool:
    """Whether the process has ended in which the handler of that folder has started."""
    return not Path("/proc", (folder / "started").read_text()).exists()


def goes_on(parent: Command) -> bool:
    """Whether the worker below a parent is the one that it has started first."""
    return parent.err.count("started, pid") == 1


def stopped(parent: Command) -> None:
    parent.send(signal.SIGTERM)
    assert parent.wait() == 0, parent.err


@pytest.fixture
def idle_gpu(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine whose GPU does nothing."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(FAKE_GPU)
    tool.chmod(0o755)
    return IDLE_GPU | {"PATH": f"{tool.parent}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("body", "code", "guard", "due_s", "frozen"),
    [
        ("beats_then_sticks", 76, "stall_trip", 1 + CONFIRM_S, False),
        ("sticks", 78, "gpu_health_trip", 3, True),
    ],
)
def test_an_idle_gpu_job_ends_its_executor_alone_and_runs_again(
    cli: Commands,
    tmp_path: Path,
    idle_gpu: dict[str, str],
    wire: proxy.Proxy,
    body: str,
    code: int,
    guard: str,
    due_s: float,
    frozen: bool,
) -> None:
    job_id = node(tmp_path / "job", body, "gpu")
    parent = supervised(cli, "gpu", **idle_gpu, QUEUE_WORKFLOWS_DB_URL=wire.dsn)
    until((tmp_path / "job" / "started").exists, timeout_s=30)
    begun = time.monotonic()
    if frozen:
        wire.freeze()
    until(lambda: gone(tmp_path / "job"), timeout_s=due_s + WITHIN_S + 10)
    assert time.monotonic() - begun <= patience(due_s + WITHIN_S)
    wire.thaw()
    until(is_done(job_id), timeout_s=30)
    ended = job(job_id)
    assert (ended["claim_no"], ended["watchdog_retries"], ended["crash_count"]) == (2, 1, 0)
    seen = events(job_id)
    assert {*seen} - {"stall_suspected"} == {"claimed", "requeued", guard}
    assert seen[guard]["elapsed_s"] >= due_s
    assert seen[guard]["detail"] == {"guard": guard, "exit_code": code}
    assert goes_on(parent), parent.err
    stopped(parent)


@pytest.mark.parametrize("body", ["beats_and_waits", "waits_for_go"])
def test_an_executor_that_is_stopped_is_not_idle(
    cli: Commands, tmp_path: Path, idle_gpu: dict[str, str], body: str
) -> None:
    job_id = node(tmp_path / "job", body, "gpu")
    parent = supervised(cli, "gpu", **idle_gpu)
    until((tmp_path / "job" / "started").exists, timeout_s=30)
    executor = int(until((tmp_path / "job" / "started").read_text))
    os.kill(executor, signal.SIGSTOP)
    time.sleep(1 + CONFIRM_S + WITHIN_S)  # longer than either guard needs for an idle GPU
    os.kill(executor, signal.SIGCONT)
    (tmp_path / "job" / "go").touch()
    until(is_done(job_id), timeout_s=30)
    assert job(job_id)["claim_no"] == 1
    stopped(parent)


@pytest.mark.parametrize("queue", ["work", "gpu"])
def test_only_the_queue_that_is_off_loses_its_handler_not_its_neighbour_that_keeps_the_gil_too(
    cli: Commands, tmp_path: Path, queue: str
) -> None:
    hanging_app.setup()
    lasts_s = 6.0
    kept = node(tmp_path / "kept", "hogs", "cpu", seconds=lasts_s)
    if queue == "gpu":
        off = node(tmp_path / "off", "hogs", "gpu")
    else:
        (tmp_path / "off").mkdir()
        args = {"folder": str(tmp_path / "off")}
        off = jobs.enqueue(task_name="hog", queue="work", args=args)
    gpus = "1" if queue == "gpu" else "0"
    up = cli.start("queue-workflows", "up", "--app", APP, "--cpu", "1", "--gpu", gpus)
    for folder in (tmp_path / "kept", tmp_path / "off"):
        until((folder / "started").exists, timeout_s=30)
    workers.disable(config.host_label(), queue)
    switched = time.monotonic()
    until(is_done(off, "queued"), timeout_s=WITHIN_S + 10)
    assert time.monotonic() - switched <= patience(WITHIN_S)
    ended = job(off)
    assert (ended["watchdog_retries"], ended["crash_count"], ended["priority"]) == (0, 0, 10)
    seen = events(off)
    assert seen["requeued"]["detail"] == {"reason": "turned off"}
    assert {*seen} == {"claimed", "requeued"}
    until(is_done(kept), timeout_s=lasts_s + 10)
    assert job(kept)["claim_no"] == 1
    assert "death" not in events(kept)
    up.send(signal.SIGINT)
    assert up.wait() == 0, up.err


@pytest.mark.parametrize("queue", ["cpu", "gpu"])
def test_a_cancelled_job_ends_after_its_grace(cli: Commands, tmp_path: Path, queue: str) -> None:
    job_id = node(tmp_path / "job", "hogs", queue)
    parent = supervised(cli, queue, QUEUE_WORKFLOWS_CANCEL_GRACE_S="3")
    until((tmp_path / "job" / "started").exists, timeout_s=30)
    asked = time.monotonic()
    jobs.cancel(job_id)
    until(is_done(job_id, "cancelled"), timeout_s=3 + WITHIN_S + 10)
    assert 3 <= time.monotonic() - asked <= patience(3 + WITHIN_S)
    assert job(job_id)["crash_count"] == 0
    assert {*events(job_id)} == {"claimed", "cancelled"}
    assert goes_on(parent), parent.err
    stopped(parent)


@pytest.mark.parametrize("queue", ["work", "gpu"])
@pytest.mark.parametrize("hurried", [False, True])
def test_sigterm_hands_the_job_back_uncounted_at_the_deadline_and_a_second_one_now(
    cli: Commands, tmp_path: Path, hurried: bool, queue: str
) -> None:
    hanging_app.setup()
    timeout_s = 60.0 if hurried else 3.0
    argv = ("queue-claim-worker", "--supervise", "--queue", queue, "--app", APP)
    parent = cli.start(*argv, "--shutdown-timeout", str(timeout_s))
    until(has_reported, timeout_s=30)
    if queue == "gpu":
        job_id = node(tmp_path, "sticks", "gpu")
    else:
        args = {"folder": str(tmp_path)}
        job_id = jobs.enqueue(task_name="stuck_with_gil", queue="work", args=args)
    until((tmp_path / "started").exists, timeout_s=30)
    parent.send(signal.SIGTERM)
    asked = time.monotonic()
    if hurried:
        parent.send(signal.SIGINT)
    assert parent.wait(WITHIN_S + 10) == 0, parent.err
    took_s = time.monotonic() - asked
    assert took_s <= patience((0.0 if hurried else timeout_s) + 1 + BUSY_S)
    assert hurried or took_s >= timeout_s, "it had its time"
    ended = job(job_id)
    assert (ended["status"], ended["attempts"], ended["crash_count"]) == ("queued", 0, 0)
    seen = events(job_id)
    assert seen["requeued"]["detail"] == {"reason": "shutdown"}
    assert {*seen} == {"claimed", "requeued"}
    with db.connect() as conn:
        assert conn.execute("SELECT state FROM workers").fetchall() == [{"state": "stopped"}]


def batch_around_a_hog(folder: Path) -> list[str]:
    """Four jobs of which the second keeps the GIL."""
    hanging_app.setup()
    args: list[dict[str, Any]] = [{}, {"folder": str(folder)}, {}, {}]
    return jobs.enqueue_many(task_name="hogs_once", queue="work", args=args)


def test_when_an_executor_dies_only_the_batch_job_whose_handler_ran_counts_a_crash(
    cli: Commands, tmp_path: Path
) -> None:
    ids = batch_around_a_hog(tmp_path)
    parent = cli.start(
        "queue-claim-worker", "--supervise", "--queue", "work", "--batch", "4", "--app", APP
    )
    started = tmp_path / "started"
    until(lambda: started.exists() and started.read_text(), timeout_s=30)
    os.kill(int(started.read_text()), signal.SIGKILL)
    until(lambda: all(job(each)["status"] == "completed" for each in ids), timeout_s=30)
    assert [job(each)["crash_count"] for each in ids] == [0, 1, 0, 0]
    assert {*events(ids[1])} == {"claimed", "reclaimed", "death"}
    assert goes_on(parent), parent.err
    stopped(parent)


def test_a_cancel_of_the_running_job_of_a_batch_ends_its_executor(
    cli: Commands, tmp_path: Path
) -> None:
    ids = batch_around_a_hog(tmp_path)
    parent = cli.start(
        *("queue-claim-worker", "--supervise", "--queue", "work", "--batch", "4", "--app", APP),
        QUEUE_WORKFLOWS_CANCEL_GRACE_S="1",
    )
    until((tmp_path / "started").exists, timeout_s=30)
    jobs.cancel(ids[2])
    jobs.cancel(ids[1])
    asked = time.monotonic()
    until(is_done(ids[1], "cancelled"), timeout_s=1 + WITHIN_S + 10)
    assert 1 <= time.monotonic() - asked <= patience(1 + WITHIN_S)
    until(lambda: all(is_done(each)() for each in (ids[0], ids[3])), timeout_s=30)
    assert is_done(ids[2], "cancelled")()
    assert [job(each)["crash_count"] for each in ids] == [0] * 4
    assert goes_on(parent), parent.err
    stopped(parent)


def test_short_jobs_that_wait_in_an_executor_behind_one_that_dies_go_back(
    cli: Commands, tmp_path: Path
) -> None:
    """After so many short ones the worker sends jobs ahead, those behind the hog too."""
    hanging_app.setup()
    args: list[dict[str, Any]] = [*[{}] * 40, {"folder": str(tmp_path)}, *[{}] * 20]
    ids = jobs.enqueue_many(task_name="hogs_once", queue="work", args=args)
    parent = cli.start("queue-claim-worker", "--supervise", "--queue", "work", "--app", APP)
    started = tmp_path / "started"
    until(lambda: started.exists() and started.read_text(), timeout_s=30)
    os.kill(int(started.read_text()), signal.SIGKILL)
    until(lambda: all(job(each)["status"] == "completed" for each in ids), timeout_s=30)
    assert [job(each)["crash_count"] for each in ids] == [0] * 40 + [1] + [0] * 20
    assert goes_on(parent), parent.err
    stopped(parent)
