"""Check an answer against an input node's question, and convert an option's label to its value."""

from __future__ import annotations

import json
import mimetypes
from collections.abc import Iterable
from typing import Any, cast

from queue_workflows import errors
from queue_workflows.dag import payload

MODULE = "__input__"
"""The start of the module name of an input node, before the widget's name."""
_LABELS = ("label", "name", "rel_path", "id")
_FILE_NAMES = ("path", "rel_path", "abs_path", "name")
_SHOWN = 12
TYPE = "$answer_type"
"""The key of a step and of its question; an app's own widget may have a key `answer_type`."""
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
    "array": (list,), "object": (dict,),
}  # fmt: skip
"""The types that this key may name, as in JSON Schema."""


def options(spec: Any) -> list[tuple[str, Any]]:
    """Return the choices of a spec as (label, value); [] for a question without.

    A stored spec may be any JSON, or `Unreadable`, which has no choices. The label of a record is
    the first of its members `label`, `name`, `rel_path` or `id`, its value is the record itself. An
    option of the widget `turnout` is a pair of label and value.
    """
    if not isinstance(spec, dict):
        return []
    spec = cast("dict[str, Any]", spec)
    given: Any = spec.get("turnout_options") or spec.get("options") or spec.get("library")
    if not isinstance(given, list):
        return []
    is_pair = spec.get("widget") == "turnout"
    return [_option(choice, is_pair) for choice in cast("list[Any]", given)]


def _option(choice: Any, is_pair: bool) -> tuple[str, Any]:
    if not isinstance(choice, dict):
        return str(choice), choice
    record = cast("dict[str, Any]", choice)
    name = next((record[k] for k in _LABELS if k in record), record)
    return str(name), record.get("value") if is_pair else record


def check(spec: Any, value: Any, where: str) -> None:
    """Raise `InvalidAnswer` for a value that the widget's spec does not allow.

    `turnout` and `choose_one` take an option (a list of options with `multiple`), `file_upload` and
    `pick_or_upload` a member of the library, null, or files whose names the spec accepts. An app's
    own widget and a question without options take any value. Raises `InputRefused` for None, before
    the question is asked, and for a spec that cannot be read.
    """
    if spec is None:
        raise errors.InputRefused(
            f"{where} has asked nothing yet: is an orchestrator running? What it takes is known "
            "once it waits"
        )
    if not isinstance(spec, dict):
        raise errors.InputRefused(
            f"{where} asks what cannot be read: cancel its run, or answer without a check"
            " (`queue-workflows answer --unchecked`)"
        )
    spec = cast("dict[str, Any]", spec)
    widget, choices = spec.get("widget"), options(spec)
    picked = any(_same(value, choice) for _, choice in choices)
    if widget in ("turnout", "choose_one") and choices:
        _check_choice(spec, value, choices, where)
    elif widget in ("file_upload", "pick_or_upload") and not picked:
        _check_files(spec, value, where)


def type_of(spec: Any) -> str | None:
    """Return the type that a question asks for, or None."""
    named = cast("dict[str, Any]", spec).get(TYPE) if isinstance(spec, dict) else None
    return named if isinstance(named, str) and named in _TYPES else None


def other_type(spec: dict[str, Any]) -> str | None:
    """Return the type of a question's answers, or None if it is unknown or boolean."""
    named = type_of(spec)
    for each in (named,) if named else (spec.get("type"), spec.get("widget")):
        if each in _TEXT or bool not in _NOT_TEXT.get(str(each), (bool,)):
            return str(each)
    return None


def check_type(spec: Any, value: Any, where: str) -> None:
    """Raise `InvalidAnswer` for a value that is neither null nor of the question's type."""
    named = type_of(spec)
    if named and not _is_of(named, value):
        raise errors.InvalidAnswer(
            f"{where} does not take {_text(value)}: its answer is of type {named}"
        )


def _is_of(named: str, value: Any) -> bool:
    if value is None or isinstance(value, bool):
        return value is None or named == "boolean"
    whole = named == "integer" and isinstance(value, float) and value.is_integer()
    return whole or isinstance(value, _TYPES[named])


def _check_choice(
    spec: dict[str, Any], value: Any, choices: list[tuple[str, Any]], where: str
) -> None:
    listed = [value]
    if spec.get("multiple"):
        if not isinstance(value, list):
            raise errors.InvalidAnswer(f"{where} takes a list: a JSON array of some of its options")
        listed = cast("list[Any]", value)
    for each in listed:
        if not any(_same(each, choice) for _, choice in choices):
            raise errors.InvalidAnswer(
                f"{where} does not take {_text(each)}: it is one of {_named(choices)}"
            )


def _check_files(spec: dict[str, Any], value: Any, where: str) -> None:
    """Check the names of files by `accept`: `[".csv"]`, `".csv, image/*"`, with or without dots."""
    accept = spec.get("accept")
    listed: Any = accept.split(",") if isinstance(accept, str) else accept
    listed = cast("list[Any]", listed) if isinstance(listed, list) else []
    texts = [str(each).strip().lower() for each in listed]
    accepted = [text if text[0] in ".*" or "/" in text else f".{text}" for text in texts if text]
    for name in _files(value):
        if accepted and not any(_accepts(pattern, name) for pattern in accepted):
            raise errors.InvalidAnswer(
                f"{where} does not take {name!r}: it accepts {', '.join(accepted)}"
            )


def _accepts(pattern: str, name: str) -> bool:
    if pattern in ("*", "*/*", ".*"):
        return True
    if "/" not in pattern:
        return name.lower().endswith(pattern.removeprefix("*"))
    kind = mimetypes.guess_type(name)[0] or ""
    return kind.startswith(pattern[:-1]) if pattern.endswith("/*") else kind == pattern


def _files(value: Any) -> list[str]:
    """Return the file names in a value: a text, a record with one, or a list of either."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        record = cast("dict[str, Any]", value)
        return [str(record[key]) for key in _FILE_NAMES if key in record][:1]
    if isinstance(value, list):
        return [name for each in cast("list[Any]", value) for name in _files(each)]
    return []


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are equal in JSON: true is not 1, and 1 is 1.0."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        a, b = cast("dict[str, Any]", one), cast("dict[str, Any]", other)
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(one, list) and isinstance(other, list):
        left, right = cast("list[Any]", one), cast("list[Any]", other)
        return len(left) == len(right) and all(map(_same, left, right))
    return bool(one == other)


def meant(spec: Any, value: Any) -> Any:
    """Return the option's value if a person has entered its label, else `value`.

    A value of an option takes precedence over a label. With `multiple`, a single value becomes a
    list of one, and each member is converted. Any other value is returned unchanged.
    """
    if not (choices := options(spec)):
        return value
    if not spec.get("multiple"):
        return _meant(value, choices)
    listed = cast("list[Any]", value) if isinstance(value, list) else [value]
    return [_meant(each, choices) for each in listed]


def _meant(value: Any, choices: list[tuple[str, Any]]) -> Any:
    if any(_same(value, choice) for _, choice in choices):
        return value
    # If a person enters 7 for the option "7", it was read as a number.
    text = value if isinstance(value, str) else json.dumps(value)
    if any(choice == text for _, choice in choices):
        return text
    return next((choice for label, choice in choices if label == text), value)


_NUMBER = (int, float)
_NOT_TEXT: dict[str, tuple[type, ...]] = {
    "number": _NUMBER, "float": _NUMBER, "integer": (int,), "int": (int,), "slider": _NUMBER,
    "boolean": (bool,), "bool": (bool,), "checkbox": (bool,), "confirm": (bool,), "toggle": (bool,),
    "object": (dict,), "array": (list,), "list": (list,), "json": (dict, list, str, bool, *_NUMBER),
}  # fmt: skip
"""The types of an answer by the question's `type` (as in JSON Schema), or else its widget."""
_TEXT = ("text", "string", "str", "textarea")


def decoded(spec: Any, value: Any) -> Any:
    """Return the decoded value of a text answer if it is JSON and the question takes no text.

    Apps of 0.3.0 store `"5"` or `"true"`. The answer type, or else options, `type` or widget decide
    whether a question takes a text. For an integer, 5.0 becomes 5. Other answers are unchanged,
    also if the question cannot be read or the value cannot be stored.
    """
    found = value
    if isinstance(value, str) and isinstance(spec, dict):
        try:
            found = json.loads(value)
            payload.encode(found, "an answer")
        except (ValueError, RecursionError):
            return value
        if not _takes_instead(cast("dict[str, Any]", spec), found, value):
            return value
    is_whole = isinstance(found, float) and found.is_integer()
    return int(found) if is_whole and type_of(spec) == "integer" else found


def _takes_instead(spec: dict[str, Any], found: Any, text: str) -> bool:
    """Return whether a question takes the decoded value `found`, rather than its JSON text."""
    widget, kind, named = spec.get("widget"), spec.get("type"), type_of(spec)
    if (named or kind) in _TEXT:
        return False
    if named:
        return _is_of(named, found)
    if widget in ("turnout", "choose_one"):
        return not _is_taken(spec, text) and _is_taken(spec, found)
    if widget in ("file_upload", "pick_or_upload"):
        return found is None or isinstance(found, (dict, list))
    kinds = _NOT_TEXT.get(str(kind)) or _NOT_TEXT.get(str(widget), ())
    if found is None:
        return bool(kinds)  # no answer
    return isinstance(found, kinds) and (not isinstance(found, bool) or bool in kinds)


def _is_taken(spec: dict[str, Any], value: Any) -> bool:
    try:
        check(spec, value, "")
    except errors.InputRefused:
        return False
    return True


def _text(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _named(choices: Iterable[tuple[str, Any]]) -> str:
    named = [
        _text(value) if label == value or isinstance(value, dict) else f"{_text(value)} ({label})"
        for label, value in choices
    ]
    rest = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    return ", ".join(named[:_SHOWN]) + rest
