"""Read the small files of `/proc` and of memory cgroups, whose descriptors are kept."""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path

NO_LIMIT = 1 << 60
"""A limit of cgroup v1 from here on, in bytes, means none."""


class File:
    """A small file whose descriptor is kept, since opening costs more than reading."""

    SIZE = 1 << 16

    def __init__(self, path: Path) -> None:
        self._path = path
        self._close: weakref.finalize[[int], File] | None = None
        self._fd = -1
        self._pid = 0

    def read(self) -> bytes:
        """Return what is there now, b"" if it cannot be read."""
        try:
            return os.pread(self._opened(), self.SIZE, 0)
        except (OSError, ValueError):
            self.close()
        return b""

    def _opened(self) -> int:
        # A child of a fork must not read the files that its parent's /proc/self names.
        if self._close is None or self._pid != os.getpid():
            self.close()
            self._fd, self._pid = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC), os.getpid()
            self._close = weakref.finalize(self, os.close, self._fd)
        return self._fd

    def close(self) -> None:
        """Close the descriptor; the next `read` opens another."""
        if self._close is not None:
            self._close()
            self._close = None

    def number(self) -> int | None:
        """Return the number that the file holds, or None."""
        text = self.read().strip()
        return int(text) if text.isdigit() else None

    def numbers(self, *names: bytes) -> list[int | None]:
        """Return the numbers of the lines `name number` or `name: number kB`, in this order."""
        text = b"\n" + self.read()
        return [_number_of(text, b"\n" + name) for name in names]


def _number_of(text: bytes, name: bytes) -> int | None:
    at = text.find(name) + len(name)
    if at < len(name) or text[at : at + 1] not in (b":", b" "):
        return None
    words = text[at + 1 : at + 40].split(None, 1)
    return int(words[0]) if words and words[0].isdigit() else None


class Cgroup:
    """The files of one memory cgroup, of version 2 or 1."""

    def __init__(self, folder: Path) -> None:
        self.id = ""
        """Differs between all cgroups of this kernel, whatever their names in containers are."""
        with contextlib.suppress(OSError):
            seen = folder.stat()
            self.id = f"{seen.st_dev}:{seen.st_ino}"
        self._limit = File(folder / "memory.max")
        self._used = File(folder / "memory.current")
        self._limit_1 = File(folder / "memory.limit_in_bytes")
        self._used_1 = File(folder / "memory.usage_in_bytes")
        self._stat = File(folder / "memory.stat")
        self._swap_limit = File(folder / "memory.swap.max")
        self._swap_used = File(folder / "memory.swap.current")

    def ram(self, below: int) -> float | None:
        """Return the share of the limit in use in %; None unless it is below this.

        File pages do not count, also those that were read more than once: the kernel drops them
        before it kills a process.
        """
        limit, used, prefix = self._limit.number(), self._used, b""
        if limit is None:
            limit, used, prefix = self._limit_1.number(), self._used_1, b"total_"
        if limit is None or not 0 < limit < min(below, NO_LIMIT) or (now := used.number()) is None:
            return None
        pages = self._stat.numbers(prefix + b"inactive_file", prefix + b"active_file")
        return 100 * max(0, now - sum(each or 0 for each in pages)) / limit

    def swap(self, below: int) -> float | None:
        """Return the same for swap; 0 if the limit is 0, since the cgroup then fills no swap."""
        limit, now = self._swap_limit.number(), self._swap_used.number()
        if limit == 0:
            return 0.0
        return None if limit is None or now is None or not 0 < limit < below else 100 * now / limit
