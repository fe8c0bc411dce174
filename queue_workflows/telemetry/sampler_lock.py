"""Let one process per host label and database sample the machine: the one that holds a file."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
from pathlib import Path

from queue_workflows import db

_log = logging.getLogger(__name__)


class SamplerLock:
    """The lock file of a host label and database in a folder; it is free when its holder ends."""

    def __init__(self, host: str, folder: Path) -> None:
        self._host = host
        self._folder = folder
        self._fd: int | None = None

    @property
    def is_held(self) -> bool:
        """Return whether this process holds the lock."""
        return self._fd is not None

    def take(self) -> bool:
        """Take the lock unless it is held; return whether it is. A clean-up may remove its file."""
        path = self._folder / lock_name(self._host)
        if self._fd is not None:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(self._fd), path.stat()):
                    return True
            os.close(self._fd)
        self._fd = _try_lock(path)
        return self._fd is not None

    def release(self) -> None:
        """Release the lock if it is held."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def lock_name(host: str) -> str:
    """Return the name of the lock file for this host label and this database."""
    digest = hashlib.sha256(f"{host}\n{db.describe()}".encode(errors="replace")).hexdigest()
    return f"queue_workflows-hw-{digest[:16]}.lock"


def _try_lock(path: Path) -> int | None:
    """Take the lock and return its descriptor; None if another process has it or it fails."""
    try:
        fd = _opened(path)
    except OSError as error:
        _log.debug("no samples: %s", error)
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def _opened(path: Path) -> int:
    # O_NONBLOCK: anybody can create a FIFO of this name, and opening one would block.
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, os.O_RDONLY | flags)  # a file of another account suffices
    except FileNotFoundError:
        return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o644)
