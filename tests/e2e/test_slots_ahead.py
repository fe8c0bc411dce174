"""A worker with slots claims short jobs ahead of its free executors; none waits for a long one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from queue_workflows import db, jobs
from tests.support import slot_app
from tests.support.commands import Command, Commands
from tests.support.wait import until
from tests.support.worker_views import ended, enqueued, row

SHORT = 60
STALL = """
CREATE TABLE stalled (id text);
CREATE FUNCTION stall() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.status = 'completed' AND EXISTS (SELECT FROM stalled s WHERE s.id = NEW.id) THEN
        PERFORM pg_advisory_xact_lock(4242);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER stall AFTER UPDATE ON ingest_jobs FOR EACH ROW EXECUTE FUNCTION stall();
"""
"""Lets the statement that records a job of the table `stalled` wait for a lock of the test."""


@pytest.fixture
def cli(cli: Commands) -> Commands:
    slot_app.setup()
    return cli


def worker(cli: Commands, slots: int) -> Command:
    return cli.start(
        "queue-claim-worker", "--queue", slot_app.QUEUE, "--slots", str(slots),
        "--app", "tests.support.slot_app:setup",
    )  # fmt: skip


@pytest.fixture
def blocked(cli: Commands, tmp_path: Path) -> tuple[Command, list[Path], list[str]]:
    """A worker whose executors all run long handlers, which short ones preceded and follow."""
    first = [enqueued("quick", number=number) for number in range(SHORT)]
    folders = [tmp_path / str(number) for number in range(2)]
    for folder in folders:
        folder.mkdir()
        enqueued("waits", folder=str(folder))
    behind = [enqueued("quick", number=number) for number in range(3)]
    running = worker(cli, 2)
    until(lambda: all(slot_app.starts_of(each) for each in folders))
    assert ended(*first[:-4])
    return running, folders, behind


def test_a_job_that_waits_behind_long_handlers_is_left_to_other_workers(
    cli: Commands, blocked: tuple[Command, list[Path], list[str]]
) -> None:
    running, folders, behind = blocked
    other = worker(cli, 1)
    until(lambda: ended(*behind))
    assert [(row(each)["attempts"], row(each)["crash_count"]) for each in behind] == [(0, 0)] * 3
    slot_app.let_go(*folders)
    for each in (running, other):
        each.send(signal.SIGTERM)
        assert each.wait() == 0, each.err


def test_a_worker_that_stops_gives_back_at_once_what_waits(
    blocked: tuple[Command, list[Path], list[str]],
) -> None:
    running, folders, behind = blocked
    running.send(signal.SIGTERM)
    until(lambda: all(row(each)["status"] == "queued" for each in behind))
    slot_app.let_go(*folders)
    assert running.wait() == 0, running.err
    rows = [row(each) for each in behind]
    assert [(each["status"], each["attempts"], each["crash_count"]) for each in rows] == [
        ("queued", 0, 0)
    ] * 3


def test_the_results_of_short_jobs_share_statements(cli: Commands) -> None:
    ids = [enqueued("quick", number=number) for number in range(400)]
    running = worker(cli, 4)
    until(lambda: ended(*ids))
    running.send(signal.SIGTERM)
    assert running.wait() == 0, running.err
    with db.connect() as conn:
        found = conn.execute("SELECT count(DISTINCT finished_at) AS n FROM ingest_jobs").fetchone()
    assert found is not None
    assert found["n"] < 300


WAITS = """
SELECT pid FROM pg_locks
 WHERE locktype = 'advisory' AND NOT granted AND objid = 4242
   AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
"""The backends that wait for the lock of the test."""


@pytest.fixture
def stalling(cli: Commands) -> Generator[db.Connection]:
    """A connection that holds the lock for which the recording of jobs of `stalled` waits."""
    with db.connect() as conn:
        conn.execute(STALL)
        conn.execute("SELECT pg_advisory_lock(4242)")
        yield conn
        conn.execute("DROP FUNCTION stall() CASCADE")
        conn.execute("DROP TABLE stalled")


def stall_a_job(conn: db.Connection) -> str:
    """Enqueue a job whose recording waits."""
    with conn.transaction():  # else a worker may have recorded it before it is in the table
        stalled = jobs.enqueue(
            task_name="quick", queue=slot_app.QUEUE, args={"number": SHORT}, conn=conn
        )
        conn.execute("INSERT INTO stalled VALUES (%s)", (stalled,))
    return stalled


def waiting_backend(conn: db.Connection) -> int:
    """Wait until a worker's statement waits; return the pid of its backend."""
    until(lambda: len(conn.execute(WAITS).fetchall()) == 1)
    return int(conn.execute(WAITS).fetchall()[0]["pid"])


def folders_in(path: Path, count: int) -> list[Path]:
    made = [path / str(number) for number in range(count)]
    for folder in made:
        folder.mkdir(parents=True)
    return made


def test_claimed_jobs_run_while_a_statement_waits(
    cli: Commands, stalling: db.Connection, tmp_path: Path
) -> None:
    running = worker(cli, 2)
    for attempt in range(10):  # on a busy machine a handler is not always tiny
        for number in range(SHORT):
            enqueued("quick", number=number)
        stalled = stall_a_job(stalling)
        folders = folders_in(tmp_path / str(attempt), 6)
        for folder in folders:
            enqueued("starts", folder=str(folder))
        waiting_backend(stalling)
        # Less than the time limit of a wait for a lock, after which the worker tries again.
        begun = in_time(lambda: all(slot_app.starts_of(each) for each in folders), 2.0)  # noqa: B023
        assert row(stalled)["status"] == "running"
        stalling.execute("SELECT pg_advisory_unlock(4242)")
        until(lambda: ended(stalled))  # noqa: B023
        if begun:
            break
        until(lambda: all(slot_app.starts_of(each) for each in folders))  # noqa: B023
        stalling.execute("SELECT pg_advisory_lock(4242)")
    else:
        pytest.fail("no claimed job ran while a statement waited")
    running.send(signal.SIGTERM)
    assert running.wait() == 0, running.err


def in_time(what: Callable[[], bool], seconds: float) -> bool:
    """Return whether this comes true within so many seconds."""
    try:
        until(what, timeout_s=seconds)
    except AssertionError:
        return False
    return True


@pytest.fixture
def beside(
    cli: Commands, stalling: db.Connection, tmp_path: Path
) -> tuple[Command, str, Path, str, int]:
    """A worker of two slots whose statement waits, while a handler runs in its other executor.

    Returns the worker, the id of the handler's job, its folder, the job whose recording waits, and
    the backend.
    """
    (folder,) = folders_in(tmp_path, 1)
    long = enqueued("waits", folder=str(folder))
    running = worker(cli, 2)
    until(lambda: bool(slot_app.starts_of(folder)))
    stalled = stall_a_job(stalling)
    return running, long, folder, stalled, waiting_backend(stalling)


Beside = tuple[Command, str, Path, str, int]


def test_an_executor_that_dies_while_a_statement_waits_is_charged_and_replaced(
    stalling: db.Connection, beside: Beside
) -> None:
    running, long, folder, stalled, _ = beside
    (pid,) = slot_app.starts_of(folder)
    os.kill(pid, signal.SIGKILL)
    stalling.execute("SELECT pg_advisory_unlock(4242)")
    until(lambda: row(long)["crash_count"] == 1)
    slot_app.let_go(folder)
    until(lambda: ended(stalled))
    running.send(signal.SIGTERM)
    assert running.wait() == 0, running.err


def test_a_worker_that_is_to_stop_while_a_statement_waits_records_what_ends(
    stalling: db.Connection, beside: Beside
) -> None:
    running, long, folder, stalled, _ = beside
    running.send(signal.SIGTERM)
    slot_app.let_go(folder)
    stalling.execute("SELECT pg_advisory_unlock(4242)")
    assert running.wait() == 0, running.err
    assert ended(stalled, long)
    assert [row(each)["claim_no"] for each in (stalled, long)] == [1, 1]


def test_a_worker_whose_launcher_is_killed_while_a_statement_waits_records_what_had_ended(
    stalling: db.Connection, beside: Beside
) -> None:
    running, long, folder, stalled, _ = beside
    (pid,) = slot_app.starts_of(folder)
    launcher = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert launcher != running.process.pid
    os.kill(launcher, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{pid}").exists())
    stalling.execute("SELECT pg_advisory_unlock(4242)")
    assert running.wait() == 1
    assert "launcher" in running.err
    assert ended(stalled)
    found = row(long)
    assert (found["status"], found["crash_count"], found["attempts"]) == ("queued", 1, 0)


def test_outcomes_that_come_while_a_connection_is_lost_are_recorded_once(
    stalling: db.Connection, beside: Beside, tmp_path: Path
) -> None:
    running, long, folder, stalled, backend = beside
    slot_app.let_go(folder)
    (other,) = folders_in(tmp_path / "other", 1)
    stalling.execute("SELECT pg_terminate_backend(%s)", (backend,))
    stalling.execute("SELECT pg_advisory_unlock(4242)")
    until(lambda: ended(stalled, long))
    last = enqueued("starts", folder=str(other))
    until(lambda: ended(last))
    assert [row(each)["crash_count"] for each in (stalled, long)] == [0, 0]
    assert len(slot_app.starts_of(folder)) == 1
    running.send(signal.SIGTERM)
    assert running.wait() == 0, running.err
