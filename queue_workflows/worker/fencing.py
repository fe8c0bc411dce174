"""Fencing: whose fault an ended lease is, and the notes that a worker leaves before it ends itself.

A worker whose lease cannot be renewed ends itself, and nobody on the server can tell that from a
handler that killed its process. So the worker says so: in the status that it shares with a parent,
and in a note on disk for the next worker of this machine, which reports it to the database.
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
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from queue_workflows import config, db
from queue_workflows.runtime import clock, identity
from queue_workflows.store import tables, transitions
from queue_workflows.types import NowFn
from queue_workflows.worker import fuses

_log = logging.getLogger(__name__)
IN_FLIGHT_S = 1.0
"""A statement without a reply for so long counts as one that the database keeps waiting."""
STARVED_S = 2.0
"""A process was held up itself if its watch did not run for so long, or a quarter of the lease."""
DEAD_AFTER_S = fuses.EXIT_WITHIN_S + 6.0
"""So long after its note was written a process has ended: a kernel timer bounds its exit."""
LOOKS_S = 10.0
"""For so long after the first report a server may still do what a dead worker had sent."""
MAX_BYTES = 1 << 20
MAX_LEASES = 1000
_SUFFIX = ".fenced"


READ_ONLY = "25"
TOO_LARGE = "54"
"""SQLSTATE classes: a server that takes no writes now, and a write that it will never take."""


def may_pass(error: db.Error) -> bool:
    """Return whether the same write may be taken later."""
    state = error.sqlstate or ""
    passing = isinstance(error, (db.OperationalError, db.InterfaceError))
    return (passing and not state.startswith(TOO_LARGE)) or state.startswith(READ_ONLY)


class Renewals:
    """Decide whether the database or the process itself kept a lease from being renewed.

    `renewed` and `refused` tell of renewals over the connection `kept`, `watched` of each look of
    the thread that judges. A handler that holds the GIL delays that thread as well as the renewals:
    then no renewal is missing by the database's fault, however the last one ended.
    """

    def __init__(self, lease_s: float, kept: db.Kept, now_fn: NowFn = clock.boot_s) -> None:
        self._now = now_fn
        self._kept = kept
        self._patience_s = max(STARVED_S, lease_s / 4)
        self._refused = False
        self._watched = now_fn()
        self._starved = False

    def renewed(self) -> None:
        """The database has answered: whatever was before is over."""
        self._refused = self._starved = False
        self._watched = self._now()

    def refused(self, error: db.Error) -> None:
        """The renewal failed; only what may pass is the database's fault."""
        self._refused = may_pass(error)

    def watched(self) -> None:
        """The watch runs."""
        now = self._now()
        self._starved |= now - self._watched > self._patience_s
        self._watched = now

    @property
    def starved(self) -> bool:
        """Whether this process did not run for a while since the last renewal."""
        return self._starved or self._now() - self._watched > self._patience_s

    def blame_database(self) -> bool:
        """Whether the process ran all the time, and asked in vain.

        What else is asked over the same connection may have kept the renewal from its turn.
        """
        failure = self._kept.failure
        failed = self._refused or (failure is not None and may_pass(failure))
        return not self.starved and (failed or self._kept.waiting_s >= IN_FLIGHT_S)


class _Note(NamedTuple):
    """What a note on disk says: the process that wrote it, when, and what it held."""

    pid: int
    machine: str
    boot: str
    at: float
    """By `clock.boot_s`, which all processes of one boot share."""
    workers: list[str]
    leases: list[tables.Lease]

    def is_of_the_dead(self) -> bool:
        """Whether its process has ended, so that its claims may be given to others."""
        if self.boot != identity.boot_id() or clock.boot_s() - self.at >= DEAD_AFTER_S:
            return True
        if self.machine != identity.machine():
            return False
        if self.pid == os.getpid():
            return True  # the number was given anew, as that of process 1 in a container
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False


def state_folder() -> Path:
    """Return the folder of this user's notes: STATE_DIR, systemd's, or one for temporary files."""
    named = config.STATE_DIR.read() or os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    return Path(named or Path(tempfile.gettempdir(), f"queue_workflows-{os.getuid()}"))


def write_note(workers: Iterable[str], leases: Iterable[tables.Lease]) -> None:
    """Leave a note that the database kept these claims from being renewed. Best effort, no wait.

    `workers` are the worker ids of this process. What they sent last may be claims, which a server
    that comes back still makes.
    It is a new file in a folder that only this user may write, or no note is left.
    """
    held = [[lease.table.name, *lease[1:]] for lease in [*leases][:MAX_LEASES]]
    note = {
        "pid": os.getpid(), "machine": identity.machine(), "boot": identity.boot_id(),
        "at": clock.boot_s(), "workers": [*workers], "leases": held,
    }  # fmt: skip
    try:
        folder = state_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(folder):
            raise PermissionError(f"{folder} is not this user's alone")
        name = f"{_database()}-{secrets.token_hex(8)}"
        # Renamed, so that no reader sees half of it.
        (folder / name).write_text(json.dumps(note), encoding="utf-8")
        (folder / name).rename(folder / f"{name}{_SUFFIX}")
    except OSError as error:
        _log.warning("no note is left of the claims that could not be renewed: %s", error)


def notes() -> list[Path]:
    """Return the notes that workers on this database have left here."""
    with contextlib.suppress(OSError):
        folder = state_folder()
        if _is_ours(folder):
            return sorted(folder.glob(f"{_database()}-*{_SUFFIX}"))
    return []


def is_noted(prefix: str) -> bool:
    """Return whether a note names a worker whose id starts with `prefix`."""
    for path in notes():
        with contextlib.suppress(OSError), path.open("rb") as file:
            note = _read(file, path)
            if note is not None and any(each.startswith(prefix) for each in note.workers):
                return True
    return False


class Reporter:
    """Report the notes of workers of this machine that have ended, over the connection `kept`."""

    def __init__(self, kept: db.Kept) -> None:
        self._kept = kept
        self._reported: dict[Path, float] = {}

    def report(self) -> bool:
        """Hand back, uncounted, what the notes name, or take back the crash that was counted.

        A note is reported again until `LOOKS_S` after the first time, then removed. Returns False
        while a note is left: it is to be reported again, its process may still run, or another
        worker reports it. Database errors pass.
        """
        left = [path for path in notes() if not self._report(path)]
        self._reported = {path: at for path, at in self._reported.items() if path in left}
        return not left

    def _report(self, path: Path) -> bool:
        try:
            with path.open("rb") as file:
                # Two workers that start at once would take the same crash back twice.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return False
                note = _read(file, path)
                if note is not None and not note.is_of_the_dead():
                    return False
                if note is not None:
                    self._excuse(note)
                    first = self._reported.setdefault(path, clock.boot_s())
                    if clock.boot_s() - first < LOOKS_S:
                        return False
                path.unlink()
        except FileNotFoundError:
            return True
        except OSError as error:
            _log.debug("the note %s waits: %s", path, error)
            return False
        return True

    def _excuse(self, note: _Note) -> None:
        with self._kept.using() as conn:
            for lease in note.leases:
                if transitions.excuse(conn, lease):
                    _log.info("job %s: no crash, its worker lost the database", lease.job_id)
            for table in (tables.NODE_JOBS, tables.INGEST_JOBS):
                for worker_id in note.workers:
                    late = transitions.held_by(conn, table, worker_id)
                    transitions.hand_back_all(conn, late, reason="claimed after its worker's end")


def _database() -> str:
    return hashlib.sha256(db.describe().encode(errors="replace")).hexdigest()[:16]


def _is_ours(folder: Path) -> bool:
    """Whether nobody else may write there: a forged note could take back counted crashes."""
    found = folder.lstat()
    mode = stat.S_IMODE(found.st_mode)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not mode & 0o022


def _read(file: BinaryIO, path: Path) -> _Note | None:
    """Return the note; None for what is none."""
    known = {table.name: table for table in (tables.NODE_JOBS, tables.INGEST_JOBS)}
    try:
        found: Any = json.loads(file.read(MAX_BYTES))
        leases = [
            tables.Lease(known[name], str(job_id), str(worker_id), int(claim_no))
            for name, job_id, worker_id, claim_no in found["leases"]
        ]
        return _Note(
            int(found["pid"]),
            found["machine"],
            found["boot"],
            float(found["at"]),
            [str(worker_id) for worker_id in found["workers"] if worker_id],
            leases,
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        _log.warning("the note %s cannot be read, and is removed: %s", path, error)
        return None
