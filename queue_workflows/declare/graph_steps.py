"""Hold the steps of a workflow while its graph is built, and what each of them waits for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from queue_workflows.declare import handles


class Step:
    """A step while it is built: `entry` becomes the document, `nodes` are its pipeline's."""

    def __init__(self, step_id: str, kind: str, around: Step | None = None) -> None:
        self.entry: dict[str, Any] = {"id": step_id, "kind": kind}
        self.around = around
        """The map in whose body the step is."""
        self.members: dict[str, Step | None] = {}
        """The branches and loops in a map's body by id, None for each node, in call order."""
        self.inputs: dict[str, Any] = {}
        self.nodes: dict[str, dict[str, Any]] = {}
        self.deps: dict[str, None] = {}
        self.prefix = "" if kind == "map" else f"{step_id}/"
        """The start of its nodes' ids in refs; those of a map's body are relative to the item."""
        self.outer: set[str] = set()
        """Heads of refs from a map's body to what is outside of it."""
        self.run: dict[str, Any] | None = None
        """The step in a map that runs a workflow for each item."""

    def wait_for(self, found: Iterable[handles.Handle]) -> None:
        """Make this step depend on the steps of these handles."""
        own = self.entry["id"]
        for handle in found:
            origin = handles.origin(handle)
            if origin.body is not None:
                if self.around is not None and (dep := self.around.member_of(handle)) != own:
                    self.deps |= {} if dep is None else {dep: None}
                continue
            if self.around is not None:
                self.around.wait_for([handle])
                continue
            self.outer.add(handles.head(handle))
            if origin.step is not None and origin.step != own:
                self.deps[origin.step] = None

    def member_of(self, handle: handles.Handle) -> str | None:
        """Return the member of this map's body that has a value; None for the item."""
        origin = handles.origin(handle)
        return origin.node if origin.step == self.entry["id"] else origin.step

    def output(self, graph: object, **known: Any) -> handles.Origin:
        """Return the origin of this step's output, which a node of the step's id has."""
        own, around = self.entry["id"], self.around
        step = own if around is None else around.entry["id"]
        return handles.Origin(graph, step=step, node=own, body=around, **known)

    def node_ids(self) -> list[str]:
        """Return the ids of its nodes, and of those of its members, as refs name them."""
        own = [f"{self.prefix}{node_id}" for node_id in self.nodes]
        inner = [step for step in self.members.values() if step is not None]
        return [*own, *(each for step in inner for each in (step.entry["id"], *step.node_ids()))]
