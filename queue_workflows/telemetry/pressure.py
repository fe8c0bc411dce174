"""Measure how full memory is, of the container or else of the machine, and throttle by it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from queue_workflows import config
from queue_workflows.telemetry import gpu_overview
from queue_workflows.types import NowFn

_log = logging.getLogger(__name__)
SWAP_PCT = 70.0
"""Swap use in % from which it throttles, and below which it is released."""
NO_LIMIT = 1 << 60
"""A limit of cgroup v1 from here on, in bytes, means none."""


class Reading(NamedTuple):
    """Memory in use in %; None: there is no such memory, or it cannot be read.

    `gpu` is that of the fullest card.
    """

    ram: float | None = None
    gpu: float | None = None
    swap: float | None = None


class Memory:
    """Read memory from `/proc` and cgroups v2 or v1, and GPU memory by `gpus`.

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
        self._proc = proc
        self._cgroups = cgroups

    def read(self) -> Reading:
        """Return the use now; raise nothing."""
        machine = _numbers(self._proc / "meminfo")
        total = machine.get("MemTotal", 0) * 1024
        folders = list(self._folders())
        ram = _fullest(folders, _ram_of, below=total)
        if ram is None and total and "MemAvailable" in machine:
            ram = 100 - machine["MemAvailable"] * 1024 * 100 / total
        swap_total = machine.get("SwapTotal", 0)
        swap = _fullest(folders, _swap_of, below=swap_total * 1024)
        if swap is None and swap_total:
            swap = 100 - machine.get("SwapFree", 0) * 100 / swap_total
        return Reading(ram, self._gpu(), swap)

    def _gpu(self) -> float | None:
        cards = [] if self._gpus is None else self._gpus.read()
        shares = [
            100 * each.vram_used_mb / each.vram_total_mb for each in cards if each.vram_total_mb
        ]
        return max(shares, default=None)

    def _folders(self) -> list[Path]:
        """Return the folders of this process's memory cgroups, from its own to the root's."""
        found: list[Path] = []
        for line in _text(self._proc / "self/cgroup").splitlines():
            _, controllers, name = [*line.split(":", 2), "", ""][:3]
            if controllers == "":
                root = self._cgroups
            elif "memory" in controllers.split(","):
                root = self._cgroups / "memory"
            else:
                continue
            # In a container the path may be the host's, of which only the root is there.
            parts = [part for part in name.split("/") if part not in ("", "..")]
            found += [root.joinpath(*parts[:size]) for size in range(len(parts), -1, -1)]
        return found


class _Use(NamedTuple):
    used: int
    limit: int


def _fullest(
    folders: list[Path], use_of: Callable[[Path], _Use | None], *, below: int
) -> float | None:
    """Return the largest share in % among the cgroups whose limit is below this; None: none is."""
    uses = [use for folder in folders if (use := use_of(folder)) is not None]
    return max((100 * use.used / use.limit for use in uses if 0 < use.limit < below), default=None)


def _ram_of(folder: Path) -> _Use | None:
    limit, used, cached = _number(folder / "memory.max"), "memory.current", "inactive_file"
    if limit is None:
        limit = _number(folder / "memory.limit_in_bytes")
        used, cached = "memory.usage_in_bytes", "total_inactive_file"
    if limit is None or limit >= NO_LIMIT or (now := _number(folder / used)) is None:
        return None
    return _Use(max(0, now - _numbers(folder / "memory.stat").get(cached, 0)), limit)


def _swap_of(folder: Path) -> _Use | None:
    limit, now = _number(folder / "memory.swap.max"), _number(folder / "memory.swap.current")
    return None if limit is None or now is None else _Use(now, limit)


def _text(path: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        return path.read_text(encoding="ascii", errors="replace")
    return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isascii() and text.isdecimal() else None


def _numbers(path: Path) -> dict[str, int]:
    """Return the lines `name number` or `name: number kB` of a file."""
    pairs = [line.replace(":", " ").split() for line in _text(path).splitlines()]
    return {each[0]: int(each[1]) for each in pairs if len(each) > 1 and each[1].isdecimal()}


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


class Throttle:
    """Decide from readings whether work has to wait for memory.

    Each resource has its own hysteresis: it throttles from its limit on until it is below its
    release value. Without own work that could give memory back nothing throttles. One thread calls
    `check`; any thread reads.
    """

    def __init__(
        self,
        read: Callable[[], Reading] | None = None,
        *,
        limits_fn: Callable[[], list[Limit]] = limits,
        now_fn: NowFn = time.monotonic,
    ) -> None:
        self._read = read or Memory(gpus=gpu_overview.Reader()).read
        self._limits = limits_fn
        self._now = now_fn
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

    def check(self, *, working: bool = True) -> bool:
        """Read the memory and return whether work has to wait; `working`: own work runs now."""
        now = self._now()
        for each in self._full:
            spent = self._seconds.get(each.resource, 0.0)
            self._seconds[each.resource] = spent + now - self._checked_at
        self._checked_at = now
        self.reading = self._read()
        before = {each.resource for each in self._full}
        full = [each for each in self._limits() if self._is_full(each, each.resource in before)]
        self._set(full, working=working, now=now)
        return self.active

    def _is_full(self, limit: Limit, was: bool) -> bool:
        use = _use(self.reading, limit)
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
                "%s, but no job of this process runs that could free memory: work continues",
                _described(full, self.reading),
            )


def _use(reading: Reading, limit: Limit) -> float | None:
    return {"RAM": reading.ram, "GPU": reading.gpu, "swap": reading.swap}[limit.resource]


def _described(full: list[Limit], reading: Reading) -> str:
    texts: list[str] = []
    for each in full:
        use = _use(reading, each)
        figure = "unknown" if use is None else f"{use:.1f} %"
        texts.append(f"{each.resource} at {figure} (limit {each.from_pct:g} %)")
    return ", ".join(texts)
