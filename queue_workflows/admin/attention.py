"""List the needs for a person: questions, failures, and bad answers of checks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from queue_workflows import db
from queue_workflows.admin import checks
from queue_workflows.db import statements
from queue_workflows.runtime import display

ABSENT_S = 10.0
"""Seconds that a due event or a new run may wait for an orchestrator, which polls each second."""
RECENT_S = 3600.0
"""Failures are listed for an hour; the page of failures has all of them."""
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


def needs(conn: db.Connection) -> list[Need]:
    """Return the needs for a person, questions and failures first."""
    return [*_questions(conn), *_failures(conn), *_models(conn), *_switches(conn), *_checked(conn)]


def absent(conn: db.Connection) -> str | None:
    """Return in a sentence that no orchestrator seems to run; None if one does its work."""
    found = statements.overview.open_events(conn)
    late = statements.overview.late_runs(conn, patience_s=ABSENT_S)
    waits_s = max([found["lag_s"], *(row["wait_s"] for row in late if not row["others"])])
    if waits_s <= ABSENT_S:
        return None
    return f"No orchestrator has taken up work for {display.duration(waits_s)}."


def _questions(conn: db.Connection) -> Iterator[Need]:
    found = statements.pages.questions(conn, most=MOST + 1)
    if found["n"]:
        count = _counted(found["n"], "node")
        text = f"{count} {'asks' if found['n'] == 1 else 'ask'} a person"
        yield Need("question", text, "queue-workflows inputs", found["waiting_s"])


def _counted(number: int, word: str) -> str:
    return f"{MOST:,}+ {word}s" if number > MOST else display.counted(number, word)


def _failures(conn: db.Connection) -> Iterator[Need]:
    found = statements.pages.failures(conn, within_s=RECENT_S, most=MOST + 1)
    if found["recent"]:
        text = f"{_counted(found['recent'], 'job')} failed within an hour"
        yield Need("failure", text, "queue-workflows runs --status failed", None, found["error"])


def _models(conn: db.Connection) -> Iterator[Need]:
    for row in statements.models.flagged(conn):
        of = f"of model {row['model']}" if row["model"] else "without a model"
        text = f"no worker can take {display.counted(row['jobs'], 'gpu job')} {of}: {row['detail']}"
        yield Need("model", text, "queue-workflows models list")


def _switches(conn: db.Connection) -> Iterator[Need]:
    for row in statements.pages.overdue_switches(conn):
        queue = "" if row["queue"] == "all" else f" queue {row['queue']}"
        text = f"{row['host_label']}{queue} should be on again, and no worker of it is there"
        yield Need("switch", text, "start its workers", row["since_s"])


def _checked(conn: db.Connection) -> Iterator[Need]:
    for kind, check in _CHECKS:
        found = check(conn)
        for one in [found] if isinstance(found, checks.Finding) else found:
            if one.level != checks.OK:
                yield Need(kind, one.text, one.remedy)
