"""Build migration folders, for tests of the schema."""

from __future__ import annotations

import shutil
from pathlib import Path

from queue_workflows import migrations


def chain_up_to(version: int, folder: Path) -> Path:
    """Return a folder with our own chain up to that version."""
    folder.mkdir(exist_ok=True)
    for path in migrations.dir().glob("*.sql"):
        if int(path.name[:4]) <= version:
            shutil.copy(path, folder / path.name)
    return folder


def write_chain(folder: Path, **texts: str) -> Path:
    """Return a folder with these migrations: `_0001_name="..."`, `_0001_name_down="..."`."""
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        stem = name.lstrip("_")
        if stem.endswith("_down"):
            stem = stem.removesuffix("_down") + ".down"
        (folder / f"{stem}.sql").write_text(text)
    return folder


def ours(*, down: bool = False) -> list[Path]:
    """Return the files of our own chain that apply its migrations, or revert them, in order."""
    return sorted(
        path for path in migrations.dir().glob("*.sql") if path.name.endswith(".down.sql") == down
    )
