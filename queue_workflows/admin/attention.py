"""List the needs for a person: questions, failures, and bad answers of checks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

from queue_workflows import db
from queue_workflows.admin import checks
from queue_workflows.db import statements
from queue_workflows.runtime import display
from queue_workflows.types import Row

ABSENT_S = 10.0
"""Seconds that a due event or a new run may wait for an orchestrator, which polls each second."""
RECENT_S = 3600.0
"""Failures are listed for an hour; the page of failures has all of them."""
CHECKED_S = 15.0
"""How long the answers of checks count: they need several statements each."""
MOST = 1000
_CHECKS = (
    ("orchestrator", checks.outbox), ("orchestrator", checks.runs), ("queue", checks.queues),
    ("queue", checks.lock_keys), ("schedule", checks.schedules), ("alert", checks.alerts),
    ("machine", checks.workers),
)  # fmt: skip
"""The checks of `doctor` whose answers change by the minute, with the kind of their needs."""


class Need(NamedTuple):
    """A line for a person with its kind, a sentence, the remedy, and for how many seconds."""

    kind: str
    """`question`, `failure`, `model`, `switch`, or a kind of `_CHECKS`."""
    text: str
    remedy: str
    since_s: float | None = None
    error: str | None = None
    """The error of the last failure."""


class Facts(NamedTuple):
    """Facts about the whole system: the needs, and whether anything has ever run or failed."""

    needs: Sequence[Need] = ()
    """Questions and failures come first."""
    absent: str | None = None
    """A sentence if no orchestrator seems to run."""
    failed_at: datetime | None = None
    """When the last job failed."""
    any_run: bool = False
    checked: Sequence[Need] = ()
    """The needs that checks have found, and when, by the monotonic clock."""
    checked_at: float = -math.inf


def facts(conn: db.Connection, before: Facts) -> Facts:
    """Return the facts of now. The checks of the last call, `before`, count for CHECKED_S."""
    checked, checked_at = before.checked, before.checked_at
    if time.monotonic() - checked_at >= CHECKED_S:
        checked, checked_at = [*_models(conn), *_checked(conn)], time.monotonic()
    row = statements.pages.attention(conn, within_s=RECENT_S, most=MOST + 1, patience_s=ABSENT_S)
    absent = None
    if (row["idle_s"] or 0.0) > ABSENT_S:
        absent = f"No orchestrator has taken up work for {display.duration(row['idle_s'])}."
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
        of = f"of model {row['model']}" if row["model"] else "without a model"
        text = f"no worker can take {display.counted(row['jobs'], 'gpu job')} {of}: {row['detail']}"
        yield Need("model", text, "queue-workflows models list")


def _checked(conn: db.Connection) -> Iterator[Need]:
    for kind, check in _CHECKS:
        found = check(conn)
        for one in [found] if isinstance(found, checks.Finding) else found:
            if one.level != checks.OK:
                yield Need(kind, one.text, one.remedy)
