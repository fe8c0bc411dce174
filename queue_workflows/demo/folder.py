"""Which Python files a folder holds, and which package each belongs to."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TypedDict

MAX_FILE_KB = 2048
"""A source beyond this is counted and not parsed: the parser needs about 100 times its size."""

ELSEWHERE = frozenset({"site-packages", "dist-packages", "__pycache__", "node_modules"})
TESTS = frozenset({"test", "tests", "idle_test"})


class ListedFile(TypedDict):
    """A source: its path from the folder with `/`, and the package that it counts for."""

    path: str
    package: str
    size_bytes: int


class Listing(TypedDict):
    """The sources in the order of their packages; `left_out` counts folders and links by reason."""

    folder: str
    files: list[ListedFile]
    left_out: dict[str, int]


def standard_library() -> Path:
    """The folder of the standard library of the Python that runs this."""
    return Path(sysconfig.get_path("stdlib"))


def list_sources(folder: Path) -> Listing:
    """Every `*.py` below the folder, links not followed; FileNotFoundError that names the folder."""
    if not folder.is_dir():
        raise FileNotFoundError(f"the folder {str(folder)!r} does not exist or is no folder")
    top = folder.resolve()
    left_out: dict[str, int] = {}
    above = _packages_above(top)
    files = [
        ListedFile(path=path, package=package_of(path, above), size_bytes=size_bytes)
        for path, size_bytes in _sources(top, left_out)
    ]
    files.sort(key=lambda file: (file["package"], file["path"]))
    return Listing(folder=str(top), files=files, left_out=dict(sorted(left_out.items())))


def package_of(path: str, above: tuple[str, ...] = ()) -> str:
    """The dotted name of the source's folder; a module right in the top folder stands for itself."""
    source = PurePosixPath(path)
    return ".".join((*above, *source.parent.parts)) or source.stem


def slice_of(files: list[ListedFile], part: int, parts: int) -> list[ListedFile]:
    """The part's share: a run of neighbours, so that all shares have about the same size."""
    total = sum(_effort(file) for file in files)
    share: list[ListedFile] = []
    before = 0
    for file in files:
        if before * parts // total == part:
            share.append(file)
        before += _effort(file)
    return share


def _effort(file: ListedFile) -> int:
    return 1024 + min(file["size_bytes"], MAX_FILE_KB * 1024)


def _packages_above(top: Path) -> tuple[str, ...]:
    """The dotted name, in parts, of a folder that is itself a package; else nothing."""
    names: list[str] = []
    while (top / "__init__.py").is_file():
        names.insert(0, top.name)
        top = top.parent
    return tuple(names)


def _sources(top: Path, left_out: dict[str, int]) -> Iterator[tuple[str, int]]:
    def leave_out(reason: str) -> None:
        left_out[reason] = left_out.get(reason, 0) + 1

    for where, folders, names in os.walk(top, onerror=lambda _: leave_out("unreadable folders")):
        here = Path(where)
        for name in list(folders):
            reason = _why_not(here / name)
            if reason is not None:
                folders.remove(name)
                leave_out(reason)
        for name in names:
            source = here / name
            if source.suffix != ".py":
                continue
            if source.is_symlink() or not source.is_file():
                leave_out("links and special files")
                continue
            yield source.relative_to(top).as_posix(), source.stat().st_size


def _why_not(folder: Path) -> str | None:
    if folder.name in TESTS:
        return "folders of tests"
    if folder.name in ELSEWHERE or (folder / "pyvenv.cfg").exists():
        return "folders of installed or generated code"
    if folder.name.startswith("."):
        return "hidden folders"
    return "links and special files" if folder.is_symlink() else None
