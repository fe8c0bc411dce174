"""Pass the output and log records of handlers to their worker, and print them there.

Stdout and stderr of an executor are pipes that the worker reads, so the output of a handler is kept
even if it is killed. An executor with one job at a time also sends the log records that it does not
print. An executor with many jobs sends the output of Python code with the job of its context; the
worker prints output of child processes, but it belongs to no job.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextvars import ContextVar
from typing import Any, Final, TypeAlias, cast

from queue_workflows.runtime import entry_point, io_loop, logs
from queue_workflows.types import JsonDict

READ_BYTES: Final = 64 * 1024
DRAIN_BYTES: Final = 2 * READ_BYTES
HELD_BYTES: Final = 2 << 20
"""The most bytes that both pipes of an executor hold; `pipe-max-size` of pipe(7) is 1 MiB."""
BACKLOG_BYTES: Final = 64 * 1024
"""The most bytes that wait for a reader of the worker's own stdout or stderr; more are dropped."""
LINE: Final = 8000
"""Characters after which a line is sent before its end."""
PIECE: Final = 1 << 20
"""The most characters of one message; longer output is sent in several."""
ENGINE: Final = "queue_workflows"
NAMES: Final = ("stdout", "stderr")
Send: TypeAlias = Callable[[int, JsonDict], object]
"""Sends a log record or printed lines (see `message`) with the key of their job, or 0."""
_TEXT: Final = logging.Formatter()
_STAMPED: Final = logging.Formatter(
    "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
)
_STAMPED.converter = time.gmtime


# --- Pipes.


def redirect(stdout: int, stderr: int) -> None:
    """Make these pipes the stdout and stderr of this process, and /dev/null its stdin."""
    for number, fd in enumerate((os.open(os.devnull, os.O_RDONLY), stdout, stderr)):
        os.dup2(fd, number)
        os.close(fd)
    for number, name in enumerate(NAMES, 1):
        if fileno(getattr(sys, name)) != number:
            # An app or a test has replaced it, so that the output would be lost.
            errors = "strict" if number == 1 else "backslashreplace"
            raw = open(number, "w", encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
            setattr(sys, name, raw)
    entry_point.print_by_lines()


def fileno(stream: Any) -> int:
    """Return the descriptor of a stream; -1 if it has none."""
    try:
        return stream.fileno()
    except (AttributeError, OSError, ValueError):  # None, no file, or closed
        return -1


class Output:
    """The worker's ends of the stdout and stderr of one executor."""

    def __init__(self, stdout: int, stderr: int) -> None:
        self.fds = {stdout: 1, stderr: 2}
        """For each open descriptor, 1 if it reads stdout, 2 if stderr."""
        self._poll = select.poll()
        for fd in self.fds:
            os.set_blocking(fd, False)
            self._poll.register(fd, select.POLLIN)

    def ready(self) -> list[int]:
        """Return the descriptors that have something to read."""
        return [fd for fd, _ in self._poll.poll(0)]

    def drain(
        self, limit: int = DRAIN_BYTES, *, closing: Callable[[int], object] = lambda _: None
    ) -> list[tuple[int, bytes]]:
        """Return about `limit` bytes of unread output at most, as pairs of 1 or 2 and bytes.

        At its end of file, `closing` is called with a descriptor, which is then closed and removed.
        """
        found: list[tuple[int, bytes]] = []
        while limit > 0 and (ready := self.ready()):
            for fd in ready:
                if limit <= 0:
                    break
                if data := os.read(fd, READ_BYTES):
                    found.append((self.fds[fd], data))
                    limit -= len(data)
                else:
                    del self.fds[fd]
                    self._poll.unregister(fd)
                    closing(fd)
                    os.close(fd)
        return found

    def close(self) -> None:
        """Close the descriptors. A process that a handler left behind can print no more."""
        while self.fds:
            os.close(self.fds.popitem()[0])


class Forward:
    """Print on the worker's own stdout or stderr without blocking; thread-safe."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._lock = threading.RLock()
        self._backlog = bytearray()
        self.dropped = 0
        """Bytes that were dropped because the backlog was full."""
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    @property
    def pending(self) -> bool:
        """Return whether output waits until the descriptor is writable, and then for `flush`."""
        return bool(self._backlog)

    def add(self, data: bytes) -> None:
        """Print this after the backlog; drop it if the backlog would exceed BACKLOG_BYTES."""
        with self._lock:
            if self._backlog and len(self._backlog) + len(data) > BACKLOG_BYTES:
                self.dropped += len(data)
                return
            self._backlog += data
            self.flush()

    def flush(self) -> None:
        """Print as much of the backlog as possible without blocking; drop it if that fails."""
        with self._lock:
            while self._backlog and self._poll.poll(0):
                try:
                    # A pipe that poll reports as writable has room for PIPE_BUF bytes.
                    del self._backlog[: os.write(self.fd, self._backlog[: select.PIPE_BUF])]
                except OSError:
                    self._backlog.clear()


class Printer:
    """Print on this process's own stdout and stderr without waiting for a reader; thread-safe.

    `post` lets the thread of the loop make a call soon.
    """

    def __init__(
        self, loop: io_loop.IoLoop, post: Callable[[Callable[[], object]], object]
    ) -> None:
        self._loop, self._post = loop, post
        self._to = {number: Forward(number) for number in (1, 2)}

    def write(self, number: int, data: bytes) -> None:
        """Print on stdout (1) or stderr (2)."""
        if data:
            self._to[number].add(data)
            if self._to[number].pending:
                flush = functools.partial(self._flush, number)
                self._post(functools.partial(self._loop.write, number, flush))

    def _flush(self, number: int) -> None:
        self._to[number].flush()
        if not self._to[number].pending:
            self._loop.write(number, None)

    @contextlib.contextmanager
    def takes_log(self) -> Generator[None]:
        """Print this process's log through this printer while the block runs.

        The records of handlers are printed there too, so a slow reader must not delay jobs.
        """
        own: list[Any] = [
            each
            for each in logging.getLogger().handlers
            if _is_ours(each) and isinstance(each, logging.StreamHandler)
        ]
        before: list[tuple[logging.StreamHandler[Any], Any]] = []
        for handler in cast("list[logging.StreamHandler[Any]]", own):
            number = fileno(handler.stream)
            if number in self._to:
                stream = _LogStream(functools.partial(self.write, number))
                before.append((handler, handler.setStream(stream)))
        try:
            yield
        finally:
            for handler, stream in before:
                handler.setStream(stream)

    def record(self, pid: int, record: JsonDict) -> None:
        """Print a log record of an executor, or its lines as JSON."""
        if stream := record.get("stream"):
            for line in filter(str.strip, record["text"].split("\n")):
                data = logs.as_json(line, stream, pid).encode()
                self.write(2 if stream == NAMES[1] else 1, data)
        elif record["printed"]:
            extra = logs.allowed(record["fields"])
            logging.getLogger(record["name"]).log(
                record["level"], "%s", record["text"], extra=extra
            )


class _LogStream:
    """The stream of a log handler, which prints through a `Printer`."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write

    def write(self, text: str) -> int:
        """Print a text; return its length."""
        self._write(text.encode("utf-8", "backslashreplace"))
        return len(text)

    def flush(self) -> None:
        """Do nothing, since nothing is buffered here."""


def _is_ours(handler: logging.Handler) -> bool:
    """Return whether `entry_point.setup_logging` has made this handler."""
    return any(isinstance(each, logs.MaskSecrets) for each in handler.filters)


# --- Log records. A handler on the root logger would disable `logging.basicConfig` and the handler
# of last resort, so records that no handler prints are collected where they are created.


class Stream:
    """A text stream that passes each text to `add`, and prints it unless that returns True."""

    def __init__(self, stream: Any, add: Callable[[str | bytes], bool]) -> None:
        self.stream = stream
        self._add = add

    def write(self, data: Any) -> int:
        """Write a text; return its length."""
        if isinstance(data, str) and self._add(data):
            return len(data)
        return self.stream.write(data)

    def writelines(self, lines: Iterable[Any]) -> None:
        """Write several texts, or pieces of bytes."""
        for each in lines:
            self.write(each)

    @property
    def buffer(self) -> _Bytes:
        """Return the stream for bytes."""
        return _Bytes(self.stream.buffer, self._add)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def __iter__(self) -> Any:
        return iter(self.stream)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.flush()


class _Bytes(Stream):
    """The binary stream of a `Stream`."""

    def write(self, data: Any) -> int:
        """Write bytes; return their number."""
        return len(data) if self._add(bytes(memoryview(data))) else self.stream.write(data)


class LogSender(logging.Handler):
    """Replace the handler of `entry_point.setup_logging`, so that the worker prints the records."""

    def __init__(self, send: Callable[[logging.LogRecord], object], level: int) -> None:
        super().__init__(level)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record, best effort."""
        try:
            self._send(record)
        except Exception:  # noqa: BLE001  logging never raises into an app
            self.handleError(record)


def send_records(send: Send, key: Callable[[], int], *, by_job: bool = False) -> None:
    """Send the log records of this process from now on; call it once in an executor.

    `key` returns the key of the job whose handler logs. Values in `extra` are sent too. Records
    that the app's own logging prints reach the worker as output, and are not sent. With `by_job`
    only messages have a job, so records that the app prints past a `Stream` are sent as well.
    """

    def send_record(record: logging.LogRecord, *, printed: bool) -> None:
        fields = (logs.fields(record) or None) if printed else None
        text = _TEXT.format(copy.copy(record))  # a formatter changes it, and others use it later
        send(
            key(),
            message(record.name, text, record.levelno) | {"printed": printed, "fields": fields},
        )

    def prints(handler: logging.Handler) -> bool:
        stream = getattr(handler, "stream", None)
        goes_out = isinstance(stream, Stream) if by_job else fileno(stream) in (1, 2)
        return goes_out or isinstance(handler, LogSender)

    def created(record: logging.LogRecord) -> None:
        if not _is_printed(record, prints):
            send_record(record, printed=False)

    root = logging.getLogger()
    own = [each for each in root.handlers if _is_ours(each)]
    for handler in own:
        root.removeHandler(handler)
    if own:
        level = min(handler.level for handler in own)
        root.addHandler(LogSender(functools.partial(send_record, printed=True), level))
    logging.setLogRecordFactory(_factory(created))


def message(name: str, text: str, level: int = logging.INFO, **more: Any) -> JsonDict:
    """Return the message for a log record, or for printed lines."""
    return {"level": level, "name": name, "text": text, "printed": False, "fields": None} | more


def _factory(created: Callable[[logging.LogRecord], object]) -> Callable[..., logging.LogRecord]:
    """Return a record factory that calls `created`, best effort, for each record."""
    make = logging.getLogRecordFactory()

    def made(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        with contextlib.suppress(Exception):
            created(record)
        return record

    return made


def _is_printed(record: logging.LogRecord, prints: Callable[[logging.Handler], bool]) -> bool:
    """Return whether any handler that gets this record `prints` it."""
    logger: logging.Logger | None = logging.getLogger(record.name)
    found: list[logging.Handler] = []
    while logger is not None:
        found += logger.handlers
        logger = logger.parent if logger.propagate else None
    if not found and logging.lastResort is not None:
        found = [logging.lastResort]
    return any(record.levelno >= each.level and prints(each) for each in found)


class JobOutput:
    """Collect the lines that handlers print, for the job in whose context they are printed.

    `key` returns the key of that job, or 0. `send` also gets the stream on which the worker has to
    print the lines as JSON; it is empty if they were printed here.
    """

    def __init__(self, key: Callable[[], int], send: Send, *, takes_bytes: bool = False) -> None:
        """Collect bytes too if `takes_bytes`; else output without a job is printed here."""
        self._key = key
        self._send = send
        self._takes_bytes = takes_bytes
        self._lock = threading.Lock()
        self._rest: dict[tuple[int, str, int], str] = {}
        """Incomplete lines by job key, stream and thread."""
        self._as_json = logs.are_json()

    def add(self, stream: str, text: str | bytes) -> bool:
        """Send the lines that this text completes; return whether the worker prints them."""
        key = self._key()
        if isinstance(text, bytes):
            if not self._takes_bytes:
                return False
            text = text.decode("utf-8", "backslashreplace")
        if not key:
            return False
        place = key, stream, threading.get_ident()
        with self._lock:
            whole = self._rest.pop(place, "") + text
            lines, ending, rest = whole.rpartition("\n")
            if len(rest) > LINE:
                lines, ending, rest = whole, "\n", ""
            if rest:
                self._rest[place] = rest
        if ending:
            self._send_lines(key, lines, stream)
        return self._as_json

    def add_record(self, record: logging.LogRecord) -> None:
        """Send a record that no handler prints."""
        if key := self._key():
            text = _STAMPED.format(copy.copy(record))
            self._send(key, message(record.name, text, record.levelno))

    def end(self, key: int) -> None:
        """Send the incomplete lines of a job that has ended."""
        with self._lock:
            left = [(place[1], self._rest.pop(place)) for place in [*self._rest] if place[0] == key]
        for stream, rest in left:
            self._send_lines(key, rest, stream)

    def _send_lines(self, key: int, text: str, stream: str) -> None:
        on = stream if self._as_json else ""
        for start in range(0, len(text) or 1, PIECE):
            part = text[start : start + PIECE]
            self._send(key, message(logs.PRINT_LOGGER, part, stream=on))


def take_streams(output: JobOutput) -> None:
    """Pass this process's output to `output` from now on; call it before `send_records`.

    The streams still print the output of no job, and all output unless the logs are JSON.
    """
    for name in NAMES:
        setattr(sys, name, Stream(getattr(sys, name), functools.partial(output.add, name)))


# --- In the worker's own process.

_outputs: ContextVar[JobOutput | None] = ContextVar("queue_workflows_output", default=None)


class _Captures:
    """The process's stdout, stderr and log records while any of its workers captures."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outputs: list[JobOutput] = []
        self._streams: dict[str, Stream] = {}
        self._made: Callable[..., logging.LogRecord] | None = None
        self._make: Callable[..., logging.LogRecord] = logging.LogRecord

    def begin(self, output: JobOutput) -> None:
        with self._lock:
            self._outputs = [*self._outputs, output]
            for name in NAMES:
                stream: Any = getattr(sys, name)
                if stream is not None and not isinstance(stream, Stream):
                    self._streams[name] = found = Stream(stream, functools.partial(self._add, name))
                    setattr(sys, name, found)
            if logging.getLogRecordFactory() is not self._made:
                self._make = logging.getLogRecordFactory()
                self._made = _factory(self._record)
                logging.setLogRecordFactory(self._made)

    def end(self, output: JobOutput) -> None:
        with self._lock:
            self._outputs = [each for each in self._outputs if each is not output]
            if self._outputs:
                return
            if logging.getLogRecordFactory() is self._made:
                logging.setLogRecordFactory(self._make)
            for name, stream in self._streams.items():
                if getattr(sys, name) is stream:
                    setattr(sys, name, stream.stream)
            self._streams.clear()

    def _output(self) -> JobOutput | None:
        """Return the output of this thread's worker, or of the only worker that captures."""
        outputs = self._outputs
        return _outputs.get() or (outputs[0] if len(outputs) == 1 else None)

    def _add(self, stream: str, data: str | bytes) -> bool:
        """Capture output, best effort: printing never fails because of it."""
        with contextlib.suppress(Exception):
            if (output := self._output()) is not None:
                return output.add(stream, data)
        return False

    def _record(self, record: logging.LogRecord) -> None:
        """Capture a record, except the engine's own, which the job's history has already."""
        name: Any = record.name
        if not name or name.partition(".")[0] == ENGINE or (output := self._output()) is None:
            return
        if not _is_printed(record, lambda each: isinstance(getattr(each, "stream", None), Stream)):
            output.add_record(record)


_captures: Final = _Captures()


@contextlib.contextmanager
def captured(output: JobOutput) -> Generator[None]:
    """Pass output and records of this thread, and of threads it starts, to `output` in a block."""
    token = _outputs.set(output)
    _captures.begin(output)
    try:
        yield
    finally:
        _outputs.reset(token)
        _captures.end(output)
