"""Expand a workflow and its pipelines, as the app writes them, into the definition of a run."""

from __future__ import annotations

import graphlib
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from queue_workflows import config, errors, refs
from queue_workflows.dag import answers, branches, document_values, graph, loops, policy

if TYPE_CHECKING:
    from queue_workflows.types import JsonDict, PipelineLoader

VERSION = 1
GROWING_VERSION = 2
"""The version of definitions with features that older code would run wrongly."""
KINDS = (
    "a step is of kind 'pipeline', 'map', 'input', 'branch', 'loop' or 'run', and in a map also of "
    "kind 'node'"
)
MAX_DEFINITION_MB = 64
_STEPS = ("pipeline", "map", "input", "branch", "loop", "run")
_KEPT = ("input", "branch", "run", "start", "output", "loop", "map")


def expand(workflow: Any, load_pipeline: PipelineLoader) -> JsonDict:
    """Return the definition, a new JSON document with the nodes in declaration order.

    `{"version", "workflow", "nodes": [{"id", "module", "queue", "model", "deps", "inputs",
    "skip_if", "pipeline", "step"}]}`. Nodes may also have `policy`, `map`, `arm`, `choice`, `loop`,
    `round` and `version`. Raises `InvalidWorkflow` that names step or node and reason; errors of
    `load_pipeline` pass through.
    """
    document = document_values.record(workflow, "the workflow")
    name = document_values.text(document, "name", "the workflow") or ""
    where = f"workflow {name!r}"
    reading = _Reading(load_pipeline, where)
    nodes = _nodes(_read_steps(document, reading, 0, where), reading, where)
    if document.get("output") is not None:
        reading.take_nodes(graph.OUTPUT, 1)
        nodes.append(_output(document["output"], nodes, where))
        reading.take_text(nodes[-1])
    own = {"map", "choice", "loop"}
    grows = any(not own.isdisjoint(node) or graph.is_engine(node["module"]) for node in nodes)
    version = GROWING_VERSION if grows else VERSION
    return {"version": version, "workflow": name, "nodes": nodes}


class _Reading:
    """The state while one workflow is read, which is its pipelines and the counts for the limits.

    Each `take_` method counts, and raises `InvalidWorkflow` beyond a limit.
    """

    def __init__(self, load_pipeline: PipelineLoader, where: str) -> None:
        self._load_pipeline = load_pipeline
        self._flows: dict[str, dict[str, JsonDict]] = {}
        self._where = where
        self._nodes = self._deps = self._chars = 0

    def flow(self, entry: Mapping[str, Any], where: str) -> dict[str, JsonDict]:
        """Return the nodes of the pipeline that a step names."""
        name = document_values.needed_text(entry, "pipeline", where)
        if name not in self._flows:
            self._flows[name] = _read_pipeline(name, self._load_pipeline(name), where)
        return self._flows[name]

    def take_nodes(self, step_id: str, count: int) -> None:
        """Count the nodes of a step before they are built."""
        self._nodes += count
        if self._nodes > graph.MAX_NODES_PER_RUN:
            raise errors.InvalidWorkflow(
                f"{self._where}: more than {graph.MAX_NODES_PER_RUN} nodes (reached in step "
                f"{step_id!r}): start child runs for parts of it"
            )

    def take_deps(self, step_id: str, nodes: list[JsonDict], before: list[str]) -> None:
        """Count the dependencies of a step's nodes; a node without `deps` depends on `before`."""
        self._deps += sum(len(node["deps"] or before) for node in nodes)
        if self._deps > graph.MAX_DEPENDENCIES:
            sources = sum(1 for node in nodes if not node["deps"])
            raise errors.InvalidWorkflow(
                f"{self._where}: step {step_id!r}: {sources} first nodes that wait for "
                f"{len(before)} nodes each make more than {graph.MAX_DEPENDENCIES} dependencies; "
                "put one joining node between"
            )

    def take_text(self, node: JsonDict) -> None:
        """Count the text of a node, except for a map's body, whose nodes are counted already."""
        keys = ("inputs", "skip_if", "step", "choice", "loop")
        settings: dict[str, Any] = {**(node.get("map") or {}), "body": None}
        chars = len(_canonical([settings, *(node.get(key) for key in keys)]))
        limit_kb = config.MAX_PAYLOAD_KB.read()
        if chars > limit_kb * 1024:
            raise errors.InvalidWorkflow(
                f"{self._where}: node {node['id']!r}: inputs of {chars // 1024} KiB; "
                f"at most {limit_kb} (MAX_PAYLOAD_KB)"
            )
        self._chars += chars
        if self._chars > MAX_DEFINITION_MB << 20:
            raise errors.InvalidWorkflow(
                f"{self._where}: the inputs of its nodes exceed {MAX_DEFINITION_MB} MiB in all; "
                "keep a large value in a file and pass its path"
            )


class _Step(NamedTuple):
    """A step as nodes of the definition; its nodes without `deps` run first.

    If a step has no nodes, the steps after it wait for the steps before it.
    """

    deps: tuple[str, ...]
    nodes: list[JsonDict] = []  # noqa: RUF012  never changed
    leaves: list[str] = []  # noqa: RUF012  never changed
    """The nodes that end it."""
    inner: Collection[str] = ()
    """The nodes of its pipeline that a dependency may name, which are none for a loop."""


def _nodes(steps: Mapping[str, _Step], reading: _Reading, where: str) -> list[JsonDict]:
    """Return the nodes of steps, in an order in which each step follows its dependencies."""
    # A dependency names a step, or a step's node, such as `cut/encode`.
    named = {node_id: step_id for step_id, step in steps.items() for node_id in step.inner}
    owners = {key: {dep: named.get(dep, dep) for dep in step.deps} for key, step in steps.items()}
    _check_order({key: tuple(deps.values()) for key, deps in owners.items()}, where, "step")
    nodes: list[JsonDict] = []
    for step_id, step in steps.items():
        before = _ends(owners[step_id], owners, steps)
        reading.take_deps(step_id, step.nodes, before)
        for node in step.nodes:
            node["deps"] = node["deps"] or before
            reading.take_text(node)
        nodes += step.nodes
    if not nodes:
        raise errors.InvalidWorkflow(f"{where}: no step makes nodes; {KINDS}")
    _add_implied_deps(nodes, where)
    return nodes


def _ends(
    deps: Mapping[str, str], owners: Mapping[str, Mapping[str, str]], steps: Mapping[str, _Step]
) -> list[str]:
    """Return the nodes that these dependencies mean, passing through steps without nodes."""
    found: dict[str, None] = {}
    waiting, seen = list(deps)[::-1], set(deps)
    while waiting:
        dep = waiting.pop()
        if dep not in steps:
            found[dep] = None
        elif not steps[dep].nodes:
            fresh = [each for each in owners[dep] if each not in seen]
            seen.update(fresh)
            waiting += fresh[::-1]
        else:
            found.update(dict.fromkeys(steps[dep].leaves))
    return [*found]


def _add_implied_deps(nodes: list[JsonDict], where: str) -> None:
    """Add the nodes that a node's inputs refer to to its dependencies, if `depends_on` lacks them.

    This ignores refs in `skip_if`, which counts as false if a ref cannot be resolved, in the
    question of an input step, between two nodes of one branch or loop, and refs that would close a
    cycle. The declared dependencies must have no cycle. Raises `InvalidWorkflow` for more than
    MAX_DEPENDENCIES in all.
    """
    by_id = {node["id"]: node for node in nodes}
    wanted = _wanted(by_id)
    if not wanted:
        return

    def joined() -> dict[str, list[str]]:
        return {key: [*node["deps"], *wanted.get(key, ())] for key, node in by_id.items()}

    groups = enumerate(graph.groups(joined()))
    group_of = {node_id: number for number, group in groups for node_id in group}
    for node_id, heads in wanted.items():
        wanted[node_id] = [head for head in heads if group_of[head] != group_of[node_id]]
    # The nodes before each node, as bits: a graph of 10,000 nodes takes 12 MB.
    bits = {node_id: 1 << number for number, node_id in enumerate(by_id)}
    before: dict[str, int] = {}
    for node_id in graphlib.TopologicalSorter(joined()).static_order():
        reached = 0
        for dep in by_id[node_id]["deps"]:
            reached |= before[dep] | bits[dep]
        for head in wanted.get(node_id, ()):
            if not reached & bits[head]:
                # A new list: several nodes share the one that their step waits for.
                by_id[node_id]["deps"] = [*by_id[node_id]["deps"], head]
                reached |= before[head] | bits[head]
        before[node_id] = reached
    if (count := sum(len(node["deps"]) for node in nodes)) > graph.MAX_DEPENDENCIES:
        raise errors.InvalidWorkflow(
            f"{where}: {count} dependencies with those that refs imply; at most "
            f"{graph.MAX_DEPENDENCIES}"
        )


def _wanted(nodes: Mapping[str, JsonDict]) -> dict[str, list[str]]:
    """Return for each node the sorted ids of further nodes that its refs imply."""
    deciding = {node_id: _deciding(node) & nodes.keys() for node_id, node in nodes.items()}
    wanted: dict[str, list[str]] = {}
    for node_id, node in nodes.items():
        arm = node.get("arm")
        heads = _input_heads(node) & nodes.keys() | deciding.get(arm or "", set())
        heads -= {node_id, *node["deps"]}
        found = [head for head in heads if arm is None or nodes[head].get("arm") != arm]
        if found:
            wanted[node_id] = sorted(found)
    return wanted


def _input_heads(node: Mapping[str, Any]) -> set[str]:
    """Return the heads of the refs that are resolved before the node, or its items, can run."""
    if node["step"] is not None:
        return set()
    # A ref to a node of an item, as `cut[a.png]/encode`, waits for the map.
    heads = {head.partition("[")[0] for head in refs.heads(node["inputs"])}
    if "map" in node:
        body = node["map"]["body"]
        # In an item these names mean its own nodes and the item, not nodes outside of the map.
        own = {node["map"]["item"], *(each["id"] for each in body)}
        heads |= set[str]().union(*map(_input_heads, body)) - own
    return heads


def _deciding(node: Mapping[str, Any]) -> set[str]:
    """Return the heads of the refs that decide which nodes of a branch or rounds of a loop run."""
    choice, loop = node.get("choice"), node.get("loop")
    found = refs.heads(choice["on"]) if choice else set[str]()
    return found.union(*(refs.heads(each["until"]) for each in loop["rounds"])) if loop else found


def digest(definition: Mapping[str, Any]) -> str:
    """Return the hex SHA-256 of a definition's canonical JSON."""
    return hashlib.sha256(_canonical(definition).encode()).hexdigest()


def _canonical(document: Any) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _read_steps(
    document: Mapping[str, Any], reading: _Reading, depth: int, where: str
) -> dict[str, _Step]:
    """Return the steps of a workflow or a map's body, which is nested in `depth` maps."""
    return {
        step_id: _read_step(entry, step_id, reading, depth, f"{where}: step {step_id!r}")
        for step_id, entry in _entries(document, "steps", "step", where).items()
    }


def _entries(
    document: Mapping[str, Any], key: str, noun: str, where: str
) -> dict[str, Mapping[str, Any]]:
    """Return the listed objects by id. Raises `InvalidWorkflow` for a missing or repeated id."""
    listed = document_values.items(document, key, where)
    if not listed:
        raise errors.InvalidWorkflow(f"{where}: it has no {key}")
    entries: dict[str, Mapping[str, Any]] = {}
    for index, raw in enumerate(listed):
        entry = document_values.record(raw, f"{where}: {noun} {index + 1}")
        own = document_values.identifier(entry, f"{where}: {noun} {index + 1}")
        if own in entries:
            raise errors.InvalidWorkflow(f"{where}: two {noun}s have the id {own!r}")
        entries[own] = entry
    return entries


def _read_step(
    entry: Mapping[str, Any], step_id: str, reading: _Reading, depth: int, where: str
) -> _Step:
    """Return the nodes of a step, which share its `skip_if`."""
    deps = document_values.ids(entry, "depends_on", where)
    skip_if = document_values.value(entry.get("skip_if"), f"{where}: 'skip_if'")
    kind = entry.get("kind")
    if kind not in _STEPS and not (kind == "node" and depth):
        if depth:
            raise errors.InvalidWorkflow(f"{where}: unknown kind {kind!r:.120}; {KINDS}")
        return _Step(deps)
    if kind in ("map", "input", "run", "node"):
        if kind == "node":
            node = _node_of_body(step_id, entry, where) | {"skip_if": skip_if or None}
        elif kind == "map":
            node = _map_node(step_id, entry, reading, depth, where) | {"skip_if": skip_if}
        elif kind == "run":
            node = _child(step_id, entry, where) | {"skip_if": skip_if}
        elif depth:
            raise errors.InvalidWorkflow(f"{where}: a map cannot ask a person")
        else:
            node = _question(step_id, entry, where) | {"skip_if": skip_if}
        reading.take_nodes(step_id, 1)
        return _Step(deps, [node], [step_id])
    inputs = _step_inputs(entry, where)
    flow, prefix = reading.flow(entry, where), f"{step_id}/"
    inner = [prefix + each for each in flow]
    leaves = [prefix + each for each in graph.last_of(flow.values())]
    known = {node_id: node["deps"] for node_id, node in flow.items()}
    if kind == "loop":
        spec = loops.read(entry, known, where)
        reading.take_nodes(step_id, len(inner) * spec.at_most + 1)
        once = _placed(flow, prefix, inputs, skip_if)
        nodes, loop = loops.expanded(step_id, spec, once, leaves, f"step {step_id!r}")
        last = [f"{each}#{spec.at_most}" for each in [*leaves, f"{prefix}{spec.end}"]]
        end = _node(step_id, loops.MODULE, list(dict.fromkeys(last)), {})
        more = {"skip_if": skip_if, "loop": loop.document()}
        return _Step(deps, [*nodes, end | more], [step_id])
    if kind == "branch":
        choice = branches.read(entry, step_id, known, where)
        reading.take_nodes(step_id, len(inner) + 1)
        nodes = [{**node, "arm": step_id} for node in _placed(flow, prefix, inputs, skip_if)]
        end = _node(step_id, branches.MODULE, choice.ends, {})
        more = {"skip_if": skip_if, "choice": choice.document()}
        return _Step(deps, [*nodes, end | more], [step_id], inner)
    reading.take_nodes(step_id, len(inner))
    return _Step(deps, _placed(flow, prefix, inputs, skip_if), leaves, inner)


def _step_inputs(entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    given, where = entry.get("inputs"), f"{where}: 'inputs'"
    return document_values.value(
        {} if given is None else document_values.record(given, where), where
    )


def _node(node_id: str, module: str, deps: Sequence[str], inputs: Mapping[str, Any]) -> JsonDict:
    """Return a node of the queue cpu with only these fields set."""
    return {
        "id": node_id,
        "module": module,
        "queue": "cpu",
        "model": None,
        "deps": deps,
        "inputs": {key: document_values.as_input(value) for key, value in inputs.items()},
        "skip_if": None,
        "pipeline": None,
        "step": None,
    }


def _question(step_id: str, entry: Mapping[str, Any], where: str) -> JsonDict:
    """Return the node of a step of kind `input`."""
    widget = document_values.needed_text(entry, "widget", where, limit=100)
    target = document_values.text(entry, "target", where)
    own = document_values.value(entry, where)
    found = policy.read_input(own, where)
    node = _node(step_id, answers.MODULE + widget, [], {"widget": widget, "target": target})
    return {**node, "step": own, **({} if found is None else {"policy": found})}


def _child(step_id: str, entry: Mapping[str, Any], where: str) -> JsonDict:
    """Return the node of a step of kind `run`."""
    workflow = document_values.needed_text(entry, "workflow", where)
    waits = entry.get("wait", True)
    if not isinstance(waits, bool):
        raise errors.InvalidWorkflow(f"{where}: 'wait' must be true or false")
    module = (graph.RUN if waits else graph.START) + workflow
    return _node(step_id, module, [], _step_inputs(entry, where))


def _map_node(
    step_id: str, entry: Mapping[str, Any], reading: _Reading, depth: int, where: str
) -> JsonDict:
    """Return the node of a step of kind `map`, with the nodes of its body relative to the item."""
    if depth + 1 > graph.MAX_MAP_DEPTH:
        raise errors.InvalidWorkflow(
            f"{where}: maps are nested deeper than {graph.MAX_MAP_DEPTH} levels"
        )
    if ("steps" in entry) == ("pipeline" in entry):
        raise errors.InvalidWorkflow(f"{where}: a map has either 'pipeline' or 'steps'")
    if "steps" in entry:
        steps = _read_steps(entry, reading, depth + 1, where)
    else:
        flow = reading.flow(entry, where)
        reading.take_nodes(step_id, len(flow))
        steps = {"": _Step((), _placed(flow, "", _step_inputs(entry, where), None))}
    body = _nodes(steps, reading, where)
    over, found = graph.read_map(entry, body, where)
    return {**_node(step_id, graph.MAP, [], {"over": over}), "map": {**found, "body": body}}


def _read_pipeline(name: str, schema: Any, where: str) -> dict[str, JsonDict]:
    """Return the nodes of a pipeline without a step's prefix, with sources as `inputs`.

    Raises `InvalidWorkflow` with the node and the reason.
    """
    where = f"{where}: pipeline {name!r}"
    document = document_values.record(schema, where)
    entries = _entries(document, "nodes", "node", where)
    defaults = policy.defaults(document, where)
    nodes = {
        node_id: _pipeline_node(node_id, entry, entries, defaults, f"{where}: node {node_id!r}")
        for node_id, entry in entries.items()
    }
    _check_order({node_id: node["deps"] for node_id, node in nodes.items()}, where, "node")
    return {node_id: {**node, "pipeline": name} for node_id, node in nodes.items()}


def _node_of_body(node_id: str, entry: Mapping[str, Any], where: str) -> JsonDict:
    """Return the node of a step of kind `node`, which gets the inputs of the step."""
    alone = {key: value for key, value in entry.items() if key not in ("depends_on", "inputs")}
    given = _step_inputs(entry, where)
    for name in given:
        _check_input(name, where)
    inputs = {name: document_values.as_input(value) for name, value in given.items()}
    return {**_pipeline_node(node_id, alone, (), {}, where), "deps": [], "inputs": inputs}


def _pipeline_node(
    node_id: str,
    entry: Mapping[str, Any],
    siblings: Collection[str],
    defaults: Mapping[str, Any],
    where: str,
) -> JsonDict:
    module = document_values.text(entry, "node", where) or node_id
    if module.startswith("__") and module.partition("__")[2].partition("__")[0] in _KEPT:
        raise errors.InvalidWorkflow(f"{where}: {module!r:.120} is kept for the engine")
    node = _node(node_id, module, document_values.ids(entry, "depends_on", where), {})
    if entry.get("gpu"):
        node |= {"queue": "gpu", "model": document_values.text(entry, "model", where)}
    node["inputs"] = _sources(entry, siblings, where)
    node["skip_if"] = document_values.value(entry.get("skip_if"), f"{where}: 'skip_if'")
    if (own := policy.read(entry, defaults, where)) is not None:
        node["policy"] = own
    if (version := config.get_config().node_versions.get(module)) is not None:
        node["version"] = version  # of the node's code, if this process knows it
    return node


def _sources(
    entry: Mapping[str, Any], siblings: Collection[str], where: str
) -> dict[str, document_values.Source]:
    """Return the sources by name, the last one of each name; entries without a name are ignored."""
    sources: dict[str, document_values.Source] = {}
    for raw in document_values.items(entry, "inputs", where):
        given = document_values.record(raw, f"{where}: an entry of 'inputs'")
        if not given.get("name"):
            continue
        name = document_values.needed_text(given, "name", f"{where}: an entry of 'inputs'")
        _check_input(name, where)
        at = f"{where}: input {name!r}"
        text = document_values.needed_text(given, "from", at, limit=None)
        sources[name] = document_values.parse_source(text, siblings, at)
    return sources


def _check_input(name: str, where: str) -> None:
    if name.startswith("$"):
        raise errors.InvalidWorkflow(f"{where}: no input can be named {name!r}: '$' marks refs")


def _check_order(deps: Mapping[str, Iterable[str]], where: str, noun: str) -> None:
    """Refuse a dependency that does not exist, names its own node, or closes a cycle."""
    for owner, needed in deps.items():
        for dep in needed:
            if dep not in deps:
                raise errors.InvalidWorkflow(
                    f"{where}: {noun} {owner!r} depends on the unknown {noun} {dep!r:.120}"
                )
            if dep == owner:
                raise errors.InvalidWorkflow(f"{where}: {noun} {owner!r} depends on itself")
    graph.refuse_cycle(deps, where, noun)


def _placed(
    flow: Mapping[str, JsonDict], prefix: str, given: Mapping[str, Any], skip_if: Any
) -> list[JsonDict]:
    """Return the nodes of a pipeline in a step with these inputs; their ids begin with `prefix`.

    Inputs that the step lacks are None.
    """
    return [
        {
            **node,
            "id": f"{prefix}{node_id}",
            "deps": [f"{prefix}{dep}" for dep in node["deps"]],
            "inputs": {name: source(prefix, given) for name, source in node["inputs"].items()},
            "skip_if": node["skip_if"] or skip_if or None,
        }
        for node_id, node in flow.items()
    ]


def _output(raw: Any, nodes: list[JsonDict], where: str) -> JsonDict:
    """Return the node with the run's output, which waits for all others."""
    where = f"{where}: 'output'"
    inputs = document_values.value(document_values.record(raw, where), where)
    if any(node["id"] == graph.OUTPUT for node in nodes):
        raise errors.InvalidWorkflow(f"{where}: no step can have the id {graph.OUTPUT!r}")
    return _node(graph.OUTPUT, graph.OUTPUT, graph.last_of(nodes), inputs)
