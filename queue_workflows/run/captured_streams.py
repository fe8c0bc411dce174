"""Pass what the process prints and logs to the worker whose handler runs in it."""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextvars import ContextVar
from typing import Any, TextIO

ENGINE = "queue_workflows"
_FORMAT = logging.Formatter(
    "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
)
_FORMAT.converter = time.gmtime


Keep = Callable[[bytes], object]
"""Keeps what the handler of a worker prints, if one runs."""
_keeps: ContextVar[Keep | None] = ContextVar("queue_workflows_log", default=None)


class _Streams:
    """The process's stdout, stderr and log records while any of its workers captures.

    Log records are captured where they are created: a handler on the root logger would disable
    `logging.basicConfig` and the handler of last resort.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sources: list[Keep] = []
        self._tees: dict[str, _Tee] = {}
        self._make: Callable[..., logging.LogRecord] = logging.LogRecord

    def begin(self, source: Keep) -> None:
        with self._lock:
            self._sources = [*self._sources, source]
            for name in ("stdout", "stderr"):
                stream: Any = getattr(sys, name)
                if stream is not None and not isinstance(stream, _Tee):
                    self._tees[name] = tee = _Tee(stream)
                    setattr(sys, name, tee)
            if logging.getLogRecordFactory() != self._record:
                self._make = logging.getLogRecordFactory()
                logging.setLogRecordFactory(self._record)

    def end(self, source: Keep) -> None:
        with self._lock:
            self._sources = [each for each in self._sources if each is not source]
            if self._sources:
                return
            if logging.getLogRecordFactory() == self._record:
                logging.setLogRecordFactory(self._make)
            for name, tee in self._tees.items():
                if getattr(sys, name) is tee:
                    setattr(sys, name, tee.stream)
            self._tees.clear()

    def _record(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = self._make(*args, **kwargs)
        _capture_log_record(record)
        return record

    def keep(self) -> Keep | None:
        """Return what keeps the output of this thread; another thread's if one worker captures."""
        found = _keeps.get()
        if found is None:
            sources = self._sources
            found = sources[0] if len(sources) == 1 else None
        return found


def _capture(data: str | bytes | bytearray | memoryview) -> None:
    """Capture output, best effort: printing never fails because of it."""
    with contextlib.suppress(Exception):
        if (keep := _streams.keep()) is not None:
            keep(data.encode("utf-8", "backslashreplace") if isinstance(data, str) else bytes(data))


class _Tee:
    """A text stream that captures what is written; everything else goes to the original stream."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        count = self.stream.write(text)
        _capture(text)
        return count

    def writelines(self, lines: Iterable[str]) -> None:
        for text in lines:
            self.write(text)

    @property
    def buffer(self) -> _Buffer:
        return _Buffer(self.stream.buffer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def __iter__(self) -> Any:
        return iter(self.stream)

    def __enter__(self) -> _Tee:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.flush()


class _Buffer:
    """The bytes under a `_Tee`."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def write(self, data: Any) -> int:
        count: int = self._buffer.write(data)
        _capture(data)
        return count

    def writelines(self, lines: Iterable[Any]) -> None:
        for data in lines:
            self.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)


def _capture_log_record(record: logging.LogRecord) -> None:
    """Capture a log record, best effort; the engine's own are in the job's history already."""
    with contextlib.suppress(Exception):
        name: Any = record.name
        if not name or name.partition(".")[0] == ENGINE or _streams.keep() is None:
            return
        if not _is_printed(record):
            # A formatter changes the record, which other handlers use later.
            _capture(_FORMAT.format(copy.copy(record)) + "\n")


def _is_printed(record: logging.LogRecord) -> bool:
    """Return whether a log record also reaches a captured stream."""
    logger: logging.Logger | None = logging.getLogger(record.name)
    handled = False
    while logger is not None:
        for handler in logger.handlers:
            handled = True
            stream = getattr(handler, "stream", None)
            if isinstance(stream, _Tee) and record.levelno >= handler.level:
                return True
        logger = logger.parent if logger.propagate else None
    return not handled and record.levelno >= logging.WARNING and isinstance(sys.stderr, _Tee)


_streams = _Streams()


@contextlib.contextmanager
def to(keep: Keep) -> Generator[None]:
    """Capture the output of this thread and of those that it starts while the block runs."""
    token = _keeps.set(keep)
    _streams.begin(keep)
    try:
        yield
    finally:
        _keeps.reset(token)
        _streams.end(keep)
