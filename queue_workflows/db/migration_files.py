"""Read the migrations of a chain from the files of its folder."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

from queue_workflows import errors, migrations

_FILE = re.compile(r"(\d{4})_(.+?)(\.down)?\.sql")
_COMPATIBLE = re.compile(r"^--\s*compatible-with:\s*(\d+)\s*$", re.MULTILINE)


class Migration(NamedTuple):
    """One step of a chain: its number, its name and the SQL of both directions."""

    version: int
    name: str
    up: str
    down: str | None

    @property
    def checksum(self) -> str:
        """Return the SHA-256 of the forward text."""
        return hashlib.sha256(self.up.encode()).hexdigest()

    @property
    def compatible_with(self) -> int:
        """Return the oldest code that may work on it (`-- compatible-with: N`); 0: any."""
        match = _COMPATIBLE.search(self.up)
        return int(match[1]) if match else 0


def chain(migrations_dir: str | Path | None = None) -> list[Migration]:
    """Return the migrations in a folder, in order.

    Files whose names start with no digit are ignored. Raises `MigrationFailed` for a folder that is
    missing or has none, a misnamed file, two of one version, and a down file without its up file.
    """
    folder = Path(migrations_dir) if migrations_dir is not None else migrations.dir()
    if not folder.is_dir():
        raise errors.MigrationFailed(f"no migration folder {str(folder)!r}: name one that exists")
    ups, downs = _files(folder)
    if orphans := sorted(downs.keys() - {path.stem for path in ups.values()}):
        raise errors.MigrationFailed(f"{orphans[0]}.down.sql has no {orphans[0]}.sql beside it")
    if not ups:
        raise errors.MigrationFailed(f"no NNNN_name.sql in migration folder {str(folder)!r}")
    found: list[Migration] = []
    for version in sorted(ups):
        path, down = ups[version], downs.get(ups[version].stem)
        text = down.read_text("utf-8") if down else None
        found.append(Migration(version, path.stem[5:], path.read_text("utf-8"), text))
    return found


def _files(folder: Path) -> tuple[dict[int, Path], dict[str, Path]]:
    """Return up files by version, down files by the stem of their up file."""
    ups: dict[int, Path] = {}
    downs: dict[str, Path] = {}
    for path in sorted(folder.glob("[0-9]*.sql")):
        match = _FILE.fullmatch(path.name)
        if match is None:
            raise errors.MigrationFailed(f"{path.name}: a migration is named NNNN_name.sql")
        version = int(match[1])
        if match[3]:
            downs[path.name.removesuffix(".down.sql")] = path
        elif version in ups or version < 1:
            raise errors.MigrationFailed(f"{path.name}: version {version} is taken or not positive")
        else:
            ups[version] = path
    return ups, downs


REQUIRED_VERSION = max(_files(migrations.dir())[0])
"""The schema version that this code works with: the highest of its own chain."""
