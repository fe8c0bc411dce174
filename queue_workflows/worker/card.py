"""How much memory the card has that this worker's models must fit."""

from __future__ import annotations

import os

from queue_workflows import config
from queue_workflows.runtime import command

TIMEOUT_S = 3.0


def vram_total_mb(tool: command.Tool) -> int | None:
    """GPU_VRAM_GB in MB of 10**6, else what nvidia-smi says in MiB of the largest visible card.

    None: unknown, and then every model fits. Blocks for up to TIMEOUT_S.
    """
    named_gb = config.GPU_VRAM_GB.read()
    if named_gb > 0:
        return round(named_gb * 1000)
    query = ("--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
    answer = tool.ask(*query, timeout_s=TIMEOUT_S)
    return largest_mb(answer.text or "", os.environ.get("CUDA_VISIBLE_DEVICES"))


def largest_mb(text: str, visible: str | None) -> int | None:
    """The largest of the cards listed, one `index, uuid, MiB` a line, that are visible.

    `visible`: indexes or starts of UUIDs, as CUDA_VISIBLE_DEVICES has them; None: all. None when a
    card that is visible cannot tell its size (`[N/A]`), and for no card at all.
    """
    wanted = None if visible is None else [part.strip() for part in visible.split(",")]
    sizes: list[str] = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 3:
            continue
        index, uuid, size = parts
        if wanted is None or any(w == index or (w and uuid.startswith(w)) for w in wanted):
            sizes.append(size)
    if not sizes or not all(size.isascii() and size.isdigit() for size in sizes):
        return None
    return max(map(int, sizes))
