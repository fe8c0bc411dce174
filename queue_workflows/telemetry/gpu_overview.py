"""Every GPU of the box at a glance, for people: by NVML, by nvidia-smi, by rocm-smi, or none."""

from __future__ import annotations

import importlib
import json
import re
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

from queue_workflows.runtime import command

TIMEOUT_S = 3.0
"""For all the tools that one reading runs."""
MB = 1024 * 1024
QUERY = "--query-gpu=index,utilization.gpu,memory.used,memory.total"
_NUMBER = re.compile(r"\d{1,15}(?:\.\d{1,6})?", re.ASCII)
T = TypeVar("T")


class Card(NamedTuple):
    """One GPU. What its driver does not tell is 0 here: judging by it is for `gpu_health`."""

    id: int
    use_pct: float
    vram_used_mb: int
    vram_total_mb: int


class Reader:
    """Reads the cards, by the first way that works; for one thread.

    `nvml`: the module to ask, by default `pynvml` of nvidia-ml-py, if it is installed; None: none.
    """

    def __init__(self, nvml: Any = ..., *, timeout_s: float = TIMEOUT_S) -> None:
        self._nvml = _pynvml() if nvml is ... else nvml
        self._open = False
        self._timeout_s = timeout_s
        self._nvidia = command.Tool("nvidia-smi")
        self._rocm = command.Tool("rocm-smi")
        self.source = "none"
        """What the latest reading came from: `nvml`, `nvidia-smi`, `rocm-smi` or `none`."""

    def read(self) -> list[Card]:
        """The cards now, in order; [] when nothing tells. Blocks for about TIMEOUT_S at worst."""
        if self._nvml is not None and (found := self._by_nvml()) is not None:
            self.source = "nvml"
            return found
        deadline = time.monotonic() + self._timeout_s
        asked = self._nvidia.ask(QUERY, "--format=csv,noheader,nounits", timeout_s=self._timeout_s)
        if asked.text is not None and (found := nvidia_cards(asked.text)):
            self.source = "nvidia-smi"
            return found
        if not asked.hung:
            left_s = max(0.0, deadline - time.monotonic())
            asked = self._rocm.ask("--showuse", "--showmeminfo", "vram", "--json", timeout_s=left_s)
            if asked.text is not None and (found := rocm_cards(asked.text)):
                self.source = "rocm-smi"
                return found
        self.source = "none"
        return []

    def _by_nvml(self) -> list[Card] | None:
        """None where there is no driver, or it has gone; it is opened again the next time."""
        try:
            if not self._open:
                self._nvml.nvmlInit()
                self._open = True
            return [self._card(index) for index in range(self._nvml.nvmlDeviceGetCount())]
        except self._nvml.NVMLError:
            self.close()
            return None

    def _card(self, index: int) -> Card:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        use = self._told(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu, 0)
        memory = self._told(lambda: nvml.nvmlDeviceGetMemoryInfo(handle), None)
        used, total = (memory.used, memory.total) if memory else (0, 0)
        return Card(index, float(use), used // MB, total // MB)

    def _told(self, ask: Callable[[], T], otherwise: T) -> T:
        """A card may tell one thing and not another: MIG no use, unified memory no memory."""
        try:
            return ask()
        except self._nvml.NVMLError:
            return otherwise

    def close(self) -> None:
        """Let the driver go."""
        if self._open:
            self._open = False
            self._told(self._nvml.nvmlShutdown, None)


def _pynvml() -> Any:
    try:
        with warnings.catch_warnings():
            # An old package of this name says on import that it is deprecated.
            warnings.simplefilter("ignore")
            return importlib.import_module("pynvml")
    except ImportError:
        return None


def nvidia_cards(text: str) -> list[Card]:
    """The rows of `nvidia-smi --query-gpu` QUERY; a field that is no number (`[N/A]`) is 0."""
    found: list[Card] = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 4 and words[0].isascii() and words[0].isdecimal():
            use, used, total = map(_number, words[1:])
            found.append(Card(int(words[0]), use, int(used), int(total)))
    return found


def rocm_cards(text: str) -> list[Card]:
    """The cards of `rocm-smi --showuse --showmeminfo vram --json`, whatever it prints before."""
    try:
        listed: Any = json.loads(text[text.index("{") :])
    except ValueError:
        return []
    found: list[Card] = []
    for name, told in cast("dict[str, Any]", listed).items() if isinstance(listed, dict) else ():
        index = re.fullmatch(r"card(\d{1,4})", name, re.ASCII)
        if index and isinstance(told, dict):
            fields = cast("dict[str, Any]", told)
            use, used, total = (
                _number(str(fields.get(key, "")))
                for key in ("GPU use (%)", "VRAM Total Used Memory (B)", "VRAM Total Memory (B)")
            )
            found.append(Card(int(index[1]), use, int(used) // MB, int(total) // MB))
    return sorted(found)


def _number(text: str) -> float:
    return float(text) if _NUMBER.fullmatch(text) else 0.0
