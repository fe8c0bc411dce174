"""Send and receive messages on a socket: blocking in an executor, never blocking in a worker.

An app's signal handler may raise an exception between any two operations of the interpreter. So
each system call and the record of what it did are one call of C code, `deque.extend(map(...))`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import threading
from collections import deque
from typing import Final

from queue_workflows.executor import codec, protocol

SIZE: Final = 64 * 1024
"""Bytes of a receive buffer; it grows for a larger message, and shrinks after it."""
MAX_FDS: Final = 8
LOST: Final = 70
"""Exit code of an executor whose channel is closed: by its worker's end, or by its own handler."""
HIGH_FDS: Final = (900, 200)
"""The channels get descriptors from here on, beyond those that a handler may close or write to."""


def high(fd: int) -> int:
    """Move a descriptor beyond those of a handler, closed on exec; return the new one."""
    for least in HIGH_FDS:
        with contextlib.suppress(OSError):  # beyond the limit of open files
            found = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, least)
            os.close(fd)
            return found
    os.set_inheritable(fd, False)
    return fd


class _Inbox:
    """The received bytes that are not taken as messages yet, in one buffer, parsed in place."""

    def __init__(self) -> None:
        self._buffer: bytearray = bytearray(SIZE)
        self._start = self._end = 0
        self._counts: deque[int] = deque()
        """Bytes of system calls that `_end` does not include yet."""
        self._error: protocol.ProtocolError | None = None

    def room(self) -> memoryview:
        """Return free space, at least one byte; the caller releases it."""
        self._settle()
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._buffer) > SIZE:
                self._buffer = bytearray(SIZE)
        elif self._end == len(self._buffer):
            waiting = bytes(memoryview(self._buffer)[self._start : self._end])
            buffer = bytearray(waiting) + bytearray(max(SIZE, self._missing()))
            self._buffer, self._start, self._end = buffer, 0, len(waiting)
        return memoryview(self._buffer)[self._end :]

    def _settle(self) -> None:
        while self._counts:
            self._end += self._counts.popleft()

    def _missing(self) -> int:
        """Return how many bytes to make room for: what is missing, at most as much as is here."""
        here = self._end - self._start
        if here < codec.HEADER.size:
            return 0
        needed = codec.length_of(self._buffer, self._start) + codec.HEADER.size - here
        # A header alone must not make this process take the memory that it announces.
        return min(needed, here)

    def receive(self, end: socket.socket) -> bool:
        """Receive once; return False at the end of the stream."""
        with self.room() as room:
            self._counts.extend(map(end.recv_into, (room,)))
        return self._counts[-1] > 0

    def add(self, data: bytes) -> None:
        """Add bytes that were received elsewhere."""
        while data:
            with self.room() as room:
                size = min(len(room), len(data))
                room[:size] = data[:size]
            self._counts.append(size)
            data = data[size:]

    def take(self) -> list[protocol.Message]:
        """Return the complete messages; raise `ProtocolError` for garbage after them, next time."""
        self._settle()
        if self._error is not None:
            raise self._error
        found: list[protocol.Message] = []
        with memoryview(self._buffer) as view:
            try:
                self._take(view, found)
            except protocol.ProtocolError as error:
                self._error = error
                if not found:
                    raise
        return found

    def _take(self, view: memoryview, found: list[protocol.Message]) -> None:
        start, size = self._start, codec.HEADER.size
        while self._end - start >= size:
            end = start + size + codec.length_of(view, start)
            if end > self._end:
                break
            with view[start + size : end] as body:
                found.append(codec.decode(body))
            start = end
        self._start = start


class Channel:
    """One end of a connected pair of stream sockets.

    A blocking channel waits until the peer has taken what it sends. Another one keeps what the
    peer has not taken, for `flush`. Any thread may send, a signal handler too; one receives. In a
    forked child `send` does nothing, since its messages would mix with the parent's.
    """

    def __init__(self, end: socket.socket, *, blocking: bool) -> None:
        end.setblocking(blocking)
        self._end = end
        self._inbox = _Inbox()
        self._lock = threading.RLock()
        self._sending = False
        self._unsent: deque[tuple[int, bytes]] = deque()
        """What waits to be sent, each with its place in the stream."""
        self._counts: deque[int] = deque((0,))
        """Their sum is the number of bytes that were sent."""
        self._pid = os.getpid()
        self.waiting = False
        """Whether it receives: an exception of a signal handler has then lost no message."""

    def fileno(self) -> int:
        """Return the descriptor of the socket; -1 once closed."""
        return self._end.fileno()

    def close(self) -> None:
        """Close this end."""
        self._end.close()

    @property
    def pending(self) -> bool:
        """Return whether something waits for `flush`, once the socket can be written."""
        return bool(self._unsent)

    def send(self, *messages: protocol.Message) -> None:
        """Send messages, by one system call if there is room.

        Raises `ChannelLost`, and `ProtocolError` with nothing sent.
        """
        data = codec.encode(*messages)
        with self._lock:
            if self._pid != os.getpid():
                return
            last = self._unsent[-1] if self._unsent else (sum(self._counts), b"")
            self._unsent.append((last[0] + len(last[1]), data))
            # A signal handler that interrupted a send on this thread leaves it to that send.
            if not self._sending:
                self._flush()

    def flush(self) -> None:
        """Send what waits, as far as there is room."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        try:
            self._sending = True
            while self._unsent:
                (place, data), sent = self._unsent[0], sum(self._counts)
                if place + len(data) <= sent:
                    self._unsent.popleft()
                    continue
                rest = memoryview(data)[sent - place :] if sent > place else data
                self._counts.extend(map(self._end.send, (rest,)))
            self._counts = deque((sum(self._counts),))
        except BlockingIOError:
            return
        except OSError as error:
            raise _lost(error) from None
        finally:
            self._sending = False

    def receive(self) -> list[protocol.Message]:
        """Return the messages that are here; a blocking channel waits for one.

        Raises `ChannelLost` at the end, `ProtocolError` for garbage; the channel is of no use then.
        """
        while not (messages := self._inbox.take()):
            self.waiting = True
            try:
                more = self._receive()
            except BlockingIOError:
                return []
            except OSError as error:
                raise _lost(error) from None
            self.waiting = False
            if not more:
                raise protocol.ChannelLost("the peer has closed the channel, or has ended")
        return messages

    def is_readable(self) -> bool:
        """Return whether `receive` would return, or raise, at once."""
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        return bool(poll.poll(0))

    def _receive(self) -> bool:
        return self._inbox.receive(self._end)


class FdChannel(Channel):
    """A channel whose messages may bring descriptors."""

    def __init__(self, end: socket.socket, *, blocking: bool) -> None:
        super().__init__(end, blocking=blocking)
        self.fds: deque[int] = deque()
        """Descriptors that came along with messages, in their order; the taker closes them."""

    def send_fds(self, message: protocol.Message, *fds: int) -> None:
        """Send a message with descriptors. The channel must be blocking."""
        data = codec.encode(message)
        with self._lock:
            try:
                sent = socket.send_fds(self._end, [data], fds)
                self._end.sendall(data[sent:])
            except OSError as error:
                raise _lost(error) from None
            self._counts.append(len(data))

    def _receive(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._end, SIZE, MAX_FDS)
        self.fds.extend(fds)
        self._inbox.add(data)
        return bool(data)


def _lost(error: OSError) -> Exception:
    """Return what to raise for an error of a system call, or of a signal handler during it."""
    if error.errno is None:  # such as the TimeoutError of an app's alarm
        return error
    return protocol.ChannelLost(f"the channel is lost: {error.strerror}")
