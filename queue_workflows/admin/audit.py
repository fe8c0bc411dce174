"""List the invariants, and check by SQL statements which jobs, runs or schedules break them."""

from __future__ import annotations

from typing import Any, NamedTuple

import psycopg

from queue_workflows import config, db
from queue_workflows.claim import recovery
from queue_workflows.db import statements
from queue_workflows.types import Row

STATEMENT_TIMEOUT_S = 60.0
"""For one invariant: three times what a million jobs took. A longer snapshot would keep vacuum
from its work."""
COMMIT_S = 15.0
"""How long a transaction under way may still change what is acknowledged: three times the 5 s that
an engine transaction may take."""
SWEEP_S = 120.0
"""Two rounds of the orchestrator's slowest sweep, that of jobs whose run is over."""


class Offender(NamedTuple):
    """What breaks an invariant: the id of a job, run or schedule entry, and how."""

    id: str
    text: str


class Invariant(NamedTuple):
    """One invariant. Without a statement it cannot be checked here, for the reason in `note`."""

    number: int
    name: str
    sentence: str
    statement: statements.Named | None
    params: tuple[str, ...] = ()
    """What the statement takes, out of `parameters()`."""
    note: str = ""


_SENTENCES = statements.comments("audit")


def _checked(number: int, name: str, statement: statements.Named, *params: str) -> Invariant:
    """Return the invariant whose sentence is the comment of the statement `name`."""
    return Invariant(number, name.replace("_", " "), _SENTENCES[name], statement, params)


INVARIANTS = (
    _checked(1, "terminal_stays", statements.audit.terminal_stays, "since"),
    _checked(2, "one_finalisation", statements.audit.one_finalisation, "since"),
    _checked(3, "claims_counted", statements.audit.claims_counted, "since"),
    _checked(4, "own_claim_only", statements.audit.own_claim_only, "since"),
    _checked(5, "running_is_claimed", statements.audit.running_is_claimed, "since", "whole"),
    _checked(6, "dependencies_first", statements.audit.dependencies_first, "since", "whole"),
    _checked(7, "outbox_agrees", statements.audit.outbox_agrees, "since", "whole", "kept"),
    _checked(8, "run_agrees", statements.audit.run_agrees, "since", "whole", "sweep_s"),
    _checked(9, "cancel_holds", statements.audit.cancel_holds, "since", "commit_s"),
    _checked(10, "one_job_per_key", statements.audit.one_job_per_key, "since", "whole"),
    _checked(11, "one_fire", statements.audit.one_fire),
    _checked(
        12,
        "attempts_bounded",
        statements.audit.attempts_bounded,
        "since",
        "whole",
        "max_crashes",
        "max_lapses",
    ),
    _checked(13, "off_holds", statements.audit.off_holds, "since", "commit_s"),
    Invariant(
        14,
        "short transactions",
        "No engine transaction is open for more than 5 s (migrations aside), and none spans app "
        "code.",
        None,
        note="the database cannot tell the transactions of an app from those of the engine; "
        "`queue-workflows doctor` shows the oldest one",
    ),
    _checked(15, "runs_advance", statements.audit.runs_advance, "sweep_s"),
    _checked(16, "maps_agree", statements.audit.maps_agree, "since", "whole"),
    _checked(
        17, "streams_numbered", statements.audit.streams_numbered, "since", "whole", "commit_s"
    ),
    _checked(18, "steps_agree", statements.audit.steps_agree, "since", "whole", "sweep_s"),
)


def parameters(
    conn: db.Connection,
    *,
    since_s: float | None,
    limit: int | None,
    commit_s: float = COMMIT_S,
    sweep_s: float = SWEEP_S,
) -> dict[str, Any]:
    """Return what the statements take, for the last `since_s` seconds; None: all that is retained.

    `limit`: most offenders per invariant. `since` is text, as it may be `-infinity`.
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
    """Return what breaks an invariant that has a statement, from one snapshot of the database."""
    assert invariant.statement is not None
    given = {name: values[name] for name in (*invariant.params, "limit")}
    rows: list[Row] = invariant.statement(conn, **given)
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
            timeout_ms = str(int(STATEMENT_TIMEOUT_S * 1000))
            statements.audit.limit_transaction(conn, timeout_ms=timeout_ms)
            return offenders(conn, invariant, values)
    except psycopg.errors.QueryCanceled:
        return f"not finished within {STATEMENT_TIMEOUT_S:g} s"
    except psycopg.Error as error:
        if conn.closed or conn.broken:
            raise
        return error.diag.message_primary or str(error)
