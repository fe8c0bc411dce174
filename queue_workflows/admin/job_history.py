"""Build the results of `history.get_run` and `history.get_job`, with all nodes and attempts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from queue_workflows import db, errors
from queue_workflows.admin import attempt_history, stored_graph
from queue_workflows.claim import job_tables
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.runtime import stored_json
from queue_workflows.types import JsonDict, Row

LOGS_MAX = 60
"""`of_run` reads the logs of a run with up to so many nodes; a log has up to LOG_CAPTURE_KB."""
FAILED_ITEMS = 20
"""The most failed items of a map that `of_run` returns."""
SAMPLED_MAX = 20
"""The most attempts that are shown with their machine's last sample before they died."""


def of_run(
    conn: db.Connection, run_id: str, *, nodes: Sequence[str] | None, logs: bool | None
) -> JsonDict | None:
    """Return the result of `history.get_run`, or None without such a run."""
    row = statements.history_rows.run(conn, run_id=run_id)
    if row is None:
        return None
    totals = statements.history_rows.node_totals(conn, run_id=run_id)
    definition = statements.runs.definition(conn, run_id=run_id)
    return _of_row(conn, row, definition, totals, nodes=nodes, logs=logs)


def _of_row(
    conn: db.Connection, row: Row, definition: Any, totals: Row, *, nodes: Sequence[str] | None,
    logs: bool | None,
) -> JsonDict:  # fmt: skip
    """Return the result of `of_run`, given the run's row and the number of its nodes."""
    run_id, counts = row["id"], totals["counts"]
    wanted = None if nodes is None else [*nodes]
    jobs = statements.history_rows.nodes(conn, run_id=run_id, nodes=wanted)
    events = statements.history_rows.node_events(conn, run_id=run_id, nodes=wanted)
    wanted_logs = len(jobs) <= LOGS_MAX if logs is None else logs
    ids = [job["id"] for job in jobs] if wanted_logs else []
    stored = statements.logs.of_jobs(conn, jobs=list(ids), table=job_tables.NODE_JOBS.name)
    graph = stored_graph.graph_nodes(definition)
    read_at = row.pop("read_at")
    by_node, by_job = _by(events, "node_id"), _by(stored, "job_id")
    made = [
        _node(job, graph, row["queued_at"], by_node[job["node_id"]], by_job[job["id"]])
        for job in jobs
    ]
    _add_machine_samples(conn, made)
    found = {node["node_id"]: node for node in made}
    rest = [name for name in nodes or () if name not in graph and name not in found]
    later = stored_graph.waiting(conn, run_id, definition, rest)
    wanted = [*graph, *(name for name in found if name not in graph), *later]
    chosen = None if nodes is None else {*nodes}
    inner = {} if nodes is None else stored_graph.loops(definition, [*found, *later])
    states = {name: node["status"] for name, node in found.items()}
    rounds = [name for name, entry in graph.items() if isinstance(entry.get("round"), int)]
    if missing := [name for name in rounds if name not in states]:
        rows = statements.history_rows.node_states(conn, run_id=run_id, nodes=missing)
        states |= {each["node_id"]: each["status"] for each in rows}
    waiting = max(0, len(graph) - sum(counts.values()) + totals["of_items"])
    return {
        "kind": "run",
        **row,
        "output": statements.runs.output(conn, run_id=run_id),
        "read_at": read_at,
        "nodes_total": waiting + sum(counts.values()),
        "counts": counts | ({"waiting": waiting} if waiting else {}),
        "maps": maps(conn, run_id),
        "loops": _loops(graph | inner, states),
        "logs_left_out": not wanted_logs,
        "nodes": [
            found.get(name) or _waiting(graph.get(name) or later[name], run_id)
            for name in wanted
            if chosen is None or name in chosen
        ],
    }


def names_to_show(conn: db.Connection, run_id: str, *, most: int, some: int) -> list[str]:
    """Return the ids of the nodes that a person wants to see first.

    These are the nodes that run, wait for an answer or failed, and the nodes of the graph outside
    of loops. If there are more than `most`, returns only the first `some` of the former.
    """
    graph = stored_graph.graph_nodes(statements.runs.definition(conn, run_id=run_id))
    active = statements.history_rows.active_nodes(conn, run_id=run_id, limit=most + 1)
    names = [name for name, entry in graph.items() if not isinstance(entry.get("round"), int)]
    if not statements.overview.maps(conn, run=run_id):
        # An app may have queued nodes that are not in the definition.
        names += statements.history_rows.further_node_ids(
            conn, run_id=run_id, but=[*graph], after="", limit=most + 1
        )
    chosen = list(dict.fromkeys([*names, *active]))
    return chosen if len(chosen) <= most else active[:some]


def page_of_run(
    conn: db.Connection, run_id: str, *, after: str | None, limit: int, logs: bool | None
) -> JsonDict | None:
    """Return the result of `history.get_run_page`, or None without such a run."""
    row = statements.history_rows.run(conn, run_id=run_id)
    if row is None:
        return None
    definition = statements.runs.definition(conn, run_id=run_id)
    graph = [*stored_graph.graph_nodes(definition)]
    begin, behind = 0, ""
    if after in graph:
        begin = graph.index(after) + 1
    elif after is not None:
        if not payload.is_storable(after) or not statements.history_rows.nodes(
            conn, run_id=run_id, nodes=[after]
        ):
            raise errors.InvalidConfig(
                f"cursor {after!r:.120}: the run has no such node now; begin with the first page"
            )
        begin, behind = len(graph), after
    names = graph[begin : begin + limit + 1]
    left = limit + 1 - len(names)
    names += statements.history_rows.further_node_ids(
        conn, run_id=run_id, but=[*graph], after=behind, limit=left
    )
    chosen = names[:limit]
    totals = statements.history_rows.node_totals(conn, run_id=run_id)
    size = max(len(graph), sum(totals["counts"].values()))
    wanted_logs = min(size, limit) <= LOGS_MAX if logs is None else logs
    found = _of_row(conn, row, definition, totals, nodes=chosen, logs=wanted_logs)
    by_id = {node["node_id"]: node for node in found["nodes"]}
    found["nodes"] = [by_id[name] for name in chosen if name in by_id]
    found["next"] = chosen[-1] if len(names) > limit else None
    return found


def maps(conn: db.Connection, run_id: str) -> list[JsonDict]:
    """Return the maps of a run's graph, their items by state, and the first `items_failed`."""
    found = statements.overview.maps(conn, run=run_id)
    for row in found:
        # The search reads all items of a map up to the last one that failed.
        most = min(row["failed"], FAILED_ITEMS)
        row["items_failed"] = statements.maps.failed_items(
            conn, run_id=run_id, map=row["node_id"], limit=most
        )
    return found


def _loops(graph: Mapping[str, Row], states: Mapping[str, str]) -> list[JsonDict]:
    """Return `node_id`, `at_most`, begun `rounds` and the state of the `last` round of each loop.

    `last` is failed, cancelled, running (also if a node is queued or waits) or completed, and None
    before the first round. A node without a state waits.
    """
    rounds: dict[str, dict[int, list[str]]] = {}
    for name, entry in graph.items():
        loop, number = stored_json.text(entry.get("arm")), entry.get("round")
        if loop is not None and isinstance(number, int):
            status = states.get(name, "waiting")
            rounds.setdefault(loop, {}).setdefault(number, []).append(status)
    loops: list[JsonDict] = []
    for name, by_number in rounds.items():
        begun = [n for n, each in by_number.items() if {*each} - {"waiting", "skipped"}]
        last = None
        if begun:
            latest = by_number[max(begun)]
            done = all(state in ("completed", "skipped") for state in latest)
            ended = next((state for state in ("failed", "cancelled") if state in latest), None)
            last = ended or ("completed" if done else "running")
        own = stored_json.mapping((graph.get(name) or {}).get("loop"))
        at_most = len(stored_json.sequence(own.get("rounds"))) or max(by_number)
        most = max(begun, default=0)
        loops.append({"node_id": name, "at_most": at_most, "rounds": most, "last": last})
    return loops


def of_job(conn: db.Connection, job_id: str) -> JsonDict | None:
    """Return the result of `history.get_job`, or None without such a job."""
    job = statements.history_rows.node(conn, job=job_id)
    if job is None:
        return _ingest_job(conn, job_id)
    run = statements.history_rows.run(conn, run_id=job["run_id"])
    graph = stored_graph.graph_nodes(statements.runs.definition(conn, run_id=job["run_id"]))
    events = statements.history_rows.node_events(conn, run_id=job["run_id"], nodes=[job["node_id"]])
    logs = statements.logs.of_jobs(conn, jobs=[job_id], table=job_tables.NODE_JOBS.name)
    made = _node(job, graph, run["queued_at"] if run else None, events, logs)
    _add_machine_samples(conn, [made])
    return made


def _ingest_job(conn: db.Connection, job_id: str) -> JsonDict | None:
    job = statements.history_rows.ingest_job(conn, job=job_id)
    if job is None:
        return None
    events = statements.history_rows.ingest_events(conn, job=job_id)
    logs = statements.logs.of_jobs(conn, jobs=[job_id], table=job_tables.INGEST_JOBS.name)
    made = _with_attempts({"kind": "ingest job"} | job, events, logs, None)
    _add_machine_samples(conn, [made])
    names = ("event_type", "actor", "error", "detail")
    acts = [
        {"at": event["created_at"]} | {name: event[name] for name in names}
        for event in events
        if event["actor"]
    ]
    return made | {"acts": acts}


def _add_machine_samples(conn: db.Connection, jobs: list[JsonDict]) -> None:
    """Give attempts that died the last sample of their machine."""
    died = [
        attempt
        for job in jobs
        for attempt in job["attempts"]
        if attempt["ended_at"]
        and attempt["host_label"]
        and attempt_history.DEATHS.intersection(event["event_type"] for event in attempt["events"])
    ]
    for attempt in died[-SAMPLED_MAX:]:
        found = statements.samples.last(
            conn, host=attempt["host_label"], since=attempt["claimed_at"], until=attempt["ended_at"]
        )
        if found is not None:
            times = {"sampled_at": found["sampled_at"], "every_s": found["every_s"]}
            attempt["machine"] = stored_json.mapping(found["sample"]) | times


def _by(rows: Iterable[Row], key: str) -> Mapping[str, list[Row]]:
    grouped: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        grouped[row[key]].append(row)
    return grouped


def _node(
    job: Row,
    graph: Mapping[str, Row],
    queued_at: datetime | None,
    events: list[Row],
    logs: list[Row],
) -> JsonDict:
    """Return a node for display; its run was queued at `queued_at`."""
    entry = graph.get(job["node_id"])
    node = {"kind": "node job"} | job | {"depends_on": list(entry["deps"]) if entry else []}
    return _with_attempts(node, events, logs, queued_at)


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
    job.pop("read_at")
    return job | {
        "output": job["output"] if done else None,
        "traceback": made[-1]["traceback"] if made and not done else None,
        "attempts_failed": job["attempts"],
        "attempts": made,
    }
