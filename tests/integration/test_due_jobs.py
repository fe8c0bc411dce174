"""A claim that returns fewer jobs than it may also returns when the next delayed job is due."""

from __future__ import annotations

from collections.abc import Generator
from types import ModuleType
from typing import Any

import pytest

from queue_workflows import db as engine
from queue_workflows import queues
from queue_workflows.engine import claims, finish, job_tables, outcomes
from tests.support import factories, transitions

NODES, INGEST = job_tables.NODE_JOBS, job_tables.INGEST_JOBS
BOTH = pytest.mark.parametrize("table", [INGEST, NODES], ids=["ingest", "nodes"])
SHAPES = pytest.mark.parametrize(
    ("table", "queue", "count"),
    [
        pytest.param(INGEST, "fetch", 1, id="ingest, one"),
        pytest.param(INGEST, "fetch", 5, id="ingest, several"),
        pytest.param(NODES, "cpu", 1, id="nodes, one"),
        pytest.param(NODES, "cpu", 5, id="nodes, several"),
        pytest.param(NODES, "gpu", 1, id="gpu nodes"),
    ],
)
WITHIN_S = 60.0


@pytest.fixture
def conn(db: ModuleType) -> Generator[engine.Connection]:
    with engine.connect() as conn:
        yield conn


def delayed(
    conn: engine.Connection, table: job_tables.JobTable, queue: str, after_s: float, **columns: Any
) -> str:
    due = factories.one(conn, "SELECT now() + %s * interval '1 second'", after_s)
    made = factories.node if table is NODES else factories.ingest
    return made(conn, queue=queue, available_at=due, **columns)["id"]


def kept(
    conn: engine.Connection, table: job_tables.JobTable, queue: str, host: str, after_s: float
) -> None:
    job_id = delayed(conn, table, queue, after_s + 3600)
    conn.execute(
        f"UPDATE {table.name} SET resume_host = %s, resume_until = available_at,"
        " resume_at = available_at - interval '1 hour' WHERE id = %s".encode(),
        (host, job_id),
    )


def reported(
    conn: engine.Connection, table: job_tables.JobTable, queue: str, count: int = 1,
    *, promote: bool = True, within_s: float = WITHIN_S, expected: int = 0, **who: Any,
) -> float | None:  # fmt: skip
    """Claim this number of jobs, of which as many as expected are there; return `due_s`."""
    waits: list[claims.Wait] = []
    on_wait = claims.OnWait(waits.append, within_s)
    claimant = transitions.who(queue, **who)
    jobs = claims.claim(conn, table, claimant, count=count, promote=promote, on_wait=on_wait)
    assert len(jobs) == expected and all(job["id"] for job in jobs)
    return waits[-1].due_s if waits else None


@SHAPES
def test_it_tells_of_the_next_delayed_job_of_its_queue(
    conn: engine.Connection, table: job_tables.JobTable, queue: str, count: int
) -> None:
    assert reported(conn, table, queue, count) is None
    others = ("load",) if table is INGEST else tuple({"cpu", "gpu"} - {queue})
    for other in others:
        delayed(conn, table, other, 10)
    delayed(conn, table, queue, 2 * WITHIN_S)
    assert reported(conn, table, queue, count) is None
    for after_s in (50, 30, 40):
        delayed(conn, table, queue, after_s)
    due_s = reported(conn, table, queue, count)
    assert due_s is not None and 20 < due_s <= 30
    assert reported(conn, table, queue, count, within_s=20) is None


@SHAPES
def test_a_job_that_is_kept_counts_for_its_host_from_the_end_of_its_wait(
    conn: engine.Connection, table: job_tables.JobTable, queue: str, count: int
) -> None:
    kept(conn, table, queue, "box", 30)
    kept(conn, table, queue, "box", -1)
    conn.execute(f"UPDATE {table.name} SET lock_key = 'k' WHERE resume_at < now()".encode())
    due_s = reported(conn, table, queue, count)
    assert due_s is not None and 20 < due_s <= 30
    assert reported(conn, table, queue, count, host="other") is None


@SHAPES
def test_a_job_that_is_due_already_counts_for_a_claim_that_does_not_promote(
    conn: engine.Connection, table: job_tables.JobTable, queue: str, count: int
) -> None:
    job_id = delayed(conn, table, queue, 30)
    with conn.transaction():
        conn.execute(b"SET LOCAL session_replication_role = replica")
        conn.execute(f"UPDATE {table.name} SET available_at = now()".encode())
    assert reported(conn, table, queue, count, promote=False) == 0
    with engine.connect() as other, other.transaction():
        other.execute(f"SELECT FROM {table.name} WHERE id = %s FOR UPDATE".encode(), (job_id,))
        assert reported(conn, table, queue, count) is None  # else it would claim again at once
    assert reported(conn, table, queue, count, expected=1) is None


@pytest.mark.parametrize(("table", "queue"), [(INGEST, "fetch"), (NODES, "cpu")])
@pytest.mark.parametrize("versions", [None, ["x@1"]])
def test_it_tells_too_if_it_claims_fewer_than_it_may(
    conn: engine.Connection, table: job_tables.JobTable, queue: str, versions: list[str] | None
) -> None:
    make = factories.node if table is NODES else factories.ingest
    for _ in range(2):
        make(conn, queue=queue)
    delayed(conn, table, queue, 30)
    if versions and table is NODES:
        factories.node(conn, required_version="x@1")
    of_version = int(bool(versions) and table is NODES)
    due_s = reported(conn, table, queue, 5, expected=2 + of_version, versions=versions)
    assert due_s is not None and 20 < due_s <= 30
    for _ in range(5):
        make(conn, queue=queue)
    assert reported(conn, table, queue, 5, expected=5, versions=versions) is None


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize(("table", "queue"), [(INGEST, "fetch"), (NODES, "cpu")])
def test_the_statement_that_records_a_job_tells_too(
    conn: engine.Connection, table: job_tables.JobTable, queue: str, count: int
) -> None:
    (factories.node if table is NODES else factories.ingest)(conn, queue=queue)
    delayed(conn, table, queue, 30)
    (job,) = claims.claim(conn, table, transitions.who(queue))
    done = [finish.Done(job_tables.lease_of(table, job), outcomes.Outcome("completed", 0.1, "{}"))]
    waits: list[claims.Wait] = []
    on_wait = claims.OnWait(waits.append, WITHIN_S)
    assert finish.finish(conn, done, who=transitions.who(queue), claim=count, on_wait=on_wait) == []
    assert waits[0].due_s is not None and 20 < waits[0].due_s <= 30


def test_a_queue_that_admits_nothing_tells_only_of_its_limit(conn: engine.Connection) -> None:
    delayed(conn, INGEST, "fetch", 30)
    delayed(conn, NODES, "cpu", 30)
    for queue in ("fetch", "cpu"):
        queues.pause(queue)
    assert reported(conn, INGEST, "fetch") is reported(conn, NODES, "cpu") is None
    queues.resume("fetch")
    queues.limit("fetch", max_running=1)
    factories.ingest(conn)
    assert reported(conn, INGEST, "fetch", expected=1) is None
    assert reported(conn, INGEST, "fetch") is None
    queues.limit("fetch", max_running=2)
    assert reported(conn, INGEST, "fetch") is not None


@BOTH
@pytest.mark.parametrize("within_s", [0.0, -1.0, 1e300, float("inf"), float("nan")])
def test_no_setting_of_the_poll_makes_a_claim_fail(
    conn: engine.Connection, table: job_tables.JobTable, within_s: float
) -> None:
    queue = "fetch" if table is INGEST else "cpu"
    delayed(conn, table, queue, 30)
    due_s = reported(conn, table, queue, within_s=within_s)
    assert (due_s is None) == (within_s <= 0)


@BOTH
def test_many_jobs_of_other_queues_hide_one_until_the_poll(
    conn: engine.Connection, table: job_tables.JobTable
) -> None:
    queue, other = ("fetch", "load") if table is INGEST else ("cpu", "gpu")
    delayed(conn, table, queue, 30)
    for _ in range(99):
        delayed(conn, table, other, 20)
    assert reported(conn, table, queue) is not None
    delayed(conn, table, other, 20)
    assert reported(conn, table, queue) is None
