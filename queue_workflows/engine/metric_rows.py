"""Count the history of jobs into totals that never fall, and read what metrics show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from queue_workflows import db
from queue_workflows.db import statements
from queue_workflows.types import Row

STEP: Final = 20_000
"""Transactions whose events one call counts at most: 0.2 s of work where each has two."""
TIMEOUT: Final = "60s"
"""One transaction may have ended very many jobs. Nobody waits for the rows that it locks."""
NO_RIGHTS: Final = (
    "this role may not write metric_totals and metric_position; "
    "`queue-workflows connect --for work` prints the GRANTs"
)
MOST_TOTALS: Final = 30_000
"""Rows of totals that are read; the queues and models with labels of their own have fewer."""
MOST_NAMES: Final = 100
"""Queues, hosts or schedules with labels of their own."""


class Progress(NamedTuple):
    """How far the history is counted."""

    counted_s: float | None
    """Seconds since events were last counted; None: never."""
    behind: int | None
    """Transactions that the server has made since."""
    may_count: bool
    """Whether this role and server may write the totals."""


def count_step(conn: db.Connection | None = None, *, most: int = STEP) -> bool:
    """Add events that are not counted yet to the totals; return whether more are left.

    Those of `most` transactions at most, in one transaction, which never is an app's. Does nothing
    while another one counts. `conn`: a connection outside of a transaction; None: one of the pool.
    """
    with db.statement(conn) as own, own.transaction():
        statements.retention.set_timeout(own, timeout=TIMEOUT)
        return bool(statements.metrics.count_events(own, most=most))


def progress(conn: db.Connection) -> Progress:
    """Return how far the history is counted."""
    return Progress(**statements.metrics.progress(conn))


class State(NamedTuple):
    """Rows that describe jobs, workers and machines now."""

    waiting: list[Row]
    """queue, why, n"""
    oldest: list[Row]
    """queue, age_s"""
    running: list[Row]
    """queue, n, lapsed"""
    awaiting: list[Row]
    """queue, n"""
    runs: list[Row]
    """status, n"""
    paused: list[Row]
    """queue, paused"""
    workers: list[Row]
    """queue, state, n, slots"""
    outbox: list[Row]
    """n, lag_s; one row"""
    schedules: list[Row]
    """name, late_s, has_error, last_fire"""
    machines: list[Row]
    """host_label, sample"""


def state(conn: db.Connection, *, stale_after_s: float) -> State:
    """Return the state now. `conn` is in a transaction, whose planner settings this changes."""
    limit = {"limit": MOST_NAMES}
    statements.metrics.in_order(conn)
    oldest = [
        *statements.metrics.oldest_ingest(conn),
        *statements.metrics.oldest_nodes(conn),
    ]
    statements.metrics.by_index(conn)
    return State(
        oldest=oldest,
        running=_of_both(conn, statements.metrics.running),
        awaiting=statements.metrics.awaiting(conn),
        runs=statements.metrics.runs(conn),
        paused=statements.metrics.paused(conn, **limit),
        workers=statements.metrics.workers(conn, stale_s=stale_after_s),
        outbox=[statements.overview.open_events(conn)],
        schedules=statements.metrics.schedules(conn, **limit),
        machines=statements.metrics.machines(conn, **limit),
        waiting=_waiting(conn),  # the last: it changes the planner's settings again
    )


def _waiting(conn: db.Connection) -> list[Row]:
    found: list[Row] = []
    for table in statements.JOB_TABLES:
        statements.metrics.by_pages[table](conn)
        found += statements.metrics.waiting[table](conn)
    return found


def _of_both(conn: db.Connection, query: Mapping[str, Callable[..., list[Row]]]) -> list[Row]:
    """Return the rows of a statement for both tables of jobs."""
    return [row for table in statements.JOB_TABLES for row in query[table](conn)]
