"""Expand maps under the run's lock: store their items, open them, and count those that ended.

Its length: all steps of a map use the rows and values that one transaction has read of its run.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from queue_workflows import config, db, errors
from queue_workflows.dag import graph, item_ids, items, payload, plan
from queue_workflows.db import statements
from queue_workflows.dispatch import run_cache
from queue_workflows.types import JsonDict, Row, Unreadable

_DONE = ("completed", "skipped")
_OPEN = ("queued", "running", "awaiting_input")
_States = Mapping[str, "tuple[str, str | None]"]
WINDOW = 1000
"""Open items of a map without `at_once`: more than the workers of a fleet run at once."""
TRANSACTION_BYTES = 64 * payload.KIB**2
"""JSON of nodes and items that one transaction writes at most: 1 to 2 s, 4 s on a busy machine.

A map opens further items later, once its transaction has written half of it.
"""
NAMED = 3


class Expansion:
    """The maps of one run in one transaction, which holds the run's lock.

    Raises `InvalidPayload` for a list, an item or a result that cannot be: the run fails. Raises
    `TooLarge` before it writes more than TRANSACTION_BYTES, or reads more than its room.
    """

    def __init__(self, conn: db.Connection, run: Row, of: graph.Graph) -> None:
        self._conn = conn
        self._run = run
        self._run_id: str = run["id"]
        self._graph = of
        self._values: dict[tuple[str, str], Any] = {}
        self._context: dict[str, Any] = {}
        self._asked: set[str] = set()
        self._room = TRANSACTION_BYTES
        self._readable = run_cache.Room()
        self.rows = 0
        """How many rows of nodes are new."""
        self.ended = False
        """Whether a map has ended, which left an event in the outbox."""

    def write(self, rows: Iterable[plan.NewNode], *, resumed: bool = False) -> None:
        """Insert the rows of a plan, and open the maps among them.

        `resumed`: the plan is that of a run's start, which may have missed the ends of items.
        """
        rows, planned = list(rows), _Planned(self._room)
        try:
            planned.add_rows(rows)
        except run_cache.TooLarge:
            if not resumed:
                raise
            # Of nodes that have a job, which several transactions may have queued, none is written.
            ids = [row.node.id for row in rows]
            present = statements.nodes.present_among(self._conn, run_id=self._run_id, nodes=ids)
            planned.add_rows(rows, set(present))
        self._insert(planned, resumed=resumed)

    def _insert(self, planned: _Planned, *, resumed: bool = False) -> None:
        self._room = planned.room
        for text in payload.arrays(planned.texts):
            self.rows += statements.nodes.insert_planned(
                self._conn, run_id=self._run_id, nodes=text
            )
        rows, planned.rows, planned.texts = planned.rows, [], []
        for row in rows:
            if row.node.map is not None and row.status == "queued":
                self._open(row, row.node.map, resumed=resumed)
        planned.room = self._room

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
            found = self._items(map_id, by_key)
            done, failed = self._go_on(of, map_id, found, by_key)
        self._step(of, map_id, done, failed)

    def _open(self, row: plan.NewNode, of: graph.Map, *, resumed: bool) -> None:
        """Seal the items of a map and open the first ones, unless it is open already."""
        map_id = row.node.id
        if (
            statements.maps.generation(self._conn, run_id=self._run_id, map=map_id)
            == self._run["generation"]
        ):
            if resumed:
                rows = statements.maps.opened(self._conn, run_id=self._run_id, map=map_id)
                found = {row["key"]: row for row in rows}
                self._step(of, map_id, *self._go_on(of, map_id, found, None))
            return
        over = (row.inputs or {})["over"]
        keys = item_ids.keys(over, of.key, map_id)
        made = len(keys) * len(of.body.nodes)
        self._refuse_too_many(map_id, len(keys), made)
        text = payload.encode_items(keys, over)
        self._room -= len(text)
        if self._room < 0:
            raise run_cache.TooLarge(
                f"map {map_id!r}: with its {len(keys)} items {_too_much(self._room)}"
            )
        root = map_id.partition("[")[0]
        statements.maps.open_map(
            self._conn,
            run_id=self._run_id,
            map=map_id,
            items=text,
            nodes=made,
            **_limits(of, len(keys)),
            root=root,
        )
        self._step(of, map_id, (), {})

    def _refuse_too_many(self, map_id: str, count: int, made: int) -> None:
        """Raise `InvalidPayload` if the run would have more nodes than MAX_NODES_PER_RUN."""
        limit = graph.MAX_NODES_PER_RUN
        if len(self._graph.nodes) + made > limit // 2:
            roots = [node.id for node in self._graph.nodes.values() if node.map is not None]
            known = statements.maps.generation(self._conn, run_id=self._run_id, map=map_id)
            made = made if known is None else 0
            made += statements.maps.nodes(self._conn, run_id=self._run_id, maps=list(roots))
        if len(self._graph.nodes) + made > limit:
            raise errors.InvalidPayload(
                f"map {map_id!r}: with its {count} items the run has "
                f"{len(self._graph.nodes) + made} nodes; at most {limit}"
            )

    def _step(
        self, of: graph.Map, map_id: str, done: Collection[str], failed: Mapping[str, str]
    ) -> None:
        """Count items that have ended, then open items as long as that ends some at once."""
        while True:
            counted = statements.maps.step(
                self._conn,
                run_id=self._run_id,
                map=map_id,
                done=[*done],
                failed=payload.encode_errors(failed),
            )
            if isinstance(counted, Unreadable):
                why = counted.reason
                raise errors.UnreadableRow(f"items of map {map_id!r} cannot be read: {why}")
            if counted is None or self._end(of, map_id, counted) or not counted["items"]:
                return
            opened = counted["items"]
            done, failed = self._start(of, map_id, opened, is_only=counted["open"] == len(opened))
            if not done and not failed:
                return

    def _end(self, of: graph.Map, map_id: str, counted: JsonDict) -> bool:
        """Complete or fail the map's node if nothing is left to do; return whether it ended."""
        inner = item_ids.of_item(map_id)
        failed, total, may_fail = counted["failed"], counted["total"], counted["may_fail"]
        if failed > may_fail and not (inner and counted["open"]):
            first = statements.maps.first_failure(self._conn, run_id=self._run_id, map=map_id)
            assert first is not None
            text = (
                f"{failed} of {total} items failed, {may_fail} may; the first: "
                f"{first['key']}: {first['error'] or 'no error was given'}"
            )
            statements.maps.fail(
                self._conn, run_id=self._run_id, map=map_id, error=payload.error_text(text)
            )
        elif counted["done"] + failed >= total:
            limit_kb = config.MAX_PAYLOAD_KB.read()
            size = statements.maps.complete(
                self._conn,
                run_id=self._run_id,
                map=map_id,
                result=of.result,
                path=list(of.path),
                limit=limit_kb * payload.KIB,
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

    def _start(
        self, of: graph.Map, map_id: str, opened: Sequence[Row], *, is_only: bool
    ) -> tuple[list[str], dict[str, str]]:
        """Queue the first nodes of opened items; return the keys of those that end with it.

        Also return the errors of those that fail because a node's inputs cannot be resolved or
        stored, or a branch or loop cannot decide. Items with large inputs open in part: the others
        follow when an item ends. `is_only`: no other item is open, so one must.
        """
        outer = self._outer(map_id)
        scopes = [items.Scope(of, map_id, row["key"], row["item"]) for row in opened]
        done = set[str]()
        if self._run["generation"]:
            wanted = [node_id for scope in scopes for node_id in items.ids(scope)]
            done = set(
                statements.nodes.done_among(self._conn, run_id=self._run_id, nodes=list(wanted))
            )
        planned = _Planned(self._room)
        for number, scope in enumerate(scopes):
            must_fit = is_only and not number
            fits = must_fit or planned.room > TRANSACTION_BYTES // 2
            own = done.intersection(items.ids(scope)) if done else done
            around = [*outer, scope]
            try:
                if fits:
                    planned.add(scope.key, self._plan(around, self._reader(around, own), None))
            except run_cache.TooLarge:
                if must_fit:
                    raise
                fits = False
            if not fits:
                count = len(scopes) - number
                statements.maps.close(
                    self._conn, run_id=self._run_id, map=map_id, key=scope.key, count=count
                )
                break
            if any(row.node.map is not None for row in planned.rows):
                self._insert(planned)  # what a map in the item writes is known then
        self._insert(planned)
        return planned.done, self._failed(of, map_id, planned.failing)

    def _go_on(
        self,
        of: graph.Map,
        map_id: str,
        found: Mapping[str, Row],
        events: Mapping[str, list[Row]] | None,
    ) -> tuple[list[str], dict[str, str]]:
        """Queue what follows in open items; return the keys of those done, and errors of failed.

        `events`: those of each item's nodes that have ended; None: any may have. An item in which a
        node failed starts no other node, and has failed once none of its nodes is open.
        """
        outer = self._outer(map_id)
        scopes = [items.Scope(of, map_id, key, each["item"]) for key, each in found.items()]
        asked: dict[str, list[str]] = {}
        for scope in scopes:
            ended = None if events is None else [each["node_id"] for each in events[scope.key]]
            asked[scope.key] = items.ids(scope) if ended is None else items.near(scope, ended)
        states = self._states(itertools.chain(*asked.values()))
        planned = _Planned(self._room)
        for scope in scopes:
            key = scope.key
            own = {node_id: states[node_id] for node_id in asked[key] if node_id in states}
            error = found[key]["error"] or _error(own)
            if error is not None:
                planned.failing[key] = error
                continue
            done = {node_id for node_id, (status, _) in own.items() if status in _DONE}
            around = [*outer, scope]
            known = None if events is None else {*asked[key]}
            reader = self._reader(around, done, known)
            finished = None if events is None else _finished(events[key])
            present = {node_id for node_id, (status, _) in own.items() if status in _OPEN}
            planned.add(key, self._plan(around, reader, finished), present | done)
        self._insert(planned, resumed=events is None)
        return planned.done, self._failed(of, map_id, planned.failing)

    def _failed(self, of: graph.Map, map_id: str, failing: Mapping[str, str]) -> dict[str, str]:
        """Return those of these errors, by key, whose items have no open node; store the others."""
        if not failing:
            return {}
        own = {key: items.ids(items.Scope(of, map_id, key, None)) for key in failing}
        states = self._states(itertools.chain(*own.values()))
        is_open = {node_id for node_id, (status, _) in states.items() if status in _OPEN}
        waiting = {key: failing[key] for key, ids in own.items() if not is_open.isdisjoint(ids)}
        if waiting:
            noted = payload.encode_errors(waiting)
            statements.maps.note_errors(self._conn, run_id=self._run_id, map=map_id, errors=noted)
        return {key: error for key, error in failing.items() if key not in waiting}

    def _items(self, map_id: str, keys: Iterable[str]) -> dict[str, Row]:
        """Return `item` and `error` of the items with these keys, by key."""
        rows = statements.maps.items(self._conn, run_id=self._run_id, map=map_id, keys=[*keys])
        return {row["key"]: row for row in rows}

    def _states(self, names: Iterable[str]) -> _States:
        """Return status and error of each of these nodes that has a row."""
        rows = statements.maps.states(self._conn, run_id=self._run_id, nodes=[*names])
        return {row["node_id"]: (row["status"], row["error"]) for row in rows}

    def _plan(
        self, scopes: Sequence[items.Scope], reader: plan.Reader, finished: list[str] | None
    ) -> plan.Plan:
        """Return what follows in the last of these items; None: from all nodes that are done.

        Raises `InvalidPayload` for an id that is too long.
        """
        of = items.Instance(scopes)
        if finished is None:
            of.check_ids()
        return plan.plan(plan.Progress(of), finished, reader, out_dir=self._run["out_dir"])

    def _outer(self, map_id: str) -> list[items.Scope]:
        """Return the items around a map, the outermost first."""
        parts = item_ids.split(map_id)
        if parts is None:
            return []
        place = parts.map_id, parts.key
        if place not in self._values:
            item = self._items(parts.map_id, [parts.key]).get(parts.key)
            self._values[place] = None if item is None else item["item"]
        owner = item_ids.node(self._graph, parts.map_id)
        assert owner is not None
        assert owner.map is not None
        return [*self._outer(parts.map_id), items.Scope(owner.map, *place, self._values[place])]

    def _reader(
        self, scopes: Sequence[items.Scope], done: set[str], asked: set[str] | None = None
    ) -> run_cache.Reader:
        """Return what is known of the last of these items, in which these nodes are done.

        `asked`: the nodes that were queried; None: all of the item.
        """
        of_items = items.context(scopes)

        def context(heads: set[str] | None) -> dict[str, Any]:
            own = {head: of_items[head] for head in heads or () if head in of_items}
            return self._outside((heads or set()) - own.keys()) | own

        begin = run_cache.in_open_transaction(self._conn)
        return run_cache.Reader(begin, self._run_id, done=done, asked=asked, context=context)

    def _outside(self, heads: set[str]) -> dict[str, Any]:
        """Return these members of the run's context; those outside of items are read once."""
        missing = {head for head in heads if item_ids.of_item(head) or head not in self._asked}
        if missing:
            found = db.run(
                self._conn, run_cache.read_context(self._run_id, missing, self._readable)
            )
            self._context.update(found)
            self._asked |= missing
        return {head: self._context[head] for head in heads if head in self._context}


class _Planned:
    """What follows in a run, or in items of a map: rows, the keys of those done, errors by key."""

    def __init__(self, room: int) -> None:
        self.room = room
        """The bytes of JSON that the transaction may still write."""
        self.rows: list[plan.NewNode] = []
        self.texts: list[str] = []
        """The rows as JSON, without those that are present."""
        self.done: list[str] = []
        self.failing: dict[str, str] = {}

    def add_rows(self, rows: Sequence[plan.NewNode], present: Collection[str] = ()) -> None:
        """Add rows, which need no text if they are present; raise `TooLarge` for no room."""
        texts, room = list[str](), self.room
        for row in rows:
            if row.node.id in present:
                continue
            texts.append(plan.encode_row(row))
            # A child run has a copy of the inputs.
            room -= len(texts[-1]) * (1 if row.child is None else 2)
            if room < 0:
                every = [each.node.id for each in (*self.rows, *rows)]
                named = ", ".join(every[:NAMED]) + (", ..." if len(every) > NAMED else "")
                seen = len(self.texts) + len(texts)
                raise run_cache.TooLarge(
                    f"{len(every)} nodes become ready together ({named}): with the inputs of "
                    f"{seen} of them {_too_much(room)}"
                )
        self.rows += rows
        self.texts += texts
        self.room = room

    def add(self, key: str, made: plan.Plan, present: Collection[str] = ()) -> None:
        """Add the plan of an item, which fails if the plan does or its inputs cannot be stored."""
        try:
            self.add_rows(made.rows, present)
        except run_cache.TooLarge:
            raise
        except errors.InvalidPayload as error:
            self.failing[key] = str(error)
            return
        if made.failure is not None:
            self.failing[key] = made.failure[1]
        elif made.complete:
            self.done.append(key)


def _too_much(room: int) -> str:
    return (
        f"a transaction would write {(TRANSACTION_BYTES - room) / 1e6:.0f} MB of JSON, at most "
        f"{TRANSACTION_BYTES / 1e6:.0f} MB; keep the large value in a file or an artifact and pass "
        "its path, or map over smaller items"
    )


def _finished(events: Iterable[Row]) -> list[str]:
    return [each["node_id"] for each in events if each["node_status"] in _DONE]


def _error(states: _States) -> str | None:
    """Return the error of an item, that of its first node that failed; None if none did."""
    for node_id, (status, error) in states.items():
        if status == "failed":
            return f"node {node_id} failed: {error or 'no error was given'}"
    return None


def _limits(of: graph.Map, total: int) -> dict[str, int]:
    """Return how many items are open at most, how many follow at once, and how many may fail.

    Without `at_once`, items follow in halves of a window: one statement inserts many of them.
    """
    window = WINDOW
    at_once = of.at_once or window
    refill = 1 if of.at_once else max(1, window // 2)
    return {"at_once": at_once, "refill": refill, "may_fail": of.allowed_failures(total)}
