"""Refuse a claimed job if a column of its row is unreadable or of a wrong type."""

from __future__ import annotations

from typing import Any, Final, NoReturn

from queue_workflows import errors
from queue_workflows.types import Row, Unreadable


def check_node(job: Row) -> None:
    """Raise `UnreadableRow` if a node cannot run with what its row holds."""
    if not isinstance(job["node_module"], str):
        raise errors.UnreadableRow(f"node_module is {_kind(job['node_module'])}, not a text")
    for column in ("inputs", "input_template", "context"):
        if (value := job.get(column)) is not None and not isinstance(value, dict):
            _refuse(column, value)
    if "run" in job and not isinstance(job["run"], dict):
        _refuse("run", job["run"])


def check_ingest(job: Row) -> None:
    """Raise `UnreadableRow` if a task cannot run with what its job's row holds."""
    if isinstance(job["args"], Unreadable):
        _refuse("args", job["args"])
    if (headers := job.get("headers")) is not None and not isinstance(headers, dict):
        _refuse("headers", headers)


def _refuse(column: str, value: Any) -> NoReturn:
    if isinstance(value, Unreadable):
        raise errors.UnreadableRow(f"{column} cannot be loaded: {value.reason}")
    raise errors.UnreadableRow(f"{column} is {_kind(value)}, not an object")


_KINDS: Final = {
    "NoneType": "null",
    "bool": "a boolean",
    "int": "a number",
    "float": "a number",
    "str": "a text",
    "list": "an array",
}


def _kind(value: Any) -> str:
    name = type(value).__name__  # pyright: ignore[reportUnknownArgumentType]
    return _KINDS.get(name, f"a {name}")
