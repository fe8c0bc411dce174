"""Show the files below a run's folder: a list, the beginning of texts, images, and downloads."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import shlex
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

import fastapi
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from queue_workflows import errors
from queue_workflows.dag import confinement
from queue_workflows.runtime import display
from queue_workflows.service import state
from queue_workflows.service.dashboard import run_page, view
from queue_workflows.types import JsonDict

router = fastapi.APIRouter()
IMAGES: Final = {
    ".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp",
    ".gif": "image/gif",
}  # fmt: skip
"""The types that a page shows as images. SVG and HTML are never opened, as they run scripts."""
TABLES: Final = {".csv": ",", ".tsv": "\t"}
TEXTS: Final = frozenset({".txt", ".log", ".md", ".json", ".jsonl", ".geojson", ".yaml", ".yml"})
MOST_IMAGE: Final = 10 * 1024 * 1024
BEGINNING: Final = 65_536
ROWS, COLUMNS = 100, 50
"""The most rows of a table, besides its head."""
ENTRIES: Final = 1_000
CHUNK: Final = 65_536
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
Place = Annotated[str, fastapi.Query(max_length=confinement.MAX_PATH_CHARS)]


def _parts(place: str) -> list[str]:
    parts = [part for part in place.split("/") if part]
    if "\0" in place or ".." in parts or "." in parts:
        raise errors.InvalidPayload(f"path {place!r:.80} leads outside of the run's folder")
    return parts


def _opened(out_dir: str, *parts: str) -> Any:
    """Open a folder below a run's folder without following links; use it as a context."""
    root, below = confinement.root_of(out_dir)
    return confinement.opened(root, *below, *parts)


def _shown(out_dir: str, place: str) -> JsonDict:
    """Return the entries of a folder, or the beginning of a file as `text`, `table` or `image`."""
    parts = _parts(place)
    try:
        with _opened(out_dir, *parts) as fd, os.scandir(fd) as entries:
            first = [*islice(entries, ENTRIES + 1)]
            found = [entry for each in first[:ENTRIES] if (entry := _entry(each)) is not None]
            found.sort(key=lambda entry: (not entry["is_folder"], entry["name"]))
            return {"entries": found, "more": len(first) > ENTRIES}
    except (NotADirectoryError, errors.FolderRefused):
        if not parts:
            raise
    suffix = Path(parts[-1]).suffix.lower()
    with _file(out_dir, place) as file:
        size = os.fstat(file.fileno()).st_size
        text = file.read(BEGINNING).decode("utf-8", "replace")
    shown: JsonDict = {"entries": None, "size": size, "cut": size > BEGINNING}
    if suffix in IMAGES:
        shown["image"] = size <= MOST_IMAGE
    elif suffix in TABLES:
        # If a row is cut, its last number would read as another one.
        lines = text.rpartition("\n")[0] if shown["cut"] else text
        with contextlib.suppress(csv.Error):
            rows = [*islice(csv.reader(io.StringIO(lines), delimiter=TABLES[suffix]), ROWS + 2)]
            shown["cut"] |= len(rows) > ROWS + 1 or any(len(row) > COLUMNS for row in rows)
            if rows:
                shown["table"] = [
                    [display.line(cell) for cell in row[:COLUMNS]] for row in rows[: ROWS + 1]
                ]
    if suffix in TEXTS or (suffix in TABLES and "table" not in shown):
        shown["text"] = display.block(text)
    return shown


def _entry(entry: os.DirEntry[str]) -> JsonDict | None:
    """Return a folder or file; None for links, devices, and names that are not UTF-8."""
    try:
        entry.name.encode()
        found = entry.stat(follow_symlinks=False)
    except (OSError, UnicodeEncodeError):
        return None
    is_folder = stat.S_ISDIR(found.st_mode)
    if not is_folder and not stat.S_ISREG(found.st_mode):
        return None
    return {"name": entry.name, "is_folder": is_folder, "size": found.st_size}


def _file(out_dir: str, place: str) -> BinaryIO:
    """Return an open plain file; raise OSError or `InvalidPayload` for anything else."""
    *above, name = _parts(place) or [""]
    with _opened(out_dir, *above) as folder:
        fd = os.open(name, _FILE, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise errors.FolderRefused(f"{place!r:.120} is not a plain file")
    return os.fdopen(fd, "rb")


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    with file:
        yield b""
        while chunk := file.read(CHUNK):
            yield chunk


async def _read(request: Request, run_id: str, call: Any, place: str) -> tuple[JsonDict, Any]:
    """Return the run, and the result of `call` for its folder; raise `NotFound` with the reason."""
    run_page.check_values(request)
    head = await view.read(request, run_page.run_row, run_id)
    near = [(f"run {head['id']}", view.path("/runs/", head["id"]))]
    if head["out_dir"] is None:
        raise view.NotFound("the run has no folder: no node has written files", near=near)
    try:
        # A file system that does not answer holds no thread of the API.
        return head, await state.of(request).reads.run(call, head["out_dir"], place)
    except errors.InvalidPayload as error:
        raise view.NotFound(str(error), near=near) from None
    except OSError as error:
        text = (
            f"no {display.line(place or 'folder', 200)} in {display.line(head['out_dir'], 200)} on "
            f"this machine: {error.strerror}; the service has to share the folder of the workers"
        )
        raise view.NotFound(text, near=near) from None


@router.get("/runs/{run_id}/files")
async def files(request: Request, run_id: view.Segment, path: Place = "") -> Response:
    """Show a folder below the run's folder, or the beginning of a file."""
    head, found = await _read(request, run_id, _shown, path)
    parts = _parts(path)
    above = [(part, "/".join(parts[: n + 1])) for n, part in enumerate(parts)]
    title = f"Files of run {head['id']}"
    command = f"ls {shlex.quote(display.line(head['out_dir'], None))}"
    return view.Page(
        request, "run_files.html", title=title, command=command, run=head, above=above, place=path,
        found=found,
    )  # fmt: skip


@router.get("/runs/{run_id}/file")
async def file(
    request: Request, run_id: view.Segment, path: Place, inline: bool = False
) -> Response:
    """Return a file: an image to show if it is `inline`, anything else as a download."""
    _, opened = await _read(request, run_id, _file, path)
    size = os.fstat(opened.fileno()).st_size
    name = path.rpartition("/")[2]
    kind = IMAGES.get(Path(name).suffix.lower()) if inline and size <= MOST_IMAGE else None
    headers = {} if kind else run_page.attachment(name)
    chunks = _chunks(opened)
    next(chunks)  # From here on its end closes the file.
    return StreamingResponse(chunks, media_type=kind or "application/octet-stream", headers=headers)
