"""Values that Python cannot load are returned as `Unreadable`."""

from __future__ import annotations

from datetime import datetime, timezone
from types import ModuleType
from typing import Any

import pytest

from queue_workflows.types import Unreadable
from tests.support import tabled


def fetched(db: ModuleType, expression: str) -> Any:
    with db.transaction() as conn:
        row = conn.execute(f"SELECT {expression} AS value").fetchone()
    return row["value"]


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("'1e5000'::jsonb", "digits"),
        ("(repeat('[', 201) || repeat(']', 201))::jsonb", "deeper than 200"),
        ("(repeat('[', 3000) || repeat(']', 3000))::json", "deeper than 200"),
        ("""(repeat('{"a":', 201) || '1' || repeat('}', 201))::jsonb""", "deeper than 200"),
    ],
)
def test_json_over_the_limits_is_an_unreadable_value(
    db: ModuleType, expression: str, reason: str
) -> None:
    value = fetched(db, expression)
    assert isinstance(value, Unreadable)
    assert reason in value.reason
    assert reason in repr(value)


def test_the_largest_json_that_is_loaded(db: ModuleType) -> None:
    value = fetched(db, "(repeat('[', 200) || repeat(']', 200))::jsonb")
    for _ in range(199):
        (value,) = value
    assert value == []
    assert fetched(db, "('[' || repeat('[],', 5000) || '[]]')::jsonb") == [[]] * 5001
    assert fetched(db, "('9' || repeat('0', 4000))::jsonb") == 9 * 10**4000


def test_json_of_too_many_bytes_is_not_parsed(db: ModuleType) -> None:
    value = fetched(db, "to_json(repeat('x', 64 * 1024 * 1024))")
    assert isinstance(value, Unreadable)
    assert "67108866 bytes" in value.reason


def test_a_time_without_a_datetime_is_the_nearest_there_is(db: ModuleType) -> None:
    cases: list[Any] = [
        ("infinity", datetime.max),
        ("-infinity", datetime.min),
        ("294276-12-31 23:59:59+00", datetime.max),
        ("10000-01-01 00:00:00+00", datetime.max),
        ("4713-01-01 00:00:00+00 BC", datetime.min),
    ]
    for moment, nearest in cases:
        with tabled.case(moment, nearest):
            assert fetched(db, f"'{moment}'::timestamptz") == nearest.replace(tzinfo=timezone.utc)
            assert fetched(db, "'2026-01-02 03:04:05+00'::timestamptz") == datetime(
                2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc
            )
