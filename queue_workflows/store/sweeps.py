"""What the frequent sweeps would find, seen in one cheap look."""

from __future__ import annotations

from typing import NamedTuple

from queue_workflows import db
from queue_workflows.engine import poison
from queue_workflows.store import nodes


class Found(NamedTuple):
    """Which sweeps have something to see to."""

    lapsed: bool
    """A running job whose lease is over."""
    overdue: bool
    """An input node past its wait."""
    turns: bool
    """Somebody in the line of a lock key, or who gave up the turn with one."""
    lines: bool
    """Limits of partitions, somebody in the line of one, or such a line that is due."""


# In an index's order each: whatever the statistics say, no plan of these reads a whole table.
_LOOK = (
    "SELECT coalesce((SELECT true FROM workflow_node_jobs WHERE status = 'running'"
    " AND (lease_expires_at IS NULL OR lease_expires_at < now()) ORDER BY worker_id LIMIT 1),"
    " (SELECT true FROM ingest_jobs WHERE status = 'running'"
    " AND (lease_expires_at IS NULL OR lease_expires_at < now()) ORDER BY worker_id LIMIT 1),"
    " false) AS lapsed,"
    " EXISTS (SELECT FROM workflow_input_timeouts WHERE due_at <= now()) AS overdue,"
    " coalesce((SELECT true FROM workflow_node_jobs WHERE lock_key IS NOT NULL"
    " AND status = 'queued' AND blocked_reason = 'locked' ORDER BY lock_key LIMIT 1),"
    " (SELECT true FROM ingest_jobs WHERE lock_key IS NOT NULL"
    " AND status = 'queued' AND blocked_reason = 'locked' ORDER BY lock_key LIMIT 1),"
    " (SELECT true FROM workflow_node_jobs WHERE status = 'queued'"
    " AND blocked_reason = 'unserved' AND octet_length(queue) >= 0 ORDER BY queue LIMIT 1),"
    " (SELECT true FROM ingest_jobs WHERE status = 'queued'"
    " AND blocked_reason = 'unserved' AND octet_length(queue) >= 0 ORDER BY queue LIMIT 1),"
    " false) AS turns,"
    " EXISTS (SELECT FROM partition_dues WHERE due_at <= now())"
    " OR EXISTS (SELECT FROM queue_partition_limits)"
    " OR coalesce((SELECT true FROM ingest_jobs WHERE partition_key IS NOT NULL"
    " AND status = 'queued' AND blocked_reason = 'limited' ORDER BY queue, partition_key LIMIT 1),"
    " false) AS lines"
)


def look(conn: db.Connection) -> Found:
    """What reclaiming, timing out and mending turns and lines would find."""
    row = conn.execute(_LOOK, prepare=True).fetchone()
    assert row is not None
    return Found(row["lapsed"], row["overdue"], row["turns"], row["lines"])


ORPHANS = nodes.orphans_duty(poison.node_job)
"""Cancels jobs whose run is over, and leaves out rows which raise."""


def any_silent(conn: db.Connection, silent_s: float) -> bool:
    """Whether a running job of either family has not been renewed for so long."""
    row = conn.execute(_SILENT, {"silent": silent_s}, prepare=True).fetchone()
    return row is not None and row["silent"]


_SILENT = (
    "SELECT coalesce((SELECT true FROM workflow_node_jobs WHERE status = 'running'"
    " AND heartbeat_at < now() - %(silent)s::float8 * interval '1 second'"
    " ORDER BY worker_id LIMIT 1),"
    " (SELECT true FROM ingest_jobs WHERE status = 'running'"
    " AND heartbeat_at < now() - %(silent)s::float8 * interval '1 second'"
    " ORDER BY worker_id LIMIT 1), false) AS silent"
)
