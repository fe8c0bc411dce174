"""Time spans, rates and ends of pauses at their edges."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from queue_workflows import errors
from queue_workflows.runtime import clock

NOW = datetime(2024, 5, 1, 12, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("30s", timedelta(seconds=30)), ("45m", timedelta(minutes=45)), ("2h", timedelta(hours=2)),
        ("1d", timedelta(days=1)), ("1.5h", timedelta(minutes=90)), ("-1s", timedelta(seconds=-1)),
    ],
)  # fmt: skip
def test_a_span_is_a_number_with_a_unit(text: str, span: timedelta) -> None:
    assert clock.parse_until(text) == span


@pytest.mark.parametrize("text", ["2024-05-01T12:00:00Z", "2024-05-01T14:00:00+02:00"])
def test_a_time_is_an_iso_text(text: str) -> None:
    assert clock.parse_until(text) == NOW
    assert clock.iso_time(text) == NOW


def test_a_time_without_a_zone_stays_naive() -> None:
    assert clock.iso_time("2024-05-01T12:00:00").tzinfo is None


@pytest.mark.parametrize("text", ["", "5", "m", "xs", "1e400s", "tomorrow"])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(errors.InvalidConfig, match="neither a time span such as 45m"):
        clock.parse_until(text)


@pytest.mark.parametrize(
    ("until", "parts"),
    [
        (None, (None, None)), (NOW, (NOW, None)), (timedelta(seconds=1), (None, timedelta(0, 1))),
        (timedelta(days=36_525), (None, timedelta(days=36_525))),
        (timedelta(microseconds=1), (None, timedelta(microseconds=1))),
    ],
)  # fmt: skip
def test_an_until_is_a_time_or_a_span(until: Any, parts: tuple[Any, Any]) -> None:
    assert clock.check_until(until) == parts


@pytest.mark.parametrize(
    ("until", "said"),
    [
        (5, "neither a datetime nor a timedelta"), ("2h", "neither a datetime nor a timedelta"),
        (datetime(2024, 5, 1), "a time with a time zone"), (timedelta(0), "above zero"),
        (timedelta(seconds=-1), "above zero"),
        (timedelta(days=36_525, microseconds=1), "a hundred years at most"),
    ],
)  # fmt: skip
def test_another_until_is_refused(until: Any, said: str) -> None:
    with pytest.raises(errors.InvalidConfig, match=said):
        clock.check_until(until)


@pytest.mark.parametrize(
    ("count", "period_s", "text"),
    [
        (100, 60.0, "100/m"), (1, 1.0, "1/s"), (2, 3600.0, "2/h"), (3, 86400.0, "3/d"),
        (4, 90.0, "4/90s"), (4, 1_728_000.0, "4/1728000s"), (None, 60.0, None), (5, None, None),
        (None, None, None),
    ],
)  # fmt: skip
def test_a_rate_is_written_by_its_unit(
    count: int | None, period_s: float | None, text: str | None
) -> None:
    assert clock.rate_text(count, period_s) == text
