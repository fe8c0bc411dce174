"""What the steps, waits and streams of an attempt request of its worker, and what answers mean."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence, Sized
from pathlib import PurePath
from typing import Any, Final, cast

from queue_workflows import errors
from queue_workflows.dag import payload, policy
from queue_workflows.runtime import masking
from queue_workflows.tasks import control
from queue_workflows.types import JsonDict

NAME_LENGTH: Final = 100
KEY_BYTES: Final = 1000
MOST_ITEMS: Final = 10_000
SHOWN: Final = 2000
"""Characters of the arguments that are stored for people to read."""
MAX_RETRIES: Final = 100
RETRY_FIRST_S: Final = 1.0
RETRY_MAX_S: Final = 30.0
"""Seconds before a step is tried again: they double from the first figure up to the second."""
EVERY_S: Final = 0.1
"""Seconds between two batches of a handler that streams all the time."""
BATCH_BYTES: Final = 256 * payload.KIB
BATCH_PARTS: Final = 1000
"""A batch of this size is sent at once, which bounds a message to the worker and its statement."""
PART_KB: Final = 64
"""Most KiB of JSON in a part, so that a reader has it one round trip after the notification."""
MAX_PARTS: Final = 100_000
"""Most parts of an attempt. With one token in each part, this is the length of a book."""
MAX_MB: Final = 64
"""Most MiB of JSON in the parts of an attempt. A larger result belongs in a file."""


class AttemptSteps:
    """The steps of one attempt: the function that records them, the used names, and the cursors."""

    def __init__(self, ask: control.Ask, control_: control.Control) -> None:
        self.ask = ask
        self.control = control_
        self.cursors: dict[tuple[str, str], int] = {}
        """How many items of each cursor are done that has not ended, by its name and key."""
        self._lock = threading.Lock()
        self._used: set[tuple[str, ...]] = set()

    def use(self, what: str, calls: str, *identity: str) -> None:
        """Raise `StepRefused` for a step, loop or sleep that this attempt has had already."""
        with self._lock:
            if identity not in self._used:
                self._used.add(identity)
                return
        known = "used" if calls == "loop" else "called"
        example = ", such as the id of what it works on" if identity[0] == "step" else ""
        raise errors.StepRefused(
            f"{what} has been {known} before in this attempt: give each {calls} a key=... of its "
            f"own{example}"
        )


class _Recorded:
    """A step or a loop of an attempt, which its kind, name and key identify in the database."""

    kind: str
    calls: str
    arguments: str
    """For messages: the noun for the calls that a key distinguishes, and for their arguments."""

    def __init__(
        self, steps: AttemptSteps, name: str, key: str | int | None, digest: tuple[str, str]
    ) -> None:
        """`digest`: the hash and the text of its arguments."""
        self._steps = steps
        self.ask = steps.ask
        self._name, self._key = checked_name(name), checked_key(key)
        self._what = _described(self.kind, self._name, self._key)
        self._hash, self._shown = digest
        steps.use(self._what, self.calls, self.kind, self._name, self._key)

    def begin(self) -> JsonDict:
        """Return the request to begin, or to get the recorded result."""
        shown = masking.mask(self._shown)
        return self._about("begin", arguments_hash=self._hash, arguments=shown)

    def _about(self, op: str, **more: Any) -> JsonDict:
        return {"op": op, "kind": self.kind, "name": self._name, "key": self._key} | more

    def taken(self, answer: JsonDict) -> JsonDict:
        """Return an answer. Raises `ClaimLost`, and `StepRefused` for changed `arguments`."""
        found = control.value_of(answer)
        if found["state"] == "changed":
            raise errors.StepRefused(
                f"{self._what} is recorded with other {self.arguments}: it had "
                f"{found['arguments']:.300}, and now has {self._shown:.300}; give it another name "
                f"or key, or repeat it by `queue-workflows retry JOB --from-step {self._name}`"
            )
        return found


class StepCall(_Recorded):
    """One call of `step` in this attempt: the requests about it, and its result."""

    kind, calls, arguments = "step", "call", "arguments"

    def __init__(
        self, of: AttemptSteps, name: str, key: str | int | None, args: Any, kw: Any, retries: int
    ) -> None:
        self.result: Any = None
        if type(retries) is not int or not 0 <= retries <= MAX_RETRIES:
            what = _described("step", checked_name(name), checked_key(key))
            raise errors.StepRefused(
                f"{what}: 'retries' must be a whole number from 0 to {MAX_RETRIES}, not "
                f"{retries!r:.40}"
            )
        super().__init__(of, name, key, _digest(args, kw))
        self._pauses = iter([min(RETRY_MAX_S, RETRY_FIRST_S * 2**n) for n in range(retries)])
        self.pause_s = 0.0

    def done(self, value: Any) -> JsonDict:
        """Return the request to record a result. Raises `InvalidPayload` for one JSON lacks."""
        output = payload.encode(value, f"result of {self._what}")
        return self._about("end", state="done", output=output)

    def failed(self, error: Exception) -> JsonDict:
        """Return the request to record an error."""
        text = f"{type(error).__name__}: {payload.error_text(error)}"[: payload.ERROR_LIMIT]
        return self._about("end", state="failed", error=text)

    def has_result(self, answer: JsonDict) -> bool:
        """Take the result of an answer, if it has one; return whether it has."""
        found = self.taken(answer)
        if found["state"] == "done":
            self.result = stored_value(found["output"], f"result of {self._what}")
        return found["state"] == "done"

    def again(self, error: Exception) -> bool:
        """Return whether the call is repeated after this error."""
        if isinstance(error, (errors.JobSignal, errors.ClaimLost, errors.InvalidPayload)):
            return False
        self.pause_s = next(self._pauses, -1.0)
        return self.pause_s >= 0


class Cursor(_Recorded):
    """One `steps` loop in this attempt."""

    kind, calls, arguments = "cursor", "loop", "items"

    def __init__(self, steps: AttemptSteps, name: str, key: str | int | None, items: Any) -> None:
        super().__init__(steps, name, key, _items_digest(items))
        self._done = 0

    def end(self) -> JsonDict:
        """Return the request to record that all items are done."""
        self._steps.cursors.pop((self._name, self._key), None)
        return self._about("end", state="done", position=self._done)

    def begun(self, answer: JsonDict) -> int | None:
        """Return how many items are done; None if all. Raises `StepRefused` for other items."""
        found = self.taken(answer)
        if found["state"] == "done":
            return None
        self._done = found["position"]
        return self._done

    def advance(self) -> None:
        """Note that one more item is done."""
        self._done += 1
        self._steps.cursors[self._name, self._key] = self._done
        self._steps.control.note_cursor(self._name, self._key, self._done)


class Wait:
    """One sleep, or one wait for an event, in this attempt."""

    def __init__(self, steps: AttemptSteps, kind: str, name: str, key: str, **more: Any) -> None:
        self._steps = steps
        self._what = _described(kind, name, key)
        self._request = {"op": "wait", "kind": kind, "name": name, "key": key, **more}

    @classmethod
    def sleep(cls, steps: AttemptSteps, seconds: float, key: str | int | None) -> Wait:
        """Return the wait of a `sleep`. Raises `StepRefused` for a bad time or key."""
        after_s, text = _seconds(seconds, "the time to sleep"), checked_key(key)
        found = cls(steps, "sleep", "sleep", text, after_s=after_s, default="null")
        steps.use(found._what, "call", "sleep", text)
        return found

    @classmethod
    def event(
        cls,
        steps: AttemptSteps,
        name: str,
        key: str | int | None,
        timeout_s: float | None,
        default: Any,
    ) -> Wait:
        """Return the wait for an event. Raises `StepRefused` and `InvalidPayload`."""
        name = checked_name(name)
        after_s = None if timeout_s is None else _seconds(timeout_s, "'timeout_s'")
        text = payload.encode(default, f"default of event {name!r}")
        return cls(steps, "event", name, checked_key(key), after_s=after_s, default=text)

    def ask(self) -> control.Answered:
        """Send the request."""
        return self._steps.ask(self._request)

    def taken(self, answer: JsonDict) -> Any:
        """Return the value of a wait that is over; end the attempt of one that is not."""
        found = control.value_of(answer)
        if found["state"] == "waiting":
            raise control.Suspended(f"waits for {self._what}")
        return stored_value(found["output"], f"value of {self._what}")


def _described(kind: str, name: str, key: str) -> str:
    return f"{kind} {name!r}" + (f" (key {key!r:.120})" if key else "")


class StreamParts:
    """The parts of one attempt that are not sent yet, and how many there were; thread-safe.

    The handler waits for the answer to each batch that it sends. So it never has more than one
    batch under way, and is slowed down to the speed of the database.
    """

    def __init__(self, ask: control.Ask, control_: control.Control) -> None:
        self._ask = ask
        self._control = control_
        self._lock = threading.Lock()
        self._names: list[str] = []
        self._parts: list[str] = []
        self._size = 0
        self._count = 0
        self._bytes = 0
        self._sent_at = -EVERY_S
        self._unanswered = False
        """Whether a request is under way whose answer is not awaited. The next answer shows that it
        was carried out, since they come in order."""

    def add(self, name: str, value: object) -> control.Answered | None:
        """Add a part; return the answer to come if a batch was sent, which the caller awaits.

        Raises `StepRefused` for a bad name, and `InvalidPayload` for a value that is not JSON or
        over a limit (ValueErrors).
        """
        name = checked_name(name)
        text = payload.encode(value, f"part of stream {name!r}")
        with self._lock:
            self._check(name, len(text))
            self._names.append(name)
            self._parts.append(text)
            self._count += 1
            self._bytes += len(text)
            self._size += len(text)
            full = self._size >= BATCH_BYTES or len(self._parts) >= BATCH_PARTS
            if full or self._unanswered or time.monotonic() - self._sent_at >= EVERY_S:
                self._unanswered = False
                return self._ask(self._take())
            first = len(self._parts) == 1
        if first:
            self._control.send_later(self.flush)
        return None

    def _check(self, name: str, size: int) -> None:
        if size > PART_KB * payload.KIB:
            raise errors.InvalidPayload(
                f"stream {name!r}: a part has {size / payload.KIB:.0f} KiB of JSON, more than the "
                f"limit of {PART_KB} KiB; divide it, or stream a path instead"
            )
        if self._count >= MAX_PARTS:
            raise errors.InvalidPayload(
                f"stream {name!r}: this attempt has streamed {MAX_PARTS} parts, which is the "
                "limit; stream larger parts"
            )
        if self._bytes + size > MAX_MB * payload.KIB * payload.KIB:
            raise errors.InvalidPayload(
                f"stream {name!r}: with this part, this attempt has streamed more than the "
                f"{MAX_MB} MiB of an attempt; write a file and stream its path"
            )

    def rest(self) -> control.Answered | None:
        """Send the rest; return the answer that proves its storage, or None if all is stored."""
        with self._lock:
            if not (self._parts or self._unanswered):
                return None
            self._unanswered = False
            return self._ask(self._take())

    def flush(self, send: Callable[[JsonDict], object]) -> None:
        """Send the remaining parts by a function that does not wait for an answer.

        The lock is held meanwhile, so that the handler's next batch is sent after this one.
        """
        if not self._lock.acquire(blocking=False):
            return self._control.send_later(self.flush)  # perhaps the handler adds its last part
        try:
            if self._parts and not self._unanswered:
                self._unanswered = True
                send(self._take())
        finally:
            self._lock.release()

    def _take(self) -> JsonDict:
        """Take the remaining parts, and return the request that sends them."""
        first = self._count - len(self._parts) + 1
        request: JsonDict = {
            "op": "stream", "first": first, "names": self._names, "parts": self._parts,
        }  # fmt: skip
        self._names, self._parts, self._size = [], [], 0
        self._sent_at = time.monotonic()
        return request


# --- Names, keys, times and arguments of steps.


def checked_name(given: Any) -> str:
    """Return the name of a step. Raises `StepRefused` unless it is a short, printable text."""
    is_plain = isinstance(given, str) and given.isprintable() and payload.is_storable(given)
    if not is_plain or not 1 <= len(given) <= NAME_LENGTH:
        raise errors.StepRefused(
            f"the name of a step must be a printable text of 1 to {NAME_LENGTH} characters, not "
            f"{ascii(given)[:80]}"
        )
    return given


def checked_key(given: Any) -> str:
    """Return the key of a step as text, "" for None; raise `StepRefused` as for a name."""
    if given is None:
        return ""
    text = str(given) if type(given) is int else given
    shown = ascii(given)[:80]
    if not (isinstance(text, str) and text and text.isprintable() and payload.is_storable(text)):
        raise errors.StepRefused(f"'key' must be a whole number or a printable text, not {shown}")
    if len(text.encode()) > KEY_BYTES:
        raise errors.StepRefused(f"'key' is longer than {KEY_BYTES:,} bytes: {shown}")
    return text


def _seconds(given: Any, what: str) -> float:
    """Return a time to wait. Raises `StepRefused` for anything but 0 s to 366 days."""
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise errors.StepRefused(f"{what} must be a number, not {ascii(given)[:80]}")
    if not 0 <= given <= policy.MAX_WAIT_S:
        raise errors.StepRefused(f"{what} must be 0 s to 366 days, not {given!r:.40} s")
    return float(given)


def _digest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str]:
    """Return a hash of the arguments of a call, and their text for people, cut.

    JSON values, paths, dates, bytes and dataclasses count by their value, other objects by their
    type alone: a model or an open file is not the same object in a later attempt.
    """
    text = f"({', '.join([*map(_text, args), *(f'{k}={_text(v)}' for k, v in kwargs.items())])})"
    ordered = [*map(_text, args), *(f"{name}={_text(kwargs[name])}" for name in sorted(kwargs))]
    found = hashlib.sha256("\0".join(ordered).encode("utf-8", "surrogatepass"))
    shown = masking.mask(payload.UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", text))
    return found.hexdigest(), shown[:SHOWN]


def _items_digest(items: Any) -> tuple[str, str]:
    """Return a hash of the items of a loop, and a short text about them for people.

    A range, and a list or tuple of up to MOST_ITEMS, are hashed by their items; others by their
    length alone. All iterables without a length (a generator, an open file) have the same hash.
    """
    if isinstance(items, (list, tuple)) and len(cast("Sequence[Any]", items)) <= MOST_ITEMS:
        return _digest((list(cast("Sequence[Any]", items)),), {})
    if isinstance(items, range):
        shown = repr(items)
    else:
        shown = f"{len(cast('Sized', items))} items" if isinstance(items, Sized) else "items"
    return hashlib.sha256(shown.encode()).hexdigest(), shown


def _text(value: Any) -> str:
    try:
        return json.dumps(value, default=_plain, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return f"<{type(value).__module__}.{type(value).__qualname__}>"


def _plain(value: Any) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, (bytes, bytearray)):
        return f"<{len(value)} bytes {hashlib.sha256(value).hexdigest()[:16]}>"
    try:
        return payload.plain(value, "argument")
    except errors.InvalidPayload:
        return f"<{type(value).__module__}.{type(value).__qualname__}>"


def stored_value(text: str | None, what: str) -> Any:
    """Return the value of stored JSON text. Raises `UnreadableRow` for what cannot be loaded."""
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise errors.UnreadableRow(f"{what} cannot be read: {error}") from None
