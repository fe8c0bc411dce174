"""A pseudo terminal on which a command runs, and the words that were shown there."""

from __future__ import annotations

import contextlib
import os
import pty
import re

SCREEN = {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
"""Variables of a command that runs on it."""


class Terminal:
    """Our end of a pseudo terminal, and all the words that were shown on it."""

    def __init__(self) -> None:
        self._ours, self.theirs = pty.openpty()
        os.set_blocking(self._ours, False)
        self._raw = ""

    def shows(self, pattern: str) -> re.Match[str] | None:
        """Return where the pattern matches the words, with one blank between two of them."""
        with contextlib.suppress(OSError):
            self._raw += os.read(self._ours, 1 << 16).decode(errors="replace")
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._raw)
        return re.search(pattern, " ".join(text.split()))

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def close(self) -> None:
        os.close(self._ours)
        os.close(self.theirs)
