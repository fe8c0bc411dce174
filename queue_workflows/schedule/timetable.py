"""Define `Schedule` and the entries of 0.3.0, check them, and compute the instants of their rows.

An entry is a task at one minute of every hour, or of chosen hours, in UTC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass, fields, replace
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

    `every="10s"` stands for the expression "every 10s". `catch_up`: which of the instants that an
    outage missed fire afterwards. `overlap`: what happens at an instant while the last job or run
    has not ended. `on_failure(alert)`: see docs/alerts.md; only schedules in code may have it.
    Raises `InvalidConfig` (a ValueError) with the schedule, the field and its allowed values.
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
            raise self._refused("give either expression or every, not both")
        if every is not None and not isinstance(every, str):
            raise self._refused(f"every is a text such as '10s' or '1h30m', not {every!r:.60}")
        if every is not None:
            object.__setattr__(self, "expression", f"every {every}")
        if (self.task_name is None) == (self.workflow_name is None):
            raise self._refused("give either task_name or workflow_name")
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
    """Raise `InvalidConfig` if a field of the schedule `name` is not a text, empty or too long."""
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


# --- the entries of 0.3.0


CATCH_UP_S = 3600.0
"""Seconds after which an entry's instant does not fire any more: one period of an hourly entry."""


@dataclass(frozen=True)
class ScheduleEntry:
    """Run `task_name` on the ingest queue `queue` at `minute` of each of `hours`, in UTC.

    `hours` is any iterable of 0-23, kept as a frozenset; None means every hour. Raises
    `InvalidConfig` (a ValueError) that names the entry and the field. A name has at most 200
    characters and must not end in `:boot`, which marks the fires of the boot kick.
    """

    name: str
    minute: int
    task_name: str
    queue: str
    hours: Iterable[int] | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        for field in ("task_name", "queue"):
            check_text(self.name, field, getattr(self, field))
        if not _whole(0, 59)(self.minute):
            raise errors.InvalidConfig(
                f"schedule entry {self.name!r}: minute must be a whole number 0-59, "
                f"not {self.minute!r}"
            )
        if self.hours is not None:
            object.__setattr__(self, "hours", _checked_hours(self.name, self.hours))

    @property
    def expression(self) -> str:
        """Return the cron expression of the same instants, in UTC."""
        hours = "*" if self.hours is None else ",".join(map(str, sorted(self.hours)))
        return f"{self.minute} {hours} * * *"

    def next_fire_at(self, now: datetime) -> datetime:
        """Return the first instant strictly after `now`, aware, in UTC; a naive `now` is UTC."""
        found = parsed(self.expression, "UTC", None).next_after(now)
        assert found is not None
        return found

    def previous_fire_at(self, now: datetime) -> datetime:
        """Return the last instant at or before `now`, aware, in UTC; a naive `now` is UTC."""
        each = parsed(self.expression, "UTC", None)
        after = expression.as_utc(now) - timedelta(days=_LONGEST_DAYS)
        (found,) = expression.latest(each, now, after=after)
        return found


def _checked_hours(name: str, hours: Any) -> frozenset[int]:
    if isinstance(hours, str) or not isinstance(hours, Iterable):
        chosen: list[Any] = []
    else:
        chosen = list(hours)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if not chosen or not all(map(_whole(0, 23), chosen)):
        raise errors.InvalidConfig(
            f"schedule entry {name!r}: hours must be whole numbers 0-23, at least one, or None for "
            f"every hour, not {hours!r}"
        )
    return frozenset(chosen)


def check(entries: Iterable[object]) -> list[ScheduleEntry]:
    """Return the entries as a list; raise as `split` does, and if one is a `Schedule`."""
    checked, rows = split(entries)
    if rows:
        raise errors.InvalidConfig("a schedule holds ScheduleEntry objects, not Schedule")
    return checked


def split(entries: Iterable[object]) -> tuple[list[ScheduleEntry], list[Schedule]]:
    """Return the old-style entries, and the schedules.

    Raises `InvalidConfig` for any other value, for two schedules of one name, and for two different
    jobs under one name at one instant, since only one could ever be claimed.
    """
    checked: list[ScheduleEntry] = []
    rows: dict[str, Schedule] = {}
    for candidate in entries:
        if isinstance(candidate, Schedule):
            if rows.setdefault(candidate.name, candidate) != candidate:
                raise errors.InvalidConfig(f"two schedules are named {candidate.name!r}")
            continue
        if not isinstance(candidate, ScheduleEntry):
            raise errors.InvalidConfig(
                "a schedule holds ScheduleEntry and Schedule objects, not "
                f"{type(candidate).__name__}"
            )
        for other in checked:
            if _collide(candidate, other):
                raise errors.InvalidConfig(
                    f"two schedule entries named {candidate.name!r} fire at the same instants but "
                    "run different jobs: give them different names"
                )
        checked.append(candidate)
    if both := sorted({one.name for one in checked} & rows.keys()):
        raise errors.InvalidConfig(f"an entry and a schedule are named {both[0]!r}")
    return checked, [*rows.values()]


def named(entries: Iterable[ScheduleEntry]) -> dict[str, ScheduleEntry]:
    """Return old-style entries by the names of their rows.

    Entries that differ only in their hours become one. If others share a name, each after the first
    gets a number, by minute and task.
    """
    merged: dict[tuple[object, ...], ScheduleEntry] = {}
    for one in entries:
        key = (type(one), one.name, one.minute, one.task_name, one.queue)
        other = merged.setdefault(key, one)
        if other.hours is not None and other is not one:
            hours = None if one.hours is None else {*one.hours, *other.hours}
            merged[key] = replace(one, hours=hours)
    found: dict[str, ScheduleEntry] = {}
    for one in sorted(merged.values(), key=lambda one: (one.name, one.minute, one.task_name)):
        name, number = one.name, 1
        while name in found:
            number += 1
            name = f"{one.name[: MAX_NAME - 6]}#{number}"
        found[name] = one
    return found


def converted(entries: Iterable[ScheduleEntry]) -> list[Schedule]:
    """Return old-style entries as schedules, each with the name of its row.

    They behave as before: after an outage only the latest missed instant fires, if it is less than
    an hour old, and no job waits for another.
    """
    found: list[Schedule] = []
    for name, one in named(entries).items():
        kind = type(one)
        own_instants = kind.next_fire_at is not ScheduleEntry.next_fire_at
        if own_instants and kind.expression is ScheduleEntry.expression:
            raise errors.InvalidConfig(
                f"schedule entry {one.name!r}: {kind.__name__} overrides next_fire_at, which "
                "schedulers do not call; override the property `expression`, or use "
                "schedules.Schedule"
            )
        found.append(Schedule(
            name, one.expression, task_name=one.task_name, queue=one.queue, overlap="allow",
            catch_up="all", catch_up_max=1, catch_up_within_s=CATCH_UP_S,
        ))  # fmt: skip
    return found


def _collide(one: ScheduleEntry, other: ScheduleEntry) -> bool:
    """Return whether two entries queue different jobs under one name at one instant."""
    same_instants = (one.name, one.minute) == (other.name, other.minute)
    same_jobs = (one.task_name, one.queue) == (other.task_name, other.queue)
    if same_jobs or not same_instants:
        return False
    return one.hours is None or other.hours is None or bool({*one.hours} & {*other.hours})
