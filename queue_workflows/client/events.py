"""Read server-sent events, and remember which one was the last."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final, cast

from queue_workflows import errors
from queue_workflows.requests.catalog import Event, Stream

MAX_BYTES: Final = 16 * 1024 * 1024
"""Bytes of one event."""
RETRY_S: Final = 2.0
RETRY_MAX_S: Final = 60.0
REMEMBERED: Final = 10_000
"""Ids of events that are not returned again when a stream is resumed."""
SILENCE_S: Final = 60.0
"""A stream on which nothing arrived for so long is opened again; the service sends sooner."""


class Parser:
    """Makes events of the bytes of a stream."""

    def __init__(self) -> None:
        self._buffer = b""
        self._kind = ""
        self._id = ""
        self._data: list[str] = []
        self._size = 0
        self.retry_s = RETRY_S
        """How long to wait before the stream is opened again."""

    def feed(self, received: bytes) -> Iterator[Event]:
        """Yield the events that are complete now. Raises `ServiceFailed` for one of any length."""
        self._buffer += received
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            if (event := self._line(line.removesuffix(b"\r"))) is not None:
                yield event
        if len(self._buffer) + self._size > MAX_BYTES:
            raise errors.ServiceFailed(f"an event of more than {MAX_BYTES:,} bytes")

    def _line(self, line: bytes) -> Event | None:
        if not line:
            return self._end()
        name, _, value = line.decode("utf-8", "replace").partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
            self._size += len(line)
        elif name == "event":
            self._kind = value
        elif name == "id" and "\0" not in value:
            self._id = value
        elif name == "retry" and value.isascii() and value.isdigit() and len(value) < 9:
            self.retry_s = min(int(value) / 1000, RETRY_MAX_S)
        return None

    def _end(self) -> Event | None:
        text, kind = "\n".join(self._data), self._kind
        self._data, self._kind, self._size = [], "", 0
        if not text:
            return None
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            data = None
        if not isinstance(data, dict):
            raise errors.ServiceFailed("an event is no JSON object: this is not the service")
        return Event(self._id, kind or "message", cast("dict[str, Any]", data))


class Follower:
    """The place in a stream that is opened again after each end.

    Raises `InvalidConfig` for an id that no event has.
    """

    def __init__(self, stream: Stream[Any]) -> None:
        self.last_id = stream.last_id
        if self.last_id and not (self.last_id.isascii() and self.last_id.isprintable()):
            raise errors.InvalidConfig(f"no event has the id {self.last_id!r:.80}")
        call = stream.call(stream.read)
        self.path, self.query = call.path, call.query
        self._ends = stream.ends
        self.over = False
        """Whether the last event has come."""
        self.failures = 0
        """How often in a row it ended in an error before an event came."""
        self.parser = Parser()
        self._seen = OrderedDict[str, None]()

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers with which the stream is opened."""
        found = {"accept": "text/event-stream"}
        return found if self.last_id is None else found | {"last-event-id": self.last_id}

    def opened(self) -> None:
        """Forget what an interrupted stream has left."""
        retry_s = self.parser.retry_s
        self.parser = Parser()
        self.parser.retry_s = retry_s

    def feed(self, received: bytes) -> Iterator[Event]:
        """Yield the events that were not returned before."""
        for event in self.parser.feed(received):
            if self._ends and event.kind == "end":
                self.over = True
                return
            self.last_id = event.id or self.last_id
            key = f"{event.kind} {event.id} {event.data.get('run_id') or ''}"
            if event.id and key in self._seen:
                continue
            self._seen[key] = None
            if len(self._seen) > REMEMBERED:
                self._seen.popitem(last=False)
            self.failures = 0
            yield event
