"""Define mutants of ingest jobs: keys, lock keys, limits, pauses, attempts, crash charges."""

from __future__ import annotations

import re

from queue_workflows.db import statements
from tests.soak.mutant import Conn, Mutant, edit, rewrite


def _two_of_a_key(conn: Conn) -> None:
    """Create two jobs for two requests with one key."""
    conn.execute("DROP INDEX ingest_jobs_idempotency_idx")
    known = r"ON CONFLICT \(idempotency_key\)[^;]*DO NOTHING"
    edit(conn, "queue_workflows_put_jobs", (known, ""))


def _admit_all(conn: Conn) -> None:
    """Admit every job with a lock key at once."""
    conn.execute("DROP INDEX ingest_jobs_lock_idx")
    held = "AND (j.status = 'running' OR (j.status = 'queued' AND j.blocked_reason IS NULL))"
    edit(conn, "queue_workflows_give_turns", (re.escape(held), "AND false"))


def _no_limit(conn: Conn) -> None:
    edit(conn, "queue_workflows_admit", (r"IF v_max IS NOT NULL THEN", "IF false THEN"))


def _no_rate(conn: Conn) -> None:
    asked = r"IF v_rate IS NOT NULL AND v_room > 0 THEN"
    edit(conn, "queue_workflows_admit", (asked, "IF false THEN"))


def _no_pause(conn: Conn) -> None:
    edit(
        conn, "queue_workflows_queue_room",
        (r"IF queue_workflows_is_paused\(v_set\.[a-z_, .]+\) THEN", "IF false THEN"),
    )  # fmt: skip


def _two_attempts_more() -> None:
    rewrite(statements.attempts.fail, b"made < most", b"made - 2 < most")


def _count_snoozes() -> None:
    """Count a hand-back, and so a snooze, as an attempt."""
    old = b"worker_id = NULL,"
    rewrite(statements.handback.hand_back, old, b"attempts = j.attempts + 1, " + old)


MUTANTS = {
    "keys": Mutant(
        "two jobs may have one idempotency key", "one key, more than one job",
        None, _two_of_a_key, jobs={"keyed": 24},
    ),
    "lock-keys": Mutant(
        "a job does not wait for its lock key",
        "two jobs of a lock key at once, or out of order",
        None, _admit_all, jobs={"locked": 24},
    ),
    "limits": Mutant(
        "any number of jobs of a partition runs", "more at once than a limit allows",
        None, _no_limit, jobs={"limited": 12},
    ),
    "rates": Mutant(
        "any number of jobs of a partition starts", "more starts than a rate allows",
        None, _no_rate, jobs={"metered": 6},
    ),
    "pauses": Mutant(
        "claims ignore that their queue is paused", "claimed while paused",
        None, _no_pause, jobs={"pooled": 36},
    ),
    "attempts": Mutant(
        "a job has two attempts more than allowed",
        "attempts miscounted or beyond the last", _two_attempts_more, jobs={"retried": 24},
    ),
    "snoozes": Mutant(
        "a snooze counts as a failed attempt",
        "attempts miscounted or beyond the last", _count_snoozes, jobs={"retried": 24},
    ),
}  # fmt: skip
