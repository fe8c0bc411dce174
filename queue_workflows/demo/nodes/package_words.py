"""Node for the gpu queue: which words tell what a package is about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from queue_workflows.demo import files, likeness, models


def run(survey: Path, out: Path, model_handle: models.CodeWords) -> dict[str, Any]:
    """Write `words.json`."""
    words: dict[str, dict[str, int]] = files.read(survey / "words.json")
    telling = {name: likeness.telling_words(counts, model_handle) for name, counts in words.items()}
    return {"words": str(files.write(out / "words.json", telling))}
