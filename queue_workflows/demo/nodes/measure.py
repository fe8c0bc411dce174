"""Node: parse and measure one share of the packages."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from queue_workflows.demo import files, listing, source


def run(
    sources: Path,
    part: int,
    parts: int,
    out: Path,
    status_callback: Callable[[float], object],
    cancel_event: threading.Event,
) -> dict[str, Any]:
    """Write `measured.json`: files, functions, and the words of each package."""
    found: listing.Listing = files.read(sources)
    share = listing.share_of(found["sources"], part, parts)
    measured_files: list[source.File] = []
    functions: list[source.Function] = []
    words: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for number, each in enumerate(share, 1):
        if cancel_event.is_set():
            return {}  # and leave the file alone: another attempt may have written it by now
        measured = _measure(Path(found["folder"]), each)
        measured_files.append(measured.file)
        functions += measured.functions
        words[each["package"]] += measured.words
        status_callback(number / len(share))
    files.write(
        out / "measured.json", {"files": measured_files, "functions": functions, "words": words}
    )
    return {
        "files": len(measured_files),
        "lines": sum(file["lines"] for file in measured_files),
    }


def _measure(folder: Path, each: listing.Source) -> source.Measured:
    limit = listing.MAX_SOURCE_KB * 1024
    try:
        with (folder / each["path"]).open("rb") as file:
            raw = file.read(limit + 1)
    except OSError as error:
        return source.unparsed(each, b"", error.strerror or type(error).__name__)
    if len(raw) > limit:
        return source.unparsed(each, b"", f"larger than {listing.MAX_SOURCE_KB:,} KB")
    return source.measure(each, raw)
