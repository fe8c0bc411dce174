"""A claim that returns fewer jobs than it may also returns when the next delayed job is due."""

from __future__ import annotations

from typing import Any

import pytest

from queue_workflows import db, queues
from tests.support import factories, transitions

NODES, INGEST = (transitions.TABLES[kind] for kind in transitions.KINDS)
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


def delayed(conn: db.Connection, table: str, queue: str, after_s: float, **columns: Any) -> str:
    due = factories.one(conn, "SELECT now() + %s * interval '1 second'", after_s)
    made = factories.node if table == NODES else factories.ingest
    return made(conn, queue=queue, available_at=due, **columns)["id"]


def kept(conn: db.Connection, table: str, queue: str, host: str, after_s: float) -> None:
    job_id = delayed(conn, table, queue, after_s + 3600)
    conn.execute(
        f"UPDATE {table} SET resume_host = %s, resume_until = available_at,"
        " resume_at = available_at - interval '1 hour' WHERE id = %s".encode(),
        (host, job_id),
    )


def reported(
    conn: db.Connection, queue: str, count: int = 1, *, promote: bool = True,
    within_s: float = WITHIN_S, expected: int = 0, **who: Any,
) -> float | None:  # fmt: skip
    """Claim this number of jobs, of which as many as expected are there; return `due_s`."""
    waits: list[Any] = []
    on_wait = transitions.on_wait(waits.append, within_s)
    claimant = transitions.who(queue, **who)
    jobs = transitions.claim(conn, claimant, count, promote=promote, on_wait=on_wait)
    assert len(jobs) == expected and all(job["id"] for job in jobs)
    return waits[-1].due_s if waits else None


@SHAPES
def test_it_tells_of_the_next_delayed_job_of_its_queue(
    conn: db.Connection, table: str, queue: str, count: int
) -> None:
    assert reported(conn, queue, count) is None
    others = ("load",) if table == INGEST else tuple({"cpu", "gpu"} - {queue})
    for other in others:
        delayed(conn, table, other, 10)
    delayed(conn, table, queue, 2 * WITHIN_S)
    assert reported(conn, queue, count) is None
    for after_s in (50, 30, 40):
        delayed(conn, table, queue, after_s)
    due_s = reported(conn, queue, count)
    assert due_s is not None and 20 < due_s <= 30
    assert reported(conn, queue, count, within_s=20) is None


@SHAPES
def test_a_job_that_is_kept_counts_for_its_host_from_the_end_of_its_wait(
    conn: db.Connection, table: str, queue: str, count: int
) -> None:
    kept(conn, table, queue, "box", 30)
    kept(conn, table, queue, "box", -1)
    conn.execute(f"UPDATE {table} SET lock_key = 'k' WHERE resume_at < now()".encode())
    due_s = reported(conn, queue, count)
    assert due_s is not None and 20 < due_s <= 30
    assert reported(conn, queue, count, host="other") is None


@SHAPES
def test_a_job_that_is_due_already_counts_for_a_claim_that_does_not_promote(
    conn: db.Connection, table: str, queue: str, count: int
) -> None:
    job_id = delayed(conn, table, queue, 30)
    with conn.transaction():
        conn.execute(b"SET LOCAL session_replication_role = replica")
        conn.execute(f"UPDATE {table} SET available_at = now()".encode())
    assert reported(conn, queue, count, promote=False) == 0
    with db.connect() as other, other.transaction():
        other.execute(f"SELECT FROM {table} WHERE id = %s FOR UPDATE".encode(), (job_id,))
        assert reported(conn, queue, count) is None  # else it would claim again at once
    assert reported(conn, queue, count, expected=1) is None


@pytest.mark.parametrize(("table", "queue"), [(INGEST, "fetch"), (NODES, "cpu")])
@pytest.mark.parametrize("versions", [None, ["x@1"]])
def test_it_tells_too_if_it_claims_fewer_than_it_may(
    conn: db.Connection, table: str, queue: str, versions: list[str] | None
) -> None:
    make = factories.node if table == NODES else factories.ingest
    for _ in range(2):
        make(conn, queue=queue)
    delayed(conn, table, queue, 30)
    if versions and table == NODES:
        factories.node(conn, required_version="x@1")
    of_version = int(bool(versions) and table == NODES)
    due_s = reported(conn, queue, 5, expected=2 + of_version, versions=versions)
    assert due_s is not None and 20 < due_s <= 30
    for _ in range(5):
        make(conn, queue=queue)
    assert reported(conn, queue, 5, expected=5, versions=versions) is None


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize(("table", "queue"), [(INGEST, "fetch"), (NODES, "cpu")])
def test_the_statement_that_records_a_job_tells_too(
    conn: db.Connection, table: str, queue: str, count: int
) -> None:
    (factories.node if table == NODES else factories.ingest)(conn, queue=queue)
    delayed(conn, table, queue, 30)
    who = transitions.who(queue)
    waits: list[Any] = []
    on_wait = transitions.on_wait(waits.append, WITHIN_S)
    jobs = transitions.claim(conn, who)
    assert transitions.complete_and_claim(conn, jobs, who, count, on_wait=on_wait) == []
    assert waits[0].due_s is not None and 20 < waits[0].due_s <= 30


def test_a_queue_that_admits_nothing_tells_only_of_its_limit(conn: db.Connection) -> None:
    delayed(conn, INGEST, "fetch", 30)
    delayed(conn, NODES, "cpu", 30)
    for queue in ("fetch", "cpu"):
        queues.pause(queue)
    assert reported(conn, "fetch") is reported(conn, "cpu") is None
    queues.resume("fetch")
    queues.limit("fetch", max_running=1)
    factories.ingest(conn)
    assert reported(conn, "fetch", expected=1) is None
    assert reported(conn, "fetch") is None
    queues.limit("fetch", max_running=2)
    assert reported(conn, "fetch") is not None


@BOTH
@pytest.mark.parametrize("within_s", [0.0, -1.0, 1e300, float("inf"), float("nan")])
def test_no_setting_of_the_poll_makes_a_claim_fail(
    conn: db.Connection, table: str, within_s: float
) -> None:
    queue = "fetch" if table == INGEST else "cpu"
    delayed(conn, table, queue, 30)
    due_s = reported(conn, queue, within_s=within_s)
    assert (due_s is None) == (within_s <= 0)


@BOTH
def test_many_jobs_of_other_queues_hide_one_until_the_poll(conn: db.Connection, table: str) -> None:
    queue, other = ("fetch", "load") if table == INGEST else ("cpu", "gpu")
    delayed(conn, table, queue, 30)
    for _ in range(99):
        delayed(conn, table, other, 20)
    assert reported(conn, queue) is not None
    delayed(conn, table, other, 20)
    assert reported(conn, queue) is None
