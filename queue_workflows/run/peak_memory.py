"""Measure the peak memory of each job apart from that of the jobs before it."""

from __future__ import annotations

import contextlib
import os

from queue_workflows.run import wire


class PeakMemory:
    """Reset the peak RSS of this process (VmHWM), so that each job has its own."""

    def __init__(self) -> None:
        self._fd: int | None = None
        with contextlib.suppress(OSError):
            self._fd = wire.high(os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC))

    def reset(self) -> None:
        """Make the present RSS the peak."""
        if self._fd is not None:
            try:
                os.write(self._fd, b"5")
            except OSError:  # the handler closed it
                self._fd = None
