"""Copy the checkout, so that nothing is ever mutated in place."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
_LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "build", "dist", "site"
)


def copy(folder: Path) -> None:
    """Copy the files of the checkout into a folder, which is made."""
    shutil.copytree(ROOT, folder, ignore=_LEFT_OUT, symlinks=True)
