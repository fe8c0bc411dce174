"""Summarize a finished run: its workers, maps, longest chain, and where failed nodes raised."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import queue_workflows
from queue_workflows import db, errors
from queue_workflows.admin import item_nodes, job_history
from queue_workflows.cli import job_texts, output, run_views
from queue_workflows.cli.run_snapshot import RunSnapshot
from queue_workflows.dag import graph, item_ids
from queue_workflows.db import statements
from queue_workflows.runtime import display

FAILURES = 20
TRACES = 3
"""Failed nodes whose tracebacks are printed: the first ones are enough."""
TRACE_LINES = 20
_FRAME = re.compile(r'[ |+-]*File "(.+)", line \d+')
_PACKAGE = Path(queue_workflows.__file__).parent


def collect(seen: RunSnapshot) -> dict[str, Any]:
    """Return the run with `workers` (host_label, queue, pid, nodes, seconds) and `longest_chain`.

    `failed`: the first nodes that failed, each with its error and traceback, which may be None.
    `maps` and `output`: as `history.get_run` returns them.
    """
    run_id = seen.run["id"]
    with db.transaction() as conn:
        places = statements.overview.completed_by(conn, run=run_id)
        seconds = {
            row["node_id"]: row["seconds"]
            for row in statements.overview.node_seconds(conn, run=run_id)
        }
        frozen = statements.runs.definition(conn, run_id=run_id)
        crashes = statements.overview.crashes(conn, run=run_id)
        failed = statements.overview.failures(conn, run=run_id, limit=FAILURES)
        maps = job_history.maps(conn, run_id)
        returned = statements.runs.output(conn, run_id=run_id)
    chain = _chain(frozen, seconds) if seconds else []
    return {
        "id": run_id,
        "workflow_name": seen.run["workflow_name"],
        "status": seen.run["status"],
        "error": seen.run["error"],
        "output": returned,
        "out_dir": seen.run["out_dir"],
        "elapsed_s": seen.run["elapsed_s"],
        "nodes_total": seen.total,
        "nodes": _by_status(seen),
        "workers": [_place(row) for row in places],
        "longest_chain": {"nodes": chain, "seconds": sum(seconds.get(name, 0.0) for name in chain)},
        "maps": maps,
        "taken_back": crashes,
        "failed": failed,
    }


def _by_status(seen: RunSnapshot) -> dict[str, int]:
    counts: dict[str, int] = {}
    for step in seen.steps:
        for status, n in step.counts.items():
            counts[status] = counts.get(status, 0) + n
    return counts


def _place(row: Mapping[str, Any]) -> dict[str, Any]:
    pid = str(row["worker_id"]).partition(":")[2].partition(":")[0]
    kept = {key: row[key] for key in ("host_label", "queue", "worker_id", "nodes", "seconds")}
    return kept | {"pid": int(pid) if pid.isdecimal() else None}


def _chain(frozen: Any, seconds: Mapping[str, float]) -> list[str]:
    """Return the longest chain of a stored definition and its items; [] if it is not a graph."""
    deps = item_nodes.dependencies(frozen, seconds)
    nodes = {
        name: graph.Node(name, "", "cpu", None, tuple(before), {}, None, None, None)
        for name, before in deps.items()
    }
    with contextlib.suppress(errors.InvalidWorkflow):
        return longest_chain(graph.Graph(nodes), seconds)
    return []


def longest_chain(walk: graph.Graph, seconds: Mapping[str, float]) -> list[str]:
    """Return the node ids of the path with the longest total handler time, in order.

    Nodes of items that have not completed, as a skipped round, are left out.
    """

    def counts(node_id: str) -> bool:
        return node_id in seconds or not item_ids.of_item(node_id)

    reached: dict[str, tuple[float, int]] = {}
    before: dict[str, str] = {}
    open_deps = {node.id: len(node.deps) for node in walk.nodes.values()}
    ready = list(walk.sources)
    for node_id in ready:
        so_far, length = reached[before[node_id]] if node_id in before else (0.0, 0)
        reached[node_id] = (so_far + seconds.get(node_id, 0.0), length + 1)
        for follower in walk.downstream(node_id):
            if follower not in before or reached[node_id] > reached[before[follower]]:
                before[follower] = node_id
            open_deps[follower] -= 1
            if not open_deps[follower]:
                ready.append(follower)
    chain = [max(reached, key=reached.__getitem__)] if reached else []
    while chain and chain[-1] in before:
        chain.append(before[chain[-1]])
    return [node_id for node_id in reversed(chain) if counts(node_id)]


def show(found: Mapping[str, Any]) -> None:
    """Print the summary."""
    nodes = ", ".join(f"{n} {status}" for status, n in sorted(found["nodes"].items()))
    name = output.line(found["workflow_name"])
    output.echo(
        f"run {found['id']} ({name}): {found['status']} in {output.seconds(found['elapsed_s'])}"
    )
    if found["output"] is not None:
        output.echo(job_texts.output_text(found["output"]))
    output.echo(f"nodes: {nodes or 'none'}")
    for place in found["workers"]:
        where = run_views.place(place["worker_id"])
        did = output.counted(place["nodes"], "node")
        output.echo(f"  {place['queue']} {where}: {did}, {output.seconds(place['seconds'])}")
    for each in found["maps"]:
        for text in job_texts.map_texts(each):
            output.echo(text)
    if found["taken_back"]:
        output.echo(f"taken back from dead workers: {output.counted(found['taken_back'], 'time')}")
    chain = found["longest_chain"]
    if chain["nodes"]:
        ends = (
            f"{chain['nodes'][0]} ... {chain['nodes'][-1]}"
            if len(chain["nodes"]) > 1
            else chain["nodes"][0]
        )
        output.echo(
            f"longest chain: {output.counted(len(chain['nodes']), 'node')}, "
            f"{output.seconds(chain['seconds'])} ({output.line(ends, 120)})"
        )
    if found["out_dir"] and _is_folder(found["out_dir"]):
        output.echo(f"files: {output.line(found['out_dir'], 1000)}")
    if found["error"]:
        output.echo(f"error: {output.line(found['error'], 2000)}")


def _is_folder(name: str) -> bool:
    # A name that is too long, or that this user may not access, raises.
    with contextlib.suppress(OSError, ValueError):
        return Path(name).is_dir()
    return False


def show_traces(found: Mapping[str, Any], *, whole: bool) -> None:
    """Print to stderr where the handlers of failed nodes raised; `whole`: all of it."""
    sys.stdout.flush()
    for node in found["failed"][:TRACES]:
        trace = node["traceback"]
        lines = display.lines(trace.rstrip()) if trace else []
        if not whole:
            lines = app_frames(lines)[-TRACE_LINES:]
        if lines:
            more = "" if whole else " (all of it: --debug)"
            output.complain(f"traceback of {output.line(node['node_id'])}{more}:")
        for line in lines:
            sys.stderr.write(output.line(line, 400) + "\n")


def app_frames(lines: list[str]) -> list[str]:
    """Return a traceback from its first frame outside the engine; [] without such a frame."""
    for number, line in enumerate(lines):
        match = _FRAME.match(line)
        if match is not None and not _is_engine(match[1]):
            return lines[number:]
    return []


def _is_engine(path: str) -> bool:
    """Return whether a path, perhaps of another machine, is in this package but not its demo."""
    _, package, name = path.rpartition(f"/{_PACKAGE.name}/")
    return bool(package) and not name.startswith("demo/") and (_PACKAGE / name).is_file()
