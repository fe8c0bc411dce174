"""Encode values as JSON that the database stores, and refuse the others before any write."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from queue_workflows import config, errors, refs
from queue_workflows.dag import jsonable, plan, policy
from queue_workflows.runtime import masking
from queue_workflows.types import Unreadable

ERROR_LIMIT = 8000
"""Characters of an error text that are stored; the contract names the figure."""

KIB = 1024
PART_BYTES = 8 * KIB * KIB
_SCALARS = frozenset((str, int, float, bool, type(None)))


class Encoder(json.JSONEncoder):
    """Encode JSON even if an app replaces methods of the base class."""

    encode = json.JSONEncoder.encode
    iterencode = json.JSONEncoder.iterencode

    def default(self, o: Any) -> Any:
        """Raise TypeError for what JSON does not have."""
        raise TypeError(f"Object of type {type(o).__name__} is not JSON serializable")


_to_json = Encoder(allow_nan=False).encode
_DIGITS = 308
_TENTHS = re.compile("[0-9]{10}")
_ESCAPED = re.compile(r"\\u(?:0000|d[89a-f][0-9a-f]{2})", re.IGNORECASE)


def encode(value: Any, what: str) -> str:
    """Return the value as JSON text that PostgreSQL's jsonb takes.

    Dates, times, UUIDs, Decimals, paths, enum members, dataclasses and pydantic models are encoded
    as by `jsonable.plain`. Raises `InvalidPayload` (a ValueError), one line that starts with
    `what` and names the place of what JSON cannot carry (sets, NaN, other objects, keys that are
    not strings), of NUL characters and lone surrogates; also past MAX_PAYLOAD_DEPTH levels of
    nesting, MAX_PAYLOAD_KB KiB, or a number of 1.7976931348623157e308.
    """
    if not _is_flat(value):
        _check(value, what, config.MAX_PAYLOAD_DEPTH.read(), config.MAX_PAYLOAD_KB.read())
    try:
        text = _to_json(value)
    except (TypeError, ValueError, RecursionError):
        text = None
    if text is None:  # Outside of the except clause, so that a refusal hides the encoder's error.
        text = _to_json(jsonable.plain(value, what))
    if "\\u" in text and _ESCAPED.search(text) and _unstorable(value):
        jsonable.plain(value, what)  # raises, and names the place of the text
    # A number that is too large has 309 digits, so every 30th character of it makes ten in a row.
    if len(text) > _DIGITS and _TENTHS.search(text[::30]):
        jsonable.plain(value, what)  # raises for a number, and names its place
    if len(text) > KIB and len(text) > (limit_kb := config.MAX_PAYLOAD_KB.read()) * KIB:
        raise _too_large(what, f"{len(text) / KIB:.0f} KiB of JSON", limit_kb)
    return text


def _is_flat(value: Any) -> bool:
    """Return whether it is a scalar or an object of scalars, which needs no further check."""
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


def encode_definition(definition: dict[str, Any]) -> str:
    """Return a checked definition as JSON text; MAX_NODES_PER_RUN bounds it, not MAX_PAYLOAD_KB."""
    return json.dumps(definition)


def encode_items(keys: Iterable[str], items: Iterable[Any]) -> str:
    """Return the items of a map, which were stored before, as a JSON array of `{key, item}`."""
    pairs = zip(keys, items, strict=True)
    return _to_json([{"key": key, "item": item} for key, item in pairs])


def encode_errors(failed: Mapping[str, str]) -> str:
    """Return the errors of items by their keys as JSON."""
    return _to_json({key: error_text(error) for key, error in failed.items()})


def encode_plan(rows: Iterable[plan.NewNode]) -> Iterator[str]:
    """Yield the rows of a plan as JSON arrays for `nodes.insert_planned`, of about PART_BYTES each.

    An array with large inputs is small enough for one statement. Raises `InvalidPayload`, which
    names the node whose resolved inputs cannot be stored.
    """
    return encode_rows(map(encode_row, rows))


def encode_rows(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts of `encode_row` as JSON arrays, as `encode_plan` does."""
    for part in parts(texts):
        yield f"[{','.join(part)}]"


def parts(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield the texts in order, in lists of about PART_BYTES; no list for no texts."""
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


def encode_row(row: plan.NewNode) -> str:
    """Return a row of a plan as JSON; raise `InvalidPayload` as `encode_plan` does."""
    if row.node.map is not None:
        return _to_json(_map_row(row))
    inputs = encode(row.inputs or {}, f"inputs of node {row.node.id!r}")
    columns = {
        "node_id": row.node.id,
        "node_module": row.node.module,
        "queue": row.node.queue,
        "required_model": row.node.model,
        "required_version": row.node.version_key,
        "pipeline_name": row.node.pipeline,
        "status": row.status,
        "input_template": row.template,
        "ref_heads": sorted(refs.heads(row.template)),
    }
    if row.child is not None:
        columns["child"] = row.child
    if row.result is not None:
        result = encode(row.result, f"output of node {row.node.id!r}")
        return f'{_to_json(columns)[:-1]}, "inputs": {inputs}, "context_delta": {result}}}'
    if row.node.policy:
        columns |= policy.columns(row.node.policy, is_input=row.node.step is not None)
    return f'{_to_json(columns)[:-1]}, "inputs": {inputs}}}'


def _map_row(row: plan.NewNode) -> dict[str, Any]:
    """Return the row of a map: it waits for its items, which are stored elsewhere."""
    return {
        "node_id": row.node.id,
        "node_module": row.node.module,
        "queue": row.node.queue,
        "status": row.status,
        "blocked_reason": "items" if row.status == "queued" else None,
        "inputs": {},
        "input_template": {},
        "ref_heads": [],
    }


def _check(value: Any, what: str, limit: int, limit_kb: int) -> None:
    level: list[Any] = [value]
    for _ in range(limit):
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                for key, member in item.items():  # pyright: ignore[reportUnknownVariableType]
                    if not isinstance(key, str):
                        jsonable.plain(value, what)  # raises, and names the place of the key
                    if isinstance(member, (dict, list, tuple)):
                        deeper.append(member)
            else:
                deeper += [m for m in item if isinstance(m, (dict, list, tuple))]  # pyright: ignore[reportUnknownVariableType]
        if not deeper:
            return
        # Each takes two characters at least. A value that holds itself twice is refused here.
        if len(deeper) * 2 > limit_kb * KIB:
            raise _too_large(what, f"at least {len(deeper)} lists and objects", limit_kb)
        level = deeper
    raise errors.InvalidPayload(f"{what}: nested deeper than {limit} levels")


def _unstorable(value: Any) -> bool:
    todo: list[Any] = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            if jsonable.UNSTORABLE.search(item):
                return True
        elif isinstance(item, dict):
            todo.extend(item.keys())  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
            todo.extend(item.values())  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
        elif isinstance(item, (list, tuple)):
            todo.extend(item)  # pyright: ignore[reportUnknownArgumentType]
    return False


def is_storable(text: str) -> bool:
    """Return whether the database can store a text: it has no NUL and no lone surrogate."""
    return jsonable.UNSTORABLE.search(text) is None


def error_text(error: object) -> str:
    """Return an error as text that the database stores: at most ERROR_LIMIT characters.

    Secrets are masked. A replacement character stands for each NUL and lone surrogate.
    """
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  app code: an error's own __str__
        text = f"{type(error).__name__} that cannot be printed"
    # Masked before it is cut, or a cut could hide that a text is a secret.
    text = masking.mask(text[: 2 * ERROR_LIMIT])
    return jsonable.UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", text)[:ERROR_LIMIT]
