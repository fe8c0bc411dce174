"""Give each executor a memory cgroup of its own, where one can be made.

Then its count of OOM kills concerns this executor only. Under version 1, it is made in the
launcher's cgroup, if this account may write there. Under version 2, it is made beside the
launcher's cgroup, if the parent was delegated to us: `Delegate=yes` of systemd marks the parent,
and `DelegateSubgroup=` puts the worker below it. A cgroup with processes of its own cannot have
children with controllers (kernel documentation, "No Internal Process Constraint").
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final, NamedTuple

PREFIX: Final = "queue-workflows-executor-"
MOUNTED: Final = Path("/sys/fs/cgroup")
OWN: Final = Path("/proc/self/cgroup")
_DELEGATED: Final = ("user.delegate", "trusted.delegate")


class Cgroup(NamedTuple):
    """The cgroup of one executor."""

    folder: Path

    def join(self) -> None:
        """Move this process into it; if that fails, remove the cgroup."""
        try:
            (self.folder / "cgroup.procs").write_text("0", encoding="ascii")
        except OSError:
            self.remove()

    def remove(self) -> bool:
        """Remove it; return False if processes are left in it."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()
        return not self.folder.exists()


class OomKills:
    """The growth of the kernel's count of OOM kills in this process's cgroup."""

    def __init__(self) -> None:
        self._count = self._read()

    def new(self) -> int | None:
        """Return the number of OOM kills since the last call; None if unknown."""
        before, self._count = self._count, self._read()
        return None if before is None or self._count is None else self._count - before

    def _read(self) -> int | None:
        found = own_folder()
        return None if found is None else oom_kills(found[0])


class Cgroups:
    """Make the cgroups of a launcher's executors, and remove them when they are empty."""

    def __init__(self) -> None:
        self._ours = OomKills()
        self._refused: Path | None = None
        """The folder in which a cgroup could not be made."""
        self._number = 0
        self._left: list[Cgroup] = []
        """The cgroups with processes that have outlived their executor."""
        parent = parent_of_executors()
        with contextlib.suppress(OSError):
            # Remove cgroups of launchers that have ended, unless processes are left in them.
            for folder in () if parent is None else parent.glob(f"{PREFIX}*"):
                pid = folder.name.removeprefix(PREFIX).partition("-")[0]
                if not Path("/proc", pid).exists():
                    Cgroup(folder).remove()

    def make(self) -> Cgroup | None:
        """Make a cgroup, which the executor joins after the fork; return None if impossible.

        Each call reads this process's own cgroup, since it may have been moved to another.
        """
        self._left = [each for each in self._left if not each.remove()]
        parent = parent_of_executors()
        if parent is None or parent == self._refused:
            return None
        self._number += 1
        made = Cgroup(parent / f"{PREFIX}{os.getpid()}-{self._number}")
        try:
            made.folder.mkdir()
        except OSError:
            self._refused = parent
            return None
        return made

    def end(self, cgroup: Cgroup | None) -> int | None:
        """Return the OOM kills of an executor that has ended, and remove its cgroup.

        Without a `cgroup`, return the new OOM kills in the launcher's cgroup; None if unknown.
        """
        found = self._ours.new()
        if cgroup is not None:
            own = oom_kills(cgroup.folder)
            found = found if own is None else own
            if not cgroup.remove():
                self._left.append(cgroup)
        return found


def oom_kills(folder: Path) -> int | None:
    """Return the OOM kills that a memory cgroup counts, of version 2 or 1; None if unknown."""
    for name in ("memory.events", "memory.oom_control"):
        with contextlib.suppress(OSError, ValueError):
            for line in (folder / name).read_text(encoding="ascii").splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
    return None


def own_folder() -> tuple[Path, int] | None:
    """Return the memory cgroup of this process and its version; None if unknown."""
    found = None
    with contextlib.suppress(OSError):
        for line in OWN.read_text(encoding="utf-8").splitlines():
            _, controllers, name = line.split(":", 2)
            if "memory" in controllers.split(","):
                return MOUNTED / "memory" / name.lstrip("/"), 1
            if not controllers:
                found = MOUNTED / name.lstrip("/"), 2
    return found


def parent_of_executors() -> Path | None:
    """Return the cgroup below which executors can get their own, or None if there is none."""
    folder, version = own_folder() or (MOUNTED, 2)
    if version == 1:
        return folder
    parent = folder.parent
    with contextlib.suppress(OSError):
        if folder != MOUNTED and any(_is_delegated(parent, name) for name in _DELEGATED):
            passed_on = parent / "cgroup.subtree_control"
            if "memory" not in passed_on.read_text(encoding="ascii").split():
                passed_on.write_text("+memory", encoding="ascii")
            return parent
    return None


def _is_delegated(folder: Path, name: str) -> bool:
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: not on Linux
        return os.getxattr(folder, name) == b"1"
    return False
