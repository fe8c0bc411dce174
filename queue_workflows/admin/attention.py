"""List what needs a person's attention, such as questions, failures and failed checks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

from queue_workflows import db
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
    since_s: float | None = None
    error: str | None = None
    """The error of the last failure."""


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


def facts(conn: db.Connection, before: Facts) -> Facts:
    """Return the present facts; the checks of the last call, `before`, are valid for CHECKED_S."""
    row = statements.pages.attention(conn, within_s=RECENT_S, most=MOST + 1, patience_s=ABSENT_S)
    checked, checked_at = before.checked, before.checked_at
    if time.monotonic() - checked_at >= CHECKED_S:
        checked, checked_at = [*_models(conn), *_checked(conn, row)], time.monotonic()
    waits = [each["wait_s"] for each in row["late"] if not each["others"]]
    idle_s = max(waits, default=0.0)
    if row["event"] is not None:
        idle_s = max(idle_s, row["event"]["lag_s"])
    absent = None
    if idle_s > ABSENT_S:
        absent = f"No orchestrator has taken up work for {display.duration(idle_s)}."
    needs = [*_now(row), *checked]
    return Facts(needs, absent, row["failed_at"], row["any_run"], checked, checked_at)


def _now(row: Row) -> Iterator[Need]:
    """Yield the needs of the statement: questions, failures, and switches."""
    if row["asked"]:
        text = f"{_counted(row['asked'], 'node')} {'asks' if row['asked'] == 1 else 'ask'} a person"
        yield Need("question", text, "queue-workflows inputs", row["asked_s"])
    if row["failed"]:
        text = f"{_counted(row['failed'], 'job')} failed within an hour"
        yield Need("failure", text, "queue-workflows runs --status failed", None, row["error"])
    for each in row["switches"]:
        queue = "" if each["queue"] == "all" else f" queue {each['queue']}"
        text = f"{each['host_label']}{queue} should be on again, and no worker of it is there"
        yield Need("switch", text, "start its workers", each["since_s"])


def _counted(number: int, word: str) -> str:
    return f"{MOST:,}+ {word}s" if number > MOST else display.counted(number, word)


def _models(conn: db.Connection) -> Iterator[Need]:
    for row in statements.models.flagged(conn):
        text = waiting_reasons.unassignable_text(row)
        yield Need("model", text, "queue-workflows models list")


def _checked(conn: db.Connection, row: Row) -> Iterator[Need]:
    """Yield the findings of those checks of `doctor` that change from minute to minute."""
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
