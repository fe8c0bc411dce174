"""Measure what samples of the hardware cost."""

from __future__ import annotations

import resource
import time
from typing import NamedTuple, Protocol


class Probe(Protocol):
    """Takes samples; see `hw_metrics.Probe`."""

    def reread(self) -> None:
        """Let the next sample read the GPUs."""
        ...

    def sample(self) -> object:
        """Take a sample."""
        ...


class Cost(NamedTuple):
    """Measure a sample's cost: CPU seconds of this process and its tools, and elapsed ones."""

    cpu_s: float
    tools_cpu_s: float
    wall_s: float


def measure(probe: Probe, times: int = 10) -> Cost:
    """Return the mean cost of a sample that reads the GPUs; block for that many samples."""
    tools = resource.getrusage(resource.RUSAGE_CHILDREN)
    own, began = time.thread_time(), time.monotonic()
    for _ in range(times):
        probe.reread()
        probe.sample()
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = now.ru_utime + now.ru_stime - tools.ru_utime - tools.ru_stime
    return Cost(
        (time.thread_time() - own) / times,
        spent / times,
        (time.monotonic() - began) / times,
    )
