"""Kill, stop, switch off and freeze a pool as a real process; no job of it is lost."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from queue_workflows import config, jobs, node_queue, workers
from queue_workflows import db as engine
from tests.support import commands
from tests.support.commands import Command, Commands
from tests.support.wait import until

APP = "tests.support.hanging_app:setup"
SCRIPT = "queue-claim-worker"
WORKERS = json.dumps([{"queue": "work", "concurrency": 3}, {"queue": "more", "concurrency": 2}])
OTHER = "more"


def pool(cli: Commands, *more: str, **env: str) -> Command:
    return cli.start(SCRIPT, "--workers", "--app", APP, *more, WORKERS_JSON=WORKERS, **env)


def enqueued(
    folder: Path, task: str, queue: str = "work", count: int = 1, conn: Any = None
) -> list[str]:
    """Jobs that work in a folder each, whose name is their id."""
    config.configure(ingest_queues={"work", OTHER})
    config.register_ingest_task(task, print)
    made: list[str] = []
    for number in range(count):
        own = folder / f"{task}-{queue}-{number}"
        own.mkdir()
        args = {"folder": str(own)}
        job_id = jobs.enqueue(task_name=task, queue=queue, args=args, conn=conn)
        made.append(job_id)
    return made


def rows(ids: list[str]) -> list[dict[str, Any]]:
    found = [node_queue.get_ingest_job(each) for each in ids]
    return [row for row in found if row is not None]


def column(ids: list[str], name: str) -> list[Any]:
    return [row[name] for row in rows(ids)]


def begun(folder: Path, count: int) -> Callable[[], bool]:
    return lambda: len([*folder.glob("*/started")]) == count


def completed(ids: list[str]) -> Callable[[], bool]:
    return lambda: set(column(ids, "status")) == {"completed"}


def test_each_running_job_of_a_killed_pool_runs_once_more(cli: Commands, tmp_path: Path) -> None:
    ids = enqueued(tmp_path, "lingers_once", count=5)
    others = enqueued(tmp_path, "awaits_once", OTHER, count=3)
    parent = pool(cli, "--supervise", "--shutdown-timeout", "0.2")
    until(begun(tmp_path, 5), timeout_s=30)
    os.kill(int(next(tmp_path.glob("*/started")).read_text()), signal.SIGKILL)
    until(begun(tmp_path, 8), timeout_s=30)
    until(completed([*ids[:3], *others[:2]]), timeout_s=30)
    crashes = column(ids, "crash_count") + column(others, "crash_count")
    assert crashes == [1, 1, 1, 0, 0, 1, 1, 0]
    assert column(ids[:3], "claim_no") == [2] * 3
    with engine.connect() as conn:
        finals = conn.execute(
            "SELECT count(*) AS n FROM ingest_job_events WHERE event_type = 'completed'"
            " GROUP BY job_id"
        ).fetchall()
    assert [row["n"] for row in finals] == [1] * 5
    parent.send(signal.SIGTERM)
    assert parent.wait() == 0, parent.err


def test_at_sigterm_what_ends_in_time_is_recorded_and_the_rest_handed_back(
    cli: Commands, tmp_path: Path
) -> None:
    stays = enqueued(tmp_path, "deaf") + enqueued(tmp_path, "awaits_once", OTHER)
    worker = pool(cli, "--shutdown-timeout", "1")
    until(begun(tmp_path, 2), timeout_s=30)
    worker.send(signal.SIGTERM)
    asked = time.monotonic()
    # Its claim may be under way already; that none begins later tests/integration/test_pool.py has.
    late = enqueued(tmp_path, "lingers_once")
    assert worker.wait() == 0, worker.err
    assert 0.9 <= time.monotonic() - asked <= 10
    every = [*stays, *late]
    assert column(every, "status") == ["queued"] * 3
    assert column(every, "crash_count") == column(every, "attempts") == [0, 0, 0]


def test_an_off_queue_parks_and_the_restarted_pool_serves_the_other(
    cli: Commands, tmp_path: Path
) -> None:
    mine = enqueued(tmp_path, "lingers_once")
    others = enqueued(tmp_path, "awaits_once", OTHER)
    parent = pool(cli, "--supervise")
    until(begun(tmp_path, 2), timeout_s=30)
    workers.disable(config.host_label(), "work")
    until(completed(others), timeout_s=30)
    assert column(mine, "status") == ["queued"]
    assert column([*mine, *others], "crash_count") == [0, 0]
    assert "exit code 79" in parent.err
    workers.enable(config.host_label(), "work")
    until(completed(mine), timeout_s=30)
    parent.send(signal.SIGTERM)
    assert parent.wait() == 0, parent.err


def test_a_handler_that_keeps_the_gil_past_its_budget_is_counted_alone(
    cli: Commands, tmp_path: Path
) -> None:
    normal = enqueued(tmp_path, "lingers_once", count=2)
    parent = pool(cli, "--supervise")
    until(begun(tmp_path, 2), timeout_s=30)
    with engine.transaction() as conn:
        (hog,) = enqueued(tmp_path, "hogs_once", OTHER, conn=conn)
        conn.execute("UPDATE ingest_jobs SET timeout_s = 1 WHERE id = %s", (hog,))
    until(completed([*normal, hog]), timeout_s=40)
    assert column(normal, "crash_count") == [0, 0]
    assert column([hog], "crash_count") == [1]
    parent.send(signal.SIGTERM)
    assert parent.wait() == 0, parent.err


def test_wrong_entries_are_refused_by_name(cli: Commands) -> None:
    bad = '[{"queue": "gpu"}, {"queue": "work", "concurrency": 0}]'
    said = commands.refused(cli.run(SCRIPT, "--workers", bad))
    assert "workers[0]: queue 'gpu' runs workflow nodes" in said
    assert "; workers[1]: concurrency 0: a whole number from 1 to 500" in said
    said = commands.refused(cli.run(SCRIPT, "--workers", WORKERS_JSON="[{}]"))
    assert "WORKERS_JSON[0]: `queue` is missing" in said
