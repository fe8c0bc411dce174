"""Run an external program although it may hang, fail or print garbage.

A `Tool` is run for its output, a `PipedCommand` with a text on stdin.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

PRINTED_LIMIT = 1 << 20
"""Bytes of output after which a tool is stopped."""
REAP_S = 0.2


class Answer(NamedTuple):
    """What a tool printed; None with the problem if it failed, `hung` if it was too slow."""

    text: str | None
    problem: str = ""
    hung: bool = False


class Tool:
    """A command on PATH, by name; not for two threads at once.

    A process that SIGKILL does not end (it waits in a driver) is left behind. It is not started
    again while it exists. So the caller does not wait, and the process table does not fill.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._left: subprocess.Popen[bytes] | None = None

    def ask(self, *arguments: str, timeout_s: float) -> Answer:
        """Run it for at most `timeout_s`, apart from REAP_S and the start; raises nothing."""
        if self._left is not None and self._left.poll() is None:
            return Answer(None, f"an earlier {self.name} still hangs", hung=True)
        self._left = None
        path = shutil.which(self.name)
        if path is None:
            return Answer(None, f"no {self.name} on PATH")
        try:
            return self._run([path, *arguments], timeout_s)
        except TimeoutError:
            return Answer(None, f"{self.name} did not end within {timeout_s:.1f} s", hung=True)
        except OSError as error:
            return Answer(None, f"{self.name}: {error.strerror or error}")

    def _run(self, argv: list[str], timeout_s: float) -> Answer:
        deadline = time.monotonic() + timeout_s
        process = subprocess.Popen(
            argv,
            bufsize=0,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            with process.stdout as pipe:
                printed = _read(pipe.fileno(), deadline)
            code = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        finally:
            if process.returncode is None:
                self._left = kill_group(process)
        if code != 0:
            return Answer(None, f"{self.name} ended with {code}")
        return Answer(printed.decode("utf-8", "replace"))


def kill_group(process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes] | None:
    """Kill a process and its group; return it if it has not ended REAP_S seconds later, else None.

    The process leads its group.
    """
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(REAP_S)
    except subprocess.TimeoutExpired:
        return process
    return None


def _read(fd: int, deadline: float) -> bytes:
    """Return all output to its end; raise TimeoutError, or OSError beyond PRINTED_LIMIT."""
    printed = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while len(printed) <= PRINTED_LIMIT:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not selector.select(left_s):
                raise TimeoutError
            chunk = os.read(fd, 65536)
            if not chunk:
                return bytes(printed)
            printed += chunk
    raise OSError(f"printed more than {PRINTED_LIMIT} bytes")


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
                self._left = kill_group(process)

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
