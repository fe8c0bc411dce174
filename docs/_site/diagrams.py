"""Mermaid blocks as SVG, drawn when the site is built: no script, nothing fetched by the reader.

Two kinds, as far as the pages use them: `sequenceDiagram` and `stateDiagram-v2`. Anything else is a
ValueError, so that the build says what it cannot draw.
"""

from __future__ import annotations

import math
import re
from html import escape
from typing import NamedTuple

BLOCK = re.compile(r"^```mermaid\n(.*?)^```$", re.M | re.S)
_EDGE = re.compile(r"(\[\*\]|\w+) --> (\[\*\]|\w+)(?:: (.+))?")
_PARTICIPANT = re.compile(r"participant (\w+)(?: as (.+))?")
_MESSAGE = re.compile(r"(\w+)(-->>|->>)(\w+): (.+)")
_NOTE = re.compile(r"Note over (\w+)(?:,\s?(\w+))?: (.+)")
PLACES = {
    "queued": (0, 1), "running": (1, 1), "awaiting_input": (2, 2), "completed": (3, 1),
    "failed": (2, 0), "cancelled": (1, 3), "skipped": (0, 3),
}  # fmt: skip
"""Column and row of each state: a layout by rule would be longer than this table."""
COLUMN, ROW, WIDE, HIGH = 190, 95, 130, 38
LANE, STEP = 175, 44


class Edge(NamedTuple):
    start: str
    end: str
    label: str


def svg(text: str) -> str:
    """The picture as a `<figure>`. Raises ValueError for a line that it cannot draw."""
    kind, *lines = [line.strip() for line in text.strip().splitlines()]
    drawn = {"stateDiagram-v2": _states, "sequenceDiagram": _sequence}.get(kind)
    if drawn is None:
        raise ValueError(f"a diagram of kind {kind!r} cannot be drawn")
    # The theme makes a figure as wide as its content, which is 300 px for an SVG without a width.
    return f'<figure class="diagram" style="width:100%">{drawn(lines)}</figure>'


def _frame(width: float, height: float, parts: list[str], label: str) -> str:
    arrow = (
        '<defs><marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7"'
        ' markerHeight="7" orient="auto-start-reverse"><path d="M0 0L10 5L0 10z"'
        ' fill="currentColor"/></marker></defs>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img"'
        f' aria-label="{escape(label)}" font-family="inherit" font-size="13" fill="none"'
        f' stroke="currentColor" style="width:100%;height:auto">{arrow}'
        f"{''.join(parts)}</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" dominant-baseline="middle" stroke="none"'
        f' fill="currentColor">{escape(text)}</text>'
    )


def _box(x: float, y: float, wide: float, text: str) -> str:
    return (
        f'<rect x="{x - wide / 2:g}" y="{y - HIGH / 2:g}" width="{wide:g}" height="{HIGH}" rx="7"/>'
        + _text(x, y, text)
    )


def _states(lines: list[str]) -> str:
    edges = list[Edge]()
    for line in lines:
        found = _EDGE.fullmatch(line)
        if found is None:
            raise ValueError(f"cannot draw {line!r}")
        edges.append(Edge(found[1], found[2], found[3] or ""))
    names = {name for edge in edges for name in edge[:2]} - {"[*]"}
    if unknown := names - PLACES.keys():
        raise ValueError(f"no place for {', '.join(sorted(unknown))}")
    spots = {name: _spot(name) for name in names}
    parts = [_box(*spots[name], WIDE, name) for name in sorted(names)]
    legend = list[str]()
    for edge in edges:
        if "[*]" in edge[:2]:
            parts += _end(edge, spots)
            if edge.label:
                legend.append(f"<li><b>new</b> → {escape(edge.end)}: {escape(edge.label)}</li>")
            continue
        number = len(legend) + 1
        parts += _arrow(spots[edge.start], spots[edge.end], number)
        legend.append(f"<li>{edge.start} → {edge.end}: {escape(edge.label)}</li>")
    width = max(x for x, _ in spots.values()) + WIDE / 2 + 30
    height = max(y for _, y in spots.values()) + HIGH / 2 + 10
    return _frame(width, height, parts, "states") + f"<ol>{''.join(legend)}</ol>"


def _spot(name: str) -> tuple[float, float]:
    column, row = PLACES[name]
    return 100 + column * COLUMN, 40 + row * ROW


def _end(edge: Edge, spots: dict[str, tuple[float, float]]) -> list[str]:
    """The black dot from which a state begins, or the ring that says it is an end."""
    if edge.start == "[*]":
        x, y = spots[edge.end]
        start = x - WIDE / 2
        dot = f'<circle cx="{start - 26:g}" cy="{y:g}" r="5" fill="currentColor"/>'
        line = f'<path d="M{start - 20:g} {y:g}H{start - 2:g}" marker-end="url(#arrow)"/>'
        return [dot, line]
    x, y = spots[edge.start]
    wide, high = WIDE + 8, HIGH + 8
    return [
        f'<rect x="{x - wide / 2:g}" y="{y - high / 2:g}" width="{wide}" height="{high}" rx="10"/>'
    ]


def _arrow(start: tuple[float, float], end: tuple[float, float], number: int) -> list[str]:
    """A curve with its number on it; the two ways between a pair bend apart."""
    (x1, y1), (x2, y2) = _rim(start, end), _rim(end, start)
    long = math.hypot(x2 - x1, y2 - y1) or 1.0
    bend = 16 if abs(y1 - y2) < 1 or abs(x1 - x2) < 1 else 10
    mx = (x1 + x2) / 2 + bend * (y2 - y1) / long
    my = (y1 + y2) / 2 - bend * (x2 - x1) / long
    cx, cy = 2 * mx - (x1 + x2) / 2, 2 * my - (y1 + y2) / 2
    return [
        f'<path d="M{x1:.0f} {y1:.0f}Q{cx:.0f} {cy:.0f} {x2:.0f} {y2:.0f}"'
        ' marker-end="url(#arrow)"/>',
        f'<circle cx="{mx:.0f}" cy="{my:.0f}" r="10" fill="var(--md-default-bg-color, white)"/>',
        _text(mx, my + 1, str(number)),
    ]


def _rim(inner: tuple[float, float], outer: tuple[float, float]) -> tuple[float, float]:
    """Where the line between two boxes leaves the first."""
    dx, dy = outer[0] - inner[0], outer[1] - inner[1]
    scale = min(
        (WIDE / 2 + 5) / abs(dx) if dx else math.inf, (HIGH / 2 + 5) / abs(dy) if dy else math.inf
    )
    return inner[0] + dx * scale, inner[1] + dy * scale


def _sequence(lines: list[str]) -> str:
    lanes = dict[str, float]()
    parts = list[str]()
    y = 20.0 + HIGH
    for line in lines:
        if found := _PARTICIPANT.fullmatch(line):
            lanes[found[1]] = x = 95 + len(lanes) * LANE
            parts.append(_box(x, HIGH / 2 + 2, LANE - 30, found[2] or found[1]))
            continue
        y += STEP
        if found := _MESSAGE.fullmatch(line):
            parts += _message(lanes[found[1]], lanes[found[3]], y, found[4], found[2] == "-->>")
        elif found := _NOTE.fullmatch(line):
            first, last = lanes[found[1]], lanes[found[2] or found[1]]
            wide = last - first + LANE - 20
            parts.append(_box((first + last) / 2, y - 8, wide, found[3]))
        else:
            raise ValueError(f"cannot draw {line!r}")
    down = [
        f'<path d="M{x:g} {HIGH + 2}V{y + 20:g}" stroke-opacity="0.3"/>' for x in lanes.values()
    ]
    width = 95 + (len(lanes) - 1) * LANE + 95
    return _frame(width, y + 24, down + parts, "what follows what")


def _message(start: float, end: float, y: float, text: str, dashed: bool) -> list[str]:
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    if start == end:
        path = f"M{start + 3:g} {y - 10:g}h26v16h-24"
        return [
            f'<path d="{path}"{dash} marker-end="url(#arrow)"/>',
            _text(start + 36, y, text, "start"),
        ]
    gap = 3 if end > start else -3
    line = f'<path d="M{start + gap:g} {y:g}H{end - gap:g}"{dash} marker-end="url(#arrow)"/>'
    return [line, _text((start + end) / 2, y - 11, text)]
