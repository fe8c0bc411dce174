"""Charts as inline SVG: places in percent and letters in pixels, so that they fit any screen."""

from __future__ import annotations

import math
from html import escape

from queue_workflows.demo.report import blocks

COLUMNS_HEIGHT = 180
MAP_HEIGHT = 460
LETTER_WIDTH = 6.6
LETTER_HEIGHT = 13
WIDE, NARROW = 700, 340
"""Widths in pixels for which the labels of a map are laid out."""


def bars(block: blocks.Bars) -> str:
    """A list of labelled bars."""
    legend = "".join(
        f'<span><i class="c{number}"></i>{escape(name)}</span>'
        for number, name in enumerate(block.legend, 1)
    )
    items = "".join(_bar(bar, block.scale) for bar in block.bars)
    return (
        f'<figcaption>{escape(block.title)}</figcaption><p class="legend">{legend}</p>'
        f'<ol class="bars">{items}</ol>'
    )


def _bar(bar: blocks.Bar, scale: float) -> str:
    rects: list[str] = []
    at = 0.0
    for number, part in enumerate(bar.parts, 1):
        width = 100 * part / scale
        rects.append(
            f'<rect class="c{number}" x="{at:.2f}%" width="{width:.2f}%" height="100%"></rect>'
        )
        at += width
    return (
        f"<li><span>{escape(bar.label)}</span><b>{escape(bar.value)}</b>"
        f'<svg width="100%" height="8" aria-hidden="true">{"".join(rects)}</svg></li>'
    )


def columns(block: blocks.Columns) -> str:
    """A histogram with its counts above the columns and its classes below."""
    highest = max(block.counts, default=0) or 1
    step = 100 / max(1, len(block.counts))
    room = COLUMNS_HEIGHT - 40
    parts: list[str] = []
    for number, (label, count) in enumerate(zip(block.labels, block.counts, strict=True)):
        height = room * count / highest
        top, middle = 18 + room - height, (number + 0.5) * step
        parts.append(
            f'<rect class="c1" x="{number * step + step * 0.12:.2f}%" width="{step * 0.76:.2f}%"'
            f' y="{top:.1f}" height="{height:.1f}"></rect>'
            f'<text x="{middle:.2f}%" y="{top - 5:.1f}">{count:,}</text>'
            f'<text class="axis" x="{middle:.2f}%" y="{COLUMNS_HEIGHT - 6}">{escape(label)}</text>'
        )
    return (
        f"<figcaption>{escape(block.title)}</figcaption>"
        f'<svg class="columns" width="100%" height="{COLUMNS_HEIGHT}" role="img"'
        f' aria-label="{escape(block.title)}">{"".join(parts)}</svg>'
        f'<p class="axis">{escape(block.axis)}</p>'
    )


def matrix(block: blocks.Matrix) -> str:
    """A table whose cells are the darker the higher the count; columns carry the rows' numbers."""
    highest = max((count for row in block.counts for count in row), default=0) or 1
    head = "".join(
        f'<th scope="col" title="{escape(name)}">{number}</th>'
        for number, name in enumerate(block.names, 1)
    )
    rows = "".join(
        f'<tr><th scope="row"><span>{number}</span> {escape(name)}</th>'
        f"{''.join(_cell(count, highest) for count in counts)}</tr>"
        for number, (name, counts) in enumerate(zip(block.names, block.counts, strict=True), 1)
    )
    return (
        f"<figcaption>{escape(block.title)}</figcaption>"
        f'<div class="scroll"><table class="matrix"><thead><tr><td></td>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _cell(count: int, highest: int) -> str:
    if not count:
        return "<td></td>"
    return f'<td style="--heat:{0.12 + 0.6 * math.sqrt(count / highest):.2f}">{count}</td>'


def plot(block: blocks.Map) -> str:
    """Discs on a plane, with labels where they do not cover each other."""
    largest = max((point.size for point in block.points), default=0) or 1
    radii = [3 + 15 * math.sqrt(point.size / largest) for point in block.points]
    wide, narrow = (_free_labels(block.points, radii, width) for width in (WIDE, NARROW))
    discs: list[str] = []
    labels: list[str] = []
    for number, (point, radius) in enumerate(zip(block.points, radii, strict=True)):
        x, y = _at(point)
        discs.append(
            f'<circle class="c1" cx="{x:.1%}" cy="{y:.1%}" r="{radius:.1f}">'
            f"<title>{escape(point.label)}: {point.size:,.0f} lines of code</title></circle>"
        )
        if number in wide:
            visible = "" if number in narrow else ' class="roomy"'
            anchor, shift = ("end", -radius - 3) if x > 0.7 else ("start", radius + 3)
            labels.append(
                f'<text{visible} x="{x:.1%}" y="{y:.1%}" dx="{shift:.1f}" dy="4"'
                f' text-anchor="{anchor}">{escape(point.label)}</text>'
            )
    return (
        f"<figcaption>{escape(block.title)}</figcaption>"
        f'<svg class="map" width="100%" height="{MAP_HEIGHT}" role="img"'
        f' aria-label="{escape(block.title)}">{"".join(discs)}{"".join(labels)}</svg>'
    )


def _at(point: blocks.Point) -> tuple[float, float]:
    """Shares of width and height, with room for the discs at the edges."""
    return 0.05 + 0.9 * point.x, 0.06 + 0.88 * point.y


def _free_labels(points: list[blocks.Point], radii: list[float], width: int) -> set[int]:
    """The numbers of the points whose labels fit beside those before them on a map so wide."""
    taken: list[tuple[float, float, float]] = []
    free: set[int] = set()
    for number, (point, radius) in enumerate(zip(points, radii, strict=True)):
        x, y = _at(point)
        length = LETTER_WIDTH * len(point.label)
        left = x * width - radius - 3 - length if x > 0.7 else x * width + radius + 3
        top = y * MAP_HEIGHT
        clear = all(
            left > end or left + length < start or abs(top - other) > LETTER_HEIGHT
            for start, end, other in taken
        )
        if clear and left >= 0 and left + length <= width:
            taken.append((left, left + length, top))
            free.add(number)
    return free
