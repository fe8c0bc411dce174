"""Check old-style schedule entries, give each a unique name, and convert them to schedules."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from datetime import datetime

from queue_workflows import errors
from queue_workflows.schedule import definition
from queue_workflows.schedule import entry as schedule_entry

Entry = schedule_entry.ScheduleEntry
Fire = tuple[Entry, datetime]

CATCH_UP_S = 3600.0
"""Seconds after which an instant does not fire any more: one period of an hourly entry."""


def order(fire: Fire) -> tuple[datetime, str]:
    """Return the fires in one fixed order, so that schedulers that claim them cannot deadlock."""
    return fire[1], fire[0].name


def check(entries: Iterable[object]) -> list[Entry]:
    """Return the entries as a list.

    Raises `InvalidConfig` for a value that is no `ScheduleEntry`, and for two different jobs under
    one name at one instant, since only one could ever be claimed.
    """
    return split(entries, allow_rows=False)[0]


def split(
    entries: Iterable[object], *, allow_rows: bool = True
) -> tuple[list[Entry], list[definition.Schedule]]:
    """Return the old-style entries and the schedules that become rows.

    Raises as `check` does, and for two schedules of one name.
    """
    checked: list[Entry] = []
    rows: dict[str, definition.Schedule] = {}
    for candidate in entries:
        if isinstance(candidate, definition.Schedule) and allow_rows:
            if rows.setdefault(candidate.name, candidate) != candidate:
                raise errors.InvalidConfig(f"two schedules are named {candidate.name!r}")
            continue
        if not isinstance(candidate, Entry):
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


def named(entries: Iterable[Entry]) -> dict[str, Entry]:
    """Return old-style entries by the names of their rows.

    Entries that differ in their hours alone become one. Of others with one name, each after the
    first gets a number, by minute and task.
    """
    merged: dict[tuple[object, ...], Entry] = {}
    for one in entries:
        key = (type(one), one.name, one.minute, one.task_name, one.queue)
        other = merged.get(key)
        merged[key] = one if other is None else dataclasses.replace(one, hours=_union(one, other))
    found: dict[str, Entry] = {}
    for one in sorted(merged.values(), key=lambda one: (one.name, one.minute, one.task_name)):
        name, number = one.name, 1
        while name in found:
            number += 1
            name = f"{one.name[: schedule_entry.MAX_NAME - 6]}#{number}"
        found[name] = one
    return found


def converted(entries: Iterable[Entry]) -> list[definition.Schedule]:
    """Return old-style entries as the schedules of which they are rows.

    They keep what they do: of what an outage missed, the latest instant fires if it is less than an
    hour old, and no job waits for another.
    """
    found: list[definition.Schedule] = []
    for name, one in named(entries).items():
        _check_expression(one)
        found.append(definition.Schedule(
            name, one.expression, task_name=one.task_name, queue=one.queue, overlap="allow",
            catch_up="all", catch_up_max=1, catch_up_within_s=CATCH_UP_S,
        ))  # fmt: skip
    return found


def _union(one: Entry, other: Entry) -> set[int] | None:
    return None if one.hours is None or other.hours is None else {*one.hours, *other.hours}


def _check_expression(one: Entry) -> None:
    kind = type(one)
    if kind.next_fire_at is not Entry.next_fire_at and kind.expression is Entry.expression:
        raise errors.InvalidConfig(
            f"schedule entry {one.name!r}: {kind.__name__} overrides next_fire_at, which "
            "schedulers do not call; override the property `expression`, or use schedules.Schedule"
        )


def _collide(one: Entry, other: Entry) -> bool:
    if (one.name, one.minute) != (other.name, other.minute):
        return False
    if (one.task_name, one.queue) == (other.task_name, other.queue):
        return False
    if one.hours is None or other.hours is None:
        return True
    return bool(set(one.hours) & set(other.hours))
