"""Register the models that this process can load, with their loaders."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from queue_workflows import errors, types


@dataclass(frozen=True)
class ModelSpec:
    """A model that `loader()` loads and returns, and whose resources `unloader(handle)` frees.

    `est_vram_gb` is the GPU memory it needs; 0 means unknown. Raises `InvalidConfig` for an invalid
    id, functions that cannot be called and a size that is not a number >= 0.
    """

    id: str
    loader: Callable[[], Any]
    unloader: Callable[[Any], object] | None = None
    est_vram_gb: float = 0.0

    def __post_init__(self) -> None:
        if not self.id:
            raise errors.InvalidConfig("a model needs a non-empty id")
        if not types.is_name(self.id):
            raise errors.InvalidConfig(f"model {self.id!r:.40}: an id has 1 to 400 bytes of UTF-8")
        if not callable(self.loader):
            raise errors.InvalidConfig(f"model {self.id!r}: loader is not callable")
        if self.unloader is not None and not callable(self.unloader):
            raise errors.InvalidConfig(f"model {self.id!r}: unloader is not callable")
        size: Any = self.est_vram_gb
        if isinstance(size, str) or not _is_size(size):
            raise errors.InvalidConfig(f"model {self.id!r}: est_vram_gb must be a number >= 0")
        # A number type of another library, such as numpy's, cannot be stored as JSON.
        object.__setattr__(self, "est_vram_gb", float(size))


def _is_size(value: Any) -> bool:
    try:
        return 0 <= float(value) < float("inf")
    except (TypeError, ValueError, OverflowError):
        return False


_lock = threading.Lock()
_specs: dict[str, ModelSpec] = {}


def register(spec: ModelSpec) -> None:
    """Make a model loadable; registering an id again replaces its spec."""
    with _lock:
        _specs[spec.id] = spec


def get(model_id: str) -> ModelSpec:
    """Return the spec; raise `UnknownModel` (a KeyError) that lists the known ids."""
    with _lock:
        spec = _specs.get(model_id)
        if spec is None:
            known = ", ".join(sorted(_specs)) or "none"
            raise errors.UnknownModel(
                f"unknown model {model_id!r}: registered are {known}; model_registry.register() "
                f"or the app's set_builtin_model_registrar() adds it{errors.hint(model_id, _specs)}"
            )
    return spec


def known_ids() -> tuple[str, ...]:
    """Return the registered ids, sorted."""
    with _lock:
        return tuple(sorted(_specs))


def clear_for_tests() -> None:
    """Forget every model."""
    with _lock:
        _specs.clear()
