"""The strips of a map's items and of a machine's samples."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from queue_workflows.service.dashboard import strip, timeline
from tests.support.examples import examples

T0 = datetime(2026, 1, 31, 9, 0, tzinfo=timezone.utc)


def bucket(position: int, total: int) -> int:
    """The bucket of a position, as the statement `run_page.buckets` has it."""
    return position * min(strip.BUCKETS, total) // total


@settings(max_examples=examples(200))
@given(st.integers(1, 5_000), st.data())
def test_each_position_is_in_the_piece_of_its_bucket(total: int, data: st.DataObject) -> None:
    worst = data.draw(
        st.dictionaries(
            st.integers(0, min(total, strip.BUCKETS) - 1), st.integers(0, 3), max_size=30
        )
    )
    found = strip.pieces(worst, total)
    ends = [*(piece.first for piece in found[1:]), total]
    assert [
        each for piece, end in zip(found, ends, strict=True) for each in range(piece.first, end)
    ] == [*range(total)]
    assert sum(piece.width for piece in found) == min(total, strip.BUCKETS)
    for piece, end in zip(found, ends, strict=True):
        for position in (piece.first, end - 1):
            place = bucket(position, total)
            assert piece.x <= place < piece.x + piece.width
            assert strip.STATES[worst.get(place, 1)] == piece.state


def test_a_large_map_has_a_thousand_places_and_the_worst_state_wins() -> None:
    found = strip.pieces(dict.fromkeys(range(strip.BUCKETS), 0) | {500: 3}, 100_000)
    (failed,) = [piece for piece in found if piece.state == "failed"]
    assert (failed.x, failed.width, failed.first) == (500, 1, 50_000)
    assert found[found.index(failed) + 1].first == 50_100
    assert {piece.state for piece in found} == {"done", "failed"}
    assert len(found) < 50
    assert strip.pieces({}, 0) == []


def sample(at_s: float, **more: Any) -> dict[str, Any]:
    return {"sampled_at": T0 + timedelta(seconds=at_s), "every_s": 2, **more}


def test_the_curves_of_a_machine() -> None:
    card = {"id": 0, "use_pct": 90.0, "vram_used_mb": 12 * 1024, "vram_total_mb": 24 * 1024}
    samples = [
        sample(2, cpu_percent=50, ram_used_mb=8 * 1024, ram_total_mb=64 * 1024, gpus=[card]),
        sample(8, cpu_percent=70, ram_used_mb=16 * 1024, ram_total_mb=64 * 1024,
               gpus=[card | {"use_pct": 10.0}]),
        sample(99, cpu_percent=100, gpus=[]),
    ]  # fmt: skip
    curves = strip.curves(samples, T0, T0 + timedelta(seconds=10))
    found = {curve["name"]: curve for curve in curves}
    assert sorted(found) == ["CPU", "GPU memory", "GPU use", "RAM"]
    cpu, ram = found["CPU"], found["RAM"]
    assert (cpu["peak"], cpu["mean"], cpu["most"], cpu["unit"]) == (70, 60, 100, "%")
    assert (ram["peak"], ram["most"], ram["unit"]) == (16, 64, "GB")
    assert found["GPU use"]["path"] == "M192 4L768 36"
    assert found["GPU memory"]["path"] == "M192 20L768 20"


def test_several_cards_and_samples_of_any_shape() -> None:
    cards = [{"id": 0, "use_pct": 1}, {"id": 1, "use_pct": 2}, {"id": "x"}, 7]
    samples = [sample(1, cpu_percent="much", gpus=cards), sample(2, cpu_percent=-1, gpus=None)]
    found = strip.curves(samples, T0, T0 + timedelta(seconds=4))
    assert [curve["name"] for curve in found] == ["GPU 0 use", "GPU 1 use"]
    assert found[0]["path"] == "M240 39.6L244 39.6"
    assert strip.curves([], T0, T0) == []


def test_a_day_of_samples_is_some_hundred_points() -> None:
    many = [sample(2 * n, cpu_percent=n % 100) for n in range(43_200)]
    (curve,) = strip.curves(many, T0, T0 + timedelta(days=1))
    assert curve["path"].count("L") <= strip.POINTS
    assert curve["peak"] == 99


def test_the_place_of_a_time() -> None:
    end = T0 + timedelta(seconds=10)
    assert timeline.share(end, T0, end) == 1
    assert timeline.share(T0 + timedelta(seconds=4), T0, end) == 0.4
    assert timeline.share(T0 - timedelta(seconds=1), T0, end) == 0
    assert timeline.share(end, T0, T0) == 1
