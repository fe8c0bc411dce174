"""Load and unload a model on request, between two jobs."""

from __future__ import annotations

from collections.abc import Callable

from queue_workflows import errors
from queue_workflows.model_cache import ModelCache

ERROR_CHARS = 1000


def load(cache: ModelCache, model_id: str) -> str | None:
    """Load a model; return why that failed, or None. Raises KeyboardInterrupt only."""
    return _changed(cache, lambda: cache.require_model(model_id))


def unload(cache: ModelCache) -> str | None:
    """Unload all models; return why that failed, or None. Raises KeyboardInterrupt only."""
    return _changed(cache, cache.drop_cache)


def _changed(cache: ModelCache, change: Callable[[], object]) -> str | None:
    cache.mark_busy()
    try:
        change()
    except errors.QueueWorkflowsError as error:
        return str(error)[:ERROR_CHARS]
    except (Exception, SystemExit) as error:  # noqa: BLE001  the boundary around app code
        return f"{type(error).__name__}: {error}"[:ERROR_CHARS]
    finally:
        cache.mark_idle()
    return None
