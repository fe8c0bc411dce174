"""The live tree of a run: steps with bars, and under them the nodes that matter now."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Generator
from typing import TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from queue_workflows.cli import output, views
from queue_workflows.cli.picture import SMALL, Picture, Step
from queue_workflows.types import Row

_STYLES = {
    "completed": "green",
    "skipped": "dim",
    "running": "cyan",
    "awaiting_input": "yellow",
    "failed": "bold red",
    "cancelled": "magenta",
}
_SIGNS = {
    "completed": "✔",
    "skipped": "↷",
    "running": "▶",
    "awaiting_input": "?",
    "failed": "✘",
    "cancelled": "∅",
}
_ASCII = {
    "completed": "+",
    "skipped": "-",
    "running": ">",
    "awaiting_input": "?",
    "failed": "x",
    "cancelled": "/",
}
_BAR = 20
_RESERVED = 6


class Tree:
    """A picture that stays in place; enter it before the first `show`.

    It is drawn by whoever calls `show`: no thread of its own. What is logged appears above it.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        unicode = (console.encoding or "").lower().startswith("utf")
        self._signs = _SIGNS if unicode else _ASCII
        self._last: RenderableType = ""
        self._moved: list[logging.StreamHandler[TextIO]] = []
        self._stderr = sys.stderr

    def __enter__(self) -> Tree:
        self._stderr = sys.stderr
        self._live.start()
        # The picture replaces sys.stderr; handlers made before it hold the stream underneath.
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler):
                ours = cast("logging.StreamHandler[TextIO]", handler)
                if ours.stream is self._stderr:
                    ours.setStream(sys.stderr)
                    self._moved.append(ours)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        for handler in self._moved:
            handler.setStream(self._stderr)

    def show(self, picture: Picture) -> None:
        """Draw it."""
        self._last = self.render(picture)
        self._live.update(self._last, refresh=True)

    def say(self, text: str) -> None:
        """Print a line above the picture."""
        self._console.print(Text(text))

    @contextlib.contextmanager
    def aside(self) -> Generator[None]:
        """Take the picture away while something else has the terminal."""
        self._live.stop()
        try:
            yield
        finally:
            self._live = Live(
                self._last, console=self._console, auto_refresh=False, vertical_overflow="crop"
            )
            self._live.start()

    def render(self, picture: Picture) -> RenderableType:
        """The whole picture, no higher than the terminal."""
        grid = Table.grid(padding=(0, 2))
        for _ in range(3):
            grid.add_column(no_wrap=True)
        room = self._console.size.height - _RESERVED - len(picture.steps)
        shown: dict[str, list[Row]] = {}
        for node in picture.nodes:
            step, slash, _ = node["node_id"].partition("/")
            wanted = picture.total <= SMALL or node["status"] != "completed"
            if wanted and slash and room > 0:
                shown.setdefault(step, []).append(node)
                room -= 1
        for step in picture.steps:
            grid.add_row(
                self._sign(step.state, "  "), Text(output.line(step.name, 40)), *self._step(step)
            )
            order = sorted(shown.get(step.name, ()), key=lambda node: node["node_id"])
            for node in order:
                grid.add_row(*self._node(node))
        title = Text(views.heading(picture), style="bold")
        return Group(title, grid)

    def _sign(self, state: str, indent: str) -> Text:
        sign = self._signs.get(state, "." if self._signs is _ASCII else "·")
        return Text(indent + sign, style=_STYLES.get(state, "dim"))

    def _step(self, step: Step) -> tuple[Text, Text]:
        style = _STYLES.get(step.state, "dim")
        if step.total == 1:
            return Text(""), _cut(views.step_text(step), style)
        filled = _BAR * step.done // step.total
        full, empty = ("━", "─") if self._signs is _SIGNS else ("#", "-")
        bar = Text(full * filled, style="green") + Text(empty * (_BAR - filled), style="dim")
        return bar, _cut(views.step_text(step), style)

    def _node(self, node: Row) -> tuple[Text, Text, Text, Text]:
        style = _STYLES.get(node["status"], "dim")
        name = node["node_id"].partition("/")[2]
        sign = self._sign(node["status"], "    ")
        return (
            sign,
            Text("  " + output.line(name, 38)),
            Text(""),
            _cut(views.node_text(node), style),
        )


def _cut(text: str, style: str) -> Text:
    """Text that ends in an ellipsis where the terminal ends."""
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")
