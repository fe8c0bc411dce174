"""Keep the first and the last part of what one attempt prints, cut and masked for the database."""

from __future__ import annotations

import re
import threading

from queue_workflows.engine import job_tables, logs
from queue_workflows.runtime import entry_point

KIB = 1024


class Recording:
    """The captured log of one attempt: the first and last half of the limit, in bytes of UTF-8."""

    def __init__(self, lease: job_tables.Lease, cap_kb: int) -> None:
        self.lease = lease
        self._half = cap_kb * KIB // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0
        self._head_stored = 0
        self._lock = threading.RLock()
        self.changed = False
        """Whether anything was added since the last `written`."""

    def add(self, data: bytes | bytearray) -> None:
        """Add output; keep what the limit allows."""
        with self._lock:
            self._total += len(data)
            self.changed = True
            if room := self._half - len(self._head):
                self._head += data[:room]
                data = data[room:]
            # One byte more than is kept shows whether a line begins there.
            self._tail += data[-self._half - 1 :]
            if len(self._tail) > 2 * self._half:
                del self._tail[: -self._half - 1]

    def written(self) -> logs.Written:
        """Return the log to store now, without a head that is stored already."""
        with self._lock:
            self.changed = False
            head, tail, total = bytes(self._head), bytes(self._tail), self._total
        if total > len(head):
            size = _end_of_whole(head)
            head, rest = head[:size], head[size:]
            if total == size + len(rest) + min(len(tail), self._half):
                tail = rest + tail
            else:
                tail = tail[-self._half - 1 :]
                tail = tail[_start_of_whole(tail) :]
        cut = total - len(head) - len(tail)
        new = len(head) != self._head_stored
        self._head_stored = len(head)
        return logs.Written(self.lease, _text(head) if new else None, _text(tail), cut)

    def mark_unstored(self) -> None:
        """Note that the last `written` was not stored, so that the next one is complete."""
        self._head_stored = 0
        self.changed = True


_DSN_BEGUN = re.compile(rb":(?:/|//\S*)?\Z")


def _end_of_whole(head: bytes) -> int:
    """Return where to end a head, so that a cut does not hide a secret from masking.

    Cut at a line or a word, unless that drops more than half.
    """
    for mark in (b"\n", b" "):
        if (at := head.rfind(mark)) >= len(head) // 2:
            return at + 1
    begun = _DSN_BEGUN.search(head, len(head) // 2)
    return begun.start() if begun else len(head)


def _start_of_whole(tail: bytes) -> int:
    """Return where to begin a tail whose first byte is not kept, by the same rule."""
    for mark in (b"\n", b" "):
        if (at := tail.find(mark, 0, len(tail) // 2)) >= 0:
            return at + 1
    word = re.match(rb"\S*", tail)
    assert word is not None
    return max(word[0].rfind(b"@") + 1, 1)


def _text(data: bytes) -> str:
    """Return the text as the database takes it, masked and without a character that was cut."""
    text = data.decode("utf-8", "ignore").replace("\0", "\N{REPLACEMENT CHARACTER}")
    return entry_point.mask(text)
