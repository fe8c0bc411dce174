"""Workers as real processes while memory is full: they wait, say so, and go on."""

from __future__ import annotations

import json
import os
import shlex
import signal
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from queue_workflows import history, jobs, workers
from tests.support import commands, memory_reports, slot_app
from tests.support.commands import Command, Commands, script
from tests.support.memory_cgroup import MemoryCgroup, memory_cgroup
from tests.support.wait import until
from tests.support.worker_views import ended, row, stopped

APP = "tests.support.slot_app:setup"
SCRIPT = "queue-claim-worker"
POOL = ("--workers", json.dumps([{"queue": slot_app.QUEUE, "concurrency": 2}]))
ONE = ("--queue", slot_app.QUEUE)
LIMIT_MB, FULL_PCT = 600, 93.0
Row = dict[str, Any]


@pytest.fixture
def cli(db: ModuleType, dsn: str) -> Generator[Commands]:
    """Starts workers on the test database; none outlives the test."""
    quick = {"MEMORY_CHECK_INTERVAL": "0.1", "QUEUE_WORKFLOWS_DL_HEARTBEAT_SEC": "0.1"}
    with commands.commands(
        QUEUE_WORKFLOWS_DB_URL=dsn, QUEUE_WORKFLOWS_CLAIM_POLL_S="0.05", **quick
    ) as made:
        yield made


@pytest.fixture
def conn(conn: Any) -> Any:
    slot_app.setup()
    return conn


def enqueued(task: str, folder: Path | None = None, **args: Any) -> str:
    given = args if folder is None else {"folder": str(folder)} | args
    return jobs.enqueue(task_name=task, queue=slot_app.QUEUE, args=given)


def listed() -> Row:
    """The worker that has reported from another process than this test."""
    found = [each for each in workers.list() if each["worker_id"] != "other"]
    return found[0] if found else {"state": "absent", "throttle": None, "last_seen": None}


def waits_for_memory(state: str) -> bool:
    found = listed()
    return found["state"] == state and (found["throttle"] or "").startswith("RAM at ")


def reports(times: int) -> None:
    """Wait for so many reports of the worker."""
    for _ in range(times):
        before = listed()["last_seen"]
        until(lambda before=before: listed()["last_seen"] != before)


@pytest.mark.parametrize(
    "options",
    [
        ONE,
        (*ONE, "--batch", "10"),
        (*ONE, "--slots", "2"),
        (*ONE, "--slots", "1", "--burst"),
        (*ONE, "--slots", "2", "--async"),
        POOL,
    ],
    ids=["plain", "batch", "slots", "burst", "async", "pool"],
)
def test_no_worker_claims_while_memory_is_full_and_jobs_run_that_fill_it(
    cli: Commands, conn: Any, tmp_path: Path, options: tuple[str, ...]
) -> None:
    cli.env |= {"MEMORY_THROTTLE_THRESHOLD": "0.001", "MEMORY_RESUME_THRESHOLD": "0.001"}
    first = enqueued("waits", tmp_path)
    running = cli.start(SCRIPT, *options, "--app", APP)
    until(lambda: waits_for_memory("busy"))
    late = enqueued("quick", number=1)
    memory_reports.other_worker(conn)
    slot_app.let_go(tmp_path)
    until(lambda: ended(first))
    until(lambda: waits_for_memory("throttled"))
    reports(3)
    assert row(late)["status"] == "queued"
    why = jobs.explain(late)
    assert why is not None
    (found,) = why["workers"]
    assert found["clause"] == "throttled"
    assert found["detail"].startswith("it waits for memory: RAM at ")
    assert why["can_run"]
    assert running.process.poll() is None
    # Nothing of ours runs any more: waiting longer would free no memory.
    conn.execute("UPDATE workers SET job_ids = '{}' WHERE worker_id = 'other'")
    until(lambda: ended(late))
    if "--burst" in options:
        assert running.wait() == 0, running.err
    else:
        stopped(running)
    assert "MEMORY THROTTLE ACTIVE: RAM at " in running.err
    assert "MEMORY THROTTLE RELEASED after " in running.err


def test_switched_off_a_full_memory_stops_nothing(cli: Commands, conn: Any, tmp_path: Path) -> None:
    cli.env |= {
        "MEMORY_THROTTLE_THRESHOLD": "0.001", "QUEUE_WORKFLOWS_WORKER_MEMORY_THROTTLE": "off"
    }  # fmt: skip
    first = enqueued("waits", tmp_path)
    running = cli.start(SCRIPT, *ONE, "--slots", "2", "--app", APP)
    until(lambda: listed()["state"] == "busy")
    reports(3)
    late = enqueued("quick", number=1)
    until(lambda: ended(late))
    assert row(first)["status"] == "running"
    assert listed()["throttle"] is None
    slot_app.let_go(tmp_path)
    until(lambda: ended(first))
    stopped(running)
    assert "MEMORY THROTTLE" not in running.err


# --- in a cgroup with a limit --------------------------------------------------------------------


@pytest.fixture
def cgroup() -> Generator[MemoryCgroup]:
    with memory_cgroup(LIMIT_MB) as made:
        yield made


@pytest.fixture
def in_cgroup(cgroup: MemoryCgroup, cli: Commands, conn: Any) -> Generator[Any]:
    """Starts a worker whose processes are all in the cgroup; it has ended before that goes."""
    del conn
    started: list[Command] = []

    def start(*options: str) -> Command:
        running = cli.start(SCRIPT, *ONE, "--app", APP, *options)
        started.append(running)

        def moved() -> bool:
            pids = set(running.family())
            cgroup.add(pids.difference(cgroup.pids()))
            return listed()["state"] == "idle" and pids <= set(cgroup.pids())

        until(moved)
        return running

    yield start
    for each in started:
        if each.process.poll() is None:
            each.send(signal.SIGKILL)
        until(lambda each=each: not each.family())


def test_a_full_container_pauses_its_worker_until_the_memory_is_free(
    in_cgroup: Any, tmp_path: Path
) -> None:
    running = in_cgroup("--slots", "2")
    large = enqueued("fills", tmp_path, percent=FULL_PCT)
    until(lambda: waits_for_memory("busy"))
    late = enqueued("quick", number=1)
    reports(3)
    assert row(late)["status"] == "queued"
    use_pct = float(listed()["throttle"].split()[2])
    assert use_pct >= 90
    slot_app.let_go(tmp_path)
    until(lambda: ended(large, late))
    until(lambda: listed()["throttle"] is None)
    stopped(running)
    released = running.err.partition("MEMORY THROTTLE RELEASED")[2]
    assert "RAM at " in released
    assert "no job of these workers" not in running.err, "it was released because memory was free"


@pytest.mark.parametrize("shape", [("1",), ("1", "--async"), ("1", "--batch", "5")])
def test_an_executor_that_keeps_the_memory_of_its_jobs_is_replaced(
    in_cgroup: Any, tmp_path: Path, shape: tuple[str, ...]
) -> None:
    running = in_cgroup("--slots", *shape)
    large = enqueued("fills", tmp_path, percent=FULL_PCT, keep=True)
    until(lambda: waits_for_memory("busy"))
    late = enqueued("quick", number=1)
    slot_app.let_go(tmp_path)
    until(lambda: ended(large, late))
    assert row(late)["result"]["pid"] != row(large)["result"]["pid"]
    assert (row(large)["crash_count"], row(late)["crash_count"]) == (0, 0)
    stopped(running)
    assert running.err.count("an executor that keeps ") == 1
    assert "no job of these workers" not in running.err, "it waited for the memory"


def test_an_executor_whose_exit_hangs_does_not_keep_the_memory(
    in_cgroup: Any, tmp_path: Path
) -> None:
    running = in_cgroup("--slots", "1")
    large = enqueued("fills", tmp_path, percent=FULL_PCT, keep=True, hangs=True)
    until(lambda: waits_for_memory("busy"))
    late = enqueued("quick", number=1)
    slot_app.let_go(tmp_path)
    until(lambda: ended(large, late))
    assert "no job of these workers" not in running.err, "it waited for the memory"
    stopped(running)


LEAKS = int(os.environ.get("LEAKS", "60"))
"""How many jobs leak: `LEAKS=200` takes a quarter of a minute."""
LEAK_MB, MOST_MB, SLOTS = 50, 150, 2


@pytest.mark.timeout(120 + 2 * LEAKS)
def test_a_handler_that_leaks_stays_within_bounds_by_max_rss_mb(
    in_cgroup: Any, cgroup: MemoryCgroup
) -> None:
    running = in_cgroup("--slots", str(SLOTS), "--max-rss-mb", str(MOST_MB))
    ids = [enqueued("leaks", megabytes=LEAK_MB) for _ in range(LEAKS)]
    until(lambda: ended(*ids), timeout_s=max(90, 2 * LEAKS), every_s=0.2)
    stopped(running)
    found = [row(each) for each in ids]
    assert {each["crash_count"] for each in found} == {0}
    # An executor gets no further job once it has more than the limit.
    largest = max(each["result"]["rss_mb"] for each in found)
    executors = len({each["result"]["pid"] for each in found})
    print(f"{LEAKS} jobs, {executors} executors, {largest} MB, all {cgroup.peak_mb} MB")
    assert largest <= MOST_MB + LEAK_MB + 5
    # At the limit of the cgroup the kernel would have killed one.
    assert (cgroup.peak_mb or 0) < LIMIT_MB


def test_a_handler_that_fills_its_container_is_charged_alone_and_with_the_cause(
    cgroup: MemoryCgroup, cli: Commands, conn: Any, tmp_path: Path
) -> None:
    """The kernel kills it; the slot beside it goes on, and its executor's cgroup is removed."""
    del conn
    claim = shlex.join([script(SCRIPT), *ONE, "--app", APP, "--slots", "2"])
    cli.env["QUEUE_WORKFLOWS_WORKER_MEMORY_THROTTLE"] = "off"
    running = cli.start("/bin/sh", "-c", f"echo 0 >{cgroup.folder}/cgroup.procs && exec {claim}")
    (tmp_path / "beside").mkdir()
    beside = enqueued("waits", tmp_path / "beside")
    until(lambda: len(executor_cgroups(cgroup)) == 1)
    large = enqueued("fills", tmp_path, percent=1000)
    until(lambda: row(large)["crash_count"] >= 1, timeout_s=60)
    shown = history.get_job(large)
    assert shown is not None
    events = [event for attempt in shown["attempts"] for event in attempt["events"]]
    death = next(each for each in events if each["event_type"] == "death")
    assert death["detail"]["signal"] == signal.SIGKILL
    assert death["detail"]["oom_kills"] == 1
    assert "out of memory: killed by SIGKILL, peak memory" in death["error"]
    jobs.cancel(large)
    slot_app.let_go(tmp_path / "beside")
    until(lambda: ended(beside))
    assert (row(beside)["crash_count"], row(beside)["claim_no"]) == (0, 1)
    stopped(running)
    assert executor_cgroups(cgroup) == []


def executor_cgroups(cgroup: MemoryCgroup) -> list[Path]:
    return [*cgroup.folder.glob("queue-workflows-executor-*")]
