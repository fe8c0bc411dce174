"""A row that a stranger keeps locked costs at most its own lease; the worker and others go on."""

from __future__ import annotations

import signal
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from queue_workflows import db, jobs, node_queue, run_store, workers
from tests.support import app_triggers, slot_app
from tests.support.commands import Command, Commands
from tests.support.wait import patience, until
from tests.support.worker_views import (
    begun,
    charges,
    ended,
    enqueued,
    node_row,
    row,
    status,
    stopped,
)

pytestmark = pytest.mark.usefixtures("slot_tasks")
QUICK = 20


@pytest.fixture
def slack_s() -> float:
    """Return how long the stranger of these tests may keep its transaction open."""
    return 300.0


def worker(cli: Commands, *more: str, slots: int = 3, queue: str = slot_app.QUEUE) -> Command:
    argv = ("--queue", queue, "--slots", str(slots), "--app", "tests.support.slot_app:setup")
    return cli.start("queue-claim-worker", *argv, *more, QUEUE_WORKFLOWS_HOST_LABEL="h")


@contextmanager
def locked(dsn: str, query: str, *values: Any) -> Generator[None]:
    """Hold the rows of an UPDATE that is not committed."""
    with psycopg.connect(dsn) as stranger:
        assert stranger.execute(query.encode(), values).rowcount > 0
        yield
        stranger.rollback()


def job_locked(dsn: str, job_id: str) -> Any:
    return locked(dsn, "UPDATE ingest_jobs SET priority = priority WHERE id = %s", job_id)


def waiting(tmp_path: Path, name: str, task: str = "waits") -> tuple[str, Path]:
    folder = tmp_path / name
    folder.mkdir()
    return enqueued(task, folder=str(folder)), folder


def others_run() -> None:
    """Jobs that come now are claimed, run and recorded within a few seconds."""
    began = time.monotonic()
    ids = [enqueued("quick", number=number) for number in range(QUICK)]
    until(lambda: ended(*ids))
    assert time.monotonic() - began < patience(5)


def lapsed(job_id: str) -> bool:
    found = jobs.list(queue=slot_app.QUEUE, lost=True)
    return job_id in [each["id"] for each in found]


def test_the_worker_goes_on_while_a_lease_cannot_be_renewed(
    cli: Commands, dsn: str, tmp_path: Path
) -> None:
    bad, folder = waiting(tmp_path, "bad", "waits_once")
    running = worker(cli, "--lease-seconds", "3")
    until(lambda: begun(folder))
    good, beside = waiting(tmp_path, "good")
    until(lambda: begun(beside))
    with job_locked(dsn, bad):
        until(lambda: lapsed(bad))
        others_run()
        before = row(good)["lease_expires_at"]
        until(lambda: row(good)["lease_expires_at"] > before)
    slot_app.let_go(beside)
    until(lambda: ended(good, bad), timeout_s=60)
    assert charges(good) == (1, 0, 0)
    stopped(running)


def test_a_lease_is_renewed_as_soon_as_the_row_is_free(
    cli: Commands, dsn: str, tmp_path: Path
) -> None:
    (held, folder), (other, beside) = waiting(tmp_path, "held"), waiting(tmp_path, "beside")
    running = worker(cli, "--lease-seconds", "12")
    until(lambda: begun(folder, beside))
    with job_locked(dsn, held):
        before, then = row(held)["lease_expires_at"], row(other)["lease_expires_at"]
        until(lambda: row(other)["lease_expires_at"] > then)
        assert row(held)["lease_expires_at"] == before
    until(lambda: row(held)["lease_expires_at"] != before, timeout_s=3)
    slot_app.let_go(folder, beside)
    until(lambda: ended(held, other))
    assert charges(held) == (1, 0, 0)
    stopped(running)


def test_a_row_that_the_app_lets_nobody_renew_costs_no_other_its_lease(
    cli: Commands, conn: db.Connection, tmp_path: Path
) -> None:
    (bad, folder), (good, beside) = waiting(tmp_path, "bad"), waiting(tmp_path, "good")
    running = worker(cli, "--lease-seconds", "12")
    until(lambda: begun(folder, beside))
    renews = f"OLD.id = '{bad}' AND OLD.status = 'running' AND NEW.status = 'running'"
    with app_triggers.refusing(conn, "ingest_jobs", renews):
        then = row(good)["lease_expires_at"]
        until(lambda: row(good)["lease_expires_at"] > then)
    slot_app.let_go(folder, beside)
    until(lambda: ended(bad, good))
    assert charges(good) == (1, 0, 0)
    stopped(running)


@pytest.mark.parametrize("task", ["waits", "fails_late", "cancelled"])
def test_an_end_that_cannot_be_recorded_delays_no_other(
    cli: Commands, dsn: str, tmp_path: Path, task: str
) -> None:
    held, folder = waiting(tmp_path, "held", "tidies_late" if task == "cancelled" else task)
    running = worker(cli)
    until(lambda: begun(folder))
    if task == "cancelled":
        jobs.cancel(held)
    with job_locked(dsn, held):
        slot_app.let_go(folder)
        for _ in range(3):
            others_run()
        assert status(held, "running")
    expected = {"waits": "completed", "fails_late": "failed", "cancelled": "cancelled"}[task]
    until(lambda: status(held, expected), timeout_s=10)
    assert row(held)["claim_no"] == 1
    stopped(running)


def test_off_and_a_stop_return_the_jobs_beside_it(cli: Commands, dsn: str, tmp_path: Path) -> None:
    held, folder = waiting(tmp_path, "held", "waits_once")
    beside = [waiting(tmp_path, f"beside{n}", "waits_once") for n in range(2)]
    running = worker(cli)
    until(lambda: begun(folder, *(each for _, each in beside)))
    with job_locked(dsn, held):
        workers.disable("h", slot_app.QUEUE)
        until(lambda: all(status(each, "queued") for each, _ in beside), timeout_s=10)
        workers.enable("h", slot_app.QUEUE)
        until(lambda: ended(*(each for each, _ in beside)))
        began = time.monotonic()
        running.send(signal.SIGTERM)
        assert running.wait() == 0
        assert time.monotonic() - began < patience(15)
        assert status(held, "running")


@pytest.mark.parametrize(
    "table", ["workers", "worker_heartbeats", "queue_settings", "worker_controls"]
)
def test_rows_about_the_worker_and_its_queue(
    cli: Commands, dsn: str, tmp_path: Path, table: str
) -> None:
    held, folder = waiting(tmp_path, "held")
    running = worker(cli, "--lease-seconds", "3")
    until(lambda: begun(folder) and workers.list())
    workers.enable("h", slot_app.QUEUE)
    with psycopg.connect(dsn) as conn:
        conn.execute("INSERT INTO queue_settings (queue) VALUES (%s)", (slot_app.QUEUE,))
    column = {"queue_settings": "queue"}.get(table, "queue")
    with locked(dsn, f"UPDATE {table} SET {column} = {column} WHERE queue = 'work'"):
        for _ in range(3):
            before = row(held)["lease_expires_at"]
            until(lambda before=before: row(held)["lease_expires_at"] > before, timeout_s=10)
            others_run()
    seen = workers.list()[0]["last_seen"]
    until(lambda: workers.list()[0]["last_seen"] > seen, timeout_s=30)
    slot_app.let_go(folder)
    until(lambda: ended(held))
    assert charges(held) == (1, 0, 0)
    stopped(running)


def test_a_locked_run_delays_no_node_of_another(cli: Commands, dsn: str) -> None:
    def node(run_id: str) -> str:
        return node_queue.enqueue_node_job(
            run_id=run_id, node_id="n", node_module="node_adds", queue="cpu", inputs={"a": 1}
        )

    first, second = (
        run_store.insert_run(workflow_name="single", status="running")["id"] for _ in range(2)
    )
    with locked(dsn, "UPDATE workflow_runs SET priority = priority WHERE id = %s", first):
        held = node(first)
        running = worker(cli, queue="cpu")
        other = node(second)
        until(lambda: node_row(other)["status"] == "completed")
    until(lambda: node_row(held)["status"] == "completed")
    assert node_row(held)["claim_no"] == 1
    stopped(running)
