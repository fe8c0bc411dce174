"""Draw strips: the items of a map by position, and the use of a machine while an attempt ran."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from queue_workflows.runtime import stored_json
from queue_workflows.service.dashboard import timeline
from queue_workflows.types import JsonDict

BUCKETS: Final = 1_000
STATES: Final = ("done", "waiting", "open", "failed")
"""The states of items; of a bucket the last of them that one of its items has is shown."""
_LINKED: Final = 25
"""The most buckets that share a link, so that a click opens items near the clicked place."""
POINTS: Final = 240
"""Points of a curve; of the samples that share one, the highest counts."""
WIDTH, HEIGHT = 960, 40
MB: Final = 1024
"""MB in a GB, the unit in which memory is shown."""
_CARDS: Final = 8


class Piece(NamedTuple):
    """Neighbouring buckets in one state: place and width in buckets, and the first position."""

    x: int
    width: int
    state: str
    first: int


def pieces(worst: Mapping[int, int], total: int) -> list[Piece]:
    """Return the strip of a map of `total` items.

    `worst`: by bucket the index in STATES of its worst item. A bucket without one is `waiting`.
    """
    buckets = min(BUCKETS, total)
    states = [STATES[worst.get(bucket, 1)] for bucket in range(buckets)]
    found: list[Piece] = []
    for state, group in itertools.groupby(range(buckets), key=states.__getitem__):
        same = [*group]
        for start in range(0, len(same), _LINKED):
            x, width = same[start], len(same[start : start + _LINKED])
            # The bucket of a position is `position * buckets // total`.
            found.append(Piece(x, width, state, -(-x * total // buckets)))
    return found


# --- samples -----------------------------------------------------------------------------------


def curves(samples: Sequence[JsonDict], begin: datetime, end: datetime) -> list[JsonDict]:
    """Return a curve for each measure that a machine's samples have between two times.

    Each has `name`, `unit`, `most` (the top of its scale), `peak`, `mean`, and as `path` the
    attribute `d` of SVG.
    """
    cards = sorted({number for row in samples for number in _cards(row)})[:_CARDS]
    found: dict[tuple[str, str], list[tuple[datetime, float]]] = {}
    most: dict[tuple[str, str], float] = {}
    for row in samples:
        if not begin <= row["sampled_at"] <= end:
            continue
        for name, unit, value, top in _measures(row, cards):
            points = found.setdefault((name, unit), [])
            scale = MB if unit == "GB" else 1
            number = stored_json.number(value)
            if number is not None and number >= 0:
                points.append((row["sampled_at"], number / scale))
                highest = max(number, stored_json.number(top) or 0.0) / scale
                most[name, unit] = max(most.get((name, unit), 0.0), highest)
    return [
        {
            "name": name, "unit": unit, "most": most[name, unit],
            "peak": max(value for _, value in points),
            "mean": sum(value for _, value in points) / len(points),
            "path": _path(points, most[name, unit] or 1.0, begin, end),
        }
        for (name, unit), points in found.items() if points
    ]  # fmt: skip


def _measures(row: JsonDict, cards: Sequence[int]) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield name, unit, value and top of the scale of each measure of a sample; memory is in MB."""
    for owner, key in (("", ""), (" of queue_workflows", "_ours")):
        yield f"CPU{owner}", "%", row.get(f"cpu{key}_percent"), 100.0
        yield f"RAM{owner}", "GB", row.get(f"ram{key}_used_mb"), row.get("ram_total_mb")
    own = _cards(row)
    for number in cards:
        name, card = f"GPU {number}" if len(cards) > 1 else "GPU", own.get(number, {})
        yield f"{name} use", "%", card.get("use_pct"), 100.0
        yield f"{name} memory", "GB", card.get("vram_used_mb"), card.get("vram_total_mb")


def _cards(row: JsonDict) -> dict[int, JsonDict]:
    listed = map(stored_json.mapping, stored_json.sequence(row.get("gpus")))
    return {card["id"]: card for card in listed if isinstance(card.get("id"), int)}


def _path(
    points: Sequence[tuple[datetime, float]], most: float, begin: datetime, end: datetime
) -> str:
    """Return a line through the points; a single one becomes a short line."""
    highest: dict[int, float] = {}
    for at, value in points:
        place = round(timeline.share(at, begin, end) * POINTS)
        highest[place] = max(highest.get(place, 0.0), value)
    if len(highest) == 1:
        highest |= {place + 1: value for place, value in highest.items()}
    placed = [(x * WIDTH / POINTS, HEIGHT * (1 - y / most)) for x, y in sorted(highest.items())]
    return "M" + "L".join(f"{x:g} {round(y, 1):g}" for x, y in placed)
