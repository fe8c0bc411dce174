"""Read a definition into a graph of nodes, edges, branches, loops and maps, and find its cycles.

The definition is stored in the run's row, where any role that may write rows can put anything.
"""

from __future__ import annotations

import graphlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from queue_workflows import config, errors, refs
from queue_workflows.dag import branches, document_values, loops, policy
from queue_workflows.types import Unreadable

VERSIONS = (1, 2)
"""The versions of definitions that this code reads; 2 has maps, branches, loops and child runs."""
MAX_ID_CHARS = 206
MAX_NODES_PER_RUN = 20_000
"""The most nodes of a run, with the items of its maps; planning so many takes seconds."""
MAX_DEPENDENCIES = 1_000_000
RUN = "__run__"
"""Followed by a workflow's name, the module of a node that waits for a child run and its output."""
START = "__start__"
"""The same for a node that does not wait; its output is the id of the child run."""
OUTPUT = "__output__"
"""Module and id of the node whose output is the output of its run."""
MAX_RUN_DEPTH = 8
"""How many child runs may be nested below a run."""
MAP = "__map__"
"""The module of the node of a map, which waits for its items."""
MAX_MAP_DEPTH = 4
"""How deep maps may nest. A node's id contains the keys of all items around it."""
MOST_AT_ONCE = 100_000
MAP_ITEM = "item"
"""The head of refs to the item, unless `as` of the step names another."""
MAP_RESULTS = "results"
"""The key of the items' results in a map's output."""
MAP_FAILED = "failed"
"""The key of the failed items in a map's output, each as `{"key", "error"}`."""
MAP_OUTPUTS = frozenset({MAP_RESULTS, "keys", MAP_FAILED})
"""All keys of a map's output."""
_STORED = "the run's stored definition"
_ROUND = re.compile("#[1-9][0-9]{0,3}$")
_LISTED = 20


def workflow_of(module: str) -> str | None:
    """Return the workflow that a node of this module runs as a child; None for other nodes."""
    for prefix in (RUN, START):
        if module.startswith(prefix):
            return module.removeprefix(prefix)
    return None


def is_engine(module: str) -> bool:
    """Return whether the engine itself ends nodes of this module."""
    return module == OUTPUT or workflow_of(module) is not None


class Map(NamedTuple):
    """A map, which runs its body once for each item of the list under its input `over`."""

    body: Graph
    """The nodes of one item; their ids and refs are relative to the item."""
    result: str
    """The node of the body whose output is the item's result."""
    path: tuple[str, ...] = ()
    """The path of the result in that output; () means all of it."""
    key: str | None = None
    """The field of an item that is its key. If it is None, the item itself is the key."""
    item: str = "item"
    """The head of refs to the item."""
    at_once: int | None = None
    """The most items that are open at once; None stands for `expansion.WINDOW`."""
    may_fail: int | float = 0
    """How many items may fail, as a count, or as a float that is a share of all."""

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
    """The version of the node's code, or None for any."""

    @property
    def version_key(self) -> str | None:
        """Return the key that a worker needs to run the node, `<module>@<version>`, or None."""
        return None if self.version is None else f"{self.module}@{self.version}"


class Graph:
    """Nodes by id in declaration order, and their edges both ways.

    Raises `InvalidWorkflow` for an unknown dependency, branch or loop.
    """

    __slots__ = ("_downstream", "leaves", "nodes", "once", "position", "sources")

    def __init__(self, nodes: dict[str, Node]) -> None:
        self._downstream = _downstream(nodes)
        self.nodes = {node_id: _linked(node, nodes) for node_id, node in nodes.items()}
        self.position = {node_id: index for index, node_id in enumerate(nodes)}
        """The positions of the nodes in declaration order."""
        self.sources = tuple(node.id for node in nodes.values() if not node.deps)
        self.leaves = tuple(node_id for node_id in nodes if not self._downstream[node_id])
        self.once = tuple(node.id for node in nodes.values() if node.round is None)
        """The nodes that no loop repeats."""

    def downstream(self, node_id: str) -> tuple[str, ...]:
        """Return the nodes that depend on this one, in declaration order; () if it is unknown."""
        return self._downstream.get(node_id, ())


def walk(of: Graph, item: str, prefix: str = "") -> Iterator[tuple[str, Node]]:
    """Yield all nodes with their ids, and after a map the nodes of its body.

    `item` is put in place of an item's key, so "[]" gives ids such as `cut[]/encode`.
    """
    for node in of.nodes.values():
        yield prefix + node.id, node
        if node.map is not None:
            yield from walk(node.map.body, item, f"{prefix}{node.id}{item}/")


def _linked(node: Node, nodes: Mapping[str, Node]) -> Node:
    """Return a node; if it ends a branch, add the nodes of each arm.

    Raises `InvalidWorkflow` for an unknown branch, and for a branch or loop with nodes of another.
    """
    if node.arm is None and node.choice is None and node.loop is None:
        return node

    def arm(node_id: str) -> str | None:
        return nodes[node_id].arm if node_id in nodes else None

    def deps(node_id: str) -> tuple[str, ...]:
        return nodes[node_id].deps if node_id in nodes else ()

    for each in () if node.loop is None else node.loop.rounds:
        if arm(each.end) != node.id:
            raise errors.InvalidWorkflow(
                f"node {node.id!r}: its round's end {each.end!r:.120} is not a node of this loop"
            )
    owner = nodes.get(node.arm or "")
    if node.arm and (owner is None or (owner.choice is None and owner.loop is None)):
        raise errors.InvalidWorkflow(
            f"node {node.id!r} belongs to the unknown branch {node.arm!r:.120}"
        )
    if node.choice is None:
        return node
    return node._replace(choice=branches.linked(node.choice, deps, arm))


def _downstream(nodes: Mapping[str, Node]) -> dict[str, tuple[str, ...]]:
    followers: dict[str, list[str]] = {node_id: [] for node_id in nodes}
    for node in nodes.values():
        for dep in node.deps:
            if dep not in followers:
                raise errors.InvalidWorkflow(
                    f"node {node.id!r} depends on {dep!r:.120}, which is not a node of it"
                )
            followers[dep].append(node.id)
    return {node_id: tuple(waiting) for node_id, waiting in followers.items()}


def read(definition: Any, where: str = _STORED) -> Graph:
    """Return the graph of a definition, which is called `where` in errors.

    Raises `InvalidWorkflow` with the node and the reason, for example too many nodes or
    dependencies, a duplicate id, a cycle, or a field of the wrong shape.
    """
    if isinstance(definition, Unreadable):
        raise errors.InvalidWorkflow(f"{where} cannot be read: {definition.reason}")
    document = document_values.record(definition, where)
    if document.get("version") not in VERSIONS:
        raise errors.InvalidWorkflow(
            f"{where} has version {document.get('version')!r:.40}, but this code reads versions "
            f"{' and '.join(map(str, VERSIONS))} only: upgrade this process, or submit the run "
            "again"
        )
    return _graph(document_values.items(document, "nodes", where), where, where, 0)


def _graph(listed: list[Any], where: str, top: str, depth: int) -> Graph:
    """Return the graph of the listed nodes, nested in `depth` maps of the definition `top`."""
    if not listed:
        raise errors.InvalidWorkflow(f"{where} has no nodes")
    if len(listed) > MAX_NODES_PER_RUN:
        raise errors.InvalidWorkflow(
            f"{where} has {len(listed)} nodes; at most {MAX_NODES_PER_RUN}"
        )
    nodes: dict[str, Node] = {}
    for index, raw in enumerate(listed):
        node = _node(raw, f"{where}: node {index + 1}", top, depth)
        if node.id in nodes:
            raise errors.InvalidWorkflow(f"{where}: two nodes have the id {node.id!r}")
        nodes[node.id] = node
    if sum(len(node.deps) for node in nodes.values()) > MAX_DEPENDENCIES:
        raise errors.InvalidWorkflow(f"{where} has more than {MAX_DEPENDENCIES} dependencies")
    try:
        made = Graph(nodes)
    except errors.InvalidWorkflow as error:
        raise errors.InvalidWorkflow(f"{where}: {error}") from None
    refuse_cycle({node.id: node.deps for node in nodes.values()}, where, "node")
    for node in nodes.values():
        at = f"{top}: node {node.id!r}"
        if node.queue not in config.DAG_QUEUES:
            raise errors.InvalidWorkflow(f"{at}: unknown queue {node.queue!r}: cpu or gpu")
        if node.model is not None and node.queue != "gpu":
            raise errors.InvalidWorkflow(f"{at}: it names a model but is not on the gpu queue")
    return made


def _node(raw: Any, where: str, top: str, depth: int) -> Node:
    entry = document_values.record(raw, where)
    node_id = _node_id(entry, where)
    where = f"{top}: node {node_id!r}"
    step = document_values.value(entry.get("step"), where)
    node = Node(
        id=node_id,
        module=document_values.needed_text(
            entry, "module", where, limit=document_values.MAX_TEXT_CHARS + 20
        ),
        queue=document_values.needed_text(entry, "queue", where),
        model=document_values.text(entry, "model", where),
        deps=document_values.names(entry, "deps", where),
        inputs=_inputs(entry.get("inputs"), where),
        skip_if=document_values.value(entry.get("skip_if"), f"{where}: 'skip_if'"),
        pipeline=document_values.text(entry, "pipeline", where),
        step=None if step is None else dict(document_values.record(step, f"{where}: 'step'")),
    )
    if (entry.get("map") is None) != (node.module != MAP):
        raise errors.InvalidWorkflow(f"{where}: it has only one of 'map' and the module {MAP!r}")
    given = [] if _MORE.keys().isdisjoint(entry) else [*_MORE]
    more = {key: _MORE[key](entry[key], node, where) for key in given if entry.get(key) is not None}
    if entry.get("map") is not None:
        more["map"] = _map(entry["map"], where, top, depth)
    return node._replace(**more) if more else node


def _policy(raw: Any, node: Node, where: str) -> dict[str, Any] | None:
    at = f"{where}: 'policy'"
    own = document_values.record(raw, at)
    return policy.read(own, {}, at) if node.step is None else policy.read_input(own, at)


def _round(raw: Any, _: Node, where: str) -> int:
    if type(raw) is not int or not 1 <= raw <= loops.MAX_ROUNDS:
        raise errors.InvalidWorkflow(f"{where}: 'round' must be 1 to {loops.MAX_ROUNDS}")
    return raw


def _version(raw: Any, _: Node, where: str) -> int:
    try:
        config.check_version(where, raw)
    except errors.InvalidConfig as error:
        raise errors.InvalidWorkflow(str(error)) from None
    return raw


_MORE: dict[str, Callable[[Any, Node, str], Any]] = {
    "policy": _policy,
    "arm": lambda raw, _, where: document_values.text(
        {"arm": raw}, "arm", where, limit=MAX_ID_CHARS
    ),
    "choice": lambda raw, node, where: branches.stored(raw, node.id, where),
    "loop": lambda raw, node, where: loops.stored(raw, node.id, where),
    "round": _round,
    "version": _version,
}
"""The readers of fields that few nodes have."""


def _map(raw: Any, where: str, top: str, depth: int) -> Map:
    if depth >= MAX_MAP_DEPTH:
        raise errors.InvalidWorkflow(f"{where}: maps are nested too deep")
    at = f"{where}: 'map'"
    given = document_values.record(raw, at)
    body = _graph(document_values.items(given, "body", where), f"{where}: its body", top, depth + 1)
    result, path = given.get("result"), given.get("path")
    if not isinstance(result, str) or result not in body.nodes:
        raise errors.InvalidWorkflow(f"{at}: 'result' {result!r:.120} is no node of its body")
    if not isinstance(path, list) or not all(isinstance(x, str) for x in cast("list[Any]", path)):
        raise errors.InvalidWorkflow(f"{at}: 'path': a list of texts is needed")
    settings = _map_settings(given, at, "item")
    return Map(body, result, tuple(cast("list[str]", path)), **settings)


def _map_settings(given: Mapping[str, Any], where: str, item: str) -> dict[str, Any]:
    """Return the checked `key`, `item`, `at_once` and `may_fail` of a map; `item` names its key."""
    at_once = given.get("at_once")
    if at_once is not None and (type(at_once) is not int or not 1 <= at_once <= MOST_AT_ONCE):
        raise errors.InvalidWorkflow(
            f"{where}: 'at_once' is a number of items, 1 to {MOST_AT_ONCE}, not {at_once!r:.40}"
        )
    allowed = document_values.record(given.get("may_fail"), f"{where}: 'may_fail'")
    is_share = "share" in allowed
    may_fail = allowed["share"] if is_share else allowed.get("count", "nothing")
    kinds, most = ((int, float), 1) if is_share else ((int,), 1_000_000_000)
    if type(may_fail) not in kinds or not 0 <= may_fail <= most:
        raise errors.InvalidWorkflow(
            f"{where}: 'may_fail' is a number of items, or a share of them from 0.0 to 1.0, "
            f"not {may_fail!r:.40}"
        )
    return {
        "key": document_values.text(given, "key", where),
        "item": document_values.identifier({"id": given.get("item")}, f"{where}: {item!r}"),
        "at_once": at_once,
        "may_fail": float(may_fail) if is_share else may_fail,
    }


def read_map(
    entry: Mapping[str, Any], body: Sequence[Mapping[str, Any]], where: str
) -> tuple[Any, dict[str, Any]]:
    """Return the list as a template, and the definition's entry of a map without its body.

    `{"key", "item", "at_once", "may_fail", "result", "path"}`. Raises `InvalidWorkflow` that starts
    with `where`.
    """
    if entry.get("over") is None:
        raise errors.InvalidWorkflow(
            f'{where}: \'over\' is missing: the list, as {{"$from": "scan/scan.files"}}'
        )
    may_fail = 0 if entry.get("may_fail") is None else entry["may_fail"]
    given = {
        "key": entry.get("key"),
        "item": MAP_ITEM if entry.get("as") is None else entry["as"],
        "at_once": entry.get("at_once"),
        "may_fail": {"share" if isinstance(may_fail, float) else "count": may_fail},
    }
    given["item"] = item = _map_settings(given, where, "as")["item"]
    if item in {node["id"] for node in body}:
        raise errors.InvalidWorkflow(
            f"{where}: a node of its body has the name {item!r} of the item"
        )
    result, path = _map_result(entry.get("result"), body, where)
    over = document_values.value(entry["over"], f"{where}: 'over'")
    return over, {**given, "result": result, "path": path}


def last_of(nodes: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the ids of the entries on which no other entry depends."""
    nodes = [*nodes]
    followed = {dep for node in nodes for dep in node["deps"]}
    return [node["id"] for node in nodes if node["id"] not in followed]


def _map_result(given: Any, body: Sequence[Mapping[str, Any]], where: str) -> tuple[str, list[str]]:
    if given is None:
        leaf, *others = last_of(body)
        if others:
            raise errors.InvalidWorkflow(
                f"{where}: {len(others) + 1} nodes end its body: name the one whose output is the "
                f'item\'s, as "result": {{"$from": "{others[-1]}"}}'
            )
        is_map = any("map" in node for node in body if node["id"] == leaf)
        return leaf, [MAP_RESULTS] if is_map else []
    path = cast("dict[str, Any]", given).get("$from") if isinstance(given, dict) else None
    if not isinstance(path, str) or len(cast("dict[str, Any]", given)) != 1:
        raise errors.InvalidWorkflow(
            f'{where}: \'result\' is one ref, as {{"$from": "encode.path"}}'
        )
    head, *rest = refs.segments(path)
    if head not in {node["id"] for node in body}:
        raise errors.InvalidWorkflow(f"{where}: 'result': its body has no node {head!r:.120}")
    return head, rest


def _node_id(entry: Mapping[str, Any], where: str) -> str:
    """Return the id, which becomes the path of a folder.

    It is one identifier, or two joined by a slash, perhaps with `#` and a loop's round.
    """
    raw = entry.get("id")
    parts = raw.split("/") if isinstance(raw, str) and len(raw) <= MAX_ID_CHARS else []
    if not 1 <= len(parts) <= 2:
        raise errors.InvalidWorkflow(
            f"{where}: {raw!r:.120} is not a node id: use one identifier, or two joined by '/'"
        )
    for part in [*parts[:-1], _ROUND.sub("", parts[-1])]:
        document_values.identifier({"id": part}, where)
    assert isinstance(raw, str)
    return raw


def _inputs(raw: Any, where: str) -> dict[str, Any]:
    """Return the input templates after checking their `$out` paths, which `bind_paths` trusts."""
    where = f"{where}: 'inputs'"
    inputs = dict(document_values.record(document_values.value(raw, where, wrapped=3), where))
    for name, template in inputs.items():
        if document_values.is_marker(template):
            _check_marker(template[document_values.OUT], f"{where}: {name!r:.80}")
    return inputs


def _check_marker(marked: Any, where: str) -> None:
    if isinstance(marked, dict):
        if "$value" not in marked:
            raise errors.InvalidWorkflow(f"{where}: {document_values.OUT!r} without '$value'")
        return
    paths = cast("list[Any]", marked) if isinstance(marked, list) else [marked]
    for path in paths:
        if not isinstance(path, str) or not path or ".." in path.split("/") or path[0] == "/":
            raise errors.InvalidWorkflow(f"{where}: {path!r:.80} is not a path below out_dir")


def refuse_cycle(deps: Mapping[str, Iterable[str]], where: str, noun: str) -> None:
    """Raise `InvalidWorkflow` that names a cycle of these dependencies, if there is one."""
    if cycle := find_cycle(deps):
        shown = cycle if len(cycle) <= _LISTED else [*cycle[:10], "...", *cycle[-9:]]
        raise errors.InvalidWorkflow(f"{where}: a cycle of {noun}s: {' -> '.join(shown)}")


def find_cycle(deps: Mapping[str, Iterable[str]]) -> list[str] | None:
    """Return a cycle, its first id repeated at the end, or None."""
    try:
        graphlib.TopologicalSorter(deps).prepare()
    except graphlib.CycleError as error:
        return error.args[1][::-1]  # it begins with a dependency
    return None


def groups(deps: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Return the nodes in groups, each behind the groups that it depends on.

    The nodes of one cycle are one group, any other node is a group of its own. A dependency that is
    not a key counts as done. This is Gabow's algorithm.
    """
    found: list[list[str]] = []
    number: dict[str, int] = {}
    grouped: set[str] = set()
    open_nodes: list[str] = []
    starts: list[int] = []
    for start in deps:
        todo = [] if start in number else [start]
        waiting: list[tuple[str, Iterator[str]]] = []
        while todo or waiting:
            if todo:
                key = todo.pop()
                number[key] = len(open_nodes)
                open_nodes.append(key)
                starts.append(number[key])
                waiting.append((key, iter(deps[key])))
            key, remaining = waiting[-1]
            for dep in remaining:
                if dep in deps and dep not in number:
                    todo.append(dep)
                    break
                while dep in deps and dep not in grouped and starts[-1] > number[dep]:
                    starts.pop()
            else:
                waiting.pop()
                if starts[-1] == number[key]:
                    starts.pop()
                    found.append(open_nodes[number[key] :])
                    grouped.update(found[-1])
                    del open_nodes[number[key] :]
    return found
