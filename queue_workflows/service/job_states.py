"""Name the states of jobs as the service shows them: `succeeded`, `canceled`, `lost`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from queue_workflows import errors
from queue_workflows.types import JsonDict, Row

_NAMES: Final = {"completed": "succeeded", "cancelled": "canceled"}
"""The service's names of statuses, where the engine has others."""
_ENGINE: Final = ("queued", "running", "completed", "failed", "cancelled")


def name(status: str, *, lost: bool = False) -> str:
    """Return the name of a status of the engine; `lost`: the job's lease has lapsed."""
    return "lost" if lost else _NAMES.get(status, status)


def named(row: Row | JsonDict) -> JsonDict:
    """Return a row of a job with the name of its state as `status`, without `lost` and `seq`."""
    shown = {key: value for key, value in row.items() if key not in ("lost", "seq")}
    return shown | {"status": name(row["status"], lost=row["lost"])}


def wanted(names: Sequence[str] | None) -> dict[str, Any]:
    """Return the filters `status` and `lost` of `jobs.list` for these names of states; None: all.

    The engine's names are accepted too. Raises `InvalidConfig` for any other name.
    """
    if names is None:
        return {}
    of_engine = {name(status): status for status in _ENGINE} | {"lost": "running"}
    for one in names:
        if one not in of_engine and one not in _ENGINE:
            raise errors.InvalidConfig(f"status {one!r:.80}: it is one of {', '.join(of_engine)}")
    found = [of_engine.get(one, one) for one in names]
    both = "running" in names and "lost" in names
    return {"status": found, "lost": None if both else "lost" in names}
