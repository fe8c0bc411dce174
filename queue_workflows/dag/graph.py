"""Build the graph of a frozen definition: nodes, edges, longest path and cycles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from queue_workflows import errors


class Node(NamedTuple):
    """One node of a definition; `inputs` are templates, `step` is set for input nodes only."""

    id: str
    module: str
    queue: str
    model: str | None
    deps: tuple[str, ...]
    inputs: dict[str, Any]
    skip_if: Any
    pipeline: str | None
    step: dict[str, Any] | None
    policy: dict[str, Any] | None = None


class Graph:
    """Nodes by id in declaration order, their edges both ways, and each node's position.

    Raises `InvalidWorkflow` for a definition of another version or with an unknown dependency.
    """

    __slots__ = ("_downstream", "leaves", "nodes", "position", "sources")

    def __init__(self, definition: Mapping[str, Any]) -> None:
        if definition.get("version") != 1:
            raise errors.InvalidWorkflow(
                f"a definition of version {definition.get('version')!r}; this code reads version 1"
            )
        fields = [field for field in Node._fields if field not in ("id", "deps", "policy")]
        nodes = {
            entry["id"]: Node(
                id=entry["id"],
                deps=tuple(entry["deps"]),
                policy=entry.get("policy"),
                **{field: entry[field] for field in fields},
            )
            for entry in definition["nodes"]
        }
        self._fill(nodes)

    @classmethod
    def of(cls, nodes: dict[str, Node]) -> Graph:
        """Return the graph of these nodes, which were checked already."""
        graph = cls.__new__(cls)
        graph._fill(nodes)
        return graph

    def _fill(self, nodes: dict[str, Node]) -> None:
        self.nodes = nodes
        self.position = {node_id: index for index, node_id in enumerate(self.nodes)}
        self._downstream = _downstream(self.nodes.values())
        self.sources = tuple(node.id for node in self.nodes.values() if not node.deps)
        self.leaves = tuple(node_id for node_id in self.nodes if not self.downstream(node_id))

    def downstream(self, node_id: str) -> tuple[str, ...]:
        """Return the nodes that depend on this one, in declaration order; () if it is unknown."""
        return self._downstream.get(node_id, ())

    def longest_chain(self) -> list[str]:
        """Return the ids of a longest path, first node first.

        Raises `InvalidWorkflow` for a cycle.
        """
        length: dict[str, int] = {}
        before: dict[str, str] = {}
        open_deps = {node.id: len(node.deps) for node in self.nodes.values()}
        ready = list(self.sources)
        for node_id in ready:
            length.setdefault(node_id, 1)
            for follower in self.downstream(node_id):
                if length.get(follower, 0) <= length[node_id]:
                    length[follower] = length[node_id] + 1
                    before[follower] = node_id
                open_deps[follower] -= 1
                if open_deps[follower] == 0:
                    ready.append(follower)
        if len(ready) < len(self.nodes):
            raise errors.InvalidWorkflow("the definition has a cycle")
        chain = [max(length, key=length.__getitem__)] if length else []
        while chain and chain[-1] in before:
            chain.append(before[chain[-1]])
        return chain[::-1]


def _downstream(nodes: Iterable[Node]) -> dict[str, tuple[str, ...]]:
    followers: dict[str, list[str]] = {}
    nodes = list(nodes)
    for node in nodes:
        followers[node.id] = []
    for node in nodes:
        for dep in node.deps:
            if dep not in followers:
                raise errors.InvalidWorkflow(f"node {node.id!r} waits for the unknown {dep!r}")
            followers[dep].append(node.id)
    return {node_id: tuple(waiting) for node_id, waiting in followers.items()}


def find_cycle(deps: Mapping[str, Iterable[str]]) -> list[str] | None:
    """Return a cycle, its first id repeated at the end, or None; dependencies must be keys."""
    finished: set[str] = set()
    for start in deps:
        path: dict[str, None] = {}
        stack = [(start, iter(deps[start]))] if start not in finished else []
        while stack:
            here, remaining = stack[-1]
            path[here] = None
            dep = next((dep for dep in remaining if dep not in finished), None)
            if dep is None:
                stack.pop()
                path.pop(here)
                finished.add(here)
            elif dep in path:
                trail = list(path)
                return [*trail[trail.index(dep) :], dep]
            else:
                stack.append((dep, iter(deps[dep])))
    return None
