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

from queue_workflows.cli import output, run_views, texts
from queue_workflows.types import Row

_LOOKS = {
    "completed": ("green", "✔", "+"),
    "skipped": ("dim", "↷", "-"),
    "running": ("cyan", "▶", ">"),
    "awaiting_input": ("yellow", "?", "?"),
    "failed": ("bold red", "✘", "x"),
    "cancelled": ("magenta", "∅", "/"),
}
"""The style of each state, its sign, and the sign of a terminal without Unicode."""
_OTHER = ("dim", "·", ".")
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
        self._last: RenderableType = ""
        self._live = self._new_live()
        self._unicode = (console.encoding or "").lower().startswith("utf")
        self._moved: list[logging.StreamHandler[TextIO]] = []
        self._stderr = sys.stderr

    def _new_live(self) -> Live:
        return Live(self._last, console=self._console, auto_refresh=False, vertical_overflow="crop")

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

    def show(self, picture: run_views.RunSnapshot) -> None:
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
            self._live = self._new_live()
            self._live.start()

    def render(self, picture: run_views.RunSnapshot) -> RenderableType:
        """Return the whole picture, no higher and no wider than the terminal."""
        width = self._console.size.width
        lines = _heading(picture, width)
        room = self._console.size.height - _RESERVED - len(picture.steps)
        shown: dict[str, list[tuple[str, Row]]] = {}
        for node in picture.nodes:
            step, own = run_views.own_name(node["node_id"])
            wanted = picture.total <= texts.SMALL or node["status"] != "completed"
            if wanted and own and room > 0:
                shown.setdefault(step, []).append((own, node))
                room -= 1
        lengths = [cell_len(output.line(step.name)) for step in picture.steps]
        lengths += [2 + cell_len(output.line(own)) for nodes in shown.values() for own, _ in nodes]
        # A node's state matters more than the end of its name, and both more than a bar.
        column = min(max(lengths, default=0), _NAME_MOST, max(_NAME_LEAST, width // 3))
        space = Text(" " * (_BAR + 2) if width >= _BAR_FROM else "")
        for step in picture.steps:
            bar = space
            if width >= _BAR_FROM and step.total > 1:
                filled = _BAR * step.done // step.total
                full, empty = ("━", "─") if self._unicode else ("#", "-")
                bar = Text(full * filled, style="green")
                bar.append(empty * (_BAR - filled) + "  ", style="dim")
            lines.append(self._line(step.state, "", step.name, column, bar, step.text))
            for own, node in sorted(shown.get(step.name, ()), key=lambda one: one[1]["node_id"]):
                text = texts.node_text(node)
                lines.append(self._line(node["status"], "  ", own, column, space, text))
        return Group(*lines)

    def _line(self, state: str, indent: str, name: str, column: int, bar: Text, words: str) -> Text:
        """Return sign, name in its column, bar and words, cut at the terminal's width."""
        style, *signs = _LOOKS.get(state, _OTHER)
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append(f"  {indent}{signs[not self._unicode]} ", style=style)
        room = column - len(indent)
        shown = output.line(name)
        if cell_len(shown) > room:
            shown = set_cell_size(shown, room - 1) + ("…" if self._unicode else "~")
        text.append(set_cell_size(shown, room) + "  ")
        return text.append_text(bar).append(words, style=style)


def _heading(picture: run_views.RunSnapshot, width: int) -> list[Text]:
    """Return the heading on as many lines as it needs; too long values are cut."""
    lines: list[str] = []
    for part in picture.heading:
        if lines and cell_len(f"{lines[-1]} {part}") <= width:
            lines[-1] += f" {part}"
        else:
            lines.append(part)
    return [Text(line, style="bold", no_wrap=True, overflow="ellipsis") for line in lines]
