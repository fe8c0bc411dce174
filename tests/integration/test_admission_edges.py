"""Admission of jobs with lock keys and limits: no commit waits for a row, none exceeds a limit."""

from __future__ import annotations

from types import ModuleType

import psycopg
import pytest

from queue_workflows import db, queues
from queue_workflows.types import Row
from tests.support import app_triggers, factories, transitions

of_each_kind = pytest.mark.parametrize("kind", transitions.KINDS)
FETCH = transitions.who("fetch")


def reason(conn: db.Connection, job: Row) -> str | None:
    return factories.reread(conn, job)["blocked_reason"]


@of_each_kind
def test_a_job_whose_time_a_plain_update_ends_waits_for_its_key(
    conn: db.Connection, kind: transitions.Kind
) -> None:
    factories.of(conn, kind, lock_key="k")
    transitions.claim(conn, transitions.who("cpu" if kind == "node" else "fetch"))
    later = factories.of(conn, kind, lock_key="k", blocked_reason="not_due")
    factories.change(conn, later, "available_at = now() + interval '1 hour'")
    assert reason(conn, later) == "not_due"
    factories.change(conn, later, "available_at = NULL")
    assert reason(conn, later) == "locked"


@of_each_kind
def test_a_waiter_that_cannot_be_written_delays_neither_its_key_nor_the_commit(
    conn: db.Connection, kind: transitions.Kind
) -> None:
    first = factories.of(conn, kind, lock_key="k")
    bad, good = factories.of(conn, kind, lock_key="k"), factories.of(conn, kind, lock_key="k")
    with app_triggers.refusing(conn, transitions.TABLES[kind], f"NEW.id = '{bad['id']}'"):
        (job,) = transitions.claim(conn, transitions.who("cpu" if kind == "node" else "fetch"))
        assert job["id"] == first["id"]
        transitions.complete(conn, job)
        assert (reason(conn, bad), reason(conn, good)) == ("locked", None)


def test_a_commit_passes_a_waiting_job_of_a_partition_that_is_locked(
    conn: db.Connection, db: ModuleType
) -> None:
    queues.limit("fetch", partition_max_running=1)
    running = factories.of(conn, "ingest", partition_key="p")
    first, second = (factories.of(conn, "ingest", partition_key="p") for _ in range(2))
    (job,) = transitions.claim(conn, FETCH)
    assert job["id"] == running["id"]
    with db.connect() as other, other.transaction():
        other.execute("SELECT FROM ingest_jobs WHERE id = %s FOR UPDATE", (first["id"],))
        with conn.transaction():
            transitions.complete(conn, job)
            # The admission outlives a lock_timeout, and tries the next job then.
            conn.execute("SET LOCAL lock_timeout = 0")
            conn.execute("SET LOCAL statement_timeout = '4s'")
            conn.execute("SET CONSTRAINTS ALL IMMEDIATE")
        assert (reason(conn, first), reason(conn, second)) == ("limited", None)


def test_claims_of_a_limited_queue_wait_for_each_others_commit(
    conn: db.Connection, db: ModuleType
) -> None:
    queues.limit("fetch", max_running=1)
    for _ in range(2):
        factories.of(conn, "ingest")
    with db.connect() as other:
        with conn.transaction():
            assert len(transitions.claim(conn, FETCH)) == 1
            other.execute("SET lock_timeout = '100ms'")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                transitions.claim(other, FETCH)
        assert transitions.claim(other, FETCH) == []


@of_each_kind
def test_a_sweep_leaves_what_is_not_due(conn: db.Connection, kind: transitions.Kind) -> None:
    job = factories.of(conn, kind)
    factories.change(conn, job, "available_at = now() + interval '1 hour'")
    assert transitions.promote_due(conn) == 0
    assert reason(conn, job) == "not_due"
