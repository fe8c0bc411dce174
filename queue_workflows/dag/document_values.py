"""Read plain JSON values out of a workflow document, and the inputs of a pipeline's nodes.

In a definition the marker `$out` counts only as the single key of a whole input. An app's own value
with that key is stored as `{"$out": {"$value": value}}`.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn, TypeAlias, TypeGuard, cast

from queue_workflows import errors
from queue_workflows.dag import payload

MAX_TEXT_CHARS = 200
MAX_ID_CHARS = 100
MAX_ID_BYTES = 200
_RESERVED = frozenset("/[]#")
"""These characters join the parts of a node's id, or mark items of maps and rounds of loops."""


def value(raw: Any, where: str, *, wrapped: int = 0) -> Any:
    """Return a copy of a value as JSON represents it (tuples become lists).

    Raises `InvalidWorkflow` that starts with `where` for another type, NaN or infinity, a key that
    is not a string, a text that PostgreSQL cannot store, or more than `payload.MAX_DEPTH` levels.
    `wrapped` is the number of levels that the engine itself has added.
    """
    return _copy(raw, where, payload.MAX_DEPTH + wrapped)


def _copy(raw: Any, where: str, levels: int) -> Any:
    if raw is None or isinstance(raw, bool):
        return raw
    if isinstance(raw, str):
        return _stored(raw, where)
    if isinstance(raw, (int, float)):
        if raw.bit_length() <= 1024 if isinstance(raw, int) else math.isfinite(raw):
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
    """Return a value that is an object, without checking its members."""
    if not isinstance(raw, Mapping):
        raise errors.InvalidWorkflow(f"{where}: an object is needed, not {_kind(raw)}")
    return cast("Mapping[str, Any]", raw)


def members(found: Any) -> dict[str, Any]:
    """Return a copy of a node's output in a context, or {} for an app's value of another type."""
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
    """Return the text under a key, of 1 to `limit` characters; None if it is missing or null."""
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

    The parts `.`, `..` and `.scratch`, which mean other folders, are percent-encoded, even before
    the number of a loop's round, and so are parts that look as if they were encoded.
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


# --- Inputs of the nodes of pipelines.

OUT = "$out"


Source: TypeAlias = Callable[[str, Mapping[str, Any]], Any]
"""Returns the template of a pipeline node's input, given the prefix of the step's node ids, such as
`cut/`, and the inputs of the step."""


def parse_source(text: str, siblings: Collection[str], where: str) -> Source:
    """Return a parsed `from`; raise `InvalidWorkflow` for an unknown form or sibling."""
    text = text.strip()
    if text.startswith("pipeline._implicit(") and text.endswith(")"):
        template = _literal(text[len("pipeline._implicit(") : -1].strip(), where)
        return lambda _, __: template
    if text.startswith("pipeline._siblings(") and text.endswith(")"):
        listed = text[len("pipeline._siblings(") : -1].strip()
        if not (listed.startswith("[") and listed.endswith("]")):
            raise errors.InvalidWorkflow(f"{where}: {text!r} must list its siblings in [ ]")
        chosen = [part.strip().strip("'\"") for part in listed[1:-1].split(",") if part.strip()]
        paths = [folder(_sibling(name, siblings, where)) for name in chosen]
        return _from_paths(paths, many=True)
    if text.startswith("pipeline."):
        rest = text.removeprefix("pipeline.")
        if not rest or (rest.startswith("_") and "(" in rest):
            raise errors.InvalidWorkflow(
                f"{where}: {text!r} is none of pipeline.<key>, pipeline._implicit(<literal>), "
                "pipeline._siblings([a, b])"
            )
        return lambda _, given: as_input(given.get(rest))
    sibling, path = _of_sibling(text, siblings)
    place = folder(_sibling(sibling, siblings, where))
    below = "" if path is None else f"/{_inside(path, text, where)}"
    return _from_paths([place + below], many=False)


def _from_paths(paths: list[str], *, many: bool) -> Source:
    """Return the source of these paths of sibling nodes, relative to the step's folder."""

    def placed(prefix: str, _: object) -> dict[str, Any]:
        start = folder(prefix)
        found = [f"{start}{path}" for path in paths]
        return {OUT: found if many else found[0]}

    return placed


def _of_sibling(text: str, siblings: Collection[str]) -> tuple[str, str | None]:
    """Return the sibling that a `from` begins with, and the path after its dot, if it has one.

    Ids may contain dots, so the longest matching id counts.
    """
    longest = MAX_ID_CHARS
    at = len(text) if len(text) <= longest else text.rfind(".", 0, longest + 1)
    while at > 0 and text[:at] not in siblings:
        at = text.rfind(".", 0, at)
    if at <= 0:
        head, dot, rest = text.partition(".")
        return head, rest if dot else None
    return text[:at], text[at + 1 :] if at < len(text) else None


def _sibling(name: str, siblings: Collection[str], where: str) -> str:
    if name not in siblings:
        raise errors.InvalidWorkflow(f"{where}: 'from' names the unknown sibling {name!r:.120}")
    return name


def _inside(rest: str, text: str, where: str) -> str:
    parts = rest.split("/")
    if any(part in ("", ".", "..") or "\\" in part for part in parts):
        raise errors.InvalidWorkflow(f"{where}: 'from' {text!r} does not stay in its folder")
    return rest


def _literal(text: str, where: str) -> Any:
    """Return the literal as JSON, else as Python, else the text; quoted if it looks like a ref."""
    from queue_workflows import refs  # late: a process that only queues jobs needs no workflows

    try:
        found = _parsed(text)
    except (RecursionError, MemoryError) as error:
        raise errors.InvalidWorkflow(f"{where}: the literal is nested too deep") from error
    template = value(found, where)
    return {"$value": template} if refs.has_refs(template) else as_input(template)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except ValueError:
        pass
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError):
        return text
    try:
        return json.loads(json.dumps(found))  # the keys become texts, as in a stored document
    except (TypeError, ValueError):
        return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def as_input(template: Any) -> Any:
    """Return an app's value as an input, quoted if it looks like the marker."""
    return {OUT: {"$value": template}} if is_marker(template) else template


def is_marker(value: Any) -> TypeGuard[dict[str, Any]]:
    """Return whether an input is the marker or a quoted value, with the single key `$out`."""
    return isinstance(value, dict) and OUT in value


def with_paths(marker: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Return a marker with `change` applied to each path; a quoted value stays unchanged."""
    marked = marker[OUT]
    if isinstance(marked, dict):
        return dict(marker)
    if isinstance(marked, list):
        return {OUT: [change(path) for path in cast("list[str]", marked)]}
    return {OUT: change(marked)}


def bind_paths(template: Mapping[str, Any], out_dir: str | None, *, node_id: str) -> dict[str, Any]:
    """Return a node's inputs with every marker replaced by paths under `out_dir`.

    Raises `InvalidWorkflow`, with the node, if it needs a path and the run has no folder.
    """
    return {
        name: _bound(cast("dict[str, Any]", value), out_dir, node_id, name)
        if isinstance(value, dict) and OUT in value
        else value
        for name, value in template.items()
    }


def _bound(marker: dict[str, Any], out_dir: str | None, node_id: str, name: str) -> Any:
    if isinstance(marker[OUT], dict):
        return marker[OUT]["$value"]
    if out_dir is None:
        raise errors.InvalidWorkflow(
            f"node {node_id!r}: input {name!r} is a path under out_dir, and the run has none"
        )
    root = out_dir.rstrip("/")
    return with_paths(marker, lambda path: f"{root}/{path}")[OUT]
