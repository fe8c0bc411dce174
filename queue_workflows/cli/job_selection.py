"""Choose the jobs that a command changes: by their ids, or by a filter."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from queue_workflows import db, errors, jobs
from queue_workflows.cli import ids
from queue_workflows.runtime import clock

_AGO = re.compile(r"(\d{1,6})([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def instant(text: str | None) -> datetime | timedelta | None:
    """Return a time span for `90m`, `24h` or `7d`, a time for ISO text. Raises `InvalidConfig`."""
    if text is None:
        return None
    ago = _AGO.fullmatch(text)
    if ago is not None:
        return timedelta(**{_UNITS[ago[2]]: int(ago[1])})
    try:
        moment = clock.iso_time(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise errors.InvalidConfig(
            f"--since {text} should look like 90m, 24h, 7d, or 2026-01-31T09:00+01:00"
        )
    return moment


class Selection:
    """The jobs that a command is about: named ids, or those that a filter finds."""

    def __init__(
        self,
        given: Sequence[str] | None,
        queue: str | None,
        task: str | None,
        status: Sequence[str] | None,
        since: str | None,
        key: str | None,
        *,
        default: Sequence[str],
    ) -> None:
        self.ids = list(given or ())
        self._given = {"queue": queue, "task_name": task, "status": status or None, "key": key}
        self._since = since
        self._default = default

    def check(self) -> None:
        """Raise `InvalidConfig` for neither ids nor a filter, and for both."""
        filtered = self._since is not None or any(v is not None for v in self._given.values())
        if bool(self.ids) == filtered:
            raise errors.InvalidConfig(
                "name jobs or give a filter: --queue, --task, --status, --since, --key"
                if not filtered
                else "name jobs or give a filter, not both"
            )
        instant(self._since)

    def found(self) -> list[str]:
        """Return the ids; for a filter the oldest first."""
        if self.ids:
            with db.transaction() as conn:
                return [ids.find(conn, one)[0] for one in self.ids]
        given: dict[str, Any] = {"status": list(self._default)}
        given |= {name: value for name, value in self._given.items() if value is not None}
        rows = jobs.list(**given, since=instant(self._since), limit=None)
        return [row["id"] for row in reversed(rows)]
