"""Run the baseline: a plain table, one SQL function per step, psycopg; also as a process."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import psycopg

SCHEMA = """
CREATE TABLE bare_jobs (
    id               bigserial PRIMARY KEY,
    queue            text NOT NULL,
    task_name        text NOT NULL DEFAULT 'noop',
    reason           text NOT NULL DEFAULT 'tick',
    status           text NOT NULL DEFAULT 'queued',
    priority         smallint NOT NULL DEFAULT 100,
    args             jsonb NOT NULL DEFAULT '{}',
    result           jsonb,
    claimed_by       text,
    lease_expires_at timestamptz,
    created_at       timestamptz NOT NULL DEFAULT now(),
    started_at       timestamptz,
    finished_at      timestamptz
);
CREATE INDEX bare_jobs_claim_idx ON bare_jobs (queue, priority, id) WHERE status = 'queued';

-- Finish one job, then claim the next.
CREATE FUNCTION bare_step(p_done bigint, p_result jsonb, p_queue text) RETURNS SETOF bare_jobs
LANGUAGE plpgsql AS $$
BEGIN
    IF p_done IS NOT NULL THEN
        UPDATE bare_jobs SET status = 'done', result = p_result, finished_at = now(),
               lease_expires_at = NULL
         WHERE id = p_done;
    END IF;
    RETURN QUERY
    UPDATE bare_jobs SET status = 'running', claimed_by = 'bare', started_at = now(),
           lease_expires_at = now() + interval '600 seconds'
     WHERE id = (SELECT id FROM bare_jobs WHERE queue = p_queue AND status = 'queued'
                  ORDER BY priority, id LIMIT 1 FOR UPDATE SKIP LOCKED)
    RETURNING *;
END $$;

-- The same for many at once.
CREATE FUNCTION bare_batch(p_done bigint[], p_results text[], p_queue text, p_size integer)
RETURNS SETOF bare_jobs LANGUAGE plpgsql AS $$
BEGIN
    UPDATE bare_jobs b SET status = 'done', result = d.result::jsonb, finished_at = now(),
           lease_expires_at = NULL
      FROM unnest(p_done, p_results) AS d (id, result) WHERE b.id = d.id;
    RETURN QUERY
    UPDATE bare_jobs SET status = 'running', claimed_by = 'bare', started_at = now(),
           lease_expires_at = now() + interval '600 seconds'
     WHERE id IN (SELECT id FROM bare_jobs WHERE queue = p_queue AND status = 'queued'
                   ORDER BY priority, id LIMIT p_size FOR UPDATE SKIP LOCKED)
    RETURNING *;
END $$;

-- Finish a job, insert the one that follows it, and wake whoever listens.
CREATE FUNCTION bare_hop(p_done bigint, p_result jsonb, p_queue text, p_left integer) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE bare_jobs SET status = 'done', result = p_result, finished_at = now(),
           lease_expires_at = NULL
     WHERE id = p_done;
    INSERT INTO bare_jobs (queue, args) VALUES (p_queue, jsonb_build_object('left', p_left));
    PERFORM pg_notify('bare_ready', p_queue);
END $$;

-- The join behind a fan: inserted by whoever finds that all of it is done.
CREATE FUNCTION bare_join(p_queue text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM bare_jobs WHERE queue = p_queue) AND NOT EXISTS (
        SELECT FROM bare_jobs WHERE queue = p_queue AND status IN ('queued', 'running')) THEN
        INSERT INTO bare_jobs (id, queue, task_name) VALUES (-1, p_queue, 'join')
            ON CONFLICT DO NOTHING;
        IF FOUND THEN
            PERFORM pg_notify('bare_ready', p_queue);
        END IF;
    END IF;
END $$;
"""
ENQUEUE = (
    "INSERT INTO bare_jobs (task_name, queue, reason, priority, args)"
    " VALUES (%s, %s, %s, %s, %s::jsonb) RETURNING id"
)
ENQUEUE_MANY = (
    "INSERT INTO bare_jobs (task_name, queue, reason, priority, args)"
    " SELECT %s, %s, %s, %s::smallint, args::jsonb FROM unnest(%s::text[]) AS a (args)"
)
STEP = "SELECT * FROM bare_step(%s::bigint, %s::jsonb, %s::text)"
BATCH = "SELECT * FROM bare_batch(%s::bigint[], %s::text[], %s::text, %s::integer)"
HOP = "SELECT bare_hop(%s::bigint, %s::jsonb, %s::text, %s::integer)"
POLL_S = 1.0

Connection = psycopg.Connection[dict[str, Any]]


def fill(conn: psycopg.Connection[Any], queue: str, count: int) -> None:
    """Empty the table, insert that many queued rows, and analyze it."""
    conn.execute("TRUNCATE bare_jobs RESTART IDENTITY")
    conn.execute(
        "INSERT INTO bare_jobs (queue) SELECT %s FROM generate_series(1, %s)", (queue, count)
    )
    conn.execute("ANALYZE bare_jobs")


def step(
    conn: Connection, done: int | None, result: str | None, queue: str
) -> dict[str, Any] | None:
    """Finish `done`, claim the next; the claimed row, or None. One commit."""
    return conn.execute(STEP, (done, result, queue), prepare=True).fetchone()


def drain(conn: Connection, queue: str) -> None:
    """Finish jobs one at a time until there is none."""
    job = step(conn, None, None, queue)
    while job is not None:
        job = step(conn, job["id"], json.dumps({}), queue)


def drain_batches(conn: Connection, queue: str, size: int) -> None:
    """Finish batches until there is none."""
    ids: list[int] = []
    while True:
        results = [json.dumps({}) for _ in ids]
        rows = conn.execute(BATCH, (ids, results, queue, size), prepare=True).fetchall()
        if not rows:
            return
        ids = [row["id"] for row in rows]


def listen(conn: Connection, queue: str) -> None:
    """Wait for jobs for ever; note when each handler starts, and insert what follows it."""
    conn.execute("LISTEN bare_ready")
    while True:
        done: int | None = None
        result: str | None = None
        joins = False
        while (job := step(conn, done, result, queue)) is not None:
            done, result = job["id"], json.dumps({"ns": time.monotonic_ns()})
            joins = joins or job["task_name"] == "fan"
            left = job["args"].get("left", 0)
            if left:
                conn.execute(HOP, (done, result, queue, left - 1), prepare=True)
                break
        if joins:
            conn.execute("SELECT bare_join(%s)", (queue,), prepare=True)
        for _ in conn.notifies(timeout=POLL_S, stop_after=1):
            pass


def connect(dsn: str) -> Connection:
    """Open a connection in autocommit, with dict rows: one statement is one transaction."""
    from psycopg.rows import dict_row

    return psycopg.Connection[dict[str, Any]].connect(dsn, autocommit=True, row_factory=dict_row)


def main() -> int:
    """Run `python -m benchmarks.baseline drain|batch|listen QUEUE [SIZE]` on the configured DSN."""
    import os

    role, queue, *more = sys.argv[1:]
    with connect(os.environ["QUEUE_WORKFLOWS_DB_URL"]) as conn:
        if role == "drain":
            drain(conn, queue)
        elif role == "batch":
            drain_batches(conn, queue, int(more[0]))
        else:
            listen(conn, queue)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
