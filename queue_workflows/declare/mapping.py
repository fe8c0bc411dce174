"""Add a map to a workflow's graph: a step whose nodes, or whose workflow, run for each item."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from queue_workflows import errors
from queue_workflows.dag import map_steps
from queue_workflows.declare import building, graph_steps, handles, node_functions


def add_map(
    graph: building.Graph,
    name: str,
    items: object,
    settings: Mapping[str, Any],
    build: Callable[[handles.Handle], Any],
    options: building.Options,
) -> handles.Handle:
    """Add a map: `build` is called with the placeholder of an item, and calls its nodes."""
    if graph.group is not None:
        raise building.refused(graph.where, graph.group, f"{name!r} is mapped")
    step, where = graph.begin("map", name, items, options)
    own = step.entry["id"]
    step.outer.clear()
    step.entry["over"] = handles.template(items, f"{where}: the list")
    step.entry |= {key: value for key, value in settings.items() if value is not None}
    item = handles.Origin(graph, what=f"{where}: an item", body=step)
    graph.group, graph.defaults = step, options.extra
    try:
        made = build(handles.Handle(item, {"$from": map_steps.ITEM}))
    finally:
        graph.group, graph.defaults = None, {}
    stores = _end_map(step, made, where)
    return handles.Handle(
        handles.Origin(graph, what=where, step=own, node=own, stores=stores),
        {"$from": f"{own}.{map_steps.RESULTS}"},
    )


def _end_map(step: graph_steps.Step, made: Any, where: str) -> bool:
    """Set the result of a map's items; return whether they have one."""
    body = {*step.members, *([] if step.run is None else [step.run["id"]])}
    if not body:
        raise errors.InvalidWorkflow(f"{where}: its function calls no node")
    for head in sorted(step.outer & {*body, *step.node_ids(), map_steps.ITEM}):
        raise errors.InvalidWorkflow(
            f"{where}: {head!r} is in it and outside of it: give one another name, a node by "
            "options(id=...)"
        )
    if made is None:
        return False
    if not isinstance(made, handles.Handle) or handles.head(made) not in body:
        raise errors.InvalidWorkflow(
            f"{where}: what is mapped returns the output of one of its nodes"
        )
    if not handles.origin(made).stores:
        return False
    step.entry["result"] = {"$from": handles.template(made, where)["$from"]}
    return True


def run_each(
    graph: building.Graph, workflow: str, given: Mapping[str, Any], *, stores: bool
) -> handles.Handle:
    """Run a workflow for each item of the map that is being built; return its output."""
    step = graph.group
    assert step is not None
    own = building.step_name(workflow)
    where = f"{graph.where}: step {step.entry['id']!r}"
    step.wait_for(graph.found(dict(given), where))
    inputs = {key: handles.template(value, f"{where}: {key!r}") for key, value in given.items()}
    step.run = {"id": own, "kind": "run", "workflow": workflow, "inputs": inputs}
    step.entry["steps"] = [step.run]
    origin = handles.Origin(
        graph, body=step, what=where, step=step.entry["id"], node=own, stores=stores
    )
    return handles.Handle(origin, {"$from": f"{own}.{node_functions.RESULT}" if stores else own})
