"""Read plain JSON values out of a workflow document, with clear errors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, cast

from queue_workflows import errors
from queue_workflows.dag import payload

MAX_DEPTH = 200
MAX_TEXT_CHARS = 200
MAX_ID_CHARS = 100
MAX_ID_BYTES = 200
_RESERVED = frozenset("/[]#")
"""These join the parts of a node's id, or mark items of maps and rounds of loops."""


def value(raw: Any, where: str, *, wrapped: int = 0) -> Any:
    """Return a copy of a value as JSON represents it (tuples become lists).

    Raises `InvalidWorkflow` that starts with `where` for another type, NaN or infinity, a key that
    is not a string, a text that PostgreSQL cannot store, or more than `payload.MAX_DEPTH` levels.
    `wrapped`: levels that the engine itself has added.
    """
    if not isinstance(raw, (dict, list, tuple, Mapping)):
        return _copy(raw, where, MAX_DEPTH)  # most values: no need to look up the limit
    return _copy(raw, where, payload.MAX_DEPTH + wrapped)


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
        raise errors.InvalidWorkflow(
            f"{where}: nested too deep, more than {payload.MAX_DEPTH} levels"
        )
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
    if payload.UNSTORABLE.search(text) is not None:
        raise errors.InvalidWorkflow(f"{where}: text with a NUL or half a surrogate pair")
    return text


def record(raw: Any, where: str) -> Mapping[str, Any]:
    """Return an object whose members are not checked."""
    if not isinstance(raw, Mapping):
        raise errors.InvalidWorkflow(f"{where}: an object is needed, not {_kind(raw)}")
    return cast("Mapping[str, Any]", raw)


def members(found: Any) -> dict[str, Any]:
    """Return a copy of what a context has under a node's id; {} for a value that is not an object.

    Behind an empty result the app's own value appears there, which may be anything.
    """
    return dict(cast("dict[str, Any]", found)) if isinstance(found, dict) else {}


def items(owner: Mapping[str, Any], key: str, where: str) -> list[Any]:
    """Return the list under a key; [] if the key is missing or null."""
    raw = owner.get(key)
    if raw is None:
        return []
    if not isinstance(raw, (list, tuple)):
        raise errors.InvalidWorkflow(f"{where}: {key!r} must be a list, not {_kind(raw)}")
    return list(cast("list[Any]", raw))


def text(
    owner: Mapping[str, Any], key: str, where: str, *, limit: int | None = MAX_TEXT_CHARS
) -> str | None:
    """Return the text under a key; None if it is missing or null. Empty text is refused.

    `limit`: how many characters it may have; None for any number.
    """
    raw = owner.get(key)
    if raw is None:
        return None
    if not isinstance(raw, str):
        raise errors.InvalidWorkflow(f"{where}: {key!r} must be text, not {_kind(raw)}")
    if not raw or (limit is not None and len(raw) > limit):
        raise errors.InvalidWorkflow(
            f"{where}: {key!r} must have 1 to {limit} characters, not {len(raw)}"
            if limit is not None
            else f"{where}: {key!r} must not be empty"
        )
    return _stored(raw, where)


def needed_text(
    owner: Mapping[str, Any], key: str, where: str, *, limit: int | None = MAX_TEXT_CHARS
) -> str:
    """Return the text under a required key."""
    found = text(owner, key, where, limit=limit)
    if found is None:
        raise errors.InvalidWorkflow(f"{where}: {key!r} is missing")
    return found


def identifier(owner: Mapping[str, Any], where: str) -> str:
    """Return the checked `id`, which becomes part of paths, refs and channel payloads."""
    raw = _id_text(owner.get("id"))
    if (
        not isinstance(raw, str)
        or not 1 <= len(raw) <= MAX_ID_CHARS
        or not raw.isprintable()
        or not _RESERVED.isdisjoint(raw)
        or len(raw.encode()) > MAX_ID_BYTES
    ):
        shown = "a number of so many digits" if type(raw) is int else f"{raw!r:.120}"
        raise errors.InvalidWorkflow(
            f"{where}: {shown} is not an id: 1 to {MAX_ID_CHARS} printable characters (at "
            f"most {MAX_ID_BYTES} bytes) without '/', '[', ']' and '#'"
        )
    return raw


def _id_text(raw: Any) -> Any:
    """Return a whole number as text; 0.3.0 took the number 7 as the id `7`."""
    whole = isinstance(raw, int) and not isinstance(raw, bool)
    # Python refuses to write a number of thousands of digits.
    return str(raw) if whole and abs(raw) < 10**MAX_ID_CHARS else raw


def ids(owner: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    """Return the ids under a key, which is a list of them or a single one; see `names`."""
    raw = _id_text(owner.get(key))
    listed = [raw] if isinstance(raw, str) else items(owner, key, where)
    return names({key: [_id_text(each) for each in listed]}, key, where)


def folder(node_id: str) -> str:
    """Return the path of a node's folder below `out_dir`: its id.

    The parts `.`, `..` and `.scratch`, which name other folders, are percent-encoded, also before
    the number of a loop's round; so are parts that look as if they were encoded.
    """
    return "/".join(map(_folder, node_id.split("/")))


_OTHER_FOLDER = re.compile(r"\.{1,2}|\.scratch|%(?:25)*2E(?:scratch|%(?:25)*2E)?")


def _folder(part: str) -> str:
    name, mark, number = part.partition("#")
    if _OTHER_FOLDER.fullmatch(name) is None:
        return part
    return f"{name.replace('%', '%25').replace('.', '%2E')}{mark}{number}"


def names(owner: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    """Return the texts in the list under a key, without duplicates, in order."""
    found = items(owner, key, where)
    for raw in found:
        if not isinstance(raw, str):
            raise errors.InvalidWorkflow(f"{where}: {key!r} lists ids, not {_kind(raw)}")
    return tuple(dict.fromkeys(cast("list[str]", found)))


def _kind(raw: Any) -> str:
    return "null" if raw is None else type(raw).__name__
