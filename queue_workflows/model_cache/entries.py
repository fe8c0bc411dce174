"""Describe what a model cache holds, and choose which models go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from queue_workflows import errors, model_registry

ROUNDING_GB = 1e-9
"""Sums of sizes are not exact."""


def gpu_should_unload(handle_present: bool, active: bool, idle_s: float, ttl_s: float) -> bool:
    """Return whether an idle model should be dropped now; a `ttl_s` <= 0 means never."""
    return handle_present and not active and ttl_s > 0 and idle_s >= ttl_s


class ResidentModel(NamedTuple):
    """A resident model: its declared memory, its load time, and since when it is loaded.

    `est_vram_gb` 0: unknown. Both times in seconds.
    """

    id: str
    est_vram_gb: float
    load_s: float
    held_s: float


class Loaded:
    """A resident model."""

    __slots__ = ("at", "handle", "load_s", "spec", "used_at", "users")

    def __init__(
        self, spec: model_registry.ModelSpec, handle: Any, load_s: float, at: float
    ) -> None:
        self.spec = spec
        self.handle = handle
        self.load_s = load_s
        self.at = self.used_at = at
        self.users = 0


class Change:
    """A load or unload in progress. It takes its place until it is over."""

    __slots__ = ("error", "is_load", "over", "size_gb")

    def __init__(self, spec: model_registry.ModelSpec, *, is_load: bool) -> None:
        self.size_gb = spec.est_vram_gb
        self.is_load = is_load
        self.over = False
        self.error: BaseException | None = None
        """Why a load has failed, for all who wait for it."""


class Capacity(NamedTuple):
    """How many models a cache holds, and of how many GB together; None: no limit."""

    models: int | None
    size_gb: float | None

    def holds(self, sizes_gb: Sequence[float]) -> bool:
        """Return whether models of these sizes fit."""
        return (self.models is None or len(sizes_gb) <= self.models) and (
            self.size_gb is None or sum(sizes_gb) <= self.size_gb + ROUNDING_GB
        )


def evicted_for(
    spec: model_registry.ModelSpec,
    resident: Iterable[Loaded],
    loads_gb: Sequence[float],
    capacity: Capacity,
) -> list[Loaded] | None:
    """Return the models to evict for another one; None while those in use leave no place.

    `resident` has the least recently used first. Raises `ModelLoadFailed` for a model that is
    larger than the cache.
    """
    if capacity.size_gb is not None and spec.est_vram_gb > capacity.size_gb:
        raise errors.ModelLoadFailed(
            f"model {spec.id!r} needs {spec.est_vram_gb:g} GB: the cache has "
            f"{capacity.size_gb:g} GB"
        )
    left = [*resident]
    idle = iter([each for each in left if not each.users])
    evicted: list[Loaded] = []
    while not capacity.holds(
        [spec.est_vram_gb, *loads_gb, *(each.spec.est_vram_gb for each in left)]
    ):
        model = next(idle, None)
        if model is None:
            return None
        evicted.append(model)
        left.remove(model)
    return evicted
