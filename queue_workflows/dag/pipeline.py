"""Check the JSON object of one pipeline, as the app defines it, and turn it into a `Pipeline`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from queue_workflows import errors
from queue_workflows.dag import bindings, document_values, graph, policy

INPUT_MODULE = "__input__"
MAP_MODULE = "__map__"
_KEPT = ("input", "branch", "run", "start", "output", "loop", "map")


class PipelineNode(NamedTuple):
    """A node without the step's prefix."""

    id: str
    module: str
    queue: str
    model: str | None
    deps: tuple[str, ...]
    inputs: tuple[tuple[str, bindings.Source], ...]
    skip_if: Any
    policy: dict[str, Any] | None = None


class Pipeline(NamedTuple):
    """The nodes in declaration order, and the ids of those that no node depends on."""

    name: str | None
    nodes: tuple[PipelineNode, ...]
    leaves: tuple[str, ...]


def read(name: str, schema: Any, where: str) -> Pipeline:
    """Return the pipeline of a schema; raise `InvalidWorkflow` with the node and the reason."""
    where = f"{where}: pipeline {name!r}"
    document = document_values.record(schema, where)
    listed = document_values.items(document, "nodes", where)
    if not listed:
        raise errors.InvalidWorkflow(f"{where}: it has no nodes")
    entries: dict[str, Mapping[str, Any]] = {}
    for index, raw in enumerate(listed):
        entry = document_values.record(raw, f"{where}: node {index + 1}")
        node_id = document_values.identifier(entry, f"{where}: node {index + 1}")
        if node_id in entries:
            raise errors.InvalidWorkflow(f"{where}: two nodes have the id {node_id!r}")
        entries[node_id] = entry
    defaults = policy.defaults(document, where)
    nodes = tuple(
        _node(node_id, entry, entries, defaults, f"{where}: node {node_id!r}")
        for node_id, entry in entries.items()
    )
    check_order({node.id: node.deps for node in nodes}, where, "node")
    followed = {dep for node in nodes for dep in node.deps}
    return Pipeline(name, nodes, tuple(node.id for node in nodes if node.id not in followed))


def of_one(node_id: str, entry: Mapping[str, Any], inputs: Iterable[str], where: str) -> Pipeline:
    """Return the pipeline of a step of kind `node`: the step is its node, and has its inputs."""
    alone = {key: value for key, value in entry.items() if key not in ("depends_on", "inputs")}
    node = _node(node_id, alone, (), {}, where)
    sources = tuple((name, bindings.FromStep(name)) for name in inputs)
    for name, _ in sources:
        _check_input(name, where)
    return Pipeline(None, (node._replace(inputs=sources),), (node_id,))


def check_order(deps: Mapping[str, tuple[str, ...]], where: str, noun: str) -> None:
    """Refuse a dependency that does not exist, is the owner itself, or closes a cycle."""
    for owner, needed in deps.items():
        for dep in needed:
            if dep not in deps:
                raise errors.InvalidWorkflow(
                    f"{where}: {noun} {owner!r} depends on the unknown {noun} {dep!r:.120}"
                )
            if dep == owner:
                raise errors.InvalidWorkflow(f"{where}: {noun} {owner!r} depends on itself")
    cycle = graph.find_cycle(deps)
    if cycle:
        shown = cycle if len(cycle) <= 20 else [*cycle[:10], "...", *cycle[-9:]]
        raise errors.InvalidWorkflow(f"{where}: a cycle of {noun}s: {' -> '.join(shown)}")


def _node(
    node_id: str,
    entry: Mapping[str, Any],
    siblings: Collection[str],
    defaults: Mapping[str, Any],
    where: str,
) -> PipelineNode:
    module = document_values.text(entry, "node", where) or node_id
    if module.startswith("__") and module.partition("__")[2].partition("__")[0] in _KEPT:
        raise errors.InvalidWorkflow(f"{where}: {module!r:.120} is kept for the engine")
    gpu = bool(entry.get("gpu"))
    return PipelineNode(
        id=node_id,
        module=module,
        queue="gpu" if gpu else "cpu",
        model=document_values.text(entry, "model", where) if gpu else None,
        deps=document_values.ids(entry, "depends_on", where),
        inputs=_inputs(entry, siblings, where),
        skip_if=document_values.value(entry.get("skip_if"), f"{where}: 'skip_if'"),
        policy=policy.read(entry, defaults, where),
    )


def _inputs(
    entry: Mapping[str, Any], siblings: Collection[str], where: str
) -> tuple[tuple[str, bindings.Source], ...]:
    """Return the sources by name, the last one of each name; entries without a name are ignored."""
    sources: dict[str, bindings.Source] = {}
    for raw in document_values.items(entry, "inputs", where):
        given = document_values.record(raw, f"{where}: an entry of 'inputs'")
        if not given.get("name"):
            continue
        name = document_values.needed_text(given, "name", f"{where}: an entry of 'inputs'")
        _check_input(name, where)
        at = f"{where}: input {name!r}"
        text = document_values.needed_text(given, "from", at, limit=None)
        sources[name] = bindings.parse(text, siblings, at)
    return tuple(sources.items())


def _check_input(name: str, where: str) -> None:
    if name.startswith("$"):
        raise errors.InvalidWorkflow(f"{where}: no input can be named {name!r}: '$' marks refs")
