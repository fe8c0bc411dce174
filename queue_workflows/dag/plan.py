"""Plan the next step of a run: rows to create, completion, or the reason of a failure.

Which nodes are ready is found at a cost that does not grow with their dependencies.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from queue_workflows import errors, refs
from queue_workflows.dag import branches, document_values, graph, loops, payload, policy

if TYPE_CHECKING:
    from queue_workflows.types import JsonDict, RefResolver

T = TypeVar("T")
END = ""


class Reader(Protocol):
    """Read one run's nodes under the lock on its row."""

    def done_among(self, ids: Collection[str]) -> set[str]:
        """Return those of these node ids that are completed or skipped."""
        ...

    def done_all(self) -> set[str]:
        """Return every node id of the run that is completed or skipped."""
        ...

    def present(self, ids: Collection[str]) -> set[str]:
        """Return those of these nodes that have a row which is neither failed nor cancelled."""
        ...

    def context(self, heads: set[str] | None) -> dict[str, Any]:
        """Return `run.context` and, under each completed node's id, its `context_delta`.

        Only the existing ones of these keys; None: all of it.
        """
        ...


class Progress:
    """What one process knows of a run's generation: a cache of facts that never become false.

    Of each waiting node only the last dependency not known to be done is queried. When that one is
    done, the next one is searched, from there backwards. So each process may keep its own cache,
    and learns of each node once. Drop it if a transaction that used it rolls back. `END`
    stands for the run's end, which waits for the leaves.
    """

    __slots__ = ("_at", "graph", "known")

    def __init__(self, of: graph.Graph) -> None:
        self.graph = of
        self.known: set[str] = set()
        self._at: dict[str, int] = {}

    def deps(self, node_id: str) -> tuple[str, ...]:
        """Return the dependencies of a node, or of `END`."""
        return self.graph.leaves if node_id == END else self.graph.nodes[node_id].deps

    def last_open(self, node_id: str) -> int:
        """Return the position of the last dependency not known to be done; -1 if there is none."""
        deps, known = self.deps(node_id), self.known
        at = self._at.get(node_id, len(deps) - 1)
        while at >= 0 and deps[at] in known:
            at -= 1
        self._at[node_id] = at
        return at

    def waits_for_more(self, *node_ids: str) -> bool:
        """Return whether every node after these is known to wait for others too."""
        return all(
            self._waits_besides(follower, node_ids)
            for node_id in node_ids
            for follower in self.graph.downstream(node_id) or (END,)
        )

    def _waits_besides(self, follower: str, node_ids: tuple[str, ...]) -> bool:
        deps, at = self.deps(follower), self.last_open(follower)
        while at >= 0 and (deps[at] in node_ids or deps[at] in self.known):
            at -= 1
        return at >= 0


class Round:
    """One plan's view of a run: `Progress`, and what the plan itself has skipped."""

    def __init__(self, progress: Progress, reader: Reader | None) -> None:
        self.progress = progress
        self.reader = reader
        self.skipped: set[str] = set()
        self.learned = False
        self._undone: set[str] = set()
        self._at: dict[str, int] = {}

    def ready(self, candidates: Iterable[str]) -> list[str]:
        """Return those whose every dependency is done or skipped here, in the given order.

        One `done_among` queries the last open dependency of each node at once. If it is done, the
        next call queries twice as many dependencies of that node.
        """
        candidates = list(candidates)
        blocked: set[str] = set()
        waiting, width = candidates, 1
        while waiting:
            asked: set[str] = set()
            open_nodes: list[str] = []
            for node_id in waiting:
                window = self._window(node_id, width)
                if self._undone.isdisjoint(window):
                    asked.update(window)
                    open_nodes += [node_id] if window else []
                else:
                    blocked.add(node_id)
            if asked:
                done = self.reader.done_among(asked) if self.reader else set[str]()
                self.progress.known |= done
                self.learned = self.learned or bool(done)
                self._undone |= asked - done
            waiting, width = open_nodes, width * 2
        return [node_id for node_id in candidates if node_id not in blocked]

    def _window(self, node_id: str, width: int) -> list[str]:
        """Return the dependencies from the last open one backwards that may be open.

        [] if it is ready.
        """
        progress, deps = self.progress, self.progress.deps(node_id)
        at = progress.last_open(node_id)
        if self.skipped:
            at = min(at, self._at.get(node_id, at))
            while at >= 0 and (deps[at] in progress.known or deps[at] in self.skipped):
                at -= 1
            self._at[node_id] = at
        window = deps[max(0, at - width + 1) : at + 1]
        return [dep for dep in window if dep not in progress.known and dep not in self.skipped]


@dataclasses.dataclass(slots=True)
class NewNode:
    """A node whose dependencies are done, and its row. `reason`: why it cannot run.

    `inputs` as resolved now, `template` with its refs; both None if skipped. `result`: the output
    of a node that the plan itself completes. `child`: the run that is made with the node,
    `{"id", "workflow"}`. `choice`, `loop`: the branch or loop that it belongs to or ends.
    """

    node: graph.Node
    status: str = "queued"
    inputs: JsonDict | None = None
    template: JsonDict | None = None
    result: JsonDict | None = None
    child: JsonDict | None = None
    choice: branches.Choice | None = None
    loop: loops.Loop | None = None
    reason: str | None = None
    after_loop: bool = False
    """Whether its round of a loop does not take place."""

    def templates(self) -> list[Any]:
        """Return all templates that the resolver gets."""
        given = [] if self.node.step is not None else list((self.template or {}).values())
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
        """Set inputs, result and status, or `reason`, for example if an input does not resolve."""
        if self.node.step is not None:
            self.inputs = self.template
        elif self.node.loop is not None:
            self._end_loop(self.node.loop, context, resolver)
        elif self.node.choice is not None:
            self.result = self._decided(
                lambda choice, value: branches.output(choice, value, context), context, resolver
            )
        else:
            inputs: JsonDict = {}
            for name, template in (self.template or {}).items():
                inputs[name], self.reason = refs.attempt(template, context, resolver)
                if self.reason is not None:
                    self.reason = f"node {self.node.id!r}: input {name!r}: {self.reason}"
                    return
            self.inputs = inputs
            if self.node.module.startswith("__"):
                self._set_result(inputs)
        if self.result is not None:
            self.status, self.template = "completed", {}
        elif self.child is not None:
            self.status = "awaiting_input"

    def _end_loop(self, loop: loops.Loop, context: JsonDict, resolver: RefResolver) -> None:
        try:
            self.result, number = loops.output(loop, context, _resolving(context, resolver))
        except errors.InvalidWorkflow as error:
            self.reason = str(error)
        else:
            self.inputs = {"rounds": number}

    def _set_result(self, inputs: JsonDict) -> None:
        """Set what the plan itself knows of a node that no worker runs."""
        workflow = graph.workflow_of(self.node.module)
        if workflow is not None:
            self.child = {"id": str(uuid.uuid4()), "workflow": workflow}
            if self.node.module.startswith(graph.START):
                self.result = {"result": self.child["id"]}
        elif self.node.module == graph.OUTPUT:
            self.result = inputs


def _resolving(context: JsonDict, resolver: RefResolver) -> Callable[[Any], Any]:
    """Return a function that resolves a template, and raises `InvalidWorkflow` if it cannot."""

    def resolved(template: Any) -> Any:
        value, reason = refs.attempt(template, context, resolver)
        if reason is not None:
            raise errors.InvalidWorkflow(reason)
        return value

    return resolved


class Plan(NamedTuple):
    """Rows in the order of their queueing; no rows if there is a failure.

    Rows may exist already: another process, or an earlier event, may have planned the same.
    `complete`: every node is done or skipped here. `failure`: the node that cannot run, and why.
    """

    rows: list[NewNode]
    complete: bool = False
    failure: tuple[str, str] | None = None


def plan(
    progress: Progress,
    finished: Iterable[str],
    reader: Reader,
    resolver: RefResolver = refs.resolve_ref,
    *,
    out_dir: str | None,
    custom_resolver: bool = False,
    committed: bool = True,
) -> Plan:
    """Return what follows from nodes that are completed or skipped; unknown ids are ignored.

    Runs under the lock on the run's row. So the last event of a join finds it ready, even if
    other processes dispatched the others. Not `committed`: only this plan may rely on them; other
    plans with the same progress do not.
    """
    finished = [node_id for node_id in finished if node_id in progress.graph.nodes]
    round_ = Round(progress, reader)
    (progress.known if committed else round_.skipped).update(finished)
    planner = _Planner(progress, reader, round_, custom_resolver)
    return planner.run(_followers(progress.graph, finished), resolver, out_dir)


def plan_start(
    progress: Progress,
    reader: Reader,
    resolver: RefResolver = refs.resolve_ref,
    *,
    out_dir: str | None,
    custom_resolver: bool = False,
) -> Plan:
    """Return every unfinished node whose dependencies are done: a run's start or resume."""
    progress.known |= reader.done_all()
    planner = _Planner(progress, reader, Round(progress, None), custom_resolver)
    # If nothing is done, only the nodes that wait for none are ready: a graph of many rounds is
    # not walked. Those that the plan ends lead to the others, and to the end.
    start = [*progress.graph.nodes, END] if progress.known else progress.graph.sources
    return planner.run(list(start), resolver, out_dir)


def _followers(graph_: graph.Graph, finished: Iterable[str]) -> list[str]:
    """Return the nodes after these in declaration order; `END` last, if one is a leaf."""
    found: set[str] = set()
    for node_id in finished:
        found.update(graph_.downstream(node_id) or (END,))
    end = [END] if END in found else []
    return sorted(found.difference(end), key=graph_.position.__getitem__) + end


class _Planner:
    """Compute one plan in rounds of ready nodes; each round follows from the skips of the last."""

    def __init__(
        self,
        progress: Progress,
        reader: Reader,
        round_: Round,
        custom_resolver: bool,
    ) -> None:
        self.progress = progress
        self.reader = reader
        self.round_ = round_
        self.whole = custom_resolver
        """Whether the resolver may read any member of the context."""
        self.values: dict[str, Any] = {}
        """The members of the context that were read; a missing one may still appear."""
        self.asked: set[str] | None = set()
        self.own: dict[str, Any] = {}
        """Outputs of nodes that the plan itself completes."""
        self.empty: dict[str, Any] = {}
        """The empty ones, which do not replace a value of `run.context`."""
        self.left_out: set[str] = set()
        """Nodes of rounds that do not take place. A loop skips 1,000 of them without a query."""
        self.queued: list[NewNode] = []
        self.parked: list[NewNode] = []
        """Nodes that wait for their child runs."""
        self.ended: list[NewNode] = []
        """Skipped nodes, and those that the plan completes."""

    def run(self, candidates: list[str], resolver: RefResolver, out_dir: str | None) -> Plan:
        may_exist, may_end = True, False
        while candidates:
            may_end = may_end or candidates[-1] == END
            known = self.progress.known
            ready = self.round_.ready(
                [each for each in candidates if each != END and each not in known]
            )
            rows = [self._bound(node_id, out_dir) for node_id in ready]
            done, failed = self._round(rows, resolver, may_exist)
            if failed is not None:
                return Plan([], failure=(failed.node.id, failed.reason or ""))
            candidates = _followers(self.progress.graph, done)
            may_exist = False  # a node that waited for a row of this plan has no row yet
        complete = may_end and bool(self.round_.ready([END]))
        return Plan([*self._by_model(), *self.parked, *self.ended], complete)

    def _bound(self, node_id: str, out_dir: str | None) -> NewNode:
        """Return a ready node with its inputs bound to the run's folder, or why it cannot run."""
        of, node = self.progress.graph, self.progress.graph.nodes[node_id]
        owner = node.arm or node_id
        row = NewNode(node, choice=of.choices.get(owner), loop=of.nodes[owner].loop)
        try:
            row.template = document_values.bind_paths(node.inputs, out_dir, node_id=node_id)
        except errors.InvalidWorkflow as error:
            row.reason = str(error)
        return row

    def _round(
        self, rows: list[NewNode], resolver: RefResolver, may_exist: bool
    ) -> tuple[list[str], NewNode | None]:
        """Return the ids done in this round, and the node whose failure ends the plan, if any.

        A node whose row exists was decided when that was written: it is neither skipped nor failed.
        """
        context = self._context(rows)
        skipped: list[NewNode] = []
        staying: list[NewNode] = []
        for row in rows:
            if row.is_skipped(context, resolver):
                row.status, row.reason = "skipped", None
                row.inputs = row.template = None
                skipped.append(row)
            else:
                staying.append(row)
        for row in staying:
            if row.reason is None:
                row.resolve(context, resolver)
        doubtful = {
            row.node.id
            for row in rows
            if row.reason is not None or row.status in ("skipped", "completed")
        }
        present = self.reader.present(doubtful) if doubtful and may_exist else set[str]()
        ended: list[NewNode] = []
        for row in [*skipped, *staying]:
            if row.node.id in doubtful:
                if row.node.id in present:
                    continue
                if row.reason is not None:
                    return [], row
                ended.append(row)
                if row.result is not None:
                    (self.own if row.result else self.empty)[row.node.id] = row.result
            else:
                (self.queued if row.child is None else self.parked).append(row)
        self.ended += ended
        self.round_.skipped.update(row.node.id for row in ended)
        self.left_out |= {row.node.id for row in skipped if row.after_loop}
        return [row.node.id for row in ended], None

    def _context(self, rows: Iterable[NewNode]) -> dict[str, Any]:
        """Return the context of these rows, after reading every head of a ref at most once."""
        templates = [template for each in rows for template in each.templates()]
        if self.round_.learned:
            self.asked = set()
            self.round_.learned = False
        if self.whole:
            if templates and self.asked is not None:
                self.values, self.asked = self.reader.context(None), None
        else:
            asked = self.asked or set[str]()
            missing = set[str]().union(*map(refs.heads, templates)) - asked - self.left_out
            if missing:
                self.values.update(self.reader.context(missing))
                self.asked = asked | missing
        if not (self.own or self.empty):
            return self.values
        return self.empty | self.values | self.own

    def _by_model(self) -> list[NewNode]:
        """Return queued rows grouped by model in order of appearance, those without last."""
        position = self.progress.graph.position
        groups: dict[str | None, list[NewNode]] = {}
        for row in sorted(self.queued, key=lambda row: position[row.node.id]):
            groups.setdefault(row.node.model, []).append(row)
        bare = groups.pop(None, [])
        return [row for group in groups.values() for row in group] + bare


def encode(rows: Iterable[NewNode]) -> Iterator[str]:
    """Yield the rows of a plan as JSON arrays for `nodes.insert_planned`, as `payload.arrays` does.

    An array with large inputs is small enough for one statement. Raises `InvalidPayload`, which
    names the node whose resolved inputs cannot be stored.
    """
    return payload.arrays(map(encode_row, rows))


def encode_row(row: NewNode) -> str:
    """Return a row of a plan as JSON; raise `InvalidPayload` as `encode` does."""
    node = row.node
    columns: JsonDict = {
        "node_id": node.id,
        "node_module": node.module,
        "queue": node.queue,
        "status": row.status,
    }
    if node.map is not None:
        # It waits for its items, which are stored elsewhere.
        blocked = "items" if row.status == "queued" else None
        more: JsonDict = {"inputs": {}, "input_template": {}, "ref_heads": []}
        return payload.to_json({**columns, "blocked_reason": blocked, **more})
    inputs = payload.encode(row.inputs or {}, f"inputs of node {node.id!r}")
    columns |= {
        "required_model": node.model,
        "required_version": node.version_key,
        "pipeline_name": node.pipeline,
        "input_template": row.template,
        "ref_heads": sorted(refs.heads(row.template)),
    }
    if row.child is not None:
        columns["child"] = row.child
    if row.result is not None:
        result = payload.encode(row.result, f"output of node {node.id!r}")
        return f'{payload.to_json(columns)[:-1]}, "inputs": {inputs}, "context_delta": {result}}}'
    if node.policy:
        columns |= policy.columns(node.policy, is_input=node.step is not None)
    return f'{payload.to_json(columns)[:-1]}, "inputs": {inputs}}}'
