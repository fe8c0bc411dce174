"""Load IANA time zones and find the instants at which their offset from UTC changes."""

from __future__ import annotations

import functools
import zoneinfo
from datetime import datetime, timedelta, timezone, tzinfo
from typing import NamedTuple

from queue_workflows import errors

UTC = timezone.utc
_DAY = timedelta(days=1)
_SECOND = timedelta(seconds=1)
_NO_ZONES = ("localtime", "posixrules", "Factory")
"""Files beside the zones: they mean another thing on each machine, or nothing."""
_NO_FOLDERS = ("posix/", "right/")
"""Copies of the zones; those of `right` count leap seconds, as no clock here does."""


class Change(NamedTuple):
    """One change of a zone's offset: the first instant of the new offset, in UTC."""

    at: datetime
    before: timedelta
    after: timedelta


def load(name: str) -> tzinfo:
    """Return the zone, for which `UTC` needs no time zone data.

    Raises `InvalidConfig` (a ValueError) for a name that is no IANA zone.
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


def offset(zone: tzinfo, at: datetime) -> timedelta:
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
        before, after = offset(zone, day), offset(zone, day + _DAY)
        if before != after:
            found.append(Change(_first_with(zone, after, day, day + _DAY), before, after))
        day += _DAY
    return tuple(found)


def _first_with(zone: tzinfo, wanted: timedelta, low: datetime, high: datetime) -> datetime:
    while high - low > _SECOND:
        middle = low + timedelta(seconds=(high - low) // _SECOND // 2)
        low, high = (low, middle) if offset(zone, middle) == wanted else (middle, high)
    return high
