"""End what a test process leaves behind, whatever ended it: servers, fleets and their folders.

Each test process starts one reaper, which waits for the end of a pipe. The kernel closes the pipe
when the test process ends, also by SIGKILL. Then the reaper kills every process that has the mark
of this test process in its environment, and PostgreSQL in a folder that has the mark in a file, and
removes these folders. One of them is the temporary folder of the process, for all that it makes
and its children make there, the folders of `tmp_path` included (`--basetemp` keeps them).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

MARK = "QW_TEST_SESSION"
FILE = "session"
"""The file of a folder that belongs to a test process; it holds the mark."""

IS_CHOSEN = "TMPDIR" in os.environ
"""Whether a person chose the folder for temporary files. Children get another one."""
pids: list[int] = []
"""The reapers of this process."""


def start(*, runs_tests: bool = True) -> None:
    """Start the reaper of this process, whose children inherit the mark from now on.

    `runs_tests`: they also inherit its temporary folder. The processes of `-n` make their own.
    """
    token, base = secrets.token_hex(16), Path(tempfile.mkdtemp(prefix="qw-")).resolve()
    env = {name: value for name, value in os.environ.items() if name != MARK}
    os.environ[MARK] = token
    # No child inherits the end that this process has, so that it closes with this process.
    read_end, _ = os.pipe()
    streams = [(os.POSIX_SPAWN_DUP2, read_end, 0), (os.POSIX_SPAWN_OPEN, 1, os.devnull, 1, 0)]
    argv = [sys.executable, "-S", __file__, token, str(base.parent)]
    pids.append(os.posix_spawn(sys.executable, argv, env, file_actions=streams, setsid=True))
    os.close(read_end)
    base.chmod(0o711)  # as root, servers run under another account, which has to pass
    own(base)
    tempfile.tempdir = str(base)
    if runs_tests:
        os.environ["TMPDIR"] = str(base)


def own(folder: Path) -> None:
    """Give a folder to this process: it is removed with it."""
    (folder / FILE).write_text(os.environ.get(MARK, ""))


def _left(token: str, folders: list[Path]) -> list[int]:
    """Return the processes that have the mark in their environment, and servers in such a folder.

    PostgreSQL has a clean environment, and works in its data folder.
    """
    wanted = f"{MARK}={token}".encode()
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            place = (process / "cwd").readlink()
            is_server = (process / "comm").read_text().strip() == "postgres"
            inside = is_server and any(place.is_relative_to(folder) for folder in folders)
            if inside or wanted in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def _folders(token: str, temporary: Path) -> list[Path]:
    found: list[Path] = []
    for parent in {temporary, Path("/dev/shm")}:
        for file in parent.glob(f"qw-*/{FILE}"):
            with contextlib.suppress(OSError):
                if file.read_text() == token:
                    found.append(file.parent)
    return found


def _end(token: str, parent: Path) -> None:
    deadline, folders = time.monotonic() + 30, _folders(token, parent)
    while (left := _left(token, folders)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    os.chdir("/")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    _end(sys.argv[1], Path(sys.argv[2]))
