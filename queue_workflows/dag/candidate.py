"""Decide about a node whose dependencies are done: is it skipped, what are its inputs or output."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from queue_workflows import errors, refs
from queue_workflows.dag import bindings, branches, engine_nodes, graph, loops

if TYPE_CHECKING:
    from queue_workflows.types import JsonDict, RefResolver

T = TypeVar("T")


class Candidate:
    """A ready node with its inputs bound to the run's folder, or why it cannot run."""

    __slots__ = (
        "after_loop", "child", "choice", "inputs", "loop", "node", "reason", "result", "template",
    )  # fmt: skip

    def __init__(
        self,
        node: graph.Node,
        choice: branches.Choice | None,
        loop: loops.Loop | None,
        out_dir: str | None,
    ) -> None:
        self.node = node
        self.choice = choice
        self.loop = loop
        self.result: JsonDict | None = None
        self.child: JsonDict | None = None
        self.template: JsonDict = {}
        self.inputs: JsonDict = {}
        self.reason: str | None = None
        self.after_loop = False
        """Whether its round of a loop does not take place."""
        try:
            self.template = bindings.bind_paths(node.inputs, out_dir, node_id=node.id)
        except errors.InvalidWorkflow as error:
            self.reason = str(error)

    def templates(self) -> list[Any]:
        """Return all templates that the resolver gets."""
        given = [] if self.node.step is not None else list(self.template.values())
        if self.choice is not None:
            given.append(self.choice.on)
            given += [{"$from": end} for end in self.choice.ends if self.node.choice is not None]
        if self.loop is not None:
            at = (self.node.round or 1) - 2
            rounds = self.loop.rounds
            if self.node.loop is None:
                rounds = rounds[at : at + 1] if at >= 0 else ()
            given += [template for one in rounds for template in (one.until, {"$from": one.end})]
        return given if self.node.skip_if is None else [self.node.skip_if, *given]

    def is_skipped(self, context: JsonDict, resolver: RefResolver) -> bool:
        """Return whether `skip_if` holds (not if it cannot be resolved), or its branch skips it.

        Sets `reason` if the branch cannot decide.
        """

        def holds(template: Any, values: Mapping[str, Any]) -> bool:
            return bool(resolver(template, values))

        condition = self.node.skip_if
        if condition is not None and refs.attempt(condition, context, holds)[0] is True:
            return True
        if self.loop is not None and self.node.loop is None:
            self.after_loop = not self._goes_on(self.loop, context, resolver)
            return self.after_loop
        if self.choice is None or self.node.choice is not None:
            return False
        end = self._decided(lambda choice, value: choice.arm_of(value), context, resolver)
        return end is not None and self.node.id not in self.choice.members[end]

    def _goes_on(self, loop: loops.Loop, context: JsonDict, resolver: RefResolver) -> bool:
        """Return whether the node's round takes place; True with `reason` if that is unknown."""
        try:
            return loops.goes_on(loop, self.node.round or 1, context, _resolving(context, resolver))
        except errors.InvalidWorkflow as error:
            self.reason = str(error)
            return True

    def _end_loop(self, loop: loops.Loop, context: JsonDict, resolver: RefResolver) -> None:
        try:
            self.result, number = loops.output(loop, context, _resolving(context, resolver))
        except errors.InvalidWorkflow as error:
            self.reason = str(error)
        else:
            self.inputs = {"rounds": number}

    def _decided(
        self,
        decide: Callable[[branches.Choice, Any], T],
        context: JsonDict,
        resolver: RefResolver,
    ) -> T | None:
        """Return the decision about the value of the branch; None with `reason` set."""
        assert self.choice is not None
        value, reason = refs.attempt(self.choice.on, context, resolver)
        if reason is not None:
            self.reason = f"branch {self.choice.id!r}: its value: {reason}"
            return None
        self.inputs = {"value": value} if self.node.choice is not None else self.inputs
        try:
            return decide(self.choice, value)
        except errors.InvalidWorkflow as error:
            self.reason = str(error)
            return None

    def resolve(self, context: JsonDict, resolver: RefResolver) -> None:
        """Set `inputs`, or `reason` for the first input that does not resolve."""
        if self.node.step is not None:
            self.inputs = self.template
            return
        if self.node.loop is not None:
            self._end_loop(self.node.loop, context, resolver)
            return
        if self.node.choice is not None:
            self.result = self._decided(
                lambda choice, value: branches.output(choice, value, context), context, resolver
            )
            return
        for name, template in self.template.items():
            self.inputs[name], reason = refs.attempt(template, context, resolver)
            if reason is not None:
                self.reason = f"node {self.node.id!r}: input {name!r}: {reason}"
                return
        self._set_result()

    def _set_result(self) -> None:
        """Set what the plan itself knows of a node that no worker runs."""
        workflow = engine_nodes.workflow_of(self.node.module)
        if workflow is not None:
            self.child = {"id": str(uuid.uuid4()), "workflow": workflow}
            if self.node.module.startswith(engine_nodes.START):
                self.result = {"result": self.child["id"]}
        elif self.node.module == engine_nodes.OUTPUT:
            self.result = self.inputs


def _resolving(context: JsonDict, resolver: RefResolver) -> Callable[[Any], Any]:
    """Return a function that resolves a template, and raises `InvalidWorkflow` if it cannot."""

    def resolved(template: Any) -> Any:
        value, reason = refs.attempt(template, context, resolver)
        if reason is not None:
            raise errors.InvalidWorkflow(reason)
        return value

    return resolved
