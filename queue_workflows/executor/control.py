"""Run the thread of an executor that receives the worker's requests while a handler runs."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Final

from queue_workflows.executor import channel, protocol

FLUSH_MS: Final = 250.0


class Received:
    """The messages of a channel, for one thread; ends the process at the end of file."""

    def __init__(self, found: channel.Channel) -> None:
        self._channel = found

    def __iter__(self) -> Iterator[protocol.Message]:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            while True:
                yield from self._channel.receive()
        except BaseException:  # noqa: BLE001  without this thread no job would start
            os._exit(channel.LOST)


class Requests:
    """The messages of the control socket, for one thread; ends the process at the end of file."""

    def __init__(self, end: socket.socket) -> None:
        self._channel = channel.Channel(end, blocking=True)
        self._woken, self._waker = (channel.high(fd) for fd in os.pipe())
        self.idle: Callable[[], bool] = lambda: False
        """Called every FLUSH_MS after `wake` until it returns False."""

    def wake(self) -> None:
        """Let `idle` be called soon."""
        with contextlib.suppress(OSError):
            os.write(self._waker, b"!")

    def __iter__(self) -> Iterator[protocol.Message]:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            yield from self._messages()
        except BaseException:  # noqa: BLE001  without this thread no request is received
            os._exit(channel.LOST)

    def _messages(self) -> Iterator[protocol.Message]:
        poll, timeout = select.poll(), None
        for fd in (self._channel.fileno(), self._woken):
            poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(timeout)}
            if self._channel.fileno() in ready:
                yield from self._channel.receive()
            if self._woken in ready:
                os.read(self._woken, channel.SIZE)
                timeout = FLUSH_MS
            elif not ready:
                timeout = FLUSH_MS if self.idle() else None
