"""Decide whether the database prevented a lease renewal; report that after the worker's exit.

A worker that cannot renew its lease exits. The server cannot distinguish this exit from a crash of
the handler. So the worker sets a flag in the shared status, for its parent. It also writes a note
on disk. The next worker of this machine reports the note to the database.
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
from queue_workflows.engine import claims, handback, job_tables, recovery
from queue_workflows.runtime import clock, identity
from queue_workflows.types import NowFn
from queue_workflows.worker import kill_timers

_log = logging.getLogger(__name__)
IN_FLIGHT_S = 1.0
"""Seconds after which the database is blamed for a statement that has no reply."""
STARVED_S = 2.0
"""Seconds without a run of the lease keeper after which this process counts as stalled.

A quarter of the lease applies instead if that is longer.
"""
DEAD_AFTER_S = kill_timers.EXIT_WITHIN_S + 6.0
"""Seconds after writing its note by which a process has ended: its kill timer fires earlier."""
REPORT_FOR_S = 10.0
"""Seconds for which a note is reported again.

Meanwhile the server may still execute the last statements of the dead worker.
"""
MAX_BYTES = 1 << 20
MAX_LEASES = 1000
_SUFFIX = ".fenced"


READ_ONLY = "25"
TOO_LARGE = "54"
"""SQLSTATE classes: 25, a read-only server; 54, a value that no retry makes small enough."""


def may_pass(error: db.Error) -> bool:
    """Return whether the same write may succeed later, after a lost connection for example."""
    state = error.sqlstate or ""
    passing = isinstance(error, (db.OperationalError, db.InterfaceError))
    return (passing and not state.startswith(TOO_LARGE)) or state.startswith(READ_ONLY)


class Renewals:
    """Decide whether the database or the process itself prevented a lease renewal.

    The lease keeper calls `renewed` or `refused` after each renewal on its dedicated connection. It
    calls `watched` each time its thread runs. A handler that keeps the GIL delays this thread and
    the renewals. The database is never blamed for such a stall.
    """

    def __init__(
        self, lease_s: float, dedicated: db.DedicatedConnection, now_fn: NowFn = clock.boot_s
    ) -> None:
        self._now = now_fn
        self._dedicated = dedicated
        self._patience_s = max(STARVED_S, lease_s / 4)
        self._refused = False
        self._watched = now_fn()
        self._starved = False

    def renewed(self) -> None:
        """Note a successful renewal; forget earlier failures and stalls."""
        self._refused = self._starved = False
        self._watched = self._now()

    def refused(self, error: db.Error) -> None:
        """Note a failed renewal; blame the database if the same write may succeed later."""
        self._refused = may_pass(error)

    def watched(self) -> None:
        """Note that the lease keeper's thread runs; remember a stall since its last run."""
        now = self._now()
        self._starved |= now - self._watched > self._patience_s
        self._watched = now

    @property
    def starved(self) -> bool:
        """Return whether this process has stalled since the last renewal."""
        return self._starved or self._now() - self._watched > self._patience_s

    def blame_database(self) -> bool:
        """Return whether this process ran without a stall, and the database failed or was silent.

        Any statement on the same connection counts, since it can delay the renewal.
        """
        failure = self._dedicated.failure
        failed = self._refused or (failure is not None and may_pass(failure))
        return not self.starved and (failed or self._dedicated.waiting_s >= IN_FLIGHT_S)


class _Note(NamedTuple):
    """The content of a note: its process, its time, the ids of its workers, and their claims."""

    pid: int
    machine: str
    boot: str
    at: float
    """The time of `clock.boot_s`, a clock that all processes share until the machine restarts."""
    workers: list[str]
    leases: list[job_tables.Lease]

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


def write_note(workers: Iterable[str], leases: Iterable[job_tables.Lease]) -> None:
    """Write a note that these claims could not be renewed because of the database.

    `workers` are the worker ids of this process: the server may still execute a claim that one of
    them sent last. At most MAX_LEASES claims are written. The folder must be writable by this user
    only. Errors are logged, not raised, since the process exits anyway.
    """
    claims = [[lease.table.name, *lease[1:]] for lease in [*leases][:MAX_LEASES]]
    note = {
        "pid": os.getpid(), "machine": identity.machine(), "boot": identity.boot_id(),
        "at": clock.boot_s(), "workers": [*workers], "leases": claims,
    }  # fmt: skip
    try:
        folder = state_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(folder):
            raise PermissionError(
                f"{folder} must belong to this user, and nobody else may write there"
            )
        name = f"{_database()}-{secrets.token_hex(8)}"
        # Write and then rename, so that no reader sees a partial note.
        (folder / name).write_text(json.dumps(note), encoding="utf-8")
        (folder / name).rename(folder / f"{name}{_SUFFIX}")
    except OSError as error:
        _log.warning(
            "cannot write a note that the database prevented the lease renewals: %s; without"
            " --supervise the jobs of this worker count a crash; set %s to a folder of this user",
            error,
            config.STATE_DIR.variables[0],
        )


def notes() -> list[Path]:
    """Return the paths of the notes that workers of this user and database have written here."""
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
    """Report the notes of ended workers of this machine, on a dedicated connection."""

    def __init__(self, dedicated: db.DedicatedConnection) -> None:
        self._dedicated = dedicated
        self._reported: dict[Path, float] = {}

    def report(self) -> bool:
        """Hand the claims of the notes back without a crash; subtract a crash already counted.

        Each note is reported for REPORT_FOR_S seconds and then deleted. Returns False while a note
        is left. Then it must be reported again, its process may still run, or another worker is
        reporting it. Raises the errors of the database.
        """
        left = [path for path in notes() if not self._report(path)]
        self._reported = {path: at for path, at in self._reported.items() if path in left}
        return not left

    def _report(self, path: Path) -> bool:
        try:
            with path.open("rb") as file:
                # Two workers that report a note at once could both subtract the same crash: neither
                # sees the other's uncommitted `death` event.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return False
                note = _read(file, path)
                if note is not None and not note.writer_has_ended():
                    return False
                if note is not None:
                    self._excuse(note)
                    first = self._reported.setdefault(path, clock.boot_s())
                    if clock.boot_s() - first < REPORT_FOR_S:
                        return False
                path.unlink()
        except FileNotFoundError:
            return True
        except OSError as error:
            _log.debug("the note %s cannot be reported yet: %s", path, error)
            return False
        return True

    def _excuse(self, note: _Note) -> None:
        with self._dedicated.using() as conn:
            for lease in note.leases:
                if recovery.excuse(conn, lease):
                    _log.info(
                        "job %s: no crash is counted, its worker could not reach the database",
                        lease.job_id,
                    )
            for table in (job_tables.NODE_JOBS, job_tables.INGEST_JOBS):
                for worker_id in note.workers:
                    late = claims.held_by(conn, table, worker_id)
                    handback.hand_back_all(
                        conn, late, reason="its worker had exited before this claim"
                    )


def _database() -> str:
    return hashlib.sha256(db.describe().encode(errors="replace")).hexdigest()[:16]


def _is_ours(folder: Path) -> bool:
    """Return whether the folder belongs to this user and nobody else may write there.

    Otherwise others could forge notes, and so undo counted crashes.
    """
    found = folder.lstat()
    mode = stat.S_IMODE(found.st_mode)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not mode & 0o022


def _read(file: BinaryIO, path: Path) -> _Note | None:
    """Return the parsed note, or None if the file is not a valid note."""
    known = {table.name: table for table in (job_tables.NODE_JOBS, job_tables.INGEST_JOBS)}
    try:
        found: Any = json.loads(file.read(MAX_BYTES))
        leases = [
            job_tables.Lease(known[name], str(job_id), str(worker_id), int(claim_no))
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
        _log.warning("the note %s is invalid, so it is deleted and not reported: %s", path, error)
        return None
