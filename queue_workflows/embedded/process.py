"""Lock files and the commands of the server: what outlives a call, and what must not."""

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
    """A descriptor of its own on the lock file, made if it is absent; no command inherits it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    _lock_fds.add(fd)
    return fd


def try_lock(fd: int) -> bool:
    """Whether the exclusive lock was to be had at once."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def close_lock(fd: int) -> None:
    """Close our copy; the lock ends when every copy is closed, so a heir of the fd keeps it."""
    _lock_fds.discard(fd)
    os.close(fd)


def release_lock(fd: int) -> None:
    """Unlock and close, whoever else has a copy of the descriptor."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    close_lock(fd)


def forget_locks() -> None:
    """In a forked child: close the copies; the parent's locks stay as they are."""
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
    """Run to the end, in a session of its own and a clean environment; returns what it printed.

    `account` None: our own user. A failure is `EmbeddedUnavailable` with the last lines; an
    account that cannot be taken, or a file that it cannot run, is an OSError.
    """
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    done = subprocess.run(
        argv,
        input=text.encode(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if log_fd is None else log_fd,
        cwd=cwd,
        env={**kept, "LC_ALL": "C", "TZ": "UTC", **(env or {})},
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
    """Whether the account gets through with this command."""
    try:
        run(argv, account, Path("/"))
    except (OSError, errors.EmbeddedUnavailable):
        return False
    return True
