"""Read runs and jobs with their attempts, events and logs; record events, and prune."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from queue_workflows import db, errors
from queue_workflows.admin import attempt_history, job_history
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.engine import job_tables
from queue_workflows.operations import retention
from queue_workflows.types import JsonDict, Row

_log = logging.getLogger(__name__)
PRUNE_BATCH = 5000
"""Events that one transaction deletes."""


def get_run(
    run_id: str,
    *,
    nodes: Sequence[str] | None = None,
    logs: bool | None = None,
    conn: db.Connection | None = None,
) -> JsonDict | None:
    """Return a run with its nodes in the workflow's order, each as `get_job` returns it, or None.

    None: there is no such run. `nodes`: return only these nodes, with the whole run's counts.
    `logs`: whether to read their logs; None: only of up to 60 nodes. `logs_left_out`: they were not
    read, so that `log` is None, and `add_logs` reads them. A node that is not queued yet has `id`
    None and status `waiting`. `output`: as `runs.output`. `counts`: nodes by status, of
    `nodes_total`. `maps`: the graph's maps with their items by state, and as `items_failed` the
    first failed. `loops`: their rounds and last state; with `nodes`, those of items among these.
    """
    with db.transaction(conn) as own:
        return job_history.of_run(own, run_id, nodes=nodes, logs=logs)


def get_run_page(run_id: str, *, after: str | None = None, limit: int = 200) -> JsonDict | None:
    """Return `get_run` of up to `limit` nodes behind node `after`, or None without such a run.

    First come the nodes of the workflow in its order, then those of items, by id. `next` is the
    `after` of the next page, None on the last one. `loops` has those of these nodes. Their logs are
    read if `limit`, or the number of the run's nodes, is at most 60. Raises `InvalidConfig` (a
    ValueError) if the run has no node `after`.
    """
    with db.transaction() as own:
        return job_history.page_of_run(own, run_id, after=after, limit=limit)


def get_job(job_id: str, *, conn: db.Connection | None = None) -> JsonDict | None:
    """Return a node job or an ingest job with its attempts, or None if there is no such job.

    `attempts`: one dict for each claim: `claim_no`, `host_label`, `worker_id`, `pid`, `queued_at`,
    `waited_s`, `claimed_at`, `ended_at`, `ran_s`, `outcome` (`running`, or the event that ended
    it), `error`, `traceback`, `events`, `log` (`text`, `cut_bytes`; None: nothing stored) and
    `machine`: the last sample of its machine before it died; None if it did not die. An ingest job
    also has `acts`: changes by others than workers, each with `at`, `event_type`, `actor`, `error`.
    """
    with db.transaction(conn) as own:
        return job_history.of_job(own, job_id)


def add_logs(nodes: Iterable[JsonDict], *, conn: db.Connection | None = None) -> None:
    """Read the logs of nodes that `get_run` returned without them into their attempts."""
    by_id = {node["id"]: node for node in nodes if node["id"]}
    with db.transaction(conn) as own:
        stored = statements.logs.of_jobs(own, jobs=list(by_id), table=job_tables.NODE_JOBS.name)
    for log in stored:
        for attempt in by_id[log["job_id"]]["attempts"]:
            if attempt["claim_no"] == log["claim_no"]:
                attempt["log"] = attempt_history.log_of(log)


def events(job_id: str) -> list[Row] | None:
    """Return the events of an ingest job, the oldest first; None if there is no such job.

    `id`, `event_type`, `attempt`, `claim_no`, `worker_id`, `host_label`, `elapsed_s`, `error`,
    `detail`, `created_at`, and `actor`: who made the change, if it was no worker.
    """
    if not payload.is_storable(job_id):
        return None
    with db.transaction() as conn:
        found = statements.history_rows.ingest_events(conn, job=job_id)
        if not found and statements.history_rows.ingest_job(conn, job=job_id) is None:
            return None
        return found


def changes(
    since: datetime | None = None, *, after: Row | None = None, limit: int = 1000
) -> list[Row]:
    """Return the events of all jobs from `since` on, the oldest first; `since` None: none.

    Each has `kind` (`ingest` or `node`), `id`, `job_id`, `run_id`, `node_id`, `event_type`,
    `attempt`, `claim_no`, `queue`, `worker_id`, `elapsed_s`, `error`, `actor`, `created_at`.
    `after`: the last one of the page before. `created_at` is the start of the transaction, so an
    event may appear behind events that are a few seconds younger.
    """
    if since is None:
        return []
    place = after or {"created_at": None, "kind": None, "id": None}
    with db.statement() as conn:
        return statements.history_rows.changes(
            conn,
            since=since,
            at=place["created_at"],
            kind=place["kind"],
            id=place["id"],
            limit=limit,
        )


def run_states(ids: Iterable[str], *, recent_s: float = 0.0, limit: int = 1000) -> list[Row]:
    """Return the state of these runs, and of those that were queued within `recent_s` seconds.

    `id`, `workflow_name`, `status`, `generation`, `error`, `progress_pct`, `created_at`,
    `started_at`, `finished_at`.
    """
    with db.statement() as conn:
        return statements.history_rows.run_states(conn, ids=[*ids], recent_s=recent_s, limit=limit)


def now() -> datetime:
    """Return the time of the database."""
    with db.statement() as conn:
        return statements.history_rows.clock(conn)


def record_event(
    *,
    run_id: str,
    node_id: str,
    event_type: str,
    job_id: str | None = None,
    attempt: int = 0,
    host_label: str | None = None,
    queue: str | None = None,
    model: str | None = None,
    elapsed_s: float | None = None,
    error: str | None = None,
    detail: dict[str, Any] | None = None,
) -> int | None:
    """Append an event to a node's history and return its id.

    An error is logged, never raised, and the id is None then; an unknown run is one. Its length: a
    column is an argument.
    """
    try:
        values: dict[str, Any] = {
            "run": run_id,
            "node": node_id,
            "job": job_id,
            "attempt": attempt,
            "event_type": event_type,
            "claim_no": None,
            "worker": None,
            "host": host_label,
            "queue": queue,
            "model": model,
            "elapsed_s": elapsed_s,
            "error": None if error is None else payload.error_text(error),
            "detail": payload.encode(detail or {}, "detail"),
        }
        with db.transaction() as conn:
            added = statements.job_events.add_node(conn, **values)
            if added is None:
                raise errors.UnknownJob(f"no run {run_id!r}")
            if event_type == "model_load_done" and elapsed_s is not None:
                statements.models.learn_load(conn, host=host_label, model=model, seconds=elapsed_s)
    except Exception as failure:  # noqa: BLE001  best effort by contract
        _log.warning("event %s of node %s was not recorded: %s", event_type, node_id, failure)
        return None
    return added["id"]


def prune() -> dict[str, int]:
    """Delete all that is past its retention; return the number of deleted rows of each kind.

    Kinds: runs, jobs (ingest), outbox, node_events, ingest_job_events, logs, fires, workers,
    heartbeats, hw_samples, gpu_models (of hosts that are gone). The nodes, answers and outbox rows
    of a run are deleted with it, uncounted. What another transaction has locked stays until the
    next call. Commits in batches. The orchestrator prunes by itself.
    """
    return retention.prune()


def prunable(*, conn: db.Connection | None = None) -> dict[str, int]:
    """Return how many runs and ingest jobs `prune` would delete now: `{"runs": n, "jobs": n}`."""
    return retention.due(conn)


def prune_events(older_than_days: float = 30) -> int:
    """Delete node events that are older; return how many. Commits in batches."""
    total = 0
    while True:
        with db.transaction() as conn:
            count = statements.job_events.prune_nodes(conn, days=older_than_days, batch=PRUNE_BATCH)
        total += count
        if count < PRUNE_BATCH:
            return total
