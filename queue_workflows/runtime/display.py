"""Format values of any type for printing, with escaped control characters and limited length.

Control characters and invisible characters are escaped as in Python: `\\x1b`, `\\u202e`, `\\n`. A
backslash is not escaped, so paths and JSON stay readable, and formatting twice changes nothing. The
text `\\x1b` and the character ESC therefore look the same, except in JSON output. Its length: lines
contain JSON and JSON contains lines, with the same limits.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, cast

from queue_workflows.runtime import masking
from queue_workflows.types import Unreadable

LIMIT = 200
"""Default maximum length of a line, in characters."""
DEPTH = 220
"""Levels of a printed JSON value. The loader of rows refuses more than 200."""
_SHORT_DEPTH = 20
"""How deep a JSON value may be nested that is printed on one line."""
_MASKED = 10_000
"""Characters after a cut that are masked too, as masks are short and may bring them into view."""
_BEGUN = re.compile(r"(?:://|\bbearer\s)\S*$", re.IGNORECASE)
"""A last word that may be an address or token which the cut makes unrecognisable."""
_ELLIPSIS = "..."
_LATEST = datetime.max.replace(tzinfo=timezone.utc)
_EARLIEST = datetime.min.replace(tzinfo=timezone.utc)

# Unicode's categories Cc, Cf, Cs, Zl and Zp, and the other characters that Unicode lists as default
# ignorable. U+FE0E and U+FE0F are not escaped, because normal emoji contain them.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160"
    "\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff"
    "\ufe00-\ufe0d\ufeff\uffa0\ufff0-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_SHORT = {"\n": r"\n", "\t": r"\t", "\r": r"\r"}
_ENDS = re.compile(r"\r\n|\n|\r")
_ESCAPED = re.compile(r"\\(?:([ntrbf])|x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")


def line(value: object, limit: int | None = LIMIT) -> str:
    """Return any value as one printable line of at most `limit` characters, without secrets.

    A longer text ends in the number of omitted characters: `...(+12)`. `limit=None` omits nothing.
    """
    return _cut(*_masked(_text(value, limit), limit), limit)


def lines(value: object) -> list[str]:
    """Return the printable lines of a text without secrets."""
    text = masking.mask(_text(value, None))
    return [_UNSAFE.sub(_escape, one.expandtabs()) for one in _ENDS.split(text)]


def block(value: object) -> str:
    """Return the whole text without secrets, its line ends kept and everything else escaped."""
    return "\n".join(lines(value))


def restored(text: str) -> str:
    """Return the text without the escapes of `line` or of JSON output.

    So a user can pass an id as a command printed it. Try the exact text first: a text that itself
    contains a backslash and `n` is changed, too.
    """
    found = _ESCAPED.sub(_character, text)
    if any("\ud800" <= char <= "\udfff" for char in found):
        # JSON writes a character beyond U+FFFF as a pair of surrogates.
        found = found.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return found


def moment(value: Any, *, zone: bool = True) -> str:
    """Return a time such as `2026-01-31 09:00:00 UTC`, and `-` for None.

    Returns `after year 9999` or `before year 1` for the ends of the range. `zone=False` omits UTC.
    """
    if not isinstance(value, datetime):
        return line(value)
    if (words := _out_of_range(value)) is not None:
        return words
    text = _utc(value).replace(tzinfo=None).isoformat(" ", "seconds")
    return f"{text} UTC" if zone else text


def answer_command(run_id: str, node_id: str) -> str:
    """Return the command that answers a node, with VALUE as the placeholder for the answer."""
    begins = "-- " if run_id.startswith("-") else ""
    return f"queue-workflows answer {begins}{shlex.quote(run_id)} {shlex.quote(node_id)} VALUE"


def again(available_at: Any) -> str:
    """Return a clause about the next attempt: `it runs again at 2026-01-31 09:12:01 UTC`.

    For None, which means at once: `it runs again as soon as a worker is free`.
    """
    if available_at is None:
        return "it runs again as soon as a worker is free"
    return f"it runs again at {moment(available_at)}"


def clock(value: Any) -> str:
    """Return the time of day in UTC as `09:12:01.250`, and `-` for None.

    Returns `after year 9999` or `before year 1` for the ends of the range.
    """
    if not isinstance(value, datetime):
        return line(value)
    if (words := _out_of_range(value)) is not None:
        return words
    return _utc(value).time().isoformat("milliseconds")


def duration(value: Any) -> str:
    """Return seconds in words: `0.3 s`, `2 min 05 s`, `3 h 07 min`; `-` for None."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        return line(value)
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"{_integer(value // 3600)} h"
    if math.isnan(value):
        return "unknown"
    if math.isinf(value):
        return "forever" if value > 0 else "0.0 s"
    if value < 60:
        return f"{max(0.0, value):.1f} s"
    whole = int(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return line(f"{_integer(whole // 3600)} h {whole % 3600 // 60:02d} min")


def number(value: Any, form: str = "g", unit: str = "") -> str:
    """Return a number in `form` with `unit`; format NaN, infinity and other values by `line`."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        return line(value)
    try:
        return f"{float(value):{form}}{unit}" if math.isfinite(value) else line(value)
    except OverflowError:
        return line(value)


def counted(number: int, word: str) -> str:
    """Return `1 node`, `2 nodes`."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def compact(value: Any, limit: int | None = LIMIT) -> str:
    """Return a value as one line of JSON with JSON escapes.

    Values below 20 levels and text past `limit` characters are replaced by `...`.
    """
    left = [10 * limit] if limit is not None else None
    text = json.dumps(_plain(value, _SHORT_DEPTH, left), ensure_ascii=False)
    return _cut(*_masked(_UNSAFE.sub(_json_escape, text), limit), limit)


def pretty(value: Any) -> list[str]:
    """Return the lines of a value without secrets as indented JSON with JSON escapes."""
    plain = masking.mask_values(_plain(value, DEPTH, None))
    text = json.dumps(plain, ensure_ascii=False, indent=2)
    return [_UNSAFE.sub(_json_escape, one) for one in text.split("\n")]


def strict_json(value: Any) -> str:
    """Return a value as indented ASCII JSON that every JSON parser accepts.

    Times become ISO 8601 strings in UTC. NaN and infinite numbers become the strings "NaN",
    "Infinity" and "-Infinity". An unreadable value becomes `{"unreadable": REASON}`.
    """
    return _ascii(_plain(value, DEPTH, None), indent=2)


def json_line(value: Any, limit: int | None = None) -> str:
    """Return a value as one line of ASCII JSON, as `strict_json` does.

    With `limit`, text after about so many characters, or below 20 levels, becomes `...`.
    """
    depth, left = (DEPTH, None) if limit is None else (_SHORT_DEPTH, [limit])
    return _ascii(_plain(value, depth, left))


def _ascii(plain: Any, indent: int | None = None) -> str:
    return json.dumps(plain, indent=indent, allow_nan=False).replace("\x7f", r"\u007f")


def _text(value: object, limit: int | None) -> str:
    if isinstance(value, str):
        return str(value)
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return moment(value)
    if isinstance(value, timedelta):
        return duration(value)
    # A NamedTuple may define its own __str__, so it is not formatted as JSON.
    if isinstance(value, (dict, list)) or type(value) is tuple:
        return compact(cast("object", value), limit)
    return _scalar(value)


def _scalar(value: object) -> str:
    if isinstance(value, Unreadable):
        return f"unreadable: {value.reason}"
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(cast("bytes", value)).decode("utf-8", "backslashreplace")
    if isinstance(value, int) and not isinstance(value, bool):
        return _integer(value)
    if isinstance(value, float) and math.isinf(value):
        return "infinity" if value > 0 else "-infinity"
    return str(value)


def _integer(value: int) -> str:
    try:
        return str(value)
    except ValueError:
        # Python converts up to 4,300 digits.
        return f"an integer of about {int(value.bit_length() * 0.30103)} digits"


def _masked(text: str, limit: int | None) -> tuple[str, int]:
    """Return the text with its secrets masked, and how many characters were left out at its end.

    Call it before a text is cut, since a secret that is cut may not be recognized.
    """
    if limit is None or len(text) <= limit + _MASKED:
        return masking.mask(text), 0
    seen = text[: limit + _MASKED]
    begun = _BEGUN.search(seen, len(seen) - _MASKED // 2)
    seen = seen[: begun.start()] if begun else seen
    return masking.mask(seen), len(text) - len(seen)


def _cut(text: str, more: int, limit: int | None) -> str:
    """Return the first `limit` characters of a text that is followed by `more` other characters."""
    if limit is None:
        return _UNSAFE.sub(_escape, text)
    if len(text) <= limit and not more:
        shown = _UNSAFE.sub(_escape, text)
        if len(shown) <= limit:
            return shown
    room, kept = limit - len(f"{_ELLIPSIS}(+{len(text) + more})"), 0
    if room < 0:
        return _ELLIPSIS[: max(0, limit)]
    pieces: list[str] = []
    for char in text[:limit]:
        piece = _UNSAFE.sub(_escape, char)
        if len(piece) > room:
            break
        room, kept = room - len(piece), kept + 1
        pieces.append(piece)
    return f"{''.join(pieces)}{_ELLIPSIS}(+{len(text) + more - kept})"


def _escape(found: re.Match[str]) -> str:
    char = found[0]
    code = ord(char)
    if char in _SHORT:
        return _SHORT[char]
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _json_escape(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1] if ord(found[0]) != 0x7F else r"\u007f"


def _character(found: re.Match[str]) -> str:
    if found[1]:
        return {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}[found[1]]
    code = int(found[2] or found[3] or found[4], 16)
    return chr(code) if code <= 0x10FFFF else found[0]


def _utc(value: datetime) -> datetime:
    """Return the time in UTC; the earliest or latest `datetime` if the conversion overflows."""
    try:
        return value if value.tzinfo is None else value.astimezone(timezone.utc)
    except OverflowError:
        return _LATEST if value.year > 5000 else _EARLIEST


def _out_of_range(value: datetime) -> str | None:
    at = _utc(value).replace(tzinfo=timezone.utc)
    return {_LATEST: "after year 9999", _EARLIEST: "before year 1"}.get(at)


def _plain(value: Any, depth: int, left: list[int] | None) -> Any:
    """Return a JSON-compatible copy of the value.

    `depth` is the number of levels left. `left` is a list with the number of characters left, or
    None for no limit. Anything beyond is replaced by `...`.
    """
    if isinstance(value, (dict, list, tuple)):
        if depth == 0:
            return _ELLIPSIS
        return _plain_members(cast("Any", value), depth - 1, left)
    if left is not None:
        left[0] -= len(value) if isinstance(value, str) else 8
        if isinstance(value, str) and left[0] < 0:
            kept = max(0, len(value) + left[0])
            return _masked(value, kept)[0][:kept] + _ELLIPSIS
    return _plain_scalar(value)


def _plain_members(value: Any, depth: int, left: list[int] | None) -> Any:
    found: list[tuple[str, Any]] = []
    members = cast("Any", value.items() if isinstance(value, dict) else enumerate(value))
    for key, member in members:
        if left is not None:
            if left[0] <= 0:
                found.append((_ELLIPSIS, _ELLIPSIS))
                break
            left[0] -= len(str(key))
        found.append((str(key), _plain(member, depth, left)))
    return dict(found) if isinstance(value, dict) else [member for _, member in found]


def _plain_scalar(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Unreadable):
        return {"unreadable": value.reason}
    if isinstance(value, datetime):
        return _utc(value).isoformat()
    if isinstance(value, float):
        if math.isnan(value):
            return "NaN"
        return value if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, int):
        return value if value.bit_length() < 14_000 else _integer(value)
    return _scalar(value)
