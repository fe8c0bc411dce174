"""Rows reach handlers as the database has them, also those of which a column cannot be loaded."""

from __future__ import annotations

import datetime
import json
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from queue_workflows.run import wire
from queue_workflows.types import Unreadable

DEEP = "[" * 300 + "]" * 300
"""Deeper than anything that is loaded."""
names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)
rows = st.dictionaries(names.filter(lambda name: name != "bad"), values, max_size=5)


@given(rows, st.integers(0, 5), st.booleans(), st.sampled_from([None, 1]))
def test_of_a_row_that_cannot_be_loaded_all_other_columns_can(
    row: dict[str, Any], place: int, is_ascii: bool, indent: int | None
) -> None:
    members = [*row.items()]
    members.insert(place, ("bad", None))
    text = json.dumps(dict(members), ensure_ascii=is_ascii, indent=indent)
    assume(text.count('"bad": null') == 1)
    found = wire.load_row(text.replace('"bad": null', f'"bad": {DEEP}').encode())
    assert isinstance(found.pop("bad"), Unreadable)
    assert found == wire.load_row(json.dumps(row).encode())
    assert [*found] == [*row]


@given(st.dictionaries(names, values | st.datetimes(timezones=st.just(datetime.timezone.utc))))
def test_a_row_of_an_answer_keeps_its_times_and_its_data(row: dict[str, Any]) -> None:
    sent = wire.encoded(wire.tagged(row))
    assert wire.timed(wire.decoded(sent)) == row
