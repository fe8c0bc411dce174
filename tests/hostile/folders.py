"""Create the folders of a sweep: allowed ones for runs, and one outside that must not change."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

BASE = Path(tempfile.gettempdir()) / f"qw-hostile-{os.getpid()}"
ROOT, OUTSIDE = BASE / "root", BASE / "outside"
LINK = ROOT / "link"
"""Leads out of the root."""
FORBIDDEN = (
    str(OUTSIDE), f"{ROOT}/../outside", str(LINK), f"{LINK}/x", f"{ROOT}/./x/../../outside/y",
    f"{ROOT}-beside",
)  # fmt: skip
"""Values of `out_dir` that lead out of the root."""


@contextmanager
def made() -> Generator[None]:
    """Create the folders for the block."""
    ROOT.mkdir(parents=True)
    OUTSIDE.mkdir()
    (OUTSIDE / "secret").touch()
    LINK.symlink_to(OUTSIDE)
    try:
        yield
    finally:
        shutil.rmtree(BASE)


def touched() -> list[str]:
    """Return and remove what was written outside of the root, so that it is reported once."""
    beside = Path(f"{ROOT}-beside")
    left = [path for path in OUTSIDE.iterdir() if path.name != "secret"]
    found = [f"written outside of the root: {path}" for path in (*left, beside) if path.exists()]
    if not (OUTSIDE / "secret").exists():
        found.append("a file outside of the root was removed")
        (OUTSIDE / "secret").touch()
    for path in (*left, beside):
        shutil.rmtree(path, ignore_errors=True)
    return found
