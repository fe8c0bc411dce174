"""Define the app of the GPU check: models of random weights, and handlers that use the GPU.

Without a GPU, in the folder that QW_GPU_PRETEND names, allocations and use are files of the
process, which the `nvidia-smi` of `tests.gpu.simulated_gpu` adds up.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import queue_workflows
from queue_workflows import model_registry

SMALL_MB, LARGE_MB = 2048, 3072
VARIABLE = "QW_GPU_PRETEND"
SLOW_S = "QW_GPU_SLOW_S"
BUSY_S = "QW_GPU_BUSY_S"
WORK_S = 0.3


class Gpu(Protocol):
    """What models and handlers need of a GPU."""

    def weights(self, mb: int) -> Any:
        """Return memory on the GPU, freed when nothing refers to it."""
        ...

    def work(self, seconds: float) -> None:
        """Keep the GPU busy for so long."""
        ...


class Torch:
    """A real GPU, used by the installed torch."""

    def __init__(self) -> None:
        import torch

        self._torch: Any = torch

    def weights(self, mb: int) -> Any:
        rows = mb * (1 << 20) // 2 // 1024
        return self._torch.randn(rows, 1024, dtype=self._torch.float16, device="cuda")

    def work(self, seconds: float) -> None:
        one = self._torch.randn(2048, 2048, device="cuda")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            one = self._torch.tanh(one @ one)
            self._torch.cuda.synchronize()


class Weights:
    """A pretended allocation."""


class Pretended:
    """A GPU simulated by files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def weights(self, mb: int) -> Weights:
        self._count += 1
        path = self._folder / f"{os.getpid()}.{self._count}.vram"
        path.write_text(str(mb))
        made = Weights()
        made.itself = made  # type: ignore[attr-defined]  a cycle, as frameworks make them
        weakref.finalize(made, path.unlink, missing_ok=True)
        return made

    def work(self, seconds: float) -> None:
        path = self._folder / f"{os.getpid()}.use"
        path.write_text("90")
        threading.Event().wait(seconds)
        path.write_text("0")


def gpu() -> Gpu:
    """Return the GPU that this process uses."""
    folder = os.environ.get(VARIABLE)
    return Pretended(Path(folder)) if folder else Torch()


def setup() -> None:
    """Register models `small`, `large` and `slow`; handlers `touch`, `think` and `stall`."""
    card: Gpu | None = None

    def the_card() -> Gpu:
        nonlocal card
        card = card or gpu()
        return card

    def slow() -> Any:
        threading.Event().wait(float(os.environ.get(SLOW_S, "180")))
        return the_card().weights(SMALL_MB)

    def touch() -> None:
        the_card().work(WORK_S)

    def think(model_handle: Any, model_load_seconds: float) -> dict[str, Any]:
        assert model_handle is not None
        the_card().work(WORK_S)
        return {"load_s": model_load_seconds}

    def stall(status_callback: Callable[..., object], cancel_event: threading.Event) -> None:
        # So long that a sample falls into it: what an idle process shows is known only then.
        the_card().work(float(os.environ.get(BUSY_S, "40")))
        status_callback()
        the_card().work(WORK_S)
        cancel_event.wait()

    for name, mb in (("small", SMALL_MB), ("large", LARGE_MB)):
        spec = model_registry.ModelSpec(
            name, lambda mb=mb: the_card().weights(mb), est_vram_gb=mb / 1024
        )
        model_registry.register(spec)
    model_registry.register(model_registry.ModelSpec("slow", slow, est_vram_gb=SMALL_MB / 1024))
    for body in (touch, think, stall):
        queue_workflows.register_node(body.__name__, body)
