"""A job that may have killed its worker is claimed alone, so that no other job dies with it."""

from __future__ import annotations

from typing import Any

import pytest

from queue_workflows import db
from tests.support import factories, transitions

NODES, INGEST = transitions.KINDS
SHAPES = pytest.mark.parametrize(
    ("kind", "more"),
    [
        pytest.param(INGEST, {}, id="ingest"),
        pytest.param(NODES, {}, id="nodes"),
        pytest.param(NODES, {"newest": True}, id="newest node first"),
        pytest.param(NODES, {"versions": ["w@2"]}, id="nodes, one with a version"),
    ],
)
WITHIN_S = 60.0


def queued(conn: db.Connection, kind: str, **columns: Any) -> str:
    made = factories.node if kind == NODES else factories.ingest
    return made(conn, **columns)["id"]


def claimed(
    conn: db.Connection, kind: str, more: dict[str, Any], count: int = 10
) -> tuple[list[str], float | None]:
    """Claim up to `count` jobs; return their ids, and in how many seconds to claim again."""
    waits: list[Any] = []
    who = transitions.who("cpu" if kind == NODES else "fetch", **more)
    on_wait = transitions.on_wait(waits.append, WITHIN_S)
    jobs = transitions.claim(conn, who, count, on_wait=on_wait)
    return [job["id"] for job in jobs], waits[-1].due_s if waits else None


@SHAPES
def test_each_is_claimed_alone_and_what_follows_at_once(
    conn: db.Connection, kind: str, more: dict[str, Any]
) -> None:
    if more.get("versions"):
        factories.node(conn, required_version="w@2", priority=200)
    others = [queued(conn, kind, priority=100) for _ in range(2)]
    crashed = [queued(conn, kind, priority=10, crash_count=1) for _ in range(2)]
    for job_id in reversed(crashed) if more.get("newest") else crashed:
        assert claimed(conn, kind, more) == ([job_id], 0)
    assert set(claimed(conn, kind, more)[0]) >= set(others)
    assert claimed(conn, kind, more) == ([], None)


@pytest.mark.parametrize("kind", [INGEST, NODES], ids=["ingest", "nodes"])
def test_it_is_left_by_a_claim_of_better_jobs_and_claimed_next(
    conn: db.Connection, kind: str
) -> None:
    better = [queued(conn, kind, priority=10) for _ in range(2)]
    crashed = queued(conn, kind, priority=50, crash_count=1)
    worse = queued(conn, kind, priority=100)
    assert claimed(conn, kind, {}) == ([*better, worse], 0)
    assert claimed(conn, kind, {}) == ([crashed], 0)
    assert claimed(conn, kind, {}) == ([], None)


@pytest.mark.parametrize("count", [2, 10])
def test_with_versions_it_is_the_last_one_of_a_claim(conn: db.Connection, count: int) -> None:
    version = {"versions": ["w@2"]}
    factories.node(conn, required_version="w@2", priority=200)
    better = queued(conn, NODES, priority=10)
    crashed = queued(conn, NODES, priority=50, crash_count=1)
    queued(conn, NODES, priority=100)
    expected = None if count == 2 else 0
    assert claimed(conn, NODES, version, count) == ([better, crashed], expected)
    assert len(claimed(conn, NODES, version)[0]) == 2


def test_a_node_with_a_crash_that_another_claims_hides_no_time(conn: db.Connection) -> None:
    queued(conn, NODES, crash_count=1)
    due = factories.one(conn, "SELECT now() + interval '30 seconds'")
    queued(conn, NODES, available_at=due)
    with db.connect() as other, other.transaction():
        other.execute("SELECT FROM workflow_node_jobs WHERE crash_count = 1 FOR UPDATE")
        jobs, due_s = claimed(conn, NODES, {})
    assert jobs == []
    assert due_s is not None and 25 < due_s <= 30


@pytest.mark.parametrize("kind", [INGEST, NODES], ids=["ingest", "nodes"])
def test_one_job_is_claimed_as_any_other(conn: db.Connection, kind: str) -> None:
    ids = [queued(conn, kind, crash_count=crashes) for crashes in (0, 1, 0)]
    assert [claimed(conn, kind, {}, count=1)[0] for _ in ids] == [[job_id] for job_id in ids]


def test_a_node_with_a_crash_of_a_run_that_is_over_stops_nobody(conn: db.Connection) -> None:
    over = factories.run(conn)
    factories.node(conn, over, "a", priority=10, crash_count=1)
    with factories.unguarded(conn, "workflow_runs"):
        conn.execute("UPDATE workflow_runs SET status = 'failed' WHERE id = %s", (over,))
    ids = [queued(conn, NODES) for _ in range(2)]
    assert claimed(conn, NODES, {}) == (ids, None)
