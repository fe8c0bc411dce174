"""What a scrape of the metrics reads, and that it counts only where its role may."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.telemetry import metrics_page
from tests.support import console, factories, transitions
from tests.support.metrics_page import read, value


def test_a_role_that_only_reads_gets_what_is_counted(migrated_database: str) -> None:
    def finish() -> None:
        factories.ingest(conn)
        transitions.complete_ingest(conn, transitions.claim_ingest(conn))

    def counted() -> float:
        return value(read(metrics_page.scrape(conn)), "jobs_total")

    with db.connect(url=migrated_database) as conn:
        finish()
        assert counted() == 1
        finish()
        conn.execute(
            "GRANT EXECUTE ON FUNCTION queue_workflows_metric_bounds(),"
            " queue_workflows_is_paused(timestamptz, timestamptz) TO pg_read_all_data;"
            " SET ROLE pg_read_all_data"
        )
        assert counted() == 1
        conn.execute("RESET ROLE; SET default_transaction_read_only = on")
        assert counted() == 1
        conn.execute("SET default_transaction_read_only = off")
        assert counted() == 2


def test_a_server_that_only_reads_gives_what_is_counted(
    conn: Any, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transitions.run_ingest(conn)
    before = console.printed("metrics")
    transitions.run_ingest(conn)
    db.close_pool()
    monkeypatch.setenv("PGOPTIONS", "-c default_transaction_read_only=on")
    done = console.command("metrics")
    assert (done.code, done.err) == (0, ""), done
    name = "queue_workflows_jobs_total"
    counted = [line for line in before.splitlines() if line.startswith(name)]
    assert counted == [line for line in done.out.splitlines() if line.startswith(name)] != []


def test_the_oldest_node_is_found_among_versions_priorities_and_queues(conn: Any) -> None:
    factories.node(conn, status="completed")
    conn.execute(
        "INSERT INTO workflow_node_jobs (run_id, node_id, node_module, queue, status, priority,"
        " required_version, created_at)"
        " SELECT r.id, concat_ws('-', q, p, v, n), 'm', q, 'queued', p, v,"
        " timestamptz '2026-01-01' + n * interval '1 s'"
        "   - CASE WHEN (q, p) = ('cpu', 7) AND v IS NULL THEN interval '30 days'"
        "          WHEN (q, p, v) = ('gpu', -32768, 'b') THEN interval '40 days'"
        "          ELSE interval '0' END"
        " FROM workflow_runs r, unnest(ARRAY['cpu', 'gpu']) q,"
        " unnest(ARRAY[-32768, 3, 7]) p, unnest(ARRAY['a', 'b', NULL]) v,"
        " generate_series(1, 200) n"
    )
    expected = {
        row["queue"]: row["age_s"]
        for row in conn.execute(
            "SELECT queue::text, extract(epoch FROM now() - min(created_at))::float8 AS age_s"
            " FROM workflow_node_jobs WHERE status = 'queued' GROUP BY queue"
        )
    }
    read_rows = (
        "SELECT coalesce(idx_tup_fetch, 0) + seq_tup_read FROM pg_stat_xact_user_tables"
        " WHERE relname = 'workflow_node_jobs'"
    )
    with conn.transaction():
        db.set_local(conn, metrics_page.IN_ORDER)
        before = factories.one(conn, read_rows)
        found = statements.metrics.oldest_nodes(conn)
        rows = factories.one(conn, read_rows) - before
    assert {row["queue"]: row["age_s"] for row in found} == pytest.approx(expected, abs=5)
    assert rows <= 3 * 18 + 1, "three searches for each version and priority"


@pytest.mark.parametrize("table", statements.JOB_TABLES)
def test_queued_jobs_are_counted_by_pages_until_there_are_statistics(
    db: ModuleType, own_database: Any, table: str
) -> None:
    own = statements.metrics

    def plan() -> str:
        with db.connect() as conn, conn.transaction():
            db.set_local(conn, metrics_page.BY_INDEX)
            own.by_pages[table](conn)
            rows = conn.execute(b"EXPLAIN " + own.waiting[table].text).fetchall()
        return "\n".join(row["QUERY PLAN"] for row in rows)

    admin = own_database.conn
    admin.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = false)")
    admin.execute(f"TRUNCATE {table} CASCADE")  # which forgets what an earlier test had counted
    if table == "ingest_jobs":
        rows = "(task_name, queue) SELECT 't', 'load'"
    else:
        admin.execute("INSERT INTO workflow_runs (id, workflow_name) VALUES ('r', 'w')")
        rows = "(run_id, node_id, node_module, queue) SELECT 'r', 'n' || n, 'm', 'cpu'"
    admin.execute(f"INSERT INTO {table} {rows} FROM generate_series(1, 2000) n")
    assert f"Bitmap Heap Scan on {table}" in plan() and "Sort" not in plan()
    admin.execute(f"VACUUM ANALYZE {table}")
    assert "Index Only Scan" in plan()
    admin.execute(f"ALTER TABLE {table} RESET (autovacuum_enabled)")
