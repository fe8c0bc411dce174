"""The files that a run's steps have left under its `out_dir`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from queue_workflows.types import JsonDict

MAX_FILES = 10_000
MAX_ENTRIES = 100_000

_KINDS = {
    "image": ".png .jpg .jpeg .gif .bmp .webp .tif .tiff .svg .heic .avif",
    "json": ".json .jsonl .geojson",
    "csv": ".csv .tsv",
    "text": ".txt .md .log .yaml .yml .xml .html",
    "pointcloud": ".ply .pcd .las .laz .e57 .xyz .pts .splat",
    "mesh": ".obj .stl .glb .gltf .off .fbx .dae .usdz",
}
_KIND_BY_SUFFIX = {suffix: kind for kind, suffixes in _KINDS.items() for suffix in suffixes.split()}


def kind_of(name: str) -> str:
    """image, json, csv, text, pointcloud or mesh by the suffix of a file name, else file."""
    return _KIND_BY_SUFFIX.get(Path(name).suffix.lower(), "file")


def listings(out_dir: str | None, wanted: Iterable[str] | None) -> dict[str, list[JsonDict]]:
    """The files of each folder right under `out_dir` by its name; None: of every folder.

    A file is `{"rel_path", "kind", "abs_path", "size_bytes"}`, `rel_path` from `out_dir`; at most
    `MAX_FILES` in all, in path order. A link to a file counts where it stays inside; folders behind
    links are not entered. What cannot be read, and names that are no UTF-8, are left out.
    """
    if out_dir is None or not _is_folder(Path(out_dir)):
        return {}
    root = Path(out_dir).absolute()
    names = _folders(root) if wanted is None else sorted(wanted)
    found: dict[str, list[JsonDict]] = {}
    budget = _Budget()
    for name in names:
        folder = root / name
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            continue
        if _is_folder(folder) and not folder.is_symlink():
            found[name] = list(_files(root, folder, budget))
    return found


class _Budget:
    """Files and directory entries that one listing may still take."""

    def __init__(self) -> None:
        self.files = MAX_FILES
        self.entries = MAX_ENTRIES


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _folders(root: Path) -> list[str]:
    return [entry.name for entry in _entries(root) if entry.is_dir(follow_symlinks=False)]


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(islice(entries, MAX_ENTRIES), key=lambda entry: entry.name)
    except OSError:
        return []


def _files(root: Path, folder: Path, budget: _Budget) -> Iterator[JsonDict]:
    inside = root.resolve()
    waiting = [iter(_entries(folder))]
    while waiting:
        entry = next(waiting[-1], None)
        if entry is None:
            waiting.pop()
            continue
        budget.entries -= 1
        if budget.entries < 0 or budget.files <= 0:
            return
        if entry.is_dir(follow_symlinks=False):
            waiting.append(iter(_entries(Path(entry.path))))
            continue
        file = _file(root, inside, entry)
        if file is not None:
            budget.files -= 1
            yield file


def _file(root: Path, inside: Path, entry: os.DirEntry[str]) -> JsonDict | None:
    path = Path(entry.path)
    try:
        entry.path.encode()
        if entry.is_symlink() and inside not in path.resolve(strict=True).parents:
            return None
        if not entry.is_file():
            return None
        size: Any = entry.stat().st_size
    except (OSError, RuntimeError, UnicodeEncodeError):
        return None
    return {
        "rel_path": path.relative_to(root).as_posix(),
        "kind": kind_of(entry.name),
        "abs_path": entry.path,
        "size_bytes": size,
    }
