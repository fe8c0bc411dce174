"""Count the history of jobs into totals that never fall."""

from __future__ import annotations

from typing import Final

from queue_workflows import db
from queue_workflows.db import statements

STEP: Final = 20_000
"""Transactions whose events one call counts at most: 0.2 s of work where each has two."""
TIMEOUT: Final = "60s"
"""One transaction may have ended very many jobs. Nobody waits for the rows that it locks."""
NO_RIGHTS: Final = (
    "this role may not write metric_totals and metric_position; "
    "`queue-workflows connect --for work` prints the GRANTs"
)


def count_step(conn: db.Connection | None = None, *, most: int = STEP) -> bool:
    """Add events that are not counted yet to the totals; return whether more are left.

    Those of `most` transactions at most, in one transaction, which never is an app's. Does nothing
    while another one counts. `conn`: a connection outside of a transaction; None: one of the pool.
    """
    with db.statement(conn) as own, own.transaction():
        statements.retention.set_timeout(own, timeout=TIMEOUT)
        return bool(statements.metrics.count_events(own, most=most))
