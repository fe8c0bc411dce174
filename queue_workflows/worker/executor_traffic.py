"""Exchange messages with executors, and keep and print what they print."""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from queue_workflows import errors
from queue_workflows.executor import protocol
from queue_workflows.runtime import printed_lines
from queue_workflows.worker import current_job, executors, multiplexer


class Owner(Protocol):
    """Receives the events of the executors; called on the thread of `select`."""

    def forked(self, handle: executors.Handle) -> None:
        """Note an executor that has just been forked."""
        ...

    def received(self, handle: executors.Handle, message: protocol.Message) -> None:
        """Act on a message of an executor."""
        ...

    def printed(self, work: current_job.Work, data: bytes) -> None:
        """Keep what the handler of a job has printed."""
        ...

    def died(self, handle: executors.Handle, works: Sequence[current_job.Work]) -> None:
        """End the jobs, if any, whose executor has ended before them; the cause is known."""
        ...


class Traffic:
    """What executors of one queue send and print; for the thread of the multiplexer.

    `owner` is set before the first fork.
    """

    owner: Owner

    def __init__(self, mux: multiplexer.Multiplexer) -> None:
        self._mux = mux

    def send_rest(self, handle: executors.Handle) -> None:
        """Send the rest of a message as the executor takes it."""
        if handle.lost is None and handle.forked.jobs.pending:
            self._watch(handle, writing=True)

    def _watch(self, handle: executors.Handle, *, writing: bool) -> None:
        """Wait until the executor takes the rest of a message, as well as for messages of it."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
        act: Callable[[executors.Handle], object] = self._exchange if writing else self.receive
        self._mux.selector.modify(handle.forked.jobs, events, lambda: act(handle))

    def _exchange(self, handle: executors.Handle) -> None:
        try:
            handle.forked.jobs.flush()
        except protocol.ChannelLost as error:
            self.lose(handle, error)
            return
        if not handle.forked.jobs.pending:
            self._watch(handle, writing=False)
        self.receive(handle)

    def receive(self, handle: executors.Handle) -> bool:
        """Act on what an executor has sent; return False if there is nothing more to come."""
        try:
            messages = handle.forked.jobs.receive()
        except errors.QueueWorkflowsError as error:
            self.lose(handle, error)
            return False
        if len(messages) != 1:
            self._mux.ready.clear()  # what was printed between them need not have been found
        for message in messages:
            self.owner.received(handle, message)
        return bool(messages)

    def lose(self, handle: executors.Handle, error: Exception) -> None:
        """Stop listening to an executor whose channel is of no use any more, and end it.

        If the channel was closed, the process is most likely ending, and its own end is the cause.
        """
        if handle.lost is None:
            handle.lost, handle.lost_at = str(error), time.monotonic()
        self._mux.forget(handle.forked.jobs)
        if not handle.exited and not isinstance(error, protocol.ChannelLost):
            handle.kill(signal.SIGKILL)

    def drain_all(self, handle: executors.Handle) -> None:
        """Keep and print all that an executor printed before the message that it sent last.

        Of an executor that has printed nothing this reads nothing: if one message alone made its
        channel readable, what was printed before it was readable at the same time.
        """
        forked, ready = handle.forked, self._mux.ready
        if handle.shared:
            return
        if forked.jobs.fileno() not in ready or not ready.isdisjoint(forked.out.fds):
            while self.drain(handle):
                continue

    def drain(self, handle: executors.Handle) -> bool:
        """Keep and print what an executor has printed; return whether there was anything."""
        before = [*handle.forked.out.fds]
        found = handle.forked.out.drain()
        for fd in before:
            if fd not in handle.forked.out.fds:
                self._mux.forget(fd)
        for number, data in found:
            work = handle.first
            self._mux.print(number, handle.lines(number, data))
            if work is not None:
                handle.printed(data)
                if not handle.shared:
                    self.owner.printed(work, data)
        return bool(found)

    def print_lines(self, handle: executors.Handle, message: protocol.Log) -> None:
        """Print as JSON what the handler of a job has printed, whose ids are bound."""
        number = 1 if message.stream == printed_lines.STREAMS[1] else 2
        for line in message.text.split("\n"):
            if line.strip():
                text = printed_lines.as_json(line, message.stream, handle.pid)
                self._mux.print(number, text.encode())

    def end_lines(self, handle: executors.Handle) -> None:
        """Print what the job of an executor has printed without a line end."""
        for number in self._mux.printed:
            self._mux.print(number, handle.lines(number, None))
