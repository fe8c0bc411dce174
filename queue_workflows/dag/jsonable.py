"""Convert Python values to JSON-compatible ones; name the place of a value without a JSON form."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import math
import pathlib
import re
import uuid
from typing import Any, cast

from queue_workflows import config, errors

UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
"""Characters that PostgreSQL does not store in a text or a jsonb value."""
LARGEST = 17976931348623157 * 10**292
"""Largest number that the database accepts. Many JSON parsers read every number as a float."""
_AS_TEXT = (uuid.UUID, decimal.Decimal, pathlib.PurePath)
_DATES = (datetime.date, datetime.time)  # a datetime is a date as well


def plain(value: Any, what: str) -> Any:
    """Return a copy that contains only dicts, lists, strings, numbers, booleans and None.

    Dates and times become ISO strings. UUIDs, Decimals and paths become strings. An enum member
    becomes its value. A dataclass and a pydantic model become dicts.

    Raises `InvalidPayload` for the first value that JSON or PostgreSQL cannot represent. The text
    begins with `what` and names the place, such as `result['a'][3]`. Also raises it for more than
    MAX_PAYLOAD_DEPTH levels, and for more values than MAX_PAYLOAD_KB has bytes.
    """
    # Each value needs at least one byte of JSON, so more values than bytes can never fit.
    max_items = config.MAX_PAYLOAD_KB.read() * 1024
    converter = _Converter(what, config.MAX_PAYLOAD_DEPTH.read(), max_items)
    try:
        return converter.converted(value, what.partition(" ")[0], 0)
    except RecursionError:
        raise errors.InvalidPayload(f"{what}: nested deeper than Python can follow") from None


class _Converter:
    def __init__(self, what: str, max_depth: int, max_items: int) -> None:
        self._what = what
        self._max_depth = max_depth
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
        if depth >= self._max_depth:
            raise errors.InvalidPayload(
                f"{self._what}: nested deeper than {self._max_depth} levels"
            )
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
