"""Plan the next step of a run, which is rows to create, completion, or a failure.

The cost of finding the ready nodes does not grow with the number of their dependencies.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from queue_workflows import errors, refs
from queue_workflows.dag import branches, document_values, graph, loops, payload, policy

if TYPE_CHECKING:
    from queue_workflows.types import JsonDict, RefResolver

END = ""
DONE = ("completed", "skipped")
"""The states of a node that satisfy the nodes that depend on it."""
PRESENT = (*DONE, "queued", "running", "awaiting_input")
"""The states of a node that a plan need not insert: it is neither failed nor cancelled."""


class Reader(Protocol):
    """Read one run's nodes under the lock on its row.

    `done_among` and `done_all` return completed and skipped nodes, `present` nodes with a row that
    is neither failed nor cancelled. `context` returns the given members of `run.context` (all for
    None), and the `context_delta` of completed nodes under their ids.
    """

    def done_among(self, ids: Collection[str]) -> set[str]: ...
    def done_all(self) -> set[str]: ...
    def present(self, ids: Collection[str]) -> set[str]: ...
    def context(self, heads: set[str] | None) -> dict[str, Any]: ...


class Progress:
    """The nodes of a run's generation that one process knows to be done; `known` never shrinks.

    For each waiting node, only the last dependency not known to be done is queried, and then the
    one before it. So each process may keep its own cache, and queries each node once. Drop it if a
    transaction that used it rolls back. `END` is the run's end, which waits for the leaves.
    `prefix` is the beginning of the ids of one item's nodes if the graph is a map's body.
    """

    __slots__ = ("_at", "graph", "known", "prefix")

    def __init__(self, of: graph.Graph, prefix: str = "") -> None:
        self.graph = of
        self.prefix = prefix
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


@dataclasses.dataclass(slots=True)
class NewNode:
    """A node whose dependencies are done, and its row; `reason` is why it cannot run, if set.

    `inputs` are resolved, `template` still has the refs; both are None if skipped. `result` is the
    output of a node that the plan itself completes. `child` is the run that is created with the
    node, `{"id", "workflow", "folder"}`. `owner` is the branch or loop that the node belongs to or
    ends. `prefix` is the beginning of its id if it is an item's node.
    """

    node: graph.Node
    status: str = "queued"
    inputs: JsonDict | None = None
    template: JsonDict | None = None
    result: JsonDict | None = None
    child: JsonDict | None = None
    owner: branches.Choice | loops.Loop | None = None
    reason: str | None = None
    after_loop: bool = False
    """Whether it is skipped because the loop has ended before its round."""
    prefix: str = ""

    @property
    def id(self) -> str:
        """Return the id of the node in its run."""
        return self.prefix + self.node.id

    @property
    def _is_end(self) -> bool:
        """Return whether it has the output of its branch or loop."""
        return self.node.choice is not None or self.node.loop is not None

    def templates(self) -> list[Any]:
        """Return all templates that have to be resolved."""
        given = [] if self.node.step is not None else list((self.template or {}).values())
        if isinstance(self.owner, loops.Loop):
            number, rounds = self.node.round or 1, self.owner.rounds
            if not self._is_end:
                rounds = [rounds[number - 2]] if 1 < number <= len(rounds) + 1 else ()
            given += [template for one in rounds for template in (one.until, {"$from": one.end})]
        elif self.owner is not None:
            ends = self.owner.ends if self._is_end else ()
            given += [self.owner.on, *({"$from": end} for end in ends)]
        return given if self.node.skip_if is None else [self.node.skip_if, *given]

    def is_skipped(self, context: JsonDict, resolver: RefResolver) -> bool:
        """Return whether its `skip_if` or its owner skips it; an unresolved `skip_if` does not.

        Sets `reason` if the owner cannot decide.
        """

        def holds(template: Any, values: Mapping[str, Any]) -> bool:
            return bool(resolver(template, values))

        condition, owner = self.node.skip_if, self.owner
        if condition is not None and refs.attempt(condition, context, holds)[0] is True:
            return True
        if owner is None or self._is_end:
            return False
        resolve = _resolving(context, resolver)
        try:
            if isinstance(owner, loops.Loop):
                number = self.node.round or 1
                self.after_loop = not loops.goes_on(owner, number, context, resolve)
                return self.after_loop
            return self.node.id not in owner.members[owner.arm_of(owner.value(resolve))]
        except errors.InvalidWorkflow as error:
            self.reason = str(error)
            return False

    def resolve(self, context: JsonDict, resolver: RefResolver) -> None:
        """Set inputs, result and status, or `reason`, for example if an input does not resolve."""
        resolve, owner = _resolving(context, resolver), self.owner
        try:
            if self.node.step is not None:
                self.inputs = self.template
            elif owner is None or not self._is_end:
                self._resolve_inputs(resolve)
            elif isinstance(owner, loops.Loop):
                self.result, number = loops.output(owner, context, resolve)
                self.inputs = {"rounds": number}
            else:
                value = owner.value(resolve)
                self.result, self.inputs = branches.output(owner, value, context), {"value": value}
        except errors.InvalidWorkflow as error:
            self.reason = str(error)
        if self.result is not None:
            self.status, self.template = "completed", {}
        elif self.child is not None:
            self.status = "awaiting_input"

    def _resolve_inputs(self, resolve: Callable[[Any], Any]) -> None:
        """Set the inputs, and the result or the child run of a node that no worker runs."""
        inputs: JsonDict = {}
        for name, template in (self.template or {}).items():
            try:
                inputs[name] = resolve(template)
            except errors.InvalidWorkflow as error:
                text = f"node {self.id!r}: input {name!r}: {error}"
                raise errors.InvalidWorkflow(text) from None
        self.inputs = inputs
        if self.node.module == graph.OUTPUT:
            self.result = inputs
        elif (workflow := graph.workflow_of(self.node.module)) is not None:
            folder = document_values.folder(self.id)
            self.child = {"id": str(uuid.uuid4()), "workflow": workflow, "folder": folder}
            if self.node.module.startswith(graph.START):
                self.result = {"result": self.child["id"]}


def _resolving(context: JsonDict, resolver: RefResolver) -> Callable[[Any], Any]:
    """Return a function that resolves a template, and raises `InvalidWorkflow` if it cannot."""

    def resolved(template: Any) -> Any:
        value, reason = refs.attempt(template, context, resolver)
        if reason is not None:
            raise errors.InvalidWorkflow(reason)
        return value

    return resolved


class Plan(NamedTuple):
    """Rows in the order in which they are queued; there are none if there is a failure.

    Rows may exist already, if another process or an earlier event has planned the same. `complete`
    means that every node is done or skipped. `failure` is the node that cannot run, and why.
    """

    rows: list[NewNode]
    complete: bool = False
    failure: tuple[str, str] | None = None


def plan(
    progress: Progress,
    finished: Iterable[str] | None,
    reader: Reader,
    resolver: RefResolver = refs.resolve_ref,
    *,
    out_dir: str | None,
    committed: bool = True,
) -> Plan:
    """Return the plan after nodes that are completed or skipped; unknown ids are ignored.

    At a run's start or resume `finished` is None, and all done nodes count. Plans are written under
    the lock on the run's row, so the last event of a join finds it ready, whichever worker took the
    others. Unless `committed`, `progress` does not keep `finished` for later plans.
    """
    known, of = progress.known, progress.graph
    if finished is None:
        known |= reader.done_all()
        # Before the first node is done, only sources are ready, so that a graph of many rounds is
        # not walked. Nodes that the plan ends lead to the others, and to the end.
        planner = Planner(progress, None, reader, resolver, out_dir)
        return planner.run([*of.nodes, END] if known else [*of.sources])
    done = {node_id for node_id in finished if node_id in of.nodes}
    if committed:
        known |= done
    skipped = set[str]() if committed else done
    planner = Planner(progress, skipped, reader, resolver, out_dir)
    return planner.run(_followers(of, done))


def _followers(graph_: graph.Graph, finished: Iterable[str]) -> list[str]:
    """Return the nodes after these in declaration order; `END` last, if one is a leaf."""
    found: set[str] = set()
    for node_id in finished:
        found.update(graph_.downstream(node_id) or (END,))
    end = [END] if END in found else []
    return sorted(found.difference(end), key=graph_.position.__getitem__) + end


class Planner:
    """Compute a plan in rounds of ready nodes; nodes skipped in a round may make others ready.

    `skipped` are nodes that count as done for this plan only. If it is None, `progress` has all
    nodes that are done.
    """

    def __init__(
        self,
        progress: Progress,
        skipped: set[str] | None,
        reader: Reader,
        resolver: RefResolver = refs.resolve_ref,
        out_dir: str | None = None,
    ) -> None:
        self.progress = progress
        self.skipped = skipped or set[str]()
        self._knows_all = skipped is None
        self._reader = reader
        self._resolver = resolver
        self._out_dir = out_dir
        self._undone: set[str] = set()
        self._at: dict[str, int] = {}
        self._values: dict[str, Any] = {}
        """The members of the context that were read; a missing member may appear later."""
        self._asked: set[str] | None = set()
        self._outputs: JsonDict = {}
        """Outputs of nodes that the plan itself completes."""
        self._left_out: set[str] = set()
        """Nodes of rounds after a loop's end; up to 1,000 are skipped without a query."""
        self._rows: list[NewNode] = []

    def run(self, candidates: list[str]) -> Plan:
        """Return the plan that begins with the ready ones of these nodes."""
        may_exist, may_end = True, False
        while candidates:
            may_end = may_end or candidates[-1] == END
            known = self.progress.known
            ready = self.ready([each for each in candidates if each != END and each not in known])
            done, failed = self._round([*map(self._bound, ready)], may_exist)
            if failed is not None:
                return Plan([], failure=(failed.id, failed.reason or ""))
            candidates = _followers(self.progress.graph, done)
            may_exist = False  # a node that depends on a node of this plan has no row yet
        return Plan(self._ordered(), may_end and bool(self.ready([END])))

    def ready(self, candidates: list[str]) -> list[str]:
        """Return the nodes whose every dependency is done or skipped here, in the given order.

        One `done_among` queries the last open dependency of each node at once. If it is done, the
        next call queries twice as many dependencies of that node.
        """
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
                done = set[str]() if self._knows_all else self._reader.done_among(asked)
                self.progress.known |= done
                if done:
                    self._asked = set()  # a member that was missing may be there now
                self._undone |= asked - done
            waiting, width = open_nodes, width * 2
        return [node_id for node_id in candidates if node_id not in blocked]

    def _window(self, node_id: str, width: int) -> list[str]:
        """Return up to `width` dependencies that may be open, from the last one backwards.

        Returns [] if the node is ready.
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

    def _bound(self, node_id: str) -> NewNode:
        """Return a ready node with its inputs bound to the run's folder, or with a `reason`."""
        nodes, prefix = self.progress.graph.nodes, self.progress.prefix
        node = nodes[node_id]
        owning = node if node.arm is None else nodes[node.arm]
        owner = owning.choice or owning.loop
        if owner is not None and prefix:
            owner = owner._replace(id=prefix + owner.id)
        row = NewNode(node, owner=owner, prefix=prefix)
        try:
            row.template = document_values.bind_paths(node.inputs, self._out_dir, node_id=row.id)
        except errors.InvalidWorkflow as error:
            row.reason = str(error)
        return row

    def _round(self, rows: list[NewNode], may_exist: bool) -> tuple[list[str], NewNode | None]:
        """Return the ids done in this round, and the node whose failure ends the plan, if any.

        A node whose row exists was decided when that was written, so it is not skipped or failed.
        """
        context = self._context(rows)
        for row in rows:
            if row.is_skipped(context, self._resolver):
                row.status, row.reason = "skipped", None
                row.inputs = row.template = None
        for row in rows:
            if row.status != "skipped" and row.reason is None:
                row.resolve(context, self._resolver)
        doubtful = {row.node.id for row in rows if row.reason is not None or row.status in DONE}
        present = self._reader.present(doubtful) if doubtful and may_exist else set[str]()
        done: list[str] = []
        for row in sorted(rows, key=lambda row: row.status != "skipped"):
            if row.node.id in present:
                continue
            if row.reason is not None:
                return [], row
            self._rows.append(row)
            if row.status in DONE:
                done.append(row.node.id)
            if row.result is not None:
                self._outputs[row.node.id] = row.result
        self.skipped.update(done)
        self._left_out |= {row.node.id for row in rows if row.after_loop}.difference(present)
        return done, None

    def _context(self, rows: Iterable[NewNode]) -> dict[str, Any]:
        """Return the context of these rows, after reading every head of a ref at most once."""
        templates = [template for each in rows for template in each.templates()]
        if self._resolver is not refs.resolve_ref:  # an app's may read any member
            if templates and self._asked is not None:
                self._values, self._asked = self._reader.context(None), None
        else:
            asked = self._asked or set[str]()
            missing = set[str]().union(*map(refs.heads, templates)) - asked - self._left_out
            if missing:
                self._values.update(self._reader.context(missing))
                self._asked = asked | missing
        # An empty output does not replace a value of `run.context`.
        filled = {node_id: output for node_id, output in self._outputs.items() if output}
        return {**self._outputs, **self._values, **filled} if self._outputs else self._values

    def _ordered(self) -> list[NewNode]:
        """Return queued rows grouped by model, rows without a model after them, then the others.

        Of the others, nodes that wait for their child runs come before nodes that have ended.
        """
        if len(self._rows) < 2:
            return self._rows
        position = self.progress.graph.position
        queued = [row for row in self._rows if row.status == "queued"]
        queued.sort(key=lambda row: position[row.node.id])
        models = dict.fromkeys(row.node.model for row in queued if row.node.model is not None)
        rank: dict[str | None, int] = {model: at for at, model in enumerate([*models, None])}
        queued.sort(key=lambda row: rank[row.node.model])
        others = [row for row in self._rows if row.status != "queued"]
        return queued + sorted(others, key=lambda row: row.status in DONE)


def encode_row(row: NewNode) -> str:
    """Return a row of a plan as JSON for `nodes.insert_planned`.

    Raises `InvalidPayload` that names the node whose resolved inputs cannot be stored.
    """
    node = row.node
    columns: JsonDict = {
        "node_id": row.id,
        "node_module": node.module,
        "queue": node.queue,
        "status": row.status,
    }
    if node.map is not None:
        # A map's node waits for its items, which are stored elsewhere.
        blocked = "items" if row.status == "queued" else None
        more: JsonDict = {"inputs": {}, "input_template": {}, "ref_heads": []}
        return payload.to_json({**columns, "blocked_reason": blocked, **more})
    inputs = payload.encode(row.inputs or {}, f"inputs of node {row.id!r}")
    if row.result is not None or row.child is not None:
        # No worker runs it, so its row has no column that a claim or an attempt needs.
        columns |= {"input_template": {}, "ref_heads": []}
        if row.child is not None:
            columns["child"] = row.child
        result = payload.encode(row.result or {}, f"output of node {row.id!r}")
        return f'{payload.to_json(columns)[:-1]}, "inputs": {inputs}, "context_delta": {result}}}'
    columns |= {
        "required_model": node.model,
        "required_version": node.version_key,
        "pipeline_name": node.pipeline,
        "input_template": row.template,
        "ref_heads": sorted(refs.heads(row.template)),
    }
    if node.policy:
        columns |= policy.columns(node.policy, is_input=node.step is not None)
    return f'{payload.to_json(columns)[:-1]}, "inputs": {inputs}}}'
