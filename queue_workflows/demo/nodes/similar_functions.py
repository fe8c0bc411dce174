"""Node for the gpu queue: which functions are near-duplicates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from queue_workflows.demo import files, likeness, models


def run(
    survey: Path,
    out: Path,
    model_handle: models.CodeWords,
    status_callback: Callable[[float], object],
) -> dict[str, Any]:
    """Write `groups.json`."""
    functions = files.read(survey / "functions.json")
    groups = likeness.like_functions(functions, model_handle, status_callback)
    return {"groups": str(files.write(out / "groups.json", groups))}
