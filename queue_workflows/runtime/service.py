"""Run threads as services: `Loop` repeats tasks, `Follow` acts on items, `Thread` runs a function.

`ErrorLog` logs the errors of repeated work, each only once in a while, and an outage in one line.
"""

from __future__ import annotations

import abc
import logging
import math
import random
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from types import GeneratorType
from typing import Generic, NamedTuple, TypeVar

from queue_workflows import errors
from queue_workflows.types import NowFn

QUIET_S = 60.0
MAX_TEXTS = 100
_DIGITS = re.compile(r"\d+")


class ErrorLog:
    """Log an error with its traceback; the same text again within `QUIET_S` is only counted.

    An outage (`errors.outage`) is logged as one line, and further errors of it at debug level. The
    comparison ignores digits, since ids and ports would make every line a new text.
    """

    def __init__(self, owner: str, now_fn: NowFn) -> None:
        self._owner = owner
        self._now = now_fn
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}
        self._away: dict[str, float] = {}
        """The tasks that failed because of an outage, and when."""

    def guard(self, what: str, call: Callable[[], T]) -> T | None:
        """Return the call's value; log any error and return None."""
        try:
            value = call()
        except BaseException as error:  # noqa: BLE001  SystemExit in a task must not end its loop
            self.report(what, error)
            return None
        self.went_well(what)
        return value

    def went_well(self, what: str) -> None:
        """Note that a task ran without an error."""
        self._away.pop(what, None)

    def report(self, what: str, error: BaseException) -> None:
        """Log the error of a task."""
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        if away := errors.outage(error):
            self._report_outage(what, away, error)
            return
        key = (what, _DIGITS.sub("#", text))
        now = self._now()
        logged_at, repeats = self._seen.get(key, (-math.inf, 0))
        if now - logged_at < QUIET_S:
            self._seen[key] = (logged_at, repeats + 1)
            return
        if len(self._seen) >= MAX_TEXTS:
            self._seen.clear()
        self._seen[key] = (now, 0)
        again = f" ({repeats} more since the last line)" if repeats else ""
        logger.error("%s: %s failed%s: %s", self._owner, what, again, text, exc_info=error)

    def _report_outage(self, what: str, away: str, error: BaseException) -> None:
        now = self._now()
        if now - max(self._away.values(), default=-math.inf) >= QUIET_S:
            text = " ".join(str(error).split()) or type(error).__name__
            logger.warning("%s: %s waits for %s: %s", self._owner, what, away, text)
        self._away[what] = now
        logger.debug("%s: %s failed", self._owner, what, exc_info=error)


T = TypeVar("T")
S = TypeVar("S", bound="Service")

MIN_EVERY_S = 0.01
FALLBACK_EVERY_S = 5.0
BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 5.0

logger = logging.getLogger(__name__)


class Service(abc.ABC):
    """A daemon thread named after the service, which starts once and stops once.

    `stop()` may be called at any time, from any thread and repeatedly. After a `stop()`, `start()`
    does nothing. Signal handlers must not call it, since it takes locks.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._stopping = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        """Return whether its thread still runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread; raise RuntimeError if it was started before."""
        with self._starting:
            if self._thread is not None:
                raise RuntimeError(f"{self.name} was started before; make a new one")
            if not self._stopping.is_set():
                self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                self._thread.start()  # after the assignment, since it may stop itself at once

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Request that the thread ends, and wait for that; return whether it has ended.

        On the thread of the service itself, it does not wait, and returns False.
        """
        if not self._stopping.is_set():
            self._stopping.set()
            self._interrupt()
        if threading.current_thread() is self._thread:
            return False
        with self._starting:
            thread = self._thread
        if thread is not None and thread.is_alive():
            thread.join(max(0.0, timeout_s))
        return not self.alive

    def __enter__(self: S) -> S:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self.stop() and threading.current_thread() is not self._thread:
            logger.warning("%s did not stop in time: its thread goes on with its work", self.name)

    @abc.abstractmethod
    def _run(self) -> None:
        """Run on the thread until `_stopping` is set."""

    def _interrupt(self) -> None:  # noqa: B027  a thread that only checks the event needs none
        """Wake a waiting `_run`; called once, after `_stopping` was set."""


class Task(NamedTuple):
    """A function that a `Loop` calls every `every_s` seconds, measured from start to start.

    A callable interval is called after each run, so that a setting is read when used; `math.inf`
    means once at the start, then only when woken. Intervals under `MIN_EVERY_S` are raised to it.
    """

    name: str
    every_s: float | Callable[[], float]
    run: Callable[[], object]


class Loop(Service):
    """Run tasks when they are due, one after the other, and each of them first at the start.

    A late or long run does not move the times of later runs; missed times are skipped. A task that
    raises is logged and runs again when next due.
    """

    def __init__(self, name: str, tasks: Iterable[Task], *, now_fn: NowFn = time.monotonic) -> None:
        super().__init__(name)
        self._tasks = list(tasks)
        names = [task.name for task in self._tasks]
        if len(set(names)) != len(names):
            raise ValueError(f"{name}: two tasks share a name: {', '.join(sorted(names))}")
        self._now = now_fn
        self._errors = ErrorLog(name, now_fn)
        self._wakeup = threading.Condition()
        self._woken = set(names)
        self._due: dict[str, float] = {}

    def wake(self, *task_names: str) -> None:
        """Make the named tasks due at once, or all without names; a wake-up during a run counts."""
        known = {task.name for task in self._tasks}
        if unknown := set(task_names) - known:
            raise ValueError(f"{self.name} has no task {', '.join(sorted(unknown))}")
        with self._wakeup:
            self._woken |= set(task_names) or known
            self._wakeup.notify_all()

    def run_due(self) -> float:
        """Run the due tasks in order; return the seconds until the next one is due (or inf)."""
        for task in self._tasks:
            if self._stopping.is_set():
                break
            since = self._take(task.name)
            if since is not None:
                self._errors.guard(task.name, task.run)
                every_s, now = self._interval(task), self._now()
                due = since + every_s
                self._due[task.name] = due if due > now else now + every_s - (now - since) % every_s
        with self._wakeup:
            if self._woken:
                return 0.0
        return max(0.0, min(self._due.values(), default=math.inf) - self._now())

    def _take(self, task_name: str) -> float | None:
        now = self._now()
        with self._wakeup:
            if task_name in self._woken:
                self._woken.discard(task_name)
                return now
        due = self._due[task_name]
        return due if due <= now else None

    def _interval(self, task: Task) -> float:
        every_s = task.every_s
        if callable(every_s):
            asked = self._errors.guard(f"{task.name}'s interval", every_s)
            every_s = FALLBACK_EVERY_S if asked is None else asked
        return max(MIN_EVERY_S, every_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            pause_s = self.run_due()
            with self._wakeup:
                if not self._woken and not self._stopping.is_set():
                    self._wakeup.wait(min(pause_s, threading.TIMEOUT_MAX))

    def _interrupt(self) -> None:
        with self._wakeup:
            self._wakeup.notify_all()


class Follow(Service, Generic[T]):
    """Call `act(item)` for each item of a source, until stopped or until the source ends.

    Errors of `act` are logged and the next item follows. If the source raises, that is logged and
    it is iterated again after a jittered pause of at most `BACKOFF_MAX_S`. `stop()` calls the
    source's `close()` if it has one, which must end a present or later iteration.
    """

    def __init__(self, name: str, source: Iterable[T], act: Callable[[T], object]) -> None:
        super().__init__(name)
        if isinstance(source, GeneratorType):
            raise TypeError(
                f"{name}: a generator cannot be iterated again after an error, nor closed from "
                "another thread; pass an object with __iter__ and close()"
            )
        self._source = source
        self._act = act
        self._errors = ErrorLog(name, time.monotonic)
        self._failures = 0

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._follow()
            except BaseException as error:  # noqa: BLE001  whatever it raised, the source is tried again
                if self._stopping.is_set():
                    return
                self._errors.report("its source", error)
            else:
                if not self._stopping.is_set():
                    logger.warning("%s: its source has ended", self.name)
                return
            longest = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(self._failures, 16))
            self._failures += 1
            self._stopping.wait(longest * random.uniform(0.5, 1.0))  # noqa: S311  jitter

    def _follow(self) -> None:
        for item in self._source:
            if self._stopping.is_set():
                return
            self._failures = 0
            self._errors.went_well("its source")
            self._errors.guard("an item", lambda item=item: self._act(item))
            if self._stopping.is_set():
                return

    def _interrupt(self) -> None:
        close = getattr(self._source, "close", None)
        if close is not None:
            self._errors.guard("closing its source", close)


class Thread(Service):
    """Run `target(stop_event)`; it must end soon after the event is set.

    An uncaught exception goes to `threading.excepthook`.
    """

    def __init__(self, name: str, target: Callable[[threading.Event], object]) -> None:
        super().__init__(name)
        self._target = target

    def _run(self) -> None:
        self._target(self._stopping)
