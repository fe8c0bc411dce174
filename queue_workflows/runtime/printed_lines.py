"""Turn what handlers print into lines of JSON with the ids of their job, where logs are JSON."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

from queue_workflows.runtime import log_context, log_format

LOGGER: Final = "print"
"""The `logger` of these lines."""
LINE: Final = 8000
"""Bytes or characters after which a line is cut."""
STREAMS: Final = {1: "stdout", 2: "stderr"}
_FORMATTER: Final = log_format.JsonFormatter()
_MASK: Final = log_format.MaskSecrets(indent=False)


def as_json(text: str, stream: str, pid: int) -> str:
    """Return a printed line as JSON, with its line end and the ids that are bound now."""
    members = {"name": LOGGER, "levelno": logging.INFO, "levelname": "INFO", "msg": text}
    record = logging.makeLogRecord({**members, "args": None, "process": pid, "stream": stream})
    _MASK.filter(record)
    return _FORMATTER.format(record) + "\n"


def is_wanted() -> bool:
    """Return whether this process logs JSON."""
    handlers = logging.getLogger().handlers
    return any(isinstance(each.formatter, log_format.JsonFormatter) for each in handlers)


class Pipes:
    """The lines of one executor, from the bytes that its stdout and stderr bring."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._rest = dict.fromkeys(STREAMS, b"")

    def add(self, number: int, data: bytes) -> bytes:
        """Return the lines of a stream that are whole now."""
        *lines, rest = (self._rest[number] + data).split(b"\n")
        while len(rest) > LINE:
            lines.append(rest[:LINE])
            rest = rest[LINE:]
        self._rest[number] = rest
        return b"".join(self._line(number, line) for line in lines)

    def end(self, number: int) -> bytes:
        """Return the last line of a stream, if it has no end."""
        rest, self._rest[number] = self._rest[number], b""
        return self._line(number, rest)

    def _line(self, number: int, line: bytes) -> bytes:
        text = line.decode("utf-8", "backslashreplace").rstrip("\r")
        return as_json(text, STREAMS[number], self._pid).encode() if text else b""


class Stream:
    """A text stream that shows `add` what is written to it; all else is of the stream below it.

    `add` returns whether that is printed elsewhere, and not here.
    """

    def __init__(self, stream: Any, add: Callable[[str | bytes], bool]) -> None:
        self.stream = stream
        self._add = add

    def write(self, text: Any) -> int:
        """Write a text; return its length."""
        if isinstance(text, str) and self._add(text):
            return len(text)
        return self.stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for each in lines:
            self.write(each)

    @property
    def buffer(self) -> _Bytes:
        """Return what takes bytes."""
        return _Bytes(self.stream.buffer, self._add)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def __iter__(self) -> Any:
        return iter(self.stream)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.flush()


class _Bytes:
    """The bytes under a `Stream`."""

    def __init__(self, buffer: Any, add: Callable[[str | bytes], bool]) -> None:
        self._buffer = buffer
        self._add = add

    def write(self, data: Any) -> int:
        """Write bytes; return their number."""
        return len(data) if self._add(bytes(memoryview(data))) else self._buffer.write(data)

    def writelines(self, lines: Iterable[Any]) -> None:
        """Write several pieces."""
        for each in lines:
            self.write(each)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)


class JsonLines:
    """Prints each line of a stream as JSON, with the ids of the job that printed it."""

    def __init__(self, stream: Any, name: str) -> None:
        self._stream = stream
        self._name = name
        self._lock = threading.RLock()
        self._rest: dict[tuple[int, Any], tuple[dict[str, str | int], str]] = {}
        """The lines that have no end yet, with their ids, by thread and job."""

    def add(self, text: str | bytes) -> bool:
        """Print the lines that are whole now."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", "backslashreplace")
        ids = log_context.of_code()
        key = (threading.get_ident(), ids.get("job_id"))
        with self._lock:
            before = self._rest.pop(key, (ids, ""))[1]
            *lines, rest = (before + text).split("\n")
            if len(rest) > LINE:
                lines, rest = [*lines, rest], ""
            if rest:
                self._rest[key] = ids, rest
            self._print(lines)
        return True

    def end(self, job_id: str | None = None) -> None:
        """Print what a job, or else anything, has printed without a line end."""
        with self._lock:
            for key in [each for each in self._rest if job_id is None or each[1] == job_id]:
                ids, rest = self._rest.pop(key)
                with log_context.bound(ids):
                    self._print([rest])

    def _print(self, lines: list[str]) -> None:
        text = "".join(as_json(each, self._name, os.getpid()) for each in lines if each.strip())
        if text:
            self._stream.write(text)


_installed: list[JsonLines] = []


def install() -> None:
    """Print lines of JSON on stdout and stderr from now on, if this process logs JSON."""
    if not is_wanted() or _installed:
        return
    for name in STREAMS.values():
        stream = getattr(sys, name)
        lines = JsonLines(stream, name)
        setattr(sys, name, Stream(stream, lines.add))
        _installed.append(lines)


def end(job_id: str | None = None) -> None:
    """Print the last lines of a job that have no line end; None: of all."""
    for lines in _installed:
        lines.end(job_id)
