"""Faults of server, schema, clocks and forks (rows P1, P8, P13, P15 of `failure_coverage.py`)."""

from __future__ import annotations

import datetime
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from psycopg import conninfo

from queue_workflows import claim_worker, db, errors, migrations, run_store, workers
from tests.support import dangerous_app, database, factories, flow, toy_app, transitions
from tests.support.commands import Command, Commands
from tests.support.dangerous_app import enqueue
from tests.support.faketime import Wall
from tests.support.wait import patience, until
from tests.support.worker_views import row as job

APP = ("--app", "tests.support.dangerous_app:setup")
NOTES = ("queue-claim-worker", *APP, "--queue", dangerous_app.QUEUE)


def started(cli: Commands, said: str, *argv: str, **env: str) -> Command:
    """A command that has printed this text."""
    command = cli.start(*argv, **env)
    until(lambda: said in command.err, timeout_s=60)
    return command


def completed(job_id: str, timeout_s: float = 30.0) -> dict[str, Any]:
    """The job's row, once it is completed."""
    until(lambda: job(job_id)["status"] == "completed", timeout_s=timeout_s)
    return job(job_id)


# --- P1 -----------------------------------------------------------------------------------------

TERMINATE = (
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = %s"
)
ROUNDS = 6


@pytest.mark.timeout(120)
def test_connections_terminated_again_and_again_end_no_worker_and_hide_no_off(
    cli: Commands, conn: db.Connection, dsn: str, tmp_path: Path
) -> None:
    own = {
        name: database.url({**conninfo.conninfo_to_dict(dsn), "application_name": name})
        for name in ("victim", "dispatcher")
    }
    worker = started(
        cli, "works on", *NOTES, QUEUE_WORKFLOWS_DB_URL=own["victim"], AI_LEADS_HOST_LABEL="box"
    )
    orchestrator = started(
        cli, "dispatches", "queue-orchestrator", *APP, QUEUE_WORKFLOWS_DB_URL=own["dispatcher"]
    )
    terminated = 0
    for number in range(ROUNDS):
        for name in own:
            terminated += factories.one(conn, TERMINATE, name)
        run_id = run_store.insert_run(workflow_name="chain", context={"folder": str(tmp_path)})[
            "id"
        ]
        completed(enqueue("note", tmp_path), 10)
        until(lambda: flow.status(run_id) == "running")  # noqa: B023  waited for
        threading.Event().wait(0.5 + number % 3 / 2)
    assert terminated >= 2 * ROUNDS
    held = enqueue("note", tmp_path, wait=True)
    until(lambda: len(toy_app.pids(tmp_path, "note")) == ROUNDS + 1)
    factories.one(conn, TERMINATE, "victim")
    asked = time.monotonic()
    workers.disable("box", dangerous_app.QUEUE)
    while worker.process.poll() is None and time.monotonic() - asked < 10:
        factories.one(conn, TERMINATE, "victim")
        threading.Event().wait(1)
    assert time.monotonic() - asked < patience(6) + 1, "the poll finds it if nothing else does"
    assert worker.wait(1) == 79, worker.err
    row = job(held)
    assert (row["status"], row["claim_no"], row["crash_count"]) == ("queued", 1, 0)
    assert orchestrator.process.poll() is None
    assert "Traceback" not in worker.err
    assert "Traceback" not in orchestrator.err


CLAIMING = (
    "SELECT pid FROM pg_stat_activity WHERE application_name = 'victim'"
    " AND query LIKE '%%queue_workflows_ingest_step%%' AND state = 'idle'"
)


def test_an_idle_worker_whose_claiming_connection_ends_claims_again_without_a_poll(
    cli: Commands, conn: db.Connection, dsn: str, tmp_path: Path
) -> None:
    own = database.url({**conninfo.conninfo_to_dict(dsn), "application_name": "victim"})
    worker = started(
        cli, "works on", *NOTES, QUEUE_WORKFLOWS_DB_URL=own, QUEUE_WORKFLOWS_CLAIM_POLL_S="3600"
    )
    completed(enqueue("note", tmp_path))
    for _ in range(3):
        until(lambda: factories.column(conn, CLAIMING))
        (pid,) = factories.column(conn, CLAIMING)
        assert factories.one(conn, "SELECT pg_terminate_backend(%s)", pid)
        until(lambda: {*factories.column(conn, CLAIMING)} - {pid})  # noqa: B023
        completed(enqueue("note", tmp_path))
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0, worker.err


def test_a_worker_that_lost_all_its_connections_listens_again(
    cli: Commands, conn: db.Connection, dsn: str, tmp_path: Path
) -> None:
    own = database.url({**conninfo.conninfo_to_dict(dsn), "application_name": "victim"})
    started(
        cli, "works on", *NOTES, QUEUE_WORKFLOWS_DB_URL=own, QUEUE_WORKFLOWS_CLAIM_POLL_S="3600"
    )
    for _ in range(5):
        assert factories.one(conn, TERMINATE, "victim") >= 1
        completed(enqueue("note", tmp_path))  # which it finds as it looks after connecting
        completed(enqueue("note", tmp_path))  # of which it hears


# --- P8 -----------------------------------------------------------------------------------------

MORE = "CREATE TABLE of_tomorrow (id text); ALTER TABLE ingest_jobs ADD COLUMN tomorrow text;"


@pytest.fixture
def tomorrow(tmp_path: Path) -> Path:
    """The chain of a version to come: ours, and a step that only adds."""
    folder = tmp_path / "migrations"
    shutil.copytree(migrations.dir(), folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    number = db.REQUIRED_VERSION + 1
    (folder / f"{number:04d}_more.sql").write_text(MORE)
    (folder / f"{number:04d}_more.down.sql").write_text("SELECT 1;")
    return folder


@pytest.fixture
def fresh(fresh_database: str, conn: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[Commands]:
    """Commands on a database of their own, where this process works too."""
    from tests.support import commands

    with monkeypatch.context() as patched:
        patched.setenv("QUEUE_WORKFLOWS_DB_URL", fresh_database)
        with commands.commands(QUEUE_WORKFLOWS_DB_URL=fresh_database) as made:
            yield made
    db.close_pool()


def test_workers_of_today_go_on_while_a_step_that_only_adds_is_applied_and_after(
    fresh: Commands, tomorrow: Path, tmp_path: Path
) -> None:
    db.bootstrap()
    worker = started(fresh, "works on", *NOTES)
    held = enqueue("note", tmp_path, wait=True)
    until(lambda: toy_app.pids(tmp_path, "note"), timeout_s=30)
    assert db.bootstrap(migrations_dir=tomorrow) == [db.REQUIRED_VERSION + 1]
    (tmp_path / "go").touch()
    assert completed(held)["claim_no"] == 1
    completed(enqueue("note", tmp_path))
    late = started(fresh, "works on", *NOTES)
    orchestrator = started(fresh, "dispatches", "queue-orchestrator", *APP)
    completed(enqueue("note", tmp_path))
    for command in (worker, late, orchestrator):
        command.send(signal.SIGTERM)
        assert command.wait() == 0


def test_a_worker_of_tomorrow_waits_for_its_schema_and_touches_nothing(
    fresh: Commands, tmp_path: Path
) -> None:
    db.bootstrap()
    waits = enqueue("note", tmp_path)
    db.downgrade(to_version=db.REQUIRED_VERSION - 1, allow_data_loss=True)
    said = f"waiting for schema version {db.REQUIRED_VERSION} (run `queue-workflows migrate`"
    worker = started(fresh, said, *NOTES)
    scheduler = started(fresh, said, "queue-scheduler", *APP)
    with db.connect() as own:
        assert factories.one(own, "SELECT count(*) FROM worker_heartbeats") == 0
        assert factories.one(own, "SELECT status FROM ingest_jobs") == "queued"
    started(fresh, "dispatches", "queue-orchestrator", *APP)
    assert completed(waits)["claim_no"] == 1
    until(lambda: "following" in scheduler.err)
    assert worker.process.poll() is None


def test_a_schema_that_breaks_with_today_is_refused_by_name(
    fresh: Commands, tomorrow: Path
) -> None:
    number = db.REQUIRED_VERSION + 1
    (step,) = tomorrow.glob(f"{number:04d}_more.sql")
    step.write_text(f"-- compatible-with: {number}\n{MORE}")
    db.bootstrap(migrations_dir=tomorrow)
    text = f"needs code that knows version {number}; this code knows {db.REQUIRED_VERSION}"
    with pytest.raises(errors.SchemaTooNew, match=text):
        db.bootstrap()
    for role in (("queue-orchestrator", *APP), NOTES, ("queue-scheduler", *APP)):
        refused = fresh.run(*role)
        assert refused.process.returncode == 2
        assert text in refused.err
        assert "Traceback" not in refused.err


# --- P13 ----------------------------------------------------------------------------------------


def lapsed(conn: db.Connection) -> str:
    """The id of a job whose worker died; no worker serves its queue."""
    conn.execute("DELETE FROM ingest_jobs WHERE queue = 'fetch'")
    row = factories.ingest(conn, task_name="note")
    transitions.expire(conn, transitions.claim_ingest(conn, transitions.who("fetch")))
    return row["id"]


def hours_off(line: str) -> float:
    """How far the clock that stamped this log line is from ours."""
    said = datetime.datetime.fromisoformat(line[:19]).replace(tzinfo=datetime.timezone.utc)
    return (said - datetime.datetime.now(datetime.timezone.utc)).total_seconds() / 3600


@pytest.mark.timeout(180)
@pytest.mark.parametrize("hours", [1, -1], ids=["ahead", "behind"])
def test_a_wall_clock_an_hour_off_that_steps_stops_and_requeues_nothing(
    cli: Commands, conn: db.Connection, tmp_path: Path, hours: int
) -> None:
    wall = Wall(tmp_path / "clock")
    wall.put(hours)
    knobs = {
        "QUEUE_WORKFLOWS_LEASE_RECLAIM_INTERVAL_S": "0.2",
        "QUEUE_WORKFLOWS_STALE_WORKER_AFTER_S": "3",
        "QUEUE_WORKFLOWS_DL_HEARTBEAT_SEC": "0.5",
    }
    env = wall.env | knobs
    orchestrator = started(cli, "dispatches", "queue-orchestrator", *APP, **env)
    worker = started(cli, "works on", *NOTES, "--lease-seconds", "3", **env)
    cpu = started(cli, "works on", "queue-claim-worker", *APP, "--queue", "cpu", **env)
    assert round(hours_off(worker.err)) == hours, "the clock is off"
    held = enqueue("note", tmp_path, wait=True)
    until(lambda: toy_app.pids(tmp_path, "note"), timeout_s=30)
    scheduler = started(cli, "following", "queue-scheduler", *APP, **env)
    for step in (hours, -hours, 0):
        wall.put(step)
        swept, before = lapsed(conn), job(held)["heartbeat_at"]
        until(lambda: job(swept)["status"] == "queued")  # noqa: B023  waited for
        until(lambda: job(held)["heartbeat_at"] > before)  # noqa: B023
        run_id = run_store.insert_run(workflow_name="chain", context={"folder": str(tmp_path)})[
            "id"
        ]
        until(lambda: flow.status(run_id) == "completed")  # noqa: B023
        fires = len(fired(conn))
        until(lambda: len(fired(conn)) > fires)  # noqa: B023
    (tmp_path / "go").touch()
    row = completed(held)
    assert (row["claim_no"], row["attempts"], row["crash_count"]) == (1, 0, 0)
    for command in (scheduler, orchestrator, worker, cpu):
        command.send(signal.SIGTERM)
        assert command.wait() == 0, command.err
        assert "DEAD WORKER" not in command.err
    instants = fired(conn)
    jobs = factories.one(
        conn,
        "SELECT count(*) FROM ingest_jobs WHERE args = '{}' AND queue = %s",
        dangerous_app.QUEUE,
    )
    assert len({*instants}) == len(instants) == jobs
    late_s = factories.column(
        conn, "SELECT extract(epoch FROM created_at - fire_at)::float8 FROM schedule_fires"
    )
    assert min(late_s) >= 0
    assert max(late_s) < 30, "by the database's clock"


def fired(conn: db.Connection) -> list[Any]:
    return factories.column(conn, "SELECT fire_at FROM schedule_fires")


# --- P15 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [(), ("--batch", "4")])
def test_children_of_a_handler_have_connections_and_names_of_their_own(
    cli: Commands, conn: db.Connection, tmp_path: Path, more: tuple[str, ...]
) -> None:
    worker = started(cli, "works on", *NOTES, *more)
    completed(enqueue("note", tmp_path))  # what it connected for only to start is closed by now
    before = {*factories.column(conn, SESSIONS)}
    row = completed(enqueue("fork", tmp_path))
    own, kept = row["result"]["sessions"]
    assert own == kept, "the children left the pool alone"
    for child, status, said in row["result"]["children"]:
        session, name = said.split()
        assert os.WIFEXITED(status)
        assert int(session) not in {own, *before}
        assert name.startswith(f"box:{child}:")
    assert row["claim_no"] == 1, "a child that fell out of the body wrote nothing"
    completed(enqueue("note", tmp_path))
    assert before <= {*factories.column(conn, SESSIONS)}, "the parent's connections are in use"
    assert "lost" not in worker.err
    assert "waits" not in worker.err


def test_a_kept_connection_stays_in_the_process_that_opened_it(db: object) -> None:
    kept = db.DedicatedConnection()
    query = "SELECT pg_backend_pid() AS pid"
    own = kept.get().execute(query).fetchone()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        other = kept.get().execute(query).fetchone()
        kept.close()
        os._exit(own == other)
    assert os.waitpid(child, 0)[1] == 0
    assert kept.get().execute(query).fetchone() == own
    kept.close()


def test_workers_forked_from_one_are_two(db: object, conn: db.Connection) -> None:
    toy_app.setup()
    made = claim_worker.ClaimWorker(queue="cpu", host="box")
    for _ in range(2):
        factories.node(conn, node_module="nobody")
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(not made.run_once())
    assert os.waitpid(child, 0)[1] == 0
    assert made.run_once()
    query = "SELECT worker_id FROM workflow_node_events WHERE event_type = 'claimed' ORDER BY id"
    pids = [int(name.split(":")[1]) for name in factories.column(conn, query)]
    assert pids == [child, os.getpid()]


SESSIONS = (
    "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
    " AND pid <> pg_backend_pid() AND application_name = 'queue_workflows'"
)
