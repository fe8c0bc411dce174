"""Keep models loaded in a process, for the threads of one process and for workers."""

from __future__ import annotations

from queue_workflows.model_cache.cache import (
    ModelCache,
    RequiresModels,
    ResidentModel,
    adapted,
    gpu_should_unload,
)

__all__ = ["ModelCache", "RequiresModels", "ResidentModel", "adapted", "gpu_should_unload"]
