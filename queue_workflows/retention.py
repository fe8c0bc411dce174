"""Deletes what is finished and old. Hosts' door; the orchestrator does it by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from queue_workflows import config, db
from queue_workflows.store import events, fleet, logs, retention, samples, schedules, workers

_Batch = Callable[[db.Connection], int]


def prune() -> dict[str, int]:
    """Delete all that is past its retention, in batches with a commit each; rows by what they were.

    Keys: runs, jobs (ingest), outbox, node_events, ingest_job_events, logs, fires, workers,
    heartbeats, hw_samples, gpu_models (what was learned on hosts that are gone). The nodes, answers
    and outbox rows of a run go with it uncounted. What another transaction has locked stays until
    the next time.
    """
    gone: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    for kind, count in batches():
        gone[kind] += count
    return dict(gone)


def due(conn: db.Connection | None = None) -> dict[str, int]:
    """How many runs and ingest jobs `prune` would delete now: `{"runs": n, "jobs": n}`."""
    with db.transaction(conn) as own:
        return retention.due(
            own,
            run_days=config.RUN_RETENTION_DAYS.read(),
            job_days=config.JOB_RETENTION_DAYS.read(),
        )


def batches() -> Iterator[tuple[str, int]]:
    """`prune` in steps: after each transaction what kind it was about and how many rows went."""
    run_days, job_days = config.RUN_RETENTION_DAYS.read(), config.JOB_RETENTION_DAYS.read()
    # Jobs even without a default: a queue may have its own.
    yield from _walk("jobs", "ingest_jobs", retention.delete_jobs, job_days)
    if run_days > 0:
        yield from _walk("runs", "workflow_runs", retention.delete_runs, run_days)
    days = config.NODE_EVENT_RETENTION_DAYS.read()
    if days > 0:
        yield from _by_age(days)
    yield from _again("workers", workers.prune, 0)
    yield from _again("hw_samples", samples.prune, 0)
    yield from _again("gpu_models", fleet.prune, 0)


def _by_age(days: int) -> Iterator[tuple[str, int]]:
    rows = retention.ROWS
    yield from _again("outbox", lambda conn: retention.delete_outbox(conn, days), rows)
    yield from _again(
        "node_events",
        lambda conn: events.prune_nodes(conn, older_than_days=days, batch=rows),
        rows,
    )
    yield from _again(
        "ingest_job_events", lambda conn: retention.delete_ingest_events(conn, days), rows
    )
    yield from _again("logs", lambda conn: logs.prune(conn, older_than_days=days, batch=rows), rows)
    yield from _again(
        "fires", lambda conn: schedules.prune(conn, older_than_days=days, limit=rows), rows
    )
    yield from _again("heartbeats", lambda conn: retention.delete_heartbeats(conn, days), 0)


def _again(kind: str, delete: _Batch, batch: int) -> Iterator[tuple[str, int]]:
    """Batch after batch while they are full; once for those without a size."""
    while True:
        with db.transaction() as conn:
            count = delete(conn)
        yield kind, count
        if not batch or count < batch:
            return


def _walk(
    kind: str,
    table: str,
    delete: Callable[[db.Connection, int, float], int],
    days: float,
) -> Iterator[tuple[str, int]]:
    """The table as it lies, page by page; the same pages again while they give full batches."""
    with db.transaction() as conn:
        end = retention.blocks(conn, table)
    for first in range(0, end, retention.BLOCKS):
        while True:
            with db.transaction() as conn:
                count = delete(conn, first, days)
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
    "workers",
    "heartbeats",
    "hw_samples",
    "gpu_models",
)
