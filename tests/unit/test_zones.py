"""The changes of a time zone's offset are found to the second."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from queue_workflows.schedule import expression
from tests.support.zone_changes import CHANGES


@pytest.mark.parametrize("zone", sorted({*CHANGES} - {"UTC", "Asia/Kathmandu"}))
def test_the_changes_of_a_zone_are_found_to_the_second(zone: str):
    for instant in CHANGES[zone]:
        at = datetime.fromisoformat(instant).replace(tzinfo=timezone.utc)
        found = expression.next_change(expression.load_zone(zone), at - timedelta(minutes=1), at)
        assert found is not None and found.at == at
