"""Check which GPUs `--cards` names, and measure the memory that the models of a worker must fit."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from queue_workflows import config, errors
from queue_workflows.runtime import external_tool

TIMEOUT_S = 3.0
KNOWN_S, UNKNOWN_S = 3600.0, 60.0
"""Seconds between two measurements: a driver may start after the worker."""
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""The variables by which a process sees some GPUs alone: NVIDIA's and AMD's."""


class GpuMemory:
    """The size of this worker's GPU memory, if known; measured by one thread."""

    def __init__(self) -> None:
        self._tool = external_tool.Tool("nvidia-smi")
        self.vram_mb: int | None = None
        self.measured = False
        """Whether it was measured, with whatever result."""

    def measure(self) -> bool:
        """Measure; return whether the size is new. A size that was known once stays known."""
        found = vram_total_mb(self._tool)
        changed = not self.measured or found not in (None, self.vram_mb)
        self.vram_mb = self.vram_mb if found is None else found
        self.measured = True
        return changed

    def every_s(self) -> float:
        """Return the seconds until the next measurement."""
        return UNKNOWN_S if self.vram_mb is None else KNOWN_S


def vram_total_mb(tool: external_tool.Tool) -> int | None:
    """Return GPU_VRAM_GB in MB of 10**6, else the MiB that nvidia-smi reports for the largest GPU.

    Only visible GPUs count. None means unknown: then every model fits. Blocks for up to TIMEOUT_S.
    """
    named_gb = config.GPU_VRAM_GB.read()
    if named_gb > 0:
        return round(named_gb * 1000)
    return largest_mb(
        _listed(tool),
        os.environ.get("CUDA_VISIBLE_DEVICES"),
        by_bus=os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID",
    )


def _listed(tool: external_tool.Tool) -> str:
    query = ("--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
    return tool.ask(*query, timeout_s=TIMEOUT_S).text or ""


def _rows(text: str) -> list[tuple[str, str, str]]:
    """Return index, UUID and size of each GPU in such a list."""
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines()]
    return [(row[0], row[1], row[2]) for row in rows if len(row) == 3]


def largest_mb(text: str, visible: str | None, *, by_bus: bool = False) -> int | None:
    """Return the size of the largest visible GPU in a list with one `index, uuid, MiB` per line.

    `visible` has indexes or prefixes of UUIDs as in CUDA_VISIBLE_DEVICES; None: all. Returns None
    for no GPU, or if a visible one has no size (`[N/A]`). Also None for an index among GPUs of
    different sizes unless `by_bus`: CUDA numbers the fastest first, nvidia-smi by bus.
    """
    cards = _rows(text)
    sizes = [size for _, _, size in cards]
    if visible is not None:
        wanted = [part.strip() for part in visible.split(",")]
        if not by_bus and len(set(sizes)) > 1 and any(part.isdigit() for part in wanted):
            return None
        sizes = [size for index, uuid, size in cards if _is_one_of(index, uuid, wanted)]
    if not sizes or not all(size.isascii() and size.isdigit() for size in sizes):
        return None
    return max(map(int, sizes))


def _is_one_of(index: str, uuid: str, wanted: list[str]) -> bool:
    return any(part == index or (part and uuid.startswith(part)) for part in wanted)


def parse(text: str) -> list[int]:
    """Return the GPUs of a list such as `0,1`. Raises `InvalidConfig` for any other text."""
    found: list[int] = []
    for part in text.split(","):
        word = part.strip()
        if not (word.isascii() and word.isdigit()) or len(word) > 4:
            raise errors.InvalidConfig(
                f"--cards {text!r:.80} should be the numbers of GPUs, as nvidia-smi shows them, "
                "joined by commas, as in 0,1"
            )
        if int(word) in found:
            raise errors.InvalidConfig(f"--cards {text!r:.80} names GPU {int(word)} twice")
        found.append(int(word))
    return found


def check(cards: Sequence[int]) -> None:
    """Raise `InvalidConfig` for a GPU that this process does not see, or that is not there.

    Without nvidia-smi nobody knows which are there. Blocks for TIMEOUT_S at most.
    """
    for name in VISIBLE:
        visible = os.environ.get(name)
        if visible is not None and (hidden := _missing(cards, visible.split(","))):
            raise errors.InvalidConfig(
                f"--cards names GPU {hidden[0]}, and {name} is {visible!r:.80}, so this GPU is "
                "not for this process; name those in it, or unset it"
            )
    known = [index for index, _, _ in _rows(_listed(external_tool.Tool("nvidia-smi")))]
    if known and (absent := _missing(cards, known)):
        raise errors.InvalidConfig(
            f"--cards names GPU {absent[0]}, and this machine has none; nvidia-smi lists "
            f"{', '.join(known)}"
        )


def _missing(cards: Sequence[int], among: Sequence[str]) -> list[int]:
    """Return the cards that are not in a list of numbers; none if it has anything else."""
    words = [word.strip() for word in among if word.strip()]
    if not all(word.isdigit() for word in words):
        return []  # UUIDs
    return [card for card in cards if str(card) not in words]


def environment(card: int) -> Mapping[str, str]:
    """Return the variables by which a process sees this GPU alone, as nvidia-smi numbers it."""
    return {**dict.fromkeys(VISIBLE, str(card)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
