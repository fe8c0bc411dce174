"""Send the statements of version 0.3.0 to its tables, one by one and as a fleet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psycopg
from psycopg.rows import dict_row

from queue_workflows import db, migrations
from queue_workflows.types import Row

CLAIM = """
UPDATE workflow_node_jobs SET status = 'running', claimed_by = %(host)s, host_label = %(host)s,
       worker_lane = 0, started_at = now(),
       lease_expires_at = now() + %(lease_s)s * interval '1 second'
 WHERE id = (SELECT j.id FROM workflow_node_jobs j JOIN workflow_runs r ON r.id = j.run_id
              WHERE j.status = 'queued' AND j.queue = 'cpu'
                AND r.status NOT IN ('completed', 'failed', 'cancelled')
              ORDER BY j.priority, j.created_at LIMIT 1 FOR UPDATE OF j SKIP LOCKED)
RETURNING *
"""
CLAIM_INGEST = """
UPDATE ingest_jobs SET status = 'running', claimed_by = %(host)s, started_at = now(),
       lease_expires_at = now() + %(lease_s)s * interval '1 second'
 WHERE id = (SELECT id FROM ingest_jobs WHERE status = 'queued' AND queue = 'fetch'
              ORDER BY priority, created_at LIMIT 1 FOR UPDATE SKIP LOCKED)
RETURNING *
"""
RENEW = """
UPDATE workflow_node_jobs SET lease_expires_at = now() + %(lease_s)s * interval '1 second'
 WHERE id = %(job)s AND status = 'running' AND claimed_by = %(host)s RETURNING *
"""
RENEW_INGEST = """
UPDATE ingest_jobs SET lease_expires_at = now() + %(lease_s)s * interval '1 second'
 WHERE id = %(job)s AND status = 'running' AND claimed_by = %(host)s RETURNING *
"""
COMPLETE = """
WITH done AS (
    UPDATE workflow_node_jobs SET status = 'completed', context_delta = '{"by": "legacy"}',
           error = NULL, seconds = 1, finished_at = now()
     WHERE id = %(job)s AND status NOT IN ('completed', 'failed', 'cancelled') RETURNING *),
sent AS (
    INSERT INTO workflow_dispatch_events (run_id, node_id, kind)
    SELECT run_id, node_id, 'completed' FROM done)
SELECT * FROM done
"""
COMPLETE_INGEST = """
UPDATE ingest_jobs SET status = 'completed', result = '{}', finished_at = now()
 WHERE id = %(job)s AND status NOT IN ('completed', 'failed', 'cancelled') RETURNING *
"""
RECLAIM = """
UPDATE workflow_node_jobs SET status = 'queued', claimed_by = NULL, lease_expires_at = NULL,
       priority = least(priority, 10)
 WHERE status = 'running' AND lease_expires_at < now() RETURNING *
"""
RECLAIM_INGEST = """
UPDATE ingest_jobs SET status = 'queued', claimed_by = NULL, lease_expires_at = NULL,
       priority = least(priority, 10)
 WHERE status = 'running' AND lease_expires_at < now() RETURNING *
"""
RECLAIM_ALL = """
UPDATE workflow_node_jobs SET status = 'queued', claimed_by = NULL, lease_expires_at = NULL,
       priority = 10
 WHERE status = 'running' RETURNING *
"""
"""Run at the start of its orchestrator, for jobs of every worker."""
BEAT = """
INSERT INTO worker_heartbeats (host_label, queue, concurrency, last_seen)
VALUES (%(host)s, %(queue)s, 1, now())
ON CONFLICT (host_label, queue) DO UPDATE SET last_seen = now() RETURNING *
"""
START = """
UPDATE workflow_runs SET status = 'running', started_at = now(), updated_at = now()
 WHERE id = %(run)s AND status = 'queued' RETURNING *
"""
ENQUEUE = """
INSERT INTO workflow_node_jobs (id, run_id, node_id, node_module, queue, status, priority, inputs,
       created_at)
VALUES (gen_random_uuid()::text, %(run)s, %(node)s, %(module)s, 'cpu', 'queued', 100, '{}', now())
ON CONFLICT (run_id, node_id) DO NOTHING RETURNING *
"""
FINISH_RUN = """
UPDATE workflow_runs SET status = 'completed', finished_at = now(), updated_at = now()
 WHERE id = %(run)s AND status = 'running' RETURNING *
"""
SUBMIT = """
INSERT INTO workflow_runs (id, workflow_name, status, mode, priority, out_dir, context, queued_at)
VALUES (%(run)s, %(workflow)s, 'queued', 'node', 100, %(out_dir)s, '{}', now()) RETURNING *
"""
SUBMIT_INGEST = """
INSERT INTO ingest_jobs (id, task_name, queue, args) VALUES (%(job)s, %(task)s, 'fetch', '{}')
RETURNING *
"""


def make_schema(conn: db.Connection) -> None:
    """Create the tables as that engine leaves them, with its ledger of two columns."""
    conn.execute(
        "CREATE TABLE queue_schema_version"
        " (version integer PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now())"
    )
    for path in sorted(migrations.dir().glob("*.sql")):
        version = int(path.name[:4])
        if version <= 12 and not path.name.endswith(".down.sql"):
            conn.execute(path.read_text().encode())
            conn.execute("INSERT INTO queue_schema_version (version) VALUES (%s)", (version,))


def do(conn: psycopg.Connection[Any], statement: str, **values: Any) -> Row | None:
    """Execute one of its statements; return the row, or None. A lease is 600 s by default."""
    return conn.execute(statement.encode(), {"lease_s": 600, **values}).fetchone()


class Process:
    """A process of that engine as a thread: an error ends it, and it is started again.

    It keeps a connection of psycopg's defaults, whose statements are prepared at their sixth use.
    """

    def __init__(self, dsn: str) -> None:
        self.deaths: list[str] = []
        self._dsn = dsn
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live, name="legacy", daemon=True)

    def __enter__(self) -> Any:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop as SIGTERM does: finish the present work."""
        self._over.set()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _live(self) -> None:
        while not self._over.is_set():
            try:
                with psycopg.connect(self._dsn, autocommit=True, row_factory=dict_row) as conn:
                    self.boot(conn)
                    while not self._over.is_set():
                        self.turn(conn)
            except psycopg.Error as error:
                self.deaths.append(f"{type(error).__name__}: {error}")
                self._over.wait(0.1)

    def boot(self, conn: psycopg.Connection[Any]) -> None:
        """Do what it does once, at its start."""

    def turn(self, conn: psycopg.Connection[Any]) -> None:
        """Do what it repeats."""


class Worker(Process):
    """Claims, renews and completes jobs without a fence; `body(job)` is the handler."""

    def __init__(
        self,
        dsn: str,
        host: str,
        body: Callable[[Row], object],
        *,
        queue: str = "cpu",
        lease_s: float = 600,
    ) -> None:
        super().__init__(dsn)
        self._who = {"host": host, "queue": queue, "lease_s": lease_s}
        self._body = body
        node = queue == "cpu"
        self._claim, self._renew, self._complete = (
            (CLAIM, RENEW, COMPLETE) if node else (CLAIM_INGEST, RENEW_INGEST, COMPLETE_INGEST)
        )
        self._channel = "node_job_ready" if node else "ingest_job_ready"

    def boot(self, conn: psycopg.Connection[Any]) -> None:
        conn.execute(f"LISTEN {self._channel}".encode())

    def turn(self, conn: psycopg.Connection[Any]) -> None:
        do(conn, BEAT, **self._who)
        job = do(conn, self._claim, **self._who)
        if job is None:
            list(conn.notifies(timeout=0.2, stop_after=1))
            return
        self._body(job)
        do(conn, self._renew, job=job["id"], **self._who)
        do(conn, self._complete, job=job["id"])


class Orchestrator(Process):
    """Starts runs, drains the outbox, takes back what lapsed; at boot, everything that runs.

    `graphs`: workflow → node id → (node module, the nodes it waits for).
    """

    def __init__(
        self,
        dsn: str,
        graphs: Mapping[str, Mapping[str, tuple[str, Sequence[str]]]],
        *,
        at_boot: str = RECLAIM_ALL,
    ) -> None:
        super().__init__(dsn)
        self._graphs = graphs
        self._at_boot = at_boot

    def boot(self, conn: psycopg.Connection[Any]) -> None:
        conn.execute(self._at_boot.encode())

    def turn(self, conn: psycopg.Connection[Any]) -> None:
        conn.execute(RECLAIM)
        conn.execute(RECLAIM_INGEST)
        for row in conn.execute(
            "SELECT id FROM workflow_runs WHERE status = 'queued' AND mode = 'node' LIMIT 50"
        ).fetchall():
            with conn.transaction():
                self._advance(conn, row["id"])
                do(conn, START, run=row["id"])
        events = conn.execute(
            "SELECT id, run_id FROM workflow_dispatch_events WHERE processed_at IS NULL"
            " ORDER BY id LIMIT 50"
        ).fetchall()
        for event in events:
            with conn.transaction():
                self._advance(conn, event["run_id"])
                conn.execute(
                    "UPDATE workflow_dispatch_events SET processed_at = now() WHERE id = %s",
                    (event["id"],),
                )
        if not events:
            self._over.wait(0.05)

    def _advance(self, conn: psycopg.Connection[Any], run: str) -> None:
        row = conn.execute("SELECT * FROM workflow_runs WHERE id = %s", (run,)).fetchone()
        graph = self._graphs[row["workflow_name"]] if row else {}
        states = {
            job["node_id"]: job["status"]
            for job in conn.execute(
                "SELECT node_id, status FROM workflow_node_jobs WHERE run_id = %s", (run,)
            ).fetchall()
        }
        for node, (module, after) in graph.items():
            if node not in states and all(states.get(name) == "completed" for name in after):
                do(conn, ENQUEUE, run=run, node=node, module=module)
        if all(states.get(node) == "completed" for node in graph):
            do(conn, FINISH_RUN, run=run)
