"""Collect what a running handler streams, and send it in batches to what stores it."""

from __future__ import annotations

import threading
import time
from typing import Final

from queue_workflows import config, errors
from queue_workflows.dag import payload, step_arguments
from queue_workflows.tasks import attempt_steps
from queue_workflows.types import JsonDict

EVERY_S: Final = 0.1
"""Seconds between two batches of a handler that streams all the time."""
BATCH_BYTES: Final = 256 * payload.KIB
BATCH_PARTS: Final = 1000
"""Size of a batch that is sent at once; it bounds a message to the worker, and its statement."""
PART_KB_MAX: Final = 1024
"""KiB that the table allows for a part, whatever STREAM_PART_KB says."""


class AttemptParts:
    """The parts of one attempt that are not sent yet, and how many there were; thread-safe.

    The handler waits for the answer to each batch that it sends. So it never has more than one
    batch under way, and is slowed down to what the database takes.
    """

    def __init__(self, ask: attempt_steps.Ask, control: object) -> None:
        """`control`: its `send_later`, if it has one, sends what is left without a further call."""
        self._ask = ask
        self._control = control
        self._lock = threading.Lock()
        self._names: list[str] = []
        self._parts: list[str] = []
        self._size = 0
        self._count = 0
        self._bytes = 0
        self._sent_at = -EVERY_S
        self._unanswered = False
        """Whether a request is under way whose answer nobody awaits. The next answer shows that it
        was carried out, since they come in order."""

    def add(self, name: str, value: object) -> attempt_steps.Answered | None:
        """Add a part; return the answer to come if a batch was sent, which the caller awaits.

        Raises `StepRefused` for a bad name, and `InvalidPayload` for a value that is no JSON or
        beyond a limit (ValueErrors).
        """
        name = step_arguments.name(name)
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
                return self._send()
            first = len(self._parts) == 1
        if first and (later := getattr(self._control, "send_later", None)) is not None:
            later(self.take_later)
        return None

    def _check(self, name: str, size: int) -> None:
        limit_kb = min(config.STREAM_PART_KB.read(), PART_KB_MAX)
        if size > limit_kb * payload.KIB:
            raise errors.InvalidPayload(
                f"stream {name!r}: a part has {size / payload.KIB:.0f} KiB of JSON, more than the "
                f"{limit_kb} KiB of STREAM_PART_KB; divide it, or stream a path instead"
            )
        if self._count >= (most := config.STREAM_MAX_PARTS.read()):
            raise errors.InvalidPayload(
                f"stream {name!r}: this attempt has streamed {most} parts, the limit of "
                "STREAM_MAX_PARTS; stream larger parts, or raise it"
            )
        limit_mb = config.STREAM_MAX_MB.read()
        if self._bytes + size > limit_mb * payload.KIB * payload.KIB:
            raise errors.InvalidPayload(
                f"stream {name!r}: with this part, this attempt has streamed more than the "
                f"{limit_mb} MiB of STREAM_MAX_MB; write a file and stream its path, or raise it"
            )

    def rest(self) -> attempt_steps.Answered | None:
        """Send what is left; return the answer that shows that all is stored; None: it is."""
        with self._lock:
            return self._send() if self._parts or self._unanswered else None

    def take_later(self) -> JsonDict | None:
        """Return the request for what is left, for a sender that does not wait; None: nothing."""
        if not self._lock.acquire(blocking=False):
            return None  # a batch is sent at this moment
        try:
            if not self._parts or self._unanswered:
                return None
            self._unanswered = True
            return self._take()
        finally:
            self._lock.release()

    def _send(self) -> attempt_steps.Answered:
        request = self._take()
        self._unanswered = False
        return self._ask(request)

    def _take(self) -> JsonDict:
        """Return the request for what is left, which then is not left."""
        first = self._count - len(self._parts) + 1
        request: JsonDict = {
            "op": "stream", "first": first, "names": self._names, "parts": self._parts,
        }  # fmt: skip
        self._names, self._parts, self._size = [], [], 0
        self._sent_at = time.monotonic()
        return request
