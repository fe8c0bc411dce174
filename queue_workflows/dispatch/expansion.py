"""Expand maps under the run's lock: store their items, open them, and count ended ones.

Its length: all steps of a map use the rows and values that one transaction has read of its run.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from queue_workflows import config, db, errors
from queue_workflows.dag import graph, item_ids, items, payload, plan
from queue_workflows.db import statements
from queue_workflows.dispatch import run_cache
from queue_workflows.types import JsonDict, Row, Unreadable

_OPEN = ("queued", "running", "awaiting_input")
_States = Mapping[str, "tuple[str, str | None]"]
WINDOW = 1000
"""Open items of a map without `at_once`, which is more than a fleet's workers run at once."""
TRANSACTION_BYTES = 64 * payload.KIB**2
"""The most JSON of nodes and items that one transaction writes, in 1 to 2 s, or 4 s if busy.

Once a transaction has written half of it, a map opens further items in a later one.
"""
NAMED = 3


class Expansion:
    """The maps of one run in one transaction, which holds the run's lock.

    Raises `InvalidPayload` for an invalid list, item or result, which fails the run. Raises
    `TooLarge` before it writes more than TRANSACTION_BYTES, or reads more than its room.
    """

    def __init__(self, conn: db.Connection, run: Row, of: graph.Graph) -> None:
        self._conn = conn
        self._run = run
        self._run_id: str = run["id"]
        self._graph = of
        self._outer_items: dict[tuple[str, str], Any] = {}
        self._context: dict[str, Any] = {}
        self._asked: set[str] = set()
        self._room = TRANSACTION_BYTES
        """The bytes of JSON that the transaction may still write."""
        self._pending: list[plan.NewNode] = []
        self._texts: list[str] = []
        """The pending rows as JSON, without nodes that have a row already."""
        self._nodes: int | None = None
        """How many nodes the graph and all maps of the run have; None until it is read."""
        self._readable = run_cache.Room()
        self.rows = 0
        """How many rows of nodes are new."""
        self.ended = False
        """Whether a map has ended, which left an event in the outbox."""

    def write(self, rows: Iterable[plan.NewNode], *, resumed: bool = False) -> None:
        """Insert the rows of a plan, and open the maps among them.

        `resumed` means that the plan starts or resumes the run. Then open maps are checked too,
        since ends of their items may have been missed.
        """
        rows = list(rows)
        try:
            self._add(rows)
        except run_cache.TooLarge:
            if not resumed:
                raise
            # Nodes that have a job already, from another transaction, are not written again.
            ids = [row.id for row in rows]
            self._add(rows, self._among(ids, plan.PRESENT))
        self._insert(resumed=resumed)

    def _among(self, nodes: list[str], statuses: Collection[str]) -> set[str]:
        among = statements.nodes.among
        return set(among(self._conn, run_id=self._run_id, nodes=nodes, statuses=[*statuses]))

    def _add(self, rows: Sequence[plan.NewNode], present: Collection[str] = ()) -> None:
        """Add rows for `_insert`, except for `present` nodes; raise `TooLarge` if they do not fit.

        `present` has ids in the graph that was planned.
        """
        texts, room = list[str](), self._room
        for row in rows:
            if row.node.id in present:
                continue
            texts.append(plan.encode_row(row))
            # A child run has a copy of the inputs.
            room -= len(texts[-1]) * (1 if row.child is None else 2)
            if room < 0:
                every = [each.id for each in (*self._pending, *rows)]
                named = ", ".join(every[:NAMED]) + (", ..." if len(every) > NAMED else "")
                seen = len(self._texts) + len(texts)
                raise run_cache.TooLarge(
                    f"{len(every)} nodes become ready together ({named}): with the inputs of "
                    f"{seen} of them {_too_much(room)}"
                )
        self._pending += rows
        self._texts += texts
        self._room = room

    def _insert(self, *, resumed: bool = False) -> None:
        """Insert the rows that were added, and open the maps among them."""
        rows, texts, self._pending, self._texts = self._pending, self._texts, [], []
        for text in payload.arrays(texts):
            self.rows += statements.nodes.insert_planned(
                self._conn, run_id=self._run_id, nodes=text
            )
        for row in rows:
            if row.node.map is not None and row.status == "queued":
                self._open(row, row.node.map, resumed=resumed)

    def advance(self, events: Iterable[Row]) -> None:
        """Count the items that these events end, and queue the next nodes of the others."""
        by_map: dict[str, dict[str, list[Row]]] = {}
        for event in events:
            if (parts := item_ids.split(event["node_id"])) is not None:
                of_key = by_map.setdefault(parts.map_id, {}).setdefault(parts.key, [])
                of_key.append(event | {"node_id": parts.inner})
        for map_id, by_key in by_map.items():
            node = item_ids.node(self._graph, map_id)
            of = None if node is None else node.map
            if of is None:
                continue
            if len(of.body.nodes) > 1:
                ended = self._go_on(of, map_id, self._items(map_id, by_key), by_key)
            else:
                last = [(key, found[-1]) for key, found in by_key.items()]
                done = [key for key, event in last if event["node_status"] in plan.DONE]
                failed = [each for each in last if each[1]["node_status"] == "failed"]
                ended = _Ended(done, {key: event["node_error"] or "" for key, event in failed})
            self._step(of, map_id, ended)

    def _open(self, row: plan.NewNode, of: graph.Map, *, resumed: bool) -> None:
        """Seal the items of a map and open the first ones, unless it is open already."""
        map_id, conn, this = row.id, self._conn, self._of(row.id)
        known = statements.maps.generation(conn, **this)
        if known == self._run["generation"]:
            if resumed:
                found = {each["key"]: each for each in statements.maps.opened(conn, **this)}
                self._step(of, map_id, self._go_on(of, map_id, found, None))
            return
        over = (row.inputs or {})["over"]
        keys = item_ids.keys(over, of.key, map_id)
        made = len(keys) * len(of.body.nodes)
        self._refuse_too_many(map_id, len(keys), made if known is None else 0)
        pairs = zip(keys, over, strict=True)
        text = payload.to_json([{"key": key, "item": item} for key, item in pairs])
        self._room -= len(text)
        if self._room < 0:
            raise run_cache.TooLarge(
                f"map {map_id!r}: with its {len(keys)} items {_too_much(self._room)}"
            )
        statements.maps.open_map(
            conn,
            **this,
            items=text,
            nodes=made,
            at_once=of.at_once or WINDOW,
            # Without `at_once`, items follow in halves of a window, many in one statement.
            refill=1 if of.at_once else max(1, WINDOW // 2),
            may_fail=of.allowed_failures(len(keys)),
            root=map_id.partition("[")[0],
        )
        self._step(of, map_id, _Ended([], {}))

    def _of(self, map_id: str) -> dict[str, str]:
        """Return the parameters of the statements about a map."""
        return {"run_id": self._run_id, "map": map_id}

    def _refuse_too_many(self, map_id: str, count: int, made: int) -> None:
        """Raise `InvalidPayload` if the run would have more nodes than MAX_NODES_PER_RUN."""
        limit, nodes = graph.MAX_NODES_PER_RUN, self._graph.nodes
        if self._nodes is None:
            roots = [node.id for node in nodes.values() if node.map is not None]
            stored: int = statements.maps.nodes(self._conn, run_id=self._run_id, maps=roots)
            self._nodes = len(nodes) + stored
        self._nodes += made
        if self._nodes > limit:
            raise errors.InvalidPayload(
                f"map {map_id!r}: with its {count} items the run has {self._nodes} nodes; "
                f"at most {limit}: map over fewer items, or start child runs for parts of the list"
            )

    def _step(self, of: graph.Map, map_id: str, ended: _Ended) -> None:
        """Count ended items and open others, and repeat while opened items end at once."""
        for number in itertools.count():
            failed = payload.encode_errors(ended.failing)
            counted = statements.maps.step(
                self._conn, **self._of(map_id), done=ended.done, failed=failed
            )
            if isinstance(counted, Unreadable):
                raise errors.UnreadableRow(
                    f"items of map {map_id!r} cannot be read: {counted.reason}"
                )
            if counted is None or self._end(of, map_id, counted) or not counted["items"]:
                return
            opened = counted["items"]
            is_only = counted["open"] == len(opened)
            if is_only and number and self._room <= TRANSACTION_BYTES // 2:
                is_only = False  # no open item will go on with the map, so the run's start does
                statements.runs.start_again(self._conn, run_id=self._run_id)
            ended = self._start(of, map_id, opened, is_only=is_only)
            if not any(ended):
                return

    def _end(self, of: graph.Map, map_id: str, counted: JsonDict) -> bool:
        """Complete or fail the map's node if nothing is left to do; return whether it ended."""
        conn, this, inner = self._conn, self._of(map_id), item_ids.of_item(map_id)
        failed, total, may_fail = counted["failed"], counted["total"], counted["may_fail"]
        if failed > may_fail and not (inner and counted["open"]):
            first = statements.maps.failed_items(conn, **this, limit=1)[0]
            text = (
                f"{failed} of {total} items failed, {may_fail} may; the first: "
                f"{first['key']}: {first['error'] or 'no error was given'}"
            )
            statements.maps.fail(conn, **this, error=payload.error_text(text))
        elif counted["done"] + failed >= total:
            limit_kb, path = config.MAX_PAYLOAD_KB.read(), list(of.path)
            limit = limit_kb * payload.KIB
            size = statements.maps.complete(conn, **this, result=of.result, path=path, limit=limit)
            if size > limit:
                raise errors.InvalidPayload(
                    f"map {map_id!r}: the results of its items are {size / payload.KIB:.0f} KiB of "
                    f"JSON, more than the {limit_kb} KiB of MAX_PAYLOAD_KB; return paths instead"
                )
        else:
            return False
        self.ended = True
        return True

    def _start(self, of: graph.Map, map_id: str, opened: Sequence[Row], *, is_only: bool) -> _Ended:
        """Queue the first nodes of opened items; return the items that end at once.

        An item fails if a node's inputs cannot be resolved or stored, or if a branch or loop
        cannot decide. If inputs are large, only some items are opened, and the rest when an item
        ends. `is_only` means that no other item is open, so at least one has to be opened.
        """
        outer, ended, done = self._outer(map_id), _Ended([], {}), set[str]()
        scopes = [items.Scope(of, map_id, row["key"], row["item"]) for row in opened]
        if self._run["generation"]:
            ids = [*itertools.chain.from_iterable(map(items.ids, scopes))]
            done |= self._among(ids, plan.DONE)
        for number, scope in enumerate(scopes):
            must_fit = is_only and not number
            fits = must_fit or self._room > TRANSACTION_BYTES // 2
            own = {each for each in of.body.nodes if scope.prefix + each in done} if done else done
            try:
                if fits:
                    self._plan(ended, [*outer, scope], own)
            except run_cache.TooLarge:
                if must_fit:
                    raise
                fits = False
            if not fits:
                count = len(scopes) - number
                statements.maps.close(self._conn, **self._of(map_id), key=scope.key, count=count)
                break
            if any(row.node.map is not None for row in self._pending):
                self._insert()  # so the rows of a map inside the item are counted, too
        self._insert()
        return ended._replace(failing=self._failed(of, map_id, ended.failing))

    def _go_on(
        self,
        of: graph.Map,
        map_id: str,
        found: Mapping[str, Row],
        events: Mapping[str, list[Row]] | None,
    ) -> _Ended:
        """Queue the next nodes of open items; return the items that have ended.

        `events` has the events of each item's ended nodes, with ids in the body; None means that
        any node may have ended. After a failure, an item queues no further node, and fails once all
        its nodes have ended.
        """
        outer, ended = self._outer(map_id), _Ended([], {})
        scopes = [items.Scope(of, map_id, key, each["item"]) for key, each in found.items()]
        asked: dict[str, Collection[str]] = dict.fromkeys(found, of.body.nodes)
        if events is not None:
            for key in found:
                asked[key] = items.near(of.body, [each["node_id"] for each in events[key]])
        states = self._states(scope.prefix + each for scope in scopes for each in asked[scope.key])
        for scope in scopes:
            key, prefix = scope.key, scope.prefix
            own = {each: states[prefix + each] for each in asked[key] if prefix + each in states}
            error = found[key]["error"] or _error(own, prefix)
            if error is not None:
                ended.failing[key] = error
                continue
            done = {node_id for node_id, (status, _) in own.items() if status in plan.DONE}
            present = done.union(each for each, (status, _) in own.items() if status in _OPEN)
            known, finished = None, None
            if events is not None:
                known = {*asked[key]}
                finished = [
                    each["node_id"] for each in events[key] if each["node_status"] in plan.DONE
                ]
            self._plan(ended, [*outer, scope], done, known, finished, present)
        self._insert(resumed=events is None)
        return ended._replace(failing=self._failed(of, map_id, ended.failing))

    def _plan(
        self,
        ended: _Ended,
        scopes: Sequence[items.Scope],
        done: set[str],
        asked: set[str] | None = None,
        finished: list[str] | None = None,
        present: Collection[str] = (),
    ) -> None:
        """Plan the last of these items and add its rows; among `asked` (or all), `done` are done.

        The item fails if the plan fails, or if inputs cannot be stored. Raises `InvalidPayload` if
        an id is too long.
        """
        scope, out_dir = scopes[-1], self._run["out_dir"]
        if finished is None:
            items.check_ids(scope)
        if out_dir is not None:
            out_dir = f"{out_dir.rstrip('/')}/{scope.id}"
        reader = run_cache.Reader(
            run_cache.in_open_transaction(self._conn),
            self._run_id,
            prefix=scope.prefix,
            done=done,
            asked=asked,
            context=functools.partial(self._context_of, scopes),
        )
        progress = plan.Progress(scope.of.body, scope.prefix)
        made = plan.plan(progress, finished, reader, out_dir=out_dir)
        for row in made.rows:
            if row.template and row.node.map is None:
                row.template = items.bound(row.template, scopes)
        try:
            self._add(made.rows, present)
        except run_cache.TooLarge:
            raise
        except errors.InvalidPayload as error:
            ended.failing[scope.key] = str(error)
            return
        if made.failure is not None:
            ended.failing[scope.key] = made.failure[1]
        elif made.complete:
            ended.done.append(scope.key)

    def _context_of(self, scopes: Sequence[items.Scope], heads: set[str] | None) -> dict[str, Any]:
        """Return the values that these heads of refs have in the last of these items.

        Members of the run's context outside of items are read only once.
        """
        found, names = items.named(heads or (), scopes)
        known = self._context
        missing = {
            each for each in names.values() if item_ids.of_item(each) or each not in self._asked
        }
        if missing:
            script = run_cache.read_context(self._run_id, missing, self._readable)
            known.update(db.run(self._conn, script))
            self._asked |= missing
        return found | {head: known[name] for head, name in names.items() if name in known}

    def _failed(self, of: graph.Map, map_id: str, failing: Mapping[str, str]) -> dict[str, str]:
        """Return the errors of items without open nodes by key, and store errors of the others."""
        if not failing:
            return {}
        own = {key: items.ids(items.Scope(of, map_id, key, None)) for key in failing}
        states = self._states(itertools.chain(*own.values()))
        is_open = {node_id for node_id, (status, _) in states.items() if status in _OPEN}
        waiting = {key: failing[key] for key, ids in own.items() if not is_open.isdisjoint(ids)}
        if waiting:
            noted = payload.encode_errors(waiting)
            statements.maps.note_errors(self._conn, **self._of(map_id), errors=noted)
        return {key: error for key, error in failing.items() if key not in waiting}

    def _items(self, map_id: str, keys: Iterable[str]) -> dict[str, Row]:
        """Return `item` and `error` of the items with these keys, by key."""
        rows = statements.maps.items(self._conn, **self._of(map_id), keys=[*keys])
        return {row["key"]: row for row in rows}

    def _states(self, names: Iterable[str]) -> _States:
        """Return status and error of each of these nodes that has a row."""
        rows = statements.history_rows.node_states(self._conn, run_id=self._run_id, nodes=[*names])
        return {row["node_id"]: (row["status"], row["error"]) for row in rows}

    def _outer(self, map_id: str) -> list[items.Scope]:
        """Return the items around a map, the outermost first."""
        parts = item_ids.split(map_id)
        if parts is None:
            return []
        place = parts.map_id, parts.key
        if place not in self._outer_items:
            row = self._items(parts.map_id, [parts.key]).get(parts.key)
            self._outer_items[place] = None if row is None else row["item"]
        owner = item_ids.node(self._graph, parts.map_id)
        assert owner is not None
        assert owner.map is not None
        scope = items.Scope(owner.map, *place, self._outer_items[place])
        return [*self._outer(parts.map_id), scope]


class _Ended(NamedTuple):
    """Items of a map that end, as the keys of completed items, and errors by key."""

    done: list[str]
    failing: dict[str, str]


def _too_much(room: int) -> str:
    return (
        f"a transaction would write {(TRANSACTION_BYTES - room) / 1e6:.0f} MB of JSON, at most "
        f"{TRANSACTION_BYTES / 1e6:.0f} MB; keep the large value in a file or an artifact and pass "
        "its path, or map over smaller items"
    )


def _error(states: _States, prefix: str) -> str | None:
    """Return the error of an item's first failed node, or None."""
    for node_id, (status, error) in states.items():
        if status == "failed":
            return f"node {prefix}{node_id} failed: {error or 'no error was given'}"
    return None
