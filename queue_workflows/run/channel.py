"""Send and receive in an executor, at its ends of the two sockets to its worker."""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final, TypeAlias

from queue_workflows import errors
from queue_workflows.run import wire
from queue_workflows.types import JsonDict

Frame: TypeAlias = "tuple[int, int, bytes]"
sigmask: Final[Callable[[int, Collection[int]], set[int]]] = importlib.import_module(
    "_signal"
).pthread_sigmask
"""The function behind `signal.pthread_sigmask`, which makes an enum member of each signal in the
old mask: that took longer than all else for a job that does nothing."""
_CATCHABLE: Final = sorted({*map(int, signal.valid_signals())} - {signal.SIGKILL, signal.SIGSTOP})
_handler_of: Final[Callable[[int], object]] = importlib.import_module("_signal").getsignal
FLUSH_MS: Final = 250.0


_seen: list[Any] = [[], []]
"""The handlers that there were the last time, and the result for them."""


def handled_signals() -> list[int]:
    """Return the signals that have a handler in Python, which may raise.

    To block all signals takes longer, since each number is converted.
    """
    handlers = [*map(_handler_of, _CATCHABLE)]
    if handlers != _seen[0]:
        pairs = zip(_CATCHABLE, handlers, strict=True)
        _seen[:] = handlers, [each for each, found in pairs if callable(found)]
    return _seen[1]


class Channel:
    """An executor's end of the socket to its worker: any thread sends, the main thread receives.

    The app's signal handlers run on the main thread and may raise. So it blocks signals while it
    sends or receives, and waits for something to receive before that.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)
        self._end = end
        self._frames = wire.Frames()
        self._lock = threading.RLock()
        self._main = threading.main_thread().ident
        self._pid = os.getpid()
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._end.fileno()

    def send(self, kind: int, key: int, body: bytes = b"") -> None:
        """Send a frame; wait until the worker has taken it. Raises ConnectionError."""
        self.send_all(wire.frame(kind, key, body))

    def send_all(self, data: bytes, *, blocked: bool = False) -> None:
        """Send frames. In a process that a handler has forked it does nothing.

        `blocked`: signals are blocked already, and the process is known.
        """
        if not blocked and os.getpid() != self._pid:
            # Its messages would mix with ours. libc's own fork() calls no hook of Python.
            return
        with self._lock:
            if blocked or threading.get_ident() != self._main:
                self._send(data)
                return
            # A change of the mask calls the handler of a signal that is pending, which may raise.
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

        An exception of the app's signal handlers is raised from here with nothing lost.
        """
        while True:
            if os.getpid() != self._pid:
                os._exit(0)  # a handler has forked it and let return: its parent has the channel
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
        """Receive once, and return what is complete. Raises ConnectionError at the end.

        Raises BlockingIOError with the flag MSG_DONTWAIT if there is nothing.
        """
        try:
            data = self._end.recv(wire.SIZE, flags)
        except BlockingIOError:
            raise
        except OSError as error:
            raise ConnectionError(f"the channel is lost: {error.strerror}") from None
        if not data:
            raise ConnectionError("the worker has closed the channel, or has ended")
        return [*self._frames.add(data)]


class Requests:
    """The requests of a worker, for one thread: key and reason of a job whose handler is to end.

    A signal would need no thread. But its handler would run on the main thread between any two
    operations of the app, such as inside `threading.Event.wait()`: to set that event there waits
    for ever for the event's own lock.

    `lost` is called at the end of file, or after an error: no request can be received any more.
    `idle` is called every FLUSH_MS after `wake` until it returns False.
    """

    def __init__(
        self, end: socket.socket, lost: Callable[[], object], idle: Callable[[], bool]
    ) -> None:
        self._end = end
        self._lost = lost
        self._idle = idle
        self._closed = False
        self._woken, self._waker = (
            socket.socket(fileno=wire.high(each.detach())) for each in socket.socketpair()
        )
        self._waker.setblocking(False)

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
                timeout = FLUSH_MS if self._idle() else None


def answer_of(answer: JsonDict) -> Any:
    """Return the value of an ANSWER; raise `UnreadableRow` or `DatabaseUnavailable`."""
    if answer["error"] is not None:
        kind = errors.UnreadableRow if answer["is_final"] else errors.DatabaseUnavailable
        raise kind(answer["error"])
    return answer["value"]
