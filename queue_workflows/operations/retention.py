"""Delete finished runs and jobs, events and logs past their retention, in small transactions."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator

from queue_workflows import config, db
from queue_workflows.db import statements
from queue_workflows.engine import row_isolation
from queue_workflows.operations import event_totals

_log = logging.getLogger(__name__)
BLOCKS = 256
"""Pages of a table that a batch reads: 2 MiB, in which some thousands of jobs fit."""
RUNS = 20
"""Runs that a batch deletes at most; their nodes, answers and outbox rows go with them."""
RUNS_TIMEOUT = "60s"
"""Each may have MAX_NODES_PER_RUN nodes. Nobody waits for the rows that are locked meanwhile."""
ROWS = 5000
_Batch = Callable[[db.Connection], int]
_Kind = tuple[str, Iterator[tuple[str, int]]]


def prune() -> dict[str, int]:
    """Delete all that is past its retention; return the number of deleted rows of each kind."""
    gone: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    for kind, count in batches():
        gone[kind] += count
    return dict(gone)


def due(conn: db.Connection | None = None) -> dict[str, int]:
    """Return how many runs and ingest jobs `prune` would delete now: `{"runs": n, "jobs": n}`."""
    with db.transaction(conn) as own:
        return {
            "runs": statements.retention.count_runs(own, days=config.RUN_RETENTION_DAYS.read()),
            "jobs": statements.retention.count_jobs(own, days=config.JOB_RETENTION_DAYS.read()),
        }


def batches(rows: row_isolation.Isolation | None = None) -> Iterator[tuple[str, int]]:
    """Prune step by step: after each transaction, yield its kind and how many rows it deleted.

    A row that raises when it is deleted is set aside in `rows` (None: for this call). An error of
    one kind is raised at the end, after the other kinds have been pruned.
    """
    kept = rows or row_isolation.Isolation()
    failed: Exception | None = _count_events()
    for kind, steps in _kinds(kept):
        while True:
            step = None
            try:
                step = next(steps, None)
            except db.Error as error:
                if row_isolation.is_outage(error):
                    raise
                _log.error("pruning of %s ends early: %s", kind, row_isolation.described(error))
                failed = failed or error
            if step is None:
                break
            yield step
    if failed is not None:
        raise failed


def _count_events() -> Exception | None:
    """Count the events that metrics have not counted, before they are deleted."""
    try:
        with db.statement() as conn:
            if not statements.metrics.progress(conn)["may_count"]:
                _log.warning("events are deleted uncounted: %s", event_totals.NO_RIGHTS)
                return None
        while event_totals.count_step():
            pass
    except db.Error as error:
        if row_isolation.is_outage(error):
            raise
        _log.error("events are deleted uncounted: %s", row_isolation.described(error))
        return error
    return None


def _kinds(rows: row_isolation.Isolation) -> Iterator[_Kind]:
    run_days, job_days = config.RUN_RETENTION_DAYS.read(), config.JOB_RETENTION_DAYS.read()
    # Jobs even without a default: a queue may have its own.
    yield "jobs", _walk("jobs", "ingest_jobs", delete_jobs, job_days, rows)
    if run_days > 0:
        yield "runs", _walk("runs", "workflow_runs", delete_runs, run_days, rows)
    days = config.NODE_EVENT_RETENTION_DAYS.read()
    if days > 0:
        yield from _by_age(days)
    days = config.EVENT_RETENTION_DAYS.read()
    if days > 0:
        batch, prune_events = ROWS, statements.events.prune
        yield (
            "events",
            _again("events", lambda conn: prune_events(conn, days=days, batch=batch), batch),
        )
    yield "workers", _again("workers", statements.workers.prune, 0)
    yield "hw_samples", _again("hw_samples", statements.samples.prune, 0)
    yield "gpu_models", _again("gpu_models", statements.models.prune, 0)
    yield "failure_alerts", _again("failure_alerts", statements.failure_alerts.prune, 0)


def _by_age(days: int) -> Iterator[_Kind]:
    rows = ROWS
    aged: dict[str, tuple[_Batch, int]] = {
        "outbox": (
            lambda conn: statements.retention.delete_outbox(conn, days=days, limit=ROWS),
            rows,
        ),
        "node_events": (
            lambda conn: statements.job_events.prune_nodes(conn, days=days, batch=rows),
            rows,
        ),
        "ingest_job_events": (lambda conn: delete_ingest_events(conn, days), rows),
        "logs": (lambda conn: statements.logs.prune(conn, days=days, batch=rows), rows),
        "fires": (lambda conn: statements.schedules.prune(conn, days=days, batch=rows), rows),
        "heartbeats": (lambda conn: statements.retention.delete_heartbeats(conn, days=days), 0),
    }
    for kind, (delete, batch) in aged.items():
        yield kind, _again(kind, delete, batch)


def _again(kind: str, delete: _Batch, batch: int) -> Iterator[tuple[str, int]]:
    """Delete batch after batch while they are full; once for a kind without a batch size."""
    while True:
        with db.transaction() as conn:
            count = delete(conn)
        yield kind, count
        if not batch or count < batch:
            return


def _walk(
    kind: str,
    table: str,
    delete: Callable[[db.Connection, int, float, row_isolation.Isolation], int],
    days: float,
    rows: row_isolation.Isolation,
) -> Iterator[tuple[str, int]]:
    """Delete page by page of the table; the same pages again while they give full batches."""
    with db.transaction() as conn:
        end = statements.retention.pages(conn, table=table)
    for first in range(0, end, BLOCKS):
        while True:
            with db.statement() as conn:
                count = delete(conn, first, days, rows)
            yield kind, count
            if kind != "runs" or count < RUNS:
                break


def _pages(first: int, days: float) -> dict[str, object]:
    return {"first": f"({first},0)", "end": f"({first + BLOCKS},0)", "days": days, "limit": RUNS}


def _set_timeout(conn: db.Connection) -> None:
    statements.retention.set_timeout(conn, timeout=RUNS_TIMEOUT)


def delete_jobs(conn: db.Connection, first: int, days: float, rows: row_isolation.Isolation) -> int:
    """Delete ingest jobs that ended so many days ago, in BLOCKS pages; return how many.

    `first`: the first of the pages. A queue's own `retention_days` stands before `days`; 0 keeps
    forever. A row that raises is set aside in `rows`.
    """
    duty = row_isolation.Duty(
        "deletion of ingest job",
        statements.retention.delete_jobs,
        statements.retention.find_jobs,
        statements.retention.delete_jobs_by_id,
        _stays,
        lambda: _pages(first, days),
        statements.retention.mark,
    )
    return len(rows.batch(conn, duty))


def delete_runs(conn: db.Connection, first: int, days: float, rows: row_isolation.Isolation) -> int:
    """Delete up to RUNS runs that ended so many days ago, in BLOCKS pages; return how many.

    0 days keep rows forever. A run with an open outbox row, or a node that has not ended, stays.
    A row that raises is set aside in `rows`.
    """
    duty = row_isolation.Duty(
        "deletion of run",
        statements.retention.delete_runs,
        statements.retention.find_runs,
        statements.retention.delete_runs_by_id,
        _stays,
        lambda: _pages(first, days),
        _set_timeout,
    )
    return len(rows.batch(conn, duty))


def _stays(conn: db.Connection, row_id: str, error: BaseException, failures: int) -> bool:
    """Return False: a row that cannot be deleted has no other end."""
    del conn, row_id, error, failures
    return False


def delete_ingest_events(conn: db.Connection, days: float) -> int:
    """Delete up to ROWS events of ingest jobs of that age; return how many."""
    statements.retention.mark(conn)
    return statements.retention.delete_ingest_events(conn, days=days, limit=ROWS)


KINDS = (
    "runs",
    "jobs",
    "outbox",
    "node_events",
    "ingest_job_events",
    "logs",
    "fires",
    "events",
    "workers",
    "heartbeats",
    "hw_samples",
    "gpu_models",
    "failure_alerts",
)
