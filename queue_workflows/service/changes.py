"""Follow the changes of jobs and runs, and new parts of streams, for event streams and polls."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Mapping
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
"""The end of a job sends no notification, so the history is read so often while clients listen."""
NOTIFIED_S: Final = 0.1
"""Delay of the read after a notification, so that many notifications cost one statement."""
WATCHED_RUNS: Final = 2_000
"""How many of the newest runs are read even without an event of their jobs."""
REPLAY_PAGES: Final = 10
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
        self._is_due = False
        """Whether a notification waits for a read."""
        self._seen: Collection[tuple[str, int]] = ()
        self._runs: Mapping[str, tuple[str, int]] = {}
        """The events and the states of runs of the last read."""
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
                    self._listener = db.listen(*CHANNELS, poll_s=self._pause_s)
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
        were_lost = wake.reason == "connected"  # notifications from before it, if there were any
        for reader in readers:
            if reader.parts_of is not None and (were_lost or reader.parts_of[:1000] in streamed):
                reader.wake()
        if wake.notified:
            self._is_due |= len(streamed) < len(wake.notified)  # parts do not change jobs
            return
        self._is_due = False
        found = self._read()
        for reader in readers:
            reader.offer(found)

    def _pause_s(self) -> float:
        return NOTIFIED_S if self._is_due else POLL_S

    def _read(self) -> list[Change]:
        """Return the changes that were not returned before; none at the first call.

        Nothing is noted before all was read: after an error the next call returns the same.
        """
        over = TERMINAL_RUN_STATUSES
        live = [run for run, (status, _) in self._runs.items() if status not in over]
        pages = [*_pages(self._since, live[-WATCHED_RUNS:])]
        events = {(row["kind"], row["id"]): row for page in pages for row in page.events}
        states = {row["id"]: row for page in pages for row in page.runs}
        jobs = [job_change(row) for key, row in events.items() if key not in self._seen]
        runs = [
            run_change(row) for key, row in states.items() if self._runs.get(key) != _state(row)
        ]
        first, self._since = self._since is None, pages[0].now - history.LATE
        self._seen, self._runs = events.keys(), {key: _state(states[key]) for key in states}
        return [] if first else [*jobs, *runs]


def _state(row: Row) -> tuple[str, int]:
    return row["status"], row["generation"]


def _pages(since: datetime | None, runs: Iterable[str] = ()) -> Iterator[history.Feed]:
    """Yield the changes since `since`, a page at a time; the first page has `runs` too."""
    page = history.feed(since, runs=runs)
    since = since or page.now - history.LATE
    while True:
        yield page
        if len(page.events) < history.FEED:
            return
        page = history.feed(since, after=page.events[-1])


def replay(last_id: str, wanted: dict[str, str]) -> list[Change]:
    """Return the matching changes since the one with this id, which may come again.

    Raises `InvalidConfig` for an id that no change has, `LookupError` if there are too many.
    """
    found: list[Change] = []
    states: dict[str, Row] = {}
    for number, page in enumerate(_pages(_instant(last_id) - history.LATE)):
        found += [one for one in map(job_change, page.events) if one.matches(wanted)]
        states |= {row["id"]: row for row in page.runs}
        if max(len(found), len(states)) > BACKLOG or number >= REPLAY_PAGES:
            raise LookupError(last_id)
    return found + [one for one in map(run_change, states.values()) if one.matches(wanted)]


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
    # A run that is retried keeps its first start.
    begun = max(filter(None, (row["started_at"], row["queued_at"], row["created_at"])))
    data = {**row, "run_id": row["id"], "at": row["finished_at"] or begun}
    state = "q" if row["status"] == "queued" else "r"
    return Change(f"{_place(data['at'])}-{state}{row['generation']}", "run", data)
