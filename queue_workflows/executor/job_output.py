"""Send what handlers print as messages, where several jobs share one executor.

Only what Python code writes to `sys.stdout` and `sys.stderr` is known to be of a job. The output of
child processes and of C code reaches the worker's own output alone.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

LINE: Final = 8000
"""Characters after which a line is sent without its end."""
PIECE: Final = 1 << 20
"""Characters of one message: a message has a limit, and what a handler prints has none."""


class JobOutput:
    """The lines that handlers print, each for the job of the context in which it was printed."""

    def __init__(self, key: Callable[[], int | None], send: Callable[[int, str], object]) -> None:
        self._key = key
        self._send = send
        self._lock = threading.Lock()
        self._rest: dict[int, str] = {}
        """The lines that have no end yet, by the key of their job."""

    def install(self) -> None:
        """Take the place of `sys.stdout` and `sys.stderr`, which go on printing."""
        for name in ("stdout", "stderr"):
            setattr(sys, name, JobStream(getattr(sys, name), self.add))

    def add(self, text: str) -> None:
        """Send the lines that are complete now, if this is printed in a job."""
        key = self._key()
        if key is None:
            return
        with self._lock:
            whole = self._rest.pop(key, "") + text
            lines, _, rest = whole.rpartition("\n")
            if len(rest) > LINE:
                lines, rest = whole, ""
            if rest:
                self._rest[key] = rest
        for start in range(0, len(lines), PIECE):
            self._send(key, lines[start : start + PIECE])

    def end(self, key: int) -> None:
        """Send the last line of a job, which has ended."""
        with self._lock:
            rest = self._rest.pop(key, "")
        if rest:
            self._send(key, rest)


class JobStream:
    """A text stream that shows a `JobOutput` what is written to it."""

    def __init__(self, stream: Any, add: Callable[[str], object]) -> None:
        self._stream = stream
        self._add = add

    def write(self, text: str) -> int:
        """Write a text; return its length."""
        written = self._stream.write(text)
        self._add(text)
        return written

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for each in lines:
            self.write(each)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
