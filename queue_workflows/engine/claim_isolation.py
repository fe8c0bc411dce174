"""Claim and change jobs although the database refuses some rows, one row at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import psycopg

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.engine import claims, job_tables
from queue_workflows.types import Row

_log = logging.getLogger(__name__)
SYSTEMIC = frozenset(
    ("08", "25", "28", "2D", "3B", "3D", "3F", "40", "42", "53", "55", "57", "58", "72")
) | {"F0", "HV", "XX"}
"""SQLSTATE classes that say nothing about a row; `queue_workflows_is_systemic` has the same."""
DATA = frozenset(("0A", "21", "22", "23", "54"))
"""SQLSTATE classes of values that cannot be computed with or stored."""


class Apart(NamedTuple):
    """The result of a claim that tried the rows one by one."""

    job_id: str | None
    """The job that was claimed; None: none."""
    aside: list[Row]
    """Each row that raised: its `id`, `run_id`, `error`, and its state now (`became`)."""


def is_about_rows(error: Exception) -> bool:
    """Return whether the server refused a statement because of what a row holds.

    An error that a trigger raises counts; a lost connection, a missing right and a timeout do not.
    """
    state = getattr(error, "sqlstate", None) or ""
    return bool(state) and state[:2] not in SYSTEMIC


def is_about_data(error: Exception) -> bool:
    """Return whether the row can never be written as it is; `queue_workflows_is_about_data` agrees.

    An error that a trigger raises does not count: the trigger may accept the row later. One that is
    not the database's counts: the value did not even reach it.
    """
    if not isinstance(error, psycopg.Error):
        return True
    return (error.sqlstate or "")[:2] in DATA


def claim_apart(
    table: job_tables.JobTable, who: claims.Claimant, *, promote: bool
) -> db.Script[Apart]:
    """Claim one job after the ordinary claim has raised, and set aside the rows that raise.

    Takes one statement, which is one transaction when `conn` is autocommit, and tries at most 100
    rows. Logs a warning for each row that raised, with the command that removes it.
    """
    row = yield from statements.claim_isolation.claim_apart.script(
        table=table.name,
        worker=who.worker_id,
        host=who.host,
        queue=who.queue,
        lease_s=who.lease_s,
        obey=who.obey,
        promote=promote,
        models=who.models,
        lane=who.lane,
        versions=who.versions,
    )
    for each in row["aside"]:
        _log.warning("%s", _describe(table, each))
    return Apart(row["job_id"], row["aside"])


_BECAME = {
    "failed": "it has failed",
    "set_aside": "it is blocked as set_aside, since it cannot be failed either",
    "postponed": "it is tried again in a minute",
    "skipped": "no change of it is accepted, so that every claim skips it",
}


def _describe(table: job_tables.JobTable, aside: Row) -> str:
    remove = (
        f"queue-workflows cancel {aside['run_id']!r}"
        if table.in_run
        else f"queue-workflows jobs delete {aside['id']!r}"
    )
    return (
        f"job {aside['id']!r} cannot be claimed: {_BECAME[aside['became']]}."
        f" The error of the database: {aside['error']!r:.1000}. To remove it: {remove}"
    )


def set_aside(lease: job_tables.Lease, *, error: str) -> db.Script[str | None]:
    """End a claimed job whose outcome the database refuses.

    Returns `failed`, `set_aside` (blocked, since it cannot be failed either), or None if nothing
    about it can be written.
    """
    parameters = job_tables.fence(lease, table=lease.table.name, error=error)
    return statements.claim_isolation.set_aside.script(**parameters)


def change_all(
    change: db.Script[list[Row]],
    leases: Sequence[job_tables.Lease],
    one: Callable[[job_tables.Lease], db.Script[Row | None]],
) -> db.Script[list[Row]]:
    """Return the rows of `change`; if a row makes it fail, those of `one` for each claim."""
    yield db.BEGIN
    try:
        rows = yield from change
    except psycopg.Error as error:
        if not is_about_rows(error):
            raise
        yield db.ROLLBACK
    else:
        yield db.COMMIT
        return rows
    return (yield from change_each(leases, one))


def change_each(
    leases: Sequence[job_tables.Lease],
    one: Callable[[job_tables.Lease], db.Script[Row | None]],
) -> db.Script[list[Row]]:
    """Change each claim in a transaction or savepoint of its own; return the changed rows.

    A claim whose change the database refuses is logged, and ends with its lease.
    """
    rows: list[Row] = []
    for lease in leases:
        yield db.BEGIN
        try:
            row = yield from one(lease)
        except psycopg.Error as error:
            if not is_about_rows(error):
                raise
            yield db.ROLLBACK
            _log.warning(
                "job %r is left to its lease, the database refuses its change: %s",
                lease.job_id,
                str(error).strip(),
            )
            continue
        yield db.COMMIT
        if row is not None:
            rows.append(row)
    return rows
