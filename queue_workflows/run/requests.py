"""Run the thread of an executor that receives the worker's requests while a handler runs.

A signal would need no thread. But its handler would run on the main thread between any two
operations of the app, such as inside `threading.Event.wait()`: to set that event there waits for
ever for the event's own lock.
"""

from __future__ import annotations

import contextlib
import select
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Final

from queue_workflows.run import wire

FLUSH_MS: Final = 250.0


class Requests:
    """The requests of a worker, for one thread: key and reason of a job whose handler is to end.

    `lost` is called at the end of file, or after an error: no request can be received any more.
    """

    def __init__(self, end: socket.socket, lost: Callable[[], object]) -> None:
        self._end = end
        self._lost = lost
        self._closed = False
        self._woken, self._waker = (
            socket.socket(fileno=wire.high(each.detach())) for each in socket.socketpair()
        )
        self._waker.setblocking(False)
        self.idle: Callable[[], bool] = lambda: False
        """Called every FLUSH_MS after `wake` until it returns False."""

    def close(self) -> None:
        """End the iteration."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def wake(self) -> None:
        """Let `idle` be called soon."""
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    def discard(self) -> None:
        """Close what `wake` uses, once no thread iterates any more."""
        self._woken.close()
        self._waker.close()

    def __iter__(self) -> Iterator[tuple[int, str]]:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            yield from self._requests()
        except BaseException:  # noqa: BLE001  without this thread no request is received
            self._lost()

    def _requests(self) -> Iterator[tuple[int, str]]:
        poll, timeout = select.poll(), None
        for each in (self._end, self._woken):
            poll.register(each, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(timeout)}
            if self._end.fileno() in ready:
                if not (data := self._end.recv(4096)):
                    if self._closed:
                        return
                    raise ConnectionError("the worker has ended")
                key, _, reason = data.decode().partition(" ")
                yield int(key), reason
            if self._woken.fileno() in ready:
                self._woken.recv(4096)
                timeout = FLUSH_MS
            elif not ready:
                timeout = FLUSH_MS if self.idle() else None
