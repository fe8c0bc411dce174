"""Count the kernel's OOM kills in the cgroup of this process."""

from __future__ import annotations

from queue_workflows.run import memory_cgroups


def count() -> int | None:
    """Return the number of OOM kills in this cgroup so far; None if unknown."""
    found = memory_cgroups.own_folder()
    return None if found is None else memory_cgroups.oom_kills(found[0])


class OomKills:
    """The kernel's count of OOM kills in this cgroup, and the increase since the last reading."""

    def __init__(self) -> None:
        self._count = count()

    def new(self) -> int | None:
        """Return how many were counted since the last call; None if unknown."""
        before, self._count = self._count, count()
        return None if before is None or self._count is None else self._count - before
