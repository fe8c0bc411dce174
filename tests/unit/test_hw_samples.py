"""A sample of a machine, with and without psutil: its values, its size, its averages."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queue_workflows import cgroup_attribution, hw_metrics
from queue_workflows.cli import telemetry
from queue_workflows.telemetry.gpu_overview import Gpu

KEYS = {
    "cpu_percent", "cpu_ours_percent", "ram_percent", "ram_used_mb", "ram_total_mb",
    "ram_ours_used_mb", "ram_ours_percent", "swap_used_mb", "gpus",
}  # fmt: skip
MB = 1 << 20


class Cards:
    """A reader of GPUs that counts its readings."""

    def __init__(self, *cards: Gpu, source: str = "nvml") -> None:
        self.cards = list(cards)
        self.source = source
        self.readings = 0

    def read(self) -> list[Gpu]:
        self.readings += 1
        return self.cards

    def close(self) -> None:
        self.source = "closed"


class Ours:
    """A fixed share of our containers."""

    def __init__(self, usage: cgroup_attribution.Usage | None = None) -> None:
        self.usage = usage

    def read(self) -> cgroup_attribution.Usage | None:
        return self.usage


class Psutil:
    """A machine of 64 GB, of which 48 are in use."""

    def __init__(self) -> None:
        self.percents = iter([0.0, 37.5, 38.5])

    def cpu_percent(self, interval: None) -> float:
        return next(self.percents)

    def virtual_memory(self) -> Any:
        return SimpleNamespace(total=65536 * MB, available=16384 * MB, percent=75.0)

    def swap_memory(self) -> Any:
        return SimpleNamespace(used=512 * MB)


def probe(cards: Any = None, ours: Any = None, **more: Any) -> hw_metrics.Probe:
    return hw_metrics.Probe(reader=cards or Cards(), ours=ours or Ours(), **more)


@pytest.fixture
def psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hw_metrics, "_psutil", Psutil)


@pytest.mark.usefixtures("psutil")
def test_a_sample_has_every_key() -> None:
    usage = cgroup_attribution.Usage(12.5, 6554)
    found = probe(Cards(Gpu(0, 97.0, 21000, 24564)), Ours(usage)).sample()
    assert found == {
        "cpu_percent": 37.5,
        "cpu_ours_percent": 12.5,
        "ram_percent": 75.0,
        "ram_used_mb": 49152,
        "ram_total_mb": 65536,
        "ram_ours_used_mb": 6554,
        "ram_ours_percent": 10.0,
        "swap_used_mb": 512,
        "gpus": [{"id": 0, "use_pct": 97.0, "vram_used_mb": 21000, "vram_total_mb": 24564}],
    }


def test_without_psutil_the_gpus_are_reported_and_the_rest_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hw_metrics, "_psutil", lambda: None)
    usage = cgroup_attribution.Usage(12.5, 6554)
    found = probe(Cards(Gpu(0, 97.0, 21000, 24564)), Ours(usage)).sample()
    assert found.keys() == KEYS
    known = {key for key, value in found.items() if value is not None}
    assert known == {"cpu_ours_percent", "ram_ours_used_mb", "gpus"}


@pytest.mark.parametrize(("source", "readings"), [("nvml", 4), ("nvidia-smi", 2), ("none", 2)])
def test_what_takes_a_process_is_read_every_5_s(source: str, readings: int) -> None:
    now = [100.0]
    cards = Cards(source=source)
    subject = probe(cards, now_fn=lambda: now[0])
    for now[0] in (100.0, 102.0, 104.0, 106.0):
        subject.sample()
    assert cards.readings == readings


@given(cards=st.integers(0, 500), mb=st.integers(0, 10**9))
def test_a_sample_always_fits_into_a_notification(cards: int, mb: int) -> None:
    rows = [Gpu(n, 100.0, mb, mb)._asdict() for n in range(cards)]
    found = hw_metrics.fit({"cpu_percent": 1.0, "gpus": rows})
    assert len(json.dumps(found)) <= hw_metrics.PAYLOAD_LIMIT + len('"gpus_cut": 500, ')
    assert len(found["gpus"]) + found.get("gpus_cut", 0) == cards
    assert ("gpus_cut" in found) == (cards > len(found["gpus"]))
    if cards <= 60:
        assert found["gpus"] == rows


def test_many_samples_come_to_mean_percentages_and_the_most_in_use() -> None:
    many = [
        {"cpu_percent": 10.0, "ram_used_mb": 100, "swap_used_mb": None, "gpus": [
            {"id": 0, "use_pct": 0.0, "vram_used_mb": 5, "vram_total_mb": 9}]},
        {"cpu_percent": None, "ram_used_mb": 300, "swap_used_mb": None, "gpus": [
            {"id": 0, "use_pct": 100.0, "vram_used_mb": 7, "vram_total_mb": 9},
            {"id": 1, "use_pct": 50.0, "vram_used_mb": 1, "vram_total_mb": 9}]},
        {"cpu_percent": 21.0, "ram_used_mb": 200, "swap_used_mb": None, "gpus": []},
    ]  # fmt: skip
    assert hw_metrics.fold(many) == {
        "cpu_percent": 15.5,
        "ram_used_mb": 300,
        "swap_used_mb": None,
        "gpus": [
            {"id": 0, "use_pct": 50.0, "vram_used_mb": 7, "vram_total_mb": 9},
            {"id": 1, "use_pct": 50.0, "vram_used_mb": 1, "vram_total_mb": 9},
        ],
    }


def test_what_a_sample_costs_is_measured_with_every_reading() -> None:
    cards = Cards(source="nvidia-smi")
    cost = telemetry.measure(probe(cards), 5)
    assert cards.readings == 5
    assert 0 <= cost.cpu_s < 1
    assert cost.tools_cpu_s == pytest.approx(0, abs=1e-6), "no tool was run"
    assert cost.wall_s > 0
