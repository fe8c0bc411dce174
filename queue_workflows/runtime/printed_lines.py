"""Turn what handlers print into lines of JSON with the ids of their job, where logs are JSON."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterable
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


class JsonStream:
    """A text stream that prints each line as JSON, with the ids of the job that printed it."""

    def __init__(self, stream: Any, name: str) -> None:
        self._stream = stream
        self._name = name
        self._lock = threading.RLock()
        self._rest: dict[tuple[int, Any], tuple[dict[str, str | int], str]] = {}
        """The lines that have no end yet, with their ids, by thread and job."""

    def write(self, text: str) -> int:
        """Print the lines that are whole now; return the length of the text."""
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
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for each in lines:
            self.write(each)

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

    @property
    def buffer(self) -> _Bytes:
        """Return what takes bytes."""
        return _Bytes(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Bytes:
    """The bytes under a `JsonStream`."""

    def __init__(self, stream: JsonStream) -> None:
        self._text = stream

    def write(self, data: Any) -> int:
        """Write bytes; return their number."""
        self._text.write(bytes(data).decode("utf-8", "backslashreplace"))
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._text, name)


_installed: list[JsonStream] = []


def install() -> None:
    """Print lines of JSON on stdout and stderr from now on, if this process logs JSON."""
    if not is_wanted() or _installed:
        return
    for name in STREAMS.values():
        stream = JsonStream(getattr(sys, name), name)
        setattr(sys, name, stream)
        _installed.append(stream)


def end(job_id: str | None = None) -> None:
    """Print the last lines of a job that have no line end; None: of all."""
    for stream in _installed:
        stream.end(job_id)
