"""Read every GPU of the machine for display: by NVML, nvidia-smi or rocm-smi."""

from __future__ import annotations

import importlib
import re
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

from queue_workflows.runtime import external_tool, stored_json

TIMEOUT_S = 3.0
"""Seconds for all tools of one reading."""
MB = 1024 * 1024
QUERY = "--query-gpu=index,utilization.gpu,memory.used,memory.total"
_INDEX = re.compile(r"\d{1,4}", re.ASCII)
_NUMBER = re.compile(r"\d{1,15}(?:\.\d{1,6})?", re.ASCII)
T = TypeVar("T")


class Gpu(NamedTuple):
    """One GPU. What its driver does not report is 0; `gpu_health` decides by known values only."""

    id: int
    use_pct: float
    vram_used_mb: int
    vram_total_mb: int


class Reader:
    """Read the GPUs by the first method that works; for one thread.

    `nvml`: the module to use, by default `pynvml` of nvidia-ml-py if it is installed; or None.
    """

    def __init__(self, nvml: Any = ...) -> None:
        self._nvml = _pynvml() if nvml is ... else nvml
        self._open = False
        self._nvidia = external_tool.Tool("nvidia-smi")
        self._rocm = external_tool.Tool("rocm-smi")
        self.source = "none"
        """The source of the latest reading: `nvml`, `nvidia-smi`, `rocm-smi` or `none`."""

    def read(self) -> list[Gpu]:
        """Return the GPUs now, in order; [] if nothing reports.

        Blocks for about TIMEOUT_S at worst.
        """
        if self._nvml is not None and (found := self._by_nvml()) is not None:
            self.source = "nvml"
            return found
        deadline = time.monotonic() + TIMEOUT_S
        answer = self._nvidia.ask(QUERY, "--format=csv,noheader,nounits", timeout_s=TIMEOUT_S)
        if answer.text is not None and (found := nvidia_gpus(answer.text)):
            self.source = "nvidia-smi"
            return found
        if not answer.hung:
            left_s = max(0.0, deadline - time.monotonic())
            answer = self._rocm.ask(
                "--showuse", "--showmeminfo", "vram", "--json", timeout_s=left_s
            )
            if answer.text is not None and (found := rocm_gpus(answer.text)):
                self.source = "rocm-smi"
                return found
        self.source = "none"
        return []

    def _by_nvml(self) -> list[Gpu] | None:
        """Return None if there is no driver, or if it has gone; it is opened again next time."""
        try:
            if not self._open:
                self._nvml.nvmlInit()
                self._open = True
            return [self._gpu(index) for index in range(self._nvml.nvmlDeviceGetCount())]
        except self._nvml.NVMLError:
            self.close()
            return None

    def _gpu(self, index: int) -> Gpu:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        use = self._value_or(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu, 0)
        memory = self._value_or(lambda: nvml.nvmlDeviceGetMemoryInfo(handle), None)
        used, total = (memory.used, memory.total) if memory else (0, 0)
        return Gpu(index, float(use), used // MB, total // MB)

    def _value_or(self, ask: Callable[[], T], otherwise: T) -> T:
        """Return a value, or None: MIG has no figure for use, unified memory none for memory."""
        try:
            return ask()
        except self._nvml.NVMLError:
            return otherwise

    def close(self) -> None:
        """Close the driver library."""
        if self._open:
            self._open = False
            self._value_or(self._nvml.nvmlShutdown, None)


def _pynvml() -> Any:
    try:
        with warnings.catch_warnings():
            # An old package of this name warns on import that it is deprecated.
            warnings.simplefilter("ignore")
            return importlib.import_module("pynvml")
    except ImportError:
        return None


def nvidia_gpus(text: str) -> list[Gpu]:
    """Return the rows of `nvidia-smi --query-gpu` QUERY; a field like `[N/A]` becomes 0."""
    found: list[Gpu] = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 4 and _INDEX.fullmatch(words[0]):
            use, used, total = map(_number, words[1:])
            found.append(Gpu(int(words[0]), use, int(used), int(total)))
    return found


def rocm_gpus(text: str) -> list[Gpu]:
    """Return the GPUs of `rocm-smi --showuse --showmeminfo vram --json`, after any other output."""
    listed = stored_json.mapping(stored_json.load_json(text[text.find("{") :]))
    found: list[Gpu] = []
    for name, values in listed.items():
        index = re.fullmatch(r"card(\d{1,4})", name, re.ASCII)
        if index and isinstance(values, dict):
            fields = cast("dict[str, Any]", values)
            use, used, total = (
                _number(str(fields.get(key, "")))
                for key in ("GPU use (%)", "VRAM Total Used Memory (B)", "VRAM Total Memory (B)")
            )
            found.append(Gpu(int(index[1]), use, int(used) // MB, int(total) // MB))
    return sorted(found)


def _number(text: str) -> float:
    return float(text) if _NUMBER.fullmatch(text) else 0.0
