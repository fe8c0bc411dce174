"""Define an app that runs under 0.3.0 and under this version.

Every handler adds a line to the journal that QW_JOURNAL names: the run's and the node's name.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import queue_workflows

NODES = {"s/a": ("note", ()), "s/b": ("note", ("s/a",)), "s/c": ("note", ("s/a",)),
         "s/d": ("note", ("s/b", "s/c"))}  # fmt: skip
"""Node id → (node module, the nodes it waits for): the workflow `w` as it is expanded."""
GRAPHS = {"w": NODES}
BODY_S = 0.02


def journal(path: Path, word: str) -> None:
    """Add a line, in one write."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(fd, f"{word}\n".encode())
    finally:
        os.close(fd)


def run(out: Path) -> dict[str, Any]:
    """Run the node: `out` ends in run/step/node."""
    path = Path(os.environ["QW_JOURNAL"])
    journal(path, "/".join(out.parts[-3:]))
    hold = path.parent / "hold"
    while hold.exists():
        time.sleep(0.02)
    time.sleep(BODY_S)
    return {"by": "ours"}


def fetch(reason: str) -> dict[str, Any]:
    """Run the ingest task."""
    journal(Path(os.environ["QW_JOURNAL"]), "fetched")
    time.sleep(BODY_S)
    return {"by": "ours"}


def setup() -> None:
    """Register everything."""
    members = [
        {"id": node[2:], "node": module, "depends_on": [name[2:] for name in after]}
        for node, (module, after) in NODES.items()
    ]
    steps = [{"id": "s", "kind": "pipeline", "pipeline": "p"}]
    queue_workflows.register_node("note", run)
    queue_workflows.register_ingest_task("fetch", fetch)
    queue_workflows.set_workflow_provider(
        {"w": {"name": "w", "steps": steps}}.__getitem__,
        {"p": {"name": "p", "nodes": members}}.__getitem__,
    )
