"""Run the thread of an executor that receives the worker's requests while a handler runs.

A signal would need no thread. But its handler would run on the main thread between any two
operations of the app, such as inside `threading.Event.wait()`: to set that event there waits for
ever for the event's own lock.
"""

from __future__ import annotations

import contextlib
import os
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
        self._woken, self._waker = (wire.high(fd) for fd in os.pipe())
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
            os.write(self._waker, b"!")

    def __iter__(self) -> Iterator[tuple[int, str]]:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            yield from self._requests()
        except BaseException:  # noqa: BLE001  without this thread no request is received
            self._lost()
        finally:
            os.close(self._woken)
            os.close(self._waker)

    def _requests(self) -> Iterator[tuple[int, str]]:
        poll, timeout = select.poll(), None
        for fd in (self._end.fileno(), self._woken):
            poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(timeout)}
            if self._end.fileno() in ready:
                if not (data := self._end.recv(4096)):
                    if self._closed:
                        return
                    raise ConnectionError("the worker has ended")
                key, _, reason = data.decode().partition(" ")
                yield int(key), reason
            if self._woken in ready:
                os.read(self._woken, 4096)
                timeout = FLUSH_MS
            elif not ready:
                timeout = FLUSH_MS if self.idle() else None
