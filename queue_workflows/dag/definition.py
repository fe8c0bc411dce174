"""Expand a workflow into the frozen definition of a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from queue_workflows import config, errors
from queue_workflows.dag import bindings, document_values, pipeline, policy

if TYPE_CHECKING:
    from queue_workflows.types import JsonDict, PipelineLoader

VERSION = 1
MAX_DEPENDENCIES = 1_000_000
MAX_DEFINITION_MB = 64


class _Step(NamedTuple):
    """A checked step; `own` is the step as written (input steps), `flow` its pipeline (others)."""

    id: str
    deps: tuple[str, ...]
    skip_if: Any
    inputs: dict[str, Any]
    flow: pipeline.Pipeline | None
    own: dict[str, Any] | None
    policy: dict[str, Any] | None = None

    @property
    def leaves(self) -> list[str]:
        """Return the node ids that end this step."""
        return [f"{self.id}/{leaf}" for leaf in self.flow.leaves] if self.flow else [self.id]


def expand(
    workflow: Any, load_pipeline: PipelineLoader, *, max_nodes: int | None = None
) -> JsonDict:
    """Return the definition: a plain JSON document, a copy, nodes in declaration order.

    `{"version", "workflow", "nodes": [{"id", "module", "queue", "model", "deps", "inputs",
    "skip_if", "pipeline", "step"}]}`, and `policy` in nodes that have one. Raises
    `InvalidWorkflow` that names step or node and reason; what `load_pipeline` raises passes
    through. `max_nodes`: None takes `MAX_NODES_PER_RUN`.
    """
    document = document_values.record(workflow, "the workflow")
    name = document_values.text(document, "name", "the workflow") or ""
    where = f"workflow {name!r}"
    steps = _read_steps(document, load_pipeline, where)
    pipeline.check_order({step.id: step.deps for step in steps.values()}, where, "step")
    budget = _Budget(config.MAX_NODES_PER_RUN.read() if max_nodes is None else max_nodes, where)
    nodes: list[JsonDict] = []
    for step in steps.values():
        before = [leaf for dep in step.deps for leaf in steps[dep].leaves]
        budget.take_step(step, before)
        for node in _flow_nodes(step, step.flow, before) if step.flow else [_input(step, before)]:
            budget.take_text(node)
            nodes.append(node)
    return {"version": VERSION, "workflow": name, "nodes": nodes}


def digest(definition: Mapping[str, Any]) -> str:
    """Return the hex SHA-256 of a definition's canonical JSON."""
    return hashlib.sha256(_canonical(definition).encode()).hexdigest()


def _canonical(document: Any) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _read_steps(
    document: Mapping[str, Any], load_pipeline: PipelineLoader, where: str
) -> dict[str, _Step]:
    listed = document_values.items(document, "steps", where)
    if not listed:
        raise errors.InvalidWorkflow(f"{where}: it has no steps")
    steps: dict[str, _Step] = {}
    flows: dict[str, pipeline.Pipeline] = {}
    for index, raw in enumerate(listed):
        entry = document_values.record(raw, f"{where}: step {index + 1}")
        step_id = document_values.identifier(entry, f"{where}: step {index + 1}")
        if step_id in steps:
            raise errors.InvalidWorkflow(f"{where}: two steps have the id {step_id!r}")
        steps[step_id] = _read_step(entry, step_id, flows, load_pipeline, where)
    return steps


def _read_step(
    entry: Mapping[str, Any],
    step_id: str,
    flows: dict[str, pipeline.Pipeline],
    load_pipeline: PipelineLoader,
    where: str,
) -> _Step:
    where = f"{where}: step {step_id!r}"
    deps = document_values.names(entry, "depends_on", where)
    skip_if = document_values.value(entry.get("skip_if"), f"{where}: 'skip_if'")
    kind = entry.get("kind")
    if kind == "input":
        document_values.needed_text(entry, "widget", where, limit=100)
        document_values.text(entry, "target", where)
        own = document_values.value(entry, where)
        return _Step(step_id, deps, skip_if, {}, None, own, policy.read_input(own, where))
    if kind != "pipeline":
        raise errors.InvalidWorkflow(
            f"{where}: unknown kind {kind!r:.120}; a step is of kind 'pipeline' or 'input'"
        )
    name = document_values.needed_text(entry, "pipeline", where)
    if name not in flows:
        flows[name] = pipeline.read(name, load_pipeline(name), where)
    given = entry.get("inputs")
    inputs = document_values.value(
        {} if given is None else document_values.record(given, f"{where}: 'inputs'"),
        f"{where}: 'inputs'",
    )
    return _Step(step_id, deps, skip_if, inputs, flows[name], None)


def _flow_nodes(step: _Step, flow: pipeline.Pipeline, before: list[str]) -> list[JsonDict]:
    return [
        {
            "id": f"{step.id}/{node.id}",
            "module": node.module,
            "queue": node.queue,
            "model": node.model,
            "deps": [f"{step.id}/{dep}" for dep in node.deps] or before,
            "inputs": _templates(step, node),
            "skip_if": node.skip_if if node.own_skip else step.skip_if,
            "pipeline": flow.name,
            "step": None,
            **_own_policy(node.policy),
        }
        for node in flow.nodes
    ]


def _templates(step: _Step, node: pipeline.PipelineNode) -> dict[str, Any]:
    """Return input templates by name; an input that the step lacks has its default."""
    templates: dict[str, Any] = {}
    for name, source in node.inputs:
        if isinstance(source, bindings.Literal):
            templates[name] = source.template
        elif isinstance(source, bindings.FromPaths):
            templates[name] = bindings.path_input(step.id, source)
        elif source.key in step.inputs:
            templates[name] = bindings.as_input(step.inputs[source.key])
    return templates


def _input(step: _Step, before: list[str]) -> JsonDict:
    own = step.own or {}
    return {
        "id": step.id,
        "module": pipeline.INPUT_MODULE + own["widget"],
        "queue": "cpu",
        "model": None,
        "deps": before,
        "inputs": {"widget": own["widget"], "target": own.get("target")},
        "skip_if": step.skip_if,
        "pipeline": None,
        "step": own,
        **_own_policy(step.policy),
    }


def _own_policy(found: dict[str, Any] | None) -> JsonDict:
    return {} if found is None else {"policy": found}


class _Budget:
    """Limits of a definition: each `take_` counts, and refuses what exceeds a limit."""

    def __init__(self, max_nodes: int, where: str) -> None:
        self.max_nodes = max_nodes
        self.where = where
        self.nodes = self.deps = self.chars = 0

    def take_step(self, step: _Step, before: list[str]) -> None:
        """Count nodes and dependencies before they are built."""
        flow = step.flow.nodes if step.flow else ()
        sources = sum(1 for node in flow if not node.deps) or 1
        self.nodes += len(flow) or 1
        self.deps += sources * len(before) + sum(len(node.deps) for node in flow)
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
        """Count the text of a node."""
        chars = len(_canonical([node["inputs"], node["skip_if"], node["step"]]))
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
