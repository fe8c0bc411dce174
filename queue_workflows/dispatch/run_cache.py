"""Cache what this process has read of its runs, and read the rest from the database."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, TypeAlias, TypeVar

from queue_workflows import db, errors
from queue_workflows.dag import definition, frozen_definition, graph, payload, readiness
from queue_workflows.dispatch import hooks
from queue_workflows.engine import nodes, runs
from queue_workflows.types import Row

Begin: TypeAlias = Callable[[], AbstractContextManager[db.Connection]]
"""Opens a transaction, from the pool or on a connection of the caller's."""

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
        self._connection = connection

    @contextmanager
    def __call__(self) -> Generator[db.Connection]:
        conn = self._connection()
        with conn.transaction():
            yield conn

    @contextmanager
    def read(self) -> Generator[db.Connection]:
        """Return the connection for a single statement, which needs no transaction around it."""
        yield self._connection()


def on_connection(conn: db.Connection | db.DedicatedConnection) -> OnConnection:
    """Return a `Begin` on one autocommit connection of the caller's."""
    return OnConnection(conn.get if isinstance(conn, db.DedicatedConnection) else lambda: conn)


def reading(begin: Begin) -> AbstractContextManager[db.Connection]:
    """Yield a connection for a single statement, without a transaction where none is needed."""
    return begin.read() if isinstance(begin, OnConnection) else begin()


def in_open_transaction(conn: db.Connection) -> Begin:
    """Return a `Begin` that joins the open transaction of `conn`."""

    @contextmanager
    def begin() -> Generator[db.Connection]:
        yield conn

    return begin


class ReadNeeded(Exception):
    """A plan needs something that only the database knows."""


class NoKnowledge:
    """A reader that knows nothing about a run's nodes."""

    def done_among(self, ids: Collection[str]) -> set[str]:  # noqa: ARG002  the protocol's name
        raise ReadNeeded

    def present(self, ids: Collection[str]) -> set[str]:  # noqa: ARG002  the protocol's name
        raise ReadNeeded

    def done_all(self) -> set[str]:
        raise ReadNeeded

    def context(self, heads: set[str] | None) -> dict[str, Any]:  # noqa: ARG002  the protocol's name
        raise ReadNeeded


class Reader:
    """Read a run's nodes from the database for one plan, in the transactions that `begin` opens."""

    def __init__(self, begin: Begin, run_id: str) -> None:
        self._begin = begin
        self._run_id = run_id
        self._room = nodes.Room()

    def done_among(self, ids: Collection[str]) -> set[str]:
        with reading(self._begin) as conn:
            return nodes.done_among(conn, self._run_id, ids)

    def present(self, ids: Collection[str]) -> set[str]:
        with reading(self._begin) as conn:
            return nodes.present_among(conn, self._run_id, ids)

    def done_all(self) -> set[str]:
        with reading(self._begin) as conn:
            return nodes.all_done(conn, self._run_id)

    def context(self, heads: set[str] | None) -> dict[str, Any]:
        with reading(self._begin) as conn:
            return db.run(conn, nodes.context(self._run_id, heads, self._room))


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

    def drop(self, concerns: Callable[[K], bool]) -> None:
        with self._lock:
            for key in [key for key in self._items if concerns(key)]:
                del self._items[key]


_cache: _Cache[Identity, readiness.Progress] = _Cache(CACHED_RUNS)
_left: _Cache[Identity, bool] = _Cache(CACHED_RUNS)
"""The runs that `read` leaves to the dispatcher."""
parts: _Cache[str, int] = _Cache(CACHED_RUNS)
"""How many events of a run fit into one transaction, where that is fewer than a batch."""
_graphs: _Cache[bytes, graph.Graph] = _Cache(CACHED_GRAPHS)
"""Graphs by the SHA-256 of their definition's text, since a stored `definition_hash` may be forged.
"""


def forget(run_id: str) -> None:
    """Drop what this process knows of a run; the database keeps the truth."""
    _cache.drop(lambda key: key[0] == run_id)


def recall(run: Row) -> readiness.Progress | None:
    """Return what is known of a run in its generation, without reading the database."""
    return _cache.get(identity(run))


def learn(begin: Begin, run: Row) -> readiness.Progress:
    """Return what is known of a run; read its definition if needed, or expand and freeze it.

    Opens transactions, and may call the provider outside of them. Raises what `hooks.expand`
    raises.
    """
    progress, made = prepare(begin, run)
    if made is None:
        return progress
    with begin() as conn:
        runs.lock(conn, run["id"])
        stored = freeze(conn, run, made)
    if not stored:
        return learn(begin, run | {"has_definition": True})
    keep(run, progress)
    return progress


def prepare(begin: Begin, run: Row) -> tuple[readiness.Progress, dict[str, Any] | None]:
    """Return what is known of a run, and its new definition for `freeze` if it was just expanded.

    Nothing is cached for a definition that is not stored yet: call `keep` after the commit.
    """
    progress = recall(run)
    if progress is not None:
        return progress, None
    if not run["has_definition"]:
        made = hooks.expand(run)
        return readiness.Progress(graph.Graph(made)), made
    with reading(begin) as conn:
        texts = runs.definition_texts(conn, [run["id"]])
    if not texts:
        raise errors.UnknownJob(f"run {run['id']!r} is gone")
    progress = readiness.Progress(_frozen_graph(texts[run["id"]]))
    keep(run, progress)
    return progress, None


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
            found = _frozen_graph(texts[run_id]) if run_id in texts else None
        except errors.InvalidWorkflow:
            found = None
        if found is None:
            _left.put(identity(run), True)
        else:
            keep(run, readiness.Progress(found))


def _frozen_graph(text: str) -> graph.Graph:
    """Return the graph of a stored definition, checked once per process and content.

    Raises `InvalidWorkflow` for a definition that cannot run, since its row may be forged.
    """
    key = hashlib.sha256(text.encode()).digest()
    known = _graphs.get(key)
    if known is None:
        known = frozen_definition.check(db.load_json(text))
        # An app's resolver may change the templates that it receives.
        if len(text) <= CACHED_GRAPH_CHARS and not hooks.app_resolves():
            _graphs.put(key, known)
    return known


def keep(run: Row, progress: readiness.Progress) -> None:
    """Cache what is known of a run in its generation."""
    _cache.put(identity(run), progress)


def freeze(conn: db.Connection, run: Row, made: dict[str, Any]) -> bool:
    """Store a definition under the run's lock; return False if the run has one already."""
    text = payload.encode_definition(made)
    return runs.freeze_definition(conn, run["id"], text, definition.digest(made))
