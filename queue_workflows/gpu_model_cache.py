"""Return the model cache that the whole process of a gpu worker shares."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from queue_workflows import model_cache

_lock = threading.Lock()
_cache: model_cache.ModelCache | None = None
_inherited: list[model_cache.ModelCache] = []


def gpu_model_cache() -> model_cache.ModelCache:
    """Return the cache of this process, created on first use; a forked child gets its own."""
    global _cache
    with _lock:
        if _cache is None:
            _cache = model_cache.ModelCache()
        return _cache


def set_publisher(publish_current_model: Callable[[str | None], object] | None) -> None:
    """Call this function on each change of the model from now on; None removes it."""
    gpu_model_cache().set_publisher(publish_current_model)


def reset_for_tests() -> None:
    """Drop the model and forget the cache."""
    global _cache
    with _lock:
        cache, _cache = _cache, None
    if cache is not None:
        cache.set_publisher(None)
        cache.drop_cache()


def _after_fork_in_child() -> None:
    """Start empty; keep the parent's handle without freeing it, since it belongs to the parent."""
    global _cache, _lock
    _lock = threading.Lock()
    if _cache is not None:
        _inherited.append(_cache)
        _cache = None


os.register_at_fork(after_in_child=_after_fork_in_child)
