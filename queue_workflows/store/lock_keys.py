"""Pass lock keys on from jobs whose queue nobody serves to jobs in served queues."""

from __future__ import annotations

from queue_workflows import db
from queue_workflows.engine import job_tables
from queue_workflows.types import Row

BATCH = 1_000
"""Jobs of a family that one transaction blocks, or puts back in line."""
BATCHES = 3
"""Transactions of a family and direction in one sweep; the rest is left to the next sweep."""
_COUNTED = 10_000
_FAMILIES = (job_tables.INGEST_JOBS.name, job_tables.NODE_JOBS.name)


def served(conn: db.Connection, stale_s: float) -> list[str]:
    """Return the queues that are not paused and have a live worker which takes jobs.

    `stale_s`: a worker that was not seen for so many seconds is not live.
    """
    row = conn.execute(
        "SELECT queue_workflows_served_queues(%s::float8) AS queues", (stale_s,), prepare=True
    ).fetchone()
    return row["queues"] if row else []


def block_unserved(conn: db.Connection, queues: list[str]) -> int:
    """Block the jobs that keep a lock key from others and are in none of these served queues.

    Returns how many; 0 if nobody waits for such a key in one of `queues`. Opens one transaction a
    batch. Their commits admit the next in line.
    """
    return _batches(conn, "block_unserved", queues)


def unblock_served(conn: db.Connection, queues: list[str]) -> int:
    """Put the unserved jobs of these served queues back in the line of their keys; how many.

    Opens one transaction a batch. Their commits admit whoever is first.
    """
    return _batches(conn, "unblock_served", queues)


def _batches(conn: db.Connection, function: str, queues: list[str]) -> int:
    count = 0
    for family in _FAMILIES:
        for _ in range(BATCHES):
            row = conn.execute(
                f"SELECT queue_workflows_{function}(%s, %s::text[], %s) AS n".encode(),
                (family, queues, BATCH),
                prepare=True,
            ).fetchone()
            if row is None or not row["n"]:
                break
            count += row["n"]
    return count


_UNSERVED = """
WITH RECURSIVE q (queue) AS (
    (SELECT queue::text FROM {jobs} WHERE status = 'queued' AND blocked_reason = 'unserved'
      AND octet_length(queue) >= 0 ORDER BY blocked_reason, {jobs}.queue LIMIT 1)
    UNION ALL
    SELECT (SELECT j.queue::text FROM {jobs} j WHERE j.status = 'queued'
        AND j.blocked_reason = 'unserved' AND octet_length(j.queue) >= 0 AND j.queue > q.queue
      ORDER BY j.blocked_reason, j.queue LIMIT 1)
      FROM q WHERE q.queue IS NOT NULL)
SELECT q.queue, (SELECT count(*) FROM (SELECT FROM {jobs} j WHERE j.status = 'queued'
       AND j.blocked_reason = 'unserved' AND octet_length(j.queue) >= 0
       AND j.queue = q.queue LIMIT %s) c) AS n
  FROM q WHERE q.queue IS NOT NULL LIMIT 100
"""


def unserved(conn: db.Connection) -> list[Row]:
    """Return the queues whose jobs let others have their lock keys: queue, n (at most 10,000).

    At most 100 queues of each family, by name.
    """
    found: dict[str, int] = {}
    for family in _FAMILIES:
        query = _UNSERVED.replace("{jobs}", family).encode()
        for row in conn.execute(query, (_COUNTED,)).fetchall():
            found[row["queue"]] = found.get(row["queue"], 0) + row["n"]
    return [{"queue": queue, "n": count} for queue, count in sorted(found.items())]
