"""Define the schedule entries of 0.3.0, and convert them to schedules.

An entry is a task at one minute of every hour, or of chosen hours, in UTC.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from queue_workflows import errors
from queue_workflows.schedule import definition, expression

_HOUR = timedelta(hours=1)
CATCH_UP_S = 3600.0
"""Seconds after which an instant does not fire any more: one period of an hourly entry."""


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
        definition.check_name(self.name)
        for field in ("task_name", "queue"):
            definition.check_text(self.name, field, getattr(self, field))
        if not _is_int(self.minute, 59):
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
        after, hours = expression.as_utc(now), range(24) if self.hours is None else self.hours
        at = after.replace(minute=self.minute, second=0, microsecond=0)
        while at <= after or at.hour not in hours:
            at += _HOUR
        return at

    def previous_fire_at(self, now: datetime) -> datetime:
        """Return the last instant at or before `now`, aware, in UTC; a naive `now` is UTC."""
        until, hours = expression.as_utc(now), range(24) if self.hours is None else self.hours
        at = until.replace(minute=self.minute, second=0, microsecond=0)
        while at > until or at.hour not in hours:
            at -= _HOUR
        return at


def _is_int(value: Any, highest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= highest


def _checked_hours(name: str, hours: Any) -> frozenset[int]:
    if isinstance(hours, str) or not isinstance(hours, Iterable):
        chosen: list[Any] = []
    else:
        chosen = list(hours)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if not chosen or not all(_is_int(hour, 23) for hour in chosen):
        raise errors.InvalidConfig(
            f"schedule entry {name!r}: hours must be whole numbers 0-23, at least one, or None for "
            f"every hour, not {hours!r}"
        )
    return frozenset(chosen)


def check(entries: Iterable[object]) -> list[ScheduleEntry]:
    """Return the entries as a list.

    Raises `InvalidConfig` for a value that is no `ScheduleEntry`, and for two different jobs under
    one name at one instant, since only one could ever be claimed.
    """
    return split(entries, allow_rows=False)[0]


def split(
    entries: Iterable[object], *, allow_rows: bool = True
) -> tuple[list[ScheduleEntry], list[definition.Schedule]]:
    """Return the old-style entries and the schedules that become rows.

    Raises as `check` does, and for two schedules of one name.
    """
    checked: list[ScheduleEntry] = []
    rows: dict[str, definition.Schedule] = {}
    for candidate in entries:
        if isinstance(candidate, definition.Schedule) and allow_rows:
            if rows.setdefault(candidate.name, candidate) != candidate:
                raise errors.InvalidConfig(f"two schedules are named {candidate.name!r}")
            continue
        if not isinstance(candidate, ScheduleEntry):
            wanted = "ScheduleEntry and Schedule" if allow_rows else "ScheduleEntry"
            raise errors.InvalidConfig(
                f"a schedule holds {wanted} objects, not {type(candidate).__name__}"
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

    Entries that differ in their hours alone become one. Of others with one name, each after the
    first gets a number, by minute and task.
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
            name = f"{one.name[: definition.MAX_NAME - 6]}#{number}"
        found[name] = one
    return found


def converted(entries: Iterable[ScheduleEntry]) -> list[definition.Schedule]:
    """Return old-style entries as the schedules of which they are rows.

    They keep what they do: of what an outage missed, the latest instant fires if it is less than an
    hour old, and no job waits for another.
    """
    found: list[definition.Schedule] = []
    for name, one in named(entries).items():
        kind = type(one)
        own_instants = kind.next_fire_at is not ScheduleEntry.next_fire_at
        if own_instants and kind.expression is ScheduleEntry.expression:
            raise errors.InvalidConfig(
                f"schedule entry {one.name!r}: {kind.__name__} overrides next_fire_at, which "
                "schedulers do not call; override the property `expression`, or use "
                "schedules.Schedule"
            )
        found.append(definition.Schedule(
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
