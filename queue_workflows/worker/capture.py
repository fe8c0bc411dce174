"""Assign what a worker's handlers print and log to their claims, and store it in the background."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Generator

from queue_workflows import config, db
from queue_workflows.engine import job_tables, logs
from queue_workflows.runtime import service
from queue_workflows.worker import captured_streams
from queue_workflows.worker.recordings import Recording

_log = logging.getLogger(__name__)
STORE_S = 2.0
SOON_S = 0.25
LAST_S = 2.0
"""Seconds for which the end of a worker waits for the database to store the rest."""
KEPT_MAX = 256
"""Ended attempts whose log is not stored yet; beyond that the oldest are dropped."""


class Source:
    """Capture the output of one worker's handlers, and store it on a thread of its own.

    `current` returns the claim whose handler runs now, or None. If several run at once, it returns
    that of the calling handler. `streams` False: nothing of this process is captured, all output
    comes by `add`.
    """

    def __init__(
        self, current: Callable[[], job_tables.Lease | None], *, streams: bool = True
    ) -> None:
        self._current = current
        self._streams = streams
        self._lock = threading.Lock()
        self._open: dict[job_tables.Lease, Recording] = {}
        """The recordings of running handlers that have printed."""
        self._ended: list[Recording] = []
        self._thread = threading.get_ident()
        self._before: list[threading.Thread] = []
        """Threads that ran when the handler began: none of them is its own."""
        self._pid = os.getpid()
        self._dedicated = db.DedicatedConnection()
        self._loop: service.Loop | None = None
        self._soon = False
        """Whether attempts end in quick succession, so that they are stored together."""

    def recording(self) -> Recording | None:
        """Return the recording of the running handler, or None if nothing is to be kept."""
        lease = self._current()
        if lease is None or self._pid != os.getpid():
            return None
        if threading.get_ident() != self._thread and threading.current_thread() in self._before:
            return None
        return self._recording_of(lease)

    def _recording_of(self, lease: job_tables.Lease) -> Recording | None:
        if (now := self._open.get(lease)) is not None:
            return now
        cap_kb = config.LOG_CAPTURE_KB.read()
        return self._open.setdefault(lease, Recording(lease, cap_kb)) if cap_kb > 0 else None

    def add(self, lease: job_tables.Lease, data: bytes) -> None:
        """Keep output of a handler that runs in another process."""
        recording = self._recording_of(lease)
        if recording is not None:
            recording.add(data)

    def begin(self) -> None:
        """Note that a handler begins, so that threads of earlier handlers do not print for it.

        Not used where several run at once.
        """
        if self._loop is not None:
            self._before = threading.enumerate()

    def end(self, lease: job_tables.Lease) -> None:
        """Note that the handler of this claim has ended; costs nothing if it did not print."""
        now = self._open.pop(lease, None) if self._open else None
        if now is not None:
            with self._lock:
                self._ended.append(now)
                del self._ended[:-KEPT_MAX]
            if not self._soon:
                self.store_soon()

    def store_soon(self) -> None:
        """Store now what was captured, in the background."""
        loop = self._loop
        if loop is not None:
            loop.wake()

    @contextlib.contextmanager
    def capturing(self) -> Generator[None]:
        """Capture the output of handlers on this thread and on the threads that they start."""
        self._pid, self._thread = os.getpid(), threading.get_ident()
        if config.LOG_CAPTURE_KB.read() <= 0:
            yield
            return
        try:
            task = service.Task("store", lambda: SOON_S if self._soon else STORE_S, self._store)
            with (
                captured_streams.to(self, streams=self._streams),
                service.Loop("worker-logs", [task]) as self._loop,
            ):
                yield
        finally:
            self._loop, self._before = None, []
            self._dedicated.close()
            self._store_last()

    def _take(self) -> tuple[list[Recording], list[Recording]]:
        """Return the ended recordings, each once, and all recordings with something to store."""
        with self._lock:
            ended, self._ended = self._ended, []
        every = {id(each): each for each in (*ended, *[*self._open.values()])}
        return ended, [each for each in every.values() if each.changed]

    def _store(self) -> None:
        ended, taken = self._take()
        self._soon = bool(ended)
        if not taken:
            self._dedicated.close()
            return
        try:
            with self._dedicated.using() as conn:
                _write(conn, taken)
        except db.Error:
            for each in taken:
                each.mark_unstored()
            with self._lock:
                self._ended = [*ended, *self._ended][-KEPT_MAX:]
            raise

    def _store_last(self) -> None:
        _, taken = self._take()
        if not taken:
            return
        try:
            with db.connect(timeout_s=LAST_S, connect_s=LAST_S) as conn:
                _write(conn, taken)
        except db.Error as error:
            _log.warning("the last lines of %d job logs are not stored: %s", len(taken), error)


def _write(conn: db.Connection, recordings: list[Recording]) -> None:
    for table in (job_tables.NODE_JOBS, job_tables.INGEST_JOBS):
        if written := [each.written() for each in recordings if each.lease.table is table]:
            logs.write(conn, table, written)
