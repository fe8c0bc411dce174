"""Explain why jobs and runs wait: one reason for all workers, and one for each live worker.

The reason of a worker is the first clause of its claim that excludes the job.
"""

from __future__ import annotations

from typing import Any

from queue_workflows import config, db
from queue_workflows.admin import stored_graph
from queue_workflows.claim import job_tables
from queue_workflows.db import statements
from queue_workflows.runtime import clock, display, stored_json
from queue_workflows.types import TERMINAL_RUN_STATUSES, JsonDict, Row

_DONE = frozenset({"completed", "skipped"})
COUNTED = 10_000
"""Jobs before another one that are counted."""
CANNOT = frozenset({"off", "unknown_node", "version", "model", "vram"})
"""Clauses of a worker that will not take the job as things are."""
DEPENDENCIES = 3
"""How many unfinished dependencies of a node are named at most."""


def of_job(conn: db.Connection, job_id: str) -> JsonDict | None:
    """Return the result of `jobs.explain`, or None without such a job."""
    for table in reversed(statements.JOB_TABLES):
        if (row := statements.waiting_facts.job[table](conn, job=job_id)) is not None:
            return _explained(conn, table, row) | {"lost": row["lost"]}
    return None


def of_run(conn: db.Connection, run_id: str, limit: int) -> JsonDict | None:
    """Return the result of `runs.explain`, or None without such a run."""
    row = statements.waiting_facts.run(conn, run=run_id)
    if row is None:
        return None
    over = row["status"] in TERMINAL_RUN_STATUSES
    rows = [] if over else statements.waiting_facts.run_nodes(conn, run=run_id)
    jobs = {job["node_id"]: job for job in rows}
    waiting = [job for job in jobs.values() if job["status"] in ("queued", "awaiting_input")]
    later = [] if over else _not_queued(row, jobs)
    found = [_waiting_node(conn, job) for job in waiting[:limit]]
    found += later[: limit - len(found)]
    return {
        "id": row["id"],
        "kind": "run",
        "name": row["workflow_name"],
        "status": row["status"],
        "detail": _of_run(row),
        "nodes": found,
        "left_out": len(waiting) + len(later) - len(found),
    }


def _of_run(row: Row) -> str | None:
    """Return why the run itself waits or does no more, or None."""
    if row["status"] in TERMINAL_RUN_STATUSES:
        return f"it is {row['status']}"
    if row["status"] != "queued":
        return None
    if row["available_at"]:
        return f"its start is tried again {display.moment(row['available_at'])}"
    return "no orchestrator has started it yet"


def _waiting_node(conn: db.Connection, job: Row) -> JsonDict:
    table = job_tables.NODE_JOBS.name
    if job["status"] == "queued" and (
        found := statements.waiting_facts.job[table](conn, job=job["id"])
    ):
        return _explained(conn, table, found)
    if job["child_run_id"] is not None:
        child = statements.waiting_facts.run(conn, run=job["child_run_id"])
        state = child["status"] if child else "gone"
        detail = f"it waits for its run {job['child_run_id']} ({state})"
        return _node(job["id"], job["node_id"], job["status"], "child", detail)
    prompt = stored_json.text(stored_json.mapping(job["input_spec"]).get("prompt"))
    detail = f"it waits for an answer: {prompt}" if prompt else "it waits for an answer"
    return _node(job["id"], job["node_id"], job["status"], "answer", detail)


def _not_queued(row: Row, jobs: dict[str, Row]) -> list[JsonDict]:
    """Return the nodes of the graph that are not queued yet, each with its open dependencies."""
    found: list[JsonDict] = []
    for node_id, entry in stored_graph.graph_nodes(row["definition"]).items():
        if node_id in jobs:
            continue
        states = {dep: jobs[dep]["status"] if dep in jobs else "waiting" for dep in entry["deps"]}
        open_ = [f"{dep} ({state})" for dep, state in states.items() if state not in _DONE]
        more = f" and {len(open_) - DEPENDENCIES} more" if len(open_) > DEPENDENCIES else ""
        what = ", ".join(open_[:DEPENDENCIES]) + more or "an orchestrator, which queues it"
        found.append(_node(None, node_id, "waiting", "dependencies", f"it waits for {what}"))
    return found


def _node(job_id: str | None, node_id: str, status: str, clause: str, detail: str) -> JsonDict:
    """Return a node that no worker can take now, with the keys of `jobs.explain`."""
    return {
        "id": job_id, "kind": "node job", "name": node_id, "queue": None, "model": None,
        "priority": None, "status": status, "clause": clause, "detail": detail, "can_run": False,
        "workers": [],
    }  # fmt: skip


def _explained(conn: db.Connection, table: str, row: Row) -> JsonDict:
    clause, detail = _of_job(conn, table, row)
    stale_s = config.STALE_WORKER_AFTER_S.read()
    met = None
    if table == job_tables.NODE_JOBS.name:
        met = statements.handback.unknown(conn, job=row["id"], stale_s=stale_s)
    row = row | {"met": met["workers"] if met else []}
    found: list[JsonDict] = []
    if clause not in ("status", "run_over", "items"):
        for worker in statements.waiting_facts.workers(conn, queue=row["queue"], stale_s=stale_s):
            own = _of_worker(conn, table, row, worker, blocked=bool(clause))
            found.append(
                {key: worker[key] for key in ("worker_id", "host_label", "pid", "state")}
                | {"running": worker["node"] or worker["ingest"]}
                | {"clause": own[0], "detail": own[1]}
            )
        clauses = {worker["clause"] for worker in found}
        if not found and clause is None:
            clause, detail = "no_worker", f"no live worker serves queue {row['queue']}"
        elif clauses == {"unknown_node"} or (clause is None and clauses == {"version"}):
            (clause,) = clauses
            detail = _without_code(row, clause)
    return {
        "id": row["id"],
        "kind": row["kind"],
        "name": row.get("node_id") or row.get("task_name"),
        "queue": row["queue"],
        "model": row.get("required_model"),
        "priority": row["priority"],
        "status": row["status"],
        "clause": clause,
        "detail": detail,
        "can_run": any(worker["clause"] not in CANNOT for worker in found),
        "workers": found,
    }


def _without_code(row: Row, clause: str) -> str:
    """Return that no live worker has the code of a node, or its version, and the remedy."""
    where = f"no live worker of queue {row['queue']}"
    if clause == "unknown_node":
        met = f"; these met it: {', '.join(row['met'])}" if row["met"] else ""
        fails_s = display.number(job_tables.UNKNOWN_NODE_S)
        return (
            f"{where} knows node module {row['node_module']}{met}; start a worker with that code, "
            f"or it fails {fails_s} s after the first worker met it"
        )
    name, _, number = row["required_version"].rpartition("@")
    return (
        f"{where} has version {number} of node {name}: start a worker with that code, or move the "
        f"run to today's code by `queue-workflows upgrade {row['run_id']}`"
    )


def _of_time(conn: db.Connection, table: str, row: Row) -> tuple[str, str]:
    """Return the clause and text of a job that waits for a time, or for an event."""
    if row["kept"]:
        host, until = row["resume_host"], _until(row["available_at"])
        return "kept", f"it may run now: it is kept for host {host}{until}, then for any"
    until = _until(row["due_at"])
    event = statements.waiting_facts.awaited_event(
        conn, job=row["id"], claim=row["claim_no"], table=table
    )
    if event is None:
        return "not_due", f"it is not due{until}"
    key = f" with key {event['key']!r}" if event["key"] else ""
    limit = f"{until} at most" if event["due_at"] else ""
    return "event", f"its handler waits for event {event['name']!r}{key}{limit}"


def _of_job(conn: db.Connection, table: str, row: Row) -> tuple[str | None, str | None]:
    """Return the clause and text that keep every worker from the job; None for neither."""
    if row["status"] != "queued":
        return "status", _of_status(conn, row)
    if row.get("run_status") in TERMINAL_RUN_STATUSES:
        return "run_over", f"its run is {row['run_status']}"
    reason = row["blocked_reason"]
    if reason == "not_due":
        return _of_time(conn, table, row)
    if reason is not None:
        return _of_block(conn, table, row, reason)
    if row["partition_key"] is not None and table == job_tables.INGEST_JOBS.name:
        limits = _limits(conn, row)
        if limits["paused"]:
            return _of_partition(limits, row["partition_key"])
    return _of_queue(conn, row["queue"])


def _of_block(conn: db.Connection, table: str, row: Row, reason: str) -> tuple[str, str]:
    if reason == "items":
        return "items", _of_items(conn, row)
    if reason == "locked":
        owner = statements.waiting_facts.lock_owner[table](conn, lock_key=row["lock_key"])
        has = f": job {owner['id']} ({owner['status']}) has it" if owner else ""
        return "locked", f"it waits for lock key {row['lock_key']}{has}"
    if reason == "unserved":
        return "unserved", _of_unserved(conn, row)
    if reason == "limited":
        return _of_partition(_limits(conn, row), row["partition_key"])
    return "blocked", f"it is blocked: {reason}"


def _of_items(conn: db.Connection, row: Row) -> str:
    """Return which items a map waits for."""
    found = statements.overview.map_state(conn, run=row["run_id"], map=row["node_id"])
    if found is None:
        return "it waits for its items"
    words = f"{found['done']}/{found['total']} done"
    words += f", {found['failed']} failed" if found["failed"] else ""
    return f"it waits for its items: {words}, {found['open']} open"


def _of_status(conn: db.Connection, row: Row) -> str:
    if row["status"] == "skipped" and (reason := _skipped_by(conn, row)):
        return f"it is skipped: {reason}"
    by = f" by {row['claimed_by']}" if row["status"] == "running" and row["claimed_by"] else ""
    return f"it is {row['status'].replace('_', ' ')}{by}"


def _skipped_by(conn: db.Connection, row: Row) -> str | None:
    """Return which branch or loop has left a node out; None for a node of neither."""
    run = statements.waiting_facts.run(conn, run=row["run_id"])
    entries = stored_graph.all_entries(run["definition"]) if run else {}
    entry = stored_graph.entry_of(entries, row["node_id"])
    arm = stored_json.text(entry.get("arm")) if entry else None
    if entry is None or arm is None:
        return None
    # The ids of a map's body are relative to the item.
    name = row["node_id"].removesuffix(str(entry["id"])) + arm
    if entry.get("round") is not None:
        return f"loop {name} has ended before this round"
    return f"branch {name} has chosen another arm"


def unserved_text(queue: str) -> str:
    """Return in words why a job of this queue is blocked as `unserved`."""
    return f"its queue {queue} is served by no worker, so its lock key passed to others"


def passed_over(conn: db.Connection, counts: list[Row]) -> list[Row]:
    """Return each unserved queue with `n`, the number of its jobs that lost their lock keys.

    `counts` are the rows of `queues.count_jobs`.
    """
    stale_s = config.STALE_WORKER_AFTER_S.read()
    served = statements.unserved_jobs.served(conn, stale_s=stale_s)
    return [
        {"queue": row["queue"], "n": row["unserved"]}
        for row in counts
        if row["unserved"] and row["queue"] not in served
    ]


def passed_over_text(row: Row) -> str:
    """Return a row of `passed_over` as a sentence."""
    jobs = display.counted(row["n"], "job")
    text = f"no worker takes the jobs of queue {row['queue']}, so the lock keys of {jobs} passed to"
    return display.line(f"{text} others", 500)


def _of_unserved(conn: db.Connection, row: Row) -> str:
    """Return why other jobs got its lock key, and whether it may wait for the key again."""
    stale_s = config.STALE_WORKER_AFTER_S.read()
    if row["queue"] in statements.unserved_jobs.served(conn, stale_s=stale_s):
        return "its queue has a worker again: it is about to wait for its lock key again"
    clause, detail = _of_queue(conn, row["queue"])
    if clause == "paused":
        return f"its {detail}, so its lock key passed to others"
    return unserved_text(row["queue"])


def _limits(conn: db.Connection, row: Row) -> Row:
    """Return the limits in force for a job's partition, with `paused`, `running` and `due_at`."""
    return statements.queues.partition_limits(
        conn, queue=row["queue"], partition=row["partition_key"]
    )


def _of_partition(limits: Row, key: str) -> tuple[str, str]:
    """Return why the jobs of a partition wait, as a clause and a text."""
    if limits["paused"]:
        return "paused", f"partition {key} is paused{_until(limits['paused_until'])}"
    rate = clock.rate_text(limits["rate_limit"], limits["rate_period_s"])
    if limits["due_at"] is not None and rate:
        due = display.moment(limits["due_at"])
        return "limited", f"partition {key} starts {rate}: the next is due {due}"
    if limits["max_running"]:
        running = f"{limits['running']} of {limits['max_running']}"
        return "limited", f"it waits for partition {key}, of which {running} jobs run"
    return "limited", f"it waits for a check of partition {key}"


def _of_queue(conn: db.Connection, queue: str) -> tuple[str | None, str | None]:
    """Return the clause and text of the pause or limit of the queue as a whole; None for none."""
    settings = statements.queues.settings(conn, queue=queue)
    if not settings:
        return None, None
    limits = settings[0] | statements.queues.use(conn, **settings[0])
    if limits["paused"]:
        by = f" by {limits['paused_by']}" if limits["paused_by"] else ""
        return "paused", f"queue {queue} is paused{by}{_until(limits['paused_until'])}"
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


def _of_worker(
    conn: db.Connection, table: str, row: Row, worker: Row, *, blocked: bool
) -> tuple[str | None, str | None]:
    """Return the clause and text that keep a worker from a job; None for neither.

    `blocked`: the job waits for every worker, so its place among others does not matter.
    """
    claim = stored_json.mapping(worker["claim"])
    if worker["off"] is not None and claim.get("obey", True):
        return "off", f"switched off ({worker['off']})"
    if (lacks := _of_code(row, worker, claim)) is not None:
        return lacks
    gpu = row["queue"] == "gpu"
    if gpu:
        given = worker | {"model": row["required_model"]}
        fit = statements.waiting_facts.misfit(conn, **given)
        if fit["misfit"] == "model":
            if worker["known_models"] is None:
                return "model", f"it registers no model, and others know {row['required_model']}"
            return "model", f"it does not know model {row['required_model']}"
        if fit["misfit"] == "vram":
            needs, has = display.number(fit["needs_gb"]), worker["vram_total_mb"] // 1000
            return "vram", f"the model needs {needs} GB, its GPU has {has} GB"
    if blocked:
        return None, None
    if throttle := stored_json.text(worker["throttle"]):
        return "throttled", f"it waits for memory: {throttle}"
    if fault := stored_json.text(worker["gpu_fault"]):
        return "gpu", f"its GPU could not be used by the last job there: {fault}"
    return _of_gpu(conn, row, worker) if gpu else _by_place(conn, table, row, worker)


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


def _by_place(
    conn: db.Connection, table: str, row: Row, worker: Row, models: list[str] | None = None
) -> tuple[str, str]:
    """Return its place in the queue; `models`: among jobs of these and such without one."""
    in_run = table == job_tables.NODE_JOBS.name
    newest = bool(stored_json.mapping(worker["claim"]).get("newest")) and in_run
    given: Row = {key: row[key] for key in ("queue", "priority", "seq")}
    given |= {"newest": newest, "models": models, "most": COUNTED}
    ahead = statements.waiting_facts.jobs_ahead[table](conn, **given)
    if not ahead["every"]:
        return "next", "it is next in line"
    if ahead["better"]:
        return "priority", f"behind {_jobs(ahead['better'])} of a better priority"
    word = "newer" if newest else "older"
    return "age", f"behind {_jobs(ahead['every'], word)} of its priority"


def _jobs(number: int, word: str = "") -> str:
    count = f"{number:,}" + (" or more" if number >= COUNTED else "")
    return " ".join(filter(None, (count, word, "job" if number == 1 else "jobs")))


def _of_gpu(conn: db.Connection, row: Row, worker: Row) -> tuple[str, str]:
    """Return the jobs that the worker's claim policy takes before this one."""
    can: list[str] = statements.waiting_facts.models(conn, **worker) or []
    claim = stored_json.mapping(worker["claim"])
    grace_s = stored_json.number(claim.get("grace_s"))
    bound_s = stored_json.number(claim.get("bound_s"))
    given: Row = worker | {
        "models": [*can, ""],
        "newest": claim.get("newest") is True,
        "policy": stored_json.text(claim.get("policy")) or "strict",
        "grace_s": 300.0 if grace_s is None else grace_s,
        "bound_s": 2400.0 if bound_s is None else bound_s,
        "versions": stored_json.texts(claim.get("versions")),
    }
    choice = statements.waiting_facts.choice(conn, **given)
    own, chosen = row["required_model"] or "", choice["model"]
    reason = _REASONS.get(choice["why"], choice["why"])
    if chosen == own and _is_it(conn, row, choice):
        return "next", f"it is what the worker takes next ({reason})"
    if own and choice["why"] in ("worth", "left") and (left := _left(conn, given, own)):
        return "left", left
    if chosen is None:
        return "left", "the waiting jobs are left to workers that have their models loaded"
    better = choice["band"] is not None and choice["band"] < row["priority"]
    if choice["why"] == "first" or better:
        return _by_place(conn, job_tables.NODE_JOBS.name, row, worker, can)
    if chosen == own:
        return "line", f"behind other jobs of {_line(own)}"
    return choice["why"], f"behind {_line(chosen)}: {reason}"


_REASONS: dict[str, Any] = {
    "first": "the first in line",
    "warm": "it needs no load here",
    "urgent": "a better priority that has waited past the grace",
    "worth": "it ends the most waiting per second of load and work",
    "overdue": "it has waited too much longer than the others",
}


def _is_it(conn: db.Connection, row: Row, choice: Row) -> bool:
    if choice["how"] != "newest":
        return row["seq"] == choice["seq"]
    given = {key: row[key] for key in ("required_model", "priority", "seq")}
    newer = statements.waiting_facts.newer_gpu_job
    return row["priority"] == choice["band"] and newer(conn, **given) is None


def _left(conn: db.Connection, worker: Row, model: str) -> str | None:
    """Return whom the model is left to, and why, or None; `worker` has its `versions`."""
    given: Row = worker | {"model": model}
    line = statements.waiting_facts.weighed(conn, **given)
    if not line["is_left"]:
        return None
    hosts = ", ".join(line["holders"] or ())
    reach_s, load_s = line["reach_s"], line["load_s"]
    reach, load = display.number(reach_s, ".0f"), display.number(load_s, ".0f")
    return f"left to {hosts}, free for it in {reach} s; a load takes {load} s here"


def _line(model: str) -> str:
    return f"model {model}" if model else "jobs without a model"
