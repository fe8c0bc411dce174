"""Let a worker's process be dead, and its parent find it and hand its claims back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from queue_workflows import db
from queue_workflows.runtime import identity, supervisor
from queue_workflows.types import Row
from queue_workflows.worker import parent as worker_parent

if TYPE_CHECKING:
    import pytest


class Death(NamedTuple):
    """How a process has ended, by default this one; without code and signal: unknown."""

    pid: int | None = None
    code: int | None = None
    signum: int | None = None
    rss_mb: int = 42
    overdue: str | None = None


def killed(pid: int | None = None) -> Death:
    """Return the death of a process by SIGKILL."""
    return Death(pid, signum=signal.SIGKILL)


def dead_pid() -> int:
    """Return the id of a process that has ended."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    assert dead.wait(30) == 0
    return dead.pid


def worker_id(host: str, pid: int | None = None, suffix: str = "x") -> str:
    """Return the id of a worker in a process, by default this one."""
    return identity.process_prefix(host, os.getpid() if pid is None else pid) + suffix


def id_with_executors(host: str) -> str:
    """Return the id of a worker in this process whose handlers run in others."""
    return identity.new_worker_id(host, executors=True)


def recover(conn: db.Connection, death: Death, host: str, **more: Any) -> list[Row]:
    """Hand the claims of a dead worker back, as its parent does; return the changed rows."""
    return worker_parent.recover_claims(conn, _exit(death), host_label=host, **more)


def _exit(death: Death) -> supervisor.Exit:
    pid = os.getpid() if death.pid is None else death.pid
    return supervisor.Exit("w", pid, death.code, death.signum, death.rss_mb, 0.5, death.overdue)


@contextmanager
def parent(host: str) -> Generator[Callable[[Death], None]]:
    """Yield what reports deaths to a parent, which hands their claims back."""
    with worker_parent.CrashRecovery(host) as made:
        yield lambda death: made.report(_exit(death))


def retry_after(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let a parent that cannot reach the database try again after these seconds."""
    monkeypatch.setattr(worker_parent, "RETRY_S", seconds)


def look_again_after(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let a parent look once more for claims of a dead worker after these seconds."""
    monkeypatch.setattr(worker_parent, "AGAIN_S", seconds)
