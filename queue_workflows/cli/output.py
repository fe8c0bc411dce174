"""How values are shown: JSON, tables, durations, and text that a terminal cannot be harmed by."""

from __future__ import annotations

import datetime
import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")
_ELLIPSIS = "..."


def line(text: object, limit: int = 200) -> str:
    """Text as one line of at most `limit` characters; control characters become a space."""
    flat = _CONTROL.sub(" ", str(text)).strip()
    return flat if len(flat) <= limit else flat[: limit - len(_ELLIPSIS)] + _ELLIPSIS


def dump(value: Any) -> None:
    """Print JSON to stdout: times in ISO 8601 (UTC), keys in the order given."""
    sys.stdout.write(json.dumps(value, indent=2, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, datetime.datetime):
        return value.astimezone(datetime.timezone.utc).isoformat()
    return str(value)


def compact(value: Any) -> str:
    """A value as JSON on one line; what JSON cannot carry as its text."""
    return json.dumps(value, ensure_ascii=False, default=str)


def echo(text: str = "") -> None:
    """Print one line to stdout."""
    sys.stdout.write(text + "\n")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print columns, as wide as their content; nothing but the head for no rows."""
    cells = [list(head), *([line(cell, 60) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for row in cells:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        echo("  ".join(padded).rstrip())


def seconds(value: float | None) -> str:
    """A duration in words: `0.3 s`, `2 min 05 s`, `3 h 07 min`; `-` for None."""
    if value is None:
        return "-"
    if value < 60:
        return f"{max(0.0, value):.1f} s"
    whole = int(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def counted(number: int, word: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
