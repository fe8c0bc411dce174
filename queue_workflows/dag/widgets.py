"""Build the `input_spec` of an input node by its widget, and list files for it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from queue_workflows import errors, refs
from queue_workflows.dag import answers, confinement

if TYPE_CHECKING:
    from queue_workflows.types import JsonDict, RefResolver

MAX_FILES = 10_000
MAX_ENTRIES = 100_000
MAX_DEPTH = 100
"""Levels of folders that a listing enters, since each needs a descriptor while it is read."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW

_KINDS = {
    "image": ".png .jpg .jpeg .gif .bmp .webp .tif .tiff .svg .heic .avif",
    "json": ".json .jsonl .geojson",
    "csv": ".csv .tsv",
    "text": ".txt .md .log .yaml .yml .xml .html",
    "pointcloud": ".ply .pcd .las .laz .e57 .xyz .pts .splat",
    "mesh": ".obj .stl .glb .gltf .off .fbx .dae .usdz",
}
_KIND_BY_SUFFIX = {suffix: kind for kind, suffixes in _KINDS.items() for suffix in suffixes.split()}
_ENGINE_KEYS = frozenset({"id", "kind", "widget", "prompt", "target", "depends_on", "skip_if"})


def head(step: Mapping[str, Any]) -> JsonDict:
    """Return the common part of specs, `step_id`, `widget`, `prompt`, `target` and the type."""
    typed = {answers.TYPE: step[answers.TYPE]} if answers.TYPE in step else {}
    return {
        "step_id": step.get("id"),
        "widget": step.get("widget"),
        "prompt": step.get("prompt") or "",
        "target": step.get("target"),
        **typed,
    }


def build_spec(
    step: Mapping[str, Any],
    *,
    context: Mapping[str, Any],
    out_dir: str | None,
    resolver: RefResolver = refs.resolve_ref,
) -> JsonDict:
    """Return the `head` and the widget's own keys.

    The built-in widgets are choose_one (`options`, `multiple`), file_upload (`accept`, by default
    `*/*`), pick_or_upload (`library`, `accept`) and turnout (`turnout_options`, from the step's
    `turnout_options` or else its `options`). Any other widget gets the step's own keys. It never
    raises; a ref that does not resolve gives an empty list.
    """
    spec = head(step)

    def resolve(value: Any) -> Any:
        found, reason = refs.attempt(value, context, resolver)
        return found if reason is None else []

    widget = step.get("widget")
    if widget == "choose_one":
        with_files = _with_files(step.get("source"), context, out_dir, resolver)
        options, _ = refs.attempt(step.get("source"), with_files, resolver)
        spec["options"] = _listed(options)
        spec["multiple"] = bool(step.get("multiple"))
    elif widget == "file_upload":
        accept = step.get("accept")
        spec["accept"] = "*/*" if accept is None else resolve(accept)
    elif widget == "pick_or_upload":
        spec["library"] = resolve(step.get("library"))
        spec["accept"] = resolve(step.get("accept"))
    elif widget == "turnout":
        offered = step.get("turnout_options", step.get("options"))
        given = _listed(resolve(offered))
        spec["turnout_options"] = [_option(option) for option in given]
    else:
        spec |= {key: step[key] for key in step if key not in _ENGINE_KEYS}
    return spec


def _listed(value: Any) -> list[Any]:
    return list(cast("list[Any]", value)) if isinstance(value, (list, tuple)) else []


def _option(given: Any) -> JsonDict:
    """Return `{"label", "value"}` of an option, which may be a bare value or lack either."""
    record = cast("dict[str, Any]", given) if isinstance(given, dict) else {"value": given}
    value = record.get("value", record.get("label"))
    return {"label": record.get("label", str(value)), "value": value}


def _with_files(
    source: Any, context: Mapping[str, Any], out_dir: str | None, resolver: RefResolver
) -> dict[str, Any]:
    """Return the context with the `files` of each folder under `out_dir` that the source names.

    An app's resolver may read any folder, so it gets all of them.
    """
    wanted = refs.heads(source) if resolver is refs.resolve_ref else None
    merged = dict(context)
    for name, files in listings(out_dir, wanted).items():
        present = context.get(name)
        base = cast("dict[str, Any]", present) if isinstance(present, dict) else {}
        merged[name] = {**base, "files": files}
    return merged


# --- The files of a run.


def kind_of(name: str) -> str:
    """Return image, json, csv, text, pointcloud or mesh by a file name's suffix, else file."""
    return _KIND_BY_SUFFIX.get(Path(name).suffix.lower(), "file")


def listings(out_dir: str | None, wanted: Iterable[str] | None) -> dict[str, list[JsonDict]]:
    """Return the files of each named folder, or for None of every folder, right under `out_dir`.

    A file is `{"rel_path", "kind", "abs_path", "size_bytes"}`, `rel_path` from `out_dir`; at most
    `MAX_FILES` in all, in path order. A link to a file counts if it stays inside `out_dir`; folders
    behind links are not entered. Unreadable files, levels beyond `MAX_DEPTH`, names that are not
    UTF-8, and an `out_dir` outside of OUT_ROOTS are left out.
    """
    if out_dir is None:
        return {}
    found: dict[str, list[JsonDict]] = {}
    try:
        with confinement.opened(out_dir) as fd:
            listing = _Listing(out_dir)
            folders = (entry.name for entry in _entries(fd) if _is_folder(entry))
            for name in folders if wanted is None else sorted(wanted):
                if name in ("", ".", "..") or "/" in name or "\0" in name:
                    continue
                with contextlib.suppress(OSError, ValueError):
                    found[name] = [*listing.files(fd, name)]
    except (OSError, ValueError):
        return {}
    return found


class _Listing:
    """A listing of an open `out_dir`, with the number of files it may still add."""

    def __init__(self, out_dir: str) -> None:
        self._out_dir = out_dir
        self._root = Path(out_dir).absolute()
        self._files = MAX_FILES
        self._entries = MAX_ENTRIES

    def files(self, parent_fd: int, *parts: str) -> Iterator[JsonDict]:
        """Yield the files of the folder that `parts` name; raise OSError for a file or a link."""
        fd = os.open(parts[-1], _FOLDER, dir_fd=parent_fd)
        try:
            for entry in _entries(fd):
                self._entries -= 1
                if self._entries < 0 or self._files <= 0:
                    return
                if _is_folder(entry):
                    if len(parts) < MAX_DEPTH:
                        with contextlib.suppress(OSError):
                            yield from self.files(fd, *parts, entry.name)
                elif (file := self._file(entry, (*parts, entry.name))) is not None:
                    self._files -= 1
                    yield file
        finally:
            os.close(fd)

    def _file(self, entry: os.DirEntry[str], parts: tuple[str, ...]) -> JsonDict | None:
        rel_path = "/".join(parts)
        try:
            rel_path.encode()
            if entry.is_symlink():
                size = self._size_behind(rel_path)
            else:
                size = _size(entry.stat(follow_symlinks=False))
        except (OSError, UnicodeEncodeError, errors.InvalidPayload):
            return None
        if size is None:
            return None
        return {
            "rel_path": rel_path,
            "kind": kind_of(entry.name),
            "abs_path": str(self._root / rel_path),
            "size_bytes": size,
        }

    def _size_behind(self, rel_path: str) -> int | None:
        """Return the size of the file behind a link, or None; InvalidPayload if it is outside."""
        *above, name = confinement.inside(self._out_dir, rel_path, "a link")
        with confinement.opened(self._out_dir, *above) as fd:
            return _size(os.stat(name, dir_fd=fd, follow_symlinks=False))


def _size(found: os.stat_result) -> int | None:
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _entries(fd: int) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(fd) as entries:
            return sorted(islice(entries, MAX_ENTRIES), key=lambda entry: entry.name)
    except OSError:
        return []
