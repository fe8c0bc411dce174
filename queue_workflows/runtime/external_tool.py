"""Run an external program that may hang, fail or print garbage.

A `Tool` is run for its output, a `PipedCommand` gets a text on stdin.
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
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, cast

PRINTED_LIMIT = 1 << 20
"""Bytes of output after which a tool is stopped."""
REAP_S = 0.2


class Answer(NamedTuple):
    """The output of a tool, or None and the problem if it failed; `hung` if it was too slow."""

    text: str | None
    problem: str = ""
    hung: bool = False


class _Command:
    """A program of which one thread runs at most one process at a time.

    A process that hangs in a driver may not end by SIGKILL. It is left behind, and the program is
    not started again while it exists. So the caller is not blocked, and processes do not pile up.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._left: subprocess.Popen[bytes] | None = None

    def _hangs(self) -> str:
        """Return a text if an earlier process still exists, else an empty text."""
        if self._left is not None and self._left.poll() is None:
            return f"an earlier {self.name} still hangs"
        self._left = None
        return ""

    @contextlib.contextmanager
    def _started(self, argv: Sequence[str], **options: Any) -> Generator[subprocess.Popen[bytes]]:
        """Start it in a group of its own, which is killed at the end of the block."""
        start = cast("Callable[..., subprocess.Popen[bytes]]", subprocess.Popen)
        process = start(argv, start_new_session=True, **options)
        try:
            yield process
        finally:
            if process.returncode is None:
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
                try:
                    process.wait(REAP_S)
                except subprocess.TimeoutExpired:
                    self._left = process


class Tool(_Command):
    """A command on PATH that is run for its output."""

    def ask(self, *arguments: str, timeout_s: float) -> Answer:
        """Run it for at most `timeout_s`, apart from REAP_S and the start; raises nothing."""
        if problem := self._hangs():
            return Answer(None, problem, hung=True)
        path = shutil.which(self.name)
        if path is None:
            return Answer(None, f"no {self.name} on PATH")
        try:
            return self._run([path, *arguments], time.monotonic() + timeout_s)
        except (TimeoutError, subprocess.TimeoutExpired):
            return Answer(None, f"{self.name} did not end within {timeout_s:.1f} s", hung=True)
        except OSError as error:
            return Answer(None, f"{self.name}: {error.strerror or error}")

    def _run(self, argv: list[str], deadline: float) -> Answer:
        null, env = subprocess.DEVNULL, {**os.environ, "LC_ALL": "C"}
        streams = {"stdin": null, "stdout": subprocess.PIPE, "stderr": null}
        with self._started(argv, bufsize=0, env=env, **streams) as process:
            assert process.stdout is not None
            with process.stdout as pipe:
                printed = _read(pipe.fileno(), deadline)
            code = process.wait(max(0.0, deadline - time.monotonic()))
        if code != 0:
            return Answer(None, f"{self.name} ended with {code}")
        return Answer(printed.decode("utf-8", "replace"))


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


class PipedCommand(_Command):
    """A program with its arguments that gets a text on stdin."""

    def __init__(self, argv: Sequence[str]) -> None:
        super().__init__(argv[0])
        self._argv = list(argv)

    def run(
        self,
        text: bytes,
        *,
        timeout_s: float,
        ends_early: Callable[[], bool] = lambda: False,
        output: int = 2,
    ) -> str | None:
        """Run it for at most `timeout_s`; return the fault, or None. Never raises.

        Its process group is killed at the timeout, and as soon as `ends_early()` is true. `output`
        is the descriptor for its output, by default this process's stderr.
        """
        if problem := self._hangs():
            return problem
        deadline = time.monotonic() + timeout_s
        try:
            # A file instead of a pipe, which would block if the command does not read.
            with tempfile.TemporaryFile() as given:
                given.write(text)
                given.seek(0)
                streams = {"stdin": given, "stdout": output, "stderr": output}
                with self._started(self._argv, **streams) as process:
                    while (left_s := deadline - time.monotonic()) > 0:
                        if ends_early():
                            return f"{self.name} was killed, as this process stops"
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            code = process.wait(min(STEP_S, left_s))
                            how = f"ended with exit code {code}"
                            how = how if code >= 0 else f"was killed by signal {-code}"
                            return f"{self.name} {how}" if code else None
        except OSError as error:
            return f"{self.name} cannot be started: {error.strerror or error}"
        return f"{self.name} did not end within {timeout_s:g} s, and was killed"
