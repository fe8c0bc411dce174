"""Cache what this process has read of its runs, and read the rest from the database."""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from queue_workflows import config, db, errors
from queue_workflows.dag import definition, graph, payload, plan
from queue_workflows.db import statements
from queue_workflows.dispatch import hooks
from queue_workflows.types import Row, Unreadable

Begin: TypeAlias = Callable[[], AbstractContextManager[db.Connection]]
"""Opens a transaction, from the pool or on a connection of the caller's."""

QUERY_KB = 32 * 1024
"""What one query should return of a context: half of what is loaded, as SQL adds spaces to JSON."""
READ_BYTES = 128 * 1024**2
"""The most that a plan reads of a context, as jsonb. Loaded, it takes up to ten times as much."""
CACHED_RUNS = 64
READ_AT_ONCE = 32
"""How many definitions one statement reads: as many results as four slots record in one."""
SMALL_BYTES = 4096
"""A definition of a few hundred nodes, compressed. To read and check it takes milliseconds."""
CACHED_GRAPHS = 16
CACHED_GRAPH_CHARS = 4_000_000
"""A definition longer than this is not cached: each run reads and checks it."""


class OnConnection:
    """A `Begin` on one autocommit connection of the caller's."""

    def __init__(self, connection: Callable[[], db.Connection]) -> None:
        self.connection = connection

    @contextmanager
    def __call__(self) -> Generator[db.Connection]:
        conn = self.connection()
        with conn.transaction():
            yield conn


def on_connection(conn: db.Connection | db.DedicatedConnection) -> OnConnection:
    """Return a `Begin` on one autocommit connection of the caller's."""
    return OnConnection(conn.get if isinstance(conn, db.DedicatedConnection) else lambda: conn)


def reading(begin: Begin) -> AbstractContextManager[db.Connection]:
    """Yield a connection for a single statement, without a transaction where none is needed."""
    return nullcontext(begin.connection()) if isinstance(begin, OnConnection) else begin()


def in_open_transaction(conn: db.Connection) -> Begin:
    """Return a `Begin` that joins the open transaction of `conn`."""
    return functools.partial(nullcontext, conn)


class ReadNeeded(Exception):
    """A plan needs something that only the database knows."""


class TooLarge(errors.UnreadableRow):
    """More than one transaction should read or write at once; a part of it may fit."""


class Room:
    """How much of a context one plan may still read."""

    def __init__(self) -> None:
        self.left = READ_BYTES


class Reader:
    """What a plan may know of a run's nodes: what its caller knows, and what the database has.

    `done`: which nodes of `asked` are done; `asked` None: of all nodes; `done` None: unknown.
    `present`: which nodes have a row; None: unknown. `context` returns members of the context
    instead of the database. `begin` opens the transactions of the reads; None: nothing is read, and
    a question that needs it raises `ReadNeeded`.
    """

    def __init__(
        self,
        begin: Begin | None,
        run_id: str,
        *,
        done: set[str] | None = None,
        asked: set[str] | None = None,
        present: set[str] | None = None,
        context: Callable[[set[str] | None], dict[str, Any]] | None = None,
    ) -> None:
        self._begin = begin
        self._run_id = run_id
        self._done = done
        self._asked = asked
        self._present = present
        self._context = context
        self._room = Room()

    def done_among(self, ids: Collection[str]) -> set[str]:
        if self._done is None:
            with self._reading() as conn:
                return set(statements.nodes.done_among(conn, run_id=self._run_id, nodes=[*ids]))
        if self._asked is not None and (unknown := set(ids) - self._asked):
            with self._reading() as conn:
                self._done.update(
                    statements.nodes.done_among(conn, run_id=self._run_id, nodes=[*unknown])
                )
            self._asked |= unknown
        return self._done.intersection(ids)

    def done_all(self) -> set[str]:
        if self._done is not None:
            return self._done
        with self._reading() as conn:
            return set(statements.nodes.all_done(conn, run_id=self._run_id))

    def present(self, ids: Collection[str]) -> set[str]:
        if self._present is not None:
            return self._present.intersection(ids)
        with self._reading() as conn:
            return set(statements.nodes.present_among(conn, run_id=self._run_id, nodes=[*ids]))

    def context(self, heads: set[str] | None) -> dict[str, Any]:
        if self._context is not None:
            return self._context(heads)
        with self._reading() as conn:
            return db.run(conn, read_context(self._run_id, heads, self._room))

    def _reading(self) -> AbstractContextManager[db.Connection]:
        if self._begin is None:
            raise ReadNeeded
        return reading(self._begin)


def read_context(
    run_id: str, heads: Iterable[str] | None, room: Room | None = None
) -> db.Script[dict[str, Any]]:
    """Read the run's context with the `context_delta` of each completed node under its id.

    Only the members that `heads` names; None: all of them. Raises `UnreadableRow` for a context
    that is no object, and for a member that cannot be loaded. Raises `TooLarge` for more than fits
    into `room`, which the reads of one plan share.
    """
    room = room or Room()
    wanted = None if heads is None else list(heads)
    at_once = max(1, QUERY_KB // max(1, config.MAX_PAYLOAD_KB.read()))
    if wanted is not None and len(wanted) > at_once:
        return (yield from _merged_context(run_id, wanted, at_once, room))
    row = yield from statements.nodes.context.script(heads=wanted, run_id=run_id, most=room.left)
    if row is None:
        return {}
    if row["kind"] != "object":
        raise errors.UnreadableRow(f"its inputs are a JSON {row['kind']}, not an object")
    if row["size"] > room.left:
        raise TooLarge(
            "the inputs and outputs that its next nodes refer to are larger together than the "
            f"{READ_BYTES / 1e6:.0f} MB of JSON that are read at once; keep a large value in a "
            "file or an artifact and pass its path"
        )
    found: Any = row["context"]
    if not isinstance(found, Unreadable):
        room.left -= row["size"]
        return found
    if wanted is not None and len(wanted) > 1:
        return (yield from _merged_context(run_id, wanted, len(wanted) // 2, room))
    what = f" under {wanted[0]!r:.120}" if wanted else ""
    raise errors.UnreadableRow(f"its inputs or outputs{what} cannot be read: {found.reason}")


def _merged_context(
    run_id: str, heads: list[str], at_once: int, room: Room
) -> db.Script[dict[str, Any]]:
    """Read these members of the context, read in parts: together they may be too large."""
    found: dict[str, Any] = {}
    for start in range(0, len(heads), at_once):
        found |= yield from read_context(run_id, heads[start : start + at_once], room)
    return found


Identity: TypeAlias = "tuple[str, int, int, int]"


def identity(run: Row) -> Identity:
    """Return a run's id, generation, revision and creation time: a recreated run is another one."""
    return run["id"], run["generation"], run["revision"], run["born"]


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Cache(Generic[K, V]):
    """Values by key; the least recently used is dropped."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._items: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        with self._lock:
            item = self._items.get(key)
            if item is not None:
                self._items.move_to_end(key)
            return item

    def put(self, key: K, item: V) -> None:
        with self._lock:
            self._items[key] = item
            while len(self._items) > self._size:
                self._items.popitem(last=False)

    def drop(self, key: K) -> None:
        with self._lock:
            self._items.pop(key, None)


_cache: _Cache[str, tuple[Identity, plan.Progress]] = _Cache(CACHED_RUNS)
"""What is known of runs by their ids."""
_left: _Cache[Identity, bool] = _Cache(CACHED_RUNS)
"""The runs that `read` leaves to the dispatcher."""
parts: _Cache[str, int] = _Cache(CACHED_RUNS)
"""How many events of a run fit into one transaction, where that is fewer than a batch."""
_graphs: _Cache[bytes, graph.Graph] = _Cache(CACHED_GRAPHS)
"""Graphs by the SHA-256 of their definition's text, since a stored `definition_hash` may be forged.
"""


class Definition(NamedTuple):
    """The definition of a run as JSON text, and its digest."""

    text: str
    digest: str


class _Expansion(NamedTuple):
    """A definition, and the hashes of the pipelines that it was made of, by name."""

    of: dict[str, bytes | None]
    made: Definition


_expansions: _Cache[bytes, _Expansion] = _Cache(CACHED_GRAPHS)
"""Definitions by the hash of the workflow's document, and of the settings that expanding reads."""


def forget(run_id: str) -> None:
    """Drop what this process knows of a run; the database keeps the truth."""
    _cache.drop(run_id)


def recall(run: Row) -> plan.Progress | None:
    """Return what is known of a run in its generation, without reading the database."""
    known = _cache.get(run["id"])
    return known[1] if known is not None and known[0] == identity(run) else None


def learn(begin: Begin, run: Row) -> plan.Progress:
    """Return what is known of a run; read its definition if needed, or expand and freeze it.

    Opens transactions, and may call the provider outside of them. Raises what `hooks.load` raises.
    """
    progress, made = prepare(begin, run)
    if made is None:
        return progress
    with begin() as conn:
        statements.runs.lock(conn, run_id=run["id"])
        stored = freeze(conn, run, made)
    if not stored:
        return learn(begin, run | {"has_definition": True})
    keep(run, progress)
    return progress


def prepare(begin: Begin, run: Row) -> tuple[plan.Progress, Definition | None]:
    """Return what is known of a run, and its new definition for `freeze` if it was just expanded.

    Nothing is cached for a definition that is not stored yet: call `keep` after the commit.
    """
    progress = recall(run)
    if progress is not None:
        return progress, None
    if not run["has_definition"]:
        made = _expanded(run)
        return plan.Progress(_graph(made.text)), made
    with reading(begin) as conn:
        texts = {
            row["id"]: row["text"]
            for row in statements.runs.definition_texts(conn, ids=[run["id"]], most=None)
        }
    if not texts:
        raise errors.UnknownJob(f"run {run['id']!r} is gone")
    progress = plan.Progress(_graph(texts[run["id"]]))
    keep(run, progress)
    return progress, None


def _expanded(run: Row) -> Definition:
    """Return the definition of a run's workflow as the provider returns it now.

    What the provider returned for an earlier run is not expanded again, as that gives the same
    definition. Raises what `hooks.load` raises.
    """
    document, load = hooks.load(run)
    pipelines: dict[str, Any] = {}

    def pipeline(name: str) -> Any:
        if name not in pipelines:
            pipelines[name] = load(name)
        return pipelines[name]

    versions = config.get_config().node_versions
    key = _hash([document, versions, config.MAX_PAYLOAD_KB.read()])
    known = None if key is None else _expansions.get(key)
    if known is not None and all(_hash(pipeline(each)) == known.of[each] for each in known.of):
        return known.made
    expanded = definition.expand(document, pipeline)
    made = Definition(payload.encode_definition(expanded), definition.digest(expanded))
    hashes = {name: _hash(schema) for name, schema in pipelines.items()}
    if key is not None and None not in hashes.values() and len(made.text) <= CACHED_GRAPH_CHARS:
        _expansions.put(key, _Expansion(hashes, made))
    return made


def _hash(document: Any) -> bytes | None:
    """Return a hash of what the app's provider returned; None if it is no plain JSON."""
    try:
        return hashlib.sha256(json.dumps(document, allow_nan=False).encode()).digest()
    except (TypeError, ValueError, RecursionError):
        return None


def unknown(wanted: Iterable[Row]) -> list[Row]:
    """Return up to READ_AT_ONCE of these runs whose graphs are to be read, each once."""
    found = {
        run["id"]: run
        for run in wanted
        if run["generation"] is not None and recall(run) is None and not _left.get(identity(run))
    }
    return [*found.values()][:READ_AT_ONCE]


def learned(asked: Iterable[Row], texts: Mapping[str, str]) -> None:
    """Keep the graphs of runs by the texts of their definitions, by run id.

    A run without a text, as it has no definition or a large one, and one that cannot run are left
    to the dispatcher, and are not asked for again.
    """
    for run in asked:
        run_id = run["id"]
        try:
            found = _graph(texts[run_id]) if run_id in texts else None
        except errors.InvalidWorkflow:
            found = None
        if found is None:
            _left.put(identity(run), True)
        else:
            keep(run, plan.Progress(found))


def _graph(text: str) -> graph.Graph:
    """Return the graph of a stored definition, checked once per process and content.

    Raises `InvalidWorkflow` for a definition that cannot run, since its row may be forged.
    """
    key = hashlib.sha256(text.encode()).digest()
    known = _graphs.get(key)
    if known is None:
        known = graph.read(db.load_json(text))
        # An app's resolver may change the templates that it receives.
        if len(text) <= CACHED_GRAPH_CHARS and not hooks.app_resolves():
            _graphs.put(key, known)
    return known


def keep(run: Row, progress: plan.Progress) -> None:
    """Cache what is known of a run in its generation."""
    _cache.put(run["id"], (identity(run), progress))


def freeze(conn: db.Connection, run: Row, made: Definition) -> bool:
    """Store a definition under the run's lock; return False if the run has one already."""
    return (
        statements.runs.freeze_definition(
            conn, run_id=run["id"], definition=made.text, digest=made.digest
        )
        == 1
    )
