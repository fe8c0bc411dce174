"""Redirect the stdout and stderr of an executor to pipes that the worker reads.

So all that a handler printed before it was killed is kept, whichever code printed it. A handler
that prints faster than the worker reads waits, as it would for a slow terminal.

There are two pairs of pipes, for jobs with odd and with even keys: the next job may begin before
the worker has read the outcome of the one before, and so it knows whose output is whose.
"""

from __future__ import annotations

import logging
import math
import os
import select
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from queue_workflows.runtime import clock, entry_point, log_format, printed_lines
from queue_workflows.types import JsonDict

READ_BYTES: Final = 64 * 1024
DRAIN_BYTES: Final = 256 * 1024
AGAIN_S: Final = 0.05
"""Seconds until a reader of our own output that is too slow is tried again."""
BACKLOG_BYTES: Final = 64 * 1024
"""Bytes that wait for a reader of the worker's own stdout or stderr; more are dropped."""


def redirect(stdout: int, stderr: int) -> None:
    """Make these pipes the stdout and stderr of this process, and /dev/null its stdin."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, number in ((nothing, 0), (stdout, 1), (stderr, 2)):
        os.dup2(fd, number)
        os.close(fd)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if fileno(getattr(sys, name)) != number:
            # An app or a test has replaced it; what is printed there would reach nobody.
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

    def __init__(self, *pipes: int) -> None:
        """`pipes`: stdout and stderr for odd keys, then for even ones."""
        self.fds = {fd: (1 - at // 2, at % 2 + 1) for at, fd in enumerate(pipes)}
        """What each open descriptor reads: of which keys (1: odd), and 1 for stdout or 2."""
        self._poll = select.poll()
        for fd in self.fds:
            os.set_blocking(fd, False)
            self._poll.register(fd, select.POLLIN)

    def readable(self) -> bool:
        """Return whether something waits, or a descriptor is at its end."""
        return bool(self._poll.poll(0))

    def drain(
        self, limit: int = DRAIN_BYTES, *, closing: Callable[[int], object] = lambda _: None
    ) -> list[tuple[tuple[int, int], bytes]]:
        """Return what waits, about `limit` bytes at most: a value of `fds` and the bytes.

        A descriptor at the end of its file is closed, after a call of `closing`, and leaves `fds`.
        """
        found: list[tuple[tuple[int, int], bytes]] = []
        for fd, source in [*self.fds.items()]:
            while limit > 0:
                try:
                    data = os.read(fd, READ_BYTES)
                except BlockingIOError:
                    break
                if not data:
                    del self.fds[fd]
                    self._poll.unregister(fd)
                    closing(fd)
                    os.close(fd)
                    break
                found.append((source, data))
                limit -= len(data)
        return found

    def close(self) -> None:
        """Close the descriptors. A process that a handler left behind can print no more."""
        while self.fds:
            os.close(self.fds.popitem()[0])


class Forward:
    """Print what executors printed on the worker's own stdout or stderr, without ever waiting."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._backlog: deque[bytes] = deque()
        self._waiting = 0
        self.dropped = 0
        """Bytes that were dropped, since nobody read."""
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    @property
    def pending(self) -> bool:
        """Return whether something waits for `flush`, once the descriptor can be written."""
        return bool(self._backlog)

    def add(self, data: bytes) -> None:
        """Print this, after what waits; drop it if too much waits."""
        if self._waiting and self._waiting + len(data) > BACKLOG_BYTES:
            self.dropped += len(data)
            return
        self._backlog.append(data)
        self._waiting += len(data)
        self.flush()

    def flush(self) -> None:
        """Print what waits, as far as it is taken at once; drop all of it if printing fails."""
        while self._backlog and self._poll.poll(0):
            data = self._backlog[0]
            try:
                # A pipe that can be written has room for as many bytes.
                sent = os.write(self.fd, data[: select.PIPE_BUF])
            except OSError:
                self._backlog.clear()
                self._waiting = 0
                return
            self._waiting -= sent
            if sent == len(data):
                self._backlog.popleft()
            else:
                self._backlog[0] = data[sent:]


class Printer:
    """Prints on this process's own stdout and stderr, and waits for no reader."""

    def __init__(self, wake_at: Callable[[float], object]) -> None:
        self._wake_at = wake_at
        self._to = {number: Forward(number) for number in (1, 2)}
        self.again_at = math.inf
        """When to `flush`; inf: nothing waits for a reader."""

    def write(self, number: int, data: bytes) -> None:
        """Print on stdout (1) or stderr (2)."""
        if data:
            self._to[number].add(data)
            if self._to[number].pending:
                self.again_at = clock.boot_s() + AGAIN_S
                self._wake_at(self.again_at)

    def record(self, pid: int, record: JsonDict) -> None:
        """Print a record of the log of an executor, or lines as JSON."""
        stream = record.get("stream")
        if stream:
            number = 1 if stream == printed_lines.STREAMS[1] else 2
            for line in record["text"].split("\n"):
                if line.strip():
                    self.write(number, printed_lines.as_json(line, stream, pid).encode())
        elif record["printed"]:
            extra = log_format.allowed(record["fields"])
            logging.getLogger(record["name"]).log(
                record["level"], "%s", record["text"], extra=extra
            )

    def flush(self, now: float) -> None:
        """Print what has waited."""
        for each in self._to.values():
            each.flush()
        pending = any(each.pending for each in self._to.values())
        self.again_at = now + AGAIN_S if pending else math.inf
