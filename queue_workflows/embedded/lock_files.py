"""Take and release the lock files of the embedded server."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

_lock_fds: set[int] = set()


def open_lock(path: Path) -> int:
    """Open the lock file, created if missing, and return a descriptor that no command inherits."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    _lock_fds.add(fd)
    return fd


def try_lock(fd: int) -> bool:
    """Try to take the exclusive lock at once; return whether that succeeded."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def close_lock(fd: int) -> None:
    """Close this copy; the lock lasts while another process has an inherited copy."""
    _lock_fds.discard(fd)
    os.close(fd)


def release_lock(fd: int) -> None:
    """Unlock and close, even if others have a copy of the descriptor."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    close_lock(fd)


def forget_locks() -> None:
    """Close the copies in a forked child; the parent's locks stay."""
    for fd in _lock_fds:
        with contextlib.suppress(OSError):
            os.close(fd)
    _lock_fds.clear()
