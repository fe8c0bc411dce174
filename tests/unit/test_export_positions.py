"""The gaps of an export's position lose the ids that were read."""

from __future__ import annotations

from typing import Any

import pytest

from queue_workflows.event_export import exporter


@pytest.mark.parametrize(
    ("gaps", "ids", "left"),
    [
        ([(1, 5)], [3], [(1, 2), (4, 5)]),
        ([(1, 5)], [1, 5], [(2, 4)]),
        ([(1, 2), (4, 4)], [1, 2, 4], []),
        ([(1, 1), (3, 9)], [4, 5, 9], [(1, 1), (3, 3), (6, 8)]),
        ([(2, 3)], [], [(2, 3)]),
    ],
)
def test_gaps_lose_the_ids_that_were_read(gaps: Any, ids: Any, left: Any) -> None:
    position = exporter._Position(10)  # pyright: ignore[reportPrivateUsage]
    position.gaps = gaps
    position.seen(ids)
    assert position.gaps == left
