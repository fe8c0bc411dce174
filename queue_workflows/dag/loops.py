"""Read a loop, expand it into the nodes of its rounds, and decide whether a round follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from queue_workflows import errors, refs
from queue_workflows.dag import document_values

MODULE = "__loop__"
"""The module of the node that has a loop's output. No worker runs it: the dispatcher ends it."""
MAX_ROUNDS = 1000


class Round(NamedTuple):
    """One round, with the node whose output is the new state, and the condition to end after it."""

    end: str
    until: Any


class Loop(NamedTuple):
    """The rounds of a loop; if `must`, the run fails unless `until` holds after the last one."""

    id: str
    rounds: Sequence[Round]
    must: bool

    def document(self) -> dict[str, Any]:
        """Return the member `loop` of a definition's node."""
        return {"rounds": [each._asdict() for each in self.rounds], "must": self.must}


class Spec(NamedTuple):
    """A step of kind `loop`; its result is at `path` in the output of the pipeline's node `end`."""

    start: Any
    until: Any
    end: str
    path: str
    at_most: int
    must: bool


def read(entry: Mapping[str, Any], known: Iterable[str], where: str) -> Spec:
    """Return the fields of a step of kind `loop`; `known` are the nodes of its pipeline."""
    at_most, must = entry.get("at_most"), entry.get("must", True)
    if isinstance(at_most, bool) or not isinstance(at_most, int):
        raise errors.InvalidWorkflow(f"{where}: 'at_most' is needed: how many rounds at most")
    if not 1 <= at_most <= MAX_ROUNDS:
        raise errors.InvalidWorkflow(f"{where}: 'at_most' must be 1 to {MAX_ROUNDS}")
    if not isinstance(must, bool):
        raise errors.InvalidWorkflow(f"{where}: 'must' must be true or false")
    end, _, path = document_values.needed_text(entry, "result", where).partition(".")
    if end not in set(known):
        raise errors.InvalidWorkflow(
            f"{where}: 'result' names {end!r:.120}, which is not a node of its pipeline"
        )
    if entry.get("until") is None:
        raise errors.InvalidWorkflow(f"{where}: 'until' is missing: what ends the loop")
    start = document_values.value(entry.get("start"), f"{where}: 'start'")
    until = document_values.value(entry["until"], f"{where}: 'until'")
    return Spec(start, until, end, path, at_most, must)


def expanded(
    step_id: str, spec: Spec, nodes: list[dict[str, Any]], leaves: Iterable[str], where: str
) -> tuple[list[dict[str, Any]], Loop]:
    """Return the nodes of all rounds, made from the `nodes` of one, and the loop.

    In refs of nodes the step's id means the state before the round, in `until` the state after it.
    """
    own = [node["id"] for node in nodes]
    last = [*leaves, f"{step_id}/{spec.end}"]
    tail = f".{spec.path}" if spec.path else ""
    found: list[dict[str, Any]] = []
    rounds: list[Round] = []
    for number in range(1, spec.at_most + 1):
        end = f"{step_id}/{spec.end}#{number}"
        earlier = f"{step_id}/{spec.end}#{number - 1}{tail}"
        state = spec.start if number == 1 else {"$from": earlier}
        heads = {each: {"$from": f"{each}#{number}"} for each in own}
        before = {} if number == 1 else {f"{each}#{number - 1}": None for each in last}
        after = heads | {step_id: {"$from": end + tail}}
        found += [
            _in_round(node, number, step_id, heads | {step_id: state}, [*before], where)
            for node in nodes
        ]
        rounds.append(Round(end, _placed(spec.until, after, where)))
    return found, Loop(step_id, tuple(rounds), spec.must)


def _in_round(
    node: dict[str, Any],
    number: int,
    step_id: str,
    heads: Mapping[str, Any],
    before: list[str],
    where: str,
) -> dict[str, Any]:
    """Return the copy of a node for round `number`; its output paths are in that round's folder."""

    def of_round(path: str) -> str:
        step, name, *rest = path.split("/")
        return "/".join([step, f"{name}#{number}", *rest])

    return {
        **node,
        "id": f"{node['id']}#{number}",
        "deps": [f"{dep}#{number}" for dep in node["deps"] if dep in heads] or before,
        "inputs": {
            name: document_values.with_paths(value, of_round)
            if document_values.is_marker(value)
            else _placed(value, heads, where)
            for name, value in node["inputs"].items()
        },
        "skip_if": _placed(node["skip_if"], heads, where),
        "arm": step_id,
        "round": number,
    }


def _placed(template: Any, heads: Mapping[str, Any], where: str) -> Any:
    """Return a template in which each ref whose head is in `heads` is replaced by that template."""
    return refs.replaced(template, lambda ref: _filled(ref, heads, where))


def _filled(given: dict[str, Any], heads: Mapping[str, Any], where: str) -> Any:
    path = given["$from"]
    head, dot, rest = path.partition(".") if isinstance(path, str) else ("", "", "")
    if head not in heads:
        return given
    place: Any = heads[head]
    if isinstance(place, dict) and [*cast("dict[str, Any]", place)] == ["$from"]:
        return {**given, "$from": f"{place['$from']}{dot}{rest}"}
    if not dot and len(given) == 1:
        return cast("Any", place)
    if refs.has_refs(place):
        raise errors.InvalidWorkflow(
            f"{where}: 'start' is made of several values, so its part {path!r:.120} is unknown: "
            "let a node return the start"
        )
    found, reason = refs.attempt(given, {head: place}, refs.resolve_ref)
    if reason is not None:
        raise errors.InvalidWorkflow(f"{where}: {path!r:.120} is not in 'start': {reason}")
    return {"$value": found}


def stored(raw: Any, node_id: str, where: str) -> Loop:
    """Return the loop of a stored node; raise `InvalidWorkflow`."""
    where = f"{where}: 'loop'"
    entry = document_values.record(raw, where)
    listed = document_values.items(entry, "rounds", where)
    if not 1 <= len(listed) <= MAX_ROUNDS:
        raise errors.InvalidWorkflow(f"{where}: {len(listed)} rounds, not 1 to {MAX_ROUNDS}")
    rounds: list[Round] = []
    for one in listed:
        given = document_values.record(one, f"{where}: a round")
        end = document_values.needed_text(given, "end", where, limit=250)
        rounds.append(Round(end, document_values.value(given.get("until"), f"{where}: 'until'")))
    return Loop(node_id, tuple(rounds), entry.get("must") is not False)


def goes_on(
    loop: Loop, number: int, context: Mapping[str, Any], resolve: Callable[[Any], Any]
) -> bool:
    """Return whether the round of this number (1 is the first) takes place.

    Raises `InvalidWorkflow` if `until` of the round before cannot be resolved.
    """
    if number < 2:
        return True
    before = loop.rounds[min(number - 2, len(loop.rounds) - 1)]
    return before.end in context and not _holds(loop, number - 1, before, resolve)


def output(
    loop: Loop, context: Mapping[str, Any], resolve: Callable[[Any], Any]
) -> tuple[dict[str, Any], int]:
    """Return the output of the last round that took place, and its number; ({}, 0) for none.

    Raises `InvalidWorkflow` if the loop has to end by `until` and did not.
    """
    number = max((at for at, one in enumerate(loop.rounds, 1) if one.end in context), default=0)
    if not number:
        return {}, 0
    last = loop.rounds[number - 1]
    if loop.must and not _holds(loop, number, last, resolve):
        raise errors.InvalidWorkflow(
            f"loop {loop.id!r}: 'until' does not hold after round {number}, and at_most is "
            f"{len(loop.rounds)}: raise it, or take the last state by must=False"
        )
    return document_values.members(context[last.end]), number


def _holds(loop: Loop, number: int, of: Round, resolve: Callable[[Any], Any]) -> bool:
    try:
        return bool(resolve(of.until))
    except errors.InvalidWorkflow as error:
        raise errors.InvalidWorkflow(
            f"loop {loop.id!r}: 'until' of round {number}: {error}"
        ) from None
