"""Isolate the rows of a batch that raise; they are skipped, tried again later, and then failed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import psycopg

from queue_workflows import db
from queue_workflows.claim import job_tables
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.types import NowFn, Row

T = TypeVar("T")
Rest: TypeAlias = Callable[[BaseException, int], bool]
"""Takes an error and how often in a row it came; returns whether it delayed or ended the row."""
Change: TypeAlias = Callable[..., list[Row]]
"""A statement that returns rows."""
Ending: TypeAlias = Callable[[db.Connection, str, BaseException, int], bool]
"""Like `Rest`, for the row with an id, in the open transaction of a connection."""

_log = logging.getLogger(__name__)
FIRST_S = 0.5
MAX_S = 60.0
MAX_ROWS = 10_000
"""How many rows are remembered. Beyond that, the oldest are forgotten and fail once more."""
PICKED = 1000
"""How many rows one batch picks."""
BUSY = frozenset({"55P03", "40P01", "40001"})
"""SQLSTATEs of a row that another transaction locks: not available, deadlock, serialization."""
TIMED_OUT = "57014"
"""SQLSTATE of a statement that took longer than `pool.STATEMENT_TIMEOUT_S`."""
SERVER = ("08", "25", "53", "57P")
"""SQLSTATE classes of a server that fails: connection, read-only, resources, shutdown."""
SYSTEMIC = frozenset(
    ("08", "25", "28", "2D", "3B", "3D", "3F", "40", "42", "53", "55", "57", "58", "72")
) | {"F0", "HV", "XX"}
"""SQLSTATE classes whose cause is not a row, but connection, transaction, rights, missing objects,
resources, locks, shutdown, storage or internal errors."""
MISSING_RIGHT = "42501"
"""The SQLSTATE of a missing right, which a function of the engine may raise for its caller."""
DATA = frozenset(("0A", "21", "22", "23", "54"))
"""SQLSTATE classes of values that cannot be computed with or stored."""


def backoff_s(failures: int) -> float:
    """Return the seconds to wait after that many failures in a row."""
    return min(MAX_S, FIRST_S * 2.0 ** max(0, min(failures - 1, 30)))


def is_busy(error: BaseException) -> bool:
    """Return whether a database error only means that another transaction has locked the row."""
    return getattr(error, "sqlstate", None) in BUSY and not _is_raised(error)


def is_outage(error: BaseException) -> bool:
    """Return whether an error means that the server is away, full or read-only.

    Every other error counts against the row, such as a value that is too large, a statement that
    is too slow, a refusal by the client, and any SQLSTATE that a trigger raises.
    """
    if not isinstance(error, psycopg.Error) or _is_raised(error):
        return False
    if error.sqlstate is None:
        return isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError))
    return error.sqlstate.startswith(SERVER)


def is_of_row(error: BaseException) -> bool:
    """Return whether a database error comes from the values of a row, or from a trigger.

    Class P0 has the errors of PL/pgSQL, for example if a trigger misses a row that it expects.
    """
    if not isinstance(error, psycopg.Error):
        return False
    return _is_raised(error) or (error.sqlstate or "").startswith(("22", "23", "54", "P0"))


def _is_raised(error: BaseException) -> bool:
    """Return whether a database function raised the error, perhaps with an outage's SQLSTATE.

    The server translates the message and its context, but never the name of its own function.
    """
    return isinstance(error, psycopg.Error) and error.diag.source_function == "exec_stmt_raise"


def is_about_rows(error: Exception) -> bool:
    """Return whether the server refused a statement because of the values of a row.

    An error that a trigger raises counts, whatever its SQLSTATE; a lost connection, a missing right
    and a timeout do not.
    """
    state = getattr(error, "sqlstate", None) or ""
    is_of_trigger = _is_raised(error) and state != MISSING_RIGHT
    return bool(state) and (is_of_trigger or state[:2] not in SYSTEMIC)


def is_about_data(error: Exception) -> bool:
    """Return whether the row can never be written with its present values.

    That is false for an error of a trigger, which may accept the row later. It is true for an error
    that the client raised before it sent the value.
    """
    if not isinstance(error, psycopg.Error):
        return True
    return (error.sqlstate or "")[:2] in DATA


# --- A batch of rows in a sweep.


class Duty(NamedTuple):
    """A change of many rows that can be done in parts, to leave out a row that raises.

    `pick` locks a batch of due rows, only those in `%(ids)s` unless it is NULL, without the rows in
    `%(aside)s`, and returns their `id`s. `change` changes the rows `%(ids)s` and returns them. Both
    take the parameters `given`. `rest` ends a row that keeps failing, if possible.
    """

    kind: str
    pick: Change
    change: Change
    rest: Ending | None
    given: Mapping[str, Any] = MappingProxyType({})
    prepare: Callable[[db.Connection], object] = lambda _: None
    """Called first in each transaction, for settings that are local to it."""

    def picked(
        self, conn: db.Connection, aside: list[str], ids: list[str] | None = None
    ) -> list[str]:
        """Lock a batch of rows, or the rows `ids` if they are still due, and return their ids."""
        rows = self.pick(conn, **self.given, aside=aside, ids=ids)
        return [row["id"] for row in rows]

    def do(self, conn: db.Connection, ids: list[str] | None = None) -> list[Row]:
        """Do one batch, or the rows `ids` if they are still due, in the open transaction."""
        self.prepare(conn)
        found = self.picked(conn, [], ids)
        return self.change(conn, **{**self.given, "ids": found}) if found else []


class _Failures(NamedTuple):
    in_a_row: int
    until: float
    busy: int = 0
    """How often in a row another transaction had locked it, which does not count as a failure."""


class Isolation:
    """The rows that raised in this process, and when each may be tried again.

    The engine's only broad `except` around work on a row is here. Errors of the server are raised.
    """

    def __init__(self, now_fn: NowFn = time.monotonic) -> None:
        self._now = now_fn
        self._lock = threading.Lock()
        self._failed: dict[tuple[str, str], _Failures] = {}

    def aside(self, kind: str) -> list[str]:
        """Return the ids of this kind that must not be tried yet."""
        now = self._now()
        with self._lock:
            return [
                row_id
                for (of, row_id), failures in self._failed.items()
                if of == kind and failures.until > now
            ]

    def attempt(
        self, kind: str, row_id: str, work: Callable[[], T], rest: Rest | None = None
    ) -> T | None:
        """Return the result of `work`, or None if it raised and the row was set aside.

        `rest` stores the failure in the row if possible. Otherwise this process skips the row for a
        time that doubles with each failure.
        """
        try:
            found = work()
        except (Exception, SystemExit) as error:
            if is_outage(error):
                raise
            self._set_aside(kind, row_id, error, rest)
            return None
        with self._lock:
            self._failed.pop((kind, row_id), None)
        return found

    def batch(self, conn: db.Connection, duty: Duty) -> list[Row]:
        """Do one batch of a duty and return the changed rows; rows that raise are set aside.

        Each part is a transaction of its own, or a savepoint if `conn` is in a transaction.
        """
        aside = self.aside(duty.kind)
        if not aside:
            try:
                with conn.transaction():
                    return duty.do(conn)
            except Exception as error:
                if is_outage(error) or is_busy(error):
                    raise
                what = "%s is done row by row, since a row raises an error: %s"
                _log.warning(what, duty.kind, _one_line(error))
        with conn.transaction():
            ids = duty.picked(conn, aside)
        return self._parts(conn, duty, ids)

    def _parts(self, conn: db.Connection, duty: Duty, ids: list[str]) -> list[Row]:
        """Change the rows of these ids; on an error, halve them until the failing row is alone."""
        done: list[Row] = []
        todo = [ids] if ids else []
        while todo:
            part = todo.pop()
            if len(part) > 1:
                try:
                    with conn.transaction():
                        done += duty.do(conn, part)
                except Exception as error:
                    if is_outage(error):
                        raise
                    half = len(part) // 2
                    todo += [part[half:], part[:half]]
                continue
            done += self._single(conn, duty, part[0]) or ()
        return done

    def _single(self, conn: db.Connection, duty: Duty, row_id: str) -> list[Row] | None:
        def work() -> list[Row]:
            with conn.transaction():
                return duty.do(conn, [row_id])

        def rest(error: BaseException, failures: int) -> bool:
            with conn.transaction():
                return duty.rest is not None and duty.rest(conn, row_id, error, failures)

        return self.attempt(duty.kind, row_id, work, rest)

    def _set_aside(self, kind: str, row_id: str, error: BaseException, rest: Rest | None) -> None:
        """Skip a row for a while, unless `rest` has delayed or ended it.

        A locked row is skipped too, as waiting for it delays the others. That does not count as a
        failure, so a lock never ends a row.
        """
        key = (kind, row_id)
        with self._lock:
            known = self._failed.pop(key, None) or _Failures(0, 0.0)
        count, busy = known.in_a_row + 1, 0
        if is_busy(error):
            count, busy = known.in_a_row, known.busy + 1
        try:
            if rest is not None and not busy and rest(error, count):
                return
        except (Exception, SystemExit) as again:
            if is_outage(again):
                raise
            _log.error("%s %s cannot be ended either: %s", kind, row_id, _one_line(again))
        wait_s = backoff_s(busy or count)
        until = "tried later" if busy else f"set aside for {wait_s:g} s (failure {count})"
        _log.warning("%s %s is %s: %s", kind, row_id, until, described(error))
        with self._lock:
            self._failed[key] = _Failures(count, self._now() + wait_s, busy)
            while len(self._failed) > MAX_ROWS:
                del self._failed[next(iter(self._failed))]


def described(error: BaseException) -> str:
    """Return the type of an error and the first line of its text, in a form that can be stored."""
    name = type(error).__name__
    text = payload.error_text(error).partition("\n")[0].strip()
    return f"{name}: {text}" if text else name


def _one_line(error: BaseException) -> str:
    return " ".join(payload.error_text(error).split())


def all_of(steps: Iterable[Callable[[], T]]) -> list[T]:
    """Do every step even if one raises; then raise the first error, or return the results."""
    first: Exception | None = None
    found: list[T] = []
    for step in steps:
        try:
            found.append(step())
        except Exception as error:  # noqa: BLE001  raised below, after the other steps
            first = first or error
    if first is not None:
        raise first
    return found


# --- Rows that scripts change.


def attempted(script: db.Script[T], *, or_slow: bool = False) -> db.Script[T | db.Error]:
    """Run a script in a transaction or savepoint of its own; return its error if a row caused it.

    After an error that transaction is rolled back. Any other error is raised. With `or_slow`, a
    row is also the cause if a statement took too long.
    """
    yield db.BEGIN
    try:
        found = yield from script
    except db.Error as error:
        if not (is_about_rows(error) or (or_slow and error.sqlstate == TIMED_OUT)):
            raise
        yield db.ROLLBACK
        return error
    yield db.COMMIT
    return found


def set_aside(
    table: job_tables.JobTable, job_id: str, *, error: str, lease: job_tables.Lease | None = None
) -> db.Script[Literal["failed", "set_aside"] | None]:
    """Fail a job that the database refuses to change; if that is refused too, block it.

    Without `lease` the job must be queued, else this must be its claim. Returns `failed`,
    `set_aside` (blocked), or None if the job is in another state or cannot be changed at all.
    """
    given: dict[str, Any] = {"job": job_id, "worker": None, "claim": None}
    if lease is not None:
        given = job_tables.fence(lease)
    known = statements.claim_isolation
    failed = known.fail[table.name].script(**given, error=error)
    if isinstance((yield from attempted(failed)), str):
        return "failed"
    blocked = yield from attempted(known.block[table.name].script(**given))
    return "set_aside" if isinstance(blocked, str) else None


def change_all(
    change: db.Script[list[Row]],
    leases: Sequence[job_tables.Lease],
    one: Callable[[job_tables.Lease], db.Script[Row | None]],
) -> db.Script[list[Row]]:
    """Run `change` and return its rows; if a row makes it fail, run `one` for each claim.

    Each `one` has a transaction or savepoint of its own. A claim whose change the database refuses
    is logged, and ends with its lease.
    """
    rows = yield from attempted(change)
    if not isinstance(rows, db.Error):
        return rows
    changed: list[Row] = []
    for lease in leases:
        row = yield from attempted(one(lease))
        if isinstance(row, db.Error):
            why = "job %r is left to its lease, the database refuses its change: %s"
            _log.warning(why, lease.job_id, str(row).strip())
        elif row is not None:
            changed.append(row)
    return changed
