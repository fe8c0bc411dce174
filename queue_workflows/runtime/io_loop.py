"""Wait for descriptors, one timer and bells on one thread, and resume the waiting generators."""

from __future__ import annotations

import functools
import math
import selectors
from collections.abc import Callable, Generator
from typing import Any, Final, TypeAlias

from queue_workflows.runtime import clock

READ: Final = selectors.EVENT_READ
WRITE: Final = selectors.EVENT_WRITE
Call: TypeAlias = Callable[[], object]
Wait: TypeAlias = "tuple[int, int] | None"
"""A descriptor and the events for which a flow waits. None stands for its bell, or for data to read
on the descriptor that it named last."""
Waiting: TypeAlias = Generator[Wait, bool, Any]
"""A generator that yields waits; it is resumed with True for a descriptor, False for its bell."""


class IoLoop:
    """A selector, one timer, and the flows that wait; everything runs on the thread of `run`.

    A turn calls the ready flows, then the timer if it is due, then flows whose bells rang.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._calls: dict[int, dict[int, Call]] = {}
        self._at = math.inf
        self.over: Callable[[], bool] | None = None
        """Called at each turn; returns whether `run` ends."""
        self.rung: dict[Flow, None] = {}
        """The flows whose bells have rung."""

    def read(self, fd: int, call: Call | None) -> None:
        """Call this whenever the descriptor can be read; None stops that."""
        self._watch(fd, READ, call)

    def write(self, fd: int, call: Call | None) -> None:
        """Call this whenever the descriptor can be written; None stops that."""
        self._watch(fd, WRITE, call)

    def _watch(self, fd: int, event: int, call: Call | None) -> None:
        calls = self._calls.get(fd)
        if call is None:
            if calls is None or calls.pop(event, None) is None:
                return
            if not calls:
                self.forget(fd)
                return
        else:
            if calls is None:
                self._calls[fd] = calls = {event: call}
                self._selector.register(fd, event, calls)
                return
            known = event in calls
            calls[event] = call
            if known:
                return
        self._selector.modify(fd, sum(calls), calls)

    def forget(self, fd: int) -> None:
        """Stop watching a descriptor; call this before the descriptor is closed."""
        if (calls := self._calls.pop(fd, None)) is not None:
            calls.clear()  # this turn may have found the descriptor ready, but not called them yet
            self._selector.unregister(fd)

    def wake_at(self, at: float) -> None:
        """Let the timer fire at this time (`clock.boot_s`) at the latest."""
        self._at = min(self._at, at)

    def run(self, tick: Callable[[float], float], over: Callable[[], bool] | None = None) -> None:
        """Run turns until `over` returns True, or without end if there is no such function.

        `tick` does the work that is due and returns when to call it again.
        """
        self.over = over
        while self.over is None or not self.over():
            left_s = 0.0 if self.rung else max(0.0, self._at - clock.boot_s())
            # epoll counts milliseconds. Round up, so that it does not wake before the timer.
            for key, events in self._selector.select(None if left_s == math.inf else left_s):
                calls: dict[int, Call] = key.data
                for event in (READ, WRITE):
                    if events & event and (call := calls.get(event)) is not None:
                        call()
            if (now := clock.boot_s()) >= self._at:
                self._at = math.inf
                self.wake_at(tick(now))
            rung, self.rung = self.rung, {}
            for flow in rung:
                flow.heard()

    def close(self) -> None:
        """Close the selector, not the descriptors."""
        self._calls.clear()
        self._selector.close()


class Flow:
    """Runs a generator on a loop, which waits for a descriptor or its bell at each yield."""

    def __init__(self, loop: IoLoop) -> None:
        self._loop = loop
        self._waiting: Waiting | None = None
        self._fd = -1
        self._writes = False
        """Whether it waits for the descriptor to be writable, too."""
        self._for_bell = True
        self._begun = self._rang = False
        self.over = False
        self._readable = functools.partial(self._resume, ready=True)

    def begin(self, waiting: Waiting) -> None:
        """Run this generator from the next turn on."""
        self._waiting = waiting
        self.ring()

    def ring(self) -> None:
        """Resume the generator soon if it waits for its bell, else once it does."""
        self._loop.rung[self] = None

    def heard(self) -> None:
        """Resume the generator if it waits for its bell; only the loop calls this."""
        if self.over or self._waiting is None:
            return
        if self._for_bell:
            self._resume(ready=False)
        else:
            self._rang = True

    def _resume(self, *, ready: bool) -> None:
        assert self._waiting is not None
        try:
            wait = self._waiting.send(ready) if self._begun else next(self._waiting)
        except StopIteration:
            self.over = True
            self.let_go()
            return
        self._begun, self._for_bell = True, wait is None
        if wait is None:
            if self._writes:
                self._writes = False
                self._loop.write(self._fd, None)
            if self._rang:
                self._rang = False
                self.ring()
            return
        fd, events = wait
        if fd != self._fd:
            self.let_go()
            self._fd = fd
            self._loop.read(fd, self._readable)
        if self._writes != bool(events & WRITE):
            self._writes = not self._writes
            self._loop.write(fd, self._readable if self._writes else None)

    def let_go(self) -> None:
        """Stop watching the descriptor; call this before it is closed."""
        if self._fd != -1:
            self._loop.forget(self._fd)
            self._fd, self._writes = -1, False
