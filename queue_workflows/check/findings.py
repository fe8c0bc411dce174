"""Define the findings of a workflow's check: errors and warnings with their texts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Finding(NamedTuple):
    """`level` is error (it will not run as written) or warning; `at` names the node or step."""

    level: str
    at: str
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.level}: {self.at}: {self.message}; {self.remedy}"


def error(at: str, message: str, remedy: str) -> Finding:
    """Return a finding that fails a run, or passes a node something else than was closest."""
    return Finding("error", at, message, remedy)


def warning(at: str, message: str, remedy: str) -> Finding:
    """Return a finding that may be intended, and fails some runs or has no effect."""
    return Finding("warning", at, message, remedy)


def listed(names: Iterable[str], most: int = 12) -> str:
    """Return the names in order, as many as a line takes; `nothing` for none."""
    ordered = list(names)
    shown = ", ".join(ordered[:most])
    return f"{shown} and {len(ordered) - most} more" if len(ordered) > most else shown or "nothing"
