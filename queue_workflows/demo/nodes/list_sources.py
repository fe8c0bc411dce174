"""Node: which sources there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from queue_workflows.demo import files, listing


def run(out: Path, folder: Path | None = None) -> dict[str, Any]:
    """Write `listing.json`; a folder of None means the standard library."""
    found = listing.list_sources(folder or listing.standard_library())
    files.write(out / "listing.json", found)
    return {
        "files": len(found["sources"]),
        "packages": len({source["package"] for source in found["sources"]}),
    }
