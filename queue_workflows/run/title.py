"""Show what a forked process is in the list of processes, whose command line is its worker's."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final

_START: Final = 45
"""Index of the address of the command line in `/proc/self/stat`, after the name of the process."""


def set_title(text: str) -> None:
    """Overwrite the command line of this process, which `ps` shows, with as much as fits.

    The kernel reads it from the memory of the process. Does nothing elsewhere than on Linux.
    """
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = (int(field) for field in fields[_START : _START + 2])
    except (OSError, ValueError):
        return
    if 0 < start < end:
        # A zero as the last byte keeps the kernel from reading on into the environment.
        room = end - start - 1
        shown = text.encode()[:room]
        ctypes.memmove(start, shown + bytes(room + 1 - len(shown)), room + 1)
