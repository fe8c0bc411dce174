"""Draw a run: a row per node, a bar per attempt, and lines for the dependencies.

It takes what `queue_workflows.history.get_run` returns, and works for a run of any workflow.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

LEFT, SPAN, TOP, ROW, BAR = 440, 480, 70, 28, 14
FILLS = {"completed": "#5bb974", "running": "#6ea8e0", "retried": "#e58a8a", "failed": "#d04a4a"}
OTHER, QUESTION = "#b8b8b8", "#f2cf63"
"""An attempt that ended otherwise, such as by a crash; the time until a person answered."""
SVG = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" \
font-family="sans-serif" font-size="12">
<rect width="100%" height="100%" fill="white"/>
<text x="20" y="28" font-size="16">{title}</text>
{parts}
</svg>
"""


class Bar(NamedTuple):
    """Something that a node did, from one time to another."""

    begin: datetime
    end: datetime
    fill: str


def draw(run: Mapping[str, Any]) -> str:
    """Return the run as SVG; what has no end yet is drawn up to the time of reading."""
    bars = {node["node_id"]: _bars(node, run["read_at"]) for node in run["nodes"]}
    every = [bar for row in bars.values() for bar in row]
    start = min((bar.begin for bar in every), default=run["read_at"])
    end = max((bar.end for bar in every), default=start)
    total_s = (end - start).total_seconds()
    scale = SPAN / max(total_s, 0.001)
    tops = {name: TOP + ROW * row for row, name in enumerate(bars)}
    shapes = _seconds(total_s, scale, TOP + ROW * len(bars))
    for node in run["nodes"]:
        name: str = node["node_id"]
        shapes += [
            _line(bars[before], bars[name], tops[before], tops[name], start, scale)
            for before in node["depends_on"]
            if bars.get(before) and bars[name]
        ]
    for node in run["nodes"]:
        name = node["node_id"]
        shapes += [_rect(bar, tops[name], start, scale) for bar in bars[name]]
        shapes += [_text(20, tops[name], name), _text(200, tops[name], _state(node, bars[name]))]
    title = f"{run['workflow_name']}: {len(bars)} nodes, {total_s:.1f} s"
    return SVG.format(
        width=LEFT + SPAN + 40,
        height=TOP + ROW * len(bars) + 20,
        title=html.escape(title),
        parts="\n".join(shapes),
    )


def _bars(node: Mapping[str, Any], now: datetime) -> list[Bar]:
    bars = [
        Bar(attempt["claimed_at"], attempt["ended_at"] or now, FILLS.get(attempt["outcome"], OTHER))
        for attempt in node["attempts"]
    ]
    if bars and node["input_spec"]:
        bars.append(Bar(bars[-1].end, node["finished_at"] or now, QUESTION))
    return bars


def _state(node: Mapping[str, Any], bars: list[Bar]) -> str:
    where = "a person" if bars and node["input_spec"] else node["queue"]
    parts = [where, node["status"].replace("_", " ")]
    if bars:
        parts.append(f"{(bars[-1].end - bars[0].begin).total_seconds():.2f} s")
    if len(node["attempts"]) > 1:
        parts.append(f"attempt {len(node['attempts'])}")
    return ", ".join(parts)


def _seconds(total_s: float, scale: float, bottom: int) -> list[str]:
    """Return the grid: about ten vertical lines with their seconds."""
    step = max(1, round(total_s / 10))
    return [
        f'<path d="M{LEFT + at * scale:.1f} {TOP - 6}V{bottom}" stroke="#e4e4e4"/>'
        f'<text x="{LEFT + at * scale:.1f}" y="{TOP - 12}" fill="#888">{at} s</text>'
        for at in range(0, int(total_s) + 1, step)
    ]


def _x(moment: datetime, start: datetime, scale: float) -> float:
    return round(LEFT + (moment - start).total_seconds() * scale, 1)


def _line(
    before: list[Bar], after: list[Bar], y1: int, y2: int, start: datetime, scale: float
) -> str:
    x1, x2 = _x(before[-1].end, start, scale), _x(after[0].begin, start, scale)
    path = f"M{x1} {y1 + BAR // 2}V{y2 + BAR // 2}H{x2}"
    return f'<path class="waits" d="{path}" fill="none" stroke="#999"/>'


def _rect(bar: Bar, y: int, start: datetime, scale: float) -> str:
    x = _x(bar.begin, start, scale)
    width = max(2, round(_x(bar.end, start, scale) - x, 1))
    return f'<rect x="{x}" y="{y}" width="{width}" height="{BAR}" rx="2" fill="{bar.fill}"/>'


def _text(x: int, y: int, text: str) -> str:
    return f'<text x="{x}" y="{y + 12}">{html.escape(text)}</text>'
