"""Ingest tasks: work that stands by itself, queued by the schedule or by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from queue_workflows.demo import listing


def snapshot_folder(reason: str, args: dict[str, Any]) -> dict[str, Any]:
    """How much code a folder holds now (`args["folder"]`, else the standard library)."""
    folder = Path(args["folder"]) if args.get("folder") else listing.standard_library()
    sources = listing.list_sources(folder)["sources"]
    return {
        "reason": reason,
        "folder": str(folder),
        "files": len(sources),
        "packages": len({source["package"] for source in sources}),
        "size_bytes": sum(source["size_bytes"] for source in sources),
    }
