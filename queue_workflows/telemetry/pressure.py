"""Measure how full memory is, of the container or else of the machine, and throttle by it.

It reads the small files of `/proc` and of memory cgroups.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from queue_workflows import config
from queue_workflows.runtime import identity, service
from queue_workflows.telemetry import gpu_overview
from queue_workflows.types import NowFn

NO_LIMIT = 1 << 60
"""A limit of cgroup v1 from here on, in bytes, means none."""


def numbers(path: Path, *names: bytes) -> list[int | None]:
    """Return the numbers of a file's lines `name number` or `name: number kB`, in this order."""
    content = text(path)
    found = (re.search(rb"^%s[: ][ \t]*(\d+)\b" % name, content, re.MULTILINE) for name in names)
    return [None if each is None else int(each[1]) for each in found]


def number(path: Path) -> int | None:
    """Return the number that a file holds, or None."""
    content = text(path).strip()
    return int(content) if content.isdigit() else None


def text(path: Path) -> bytes:
    """Return the content of a file; b"" if it cannot be read."""
    try:
        return path.read_bytes()
    except (OSError, ValueError):
        return b""


class Cgroup:
    """The files of one memory cgroup, of version 2 or 1."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.id = ""
        """Differs between all cgroups of this kernel, whatever their names in containers are."""
        with contextlib.suppress(OSError):
            seen = folder.stat()
            self.id = f"{seen.st_dev}:{seen.st_ino}"

    def ram(self, below: int) -> float | None:
        """Return the share of the limit in use in %; None unless the limit is under `below` bytes.

        File pages do not count, also those that were read more than once: the kernel drops them
        before it kills a process.
        """
        limit, used, prefix = number(self._folder / "memory.max"), "memory.current", b""
        if limit is None:
            limit = number(self._folder / "memory.limit_in_bytes")
            used, prefix = "memory.usage_in_bytes", b"total_"
        now = number(self._folder / used)
        if limit is None or now is None or not 0 < limit < min(below, NO_LIMIT):
            return None
        names = prefix + b"inactive_file", prefix + b"active_file"
        pages = numbers(self._folder / "memory.stat", *names)
        return 100 * max(0, now - sum(each or 0 for each in pages)) / limit

    def swap(self, below: int) -> float | None:
        """Return the same for swap."""
        limit = number(self._folder / "memory.swap.max")
        now = number(self._folder / "memory.swap.current")
        return None if limit is None or now is None or not 0 < limit < below else 100 * now / limit

    @property
    def fills_no_swap(self) -> bool:
        """Return whether its limit of swap is 0."""
        return number(self._folder / "memory.swap.max") == 0


_log = logging.getLogger(__name__)
SWAP_PCT = 70.0
"""Swap use in % from which it throttles, and below which it is released."""
MACHINE = "machine"
"""Stands for the memory of the whole machine."""


class Reading(NamedTuple):
    """Memory in use in %; None if there is no such memory, or it cannot be read.

    `gpu` is the value of the fullest GPU.
    """

    ram: float | None = None
    gpu: float | None = None
    swap: float | None = None
    ram_of: str = MACHINE
    """Whose RAM it is: MACHINE, or the id of a cgroup with a limit."""
    swap_of: str = MACHINE

    def of(self, resource: str) -> tuple[float | None, str]:
        """Return the use of RAM, GPU or swap, and whose memory it is."""
        uses = {"RAM": (self.ram, self.ram_of), "swap": (self.swap, self.swap_of)}
        return uses.get(resource, (self.gpu, MACHINE))


class Memory:
    """Read memory from `/proc` and cgroups v2 or v1, and GPU memory by `gpus`; for one thread.

    If a cgroup of this process has a limit below the machine's memory, the fullest such cgroup
    counts, and the machine does not. File pages that the kernel can drop do not count. `gpus` None
    reads no GPU.
    """

    def __init__(
        self,
        *,
        gpus: gpu_overview.Reader | None = None,
        proc: Path = Path("/proc"),
        cgroups: Path = Path("/sys/fs/cgroup"),
    ) -> None:
        self._gpus = gpus
        self._root = cgroups
        self._machine = proc / "meminfo"
        self._own = proc / "self/cgroup"
        self._of = b""
        """The text of /proc/self/cgroup to which the cgroups belong."""
        self._cgroups: list[Cgroup] = []
        self.within: tuple[str, ...] = (MACHINE,)
        """The memory that this process fills: MACHINE, and the ids of its cgroups with a limit."""

    def read(self) -> Reading:
        """Return the use now; raise nothing."""
        names = b"MemTotal", b"MemAvailable", b"SwapTotal", b"SwapFree"
        total, free, swap_total, swap_free = numbers(self._machine, *names)
        if (own := text(self._own)) != self._of:
            self._of = own
            self._cgroups = [Cgroup(each) for each in self._folders(own)]
            self.within = (MACHINE, *(each.id for each in self._cgroups))
        ram, ram_of = _fullest((each.ram((total or 0) * 1024), each.id) for each in self._cgroups)
        if ram is None and total and free is not None:
            ram = 100 - free * 100 / total
        swap, swap_of = None, MACHINE
        if swap_total:
            swap, swap_of = _fullest(
                (each.swap(swap_total * 1024), each.id) for each in self._cgroups
            )
            if closed := [each.id for each in self._cgroups if each.fills_no_swap]:
                swap, swap_of = 0.0, closed[0]
            if swap is None:
                swap = 100 - (swap_free or 0) * 100 / swap_total
        return Reading(ram, self._gpu(), swap, ram_of, swap_of)

    def _gpu(self) -> float | None:
        cards = [] if self._gpus is None else self._gpus.read()
        shares = [
            100 * each.vram_used_mb / each.vram_total_mb for each in cards if each.vram_total_mb
        ]
        return max(shares, default=None)

    def _folders(self, own: bytes) -> list[Path]:
        """Return the folders of this process's memory cgroups, from its own to the root's."""
        found: list[Path] = []
        for line in os.fsdecode(own).splitlines():
            _, controllers, name = [*line.split(":", 2), "", ""][:3]
            if controllers == "":
                root = self._root
            elif "memory" in controllers.split(","):
                root = self._root / "memory"
            else:
                continue
            # In a container the path may be the host's, of which only the root is visible.
            parts = [part for part in name.split("/") if part not in ("", "..")]
            folders = (root.joinpath(*parts[:size]) for size in range(len(parts), -1, -1))
            with contextlib.suppress(OSError, ValueError):  # a name that no path can have
                found += [each for each in folders if each.is_dir()]
        return found


def _fullest(uses: Iterable[tuple[float | None, str]]) -> tuple[float | None, str]:
    """Return the largest use with the id of its cgroup; None and MACHINE if no use is known."""
    known = ((use, name) for use, name in uses if use is not None)
    return max(known, default=(None, MACHINE))


def ids(names: Iterable[str]) -> list[str]:
    """Return names of memory, as in `Memory.within`, made unique among all machines."""
    return sorted(f"{identity.boot_id()}:{name}" for name in names)


class Limit(NamedTuple):
    """From which use of a resource in % it throttles, and below which use it is released."""

    resource: str
    from_pct: float
    release_pct: float


def limits() -> list[Limit]:
    """Return the limits of RAM, GPU memory and swap by the knobs of this process.

    A release value above its limit counts as the limit.
    """
    ram, gpu = config.MEMORY_THROTTLE_THRESHOLD.read(), config.GPU_THROTTLE_THRESHOLD.read()
    return [
        Limit("RAM", ram, min(ram, config.MEMORY_RESUME_THRESHOLD.read())),
        Limit("GPU", gpu, min(gpu, config.GPU_RESUME_THRESHOLD.read())),
        Limit("swap", SWAP_PCT, SWAP_PCT),
    ]


def nearly_full(reading: Reading) -> frozenset[str]:
    """Return whose memory is at its release value or above, as in `Reading.ram_of`."""
    found: set[str] = set()
    for limit in limits():
        use, owner = reading.of(limit.resource)
        if use is not None and use >= limit.release_pct:
            found.add(owner)
    return frozenset(found)


class Throttle:
    """Decide from readings whether work has to wait for memory.

    Each resource has its own hysteresis: it throttles from its limit on until it is below its
    release value. Without own work that could give memory back nothing throttles. A measurement
    that fails is logged, and counts as unknown. One thread calls `check`; any thread reads.
    """

    def __init__(
        self,
        read: Callable[[], Reading] | None = None,
        *,
        limits_fn: Callable[[], list[Limit]] = limits,
        ours: str = "this process",
        now_fn: NowFn = time.monotonic,
    ) -> None:
        """`ours`: where the jobs run that `check` counts as own work, for the log."""
        self._read = read or Memory(gpus=gpu_overview.Reader()).read
        self._limits = limits_fn
        self._ours = ours
        self._now = now_fn
        self._errors = service.ErrorLog("memory throttle", now_fn)
        self._full: list[Limit] = []
        """The limits that throttle now."""
        self._since = self._checked_at = now_fn()
        self._warned = False
        self._seconds: dict[str, float] = {}
        self.reading = Reading()
        """The latest reading."""

    @property
    def active(self) -> bool:
        """Return whether work has to wait."""
        return bool(self._full)

    @property
    def reason(self) -> str | None:
        """Return why work waits, as `RAM at 93.1 % (limit 90 %)`; None if it does not."""
        return _described(self._full, self.reading) or None

    @property
    def seconds(self) -> dict[str, float]:
        """Return for how many seconds each resource has throttled, until the latest check."""
        return dict(self._seconds)

    def check(self, *, working: bool | Callable[[frozenset[str]], bool] = True) -> bool:
        """Read the memory and return whether work has to wait.

        `working`: whether work of this process runs now, or a function that returns that. It is
        called only if memory is full, with the full memories as `Reading.ram_of` names them.
        """
        now = self._now()
        for each in self._full:
            spent = self._seconds.get(each.resource, 0.0)
            self._seconds[each.resource] = spent + now - self._checked_at
        self._checked_at = now
        # Memory that cannot be read is unknown: it must not hold back work until it can be read.
        self.reading = self._errors.guard("the reading", self._measured) or Reading()
        before = {each.resource for each in self._full}
        full = [each for each in self._limits() if self._is_full(each, each.resource in before)]
        if callable(working):
            working = not full or working(
                frozenset(self.reading.of(each.resource)[1] for each in full)
            )
        self._set(full, working=working, now=now)
        return self.active

    def _measured(self) -> Reading:
        """Return the reading; raise if it is none. NaN is an unknown use."""
        found = self._read()
        uses = (None if use is None else float(use) for use in (found.ram, found.gpu, found.swap))
        ram, gpu, swap = (use if use == use else None for use in uses)
        return Reading(ram, gpu, swap, found.ram_of, found.swap_of)

    def _is_full(self, limit: Limit, was: bool) -> bool:
        use, _ = self.reading.of(limit.resource)
        return use is not None and use >= (limit.release_pct if was else limit.from_pct)

    def _set(self, full: list[Limit], *, working: bool, now: float) -> None:
        before, self._full = self._full, full if working else []
        if self._full and not before:
            self._since = now
            _log.warning("🚨 MEMORY THROTTLE ACTIVE: %s", _described(full, self.reading))
        elif before and not self._full:
            what = _described(before, self.reading)
            _log.info("✅ MEMORY THROTTLE RELEASED after %.0f s: %s", now - self._since, what)
        if working or not full:
            self._warned = False
        elif not self._warned:
            self._warned = True
            _log.warning(
                "%s, but no job of %s runs that could free memory: work continues",
                _described(full, self.reading),
                self._ours,
            )


def _described(full: list[Limit], reading: Reading) -> str:
    texts: list[str] = []
    for each in full:
        use, _ = reading.of(each.resource)
        figure = "unknown" if use is None else f"{use:.1f} %"
        texts.append(f"{each.resource} at {figure} (limit {each.from_pct:g} %)")
    return ", ".join(texts)
