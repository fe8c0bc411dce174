"""A check of `audit` only reads, is bounded, and reads no table of jobs from end to end."""

from __future__ import annotations

import json
import time
from typing import Any

import psycopg
import pytest

from queue_workflows.admin import audit
from queue_workflows.db import statements
from tests.support import console, factories
from tests.support.wait import patience

OLD = "now() - interval '1 h'"


def parameters(conn: Any, since_s: float | None = None, limit: int | None = None) -> dict[str, Any]:
    return audit.parameters(conn, since_s=since_s, limit=limit)


def test_a_window_reads_no_table_of_jobs_from_end_to_end(conn: Any) -> None:
    conn.execute("SET statement_timeout = '60s'")  # 80,000 rows
    conn.execute("SET session_replication_role = replica")
    conn.execute(
        "INSERT INTO ingest_jobs (id, task_name, queue, status, finished_at)"
        f" SELECT 'x' || n, 't', 'q', 'completed', {OLD} FROM generate_series(1, 40000) n;"
        " INSERT INTO workflow_node_jobs (id, run_id, node_id, node_module, queue, status)"
        " SELECT 'x' || n, 'r' || n / 9, 'n' || n, 'm', 'cpu', 'completed'"
        " FROM generate_series(1, 40000) n; ANALYZE".encode()
    )
    values = parameters(conn, 60, limit=6)
    for each in audit.INVARIANTS:
        if each.statement is None:
            continue
        plan = conn.execute(b"EXPLAIN " + each.statement.text, values).fetchall()
        text = "\n".join(row["QUERY PLAN"] for row in plan)
        assert "Seq Scan on ingest_jobs" not in text, f"invariant {each.number}\n{text}"
        assert "Seq Scan on workflow_node_jobs" not in text, f"invariant {each.number}\n{text}"
    conn.execute("TRUNCATE ingest_jobs, workflow_node_jobs")


def invariant_of(statement: bytes) -> audit.Invariant:
    return audit.Invariant(
        99, "test", "A test.", statements.Named(statement, "A test.", "many", None)
    )


def test_nothing_can_be_written(conn: Any) -> None:
    factories.ingest(conn, id="in")
    invariant = invariant_of(
        b"WITH gone AS (DELETE FROM ingest_jobs RETURNING id)"
        b" SELECT id, 'gone' AS text FROM gone LIMIT %(limit)s"
    )
    outcome = audit.check(conn, invariant, parameters(conn))
    assert isinstance(outcome, str)
    assert "read-only" in outcome
    assert factories.column(conn, "SELECT id FROM ingest_jobs") == ["in"]


def test_a_check_that_takes_too_long_is_given_up(
    conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "STATEMENT_TIMEOUT_S", 0.05)
    invariant = invariant_of(b"SELECT 'x' AS id, pg_sleep(9)::text AS text LIMIT %(limit)s")
    began = time.monotonic()
    assert "not finished within 0.05 s" in str(audit.check(conn, invariant, parameters(conn)))
    assert time.monotonic() - began < patience(5)
    assert isinstance(conn.execute("SELECT 1").fetchone(), dict)


def test_a_lost_connection_is_no_finding(conn: Any, dsn: str) -> None:
    values = parameters(conn)
    with psycopg.connect(dsn, autocommit=True) as other:
        other.execute("SELECT pg_terminate_backend(%s, 5000)", (conn.info.backend_pid,))
    with pytest.raises(psycopg.OperationalError):
        audit.check(conn, audit.INVARIANTS[0], values)


def test_an_unfinished_check_fails_too(conn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "INVARIANTS", (invariant_of(b"SELECT nothing"),))
    done = console.command("audit", "--json")
    (found,) = json.loads(done.out)["invariants"]
    assert (done.code, found["state"]) == (1, "unfinished")
    assert "try a shorter --since" in found["note"]
