"""Instants of cron expressions and intervals, against a scan of every minute and second."""

from __future__ import annotations

import itertools
import sys
import zoneinfo
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date, datetime, timedelta, timezone
from typing import Any, NamedTuple

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from queue_workflows import errors
from queue_workflows.schedule import expression
from tests.support import tabled
from tests.support.examples import examples
from tests.support.zone_changes import CHANGES

UTC = timezone.utc
MINUTE = timedelta(minutes=1)
PLACES = [(zone, at(text)) for at in [lambda t: datetime.fromisoformat(t).replace(tzinfo=UTC)]
          for zone, texts in CHANGES.items() for text in texts]  # fmt: skip


def local(at: datetime, zone: str) -> datetime:
    return at.astimezone(zoneinfo.ZoneInfo(zone))


def scan(zone: str, start: datetime, end: datetime, step: timedelta, matches, once: bool):
    """Check every step: the slow reference, which uses neither transitions nor the library."""
    at = start + step
    before = local(start, zone).replace(tzinfo=None)
    while at <= end:
        shown = local(at, zone)
        wall = shown.replace(tzinfo=None)
        hit = matches(wall) and (not once or shown.fold == 0)
        if once and wall - before > step:
            skipped = (before + n * step for n in range(1, (wall - before) // step))
            hit = hit or any(matches(one) for one in skipped)
        if hit:
            yield at
        before, at = wall, at + step


def computed(parsed: expression.Expression, start: datetime, end: datetime) -> Iterator[datetime]:
    at = parsed.next_after(start)
    while at is not None and at <= end:
        yield at
        at = parsed.next_after(at)


def numbers(least: int, most: int) -> st.SearchStrategy[frozenset[int]]:
    return st.frozensets(st.integers(least, most), min_size=1, max_size=4)


def text(chosen: frozenset[int] | None) -> str:
    return "*" if chosen is None else ",".join(map(str, sorted(chosen)))


@settings(max_examples=examples(120))
@given(
    st.sampled_from(PLACES), numbers(0, 59), st.none() | numbers(0, 4) | numbers(0, 23),
    st.none() | numbers(0, 6), st.integers(-1500, 200), st.integers(0, 59),
)  # fmt: skip
def test_every_instant_is_that_of_a_scan_of_each_minute(place, minutes, hours, days, ahead, second):
    zone, change = place
    start = change + ahead * MINUTE + timedelta(seconds=second)
    fields = f"{text(minutes)} {text(hours)} * * {text(days)}"
    parsed = expression.parse(fields, zone)

    def matches(wall: datetime) -> bool:
        return (
            wall.minute in minutes
            and (hours is None or wall.hour in hours)
            and (days is None or wall.isoweekday() % 7 in days)
        )

    begin = start.replace(second=0)
    wanted = scan(zone, begin, begin + 1700 * MINUTE, MINUTE, matches, once=hours is not None)
    assert list(computed(parsed, start, begin + 1700 * MINUTE)) == list(wanted)


@settings(max_examples=examples(25))
@given(st.sampled_from(PLACES), numbers(0, 59), st.none() | numbers(0, 59), st.integers(-700, 100))
def test_seconds_are_those_of_a_scan_of_each_second(place, seconds, minutes, ahead):
    zone, change = place
    start, end = change + timedelta(seconds=ahead), change + timedelta(seconds=ahead + 900)
    parsed = expression.parse(f"{text(seconds)} {text(minutes)} * * * *", zone)

    def matches(wall: datetime) -> bool:
        return wall.second in seconds and (minutes is None or wall.minute in minutes)

    wanted = scan(zone, start, end, timedelta(seconds=1), matches, once=False)
    assert list(computed(parsed, start, end)) == list(wanted)


@settings(max_examples=examples(60))
@given(st.sampled_from(PLACES), numbers(0, 59), numbers(0, 23), st.integers(0, 4000))
def test_the_latest_instants_are_the_last_of_those_that_come_after(place, minutes, hours, width):
    zone, change = place
    parsed = expression.parse(f"{text(minutes)} {text(hours)} * * *", zone)
    start, end = change - 2000 * MINUTE, change + (width - 2000) * MINUTE
    every = list(computed(parsed, start, end))
    for count in (1, 3, 1000):
        assert expression.latest(parsed, end, after=start, count=count) == every[-count:]


def days_of(zone: str, start: datetime, end: datetime) -> Iterator[date]:
    day, last = local(start, zone).date(), local(end, zone).date()
    while day <= last:
        yield day
        day += timedelta(days=1)


def instants_of(wall: datetime, zone: str, *, once: bool) -> set[datetime]:
    """Return when a local time fires, by the folds of the standard library."""
    both = [
        wall.replace(tzinfo=zoneinfo.ZoneInfo(zone), fold=fold).astimezone(UTC) for fold in (0, 1)
    ]
    shown = [at for at in both if local(at, zone).replace(tzinfo=None) == wall]
    if shown:
        return {shown[0]} if once else {*shown}
    if not once:
        return set()
    # It is skipped: the first minute of the new offset is the end of the gap.
    at = min(both).replace(second=0) - MINUTE
    before = local(at, zone).utcoffset()
    while local(at, zone).utcoffset() == before:
        at += MINUTE
    return {at}


def listed(
    zone: str,
    start: datetime,
    end: datetime,
    matches: Callable[[date], bool],
    times: Iterable[tuple[int, int, int]],
    *,
    once: bool,
) -> list[datetime]:
    """The slow reference: every local time of every day, by the standard library."""
    found: set[datetime] = set()
    for day in filter(matches, days_of(zone, start, end)):
        for hour, minute, second in times:
            wall = datetime(day.year, day.month, day.day, hour, minute, second)
            found |= instants_of(wall, zone, once=once)
    return sorted(at for at in found if start < at <= end)


def is_last_of_month(day: date) -> bool:
    return (day + timedelta(days=1)).day == 1


YEARS: list[tuple[str, int, Callable[[date], bool], list[int], list[int]]] = [
    ("30 2 * * *", 10, lambda day: True, [2], [30]),
    ("0 0 1 * *", 25, lambda day: day.day == 1, [0], [0]),
    ("59 23 L * *", 25, is_last_of_month, [23], [59]),
    ("15 1-3 * 3,4,10,11 SUN", 25,
     lambda day: day.isoweekday() == 7 and day.month in (3, 4, 10, 11), [1, 2, 3], [15]),
    ("5 0 13 * FRI", 25, lambda day: day.day == 13 or day.isoweekday() == 5, [0], [5]),
    ("20 */12 * * *", 3, lambda day: True, [0, 12], [20]),
    ("10 * 27-31 3,10 *", 25,
     lambda day: day.day >= 27 and day.month in (3, 10), [*range(24)], [10]),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", YEARS, ids=[case[0] for case in YEARS])
def test_the_years_of_ten_zones_are_those_of_a_list_of_local_times(case: Any):
    fields, years, matches, hours, minutes = case
    once = not fields.split()[1].startswith("*")
    times = [(hour, minute, 0) for hour in hours for minute in minutes]
    for zone in CHANGES:
        start = datetime(2009, 6, 30, 23, 17, tzinfo=UTC)
        end = start.replace(year=2009 + years)
        wanted = listed(zone, start, end, matches, times, once=once)
        assert list(computed(expression.parse(fields, zone), start, end)) == wanted, zone


MONTHS = ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"]
DAYS = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"]


class Field(NamedTuple):
    """One field of an expression, and the numbers that it stands for."""

    text: str
    chosen: frozenset[int]

    @property
    def is_star(self) -> bool:
        return self.text.startswith("*")


@st.composite
def fields_of(
    draw: st.DrawFn, least: int, most: int, names: Sequence[str] = (), end: int | None = None
) -> Field:
    """A star, a number or name, a range with or without a step, or a list of such.

    `end`: the last number, if it is another one for the first, as 7 is for 0.
    """

    def shown(number: int) -> str:
        return names[number - least] if names and draw(st.booleans()) else str(number)

    if draw(st.integers(0, 3)) == 0:
        step = draw(st.sampled_from([1, 1, 2, 5, 7]))
        text = "*" if step == 1 else f"*/{step}"
        return Field(text, frozenset(range(least, most + 1, step)))
    parts: list[str] = []
    chosen: set[int] = set()
    for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
        first = draw(st.integers(least, most))
        last = draw(st.integers(first, most))
        kind = draw(st.sampled_from(["one", "one", "range", "step", "from"]))
        step = draw(st.integers(1, 9)) if kind in ("step", "from") else 1
        if kind == "from":
            last = most if end is None else end
            parts.append(f"{shown(first)}/{step}")
        elif kind == "one" or first == last:
            # cronsim takes 5-5/2 for 5/2.
            last = first
            parts.append(shown(first))
        else:
            parts.append(f"{shown(first)}-{shown(last)}" + (f"/{step}" if kind == "step" else ""))
        chosen |= {least if n > most else n for n in range(first, last + 1, step)}
    return Field(",".join(parts), frozenset(chosen))


def few(field: Field, most: int) -> bool:
    return len(field.chosen) <= most


@pytest.mark.slow
@pytest.mark.timeout(300)
@settings(max_examples=examples(60), phases=[Phase.reuse, Phase.generate])
@given(
    st.sampled_from([*CHANGES]),
    st.tuples(
        st.just(None) | fields_of(0, 59).filter(lambda one: few(one, 2)),
        fields_of(0, 59).filter(lambda one: few(one, 3)),
        fields_of(0, 23).filter(lambda one: few(one, 4) or one.is_star),
        fields_of(1, 31), fields_of(1, 12, MONTHS), fields_of(0, 6, DAYS, 7),
    ),
    st.integers(0, 20 * 365 * 1440), st.integers(1, 5),
)  # fmt: skip
def test_years_of_any_expression_are_those_of_a_list_of_local_times(zone, drawn, begin, years):
    seconds, minutes, hours, days, months, weekdays = drawn
    fields = " ".join(one.text for one in drawn if one is not None)
    try:
        parsed = expression.parse(fields, zone)
    except errors.InvalidConfig:
        # Days that no chosen month has, such as February 30, are refused.
        assert not days.is_star and min(days.chosen) > 28
        return

    def matches(day: date) -> bool:
        of_month, of_week = day.day in days.chosen, day.isoweekday() % 7 in weekdays.chosen
        either = of_month or of_week
        both = of_month and of_week
        found = both if days.is_star or weekdays.is_star else either
        return day.month in months.chosen and found

    start = datetime(2008, 1, 1, tzinfo=UTC) + begin * MINUTE
    chosen = [hours.chosen, minutes.chosen, {0} if seconds is None else seconds.chosen]
    # As many days as the list of local times takes a fraction of a second for.
    a_day = len(chosen[0]) * len(chosen[1]) * len(chosen[2])
    end = start + timedelta(days=min(365 * years, 8_000 // a_day))
    wanted = listed(
        zone, start, end, matches, [*itertools.product(*chosen)], once=not hours.is_star
    )  # fmt: skip
    assert list(computed(parsed, start, end)) == wanted


def test_a_far_match_crosses_rules_that_change_in_between():
    parsed = expression.parse("0 12 29 2 *", "Pacific/Apia")
    at = parsed.next_after(datetime(2008, 3, 1, tzinfo=UTC))
    assert at is not None
    assert local(at, "Pacific/Apia").isoformat() == "2012-02-29T12:00:00+14:00"
    assert expression.parse("0 0 31 2 1", "UTC").next_after(at) is not None


@pytest.mark.parametrize(("every", "seconds"), [("every 10s", 10), ("every 1h30m", 5400)])
def test_an_interval_counts_from_1970_or_from_its_anchor(every: str, seconds: int):
    start = datetime(2024, 3, 31, 0, 59, 7, 250_000, tzinfo=UTC)
    found = list(itertools.islice(computed(expression.parse(every), start, start.replace(2025)), 5))
    assert all(at.timestamp() % seconds == 0 for at in found)
    assert found[0] - start <= timedelta(seconds=seconds) < found[1] - start
    anchor = datetime(2024, 4, 1, 0, 0, 3, tzinfo=UTC)
    parsed = expression.parse(every, "UTC", anchor)
    assert parsed.next_after(start) == anchor
    assert parsed.next_after(anchor) == anchor + timedelta(seconds=seconds)


def test_a_wrong_expression_is_refused_with_what_is_allowed():
    cases: list[Any] = [
        ("61 * * * *", "Bad minute.*minute 0-59"),
        ("* 24 * * *", "Bad hour"),
        ("0 24 * * *", "Bad hour"),
        ("* * 0 * *", "Bad day-of-month"),
        ("0 0 30 2 *", "Bad day-of-month"),
        ("* * * FOO *", "Bad month"),
        ("* * * * 8", "Bad day-of-week"),
        ("x * * * * *", "Bad second"),
        ("* * *", "fields"),
        ("", "five fields"),
        ("@often", "aliases are @yearly"),
        ("every 0s", "1s to 366d"),
        ("every 10", "numbers with a unit"),
        ("every 400d", "1s to 366d"),
        ("*" * 300, "five fields"),
    ]
    for bad, said in cases:
        with tabled.case(bad, said), pytest.raises(errors.InvalidConfig, match=said):
            expression.parse(bad, "UTC")


def test_a_wrong_zone_is_refused():
    cases: list[Any] = ["", "Mars/Base", "../etc/passwd", "/etc", "Europe", "a\0b", "é" * 9]
    for bad in cases:
        with (
            tabled.case(bad),
            pytest.raises(errors.InvalidConfig, match="no IANA time zone"),
        ):
            expression.parse("0 3 * * *", bad)


def test_names_ranges_steps_and_aliases():
    start = datetime(2024, 1, 1, tzinfo=UTC)
    for fields, wanted in {
        "0 3 * * MON-FRI": "2024-01-01T03:00",
        "*/20 9-17 * FEB sun": "2024-02-04T09:00",
        "@weekly": "2024-01-07T00:00",
        "@yearly": "2025-01-01T00:00",
        "0 0 L * *": "2024-01-31T00:00",
    }.items():
        at = expression.parse(fields).next_after(start)
        assert at == datetime.fromisoformat(wanted).replace(tzinfo=UTC), fields


def test_without_the_extra_intervals_and_converted_entries_work(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cronsim", None)
    expression.parse.cache_clear()
    start = datetime(2024, 1, 1, tzinfo=UTC)
    assert expression.parse("5 1,3 * * *").next_after(start) == start.replace(hour=1, minute=5)
    assert expression.parse("@hourly").next_after(start) == start.replace(hour=1)
    assert expression.parse("every 1h").next_after(start) == start.replace(hour=1)
    with pytest.raises(errors.MissingExtra, match=r"pip install 'SOURCE\[cron\]'"):
        expression.parse("*/5 * * * *")


def notes(fields: str, zone: str, day: str) -> list[tuple[str, str | None, bool]]:
    start = datetime.fromisoformat(day).replace(tzinfo=UTC)
    found = expression.parse(fields, zone).occurrences(start, start + timedelta(days=1))
    return [(f"{local(one.at, zone):%H:%M}", one.note, one.fires) for one in found]


def test_a_preview_marks_what_is_skipped_and_what_comes_twice():
    spring, autumn = "2024-03-30T22:00", "2024-10-26T22:30"
    skipped = "02:30:00 does not exist"
    moved = f"{skipped}: fires at the end of the gap"
    assert notes("30 2 * * *", "Europe/Warsaw", spring) == [("03:00", moved, True)]
    once = "first of two: the second does not fire"
    assert notes("30 2 * * *", "Europe/Warsaw", autumn) == [("02:30", once, True)]
    hourly = notes("30 * * * *", "Europe/Warsaw", spring)
    assert ("03:00", skipped, False) in hourly
    assert len([one for one in hourly if one[2]]) == 24
    halves = notes("*/30 * * * *", "Europe/Warsaw", spring)
    assert [one for one in halves if one[1]] == [
        ("03:00", "02:00:00 does not exist", False), ("03:00", skipped, False),
    ]  # fmt: skip
    assert ("03:00", None, True) in halves
    twice = [one for one in notes("30 * * * *", "Europe/Warsaw", autumn) if one[1]]
    assert twice == [("02:30", "first of two", True), ("02:30", "second of two", True)]
