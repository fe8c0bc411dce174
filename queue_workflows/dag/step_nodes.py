"""Expand one step of a workflow into the nodes of the definition: ids, inputs, dependencies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from queue_workflows import config
from queue_workflows.dag import bindings, branches, loops, pipeline

if TYPE_CHECKING:
    from queue_workflows.types import JsonDict


class Step(NamedTuple):
    """A checked step: its pipeline, or its map, or `own`, an input step as written."""

    id: str
    deps: tuple[str, ...]
    skip_if: Any
    inputs: dict[str, Any]
    flow: pipeline.Pipeline | None
    own: dict[str, Any] | None
    policy: dict[str, Any] | None = None
    choice: branches.Choice | None = None
    child: str | None = None
    """The module of the node of a child run."""
    loop: loops.Spec | None = None
    map: dict[str, Any] | None = None
    """`over`, a template, and the definition's entry of a map without its body."""
    body: tuple[JsonDict, ...] = ()
    alone: bool = False
    """Whether it is one node, which has the step's id."""
    ignored: bool = False
    """Whether it is of a kind that makes no nodes; the steps after it wait for those before it."""

    @property
    def leaves(self) -> list[str]:
        """Return the node ids that end this step."""
        if self.ignored:
            return []
        decides = self.choice is not None or self.loop is not None
        if self.flow is None or self.alone or decides:
            return [self.id]
        return [f"{self.id}/{leaf}" for leaf in self.flow.leaves]

    @property
    def node_ids(self) -> frozenset[str]:
        """Return the nodes of its pipeline that a dependency may name; none of a loop's."""
        if self.flow is None or self.alone or self.loop is not None:
            return frozenset()
        return frozenset(f"{self.id}/{node.id}" for node in self.flow.nodes)


def of_step(step: Step, before: list[str]) -> list[JsonDict]:
    """Return the nodes of a step; those that begin it wait for the nodes `before`."""
    if step.ignored:
        return []
    if step.child is not None:
        node = engine_node(step.id, step.child, before, step.inputs)
        return [{**node, "skip_if": step.skip_if}]
    if step.flow is None:
        return [_map_node(step, before) if step.map is not None else _input(step, before)]
    nodes = of_pipeline(step, step.flow, "" if step.alone else f"{step.id}/", before)
    if step.loop is not None:
        leaves = [f"{step.id}/{leaf}" for leaf in step.flow.leaves]
        return _rounds(step.id, step.loop, nodes, leaves, before, step.skip_if)
    if step.choice is None:
        return nodes
    return [*({**node, "arm": step.id} for node in nodes), _branch(step, step.choice)]


def engine_node(node_id: str, module: str, deps: list[str], inputs: dict[str, Any]) -> JsonDict:
    """Return a node that the engine itself completes."""
    return {
        "id": node_id,
        "module": module,
        "queue": "cpu",
        "model": None,
        "deps": deps,
        "inputs": {key: bindings.as_input(value) for key, value in inputs.items()},
        "skip_if": None,
        "pipeline": None,
        "step": None,
    }


def _map_node(step: Step, before: list[str]) -> JsonDict:
    made = dict(step.map or {})
    over = made.pop("over")
    return {
        "id": step.id,
        "module": pipeline.MAP_MODULE,
        "queue": "cpu",
        "model": None,
        "deps": before,
        "inputs": {"over": bindings.as_input(over)},
        "skip_if": step.skip_if,
        "pipeline": None,
        "step": None,
        "map": {**made, "body": list(step.body)},
    }


def of_pipeline(
    step: Step, flow: pipeline.Pipeline, prefix: str, before: list[str]
) -> list[JsonDict]:
    """Return the nodes of a step's pipeline, whose ids begin with `prefix`."""
    return [
        {
            "id": f"{prefix}{node.id}",
            "module": node.module,
            "queue": node.queue,
            "model": node.model,
            "deps": [f"{prefix}{dep}" for dep in node.deps] or before,
            "inputs": _templates(step, node, prefix),
            "skip_if": node.skip_if or step.skip_if or None,
            "pipeline": flow.name,
            "step": None,
            **_own_policy(node.policy),
            **_own_version(node.module),
        }
        for node in flow.nodes
    ]


def _templates(step: Step, node: pipeline.PipelineNode, prefix: str) -> dict[str, Any]:
    """Return input templates by name; an input that the step does not give is None."""
    templates: dict[str, Any] = {}
    for name, source in node.inputs:
        if isinstance(source, bindings.Literal):
            templates[name] = source.template
        elif isinstance(source, bindings.FromPaths):
            templates[name] = bindings.path_input(prefix, source)
        else:
            templates[name] = bindings.as_input(step.inputs.get(source.key))
    return templates


def _input(step: Step, before: list[str]) -> JsonDict:
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


def _rounds(
    step_id: str,
    spec: loops.Spec,
    nodes: list[JsonDict],
    leaves: list[str],
    before: list[str],
    skip_if: Any,
) -> list[JsonDict]:
    """Return the nodes of all rounds of a loop, and the one with its output."""
    found, loop = loops.expanded(step_id, spec, nodes, leaves, before, f"step {step_id!r}")
    ends = list(
        dict.fromkeys(f"{each}#{spec.at_most}" for each in [*leaves, f"{step_id}/{spec.end}"])
    )
    last = engine_node(step_id, loops.MODULE, ends, {})
    return [*found, {**last, "skip_if": skip_if, "loop": loop.document()}]


def _branch(step: Step, choice: branches.Choice) -> JsonDict:
    return {
        **engine_node(step.id, branches.MODULE, choice.ends, {}),
        "skip_if": step.skip_if,
        "choice": choice.document(),
    }


def _own_version(module: str) -> JsonDict:
    """Return the version of a node's code, if this process knows one."""
    version = config.get_config().node_versions.get(module)
    return {} if version is None else {"version": version}


def _own_policy(found: dict[str, Any] | None) -> JsonDict:
    return {} if found is None else {"policy": found}
