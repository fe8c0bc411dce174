"""Define the frames between a worker and its executors.

A frame is a header (length of the body, kind, key of the job), then the body. The rows of jobs and
their results stay JSON texts: the worker passes them on without parsing them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
from collections.abc import Iterator
from typing import Any, Final

from queue_workflows import errors
from queue_workflows.dag import policy
from queue_workflows.engine import outcomes

HEADER: Final = struct.Struct("<IBI")
_COMPLETED: Final = struct.Struct("<diII")
"""Seconds, peak memory in MB (-1: unknown), bytes of the logged error and of the inputs."""
MAX_BYTES: Final = 256 * 1024 * 1024
"""Bytes of one body. A job has up to three values of 64 MiB each, the loader's limit."""
SIZE: Final = 256 * 1024
"""Bytes of one read."""
LOST: Final = 70
"""Exit code of an executor whose channel is closed: by its worker's end, or by its own handler."""

# To an executor.
RUN_TASK: Final = b"T"[0]
"""Run an ingest job; the body is its row as a JSON text."""
RUN_NODE: Final = b"N"[0]
ANSWER: Final = b"A"[0]
"""The answer to a question: its number, then `value` or `error`."""
ANNOUNCE: Final = b"H"[0]
"""Call `on_node_completed` with the value of a job that was recorded: its `job` and `run`."""
FORGET: Final = b"F"[0]
"""Drop the value of a job: no ANNOUNCE follows."""
LOAD: Final = b"L"[0]
"""Load the `model` for the jobs to come; without one, unload: `idle_only` or at once."""
INTERRUPT: Final = b"I"[0]
"""The handler of a job is to end, in an executor for many; the body is the reason."""
QUIT: Final = b"Q"[0]
"""End the process after what came before."""

# From an executor.
COMPLETED: Final = b"D"[0]
"""A job is completed; see `completed_body`."""
ENDED: Final = b"E"[0]
"""A job has ended otherwise; see `ended_body`."""
PROGRESS: Final = b"P"[0]
"""The handler is active; the body is its progress as a JSON text, or empty."""
CURSOR: Final = b"C"[0]
"""So many items of a cursor are done: name, key and position."""
ASK: Final = b"K"[0]
"""The handler asks: number, what (`rows`, `out_dir`, `context`, a request about a step)."""
LOG: Final = b"G"[0]
"""A record of the app's log, or lines that it printed; see `log_sender` and `job_output`."""
WAITS: Final = b"W"[0]
"""The handler of a job waits for others in the executor; STARTED tells when it starts."""
STARTED: Final = b"S"[0]
ANNOUNCED: Final = b"h"[0]
"""The hook of an ANNOUNCE has ended."""
MODEL: Final = b"m"[0]
"""The loaded model, the one being loaded, and their times; see `model_cache`."""
CHANGED: Final = b"d"[0]
"""A LOAD has ended; the body is its error, or null."""
EVENT: Final = b"e"[0]
"""An event for the history of a node: its type and seconds."""
READY: Final = b"l"[0]
"""The executor has loaded the app itself: what it registered, or the error."""

HIGH_FDS: Final = (900, 200)
"""The channels get descriptors from here on, beyond those that a handler may close or write to."""
_COMPACT: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=str).encode


class ProtocolError(errors.QueueWorkflowsError, RuntimeError):
    """The peer sent bytes that are no frame; one line of text."""


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
        return json.loads(body.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"garbage in the channel ({error}): {body[:40]!r}") from None


class Frames:
    """Cut received bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def add(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """Yield kind, key and body of each frame that is complete now. Raises `ProtocolError`."""
        buffer, at, size = self._buffer, 0, HEADER.size
        buffer += data
        try:
            while len(buffer) - at >= size:
                length, kind, key = HEADER.unpack_from(buffer, at)
                if length > MAX_BYTES:
                    raise ProtocolError(f"garbage in the channel: {bytes(buffer[at : at + 40])!r}")
                end = at + size + length
                if len(buffer) < end:
                    return
                body, at = bytes(buffer[at + size : end]), end
                yield kind, key, body
        finally:
            del buffer[:at]


def completed_body(outcome: outcomes.Outcome) -> bytes:
    """Return a completed outcome: how it went, what a node received, and the result."""
    error = outcome.error.encode("utf-8", "surrogatepass")
    received = (outcome.resolved_inputs or "").encode("utf-8", "surrogatepass")
    peak = -1 if outcome.vm_rss_mb_peak is None else outcome.vm_rss_mb_peak
    head = _COMPLETED.pack(outcome.seconds, peak, len(error), len(received))
    return head + error + received + outcome.result.encode("utf-8", "surrogatepass")


def completed_of(body: bytes) -> outcomes.Outcome:
    """Return the outcome of `completed_body`. Raises ValueError."""
    if len(body) < (at := _COMPLETED.size):
        raise ProtocolError(f"garbage in the channel: {body[:40]!r}")
    seconds, peak, error, received = _COMPLETED.unpack_from(body)
    text = body[at:].decode("utf-8", "surrogatepass")
    if not (error or received):
        return outcomes.Outcome(
            "completed", seconds, text, vm_rss_mb_peak=None if peak < 0 else peak
        )
    parts = body[at : at + error], body[at + error : at + error + received]
    told, inputs = (each.decode("utf-8", "surrogatepass") for each in parts)
    return outcomes.Outcome(
        "completed",
        seconds,
        body[at + error + received :].decode("utf-8", "surrogatepass"),
        told,
        resolved_inputs=inputs or None,
        vm_rss_mb_peak=None if peak < 0 else peak,
    )


def ended_body(outcome: outcomes.Outcome) -> bytes:
    """Return an outcome that is not `completed`."""
    raised = outcome.raised
    return encoded(
        {
            "kind": outcome.kind,
            "seconds": outcome.seconds,
            "error": outcome.error,
            "detail": outcome.detail,
            "received": outcome.resolved_inputs,
            "rss_mb": outcome.vm_rss_mb_peak,
            "names": sorted(raised.names),
            "wish": raised.wish,
            "after_s": raised.after_s,
            "task": None if outcome.task is None else dict(outcome.task),
            "cursors": outcome.cursors,
        }
    )


def ended_of(body: bytes) -> outcomes.Outcome:
    """Return the outcome of `ended_body`. Raises `ProtocolError`."""
    given = decoded(body)
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


def high(fd: int) -> int:
    """Move a descriptor beyond those of a handler, closed on exec; return the new one."""
    for least in HIGH_FDS:
        with contextlib.suppress(OSError):  # beyond the limit of open files
            found = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, least)
            os.close(fd)
            return found
    os.set_inheritable(fd, False)
    return fd
