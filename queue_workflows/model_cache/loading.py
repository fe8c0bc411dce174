"""Call the loaders and unloaders of models, and release the memory that unloaded models used."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import logging
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any, Final

from queue_workflows import config, errors, model_registry

_log = logging.getLogger("queue_workflows.model_cache")
_NO_GPU: Final = re.compile(
    "no CUDA-capable device|no (CUDA|HIP) GPUs are available|no NVIDIA driver|GPU is lost"
    "|CUDA driver initialization failed|CUDA driver version is insufficient",
    re.IGNORECASE,
)
"""What CUDA, HIP and torch say to a process that cannot use a GPU, whatever it asks of it."""
_NO_MEMORY: Final = re.compile("out of memory|RESOURCE_EXHAUSTED|OutOfMemory", re.IGNORECASE)


@dataclasses.dataclass(slots=True, eq=False)
class Loaded:
    """A resident model, and when it was loaded and used last."""

    spec: model_registry.ModelSpec
    handle: Any
    load_s: float
    at: float
    used_at: float
    users: int = 0


def find(model_id: str, registrar: Callable[[], object] | None) -> model_registry.ModelSpec:
    """Return a registered model; call the registrar, by default the app's, if it is unknown.

    Raises `UnknownModel`, and `ModelLoadFailed` if the registrar raises.
    """
    with contextlib.suppress(errors.UnknownModel):
        return model_registry.get(model_id)
    try:
        (registrar or config.get_config().builtin_model_registrar)()
    except Exception as error:
        raise errors.ModelLoadFailed(
            f"registering models for {model_id!r} failed: {reason(error)}"
        ) from error
    return model_registry.get(model_id)


def load(spec: model_registry.ModelSpec) -> Any:
    """Return the result of a model's loader; raise `ModelLoadFailed` if it raises."""
    try:
        return spec.loader()
    except BaseException as error:
        clear_frames(error)
        _release_memory()
        if not isinstance(error, Exception):
            raise
        raise errors.ModelLoadFailed(
            f"loading model {spec.id!r} failed: {reason(error)}"
        ) from error


def unload(model: Loaded) -> None:
    """Call the unloader of a model, and drop its handle; raise `ModelLoadFailed`."""
    spec, handle = model.spec, model.handle
    model.handle = None  # nothing else may keep it alive
    try:
        if spec.unloader is not None:
            spec.unloader(handle)
    except Exception as error:
        clear_frames(error)
        _log.exception("unloading model %s failed", spec.id)
        raise errors.ModelLoadFailed(
            f"unloading model {spec.id!r} failed: {reason(error)}"
        ) from error
    finally:
        del handle
        _release_memory()


def reason(error: BaseException) -> str:
    """Return an error as text."""
    return f"{type(error).__name__}: {error}"


def clear_frames(error: BaseException) -> None:
    """Drop the variables that a traceback keeps alive: half a model can be gigabytes."""
    for each in _causes(error):
        traceback.clear_frames(each.__traceback__)


def sees_no_gpu(error: BaseException) -> bool:
    """Return whether an error means that this process cannot use a GPU."""
    return any(_NO_GPU.search(str(each)) for each in _causes(error))


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error means that RAM or the memory of a GPU is full."""
    return any(
        isinstance(each, MemoryError) or _NO_MEMORY.search(reason(each)) for each in _causes(error)
    )


def _causes(error: BaseException) -> list[BaseException]:
    """Return an error with its causes, and with the errors of a group."""
    found: list[BaseException] = []
    todo: list[BaseException | None] = [error]
    while todo:
        each = todo.pop()
        if each is not None and not any(each is known for known in found):
            found.append(each)
            todo += (each.__cause__, each.__context__, *getattr(each, "exceptions", ()))
    return found


def _release_memory() -> None:
    """Return freed memory to the GPU and the system, as far as they allow it."""
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        try:
            torch.cuda.empty_cache()
        except Exception:  # noqa: BLE001  best effort
            _log.warning("torch.cuda.empty_cache() failed", exc_info=True)
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # only glibc has malloc_trim
            ctypes.CDLL(None).malloc_trim(0)
