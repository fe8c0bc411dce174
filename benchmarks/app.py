"""Define the app of the measured workers: handlers that do nothing, workflows of any size."""

from __future__ import annotations

import time
from typing import Any

import queue_workflows


def noop() -> dict[str, Any]:
    """Do nothing: a handler without cost."""
    return {}


def stamp() -> dict[str, Any]:
    """Return when the handler started, by a clock that all processes of a machine share."""
    return {"ns": time.monotonic_ns()}


def linked(ns: int) -> dict[str, Any]:
    """Return what `stamp` returns; the input is the start of the node before."""
    return {"ns": max(ns + 1, time.monotonic_ns())}


def listing(count: int) -> dict[str, Any]:
    """Return a list of so many items."""
    return {"items": list(range(count))}


def _nodes(name: str) -> list[dict[str, Any]]:
    shape, _, size = name.partition(":")
    count = int(size or 1)
    if shape == "wide":
        return [{"id": f"n{i}", "node": "noop"} for i in range(count)]
    if shape == "chain":
        return [
            {"id": f"n{i}", "node": "stamp", "depends_on": [f"n{i - 1}"] if i else []}
            for i in range(count)
        ]
    if shape == "linked":
        return [
            {
                "id": f"n{i}",
                "node": "linked",
                "inputs": [{"name": "ns", "from": f"pipeline.n{i}"}],
                "depends_on": [f"n{i - 1}"] if i else [],
            }
            for i in range(count)
        ]
    if shape == "listing":
        given = {"name": "count", "from": f"pipeline._implicit({count})"}
        return [{"id": "source", "node": "listing", "inputs": [given]}]
    if shape == "item":
        return [{"id": "n", "node": "noop"}]
    if shape == "joining":
        return [{"id": "join", "node": "stamp"}]
    middle = [{"id": f"n{i}", "node": "noop", "depends_on": ["source"]} for i in range(count)]
    join = {"id": "join", "node": "stamp", "depends_on": [node["id"] for node in middle]}
    return [{"id": "source", "node": "stamp"}, *middle, join]


def load_workflow(name: str) -> dict[str, Any]:
    """Return `wide:N`, `chain:N` or `fan:N`: one step with the pipeline of the same name.

    `linked:N` is the chain in which each node gets the result of the one before.
    `map:N` is the fan as a map over a list of N items.
    """
    if name.startswith("map:"):
        return {"name": name, "steps": _map_steps(name.partition(":")[2])}
    shape, _, size = name.partition(":")
    if shape not in ("wide", "chain", "linked", "fan"):
        raise LookupError(f"no workflow {name!r}")
    step: dict[str, Any] = {"id": "w", "kind": "pipeline", "pipeline": name}
    if shape == "linked":
        before = {f"n{i}": {"$from": f"w/n{i - 1}.ns"} for i in range(1, int(size))}
        step["inputs"] = {"n0": 0, **before}
    return {"name": name, "steps": [step]}


def _map_steps(size: str) -> list[dict[str, Any]]:
    def step(step_id: str, pipeline: str, *after: str) -> dict[str, Any]:
        return {"id": step_id, "kind": "pipeline", "pipeline": pipeline, "depends_on": [*after]}

    over = {"$from": "s/source.items"}
    mapped = {"id": "m", "kind": "map", "over": over, "pipeline": "item", "depends_on": ["s"]}
    return [step("s", f"listing:{size}"), mapped, step("w", "joining", "m")]


def pipeline_schema(name: str) -> dict[str, Any]:
    """Return the nodes of a workflow."""
    return {"name": name, "nodes": _nodes(name)}


queue_workflows.register_node("noop", noop)
queue_workflows.register_node("stamp", stamp)
queue_workflows.register_node("linked", linked)
queue_workflows.register_node("listing", listing)
queue_workflows.register_ingest_task("noop", noop)
queue_workflows.register_ingest_task("stamp", stamp)
queue_workflows.set_workflow_provider(load_workflow, pipeline_schema)
