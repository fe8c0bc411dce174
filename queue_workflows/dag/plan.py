"""Plan the next step of a run: rows to create, completion, or the reason of a failure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from queue_workflows import refs
from queue_workflows.dag import candidate, graph, readiness

if TYPE_CHECKING:
    from queue_workflows.types import JsonDict, RefResolver


T = TypeVar("T")


class Reader(readiness.Truth, Protocol):
    """Read one run's nodes under the lock on its row."""

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


class NewNode(NamedTuple):
    """A row to create. `inputs` as resolved now, `template` with its refs; both None if skipped.

    `result`: the output of a node that the plan itself completes. `child`: the run that is made
    with the node, `{"id", "workflow"}`.
    """

    node: graph.Node
    status: str
    inputs: JsonDict | None
    template: JsonDict | None
    result: JsonDict | None = None
    child: JsonDict | None = None


class Plan(NamedTuple):
    """Rows in the order of their queueing; no rows if there is a failure.

    Rows may exist already: another process, or an earlier event, may have planned the same.
    `complete`: every node is done or skipped here. `failure`: the node that cannot run, and why.
    """

    rows: list[NewNode]
    complete: bool = False
    failure: tuple[str, str] | None = None


def plan(
    progress: readiness.Progress,
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
    round_ = readiness.Round(progress, reader)
    (progress.known if committed else round_.skipped).update(finished)
    planner = _Planner(progress, reader, round_, custom_resolver)
    return planner.run(_followers(progress.graph, finished), resolver, out_dir)


def plan_start(
    progress: readiness.Progress,
    reader: Reader,
    resolver: RefResolver = refs.resolve_ref,
    *,
    out_dir: str | None,
    custom_resolver: bool = False,
) -> Plan:
    """Return every unfinished node whose dependencies are done: a run's start or resume."""
    progress.known |= reader.done_all()
    planner = _Planner(progress, reader, readiness.Round(progress, None), custom_resolver)
    # If nothing is done, only the nodes that wait for none are ready: a graph of many rounds is
    # not walked. Those that the plan ends lead to the others, and to the end.
    start = [*progress.graph.nodes, readiness.END] if progress.known else progress.graph.sources
    return planner.run(list(start), resolver, out_dir)


def _followers(graph_: graph.Graph, finished: Iterable[str]) -> list[str]:
    """Return the nodes after these in declaration order; `END` last, if one is a leaf."""
    found: set[str] = set()
    for node_id in finished:
        found.update(graph_.downstream(node_id) or (readiness.END,))
    end = [readiness.END] if readiness.END in found else []
    return sorted(found.difference(end), key=graph_.position.__getitem__) + end


class _Planner:
    """Compute one plan in rounds of ready nodes; each round follows from the skips of the last."""

    def __init__(
        self,
        progress: readiness.Progress,
        reader: Reader,
        round_: readiness.Round,
        custom_resolver: bool,
    ) -> None:
        self.progress = progress
        self.reader = reader
        self.round_ = round_
        self.context = _Context(reader, round_, whole=custom_resolver)
        self.queued: list[NewNode] = []
        self.parked: list[NewNode] = []
        """Nodes that wait for their child runs."""
        self.ended: list[NewNode] = []
        """Skipped nodes, and those that the plan completes."""

    def run(self, candidates: list[str], resolver: RefResolver, out_dir: str | None) -> Plan:
        nodes = self.progress.graph.nodes
        may_exist, may_end = True, False
        while candidates:
            may_end = may_end or candidates[-1] == readiness.END
            ready = self.round_.ready(filter(self._is_open, candidates))
            done, failure = self._round(
                [self._candidate(nodes[node_id], out_dir) for node_id in ready],
                resolver,
                may_exist,
            )
            if failure is not None:
                return Plan([], failure=(failure.node.id, failure.reason or ""))
            candidates = _followers(self.progress.graph, done)
            may_exist = False  # a node that waited for a row of this plan has no row yet
        complete = may_end and bool(self.round_.ready([readiness.END]))
        return Plan([*self._by_model(), *self.parked, *self.ended], complete)

    def _candidate(self, node: graph.Node, out_dir: str | None) -> candidate.Candidate:
        graph_ = self.progress.graph
        choice = graph_.choices.get(node.arm or node.id)
        return candidate.Candidate(node, choice, graph_.nodes[node.arm or node.id].loop, out_dir)

    def _is_open(self, node_id: str) -> bool:
        return node_id != readiness.END and node_id not in self.progress.known

    def _round(
        self, candidates: list[candidate.Candidate], resolver: RefResolver, may_exist: bool
    ) -> tuple[list[str], candidate.Candidate | None]:
        """Return the ids done in this round, and the node whose failure ends the plan, if any.

        A node whose row exists was decided when that was written: it is neither skipped nor failed.
        """
        context = self.context.covering(candidates)
        skipped = [each for each in candidates if each.is_skipped(context, resolver)]
        leaving = {each.node.id for each in skipped}
        staying = [each for each in candidates if each.node.id not in leaving]
        for each in staying:
            if each.reason is None:
                each.resolve(context, resolver)
        doubtful = leaving | {
            each.node.id for each in staying if each.reason is not None or each.result is not None
        }
        present = self.reader.present(doubtful) if doubtful and may_exist else set[str]()
        ended = [NewNode(each.node, "skipped", None, None) for each in skipped]
        for each in staying:
            if each.result is not None:
                ended.append(
                    NewNode(each.node, "completed", each.inputs, {}, each.result, each.child)
                )
            elif each.child is not None:
                self.parked.append(
                    NewNode(
                        each.node, "awaiting_input", each.inputs, each.template, None, each.child
                    )
                )
            elif each.reason is None:
                self.queued.append(NewNode(each.node, "queued", each.inputs, each.template))
            elif each.node.id not in present:
                return [], each
        new = [row for row in ended if row.node.id not in present]
        self.ended += new
        self.round_.skipped.update(row.node.id for row in new)
        self.context.add(new, left_out={each.node.id for each in skipped if each.after_loop})
        return [row.node.id for row in new], None

    def _by_model(self) -> list[NewNode]:
        """Return queued rows grouped by model in order of appearance, those without last."""
        position = self.progress.graph.position
        groups: dict[str | None, list[NewNode]] = {}
        for row in sorted(self.queued, key=lambda row: position[row.node.id]):
            groups.setdefault(row.node.model, []).append(row)
        bare = groups.pop(None, [])
        return [row for group in groups.values() for row in group] + bare


class _Context:
    """The context of refs as far as the plan has read it; a missing head may still appear."""

    def __init__(self, reader: Reader, round_: readiness.Round, *, whole: bool) -> None:
        self.reader = reader
        self.round_ = round_
        self.whole = whole
        self.values: dict[str, Any] = {}
        self.asked: set[str] | None = set()
        self._own: dict[str, Any] = {}
        """Outputs of nodes that the plan itself completes."""
        self._empty: dict[str, Any] = {}
        """The empty ones, which do not replace a value of `run.context`."""
        self._left_out: set[str] = set()
        """Nodes of rounds that do not take place. A loop skips 1,000 of them without a query."""

    def add(self, ended: Iterable[NewNode], left_out: set[str]) -> None:
        """Add nodes that the plan itself skips or completes."""
        self._left_out |= left_out
        for row in ended:
            if row.result is not None:
                (self._own if row.result else self._empty)[row.node.id] = row.result

    def covering(self, candidates: Iterable[candidate.Candidate]) -> dict[str, Any]:
        """Return the values, after reading every head of these templates at most once."""
        templates = [template for each in candidates for template in each.templates()]
        if self.round_.learned:
            self.asked = set()
            self.round_.learned = False
        if self.whole:
            if templates and self.asked is not None:
                self.values, self.asked = self.reader.context(None), None
            return self._seen()
        asked = self.asked or set[str]()
        missing = set[str]().union(*map(refs.heads, templates)) - asked - self._left_out
        if missing:
            self.values.update(self.reader.context(missing))
            self.asked = asked | missing
        return self._seen()

    def _seen(self) -> dict[str, Any]:
        if not (self._own or self._empty):
            return self.values
        return self._empty | self.values | self._own
