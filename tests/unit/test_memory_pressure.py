"""How full memory is, of the container or the machine, and when work waits for it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queue_workflows.telemetry import gpu_overview, pressure

MB = 1 << 20
GB = 1 << 30


class Machine:
    """Folders like /proc and /sys/fs/cgroup."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroups.mkdir()
        self.is_in("0::/")

    def has(self, total_mb: int, available_mb: int, swap: tuple[int, int] = (0, 0)) -> None:
        lines = {"MemTotal": total_mb, "MemAvailable": available_mb, "SwapTotal": swap[0],
                 "SwapFree": swap[1]}  # fmt: skip
        text = "".join(f"{name}:  {value * 1024} kB\n" for name, value in lines.items())
        (self.proc / "meminfo").write_text(text)

    def is_in(self, *lines: str) -> None:
        (self.proc / "self/cgroup").write_text("".join(f"{line}\n" for line in lines))

    def cgroup(self, name: str, **files: object) -> None:
        folder = self.cgroups / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, value in files.items():
            (folder / file.replace("__", ".")).write_text(f"{value}\n")

    def read(self) -> pressure.Reading:
        return pressure.Memory(proc=self.proc, cgroups=self.cgroups).read()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_a_limit_the_machine_counts(machine: Machine) -> None:
    machine.has(1000, 250, swap=(200, 50))
    machine.cgroup("", memory__max="max")
    found = machine.read()
    assert (found.ram, found.swap, found.gpu) == (75.0, 75.0, None)


def test_the_limit_of_the_container_counts_and_not_the_machine(machine: Machine) -> None:
    machine.has(64_000, 1_000)
    machine.is_in("0::/app/worker")
    machine.cgroup("app", memory__max=GB, memory__current=GB // 2, memory__stat="anon 1")
    machine.cgroup("app/worker", memory__max="max", memory__current=GB // 2)
    assert machine.read().ram == 50.0


def test_of_several_limits_the_fullest_counts(machine: Machine) -> None:
    machine.has(64_000, 32_000)
    machine.is_in("0::/a/b")
    machine.cgroup("a", memory__max=2 * GB, memory__current=GB)
    machine.cgroup("a/b", memory__max=GB, memory__current=GB * 9 // 10)
    assert machine.read().ram == pytest.approx(90, abs=0.01)


def test_pages_of_files_that_can_be_dropped_do_not_count(machine: Machine) -> None:
    machine.has(64_000, 32_000)
    stat = f"anon {GB // 4}\ninactive_file {GB // 4}\nactive_file {GB // 4}"
    machine.cgroup("", memory__max=GB, memory__current=GB * 3 // 4, memory__stat=stat)
    assert machine.read().ram == 25.0


def test_a_limit_beyond_the_machine_is_none(machine: Machine) -> None:
    machine.has(1000, 400)
    machine.cgroup("", memory__max=64 * GB, memory__current=GB)
    assert machine.read().ram == 60.0


def test_cgroups_of_version_1_are_read_at_the_root_of_a_container(machine: Machine) -> None:
    machine.has(64_000, 32_000)
    machine.is_in("4:memory:/docker/abc", "3:cpu,cpuacct:/docker/abc")
    machine.cgroup(
        "memory", memory__limit_in_bytes=GB, memory__usage_in_bytes=GB // 2,
        memory__stat=f"total_inactive_file {GB // 8}\ntotal_active_file {GB // 8}",
    )  # fmt: skip
    assert machine.read().ram == 25.0


def test_the_swap_of_a_container_counts_by_its_limit(machine: Machine) -> None:
    machine.has(64_000, 32_000, swap=(8_000, 8_000))
    machine.cgroup("", memory__swap__max=1000 * MB, memory__swap__current=700 * MB)
    assert machine.read().swap == 70.0


def test_a_container_that_may_not_swap_does_not_wait_for_the_swap_of_the_machine(
    machine: Machine,
) -> None:
    machine.has(64_000, 32_000, swap=(8_000, 1_000))
    machine.cgroup("", memory__swap__max=1000 * MB, memory__swap__current=900 * MB)
    machine.cgroup("app", memory__swap__max=0, memory__swap__current=0)
    machine.is_in("0::/app")
    assert machine.read().swap == 0.0


def test_a_cgroup_that_uses_no_swap_yet_does_not_hide_a_full_one_above_it(machine: Machine) -> None:
    machine.has(64_000, 32_000, swap=(8_000, 8_000))
    machine.cgroup("", memory__swap__max=1000 * MB, memory__swap__current=900 * MB)
    machine.cgroup("app", memory__swap__max=500 * MB, memory__swap__current=0)
    machine.is_in("0::/app")
    assert machine.read().swap == 90.0


@pytest.mark.parametrize("text", ["", "MemTotal: x kB\n", "MemTotal:\n", "\xff\0", "MemTotal: 5\n"])
def test_files_that_cannot_be_read_are_unknown_memory(machine: Machine, text: str) -> None:
    (machine.proc / "meminfo").write_text(text)
    machine.is_in("", "0", "0::", "x:y", f"0::/{'x' * 300}")
    assert machine.read() == pressure.Reading()


def test_without_proc_memory_is_unknown(tmp_path: Path) -> None:
    memory = pressure.Memory(proc=tmp_path / "none", cgroups=tmp_path / "none")
    assert memory.read() == pressure.Reading()


def test_the_fullest_gpu_counts() -> None:
    class Cards(gpu_overview.Reader):
        def read(self) -> list[gpu_overview.Gpu]:
            return [gpu_overview.Gpu(0, 0.0, 10, 100), gpu_overview.Gpu(1, 0.0, 80, 100),
                    gpu_overview.Gpu(2, 0.0, 0, 0)]  # fmt: skip

    assert pressure.Memory(gpus=Cards(None)).read().gpu == 80.0


def test_this_machine_has_memory() -> None:
    ram = pressure.Memory().read().ram
    assert ram is not None
    assert 0 < ram <= 100


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Throttled:
    """A throttle whose readings are set."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.now = pressure.Reading()
        self.throttle = pressure.Throttle(lambda: self.now, now_fn=self.clock)

    def at(self, *, working: bool = True, after_s: float = 5.0, **use: float) -> bool:
        self.clock.now += after_s
        self.now = pressure.Reading(**use)
        return self.throttle.check(working=working)


@pytest.fixture
def throttled() -> Throttled:
    return Throttled()


@pytest.mark.parametrize(
    ("resource", "engages", "holds", "releases"),
    [("ram", 90, 80, 79.9), ("gpu", 85, 75, 74.9), ("swap", 70, 70, 69.9)],
)
def test_each_resource_has_its_limits(
    throttled: Throttled, resource: str, engages: float, holds: float, releases: float
) -> None:
    assert not throttled.at(**{resource: engages - 0.1})
    assert throttled.at(**{resource: engages})
    assert throttled.at(**{resource: holds})
    assert not throttled.at(**{resource: releases})
    assert not throttled.at(**{resource: engages - 0.1})


def test_a_resource_that_never_reached_its_limit_holds_nothing(throttled: Throttled) -> None:
    assert throttled.at(ram=95, gpu=80)
    assert not throttled.at(ram=79, gpu=80)


def test_limits_come_from_the_environment(
    throttled: Throttled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMORY_THROTTLE_THRESHOLD", "50")
    monkeypatch.setenv("MEMORY_RESUME_THRESHOLD", "60")  # above the limit: as the limit
    assert throttled.at(ram=50)
    assert not throttled.at(ram=49)
    monkeypatch.setenv("GPU_THROTTLE_THRESHOLD", "20")
    monkeypatch.setenv("GPU_RESUME_THRESHOLD", "10")
    assert throttled.at(gpu=20)
    assert throttled.at(gpu=11)
    assert not throttled.at(gpu=9)


def test_it_logs_when_it_pauses_and_when_it_continues(
    throttled: Throttled, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(3):
        throttled.at(ram=91.26)
    assert throttled.throttle.reason == "RAM at 91.3 % (limit 90 %)"
    for _ in range(3):
        throttled.at(ram=70)
    assert [record.message for record in caplog.records] == [
        "🚨 MEMORY THROTTLE ACTIVE: RAM at 91.3 % (limit 90 %)",
        "✅ MEMORY THROTTLE RELEASED after 15 s: RAM at 70.0 % (limit 90 %)",
    ]
    assert throttled.throttle.reason is None
    assert throttled.throttle.seconds == {"RAM": 15.0}


def test_pressure_while_nothing_of_ours_runs_is_logged_once_and_stops_nothing(
    throttled: Throttled, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        assert not throttled.at(ram=95, working=False)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no job of this process runs" in caplog.text


def test_it_is_released_when_our_last_job_ends_although_memory_is_full(
    throttled: Throttled,
) -> None:
    assert throttled.at(ram=95, working=True)
    assert not throttled.at(ram=95, working=False)


def test_unknown_memory_never_throttles(throttled: Throttled) -> None:
    assert not throttled.at()
    assert throttled.at(ram=95)
    assert not throttled.at()


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), max_size=40))
def test_it_follows_the_hysteresis_of_each_resource(uses: list[tuple[float, float]]) -> None:
    throttled, ram, gpu = Throttled(), False, False
    for ram_pct, gpu_pct in uses:
        ram = ram_pct >= (80 if ram else 90)
        gpu = gpu_pct >= (75 if gpu else 85)
        assert throttled.at(ram=ram_pct, gpu=gpu_pct) == (ram or gpu)


def test_each_reading_is_new_and_follows_a_move_to_another_cgroup(machine: Machine) -> None:
    machine.has(64_000, 32_000)
    machine.is_in("0::/a")
    machine.cgroup("a", memory__max=GB, memory__current=GB // 2)
    machine.cgroup("b", memory__max=GB, memory__current=GB // 4)
    memory = pressure.Memory(proc=machine.proc, cgroups=machine.cgroups)
    assert memory.read().ram == 50.0
    machine.cgroup("a", memory__current=GB * 3 // 4)
    assert memory.read().ram == 75.0
    machine.is_in("0::/b")
    assert memory.read().ram == 25.0
    machine.cgroup("b", memory__max="max")
    machine.has(1000, 900)
    assert memory.read().ram == 10.0


def test_repeated_readings_open_no_further_files(machine: Machine) -> None:
    machine.has(64_000, 32_000)
    machine.cgroup("", memory__max=GB, memory__current=GB // 2, memory__stat="anon 1")
    memory = pressure.Memory(proc=machine.proc, cgroups=machine.cgroups)
    memory.read()
    before = _open_files()
    for _ in range(50):
        memory.read()
    assert _open_files() == before


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize(
    "wrong",
    [None, 5, (None, "full", None), pressure.Reading(ram="full"), OSError("no file")],  # type: ignore[arg-type]
)
def test_a_measurement_that_fails_is_unknown_memory(
    throttled: Throttled, caplog: pytest.LogCaptureFixture, wrong: Any
) -> None:
    assert throttled.at(ram=95)

    def read() -> Any:
        if isinstance(wrong, Exception):
            raise wrong
        return wrong

    throttle = pressure.Throttle(lambda: throttled.now if found.pop() else read())
    found = [False, True]
    assert throttle.check()
    assert not throttle.check()
    assert throttle.reading == pressure.Reading()
    assert throttle.reason is None
    assert "the reading failed" in caplog.text


def test_not_a_number_is_unknown_memory(throttled: Throttled) -> None:
    assert throttled.at(ram=95)
    assert not throttled.at(ram=float("nan"), gpu=float("nan"))
    assert throttled.throttle.reading == pressure.Reading()
