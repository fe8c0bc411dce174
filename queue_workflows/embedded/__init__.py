"""Share one embedded PostgreSQL among an app's processes; the last of them stops it."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from queue_workflows import errors
from queue_workflows.embedded import cluster
from queue_workflows.embedded.cluster import data_dir

__all__ = ["Server", "data_dir", "ensure"]
LIFECYCLE = "lifecycle.lock"
"""Only the process with this lock may start, join, leave or stop the folder's server."""


class _Membership:
    """This process's membership in one folder's server, shared by all its `Server` handles."""

    __slots__ = ("chosen", "folder", "handles", "socket_dir", "users_fd")

    def __init__(self, folder: Path, users_fd: int) -> None:
        self.folder = folder
        self.users_fd = users_fd
        self.handles = 0
        self.socket_dir = ""
        self.chosen: dict[object, str] = {}


class Server:
    """A handle on the running server; `release()` or the end of a `with` releases it."""

    __slots__ = ("_membership", "_released", "started")

    def __init__(self, membership: _Membership, *, started: bool) -> None:
        self._membership = membership
        self._released = False
        self.started = started
        """Whether the `ensure()` that created this handle started the server."""

    @property
    def dsn(self) -> str:
        """Return a URL over the unix socket, for the role `postgres` and no project's database."""
        return self.dsn_of(cluster.DATABASE)

    def dsn_of(self, database: str) -> str:
        """Return the URL of a database of this server, whether or not it exists."""
        host = quote(self._membership.socket_dir, safe="")
        return f"postgresql://postgres@/{quote(database, safe='')}?host={host}&port={cluster.PORT}"

    @property
    def chosen(self) -> dict[object, str]:
        """Return the databases that this process chose, and why; empty after it has left."""
        return self._membership.chosen

    @property
    def data_dir(self) -> Path:
        """Return the folder of cluster, locks and log."""
        return self._membership.folder

    def describe(self, database: str = cluster.DATABASE, of: Path | None = None) -> str:
        """Return one line that names the database in use, and the project's folder if `of` is."""
        how = "started" if self.started else "joined"
        name = f"embedded PostgreSQL {cluster.MAJOR}, database {database}"
        return f"{name}{f' of {of}' if of else ''}, in {self.data_dir} ({how})"

    def release(self) -> None:
        """Release the handle; the last process to do so stops the server. Safe to repeat."""
        with _mutex:
            if self._released:
                return
            self._released = True
            self._membership.handles -= 1
            if not self._membership.handles:
                _leave(self._membership)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_mutex = threading.Lock()
_memberships: dict[Path, _Membership] = {}


def ensure(*, create: bool = True, settings: Mapping[str, str] | None = None) -> Server:
    """Join the folder's server; create its cluster and start it if needed. Return a handle.

    `create=False` starts or joins only what exists. `settings` apply if this call starts the
    server. Raises `EmbeddedUnavailable`, whose text names the remedy. Waits for the folder's lock.
    """
    folder = data_dir()
    try:
        with _mutex:
            membership = _memberships.get(folder)
            started = False
            if membership is None or not cluster.alive(folder):
                cluster.check(folder, create=create)
                membership, started = _join(folder, settings or {})
            membership.handles += 1
            return Server(membership, started=started)
    except OSError as error:
        raise errors.EmbeddedUnavailable(
            f"the embedded server's folder {folder} cannot be used: {error}; "
            f"name another one by {cluster.KNOB}"
        ) from error


def _join(folder: Path, settings: Mapping[str, str]) -> tuple[_Membership, bool]:
    """Take this process's share of the users lock; return whether that started the server."""
    cluster.make_folder(folder)
    with cluster.locked(folder / LIFECYCLE):
        found, started = cluster.find_or_start(folder, settings)
        membership = _memberships.get(folder)
        if membership is None:
            users_fd = cluster.open_lock(folder / "users.lock")
            fcntl.flock(users_fd, fcntl.LOCK_SH)
            membership = _memberships[folder] = _Membership(folder, users_fd)
        membership.socket_dir = found.socket_dir
        return membership, started


def _leave(membership: _Membership) -> None:
    """Release the share; stop the server if it was the last one. A forked child does nothing."""
    if _memberships.get(membership.folder) is not membership:
        return
    del _memberships[membership.folder]
    try:
        with (
            contextlib.suppress(OSError, errors.EmbeddedUnavailable),
            cluster.locked(membership.folder / LIFECYCLE),
        ):
            if cluster.try_lock(membership.users_fd):
                cluster.stop(membership.folder)
    finally:
        cluster.release_lock(membership.users_fd)


def _release_all() -> None:
    with _mutex:
        for membership in list(_memberships.values()):
            _leave(membership)


def _forget_in_child() -> None:
    """Forget everything in a forked child: the share and the locks stay with the parent."""
    global _mutex
    _mutex = threading.Lock()
    _memberships.clear()
    cluster.forget_locks()


os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(_release_all)
