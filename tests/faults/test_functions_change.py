"""Change functions and tables while workers run: no job is lost, no error, no second claim."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from queue_workflows import db, jobs
from tests.support import dangerous_app, factories, installed_functions, slot_app
from tests.support.commands import Commands
from tests.support.wait import until

APP = ("--app", "tests.support.dangerous_app:setup")
QUEUE = dangerous_app.QUEUE
WORKER = ("queue-claim-worker", *APP, "--queue", QUEUE)
CHANGES = 10
ROUND = 50
BODY = "    -- Ranges of the columns that every claim writes."
STEP = "    v_ids     text[] := '{}';\nBEGIN\n"


@pytest.fixture
def conn(conn: db.Connection) -> Iterator[db.Connection]:
    yield conn
    conn.execute("DELETE FROM queue_schema_objects")
    db.bootstrap()


def changed(number: int) -> dict[str, str]:
    """Return the set with another comment and a harmless statement in two functions."""
    text = installed_functions.text("functions")
    assert text.count(BODY) == text.count(STEP) == 1
    text = text.replace(BODY, f"    -- change {number}\n    PERFORM {number};\n{BODY}")
    triggers = f"{installed_functions.text('triggers')}-- change {number}\n"
    return {"functions": text.replace(STEP, f"{STEP}    PERFORM {number};\n"), "triggers": triggers}


class Feeder(threading.Thread):
    """Keeps jobs queued, however fast the worker is, until it is stopped."""

    def __init__(self, folder: Path) -> None:
        super().__init__(name="test-feeder")
        self._folder, self._over = folder, threading.Event()
        self.enqueued = 0

    def run(self) -> None:
        with db.connect() as conn:
            while not self._over.is_set():
                if factories.one(conn, QUEUED) < ROUND:
                    conn.execute(ENQUEUE.encode(), (QUEUE, str(self._folder), ROUND))
                    self.enqueued += ROUND
                self._over.wait(0.01)

    def __enter__(self) -> Feeder:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


def test_a_worker_drains_its_queue_while_the_functions_and_triggers_change(
    cli: Commands, conn: db.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = [changed(number) for number in range(1, CHANGES + 1)]
    worker = cli.start(*WORKER)
    # Undone before `conn` installs the real set again, which tests in this database rely on.
    with monkeypatch.context() as patch, Feeder(tmp_path) as feeder:
        installed_functions.retry_soon(patch)
        for texts in sets:
            ended = factories.one(conn, ENDED)
            until(lambda: factories.one(conn, ENDED) > ended, timeout_s=60)  # noqa: B023
            installed_functions.replace(patch, **texts)
            assert db.bootstrap() == []
            assert factories.one(conn, INSTALLED) == installed_functions.checksum("functions")
        ended = factories.one(conn, ENDED)
        until(lambda: factories.one(conn, ENDED) > ended, timeout_s=60)
    until(lambda: factories.one(conn, ENDED) == feeder.enqueued, timeout_s=60)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert rows(conn, tmp_path) == [
        {"status": "completed", "claim_no": 1, "attempts": 0, "n": feeder.enqueued}
    ]
    for word in ("Traceback", "ERROR", "error", "retry", "again"):
        assert not [line for line in worker.err.splitlines() if word in line]


ENQUEUE = """
INSERT INTO ingest_jobs (task_name, queue, args)
SELECT 'note', %s, jsonb_build_object('folder', %s::text) FROM generate_series(1, %s)
"""
QUEUED = f"SELECT count(*) FROM ingest_jobs WHERE status = 'queued' AND queue = '{QUEUE}'"
ENDED = f"SELECT count(*) FROM ingest_jobs WHERE status = 'completed' AND queue = '{QUEUE}'"
INSTALLED = "SELECT checksum FROM queue_schema_objects WHERE part = 'functions'"


def rows(conn: db.Connection, folder: Path) -> list[dict[str, Any]]:
    """The jobs of the feeder of this folder, by how they ended."""
    return conn.execute(
        "SELECT status::text, claim_no, attempts, count(*) AS n FROM ingest_jobs"
        " WHERE args ->> 'folder' = %s GROUP BY 1, 2, 3",
        (str(folder),),
    ).fetchall()


@pytest.fixture
def altered(
    migrated_database: str, monkeypatch: pytest.MonkeyPatch, slot_tasks: None
) -> Iterator[db.Connection]:
    """A connection to a database of the test's own, whose tables it may alter."""
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", migrated_database)
    with db.connect() as own:
        yield own
    db.close_pool()


ENDS = {
    "fails": ("queued", 1, "ValueError: as it was asked to"),
    "waits": ("failed", 0, "ran longer than its budget of 0.5 s"),
}
"""Tasks that do not complete, and what their worker makes of the first attempt of five."""


@pytest.mark.parametrize("task", ENDS)
def test_a_worker_ends_jobs_as_before_after_a_column_was_added_to_their_table(
    cli: Commands, altered: db.Connection, tmp_path: Path, task: str
) -> None:
    """A newer release adds columns while workers of this one run, as an app may do at any time."""

    def ended(name: str) -> tuple[Any, ...]:
        args = {"folder": str(tmp_path / name)}
        (tmp_path / name).mkdir()
        job = jobs.enqueue(
            task_name=task, queue=slot_app.QUEUE, args=args, max_attempts=5, timeout_s=0.5
        )

        def row() -> Any:
            query = "SELECT status::text, attempts, error, claim_no, lease_expires_at"
            return altered.execute(f"{query} FROM ingest_jobs WHERE id = %s", (job,)).fetchone()

        until(lambda: row()["claim_no"] and row()["lease_expires_at"] is None)
        found = row()
        jobs.cancel(job)
        return found["status"], found["attempts"], found["error"]

    dsn = os.environ["QUEUE_WORKFLOWS_DB_URL"]
    argv = ("--queue", slot_app.QUEUE, "--slots", "1", "--app", "tests.support.slot_app:setup")
    worker = cli.start("queue-claim-worker", *argv, QUEUE_WORKFLOWS_DB_URL=dsn)
    assert ended("before") == ENDS[task]
    altered.execute("ALTER TABLE ingest_jobs ADD COLUMN of_the_app text")
    assert ended("after") == ENDS[task]
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0


def test_a_pool_reads_jobs_as_before_after_a_column_was_added(
    altered: db.Connection, tmp_path: Path
) -> None:
    """A connection prepares what it executes often, and the server refuses that afterwards."""
    args = {"folder": str(tmp_path)}
    job = jobs.enqueue(task_name="fails", queue=slot_app.QUEUE, args=args)

    def status() -> str:
        row = jobs.get(job)
        assert row is not None
        return row["status"]

    assert {status() for _ in range(10)} == {"queued"}
    altered.execute("ALTER TABLE ingest_jobs ADD COLUMN of_the_app text")
    assert {status() for _ in range(10)} == {"queued"}
