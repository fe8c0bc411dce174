"""Choose the arm of a branch by a value, and read branches from documents and definitions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from queue_workflows import errors
from queue_workflows.dag import document_values

MODULE = "__branch__"
"""The module of the node that has a branch's output. No worker runs it: the dispatcher ends it."""
MAX_ARMS = 1000
_SHOWN = 20


class Choice(NamedTuple):
    """A branch. `arms` maps a value to the last node of its arm, `other` is for other values."""

    id: str
    on: Any
    arms: dict[str, str]
    other: str | None
    members: dict[str, frozenset[str]] = {}  # noqa: RUF012  never changed
    """The nodes of each arm, by its last node."""

    @property
    def ends(self) -> list[str]:
        """Return the last nodes of all arms, each once."""
        return list(dict.fromkeys([*self.arms.values(), *([self.other] if self.other else [])]))

    def document(self) -> dict[str, Any]:
        """Return the member `choice` of a definition's node."""
        return {"on": self.on, "arms": self.arms, "other": self.other}

    def value(self, resolve: Callable[[Any], Any]) -> Any:
        """Return the value that chooses the arm; raise `InvalidWorkflow` if it does not resolve."""
        try:
            return resolve(self.on)
        except errors.InvalidWorkflow as error:
            raise errors.InvalidWorkflow(f"branch {self.id!r}: its value: {error}") from None

    def arm_of(self, value: Any) -> str:
        """Return the last node of a value's arm; raise `InvalidWorkflow` if there is none."""
        key = key_of(value)
        if key in self.arms:
            return self.arms[key]
        if self.other is not None:
            return self.other
        listed = ", ".join(list(self.arms)[:_SHOWN]) + (", ..." if len(self.arms) > _SHOWN else "")
        raise errors.InvalidWorkflow(
            f"branch {self.id!r}: no arm for {value!r:.120}; its arms are {listed}: add one, or "
            "'other' for every other value"
        )


def key_of(value: Any) -> str | None:
    """Return the key of a value's arm, which is a text itself, or the JSON text of other values.

    Returns None for a list, an object and a number with a fraction, which cannot choose an arm.
    """
    if value is None or isinstance(value, (bool, int)):
        return json.dumps(value)
    return value if isinstance(value, str) else None


def read(
    entry: Mapping[str, Any], step_id: str, known: Mapping[str, Iterable[str]], where: str
) -> Choice:
    """Return the branch of a step of kind `branch`; `known` has the deps of its pipeline's nodes.

    Raises `InvalidWorkflow` for arms that do not name a node, and for a node outside of all arms.
    """
    arms = {
        document_values.needed_text({"arm": key}, "arm", f"{where}: 'arms'"): name
        for key, name in document_values.record(entry.get("arms"), f"{where}: 'arms'").items()
    }
    other = document_values.text(entry, "other", where)
    if not 1 <= len(arms) <= MAX_ARMS:
        raise errors.InvalidWorkflow(f"{where}: 'arms' has {len(arms)} arms, not 1 to {MAX_ARMS}")
    if entry.get("on") is None:
        raise errors.InvalidWorkflow(f"{where}: 'on' is missing: the value that chooses the arm")
    ends = [*arms.items(), *([("other", other)] if other is not None else [])]
    for key, name in ends:
        if not isinstance(name, str) or name not in known:
            raise errors.InvalidWorkflow(
                f"{where}: arm {key!r:.120} names {name!r:.120}, which is not a node of its "
                "pipeline: an arm is the name of its last node"
            )
    reached = set[str]().union(*(_closure(end, known.__getitem__) for _, end in ends))
    for name in known:
        if name not in reached:
            raise errors.InvalidWorkflow(
                f"{where}: node {name!r} belongs to no arm: name it, or let an arm's last node "
                "depend on it"
            )
    return Choice(
        step_id,
        document_values.value(entry["on"], f"{where}: 'on'"),
        {key: f"{step_id}/{name}" for key, name in arms.items()},
        None if other is None else f"{step_id}/{other}",
    )


def stored(raw: Any, node_id: str, where: str) -> Choice:
    """Return the branch of a stored node; raise `InvalidWorkflow`."""
    where = f"{where}: 'choice'"
    entry = document_values.record(raw, where)
    arms = document_values.record(entry.get("arms"), f"{where}: 'arms'")
    if not 1 <= len(arms) <= MAX_ARMS:
        raise errors.InvalidWorkflow(f"{where}: {len(arms)} arms, not 1 to {MAX_ARMS}")
    ends = {
        key: document_values.needed_text(arms, key, f"{where}: 'arms'", limit=201) for key in arms
    }
    other = document_values.text(entry, "other", where, limit=201)
    return Choice(node_id, document_values.value(entry.get("on"), where), ends, other)


def linked(
    choice: Choice, deps: Callable[[str], Iterable[str] | None], arm: Callable[[str], str | None]
) -> Choice:
    """Return the branch with the nodes of each arm; raise if an arm has another branch's node.

    `deps` returns the dependencies of a node, and `arm` its branch. The error is `InvalidWorkflow`.
    """
    members: dict[str, frozenset[str]] = {}
    for end in choice.ends:
        if arm(end) != choice.id:
            raise errors.InvalidWorkflow(
                f"node {choice.id!r}: its arm {end!r:.120} is not a node of this branch"
            )
        members[end] = frozenset(
            _closure(end, lambda each: {d for d in deps(each) or () if arm(d) == choice.id})
        )
    return choice._replace(members=members)


def output(choice: Choice, value: Any, context: Mapping[str, Any]) -> dict[str, Any]:
    """Return the output of the chosen arm's last node; {} if that was skipped by its `skip_if`.

    Raises `InvalidWorkflow` if the value chooses another arm than the one that has run.
    """
    end = choice.arm_of(value)
    if end in context:
        return document_values.members(context[end])
    ran = next((each for each in choice.ends if each in context), None)
    if ran is not None:
        raise errors.InvalidWorkflow(
            f"branch {choice.id!r}: {ran!r} has run, and {value!r:.120} chooses {end!r} now: the "
            f"value has changed since; retry from {choice.id!r} chooses again"
        )
    return {}


def _closure(end: str, deps: Callable[[str], Iterable[str]]) -> set[str]:
    found, todo = {end}, [end]
    while todo:
        fresh = set(deps(todo.pop())) - found
        found |= fresh
        todo += fresh
    return found
