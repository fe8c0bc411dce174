"""Check the definition that is stored in a run's row.

A role that may write the row may have stored anything there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from queue_workflows import config, errors
from queue_workflows.dag import (
    bindings,
    branches,
    document_values,
    graph,
    loops,
    map_steps,
    pipeline,
    policy,
)
from queue_workflows.types import Unreadable

QUEUES = ("cpu", "gpu")
MAX_ID_CHARS = 206
_ROUND = re.compile("#[1-9][0-9]{0,3}$")
MAX_DEPENDENCIES = 1_000_000
_LISTED = 20
_WHERE = "the run's stored definition"


def check(definition: Any) -> graph.Graph:
    """Return the graph of a stored definition.

    Raises `InvalidWorkflow` with the node and the reason: not a definition, no nodes, more than
    MAX_NODES_PER_RUN nodes, more than MAX_DEPENDENCIES dependencies, a duplicate id, an unknown
    dependency, a cycle, or a field of the wrong shape.
    """
    where = _WHERE
    if isinstance(definition, Unreadable):
        raise errors.InvalidWorkflow(f"{where} cannot be read: {definition.reason}")
    document = document_values.record(definition, where)
    if document.get("version") not in graph.VERSIONS:
        raise errors.InvalidWorkflow(
            f"{where} has version {document.get('version')!r:.40}, but this code reads versions "
            f"{' and '.join(map(str, graph.VERSIONS))} only: upgrade this process, or submit the "
            "run again"
        )
    return _graph(document_values.items(document, "nodes", where), where, depth=0)


def _graph(listed: list[Any], where: str, depth: int) -> graph.Graph:
    """Return the graph of the listed nodes, which are in `depth` maps."""
    limit = config.MAX_NODES_PER_RUN.read()
    if not listed:
        raise errors.InvalidWorkflow(f"{where} has no nodes")
    if len(listed) > limit:
        raise errors.InvalidWorkflow(
            f"{where} has {len(listed)} nodes; at most {limit} (MAX_NODES_PER_RUN)"
        )
    nodes: dict[str, graph.Node] = {}
    for index, raw in enumerate(listed):
        node = _node(raw, f"{where}: node {index + 1}", depth)
        if node.id in nodes:
            raise errors.InvalidWorkflow(f"{where}: two nodes have the id {node.id!r}")
        nodes[node.id] = node
    _check_edges(nodes, where)
    return graph.Graph.of(nodes)


def _node(raw: Any, where: str, depth: int) -> graph.Node:
    entry = document_values.record(raw, where)
    node_id = _node_id(entry, where)
    where = f"{_WHERE}: node {node_id!r}"
    step = entry.get("step")
    own = (
        None
        if step is None
        else dict(document_values.record(document_values.value(step, where), f"{where}: 'step'"))
    )
    queue = document_values.needed_text(entry, "queue", where)
    model = document_values.text(entry, "model", where)
    if queue not in QUEUES:
        raise errors.InvalidWorkflow(f"{where}: unknown queue {queue!r}; it is cpu or gpu")
    if model is not None and queue != "gpu":
        raise errors.InvalidWorkflow(f"{where}: it names a model but is not on the gpu queue")
    return graph.Node(
        id=node_id,
        module=document_values.needed_text(
            entry, "module", where, limit=document_values.MAX_TEXT_CHARS + 20
        ),
        queue=queue,
        model=model,
        deps=document_values.names(entry, "deps", where),
        inputs=_inputs(entry.get("inputs"), where),
        skip_if=document_values.value(entry.get("skip_if"), f"{where}: 'skip_if'"),
        pipeline=document_values.text(entry, "pipeline", where),
        step=own,
        policy=_policy(entry.get("policy"), own is not None, where),
        map=_map(entry, where, depth),
        arm=document_values.text(entry, "arm", where, limit=MAX_ID_CHARS),
        choice=branches.stored(entry.get("choice"), node_id, where),
        loop=loops.stored(entry.get("loop"), node_id, where),
        round=_round(entry.get("round"), where),
        version=_version(entry.get("version"), where),
    )


def _round(raw: Any, where: str) -> int | None:
    if raw is None:
        return None
    if isinstance(raw, bool) or not isinstance(raw, int) or not 1 <= raw <= loops.MAX_ROUNDS:
        raise errors.InvalidWorkflow(f"{where}: 'round' must be 1 to {loops.MAX_ROUNDS}")
    return raw


def _version(raw: Any, where: str) -> int | None:
    try:
        config.check_version(where, raw)
    except errors.InvalidConfig as error:
        raise errors.InvalidWorkflow(str(error)) from None
    return raw


def _map(entry: Mapping[str, Any], where: str, depth: int) -> graph.Map | None:
    """Return the map of a node; None for a node of another kind."""
    raw = entry.get("map")
    if (raw is None) != (entry.get("module") != pipeline.MAP_MODULE):
        raise errors.InvalidWorkflow(f"{where}: 'map' and the module {pipeline.MAP_MODULE!r}")
    if raw is None:
        return None
    if depth >= map_steps.MAX_DEPTH:
        raise errors.InvalidWorkflow(f"{where}: maps are nested too deep")
    given = document_values.record(raw, f"{where}: 'map'")
    listed = document_values.items(given, "body", where)
    body = _graph(listed, f"{where}: its body", depth + 1)
    return map_steps.stored(given, body, f"{where}: 'map'")


def _node_id(entry: Mapping[str, Any], where: str) -> str:
    """Return the id: one identifier, or two joined by a slash, and `#` with a loop's round.

    Nothing else is accepted, because the id becomes the path of a folder.
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
        if isinstance(template, dict) and bindings.OUT in template:
            _check_marker(template[bindings.OUT], f"{where}: {name!r:.80}")  # pyright: ignore[reportUnknownArgumentType]
    return inputs


def _check_marker(marked: Any, where: str) -> None:
    if isinstance(marked, dict):
        if "$value" not in marked:
            raise errors.InvalidWorkflow(f"{where}: {bindings.OUT!r} without '$value'")
        return
    paths = cast("list[Any]", marked) if isinstance(marked, list) else [marked]
    for path in paths:
        if not isinstance(path, str) or not path or ".." in path.split("/") or path[0] == "/":
            raise errors.InvalidWorkflow(f"{where}: {path!r:.80} is not a path below out_dir")


def _policy(raw: Any, is_input: bool, where: str) -> dict[str, Any] | None:
    if raw is None:
        return None
    given = document_values.record(raw, f"{where}: 'policy'")
    if is_input:
        return policy.read_input(given, f"{where}: 'policy'")
    return policy.read(given, {}, f"{where}: 'policy'")


def _check_edges(nodes: Mapping[str, graph.Node], where: str) -> None:
    """Refuse unknown dependencies, too many, and cycles."""
    if sum(len(node.deps) for node in nodes.values()) > MAX_DEPENDENCIES:
        raise errors.InvalidWorkflow(f"{where} has more than {MAX_DEPENDENCIES} dependencies")
    for node in nodes.values():
        for dep in node.deps:
            if dep not in nodes:
                raise errors.InvalidWorkflow(
                    f"{where}: node {node.id!r} depends on {dep!r:.120}, which is not a node of it"
                )
    cycle = graph.find_cycle({node.id: node.deps for node in nodes.values()})
    if cycle:
        shown = cycle if len(cycle) <= _LISTED else [*cycle[:10], "...", *cycle[-9:]]
        raise errors.InvalidWorkflow(f"{where}: a cycle of nodes: {' -> '.join(shown)}")
