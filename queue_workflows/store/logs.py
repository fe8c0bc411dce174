"""The logs of attempts: written under the claim, pruned by age."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from psycopg import sql

from queue_workflows import db
from queue_workflows.store import tables


class Written(NamedTuple):
    """An attempt's log; `head` None: as it is stored. Between head and tail `cut_bytes` are gone.

    No NUL and no lone surrogate in either.
    """

    lease: tables.Lease
    head: str | None
    tail: str
    cut_bytes: int


_WRITE = {
    table.name: sql.SQL(
        "INSERT INTO job_attempt_logs AS l (job_table, job_id, claim_no, head, tail, cut_bytes)"
        " SELECT {name}, w.job_id, w.claim_no, coalesce(w.head, ''), w.tail, w.cut"
        " FROM unnest(%(jobs)s::text[], %(claims)s::bigint[], %(heads)s::text[],"
        " %(tails)s::text[], %(cuts)s::bigint[]) AS w (job_id, claim_no, head, tail, cut)"
        " JOIN {jobs} j ON j.id = w.job_id AND j.claim_no = w.claim_no"
        " ON CONFLICT (job_id, claim_no, job_table) DO UPDATE SET"
        # Left out, it stays where it lies and is not written again.
        " head = CASE WHEN excluded.head = '' THEN l.head ELSE excluded.head END,"
        " tail = excluded.tail, cut_bytes = excluded.cut_bytes, updated_at = now()"
    )
    .format(name=sql.Literal(table.name), jobs=sql.Identifier(table.name))
    .as_bytes(None)
    for table in (tables.NODE_JOBS, tables.INGEST_JOBS)
}


def write(conn: db.Connection, table: tables.JobTable, logs: Sequence[Written]) -> int:
    """Store the logs of attempts, each once; how many.

    Left out are those whose job is gone or was claimed again, whichever worker did.
    """
    parameters = {
        "jobs": [log.lease.job_id for log in logs],
        "claims": [log.lease.claim_no for log in logs],
        "heads": [log.head for log in logs],
        "tails": [log.tail for log in logs],
        "cuts": [log.cut_bytes for log in logs],
    }
    return conn.execute(_WRITE[table.name], parameters).rowcount


def prune(conn: db.Connection, *, older_than_days: float, batch: int) -> int:
    """Delete up to `batch` logs of attempts past their age; how many."""
    return conn.execute(_PRUNE, (older_than_days, batch)).rowcount


_PRUNE = (
    "DELETE FROM job_attempt_logs WHERE ctid = ANY (ARRAY(SELECT ctid FROM job_attempt_logs"
    " WHERE created_at < now() - %s * interval '1 day' LIMIT %s))"
)
