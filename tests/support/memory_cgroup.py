"""Run processes in a memory cgroup of their own, where this account can make one."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.wait import until

REQUIRED = "QW_TEST_CGROUPS"
"""If this variable is set, a cgroup that cannot be made fails the test: `.ci/run` sets it."""
_ROOT = Path("/sys/fs/cgroup")


class _Files(NamedTuple):
    limit: str
    peak: str


class MemoryCgroup:
    """A cgroup with a limit, of version 1 or 2."""

    def __init__(self, folder: Path, files: _Files) -> None:
        self.folder = folder
        self._files = files

    def limit(self, megabytes: int) -> None:
        (self.folder / self._files.limit).write_text(str(megabytes << 20))

    def add(self, pids: Iterable[int]) -> None:
        """Move processes into it. What they have in memory stays counted where it is."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                (self.folder / "cgroup.procs").write_text(str(pid))

    @property
    def peak_mb(self) -> int | None:
        """The most that its processes have had in memory at once; None: an old kernel."""
        path = self.folder / self._files.peak
        return int(path.read_text()) >> 20 if path.exists() else None

    def pids(self) -> list[int]:
        return [int(line) for line in (self.folder / "cgroup.procs").read_text().split()]


def _parent() -> tuple[Path, _Files]:
    """Return the folder in which a cgroup can be made; raise OSError with the reason else."""
    if (_ROOT / "memory").is_dir():
        return _ROOT / "memory", _Files("memory.limit_in_bytes", "memory.max_usage_in_bytes")
    known = (_ROOT / "cgroup.controllers").read_text().split()
    if "memory" not in known:
        raise OSError(f"the controllers are {known}, without memory")
    passed_on = _ROOT / "cgroup.subtree_control"
    if "memory" not in passed_on.read_text().split():
        passed_on.write_text("+memory")
    return _ROOT, _Files("memory.max", "memory.peak")


def _made(megabytes: int) -> MemoryCgroup:
    parent, files = _parent()
    folder = parent / f"queue-workflows-test-{secrets.token_hex(6)}"
    folder.mkdir()
    made = MemoryCgroup(folder, files)
    try:
        made.limit(megabytes)
    except OSError:
        folder.rmdir()
        raise
    return made


@contextlib.contextmanager
def memory_cgroup(megabytes: int) -> Generator[MemoryCgroup]:
    """Make a cgroup; where that is not possible, skip the test with the reason, or fail it."""
    try:
        made = _made(megabytes)
    except OSError as error:
        text = f"no memory cgroup can be made here: {error}"
        if REQUIRED in os.environ:
            pytest.fail(text)
        pytest.skip(text)
    try:
        yield made
    finally:
        until(lambda: not made.pids())
        for below in made.folder.glob("*/"):
            until(lambda below=below: not (below / "cgroup.procs").read_text())
            below.rmdir()
        made.folder.rmdir()
