"""Define the frames between a worker and its executors, and an executor's end of their socket.

A frame is a header (length of the body, kind, key of the job), then the body. The rows of jobs and
their results stay JSON texts: the worker passes them on without parsing them.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import importlib
import math
import os
import re
import select
import signal
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final, TypeAlias, cast

from queue_workflows import errors
from queue_workflows.claim import outcomes
from queue_workflows.dag import payload, policy
from queue_workflows.runtime import stored_json
from queue_workflows.types import JsonDict, Row, Unreadable

Frame: TypeAlias = "tuple[int, int, bytes]"
"""The kind, the key of the job (0 for none), and the body."""
HEADER: Final = struct.Struct("<IBI")
_COMPLETED: Final = struct.Struct("<diII")
"""Seconds, peak memory in MB (-1 if unknown), sizes in bytes of the logged error and the inputs."""
MAX_BYTES: Final = 256 * 1024 * 1024
"""The most bytes of one body. A job has up to three values of 64 MiB each, the loader's limit."""
SIZE: Final = 256 * 1024
"""The most bytes of one read."""
TIME: Final = "\0time"
"""Marks a time in an answer; stored JSON never has a NUL."""
LOST: Final = 70
"""Exit code of an executor whose channel was closed, by its worker's end or by its own handler."""

# Kinds are control characters that text does not contain, so that stray text is noticed at once.
# To an executor.
RUN_TASK: Final = 1  # Run an ingest job; the body is its row as a JSON text.
RUN_NODE: Final = 2
ANSWER: Final = 3  # Answers a question, whose number takes the place of the key.
ANNOUNCE: Final = 4  # Call `on_node_completed` with `job` and `run`; without them drop the value.
DRAINED: Final = 5  # The worker has read the output that a PRINTED announced.
LOAD: Final = 6  # Load the `model` for later jobs, or unload it, at once or if `idle_only`.
INTERRUPT: Final = 7  # End a handler, in an executor with many jobs; the body is the reason.
QUIT: Final = 8  # End the process after what came before.
# From an executor.
COMPLETED: Final = 14  # See `completed_body`.
ENDED: Final = 15  # A job has ended otherwise; see `ended_body`.
PROGRESS: Final = 16  # The handler is active; the body is its progress as a JSON text, or empty.
CURSOR: Final = 17  # The name, key and position of a cursor.
ASK: Final = 18  # A question: number, kind (`rows`, `out_dir`, `context`, `step`) and details.
LOG: Final = 19  # A record of the app's log, or lines that it printed; see `job_output`.
WAITS: Final = 20  # The handler of a job waits for others in the executor, until STARTED.
STARTED: Final = 21
ANNOUNCED: Final = 22  # The hook of an ANNOUNCE has ended.
MODEL: Final = 23  # The loaded model, the one being loaded, and their times; see `model_cache`.
CHANGED: Final = 24  # A LOAD has ended; the body is its error, or null.
EVENT: Final = 25  # An event for the history of a node: its type and seconds.
READY: Final = 26  # The executor can run jobs, or the body says why the app cannot be loaded.
PRINTED: Final = 27  # The pipes may hold output of the job whose outcome follows.
LEAVES: Final = 28
"""The executor has to be replaced, as it cannot restore the state that the body names.

It does not run the jobs that were sent to it since, unless async jobs share it."""

OF_EXECUTOR: Final = frozenset([ANNOUNCED, MODEL, CHANGED, READY, LEAVES])
"""Kinds that concern an executor, not a job."""
_KINDS: Final = frozenset([*range(RUN_TASK, QUIT + 1), *range(COMPLETED, LEAVES + 1)])
_TEXT, _NUMBER, _NONE = (str,), (int, float), (type(None),)
_MEMBERS: Final[dict[int, dict[Any, tuple[type, ...]]]] = {
    ENDED: {
        "kind": _TEXT, "seconds": _NUMBER, "error": _TEXT, "detail": _TEXT + _NONE,
        "received": _TEXT + _NONE, "rss_mb": (int, *_NONE), "names": (list,), "wish": _TEXT,
        "after_s": _NUMBER + _NONE, "task": (dict, *_NONE), "cursors": (list,),
    },
    CURSOR: {0: _TEXT, 1: _TEXT, 2: (int,)},
    ASK: {"no": (int,), "what": _TEXT},
    LOG: {
        "level": (int,), "name": _TEXT, "text": _TEXT, "printed": (bool,),
        "fields": (dict, *_NONE),
    },
    MODEL: {
        "current": _TEXT + _NONE, "loading": _TEXT + _NONE, "load_s": _NUMBER, "held_s": _NUMBER,
        "vram_gb": _NUMBER,
    },
    EVENT: {0: _TEXT, 1: _NUMBER + _NONE},
    READY: {"text": _TEXT},
}  # fmt: skip
"""The types of the members of bodies. They are checked, as a handler may write to the channel."""
_BOUNDED: Final = ("no", "seconds", "load_s", "held_s", "vram_gb")
"""Members that must be at least 0, finite, and small enough for a header."""
_ENDS: Final = frozenset({"failed", "parked", "cancelled", "snoozed", "waiting"})

HIGH_FDS: Final = (900, 200)
"""The least descriptors of channels, beyond any that a handler may close or write to."""
_COMPACT: Final = payload.Encoder(ensure_ascii=False, separators=(",", ":"), default=str).encode


class ProtocolError(errors.QueueWorkflowsError, RuntimeError):
    """The peer sent bytes that are not a valid frame; the text is one line."""


def frame(kind: int, key: int, body: bytes) -> bytes:
    """Return a frame."""
    if len(body) > MAX_BYTES:
        raise ProtocolError(f"a message of {len(body)} bytes, more than {MAX_BYTES}")
    return HEADER.pack(len(body), kind, key) + body


def encoded(value: Any) -> bytes:
    """Return a value as JSON."""
    return _COMPACT(value).encode("utf-8", "surrogatepass")


def decoded(body: bytes) -> Any:
    """Return the value of a JSON body. Raises `ProtocolError`."""
    try:
        return stored_json.decode(body.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"garbage in the channel ({error}): {body[:40]!r}") from None


def checked(kind: int, body: bytes) -> Any:
    """Return the value of a JSON body of this kind. Raises `ProtocolError`."""
    found = decoded(body)
    try:
        wrong = [name for name, types in _MEMBERS[kind].items() if type(found[name]) not in types]
        numbers = [name for name in _BOUNDED if not wrong and name in _MEMBERS[kind]]
        wrong += [name for name in numbers if not 0 <= found[name] < 2**32]
    except (TypeError, LookupError):
        wrong = ["its members"]
    if wrong:
        raise ProtocolError(f"garbage in the channel ({wrong[0]}): {body[:40]!r}")
    return found


class Frames:
    """Cut received bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._at: int = 0

    def add(self, data: bytes) -> Iterator[Frame]:
        """Yield kind, key and body of each frame that is complete now. Raises `ProtocolError`.

        What handles a frame may add more: it is then given the frames behind it.
        """
        buffer, size = self._buffer, HEADER.size
        buffer += data
        try:
            while len(buffer) - (at := self._at) >= size:
                length, kind, key = HEADER.unpack_from(buffer, at)
                if length > MAX_BYTES or kind not in _KINDS:
                    raise ProtocolError(f"garbage in the channel: {bytes(buffer[at : at + 40])!r}")
                end = at + size + length
                if len(buffer) < end:
                    return
                self._at = end
                yield kind, key, bytes(buffer[at + size : end])
        finally:
            del buffer[: self._at]
            self._at = 0


def completed_body(outcome: outcomes.Outcome) -> bytes:
    """Return the body of a completed outcome, with a node's inputs and the result."""
    error = outcome.error.encode("utf-8", "surrogatepass")
    received = (outcome.resolved_inputs or "").encode("utf-8", "surrogatepass")
    peak = -1 if outcome.vm_rss_mb_peak is None else outcome.vm_rss_mb_peak
    head = _COMPLETED.pack(outcome.seconds, peak, len(error), len(received))
    return head + error + received + outcome.result.encode("utf-8", "surrogatepass")


def completed_of(body: bytes) -> outcomes.Outcome:
    """Return the outcome of `completed_body`. Raises `ProtocolError` or ValueError."""
    if len(body) < (at := _COMPLETED.size):
        raise ProtocolError(f"garbage in the channel: {body[:40]!r}")
    seconds, peak, error, received = _COMPLETED.unpack_from(body)
    if not 0 <= seconds < math.inf:
        raise ProtocolError(f"garbage in the channel: a job of {seconds} seconds")
    inputs_at, result_at = at + error, at + error + received
    parts = body[at:inputs_at], body[inputs_at:result_at], body[result_at:]
    logged, inputs, result = (each.decode("utf-8", "surrogatepass") for each in parts)
    rss_mb = None if peak < 0 else peak
    return outcomes.Outcome(
        "completed", seconds, result, logged, resolved_inputs=inputs or None, vm_rss_mb_peak=rss_mb
    )


def ended_body(outcome: outcomes.Outcome) -> bytes:
    """Return the body of an outcome other than `completed`."""
    raised, task = outcome.raised, outcome.task
    found = {
        "kind": outcome.kind, "seconds": outcome.seconds, "error": outcome.error,
        "detail": outcome.detail, "received": outcome.resolved_inputs,
        "rss_mb": outcome.vm_rss_mb_peak, "names": sorted(raised.names), "wish": raised.wish,
        "after_s": raised.after_s, "task": None if task is None else dict(task),
        "cursors": outcome.cursors,
    }  # fmt: skip
    return encoded(found)


def ended_of(body: bytes) -> outcomes.Outcome:
    """Return the outcome of `ended_body`. Raises `ProtocolError`, ValueError or TypeError."""
    given = checked(ENDED, body)
    if given["kind"] not in _ENDS:
        raise ProtocolError(f"garbage in the channel: a job cannot end {given['kind'][:40]!r}")
    return outcomes.Outcome(
        given["kind"],
        given["seconds"],
        error=given["error"],
        detail=given["detail"],
        resolved_inputs=given["received"],
        vm_rss_mb_peak=given["rss_mb"],
        raised=policy.Raised(frozenset(given["names"]), given["wish"], given["after_s"]),
        task=given["task"],
        cursors=tuple((name, key, at) for name, key, at in given["cursors"]),
    )


def tagged(row: Row) -> JsonDict:
    """Return a row for an answer in JSON; times are marked, and an `Unreadable` becomes None."""
    found = dict(row)
    for name, value in row.items():
        if isinstance(value, datetime.datetime):
            found[name] = {TIME: value.isoformat()}
        elif isinstance(value, Unreadable):
            found[name] = None
    return found


def timed(row: Row) -> Row:
    """Return a row from an answer, with marked times converted back."""
    found = dict(row)
    for name, value in row.items():
        if isinstance(value, dict) and isinstance(text := cast("Row", value).get(TIME), str):
            found[name] = datetime.datetime.fromisoformat(text)
    return found


def high(fd: int) -> int:
    """Move a descriptor to a high number, closed on exec; return the new one."""
    for least in HIGH_FDS:
        with contextlib.suppress(OSError):  # beyond the limit of open files
            found = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, least)
            os.close(fd)
            return found
    os.set_inheritable(fd, False)
    return fd


# --- In an executor, or a thread of the worker's own process that takes its place.

signals: Final[Any] = importlib.import_module("_signal")
"""Its functions, unlike those of `signal`, do not convert signals to enum members. For an empty
job, that conversion took longer than everything else."""
sigmask: Final[Callable[[int, Collection[int]], set[int]]] = signals.pthread_sigmask
CATCHABLE: Final = sorted({*map(int, signal.valid_signals())} - {signal.SIGKILL, signal.SIGSTOP})
_seen: Final[list[Any]] = [[], []]
"""The signal handlers at the last call of `handled_signals`, and its result."""


def handled_signals() -> list[int]:
    """Return the signals that have a handler in Python, which may raise.

    Blocking all signals takes longer, since each number is converted.
    """
    handlers = [*map(signals.getsignal, CATCHABLE)]
    if handlers != _seen[0]:
        pairs = zip(CATCHABLE, handlers, strict=True)
        _seen[:] = handlers, [each for each, found in pairs if callable(found)]
    return _seen[1]


class Channel:
    """An executor's end of the socket to its worker; any thread may send, the main thread receives.

    The app's signal handlers run on the main thread and may raise. So that thread blocks signals
    while it sends or receives, but not while it waits for data.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)
        self._end = end
        self._frames = Frames()
        self._lock = threading.RLock()
        self._main = threading.main_thread().ident
        self._pid = os.getpid()
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def send(self, kind: int, key: int, body: bytes = b"") -> None:
        """Send a frame; wait until the socket has room for it. Raises ConnectionError."""
        self.send_all(frame(kind, key, body))

    def send_all(self, data: bytes, *, blocked: bool = False) -> None:
        """Send frames. In a process that a handler has forked, do nothing.

        `blocked` means that the caller has blocked signals and checked the process.
        """
        if not blocked and os.getpid() != self._pid:
            # A forked child's messages would mix with ours. libc's fork() calls no Python hook.
            return
        with self._lock:
            if blocked or threading.get_ident() != self._main:
                self._send(data)
                return
            # Changing the mask may call the handler of a pending signal, which may raise.
            mask = sigmask(signal.SIG_BLOCK, ())
            try:
                sigmask(signal.SIG_SETMASK, handled_signals())
                self._send(data)
            finally:
                sigmask(signal.SIG_SETMASK, mask)

    def _send(self, data: bytes) -> None:
        try:
            self._end.sendall(data)
        except OSError as error:
            raise ConnectionError(f"the channel is lost: {error.strerror}") from None

    def receive(self) -> list[Frame]:
        """Wait for frames and return them. Raises ConnectionError at the end.

        If an app's signal handler raises here, no data is lost.
        """
        while True:
            if os.getpid() != self._pid:
                os._exit(0)  # a handler forked this process, whose parent has the channel
            try:
                sigmask(signal.SIG_SETMASK, handled_signals())
                found = self.receive_now(socket.MSG_DONTWAIT)
            except BlockingIOError:
                found = None
            finally:
                sigmask(signal.SIG_SETMASK, ())
            if found:
                return found
            if found is None:
                self._poll.poll()

    def receive_now(self, flags: int = 0) -> list[Frame]:
        """Receive once, and return the complete frames. Raises ConnectionError at the end.

        With the flag MSG_DONTWAIT it raises BlockingIOError if there is no data.
        """
        try:
            data = self._end.recv(SIZE, flags)
        except BlockingIOError:
            raise
        except OSError as error:
            raise ConnectionError(f"the channel is lost: {error.strerror}") from None
        if not data:
            raise ConnectionError("the worker has closed the channel, or has ended")
        return [*self._frames.add(data)]


def answer_of(body: bytes) -> Any:
    """Return the value of an ANSWER; raise `UnreadableRow` or `DatabaseUnavailable`."""
    answer = decoded(body)
    if answer["error"] is not None:
        kind = errors.UnreadableRow if answer["is_final"] else errors.DatabaseUnavailable
        raise kind(answer["error"])
    return answer["value"]


_TOKEN: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{},:]')


def load_row(body: bytes) -> Row:
    """Return a claimed job; a column that cannot be loaded is an `Unreadable`."""
    row = stored_json.load_json(body)
    if not isinstance(row, Unreadable):
        return row
    found: Row = {}
    for name, text in _members(body):
        found[name] = stored_json.load_json(text)
    if isinstance(found.get("context"), Unreadable):
        found["context"] = None  # the handler asks for the members that it needs
    return found


def _members(body: bytes) -> list[tuple[str, bytes]]:
    """Split a JSON object into its names and the texts of their values."""
    found: list[tuple[str, bytes]] = []
    name: str | None = None
    begin = depth = 0
    for token in _TOKEN.finditer(body):
        mark = token[0]
        if depth == 1 and name is not None and mark in (b",", b"}"):
            found.append((name, body[begin : token.start()].strip()))
            name = None
        if mark in (b"{", b"["):
            depth += 1
        elif mark in (b"}", b"]"):
            depth -= 1
        elif depth == 1 and mark == b":":
            begin = token.end()
        elif depth == 1 and name is None and mark != b",":
            name = stored_json.decode(mark.decode())
    return found
