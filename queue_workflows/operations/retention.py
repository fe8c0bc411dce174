"""Delete finished runs and jobs, events and logs past their retention, in small transactions."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator

from queue_workflows import config, db
from queue_workflows.db import statements
from queue_workflows.engine import (
    metric_rows,
    retention,
    row_isolation,
)

_log = logging.getLogger(__name__)

_Batch = Callable[[db.Connection], int]
_Kind = tuple[str, Iterator[tuple[str, int]]]


def prune() -> dict[str, int]:
    """Delete all that is past its retention; return the number of deleted rows of each kind."""
    gone: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    for kind, count in batches():
        gone[kind] += count
    return dict(gone)


def due(conn: db.Connection | None = None) -> dict[str, int]:
    """Return how many runs and ingest jobs `prune` would delete now."""
    with db.transaction(conn) as own:
        return retention.due(
            own,
            run_days=config.RUN_RETENTION_DAYS.read(),
            job_days=config.JOB_RETENTION_DAYS.read(),
        )


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
            if not metric_rows.progress(conn).may_count:
                _log.warning("events are deleted uncounted: %s", metric_rows.NO_RIGHTS)
                return None
        while metric_rows.count_step():
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
    yield "jobs", _walk("jobs", "ingest_jobs", retention.delete_jobs, job_days, rows)
    if run_days > 0:
        yield "runs", _walk("runs", "workflow_runs", retention.delete_runs, run_days, rows)
    days = config.NODE_EVENT_RETENTION_DAYS.read()
    if days > 0:
        yield from _by_age(days)
    days = config.EVENT_RETENTION_DAYS.read()
    if days > 0:
        batch, prune_events = retention.ROWS, statements.events.prune
        yield (
            "events",
            _again("events", lambda conn: prune_events(conn, days=days, batch=batch), batch),
        )
    yield "workers", _again("workers", statements.workers.prune, 0)
    yield "hw_samples", _again("hw_samples", statements.samples.prune, 0)
    yield "gpu_models", _again("gpu_models", statements.models.prune, 0)
    yield "failure_alerts", _again("failure_alerts", statements.failure_alerts.prune, 0)


def _by_age(days: int) -> Iterator[_Kind]:
    rows = retention.ROWS
    aged: dict[str, tuple[_Batch, int]] = {
        "outbox": (
            lambda conn: statements.retention.delete_outbox(conn, days=days, limit=retention.ROWS),
            rows,
        ),
        "node_events": (
            lambda conn: statements.job_events.prune_nodes(conn, days=days, batch=rows),
            rows,
        ),
        "ingest_job_events": (lambda conn: retention.delete_ingest_events(conn, days), rows),
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
    for first in range(0, end, retention.BLOCKS):
        while True:
            with db.statement() as conn:
                count = delete(conn, first, days, rows)
            yield kind, count
            if kind != "runs" or count < retention.RUNS:
                break


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
