"""Choose the output folder of a run that has no `out_dir`."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from pathlib import Path

from queue_workflows import config
from queue_workflows.dag import confinement
from queue_workflows.types import Row

_PLAIN_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,119}", re.ASCII)


def folder() -> Path:
    """Return the parent folder of runs' folders; it may not exist yet.

    It is OUTPUTS_DIR, else `runs` in the first of OUT_ROOTS, else `queue_workflows/outputs` in the
    user's data folder (root: `/var/lib/queue_workflows/outputs`).
    """
    if chosen := config.OUTPUTS_DIR.read():
        return Path(chosen).expanduser().absolute()
    if roots := confinement.roots():
        # In a subfolder, because a run id may equal the name of an unrelated folder in the root.
        return Path(roots[0], "runs")
    try:
        return config.data_folder() / "outputs"
    except RuntimeError:  # an account without a home
        return Path(tempfile.gettempdir(), "queue_workflows-outputs")


def of_run(run_id: str) -> str:
    """Return the folder of a run without an `out_dir`, the same on every call.

    If the id is not a simple file name, its hash is used instead, so that it cannot lead elsewhere.
    """
    name = run_id
    if not _PLAIN_NAME.fullmatch(run_id):
        name = "run-" + hashlib.sha256(run_id.encode(errors="replace")).hexdigest()[:32]
    return os.fspath(folder() / name)


def given(run: Row) -> Row:
    """Return the run; if it has no `out_dir`, a copy with the folder of `of_run`."""
    return run if run["out_dir"] is not None else run | {"out_dir": of_run(run["id"])}
