"""Send what handlers print as messages, where several jobs share one executor.

Only what Python code writes to `sys.stdout` and `sys.stderr` is known to be of a job. The output of
child processes and of C code reaches the worker's own output alone.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

from queue_workflows.runtime import printed_lines
from queue_workflows.types import JsonDict

LINE: Final = 8000
"""Characters after which a line is sent without its end."""
PIECE: Final = 1 << 20
"""Characters of one message: a message has a limit, and what a handler prints has none."""


class JobOutput:
    """The lines that handlers print, each for the job of the context in which it was printed.

    `send` gets the key of a job and records as of `log_sender`, with the stream on which the worker
    is to print the lines as JSON: empty if they were printed here.
    """

    def __init__(self, key: Callable[[], int], send: Callable[[int, JsonDict], object]) -> None:
        self._key = key
        self._send = send
        self._lock = threading.Lock()
        self._rest: dict[tuple[int, str], str] = {}
        """The lines that have no end yet, by the key of their job and the stream."""
        self._as_json = False

    def install(self) -> None:
        """Take the place of `sys.stdout` and `sys.stderr`, before `log_sender.install`.

        They go on printing what is of no job, and all if the logs are no JSON.
        """
        self._as_json = printed_lines.is_wanted()
        for name in ("stdout", "stderr"):
            add = functools.partial(self.add, name)
            setattr(sys, name, JobStream(getattr(sys, name), add))

    def add(self, stream: str, text: str) -> bool:
        """Send the lines that are complete now; return whether the worker prints them."""
        key = self._key()
        if not key:
            return False
        place = key, stream
        with self._lock:
            whole = self._rest.pop(place, "") + text
            lines, _, rest = whole.rpartition("\n")
            if len(rest) > LINE:
                lines, rest = whole, ""
            if rest:
                self._rest[place] = rest
        for start in range(0, len(lines), PIECE):
            self._send_lines(key, lines[start : start + PIECE], stream)
        return self._as_json

    def end(self, key: int) -> None:
        """Send the last lines of a job, which has ended."""
        for stream in ("stdout", "stderr"):
            with self._lock:
                rest = self._rest.pop((key, stream), "")
            if rest:
                self._send_lines(key, rest, stream)

    def _send_lines(self, key: int, text: str, stream: str) -> None:
        on = stream if self._as_json else ""
        record: JsonDict = {"level": logging.INFO, "name": printed_lines.LOGGER, "text": text}
        self._send(key, record | {"printed": False, "fields": None, "stream": on})


class JobStream:
    """A text stream that shows a `JobOutput` what is written to it."""

    def __init__(self, stream: Any, add: Callable[[str], bool]) -> None:
        self._stream = stream
        self._add = add

    def write(self, text: str) -> int:
        """Write a text; return its length."""
        return len(text) if self._add(text) else self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for each in lines:
            self.write(each)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
