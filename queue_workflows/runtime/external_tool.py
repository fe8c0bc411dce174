"""Run an external tool for its output, although it may hang, fail or print garbage."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import time
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
