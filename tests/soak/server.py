"""Start a throw-away PostgreSQL for the soak, which can be stopped at any moment."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from queue_workflows import embedded
from queue_workflows.embedded import cluster
from tests.support import database, reaper, wait

SETTINGS = {"fsync": "on", "synchronous_commit": "on", "log_min_messages": "fatal"}
DRIVER = "soak-driver"
_FOLDERS = "qw-soak-"
_DIR = "QUEUE_WORKFLOWS_EMBEDDED_DIR"


class Server:
    """A running server; `restart` is immediate: no checkpoint, every connection dies."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.folder = base / "pg"
        self._handles: list[embedded.Server] = []
        self._ensure()

    def _ensure(self) -> None:
        with database.environment(**{_DIR: str(self.folder)}):
            self._handles.append(embedded.ensure(settings=SETTINGS))

    @property
    def dsn(self) -> str:
        """Return the DSN over the unix socket."""
        return self._handles[0].dsn

    def restart(self) -> None:
        """Stop the server by `pg_ctl -m immediate stop`, then start it."""
        running = cluster.running(self.folder)
        if running is not None and running.pid is not None:
            os.kill(running.pid, signal.SIGQUIT)
            wait.until(lambda: not cluster.alive(self.folder), timeout_s=30)
        self._ensure()

    def close(self) -> None:
        """Stop it."""
        for handle in self._handles:
            handle.release()


@contextmanager
def throw_away() -> Generator[Server]:
    """Yield a server in a folder of its own; remove both, and those of killed soaks."""
    _sweep()
    base = Path(tempfile.mkdtemp(prefix=_FOLDERS))
    reaper.own(base)
    base.chmod(0o711)  # as root the server runs under another account, which has to pass
    lock = os.open(base / "run.new", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (base / "run.new").rename(base / "run.lock")
    try:
        server = Server(base)
        try:
            yield server
        finally:
            server.close()
    finally:
        shutil.rmtree(base, ignore_errors=True)
        os.close(lock)


def _sweep() -> None:
    for base in Path(tempfile.gettempdir()).glob(f"{_FOLDERS}*"):
        with suppress(OSError):
            fd = os.open(base / "run.lock", os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if (base / "pg").exists() and cluster.alive(base / "pg"):
                    with database.environment(**{_DIR: str(base / "pg")}):
                        embedded.ensure(create=False).release()
                shutil.rmtree(base, ignore_errors=True)
            finally:
                os.close(fd)
