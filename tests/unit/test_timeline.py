"""The time line of a run: waits, loads and runs as bars, and what failed attempts cost."""

from __future__ import annotations

import itertools
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queue_workflows.service.dashboard import timeline
from tests.support.examples import examples

T0 = datetime(2026, 1, 31, 9, 0, tzinfo=timezone.utc)


def at(seconds: float | None) -> datetime | None:
    return None if seconds is None else T0 + timedelta(seconds=seconds)


def attempt(
    queued: float | None,
    claimed: float,
    ended: float | None,
    outcome: str,
    *kinds: str,
    load: float = 0.0,
) -> dict[str, Any]:
    events = [{"event_type": kind, "elapsed_s": None} for kind in kinds]
    if load:
        events.append({"event_type": "model_load_done", "elapsed_s": load})
    return {
        "claim_no": 1, "queued_at": at(queued), "claimed_at": at(claimed), "ended_at": at(ended),
        "outcome": outcome, "events": events, "host_label": "box-1",
        "ran_s": None if ended is None else ended - claimed,
    }  # fmt: skip


def node(
    *attempts: dict[str, Any], status: str = "completed", queue: str = "cpu", **more: Any
) -> dict[str, Any]:
    last = attempts[-1]["ended_at"] if attempts else None
    finished_at = None if status in ("queued", "running", "awaiting_input") else last
    return {
        "node_id": "a", "status": status, "queue": queue, "created_at": T0, "child_run_id": None,
        "finished_at": finished_at, "blocked_reason": None, "required_model": None,
        "attempts": [*attempts],
    } | more  # fmt: skip


def drawn(*nodes: dict[str, Any], now: datetime = T0) -> list[dict[str, Any]]:
    """Return the nodes with the spans that a table and a cost are made of."""
    return [each | {"spans": timeline.spans(each, now)} for each in nodes]


def spans(one: dict[str, Any], now: float = 100.0) -> list[tuple[str, float, str, bool]]:
    now_at = at(now)
    assert now_at is not None
    return [(each.kind, each.seconds, each.why, each.lost) for each in timeline.spans(one, now_at)]


def test_an_attempt_is_a_wait_a_load_and_a_run() -> None:
    assert spans(node(attempt(0, 2, 10, "completed", load=3))) == [
        ("wait", 2, "a worker", False), ("load", 3, "completed", False),
        ("run", 5, "completed", False),
    ]  # fmt: skip


def test_what_a_node_waited_for_after_each_outcome() -> None:
    attempts = [
        attempt(0, 1, 2, "retried"), attempt(2, 5, 6, "reclaimed"), attempt(6, 7, 8, "requeued"),
        attempt(8, 9, 10, "completed"),
    ]  # fmt: skip
    found = spans(node(*attempts))
    waits = [(seconds, why) for kind, seconds, why, _ in found if kind == "wait"]
    assert waits == [(1, "a worker"), (3, "its back-off"), (1, "a worker"), (1, "a worker")]
    assert [lost for kind, _, _, lost in found if kind == "run"] == [True, True, False, False]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"status": "queued"}, "a cpu worker"),
        ({"status": "queued", "required_model": "sdxl"}, "a cpu worker with sdxl"),
        ({"status": "queued", "blocked_reason": "locked"}, "a lock key"),
        ({"status": "queued", "blocked_reason": "items"}, "its items"),
        ({"status": "queued", "blocked_reason": "of an app"}, "a cpu worker"),
        ({"status": "awaiting_input"}, "an answer"),
        ({"status": "awaiting_input", "child_run_id": "r2"}, "a child run"),
    ],
)
def test_what_a_node_waits_for_now(more: dict[str, Any], why: str) -> None:
    assert spans(node(**more)) == [("wait", 100, why, False)]
    assert timeline.waits_for(node(**more)) == why


def test_a_node_that_is_tried_again_waits_for_its_time_and_then_for_a_worker() -> None:
    tried = node(attempt(0, 1, 2, "retried"), status="queued")
    assert spans(tried | {"blocked_reason": "not_due"})[-1] == ("wait", 98, "its time", False)
    assert spans(tried)[-1] == ("wait", 98, "a cpu worker", False)


def test_a_node_that_never_ran() -> None:
    assert spans(node(status="skipped", finished_at=at(5))) == []
    assert spans(node(status="cancelled", finished_at=at(5))) == [("wait", 5, "a worker", False)]


def test_a_question_is_a_wait_after_the_attempt_that_asked() -> None:
    asked = node(attempt(0, 1, 2, "parked"), status="completed", finished_at=at(50))
    assert spans(asked)[-1] == ("wait", 48, "an answer", False)
    child = node(attempt(0, 1, 2, "parked"), finished_at=at(50), child_run_id="r2")
    assert spans(child)[-1] == ("wait", 48, "a child run", False)


def test_running_and_unknown_ends() -> None:
    assert spans(node(attempt(0, 1, None, "running"), status="running"))[-1][:2] == ("run", 99)
    lost = node(attempt(0, 1, None, "unknown"), attempt(None, 9, 10, "completed"))
    assert spans(lost)[1:] == [("run", 8, "unknown", True), ("run", 1, "completed", False)]


def test_the_lines_are_in_the_order_of_their_start() -> None:
    nodes = [
        node(attempt(0, 30, 40, "completed"), node_id="late"),
        node(attempt(0, 5, 10, "completed"), node_id="early"),
        node(status="skipped", finished_at=at(0), node_id="never"),
    ]
    step = {
        "step": "s", "counts": {"completed": 7, "running": 1}, "started_at": at(20),
        "finished_at": None,
    }  # fmt: skip
    now = T0 + timedelta(seconds=80)
    table = timeline.table(drawn(*nodes, now=now), [step], T0, now)
    assert [line.name for line in table["lines"]] == ["early", "s", "late", "never"]
    early, of_step = table["lines"][:2]
    assert (early.nodes, early.attempts, early.start_s, early.where) == (None, 1, 5, "box-1")
    assert early.took_s == (5, 0, 5)
    assert early.bars == [("wait", 0.0, 6.2), ("run", 6.2, 6.2)]
    assert of_step.status == "running"
    assert (of_step.nodes, of_step.took_s, of_step.bars[0][1]) == (8, (0, 0, 60), 25.0)
    assert table["marks"] == [
        "0 s",
        "20 s",
        "40 s",
        "1 min 00 s",
        "1 min 20 s",
    ]


def test_the_legend_names_the_colours_of_this_time_line_alone() -> None:
    def legend(*nodes: dict[str, Any]) -> list[tuple[str, str]]:
        now = T0 + timedelta(seconds=100)
        return timeline.table(drawn(*nodes, now=now), [], T0, now)["legend"]

    assert legend(node(attempt(0, 0, 1, "completed"))) == [("run", "run")]
    assert legend(
        node(attempt(0, 1, 2, "retried"), attempt(2, 3, 9, "completed", load=2)),
        node(status="awaiting_input"),
        node(status="awaiting_input", child_run_id="r2"),
        node(status="queued", blocked_reason="limited"),
        node(status="queued", queue="gpu", required_model="sdxl"),
    ) == [
        ("wait", "wait for a worker"), ("asks", "wait for a child run or an answer"),
        ("warning", "wait for its back-off"), ("ended", "wait for a limit"), ("load", "load"),
        ("run", "run"), ("lost", "failed or died"),
    ]  # fmt: skip


seconds = st.one_of(st.floats(0, 1e6), st.just(0.0))


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(seconds, seconds, seconds, seconds), max_size=6), st.booleans())
def test_bars_stay_inside_and_do_not_overlap(
    given_s: list[tuple[float, float, float, float]], goes_on: bool
) -> None:
    when, attempts = 0.0, list[dict[str, Any]]()
    for wait_s, load_s, run_s, pause_s in given_s:
        end = when + wait_s + run_s
        attempts.append(attempt(when, when + wait_s, end, "retried", load=load_s))
        when = end + pause_s
    one = node(*attempts, status="queued" if goes_on else "completed")
    now = T0 + timedelta(seconds=when + 1)
    (line,) = timeline.table(drawn(one, now=now), [], T0, now)["lines"]
    assert all(x >= 0 and x + width <= 100.01 for _, x, width in line.bars)
    found = timeline.spans(one, now)
    assert all(a.end <= b.begin for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("odd", [datetime.max, datetime.min])
def test_times_at_the_ends_of_the_calendar(odd: datetime) -> None:
    end = odd.replace(tzinfo=timezone.utc)
    one = attempt(0, 1, 2, "failed", load=1e300) | {"ended_at": end}
    for each in (node(one), node(one | {"claimed_at": end}), node(created_at=end, status="queued")):
        table = timeline.table(drawn(each), [], T0, T0)
        assert all(0 <= x <= 100 for line in table["lines"] for _, x, _ in line.bars)


# --- cost --------------------------------------------------------------------------------------


def test_what_failed_attempts_cost() -> None:
    good = node(attempt(0, 1, 2, "completed"), node_id="good")
    assert timeline.cost(drawn(good)) == ""
    bad = node(
        attempt(0, 0, 1200, "reclaimed", "claimed", "reclaimed"),
        attempt(1200, 1200, 2460, "retried"), attempt(2460, 2500, 2600, "completed"), queue="gpu",
    )  # fmt: skip
    assert timeline.cost(drawn(good, bad)) == "2 attempts, 41 min of GPU lost"
    trip = node(attempt(0, 0, 60, "requeued", "stall_trip"), attempt(60, 60, 61, "completed"))
    assert timeline.cost(drawn(trip)) == "1 attempt, 1 min 00 s lost"
    both = "3 attempts, 42 min (41 min of GPU) lost"
    assert timeline.cost(drawn(bad, trip)) == both
    handed_back = node(attempt(0, 0, 60, "requeued"), attempt(60, 60, 61, "completed"))
    assert timeline.cost(drawn(handed_back)) == ""


def test_an_attempt_that_runs_has_cost_nothing_yet() -> None:
    runs = node(attempt(0, 0, None, "running", "stall_trip"), status="running")
    assert timeline.cost(drawn(runs, now=T0 + timedelta(seconds=60))) == ""


def test_a_load_that_is_made_again_counts_once() -> None:
    again = node(
        attempt(0, 0, 50, "requeued", load=20),
        attempt(50, 50, 90, "completed", load=25),
        queue="gpu",
    )
    assert timeline.cost(drawn(again)) == "1 model load repeated, 25 s"


def test_the_state_of_a_group_is_its_worst() -> None:
    assert timeline.state_of({"completed": 3, "failed": 1, "running": 2}) == "failed"
    assert timeline.state_of({"completed": 3, "queued": 1}) == "queued"
    assert timeline.state_of({"completed": 3, "skipped": 1}) == "completed"
    assert timeline.state_of({"skipped": 1}) == "skipped"
    assert timeline.state_of({}) == "completed"
