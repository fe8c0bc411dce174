"""Shapes that every floor shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

Row: TypeAlias = dict[str, Any]
"""One table row by column name; jsonb is decoded, timestamps are aware datetimes."""

JsonDict: TypeAlias = dict[str, Any]
"""A JSON object."""

NowFn: TypeAlias = Callable[[], float]
"""A monotonic clock in seconds."""

SleepFn: TypeAlias = Callable[[float], object]
"""Waits that many seconds."""

ExitFn: TypeAlias = Callable[[int], None]
"""Leaves the process with an exit code; `os._exit` in production."""

WorkflowLoader: TypeAlias = Callable[[str], Mapping[str, Any]]
PipelineLoader: TypeAlias = Callable[[str], Mapping[str, Any]]
RefResolver: TypeAlias = Callable[[Any, Mapping[str, Any]], Any]
WidgetSpec: TypeAlias = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]
NodeHook: TypeAlias = Callable[[Row, Row, JsonDict], None]


def is_name(value: object) -> bool:
    """Whether the database takes it for a host, worker or model: 1 to 400 bytes, no NUL."""
    try:
        return isinstance(value, str) and "\x00" not in value and 1 <= len(value.encode()) <= 400
    except UnicodeEncodeError:
        return False


class WorkflowDocuments(Protocol):
    """A workflow that brings its own pipelines, each named `<workflow>.<step>`."""

    def document(self) -> Mapping[str, Any]:
        """`{"name", "steps"}`."""
        ...

    def pipelines(self) -> Mapping[str, Mapping[str, Any]]:
        """`{"name", "nodes"}` by name."""
        ...
