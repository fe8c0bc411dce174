"""Draw a run as a live tree: steps with bars, and below them the nodes that matter now."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Generator
from typing import TextIO, cast

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from queue_workflows.cli import output, run_snapshot, run_views
from queue_workflows.cli.run_snapshot import SMALL, RunSnapshot, Step
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
_BAR_FROM = 70
_NAME_LEAST, _NAME_MOST = 10, 40
_RESERVED = 6


class Tree(run_views.View):
    """A picture that stays in place; enter it before the first `show`.

    The caller of `show` draws it, without a thread. Log lines appear above it.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(lambda text: console.print(Text(output.line(text, None))))
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
        # The picture replaces sys.stderr; earlier handlers have the original stream.
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

    def show(self, picture: RunSnapshot) -> None:
        """Draw the run."""
        self._last = self.render(picture)
        self._live.update(self._last, refresh=True)

    @contextlib.contextmanager
    def aside(self) -> Generator[None]:
        """Remove the picture while something else uses the terminal."""
        self._live.stop()
        try:
            yield
        finally:
            self._live = Live(
                self._last, console=self._console, auto_refresh=False, vertical_overflow="crop"
            )
            self._live.start()

    def render(self, picture: RunSnapshot) -> RenderableType:
        """Return the whole picture, no higher and no wider than the terminal."""
        width = self._console.size.width
        lines = _heading(picture, width)
        room = self._console.size.height - _RESERVED - len(picture.steps)
        shown: dict[str, list[Row]] = {}
        for node in picture.nodes:
            step, own = run_snapshot.own_name(node["node_id"])
            wanted = picture.total <= SMALL or node["status"] != "completed"
            if wanted and own and room > 0:
                shown.setdefault(step, []).append(node)
                room -= 1
        names = [(step.name, 0) for step in picture.steps]
        names += [(_own_name(node), 2) for nodes in shown.values() for node in nodes]
        longest = max((indent + cell_len(output.line(name)) for name, indent in names), default=0)
        # A node's state matters more than the end of its name, and both more than a bar.
        column = min(longest, _NAME_MOST, max(_NAME_LEAST, width // 3))
        bars = width >= _BAR_FROM
        for step in picture.steps:
            style = _STYLES.get(step.state, "dim")
            bar = self._bar(step) if bars else Text("")
            lines.append(self._line(step.state, "", step.name, column, bar))
            lines[-1].append(run_views.step_text(step), style=style)
            for node in sorted(shown.get(step.name, ()), key=lambda node: node["node_id"]):
                space = Text(" " * (_BAR + 2) if bars else "")
                lines.append(self._line(node["status"], "  ", _own_name(node), column, space))
                lines[-1].append(run_views.node_text(node), _STYLES.get(node["status"], "dim"))
        return Group(*lines)

    def _line(self, state: str, indent: str, name: str, column: int, bar: Text) -> Text:
        """Return sign, name in its column and bar, with a text cut at the terminal's width."""
        sign = self._signs.get(state, "." if self._signs is _ASCII else "·")
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append(f"  {indent}{sign} ", style=_STYLES.get(state, "dim"))
        room = column - len(indent)
        shown = output.line(name)
        if cell_len(shown) > room:
            shown = set_cell_size(shown, room - 1) + ("…" if self._signs is _SIGNS else "~")
        text.append(set_cell_size(shown, room) + "  ")
        return text.append_text(bar)

    def _bar(self, step: Step) -> Text:
        if step.total == 1:
            return Text(" " * (_BAR + 2))
        filled = _BAR * step.done // step.total
        full, empty = ("━", "─") if self._signs is _SIGNS else ("#", "-")
        bar = Text(full * filled, style="green")
        return bar.append(empty * (_BAR - filled) + "  ", style="dim")


def _own_name(node: Row) -> str:
    """Return a node's name within its step."""
    return run_snapshot.own_name(node["node_id"])[1]


def _heading(picture: RunSnapshot, width: int) -> list[Text]:
    """Return the heading on as many lines as it needs; too long values are cut."""
    lines: list[str] = []
    for part in run_views.heading_parts(picture):
        if lines and cell_len(f"{lines[-1]} {part}") <= width:
            lines[-1] += f" {part}"
        else:
            lines.append(part)
    return [Text(line, style="bold", no_wrap=True, overflow="ellipsis") for line in lines]
