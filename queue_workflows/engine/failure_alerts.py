"""Claim the failures that are to be sent as alerts, and keep the limit of all senders.

Each function takes part in the transaction of its connection. The rows are written by triggers.
"""

from __future__ import annotations

import logging
import secrets
from typing import NamedTuple

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.runtime import display
from queue_workflows.types import Row

TRIES = 2
"""How often a failure is taken: a second time after a sender that died during the call."""
PATIENCE_S = 60.0
"""Seconds for which a failure is left to senders of the app whose code has a function for it."""
_log = logging.getLogger(__name__)


class Taken(NamedTuple):
    """What one call sends: one failure, or a summary of all that wait."""

    token: str
    """The identity of this claim."""
    failure: Row | None
    """kind, subject, name, queue, schedule, reason, error, failed_at; None for a summary."""
    kinds: list[Row]
    """Of a summary, for each kind: kind, n, names (up to five), failed_at (the last)."""


def announce(conn: db.Connection, *, keep_s: float) -> None:
    """Note that a sender is there: failures of the next `keep_s` seconds are noted for it."""
    conn.execute(statements.failure_alerts.announce, {"keep_s": keep_s})


def take(
    conn: db.Connection, *, app: str, per_minute: int, lease_s: float, max_age_s: float
) -> Taken | None:
    """Claim what a sender of `app` sends next, for `lease_s` seconds.

    None if nothing waits, the limit is reached, or another sender is here at the same time.

    While more failures wait than calls are left, the last of the `per_minute` calls takes all of
    them. Then nothing is sent for a minute. Failures over `max_age_s` old are deleted.
    """
    row = conn.execute(statements.failure_alerts.pending).fetchone()
    if row is None or not row["any"]:
        return None
    if conn.execute(statements.failure_alerts.lock).fetchone() is None:
        return None
    _expire(conn, max_age_s)
    state = conn.execute(statements.failure_alerts.free, {"per_minute": per_minute}).fetchone()
    free = state["free"] if state else 0
    if not free:
        return None
    mine = {"app": app, "patience_s": PATIENCE_S}
    counted = conn.execute(statements.failure_alerts.waiting, mine).fetchone()
    waiting = counted["n"] if counted else 0
    if not waiting:
        return None
    if free == 1:
        conn.execute(statements.failure_alerts.quiet)
    token = secrets.token_hex(8)
    given = mine | {"token": token, "lease_s": lease_s}
    if free == 1 and waiting > 1:
        kinds = conn.execute(statements.failure_alerts.take_all, given).fetchall()
        return Taken(token, None, kinds) if kinds else None
    one = conn.execute(statements.failure_alerts.take, given).fetchone()
    return Taken(token, one, []) if one else None


def _expire(conn: db.Connection, max_age_s: float) -> None:
    given = {"max_age_s": max_age_s, "tries": TRIES}
    rows = conn.execute(statements.failure_alerts.expire, given).fetchall()
    lost = [row for row in rows if not row["is_sent"]]
    if not lost:
        return
    tried = [row for row in lost if row["claims"] >= TRIES]
    for row in tried[:5]:
        _log.warning(
            "failure of %s %s: %d senders ended during the call; it is not sent again",
            row["kind"], display.line(row["subject"]), row["claims"],
        )  # fmt: skip
    if count := len(lost) - len(tried):
        _log.warning(
            "not sent any more, as they are over %g s old: %d of the failures", max_age_s, count
        )


def sent(conn: db.Connection, token: str) -> None:
    """Record that what was taken under this token is sent; nothing if another sender has it now."""
    conn.execute(statements.failure_alerts.sent, {"token": token})


def prune(conn: db.Connection) -> int:
    """Delete failures that nobody sends any more; return how many."""
    return conn.execute(statements.failure_alerts.prune).rowcount
