"""Add a branch to a workflow's graph: a step with the nodes of all arms, of which one runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

from queue_workflows import errors
from queue_workflows.dag import branches
from queue_workflows.declare import (
    building,
    callables,
    compiling,
    graph_steps,
    handles,
    node_functions,
)

R = TypeVar("R")
S = TypeVar("S")


class _End(NamedTuple):
    """The last node of an arm (relative to its step), and what of its output the branch has."""

    node: str
    is_value: bool
    origin: handles.Origin


def branch(
    value: object,
    arms: Mapping[Any, Callable[..., R]],
    other: Callable[..., S] | None = None,
    *,
    id: str | None = None,  # noqa: A002  the definition's word
    after: Iterable[object] = (),
    skip_if: object = None,
) -> R | S:
    """Run the arm of a value; return the arm's output. Nodes of the other arms are skipped.

    `arms` has a node, a pipeline, or a function that calls nodes, by the value: a text, a whole
    number, a boolean or None. `other` is the arm of every other value; without it the run fails. An
    arm with a parameter that has no default is given what `value` was selected from: `cut` for
    `cut["kind"]`.
    """
    graph = compiling.needed("branch()")
    options = building.Options(id, tuple(after), skip_if)
    with graph.deciding_step("branch", value, options) as step:
        where = f"{graph.where}: step {step.entry['id']!r}"
        if not arms:
            raise errors.InvalidWorkflow(f"{where}: a branch needs an arm: branch(x, {{'a': f}})")
        given = _given(value, where)
        made: dict[Callable[..., Any], _End] = {}
        ends: dict[str, _End] = {}
        for raw, arm in arms.items():
            key = branches.key_of(raw)
            if key is None or key in ends:
                raise errors.InvalidWorkflow(
                    f"{where}: {raw!r:.80} is no key of an arm of its own: keys are texts, whole "
                    "numbers, booleans and None, compared as texts"
                )
            ends[key] = _end(step, arm, given, made, f"{where}: arm {key!r}")
        rest = None if other is None else _end(step, other, given, made, f"{where}: other")
    step.entry["on"] = handles.template(value, f"{where}: its value")
    step.entry["arms"] = {key: end.node for key, end in ends.items()}
    if rest is not None:
        step.entry["other"] = rest.node
    return cast("Any", _output(graph, step, [*ends.values(), *([rest] if rest else [])], where))


def _given(value: object, where: str) -> handles.Handle:
    if not isinstance(value, handles.Handle):
        raise errors.InvalidWorkflow(
            f"{where}: branch() takes a value of the run, not {value!r:.80}: choose in Python "
            "what is known while the graph is built"
        )
    return handles.selected_from(value)


def _end(
    step: graph_steps.Step,
    arm: Callable[..., Any],
    given: handles.Handle,
    made: dict[Callable[..., Any], _End],
    where: str,
) -> _End:
    """Call an arm, once if several values have it; return its last node."""
    if arm in made:
        return made[arm]
    if not callable(arm):
        raise errors.InvalidWorkflow(f"{where}: {arm!r:.80} is no node, pipeline or function")
    found = arm(given) if callables.takes_one(arm) else arm()
    origin = handles.origin(found) if isinstance(found, handles.Handle) else None
    node = origin.node if origin is not None else None
    if origin is None or node is None or origin.step != step.entry["id"]:
        raise errors.InvalidWorkflow(
            f"{where}: an arm returns the output of a node that it calls, all of it"
        )
    path = handles.template(found, where)["$from"] if origin.stores else node
    if path not in (node, f"{node}.{node_functions.RESULT}"):
        raise errors.InvalidWorkflow(
            f"{where}: an arm returns all of a node's output: select from it behind the branch"
        )
    made[arm] = _End(node.partition("/")[2], path != node, origin)
    return made[arm]


def _output(
    graph: building.Graph, step: graph_steps.Step, ends: list[_End], where: str
) -> handles.Handle:
    stored = [end for end in ends if end.origin.stores]
    if len({end.is_value for end in stored}) > 1:
        listed = ", ".join(f"{end.node}: {'a value' if end.is_value else 'a dict'}" for end in ends)
        raise errors.InvalidWorkflow(
            f"{where}: its arms return dicts and other values ({listed}): let all return the same"
        )
    keys = [end.origin.keys for end in stored]
    known = None if None in keys else frozenset[str]().union(*(key or () for key in keys))
    own = step.entry["id"]
    is_value = bool(stored) and stored[0].is_value
    origin = step.output(graph, what=where, keys=known, stores=bool(stored))
    return handles.Handle(origin, {"$from": f"{own}.{node_functions.RESULT}" if is_value else own})
