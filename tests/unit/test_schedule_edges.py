"""Schedules of the code: what each field takes, and the instants of their rows at the edges."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from queue_workflows import errors
from queue_workflows.schedule import expression, timetable

UTC = timezone.utc
DAY = timedelta(days=1)
TICK = timedelta(microseconds=1)


def schedule(**more: Any) -> timetable.Schedule:
    return timetable.Schedule(
        **{"name": "s", "expression": "0 3 * * *", "task_name": "t", "queue": "fetch", **more}
    )


def at(day: int, hour: int = 3, minute: int = 0, second: int = 0) -> datetime:
    return datetime(2024, 5, day, hour, minute, second, tzinfo=UTC)


def row(**more: Any) -> dict[str, Any]:
    return {
        "expression": "0 3 * * *", "tz": "UTC", "start_at": None, "end_at": None,
        "next_at": at(1), "catch_up": "last", "catch_up_max": 100,
        "catch_up_within_s": 86_400.0, "jitter_s": 0.0, **more,
    }  # fmt: skip


# --- fields


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"task_name": None, "queue": None}, "give either task_name or workflow_name"),
        ({"workflow_name": "w"}, "give either task_name or workflow_name"),
        ({"every": "10s"}, "give either expression or every, not both"),
        ({"expression": "", "every": 10}, "every is a text such as"),
        ({"expression": None}, "expression is a text such as '0 3"),
        ({"tz": None}, "tz is a text such as 'Europe"),
        ({"task_name": ""}, "task_name must be a text"),
        ({"task_name": None, "workflow_name": 3}, "workflow_name must be a text"),
        ({"queue": ""}, "queue must be a text"),
        ({"queue": "é" * 101}, "queue has over 200 bytes"),
        ({"idempotency_key": " "}, "idempotency_key must be a text"),
        ({"args": [1]}, "args is a mapping"),
        ({"inputs": {"x": 1}}, "inputs belongs to a schedule with workflow_name"),
        ({"headers": [1]}, "headers is a mapping of texts"),
        ({"headers": {"a": 1, "b": "x"}}, "headers is a mapping of texts"),
        ({"priority": -32769}, "priority is a whole number"),
        ({"priority": 32768}, "priority is a whole number"),
        ({"priority": True}, "priority is a whole number"),
        ({"priority": 1.0}, "priority is a whole number"),
        ({"on_failure": "mail"}, "on_failure is a function"),
        ({"catch_up": "first"}, "catch_up is one of none, last, all"),
        ({"overlap": "never"}, "overlap is one of allow, skip, replace, queue"),
        ({"catch_up_within_s": 0}, "catch_up_within_s is a number of seconds"),
        ({"catch_up_within_s": 0.0009}, "catch_up_within_s is a number of seconds"),
        ({"catch_up_within_s": 31_622_401}, "up to 31622400"),
        ({"catch_up_within_s": "1"}, "catch_up_within_s is a number of seconds"),
        ({"jitter_s": -0.5}, "jitter_s is a number of seconds"),
        ({"jitter_s": True}, "jitter_s is a number of seconds"),
        ({"catch_up_max": 0}, "catch_up_max is a whole number 1-1000"),
        ({"catch_up_max": 1001}, "catch_up_max is a whole number 1-1000"),
        ({"catch_up_max": True}, "catch_up_max is a whole number 1-1000"),
        ({"start_at": datetime(2024, 1, 1)}, "start_at is a datetime with a time zone"),
        ({"end_at": "2024-01-01"}, "end_at is a datetime with a time zone"),
        ({"start_at": datetime(1999, 12, 31, tzinfo=UTC)}, "start_at is from 2000-01-01"),
        ({"end_at": datetime(9999, 12, 31, 0, 0, 1, tzinfo=UTC)}, "end_at is from 2000-01-01"),
        ({"start_at": at(2), "end_at": at(1)}, "end_at is before start_at"),
        ({"expression": "0 25 * * *"}, "schedule 's': expression '0 25"),
        ({"name": "s:boot"}, "must not end in ':boot'"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_refused_with_what_it_takes(more: dict[str, Any], said: str) -> None:
    with pytest.raises(errors.InvalidConfig) as refused:
        schedule(**more)
    assert said in str(refused.value)
    assert "'s" in str(refused.value)


@pytest.mark.parametrize(
    "more",
    [
        {"queue": "é" * 100}, {"queue": None}, {"args": {}}, {"args": {"x": 1}}, {"inputs": {}},
        {"headers": {"a": "b"}}, {"headers": {}}, {"priority": -32768}, {"priority": 32767},
        {"catch_up_within_s": 0.001}, {"catch_up_within_s": 31_622_400}, {"jitter_s": 0},
        {"jitter_s": 31_622_400.0}, {"catch_up_max": 1}, {"catch_up_max": 1000},
        {"start_at": datetime(2000, 1, 1, tzinfo=UTC)}, {"on_failure": print},
        {"end_at": datetime(9999, 12, 31, tzinfo=UTC)}, {"start_at": at(1), "end_at": at(1)},
        {"start_at": at(1), "end_at": at(2)}, {"start_at": at(2)}, {"end_at": at(2)},
    ],
)  # fmt: skip
def test_the_last_value_of_each_range_is_taken(more: dict[str, Any]) -> None:
    made = schedule(**more)
    assert {key: getattr(made, key) for key in more} == more


@pytest.mark.parametrize("field", ["queue", "idempotency_key", "headers"])
def test_what_jobs_have_is_refused_for_a_workflow(field: str) -> None:
    flow = {"task_name": None, "workflow_name": "w", "queue": None}
    assert schedule(**flow, inputs={"x": 1}).workflow_name == "w"
    with pytest.raises(errors.InvalidConfig, match=f"{field} belongs to a schedule of a task"):
        schedule(**{**flow, field: {"a": "b"} if field == "headers" else "x"})
    with pytest.raises(errors.InvalidConfig, match="args belongs to a schedule with task_name"):
        schedule(**flow, args={"x": 1})


def test_the_defaults_are_the_documented_ones() -> None:
    made = schedule(expression="", every="10s")
    assert (made.expression, made.tz, made.catch_up, made.overlap) == (
        "every 10s", "UTC", "last", "skip",
    )  # fmt: skip
    assert (made.catch_up_max, made.catch_up_within_s, made.jitter_s) == (100, 86_400.0, 0.0)
    assert "on_failure" not in timetable.COLUMNS
    with pytest.raises(AttributeError):
        made.name = "other"  # type: ignore[misc]
    assert {"name", "expression", "end_at"} < set(timetable.COLUMNS)
    assert timetable.GRACE_S == 60.0


# --- instants of a row


def test_the_first_instant_is_after_the_given_one_and_between_start_and_end() -> None:
    assert timetable.first_after(row(), at(1)) == at(2)
    assert timetable.first_after(row(), at(1) - TICK) == at(1)
    assert timetable.first_after(row(start_at=at(5)), at(1)) == at(5)
    assert timetable.first_after(row(start_at=at(5)), at(7)) == at(8)
    assert timetable.first_after(row(end_at=at(2)), at(1)) == at(2)
    assert timetable.first_after(row(end_at=at(9)), at(1)) == at(2)
    assert timetable.first_after(row(end_at=at(2) - TICK), at(1)) is None
    assert timetable.first_after(row(start_at=at(5) + TICK), at(1)) == at(6)


def test_an_interval_counts_from_the_start() -> None:
    every = row(expression="every 1h", start_at=at(1, 3, 7))
    assert timetable.first_after(every, at(1, 3, 7)) == at(1, 4, 7)
    assert schedule(expression="every 1h", start_at=at(1, 3, 7)).parsed().next_after(
        at(1, 3, 7)
    ) == at(1, 4, 7)


def test_the_last_missed_instant_fires_alone() -> None:
    assert timetable.due(row(), at(4)) == [at(4)]
    assert timetable.due(row(), at(4) - TICK) == [at(3)]
    assert timetable.due(row(), at(1)) == [at(1)]
    assert timetable.due(row(), at(1) - TICK) == []
    assert timetable.due(row(next_at=at(1) + TICK), at(1, 4)) == []
    assert timetable.due(row(end_at=at(2)), at(4)) == [at(2)]
    assert timetable.due(row(end_at=at(9)), at(4)) == [at(4)]


def test_without_catch_up_an_instant_fires_for_a_minute_and_its_jitter() -> None:
    none = row(catch_up="none")
    assert timetable.due(none, at(4, 3, 0, 59)) == [at(4)]
    assert timetable.due(none, at(4, 3, 1)) == []
    assert timetable.due(row(catch_up="none", jitter_s=30.0), at(4, 3, 1, 29)) == [at(4)]
    assert timetable.due(row(catch_up="none", jitter_s=30.0), at(4, 3, 1, 30)) == []


def test_all_missed_instants_fire_up_to_their_number_and_age() -> None:
    every = row(catch_up="all", catch_up_within_s=10 * 86_400.0)
    assert timetable.due(every, at(4)) == [at(1), at(2), at(3), at(4)]
    assert timetable.due({**every, "catch_up_max": 2}, at(4)) == [at(3), at(4)]
    assert timetable.due({**every, "catch_up_within_s": 86_401.0}, at(4)) == [at(3), at(4)]
    young = {**every, "catch_up_within_s": 86_400.0}
    assert timetable.due(young, at(4)) == [at(4)]
    assert timetable.due({**young, "jitter_s": 1.0}, at(4)) == [at(3), at(4)]


def test_the_last_instant_of_a_row_ignores_its_catch_up() -> None:
    none = row(catch_up="none")
    assert timetable.last_until(none, at(4, 9)) == at(4)
    assert timetable.last_until(none, at(1)) == at(1)
    assert timetable.last_until(none, at(1) - TICK) is None
    assert timetable.last_until(row(next_at=at(1) + TICK), at(1, 4)) is None
    assert timetable.last_until(row(end_at=at(2)), at(4)) == at(2)


def test_the_period_is_that_around_now() -> None:
    assert timetable.period(row(), at(4, 9)) == DAY
    assert timetable.period(row(expression="0 3 1 1 *"), at(4)) == timedelta(days=366)
    assert timetable.period(row(end_at=at(4)), at(4)) is None
    # In 2024 that minute lies in the gap of the clock, half an hour further.
    gap = row(expression="30 2 31 3 *", tz="Europe/Warsaw")
    just_before = datetime(2024, 3, 31, 0, 59, tzinfo=UTC)
    assert timetable.period(gap, just_before) == timedelta(days=366, minutes=30)
    assert timetable.period(row(expression="every 1h", start_at=at(9)), at(4)) is None


# --- old-style entries


def old(name: str = "e", minute: int = 5, **more: Any) -> timetable.ScheduleEntry:
    return timetable.ScheduleEntry(
        name, minute, **{"task_name": "t", "queue": "fetch", "hours": None, **more}
    )


@pytest.mark.parametrize("more", [{"minute": 0}, {"minute": 59}, {"hours": [0]}, {"hours": [23]}])
def test_the_first_and_last_minute_and_hour_are_taken(more: dict[str, Any]) -> None:
    assert old(**more).expression.endswith(" * * *")


@pytest.mark.parametrize(
    ("value", "taken"),
    [
        ("x", True),
        ("x" * 200, True),
        ("x" * 201, False),
        ("\ud800", False),
        ("", False),
        (3, False),
    ],
)
def test_a_name_is_a_text_that_can_be_stored(value: Any, taken: bool) -> None:
    assert timetable.is_name(value) is taken


@pytest.mark.parametrize("hours", [[-1], [0, 24], ["1"], [1, 2.0]])
def test_one_wrong_hour_is_refused(hours: list[Any]) -> None:
    with pytest.raises(errors.InvalidConfig, match="hours must be whole numbers 0-23"):
        old(hours=hours)


def test_an_entry_is_the_cron_expression_of_its_minute_and_hours() -> None:
    assert old(hours={18, 6}).expression == "5 6,18 * * *"
    assert old().expression == "5 * * * *"


def test_entries_that_differ_in_hours_are_one_row_and_others_get_numbers() -> None:
    given = [
        old(hours={1}), old(hours={2}),
        old("every", hours={1}), old("every"), old("all"), old("all", hours={1}),
        old("same", 30, task_name="b"), old("same", 30, task_name="a"), old("same", 4),
    ]  # fmt: skip
    found = timetable.named(given)
    assert {name: one.hours for name, one in found.items()} == {
        "e": {1, 2}, "every": None, "all": None, "same": None, "same#2": None, "same#3": None,
    }  # fmt: skip
    same = [found[name] for name in ("same", "same#2", "same#3")]
    assert [(one.minute, one.task_name) for one in same] == [(4, "t"), (30, "a"), (30, "b")]


def test_a_numbered_name_fits_its_column() -> None:
    given = [old("x" * 200, minute) for minute in range(3)]
    names = [*timetable.named(given)]
    assert names == ["x" * 200, "x" * 194 + "#2", "x" * 194 + "#3"]


def test_a_converted_entry_fires_alone_within_its_hour() -> None:
    (made,) = timetable.converted([old(hours={6})])
    assert (made.name, made.expression, made.task_name, made.queue) == (
        "e", "5 6 * * *", "t", "fetch",
    )  # fmt: skip
    assert (made.overlap, made.catch_up, made.catch_up_max, made.catch_up_within_s) == (
        "allow", "all", 1, 3600.0,
    )  # fmt: skip


class Shifted(timetable.ScheduleEntry):
    """An app's entry that computes its own instants."""

    def next_fire_at(self, now: datetime) -> datetime:
        return super().next_fire_at(now) + timedelta(minutes=1)


class Described(Shifted):
    """One that also says them as an expression."""

    @property
    def expression(self) -> str:
        return "6 * * * *"


def test_an_entry_with_instants_of_its_own_needs_an_expression() -> None:
    with pytest.raises(errors.InvalidConfig, match="override the property `expression`"):
        timetable.converted([Shifted("e", 5, "t", "fetch")])
    (made,) = timetable.converted([Described("e", 5, "t", "fetch")])
    assert made.expression == "6 * * * *"


def test_entries_and_schedules_are_told_apart_and_have_names_of_their_own() -> None:
    made = schedule()
    assert timetable.split([old(), made, made]) == ([old()], [made])
    with pytest.raises(errors.InvalidConfig, match="two schedules are named 's'"):
        timetable.split([made, schedule(tz="Europe/Warsaw")])
    with pytest.raises(errors.InvalidConfig, match="an entry and a schedule are named 's'"):
        timetable.split([old("s"), made])
    with pytest.raises(errors.InvalidConfig, match="an entry and a schedule are named 'a'"):
        timetable.split([old("s"), old("a"), made, schedule(name="a")])
    with pytest.raises(errors.InvalidConfig, match="holds ScheduleEntry objects, not Schedule"):
        timetable.check([made])
    with pytest.raises(errors.InvalidConfig, match="holds ScheduleEntry and Schedule objects"):
        timetable.split([3])


@pytest.mark.parametrize(
    ("more", "collides"),
    [
        ({"task_name": "u"}, True), ({"queue": "load"}, True), ({}, False),
        ({"task_name": "u", "minute": 6}, False), ({"task_name": "u", "name": "f"}, False),
        ({"task_name": "u", "hours": {2, 3}}, True), ({"task_name": "u", "hours": {4}}, False),
    ],
)  # fmt: skip
def test_two_jobs_of_one_name_and_instant_collide(more: dict[str, Any], collides: bool) -> None:
    given = [old(hours={1, 2}), old(**{"hours": {1, 2}, **more})]
    if not collides:
        assert timetable.check(given) == given
        return
    with pytest.raises(errors.InvalidConfig, match="fire at the same instants"):
        timetable.check(given)


# --- zones


def test_the_changes_before_and_after_an_instant() -> None:
    zone = expression.load_zone("Europe/Warsaw")
    spring, autumn = datetime(2024, 3, 31, 1, tzinfo=UTC), datetime(2024, 10, 27, 1, tzinfo=UTC)
    hour = timedelta(hours=1)
    to_summer, to_winter = (
        expression.Change(spring, hour, 2 * hour),
        expression.Change(autumn, 2 * hour, hour),
    )
    assert expression.last_change(zone, spring) == to_summer
    last_autumn = expression.last_change(zone, spring - TICK)
    assert last_autumn is not None and last_autumn.at == datetime(2023, 10, 29, 1, tzinfo=UTC)
    assert expression.last_change(zone, datetime(2024, 12, 31, tzinfo=UTC)) == to_winter
    assert expression.next_change(zone, spring - TICK, spring) == to_summer
    assert expression.next_change(zone, spring, autumn) == to_winter
    assert expression.next_change(zone, spring, autumn - TICK) is None
    late = datetime(2023, 12, 1, tzinfo=UTC)
    assert expression.next_change(zone, late, autumn) == to_summer
    assert expression.last_change(expression.UTC, autumn) is None


@pytest.mark.parametrize("name", ["Europe/Warsaw", "America/New_York"])
def test_the_first_and_the_last_year_have_no_changes_and_the_one_before_has(name: str) -> None:
    zone = expression.load_zone(name)
    first, last = (datetime(year, 6, 1, tzinfo=UTC) for year in (1, 9999))
    assert expression.last_change(zone, first) is None
    assert expression.next_change(zone, last, last + 180 * DAY) is None
    before = expression.next_change(zone, datetime(9998, 1, 1, tzinfo=UTC), last)
    assert before is not None and (before.at.year, before.at.month) == (9998, 3)


@pytest.mark.parametrize(
    ("name", "change"),
    [("Africa/Sao_Tome", "2018-01-01T01:00"), ("Asia/Singapore", "1981-12-31T16:00")],
)
def test_a_change_on_the_first_or_the_last_day_of_a_year_is_found(name: str, change: str) -> None:
    found = datetime.fromisoformat(change).replace(tzinfo=UTC)
    next_one = expression.next_change(
        expression.load_zone(name), found - 20 * DAY, found + 20 * DAY
    )
    last_one = expression.last_change(expression.load_zone(name), found + 20 * DAY)
    assert next_one is not None and next_one == last_one and next_one.at == found


@pytest.mark.parametrize("name", ["localtime", "posixrules", "Factory", "posix/UTC", "right/UTC"])
def test_files_beside_the_zones_are_no_zones(name: str) -> None:
    with pytest.raises(errors.InvalidConfig, match="is no IANA time zone"):
        expression.load_zone(name)


def test_utc_needs_no_time_zone_data() -> None:
    assert expression.load_zone("UTC") is expression.UTC
