"""Record which `queue-workflows up` serves which database of the embedded server.

Each has a file `up/<database>.<random>`, which it keeps locked: the kernel drops the lock with its
process, however that ends, so that a file without a lock is left over.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import secrets
from collections.abc import Callable, Generator
from pathlib import Path
from typing import NamedTuple

from queue_workflows.embedded import cluster, lock_files


class Up(NamedTuple):
    """A running `up`: its process, its app as `--app` names it, and its start (UTC)."""

    database: str
    pid: int
    app: str
    since: str


@contextlib.contextmanager
def registered(
    folder: Path, database: str, app: str, *, refuse: Callable[[list[Up]], None]
) -> Generator[None]:
    """Register this process as an `up` of `app` while the block runs.

    `refuse` gets those that work on the database already, and raises to register nothing. Nobody
    else registers meanwhile.
    """
    path = folder / "up" / f"{database}.{secrets.token_hex(8)}"
    with _alone(folder):
        refuse(_live(folder, database))
        fd = lock_files.open_lock(path)
        fcntl.flock(fd, fcntl.LOCK_EX)
        since = datetime.datetime.now(datetime.timezone.utc).isoformat(" ", "seconds")
        os.write(fd, json.dumps({"pid": os.getpid(), "app": app, "since": since}).encode())
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        lock_files.release_lock(fd)


def live(folder: Path, database: str | None = None) -> list[Up]:
    """Return the `up` processes that run now, on one database or on all."""
    with _alone(folder):
        return _live(folder, database)


@contextlib.contextmanager
def _alone(folder: Path) -> Generator[None]:
    cluster.make_folder(folder / "up")
    fd = lock_files.open_lock(folder / "ups.lock")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        lock_files.release_lock(fd)


def _live(folder: Path, database: str | None) -> list[Up]:
    found = list[Up]()
    for path in sorted((folder / "up").iterdir()):
        name = path.name.partition(".")[0]
        if database not in (None, name):
            continue
        fd = lock_files.open_lock(path)
        try:
            if lock_files.try_lock(fd):
                path.unlink()
                continue
            content = json.loads(os.pread(fd, 1 << 16, 0))
            found.append(Up(name, content["pid"], content["app"], content["since"]))
        finally:
            lock_files.close_lock(fd)
    return found
