"""Return running jobs to their queue: those with a lapsed lease, of one host, or all of them."""

from __future__ import annotations

from typing import cast

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.engine import job_tables, recovery, row_isolation
from queue_workflows.types import NodeJob, Row

_IN_BRIEF = ("id", "run_id", "node_id", "status")


def reclaim_nodes() -> list[Row]:
    """Take back node jobs whose lease has lapsed; return id, run_id, node_id and status of each.

    A row that raises is left out, and the others are taken back.
    """
    return _brief(_reclaim(job_tables.NODE_JOBS))


def reclaim_ingest_jobs() -> list[Row]:
    """Take back ingest jobs whose lease has lapsed; return their rows, as `reclaim_nodes` does."""
    return _reclaim(job_tables.INGEST_JOBS)


def _reclaim(table: job_tables.JobTable) -> list[Row]:
    with db.statement() as conn:
        return recovery.reclaim_lapsed(conn, table, rows=row_isolation.Isolation())


def _brief(rows: list[Row]) -> list[Row]:
    return [{name: row[name] for name in _IN_BRIEF} for row in rows]


def requeue_node(job_id: str) -> NodeJob | None:
    """Queue a running node job at the front, `watchdog_retries` + 1; its row, None: not running."""
    with db.transaction() as conn:
        return cast("NodeJob | None", statements.manual_changes.requeue_node(conn, job=job_id))


def requeue_all_nodes() -> list[Row]:
    """Queue every running node job at the front, counting nothing; as `reclaim_nodes`."""
    with db.transaction() as conn:
        return _brief(statements.manual_changes.requeue_all_nodes(conn))


def requeue_of_host(host_label: str, queue: str) -> int:
    """Queue a host's running jobs of a queue at the front, counting nothing; return how many."""
    table = job_tables.of_queue(queue)
    with db.transaction() as conn:
        return len(
            statements.manual_changes.requeue_of_host[table.name](
                conn, host=host_label, queue=queue
            )
        )
