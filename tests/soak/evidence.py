"""Collect what the checks read: final rows, journal, acknowledgements and faults."""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from queue_workflows import db
from tests.soak import (
    acknowledgements,
    clock,
    fault_plan,
    faults,
    fleet,
    journal,
    observer,
    stream_readers,
    workflows,
)

_JOBS = """
SELECT 'node' AS family, j.id, j.run_id, j.node_id, j.node_module AS what, j.status::text,
       j.claim_no, j.crash_count, j.lapse_count, j.watchdog_retries, j.attempts, j.max_attempts,
       j.error, j.context_delta AS result, NULL AS reason, j.queue, j.seq, NULL AS key,
       NULL AS lock_key, NULL AS partition, extract(epoch FROM j.created_at)::float8 AS epoch
  FROM workflow_node_jobs j
UNION ALL
SELECT 'ingest', id, NULL, NULL, task_name, status::text, claim_no, crash_count,
       lapse_count, watchdog_retries, attempts, max_attempts, error, result, reason, queue, seq,
       CASE WHEN idempotency_released IS NOT TRUE THEN idempotency_key END, lock_key, partition_key,
       extract(epoch FROM created_at)::float8
  FROM ingest_jobs
"""
_EVENTS = """
SELECT job_id AS job, id AS place, event_type::text AS kind, claim_no AS claim, worker_id AS worker,
       host_label AS host, queue, extract(epoch FROM created_at)::float8 AS epoch, error,
       detail ->> 'reason' AS reason
  FROM {} WHERE job_id IS NOT NULL ORDER BY id
"""
_RUNS = """
SELECT id, workflow_name, status, error, definition -> 'nodes' AS nodes,
       CASE WHEN mode = 'node' THEN parent_run_id END AS parent, context ->> 'kind' AS kind,
       extract(epoch FROM created_at)::float8 AS epoch
  FROM workflow_runs
"""
_FIRES = """
SELECT f.name, extract(epoch FROM f.fire_at)::float8 AS at, f.job_id, j.id IS NOT NULL AS there
  FROM schedule_fires f LEFT JOIN ingest_jobs j ON j.id = f.job_id ORDER BY f.fire_at
"""


class Event(NamedTuple):
    """A row of either event table; `at` is the writing transaction's start, monotonic seconds."""

    job: str
    place: int
    kind: str
    claim: int | None
    worker: str | None
    host: str | None
    queue: str | None
    at: float
    epoch: float
    error: str | None = None
    reason: str | None = None
    """Why its worker handed the job back."""

    @property
    def pid(self) -> int:
        """Return the process that its worker id names, 0 if none."""
        return int((self.worker or ":0").split(":")[1])


class Locked(NamedTuple):
    """A row of a job that a transaction of a stranger had locked, in monotonic seconds."""

    job: str
    since: float
    until: float


@dataclass
class Evidence:
    """Everything that is known once the fleet has stopped."""

    jobs: dict[str, dict[str, Any]]
    runs: dict[str, dict[str, Any]]
    events: dict[str, list[Event]]
    fires: list[dict[str, Any]]
    lines: list[journal.Line]
    books: acknowledgements.Acknowledgements
    faults: list[faults.Fault]
    off: list[tuple[str, str, float, float]]
    ended: list[fleet.Ended]
    time: clock.Clock
    began: float
    ended_load: float
    stuck: list[str]
    invariants: list[str]
    slow: list[str]
    hostile: list[str] = field(default_factory=list[str])
    """What a hostile role got done that it may not, or that took too long."""
    shown: list[str] = field(default_factory=list[str])
    """What is wrong with what commands and logs showed of hostile rows, and with files."""
    locked: list[Locked] = field(default_factory=list[Locked])
    """Jobs whose rows a stranger had locked: they are not renewed meanwhile."""
    blocked: list[str] = field(default_factory=list[str])
    """Who waited for the transaction of a stranger and may not."""
    changed: list[str] = field(default_factory=list[str])
    """Texts that a client with other settings read wrongly."""
    unserved: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    """Queues that perhaps had no live worker, and when: see `observer.Observer`."""
    blind: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """When the observer saw nothing, in the database's epoch seconds."""
    served: list[observer.Served] = field(default_factory=list[observer.Served])
    """What each live worker of `observer.WATCHED` did at each poll, in monotonic seconds."""
    polls: list[float] = field(default_factory=list[float])
    """The instants of these polls, in monotonic seconds."""
    streams: dict[str, stream_readers.Read] = field(default_factory=dict[str, stream_readers.Read])
    """What the reader of each job's stream got, in the order in which it got it."""
    by_job: dict[str, list[journal.Line]] = field(default_factory=dict[str, list[journal.Line]])

    def claims(self, job: str) -> dict[int, Event]:
        """Claim number → its `claimed` event."""
        found = (e for e in self.events.get(job, []) if e.kind == "claimed")
        return {event.claim: event for event in found if event.claim is not None}

    def finals(self, job: str) -> list[Event]:
        """Return its `completed` and `failed` events, oldest first."""
        return [e for e in self.events.get(job, []) if e.kind in ("completed", "failed")]

    def hit(self, kinds: tuple[str, ...], pid: int, since: float, until: float) -> bool:
        """Return whether a kill or a fault of these kinds hit this process between two instants."""
        return any(
            (f.is_kill or f.kind in kinds) and f.hits(pid, since, until) for f in self.faults
        )

    @functools.cached_property
    def killers(self) -> list[journal.Line]:
        """Return the first line of each handler that kills a process."""
        starts = [line for line in self.lines if line.word == "start"]
        return [line for line in starts if line.what in workflows.KILLERS]

    def died_in_executor(self, job: str, claim: int | None) -> bool:
        """Return whether a fault killed the executor in which this claim's handler ran.

        It may have written its last line just before, and so not be among the jobs of the fault.
        """
        places = {line.runs_in for line in self.by_job.get(job, []) if line.claim == claim}
        killed = [f for f in self.faults if f.kind == fault_plan.KILL_EXECUTOR]
        held = {(each.id, each.claim_no) for f in killed for each in f.held}
        return (job, claim) in held or any(pid in places for f in killed for pid in f.pids)

    def hit_seat(self, kind: str, seat: fleet.Seat, since: float, until: float) -> bool:
        """Return whether a fault of this kind hit a seat between two instants."""
        return any(
            fault.kind == kind and fault.seat == seat.name and since <= fault.at <= until
            for fault in self.faults
        )

    def was_locked(self, job: str, since: float, until: float) -> bool:
        """Return whether a stranger had the row of a job locked between the two instants."""
        return any(
            each.job == job and each.since <= until and each.until >= since for each in self.locked
        )

    def paused(self, queue: str, since: float, until: float) -> bool:
        """Return whether the queue may have been paused between the two instants."""
        return any(
            pause.queue == queue
            and self.time.at(pause.since) <= until
            and self.time.at(pause.until) >= since
            for pause in self.books.pauses
        )

    def seat(self, event: Event) -> fleet.Seat | None:
        """Return the seat of the worker's process of an event."""
        where = [s for s in fleet.SEATS if s.label == event.host and event.queue in s.queues]
        if len(where) == 1:
            return where[0]
        # A pid comes back for another process; its own is the one that ended next.
        its = [e for e in self.ended if e.pid == event.pid and e.at >= event.at]
        name = min(its).seat if its else None
        return next((s for s in where if s.name == name), None)


def is_worn(job: dict[str, Any]) -> bool:
    """Return whether a job failed as poison, which crashes and lapses by faults may cause too."""
    worn = job["crash_count"] >= fleet.MAX_CRASHES or job["lapse_count"] >= fleet.MAX_LAPSES
    return job["status"] == "failed" and worn


def gather(seen_live: list[str], **known: Any) -> Evidence:
    """Read the database and the journal; a sweep of orphans comes before (invariant 8)."""
    time: clock.Clock = known["time"]
    with db.connection() as conn:
        jobs = {row["id"]: row for row in conn.execute(_JOBS).fetchall()}
        runs = {row["id"]: row for row in conn.execute(_RUNS).fetchall()}
        fires = conn.execute(_FIRES).fetchall()
        events: dict[str, list[Event]] = defaultdict(list)
        for table in ("workflow_node_events", "ingest_job_events"):
            for row in conn.execute(_EVENTS.format(table).encode()).fetchall():
                epoch = row["epoch"]
                events[row["job"]].append(Event(**row, at=time.at(epoch)))
        # A handler that still runs would never end: liveness was checked before the fleet stopped.
        broken = observer.broken_invariants(conn, sweep_s=0)
    evidence = Evidence(jobs, runs, dict(events), fires, invariants=seen_live + broken, **known)
    by_job: dict[str, list[journal.Line]] = defaultdict(list)
    for line in evidence.lines:
        by_job[line.job].append(line)
    evidence.by_job = dict(by_job)
    return evidence
