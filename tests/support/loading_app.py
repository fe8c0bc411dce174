"""Define an app that notes in a folder what each process that loads it does.

It opens a pipe at its import, as others do a connection to a server, and registers functions that
are called at a fork and at the end of a process. `REFUSE`: all but the first process that
loads it are refused. `THREAD`: it starts a thread. `FORK`: a process. `KILL`: it kills
the children of the first process that loads it.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from pathlib import Path

from queue_workflows import errors
from tests.support import toy_app

FOLDER = "LOADING_APP_FOLDER"
REFUSE = "LOADING_APP_REFUSES"
THREAD = "LOADING_APP_THREAD"
FORK = "LOADING_APP_FORK"
KILL = "LOADING_APP_KILLS"
_ends: list[int] = []


def noted(folder: Path, word: str) -> dict[int, str]:
    """Return the processes that noted this word, and what else they noted with it."""
    path = folder / "noted"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return {int(pid): more for first, pid, more in lines if first == word}


def _note(word: str, more: str = "-") -> None:
    fd = os.open(Path(os.environ[FOLDER]) / "noted", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(fd, f"{word} {os.getpid()} {more}\n".encode())
    finally:
        os.close(fd)


def _fork() -> None:
    """Leave a child that has all descriptors, and lives as long as this process."""
    parent = os.getpid()
    if not os.fork():
        while os.getppid() == parent:
            time.sleep(0.05)
        os._exit(0)


def setup() -> None:
    """Register what `toy_app` has."""
    if os.environ.get(REFUSE) and noted(Path(os.environ[FOLDER]), "loaded"):
        raise errors.InvalidConfig("the second one is refused")
    _ends.extend(os.pipe())
    _note("loaded", os.readlink(f"/proc/self/fd/{_ends[0]}"))  # noqa: PTH115
    atexit.register(_note, "ended")
    os.register_at_fork(before=lambda: _note("forks"))
    if os.environ.get(KILL) and len(noted(Path(os.environ[FOLDER]), "loaded")) == 1:
        for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
    if os.environ.get(FORK):
        _fork()
    if os.environ.get(THREAD):
        threading.Thread(target=threading.Event().wait, name="of the app", daemon=True).start()
    sys.stdout.write("printed while loading\n")
    toy_app.setup()
