"""Draw a run as a live tree: steps with bars, and below them the nodes that matter now."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import sys
from collections.abc import Generator
from typing import TextIO, cast

from rich.console import Console, Group, OverflowMethod, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
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
_LIVE = frozenset({"queued", "running", "awaiting_input"})
_BAR = 20
_BAR_FROM = 70
_NAME_LEAST, _NAME_MOST = 10, 40
_BEFORE_NAME = 4
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
        self._cut: OverflowMethod = "ellipsis" if self._unicode else "crop"
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
        """Return the whole picture, no higher and no wider than the terminal.

        If it has no room for all steps, it begins with the first one that goes on.
        """
        width, height = self._console.size
        most, steps = max(1, height - _RESERVED), picture.steps
        live = (at for at, step in enumerate(steps) if not _LIVE.isdisjoint(step.counts))
        left = (at for at, step in enumerate(steps) if step.done < step.total)
        first = min(next(itertools.chain(live, left), len(steps)), max(0, len(steps) - most))
        steps = steps[first : first + most]
        room = most - len(steps)
        shown: dict[str, list[tuple[str, Row]]] = {}
        for node in picture.nodes:
            step = re.split(r"[/\[]", node["node_id"], maxsplit=1)[0]
            own = node["node_id"].removeprefix(step).removeprefix("/")  # such as `[clip-7]/encode`
            wanted = picture.total <= texts.SMALL or node["status"] != "completed"
            if wanted and own and room > 0:
                shown.setdefault(step, []).append((own, node))
                room -= 1
        # A node's state matters more than the end of its name, and both more than a bar.
        column = min(_NAME_MOST, max(_NAME_LEAST, width // 3))
        grid, has_bars = Table.grid(padding=(0, 2)), width >= _BAR_FROM
        grid.add_column(no_wrap=True, overflow=self._cut, max_width=_BEFORE_NAME + column)

        def add(state: str, indent: str, name: str, words: str, bar: RenderableType = "") -> None:
            style, *signs = _LOOKS.get(state, _OTHER)
            sign = (signs[not self._unicode], style)
            first = Text.assemble(indent, sign, f" {output.line(name)}")
            last = Text(words, style=style, no_wrap=True, overflow=self._cut)
            grid.add_row(*((first, bar, last) if has_bars else (first, last)))

        for step in steps:
            bar = ProgressBar(step.total, step.done, _BAR, style="dim", complete_style="green")
            add(step.state, "  ", step.name, step.text, bar if step.total > 1 else "")
            for own, node in sorted(shown.get(step.name, ()), key=lambda one: one[1]["node_id"]):
                add(node["status"], "    ", own, texts.node_text(node))
        return Group(Text(picture.heading, style="bold", overflow=self._cut), grid)
