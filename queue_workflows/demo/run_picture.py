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
    """Return the run as SVG; an attempt without an end is drawn up to the time of reading."""
    nodes, now = run["nodes"], run["read_at"]
    bars = {node["node_id"]: _bars(node, now) for node in nodes}
    tops = {name: TOP + ROW * row for row, name in enumerate(bars)}
    bottom = TOP + ROW * len(bars)
    start = min((bar.begin for row in bars.values() for bar in row), default=now)
    end = max((bar.end for row in bars.values() for bar in row), default=start)
    total_s = (end - start).total_seconds()

    def x(at_s: float) -> float:
        return round(LEFT + at_s * SPAN / max(total_s, 0.001), 1)

    def place(moment: datetime) -> float:
        return x((moment - start).total_seconds())

    shapes = [
        f'<path d="M{x(at)} {TOP - 6}V{bottom}" stroke="#e4e4e4"/>'
        f'<text x="{x(at)}" y="{TOP - 12}" fill="#888">{at} s</text>'
        for at in range(0, int(total_s) + 1, max(1, round(total_s / 10)))
    ]
    for node in nodes:
        name, middle = node["node_id"], BAR // 2
        for before in node["depends_on"]:
            if bars.get(before) and bars[name]:
                path = f"M{place(bars[before][-1].end)} {tops[before] + middle}"
                path += f"V{tops[name] + middle}H{place(bars[name][0].begin)}"
                shapes.append(f'<path class="waits" d="{path}" fill="none" stroke="#999"/>')
    for node in nodes:
        name, top = node["node_id"], tops[node["node_id"]]
        for bar in bars[name]:
            width = max(2, round(place(bar.end) - place(bar.begin), 1))
            shapes.append(
                f'<rect x="{place(bar.begin)}" y="{top}" width="{width}" height="{BAR}" rx="2"'
                f' fill="{bar.fill}"/>'
            )
        for left, text in ((20, name), (200, _state(node, bars[name]))):
            shapes.append(f'<text x="{left}" y="{top + 12}">{html.escape(text)}</text>')
    return SVG.format(
        width=LEFT + SPAN + 40,
        height=bottom + 20,
        title=html.escape(f"{run['workflow_name']}: {len(bars)} nodes, {total_s:.1f} s"),
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
