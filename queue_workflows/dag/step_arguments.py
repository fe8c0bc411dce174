"""Check the names, keys and waiting times of steps, and hash their arguments for comparison."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence, Sized
from pathlib import PurePath
from typing import Any, Final, cast

from queue_workflows import errors
from queue_workflows.dag import payload, policy
from queue_workflows.runtime import masking

NAME_LENGTH: Final = 100
KEY_BYTES: Final = 1000
MOST_ITEMS: Final = 10_000
SHOWN: Final = 2000
"""Characters of the arguments that are stored for people to read."""


def name(given: Any) -> str:
    """Return the name of a step. Raises `StepRefused` for one that is no short, printable text."""
    if not isinstance(given, str) or not 1 <= len(given) <= NAME_LENGTH or not _is_plain(given):
        raise errors.StepRefused(
            f"the name of a step must be a printable text of 1 to {NAME_LENGTH} characters, not "
            f"{_shown(given)}"
        )
    return given


def key(given: Any) -> str:
    """Return the key of a step as text, "" for None. Raises `StepRefused` as `name` does."""
    if given is None:
        return ""
    text = str(given) if type(given) is int else given
    if not isinstance(text, str) or not text or not _is_plain(text):
        raise errors.StepRefused(
            f"'key' must be a whole number or a printable text, not {_shown(given)}"
        )
    if len(text.encode()) > KEY_BYTES:
        raise errors.StepRefused(f"'key' is longer than {KEY_BYTES:,} bytes: {_shown(given)}")
    return text


def seconds(given: Any, what: str) -> float:
    """Return a time to wait. Raises `StepRefused` for anything but 0 s to 366 days."""
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise errors.StepRefused(f"{what} must be a number, not {_shown(given)}")
    if not 0 <= given <= policy.MAX_WAIT_S:
        raise errors.StepRefused(f"{what} must be 0 s to 366 days, not {given!r:.40} s")
    return float(given)


def _is_plain(text: str) -> bool:
    return text.isprintable() and payload.is_storable(text)


def _shown(given: Any) -> str:
    return ascii(given)[:80]


def digest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str]:
    """Return a hash of the arguments of a call, and their text for people, cut.

    JSON values, paths, dates, bytes and dataclasses count by their value, other objects by their
    type alone: a model or an open file is not the same object in a later attempt.
    """
    text = f"({', '.join([*map(_text, args), *(f'{k}={_text(v)}' for k, v in kwargs.items())])})"
    ordered = [*map(_text, args), *(f"{name}={_text(kwargs[name])}" for name in sorted(kwargs))]
    found = hashlib.sha256("\0".join(ordered).encode("utf-8", "surrogatepass"))
    shown = masking.mask(payload.UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", text))
    return found.hexdigest(), shown[:SHOWN]


def items_digest(items: Any) -> tuple[str, str]:
    """Return a hash of the items of a loop, and their text for people, cut.

    A range, and a list or tuple of up to MOST_ITEMS, count by their items, others with a length by
    that alone; what has no length (a generator, an open file) always counts as the same.
    """
    if isinstance(items, (list, tuple)) and len(cast("Sequence[Any]", items)) <= MOST_ITEMS:
        return digest((list(cast("Sequence[Any]", items)),), {})
    if isinstance(items, range):
        shown = repr(items)
    else:
        shown = f"{len(cast('Sized', items))} items" if isinstance(items, Sized) else "items"
    return hashlib.sha256(shown.encode()).hexdigest(), shown


def _text(value: Any) -> str:
    try:
        return json.dumps(value, default=_plain, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return f"<{_type(value)}>"


def _plain(value: Any) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, (bytes, bytearray)):
        return f"<{len(value)} bytes {hashlib.sha256(value).hexdigest()[:16]}>"
    try:
        return payload.plain(value, "argument")
    except errors.InvalidPayload:
        return f"<{_type(value)}>"


def _type(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def loaded(text: str | None, what: str) -> Any:
    """Return the value of stored JSON text. Raises `UnreadableRow` for what cannot be loaded."""
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise errors.UnreadableRow(f"{what} cannot be read: {error}") from None
