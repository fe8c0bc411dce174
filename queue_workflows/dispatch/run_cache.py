"""Cache the graphs and the progress of runs in this process, and read the rest of a run."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from queue_workflows import config, db, errors
from queue_workflows.dag import definition, graph, hooks, payload, plan
from queue_workflows.db import statements
from queue_workflows.types import Row, Unreadable

Begin: TypeAlias = Callable[[], AbstractContextManager[db.Connection]]
"""Opens a transaction, on a connection of the pool or of the caller."""

QUERY_KB = 32 * 1024
"""The most of a context that one query returns, half of the loader's limit, as SQL adds spaces."""
READ_BYTES = 128 * 1024**2
"""The most bytes of a context that a plan reads. Loaded, they take up to ten times as much."""
CACHED_RUNS = 64
READ_AT_ONCE = 32
"""How many definitions one statement reads, about as many as results are recorded at once."""
SMALL_BYTES = 4096
"""Compressed size of a definition of some hundred nodes, which is read and checked within ms."""
CACHED_GRAPHS = 16
CACHED_GRAPH_CHARS = 4_000_000
"""A definition longer than this is not cached: each run reads and checks it."""


class OnConnection:
    """A `Begin` on one autocommit connection of the caller."""

    def __init__(self, connection: Callable[[], db.Connection]) -> None:
        self.connection = connection

    @contextmanager
    def __call__(self) -> Generator[db.Connection]:
        with (conn := self.connection()).transaction():
            yield conn


def on_connection(conn: db.Connection | db.DedicatedConnection) -> OnConnection:
    """Return a `Begin` on one autocommit connection of the caller."""
    return OnConnection(conn.get if isinstance(conn, db.DedicatedConnection) else lambda: conn)


def reading(begin: Begin) -> AbstractContextManager[db.Connection]:
    """Yield a connection for a single statement, without a transaction if possible."""
    return nullcontext(begin.connection()) if isinstance(begin, OnConnection) else begin()


def in_open_transaction(conn: db.Connection) -> Begin:
    """Return a `Begin` that joins the open transaction of `conn`."""
    return functools.partial(nullcontext, conn)


class ReadNeeded(Exception):
    """A plan needs data that only the database has."""


class TooLarge(errors.UnreadableRow):
    """The data is too large for one transaction; a part of it may fit."""


class Room:
    """How much of a context one plan may still read."""

    def __init__(self) -> None:
        self.left = READ_BYTES


class Reader:
    """The data of a plan, from the caller's knowledge of a run's nodes, else from the database.

    `done` are the done nodes among `asked` (or among all), `present` the nodes with a row, and
    `context` returns members of the context. Other data is read in a transaction of `begin`; if
    that is None, `ReadNeeded` is raised. The ids of nodes lack their `prefix`.
    """

    def __init__(
        self,
        begin: Begin | None,
        run_id: str,
        *,
        prefix: str = "",
        done: set[str] | None = None,
        asked: set[str] | None = None,
        present: set[str] | None = None,
        context: Callable[[set[str] | None], dict[str, Any]] | None = None,
    ) -> None:
        self._begin = begin
        self._run_id = run_id
        self._prefix = prefix
        self._done = done
        self._asked = asked
        self._present = present
        self._context = context
        self._room = Room()

    def done_among(self, ids: Collection[str]) -> set[str]:
        if self._done is None:
            return self._query(plan.DONE, ids)
        if self._asked is not None and (unknown := set(ids) - self._asked):
            self._done |= self._query(plan.DONE, unknown)
            self._asked |= unknown
        return self._done.intersection(ids)

    def done_all(self) -> set[str]:
        if self._done is not None:
            return self._done
        with self._reading() as conn:
            return set(statements.nodes.all_done(conn, run_id=self._run_id))

    def present(self, ids: Collection[str]) -> set[str]:
        if self._present is None:
            return self._query(plan.PRESENT, ids)
        return self._present.intersection(ids)

    def context(self, heads: set[str] | None) -> dict[str, Any]:
        if self._context is not None:
            return self._context(heads)
        with self._reading() as conn:
            return db.run(conn, read_context(self._run_id, heads, self._room))

    def _query(self, statuses: Collection[str], ids: Collection[str]) -> set[str]:
        nodes = [self._prefix + each for each in ids]
        with self._reading() as conn:
            found = statements.nodes.among(
                conn, run_id=self._run_id, nodes=nodes, statuses=[*statuses]
            )
        return {each.removeprefix(self._prefix) for each in found}

    def _reading(self) -> AbstractContextManager[db.Connection]:
        if self._begin is None:
            raise ReadNeeded
        return reading(self._begin)


def read_context(
    run_id: str, heads: Iterable[str] | None, room: Room | None = None
) -> db.Script[dict[str, Any]]:
    """Read the run's context with the `context_delta` of each completed node under its id.

    It reads only the members that `heads` names, or all for None. Raises `UnreadableRow` for a
    context that is not an object, and for a member that cannot be loaded. Raises `TooLarge` if they
    do not fit into `room`, which the reads of one plan share.
    """
    room = room or Room()
    wanted = None if heads is None else [*heads]
    at_once = max(1, QUERY_KB // max(1, config.MAX_PAYLOAD_KB.read()))
    if wanted is None or len(wanted) <= at_once:
        row = yield from statements.nodes.context.script(
            heads=wanted, run_id=run_id, most=room.left
        )
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
        whole: Any = row["context"]
        if not isinstance(whole, Unreadable):
            room.left -= row["size"]
            return whole
        if wanted is None or len(wanted) < 2:
            what = f" under {wanted[0]!r:.120}" if wanted else ""
            raise errors.UnreadableRow(
                f"its inputs or outputs{what} cannot be read: {whole.reason}"
            )
        at_once = len(wanted) // 2
    # Read them in parts, since together they may be too large to be loaded.
    found: dict[str, Any] = {}
    for start in range(0, len(wanted), at_once):
        found |= yield from read_context(run_id, wanted[start : start + at_once], room)
    return found


Identity: TypeAlias = "tuple[str, int, int, int]"


def identity(run: Row) -> Identity:
    """Return a run's id, generation, revision and creation time, which differs if recreated."""
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


_cache: _Cache[str, tuple[Identity, plan.Progress | None]] = _Cache(CACHED_RUNS)
"""The progress of runs by their ids, None for a run that a worker leaves to the dispatcher."""
parts: _Cache[str, int] = _Cache(CACHED_RUNS)
"""How many events of a run fit into one transaction, if fewer than a batch."""


class Definition(NamedTuple):
    """The definition of a run as JSON text, and its digest."""

    text: str
    digest: str


_expansions: _Cache[bytes, tuple[dict[str, bytes], Definition]] = _Cache(CACHED_GRAPHS)
"""Definitions, with the hashes of their pipelines by name. The key is the hash of the workflow's
document and of the settings that affect expanding."""


def forget(run_id: str) -> None:
    """Drop the cached progress of a run."""
    _cache.drop(run_id)


def recall(run: Row) -> plan.Progress | None:
    """Return the cached progress of a run; None if there is none for its generation."""
    known = _cache.get(run["id"])
    return known[1] if known is not None and known[0] == identity(run) else None


def learn(begin: Begin, run: Row) -> plan.Progress:
    """Return the progress of a run; read its definition if needed, or expand and freeze it.

    Opens transactions, and may call the provider outside of them. Raises as `hooks.load` does.
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
    """Return the progress of a run, and its new definition for `freeze` if it was just expanded.

    Nothing is cached for a definition that is not stored yet: call `keep` after the commit.
    """
    progress = recall(run)
    if progress is not None:
        return progress, None
    if not run["has_definition"]:
        made = _expanded(run)
        return plan.Progress(_graph(made.text)), made
    with reading(begin) as conn:
        rows = statements.runs.definition_texts(conn, ids=[run["id"]], most=None)
    if not rows:
        raise errors.UnknownJob(f"run {run['id']!r} is gone")
    progress = plan.Progress(_graph(rows[0]["text"]))
    keep(run, progress)
    return progress, None


def _expanded(run: Row) -> Definition:
    """Return the definition of a run's workflow as the provider returns it now.

    An unchanged document of an earlier run is not expanded again. Raises as `hooks.load` does.
    """
    document, load = hooks.load(run)
    used: dict[str, Any] = {}

    def pipeline(name: str) -> Any:
        if name not in used:
            used[name] = load(name)
        return used[name]

    key = _hash([document, config.get_config().node_versions, config.MAX_PAYLOAD_KB.read()])
    known = _expansions.get(key)
    if known is not None and all(_hash(pipeline(name)) == each for name, each in known[0].items()):
        return known[1]
    expanded = definition.expand(document, pipeline)
    made = Definition(payload.to_json(expanded), definition.digest(expanded))
    if len(made.text) <= CACHED_GRAPH_CHARS:
        _expansions.put(key, ({name: _hash(schema) for name, schema in used.items()}, made))
    return made


def _hash(document: Any) -> bytes:
    """Return a hash of the provider's document; a random one if it is not plain JSON."""
    try:
        return hashlib.sha256(json.dumps(document, allow_nan=False).encode()).digest()
    except (TypeError, ValueError, RecursionError):
        return os.urandom(32)


def unknown(wanted: Iterable[Row]) -> list[Row]:
    """Return up to READ_AT_ONCE of these runs whose graphs are not cached, without duplicates."""
    found: dict[str, Row] = {}
    for run in wanted:
        known = _cache.get(run["id"])
        if run["generation"] is not None and (known is None or known[0] != identity(run)):
            found[run["id"]] = run
    return [*found.values()][:READ_AT_ONCE]


def learned(asked: Iterable[Row], texts: Mapping[str, str]) -> None:
    """Cache the graphs of runs. `texts` has the texts of their definitions by run id.

    A run whose definition is missing or too large, or cannot run, is left to the dispatcher, and is
    not read again.
    """
    for run in asked:
        keep(run, None)
        with contextlib.suppress(errors.InvalidWorkflow):
            if run["id"] in texts:
                keep(run, plan.Progress(_graph(texts[run["id"]])))


def _graph(text: str) -> graph.Graph:
    """Return the graph of a stored definition, checked once per process and content.

    Raises `InvalidWorkflow` for a definition that cannot run, since its row may be forged.
    """
    # With an app's resolver the graph is not cached, since it may change the templates it gets.
    if len(text) > CACHED_GRAPH_CHARS or hooks.app_resolves():
        return graph.read(db.load_json(text))
    return _read(text)


@functools.lru_cache(maxsize=CACHED_GRAPHS)
def _read(text: str) -> graph.Graph:
    return graph.read(db.load_json(text))


def keep(run: Row, progress: plan.Progress | None) -> None:
    """Cache the progress of a run; None means that workers leave the run to the dispatcher."""
    _cache.put(run["id"], (identity(run), progress))


def freeze(conn: db.Connection, run: Row, made: Definition) -> bool:
    """Store a definition under the run's lock; return False if it has one, or another workflow."""
    given = {"definition": made.text, "digest": made.digest, "workflow": run["workflow_name"]}
    return statements.runs.freeze_definition(conn, run_id=run["id"], **given) == 1
