"""Build the graph of a frozen definition: nodes, edges, longest path and cycles."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from queue_workflows import errors
from queue_workflows.dag import branches, loops

VERSIONS = (1, 2)
"""The versions of definitions that this code reads; 2 has maps, branches, loops and child runs."""
_OPTIONAL = ("policy", "map", "arm", "choice", "loop", "round", "version")


class Map(NamedTuple):
    """What a map does with the list under its input `over`: its body, once for each item."""

    body: Graph
    """The nodes of one item; their ids and refs are relative to the item."""
    result: str
    """The node of the body whose output is the item's result."""
    path: tuple[str, ...] = ()
    """Where the result is in that output; (): all of it."""
    key: str | None = None
    """The field that names an item; None: the item itself."""
    item: str = "item"
    """The head of refs to the item."""
    at_once: int | None = None
    """How many items are open at most; None: as many as MAP_WINDOW says."""
    may_fail: int | float = 0
    """How many items may fail: a count, or as a float a share of all."""

    def allowed_failures(self, total: int) -> int:
        """Return how many of `total` items may fail without failing the map."""
        if isinstance(self.may_fail, float):
            return int(self.may_fail * total + 1e-9)
        return self.may_fail


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
    map: Map | None = None
    arm: str | None = None
    """The branch or loop that decides whether the node runs."""
    choice: branches.Choice | None = None
    """Set for the node that has a branch's output."""
    loop: loops.Loop | None = None
    """Set for the node that has a loop's output."""
    round: int | None = None
    """The number of the loop's round, from 1."""
    version: int | None = None
    """The version of the node's code; None: any."""

    @property
    def version_key(self) -> str | None:
        """Return what a worker must have to run the node, `<module>@<version>`; None: nothing."""
        return None if self.version is None else f"{self.module}@{self.version}"


class Graph:
    """Nodes by id in declaration order, their edges both ways, and each node's position.

    Raises `InvalidWorkflow` for a definition of another version or with an unknown dependency.
    """

    __slots__ = (
        "_downstream", "choices", "leaves", "nodes", "once", "position", "sources",
    )  # fmt: skip
    nodes: Mapping[str, Node]
    choices: Mapping[str, branches.Choice]
    position: Mapping[str, int]
    sources: tuple[str, ...]
    leaves: tuple[str, ...]
    once: tuple[str, ...]
    """The nodes that no loop repeats."""

    def __init__(self, definition: Mapping[str, Any]) -> None:
        if definition.get("version") not in VERSIONS:
            raise errors.InvalidWorkflow(
                f"a definition of version {definition.get('version')!r}; this code reads versions "
                f"{' and '.join(map(str, VERSIONS))}"
            )
        self._fill({entry["id"]: _node(entry) for entry in definition["nodes"]})

    @classmethod
    def of(cls, nodes: dict[str, Node]) -> Graph:
        """Return the graph of these nodes, which were checked already."""
        graph = cls.__new__(cls)
        graph._fill(nodes)
        return graph

    def _fill(self, nodes: dict[str, Node]) -> None:
        self.nodes = nodes
        self.choices = _choices(nodes)
        _check_loops(nodes)
        self.position = {node_id: index for index, node_id in enumerate(self.nodes)}
        self._downstream = _downstream(self.nodes.values())
        self.sources = tuple(node.id for node in self.nodes.values() if not node.deps)
        self.leaves = tuple(node_id for node_id in self.nodes if not self.downstream(node_id))
        self.once = tuple(node.id for node in self.nodes.values() if node.round is None)

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


def _choices(nodes: Mapping[str, Node]) -> dict[str, branches.Choice]:
    """Return the branches by their nodes' ids; raise `InvalidWorkflow` for an unknown one."""

    def deps(node_id: str) -> tuple[str, ...]:
        return nodes[node_id].deps if node_id in nodes else ()

    def arm(node_id: str) -> str | None:
        return nodes[node_id].arm if node_id in nodes else None

    found = {
        node.id: branches.linked(node.choice, deps, arm)
        for node in nodes.values()
        if node.choice is not None
    }
    for node in nodes.values():
        if node.arm is None or node.arm in found:
            continue
        if node.arm not in nodes or nodes[node.arm].loop is None:
            raise errors.InvalidWorkflow(
                f"node {node.id!r} belongs to the unknown branch {node.arm!r:.120}"
            )
    return found


def _check_loops(nodes: Mapping[str, Node]) -> None:
    for node in nodes.values():
        if node.loop is not None:
            loops.linked(node.loop, lambda end: nodes[end].arm if end in nodes else None)


_REQUIRED = [field for field in Node._fields if field not in ("id", "deps", *_OPTIONAL)]


def _node(entry: Mapping[str, Any]) -> Node:
    node_id, more = entry["id"], dict[str, Any]()
    if entry.get("map") is not None:
        more["map"] = _map(entry["map"])
    if entry.get("loop") is not None:
        more["loop"] = loops.stored(entry["loop"], node_id, f"node {node_id!r:.120}")
    if entry.get("choice") is not None:
        more["choice"] = branches.stored(entry["choice"], node_id, f"node {node_id!r:.120}")
    return Node(
        id=node_id,
        deps=tuple(entry["deps"]),
        policy=entry.get("policy"),
        arm=entry.get("arm"),
        round=entry.get("round"),
        version=entry.get("version"),
        **{field: entry[field] for field in _REQUIRED},
        **more,
    )


def _map(given: Mapping[str, Any]) -> Map:
    settings: dict[str, Any] = {
        **given,
        "path": tuple(given["path"]),
        "may_fail": failures_of(given["may_fail"]),
    }
    body = Graph.of({entry["id"]: _node(entry) for entry in settings.pop("body")})
    return Map(body=body, **settings)


def failures_of(given: Mapping[str, Any]) -> int | float:
    """Return `may_fail` as a definition stores it, `{"count": n}` or `{"share": x}`."""
    return float(given["share"]) if "share" in given else int(given["count"])


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


def ordered(deps: Mapping[str, Collection[str]]) -> list[str]:
    """Return the nodes that are neither on a cycle nor behind one, each after its dependencies.

    A dependency that is no key counts as done.
    """
    missing = {key: sum(dep in deps for dep in needed) for key, needed in deps.items()}
    followers: dict[str, list[str]] = {key: [] for key in deps}
    for key, needed in deps.items():
        for dep in needed:
            if dep in deps:
                followers[dep].append(key)
    ready = [key for key, count in missing.items() if not count]
    for key in ready:
        for follower in followers[key]:
            missing[follower] -= 1
            if not missing[follower]:
                ready.append(follower)
    return ready


def on_cycles(deps: Mapping[str, Collection[str]]) -> dict[str, int]:
    """Return a number for each node on a cycle; two nodes of one cycle have the same number.

    A node on a path from one cycle to another has a number of its own.
    """
    left = deps.keys() - set(ordered(deps))
    turned: dict[str, list[str]] = {key: [] for key in left}
    for key in left:
        for dep in left.intersection(deps[key]):
            turned[dep].append(key)
    left -= set(ordered(turned))
    found: dict[str, int] = {}
    for number, start in enumerate(reversed(_finished(deps, left))):
        waiting = [start]
        while waiting:
            key = waiting.pop()
            if key not in found:
                found[key] = number
                waiting += left.intersection(turned[key])
    return found


def _finished(deps: Mapping[str, Collection[str]], nodes: set[str]) -> list[str]:
    """Return these nodes in the order in which a search in depth leaves them."""
    found: list[str] = []
    seen: set[str] = set()
    for start in nodes:
        stack = [(start, iter(nodes.intersection(deps[start])))] if start not in seen else []
        seen.add(start)
        while stack:
            key, remaining = stack[-1]
            dep = next((dep for dep in remaining if dep not in seen), None)
            if dep is None:
                found.append(key)
                stack.pop()
            else:
                seen.add(dep)
                stack.append((dep, iter(nodes.intersection(deps[dep]))))
    return found
