"""Run a command with a text on stdin, although it may hang or fail."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence

from queue_workflows.runtime import external_tool

STEP_S = 0.1
"""Seconds between two checks whether the caller has to stop."""


class PipedCommand:
    """A program with its arguments; not for two threads at once.

    Its output goes to this process's stderr. A process that SIGKILL does not end is left behind,
    and the command is not started again while it exists.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = list(argv)
        self._left: subprocess.Popen[bytes] | None = None

    def run(
        self, text: bytes, *, timeout_s: float, ends_early: Callable[[], bool] = lambda: False
    ) -> str | None:
        """Run it for at most `timeout_s`; return what went wrong, or None. Raises nothing.

        Its process group is killed at the timeout, and as soon as `ends_early()` is true.
        """
        name = self._argv[0]
        if self._left is not None and self._left.poll() is None:
            return f"an earlier {name} still hangs"
        self._left = None
        try:
            # A file, as a pipe would block on a command that does not read.
            with tempfile.TemporaryFile() as given:
                given.write(text)
                given.seek(0)
                process = subprocess.Popen(
                    self._argv, stdin=given, stdout=2, start_new_session=True
                )
        except OSError as error:
            return f"{name} cannot be started: {error.strerror or error}"
        try:
            return self._wait(process, timeout_s, ends_early)
        finally:
            if process.returncode is None:
                self._left = external_tool.kill_group(process)

    def _wait(
        self,
        process: subprocess.Popen[bytes],
        timeout_s: float,
        ends_early: Callable[[], bool],
    ) -> str | None:
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            if ends_early():
                return f"{self._argv[0]} was killed, as this process stops"
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(min(STEP_S, left_s))
                return None if code == 0 else f"{self._argv[0]} ended with {code}"
        return f"{self._argv[0]} did not end within {timeout_s:g} s, and was killed"
