"""Old-style schedule entries: their instants in UTC, their order and their checks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from datetime import datetime, timedelta, timezone, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queue_workflows import errors
from queue_workflows.schedule import timetable
from queue_workflows.schedule.timetable import ScheduleEntry
from tests.support import entry_instants, tabled
from tests.support.examples import examples

UTC = timezone.utc
HOUR = timedelta(hours=1)
ZONES = ("Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu", "UTC")
DST_DATES = (
    datetime(2024, 3, 31, 1, tzinfo=UTC),  # Berlin: 02:00 becomes 03:00
    datetime(2024, 10, 27, 1, tzinfo=UTC),  # Berlin: 03:00 becomes 02:00
    datetime(2024, 3, 10, 7, tzinfo=UTC),  # New York, forward
    datetime(2024, 11, 3, 6, tzinfo=UTC),  # New York, back
    datetime(2024, 10, 5, 15, 30, tzinfo=UTC),  # Lord Howe, forward by half an hour
    datetime(2024, 4, 6, 15, tzinfo=UTC),  # Lord Howe, back by half an hour
)


def hourly(minute: int = 5, name: str = "hourly", hours: Iterable[int] | None = None):
    return ScheduleEntry(name, minute, "task", "fetch", hours=hours)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


entries = st.builds(
    ScheduleEntry,
    st.sampled_from(["a", "b", "c"]),
    st.integers(0, 59),
    st.just("task"),
    st.just("fetch"),
    st.none() | st.frozensets(st.integers(0, 23), min_size=1),
)
instants = st.datetimes(datetime(2020, 1, 1), datetime(2030, 1, 1), timezones=st.just(UTC))
around_dst = st.builds(
    lambda date, offset: date + offset,
    st.sampled_from(DST_DATES),
    st.timedeltas(-3 * HOUR, 3 * HOUR),
)
moments = instants | around_dst
zones = st.sampled_from(ZONES).map(ZoneInfo) | st.integers(-14 * 60, 14 * 60).map(
    lambda minutes: timezone(timedelta(minutes=minutes))
)


def brute_next(entry: ScheduleEntry, now: datetime) -> datetime:
    moment = now.astimezone(UTC).replace(second=0, microsecond=0) + timedelta(minutes=1)
    while moment.minute != entry.minute or (
        entry.hours is not None and moment.hour not in entry.hours
    ):
        moment += timedelta(minutes=1)
    return moment


def test_next_is_strictly_after_now_and_previous_may_be_now():
    entry = hourly(5)
    assert entry.next_fire_at(at("2024-05-01T10:05:00")) == at("2024-05-01T11:05:00")
    assert entry.previous_fire_at(at("2024-05-01T10:05:00")) == at("2024-05-01T10:05:00")
    assert entry.next_fire_at(at("2024-05-01T10:04:59.999999")) == at("2024-05-01T10:05:00")
    assert entry.previous_fire_at(at("2024-05-01T10:04:59.999999")) == at("2024-05-01T09:05:00")


def test_hours_restrict_across_midnight_and_year():
    entry = hourly(30, hours={6})
    assert entry.next_fire_at(at("2023-12-31T06:30:00")) == at("2024-01-01T06:30:00")
    assert entry.previous_fire_at(at("2024-01-01T06:29:00")) == at("2023-12-31T06:30:00")


def test_a_naive_now_is_utc():
    assert hourly(5).next_fire_at(datetime(2024, 5, 1, 10)) == at("2024-05-01T10:05:00")
    assert hourly(5).previous_fire_at(datetime(2024, 5, 1, 10)) == at("2024-05-01T09:05:00")


@given(entries, moments)
@settings(max_examples=examples(40))
def test_next_agrees_with_walking_minute_by_minute(entry: ScheduleEntry, now: datetime):
    assert entry.next_fire_at(now) == brute_next(entry, now)


@given(entries, moments)
@settings(max_examples=examples(50))
def test_previous_and_next_enclose_now_with_nothing_between(entry: ScheduleEntry, now: datetime):
    before, after = entry.previous_fire_at(now), entry.next_fire_at(now)
    assert before <= now < after
    assert entry.next_fire_at(before) == after
    assert entry.previous_fire_at(after) == after
    assert before.utcoffset() == after.utcoffset() == timedelta(0)


@given(entries, moments, zones)
@settings(max_examples=examples(50))
def test_the_zone_of_now_changes_nothing(entry: ScheduleEntry, now: datetime, zone: tzinfo):
    local = now.astimezone(zone)
    assert entry.next_fire_at(local) == entry.next_fire_at(now)
    assert entry.previous_fire_at(local) == entry.previous_fire_at(now)


def test_a_dst_change_neither_skips_nor_repeats_an_hour():
    for zone in ZONES:
        for change in DST_DATES:
            with tabled.case(change, zone):
                start = (change - 24 * HOUR).astimezone(ZoneInfo(zone))
                end = (change + 24 * HOUR).astimezone(ZoneInfo(zone))
                fired = [fire_at for _, fire_at in entry_instants.between([hourly(30)], start, end)]
                assert len(fired) == 48
                assert all(later - sooner == HOUR for sooner, later in itertools.pairwise(fired))


def test_a_local_time_that_exists_twice_is_two_instants():
    berlin = ZoneInfo("Europe/Berlin")
    first = datetime(2024, 10, 27, 2, 20, tzinfo=berlin, fold=0)
    second = datetime(2024, 10, 27, 2, 20, tzinfo=berlin, fold=1)
    assert hourly(30).next_fire_at(first) == at("2024-10-27T00:30:00")
    assert hourly(30).next_fire_at(second) == at("2024-10-27T01:30:00")


def test_an_entry_is_a_value_and_takes_any_iterable_of_hours():
    entry = ScheduleEntry("x", minute=30, task_name="t", queue="fetch", hours=[6, 18, 6])
    assert entry == ScheduleEntry("x", 30, "t", "fetch", hours=frozenset({18, 6}))
    assert entry.hours == frozenset({6, 18})
    assert len({entry, ScheduleEntry("x", 30, "t", "fetch", hours=(18, 6))}) == 1
    with pytest.raises(AttributeError):
        entry.minute = 3  # type: ignore[misc]


def test_a_bad_entry_is_refused_by_field():
    cases: list[Any] = [
        ({"minute": 60}, "minute"),
        ({"minute": -1}, "minute"),
        ({"minute": True}, "minute"),
        ({"minute": 5.0}, "minute"),
        ({"minute": "5"}, "minute"),
        ({"hours": []}, "hours"),
        ({"hours": [24]}, "hours"),
        ({"hours": [True]}, "hours"),
        ({"hours": "12"}, "hours"),
        ({"hours": 12}, "hours"),
        ({"name": " "}, "name"),
        ({"name": None}, "name"),
        ({"name": "x" * 201}, "name"),
        ({"name": "a\0b"}, "name"),
        ({"name": "prices:boot"}, "':boot'"),
        ({"task_name": ""}, "task_name"),
        ({"queue": ""}, "queue"),
    ]
    for changes, said in cases:
        with tabled.case(changes, said):
            fields: dict[str, object] = {
                "name": "e",
                "minute": 5,
                "task_name": "t",
                "queue": "fetch",
            }
            with pytest.raises(ValueError, match=said) as caught:
                ScheduleEntry(**(fields | changes))  # type: ignore[arg-type]
            assert isinstance(caught.value, errors.InvalidConfig)


def test_one_name_at_one_instant_is_one_job():
    same = ScheduleEntry("x", 5, "one", "fetch")
    assert timetable.check([same, same]) == [same, same]
    timetable.check([same, ScheduleEntry("x", 35, "two", "fetch")])
    timetable.check(
        [
            ScheduleEntry("x", 5, "one", "fetch", hours={1}),
            ScheduleEntry("x", 5, "two", "fetch", hours={2}),
        ]
    )
    for other in (
        ScheduleEntry("x", 5, "two", "fetch"),
        ScheduleEntry("x", 5, "one", "load", hours={7}),
    ):
        with pytest.raises(errors.InvalidConfig, match="'x'"):
            timetable.check([same, other])


def test_a_schedule_holds_entries_only():
    with pytest.raises(errors.InvalidConfig, match="dict"):
        timetable.check([{"name": "x"}])
