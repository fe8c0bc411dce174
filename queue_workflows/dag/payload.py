"""Convert values to JSON that the database can store, and refuse other values before any write."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import json
import math
import pathlib
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from queue_workflows import config, errors
from queue_workflows.runtime import masking
from queue_workflows.types import Unreadable

ERROR_LIMIT = 8000
"""The most characters of an error text that are stored."""

MAX_DEPTH = 64
"""Deepest nesting of a result, inputs or answer, which every JSON parser can read."""
KIB = 1024
PART_BYTES = 8 * KIB * KIB
UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
"""Characters that PostgreSQL does not store in a text or a jsonb value."""
LARGEST = 17976931348623157 * 10**292
"""The largest number that is accepted, since many JSON parsers read every number as a float."""
_SCALARS = frozenset((str, int, float, bool, type(None)))
_AS_TEXT = (uuid.UUID, decimal.Decimal, pathlib.PurePath)
_DATES = (datetime.date, datetime.time)  # a datetime is a date as well


class Encoder(json.JSONEncoder):
    """Encode JSON even if an app replaces methods of the base class."""

    encode = json.JSONEncoder.encode
    iterencode = json.JSONEncoder.iterencode

    def default(self, o: Any) -> Any:
        """Raise TypeError for a type that JSON does not have."""
        raise TypeError(f"Object of type {type(o).__name__} is not JSON serializable")


to_json = Encoder(allow_nan=False).encode
"""Return a value of JSON's own types as text, without further checks."""
_DIGITS = 308
_TENTHS = re.compile("[0-9]{10}")
_ESCAPED = re.compile(r"\\u(?:0000|d[89a-f][0-9a-f]{2})", re.IGNORECASE)


def encode(value: Any, what: str) -> str:
    """Return the value as JSON text that PostgreSQL's jsonb takes.

    Values of other types are encoded as by `plain`. Raises `InvalidPayload` (a ValueError) for a
    value that JSON or PostgreSQL cannot represent, with one line that starts with `what` and names
    the place. Also raises it past MAX_DEPTH levels, MAX_PAYLOAD_KB KiB, or a number over LARGEST.
    """
    if not _is_flat(value):
        _check(value, what, MAX_DEPTH, config.MAX_PAYLOAD_KB.read())
    try:
        text = to_json(value)
    except (TypeError, ValueError, RecursionError):
        text = None
    if text is None:  # outside of the except clause, so that its error is not shown as a cause
        text = to_json(plain(value, what))
    if "\\u" in text and _ESCAPED.search(text):
        plain(value, what)  # raises for a text that cannot be stored, and names its place
    # A number that is too large has 309 digits, so every 30th character of it makes ten in a row.
    if len(text) > _DIGITS and _TENTHS.search(text[::30]):
        plain(value, what)  # raises for a number, and names its place
    if len(text) > KIB and len(text) > (limit_kb := config.MAX_PAYLOAD_KB.read()) * KIB:
        raise _too_large(what, f"{len(text) / KIB:.0f} KiB of JSON", limit_kb)
    return text


def _is_flat(value: Any) -> bool:
    """Return whether a value is a scalar or an object of scalars, which needs no further check."""
    if type(value) is not dict:
        return not (value and isinstance(value, (dict, list, tuple)))
    for key, member in value.items():  # pyright: ignore[reportUnknownVariableType]
        if type(key) is not str or type(member) not in _SCALARS:  # pyright: ignore[reportUnknownArgumentType]
            return False
    return True


def _too_large(what: str, found: str, limit_kb: int) -> errors.InvalidPayload:
    return errors.InvalidPayload(
        f"{what}: {found}, more than the {limit_kb} KiB of MAX_PAYLOAD_KB; store a path instead"
    )


def stored_object(value: Any, what: str) -> dict[str, Any]:
    """Return a stored JSON object, {} for null; raise `UnreadableRow` for anything else."""
    if isinstance(value, Unreadable):
        raise errors.UnreadableRow(f"{what} cannot be read: {value.reason}")
    if value is not None and not isinstance(value, dict):
        raise errors.UnreadableRow(f"{what}: a JSON object is needed, not {type(value).__name__}")
    return cast("dict[str, Any]", value or {})


def encode_errors(failed: Mapping[str, str]) -> str:
    """Return the errors of items by their keys as JSON."""
    return to_json({key: error_text(error) for key, error in failed.items()})


def arrays(texts: Iterable[str]) -> Iterator[str]:
    """Yield JSON texts as JSON arrays, of about PART_BYTES each."""
    for part in parts(texts):
        yield f"[{','.join(part)}]"


def parts(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield the texts in order, in lists of about PART_BYTES each."""
    part: list[str] = []
    size = 0
    for text in texts:
        if part and size + len(text) > PART_BYTES:
            yield part
            part, size = [], 0
        part.append(text)
        size += len(text)
    if part:
        yield part


def _check(value: Any, what: str, limit: int, limit_kb: int) -> None:
    level: list[Any] = [value]
    for _ in range(limit):
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                for key, member in item.items():  # pyright: ignore[reportUnknownVariableType]
                    if not isinstance(key, str):
                        plain(value, what)  # raises, and names the place of the key
                    if isinstance(member, (dict, list, tuple)):
                        deeper.append(member)
            else:
                deeper += [m for m in item if isinstance(m, (dict, list, tuple))]  # pyright: ignore[reportUnknownVariableType]
        if not deeper:
            return
        # Each has at least two characters. Without this, a value that contains itself twice would
        # double at each level.
        if len(deeper) * 2 > limit_kb * KIB:
            raise _too_large(what, f"at least {len(deeper)} lists and objects", limit_kb)
        level = deeper
    raise errors.InvalidPayload(f"{what}: nested deeper than {limit} levels")


def plain(value: Any, what: str) -> Any:
    """Return a copy that contains only dicts, lists, strings, numbers, booleans and None.

    Dates and times become ISO strings, UUIDs, Decimals and paths strings, an enum member its value,
    dataclasses and pydantic models dicts. Raises `InvalidPayload` for the first value that JSON or
    PostgreSQL cannot represent, with its place, such as `result['a'][3]`; also for more than
    MAX_DEPTH levels, and for more values than MAX_PAYLOAD_KB has bytes.
    """
    # Each value needs at least one byte of JSON, so more values than bytes can never fit.
    max_items = config.MAX_PAYLOAD_KB.read() * 1024
    converter = _Converter(what, max_items)
    try:
        return converter.converted(value, what.partition(" ")[0], 0)
    except RecursionError:
        raise errors.InvalidPayload(f"{what}: nested deeper than Python can follow") from None


class _Converter:
    def __init__(self, what: str, max_items: int) -> None:
        self._what = what
        self._items_left = max_items

    def converted(self, value: Any, place: str, depth: int) -> Any:
        """Return the JSON-compatible form of the value at `place`."""
        self._items_left -= 1
        if self._items_left < 0:
            raise errors.InvalidPayload(
                f"{self._what}: it has too many values for MAX_PAYLOAD_KB"
                f" ({config.MAX_PAYLOAD_KB.read()} KiB); put the data in a file and store its path"
            )
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, enum.Enum):
            return self.converted(value.value, place, depth)
        if isinstance(value, str):
            return self._text(value, place)
        if isinstance(value, (int, float)):
            return self._number(value, place)
        if isinstance(value, _DATES):
            return value.isoformat()
        if isinstance(value, _AS_TEXT):
            return self._text(str(value), place)
        return self._container(value, place, depth)

    def _container(self, value: Any, place: str, depth: int) -> Any:
        if depth >= MAX_DEPTH:
            raise errors.InvalidPayload(f"{self._what}: nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, dict):
            return self._members(cast("dict[Any, Any]", value), place, depth)
        if isinstance(value, (list, tuple)):
            listed = cast("list[Any]", value)
            return [
                self.converted(item, f"{place}[{n}]", depth + 1) for n, item in enumerate(listed)
            ]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            return self._members({name: getattr(value, name) for name in names}, place, depth)
        if not isinstance(value, type) and callable(getattr(value, "model_dump", None)):
            return self.converted(value.model_dump(mode="json"), place, depth)
        kind = type(value).__name__
        article = "an" if kind[:1].lower() in "aeiou" else "a"
        raise self._refused(place, f"{article} {kind}, which JSON cannot carry")

    def _members(self, members: dict[Any, Any], place: str, depth: int) -> dict[str, Any]:
        for key in members:
            if not isinstance(key, str):
                raise self._refused(place, f"key {key!r:.80} is not a string")
            self._text(key, f"{place}[{key!r:.80}]")
        return {
            key: self.converted(member, f"{place}[{key!r:.80}]", depth + 1)
            for key, member in members.items()
        }

    def _text(self, value: str, place: str) -> str:
        if UNSTORABLE.search(value):
            raise self._refused(place, "text with a NUL character or a lone surrogate")
        return value

    def _number(self, value: float, place: str) -> float:
        if isinstance(value, float) and not math.isfinite(value):
            raise self._refused(place, f"{value!r}, which JSON cannot carry")
        if isinstance(value, int) and not -LARGEST <= value <= LARGEST:
            raise self._refused(place, "a number beyond 1.7976931348623157e308; store it as a text")
        return value

    def _refused(self, place: str, reason: str) -> errors.InvalidPayload:
        return errors.InvalidPayload(f"{self._what}: {place}: {reason}")


def distinct_ids(ids: str | Iterable[str]) -> list[str]:
    """Return these ids in order without duplicates; raise `InvalidConfig` for another type."""
    if isinstance(ids, Mapping):  # a row, whose columns are not ids
        _check_text(cast("Any", ids))
    given = [ids] if isinstance(ids, str) else [*ids]
    for one in given:
        _check_text(one)
    return list(dict.fromkeys(given))


def is_storable(text: str | None) -> bool:
    """Return whether the database can store a text, without a NUL or a lone surrogate, or None.

    Raises `InvalidConfig` for a value of another type, such as a row in place of its id.
    """
    if text is None:
        return True
    _check_text(text)
    return UNSTORABLE.search(text) is None


def _check_text(given: object) -> None:
    if isinstance(given, str):
        return
    if isinstance(given, Mapping) and "id" in given:
        raise errors.InvalidConfig("an id is a text, and this is a row: pass its id, row['id']")
    raise errors.InvalidConfig(f"{given!r:.80}: an id is a text")


def error_text(error: object) -> str:
    """Return an error as text that the database stores: at most ERROR_LIMIT characters.

    Secrets are masked. A replacement character stands for each NUL and lone surrogate.
    """
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  app code: an error's own __str__
        text = f"{type(error).__name__} that cannot be printed"
    # Mask before the cut, since a secret that is cut may not be recognised.
    text = masking.mask(text[: 2 * ERROR_LIMIT])
    return UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", text)[:ERROR_LIMIT]
