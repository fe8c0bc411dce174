"""Read runs and jobs with their attempts, events and logs; record events, and prune."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from queue_workflows import db
from queue_workflows.admin import attempt_history, overview
from queue_workflows.dag import payload
from queue_workflows.engine import history_rows, job_events, job_tables, models, samples
from queue_workflows.engine import logs as attempt_logs
from queue_workflows.operations import retention
from queue_workflows.runtime import stored_json
from queue_workflows.types import JsonDict, Row

_log = logging.getLogger(__name__)
PRUNE_BATCH = 5000
"""Events that one transaction deletes."""
LOGS_MAX = 60
"""`get_run` reads the logs of a run with up to this many nodes; a log has up to LOG_CAPTURE_KB."""
FAILED_ITEMS = 20
"""Failed items of a map that `get_run` returns."""
SAMPLED_MAX = 20
"""Attempts that died which are shown with the last sample of their machine."""


def get_run(
    run_id: str,
    *,
    nodes: Sequence[str] | None = None,
    logs: bool | None = None,
    conn: db.Connection | None = None,
) -> JsonDict | None:
    """Return a run with its nodes in the workflow's order, each as `get_job` returns it, or None.

    None: there is no such run. `nodes`: return only these nodes, with the whole run's counts.
    `logs`: whether to read their logs; None: only of up to LOGS_MAX nodes. `logs_left_out`: they
    were not read, so that `log` is None, and `add_logs` reads them. A node that is not queued yet
    has `id` None and status `waiting`. `counts`: nodes by status, of `nodes_total`. `maps`: the
    maps of the graph with their items by state, and as `items_failed` the first that failed.
    `loops`: the loops with their rounds so far, and the state of the last; [] if `nodes` are given.
    """
    with db.transaction(conn) as own:
        row = history_rows.run(own, run_id)
        if row is None:
            return None
        counts = history_rows.node_counts(own, run_id)
        of_items = history_rows.count_item_nodes(own, run_id)
        maps = [_map(own, run_id, found) for found in overview.maps(own, run_id)]
        jobs = history_rows.nodes(own, run_id, nodes)
        events = history_rows.node_events(own, run_id, nodes)
        wanted_logs = len(jobs) <= LOGS_MAX if logs is None else logs
        ids = [job["id"] for job in jobs] if wanted_logs else []
        stored = attempt_logs.of_jobs(own, job_tables.NODE_JOBS, ids)
        graph = _graph(row.pop("definition"))
        read_at = row.pop("read_at")
        records = _by(events, "node_id"), _by(stored, "job_id")
        made = [_node(job, graph.get(job["node_id"]), row, records) for job in jobs]
        found = {node["node_id"]: node for node in _with_machine_samples(own, made)}
    wanted = [*graph, *(name for name in found if name not in graph)]
    waiting = max(0, len(graph) - sum(counts.values()) + of_items)
    return {
        "kind": "run",
        **row,
        "read_at": read_at,
        "nodes_total": waiting + sum(counts.values()),
        "counts": counts | ({"waiting": waiting} if waiting else {}),
        "maps": maps,
        "loops": _loops(graph, found) if nodes is None else [],
        "logs_left_out": not wanted_logs,
        "nodes": [
            found.get(name) or _waiting(graph[name], run_id)
            for name in wanted
            if nodes is None or name in nodes
        ],
    }


def _map(conn: db.Connection, run_id: str, row: Row) -> JsonDict:
    """Return a map with the first items that failed."""
    failed = overview.failed_items(conn, run_id, row["node_id"], limit=FAILED_ITEMS)
    return {**row, "items_failed": failed}


def _loops(graph: Mapping[str, Row], found: Mapping[str, JsonDict]) -> list[JsonDict]:
    """Return the loops of a graph: `node_id`, `at_most`, `rounds` begun, state of the `last`.

    `last`: failed, cancelled, running (also if a node is queued or waits) or completed; None
    without a round.
    """
    rounds: dict[str, dict[int, list[str]]] = {}
    for name, entry in graph.items():
        loop, number = stored_json.text(entry.get("arm")), entry.get("round")
        if loop is not None and isinstance(number, int):
            status = found[name]["status"] if name in found else "waiting"
            rounds.setdefault(loop, {}).setdefault(number, []).append(status)
    loops: list[JsonDict] = []
    for name, by_number in rounds.items():
        begun = [n for n, states in by_number.items() if {*states} - {"waiting", "skipped"}]
        last = None
        if begun:
            states = by_number[max(begun)]
            done = all(state in ("completed", "skipped") for state in states)
            ended = next((state for state in ("failed", "cancelled") if state in states), None)
            last = ended or ("completed" if done else "running")
        loops.append(
            {
                "node_id": name,
                "at_most": max(by_number),
                "rounds": max(begun, default=0),
                "last": last,
            }
        )
    return loops


def get_job(job_id: str, *, conn: db.Connection | None = None) -> JsonDict | None:
    """Return a node job or an ingest job with its attempts, or None if there is no such job.

    `attempts`: one dict for each claim: `claim_no`, `host_label`, `worker_id`, `pid`, `queued_at`,
    `waited_s`, `claimed_at`, `ended_at`, `ran_s`, `outcome` (`running`, or the event that ended
    it), `error`, `traceback`, `events`, `log` (`text`, `cut_bytes`; None: nothing stored) and
    `machine`: the last sample of its machine before it died; None if it did not die. An ingest job
    also has `acts`: changes by others than workers, each with `at`, `event_type`, `actor`, `error`.
    """
    with db.transaction(conn) as own:
        job = history_rows.node(own, job_id)
        if job is None:
            return _ingest_job(own, job_id)
        run = history_rows.run(own, job["run_id"]) or {"definition": None, "started_at": None}
        names = [job["node_id"]]
        events = _by(history_rows.node_events(own, job["run_id"], names), "node_id")
        logs = _by(attempt_logs.of_jobs(own, job_tables.NODE_JOBS, [job_id]), "job_id")
        entry = _graph(run["definition"]).get(job["node_id"])
        return _with_machine_samples(own, [_node(job, entry, run, (events, logs))])[0]


def add_logs(nodes: Iterable[JsonDict], *, conn: db.Connection | None = None) -> None:
    """Read the logs of nodes that `get_run` returned without them into their attempts."""
    by_id = {node["id"]: node for node in nodes if node["id"]}
    with db.transaction(conn) as own:
        stored = attempt_logs.of_jobs(own, job_tables.NODE_JOBS, list(by_id))
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
        found = history_rows.ingest_events(conn, job_id)
        if not found and history_rows.ingest_job(conn, job_id) is None:
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
    with db.statement() as conn:
        return history_rows.changes(conn, since, after, limit)


def run_states(ids: Iterable[str], *, recent_s: float = 0.0, limit: int = 1000) -> list[Row]:
    """Return the state of these runs, and of those that were queued within `recent_s` seconds.

    `id`, `workflow_name`, `status`, `generation`, `error`, `progress_pct`, `created_at`,
    `started_at`, `finished_at`.
    """
    with db.statement() as conn:
        return history_rows.run_states(conn, [*ids], recent_s=recent_s, limit=limit)


def now() -> datetime:
    """Return the time of the database."""
    with db.statement() as conn:
        return history_rows.clock(conn)


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

    An error is logged, never raised; the id is None then.
    """
    try:
        values = {
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
            event_id = job_events.add_node_event(conn, values)
            if event_type == "model_load_done" and elapsed_s is not None:
                models.learn_load(conn, host_label, model, elapsed_s)
    except Exception as failure:  # noqa: BLE001  best effort by contract
        _log.warning("event %s of node %s was not recorded: %s", event_type, node_id, failure)
        return None
    return event_id


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
            count = job_events.prune_nodes(conn, older_than_days=older_than_days, batch=PRUNE_BATCH)
        total += count
        if count < PRUNE_BATCH:
            return total


def _ingest_job(conn: db.Connection, job_id: str) -> JsonDict | None:
    job = history_rows.ingest_job(conn, job_id)
    if job is None:
        return None
    events = history_rows.ingest_events(conn, job_id)
    logs = attempt_logs.of_jobs(conn, job_tables.INGEST_JOBS, [job_id])
    shown = _with_attempts({"kind": "ingest job"} | job, events, logs, None)
    acts = [_act(event) for event in events if event["actor"]]
    return _with_machine_samples(conn, [shown | {"acts": acts}])[0]


def _act(event: Row) -> JsonDict:
    return {"at": event["created_at"]} | {
        key: event[key] for key in ("event_type", "actor", "error", "detail")
    }


def _with_machine_samples(conn: db.Connection, jobs: list[JsonDict]) -> list[JsonDict]:
    """Return the jobs; attempts that died get the last sample of their machine."""
    died = [
        attempt
        for job in jobs
        for attempt in job["attempts"]
        if attempt["ended_at"]
        and attempt["host_label"]
        and attempt_history.DEATHS.intersection(event["event_type"] for event in attempt["events"])
    ]
    for attempt in died[-SAMPLED_MAX:]:
        found = samples.last(
            conn, attempt["host_label"], attempt["claimed_at"], attempt["ended_at"]
        )
        if found is not None:
            times = {"sampled_at": found["sampled_at"], "every_s": found["every_s"]}
            attempt["machine"] = stored_json.mapping(found["sample"]) | times
    return jobs


def _graph(definition: Any) -> dict[str, Row]:
    """Return the nodes of a frozen definition by id, in its order; none before a first start."""
    return stored_json.graph_nodes(definition)


def _by(rows: Iterable[Row], key: str) -> Mapping[str, list[Row]]:
    grouped: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        grouped[row[key]].append(row)
    return grouped


def _node(
    job: Row,
    entry: Row | None,
    run: Row,
    records: tuple[Mapping[str, list[Row]], Mapping[str, list[Row]]],
) -> JsonDict:
    """Return a node as it is shown; `records`: the events by node id and the logs by job id."""
    node = {"kind": "node job"} | job | {"depends_on": list(entry["deps"]) if entry else []}
    events, logs = records[0].get(job["node_id"], []), records[1].get(job["id"], [])
    return _with_attempts(node, events, logs, run["started_at"])


def _waiting(entry: Row, run_id: str) -> JsonDict:
    return {
        "kind": "node job", "id": None, "run_id": run_id, "node_id": entry["id"],
        "node_module": entry.get("module"), "pipeline_name": entry.get("pipeline"),
        "queue": entry.get("queue"), "required_model": entry.get("model"), "status": "waiting",
        "depends_on": list(entry["deps"]), "inputs": None, "output": None, "error": None,
        "traceback": None, "attempts_failed": 0, "attempts": [],
    }  # fmt: skip


def _with_attempts(
    job: Row, events: list[Row], logs: list[Row], reopened: datetime | None
) -> JsonDict:
    made = attempt_history.build(job, events, logs, reopened=reopened)
    done = job["status"] == "completed"
    last = made[-1]["traceback"] if made and job["status"] != "completed" else None
    job.pop("read_at")
    return job | {
        "output": job["output"] if done else None,
        "traceback": last,
        "attempts_failed": job["attempts"],
        "attempts": made,
    }
