"""A job that may have killed its worker is claimed alone, so that no other job dies with it."""

from __future__ import annotations

from collections.abc import Generator
from types import ModuleType
from typing import Any

import pytest

from queue_workflows import db as engine
from queue_workflows.engine import claims, job_tables
from tests.support import factories, transitions

NODES, INGEST = job_tables.NODE_JOBS, job_tables.INGEST_JOBS
SHAPES = pytest.mark.parametrize(
    ("table", "more"),
    [
        pytest.param(INGEST, {}, id="ingest"),
        pytest.param(NODES, {}, id="nodes"),
        pytest.param(NODES, {"newest": True}, id="newest node first"),
        pytest.param(NODES, {"versions": ["w@2"]}, id="nodes, one with a version"),
    ],
)
WITHIN_S = 60.0


@pytest.fixture
def conn(db: ModuleType) -> Generator[engine.Connection]:
    with engine.connect() as conn:
        yield conn


def queued(conn: engine.Connection, table: job_tables.JobTable, **columns: Any) -> str:
    made = factories.node if table is NODES else factories.ingest
    return made(conn, **columns)["id"]


def claimed(
    conn: engine.Connection, table: job_tables.JobTable, more: dict[str, Any], count: int = 10
) -> tuple[list[str], float | None]:
    """Claim up to `count` jobs; return their ids, and in how many seconds to claim again."""
    waits: list[claims.Wait] = []
    who = transitions.who("cpu" if table is NODES else "fetch", **more)
    on_wait = claims.OnWait(waits.append, WITHIN_S)
    jobs = claims.claim(conn, table, who, count=count, on_wait=on_wait)
    return [job["id"] for job in jobs], waits[-1].due_s if waits else None


@SHAPES
def test_each_is_claimed_alone_and_what_follows_at_once(
    conn: engine.Connection, table: job_tables.JobTable, more: dict[str, Any]
) -> None:
    if more.get("versions"):
        factories.node(conn, required_version="w@2", priority=200)
    others = [queued(conn, table, priority=100) for _ in range(2)]
    crashed = [queued(conn, table, priority=10, crash_count=1) for _ in range(2)]
    for job_id in reversed(crashed) if more.get("newest") else crashed:
        assert claimed(conn, table, more) == ([job_id], 0)
    assert set(claimed(conn, table, more)[0]) >= set(others)
    assert claimed(conn, table, more) == ([], None)


@pytest.mark.parametrize("table", [INGEST, NODES], ids=["ingest", "nodes"])
def test_it_is_left_by_a_claim_of_better_jobs_and_claimed_next(
    conn: engine.Connection, table: job_tables.JobTable
) -> None:
    better = [queued(conn, table, priority=10) for _ in range(2)]
    crashed = queued(conn, table, priority=50, crash_count=1)
    worse = queued(conn, table, priority=100)
    assert claimed(conn, table, {}) == ([*better, worse], 0)
    assert claimed(conn, table, {}) == ([crashed], 0)
    assert claimed(conn, table, {}) == ([], None)


@pytest.mark.parametrize("count", [2, 10])
def test_with_versions_it_is_the_last_one_of_a_claim(conn: engine.Connection, count: int) -> None:
    version = {"versions": ["w@2"]}
    factories.node(conn, required_version="w@2", priority=200)
    better = queued(conn, NODES, priority=10)
    crashed = queued(conn, NODES, priority=50, crash_count=1)
    queued(conn, NODES, priority=100)
    expected = None if count == 2 else 0
    assert claimed(conn, NODES, version, count) == ([better, crashed], expected)
    assert len(claimed(conn, NODES, version)[0]) == 2


def test_a_node_with_a_crash_that_another_claims_hides_no_time(conn: engine.Connection) -> None:
    queued(conn, NODES, crash_count=1)
    due = factories.one(conn, "SELECT now() + interval '30 seconds'")
    queued(conn, NODES, available_at=due)
    with engine.connect() as other, other.transaction():
        other.execute("SELECT FROM workflow_node_jobs WHERE crash_count = 1 FOR UPDATE")
        jobs, due_s = claimed(conn, NODES, {})
    assert jobs == []
    assert due_s is not None and 25 < due_s <= 30


@pytest.mark.parametrize("table", [INGEST, NODES], ids=["ingest", "nodes"])
def test_one_job_is_claimed_as_any_other(
    conn: engine.Connection, table: job_tables.JobTable
) -> None:
    ids = [queued(conn, table, crash_count=crashes) for crashes in (0, 1, 0)]
    assert [claimed(conn, table, {}, count=1)[0] for _ in ids] == [[job_id] for job_id in ids]


def test_a_node_with_a_crash_of_a_run_that_is_over_stops_nobody(conn: engine.Connection) -> None:
    over = factories.run(conn)
    factories.node(conn, over, "a", priority=10, crash_count=1)
    with factories.unguarded(conn, "workflow_runs"):
        conn.execute("UPDATE workflow_runs SET status = 'failed' WHERE id = %s", (over,))
    ids = [queued(conn, NODES) for _ in range(2)]
    assert claimed(conn, NODES, {}) == (ids, None)
