"""Compute the instants of old-style entries one after the other, as what tests expect."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from queue_workflows.schedule import timetable


def between(
    entries: Iterable[timetable.ScheduleEntry], after: datetime, until: datetime
) -> list[tuple[timetable.ScheduleEntry, datetime]]:
    """Return each entry with its instants after `after` and up to `until`, by instant and name."""
    due: list[tuple[timetable.ScheduleEntry, datetime]] = []
    for entry in entries:
        fire_at = entry.next_fire_at(after)
        while fire_at <= until:
            due.append((entry, fire_at))
            fire_at = entry.next_fire_at(fire_at)
    return sorted(due, key=lambda fire: (fire[1], fire[0].name))
