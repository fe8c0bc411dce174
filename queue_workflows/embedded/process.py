"""Lock files of the embedded server, and running its commands without inherited state."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from queue_workflows import errors

_lock_fds: set[int] = set()


class Account(NamedTuple):
    """The user and group that a command runs as."""

    uid: int
    gid: int


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


def run(
    argv: Sequence[str],
    account: Account | None,
    cwd: Path,
    *,
    text: str = "",
    log_fd: int | None = None,
    inherit: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
) -> str:
    """Run a command in a session of its own with a clean environment; return its output.

    `account` None: this user. A failure is `EmbeddedUnavailable` with the last lines. An account
    that cannot be used, or a file that it cannot run, is an OSError.
    """
    environment = {
        name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ
    }
    done = subprocess.run(
        argv,
        input=text.encode(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if log_fd is None else log_fd,
        cwd=cwd,
        env={**environment, "LC_ALL": "C", "TZ": "UTC", **(env or {})},
        pass_fds=inherit,
        start_new_session=True,
        user=account.uid if account else None,
        group=account.gid if account else None,
        extra_groups=() if account else None,
        check=False,
    )
    printed = done.stdout.decode(errors="replace")
    if done.returncode:
        lines = [line for line in printed.splitlines() if line.strip()]
        raise errors.EmbeddedUnavailable(
            f"{Path(argv[0]).name} failed with {done.returncode}: {' / '.join(lines[-6:])}"
        )
    return printed


def can_run(argv: Sequence[str], account: Account) -> bool:
    """Return whether the account can run this command."""
    try:
        run(argv, account, Path("/"))
    except (OSError, errors.EmbeddedUnavailable):
        return False
    return True
