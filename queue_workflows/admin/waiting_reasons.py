"""Explain why jobs and runs wait: one reason for all workers, and one for each live worker.

The reason of a worker is a clause of its claim that excludes the job. One that would still hold if
the worker were switched on comes before its switch. `groups` finds the reasons of all queued jobs
by the same rules, but ignores a job's place among others. Its length: each clause is a short
function.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from queue_workflows import config, db
from queue_workflows.admin import stored_graph
from queue_workflows.claim import job_tables
from queue_workflows.db import statements
from queue_workflows.runtime import clock, display, stored_json
from queue_workflows.types import TERMINAL_RUN_STATUSES, JsonDict, Row

_DONE = frozenset({"completed", "skipped"})
COUNTED = 10_000
"""The most jobs before another one that are counted."""
CANNOT = frozenset({"off", "unknown_node", "version", "model", "vram"})
"""Clauses of a worker that cannot take the job at present."""
DEPENDENCIES = 3
"""How many unfinished dependencies of a node are named at most."""
GROUPED = 1_000
"""The most jobs of a queue, and the most blocked jobs of a table, that `groups` reads."""
BUCKETS = 100
"""How many buckets of jobs with the same facts `groups` explains, the largest first."""


def of_job(conn: db.Connection, job_id: str) -> JsonDict | None:
    """Return the result of `jobs.explain`, or None without such a job."""
    for table in reversed(statements.JOB_TABLES):
        for row in _read_jobs(conn, table, [job_id]):
            return _explained(conn, [row])[0] | {"lost": row["lost"]}
    return None


def _read_jobs(conn: db.Connection, table: str, ids: list[str]) -> list[Row]:
    """Return jobs with the facts that keep them waiting."""
    stale_s = config.STALE_WORKER_AFTER_S.read()
    return statements.waiting_facts.jobs[table](conn, ids=ids, stale_s=stale_s)


# --- all jobs ----------------------------------------------------------------------------------


def groups(conn: db.Connection) -> JsonDict:
    """Return `groups` of queued jobs by queue and reason of the wait, the largest first.

    Each has `queue`, `kind`, `model`, `count`, `is_more` (there are more, which were not read),
    `since` (when its oldest job was queued), `job` and `run_id` of its first job, and this job's
    `clause`, `detail` and `can_run` as in `jobs.explain`. `workers` has, for each reason of live
    workers, `clause`, `detail` (None if they take the job in its turn), `count` and `machines`.
    `left_out` is the number of jobs in no group, as only the largest BUCKETS are explained.
    """
    buckets = statements.waiting_facts.buckets(conn, most=GROUPED, limit=BUCKETS)
    rows: dict[tuple[str, str], Row] = {}
    for table in statements.JOB_TABLES:
        ids = [each["first_id"] for each in buckets if each["jobs"] == table]
        found = _read_jobs(conn, table, ids)
        # Other jobs have been claimed since the first read.
        rows |= {(table, row["id"]): row for row in found if row["status"] == "queued"}
    explained = dict(zip(rows, _explained(conn, [*rows.values()], has_place=False), strict=True))
    made: dict[str, JsonDict] = {}
    for bucket in buckets:
        key = bucket["jobs"], bucket["first_id"]
        if key not in rows:
            continue
        group = _group(bucket, rows[key], explained[key])
        same = repr([group[name] for name in ("queue", "kind", "clause", "detail", "workers")])
        first = made.setdefault(same, group)
        if first is not group:
            first["count"] += group["count"]
            first["is_more"] |= group["is_more"]
            first["since"] = min(first["since"], group["since"])
            first["model"] = group["model"] if group["model"] == first["model"] else None
    listed = sum(bucket["n"] for bucket in buckets)
    return {
        "groups": sorted(made.values(), key=lambda group: (-group["count"], group["queue"])),
        "left_out": int(buckets[0]["total"]) - listed if buckets else 0,
    }


def _group(bucket: Row, row: Row, found: JsonDict) -> JsonDict:
    """Return a group of `groups` from a bucket, its first job and why that waits."""
    reasons: dict[tuple[str | None, str | None], list[str]] = {}
    for worker in found["workers"]:
        own = worker["clause"], worker["detail"]
        reasons.setdefault(own, []).append(worker["host_label"])
    return {
        key: found[key] for key in ("queue", "kind", "model", "clause", "detail", "can_run")
    } | {
        "count": bucket["n"],
        "is_more": bucket["is_more"],
        "since": bucket["since"],
        "job": row["id"],
        "run_id": row.get("run_id"),
        "workers": [
            {"clause": own[0], "detail": own[1], "count": len(hosts), "machines": sorted({*hosts})}
            for own, hosts in reasons.items()
        ],
    }


# --- one job or run ----------------------------------------------------------------------------


def of_run(conn: db.Connection, run_id: str, limit: int) -> JsonDict | None:
    """Return the result of `runs.explain`, or None without such a run."""
    row = statements.waiting_facts.run(conn, run=run_id)
    if row is None:
        return None
    waiting, later = list[Row](), list[JsonDict]()
    if row["status"] not in TERMINAL_RUN_STATUSES:
        graph = stored_graph.graph_nodes(row["definition"])
        waiting = statements.waiting_facts.run_nodes(conn, run=run_id, limit=limit)
        rows = statements.history_rows.node_states(conn, run_id=run_id, nodes=[*graph])
        later = _not_queued(graph, {job["node_id"]: job["status"] for job in rows})
    queued = [job["id"] for job in waiting if job["status"] == "queued"]
    explained = {
        each["id"]: each
        for each in _explained(conn, _read_jobs(conn, job_tables.NODE_JOBS.name, queued))
    }
    found = [explained.get(job["id"]) or _asks(job) for job in waiting]
    found += later[: limit - len(found)]
    total = waiting[0]["total"] if waiting else 0
    return {
        "id": row["id"],
        "kind": "run",
        "name": row["workflow_name"],
        "status": row["status"],
        "detail": _of_run(row),
        "nodes": found,
        "left_out": total + len(later) - len(found),
    }


def _of_run(row: Row) -> str | None:
    """Return why the run itself waits or has ended, or None."""
    if row["status"] in TERMINAL_RUN_STATUSES:
        return f"it is {row['status']}"
    if row["status"] != "queued":
        return None
    if row["available_at"]:
        return f"its start is tried again {display.moment(row['available_at'])}"
    return "no orchestrator has started it yet"


def _asks(job: Row) -> JsonDict:
    """Return a node that waits for an answer or for its child run."""
    if job["child_run_id"] is not None:
        state = job["child_status"] or "gone"
        return _shown(job, "child", f"it waits for its run {job['child_run_id']} ({state})")
    prompt = stored_json.text(job["prompt"])
    return _shown(job, "answer", "it waits for an answer" + (f": {prompt}" if prompt else ""))


def _not_queued(graph: Mapping[str, JsonDict], states: Mapping[str, str]) -> list[JsonDict]:
    """Return the nodes of the graph that are not queued yet, each with its open dependencies.

    `states` has the states of nodes that have a job.
    """
    found: list[JsonDict] = []
    for node_id, entry in graph.items():
        if node_id in states:
            continue
        needed = {dep: states.get(dep, "waiting") for dep in entry["deps"]}
        open_ = [f"{dep} ({state})" for dep, state in needed.items() if state not in _DONE]
        more = f" and {len(open_) - DEPENDENCIES} more" if len(open_) > DEPENDENCIES else ""
        what = ", ".join(open_[:DEPENDENCIES]) + more or "an orchestrator, which queues it"
        node = {"node_id": node_id, "status": "waiting"}
        found.append(_shown(node, "dependencies", f"it waits for {what}"))
    return found


def _shown(
    row: Row, clause: str | None, detail: str | None, workers: Sequence[JsonDict] = ()
) -> JsonDict:
    """Return a job, or a node without one, as `jobs.explain` does."""
    return {
        "id": row.get("id"),
        "kind": row.get("kind", "node job"),
        "name": row.get("node_id") or row.get("task_name"),
        "queue": row.get("queue"),
        "model": row.get("required_model"),
        "priority": row.get("priority"),
        "status": row["status"],
        "clause": clause,
        "detail": detail,
        "can_run": any(worker["clause"] not in CANNOT for worker in workers),
        "workers": [*workers],
    }


_NO_WORKER_MATTERS = frozenset({"status", "run_over", "items"})
"""Clauses of jobs that no worker could take."""


def _explained(conn: db.Connection, rows: list[Row], *, has_place: bool = True) -> list[JsonDict]:
    """Return why each of these jobs waits; `has_place` also considers its place among others."""
    if not rows:
        return []
    queues = sorted({row["queue"] for row in rows})
    models = sorted({row["required_model"] for row in rows if row.get("required_model")})
    stale_s = config.STALE_WORKER_AFTER_S.read()
    live = statements.waiting_facts.workers(conn, queues=queues, models=models, stale_s=stale_s)
    settings = statements.queues.waiting(conn, queue=None if queues[1:] else queues[0])
    limits = {row["queue"]: row for row in settings}
    places = _Places(conn, live, models) if has_place else None
    # A worker that does not know a node leaves an error, which the next claim clears.
    handed = [row["id"] for row in rows if row["kind"] == "node job" and row["error"]]
    found = statements.waiting_facts.met(conn, ids=handed) if handed else []
    met = {row["id"]: row["workers"] for row in found}
    return [
        _of_one(
            conn, row | {"met": met.get(row["id"], [])}, limits.get(row["queue"]),
            [worker for worker in live if worker["queue"] == row["queue"]], places,
        )
        for row in rows
    ]  # fmt: skip


def _of_one(
    conn: db.Connection, row: Row, limits: Row | None, workers: list[Row], places: _Places | None
) -> JsonDict:
    """Return why a job waits, from the settings and the live workers of its queue."""
    clause, detail = _of_job(conn, row, limits)
    place = _of_gpu if row["queue"] == "gpu" and row["kind"] == "node job" else _by_place
    found: list[JsonDict] = []
    for worker in () if clause in _NO_WORKER_MATTERS else workers:
        own = _kept_out(row, worker)
        if own is None and clause is None:
            own = _held_up(worker)
            if own is None and places is not None:
                own = place(places, row, worker)
        found.append(
            {key: worker[key] for key in ("worker_id", "host_label", "pid", "state")}
            | {"running": worker["node"] or worker["ingest"]}
            | dict(zip(("clause", "detail"), own or (None, None), strict=True))
        )
    clause, detail = _of_all(row, clause, detail, workers, found)
    return _shown(row, clause, detail, found)


def _of_all(
    row: Row, clause: str | None, detail: str | None, workers: list[Row], found: list[JsonDict]
) -> tuple[str | None, str | None]:
    """Return the clause and text of a job, if need be from the clauses of all workers, `found`."""
    of_workers = {worker["clause"] for worker in found}
    if of_workers == {"unknown_node"}:
        where = f"no live worker of queue {row['queue']}"
        met = f"; these met it: {', '.join(row['met'])}" if row["met"] else ""
        fails_s = display.number(job_tables.UNKNOWN_NODE_S)
        return "unknown_node", (
            f"{where} knows node module {row['node_module']}{met}; start a worker with that code, "
            f"or it fails {fails_s} s after the first worker met it"
        )
    if not of_workers and clause == "paused":
        return clause, f"{detail}, and no live worker serves its queue"
    if not of_workers and clause is None:
        return "no_worker", f"no live worker serves queue {row['queue']}"
    if clause is None and of_workers <= CANNOT:
        return _of_none(row, workers, found)
    return clause, detail


def _of_none(row: Row, workers: list[Row], found: list[JsonDict]) -> tuple[str, str]:
    """Return the clause and text of a job that every live worker has to leave at present.

    `found` has the clauses of `workers`. The reasons of a model are in the words of
    queue_workflows_gpu_unserved(), so that `unassignable_text` says the same of all its jobs.
    """
    kept_out: dict[str, list[Row]] = {}
    for worker, own in zip(workers, found, strict=True):
        kept_out.setdefault(own["clause"], []).append(worker)
    cannot = "no worker can take it, as "
    if "off" in kept_out:
        hosts = sorted({worker["host_label"] for worker in kept_out["off"]})
        return "off", f"{cannot}every machine that can take it is off: {', '.join(hosts)}"
    if "vram" in kept_out:
        largest = max(kept_out["vram"], key=lambda worker: worker["vram_total_mb"])
        fit = _fit(largest, row["required_model"])
        needs, has = display.number(fit.get("needs_gb")), largest["vram_total_mb"] // 1000
        gpu = f"the largest GPU that may load it has {has} GB"
        return "vram", f"{cannot}it needs {needs} GB, and {gpu}"
    if "model" in kept_out:
        return "model", f"{cannot}no live gpu worker knows the model"
    name, _, number = row["required_version"].rpartition("@")
    return "version", (
        f"no live worker of queue {row['queue']} has version {number} of node {name}: start a "
        "worker with that code, or move the run to today's code by "
        f"`queue-workflows upgrade {row['run_id']}`"
    )


def _of_time(row: Row) -> tuple[str, str]:
    """Return the clause and text of a job that waits for a time, or for an event."""
    if row["kept"]:
        host, until = row["resume_host"], _until(row["available_at"])
        return "kept", f"it may run now: it is kept for host {host}{until}, then for any"
    until = _until(row["due_at"])
    if row["event_name"] is None:
        return "not_due", f"it is not due{until}"
    key = f" with key {row['event_key']!r}" if row["event_key"] else ""
    limit = f"{until} at most" if row["event_due_at"] else ""
    return "event", f"its handler waits for event {row['event_name']!r}{key}{limit}"


def _of_job(conn: db.Connection, row: Row, limits: Row | None) -> tuple[str | None, str | None]:
    """Return the clause and text that keep every worker from the job; None for neither.

    `limits` are the settings of its queue, with their use, as `queues.waiting` returns them.
    """
    if row["status"] != "queued":
        return "status", _of_status(conn, row)
    if row.get("run_status") in TERMINAL_RUN_STATUSES:
        return "run_over", f"its run is {row['run_status']}"
    reason = row["blocked_reason"]
    if reason == "not_due":
        return _of_time(row)
    if reason is not None:
        return _of_block(row, limits, reason)
    if row["partition_paused"] and row["kind"] == "ingest job":
        return _of_partition(row)
    return _of_queue(limits)


def _of_block(row: Row, limits: Row | None, reason: str) -> tuple[str, str]:
    if reason == "items":
        return "items", _of_items(row)
    if reason == "locked":
        is_owned = row["owner_id"] is not None
        has = f": job {row['owner_id']} ({row['owner_status']}) has it" if is_owned else ""
        return "locked", f"it waits for lock key {row['lock_key']}{has}"
    if reason == "unserved":
        return "unserved", _of_unserved(row, limits)
    if reason == "limited":
        return _of_partition(row)
    return "blocked", f"it is blocked: {reason}"


def _of_items(row: Row) -> str:
    """Return which items a map waits for."""
    if row["map_total"] is None:
        return "it waits for its items"
    counts = {"failed": row["map_failed"], "open": row["map_open"]}
    counts["not started"] = row["map_total"] - row["map_done"] - sum(counts.values())
    others = "".join(f", {count} {state}" for state, count in counts.items() if count > 0)
    return f"it waits for its items: {row['map_done']} of {row['map_total']} done{others}"


def _of_status(conn: db.Connection, row: Row) -> str:
    if row["status"] == "skipped" and (reason := _skipped_by(conn, row)):
        return f"it is skipped: {reason}"
    by = f" by {row['claimed_by']}" if row["status"] == "running" and row["claimed_by"] else ""
    return f"it is {row['status'].replace('_', ' ')}{by}"


def _skipped_by(conn: db.Connection, row: Row) -> str | None:
    """Return the branch or loop that has skipped a node; None for a node outside of both."""
    run = statements.waiting_facts.run(conn, run=row["run_id"])
    entries = stored_graph.all_entries(run["definition"]) if run else {}
    entry = stored_graph.entry_of(entries, row["node_id"])
    arm = stored_json.text(entry.get("arm")) if entry else None
    if entry is None or arm is None:
        return None
    # The ids of a map's body are relative to the item.
    name = row["node_id"].removesuffix(entry["id"]) + arm
    if entry.get("round") is not None:
        return f"loop {name} has ended before this round"
    return f"branch {name} has chosen another arm"


def unserved_text(queue: str) -> str:
    """Return in words why a job of this queue is blocked as `unserved`."""
    return f"its queue {queue} is served by no worker, so its lock key passed to others"


def live_queues(conn: db.Connection, *, partitions: int = 0) -> list[Row]:
    """Return the queues with settings or live jobs, and the counts of jobs and workers.

    After a queue come its partitions that have settings, up to `partitions` in all.
    """
    stale_s = config.STALE_WORKER_AFTER_S.read()
    return statements.queues.list(
        conn, window=0.0, stale_s=stale_s, served=False, queue=None, most=partitions
    )


def paused(rows: list[Row]) -> list[Row]:
    """Return the rows of `live_queues` that are paused now; `partition` is None for a queue."""
    names = {"since": "paused_at", "until": "paused_until", "by": "paused_by"}
    return [
        {"queue": row["queue"], "partition": row["partition"]}
        | {name: row[column] for name, column in names.items()}
        for row in rows
        if row["paused"]
    ]


def paused_text(row: Row) -> str:
    """Return in words that a queue is paused, by whom, and until when."""
    by = f" by {row['paused_by']}" if row["paused_by"] else ""
    return f"queue {row['queue']} is paused{by}{_until(row['paused_until'])}"


def passed_over(rows: list[Row]) -> list[Row]:
    """Return the queues without a worker whose jobs (`n` of them) lost their lock keys to others.

    `rows` come from `live_queues`.
    """
    return [
        {"queue": row["queue"], "n": row["unserved"]}
        for row in rows
        if row["unserved"] and (row["paused"] or not row["taking"])
    ]


def passed_over_text(row: Row) -> str:
    """Return a row of `passed_over` as a sentence."""
    jobs = display.counted(row["n"], "job")
    text = f"no worker takes the jobs of queue {row['queue']}, so the lock keys of {jobs} passed to"
    return display.line(f"{text} others", 500)


def unassignable_text(row: Row) -> str:
    """Return in words which gpu jobs no worker can take; `row` comes from `models.flagged`."""
    of = f"of model {row['model']}" if row["model"] else "without a model"
    jobs = display.counted(row["jobs"], "queued gpu job")
    return f"no worker can take {jobs} {of}: {row['detail']}"


def _of_unserved(row: Row, limits: Row | None) -> str:
    """Return why other jobs got its lock key, and whether it may wait for the key again."""
    if row["is_served"]:
        return "its queue has a worker again: it is about to wait for its lock key again"
    clause, detail = _of_queue(limits)
    if clause == "paused":
        return f"its {detail}, so its lock key passed to others"
    return unserved_text(row["queue"])


def _of_partition(row: Row) -> tuple[str, str]:
    """Return why the jobs in the partition of a job wait, as a clause and a text."""
    key = row["partition_key"]
    if row["partition_paused"]:
        return "paused", f"partition {key} is paused{_until(row['partition_until'])}"
    rate = clock.rate_text(row["partition_rate"], row["partition_period_s"])
    if row["partition_due_at"] is not None and rate:
        due = display.moment(row["partition_due_at"])
        return "limited", f"partition {key} starts {rate}: the next is due {due}"
    if row["partition_most"]:
        running = f"{row['partition_running']} of {row['partition_most']}"
        return "limited", f"it waits for partition {key}, of which {running} jobs run"
    return "limited", f"it waits for a check of partition {key}"


def _of_queue(limits: Row | None) -> tuple[str | None, str | None]:
    """Return the clause and text of the queue's own pause or limit, or (None, None)."""
    if limits is None:
        return None, None
    queue = limits["queue"]
    if limits["paused"]:
        return "paused", paused_text(limits)
    if limits["max_running"] and limits["running"] >= limits["max_running"]:
        return "limited", f"queue {queue} runs its limit of {limits['max_running']}"
    if limits["due_s"] is not None:
        rate = clock.rate_text(limits["rate_limit"], limits["rate_period_s"])
        due = display.number(limits["due_s"], ".1f", " s")
        return "limited", f"queue {queue} starts {rate}: the next in {due}"
    return None, None


def _until(instant: Any) -> str:
    return f" until {display.moment(instant)}" if instant else ""


# --- one worker --------------------------------------------------------------------------------


def _kept_out(row: Row, worker: Row) -> tuple[str, str] | None:
    """Return the clause and text of a worker that cannot take the job at present, or None."""
    claim = stored_json.mapping(worker["claim"])
    if (lacks := _of_code(row, worker, claim)) is not None:
        return lacks
    model = row.get("required_model")
    fit = _fit(worker, model)
    if fit.get("misfit") == "model":
        if worker["known_models"] is None:
            return "model", f"it registers no model, and others know {model}"
        return "model", f"it does not know model {model}"
    if fit.get("misfit") == "vram":
        needs, has = display.number(fit.get("needs_gb")), worker["vram_total_mb"] // 1000
        return "vram", f"the model needs {needs} GB, its GPU has {has} GB"
    if worker["off"] is not None and claim.get("obey", True):
        return "off", f"switched off ({worker['off']})"
    return None


def _fit(worker: Row, model: str | None) -> JsonDict:
    """Return why a gpu worker leaves out jobs of a model, `misfit`, and the memory it needs."""
    return stored_json.mapping(stored_json.mapping(worker["misfits"]).get(model or ""))


def _held_up(worker: Row) -> tuple[str, str] | None:
    """Return the clause and text of a worker that takes no job at all for now, or None."""
    if throttle := stored_json.text(worker["throttle"]):
        return "throttled", f"it waits for memory: {throttle}"
    if fault := stored_json.text(worker["gpu_fault"]):
        return "gpu", f"its GPU could not be used by the last job there: {fault}"
    return None


def _of_code(row: Row, worker: Row, claim: JsonDict) -> tuple[str, str] | None:
    """Return the clause and text if the worker lacks the node, or its version, else None.

    `met` of the row has the workers that were given the node and did not know it.
    """
    if (needed := row.get("required_version")) is not None:
        versions = stored_json.texts(claim.get("versions"))
        if needed not in versions:
            name, _, number = needed.rpartition("@")
            own = [each.rpartition("@")[2] for each in versions if each.rpartition("@")[0] == name]
            has = f"has version {own[0]}" if own else "has no version of it"
            needs = f"the job needs version {number} of node {name}"
            return "version", f"{needs}, and the worker {has}"
    module, nodes = row.get("node_module"), claim.get("nodes")
    if module is None or module.startswith("__"):
        return None
    lacks = nodes is not None and module not in stored_json.texts(nodes)
    if not lacks and worker["worker_id"] not in row["met"]:
        return None
    return "unknown_node", f"it does not know node module {module}"


class _Places:
    """The places of jobs among others, each read once for all workers and jobs that share it."""

    def __init__(self, conn: db.Connection, workers: list[Row], models: list[str]) -> None:
        self._conn, self._workers, self._models = conn, workers, models
        self._ahead: dict[tuple[Any, ...], Row] = {}

    def ahead(self, row: Row, *, newest: bool, models: list[str] | None) -> Row:
        """Return how many jobs come before this one; if `models`, only of these or without one."""
        key = row["kind"], row["id"], newest, None if models is None else (*models,)
        if key not in self._ahead:
            is_node = row["kind"] == "node job"
            table = job_tables.NODE_JOBS if is_node else job_tables.INGEST_JOBS
            given: Row = {name: row[name] for name in ("queue", "priority", "seq")}
            given |= {"newest": newest, "models": models, "most": COUNTED}
            count = statements.waiting_facts.jobs_ahead[table.name]
            self._ahead[key] = count(self._conn, **given)
        return self._ahead[key]

    @functools.cached_property
    def choices(self) -> dict[str, Row]:
        """Return the next claim of each gpu worker by its id."""
        gpu = [_chooser(worker) for worker in self._workers if worker["queue"] == "gpu"]
        rows = statements.waiting_facts.gpu_choices(
            self._conn, workers=json.dumps(gpu), models=self._models
        )
        return {row["worker_id"]: row for row in rows}


def _chooser(worker: Row) -> JsonDict:
    """Return the settings by which a gpu worker claims."""
    names = ("worker_id", "host_label", "current_model", "known_models", "vram_total_mb")
    claim = stored_json.mapping(worker["claim"])
    found: JsonDict = {
        "newest": claim.get("newest") is True,
        "policy": stored_json.text(claim.get("policy")) or "strict",
        "versions": stored_json.texts(claim.get("versions")),
    }
    for name, usual_s in (("grace_s", 300.0), ("bound_s", 2400.0)):
        seconds = stored_json.number(claim.get(name))
        found[name] = usual_s if seconds is None or not math.isfinite(seconds) else seconds
    return found | {name: worker[name] for name in names}


def _by_place(
    places: _Places, row: Row, worker: Row, models: list[str] | None = None
) -> tuple[str, str]:
    """Return its place in the queue; if `models`, among jobs of these models or without one."""
    newest = bool(stored_json.mapping(worker["claim"]).get("newest"))
    newest = newest and row["kind"] == "node job"
    ahead = places.ahead(row, newest=newest, models=models)
    if not ahead["every"]:
        return "next", "it is next in line"
    if ahead["better"]:
        return "priority", f"behind {_jobs(ahead['better'])} of a better priority"
    word = "newer" if newest else "older"
    return "age", f"behind {_jobs(ahead['every'], word)} of its priority"


def _jobs(number: int, word: str = "") -> str:
    count = f"{number:,}" + (" or more" if number >= COUNTED else "")
    return " ".join(filter(None, (count, word, "job" if number == 1 else "jobs")))


def _of_gpu(places: _Places, row: Row, worker: Row) -> tuple[str, str]:
    """Return the clause and text for jobs that the worker's claim policy takes before this one."""
    choice = places.choices[worker["worker_id"]]
    own, chosen, why = row["required_model"] or "", choice["model"], choice["why"]
    reason = _REASONS.get(why, why)
    if chosen == own and choice["seq"] == row["seq"]:
        return "next", f"the worker takes it next ({reason})"
    if held := stored_json.mapping(choice["held"]).get(own):
        hosts = ", ".join(held["holders"])
        reach, load = (display.number(held[name], ".0f") for name in ("reach_s", "load_s"))
        return "left", f"left to {hosts}, which can run it in {reach} s; a load here takes {load} s"
    if chosen is None:
        return "left", "the waiting jobs are left to workers that have their models loaded"
    better = choice["band"] is not None and choice["band"] < row["priority"]
    if why == "first" or better:
        return _by_place(places, row, worker, choice["can"])
    if chosen == own:
        return "line", f"behind other jobs of {_line(own)}"
    return why, f"behind {_line(chosen)}: {reason}"


_REASONS: dict[str, Any] = {
    "first": "the first in line",
    "warm": "it needs no load here",
    "urgent": "a better priority that has waited past the grace",
    "worth": "it ends the most waiting per second of load and work",
    "overdue": "it has waited too much longer than the others",
}


def _line(model: str) -> str:
    return f"model {model}" if model else "jobs without a model"
