"""Make the nodes of one item of a map out of the map's body."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from queue_workflows import errors, refs
from queue_workflows.dag import branches, document_values, graph, item_ids, loops


class Scope(NamedTuple):
    """One item: its map, the id of the map's node, its key and its value."""

    of: graph.Map
    map_id: str
    key: str
    item: Any

    @property
    def id(self) -> str:
        """Return the id of the item, `cut[clip-7]`."""
        return item_ids.folder(self.map_id, self.key)


class Instance(graph.Graph):
    """The nodes of the last of these items, which the others enclose, the outermost first.

    Refs to an item become its value, refs to nodes of the body get their full ids. A ref to a part
    that an item lacks gets a full id too, `films[a]/item.size`, which names it if it is resolved in
    `context`. A node is made when it is looked up, since an event of a loop concerns a few of its
    many rounds. That raises `InvalidPayload` for an id that is too long.
    """

    __slots__ = ("_body", "_prefix")

    def __init__(self, scopes: Sequence[Scope]) -> None:
        self._body, self._prefix = scopes[-1].of.body, f"{scopes[-1].id}/"
        self.nodes = _Nodes(self._body.nodes, scopes)
        self.sources = self._named(self._body.sources)
        self.leaves = self._named(self._body.leaves)
        self.once = self._named(self._body.once)

    def _named(self, node_ids: Iterable[str]) -> tuple[str, ...]:
        return tuple(self._prefix + node_id for node_id in node_ids)

    def position(self, node_id: str) -> int:
        return self._body.position(node_id.removeprefix(self._prefix))

    def downstream(self, node_id: str) -> tuple[str, ...]:
        return self._named(self._body.downstream(node_id.removeprefix(self._prefix)))

    def check_ids(self) -> None:
        """Raise `InvalidPayload` if the id of any node would be too long."""
        for node_id in self.nodes:
            _check_id(node_id)


def _check_id(node_id: str) -> None:
    if len(node_id.encode(errors="replace")) > item_ids.MAX_ID_BYTES:
        raise errors.InvalidPayload(
            f"node {node_id!r:.120} ...: an id of more than {item_ids.MAX_ID_BYTES} bytes"
        )


class _Nodes(Mapping[str, graph.Node]):
    """The nodes of an item by their full ids, each made from the body's at its first use."""

    def __init__(self, of: Mapping[str, graph.Node], scopes: Sequence[Scope]) -> None:
        self._of = of
        self._scopes = scopes
        self._prefix = f"{scopes[-1].id}/"
        self._made: dict[str, graph.Node] = {}

    def __getitem__(self, node_id: str) -> graph.Node:
        if node_id not in self._made:
            if node_id not in self:
                raise KeyError(node_id)
            _check_id(node_id)
            self._made[node_id] = self._make(self._of[node_id[len(self._prefix) :]])
        return self._made[node_id]

    def __contains__(self, node_id: object) -> bool:
        if not isinstance(node_id, str) or not node_id.startswith(self._prefix):
            return False
        return node_id[len(self._prefix) :] in self._of

    def __iter__(self) -> Iterator[str]:
        return (self._prefix + node_id for node_id in self._of)

    def __len__(self) -> int:
        return len(self._of)

    def _make(self, node: graph.Node) -> graph.Node:
        prefix, scopes, choice, loop = self._prefix, self._scopes, node.choice, node.loop
        if choice is not None:
            choice = branches.Choice(
                prefix + choice.id,
                _bound(choice.on, scopes),
                {key: prefix + end for key, end in choice.arms.items()},
                None if choice.other is None else prefix + choice.other,
                {
                    prefix + end: frozenset(prefix + member for member in members)
                    for end, members in choice.members.items()
                },
            )
        if loop is not None:
            rounds = _Rounds(loop.rounds, prefix, scopes)
            loop = loops.Loop(prefix + loop.id, rounds, loop.must)
        return node._replace(
            id=prefix + node.id,
            deps=tuple(prefix + dep for dep in node.deps),
            inputs={name: _input(value, scopes) for name, value in node.inputs.items()},
            skip_if=_bound(node.skip_if, scopes),
            arm=None if node.arm is None else prefix + node.arm,
            choice=choice,
            loop=loop,
        )


class _Rounds(Sequence[loops.Round]):
    """The rounds of a loop in an item, each made when it is looked up."""

    def __init__(self, of: Sequence[loops.Round], prefix: str, scopes: Sequence[Scope]) -> None:
        self._of, self._prefix, self._scopes = of, prefix, scopes

    def __getitem__(self, at: int) -> loops.Round:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = self._of[at]
        return loops.Round(self._prefix + found.end, _bound(found.until, self._scopes))

    def __len__(self) -> int:
        return len(self._of)


def context(scopes: Iterable[Scope]) -> dict[str, Any]:
    """Return the values of these items by the full ids of refs to parts that they lack."""
    return {f"{scope.id}/{scope.of.item}": scope.item for scope in scopes}


def ids(scope: Scope) -> list[str]:
    """Return the full ids of an item's nodes."""
    return [f"{scope.id}/{node_id}" for node_id in scope.of.body.nodes]


def near(scope: Scope, node_ids: Iterable[str]) -> list[str]:
    """Return the full ids of the nodes on which the followers of these (full ids) depend.

    Of a loop these are the rounds around them. All nodes that no loop repeats are among them.
    """
    body, prefix = scope.of.body, f"{scope.id}/"
    found = dict.fromkeys(body.once)
    if len(found) < len(body.nodes):
        for node_id in node_ids:
            inner = node_id.removeprefix(prefix)
            for follower in body.downstream(inner):
                found |= dict.fromkeys([follower, *body.nodes[follower].deps])
    return [prefix + node_id for node_id in found]


def _input(value: Any, scopes: Sequence[Scope]) -> Any:
    if not document_values.is_marker(value):
        return _plain(_bound(value, scopes))
    if isinstance(marked := value[document_values.OUT], dict):
        return {document_values.OUT: {"$value": _bound(marked["$value"], scopes)}}
    return document_values.with_paths(value, lambda path: f"{scopes[-1].id}/{path}")


def _plain(bound: Any) -> Any:
    """Return a bound template without the quotes that it does not need.

    A value that stands for itself saves the worker a look-up of the run's context.
    """
    if isinstance(bound, dict) and bound.keys() == {"$value"}:
        value = cast("dict[str, Any]", bound)["$value"]
        return cast(
            "Any", bound if document_values.is_marker(value) or refs.has_refs(value) else value
        )
    return cast("Any", bound)


def _bound(value: Any, scopes: Sequence[Scope]) -> Any:
    """Return a template with the refs into these items resolved; other refs stay."""
    return refs.replaced(value, lambda ref: _ref(ref, scopes))


def _ref(ref: dict[str, Any], scopes: Sequence[Scope]) -> Any:
    path = ref["$from"]
    if not isinstance(path, str):
        return ref
    head = refs.segments(path)[0]
    for scope in reversed(scopes):
        if head == scope.of.item:
            value, reason = refs.attempt(ref, {head: scope.item}, refs.resolve_ref)
            if reason is None:
                return {"$value": value}
        if head == scope.of.item or head in scope.of.body.nodes:
            return {**ref, "$from": f"{scope.id}/{path}"}
    return ref
