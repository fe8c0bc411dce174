"""End a test session that takes too long, and say which tests were under way or had failed.

It runs in the process that was started: with `-n` in the controller, which hears of each test.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 900.0
"""For README's command. Sessions with slow tests take longer, and say so by the variable."""
VARIABLE = "QW_TEST_LIMIT_S"
EXIT_CODE = 3


class SessionLimit:
    """A pytest plugin that ends the session after `limit_s` seconds."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._capture: Any = None
        self._under_way: dict[str, float] = {}
        self._failed: list[str] = []
        self._timer = threading.Timer(limit_s, self._end)
        self._timer.daemon = True
        self._timer.name = "session-limit"

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._capture = session.config.pluginmanager.getplugin("capturemanager")
        self._timer.start()

    def pytest_sessionfinish(self) -> None:
        self._timer.cancel()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._under_way[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._under_way.pop(nodeid, None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.append(f"{report.nodeid}\n{report.longreprtext[-3000:]}")

    def _end(self) -> None:
        now = time.monotonic()
        lines = [f"  {now - since:6.0f} s  {nodeid}" for nodeid, since in self._under_way.items()]
        listed = "\n".join(lines or ["  none"])
        text = (
            f"\nThe test session took longer than {self._limit_s:.0f} s ({VARIABLE} sets the "
            f"limit). Tests under way:\n{listed}\n"
        )
        if self._failed:
            text += "Tests that have failed:\n" + "\n".join(self._failed) + "\n"
        self._capture.suspend_global_capture(in_=False)
        os.write(2, text.encode())
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os._exit(EXIT_CODE)


def _descendants(pid: int) -> list[int]:
    """Return the children of a process, their children, and so on; the processes of `-n`."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *_descendants(child)]
    return found


def install(config: pytest.Config) -> None:
    """Limit the session of this process; a process of `-n` is limited by its controller."""
    if hasattr(config, "workerinput"):
        return
    given = os.environ.get(VARIABLE)
    quick = config.getoption("markexpr") == "not slow"
    limit_s = float(given) if given else (LIMIT_S if quick else 4 * LIMIT_S)
    config.pluginmanager.register(SessionLimit(limit_s), "session-limit")
