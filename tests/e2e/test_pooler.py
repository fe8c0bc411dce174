"""All processes work through PgBouncer in transaction mode, and leave nothing in its sessions."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import psycopg
import pytest

from queue_workflows import jobs, runs, schedules, workers
from tests.support import commands, console, http_service, pgbouncer, reused_backends, toy_app
from tests.support.commands import TOYHOST, Command, Commands
from tests.support.pgbouncer import Pooler
from tests.support.wait import until

if TYPE_CHECKING:
    from tests.support.database import Database

pytestmark = pytest.mark.skipif(
    pgbouncer.PROGRAM is None and "QW_TEST_PGBOUNCER" not in os.environ,
    reason="pgbouncer is not installed here",
)
STATE = """
SELECT ARRAY(SELECT name || '=' || setting FROM pg_settings
              WHERE source = 'session' AND name NOT IN ('application_name', 'client_encoding',
                    'DateStyle', 'TimeZone', 'standard_conforming_strings')
              ORDER BY 1)
    || ARRAY(SELECT name || '=' || setting FROM pg_settings
              WHERE name IN ('client_encoding', 'DateStyle', 'TimeZone', 'search_path',
                             'statement_timeout', 'lock_timeout', 'jit') ORDER BY 1)
    || ARRAY(SELECT 'statement ' || name FROM pg_prepared_statements)
    || ARRAY(SELECT 'channel ' || name FROM pg_listening_channels() AS c (name))
    || ARRAY(SELECT 'lock ' || objid FROM pg_locks
              WHERE locktype = 'advisory' AND pid = pg_backend_pid())
"""
"""What another client of the pooler sees of a session that we may have used before."""
ODD = {"client_encoding": "LATIN1", "DateStyle": "German, DMY", "TimeZone": "Asia/Kathmandu"}


class Neighbour:
    """Another client of the pooler, which notes each state in which it finds a session."""

    def __init__(self, dsn: str) -> None:
        self.seen: set[tuple[str, ...]] = set()
        self.looks = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, args=(dsn,))

    def _look(self, dsn: str) -> None:
        with psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as conn:
            for name, value in ODD.items():
                conn.execute(f"SET {name} = '{value}'".encode())
            while not self._over.wait(0.005):
                row = conn.execute(STATE).fetchone()
                assert row is not None
                self.seen.add(tuple(row[0]))
                self.looks += 1

    def __enter__(self) -> Neighbour:
        self._thread.start()
        until(lambda: self.looks)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.fixture
def pooler(db: ModuleType, dsn: str, monkeypatch: pytest.MonkeyPatch) -> Generator[Pooler]:
    """A pooler with two sessions; this process and its commands work through it by POLL_ONLY."""
    monkeypatch.setenv("QUEUE_WORKFLOWS_POLL_ONLY", "1")
    for name in ("CLAIM_POLL_S", "WORKER_CONTROL_POLL_S"):
        monkeypatch.setenv(f"QUEUE_WORKFLOWS_{name}", "0.2")
    with reused_backends.shared.off(), pgbouncer.pooler(dsn) as made:
        monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", made.dsn)
        yield made
        db.close_pool()


@pytest.fixture
def through(pooler: Pooler) -> Generator[Commands]:
    """Starts commands that reach the database through the pooler."""
    with commands.commands(QUEUE_WORKFLOWS_DB_URL=pooler.dsn) as made:
        yield made


@pytest.fixture
def neighbour(pooler: Pooler) -> Generator[Neighbour]:
    """Another client; at the end each session was in the state in which the server began it."""
    with psycopg.connect(pooler.dsn, autocommit=True) as conn:
        for name, value in ODD.items():
            conn.execute(f"SET {name} = '{value}'".encode())
        row = conn.execute(STATE).fetchone()
    assert row is not None
    with Neighbour(pooler.dsn) as made:
        yield made
    assert made.seen == {tuple(row[0])}


def completed(*ids: str) -> bool:
    return all((jobs.get(each) or {}).get("status") == "completed" for each in ids)


def status(run_id: str) -> str | None:
    return (runs.get(run_id) or {}).get("status")


def submitted(workflow: str, folder: Path) -> str:
    return runs.submit(workflow, inputs={"folder": str(folder)})["id"]


def stopped(command: Command) -> None:
    command.send(signal.SIGINT)
    assert command.wait() == 0, command.err


def test_up_serves_jobs_runs_questions_and_a_schedule(
    through: Commands, neighbour: Neighbour, tmp_path: Path
) -> None:
    toy_app.setup()
    up = through.start("queue-workflows", "up", "--app", TOYHOST, "--cpu", "2")
    args = {"folder": str(tmp_path)}
    ids = [jobs.enqueue(task_name="note", queue="notes", args=args) for _ in range(20)]
    run_id = submitted("full", tmp_path)
    schedules.add("often", "every 1s", task_name="note", queue="notes", overlap="allow")
    until(lambda: completed(*ids), timeout_s=60)
    until(lambda: "awaiting_input" in {each["status"] for each in runs.nodes(run_id)}, timeout_s=60)
    runs.answer(run_id, "ask", "l")
    until(lambda: status(run_id) == "completed", timeout_s=60)
    until(lambda: len(jobs.list(queue="notes")) > len(ids))
    shown = console.printed("show", run_id)
    assert "completed" in shown and "work/first" in shown
    assert through.run("queue-workflows", "show", ids[0]).process.poll() == 0
    stopped(up)
    assert neighbour.looks > 20


def test_cancel_off_and_a_worker_that_dies(
    through: Commands, neighbour: Neighbour, tmp_path: Path
) -> None:
    toy_app.setup()
    argv = ("queue-claim-worker", "--queue", "cpu", "--app", TOYHOST, "--supervise")
    orchestrator = through.start("queue-orchestrator", "--app", TOYHOST)
    worker = through.start(*argv, QUEUE_WORKFLOWS_HOST_LABEL="h")
    for name in ("canceled", "off", "killed"):
        (tmp_path / name).mkdir()
    canceled = submitted("progress", tmp_path / "canceled")
    until(lambda: toy_app.pids(tmp_path / "canceled", "progress"), timeout_s=60)
    runs.cancel(canceled)
    until(lambda: status(canceled) == "cancelled")
    off = submitted("hold", tmp_path / "off")
    until(lambda: toy_app.pids(tmp_path / "off", "hold"), timeout_s=60)
    workers.disable("h", "cpu")
    (node,) = [each for each in runs.nodes(off) if each["node_id"] == "work/hold"]
    until(lambda: (jobs.get(node["id"]) or {})["status"] == "queued")
    workers.enable("h", "cpu")
    until(lambda: status(off) == "completed", timeout_s=60)
    killed = submitted("hold", tmp_path / "killed")
    (pid,) = until(lambda: toy_app.pids(tmp_path / "killed", "hold"), timeout_s=60)
    os.kill(pid, signal.SIGKILL)
    until(lambda: status(killed) == "completed", timeout_s=60)
    for each in (worker, orchestrator):
        each.send(signal.SIGTERM)
        assert each.wait() == 0, each.err
    assert neighbour.looks > 20


def test_http(through: Commands, neighbour: Neighbour) -> None:
    with http_service.served(through) as service:
        job_id = service.trigger(args={"n": 4})["job_id"]
        assert service.ended(job_id)["status"] == "succeeded"
        assert service.events(job_id) == ["queued", "claimed", "completed"]


def test_migrate(
    own_database: Database, fresh_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_POLL_ONLY", "1")
    with (
        reused_backends.shared.off(),
        pgbouncer.pooler(fresh_database) as pooler,
        Neighbour(pooler.dsn) as neighbour,
        commands.commands(QUEUE_WORKFLOWS_DB_URL=pooler.dsn) as through,
    ):
        both = [through.start("queue-workflows", "migrate") for _ in range(2)]
        for each in both:
            assert each.wait() == 0, each.err
        assert "nothing to do" in through.run("queue-workflows", "migrate").out
    assert len(neighbour.seen) == 1, neighbour.seen
    with psycopg.connect(fresh_database) as conn, psycopg.connect(own_database.dsn) as other:
        count = "SELECT count(*) FROM pg_trigger"
        assert conn.execute(count).fetchone() == other.execute(count).fetchone()


def listed(doctor: Command) -> dict[str, dict[str, str]]:
    return {each["check"]: each for each in json.loads(doctor.out)["findings"]}


def test_doctor_tells_that_poll_only_is_missing(
    through: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    doctor = ("queue-workflows", "doctor", "--json")
    found = listed(through.run(*doctor))
    assert found["listen"]["level"] == "ok" and "POLL_ONLY" in found["listen"]["text"]
    monkeypatch.delenv("QUEUE_WORKFLOWS_POLL_ONLY")
    found = listed(through.run(*doctor))
    assert found["listen"]["level"] == "error"
    assert "a pooler in transaction mode" in found["listen"]["text"]
    assert "QUEUE_WORKFLOWS_POLL_ONLY=1" in found["listen"]["remedy"]
