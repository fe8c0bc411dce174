"""Define `Schedule`, check its fields, and compute the instants at which its row fires."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, fields
from datetime import datetime, timedelta, timezone
from typing import Any, Literal, cast, get_args

from queue_workflows import errors
from queue_workflows.dag import payload
from queue_workflows.schedule import expression
from queue_workflows.types import FailureHook

CatchUp = Literal["none", "last", "all"]
Overlap = Literal["allow", "skip", "replace", "queue"]
_MAX_S = 31_622_400
_FIRST = datetime(2000, 1, 1, tzinfo=timezone.utc)
_LAST = datetime(9999, 12, 31, tzinfo=timezone.utc)
BOOT_SUFFIX = ":boot"
MAX_NAME = 200
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
        check_name(self.name)
        if every is not None and self.expression != "":
            raise self._refused("expression or every: give one of them")
        if every is not None and not isinstance(every, str):
            raise self._refused(f"every is a text such as '10s' or '1h30m', not {every!r:.60}")
        if every is not None:
            object.__setattr__(self, "expression", f"every {every}")
        if (self.task_name is None) == (self.workflow_name is None):
            raise self._refused("task_name or workflow_name: give one of them")
        self._check_fields()
        self._check_target()
        if self.start_at and self.end_at and self.end_at < self.start_at:
            raise self._refused("end_at is before start_at")
        try:
            self.parsed()
        except errors.InvalidConfig as error:
            raise self._refused(str(error)) from None

    def _check_fields(self) -> None:
        for field in ("task_name", "workflow_name", "queue", "idempotency_key"):
            if (given := getattr(self, field)) is not None:
                check_text(self.name, field, given)
        if self.queue is not None and len(self.queue.encode()) > _MAX_QUEUE:
            raise self._refused(f"queue has over {_MAX_QUEUE} bytes: {self.queue!r:.40}")
        for field, (takes, meant) in _FIELDS.items():
            given = getattr(self, field)
            if not takes(given) and (given is not None or getattr(Schedule, field) is not None):
                raise self._refused(f"{field} is {meant}, not {given!r:.60}")
        for field, given in (("start_at", self.start_at), ("end_at", self.end_at)):
            if given is not None and not _FIRST <= given <= _LAST:
                raise self._refused(f"{field} is from 2000-01-01 to 9999-12-31, not {given}")

    def _check_target(self) -> None:
        """Raise for a field that the target, a task or a workflow, does not take."""
        for field, owner in (("args", "task_name"), ("inputs", "workflow_name")):
            if getattr(self, field) and getattr(self, owner) is None:
                raise self._refused(f"{field} belongs to a schedule with {owner}")
        if self.workflow_name is not None:
            for field in ("queue", "idempotency_key", "headers"):
                if getattr(self, field) is not None:
                    raise self._refused(f"{field} belongs to a schedule of a task")

    def _refused(self, reason: str) -> errors.InvalidConfig:
        return errors.InvalidConfig(f"schedule {self.name!r}: {reason}")

    def parsed(self) -> expression.Expression:
        """Return the expression; an interval counts from `start_at`."""
        return parsed(self.expression, self.tz, self.start_at)


def _whole(low: int, high: int) -> Callable[[Any], bool]:
    return lambda given: type(given) is int and low <= given <= high


def _seconds(least: float) -> Callable[[Any], bool]:
    return lambda given: (
        isinstance(given, (int, float)) and not isinstance(given, bool) and least <= given <= _MAX_S
    )


def _is_a(kind: type) -> Callable[[Any], bool]:
    return lambda given: isinstance(given, kind)


def _has_texts(given: Any) -> bool:
    return isinstance(given, Mapping) and all(
        isinstance(each, str) for each in cast("Mapping[Any, Any]", given).values()
    )


def _is_aware(given: Any) -> bool:
    return isinstance(given, datetime) and given.tzinfo is not None


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "expression": (_is_a(str), "a text such as '0 3 * * *'"),
    "tz": (_is_a(str), "a text such as 'Europe/Warsaw'"),
    "args": (_is_a(Mapping), "a mapping"),
    "inputs": (_is_a(Mapping), "a mapping"),
    "headers": (_has_texts, "a mapping of texts"),
    "priority": (_whole(-32768, 32767), "a whole number -32768 to 32767"),
    "on_failure": (callable, "a function"),
    "catch_up": (get_args(CatchUp).__contains__, f"one of {', '.join(get_args(CatchUp))}"),
    "overlap": (get_args(Overlap).__contains__, f"one of {', '.join(get_args(Overlap))}"),
    "catch_up_within_s": (_seconds(1e-3), f"a number of seconds up to {_MAX_S}"),
    "jitter_s": (_seconds(0), f"a number of seconds up to {_MAX_S}"),
    "catch_up_max": (_whole(1, MAX_CAUGHT_UP), f"a whole number 1-{MAX_CAUGHT_UP}"),
    "start_at": (_is_aware, "a datetime with a time zone"),
    "end_at": (_is_aware, "a datetime with a time zone"),
}
"""What a field takes. One whose default is None takes that, too."""


def check_name(name: Any) -> None:
    """Raise `InvalidConfig` for a name that no schedule may have."""
    check_text(name, "name", name)
    if name.endswith(BOOT_SUFFIX):
        raise errors.InvalidConfig(
            f"schedule entry {name!r}: a name must not end in {BOOT_SUFFIX!r}"
        )


def check_text(name: Any, field: str, value: Any) -> None:
    """Raise `InvalidConfig` for a field of the schedule `name` that is no text, empty or long."""
    if not is_name(value):
        raise errors.InvalidConfig(
            f"schedule entry {name!r}: {field} must be a text of 1 to {MAX_NAME} characters, "
            f"not {value!r}"
        )


def is_name(value: Any) -> bool:
    """Return whether a value is a text that PostgreSQL stores, of 1 to `MAX_NAME` characters."""
    is_text = isinstance(value, str) and payload.is_storable(value)
    return is_text and len(value) <= MAX_NAME and bool(value.strip())


COLUMNS: tuple[str, ...] = tuple(
    field.name for field in fields(Schedule) if field.name != "on_failure"
)
"""The fields that are columns: of `on_failure` the table has whether there is one."""


def parsed(text: str, tz: str, start_at: datetime | None) -> expression.Expression:
    """Return the expression of a schedule; an interval counts from `start_at`."""
    anchor = None if start_at is None else expression.as_utc(start_at)
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
    late_s = {"none": GRACE_S, "all": row["catch_up_within_s"]}.get(row["catch_up"])
    return _passed(row, now, late_s, row["catch_up_max"] if row["catch_up"] == "all" else 1)


def last_until(row: Mapping[str, Any], now: datetime) -> datetime | None:
    """Return the last instant of a row from `next_at` to `now`; None if there is none."""
    return next(iter(_passed(row, now)), None)


def _passed(
    row: Mapping[str, Any], now: datetime, late_s: float | None = None, count: int = 1
) -> list[datetime]:
    found = parsed(row["expression"], row["tz"], row["start_at"])
    until = expression.as_utc(now if row["end_at"] is None else min(now, row["end_at"]))
    after = expression.as_utc(row["next_at"]) - timedelta(microseconds=1)
    if late_s is not None:
        # A jitter delays an instant, so it is not late before that delay is over.
        after = max(after, expression.as_utc(now) - timedelta(seconds=late_s + row["jitter_s"]))
    return expression.latest(found, until, after=after, count=count)


def period(row: Mapping[str, Any], now: datetime) -> timedelta | None:
    """Return the time between the instants before and after `now`; None without both."""
    found = parsed(row["expression"], row["tz"], row["start_at"])
    coming = first_after(row, now)
    past = expression.latest(
        found, now, after=expression.as_utc(now) - timedelta(days=_LONGEST_DAYS)
    )
    return None if coming is None or not past else coming - past[-1]
