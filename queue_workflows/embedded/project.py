"""Find the project that an app, script or folder belongs to, and name its embedded database."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from queue_workflows import errors

_STEM_MAX = 40
"""Most characters of the folder's name in a name of a database, which has at most 63 bytes."""
_NAME = re.compile(r"[A-Za-z0-9_]{1,63}")
_RESERVED = frozenset({"postgres", "template0", "template1"})
_INSTALLED = frozenset({"site-packages", "dist-packages"})
DEMO = "demo"


class Project(NamedTuple):
    """The name of a database, and the folder of the project that it belongs to."""

    name: str
    folder: Path | None
    """None if the database was chosen with `--db`; several apps may share such a database."""


def named(name: str) -> Project:
    """Return the project for a name from `--db`.

    Raises `InvalidConfig` for a reserved name, and for one with other characters or a wrong length.
    """
    if not _NAME.fullmatch(name) or name in _RESERVED:
        raise errors.InvalidConfig(
            f"--db {name!r} is not a valid database name: use 1 to 63 letters, digits or '_', and "
            f"none of the reserved names {', '.join(sorted(_RESERVED))}; "
            "`queue-workflows databases` lists the databases that exist"
        )
    return Project(name, None)


def of_folder(folder: Path) -> Project:
    """Return the project of a folder, whether or not anything is in it.

    Two folders of one name have different digits at the end of the database's name.
    """
    real = folder.resolve()
    stem = re.sub(r"[^a-z0-9]+", "_", real.name.lower()).strip("_")[:_STEM_MAX] or "app"
    digest = hashlib.sha256(os.fsencode(real)).hexdigest()[:8]
    return Project(f"{stem}_{digest}", real)


def here() -> Path:
    """Return the current folder, or `/` if the current folder no longer exists."""
    try:
        return Path.cwd()
    except OSError:
        return Path("/")


def around(folder: Path) -> list[Project]:
    """Return the projects that a folder may belong to, nearest first.

    These are the folder itself, its `src` subfolder, and then the same for each parent folder.
    """
    real = folder.resolve()
    folders = [each / below for each in (real, *real.parents) for below in ("", "src")]
    return [of_folder(each) for each in folders]


def of_module(module: str) -> Project:
    """Return the project of an app, given its imported module.

    The project's folder is the one that contains the top-level module or package. For an installed
    app it is the package itself, because all installed apps share `site-packages`. Modules of this
    package give `DEMO`. A module that has no file gives the current folder.
    """
    top = module.partition(".")[0]
    loaded = sys.modules.get(top)
    place = _place(loaded) if loaded is not None else None
    if top == __name__.partition(".")[0]:
        return Project(DEMO, place)
    if place is None:
        return of_folder(here())
    if _INSTALLED & set(place.parts):
        return of_folder(place)
    return of_folder(_above_packages(place.parent))


def of_script() -> Project | None:
    """Return the project of the script that this process runs; None for an installed command."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py"):
        return None
    path = Path(file).resolve()
    ours = Path(__file__).resolve().parents[1]
    elsewhere = (Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve(), ours)
    if _INSTALLED & set(path.parts) or any(path.is_relative_to(each) for each in elsewhere):
        return None
    return of_folder(_above_packages(path.parent))


def _place(module: ModuleType) -> Path | None:
    """Return the package's folder, or the module's file path without its suffix, or None."""
    for folder in getattr(module, "__path__", ()):
        return Path(folder).resolve()
    file = getattr(module, "__file__", None)
    return Path(file).resolve().with_suffix("") if isinstance(file, str) else None


def _above_packages(folder: Path) -> Path:
    """Return the nearest folder without `__init__.py`, this one or a parent.

    A module may be started from inside its package.
    """
    while (folder / "__init__.py").exists() and folder != folder.parent:
        folder = folder.parent
    return folder
