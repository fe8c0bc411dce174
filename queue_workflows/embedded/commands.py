"""Run the commands of the embedded server with a clean environment, and as another user."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from queue_workflows import errors


class Account(NamedTuple):
    """The user and group that a command runs as."""

    uid: int
    gid: int


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
