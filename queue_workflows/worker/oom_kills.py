"""Count the kernel's OOM kills in the cgroup of this process."""

from __future__ import annotations

from pathlib import Path

_CGROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


def count() -> int | None:
    """Return the number of OOM kills in this cgroup (v2) so far; None if unknown."""
    try:
        own = _CGROUP.read_text(encoding="utf-8").partition("::")[2].splitlines()[0]
        text = (_CGROUPS / own.lstrip("/") / "memory.events").read_text(encoding="ascii")
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])
    except (OSError, ValueError, KeyError, IndexError):
        return None


class OomKills:
    """The kernel's count of OOM kills in this cgroup, and the increase since the last reading."""

    def __init__(self) -> None:
        self._count = count()

    def new(self) -> int | None:
        """Return how many were counted since the last call; None if unknown."""
        before, self._count = self._count, count()
        return None if before is None or self._count is None else self._count - before
