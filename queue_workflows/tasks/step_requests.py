"""What the steps, loops and waits of an attempt request of the worker, and what answers mean."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

from queue_workflows import errors
from queue_workflows.dag import payload, step_arguments
from queue_workflows.runtime import entry_point
from queue_workflows.tasks import attempt_steps, control, job
from queue_workflows.types import JsonDict

MAX_RETRIES: Final = 100
RETRY_FIRST_S: Final = 1.0
RETRY_MAX_S: Final = 30.0
"""Seconds before a step is tried again: they double from the first figure up to the second."""


class StepCall:
    """One call of `step` in this attempt: the requests about it, and its result."""

    def __init__(
        self, name: str, key: str | int | None, args: Any, kwargs: Any, retries: int
    ) -> None:
        steps = job.current_job().steps
        self.ask = steps.ask
        self.result: Any = None
        self._name, self._key = step_arguments.name(name), step_arguments.key(key)
        self._what = _described("step", self._name, self._key)
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
        text = f"{type(error).__name__}: {payload.error_text(error)}"[: payload.ERROR_LIMIT]
        return self._about("end", state="failed", error=text)

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


class Cursor:
    """One `steps` loop in this attempt."""

    def __init__(self, name: str, key: str | int | None, items: Any) -> None:
        self._steps = job.current_job().steps
        self._name, self._key = step_arguments.name(name), step_arguments.key(key)
        self._what = _described("cursor", self._name, self._key)
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


class Wait:
    """One sleep, or one wait for an event, in this attempt."""

    def __init__(self, kind: str, name: str, key: str, after_s: float | None, default: str) -> None:
        self._steps = job.current_job().steps
        self._what = _described(kind, name, key)
        self._request = {
            "op": "wait", "kind": kind, "name": name, "key": key, "after_s": after_s,
            "default": default,
        }  # fmt: skip

    @classmethod
    def sleep(cls, seconds: float, minutes: float, hours: float, key: str | int | None) -> Wait:
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
    def event(cls, name: str, key: str | int | None, timeout_s: float | None, default: Any) -> Wait:
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


def _described(kind: str, name: str, key: str) -> str:
    return f"{kind} {name!r}" + (f" (key {key!r:.120})" if key else "")
