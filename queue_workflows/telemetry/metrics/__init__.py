"""Return the metrics page for Prometheus, and count the events of the history for it."""

from __future__ import annotations

import logging
import time
from typing import Final

import queue_workflows
from queue_workflows import config, db, history
from queue_workflows.claim import row_isolation
from queue_workflows.db import statements
from queue_workflows.telemetry.metrics import exposition
from queue_workflows.types import Row

CONTENT_TYPE: Final = exposition.CONTENT_TYPE
NEAR: Final = 1_000
"""Transactions whose events a scrape counts itself, in some milliseconds."""
LATE_S: Final = 60.0
"""After so many seconds without a count nobody else counts, so that a scrape does."""
COUNT_FOR_S: Final = 1.0
MOST_TOTALS: Final = 30_000
"""Rows of totals that are read; the queues and models with labels of their own have fewer."""
_log = logging.getLogger(__name__)


def scrape(conn: db.Connection | None = None) -> str:
    """Return all metrics in the text format of Prometheus; CONTENT_TYPE is its media type.

    Counts the last events first where the database lets it and that is little work, or nobody else
    does it. `conn`: a connection outside of a transaction; None: one of the engine's pool. Raises
    the errors of `db`.
    """
    started = time.monotonic()
    with db.statement(conn) as own:
        seen = statements.metrics.progress(own)
        if seen["may_count"]:
            if seen["behind"] is None or (seen["counted_s"] or 0.0) > LATE_S:
                count(own, within_s=COUNT_FOR_S)
            elif seen["behind"] <= NEAR:
                count(own, within_s=0)
        with own.transaction():
            seen = statements.metrics.progress(own)
            rows = statements.metrics.totals(own, limit=MOST_TOTALS)
            bounds = statements.metrics.bounds(own)
            state = exposition.state(own, stale_after_s=config.STALE_WORKER_AFTER_S.read())
    known = {row["name"] for row in rows if row["metric"] != "model_load"}
    families = [*exposition.counted(rows, bounds), *exposition.gauges(state, known)]
    return exposition.page([*families, *_about(seen, started)])


def count(conn: db.Connection | None = None, *, within_s: float) -> bool:
    """Count events of the history in small transactions, for `within_s` at least one.

    Returns whether all are counted. Does nothing while another process counts, and where this role
    and server may not write the totals. An error of the database is logged, as it must not keep a
    scrape from what is counted; an outage is raised. `conn`: as in `scrape`.
    """
    with db.statement(conn) as own:
        if not statements.metrics.progress(own)["may_count"]:
            return False
    until = time.monotonic() + within_s
    try:
        while history.count_step(conn):
            if time.monotonic() >= until:
                return False
    except db.Error as error:
        if row_isolation.is_outage(error):
            raise
        _log.warning("the history of jobs is not counted: %s", row_isolation.described(error))
        return False
    return True


def _about(seen: Row, started: float) -> list[exposition.Family]:
    info = exposition.gauge("build_info", "The version of the package that made this page.")
    info.add(1, {"version": queue_workflows.__version__})
    age = exposition.gauge("history_counted_age_seconds", "Time since events were last counted.")
    age.add(seen["counted_s"], {})
    behind = exposition.gauge(
        "history_uncounted_transactions", "Transactions of the server since events were counted."
    )
    behind.add(seen["behind"], {})
    took = exposition.gauge("scrape_duration_seconds", "Time that it took to make this page.")
    took.add(time.monotonic() - started, {})
    return [info, age, behind, took]
