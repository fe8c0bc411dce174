"""Describe a failure: as the dict of the hook, the JSON of the command, and one line of text."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

from queue_workflows.engine import failure_alerts
from queue_workflows.runtime import display, entry_point
from queue_workflows.types import JsonDict, Row

ERROR_LIMIT = 2000
TEXT_LIMIT = 600
SUMMARY = "summary"
_FAILED = {"failed": "failed", "cannot_fire": "cannot fire", "missed": "missed an instant"}


def of(taken: failure_alerts.Taken) -> JsonDict:
    """Return the alert of what a sender took; docs/alerts.md lists its keys."""
    return _summary(taken.kinds) if taken.failure is None else _single(taken.failure)


def _single(row: Row) -> JsonDict:
    error = None if row["error"] is None else entry_point.mask(row["error"])[:ERROR_LIMIT]
    place = [
        f"{what} {display.line(row[key])}"
        for what, key in (("queue", "queue"), ("schedule", "schedule"))
        if row[key] is not None and row[key] != row["subject"]
    ]
    text = f"{row['kind']} {display.line(row['subject'])}"
    if row["name"] is not None:
        text += f" of {'workflow' if row['kind'] == 'run' else 'task'} {display.line(row['name'])}"
    text += f" ({', '.join(place)})" if place else ""
    text += f" {_FAILED[row['reason']]}"
    return {
        "kind": row["kind"],
        "id": row["subject"],
        "name": row["name"],
        "queue": row["queue"],
        "schedule": row["schedule"],
        "reason": row["reason"],
        "error": error,
        "at": _iso(row["failed_at"]),
        "count": 1,
        "text": display.line(f"{text}: {error or 'no error is stored'}", TEXT_LIMIT),
    }


def _summary(kinds: list[Row]) -> JsonDict:
    count = sum(row["n"] for row in kinds)
    parts = [
        f"{row['n']} {row['kind']}{'s' if row['n'] > 1 else ''} "
        f"({', '.join(display.line(name, 60) for name in row['names'])})"
        for row in kinds
    ]
    return {
        "kind": SUMMARY,
        "id": None,
        "name": None,
        "queue": None,
        "schedule": None,
        "reason": "limit",
        "error": None,
        "at": _iso(max(row["failed_at"] for row in kinds)),
        "count": count,
        "text": display.line(f"{count} more failures: {', '.join(parts)}", TEXT_LIMIT),
    }


def encoded(alert: JsonDict) -> bytes:
    """Return the alert as one line of JSON in ASCII, at most about 64 KiB, with a newline."""
    return json.dumps(alert, ensure_ascii=True).encode() + b"\n"


def _iso(at: Any) -> str | None:
    return at.astimezone(timezone.utc).isoformat() if isinstance(at, datetime) else None
