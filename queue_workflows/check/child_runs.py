"""Check the workflows that a graph's nodes run: that they exist, and do not call each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from queue_workflows import config
from queue_workflows.check import findings
from queue_workflows.check.findings import Finding
from queue_workflows.dag import engine_nodes, graph, map_steps
from queue_workflows.runtime import stored_json

MAX_WORKFLOWS = 1000
"""Workflows that are read for one check."""


def check(name: str, nodes: Iterable[graph.Node]) -> Iterator[Finding]:
    """Yield a finding for each child that is unknown, and for each cycle or too deep a chain."""
    calls = _Calls()
    for node in nodes:
        workflow = engine_nodes.workflow_of(node.module)
        if workflow is None:
            continue
        at = f"node {node.id!r}"
        if calls.of(workflow) is None:
            yield findings.error(
                at,
                f"workflow {workflow!r} is not known here",
                "declare it by @workflow, let the provider have it, or check with --app",
            )
        elif path := calls.cycle([name, workflow]):
            yield findings.error(
                at,
                f"a cycle of child runs: {' -> '.join(path)}",
                "a run whose child calls its parent never ends: use a loop or a map",
            )
        elif (depth := calls.depth(workflow)) > engine_nodes.MAX_DEPTH:
            yield findings.error(
                at,
                f"child runs are nested {depth} deep",
                f"at most {engine_nodes.MAX_DEPTH}: let one workflow call the nodes of another",
            )


class _Calls:
    """The workflows that each workflow calls, each read once."""

    def __init__(self) -> None:
        self._known: dict[str, list[str] | None] = {}
        self._depths: dict[str, int] = {}

    def of(self, name: str) -> list[str] | None:
        """Return what a workflow calls; None for one that cannot be read."""
        if name not in self._known:
            self._known[name] = _called(name) if len(self._known) < MAX_WORKFLOWS else []
        return self._known[name]

    def cycle(self, path: list[str]) -> list[str] | None:
        """Return a path of calls that comes back to a workflow of it; None if there is none."""
        stack, seen = [path], set[str]()
        while stack:
            here = stack.pop()
            if here[-1] in here[:-1]:
                return here[here.index(here[-1]) :]
            if here[-1] not in seen:
                seen.add(here[-1])
                stack += [[*here, called] for called in self.of(here[-1]) or ()]
        return None

    def depth(self, name: str) -> int:
        """Return how many runs are below each other, this one included; there is no cycle."""
        if name not in self._depths:
            below = [self.depth(called) for called in self.of(name) or ()]
            self._depths[name] = 1 + max(below, default=0)
        return self._depths[name]


def _called(name: str) -> list[str] | None:
    load = config.get_config().workflow_loader
    if load is None:
        return None
    try:
        document: Any = load(name)
    except (Exception, SystemExit):  # noqa: BLE001  boundary around app code
        return None
    entry = cast("Mapping[str, Any]", document if isinstance(document, Mapping) else {})
    return [str(step.get("workflow")) for step in _steps(entry, 0) if step.get("kind") == "run"]


def _steps(entry: Mapping[str, Any], depth: int) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a document, and those inside its maps."""
    for raw in stored_json.sequence(entry.get("steps")):
        step = stored_json.mapping(raw)
        yield step
        if step.get("kind") == "map" and depth < map_steps.MAX_DEPTH:
            yield from _steps(step, depth + 1)
