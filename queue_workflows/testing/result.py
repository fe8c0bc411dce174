"""Describe the result of a run for the assertions of a test."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from queue_workflows import errors, history, runs
from queue_workflows.types import JsonDict, NodeJob

_FAILURES = 1000


class Node(NamedTuple):
    """One node of a run: its status, inputs, output or error, and the four counters."""

    id: str
    status: str
    output: JsonDict
    """Its `context_delta`; {} for none."""
    inputs: JsonDict
    """The inputs as the handler received them; before it ran, as resolved when it was queued."""
    error: str | None
    traceback: str | None
    claims: int
    attempts: int
    crashes: int
    trips: int
    asks: JsonDict | None
    """The `input_spec` of an input node that has asked."""


class Result(NamedTuple):
    """A run as it is now: `status`, `error`, and its nodes by id in the order of their queueing."""

    run_id: str
    status: str
    error: str | None
    nodes: dict[str, Node]
    out_dir: Path

    @property
    def outputs(self) -> dict[str, JsonDict]:
        """Return the output of each completed node, by node id."""
        return {n.id: n.output for n in self.nodes.values() if n.status == "completed"}

    @property
    def failures(self) -> dict[str, str]:
        """Return the error of each failed node, by node id."""
        return {n.id: n.error or "" for n in self.nodes.values() if n.status == "failed"}

    @property
    def waiting(self) -> dict[str, JsonDict]:
        """Return the question of each node that waits for an answer, by node id."""
        return {n.id: n.asks or {} for n in self.nodes.values() if n.status == "awaiting_input"}

    def completed(self) -> Result:
        """Return itself; raise `AssertionError` with what failed or waits if it is not done."""
        if self.status == "completed":
            return self
        lines = [f"run {self.run_id} is {self.status}" + (f": {self.error}" if self.error else "")]
        lines += [f"node {name} waits for an answer" for name in self.waiting]
        for name in self.failures:
            lines.append(f"node {name} failed: {self.nodes[name].error}")
            lines += [self.nodes[name].traceback or ""]
        raise AssertionError("\n".join(lines))


def of_run(run_id: str) -> Result:
    """Return the result of a run. Raises `UnknownJob` if there is none."""
    run = runs.get(run_id)
    if run is None:
        raise errors.UnknownJob(f"no run {run_id!r}")
    rows = sorted(runs.nodes(run_id), key=lambda row: row["seq"])
    failed = [row["node_id"] for row in rows if row["status"] == "failed"][:_FAILURES]
    shown = history.get_run(run_id, nodes=failed, logs=False) or {"nodes": []}
    traces = {node["node_id"]: node["traceback"] for node in shown["nodes"]}
    nodes = {row["node_id"]: _node(row, traces.get(row["node_id"])) for row in rows}
    return Result(run_id, run["status"], run["error"], nodes, Path(run["out_dir"] or "."))


def _node(row: NodeJob, traceback: str | None) -> Node:
    return Node(
        id=row["node_id"],
        status=row["status"],
        output=row["context_delta"] or {},
        inputs=row["resolved_inputs"] or row["inputs"] or {},
        error=row["error"],
        traceback=traceback,
        claims=row["claim_no"],
        attempts=row["attempts"],
        crashes=row["crash_count"],
        trips=row["watchdog_retries"],
        asks=row["input_spec"],
    )
