"""The boot clock: which clock it reads, and its replacement where there is none."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from queue_workflows.runtime import clock

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the boot clock is Linux's")


@on_linux
def test_it_reads_the_clock_that_counts_suspend(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = {time.CLOCK_BOOTTIME: 7200.5, time.CLOCK_MONOTONIC: 3600.0}
    monkeypatch.setattr(time, "clock_gettime", readings.__getitem__)
    monkeypatch.setattr(time, "monotonic", lambda: 3600.0)
    assert clock.boot_s() == 7200.5


@on_linux
def test_it_is_the_kernels_uptime() -> None:
    before_s = clock.boot_s()
    uptime_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    assert before_s - 0.02 <= uptime_s <= clock.boot_s()


def test_without_a_boot_clock_it_is_the_monotonic_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(time, "CLOCK_BOOTTIME", raising=False)
    monkeypatch.setattr(clock, "_BOOT_CLOCK", clock._boot_clock())
    monkeypatch.setattr(time, "monotonic", lambda: 3600.0)
    assert clock.boot_s() == 3600.0


@on_linux
def test_a_kernel_that_refuses_the_boot_clock_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_clock: int) -> float:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(time, "clock_gettime", refuse)
    assert clock._boot_clock() is None
