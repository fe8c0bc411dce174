"""Define an app with models and gpu nodes: `--app tests.support.card_app:setup`."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import queue_workflows
from queue_workflows import model_registry
from tests.support import slot_app

FOLDER = "QW_TEST_CARDS"
"""The variable with a folder for the journals of models, and for the file `go`."""
UNLOAD_S = "QW_TEST_UNLOAD_S"
"""The variable with the seconds that an unload takes."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
LONG_S = 60.0
_loaded_with: list[str | None] = []


def folder() -> Path:
    return Path(os.environ[FOLDER])


def journal(name: str) -> list[str]:
    """What models of this name have noted: `load` or `unload`, and the GPU."""
    path = folder() / name
    return path.read_text().splitlines() if path.exists() else []


def _note(name: str, text: str) -> None:
    with (folder() / name).open("a", encoding="ascii") as file:
        file.write(f"{text} {os.environ.get(VISIBLE)}\n")


def _here() -> dict[str, Any]:
    return {
        "card": os.environ.get(VISIBLE),
        "hip": os.environ.get("HIP_VISIBLE_DEVICES"),
        "at_load": _loaded_with[-1],
        "pid": os.getpid(),
    }


def shows() -> dict[str, Any]:
    return _here()


def draws(model_handle: str, model_load_seconds: float) -> dict[str, Any]:
    return {**_here(), "handle": model_handle, "cold": model_load_seconds > 0}


def sees_none() -> None:
    raise RuntimeError("CUDA error: no CUDA-capable device is detected")


def takes_too_much() -> None:
    raise MemoryError


def waits(folder: str) -> dict[str, Any]:
    slot_app.waits(folder=folder)
    return _here()


def draws_and_waits(folder: str, model_handle: str) -> dict[str, Any]:
    slot_app.waits(folder=folder)
    return {**_here(), "handle": model_handle}


def deaf(folder: str) -> dict[str, Any]:
    """Ends neither on request nor by SIGTERM at its first start."""
    slot_app.ignores_sigterm(folder=folder)
    return _here()


def dies(folder: str) -> dict[str, Any]:
    """Kills its process at its first start."""
    if slot_app.begins(folder):
        os.kill(os.getpid(), signal.SIGKILL)
    return _here()


def stalls(folder: str, status_callback: Callable[..., object]) -> dict[str, Any]:
    """Reports once at its first start, and then nothing more."""
    if slot_app.begins(folder):
        status_callback()
        time.sleep(LONG_S)
    return _here()


def _models() -> None:
    def load(name: str) -> str:
        _note(name, "load")
        if name == "slow":
            ends = time.monotonic() + LONG_S
            while time.monotonic() < ends and not (folder() / "go").exists():
                threading.Event().wait(0.02)
        if name == "bad":
            raise RuntimeError("no weights")
        if (error := folder() / f"error of {name}").exists():
            raise RuntimeError(error.read_text())
        return f"{name} of {os.getpid()}"

    def unload(name: str) -> None:
        time.sleep(float(os.environ.get(UNLOAD_S, "0")))
        _note(name, "unload")

    for name in ("sketch", "photo", "slow", "bad"):
        model_registry.register(
            model_registry.ModelSpec(
                name, lambda name=name: load(name), lambda _, name=name: unload(name), 2.5
            )
        )


def setup() -> None:
    """Register nodes, and a registrar of models; note which GPU is visible now."""
    _loaded_with.append(os.environ.get(VISIBLE))
    own = (shows, draws, sees_none, takes_too_much, waits, draws_and_waits, deaf, dies, stalls)
    for node in own:
        queue_workflows.register_node(node.__name__, node)
    queue_workflows.register_node("alone", draws, isolation="process")
    queue_workflows.set_builtin_model_registrar(_models)


def setup_threads() -> None:
    """Do as `setup` does, and leave a thread behind, as careless libraries do."""
    setup()
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def install_nvidia_smi(tools: Path, *, busy: int = 1) -> None:
    """Put an `nvidia-smi` of two GPUs in a folder for PATH; GPU `busy` is at 90 %.

    It notes each reading of the memory in use in the file `readings` there.
    """
    tools.mkdir()
    path = tools / "nvidia-smi"
    use = "\n".join(f"{card}, {90 if card == busy else 0} %" for card in (0, 1))
    memory = "\n".join(f"{card}, {90 if card == busy else 0}, 9000, 24576" for card in (0, 1))
    path.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        "--query-gpu=index,uuid,memory.total)"
        " echo '0, GPU-aa, 24576'; echo '1, GPU-bb, 12288' ;;\n"
        f"--query-gpu=index,utilization.gpu) echo '{use}' ;;\n"
        "--query-gpu=index,utilization.gpu,memory.used,memory.total)"
        f" echo '{memory}'; echo >> '{tools}/readings' ;;\n"
        "--query-gpu=utilization.gpu) echo '0 %'; echo '90 %' ;;\n"
        "*) exit 2 ;;\n"
        "esac\n"
    )
    path.chmod(0o755)
