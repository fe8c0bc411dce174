"""Load the rows of jobs, which an executor gets as JSON, and pass those of answers as JSON."""

from __future__ import annotations

import datetime
import re
from typing import Any, Final, cast

from queue_workflows.runtime import json_loading
from queue_workflows.types import JsonDict, Row, Unreadable

_SKIP: Final = re.compile(rb'[^"\[\]{},]+|"(?:[^"\\]|\\.)*"')
TIME: Final = "\0time"
"""Tags a time in an answer: no stored JSON has a NUL."""


def loaded(body: bytes) -> Row:
    """Return a claimed job; a column that cannot be loaded is an `Unreadable`."""
    row = json_loading.load_json(body)
    if not isinstance(row, Unreadable):
        return row
    found: Row = {}
    for name, text in _members(body):
        found[name] = json_loading.load_json(text)
    if isinstance(found.get("context"), Unreadable):
        found["context"] = None  # the handler asks for the members that it needs
    return found


def _members(body: bytes) -> list[tuple[str, bytes]]:
    """Cut a JSON object into its names and the texts of their values."""
    found: list[tuple[str, bytes]] = []
    at = body.index(b"{") + 1
    while (start := body.find(b'"', at)) != -1:
        match = _SKIP.match(body, start)
        assert match is not None
        name, at, depth = (
            json_loading.decode(match[0].decode()),
            body.index(b":", match.end()) + 1,
            0,
        )
        begin = at
        while at < len(body):
            byte = body[at : at + 1]
            if byte in (b"[", b"{"):
                depth += 1
            elif byte in (b"]", b"}"):
                if not depth:
                    break
                depth -= 1
            elif byte == b"," and not depth:
                break
            if byte in b"[]{},":
                at += 1
            else:
                skipped = _SKIP.match(body, at)
                at = at + 1 if skipped is None else skipped.end()
        found.append((name, body[begin:at].strip()))
        if body[at : at + 1] != b",":
            break
        at += 1
    return found


def tagged(row: Row) -> JsonDict:
    """Return a row of an answer as JSON has it: a time is tagged, and an `Unreadable` is None."""
    return {name: _tagged(value) for name, value in row.items()}


def _tagged(value: Any) -> Any:
    if value is None or isinstance(value, (str, int, float, list, dict)):
        return cast("Any", value)
    if isinstance(value, datetime.datetime):
        return {TIME: value.isoformat()}
    return None if isinstance(value, Unreadable) else str(value)


def timed(row: Row) -> Row:
    """Return a row of an answer with its times."""
    return {name: _untagged(value) for name, value in row.items()}


def _untagged(value: Any) -> Any:
    if isinstance(value, dict) and isinstance(text := cast("Row", value).get(TIME), str):
        return datetime.datetime.fromisoformat(text)
    return cast("Any", value)
