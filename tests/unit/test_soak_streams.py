"""The soak's check of streams: what a reader may get, and what it may not."""

from __future__ import annotations

from typing import Any

from queue_workflows import streams
from tests.soak import check_streams, evidence, stream_tasks
from tests.support import tabled

WHOLE = stream_tasks.COUNT


def part(claim_no: int, seq: int) -> streams.Part:
    value = [claim_no, seq - 1] if seq else None
    return streams.Part(claim_no, seq, stream_tasks.NAME if seq else "", value, None)


def found(parts: list[streams.Part], status: str = "completed", claim_no: int = 2) -> list[str]:
    known: dict[str, Any] = dict.fromkeys(
        (
            "runs", "events", "fires", "lines", "books", "faults", "off", "ended", "time", "began",
            "ended_load", "stuck", "invariants", "slow",
        )
    )  # fmt: skip
    jobs = {"j": {"status": status, "claim_no": claim_no}}
    return [*check_streams.read(evidence.Evidence(**known, jobs=jobs, streams={"j": parts}))]


FIRST = [part(1, seq) for seq in range(1, 6)]
SECOND = [part(2, seq) for seq in range(WHOLE + 1)]


def test_a_prefix_of_each_attempt_a_mark_and_the_whole_last_one_are_right() -> None:
    assert found(FIRST + SECOND) == []
    assert found(SECOND[1:]) == [], "a reader that comes late"
    assert found(FIRST, "failed") == []


def test_anything_else_is_found() -> None:
    cases: list[Any] = [
        (FIRST + SECOND[1:], "without a mark"),
        (FIRST + SECOND[:1] + SECOND, "a mark of attempt 2 behind one of 2"),
        (FIRST[1:] + SECOND, "part 1-2 behind 0-0"),
        (FIRST + FIRST[-1:] + SECOND, "part 1-5 behind 1-5"),
        (FIRST + SECOND[:4] + SECOND[5:], "part 2-5 behind 2-3"),
        (FIRST + SECOND[:-1], "39 parts of its last attempt"),
        (FIRST, "nothing of it"),
        ([*FIRST[:1], part(1, 2)._replace(value=[2, 1]), *SECOND], "part 1-2 is"),
    ]
    for parts, words in cases:
        with tabled.case(parts, words):
            assert any(words in text for text in found(parts)), found(parts)
