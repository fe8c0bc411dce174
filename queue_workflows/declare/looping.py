"""Add a loop to a workflow's graph: a step whose nodes run again until a value ends it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from queue_workflows import errors
from queue_workflows.declare import building, callables, compiling, handles

R = TypeVar("R")
_UNTIL = (
    "until takes the state and returns a part of it (r['ok']), a comparison by == or != "
    "(r['left'] == 0), or what a node returns (until=is_good)"
)
_RETURNS = (
    "the repeated function returns the output of a node that it calls, which is the next state"
)


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
