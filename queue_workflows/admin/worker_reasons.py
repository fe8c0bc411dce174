"""Explain why a worker does not take a job: the first clause of its claim that excludes the job."""

from __future__ import annotations

from typing import Any

from queue_workflows import db
from queue_workflows.claim import job_tables
from queue_workflows.db import statements
from queue_workflows.runtime import display, stored_json
from queue_workflows.types import JsonDict, Row

COUNTED = 10_000
"""Jobs before another one that are counted."""
CANNOT = frozenset({"off", "unknown_node", "version", "model", "vram"})
"""Clauses of a worker that will not take the job as things are."""


def of_worker(
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
    """Return the clause and text if the worker lacks the node, or its version; None: it fits.

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
    """Return the place among the waiting jobs of its queue.

    `models`: only node jobs of these and such without one count.
    """
    in_run = table == job_tables.NODE_JOBS.name
    newest = bool(stored_json.mapping(worker["claim"]).get("newest")) and in_run
    given: Row = {key: row[key] for key in ("queue", "priority", "seq")}
    given |= {"newest": newest, "models": models, "most": COUNTED}
    facts = statements.waiting_facts
    ahead = (facts.node_jobs_ahead if in_run else facts.ingest_jobs_ahead)(conn, **given)
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
    """Return what the worker's claim policy takes before this job."""
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
    """Return which workers the model is left to, and why; None if it is left to nobody.

    `worker` has its `versions`.
    """
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
