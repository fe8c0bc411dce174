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
import stat
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import NamedTuple

from queue_workflows.embedded import cluster
from queue_workflows.runtime import app_loading

LOCK = "ups.lock"


class Up(NamedTuple):
    """A running `up`: its process, its app as `--app` names it, and its start (UTC).

    `sources`: the files of its app. `checksum`: their checksum when it loaded them.
    """

    database: str
    pid: int
    app: str
    since: str
    sources: list[str]
    checksum: str


@contextlib.contextmanager
def registered(
    folder: Path, database: str, app: str, *, refuse: Callable[[list[Up]], None]
) -> Generator[None]:
    """Register this process as an `up` of `app` while the block runs.

    `refuse` gets the ones that work on the database already, and raises to prevent the
    registration. No other process registers meanwhile.
    """
    path = folder / "up" / f"{database}.{secrets.token_hex(8)}"
    cluster.make_folder(folder / "up")
    with cluster.locked(folder / LOCK):
        refuse(_live(folder, database))
        fd = cluster.open_lock(path)
        fcntl.flock(fd, fcntl.LOCK_EX)
        record = {
            "pid": os.getpid(),
            "app": app,
            "since": datetime.datetime.now(datetime.timezone.utc).isoformat(" ", "seconds"),
            "sources": (files := app_loading.sources(app) if app else []),
            "checksum": app_loading.checksum(files),
        }
        os.write(fd, json.dumps(record).encode())
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        cluster.release_lock(fd)


def live(folder: Path, database: str | None = None) -> list[Up]:
    """Return the `up` processes that run now, on one database or on all."""
    cluster.make_folder(folder / "up")
    with cluster.locked(folder / LOCK):
        return _live(folder, database)


def _live(folder: Path, database: str | None) -> list[Up]:
    found = list[Up]()
    for path in sorted((folder / "up").iterdir()):
        name = path.name.partition(".")[0]
        if database not in (None, name):
            continue
        fd = cluster.open_lock(path)
        try:
            # From here on its process may end, and remove it.
            if cluster.try_lock(fd):
                path.unlink(missing_ok=True)
                continue
            record = os.pread(fd, os.fstat(fd).st_size, 0)
            with contextlib.suppress(TypeError, ValueError):  # of another version, or cut short
                found.append(Up(database=name, **json.loads(record)))
        finally:
            cluster.close_lock(fd)
    return found


def state_folder() -> Path:
    """Return the folder of these files for a server of the user's own.

    It is $STATE_DIRECTORY, which systemd sets, else a folder of this user among the temporary
    files.
    """
    named = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    return Path(named or Path(tempfile.gettempdir(), f"queue_workflows-{os.getuid()}"))


def is_ours(folder: Path) -> bool:
    """Return whether the folder belongs to this user and only this user may write there."""
    found = folder.lstat()
    mode = stat.S_IMODE(found.st_mode)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not mode & 0o022
