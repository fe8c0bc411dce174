"""Read a clock that also counts while the machine sleeps."""

from __future__ import annotations

import time


def _boot_clock() -> int | None:
    clock: int | None = getattr(time, "CLOCK_BOOTTIME", None)
    if clock is not None:
        try:
            time.clock_gettime(clock)
        except OSError:
            return None
    return clock


_BOOT_CLOCK = _boot_clock()


def boot_s() -> float:
    """Return the seconds since boot, suspend included; for intervals and deadlines only.

    Without such a clock (macOS) it is the monotonic one, which may stop during suspend. A process
    always gets the same clock.
    """
    return time.monotonic() if _BOOT_CLOCK is None else time.clock_gettime(_BOOT_CLOCK)
