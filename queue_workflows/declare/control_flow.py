"""Add branches and loops to a workflow's graph: steps that decide which of their nodes run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

from queue_workflows import errors
from queue_workflows.dag import branches
from queue_workflows.declare import building, callables, compiling, handles, node_functions

R = TypeVar("R")
S = TypeVar("S")
_UNTIL = (
    "until takes the state and returns a part of it (r['ok']), a comparison by == or != "
    "(r['left'] == 0), or what a node returns (until=is_good)"
)
_RETURNS = (
    "the repeated function returns the output of a node that it calls, which is the next state"
)


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
        if not isinstance(value, handles.Handle):
            raise errors.InvalidWorkflow(
                f"{where}: branch() takes a value of the run, not {value!r:.80}: choose in Python "
                "what is known while the graph is built"
            )
        given = handles.selected_from(value)
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


def _end(
    step: building.Step,
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
    graph: building.Graph, step: building.Step, ends: list[_End], where: str
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


def loop(
    body: Callable[..., R],
    *,
    start: object,
    until: Callable[[R], object],
    at_most: int,
    must: bool = True,
    id: str | None = None,  # noqa: A002  the definition's word
    after: Iterable[object] = (),
    skip_if: object = None,
) -> R:
    """Run `body` again with what it returned, until `until` holds; return the last state.

    `body`: a node, a pipeline, or a function that calls nodes, with the state as its argument.
    `start` is the first state. `until` is called once, while the graph is built. After `at_most`
    rounds (1 to 1000) the run fails; with `must=False` the last state counts.
    """
    graph = compiling.needed("loop()")
    options = building.Options(id, tuple(after), skip_if)
    with graph.deciding_step("loop", start, options) as step:
        own = step.entry["id"]
        where = f"{graph.where}: step {own!r}"
        if not callables.takes_one(body):
            raise errors.InvalidWorkflow(f"{where}: the repeated function takes the state")
        place = handles.Origin(graph, what=where, step=own, body=step.around)
        state = handles.Handle(place, {"$from": own})
        found = body(state)
        origin = handles.origin(found) if isinstance(found, handles.Handle) else None
        if origin is None or origin.node is None or origin.step != own or not origin.stores:
            raise errors.InvalidWorkflow(f"{where}: {_RETURNS}")
        result = handles.template(found, where)["$from"]
        step.entry["until"] = _condition(until, found, where)
    first = handles.template(start, f"{where}: start")
    step.entry.update(start=first, result=result.removeprefix(f"{own}/"), at_most=at_most)
    if not must:
        step.entry["must"] = False
    made = step.output(graph, what=where, keys=origin.keys)
    return cast("R", handles.Handle(made, {"$from": own + result.removeprefix(origin.node)}))


def _condition(until: Callable[[R], object], state: R, where: str) -> Any:
    try:
        found = until(state)
    except errors.InvalidWorkflow as error:
        if "has no value" not in str(error):
            raise
        raise errors.InvalidWorkflow(f"{where}: {_UNTIL}; other conditions: a node") from error
    if not isinstance(found, handles.Handle):
        raise errors.InvalidWorkflow(f"{where}: until returned {found!r:.80}: {_UNTIL}")
    return handles.template(found, f"{where}: until")
