"""Describe one schedule entry: a task at one minute of every hour, or of chosen hours, UTC."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from queue_workflows import errors

BOOT_SUFFIX = ":boot"
MAX_NAME = 200
_HOUR = timedelta(hours=1)


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
        fire_at = self._in_hour(as_utc(now))
        if fire_at <= as_utc(now):
            fire_at += _HOUR
        while not self._fires_in(fire_at.hour):
            fire_at += _HOUR
        return fire_at

    def previous_fire_at(self, now: datetime) -> datetime:
        """Return the last instant at or before `now`, aware, in UTC; a naive `now` is UTC."""
        fire_at = self._in_hour(as_utc(now))
        if fire_at > as_utc(now):
            fire_at -= _HOUR
        while not self._fires_in(fire_at.hour):
            fire_at -= _HOUR
        return fire_at

    def _in_hour(self, now: datetime) -> datetime:
        return now.replace(minute=self.minute, second=0, microsecond=0)

    def _fires_in(self, hour: int) -> bool:
        return self.hours is None or hour in self.hours


def as_utc(moment: datetime) -> datetime:
    """Return the same instant in UTC; a naive one is in UTC already."""
    if moment.tzinfo is None:
        return moment.replace(tzinfo=timezone.utc)
    return moment.astimezone(timezone.utc)


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
    if not isinstance(value, str) or not value.strip() or "\0" in value or len(value) > MAX_NAME:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


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
