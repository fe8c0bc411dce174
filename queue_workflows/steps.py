"""Steps of a handler: what one has returned is recorded, and a later attempt gets it from there.

The functions work inside of nodes and ingest tasks, however a worker runs them.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Generator,
    Iterable,
)
from typing import Any, Final, TypeVar

from queue_workflows import errors, tasks
from queue_workflows.dag import payload, step_arguments
from queue_workflows.runtime import entry_point
from queue_workflows.tasks import attempt_steps, control
from queue_workflows.types import JsonDict

T = TypeVar("T")
MAX_RETRIES: Final = 100
RETRY_FIRST_S: Final = 1.0
RETRY_MAX_S: Final = 30.0
"""Seconds before a step is tried again: they double from the first figure up to the second."""


def step(
    name: str,
    fn: Callable[..., T],
    /,
    *args: Any,
    retries: int = 0,
    key: str | int | None = None,
    **kwargs: Any,
) -> T:
    """Call `fn(*args, **kwargs)` once and return what is recorded of it, in any later attempt too.

    The result is stored as JSON before this returns. `key` tells steps of one name apart.
    `retries`: how often it is called again at once after an error. The call may run again if the
    worker dies before the result is stored. Raises `StepRefused` (a ValueError) for a name that
    this attempt has used, and for a recorded step that had other arguments.
    """
    trial = _Trial(name, key, args, kwargs, retries)
    while True:
        if trial.has_result(trial.ask(trial.begin()).result()):
            return trial.result
        try:
            value = fn(*args, **kwargs)
            end = trial.done(value)
        except Exception as error:
            trial.taken(trial.ask(trial.failed(error)).result())
            if not trial.again(error):
                raise
            time.sleep(trial.pause_s)
            continue
        trial.has_result(trial.ask(end).result())
        return trial.result


async def step_async(
    name: str,
    fn: Callable[..., Awaitable[T]],
    /,
    *args: Any,
    retries: int = 0,
    key: str | int | None = None,
    **kwargs: Any,
) -> T:
    """Do as `step` does, for an async function, which it awaits."""
    trial = _Trial(name, key, args, kwargs, retries)
    while True:
        if trial.has_result(await asyncio.wrap_future(trial.ask(trial.begin()))):
            return trial.result
        try:
            value = await fn(*args, **kwargs)
            end = trial.done(value)
        except Exception as error:
            trial.taken(await asyncio.wrap_future(trial.ask(trial.failed(error))))
            if not trial.again(error):
                raise
            await asyncio.sleep(trial.pause_s)
            continue
        trial.has_result(await asyncio.wrap_future(trial.ask(end)))
        return trial.result


def steps(
    name: str, items: Iterable[T], /, *, key: str | int | None = None
) -> Generator[T, None, None]:
    """Yield the items, in a later attempt from the one on that was not done.

    An item is done when the next one is taken. How far it is, is stored with the renewals of the
    lease and at the end of an attempt, and not for each item: after a crash the items of the last
    seconds come again. `items` must be the same in each attempt. Raises `StepRefused` (a
    ValueError) for a name that this attempt has used, and for a range or list that has changed.
    """
    cursor = _Cursor(name, key, items)
    done = cursor.begun(cursor.ask(cursor.begin()).result())
    for item in () if done is None else itertools.islice(items, done, None):
        yield item
        cursor.advance()
    if done is not None:
        attempt_steps.value_of(cursor.ask(cursor.end()).result())


async def steps_async(
    name: str, items: Iterable[T] | AsyncIterable[T], /, *, key: str | int | None = None
) -> AsyncGenerator[T, None]:
    """Do as `steps` does, in an async handler; `items` may be asynchronous."""
    cursor = _Cursor(name, key, items)
    done = cursor.begun(await asyncio.wrap_future(cursor.ask(cursor.begin())))
    if done is None:
        return
    if isinstance(items, AsyncIterable):
        number = 0
        async for item in items:
            number += 1
            if number > done:
                yield item
                cursor.advance()
    else:
        for item in itertools.islice(items, done, None):
            yield item
            cursor.advance()
    attempt_steps.value_of(await asyncio.wrap_future(cursor.ask(cursor.end())))


class _Cursor:
    """One `steps` loop in this attempt."""

    def __init__(self, name: str, key: str | int | None, items: Any) -> None:
        self._steps = tasks.current_job().steps
        self._name, self._key = step_arguments.name(name), step_arguments.key(key)
        self._what = f"cursor {name!r}" + (f" (key {self._key!r:.120})" if self._key else "")
        self._hash, self._shown = step_arguments.items_digest(items)
        self._done = 0
        if not self._steps.use("cursor", self._name, self._key):
            raise errors.StepRefused(
                f"{self._what} has been used before in this attempt: give each loop a key=... of "
                "its own"
            )
        self.ask = self._steps.ask

    def begin(self) -> JsonDict:
        """Return the request to begin."""
        shown = entry_point.mask(self._shown)
        return self._about("begin") | {"arguments_hash": self._hash, "arguments": shown}

    def end(self) -> JsonDict:
        """Return the request to record that all items are done."""
        self._steps.cursors.pop((self._name, self._key), None)
        return self._about("end") | {"state": "done", "position": self._done}

    def _about(self, op: str) -> JsonDict:
        return {"op": op, "kind": "cursor", "name": self._name, "key": self._key}

    def begun(self, answer: JsonDict) -> int | None:
        """Return how many items are done; None: all are. Raises `StepRefused` for other items."""
        found = attempt_steps.value_of(answer)
        if found["state"] == "changed":
            raise errors.StepRefused(
                f"{self._what} is recorded with other items: it had {found['arguments']:.300}, and "
                f"now has {self._shown:.300}; give it another name or key, or repeat it by "
                f"`queue-workflows retry JOB --from-step {self._name}`"
            )
        if found["state"] == "done":
            return None
        self._done = found["position"]
        return self._done

    def advance(self) -> None:
        """Note that one more item is done."""
        self._done += 1
        self._steps.note(self._name, self._key, self._done)


def sleep(
    seconds: float = 0.0, *, minutes: float = 0.0, hours: float = 0.0, key: str | int | None = None
) -> None:
    """End this attempt, uncounted, and let the job continue after this time.

    Nothing is taken meanwhile: no slot, no process, no GPU. Then the handler is called again; its
    recorded steps give their results, and this returns. The time of the first call counts. It ends
    the handler by an exception that is no `Exception`; what is open is closed. `key` tells two
    sleeps of one handler apart.
    """
    wait = _Wait.sleep(seconds, minutes, hours, key)
    wait.taken(wait.ask().result())


async def sleep_async(
    seconds: float = 0.0, *, minutes: float = 0.0, hours: float = 0.0, key: str | int | None = None
) -> None:
    """Do as `sleep` does, in an async handler."""
    wait = _Wait.sleep(seconds, minutes, hours, key)
    wait.taken(await asyncio.wrap_future(wait.ask()))


def wait_for_event(
    name: str,
    *,
    key: str | int | None = None,
    timeout_s: float | None = None,
    default: Any = None,
) -> Any:
    """Return the value of an event once it was sent, or `default` after `timeout_s`.

    If it was not sent yet, this ends the attempt as `sleep` does. The job continues from the
    commit on that sends the event (`events.send`, or an INSERT). `timeout_s` None: no limit; 0: do
    not wait. The time of the first call counts.
    """
    wait = _Wait.event(name, key, timeout_s, default)
    return wait.taken(wait.ask().result())


async def wait_for_event_async(
    name: str,
    *,
    key: str | int | None = None,
    timeout_s: float | None = None,
    default: Any = None,
) -> Any:
    """Do as `wait_for_event` does, in an async handler."""
    wait = _Wait.event(name, key, timeout_s, default)
    return wait.taken(await asyncio.wrap_future(wait.ask()))


class _Wait:
    """One sleep, or one wait for an event, in this attempt."""

    def __init__(self, kind: str, name: str, key: str, after_s: float | None, default: str) -> None:
        self._steps = tasks.current_job().steps
        self._what = f"{kind} {name!r}" + (f" (key {key!r:.120})" if key else "")
        self._request = {
            "op": "wait", "kind": kind, "name": name, "key": key, "after_s": after_s,
            "default": default,
        }  # fmt: skip

    @classmethod
    def sleep(cls, seconds: float, minutes: float, hours: float, key: str | int | None) -> _Wait:
        """Return the wait of a `sleep`. Raises `StepRefused` for a time or key that is no one."""
        after_s = step_arguments.seconds(seconds + 60 * minutes + 3600 * hours, "the time to sleep")
        text = step_arguments.key(key)
        found = cls("sleep", "sleep", text, after_s, "null")
        if not found._steps.use("sleep", text):
            raise errors.StepRefused(
                f"{found._what} has been called before in this attempt: give each call a key=... "
                "of its own"
            )
        return found

    @classmethod
    def event(
        cls, name: str, key: str | int | None, timeout_s: float | None, default: Any
    ) -> _Wait:
        """Return the wait for an event. Raises `StepRefused` and `InvalidPayload`."""
        name = step_arguments.name(name)
        after_s = None if timeout_s is None else step_arguments.seconds(timeout_s, "'timeout_s'")
        text = payload.encode(default, f"default of event {name!r}")
        return cls("event", name, step_arguments.key(key), after_s, text)

    def ask(self) -> attempt_steps.Answered:
        """Send the request."""
        return self._steps.ask(self._request)

    def taken(self, answer: JsonDict) -> Any:
        """Return the value of a wait that is over; end the attempt of one that is not."""
        found = attempt_steps.value_of(answer)
        if found["state"] == "waiting":
            raise control.Suspended(f"waits for {self._what}")
        return step_arguments.loaded(found["output"], f"value of {self._what}")


class _Trial:
    """One call of `step` in this attempt: the requests about it, and its result."""

    def __init__(
        self, name: str, key: str | int | None, args: Any, kwargs: Any, retries: int
    ) -> None:
        steps = tasks.current_job().steps
        self.ask = steps.ask
        self.result: Any = None
        self._name, self._key = step_arguments.name(name), step_arguments.key(key)
        self._what = f"step {name!r}" + (f" (key {self._key!r:.120})" if self._key else "")
        if type(retries) is not int or not 0 <= retries <= MAX_RETRIES:
            raise errors.StepRefused(
                f"{self._what}: 'retries' must be a whole number from 0 to {MAX_RETRIES}, not "
                f"{retries!r:.40}"
            )
        self._arguments = step_arguments.digest(args, kwargs)
        if not steps.use("step", self._name, self._key):
            raise errors.StepRefused(
                f"{self._what} has been called before in this attempt: give each call a key=... "
                "of its own, such as the id of what it works on"
            )
        self._pauses = _pauses(retries)
        self.pause_s = 0.0

    def begin(self) -> JsonDict:
        """Return the request to begin, or to get what is recorded."""
        text, shown = self._arguments
        return self._about("begin", arguments_hash=text, arguments=entry_point.mask(shown))

    def done(self, value: Any) -> JsonDict:
        """Return the request to record a result. Raises `InvalidPayload` for one JSON lacks."""
        return self._about("end", state="done", output=payload.encode(value, f"result of {self}"))

    def failed(self, error: Exception) -> JsonDict:
        """Return the request to record an error."""
        text = f"{type(error).__name__}: {entry_point.mask(payload.error_text(error))}"
        return self._about("end", state="failed", error=payload.error_text(text))

    def _about(self, op: str, **more: Any) -> JsonDict:
        return {"op": op, "kind": "step", "name": self._name, "key": self._key} | more

    def taken(self, answer: JsonDict) -> JsonDict:
        """Return an answer. Raises `ClaimLost`, and `StepRefused` for changed arguments."""
        found = attempt_steps.value_of(answer)
        if found["state"] == "changed":
            raise errors.StepRefused(
                f"{self._what} is recorded with other arguments: it had {found['arguments']:.300}, "
                f"and now has {self._arguments[1]:.300}; give it another name or key, or repeat it "
                f"by `queue-workflows retry JOB --from-step {self._name}`"
            )
        return found

    def has_result(self, answer: JsonDict) -> bool:
        """Take the result of an answer, if it has one; return whether it has."""
        found = self.taken(answer)
        if found["state"] == "done":
            self.result = step_arguments.loaded(found["output"], f"result of {self}")
            return True
        return False

    def again(self, error: Exception) -> bool:
        """Return whether the call is repeated after this error."""
        if isinstance(error, (errors.JobSignal, errors.ClaimLost, errors.InvalidPayload)):
            return False
        self.pause_s = next(self._pauses, -1.0)
        return self.pause_s >= 0

    def __str__(self) -> str:
        return self._what


def _pauses(retries: int) -> Generator[float]:
    for number in range(retries):
        yield min(RETRY_MAX_S, RETRY_FIRST_S * 2**number)
