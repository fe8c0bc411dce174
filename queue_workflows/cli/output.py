"""Print JSON, tables, lines and durations; `runtime.display` escapes the values."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from queue_workflows.runtime import display

line = display.line
compact = display.compact
seconds = display.duration
counted = display.counted
CELL = 60
"""Maximum characters of a table's cell."""


def word(value: Any, limit: int | None = display.LIMIT) -> str:
    """Return a text as it is, another value as short JSON."""
    return value if isinstance(value, str) else compact(value, limit)


def dump(value: Any) -> None:
    """Print JSON to stdout: times in ISO 8601 (UTC), keys in the given order, ASCII only.

    The last member of an object may be an iterator, whose items are printed as they are read.
    """
    members = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    last = next(reversed(members), "")
    if not isinstance(members.get(last), Iterator):
        sys.stdout.write(display.strict_json(value) + "\n")
        return
    sys.stdout.write(display.strict_json(members | {last: []}).removesuffix("]\n}"))
    end = ""
    for item in members[last]:
        sys.stdout.write(f"{end}\n{textwrap.indent(display.strict_json(item), '    ')}")
        end = ","
    sys.stdout.write("\n  ]\n}\n" if end else "]\n}\n")


def echo(text: str = "", limit: int | None = None) -> None:
    """Print one line of at most `limit` characters to stdout, escaped."""
    sys.stdout.write(display.line(text, limit) + "\n")


def echo_now(text: str) -> None:
    """Print one line to stdout at once."""
    echo(text)
    sys.stdout.flush()


def some(lines: Sequence[str], shown: int) -> None:
    """Print the first lines, and how many more there are."""
    for text in lines[:shown]:
        echo(line(text))
    if len(lines) > shown:
        echo(f"  and {len(lines) - shown} more")


def complain(text: str) -> None:
    """Print one line to stderr, escaped, with secrets masked."""
    sys.stderr.write(display.line(text, None) + "\n")
    sys.stderr.flush()


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print columns as wide as their content; only the head if there are no rows."""
    cells = [list(head), *([line(cell, CELL) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for row in cells:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        echo("  ".join(padded).rstrip())


def listed(*parts: object) -> str:
    """Return the parts that are neither empty nor false, with commas between."""
    return ", ".join(str(part) for part in parts if part)
