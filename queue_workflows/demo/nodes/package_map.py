"""Node for the gpu queue: where each package lies on a map of likeness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from queue_workflows.demo import files, likeness, models

MAPPED = 80
"""So many of the largest packages; with more, a map is a cloud."""


def run(survey: Path, out: Path, model_handle: models.CodeWords) -> dict[str, Any]:
    """Write `positions.json`."""
    words: dict[str, dict[str, int]] = files.read(survey / "words.json")
    vectors = {name: model_handle.vector(words[name]) for name in list(words)[:MAPPED]}
    return {"positions": str(files.write(out / "positions.json", likeness.lay_out(vectors)))}
