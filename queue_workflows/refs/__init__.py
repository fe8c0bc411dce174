"""Resolve refs, the values `$value`, `$from`, `$eq`, `$ne` and `$filter` in plain data."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from queue_workflows import errors
from queue_workflows.refs import safe_patterns

MAX_DEPTH = 200
VALUE = "$result"
"""With `"$result": true` a stored `{"result": x}` is x, and another dict is as it is: the output of
a function whose annotation does not say whether it returns a dict."""
_MARK = "$dict"
OPERATORS = ("$filter", "$eq", "$ne")
"""The operators of a ref; the first one that it has counts."""
_INDEX = re.compile(r"-?[0-9]{1,9}")
_ITEM = re.compile(r"(?:[^.\[]*\[[^\]]*\])+[^.]*")
"""The id of an item's node at the start of a path, as `cut[a.png]/encode`: keys may have dots."""


def resolve_ref(value: Any, context: Mapping[str, Any]) -> Any:
    """Return the value of a template; a value found by `$from` is data and is not resolved.

    A segment of a path is a dict key or a list index (negative from the end), never an attribute.
    Of several operators the first of `OPERATORS` counts.
    Raises `RefNotFound` (KeyError), `InvalidRef` (ValueError: unknown operator, unsafe pattern,
    more than `MAX_DEPTH` dicts deep), TypeError (`$filter` on a non-list).
    """
    return _resolve(value, context, 0)


def _resolve(value: Any, context: Mapping[str, Any], depth: int) -> Any:
    if not isinstance(value, dict):
        return value
    if depth >= MAX_DEPTH:
        raise errors.InvalidRef(f"a value nested deeper than {MAX_DEPTH} levels")
    record = cast("dict[str, Any]", value)
    if "$value" in record:
        return record["$value"]
    if "$from" in record:
        return _lookup(record, context)
    return {key: _resolve(member, context, depth + 1) for key, member in record.items()}


def _lookup(ref: dict[str, Any], context: Mapping[str, Any]) -> Any:
    path = ref["$from"]
    if not isinstance(path, str):
        raise errors.InvalidRef(f"$from takes a path like 'a.b.c', not {type(path).__name__}")
    for key in ref:
        if key.startswith("$") and key not in ("$from", VALUE, *OPERATORS):
            raise errors.InvalidRef(
                f"$from {path!r}: unknown operator {key!r}; known are $eq, $ne, $filter"
            )
    found: Any = _walk(path, context)
    if ref.get(VALUE):
        found = _value(found)
    if "$filter" in ref:
        return _filter(path, found, ref["$filter"])
    if "$eq" in ref:
        return _equal(found, ref["$eq"])
    return not _equal(found, ref["$ne"]) if "$ne" in ref else found


def _value(output: Any) -> Any:
    """Return the value that a function returned from its stored output; see `marked`."""
    marks = _marks(output)
    if not marks:
        return output if marks is None else output["result"]
    return {key: member for key, member in output.items() if key != _MARK * marks}


def marked(returned: Any) -> Any:
    """Return a returned value as it is stored: a dict that looks like a stored value gets a mark.

    A value x that is not a dict is stored as `{"result": x}`. A dict of this form is stored as
    `{"result": x, "$dict": true}`; if it has marks itself, it gets one more: `$dict$dict`, and so
    on. Other values are returned unchanged.
    """
    marks = _marks(returned)
    return returned if marks is None else {**returned, _MARK * (marks + 1): True}


def _marks(output: Any) -> int | None:
    """Return the number of marks if `result` is the only other key; None for another value."""
    if not isinstance(output, dict) or "result" not in output:
        return None
    count = len(cast("dict[str, Any]", output)) - 1
    return count if all(_MARK * (n + 1) in output for n in range(count)) else None


def segments(path: str) -> list[str]:
    """Return the segments of a path; the id of an item's node is one, also if its key has dots."""
    if "[" not in path:
        return path.split(".")
    head = _ITEM.match(path)
    if head is None:
        return path.split(".")
    rest = path[head.end() :]
    return [head[0], *(rest[1:].split(".") if rest else ())]


def _walk(path: str, context: Mapping[str, Any]) -> Any:
    found: Any = context
    for segment in segments(path):
        if isinstance(found, Mapping):
            if segment in found:
                found = cast("Mapping[str, Any]", found)[segment]
                continue
        elif isinstance(found, (list, tuple)):
            items = cast("list[Any]", found)
            if _INDEX.fullmatch(segment) and -len(items) <= int(segment) < len(items):
                found = items[int(segment)]
                continue
        raise errors.RefNotFound(f"$from {path!r}: there is no {segment!r}")
    return found


def _equal(left: Any, right: Any) -> bool:
    try:
        return bool(left == right)
    except RecursionError as error:
        raise errors.InvalidRef("values too deep to compare") from error


def _filter(path: str, found: Any, conditions: Any) -> list[Any]:
    if not isinstance(found, (list, tuple)):
        raise TypeError(f"$from {path!r}: $filter needs a list, not {type(found).__name__}")
    if not isinstance(conditions, dict):
        raise errors.InvalidRef(
            f"$from {path!r}: $filter takes an object like {{'field:eq': value}}"
        )
    items = cast("list[Any]", found)
    effort = safe_patterns.Effort(len(items))
    tests = [
        _condition(str(key), operand, effort)
        for key, operand in cast("dict[Any, Any]", conditions).items()
    ]
    return [
        item
        for item in items
        if isinstance(item, dict) and all(test(cast("dict[str, Any]", item)) for test in tests)
    ]


def _condition(
    key: str, operand: Any, effort: safe_patterns.Effort
) -> Callable[[dict[str, Any]], bool]:
    field, _, operator = key.rpartition(":")
    if operator == "eq" and field:
        return lambda item: _equal(item.get(field), operand)
    if operator == "matches" and field:
        pattern = safe_patterns.safe_pattern(operand)
        return lambda item: safe_patterns.matches(pattern, item.get(field), effort)
    raise errors.InvalidRef(f"$filter {key!r}: a condition is '<field>:eq' or '<field>:matches'")


def attempt(
    value: Any, context: Mapping[str, Any], resolver: Callable[[Any, Mapping[str, Any]], Any]
) -> tuple[Any, str | None]:
    """Return `(resolved, None)`, or `(None, reason)` if the resolver, perhaps the app's, raises."""
    try:
        return resolver(value, context), None
    except errors.QueueWorkflowsError as error:
        return None, str(error)
    except Exception as error:  # noqa: BLE001  boundary around app code
        return None, f"{type(error).__name__}: {error}"


def resolve_inputs(
    template: Mapping[str, Any],
    context: Mapping[str, Any],
    fallback: Mapping[str, Any],
    resolver: Callable[[Any, Mapping[str, Any]], Any] = resolve_ref,
) -> dict[str, Any]:
    """Return the template with every member resolved once.

    A member that does not resolve keeps its value of `fallback`; without one it is left out.
    """
    resolved: dict[str, Any] = {}
    for name, value in template.items():
        found, reason = attempt(value, context, resolver)
        if reason is None:
            resolved[name] = found
        elif name in fallback:
            resolved[name] = fallback[name]
    return resolved


def replaced(template: Any, change: Callable[[dict[str, Any]], Any]) -> Any:
    """Return a template in which `change(ref)` stands for each ref; quoted values stay."""
    if not isinstance(template, dict):
        return template
    record = cast("dict[str, Any]", template)
    if "$value" in record:
        return record
    if "$from" in record:
        return change(record)
    return {key: replaced(member, change) for key, member in record.items()}


def inside(value: Any) -> list[dict[str, Any]]:
    """Return every `$value` and `$from` dict that `resolve_ref` would visit, at any depth."""
    found: list[dict[str, Any]] = []
    waiting = [value]
    while waiting:
        member = waiting.pop()
        if isinstance(member, dict):
            record = cast("dict[str, Any]", member)
            if "$value" in record or "$from" in record:
                found.append(record)
            else:
                waiting.extend(record.values())
    return found


def has_refs(value: Any) -> bool:
    """Return whether resolving changes the value."""
    return bool(inside(value))


def heads(value: Any) -> set[str]:
    """Return the first segment of every `$from` path: the context keys that resolving needs."""
    paths = (ref["$from"] for ref in inside(value) if "$value" not in ref)
    return {segments(path)[0] for path in paths if isinstance(path, str)}
