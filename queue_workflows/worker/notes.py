"""Write and read notes: small files that excuse the claims which an exit has left behind.

The server cannot distinguish an exit for want of the database from a crash of the handler. So the
worker writes a note on disk. Its parent, or the next worker of this machine, reports the note to
the database.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import secrets
import stat
import tempfile
import threading
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

from queue_workflows import config, db
from queue_workflows.engine import job_tables
from queue_workflows.runtime import clock, identity

_log = logging.getLogger(__name__)
DEAD_AFTER_S = 10.0
"""Seconds after writing its note by which a process has ended: its kill timer fires earlier."""
MAX_BYTES = 1 << 20
MAX_LEASES = 1000
_SUFFIX = ".fenced"
_NONE: Mapping[str, float] = MappingProxyType({})


class Note(NamedTuple):
    """The content of a note: its process, its time, the ids of its workers, and their claims."""

    pid: int
    machine: str
    boot: str
    at: float
    """The time of `clock.boot_s`, a clock that all processes share until the machine restarts."""
    workers: list[str]
    leases: list[job_tables.Lease]
    asked: Mapping[str, float] = _NONE
    """The time (as `at`) of the first claim without a reply, by worker id."""

    def writer_has_ended(self) -> bool:
        """Return whether the process that wrote the note has ended.

        Its claims may be handed back only then.
        """
        if self.boot != identity.boot_id() or clock.boot_s() - self.at >= DEAD_AFTER_S:
            return True
        if self.machine != identity.machine():
            return False
        if self.pid == os.getpid():
            return True  # pids repeat: the main process of each container has pid 1
        return not identity.process_exists(self.pid)


def state_folder() -> Path:
    """Return the folder for notes.

    It is STATE_DIR, else systemd's $STATE_DIRECTORY, else a folder of this user among the temporary
    files.
    """
    named = config.STATE_DIR.read() or os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    return Path(named or Path(tempfile.gettempdir(), f"queue_workflows-{os.getuid()}"))


def write_note(
    workers: Iterable[str],
    leases: Iterable[job_tables.Lease],
    asked: Mapping[str, float] = _NONE,
) -> None:
    """Write a note that ending these claims was not their handlers' fault.

    `workers` are the worker ids of this process: the server may still execute a claim that one of
    them sent last. `asked`: when each sent its first claim without a reply (`clock.boot_s`). At
    most MAX_LEASES claims are written. The folder must be writable by this user only. Errors are
    logged, not raised, since the process exits anyway.
    """
    written = _write(workers, leases, asked)
    if written is not None:
        os.close(written.fd)


class ExitNote:
    """The note of a worker that is about to exit, which is written before its hand-back is tried.

    The file stays locked until `withdraw` or the end of the process, however the process ends.
    Until then no `Reporter` reports the note, so the worker may still stay.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._closing: weakref.finalize[[int], ExitNote] | None = None

    def write(
        self,
        workers: Iterable[str],
        leases: Iterable[job_tables.Lease],
        asked: Mapping[str, float] = _NONE,
    ) -> None:
        """Write the note, as `write_note` does; it replaces an earlier one."""
        written = _write(workers, leases, asked)
        if written is not None:
            self._replace(written.path, weakref.finalize(self, os.close, written.fd))

    def withdraw(self) -> None:
        """Delete the note, if there is one."""
        self._replace(None, None)

    def _replace(
        self, path: Path | None, closing: weakref.finalize[[int], ExitNote] | None
    ) -> None:
        with self._lock:
            old, self._path = self._path, path
            close, self._closing = self._closing, closing
        if old is not None:
            with contextlib.suppress(OSError):
                old.unlink()
        if close is not None:
            close()


class _File(NamedTuple):
    """A written note and a descriptor that holds its lock."""

    path: Path
    fd: int


def _write(
    workers: Iterable[str], leases: Iterable[job_tables.Lease], asked: Mapping[str, float]
) -> _File | None:
    """Write a note and return it locked; log an error and return None if that is impossible."""
    claims = [[lease.table.name, *lease[1:]] for lease in [*leases][:MAX_LEASES]]
    note = {
        "pid": os.getpid(), "machine": identity.machine(), "boot": identity.boot_id(),
        "at": clock.boot_s(), "workers": [*workers], "leases": claims,
        "asked": dict(asked),
    }  # fmt: skip
    try:
        folder = state_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_ours(folder):
            raise PermissionError(
                f"{folder} must belong to this user, and nobody else may write there"
            )
        name = f"{database()}-{secrets.token_hex(8)}"
        with (folder / name).open("wb") as file:
            # Lock, write and then rename, so that no reader sees a partial or unlocked note.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(json.dumps(note).encode())
            file.flush()
            path = (folder / name).rename(folder / f"{name}{_SUFFIX}")
            return _File(path, os.dup(file.fileno()))
    except OSError as error:
        _log.warning(
            "cannot write a note that the database prevented the lease renewals: %s; without"
            " --supervise the jobs of this worker count a crash; set %s to a folder of this user",
            error,
            config.STATE_DIR.variables[0],
        )
    return None


def paths() -> list[Path]:
    """Return the paths of the notes that workers of this user and database have written here."""
    with contextlib.suppress(OSError):
        folder = state_folder()
        if is_ours(folder):
            return sorted(folder.glob(f"{database()}-*{_SUFFIX}"))
    return []


def is_noted(prefix: str) -> bool:
    """Return whether a note names a worker whose id starts with `prefix`."""
    for path in paths():
        with contextlib.suppress(OSError), path.open("rb") as file:
            note = read(file, path)
            if note is not None and any(each.startswith(prefix) for each in note.workers):
                return True
    return False


def database() -> str:
    """Return a name for the database in the names of files."""
    return hashlib.sha256(db.describe().encode(errors="replace")).hexdigest()[:16]


def is_ours(folder: Path) -> bool:
    """Return whether the folder belongs to this user and nobody else may write there.

    Otherwise others could forge notes, and so undo counted crashes.
    """
    found = folder.lstat()
    mode = stat.S_IMODE(found.st_mode)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not mode & 0o022


def read(file: BinaryIO, path: Path) -> Note | None:
    """Return the parsed note, or None if the file is not a valid note."""
    known = {table.name: table for table in (job_tables.NODE_JOBS, job_tables.INGEST_JOBS)}
    try:
        found: Any = json.loads(file.read(MAX_BYTES))
        leases = [
            job_tables.Lease(known[name], str(job_id), str(worker_id), int(claim_no))
            for name, job_id, worker_id, claim_no in found["leases"]
        ]
        return Note(
            int(found["pid"]),
            found["machine"],
            found["boot"],
            float(found["at"]),
            [str(worker_id) for worker_id in found["workers"] if worker_id],
            leases,
            {str(worker_id): float(at) for worker_id, at in found.get("asked", {}).items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        _log.warning("the note %s is invalid, so it is deleted and not reported: %s", path, error)
        return None
