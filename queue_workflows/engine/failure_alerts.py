"""Claim the failures that are to be sent as alerts, and keep the limit of all senders.

Each function takes part in the transaction of its connection. The rows are written by triggers.
"""

from __future__ import annotations

import logging
import secrets
from typing import Any, NamedTuple

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


def take(
    conn: db.Connection, *, app: str, per_minute: int, lease_s: float, max_age_s: float
) -> Taken | None:
    """Claim what a sender of `app` sends next, for `lease_s` seconds.

    None if nothing waits, the limit is reached, or another sender is here at the same time.

    While more failures wait than calls are left, the last of the `per_minute` calls takes all of
    them. Then nothing is sent for a minute. Failures over `max_age_s` old are deleted.
    """
    if not statements.failure_alerts.pending(conn):
        return None
    if statements.failure_alerts.lock(conn) is None:
        return None
    _expire(conn, max_age_s)
    free = statements.failure_alerts.free(conn, per_minute=per_minute)
    if not free:
        return None
    mine: dict[str, Any] = {"app": app, "patience_s": PATIENCE_S}
    waiting = statements.failure_alerts.waiting(conn, **mine)
    if not waiting:
        return None
    if free == 1:
        statements.failure_alerts.quiet(conn)
    token = secrets.token_hex(8)
    if free == 1 and waiting > 1:
        kinds = statements.failure_alerts.take_all(conn, **mine, token=token, lease_s=lease_s)
        return Taken(token, None, kinds) if kinds else None
    one = statements.failure_alerts.take(conn, **mine, token=token, lease_s=lease_s)
    return Taken(token, one, []) if one else None


def _expire(conn: db.Connection, max_age_s: float) -> None:
    rows = statements.failure_alerts.expire(conn, max_age_s=max_age_s, tries=TRIES)
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
