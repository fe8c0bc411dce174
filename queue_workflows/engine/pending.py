"""Check in one cheap statement whether an orchestrator or a sweep has work."""

from __future__ import annotations

from typing import NamedTuple

from queue_workflows import db
from queue_workflows.db import statements


class Work(NamedTuple):
    """Which work waits for an orchestrator."""

    runs: bool
    """Runs to start."""
    events: bool
    """Outbox events to dispatch."""
    answers: bool
    """Answers of people to take."""
    due: bool
    """Delayed jobs or runs to promote."""
    run_due_s: float | None
    """Seconds until the next delayed run is due. None: none is within the time asked for."""


class Sweeps(NamedTuple):
    """Which sweeps have something to do."""

    leases: bool
    """A running job's lease has lapsed."""
    inputs: bool
    """An input node has waited too long."""
    lock_queues: bool
    """A job waits for a lock key, or let others go first because no worker serves its queue."""
    partitions: bool
    """A partition has a limit, waiters, or waiters that are due."""


def work(conn: db.Connection, *, within_s: float = 0.0) -> Work:
    """Return which work waits for an orchestrator.

    `within_s`: how far to look ahead for a delayed run, at most a day.
    """
    row = conn.execute(statements.pending.work, {"within_s": within_s}, prepare=True).fetchone()
    assert row is not None
    return Work(**row)


def sweeps(conn: db.Connection) -> Sweeps:
    """Return which sweeps have something to do."""
    row = conn.execute(statements.pending.sweeps, prepare=True).fetchone()
    assert row is not None
    return Sweeps(**row)


def has_silent_jobs(conn: db.Connection, silent_s: float) -> bool:
    """Return whether a running job of either family was not renewed for that many seconds."""
    parameters = {"silent_s": silent_s}
    row = conn.execute(statements.pending.silent_jobs, parameters, prepare=True).fetchone()
    return row is not None and row["silent"]
