"""Node for the gpu queue: which packages are alike."""

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
    """Write `pairs.json`."""
    words: dict[str, dict[str, int]] = files.read(survey / "words.json")
    vectors = {name: model_handle.vector(counts) for name, counts in words.items()}
    pairs = likeness.like_pairs(vectors, status_callback)
    return {"pairs": str(files.write(out / "pairs.json", pairs))}
