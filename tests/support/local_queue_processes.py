"""Processes that serve an ingest queue by `IngestPlan`, and what their jobs note of themselves."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from queue_workflows import db, jobs
from tests.support import factories, local_queue_app
from tests.support.local_queue_app import QUEUE
from tests.support.wait import until

ROOT = Path(__file__).resolve().parents[2]
LEASE_S = 2.0
Process = subprocess.Popen[str]
Start = Callable[..., Process]


@contextmanager
def processes(dsn: str) -> Generator[Start]:
    """Yield a function that starts a process which serves the queue; none outlives the block."""
    made: list[Process] = []

    def started(
        *, by: str = dsn, workers: int = 4, limit: int | None = None, stop_s: float = 30.0
    ) -> Process:
        plan = {"lease_s": LEASE_S, "limit": limit}
        given = {"workers": workers, "plan": plan, "stop_s": stop_s}
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.local_queue_app", json.dumps(given)],
            cwd=ROOT,
            env={**os.environ, "QUEUE_WORKFLOWS_DB_URL": by, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        made.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    try:
        yield started
    finally:
        for process in made:
            process.kill()
            process.wait(10)
            assert process.stdout is not None
            process.stdout.close()


class Journal:
    """Jobs that note their starts and ends, and what they have noted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.names: list[str] = []

    def enqueue(self, count: int, **args: Any) -> list[str]:
        names = [f"job{len(self.names) + number}" for number in range(count)]
        self.names += names
        given = [{"folder": str(self._folder), "name": name, **args} for name in names]
        return jobs.enqueue_many(task_name="journal", queue=QUEUE, args=given)

    def let_go(self) -> None:
        (self._folder / "go").touch()

    def spans(self) -> list[list[local_queue_app.Span]]:
        return [local_queue_app.spans(self._folder, name) for name in self.names]

    def begun(self, process: Process) -> int:
        """How many handlers have begun in a process."""
        return sum(each.pid == process.pid for each in itertools.chain(*self.spans()))


def states(conn: db.Connection) -> Counter[str]:
    """How many jobs of the local queue have each state."""
    found = conn.execute("SELECT status FROM ingest_jobs WHERE queue = %s", (QUEUE,))
    return Counter(row["status"] for row in found)


def assert_each_ended_once(conn: db.Connection, count: int) -> None:
    with contextlib.suppress(AssertionError):
        until(lambda: states(conn) == {"completed": count}, timeout_s=60)
    left = conn.execute(
        "SELECT * FROM ingest_jobs WHERE status <> 'completed' AND queue = %s", (QUEUE,)
    ).fetchall()
    assert (left, states(conn)) == ([], {"completed": count}), left
    found = factories.column(
        conn,
        "SELECT count(*) FROM ingest_job_events WHERE event_type = 'completed'"
        f" AND queue = '{QUEUE}' GROUP BY job_id",
    )
    assert found == [1] * count


def assert_apart(spans: list[list[local_queue_app.Span]], killed: dict[int, float]) -> None:
    """No handler of a job began before the one before it had ended, or was killed."""
    for each in spans:
        for before, after in itertools.pairwise(each):
            assert after.began >= min(before.ended, killed.get(before.pid, before.ended))


def stopped(*processes: Process) -> None:
    for process in processes:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
