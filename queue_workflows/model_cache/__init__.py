"""Keep models loaded in a process, for the threads of one process and for workers."""

from __future__ import annotations

from queue_workflows.model_cache.app_cache import RequiresModels, adapted
from queue_workflows.model_cache.cache import ModelCache
from queue_workflows.model_cache.entries import ResidentModel, gpu_should_unload

__all__ = ["ModelCache", "RequiresModels", "ResidentModel", "adapted", "gpu_should_unload"]
