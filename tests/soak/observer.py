"""Check the invariants while the soak runs; find open transactions and queues without workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from queue_workflows import db
from queue_workflows.admin import audit
from tests.soak import background, faults, fleet, tasks

SLACK_S = 1.0
"""What is acknowledged may meet a transaction of this age that is still under way."""
INVARIANTS_EVERY_S = 5.0
LOOK_EVERY_S = 0.5
OPEN_S = 6.0
"""The five seconds of invariant 14, and one for the query itself."""
EXCUSE_S = 12.0
"""The engine's limit on an idle transaction, and one poll: a stopped process cannot end it."""
_OPEN = """
SELECT application_name AS seat, extract(epoch FROM now() - xact_start)::float8 AS open_s,
       state, left(query, 80) AS query
  FROM pg_stat_activity
 WHERE datname = current_database() AND application_name = ANY (%s)
   AND xact_start < clock_timestamp() - %s * interval '1 second'
"""
_DOUBT_S = fleet.KNOBS["STALE_WORKER_AFTER_S"] - 2.0
"""A worker that was not seen for so long may be stale at a sweep between two polls."""
BLIND_S = 1.0
"""A longer gap between two polls proves nothing about the time in between: twice LOOK_EVERY_S."""
_UNSERVED = """
SELECT extract(epoch FROM clock_timestamp())::float8 AS at, ARRAY(
       SELECT q.queue FROM unnest(%s::text[]) q (queue)
        WHERE NOT EXISTS (
              SELECT FROM workers w WHERE w.queue = q.queue
                 AND w.state NOT IN ('stopped', 'dead', 'parked', 'paused', 'draining')
                 AND w.last_seen > clock_timestamp() - %s * interval '1 second')) AS queues
"""
_SERVED = """
SELECT extract(epoch FROM clock_timestamp())::float8 AS at, w.worker_id AS worker,
       w.host_label AS host, w.queue, w.pid, extract(epoch FROM w.last_seen)::float8 AS last_seen,
       w.state IN ('parked', 'paused') OR EXISTS (
           SELECT FROM worker_controls c
            WHERE c.host_label = w.host_label AND c.queue IN (w.queue, 'all')
              AND queue_workflows_is_off(c.desired_state, c.until_at)) AS is_off,
       (SELECT count(*) FROM ingest_jobs j
         WHERE j.status = 'running' AND j.worker_id = w.worker_id)
       + (SELECT count(*) FROM workflow_node_jobs j
           WHERE j.status = 'running' AND j.worker_id = w.worker_id) AS running
  FROM workers w
 WHERE w.queue = ANY (%s) AND w.state NOT IN ('stopped', 'dead')
   AND w.last_seen > clock_timestamp() - %s * interval '1 second'
"""
WATCHED = (*tasks.QUEUES, "cpu")
"""The queues whose jobs are claimed in the order of their rows, unlike those of a GPU worker."""
_UNFINISHED = """
SELECT 'run ' || r.id || ' (' || r.workflow_name || ') is ' || r.status AS what,
       coalesce((SELECT sum(claim_no * 8 + attempts + length(status::text))
                   FROM workflow_node_jobs j WHERE j.run_id = r.id), 0)::float8 AS moves
  FROM workflow_runs r
 WHERE r.id = ANY (%(runs)s) AND (
       (r.status NOT IN ('completed', 'failed', 'cancelled') AND NOT EXISTS (
           SELECT FROM workflow_node_jobs j WHERE j.run_id = r.id AND j.status = 'awaiting_input'
              AND r.id = ANY (%(waiting)s)))
       OR EXISTS (SELECT FROM workflow_node_jobs j WHERE j.run_id = r.id AND j.status = 'running'))
UNION ALL
SELECT 'ingest job ' || id || ' (' || task_name || ') is ' || status, claim_no * 8 + attempts
  FROM ingest_jobs WHERE id = ANY (%(jobs)s) AND status IN ('queued', 'running')
"""


class Served(NamedTuple):
    """What a live worker of a queue did at a poll; instants in the database's epoch seconds.

    `running`: its jobs.
    """

    at: float
    worker: str
    host: str
    queue: str
    pid: int
    last_seen: float
    is_off: bool
    running: int


class Observer(background.BackgroundThread):
    """Polls in a thread of its own while the block runs."""

    def __init__(self, done: list[faults.Fault]) -> None:
        super().__init__("observer")
        self.invariants: list[str] = []
        self.slow: list[str] = []
        self.unserved: list[tuple[str, float]] = []
        """Each queue that perhaps had no live worker, and when, in the database's epoch seconds."""
        self.blind: list[tuple[float, float]] = []
        """The gaps of over BLIND_S between two polls of the queues, in the same seconds."""
        self.served: list[Served] = []
        self.polls: list[float] = []
        """When `served` was polled, in the database's epoch seconds."""
        self._polled_at = float("inf")
        self._done = done

    def go(self, stop: threading.Event) -> None:
        due = time.monotonic() + INVARIANTS_EVERY_S
        while not stop.wait(LOOK_EVERY_S):
            try:
                self._look_for_open()
                self._look_for_workers()
                if time.monotonic() >= due:
                    self._judge()
                    due = time.monotonic() + INVARIANTS_EVERY_S
            except db.Error:
                continue

    def _look_for_open(self) -> None:
        seats = [seat.name for seat in fleet.SEATS]
        with db.connection() as conn:
            rows = conn.execute(_OPEN, (seats, OPEN_S)).fetchall()
        now = time.monotonic()
        for row in rows:
            if not any(
                fault.until >= now - EXCUSE_S and fault.seat in (row["seat"], "server", "machine")
                for fault in self._done
            ):
                text = f"{row['seat']}: {row['open_s']:.1f} s, {row['state']}: {row['query']}"
                self.slow.append(text)

    def _look_for_workers(self) -> None:
        with db.connection() as conn:
            row = conn.execute(_UNSERVED, ([*tasks.QUEUES], _DOUBT_S)).fetchone()
        assert row is not None
        self.note_poll(row["at"], row["queues"])
        with db.connection() as conn:
            rows = conn.execute(_SERVED, ([*WATCHED], _DOUBT_S)).fetchall()
        # One instant for the whole poll, so that all rows of it are found by it.
        self.served += [Served(**{**each, "at": row["at"]}) for each in rows]
        self.polls.append(row["at"])

    def note_poll(self, at: float, queues: list[str]) -> None:
        """Note that these queues had perhaps no live worker, and that nothing was seen in a gap.

        On an overloaded machine this process does not run for a second or more.
        """
        self.unserved += [(queue, at) for queue in queues]
        if at - self._polled_at > BLIND_S:
            self.blind.append((self._polled_at, at))
        self._polled_at = at

    def _judge(self) -> None:
        with db.connection() as conn:
            self.invariants += broken_invariants(conn)


def broken_invariants(conn: db.Connection, *, sweep_s: float = audit.SWEEP_S) -> list[str]:
    """Return what breaks an invariant; those that need a sweep may be broken for `sweep_s`."""
    values = audit.parameters(conn, since_s=None, limit=100, commit_s=SLACK_S, sweep_s=sweep_s)
    return [
        f"invariant {invariant.number} ({invariant.name}): {found.id}: {found.text}"
        for invariant in audit.INVARIANTS
        if invariant.statement is not None
        for found in audit.offenders(conn, invariant, values)
    ]


def settle(
    unfinished: Callable[[], tuple[list[str], float]], *, quiet_s: float, most_s: float
) -> tuple[list[str], float]:
    """Wait until nothing is unfinished; what is stuck, and how long it took.

    Stuck is what is left when nothing has moved for `quiet_s`, or after `most_s`.
    """
    began = moved = time.monotonic()
    last: tuple[int, float] | None = None
    pause = threading.Event()
    while True:
        now = time.monotonic()
        try:
            left, moves = unfinished()
        except db.Error:
            pause.wait(0.5)
            continue
        if not left:
            return [], now - began
        if (len(left), moves) != last:
            last, moved = (len(left), moves), now
        if now - moved > quiet_s or now - began > most_s:
            return left, now - began
        pause.wait(0.3)


def unfinished(runs: list[str], jobs: list[str], waiting: list[str]) -> tuple[list[str], float]:
    """Return what neither ended nor waits for a person, and a number that shows progress."""
    with db.connection() as conn:
        rows = conn.execute(
            _UNFINISHED, {"runs": runs, "jobs": jobs, "waiting": waiting}
        ).fetchall()
    return [row["what"] for row in rows], sum(row["moves"] for row in rows)
