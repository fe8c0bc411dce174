"""Parse cron expressions and intervals, and compute their instants in a time zone."""

from __future__ import annotations

import collections
import functools
import re
import zoneinfo
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone, tzinfo
from typing import NamedTuple

from queue_workflows import errors

UTC = timezone.utc
ALIASES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
MAX_TEXT = 200
MAX_INTERVAL_S = 366 * 86_400
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_EVERY = re.compile(r"every\s+((?:\d{1,9}[smhdw]\s*)+)", re.IGNORECASE | re.ASCII)
_SIMPLE = re.compile(r"([0-5]?\d) (\*|\d\d?(?:,\d\d?)*) \* \* \*", re.ASCII)
"""The form of converted old-style entries, which is computed here, so that it needs no library."""
_FIELDS = (
    "five fields (minute 0-59, hour 0-23, day of month 1-31, month 1-12 or JAN-DEC, day of week "
    "0-7 or SUN-SAT), six with seconds 0-59 in front, an alias such as @daily, or an interval such "
    "as 'every 10s'"
)
_SECOND = timedelta(seconds=1)
_DAY = timedelta(days=1)
_NO_ZONES = ("localtime", "posixrules", "Factory")
"""Files in the folder of zones that are not a zone, or a different one on each machine."""
_NO_FOLDERS = ("posix/", "right/")
"""Copies of the zones. The ones in `right` count leap seconds, which clocks here do not."""
_WIDEN = 8
_LONGEST_FOLD = timedelta(days=1)
_FIRST = datetime.min.replace(tzinfo=UTC) + timedelta(days=1)
_LAST = datetime.max.replace(tzinfo=UTC) - timedelta(days=1)
"""Within these instants every local time is a datetime."""


class Occurrence(NamedTuple):
    """An instant that fires, or a local time that a clock change skips; `note` explains it."""

    at: datetime
    note: str | None = None
    fires: bool = True


class Change(NamedTuple):
    """One change of a zone's offset: the first instant of the new offset, in UTC."""

    at: datetime
    before: timedelta
    after: timedelta


class Expression:
    """The instants of a schedule, each a whole second, aware and in UTC."""

    def next_after(self, after: datetime) -> datetime | None:
        """Return the first instant after `after`; None if there is none in 50 years."""
        raise NotImplementedError

    def occurrences(self, after: datetime, until: datetime) -> Iterator[Occurrence]:
        """Yield the instants with after < instant <= until, and what a clock change swallows."""
        at = self.next_after(after)
        while at is not None and at <= until:
            yield Occurrence(at)
            at = self.next_after(at)


class Interval(Expression):
    """Every so many seconds, counted from `anchor`, or from 1970 in UTC."""

    def __init__(self, period_s: int, anchor: datetime | None) -> None:
        self._period = timedelta(seconds=period_s)
        self._anchor = anchor or datetime(1970, 1, 1, tzinfo=UTC)

    def next_after(self, after: datetime) -> datetime | None:
        """Return the first instant after `after`, never one before the anchor."""
        passed = (as_utc(after) - self._anchor) // self._period
        try:
            return self._anchor + max(0, passed + 1) * self._period
        except OverflowError:
            return None


class Cron(Expression):
    """A cron expression in a time zone.

    With a named hour, each local time fires once: one that the clock skips at the end of the gap,
    one that comes twice the first time. With an hour that begins with `*` the expression fires
    whenever the clock shows a matching time: never if it is skipped, twice if it comes twice.
    """

    def __init__(self, text: str, zone: tzinfo) -> None:
        fields = ALIASES.get(text.lower(), text).split()
        self._walls = _walls(" ".join(fields), text)
        self._zone = zone
        self._once = not fields[-4].startswith("*")

    def next_after(self, after: datetime) -> datetime | None:
        """Return the first instant after `after`; None if there is none in 50 years."""
        start = max(as_utc(after), _FIRST)
        change = last_change(self._zone, start)
        try:
            wall = start.replace(tzinfo=None) + _offset(self._zone, start)
            if change is not None:
                wall = max(wall, self._first_wall(change) - _SECOND)
            while (found := self._walls(wall)) is not None:  # in each stretch of one offset
                offset = change.after if change else _offset(self._zone, start)
                fire_at = max(start, found.replace(tzinfo=UTC) - offset)
                change = next_change(self._zone, start, fire_at)
                if change is None:
                    return fire_at
                start, wall = change.at, self._first_wall(change) - _SECOND
        except OverflowError:
            pass
        return None

    def _first_wall(self, change: Change) -> datetime:
        """Return the local time at which the search of the stretch after a change begins."""
        offset = change.before if self._once else change.after
        return change.at.replace(tzinfo=None) + offset

    def occurrences(self, after: datetime, until: datetime) -> Iterator[Occurrence]:
        """Yield the instants with after < instant <= until, and what a clock change swallows."""
        at = as_utc(after)
        while True:
            fire_at = self.next_after(at)
            end = until if fire_at is None else min(fire_at, until)
            change = None if self._once else next_change(self._zone, at, end)
            while change is not None:
                for wall in self._skipped(change):
                    yield Occurrence(change.at, f"{wall:%H:%M:%S} does not exist", fires=False)
                change = next_change(self._zone, change.at, end)
            if fire_at is None or fire_at > until:
                return
            yield Occurrence(fire_at, self._note(fire_at))
            at = fire_at

    def _skipped(self, change: Change) -> Iterator[datetime]:
        start = change.at.replace(tzinfo=None)
        wall = self._walls(start + change.before - _SECOND)
        while wall is not None and wall < start + change.after:
            yield wall
            wall = self._walls(wall)

    def _note(self, at: datetime) -> str | None:
        change = last_change(self._zone, at)
        if change is not None:
            skipped = next(self._skipped(change), None) if self._once and at == change.at else None
            if skipped is not None:
                return f"{skipped:%H:%M:%S} does not exist: fires at the end of the gap"
            if at < change.at + (change.before - change.after):
                return "second of two"
        coming = next_change(self._zone, at, min(at, _LAST) + _LONGEST_FOLD)
        if coming is not None and at >= coming.at - (coming.before - coming.after):
            return "first of two" + (": the second does not fire" if self._once else "")
        return None


_Walls = Callable[[datetime], "datetime | None"]
"""Takes a local time and returns the next one of an expression; ignores changes of the clock."""


def _hourly(minute: int, hours: frozenset[int]) -> _Walls:
    def after(wall: datetime) -> datetime:
        found = wall.replace(minute=minute, second=0, microsecond=0)
        while found <= wall or found.hour not in hours:
            found += timedelta(hours=1)
        return found

    return after


def _walls(fields: str, text: str) -> _Walls:
    simple = _SIMPLE.fullmatch(fields)
    if simple:
        hours = range(24) if simple[2] == "*" else map(int, simple[2].split(","))
        chosen = frozenset(hours)
        if max(chosen) < 24:
            return _hourly(int(simple[1]), chosen)
    try:
        import cronsim
    except ImportError:
        raise errors.MissingExtra(
            f"cron expression {text!r:.80} needs cronsim: pip install 'SOURCE[cron]' "
            "(SOURCE is the checkout or wheel of queue_workflows)"
        ) from None
    try:
        cronsim.CronSim(fields, datetime(2024, 1, 1))
    except cronsim.CronSimError as error:
        raise errors.InvalidConfig(
            f"expression {text!r:.80}: {error}; it takes {_FIELDS}"
        ) from None
    # It is given naive times: the clock's changes are handled above.
    return lambda wall: next(cronsim.CronSim(fields, wall), None)


@functools.lru_cache(maxsize=20_000)
def parse(text: str, tz: str = "UTC", anchor: datetime | None = None) -> Expression:
    """Return the expression; `anchor` (aware) is the start from which an interval counts.

    Raises `InvalidConfig` (a ValueError) with the field and what it takes, and `MissingExtra` for a
    cron expression where the extra `cron` is not installed.
    """
    zone = load_zone(tz)
    if not isinstance(text, str) or not text.strip() or len(text) > MAX_TEXT:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise errors.InvalidConfig(f"expression {text!r:.80}: it takes {_FIELDS}")
    cleaned = " ".join(text.split())
    if cleaned.lower().startswith("every"):
        return Interval(_period_s(cleaned), anchor)
    if cleaned.startswith("@") and cleaned.lower() not in ALIASES:
        raise errors.InvalidConfig(f"expression {text!r:.80}: aliases are {', '.join(ALIASES)}")
    return Cron(cleaned, zone)


def _period_s(text: str) -> int:
    found = _EVERY.fullmatch(text)
    parts = re.findall(r"(\d+)([smhdw])", found[1].lower()) if found else []
    seconds = sum(int(count) * _UNITS_S[unit] for count, unit in parts)
    if not 1 <= seconds <= MAX_INTERVAL_S:
        raise errors.InvalidConfig(
            f"interval {text!r:.80}: 'every' and numbers with a unit (s, m, h, d, w), together 1s "
            "to 366d, such as 'every 10s' or 'every 1h30m'"
        )
    return seconds


def latest(
    expression: Expression, until: datetime, *, after: datetime, count: int = 1
) -> list[datetime]:
    """Return the last `count` instants in after < instant <= until, the oldest first.

    It searches forward in ever longer stretches before `until`, so that an expression of every
    second costs as little after a year as one of every month.
    """
    width, end = timedelta(minutes=1), as_utc(until)
    start = as_utc(after)
    while True:
        begin = end - min(width, end - start)
        found: collections.deque[datetime] = collections.deque(maxlen=count)
        at = expression.next_after(begin)
        while at is not None and at <= end:
            found.append(at)
            at = expression.next_after(at)
        if len(found) == count or begin <= start:
            return list(found)
        width *= _WIDEN


# --- time zones -------------------------------------------------------------------------------


def load_zone(name: str) -> tzinfo:
    """Return the zone, for which `UTC` needs no time zone data.

    Raises `InvalidConfig` (a ValueError) for a name that is not an IANA zone.
    """
    if name == "UTC":
        return UTC
    try:
        if name not in _NO_ZONES and not name.startswith(_NO_FOLDERS):
            return zoneinfo.ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        pass
    raise errors.InvalidConfig(
        f"tz {name!r:.80} is no IANA time zone such as Europe/Warsaw, or this machine has no "
        "time zone data: pip install 'SOURCE[cron]' brings it "
        "(SOURCE is the checkout or wheel of queue_workflows)"
    )


def _offset(zone: tzinfo, at: datetime) -> timedelta:
    """Return the zone's offset from UTC at an instant."""
    return at.astimezone(zone).utcoffset() or timedelta(0)


def last_change(zone: tzinfo, at: datetime) -> Change | None:
    """Return the latest change at or before an instant; None if its year and the last had none."""
    years = (at.year, at.year - 1)
    return next((c for year in years for c in reversed(_changes(zone, year)) if c.at <= at), None)


def next_change(zone: tzinfo, after: datetime, until: datetime) -> Change | None:
    """Return the first change with after < change <= until, or None."""
    found = (c for year in range(after.year, until.year + 1) for c in _changes(zone, year))
    return next((c for c in found if after < c.at <= until), None)


@functools.lru_cache(maxsize=2048)
def _changes(zone: tzinfo, year: int) -> tuple[Change, ...]:
    """Return the changes of a year of UTC. Two changes within one day would cancel out."""
    if zone is UTC or not 2 <= year <= 9998:
        return ()
    found: list[Change] = []
    day, end = datetime(year, 1, 1, tzinfo=UTC), datetime(year + 1, 1, 1, tzinfo=UTC)
    while day < end:
        before, after = _offset(zone, day), _offset(zone, day + _DAY)
        low, high = day, day + _DAY
        while before != after and high - low > _SECOND:
            middle = low + timedelta(seconds=(high - low) // _SECOND // 2)
            low, high = (low, middle) if _offset(zone, middle) == after else (middle, high)
        if before != after:
            found.append(Change(high, before, after))
        day += _DAY
    return tuple(found)


def as_utc(moment: datetime) -> datetime:
    """Return the same instant in UTC; a naive one is in UTC already."""
    if moment.tzinfo is None:
        return moment.replace(tzinfo=timezone.utc)
    return moment.astimezone(timezone.utc)
