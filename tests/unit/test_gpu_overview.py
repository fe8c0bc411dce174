"""The GPUs of a machine, from its tools' output: drivers, MIG, unified memory, AMD, none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queue_workflows.telemetry import gpu_overview
from queue_workflows.telemetry.gpu_overview import Gpu
from tests.support import tabled
from tests.support.examples import examples


def test_gpus_of_nvidia() -> None:
    cases: list[Any] = [
        # 390 to 470: a GPU without the reading prints [Not Supported].
        ("0, 97, 10989, 11178\n", [Gpu(0, 97, 10989, 11178)]),
        ("0, [Not Supported], 300, 2002\n", [Gpu(0, 0, 300, 2002)]),
        # 510 on: [N/A], and [Insufficient Permissions] inside some containers.
        ("0, [N/A], 14, 40960\n1, 12, 5, 40960\n", [Gpu(0, 0, 14, 40960), Gpu(1, 12, 5, 40960)]),
        ("0, [Insufficient Permissions], 14, 40960\n", [Gpu(0, 0, 14, 40960)]),
        # MIG: the parent's memory is known, its use is not.
        ("0, [N/A], 87, 81559\n", [Gpu(0, 0, 87, 81559)]),
        # Unified memory: no memory of its own.
        ("0, 43, [N/A], [N/A]\n", [Gpu(0, 43, 0, 0)]),
        ("0, 43, Not Supported, N/A\n", [Gpu(0, 43, 0, 0)]),
        # A GPU that fell off the bus, and one that works.
        ("0, [GPU requires reset], 0, 24564\n", [Gpu(0, 0, 0, 24564)]),
        ("0, [Unknown Error], [Unknown Error], [Unknown Error]\n", [Gpu(0, 0, 0, 0)]),
        ("Unable to determine the device handle for GPU0: GPU is lost.\n", []),
        ("1, 5, 3, 24564\n", [Gpu(1, 5, 3, 24564)]),
        # With units, as when the format's `nounits` is not known.
        ("0, 45 %, 1234 MiB, 24564 MiB\n", [Gpu(0, 0, 0, 0)]),
        ("No devices were found\n", []),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", []),
        ("", []),
        ("٣, 1, 2, 3\n-1, 1, 2, 3\n0, 1, 2\n", []),
        (f"{'9' * 5000}, 1, 2, 3\n", []),
    ]
    for text, found in cases:
        with tabled.case(text, found):
            assert gpu_overview.nvidia_gpus(text) == found


ROCM = """\
WARNING: AMD GPU device(s) is/are in a low-power state. Check power control/runtime_status

{"card1": {"GPU use (%)": "3", "VRAM Total Memory (B)": "17163091968", "VRAM Total Used Memory \
(B)": "1073741824"}, "card0": {"GPU use (%)": "N/A", "VRAM Total Memory (B)": "536870912"}, \
"system": {"Driver version": "6.8.5"}}
"""


def test_gpus_of_amd() -> None:
    cases: list[Any] = [
        (ROCM, [Gpu(0, 0, 0, 512), Gpu(1, 3, 1024, 16368)]),
        ('{"card0": {"GPU use (%)": 87}}', [Gpu(0, 87, 0, 0)]),
        ('{"card0": "broken", "cardx": {}}', []),
        ("{}", []),
        ("[]", []),
        ("{", []),
        ('{"card0": ' + "[" * 100_000, []),
        ("", []),
        ("No AMD GPUs specified\n", []),
    ]
    for text, found in cases:
        with tabled.case(text, found):
            assert gpu_overview.rocm_gpus(text) == found


@given(st.text(st.sampled_from('{}[]":,0123456789.%ard-cUseGP MBVTotlmy()\n')))
@settings(max_examples=examples(150))
def test_invalid_output_gives_gpus_or_none(text: str) -> None:
    for card in gpu_overview.nvidia_gpus(text) + gpu_overview.rocm_gpus('{"card0": ' + text):
        assert card.id >= 0 and card.use_pct >= 0


class Nvml:
    """What nvidia-ml-py offers, for GPUs that report only a part or a driver that goes away."""

    class NVMLError(Exception):
        """As nvidia-ml-py's."""

    def __init__(self, *answers: tuple[Any, Any]) -> None:
        self.answers = list(answers)
        self.driver = True
        self.opened = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self._need()
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self._need()

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self._need()
        return len(self.answers)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        self._need()
        return index

    def nvmlDeviceGetUtilizationRates(self, index: int) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=self._known(self.answers[index][0]))

    def nvmlDeviceGetMemoryInfo(self, index: int) -> Any:  # noqa: N802
        used, total = self._known(self.answers[index][1])
        return SimpleNamespace(used=used << 20, total=total << 20)

    def _need(self) -> None:
        if not self.driver:
            raise self.NVMLError("driver not loaded")

    def _known(self, value: Any) -> Any:
        if value is None:
            raise self.NVMLError("not supported")
        return value


@pytest.fixture
def no_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")


@pytest.mark.usefixtures("no_tools")
def test_gpus_of_nvml_even_with_partial_readings() -> None:
    nvml = Nvml((62, (1000, 24564)), (None, (14, 40960)), (5, None))
    reader = gpu_overview.Reader(nvml)
    assert reader.read() == [Gpu(0, 62, 1000, 24564), Gpu(1, 0, 14, 40960), Gpu(2, 5, 0, 0)]
    assert reader.source == "nvml"
    reader.read()
    assert nvml.opened == 1
    reader.close()


@pytest.mark.usefixtures("no_tools")
def test_a_driver_that_goes_and_comes_back() -> None:
    nvml = Nvml((62, (1000, 24564)))
    reader = gpu_overview.Reader(nvml)
    assert reader.read()
    nvml.driver = False
    assert reader.read() == []
    assert reader.source == "none"
    nvml.driver = True
    assert reader.read() == [Gpu(0, 62, 1000, 24564)]
    assert (reader.source, nvml.opened) == ("nvml", 2)


@pytest.mark.usefixtures("no_tools")
def test_a_machine_without_gpus_and_tools() -> None:
    reader = gpu_overview.Reader(None)
    assert (reader.read(), reader.source) == ([], "none")
    reader.close()
