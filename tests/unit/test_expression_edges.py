"""Expressions at their edges: the longest text and interval, hours, the end of the calendar."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from queue_workflows import errors
from queue_workflows.schedule import expression
from tests.support import tabled

UTC = timezone.utc
START = datetime(2024, 1, 1, tzinfo=UTC)
TICK = timedelta(microseconds=1)


def after(text: str, *moments: datetime, **more: Any) -> list[datetime | None]:
    parsed = expression.parse(text, **more)
    return [parsed.next_after(moment) for moment in moments]


def test_an_interval_is_the_sum_of_its_parts() -> None:
    cases: list[Any] = [
        ("every 1s", 1), ("every 1m", 60), ("every 1h", 3600), ("every 1d", 86_400),
        ("every 1w", 604_800), ("EVERY 1h 30M", 5400), ("every 366d", 366 * 86_400),
        ("every  2s", 2),
    ]  # fmt: skip
    for text, seconds in cases:
        with tabled.case(text, seconds):
            period = timedelta(seconds=seconds)
            assert after(text, START, START - TICK, START + period, anchor=START) == [
                START + period, START, START + 2 * period,
            ]  # fmt: skip
            assert after(text, START - 10 * period, anchor=START) == [START]


@pytest.mark.parametrize("text", ["every 0s", "every 366d 1s", "every", "everyday", "every 1y"])
def test_another_interval_is_refused(text: str) -> None:
    with pytest.raises(errors.InvalidConfig, match="together 1s to 366d"):
        expression.parse(text)


def test_an_interval_without_an_anchor_counts_from_1970() -> None:
    assert after("every 7s", datetime(1970, 1, 1, tzinfo=UTC)) == [
        datetime(1970, 1, 1, 0, 0, 7, tzinfo=UTC)
    ]
    assert after("every 1h", datetime(2024, 1, 1)) == [START + timedelta(hours=1)]


def test_nothing_comes_after_the_end_of_the_calendar() -> None:
    end = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
    assert after("every 1h", end) == [None]
    assert after("5 * * * *", end) == [None]


def test_the_ends_of_the_calendar_end_an_expression_in_every_zone() -> None:
    cases: list[Any] = ["UTC", "Asia/Tokyo", "America/New_York", "Pacific/Kiritimati"]
    for text in ("0 3 * * *", "*/5 * * * *", "every 1h"):
        for tz in cases:
            with tabled.case(tz, text):
                parsed = expression.parse(text, tz)
                first, last = (end.replace(tzinfo=UTC) for end in (datetime.min, datetime.max))
                near = [last - timedelta(hours=hours) for hours in (0, 1, 11, 14, 15)]
                for end in near:
                    found = parsed.next_after(end)
                    assert found is None or end < found <= last
                    assert all(end < each.at <= last for each in parsed.occurrences(end, last))
                assert parsed.next_after(last) is None
                (soon,) = expression.latest(parsed, last, after=first)
                assert last - soon < timedelta(days=2)
                begun = parsed.next_after(first)
                assert begun is not None and next(parsed.occurrences(first, last)).at == begun
                assert expression.latest(parsed, begun, after=first) == [begun]


def test_a_text_of_200_characters_is_taken() -> None:
    listed = ",".join(["30"] * 64)
    text = f"{listed} 3 * * *"
    text += " " * (200 - len(text))
    assert len(text) == 200
    assert after(text, START) == [START.replace(hour=3, minute=30)]
    for wrong in (text + " ", " ", "", 5):
        with pytest.raises(errors.InvalidConfig, match="it takes five fields"):
            expression.parse(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["@often", "@Dailyy", "@"])
def test_an_unknown_alias_is_refused(text: str) -> None:
    with pytest.raises(errors.InvalidConfig, match="aliases are @yearly"):
        expression.parse(text)


def test_the_instant_after_the_new_year() -> None:
    cases: list[Any] = [
        ("@yearly", "2025-01-01T00:00"), ("@annually", "2025-01-01T00:00"),
        ("@monthly", "2024-02-01T00:00"), ("@weekly", "2024-01-07T00:00"),
        ("@daily", "2024-01-02T00:00"), ("@Midnight", "2024-01-02T00:00"),
        ("@hourly", "2024-01-01T01:00"), ("0 0 * * *", "2024-01-02T00:00"),
        ("59 23 * * *", "2024-01-01T23:59"), ("7 5,3 * * *", "2024-01-01T03:07"),
        ("1 0 * * *", "2024-01-01T00:01"), ("30 0 0 * * *", "2024-01-01T00:00:30"),
    ]  # fmt: skip
    for text, wanted in cases:
        with tabled.case(text, wanted):
            assert after(text, START) == [datetime.fromisoformat(wanted).replace(tzinfo=UTC)]


@pytest.mark.parametrize(
    "text", ["5 24 * * *", "5 25 * * *", "5 1,99 * * *", "60 3 * * *", "5 3 * *", "5 3,24 * * *"]
)
def test_a_field_out_of_its_range_is_refused(text: str) -> None:
    with pytest.raises(errors.InvalidConfig, match="it takes five fields"):
        expression.parse(text)


@pytest.mark.parametrize("text", ["every 1h", "0 * * * *"])
def test_occurrences_lie_behind_the_start_and_up_to_the_end(text: str) -> None:
    hour = timedelta(hours=1)
    found = [*expression.parse(text).occurrences(START, START + 2 * hour)]
    assert found == [expression.Occurrence(START + n * hour) for n in (1, 2)]
    assert [*expression.parse(text).occurrences(START, START + hour - TICK)] == []
    assert all(one.fires and one.note is None for one in found)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_the_latest_instants_lie_behind_the_start_and_up_to_the_end(count: int) -> None:
    hour, parsed = timedelta(hours=1), expression.parse("0 * * * *")

    def latest(until: datetime, since: datetime) -> list[datetime]:
        return expression.latest(parsed, until, after=since, count=count)

    three = [START + n * hour for n in (1, 2, 3)]
    assert latest(START + 3 * hour, START) == three[-count:]
    assert latest(START + 3 * hour - TICK, START) == three[:2][-count:]
    assert latest(START + 3 * hour, START - TICK) == [START, *three][-count:]
    assert latest(START, START) == []
    assert latest(START, START + hour) == []


class Counted(expression.Interval):
    """An interval that counts its look-ups."""

    calls = 0

    def next_after(self, after: datetime) -> datetime | None:
        self.calls += 1
        return super().next_after(after)


def test_the_latest_of_many_instants_is_found_at_a_bounded_cost() -> None:
    every = Counted(1, None)
    year = timedelta(days=365)
    assert expression.latest(every, START, after=START - year) == [START]
    assert every.calls == 61
    rare = Counted(366 * 86_400, None)
    assert len(expression.latest(rare, START, after=START - 2 * year, count=2)) == 2
    assert rare.calls < 20


# --- changes of the clock


def warsaw(text: str, day: str, hours: int = 24) -> list[tuple[str, str | None, bool]]:
    start = datetime.fromisoformat(day).replace(tzinfo=UTC)
    found = expression.parse(text, "Europe/Warsaw").occurrences(
        start, start + timedelta(hours=hours)
    )
    return [(f"{one.at:%H:%M}", one.note, one.fires) for one in found]


def test_a_fixed_hour_on_the_edges_of_the_gap_and_of_the_fold() -> None:
    moved = "{} does not exist: fires at the end of the gap"
    for text, wanted in {
        "59 1 * * *": ("00:59", None, True),
        "0 2 * * *": ("01:00", moved.format("02:00:00"), True),
        "59 2 * * *": ("01:00", moved.format("02:59:00"), True),
        "0 3 * * *": ("01:00", None, True),
    }.items():
        assert warsaw(text, "2024-03-30T23:30", 5) == [wanted], text
    twice = "first of two: the second does not fire"
    for text, wanted in {
        "59 1 * * *": ("23:59", None, True),
        "0 2 * * *": ("00:00", twice, True),
        "59 2 * * *": ("00:59", twice, True),
        "0 3 * * *": ("02:00", None, True),
    }.items():
        assert warsaw(text, "2024-10-26T23:30", 5) == [wanted], text


def test_after_the_first_of_two_the_next_instant_is_behind_the_second() -> None:
    second = datetime(2024, 10, 27, 1, 30, tzinfo=UTC)  # 02:30 for the second time
    assert after("0 3 * * *", second, tz="Europe/Warsaw") == [second.replace(hour=2, minute=0)]
    assert after("59 59 2 * * *", second, tz="Europe/Warsaw") == [
        datetime(2024, 10, 28, 1, 59, 59, tzinfo=UTC)
    ]


def test_every_hour_on_the_edges_of_the_gap_and_of_the_fold() -> None:
    assert warsaw("0 * * * *", "2024-03-30T23:30", 4) == [
        ("00:00", None, True), ("01:00", "02:00:00 does not exist", False), ("01:00", None, True),
        ("02:00", None, True), ("03:00", None, True),
    ]  # fmt: skip
    assert warsaw("0 * * * *", "2024-10-26T22:30", 4) == [
        ("23:00", None, True), ("00:00", "first of two", True), ("01:00", "second of two", True),
        ("02:00", None, True),
    ]  # fmt: skip
