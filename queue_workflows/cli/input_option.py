"""Parse the options `--input k=v` and `--input @file.json` into the inputs of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from queue_workflows import errors


def inputs(
    given: Iterable[str], accepts: Callable[[str, Any], bool] = lambda _key, _value: True
) -> dict[str, Any]:
    """Return the members of all `k=v` and files; later ones win.

    A value that is not JSON is text. So is one that `accepts(key, value)` takes only as text: a
    parameter annotated `str` gets `123` as text. Raises `InvalidConfig` that names the option and
    the right form.
    """
    merged: dict[str, Any] = {}
    for text in given:
        if text.startswith("@"):
            merged |= _from_file(text[1:])
            continue
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise errors.InvalidConfig(f"--input {text!r} should be key=value or @file.json")
        merged[key] = value_of(value, f"--input {key}")
        if not accepts(key, merged[key]) and accepts(key, value):
            merged[key] = value
    return merged


def value_of(text: str, what: str) -> Any:
    """Return the text as JSON if it is JSON, else the text itself."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise errors.InvalidConfig(f"{what} is nested too deeply") from None
    except ValueError:
        return text


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _from_file(name: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(name).read_text(encoding="utf-8"), parse_constant=_no_constant)
    except OSError as error:
        raise errors.InvalidConfig(f"--input @{name} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise errors.InvalidConfig(f"--input @{name} is not JSON: {reason}") from None
    if not isinstance(found, dict):
        raise errors.InvalidConfig(f"--input @{name} should hold a JSON object")
    return found  # pyright: ignore[reportUnknownVariableType]  a JSON object has string keys
