"""Read runs and jobs with their attempts, events and logs; record events, and prune."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from queue_workflows import config, db, errors
from queue_workflows.admin import attempt_history, job_history
from queue_workflows.claim import job_tables, row_isolation
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.types import JsonDict, Row

_log = logging.getLogger(__name__)
PRUNE_BATCH = 5000
"""The most events that one transaction deletes."""
LATE: Final = timedelta(seconds=6)
"""An event may become visible so much later than newer ones, as transactions take up to 5 s."""
FEED, FEED_RUNS = 5_000, 10_000
_EVENT: Final = (
    "kind", "id", "job_id", "run_id", "node_id", "event_type", "attempt", "claim_no", "queue",
    "worker_id", "elapsed_s", "error", "actor", "created_at",
)  # fmt: skip
_STATE: Final = (
    "workflow_name", "status", "generation", "error", "progress_pct", "created_at", "queued_at",
    "started_at", "finished_at",
)  # fmt: skip


def get_run(
    run_id: str,
    *,
    nodes: Sequence[str] | None = None,
    logs: bool | None = None,
    conn: db.Connection | None = None,
) -> JsonDict | None:
    """Return a run with its nodes in the workflow's order, each as `get_job` returns it, or None.

    `nodes`: return only these nodes; the counts stay those of the whole run. `logs`: whether to
    read logs; None reads them for up to 60 nodes. If `logs_left_out`, each `log` is None, and
    `add_logs` reads it. A node that is not queued yet has `id` None and status `waiting`. `output`:
    as `runs.output`. `counts`: nodes by status, of `nodes_total`. `maps`: the maps of the graph,
    each with its items by state and the first `items_failed`. `loops`: the loops of the graph, then
    the loops in the items of `nodes`, each with its rounds and last state.
    """
    if not payload.is_storable(run_id):
        return None
    with db.transaction(conn) as own:
        return job_history.of_run(own, run_id, nodes=nodes, logs=logs)


def get_run_page(
    run_id: str,
    *,
    after: str | None = None,
    limit: int = 200,
    logs: bool | None = None,
    conn: db.Connection | None = None,
) -> JsonDict | None:
    """Return `get_run` of up to `limit` nodes after node `after`, or None without such a run.

    First come the nodes of the workflow in its order, then nodes of items, by id. `next` is the
    `after` of the next page, None on the last one. `logs`: whether to read their logs; None: if
    `limit`, or the number of the run's nodes, is at most 60. Raises `InvalidConfig` (a ValueError)
    if the run has no node `after`.
    """
    if not payload.is_storable(run_id):
        return None
    with db.transaction(conn) as own:
        return job_history.page_of_run(own, run_id, after=after, limit=limit, logs=logs)


def get_job(job_id: str, *, conn: db.Connection | None = None) -> JsonDict | None:
    """Return a node job or an ingest job with its attempts, or None if there is no such job.

    `attempts`: one dict for each claim: `claim_no`, `host_label`, `worker_id`, `pid`, `queued_at`,
    `waited_s`, `claimed_at`, `ended_at`, `ran_s`, `outcome` (`running`, or the event that ended
    it), `error`, `traceback`, `events`, `used` (mean `gpu_pct`, peaks `vram_mb` and `ram_mb`; None:
    not measured), `log` (`text`, `cut_bytes`; None: nothing stored) and `machine`: the last sample
    of its machine before it died; None if it did not die. An ingest job also has `acts`, the
    changes that no worker made, each with `at`, `event_type`, `actor`, `error`.
    """
    if not payload.is_storable(job_id):
        return None
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
    `detail`, `created_at`, and `actor`: who made the change, unless a worker did.
    """
    if not payload.is_storable(job_id):
        return None
    with db.transaction() as conn:
        found = statements.history_rows.ingest_events(conn, job=job_id)
        if not found and statements.history_rows.ingest_job(conn, job=job_id) is None:
            return None
        return found


class Feed(NamedTuple):
    """Changes of jobs and runs, and the database's time when they were read."""

    now: datetime
    events: list[Row]
    """Events with the columns `_EVENT`; `kind` is `ingest` or `node`."""
    runs: list[Row]
    """Runs with `id` and the columns `_STATE`."""


def feed(
    since: datetime | None = None, *, after: Row | None = None, runs: Iterable[str] = ()
) -> Feed:
    """Return up to FEED events of jobs from `since` on, the oldest first, and states of runs.

    The runs are the runs of these events, the runs in `runs`, and the newest runs queued since
    then, up to FEED_RUNS. `since` defaults to LATE ago. `after` is the last event of the previous
    page. The `created_at` of an event is the start of its transaction, so it may appear after
    events that are up to LATE younger. It is one statement.
    """
    place = after or dict.fromkeys(("created_at", "kind", "id"))
    behind = {"at": place["created_at"], "kind": place["kind"], "id": place["id"]}
    late_s = LATE.total_seconds()
    with db.statement() as conn:
        rows = statements.history_rows.feed(
            conn, since=since, late_s=late_s, runs=[*runs], limit=FEED, most=FEED_RUNS, **behind
        )
    events = [{name: row[name] for name in _EVENT} for row in rows if row["id"] is not None]
    states = [row for row in rows if row["kind"] == "run"]
    states = [{"id": row["run_id"]} | {name: row[name] for name in _STATE} for row in states]
    return Feed(rows[0]["now"], events, states)


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

    An error, such as an unknown run, is logged, and the result is None. Its length: each column is
    an argument.
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
            added = statements.job_events.add[job_tables.NODE_JOBS.name](conn, **values)
            if added is None:
                raise errors.UnknownJob(f"no run {run_id!r}")
            if event_type == "model_load_done" and elapsed_s is not None:
                statements.models.learn_load(conn, host=host_label, model=model, seconds=elapsed_s)
    except Exception as failure:  # noqa: BLE001  best effort by contract
        _log.warning("event %s of node %s was not recorded: %s", event_type, node_id, failure)
        return None
    return added["id"]


# --- totals ------------------------------------------------------------------------------------

COUNT_EVERY_S: Final = 5.0
"""Seconds between two counts, so that a scrape, every 15 s, has few events to count itself."""
COUNTED_AT_ONCE: Final = 20_000
"""The most transactions whose events one call counts, 0.2 s of work with two events in each."""
_LONG: Final = {"statement_timeout": "60s"}
"""The limit of a statement that counts the events of very many jobs, or deletes runs with
MAX_NODES_PER_RUN nodes. Others do not need its locks."""
NO_RIGHTS: Final = (
    "this role may not write metric_totals and metric_position; "
    "`queue-workflows connect --for work` prints the GRANTs"
)


def count_step(conn: db.Connection | None = None) -> bool:
    """Add uncounted events to the totals, which never decrease; return whether more are left.

    Counts the events of up to COUNTED_AT_ONCE transactions, in a transaction of its own. Does
    nothing while another process counts. `conn`, by default of the pool, must not be in a
    transaction.
    """
    with db.statement(conn) as own, own.transaction():
        db.set_local(own, _LONG)
        return bool(statements.metrics.count_events(own, most=COUNTED_AT_ONCE))


# --- prune -------------------------------------------------------------------------------------

PRUNED = (
    "runs", "jobs", "outbox", "node_events", "ingest_job_events", "logs", "fires", "events",
    "workers", "heartbeats", "hw_samples", "gpu_models", "failure_alerts", "acts", "starts",
    "exports",
)  # fmt: skip
"""The kinds of rows that are pruned."""
BLOCKS = 256
"""Pages of a table that a batch reads, which are 2 MiB with some thousands of jobs."""
RUNS = 20
"""The most runs that a batch deletes, with their nodes, answers and outbox rows."""
_BY_AGE: Final = {"queue_workflows.retention": "on"}
"""The mark of a transaction that deletes by age: no event is written for each deleted row."""
_Delete = Callable[[db.Connection], int]


def prune() -> dict[str, int]:
    """Delete all rows past their retention; return the number of deleted rows of each kind.

    Kinds: runs, jobs (ingest), outbox, node_events, ingest_job_events, logs, fires, acts, starts
    (of partitions), exports, workers, heartbeats, hw_samples, gpu_models (of hosts that are gone).
    A run's nodes, answers and outbox rows are deleted with it, uncounted. Rows that others have
    locked stay until the next call. Commits in batches. The orchestrator prunes by itself.
    """
    gone: Counter[str] = Counter(dict.fromkeys(PRUNED, 0))
    for kind, count in prune_batches():
        gone[kind] += count
    return dict(gone)


def prunable(*, conn: db.Connection | None = None) -> dict[str, int]:
    """Return how many runs and ingest jobs `prune` would delete now: `{"runs": n, "jobs": n}`."""
    run_days, job_days = config.RUN_RETENTION_DAYS.read(), config.JOB_RETENTION_DAYS.read()
    with db.transaction(conn) as own:
        return {
            "runs": statements.retention.count_runs(own, days=run_days),
            "jobs": statements.retention.count_jobs(own, days=job_days),
        }


def prune_events(older_than_days: float = 30) -> int:
    """Delete node events that are older than so many days, in batches; return how many."""
    of_nodes = statements.retention.delete_events[job_tables.NODE_JOBS.name]
    delete = functools.partial(of_nodes, days=older_than_days, batch=PRUNE_BATCH)
    return sum(count for _, count in _again("node_events", delete, PRUNE_BATCH))


def prune_batches(rows: row_isolation.Isolation | None = None) -> Iterator[tuple[str, int]]:
    """Prune in steps; after each transaction, yield its kind and how many rows it deleted.

    A row that raises when it is deleted is set aside in `rows`, by default only for this call. An
    error of one kind is raised at the end, after the other kinds have been pruned.
    """
    kept = rows or row_isolation.Isolation()
    failed: Exception | None = _count_events()
    for kind, steps in _kinds(kept):
        try:
            yield from steps
        except db.Error as error:
            if row_isolation.is_outage(error):
                raise
            _log.error("pruning of %s ends early: %s", kind, row_isolation.described(error))
            failed = failed or error
    if failed is not None:
        raise failed


def _count_events() -> Exception | None:
    """Count the events that metrics have not counted, before they are deleted."""
    try:
        with db.statement() as conn:
            if not statements.metrics.progress(conn)["may_count"]:
                _log.warning("events are deleted uncounted: %s", NO_RIGHTS)
                return None
        while count_step():
            pass
    except db.Error as error:
        if row_isolation.is_outage(error):
            raise
        _log.error("events are deleted uncounted: %s", row_isolation.described(error))
        return error
    return None


_Steps = Iterator[tuple[str, int]]


def _kinds(rows: row_isolation.Isolation) -> Iterator[tuple[str, _Steps]]:
    """Yield each kind with the steps that prune it."""
    # Jobs even without a default: a queue may have its own.
    yield "jobs", _pages("jobs", "ingest_jobs", config.JOB_RETENTION_DAYS.read(), rows)
    if (days := config.RUN_RETENTION_DAYS.read()) > 0:
        yield "runs", _pages("runs", "workflow_runs", days, rows)
    days = config.NODE_EVENT_RETENTION_DAYS.read()
    aged: dict[str, Callable[..., int]] = (
        {}
        if days <= 0
        else {
            "outbox": statements.retention.delete_outbox,
            "node_events": statements.retention.delete_events[job_tables.NODE_JOBS.name],
            "ingest_job_events": statements.retention.delete_events[job_tables.INGEST_JOBS.name],
            "logs": statements.logs.prune,
            "fires": statements.schedules.prune,
            "events": statements.events.prune,
            "acts": statements.acts.prune,
            "starts": statements.queues.prune_starts,
            "exports": statements.event_exports.prune,
        }
    )
    for kind, delete in aged.items():
        of_age = functools.partial(delete, days=days, batch=PRUNE_BATCH)
        yield kind, _again(kind, of_age, PRUNE_BATCH)
    at_once: dict[str, _Delete] = {
        "workers": statements.workers.prune,
        "hw_samples": statements.samples.prune,
        "gpu_models": statements.models.prune,
        "failure_alerts": statements.failure_alerts.prune,
    }
    if days > 0:
        at_once["heartbeats"] = functools.partial(statements.retention.delete_heartbeats, days=days)
    for kind, delete in at_once.items():
        yield kind, _again(kind, delete, 0)


def _again(kind: str, delete: _Delete, batch: int) -> _Steps:
    """Delete batches while they are full, or once for a kind without a batch size."""
    while True:
        with db.transaction() as conn:
            db.set_local(conn, _BY_AGE)
            count = delete(conn)
        yield kind, count
        if not batch or count < batch:
            return


def _pages(kind: str, table: str, days: float, rows: row_isolation.Isolation) -> _Steps:
    """Delete rows that ended so many days ago, page by page of a table; 0 days keep them forever.

    A queue's own `retention_days` takes precedence over `days`. A run with an open outbox row or
    node is kept. A page is read again while it gives a full batch of runs.
    """
    with db.transaction() as conn:
        end = statements.retention.pages(conn, table=table)
    for first in range(0, end, BLOCKS):
        duty = deletion(kind, first, days)
        while True:
            with db.statement() as conn:
                count = len(rows.batch(conn, duty))
            yield kind, count
            if kind != "runs" or count < RUNS:
                break


def deletion(kind: str, first: int, days: float) -> row_isolation.Duty:
    """Return the deletion of `runs` or `jobs` that old in BLOCKS pages of their table.

    `first` is the first of these pages. Runs are deleted RUNS at a time.
    """
    given = {"first": f"({first},0)", "end": f"({first + BLOCKS},0)", "days": days, "limit": RUNS}

    own = statements.retention
    if kind == "runs":
        long = functools.partial(db.set_local, settings=_LONG)
        return row_isolation.Duty(
            "deletion of run", own.old_runs, own.delete_runs, None, given, long
        )
    by_age = functools.partial(db.set_local, settings=_BY_AGE)
    return row_isolation.Duty(
        "deletion of ingest job", own.old_jobs, own.delete_jobs, None, given, by_age
    )
