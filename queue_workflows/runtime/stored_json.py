"""Load stored JSON of any shape without raising, since plain SQL may have written anything."""

from __future__ import annotations

import json
from typing import Any, cast

from queue_workflows.types import Row, Unreadable

MAX_DEPTH = 200
"""Levels of nesting, well below the interpreter's recursion limit of 1,000 frames."""
MAX_BYTES = 64 * 1024 * 1024
"""Bytes of JSON text. A loaded value takes up to ten times as much memory."""
KEPT_BYTES = 64 * 1024
"""Bytes that an `Unreadable` keeps of a text over MAX_BYTES, so that a person can identify it."""


class Decoder(json.JSONDecoder):
    """Decode JSON even if an app replaces functions of `json`."""

    decode = json.JSONDecoder.decode
    raw_decode = json.JSONDecoder.raw_decode


decode = Decoder().decode
"""Used instead of `json.loads`, which would detect the encoding of bytes; it is always UTF-8."""


def load_json(data: str | bytes) -> Any:
    """Return the value of a JSON text, or an `Unreadable` with the reason why it is not loaded.

    `Unreadable` is returned for invalid JSON, a text over MAX_BYTES, and more than MAX_DEPTH
    levels. It is also returned for an integer with more digits than Python converts (4,300 by
    default, `sys.set_int_max_str_digits`).
    """
    raw = data.encode() if isinstance(data, str) else data
    size = len(raw)
    if size > MAX_BYTES:
        return Unreadable(f"it has {size} bytes, more than {MAX_BYTES}", raw[:KEPT_BYTES])
    try:
        value = decode(raw.decode("utf-8", "surrogatepass"))
    except RecursionError:
        return Unreadable(f"it is nested deeper than {MAX_DEPTH} levels", raw)
    except ValueError as error:
        # The parser's text is "Exceeds the limit (4300 digits) for integer string conversion".
        return Unreadable(str(error).partition(";")[0], raw)
    # A level needs two brackets. Most texts are too short for that many.
    levels_fit = size > 2 * MAX_DEPTH
    if levels_fit and raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _is_deep(value):
        return Unreadable(f"it is nested deeper than {MAX_DEPTH} levels", raw)
    return value


def _is_deep(value: Any) -> bool:
    level: list[Any] = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for item in level:
            members = cast("list[Any]", item.values() if type(item) is dict else item)
            deeper += [m for m in members if type(m) is dict or type(m) is list]
        if not deeper:
            return False
        level = deeper
    return True


def mapping(value: Any) -> Row:
    """Return the value if it is a JSON object, else an empty dict."""
    return cast("Row", value) if isinstance(value, dict) else {}


def sequence(value: Any) -> list[Any]:
    """Return the value if it is a JSON array, else an empty list."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def text(value: Any) -> str | None:
    """Return the value if it is a string, else None."""
    return value if isinstance(value, str) else None


def texts(value: Any) -> list[str]:
    """Return the strings in a JSON array, without its other values; [] if it is not an array."""
    return [each for each in sequence(value) if isinstance(each, str)]


def number(value: Any) -> float | None:
    """Return the value if it is a number that a float can hold, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
