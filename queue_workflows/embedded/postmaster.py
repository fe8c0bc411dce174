"""Find, start, await and stop the server, all under the folder's lock."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import NamedTuple

from queue_workflows import errors
from queue_workflows.embedded import cluster, commands, lock_files

PATIENCE_S = 90.0
POLL_S = 0.005
_STOP_S = 30.0
_LOG_MAX_BYTES = 1 << 20


class Postmaster(NamedTuple):
    pid: int | None
    socket_dir: str


def find_or_start(folder: Path, settings: Mapping[str, str]) -> tuple[Postmaster, bool]:
    """Return the present server; wait for one that starts or stops."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if postmaster := running(folder):
            return postmaster, False
        server_fd = lock_files.open_lock(folder / "server.lock")
        try:
            if lock_files.try_lock(server_fd):
                pid = _start(folder, server_fd, settings)
                break
        finally:
            lock_files.close_lock(server_fd)
        time.sleep(POLL_S)
    else:
        raise errors.EmbeddedUnavailable(
            f"the embedded server in {folder} has been neither ready nor gone for "
            f"{PATIENCE_S:.0f} s: see {folder / 'server.log'}"
        )
    try:
        return _await_ready(folder), True
    except BaseException:
        if alive(folder):
            os.kill(pid, signal.SIGINT)
        raise


def running(folder: Path) -> Postmaster | None:
    """Return the postmaster that listens and says `ready`; no pid in another pid namespace."""
    try:
        lines = (folder / "data" / "postmaster.pid").read_text().splitlines()
    except FileNotFoundError:
        return None
    if len(lines) < 8 or lines[7].strip() != "ready":
        return None
    pid: int | None = int(lines[0])
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(f"{lines[4]}/.s.PGSQL.{lines[3]}")
        except OSError:
            return None
        if hasattr(socket, "SO_PEERCRED"):
            peer = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid = pid if struct.unpack("3i", peer)[0] == pid else None
    return Postmaster(pid, lines[4])


def _start(folder: Path, server_fd: int, settings: Mapping[str, str]) -> int:
    """Start a postmaster and return its pid.

    Every process of the server inherits `server_fd`: the lock lasts as long as one of them lives.
    """
    owner = cluster.account(folder)
    bin_dir = cluster.binaries(folder, owner)
    if not (folder / "data").exists():
        durable = settings.get("fsync") != "off"
        cluster.create(folder, bin_dir, owner, server_fd, durable=durable)
    socket_dir = cluster.socket_dir(folder, owner)
    for name in (f".s.PGSQL.{cluster.PORT}", f".s.PGSQL.{cluster.PORT}.lock"):
        (socket_dir / name).unlink(missing_ok=True)
    options = {
        **settings,
        "listen_addresses": "",
        "unix_socket_directories": '"' + str(socket_dir).replace('"', '""') + '"',
        "unix_socket_permissions": "0700",
        "port": cluster.PORT,
        "hba_file": str(folder / "pg_hba.conf"),
        "ident_file": str(folder / "pg_ident.conf"),
    }
    argv = [str(bin_dir / "postgres"), "-D", str(folder / "data")]
    argv += [f"--{name}={value}" for name, value in options.items()]
    with _log(folder) as log_fd:
        # A session of its own: signals to this process or its group do not reach it.
        printed = commands.run(
            ["/bin/sh", "-c", '"$@" >&2 & echo $!', "sh", *argv],
            owner, folder, log_fd=log_fd, inherit=(server_fd,), env=_ignored_pid(folder),
        )  # fmt: skip
    return int(printed)


@contextlib.contextmanager
def _log(folder: Path) -> Generator[int]:
    path = folder / "server.log"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    if path.exists() and path.stat().st_size > _LOG_MAX_BYTES:
        flags |= os.O_TRUNC
    fd = os.open(path, flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _ignored_pid(folder: Path) -> dict[str, str]:
    """Return the environment under which PostgreSQL ignores a stale pid file, also of a reused pid.

    PostgreSQL takes PG_GRANDPARENT_PID for a process that cannot be a postmaster, and still checks
    for users of the shared memory. The file is stale, since this process has the server lock.
    """
    pid_file = folder / "data" / "postmaster.pid"
    if not pid_file.exists():
        return {}
    pid = pid_file.read_text().partition("\n")[0].strip()
    if not pid.lstrip("-").isdecimal():
        pid_file.unlink()
    return {"PG_GRANDPARENT_PID": pid} if pid.isdecimal() else {}


def _await_ready(folder: Path) -> Postmaster:
    log = folder / "server.log"
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if postmaster := running(folder):
            return postmaster
        if not alive(folder):
            break
        time.sleep(POLL_S)
    tail = log.read_text(errors="replace").splitlines()[-4:]
    raise errors.EmbeddedUnavailable(
        f"the embedded server in {folder} did not start: {' / '.join(tail)} (log: {log})"
    )


def alive(folder: Path) -> bool:
    """Return whether any process of the server lives, including orphans."""
    fd = lock_files.open_lock(folder / "server.lock")
    try:
        return not lock_files.try_lock(fd)
    finally:
        lock_files.close_lock(fd)


def stop(folder: Path) -> None:
    """Stop the server by a fast shutdown.

    Return when all its processes ended, or after `_STOP_S`.
    """
    postmaster = running(folder)
    if postmaster is None or postmaster.pid is None:
        return
    os.kill(postmaster.pid, signal.SIGINT)
    deadline = time.monotonic() + _STOP_S
    while alive(folder) and time.monotonic() < deadline:
        time.sleep(POLL_S)
