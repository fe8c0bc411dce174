"""Make the folders that a node's handler asks for, inside the folder of its run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from queue_workflows.dag import confinement, document_values
from queue_workflows.types import Row


class NodeFolders:
    """A node's folders, made when it asks for them; `close` removes what is of this attempt.

    `out_dir` returns the folder of the run.
    """

    def __init__(self, job: Row, out_dir: Callable[[], str]) -> None:
        self._job = job
        self._out_dir = out_dir
        self._scratch: confinement.Scratch | None = None

    def check(self) -> None:
        """Raise `FolderRefused` for a run whose `out_dir` OUT_ROOTS does not allow."""
        if confinement.roots():
            confinement.check(self._out_dir())

    def out(self) -> Path:
        """Return `<out_dir>/<node_id>`, created."""
        node_id = self._job["node_id"]
        folder = document_values.folder(node_id)
        return confinement.make(self._out_dir(), folder, f"node id {node_id!r:.120}")

    def scratch(self) -> Path:
        """Return a folder of this attempt alone, under `<out_dir>/.scratch`."""
        root, prefix = self._out_dir(), f"{self._job['claim_no']}-"
        parent = str(Path(os.path.realpath(root), confinement.SCRATCH))
        with confinement.opened(root, confinement.SCRATCH, create=True) as fd:
            self._scratch = confinement.Scratch(parent, fd, prefix)
        return self._scratch.path

    def close(self) -> None:
        """Remove the scratch folder and its content."""
        if self._scratch is not None:
            self._scratch.remove()
