"""Define `Schedule`, check its fields, and compute the instants at which its row fires."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass, fields
from datetime import datetime, timedelta, timezone
from typing import Any, Literal

from queue_workflows import errors
from queue_workflows.schedule import entry, expression
from queue_workflows.types import FailureHook

CatchUp = Literal["none", "last", "all"]
Overlap = Literal["allow", "skip", "replace", "queue"]
_CHOICES = {"catch_up": ("none", "last", "all"), "overlap": ("allow", "skip", "replace", "queue")}
_MAX_S = 31_622_400
_FIRST = datetime(2000, 1, 1, tzinfo=timezone.utc)
_LAST = datetime(9999, 12, 31, tzinfo=timezone.utc)
_MAX_QUEUE = 200
"""Bytes of a queue's name in the table."""
_LONGEST_DAYS = 367
MAX_CAUGHT_UP = 1000
GRACE_S = 60.0
"""With `catch_up="none"`, seconds for which an instant is on time: a restart takes less."""


@dataclass(frozen=True)
class Schedule:
    """Queue a task with `args`, or submit a workflow with `inputs`, at the times of `expression`.

    `every="10s"` stands for the expression "every 10s". `catch_up`: what fires of the instants that
    an outage missed. `overlap`: what an instant does while the job or run of the last fire is not
    over. `on_failure(alert)`: see docs/alerts.md; for a schedule of the code only. Raises
    `InvalidConfig` (a ValueError) that names the schedule, the field and what it takes.
    """

    name: str
    expression: str = ""
    tz: str = "UTC"
    task_name: str | None = None
    args: Mapping[str, Any] | None = None
    workflow_name: str | None = None
    inputs: Mapping[str, Any] | None = None
    queue: str | None = None
    priority: int | None = None
    idempotency_key: str | None = None
    headers: Mapping[str, str] | None = None
    catch_up: CatchUp = "last"
    catch_up_max: int = 100
    catch_up_within_s: float = 86_400.0
    overlap: Overlap = "skip"
    jitter_s: float = 0.0
    start_at: datetime | None = None
    end_at: datetime | None = None
    on_failure: FailureHook | None = None
    every: InitVar[str | None] = None

    def __post_init__(self, every: Any) -> None:
        entry.check_name(self.name)
        if every is not None:
            self._set_interval(every)
        if (self.task_name is None) == (self.workflow_name is None):
            raise self._refused("task_name or workflow_name: give one of them")
        self._check_texts()
        self._check_target()
        for field, allowed in _CHOICES.items():
            if getattr(self, field) not in allowed:
                raise self._refused(
                    f"{field} is one of {', '.join(allowed)}, not {getattr(self, field)!r:.40}"
                )
        self._check_number("catch_up_within_s", 1e-3)
        self._check_number("jitter_s", 0)
        most = self.catch_up_max
        if type(most) is not int or not 1 <= most <= MAX_CAUGHT_UP:
            raise self._refused(f"catch_up_max is a whole number 1-{MAX_CAUGHT_UP}, not {most!r}")
        for field in ("start_at", "end_at"):
            self._check_time(field)
        if self.start_at and self.end_at and self.end_at < self.start_at:
            raise self._refused("end_at is before start_at")
        try:
            self.parsed()
        except errors.InvalidConfig as error:
            raise self._refused(str(error)) from None

    def _set_interval(self, every: Any) -> None:
        if self.expression != "":
            raise self._refused("expression or every: give one of them")
        if not isinstance(every, str):
            raise self._refused(f"every is a text such as '10s' or '1h30m', not {every!r:.60}")
        object.__setattr__(self, "expression", f"every {every}")

    def _check_texts(self) -> None:
        for field, example in (("expression", "0 3 * * *"), ("tz", "Europe/Warsaw")):
            if not isinstance(getattr(self, field), str):
                given = getattr(self, field)
                raise self._refused(f"{field} is a text such as {example!r}, not {given!r:.60}")
        for field in ("task_name", "workflow_name", "queue", "idempotency_key"):
            if getattr(self, field) is not None:
                entry.check_text(self.name, field, getattr(self, field))
        if self.queue is not None and len(self.queue.encode()) > _MAX_QUEUE:
            raise self._refused(f"queue has over {_MAX_QUEUE} bytes: {self.queue!r:.40}")

    def _check_target(self) -> None:
        for field, owner in (("args", "task_name"), ("inputs", "workflow_name")):
            given = getattr(self, field)
            if given is not None and not isinstance(given, Mapping):
                raise self._refused(f"{field} is a mapping, not {given!r:.40}")
            if given and getattr(self, owner) is None:
                raise self._refused(f"{field} belongs to a schedule with {owner}")
        headers: Any = self.headers
        if headers is not None and not (
            isinstance(headers, Mapping) and all(isinstance(text, str) for text in headers.values())  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        ):
            raise self._refused(f"headers is a mapping of texts, not {headers!r:.40}")
        given = self.priority
        if given is not None and (type(given) is not int or not -32768 <= given <= 32767):
            raise self._refused(f"priority is a whole number -32768 to 32767, not {given!r:.40}")
        if self.on_failure is not None and not callable(self.on_failure):
            raise self._refused(f"on_failure is a function, not {self.on_failure!r:.60}")
        if self.workflow_name is not None:
            for field in ("queue", "idempotency_key", "headers"):
                if getattr(self, field) is not None:
                    raise self._refused(f"{field} belongs to a schedule of a task")

    def _check_number(self, field: str, least: float) -> None:
        given = getattr(self, field)
        number = isinstance(given, (int, float)) and not isinstance(given, bool)
        if not number or not least <= given <= _MAX_S:
            raise self._refused(f"{field} is a number of seconds up to {_MAX_S}, not {given!r:.40}")

    def _check_time(self, field: str) -> None:
        given = getattr(self, field)
        if given is None:
            return
        if not isinstance(given, datetime) or given.tzinfo is None:
            raise self._refused(f"{field} is a datetime with a time zone, not {given!r:.60}")
        if not _FIRST <= given <= _LAST:
            raise self._refused(f"{field} is from 2000-01-01 to 9999-12-31, not {given}")

    def _refused(self, reason: str) -> errors.InvalidConfig:
        return errors.InvalidConfig(f"schedule {self.name!r}: {reason}")

    def parsed(self) -> expression.Expression:
        """Return the expression; an interval counts from `start_at`."""
        return parsed(self.expression, self.tz, self.start_at)


COLUMNS: tuple[str, ...] = tuple(
    field.name for field in fields(Schedule) if field.name != "on_failure"
)
"""The fields that are columns: of `on_failure` the table has whether there is one."""


def parsed(text: str, tz: str, start_at: datetime | None) -> expression.Expression:
    """Return the expression of a schedule; an interval counts from `start_at`."""
    anchor = None if start_at is None else entry.as_utc(start_at)
    return expression.parse(text, tz, anchor)


def first_after(row: Mapping[str, Any], after: datetime) -> datetime | None:
    """Return the first instant of a schedule's row after `after`; None if none is left."""
    start_at, end_at = row["start_at"], row["end_at"]
    if start_at is not None:
        after = max(after, start_at - timedelta(microseconds=1))
    found = parsed(row["expression"], row["tz"], start_at).next_after(after)
    return None if found is None or (end_at is not None and found > end_at) else found


def due(row: Mapping[str, Any], now: datetime) -> list[datetime]:
    """Return the instants of a row from `next_at` to `now` that its catch-up policy fires."""
    found = parsed(row["expression"], row["tz"], row["start_at"])
    until = entry.as_utc(now if row["end_at"] is None else min(now, row["end_at"]))
    after = entry.as_utc(row["next_at"]) - timedelta(microseconds=1)
    late_s = {"none": GRACE_S, "all": row["catch_up_within_s"]}.get(row["catch_up"])
    if late_s is not None:
        # A jitter delays an instant, so it is not late before that delay is over.
        after = max(after, entry.as_utc(now) - timedelta(seconds=late_s + row["jitter_s"]))
    count = row["catch_up_max"] if row["catch_up"] == "all" else 1
    return expression.latest(found, until, after=after, count=count)


def last_until(row: Mapping[str, Any], now: datetime) -> datetime | None:
    """Return the last instant of a row from `next_at` to `now`; None if there is none."""
    found = parsed(row["expression"], row["tz"], row["start_at"])
    until = entry.as_utc(now if row["end_at"] is None else min(now, row["end_at"]))
    after = entry.as_utc(row["next_at"]) - timedelta(microseconds=1)
    return next(iter(expression.latest(found, until, after=after)), None)


def period(row: Mapping[str, Any], now: datetime) -> timedelta | None:
    """Return the time between the instants before and after `now`; None without both."""
    found = parsed(row["expression"], row["tz"], row["start_at"])
    coming = first_after(row, now)
    past = expression.latest(found, now, after=entry.as_utc(now) - timedelta(days=_LONGEST_DAYS))
    return None if coming is None or not past else coming - past[-1]
