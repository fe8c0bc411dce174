"""Follow the changes of jobs and runs, and new parts of streams, for event streams and polls."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any, Final, NamedTuple

from queue_workflows import db, errors, history
from queue_workflows.runtime import service
from queue_workflows.types import TERMINAL_RUN_STATUSES, Row

PARTS: Final = "job_parts"
"""The channel of notifications about new parts, and the kind of change that stands for them."""
BACKLOG: Final = 2_000
"""Changes that a slow reader may be behind; then its stream ends, and it has to come again."""
CHANNELS: Final = (
    "ingest_job_ready", "node_job_ready", "job_cancel", "orchestrator_work", PARTS,
)  # fmt: skip
POLL_S: Final = 0.5
"""Nothing notifies of a job that ends, so the history is read so often while somebody listens."""
OVERLAP: Final = timedelta(seconds=6)
"""A transaction of the engine ends within 5 s: its events appear behind younger ones until then."""
PAGE: Final = 1000
REMEMBERED: Final = 20_000
WATCHED_RUNS: Final = 2_000
REPLAY_PAGES: Final = 50
"""Pages of events that are searched for missed changes; with more, a reader is refused."""


class Change(NamedTuple):
    """A change: its place in the order of all, the kind `job` or `run`, and its data."""

    id: str
    kind: str
    data: dict[str, Any]

    def matches(self, wanted: dict[str, str]) -> bool:
        """Return whether the change has these members."""
        return all(
            (self.kind if name == "kind" else self.data.get(name)) == text
            for name, text in wanted.items()
        )


class Reader:
    """One waiter for changes, on an event loop; it gets the changes that match its filter.

    `parts_of`: the id of a job whose new parts wake it too. Only `next` and `begun` are called on
    the loop, the others on the thread that follows the changes.
    """

    def __init__(self, wanted: dict[str, str], parts_of: str | None) -> None:
        self._loop = asyncio.get_running_loop()
        self.parts_of = parts_of
        self._wanted = wanted
        self._changes: list[Change] = []
        self._begun = asyncio.Event()
        self._woken = asyncio.Event()
        self.closed = False

    def offer(self, found: Iterable[Change]) -> None:
        """Add the changes that match; every later one is offered from now on."""
        self._call(self._put, [change for change in found if change.matches(self._wanted)])

    def wake(self) -> None:
        """Let `next` return."""
        self._call(self._woken.set)

    def end(self) -> None:
        """End the reader's iteration."""
        self.closed = True
        self.wake()

    def _put(self, found: list[Change]) -> None:
        self._begun.set()
        if found and not self.closed:
            self._changes += found
            self.closed = len(self._changes) > BACKLOG
            self._woken.set()

    def _call(self, call: Callable[..., Any], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # its event loop has ended
            self._loop.call_soon_threadsafe(call, *args)

    async def begun(self, timeout_s: float) -> None:
        """Wait until every later change is offered, or the time is over."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._begun.wait(), timeout_s)

    async def next(self, timeout_s: float) -> list[Change]:
        """Return the next changes; none after the timeout, and when only parts are new."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._woken.wait(), timeout_s)
        if not self.closed:
            self._woken.clear()
        found, self._changes = self._changes, []
        return found


class Changes:
    """Reads the history while there are readers, on one thread, and passes on the new ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: list[Reader] = []
        self._follow: service.Follow[db.Wake] | None = None
        self._listener: db.Listener | None = None
        self._closed = False
        self._seen = OrderedDict[tuple[str, int], None]()
        self._runs = OrderedDict[str, tuple[str, int]]()
        self._since: datetime | None = None

    @contextlib.asynccontextmanager
    async def reading(
        self, *, parts_of: str | None = None, **wanted: str | None
    ) -> AsyncGenerator[Reader]:
        """Yield a reader of the changes with these members; new parts of job `parts_of` wake it."""
        chosen = {name: text for name, text in wanted.items() if text is not None}
        reader = Reader(chosen, parts_of)
        with self._lock:
            reader.closed = self._closed
            if not self._closed:
                self._readers.append(reader)
                if self._listener is None:
                    self._listener = db.listen(*CHANNELS, poll_s=POLL_S)
                    self._follow = service.Follow("service-changes", self._listener, self._on_wake)
                    self._follow.start()
                self._listener.wake()
        try:
            yield reader
        finally:
            with self._lock:
                if reader in self._readers:
                    self._readers.remove(reader)

    def end_readers(self) -> None:
        """End all readers, and every later one at once."""
        with self._lock:
            self._closed = True
            readers, self._readers = self._readers, []
        for reader in readers:
            reader.end()

    def close(self) -> None:
        """End all readers, and the thread."""
        self.end_readers()
        if self._follow is not None:
            self._follow.stop()

    def _on_wake(self, wake: db.Wake) -> None:
        with self._lock:
            readers = [*self._readers]
        if not readers:
            self._since = None
            return
        streamed = {text for channel, text in wake.notified if channel == PARTS}
        for reader in readers:
            if reader.parts_of is not None and reader.parts_of[:1000] in streamed:
                reader.wake()
        if wake.notified and len(streamed) == len(wake.notified):
            return  # parts do not change jobs
        found = self._read()
        for reader in readers:
            reader.offer(found)

    def _read(self) -> list[Change]:
        """Return the changes that were not returned before; none at the first call.

        Nothing is noted before all was read: after an error the next call returns the same.
        """
        now = history.now()
        rows: list[Row] = []
        for page in _pages(self._since or now - OVERLAP):
            rows += [row for row in page if (row["kind"], row["id"]) not in self._seen]
        jobs = [*map(job_change, rows)]
        wanted = _runs_of(jobs) | self._runs.keys()
        recent_s = OVERLAP.total_seconds()
        states = history.run_states(wanted, recent_s=recent_s, limit=WATCHED_RUNS)
        runs = [row for row in states if self._runs.get(row["id"]) != _state(row)]
        first, self._since = self._since is None, now - OVERLAP
        self._note(rows, runs)
        return [] if first else [*jobs, *map(run_change, runs)]

    def _note(self, rows: list[Row], runs: list[Row]) -> None:
        self._seen.update(((row["kind"], row["id"]), None) for row in rows)
        for row in runs:
            if row["status"] in TERMINAL_RUN_STATUSES:
                self._runs.pop(row["id"], None)
            else:
                self._runs[row["id"]] = _state(row)
        for known, most in ((self._seen, REMEMBERED), (self._runs, WATCHED_RUNS)):
            while len(known) > most:
                known.popitem(last=False)


def _state(row: Row) -> tuple[str, int]:
    return row["status"], row["generation"]


def _runs_of(found: Iterable[Change]) -> set[str]:
    return {change.data["run_id"] for change in found if change.data["run_id"]}


def _pages(since: datetime) -> Iterator[list[Row]]:
    """Yield the events of jobs from `since` on, a page at a time."""
    after: Row | None = None
    while True:
        page = history.changes(since, after=after, limit=PAGE)
        yield page
        if len(page) < PAGE:
            return
        after = page[-1]


def replay(last_id: str, wanted: dict[str, str]) -> list[Change]:
    """Return the matching changes since the one with this id, which may come again.

    Raises `InvalidConfig` for an id that no change has, `LookupError` if there are too many.
    """
    since = _instant(last_id) - OVERLAP
    found: list[Change] = []
    runs: set[str] = set()
    for number, page in enumerate(_pages(since)):
        changes = [*map(job_change, page)]
        runs |= _runs_of(changes)
        found += [change for change in changes if change.matches(wanted)]
        most = max(len(found), len(runs))
        if most > BACKLOG or number >= REPLAY_PAGES:
            raise LookupError(last_id)
    away_s = max(0.0, (history.now() - since).total_seconds())
    states = history.run_states(runs, recent_s=away_s, limit=BACKLOG + 1)
    if len(states) > BACKLOG:
        raise LookupError(last_id)
    return found + [each for each in map(run_change, states) if each.matches(wanted)]


def _instant(change_id: str) -> datetime:
    text = change_id.partition("-")[0]
    if text.isascii() and text.isdigit() and len(text) <= 17:
        return datetime.fromtimestamp(0, timezone.utc) + timedelta(microseconds=int(text))
    raise errors.InvalidConfig(f"Last-Event-ID {change_id!r:.80}: no event has this id")


def _place(at: datetime) -> int:
    return int(at.timestamp() * 1_000_000)


def job_change(row: Row) -> Change:
    """Return an event of a job as a change."""
    number = f"{_place(row['created_at'])}-{row['kind'][0]}{row['id']}"
    data = {name: value for name, value in row.items() if name not in ("id", "created_at")}
    return Change(number, "job", data | {"at": row["created_at"]})


def run_change(row: Row) -> Change:
    """Return the state of a run as a change."""
    at = row["finished_at"] or row["started_at"] or row["created_at"]
    data = {**row, "run_id": row["id"], "at": at}
    return Change(f"{_place(at)}-r{row['generation']}", "run", data)
