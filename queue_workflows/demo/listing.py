"""Which Python files a folder holds, and which package each belongs to."""

from __future__ import annotations

import os
import platform
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TypedDict

TESTS, INSTALLED = "folders of tests", "folders of installed code"
UNREADABLE, SPECIAL = "folders that cannot be read", "links and special files"
NOT_ENTERED = {
    "test": TESTS,
    "tests": TESTS,
    "idle_test": TESTS,
    "site-packages": INSTALLED,
    "dist-packages": INSTALLED,
    "node_modules": INSTALLED,
}
MAX_SOURCE_KB = 2048
"""A larger source is not parsed: the parser takes some hundred times its size in memory."""
READING_COST_BYTES = 1024
"""What opening a file costs, as so many bytes of parsing; many small files are work too."""


class Source(TypedDict):
    """A file: its path from the folder with `/`, its dotted name, and what it is counted under."""

    path: str
    module: str
    package: str
    size_bytes: int


class Listing(TypedDict):
    """The sources, package by package; `left_out` counts what was not looked at, by kind."""

    folder: str
    python: str
    sources: list[Source]
    left_out: dict[str, int]


def standard_library() -> Path:
    """The folder with the standard library of the Python that runs this."""
    return Path(sysconfig.get_path("stdlib"))


def list_sources(folder: Path) -> Listing:
    """Every `*.py` below a folder, links not followed.

    Raises NotADirectoryError or PermissionError that names the folder.
    """
    if not folder.is_dir():
        raise NotADirectoryError(f"{str(folder)!r} does not exist or is no folder")
    top = folder.resolve()
    left_out: Counter[str] = Counter()
    above = _packages_above(top)
    sources = [_source(path, above, size_bytes) for path, size_bytes in _walk(top, left_out)]
    sources.sort(key=lambda source: (source["package"], source["path"]))
    major, minor, _ = platform.python_version_tuple()
    return Listing(
        folder=str(top),
        python=f"{major}.{minor}",
        sources=sources,
        left_out=dict(sorted(left_out.items())),
    )


def share_of(sources: list[Source], part: int, parts: int) -> list[Source]:
    """One of `parts` stretches of the list, all about as much work."""
    total = sum(_cost(source) for source in sources)
    share: list[Source] = []
    before = 0
    for source in sources:
        if before * parts // total == part:
            share.append(source)
        before += _cost(source)
    return share


def _cost(source: Source) -> int:
    return READING_COST_BYTES + min(source["size_bytes"], MAX_SOURCE_KB * 1024)


def _source(path: str, above: tuple[str, ...], size_bytes: int) -> Source:
    """A folder is a package; a module right in the top folder stands for itself.

    Names are shown to people: unlike in the path, what is no UTF-8 in them becomes `?`.
    """
    file = PurePosixPath(path.encode("utf-8", "replace").decode())
    folders = (*above, *file.parent.parts)
    names = folders if file.stem == "__init__" and folders else (*folders, file.stem)
    package = ".".join(folders) or file.stem
    return Source(path=path, module=".".join(names), package=package, size_bytes=size_bytes)


def _packages_above(top: Path) -> tuple[str, ...]:
    """The name, in parts, of a top folder that is a package itself; else nothing."""
    names: tuple[str, ...] = ()
    while (top / "__init__.py").is_file():
        names = (top.name, *names)
        top = top.parent
    return names


def _walk(top: Path, left_out: Counter[str]) -> Iterator[tuple[str, int]]:
    """Path and size of every source; counts what is left out."""

    def unreadable(error: OSError) -> None:
        if error.filename == str(top):
            raise error
        left_out[UNREADABLE] += 1

    for folder, folders, names in os.walk(top, onerror=unreadable):
        here = Path(folder)
        if "pyvenv.cfg" in names and here != top:
            left_out[INSTALLED] += 1
            folders.clear()
            continue
        _prune(here, folders, left_out)
        for path in (here / name for name in names if name.endswith(".py")):
            about = _about(path)
            if about is not None and stat.S_ISREG(about.st_mode):
                yield path.relative_to(top).as_posix(), about.st_size
            else:
                left_out[SPECIAL] += 1


def _prune(here: Path, folders: list[str], left_out: Counter[str]) -> None:
    """Take out the folders that `os.walk` shall not enter.

    Caches come and go between two looks: they are not counted, so that the report stays the same.
    """
    for name in list(folders):
        about = _about(here / name)
        if name == "__pycache__" or name.startswith("."):
            folders.remove(name)
        elif name in NOT_ENTERED:
            folders.remove(name)
            left_out[NOT_ENTERED[name]] += 1
        elif about is not None and stat.S_ISLNK(about.st_mode):
            folders.remove(name)
            left_out[SPECIAL] += 1


def _about(path: Path) -> os.stat_result | None:
    """What the path itself is, links not followed; None when that cannot be known."""
    try:
        return path.lstat()
    except OSError:
        return None
