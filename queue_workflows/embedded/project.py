"""Which database of the embedded server an app has: one per project, named by the app's folder."""

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
"""Characters of the folder's name; PostgreSQL allows 63 bytes, and `_` and 8 digits follow."""
_NAME = re.compile(r"[A-Za-z0-9_]{1,63}")
_RESERVED = frozenset({"postgres", "template0", "template1"})
_INSTALLED = frozenset({"site-packages", "dist-packages"})
DEMO = "demo"


class Project(NamedTuple):
    """A database by its name, and the folder of the app that it belongs to."""

    name: str
    folder: Path | None
    """None for a database that was named by hand and may be shared by several apps."""


def named(name: str) -> Project:
    """Return the project of a name given by hand. Raises `InvalidConfig` for an unusable one."""
    if not _NAME.fullmatch(name) or name in _RESERVED:
        raise errors.InvalidConfig(
            f"--db {name!r}: a database's name is 1 to 63 letters, digits and '_', and none of "
            f"{', '.join(sorted(_RESERVED))}; `queue-workflows databases` lists those that exist"
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
    """Return the current folder; the root if it was deleted while this process ran."""
    try:
        return Path.cwd()
    except OSError:
        return Path("/")


def around(folder: Path) -> list[Project]:
    """Return the projects that a folder may lie in, the nearest first.

    Each folder from this one upwards, and the `src` folder that stands beside it.
    """
    real = folder.resolve()
    folders = [each / below for each in (real, *real.parents) for below in ("", "src")]
    return [of_folder(each) for each in folders]


def of_module(module: str) -> Project:
    """Return the project of an app by its module, which has been imported.

    Its folder is the one in which the top-level module or package lies. An app that is installed
    shares that folder with others, so that its package is its folder.
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
    """The package's folder, or the module's file without its suffix."""
    for folder in getattr(module, "__path__", ()):
        return Path(folder).resolve()
    file = getattr(module, "__file__", None)
    return Path(file).resolve().with_suffix("") if isinstance(file, str) else None


def _above_packages(folder: Path) -> Path:
    """The nearest folder that is no package: a module may be started from inside its package."""
    while (folder / "__init__.py").exists() and folder != folder.parent:
        folder = folder.parent
    return folder
