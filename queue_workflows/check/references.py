"""Check a graph's refs: whether their targets exist when they are resolved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from queue_workflows import errors, refs
from queue_workflows.check import findings
from queue_workflows.check.findings import Finding
from queue_workflows.dag import graph

_ASKED = {
    "choose_one": ("source",),
    "file_upload": ("accept",),
    "pick_or_upload": ("library", "accept"),
    "turnout": ("turnout_options", "options"),
}
"""The keys of an input step that the engine resolves, by its widget."""

Outputs = Callable[[graph.Node], "frozenset[str] | None"]


class References:
    """Check every ref of a graph; `needs` collects the names of the run's inputs."""

    def __init__(
        self,
        of: graph.Graph,
        outputs: Outputs,
        *,
        around: tuple[References, graph.Node] | None = None,
    ) -> None:
        self.graph = of
        self._around = around
        self.needs: dict[str, None] = {}
        self._outputs = outputs
        self._steps = {node_id.partition("/")[0] for node_id in of.nodes if "/" in node_id}
        self._questions = [node_id for node_id in of.nodes if "/" not in node_id]
        self._before = _Before(of)

    def check(self, node: graph.Node) -> Iterator[Finding]:
        """Check the refs of a node's inputs, of its `skip_if`, and of an input step's options."""
        found: list[tuple[graph.Node, str, Any]] = []
        if node.choice is not None:
            # The first nodes of the arms read the value, so they must wait for its node.
            ends = node.choice.ends
            first = min(node.choice.members[ends[0]], key=self.graph.position.__getitem__)
            found.append((self.graph.nodes[first], "its value", node.choice.on))
        if node.loop is not None:
            found.append((node, "'until'", node.loop.rounds[0].until))
        if node.step is None:
            found += [(node, f"input {name!r}", value) for name, value in node.inputs.items()]
        else:
            asked = _ASKED.get(str(node.step.get("widget")), ())
            found += [(node, repr(name), node.step.get(name)) for name in asked]
        for owner, what, template in [*found, (node, "'skip_if'", node.skip_if)]:
            for ref in refs.inside(template):
                at = f"node {self._named(node.id)!r}: {what}"
                yield from self._one(owner, ref, at, at_start=what != "'skip_if'")
        if node.map is not None:
            body = References(node.map.body, self._outputs, around=(self, node))
            for inner in node.map.body.nodes.values():
                # The rounds of a loop are alike; the second one has the state of a round.
                yield from body.check(inner) if (inner.round or 1) <= 2 else ()

    def _named(self, node_id: str) -> str:
        if self._around is None:
            return node_id
        outer, owner = self._around
        return f"{outer._named(owner.id)}[...]/{node_id}"

    def _one(
        self, node: graph.Node, ref: dict[str, Any], at: str, *, at_start: bool
    ) -> Iterator[Finding]:
        if "$value" in ref:
            return
        path = ref["$from"]
        try:
            refs.resolve_ref({**ref, "$from": "x"}, {"x": []})
            if not isinstance(path, str) or not path:
                raise errors.InvalidRef(f"$from takes a path like 'a.b.c', not {path!r:.80}")
        except errors.InvalidRef as error:
            yield findings.error(at, str(error), "write it as a ref of docs/json-workflows.md")
            return
        given = [key for key in refs.OPERATORS if key in ref]
        if len(given) > 1:
            yield findings.warning(
                at,
                f"ref {path!r} has {' and '.join(given)}, and only {given[0]} counts",
                "keep one of them",
            )
        head, *rest = refs.segments(path)
        if head in self.graph.nodes:
            yield from self._to_node(node, self.graph.nodes[head], rest, at, at_start=at_start)
        elif self._around is not None:
            outer, owner = self._around
            if owner.map is None or head != owner.map.item:
                yield from outer._one(owner, ref, at, at_start=at_start)
        elif "/" in head:
            meant = errors.closest(head, self.graph.nodes)
            yield findings.error(
                at,
                f"ref {path!r}: there is no node {head!r}",
                f"did you mean {meant!r}?" if meant else "a node is named <step>/<node>",
            )
        elif head in self._steps:
            yield from self._to_step(node, head, rest, at)
        else:
            yield from self._to_run(head, path, at)

    def _to_node(
        self, node: graph.Node, target: graph.Node, rest: list[str], at: str, *, at_start: bool
    ) -> Iterator[Finding]:
        if target.id == node.id:
            yield findings.error(at, "the ref names the node itself", "name another node")
            return
        if not self._before.has(node, target.id):
            waits = target.id.partition("/")[0]
            yield findings.error(
                at,
                f"{node.id!r} does not wait for {target.id!r}, which the ref names",
                f"add it (or its step {waits!r}) to 'depends_on'",
            )
        keys = self._outputs(target)
        if rest and keys is not None and rest[0] not in keys:
            meant = errors.closest(rest[0], keys)
            yield findings.error(
                at,
                f"{target.id!r} has no output {rest[0]!r}",
                f"did you mean {meant!r}?"
                if meant
                else f"its outputs are {findings.listed(sorted(keys))}",
            )
        if at_start and target.arm is not None and target.arm not in (node.arm, node.id):
            yield findings.warning(
                at,
                f"{target.id!r} may be left out by step {target.arm!r}, and then the run fails "
                "here",
                f"take the step's output: {target.arm!r}",
            )
        if at_start and target.skip_if is not None and node.skip_if != target.skip_if:
            yield findings.warning(
                at,
                f"{target.id!r} may be skipped, and then the run fails here",
                "give this node the same 'skip_if', or do not use that output",
            )

    def _to_step(self, node: graph.Node, step: str, rest: list[str], at: str) -> Iterator[Finding]:
        inner = [node_id for node_id in self.graph.nodes if node_id.startswith(f"{step}/")]
        widget = None if node.step is None else node.step.get("widget")
        if widget == "choose_one" and rest[:1] == ["files"]:
            if not any(self._before.has(node, node_id) for node_id in inner):
                yield findings.error(
                    at, f"it does not wait for step {step!r}", "add the step to 'depends_on'"
                )
            return
        yield findings.error(
            at,
            f"the ref names the step {step!r}, which has no outputs of its own",
            f"name its node: {findings.listed(inner)}",
        )

    def _to_run(self, head: str, path: str, at: str) -> Iterator[Finding]:
        if head in self.needs:
            return
        self.needs[head] = None
        meant = errors.closest(head, self._questions)
        if meant is not None:
            yield findings.warning(
                at,
                f"ref {path!r} is to the run's input {head!r}",
                f"did you mean the step {meant!r}?",
            )


class _Before:
    """What is done before a node starts; cached for the last node."""

    def __init__(self, of: graph.Graph) -> None:
        self._graph = of
        self._node: graph.Node | None = None
        self._direct = frozenset[str]()
        self._all: set[str] | None = None

    def has(self, node: graph.Node, target: str) -> bool:
        """Return whether the target is done before the node starts."""
        if node is not self._node:
            self._node, self._direct, self._all = node, frozenset(node.deps), None
        if target in self._direct:
            return True
        if self._all is None:
            self._all = set(self._direct)
            waiting = list(self._direct)
            while waiting:
                fresh = set(self._graph.nodes[waiting.pop()].deps) - self._all
                self._all |= fresh
                waiting += fresh
        return target in self._all
