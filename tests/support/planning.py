"""Expand workflows, read their graphs and plan their runs in memory, without a database.

Tests of what a workflow means call this module: when the planner changes, this file does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from queue_workflows.cli import check
from queue_workflows.dag import definition, document_values, graph, plan

Plan = plan.Plan
expand, digest, read = definition.expand, definition.digest, graph.read
bind_paths, folder = document_values.bind_paths, document_values.folder
encode_row = plan.encode_row


def tree(made: dict[str, Any], needs: Iterable[Any] = ()) -> list[str]:
    """Return the lines of a definition's tree in ASCII, as `check` prints it."""
    return list(check.tree(made, tuple(needs), unicode=False))


def chart(made: dict[str, Any]) -> list[str]:
    """Return the lines of a definition's flowchart, without their indentation."""
    return [line.strip() for line in check.mermaid(made)]


LIVE = {"queued", "running", "awaiting_input", "completed", "skipped"}


def node(node_id: str, *deps: str, **more: Any) -> dict[str, Any]:
    """Return a node of a stored definition."""
    fields = {"module": node_id, "queue": "cpu", "model": None, "inputs": {}, "skip_if": None,
              "pipeline": "p", "step": None}  # fmt: skip
    return {"id": node_id, "deps": list(deps), **fields, **more}


def built(*nodes: dict[str, Any]) -> graph.Graph:
    """Return the graph of a stored definition with these nodes."""
    return graph.read({"version": 1, "workflow": "w", "nodes": list(nodes)})


class FakeRun:
    """A run in memory: rows as `ON CONFLICT DO NOTHING` would leave them, and a counting reader."""

    def __init__(self, of: graph.Graph, **context: Any) -> None:
        self.graph = of
        self.run_context = context
        self.status: dict[str, str] = {}
        self.delta: dict[str, Any] = {}
        self.rows: list[plan.NewNode] = []
        self.lookups = self.calls = self.full_reads = self.present_calls = 0
        self.heads_read: list[set[str] | None] = []

    def _done(self, node_id: str) -> bool:
        return self.status.get(node_id) in ("completed", "skipped")

    def done_among(self, ids: Collection[str]) -> set[str]:
        assert ids
        self.calls += 1
        self.lookups += len(ids)
        return {node_id for node_id in ids if self._done(node_id)}

    def done_all(self) -> set[str]:
        self.full_reads += 1
        return {node_id for node_id in self.status if self._done(node_id)}

    def present(self, ids: Collection[str]) -> set[str]:
        assert ids
        self.present_calls += 1
        return {node_id for node_id in ids if self.status.get(node_id) in LIVE}

    def context(self, heads: set[str] | None) -> dict[str, Any]:
        assert heads is None or heads
        self.heads_read.append(None if heads is None else set(heads))
        deltas = {i: d for i, d in self.delta.items() if self.status[i] == "completed"}
        whole = {**self.run_context, **deltas}
        return whole if heads is None else {k: v for k, v in whole.items() if k in heads}

    def write(self, made: plan.Plan) -> list[str]:
        """Store the rows of a plan; return the ids of those that were new."""
        new = [row for row in made.rows if row.node.id not in self.status]
        done_here = {row.node.id for row in made.rows if row.status != "queued"}
        for row in new:
            open_deps = [dep for dep in row.node.deps if not self._done(dep)]
            assert done_here.issuperset(open_deps), row.node.id
        for row in new:
            self.status[row.node.id] = row.status
            if row.result is not None:
                self.delta[row.node.id] = row.result
        self.rows += new
        return [row.node.id for row in new]

    def finish(self, *ids: str, **delta: Any) -> None:
        """Complete nodes with this output."""
        for node_id in ids:
            self.status[node_id] = "completed"
            self.delta[node_id] = dict(delta)

    def start(self, progress: plan.Progress | None = None, **options: Any) -> plan.Plan:
        """Plan and write the first nodes."""
        options.setdefault("out_dir", "/o")
        made = plan.plan(progress or plan.Progress(self.graph), None, self, **options)
        self.write(made)
        return made

    def after(self, *ids: str, progress: plan.Progress | None = None, **options: Any) -> plan.Plan:
        """Plan and write what follows from events of these nodes."""
        options.setdefault("out_dir", "/o")
        made = plan.plan(progress or plan.Progress(self.graph), ids, self, **options)
        self.write(made)
        return made


def ids(made: plan.Plan, status: str | None = None) -> list[str]:
    """Return the nodes that a plan writes, all or those with this status."""
    return [row.node.id for row in made.rows if status in (None, row.status)]
