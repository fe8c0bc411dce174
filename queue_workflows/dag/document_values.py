"""Read plain JSON values out of a workflow document, with clear errors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, cast

from queue_workflows import config, errors

MAX_DEPTH = 200
MAX_TEXT_CHARS = 200
_IDENTIFIER = re.compile(r"[A-Za-z0-9_-]{1,100}")
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def value(raw: Any, where: str, *, wrapped: int = 0) -> Any:
    """Return a copy of a value as JSON represents it (tuples become lists).

    Raises `InvalidWorkflow` that starts with `where` for another type, NaN or infinity, a key that
    is not a string, a text that PostgreSQL cannot store, or more than `MAX_PAYLOAD_DEPTH` levels.
    `wrapped`: levels that the engine itself has added.
    """
    if not isinstance(raw, (dict, list, tuple, Mapping)):
        return _copy(raw, where, MAX_DEPTH)  # most values: no need to look up the limit
    return _copy(raw, where, min(config.MAX_PAYLOAD_DEPTH.read(), MAX_DEPTH) + wrapped)


def _copy(raw: Any, where: str, levels: int) -> Any:
    if raw is None or isinstance(raw, bool):
        return raw
    if isinstance(raw, str):
        return _stored(raw, where)
    if isinstance(raw, (int, float)):
        if isinstance(raw, int) and raw.bit_length() <= 1024:
            return raw
        if isinstance(raw, float) and math.isfinite(raw):
            return raw
        raise errors.InvalidWorkflow(f"{where}: a number that JSON cannot carry")
    if levels <= 0:
        raise errors.InvalidWorkflow(f"{where}: nested too deep (MAX_PAYLOAD_DEPTH)")
    if isinstance(raw, Mapping):
        members = cast("Mapping[Any, Any]", raw).items()
        return {_key(key, where): _copy(member, where, levels - 1) for key, member in members}
    if isinstance(raw, (list, tuple)):
        return [_copy(member, where, levels - 1) for member in cast("list[Any]", raw)]
    raise errors.InvalidWorkflow(f"{where}: a {type(raw).__name__} is not a JSON value")


def _key(raw: Any, where: str) -> str:
    if not isinstance(raw, str):
        raise errors.InvalidWorkflow(f"{where}: the key {raw!r:.40} is not a string")
    return _stored(raw, where)


def _stored(text: str, where: str) -> str:
    if _UNSTORABLE.search(text):
        raise errors.InvalidWorkflow(f"{where}: text with a NUL or half a surrogate pair")
    return text


def record(raw: Any, where: str) -> Mapping[str, Any]:
    """Return an object whose members are not checked."""
    if not isinstance(raw, Mapping):
        raise errors.InvalidWorkflow(f"{where}: an object is needed, not {_kind(raw)}")
    return cast("Mapping[str, Any]", raw)


def items(owner: Mapping[str, Any], key: str, where: str) -> list[Any]:
    """Return the list under a key; [] if the key is missing or null."""
    raw = owner.get(key)
    if raw is None:
        return []
    if not isinstance(raw, (list, tuple)):
        raise errors.InvalidWorkflow(f"{where}: {key!r} must be a list, not {_kind(raw)}")
    return list(cast("list[Any]", raw))


def text(
    owner: Mapping[str, Any], key: str, where: str, *, limit: int = MAX_TEXT_CHARS
) -> str | None:
    """Return the text under a key; None if it is missing or null. Empty text is refused."""
    raw = owner.get(key)
    if raw is None:
        return None
    if not isinstance(raw, str):
        raise errors.InvalidWorkflow(f"{where}: {key!r} must be text, not {_kind(raw)}")
    if not raw or len(raw) > limit:
        raise errors.InvalidWorkflow(
            f"{where}: {key!r} must have 1 to {limit} characters, not {len(raw)}"
        )
    return _stored(raw, where)


def needed_text(
    owner: Mapping[str, Any], key: str, where: str, *, limit: int = MAX_TEXT_CHARS
) -> str:
    """Return the text under a required key."""
    found = text(owner, key, where, limit=limit)
    if found is None:
        raise errors.InvalidWorkflow(f"{where}: {key!r} is missing")
    return found


def identifier(owner: Mapping[str, Any], where: str) -> str:
    """Return the checked `id`, which becomes part of paths, refs and channel payloads."""
    raw = owner.get("id")
    if not isinstance(raw, str) or not _IDENTIFIER.fullmatch(raw):
        raise errors.InvalidWorkflow(
            f"{where}: {raw!r:.120} is not an id: 1 to 100 letters, digits, '_' or '-'"
        )
    return raw


def names(owner: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    """Return the texts in the list under a key, without duplicates, in order."""
    found = items(owner, key, where)
    for raw in found:
        if not isinstance(raw, str):
            raise errors.InvalidWorkflow(f"{where}: {key!r} lists ids, not {_kind(raw)}")
    return tuple(dict.fromkeys(cast("list[str]", found)))


def _kind(raw: Any) -> str:
    return "null" if raw is None else type(raw).__name__
