"""Draw strips: the items of a map by position, and what a machine did while an attempt ran."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from queue_workflows.runtime import stored_json
from queue_workflows.types import JsonDict

BUCKETS: Final = 1_000
STATES: Final = ("done", "waiting", "open", "failed")
"""The states of items; of a bucket the last of them that one of its items has is shown."""
_LINKED: Final = 25
"""Buckets that share a link at most, so that a click opens items near its place."""
POINTS: Final = 240
"""Points of a curve; of the samples that share one, the highest counts."""
WIDTH, HEIGHT = 960, 40
MB = 1024


class Piece(NamedTuple):
    """Neighbouring buckets in one state: place and width in buckets, first and last position."""

    x: int
    width: int
    state: str
    first: int
    last: int


def pieces(worst: Mapping[int, int], total: int) -> list[Piece]:
    """Return the strip of a map of `total` items.

    `worst`: by bucket the index in STATES of its worst item. A bucket without one is `waiting`.
    """
    buckets = min(BUCKETS, total)
    found: list[Piece] = []
    for bucket in range(buckets):
        state = STATES[worst.get(bucket, 1)]
        first = _first(bucket, buckets, total)
        last = _first(bucket + 1, buckets, total) - 1
        before = found[-1] if found else None
        if before is not None and before.state == state and before.width < _LINKED:
            found[-1] = before._replace(width=before.width + 1, last=last)
        else:
            found.append(Piece(bucket, 1, state, first, last))
    return found


def _first(bucket: int, buckets: int, total: int) -> int:
    """Return the first position of a bucket: the least one with `position * buckets / total` in it."""
    return -(-bucket * total // buckets)


# --- samples -----------------------------------------------------------------------------------


class Curve(NamedTuple):
    """A curve of one measure over the time of an attempt: the attributes `d` and what it peaks at."""

    name: str
    unit: str
    most: float
    """The top of the scale."""
    peak: float
    mean: float
    path: str


Read = Callable[[JsonDict], Any]
_MEASURES: Final[tuple[tuple[str, str, Read, Read], ...]] = (
    ("CPU", "%", lambda row: row.get("cpu_percent"), lambda _: 100.0),
    ("CPU of queue_workflows", "%", lambda row: row.get("cpu_ours_percent"), lambda _: 100.0),
    ("RAM", "GB", lambda row: _gb(row.get("ram_used_mb")), lambda row: _gb(row.get("ram_total_mb"))),
    (
        "RAM of queue_workflows", "GB",
        lambda row: _gb(row.get("ram_ours_used_mb")), lambda row: _gb(row.get("ram_total_mb")),
    ),
)  # fmt: skip


def curves(samples: Sequence[JsonDict], begin: datetime, end: datetime) -> list[Curve]:
    """Return the curves of a machine's samples between two times; measures without values have none."""
    made = [
        _curve(name, unit, samples, read, top, begin, end) for name, unit, read, top in _MEASURES
    ]
    cards = sorted({number for row in samples for number in _cards(row)})
    for number in cards[:8]:
        name = f"GPU {number}" if len(cards) > 1 else "GPU"
        use, memory = f"{name} use", f"{name} memory"
        made.append(
            _curve(use, "%", samples, _of(number, "use_pct"), lambda _: 100.0, begin, end)
        )
        read, top = _of(number, "vram_used_mb", _gb), _of(number, "vram_total_mb", _gb)
        made.append(_curve(memory, "GB", samples, read, top, begin, end))
    return [curve for curve in made if curve is not None]


def _cards(row: JsonDict) -> dict[int, JsonDict]:
    listed = map(stored_json.mapping, stored_json.sequence(row.get("gpus")))
    return {card["id"]: card for card in listed if isinstance(card.get("id"), int)}


def _of(number: int, key: str, made: Read = lambda value: value) -> Read:
    return lambda row: made(_cards(row).get(number, {}).get(key))


def _gb(value: Any) -> float | None:
    number = stored_json.number(value)
    return None if number is None else number / MB


def _curve(
    name: str, unit: str, samples: Sequence[JsonDict], read: Read, top: Read,
    begin: datetime, end: datetime,
) -> Curve | None:  # fmt: skip
    width_s = max((end - begin).total_seconds(), 0.001)
    highest: dict[int, float] = {}
    values: list[float] = []
    most = 0.0
    for row in samples:
        value = stored_json.number(read(row))
        at = (row["sampled_at"] - begin).total_seconds() / width_s
        if value is None or value < 0 or not 0 <= at <= 1:
            continue
        values.append(float(value))
        most = max(most, float(value), float(stored_json.number(top(row)) or 0.0))
        place = round(at * POINTS)
        highest[place] = max(highest.get(place, 0.0), float(value))
    if not values:
        return None
    path = _path(highest.items(), most or 1.0)
    return Curve(name, unit, most, max(values), sum(values) / len(values), path)


def _path(points: Iterable[tuple[int, float]], most: float) -> str:
    """Return a line through the points; a single one becomes a short line."""
    scale = WIDTH / POINTS
    placed = [(x * scale, HEIGHT * (1 - min(value / most, 1.0))) for x, value in sorted(points)]
    if len(placed) == 1:
        placed.append((placed[0][0] + scale, placed[0][1]))
    return "M" + "L".join(f"{x:g} {round(y, 1):g}" for x, y in placed)


def place(at: datetime, begin: datetime, end: datetime) -> float:
    """Return where a time is on the curves, as the moment of a death."""
    width_s = max((end - begin).total_seconds(), 0.001)
    return round(WIDTH * min(1.0, max(0.0, (at - begin).total_seconds() / width_s)), 1)
