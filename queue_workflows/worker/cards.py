"""Parse and check `--cards`, and return the variables by which a process sees one GPU alone."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from queue_workflows import errors
from queue_workflows.runtime import external_tool
from queue_workflows.worker import gpu_memory

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""The variables by which a process sees some GPUs alone: NVIDIA's and AMD's."""


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

    Without nvidia-smi nobody knows which are there. Blocks for `gpu_memory.TIMEOUT_S` at most.
    """
    for name in VISIBLE:
        visible = os.environ.get(name)
        if visible is not None and (hidden := _missing(cards, visible.split(","))):
            raise errors.InvalidConfig(
                f"--cards names GPU {hidden[0]}, and {name} is {visible!r:.80}, so this GPU is "
                "not for this process; name those in it, or unset it"
            )
    known = gpu_memory.indexes(external_tool.Tool("nvidia-smi"))
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
