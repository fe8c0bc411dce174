"""The report as Markdown; charts become tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from queue_workflows.demo.report import blocks

BAR_CHARS = 24


def render(report: blocks.Report) -> str:
    """The document; it ends with a newline."""
    tiles = _table([label for _, label in report.tiles], [[value for value, _ in report.tiles]])
    head = [f"# {_plain(report.title)}", _plain(report.folder), tiles]
    pieces = [*head, *(piece for section in report.sections for piece in _section(section))]
    return "\n\n".join(pieces) + "\n"


def _section(section: blocks.Section) -> list[str]:
    shown = [_block(block) for block in section.blocks]
    return [f"## {section.title}", _plain(section.summary), *(text for text in shown if text)]


def _block(block: blocks.Block) -> str:
    match block:
        case blocks.Bars():
            return _titled(block.title, _bars(block))
        case blocks.Columns():
            rows = zip(block.labels, (f"{count:,}" for count in block.counts), strict=True)
            return _titled(block.title, _table([block.axis, "functions"], rows, numbers=1))
        case blocks.Matrix():
            rows = [
                [name, *(str(count or "") for count in counts)]
                for name, counts in zip(block.names, block.counts, strict=True)
            ]
            return _titled(block.title, _table(["", *block.names], rows, numbers=len(rows)))
        case blocks.Table():
            return _titled(block.title, _table(block.head, block.rows, numbers=block.numbers))
        case blocks.Notes():
            return "\n".join(f"- {_plain(sentence)}" for sentence in block.sentences)
        case blocks.Map():
            return ""


def _bars(block: blocks.Bars) -> str:
    rows = [[bar.label, bar.value, _drawn(bar.parts[0] / block.scale)] for bar in block.bars]
    first = f"of which {block.legend[0].lower()}" if block.legend else ""
    return _table(["Package", "", first], rows)


def _drawn(share: float) -> str:
    return "█" * math.ceil(BAR_CHARS * share)


def _titled(title: str, table: str) -> str:
    return f"**{title}**\n\n{table}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: int = 0) -> str:
    texts = len(head) - numbers
    lines = [head, ["---"] * texts + ["---:"] * numbers, *rows]
    return "\n".join(f"| {' | '.join(map(_plain, line))} |" for line in lines)


def _plain(text: str) -> str:
    """The text with what Markdown would take for markup escaped, on one line."""
    for char in "\\`*_|<&[":
        text = text.replace(char, f"\\{char}")
    return " ".join(text.split())
