"""Expand a workflow into the frozen definition of a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from queue_workflows import config, errors, refs
from queue_workflows.dag import (
    branches,
    document_values,
    engine_nodes,
    graph,
    loops,
    map_steps,
    pipeline,
    policy,
    step_nodes,
)

if TYPE_CHECKING:
    from queue_workflows.types import JsonDict, PipelineLoader

VERSION = 1
GROWING_VERSION = 2
"""The version of definitions with constructs that code of version 1 would run wrongly."""
KINDS = (
    "a step is of kind 'pipeline', 'map', 'input', 'branch', 'loop' or 'run', and in a map also of "
    "kind 'node'"
)
MAX_DEPENDENCIES = 1_000_000
MAX_DEFINITION_MB = 64


def expand(
    workflow: Any, load_pipeline: PipelineLoader, *, max_nodes: int | None = None
) -> JsonDict:
    """Return the definition: a plain JSON document, a copy, nodes in declaration order.

    `{"version", "workflow", "nodes": [{"id", "module", "queue", "model", "deps", "inputs",
    "skip_if", "pipeline", "step"}]}`, and `policy`, `map`, `arm`, `choice`, `loop`, `round` in
    nodes that have one, and `version` where the app gives one. Raises
    `InvalidWorkflow` that names step or node and reason; what `load_pipeline` raises passes
    through. `max_nodes`: None takes `MAX_NODES_PER_RUN`.
    """
    document = document_values.record(workflow, "the workflow")
    name = document_values.text(document, "name", "the workflow") or ""
    where = f"workflow {name!r}"
    budget = _Budget(config.MAX_NODES_PER_RUN.read() if max_nodes is None else max_nodes, where)
    nodes = _nodes(_read_steps(document, load_pipeline, where, budget), budget, where)
    if document.get("output") is not None:
        nodes.append(_output(document["output"], nodes, where))
        budget.take_text(nodes[-1])
    version = GROWING_VERSION if any(map(_grows, nodes)) else VERSION
    return {"version": version, "workflow": name, "nodes": nodes}


def _grows(node: JsonDict) -> bool:
    own = ("map", "choice", "loop")
    return any(key in node for key in own) or engine_nodes.is_engine(node["module"])


def _nodes(steps: Mapping[str, step_nodes.Step], budget: _Budget, where: str) -> list[JsonDict]:
    """Return the nodes of steps, each step's behind those of the steps before it."""
    # A dependency names a step, or a node of one, as in `cut/encode`.
    named = {node_id: step.id for step in steps.values() for node_id in step.node_ids}
    owners = {step.id: {dep: named.get(dep, dep) for dep in step.deps} for step in steps.values()}
    pipeline.check_order({key: tuple(deps.values()) for key, deps in owners.items()}, where, "step")
    nodes: list[JsonDict] = []
    for step in steps.values():
        before = _ends(owners[step.id], owners, steps)
        budget.take_step(step, before)
        for node in step_nodes.of_step(step, before):
            budget.take_text(node)
            nodes.append(node)
    if not nodes:
        raise errors.InvalidWorkflow(f"{where}: no step makes nodes; {KINDS}")
    _add_implied_deps(nodes, where)
    return nodes


def _ends(
    deps: Mapping[str, str],
    owners: Mapping[str, Mapping[str, str]],
    steps: Mapping[str, step_nodes.Step],
) -> list[str]:
    """Return the nodes that these dependencies stand for; through ignored steps, those before."""
    found: dict[str, None] = {}
    waiting, seen = list(deps)[::-1], set(deps)
    while waiting:
        dep = waiting.pop()
        if dep not in steps:
            found[dep] = None
        elif steps[dep].ignored:
            fresh = [each for each in owners[dep] if each not in seen]
            seen.update(fresh)
            waiting += fresh[::-1]
        else:
            found.update(dict.fromkeys(steps[dep].leaves))
    return [*found]


def _add_implied_deps(nodes: list[JsonDict], where: str) -> None:
    """Let each node wait for the nodes that its inputs refer to, also if `depends_on` lacks them.

    Refs in `skip_if` imply nothing: one that cannot be resolved does not skip. Neither do refs in
    the question of an input step, between two nodes of one branch or loop, or refs that would
    close a cycle. They are resolved when the node is ready. The declared dependencies must have
    no cycle. Raises `InvalidWorkflow` for more than MAX_DEPENDENCIES in all.
    """
    by_id = {node["id"]: node for node in nodes}
    deciding = {node["id"]: _deciding(node) & by_id.keys() for node in nodes}
    wanted: dict[str, list[str]] = {}
    for node_id, node in by_id.items():
        arm = node.get("arm")
        heads = _input_heads(node) & by_id.keys() | deciding.get(arm or "", set())
        heads -= {node_id, *node["deps"]}
        found = [head for head in heads if arm is None or by_id[head].get("arm") != arm]
        if found:
            wanted[node_id] = sorted(found)
    if not wanted:
        return
    cycle = graph.on_cycles(_joined(by_id, wanted))
    for node_id in wanted.keys() & cycle.keys():
        wanted[node_id] = [head for head in wanted[node_id] if cycle.get(head) != cycle[node_id]]
    # The nodes before each node, as bits: a graph of 10,000 nodes takes 12 MB.
    bits = {node_id: 1 << number for number, node_id in enumerate(by_id)}
    before: dict[str, int] = {}
    for node_id in graph.ordered(_joined(by_id, wanted)):
        reached = 0
        for dep in by_id[node_id]["deps"]:
            reached |= before[dep] | bits[dep]
        for head in wanted.get(node_id, ()):
            if not reached & bits[head]:
                # A new list: several nodes share the one that their step waits for.
                by_id[node_id]["deps"] = [*by_id[node_id]["deps"], head]
                reached |= before[head] | bits[head]
        before[node_id] = reached
    if (count := sum(len(node["deps"]) for node in nodes)) > MAX_DEPENDENCIES:
        raise errors.InvalidWorkflow(
            f"{where}: {count} dependencies with those that refs imply; at most {MAX_DEPENDENCIES}"
        )


def _joined(
    nodes: Mapping[str, JsonDict], more: Mapping[str, list[str]]
) -> dict[str, frozenset[str]]:
    return {key: frozenset([*node["deps"], *more.get(key, ())]) for key, node in nodes.items()}


def _input_heads(node: Mapping[str, Any]) -> set[str]:
    """Return the heads of the refs that are resolved before the node can run, or its items can."""
    if node["step"] is not None:
        return set()
    # A ref to a node of an item, as `cut[a.png]/encode`, waits for the map.
    heads = {head.partition("[")[0] for head in refs.heads(node["inputs"])}
    if "map" in node:
        body = node["map"]["body"]
        # In an item these names are its own nodes and the item, whatever is outside of the map.
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
    document: Mapping[str, Any],
    load_pipeline: PipelineLoader,
    where: str,
    budget: _Budget,
    depth: int = 0,
) -> dict[str, step_nodes.Step]:
    listed = document_values.items(document, "steps", where)
    if not listed:
        raise errors.InvalidWorkflow(f"{where}: it has no steps")
    steps: dict[str, step_nodes.Step] = {}
    reading = _Reading(load_pipeline, {}, budget, depth)
    for index, raw in enumerate(listed):
        entry = document_values.record(raw, f"{where}: step {index + 1}")
        step_id = document_values.identifier(entry, f"{where}: step {index + 1}")
        if step_id in steps:
            raise errors.InvalidWorkflow(f"{where}: two steps have the id {step_id!r}")
        steps[step_id] = _read_step(entry, step_id, reading, where)
    return steps


class _Reading(NamedTuple):
    """What reading steps needs: pipelines by name, limits, and in how many maps the steps are."""

    load_pipeline: PipelineLoader
    flows: dict[str, pipeline.Pipeline]
    budget: _Budget
    depth: int

    def flow(self, entry: Mapping[str, Any], where: str) -> pipeline.Pipeline:
        """Return the pipeline that a step names."""
        name = document_values.needed_text(entry, "pipeline", where)
        if name not in self.flows:
            self.flows[name] = pipeline.read(name, self.load_pipeline(name), where)
        return self.flows[name]


def _read_step(
    entry: Mapping[str, Any], step_id: str, reading: _Reading, where: str
) -> step_nodes.Step:
    where = f"{where}: step {step_id!r}"
    deps = document_values.ids(entry, "depends_on", where)
    skip_if = document_values.value(entry.get("skip_if"), f"{where}: 'skip_if'")
    kind = entry.get("kind")
    if kind == "input":
        if reading.depth:
            raise errors.InvalidWorkflow(f"{where}: a map cannot ask a person")
        document_values.needed_text(entry, "widget", where, limit=100)
        document_values.text(entry, "target", where)
        own = document_values.value(entry, where)
        return step_nodes.Step(step_id, deps, skip_if, {}, None, own, policy.read_input(own, where))
    if kind == "map":
        body = _body(entry, reading, where)
        found = map_steps.read(entry, body, where)
        return step_nodes.Step(step_id, deps, skip_if, {}, None, None, map=found, body=tuple(body))
    if kind not in ("pipeline", "branch", "loop", "run", *(("node",) if reading.depth else ())):
        if reading.depth:
            raise errors.InvalidWorkflow(f"{where}: unknown kind {kind!r:.120}; {KINDS}")
        return step_nodes.Step(step_id, deps, None, {}, None, None, ignored=True)
    inputs = _step_inputs(entry, where)
    if kind == "run":
        return step_nodes.Step(
            step_id, deps, skip_if, inputs, None, None, child=_child(entry, where)
        )
    if kind == "node" and reading.depth:
        flow = pipeline.of_one(step_id, entry, inputs, where)
        return step_nodes.Step(step_id, deps, skip_if, inputs, flow, None, alone=True)
    flow = reading.flow(entry, where)
    known = {node.id: node.deps for node in flow.nodes}
    choice = branches.read(entry, step_id, known, where) if kind == "branch" else None
    loop = loops.read(entry, known, where) if kind == "loop" else None
    return step_nodes.Step(step_id, deps, skip_if, inputs, flow, None, choice=choice, loop=loop)


def _step_inputs(entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = entry.get("inputs")
    return document_values.value(
        {} if given is None else document_values.record(given, f"{where}: 'inputs'"),
        f"{where}: 'inputs'",
    )


def _child(entry: Mapping[str, Any], where: str) -> str:
    """Return the module of the node of a step of kind `run`."""
    workflow = document_values.needed_text(entry, "workflow", where)
    waits = entry.get("wait", True)
    if not isinstance(waits, bool):
        raise errors.InvalidWorkflow(f"{where}: 'wait' must be true or false")
    return (engine_nodes.RUN if waits else engine_nodes.START) + workflow


def _output(raw: Any, nodes: list[JsonDict], where: str) -> JsonDict:
    """Return the node with the run's output, which waits for all others."""
    where = f"{where}: 'output'"
    followed = {dep for node in nodes for dep in node["deps"]}
    leaves = [node["id"] for node in nodes if node["id"] not in followed]
    inputs = document_values.value(document_values.record(raw, where), where)
    if any(node["id"] == engine_nodes.OUTPUT for node in nodes):
        raise errors.InvalidWorkflow(f"{where}: no step can have the id {engine_nodes.OUTPUT!r}")
    return step_nodes.engine_node(engine_nodes.OUTPUT, engine_nodes.OUTPUT, leaves, inputs)


def _body(entry: Mapping[str, Any], reading: _Reading, where: str) -> list[JsonDict]:
    """Return the nodes of a map's body, their ids relative to the item."""
    if reading.depth + 1 > map_steps.MAX_DEPTH:
        raise errors.InvalidWorkflow(
            f"{where}: maps are nested deeper than {map_steps.MAX_DEPTH} levels"
        )
    if ("steps" in entry) == ("pipeline" in entry):
        raise errors.InvalidWorkflow(f"{where}: a map has either 'pipeline' or 'steps'")
    if "steps" in entry:
        args = (reading.load_pipeline, where, reading.budget, reading.depth + 1)
        return _nodes(_read_steps(entry, *args), reading.budget, where)
    flow = reading.flow(entry, where)
    step = step_nodes.Step("", (), None, _step_inputs(entry, where), flow, None)
    reading.budget.take_step(step, [])
    nodes = step_nodes.of_pipeline(step, flow, "", [])
    for node in nodes:
        reading.budget.take_text(node)
    _add_implied_deps(nodes, where)
    return nodes


class _Budget:
    """Limits of a definition: each `take_` counts, and refuses what exceeds a limit."""

    def __init__(self, max_nodes: int, where: str) -> None:
        self.max_nodes = max_nodes
        self.where = where
        self.nodes = self.deps = self.chars = 0

    def take_step(self, step: step_nodes.Step, before: list[str]) -> None:
        """Count nodes and dependencies before they are built."""
        flow = step.flow.nodes if step.flow else ()
        sources = sum(1 for node in flow if not node.deps) or 1
        times = step.loop.at_most if step.loop else 1
        self.nodes += (len(flow) or 1) * times + (step.choice is not None or times > 1)
        self.deps += sources * len(before) + sum(len(node.deps) for node in flow)
        self.deps += len(step.choice.ends) if step.choice else 0
        if self.nodes > self.max_nodes:
            raise errors.InvalidWorkflow(
                f"{self.where}: more than {self.max_nodes} nodes (reached in step {step.id!r}; "
                "MAX_NODES_PER_RUN sets the limit)"
            )
        if self.deps > MAX_DEPENDENCIES:
            raise errors.InvalidWorkflow(
                f"{self.where}: step {step.id!r}: {sources} first nodes that wait for "
                f"{len(before)} nodes each make more than {MAX_DEPENDENCIES} dependencies; "
                "put one joining node between"
            )

    def take_text(self, node: JsonDict) -> None:
        """Count the text of a node, without those of the body of a map, which were counted."""
        keys = ("inputs", "skip_if", "step", "choice", "loop")
        settings: dict[str, Any] = {**(node.get("map") or {}), "body": None}
        chars = len(_canonical([settings, *(node.get(key) for key in keys)]))
        limit_kb = config.MAX_PAYLOAD_KB.read()
        if chars > limit_kb * 1024:
            raise errors.InvalidWorkflow(
                f"{self.where}: node {node['id']!r}: inputs of {chars // 1024} KiB; "
                f"at most {limit_kb} (MAX_PAYLOAD_KB)"
            )
        self.chars += chars
        if self.chars > MAX_DEFINITION_MB << 20:
            raise errors.InvalidWorkflow(
                f"{self.where}: the inputs of its nodes exceed {MAX_DEFINITION_MB} MiB in all"
            )
