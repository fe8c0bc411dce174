"""List what needs a person's attention, such as questions, failures and failed checks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from queue_workflows import config, db, failures
from queue_workflows.admin import checks, waiting_reasons
from queue_workflows.db import statements
from queue_workflows.runtime import display
from queue_workflows.types import Row

ABSENT_S = 10.0
"""Seconds that a due event or a new run may wait for an orchestrator, which polls each second."""
RECENT_S = 3600.0
"""Seconds for which failures are listed here; the page of failures has all of them."""
CHECKED_S = 15.0
"""Seconds for which results of checks are reused, since checks need six statements."""
MOST = 1000


class Need(NamedTuple):
    """A line for a person with its kind, a sentence, the remedy, and its age in seconds."""

    kind: str
    """`question`, `failure`, `switch`, `model`, or a kind of `_checked`."""
    text: str
    remedy: str
    """A command in it is between backticks."""
    since_s: float | None = None
    error: str | None = None
    """The error of the last failure, or how many causes the failures have."""


class Facts(NamedTuple):
    """Facts about the whole system, with the needs, and whether anything has ever run or failed."""

    needs: Sequence[Need] = ()
    """Questions and failures come first."""
    absent: str | None = None
    """A sentence if no orchestrator seems to run."""
    failed_at: datetime | None = None
    """When the last job failed."""
    any_run: bool = False
    checked: Sequence[Need] = ()
    """The needs that checks have found, and the time of the checks by the monotonic clock."""
    checked_at: float = -math.inf
    causes: str | None = None
    """The causes of jobs that failed within RECENT_S, as the checks found; None for one alone."""
    awaited: Sequence[str] = ()
    """The machines without a worker that the needs `switch` name."""


def facts(conn: db.Connection, before: Facts) -> Facts:
    """Return the present facts.

    The checks of the last call, `before`, are valid for CHECKED_S, or until an orchestrator comes
    or goes, so that no check contradicts `absent`.
    """
    row = statements.pages.attention(
        conn,
        within_s=RECENT_S,
        most=MOST + 1,
        patience_s=ABSENT_S,
        stale_s=config.STALE_WORKER_AFTER_S.read(),
    )
    absent = _absent(row)
    checked, checked_at, causes = before.checked, before.checked_at, before.causes
    is_over = time.monotonic() - checked_at >= CHECKED_S
    if is_over or (absent is None) != (before.absent is None):
        checked, checked_at = [*_models(conn), *_checked(conn, row)], time.monotonic()
        causes = _causes(conn) if row["failed"] > 1 else None
    needs = [*_now(row, causes), *checked]
    return Facts(
        needs,
        absent,
        failed_at=row["failed_at"],
        any_run=row["any_run"],
        checked=checked,
        checked_at=checked_at,
        causes=causes,
        awaited=[each["host_label"] for each in row["switches"]],
    )


def _absent(row: Row) -> str | None:
    """Return a sentence if no orchestrator seems to run."""
    waits = [each["wait_s"] for each in row["late"] if not each["others"]]
    idle_s = max(waits, default=0.0)
    if row["event"] is not None:
        idle_s = max(idle_s, row["event"]["lag_s"])
    if idle_s <= ABSENT_S:
        return None
    return f"No orchestrator has taken up work for {display.duration(idle_s)}."


def _causes(conn: db.Connection) -> str | None:
    """Return how many causes the failures of jobs within RECENT_S have, and the most frequent.

    Returns None for a single cause.
    """
    found = failures.list(since=timedelta(seconds=RECENT_S), seen=True, conn=conn)
    groups = [each for each in found.groups if each["members"][0]["kind"] != "schedule"]
    if len(groups) < 2:
        return None
    most = max(groups, key=lambda group: group["count"])
    return f"{len(groups)} causes, most: {most['signature']} ({most['count']:,})"


def _now(row: Row, causes: str | None) -> Iterator[Need]:
    """Yield the needs of the statement: questions, failures, switches, and dead workers."""
    if row["asked"]:
        text = f"{_counted(row['asked'], 'node')} {'asks' if row['asked'] == 1 else 'ask'} a person"
        yield Need("question", text, "`queue-workflows inputs`", row["asked_s"])
    if row["failed"]:
        text = f"{_counted(row['failed'], 'job')} failed within an hour"
        error = causes or row["error"]
        yield Need("failure", text, "`queue-workflows failures --since 1h`", None, error)
    for each in row["switches"]:
        queue = "" if each["queue"] == "all" else f" queue {each['queue']}"
        text = f"{each['host_label']}{queue} should be on again, but no worker of it runs"
        yield Need("switch", text, "start its workers", each["since_s"])
    for each in row["gone"]:
        text = f"{each['host_label']}: its worker of queue {each['queue']} died, and none came back"
        yield Need("machine", text, "start it, or switch the queue off there", each["since_s"])


def _counted(number: int, word: str) -> str:
    return f"{MOST:,}+ {word}s" if number > MOST else display.counted(number, word)


def _models(conn: db.Connection) -> Iterator[Need]:
    for row in statements.models.flagged(conn):
        text = waiting_reasons.unassignable_text(row)
        yield Need("model", text, "`queue-workflows models list`")


def _checked(conn: db.Connection, row: Row) -> Iterator[Need]:
    """Yield the findings of the `doctor` checks whose results change from minute to minute."""
    late = [each for each in row["late"] if each["wait_s"] > checks.WAIT_WARN_S]
    live = waiting_reasons.live_queues(conn)
    found = {
        "orchestrator": [
            checks.outbox(conn, oldest=row["event"] or {"lag_s": 0.0}),
            *checks.runs(conn, late=late),
        ],
        "queue": [*checks.queues(conn, live=live), *checks.lock_keys(conn, live=live)],
        "schedule": checks.schedules(conn),
        "alert": [checks.alerts(conn)],
        "machine": checks.workers(conn),
    }
    for kind, findings in found.items():
        for one in findings:
            if one.level != checks.OK:
                yield Need(kind, one.text, one.remedy)
