"""Expand maps under the run's lock: seal their items, open them, and count those that ended."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from queue_workflows import config, db, errors, refs
from queue_workflows.dag import graph, item_ids, items, map_steps, payload, plan, readiness
from queue_workflows.engine import maps, nodes
from queue_workflows.types import Row

_DONE = ("completed", "skipped")
_OPEN = ("queued", "running", "awaiting_input")
_States = Mapping[str, "tuple[str, str | None]"]


class Expansion:
    """The maps of one run in one transaction, which holds the run's lock.

    Raises `InvalidPayload` for a list, an item or a result that cannot be: the run fails.
    """

    def __init__(self, conn: db.Connection, run: Row, of: graph.Graph) -> None:
        self._conn = conn
        self._run = run
        self._run_id: str = run["id"]
        self._graph = of
        self._values: dict[tuple[str, str], Any] = {}
        self._context: dict[str, Any] = {}
        self._asked: set[str] = set()
        self.rows = 0
        """How many rows of nodes are new."""
        self.ended = False
        """Whether a map has ended, which left an event in the outbox."""

    def write(self, rows: Iterable[plan.NewNode], *, resumed: bool = False) -> None:
        """Insert the rows of a plan, and open the maps among them.

        `resumed`: the plan is that of a run's start, which may have missed the ends of items.
        """
        rows = list(rows)
        for text in payload.encode_plan(rows):
            self.rows += nodes.insert_planned(self._conn, self._run_id, text)
        for row in rows:
            if row.node.map is not None and row.status == "queued":
                self._open(row, row.node.map, resumed=resumed)

    def advance(self, events: Iterable[Row]) -> None:
        """Count the items that these events end, and go on with the others."""
        ended: dict[str, dict[str, list[Row]]] = {}
        for event in events:
            parts = item_ids.split(event["node_id"])
            if parts is not None:
                ended.setdefault(parts.map_id, {}).setdefault(parts.key, []).append(event)
        for map_id, by_key in ended.items():
            node = item_ids.node(self._graph, map_id)
            if node is not None and node.map is not None:
                self._advance(node.map, map_id, by_key)

    def _advance(self, of: graph.Map, map_id: str, by_key: Mapping[str, list[Row]]) -> None:
        if len(of.body.nodes) == 1:
            last = {key: events[-1] for key, events in by_key.items()}
            done = [key for key, event in last.items() if event["node_status"] in _DONE]
            failed = {
                key: event["node_error"] or ""
                for key, event in last.items()
                if event["node_status"] == "failed"
            }
        else:
            found = maps.items(self._conn, self._run_id, map_id, by_key)
            finished = {
                key: [event["node_id"] for event in by_key[key] if event["node_status"] in _DONE]
                for key in found
            }
            done, failed = self._go_on(of, map_id, found.items(), finished)
        self._step(of, map_id, done, failed)

    def _open(self, row: plan.NewNode, of: graph.Map, *, resumed: bool) -> None:
        """Seal the items of a map and open the first ones, unless it is open already."""
        map_id = row.node.id
        if maps.generation(self._conn, self._run_id, map_id) == self._run["generation"]:
            if resumed:
                found = maps.opened(self._conn, self._run_id, map_id)
                done, failed = self._go_on(of, map_id, found, None)
                self._step(of, map_id, done, failed)
            return
        over = (row.inputs or {})["over"]
        keys = item_ids.keys(over, of.key, map_id)
        made = len(keys) * len(of.body.nodes)
        self._refuse_too_many(map_id, len(keys), made)
        text = payload.encode_items(keys, over)
        root = map_id.partition("[")[0]
        maps.open_map(self._conn, self._run_id, map_id, text, _limits(of, len(keys)), made, root)
        self._step(of, map_id, (), {})

    def _refuse_too_many(self, map_id: str, count: int, made: int) -> None:
        """Raise `InvalidPayload` if the run would have more nodes than MAX_NODES_PER_RUN."""
        limit = config.MAX_NODES_PER_RUN.read()
        if len(self._graph.nodes) + made > limit // 2:
            roots = [node.id for node in self._graph.nodes.values() if node.map is not None]
            known = maps.generation(self._conn, self._run_id, map_id)
            made = made if known is None else 0
            made += maps.count_nodes(self._conn, self._run_id, roots)
        if len(self._graph.nodes) + made > limit:
            raise errors.InvalidPayload(
                f"map {map_id!r}: with its {count} items the run has "
                f"{len(self._graph.nodes) + made} nodes; at most {limit} (MAX_NODES_PER_RUN)"
            )

    def _step(
        self, of: graph.Map, map_id: str, done: Collection[str], failed: Mapping[str, str]
    ) -> None:
        """Count items that have ended, then open items as long as that ends some at once."""
        while True:
            errors_json = payload.encode_errors(failed)
            counted = maps.step(self._conn, self._run_id, map_id, done, errors_json)
            if counted is None or self._end(of, map_id, counted) or not counted.items:
                return
            opened = [(each["key"], each["item"]) for each in counted.items]
            done, failed = self._start(of, map_id, opened), {}
            if not done:
                return

    def _end(self, of: graph.Map, map_id: str, counted: maps.Step) -> bool:
        """Complete or fail the map's node if nothing is left to do; return whether it ended."""
        inner = item_ids.of_item(map_id)
        if counted.failed > counted.may_fail and not (inner and counted.open):
            first = maps.first_failure(self._conn, self._run_id, map_id)
            assert first is not None
            text = (
                f"{counted.failed} of {counted.total} items failed, {counted.may_fail} may; the "
                f"first: {first[0]}: {first[1]}"
            )
            maps.fail(self._conn, self._run_id, map_id, payload.error_text(text))
        elif counted.done + counted.failed >= counted.total:
            limit_kb = config.MAX_PAYLOAD_KB.read()
            size = maps.complete(
                self._conn, self._run_id, map_id, of.result, of.path, limit_kb * payload.KIB
            )
            if size > limit_kb * payload.KIB:
                raise errors.InvalidPayload(
                    f"map {map_id!r}: the results of its items are {size / payload.KIB:.0f} KiB of "
                    f"JSON, more than the {limit_kb} KiB of MAX_PAYLOAD_KB; return paths instead"
                )
        else:
            return False
        self.ended = True
        return True

    def _start(self, of: graph.Map, map_id: str, opened: Sequence[tuple[str, Any]]) -> list[str]:
        """Queue the first nodes of opened items; return the keys of those that end with it."""
        outer = self._outer(map_id)
        scopes = [items.Scope(of, map_id, key, item) for key, item in opened]
        done = set[str]()
        if self._run["generation"]:
            wanted = [node_id for scope in scopes for node_id in items.ids(scope)]
            done = nodes.done_among(self._conn, self._run_id, wanted)
        rows: list[plan.NewNode] = []
        ended: list[str] = []
        for scope in scopes:
            made = self._plan([*outer, scope], dict.fromkeys(done, ("completed", None)), None)
            rows += made.rows
            ended += [scope.key] if made.complete else []
        self.write(rows)
        return ended

    def _go_on(
        self,
        of: graph.Map,
        map_id: str,
        found: Iterable[tuple[str, Any]],
        finished: Mapping[str, list[str]] | None,
    ) -> tuple[list[str], dict[str, str]]:
        """Queue what follows in open items; return the keys of those done, and errors of failed.

        `finished`: the nodes that have ended in each; None: any may have. An item with a node that
        failed starts no other node, and has failed once none of its nodes is open.
        """
        scopes = [items.Scope(of, map_id, key, item) for key, item in found]
        wanted = [node_id for scope in scopes for node_id in items.ids(scope)]
        states = maps.states(self._conn, self._run_id, wanted)
        outer = self._outer(map_id)
        rows: list[plan.NewNode] = []
        done: list[str] = []
        failed: dict[str, str] = {}
        for scope in scopes:
            own = {node_id: states[node_id] for node_id in items.ids(scope) if node_id in states}
            broken = [
                (node_id, error) for node_id, (status, error) in own.items() if status == "failed"
            ]
            if broken:
                if not any(status in _OPEN for status, _ in own.values()):
                    node_id, error = broken[0]
                    why = error or "no error was given"
                    failed[scope.key] = f"node {node_id} failed: {why}"
                continue
            ends = None if finished is None else finished[scope.key]
            made = self._plan([*outer, scope], own, ends)
            rows += made.rows
            done += [scope.key] if made.complete else []
        self.write(rows, resumed=finished is None)
        return done, failed

    def _plan(
        self, scopes: Sequence[items.Scope], states: _States, finished: list[str] | None
    ) -> plan.Plan:
        """Return what follows in an item; None: from all of its nodes that are done."""
        progress = readiness.Progress(items.instance(scopes))
        reader = _Reader(self, {n for n, (status, _) in states.items() if status in _DONE})
        out_dir = self._run["out_dir"]
        made = (
            plan.plan_start(progress, reader, refs.resolve_ref, out_dir=out_dir)
            if finished is None
            else plan.plan(progress, finished, reader, refs.resolve_ref, out_dir=out_dir)
        )
        if made.failure is not None:
            raise errors.InvalidPayload(made.failure[1])
        return made

    def _outer(self, map_id: str) -> list[items.Scope]:
        """Return the items around a map, the outermost first."""
        parts = item_ids.split(map_id)
        if parts is None:
            return []
        place = parts.map_id, parts.key
        if place not in self._values:
            found = maps.items(self._conn, self._run_id, parts.map_id, [parts.key])
            self._values[place] = found.get(parts.key)
        owner = item_ids.node(self._graph, parts.map_id)
        assert owner is not None
        assert owner.map is not None
        return [*self._outer(parts.map_id), items.Scope(owner.map, *place, self._values[place])]

    def context(self, heads: set[str]) -> dict[str, Any]:
        """Return these members of the run's context; those outside of items are read once."""
        missing = {head for head in heads if item_ids.of_item(head) or head not in self._asked}
        if missing:
            found = nodes.context(self._conn, self._run_id, missing)
            self._context.update(found)
            self._asked |= missing
        return {head: self._context[head] for head in heads if head in self._context}

    def present(self, ids: Collection[str]) -> set[str]:
        """Return those of these nodes that have a row which is neither failed nor cancelled."""
        return nodes.present_among(self._conn, self._run_id, ids)


class _Reader:
    """The knowledge of an item's nodes for a plan: which are done was read before."""

    def __init__(self, of: Expansion, done: set[str]) -> None:
        self._of = of
        self._done = done

    def done_among(self, ids: Collection[str]) -> set[str]:
        return self._done.intersection(ids)

    def done_all(self) -> set[str]:
        return self._done

    def present(self, ids: Collection[str]) -> set[str]:
        return self._of.present(ids)

    def context(self, heads: set[str] | None) -> dict[str, Any]:
        return self._of.context(heads or set())


def _limits(of: graph.Map, total: int) -> maps.Limits:
    """Return the limits of a map of so many items.

    Without `at_once`, items follow in halves of a window: one statement inserts many of them.
    """
    window = min(max(1, config.MAP_WINDOW.read()), map_steps.MOST_AT_ONCE)
    at_once = of.at_once or window
    refill = 1 if of.at_once else max(1, window // 2)
    return maps.Limits(at_once, refill, of.allowed_failures(total))
