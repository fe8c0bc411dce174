"""Read the fenced blocks and links of a Markdown page, and the marks beside a block."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

RUN = ("python", "sql", "console")
SHOWN = ("text", "json", "mermaid")
_FENCE = re.compile(r"^(```+)\s*(\S*)\s*$")
_MARK = re.compile(r"<!--\s*(no-run|file|background|ready):\s*(.+?)\s*-->")
_LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")


class Block(NamedTuple):
    """A fenced block; `line` is that of its first line of text.

    `no_run` is the reason why nobody runs it; `file` the name under which it is stored first;
    `background` the reason why its command runs until the page ends, and `ready` a query that has a
    row once it is up.
    """

    page: Path
    line: int
    language: str
    text: str
    no_run: str = ""
    file: str = ""
    background: str = ""
    ready: str = ""

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


class Command(NamedTuple):
    """A line after `$ `, with what the page shows below it ("" where it shows nothing)."""

    text: str
    output: str


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in order; a mark is on the last text line above its block."""
    found: list[Block] = []
    fence, language, start, body = "", "", 0, [""]
    mark = ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        match = _FENCE.match(line)
        if not fence and match:
            fence, language, start, body = match[1], match[2], number + 1, []
        elif fence and match and match[1] == fence and not match[2]:
            marks = dict(_MARK.findall(mark))
            text = "".join(f"{each}\n" for each in body)
            named = [marks.get(each, "") for each in ("no-run", "file", "background", "ready")]
            found.append(Block(page, start, language, text, *named))
            fence, mark = "", ""
        elif fence:
            body.append(line)
        elif line.strip():
            mark = line
    if fence:
        raise ValueError(f"{page.name}:{start}: the block has no end")
    return found


def commands(block: Block) -> list[Command]:
    """Return the commands of a console block; a backslash at a line's end joins the next line."""
    found: list[tuple[list[str], list[str]]] = []
    goes_on = False
    for line in block.text.splitlines():
        if goes_on:
            found[-1][0].append(line)
        elif line.startswith("$ "):
            found.append(([line[2:]], []))
        elif found:
            found[-1][1].append(line)
        else:
            raise ValueError(f"{block}: a console block starts with a command after '$ '")
        goes_on = line.endswith("\\") and not found[-1][1]
    return [Command("\n".join(text), "".join(f"{o}\n" for o in out)) for text, out in found]


def links(page: Path) -> list[str]:
    """Return the targets of a page's links, without those inside blocks."""
    text = re.sub(r"^```.*?^```\s*$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return _LINK.findall(text)


def anchors(page: Path) -> set[str]:
    """Return what a link may name after `#`: headings as the usual renderers spell them."""
    text = re.sub(r"^```.*?^```\s*$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+\s+(.+?)\s*$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
