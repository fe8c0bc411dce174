"""List the invariants, and check by SQL statements which jobs, runs or schedules break them."""

from __future__ import annotations

from typing import Any, NamedTuple

import psycopg

from queue_workflows import config, db
from queue_workflows.claim import recovery
from queue_workflows.db import statements
from queue_workflows.types import Row

STATEMENT_TIMEOUT_S = 60.0
"""Seconds that the check of one invariant may take, three times its duration with a million jobs. A
longer snapshot would keep vacuum from removing old rows."""
COMMIT_S = 15.0
"""Seconds for which an open transaction may still change acknowledged rows, which is three times
the 5 s of an engine transaction."""
SWEEP_S = 120.0
"""Seconds of two rounds of the orchestrator's slowest sweep, which ends the jobs of ended runs."""


class Offender(NamedTuple):
    """A row that breaks an invariant, with the id of its job, run or schedule, and the reason."""

    id: str
    text: str


class Invariant(NamedTuple):
    """One invariant. Without a statement it cannot be checked here, for the reason in `note`."""

    number: int
    name: str
    sentence: str
    statement: statements.Named | None
    note: str = ""


def _invariants() -> tuple[Invariant, ...]:
    """Return the invariants of `audit.sql`; a statement's comment is the sentence."""
    found = [
        Invariant(0, name.replace("_", " "), sentence, getattr(statements.audit, name))
        for name, sentence in statements.comments("audit").items()
        if name != "parameters"
    ]
    found.insert(
        13,
        Invariant(
            0,
            "short transactions",
            "No engine transaction is open for more than 5 s (migrations aside), and none spans "
            "app code.",
            None,
            "the database cannot tell the transactions of an app from those of the engine; "
            "`queue-workflows doctor` shows the oldest one",
        ),
    )
    return tuple(each._replace(number=number) for number, each in enumerate(found, 1))


INVARIANTS = _invariants()


def parameters(
    conn: db.Connection,
    *,
    since_s: float | None,
    limit: int | None,
    commit_s: float = COMMIT_S,
    sweep_s: float = SWEEP_S,
) -> dict[str, Any]:
    """Return the parameters of the statements, for the last `since_s` seconds, or for all.

    `limit` is the most offenders per invariant. `since` is text, as it may be `-infinity`.
    """
    days = config.NODE_EVENT_RETENTION_DAYS.read()
    row = statements.audit.parameters(conn, since_s=since_s, retention_days=days)
    return row | {
        "whole": since_s is None,
        "commit_s": commit_s,
        "sweep_s": sweep_s,
        "max_crashes": recovery.MAX_CRASHES,
        "max_lapses": recovery.MAX_LAPSES,
        "limit": limit,
    }


def offenders(conn: db.Connection, invariant: Invariant, values: dict[str, Any]) -> list[Offender]:
    """Return the offenders of an invariant that has a statement, from one snapshot."""
    assert invariant.statement is not None
    rows: list[Row] = invariant.statement(conn, **values)
    return [Offender(row["id"] or "-", row["text"] or "") for row in rows]


def check(
    conn: db.Connection, invariant: Invariant, values: dict[str, Any]
) -> list[Offender] | str:
    """Return `offenders` from a read-only transaction, or why the check could not be finished.

    The transaction is limited to STATEMENT_TIMEOUT_S and one core. Raises `db.Error` if the
    connection is lost.
    """
    try:
        with conn.transaction():
            limits = {
                "transaction_read_only": "on",
                "statement_timeout": str(int(STATEMENT_TIMEOUT_S * 1000)),
                "jit": "off",
                "max_parallel_workers_per_gather": "0",
            }
            db.set_local(conn, limits)
            return offenders(conn, invariant, values)
    except psycopg.errors.QueryCanceled:
        return f"not finished within {STATEMENT_TIMEOUT_S:g} s"
    except psycopg.Error as error:
        if conn.closed or conn.broken:
            raise
        return error.diag.message_primary or str(error)
