"""The history of runs and jobs, attempt by attempt. The hosts' door; a call is one transaction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from queue_workflows import db
from queue_workflows.engine import job_tables, run_history, samples
from queue_workflows.engine import logs as attempt_logs
from queue_workflows.runtime import stored_json
from queue_workflows.types import TERMINAL_RUN_STATUSES, JsonDict, Row

PRUNE_BATCH = 1000
LOGS_MAX = 60
"""Nodes of whose logs `get_run` reads all unasked; a log has up to LOG_CAPTURE_KB."""
_TRIPS = frozenset({"budget_trip", "stall_trip", "gpu_health_trip"})
_ENDS = frozenset(
    {"completed", "failed", "cancelled", "parked", "retried", "requeued", "reclaimed"}
)
"""Events with which an attempt ends; each has its claim's number."""
_DIED = _TRIPS | {"death", "reclaimed"}
BOXES = 20
"""Attempts that died which are shown with what their box did."""


def get_run(
    run_id: str,
    *,
    nodes: Sequence[str] | None = None,
    logs: bool | None = None,
    conn: db.Connection | None = None,
) -> JsonDict | None:
    """A run with its nodes in the workflow's order, each as `get_job` gives it; None: no such run.

    `nodes`: only the attempts of these, the rest of the run all the same. `logs`: whether to read
    their logs; None: of up to LOGS_MAX nodes. `logs_left_out` says that they were not: `log` is
    None, and `add_logs` reads them. A node that is not queued yet has `id` None and status
    `waiting`. `counts`: nodes by status, of `nodes_total`.
    """
    with db.transaction(conn) as own:
        row = run_history.run(own, run_id)
        if row is None:
            return None
        counts = run_history.node_counts(own, run_id)
        jobs = run_history.nodes(own, run_id, nodes)
        events = run_history.node_events(own, run_id, nodes)
        wanted_logs = len(jobs) <= LOGS_MAX if logs is None else logs
        ids = [job["id"] for job in jobs] if wanted_logs else []
        stored = attempt_logs.of_jobs(own, job_tables.NODE_JOBS, ids)
        graph = _graph(row.pop("definition"))
        read_at = row.pop("read_at")
        told = _by(events, "node_id"), _by(stored, "job_id")
        made = [_node(job, graph.get(job["node_id"]), row, told) for job in jobs]
        found = {node["node_id"]: node for node in _with_boxes(own, made)}
    wanted = [*graph, *(name for name in found if name not in graph)]
    waiting = max(0, len(graph) - sum(counts.values()))
    return {
        "kind": "run",
        **row,
        "read_at": read_at,
        "nodes_total": max(len(graph), sum(counts.values())),
        "counts": counts | ({"waiting": waiting} if waiting else {}),
        "logs_left_out": not wanted_logs,
        "nodes": [
            found.get(name) or _waiting(graph[name], run_id)
            for name in wanted
            if nodes is None or name in nodes
        ],
    }


def get_job(job_id: str, *, conn: db.Connection | None = None) -> JsonDict | None:
    """A node job or an ingest job with its attempts; None: no such job.

    `attempts`: one dict a claim: `claim_no`, `host_label`, `worker_id`, `pid`, `queued_at`,
    `waited_s`, `claimed_at`, `ended_at`, `ran_s`, `outcome` (`running`, or the event that ended
    it), `error`, `traceback`, `events`, `log` (`text`, `cut_bytes`; None: nothing stored) and
    `box`: of one that died what its host's last sample before its end showed, or None. An ingest
    job has `acts` besides: what no worker did, each with `at`, `event_type`, `actor`, `error`.
    """
    with db.transaction(conn) as own:
        job = run_history.node(own, job_id)
        if job is None:
            return _ingest_job(own, job_id)
        run = run_history.run(own, job["run_id"]) or {"definition": None, "started_at": None}
        names = [job["node_id"]]
        events = _by(run_history.node_events(own, job["run_id"], names), "node_id")
        logs = _by(attempt_logs.of_jobs(own, job_tables.NODE_JOBS, [job_id]), "job_id")
        entry = _graph(run["definition"]).get(job["node_id"])
        return _with_boxes(own, [_node(job, entry, run, (events, logs))])[0]


def add_logs(nodes: Iterable[JsonDict], *, conn: db.Connection | None = None) -> None:
    """Read the logs of nodes that `get_run` gave without them, into their attempts."""
    by_id = {node["id"]: node for node in nodes if node["id"]}
    with db.transaction(conn) as own:
        stored = attempt_logs.of_jobs(own, job_tables.NODE_JOBS, list(by_id))
    for log in stored:
        for attempt in by_id[log["job_id"]]["attempts"]:
            if attempt["claim_no"] == log["claim_no"]:
                attempt["log"] = log_of(log)


def prune_logs(older_than_days: float = 30) -> int:
    """Delete the logs of attempts past that age, in batches; how many."""
    total = 0
    while True:
        with db.transaction() as conn:
            count = attempt_logs.prune(conn, older_than_days=older_than_days, batch=PRUNE_BATCH)
        total += count
        if count < PRUNE_BATCH:
            return total


def _ingest_job(conn: db.Connection, job_id: str) -> JsonDict | None:
    job = run_history.ingest_job(conn, job_id)
    if job is None:
        return None
    events = run_history.ingest_events(conn, job_id)
    logs = attempt_logs.of_jobs(conn, job_tables.INGEST_JOBS, [job_id])
    told = _told({"kind": "ingest job"} | job, events, logs, None)
    acts = [_act(event) for event in events if event["actor"]]
    return _with_boxes(conn, [told | {"acts": acts}])[0]


def _act(event: Row) -> JsonDict:
    return {"at": event["created_at"]} | {
        key: event[key] for key in ("event_type", "actor", "error", "detail")
    }


def _with_boxes(conn: db.Connection, jobs: list[JsonDict]) -> list[JsonDict]:
    """The same jobs; to attempts that died is added what their box did last."""
    died = [
        attempt
        for job in jobs
        for attempt in job["attempts"]
        if attempt["ended_at"]
        and attempt["host_label"]
        and _DIED.intersection(event["event_type"] for event in attempt["events"])
    ]
    for attempt in died[-BOXES:]:
        found = samples.last(
            conn, attempt["host_label"], attempt["claimed_at"], attempt["ended_at"]
        )
        if found is not None:
            times = {"sampled_at": found["sampled_at"], "every_s": found["every_s"]}
            attempt["box"] = stored_json.mapping(found["sample"]) | times
    return jobs


def _graph(definition: Any) -> dict[str, Row]:
    """The nodes of a frozen definition by id, in its order; of a run that never started none."""
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
    told: tuple[Mapping[str, list[Row]], Mapping[str, list[Row]]],
) -> JsonDict:
    """A node as it is shown; `told` are the events by node id and the logs by job id."""
    node = {"kind": "node job"} | job | {"depends_on": list(entry["deps"]) if entry else []}
    events, logs = told[0].get(job["node_id"], []), told[1].get(job["id"], [])
    return _told(node, events, logs, run["started_at"])


def _waiting(entry: Row, run_id: str) -> JsonDict:
    return {
        "kind": "node job", "id": None, "run_id": run_id, "node_id": entry["id"],
        "node_module": entry.get("module"), "pipeline_name": entry.get("pipeline"),
        "queue": entry.get("queue"), "required_model": entry.get("model"), "status": "waiting",
        "depends_on": list(entry["deps"]), "inputs": None, "output": None, "error": None,
        "traceback": None, "attempts_failed": 0, "attempts": [],
    }  # fmt: skip


def _told(job: Row, events: list[Row], logs: list[Row], reopened: datetime | None) -> JsonDict:
    made = attempts(job, events, logs, reopened=reopened)
    done = job["status"] == "completed"
    last = made[-1]["traceback"] if made and job["status"] != "completed" else None
    job.pop("read_at")
    return job | {
        "output": job["output"] if done else None,
        "traceback": last,
        "attempts_failed": job["attempts"],
        "attempts": made,
    }


def attempts(
    job: Row, events: Iterable[Row], logs: Iterable[Row], *, reopened: datetime | None = None
) -> list[JsonDict]:
    """One entry a claim, the oldest first, out of a job's events, the oldest first, and its logs.

    An event without a claim's number (model loads, a host's own) belongs to the claim before it.
    `reopened`: when the job's run started last, from which a reopened node has waited. Of a claim
    whose events are pruned, or that was made before there were any, what the row knows.
    """
    made: dict[int, JsonDict] = {}
    queued_at, current = job["created_at"], 0
    for event in events:
        number = event["claim_no"] or current
        if event["event_type"] == "claimed":
            current = number
            made[number] = _attempt(number, event, _waited_from(queued_at, event, reopened))
        elif number in made:
            _add(made[number], event)
        if event["event_type"] in _ENDS:
            queued_at = (
                None if event["event_type"] in TERMINAL_RUN_STATUSES else event["created_at"]
            )
    if job["claim_no"] and job["claim_no"] not in made:
        made[job["claim_no"]] = _from_row(job)
    for number, attempt in made.items():
        _finish(attempt, job, last=number == job["claim_no"])
    for log in logs:
        if log["claim_no"] in made:
            made[log["claim_no"]]["log"] = log_of(log)
    return [made[number] for number in sorted(made)]


def log_of(row: Row) -> JsonDict:
    """`text`, with a line in the place of what was cut out of its middle, and `cut_bytes`."""
    return {"text": log_text(row), "cut_bytes": row["cut_bytes"]}


def log_text(row: Row) -> str:
    """A stored log as one text."""
    return row["head"] + (gap(row["cut_bytes"]) if row["cut_bytes"] else "") + row["tail"]


def gap(cut_bytes: int) -> str:
    """The line that stands for so many bytes of a log that were not kept."""
    return f"\n[... {cut_bytes:,} bytes cut ...]\n"


def _waited_from(
    queued_at: datetime | None, event: Row, reopened: datetime | None
) -> datetime | None:
    if queued_at is None and reopened is not None and reopened <= event["created_at"]:
        return reopened
    return queued_at


def _attempt(number: int, event: Row, queued_at: datetime | None) -> JsonDict:
    claimed_at = event["created_at"]
    return {
        "claim_no": number,
        "host_label": event["host_label"],
        "worker_id": event["worker_id"],
        "pid": _pid(event["worker_id"]),
        "queued_at": queued_at,
        "waited_s": _seconds(queued_at, claimed_at),
        "claimed_at": claimed_at,
        "ended_at": None,
        "ran_s": None,
        "outcome": None,
        "error": None,
        "traceback": None,
        "events": [_event(event)],
        "log": None,
        "box": None,
    }


def _from_row(job: Row) -> JsonDict:
    claim = {
        "created_at": job["started_at"], "host_label": job["claimed_by"],
        "worker_id": job["worker_id"],
    }  # fmt: skip
    attempt = _attempt(job["claim_no"], claim | dict.fromkeys(_TOLD), None)
    attempt["events"] = []
    if job["status"] not in ("running", "queued"):
        ended = {"ended_at": job["finished_at"], "outcome": job["status"], "error": job["error"]}
        attempt |= ended | {"ran_s": job["seconds"]}
    return attempt


_TOLD = ("event_type", "elapsed_s", "error", "detail")


def _event(event: Row) -> JsonDict:
    told = {key: event[key] for key in _TOLD}
    return {"event_type": told.pop("event_type"), "at": event["created_at"], **told}


def _add(attempt: JsonDict, event: Row) -> None:
    attempt["events"].append(_event(event))
    kind = event["event_type"]
    trace = stored_json.text(stored_json.mapping(event["detail"]).get("traceback"))
    attempt["traceback"] = trace or attempt["traceback"]
    if event["error"] and (kind in _TRIPS or attempt["error"] is None):
        attempt["error"] = event["error"]
    if kind in _ENDS and attempt["ended_at"] is None:
        attempt["ended_at"], attempt["outcome"] = event["created_at"], kind
        attempt["ran_s"] = event["elapsed_s"]


def _finish(attempt: JsonDict, job: Row, *, last: bool) -> None:
    """Say how long it ran, and that it runs; an attempt that nobody ended has outcome `unknown`."""
    ended_at = attempt["ended_at"]
    if attempt["outcome"] is None:
        running = last and job["status"] == "running"
        attempt["outcome"] = "running" if running else "unknown"
        ended_at = job["read_at"] if running else None
    if attempt["ran_s"] is None:
        attempt["ran_s"] = _seconds(attempt["claimed_at"], ended_at)


def _seconds(start: datetime | None, end: datetime | None) -> float | None:
    if start is None or end is None:
        return None
    return max(0.0, (end - start).total_seconds())


def _pid(worker_id: Any) -> int | None:
    text = str(worker_id or "").partition(":")[2].partition(":")[0]
    return int(text) if text.isdecimal() else None
