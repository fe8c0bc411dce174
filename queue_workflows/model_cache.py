"""Keep one model loaded per process: load it on demand, swap it, drop it when idle."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from queue_workflows import config, errors, model_registry, types

_log = logging.getLogger("queue_workflows.model_cache")


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


class RequiresModels(Protocol):
    """The one member that a model cache of an app must have."""

    def require_model(self, model_id: str, /) -> Any:
        """Return the model's handle, loaded if need be."""
        ...


class ModelCache:
    """Keep at most one model loaded.

    `publish_current_model(model_or_None)` gets None when a change starts, and the id when a load is
    done; its errors are logged. `idle_ttl_s` None reads `GPU_MODEL_IDLE_TTL_S`. `register_builtins`
    None uses the app's `set_builtin_model_registrar`. Every method may be called from any thread;
    changes happen one at a time, and readers never wait.
    """

    def __init__(
        self,
        *,
        publish_current_model: Callable[[str | None], object] | None = None,
        idle_ttl_s: float | None = None,
        register_builtins: Callable[[], object] | None = None,
        now_fn: types.NowFn = time.monotonic,
    ) -> None:
        self._publish_current_model = publish_current_model
        self._idle_ttl_s = idle_ttl_s
        self._register_builtins = register_builtins
        self._now = now_fn
        self._lock = threading.RLock()
        self._resident: tuple[model_registry.ModelSpec, Any] | None = None
        self._loading: str | None = None
        self._busy = 0
        self._used_at = now_fn()
        self._last_load_seconds = 0.0
        self._loaded = (0.0, 0.0)
        """How long the resident model's load took, and when it ended."""

    @property
    def current_model(self) -> str | None:
        """Return the id of the loaded model; None if none is loaded, and during a swap."""
        resident = self._resident
        return resident[0].id if resident else None

    @property
    def current_handle(self) -> Any:
        """Return what the model's loader returned; None if no model is loaded."""
        resident = self._resident
        return resident[1] if resident else None

    @property
    def last_load_seconds(self) -> float:
        """Return the seconds that the last `require_model` spent loading; 0.0 if it was loaded."""
        return self._last_load_seconds

    @property
    def resident(self) -> ResidentModel | None:
        """Return the loaded model; None if none is loaded, and during a swap."""
        resident, (load_s, at) = self._resident, self._loaded
        if resident is None:
            return None
        return ResidentModel(resident[0].id, resident[0].est_vram_gb, load_s, self._now() - at)

    @property
    def loading_model(self) -> str | None:
        """Return the id of the model that is being loaded or waits for an unload; or None."""
        return self._loading

    def set_publisher(self, publish_current_model: Callable[[str | None], object] | None) -> None:
        """Call this function on each change from now on; None calls nothing."""
        with self._lock:
            self._publish_current_model = publish_current_model

    def require_model(self, model_id: str) -> Any:
        """Return the model's handle; load the model if another or none is resident.

        Raises `UnknownModel` for an unknown id and `ModelLoadFailed` for a failed registrar; both
        keep the resident model. A failed unload or load raises `ModelLoadFailed` from its cause;
        then the cache is empty and usable.
        """
        with self._lock:
            if self._loading is not None:
                raise errors.ModelLoadFailed(
                    f"the loader of {self._loading!r} asked for model {model_id!r}: "
                    "one model is resident at a time"
                )
            self._last_load_seconds = 0.0
            if self.current_model != model_id:
                self._swap(self._find(model_id))
            self._used_at = self._now()
            return self.current_handle

    def drop_cache(self) -> None:
        """Unload the resident model, if any, even in the middle of a job; waits for a load.

        Raises `ModelLoadFailed` when its unloader raised; the cache is empty then too.
        """
        with self._lock:
            self._drop()

    def mark_busy(self) -> None:
        """Note that a job uses the cache: no idle unload until the matching `mark_idle`."""
        with self._lock:
            self._busy += 1

    def mark_idle(self) -> None:
        """Note that a job has ended; the idle time starts after the outermost of nested calls."""
        with self._lock:
            self._busy = max(0, self._busy - 1)
            self._used_at = self._now()

    def is_idle_too_long(self) -> bool:
        """Return whether a model is loaded that no job has used for the TTL."""
        ttl_s = self._idle_ttl_s
        if ttl_s is None:
            ttl_s = config.GPU_MODEL_IDLE_TTL_S.read()
        active = self._busy > 0 or self._loading is not None
        idle_s = self._now() - self._used_at
        return gpu_should_unload(self._resident is not None, active, idle_s, ttl_s)

    def reap_idle_once(self) -> bool:
        """Unload a model that has been idle for the TTL; return whether one was unloaded.

        False at once while a load or unload is in progress. A failing unloader is logged.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if not self.is_idle_too_long():
                return False
            idle_s = self._now() - self._used_at
            _log.info("model %s unloaded after %.0f s without a job", self.current_model, idle_s)
            with contextlib.suppress(errors.ModelLoadFailed):  # _drop has logged it
                self._drop()
            return True
        finally:
            self._lock.release()

    def _find(self, model_id: str) -> model_registry.ModelSpec:
        with contextlib.suppress(errors.UnknownModel):
            return model_registry.get(model_id)
        registrar = self._register_builtins or config.get_config().builtin_model_registrar
        try:
            registrar()
        except Exception as error:
            raise errors.ModelLoadFailed(
                f"registering models for {model_id!r} failed: {_reason(error)}"
            ) from error
        return model_registry.get(model_id)

    def _swap(self, spec: model_registry.ModelSpec) -> None:
        self._loading = spec.id
        try:
            if not self._drop():
                self._publish(None)
            self._load(spec)
        except BaseException:
            self._loading = None
            self._publish(None)
            raise

    def _load(self, spec: model_registry.ModelSpec) -> None:
        started = self._now()
        loaded = False
        try:
            handle = spec.loader()
            loaded = True
        except Exception as error:
            _clear_frames(error)
            raise errors.ModelLoadFailed(
                f"loading model {spec.id!r} failed: {_reason(error)}"
            ) from error
        finally:
            self._loading = None
            self._last_load_seconds = self._now() - started
            if not loaded:
                _release_memory()
        self._loaded = (self._last_load_seconds, self._now())
        self._resident = (spec, handle)
        _log.info("model %s loaded in %.1f s", spec.id, self._last_load_seconds)
        self._publish(spec.id)

    def _drop(self) -> bool:
        """Drop the model; return False if none was loaded."""
        if self._resident is None:
            return False
        spec, handle = self._resident
        self._resident = None
        self._publish(None)
        try:
            if spec.unloader is not None:
                spec.unloader(handle)
        except Exception as error:
            _clear_frames(error)
            _log.exception("unloading model %s failed", spec.id)
            raise errors.ModelLoadFailed(
                f"unloading model {spec.id!r} failed: {_reason(error)}"
            ) from error
        finally:
            del handle
            _release_memory()
        return True

    def _publish(self, model_id: str | None) -> None:
        if self._publish_current_model is None:
            return
        try:
            self._publish_current_model(model_id)
        except Exception:  # noqa: BLE001  boundary around app code
            _log.exception("announcing current model %s failed", model_id)


class _AppCache(ModelCache):
    """A model cache of an app, of whose members only `require_model` has to exist."""

    def __init__(self, cache: RequiresModels) -> None:
        super().__init__()
        self._app = cache

    def _has(self, name: str) -> Any:
        member = getattr(self._app, name, None)
        return member if callable(member) else None

    def _call(self, name: str) -> Any:
        member = self._has(name)
        return member() if member is not None else None

    @property
    def current_model(self) -> str | None:
        return getattr(self._app, "current_model", None)

    @property
    def current_handle(self) -> Any:
        return getattr(self._app, "current_handle", None)

    @property
    def resident(self) -> ResidentModel | None:
        model = self.current_model
        load_s, at = self._loaded
        return None if model is None else ResidentModel(model, 0.0, load_s, self._now() - at)

    def set_publisher(self, publish_current_model: Callable[[str | None], object] | None) -> None:
        self._publish_current_model = publish_current_model
        if (own := self._has("set_publisher")) is not None:
            own(publish_current_model)

    def require_model(self, model_id: str) -> Any:
        started, before = self._now(), self.current_model
        self._loading = None if before == model_id else model_id
        try:
            return self._app.require_model(model_id)
        finally:
            self._loading = None
            self._last_load_seconds = 0.0 if before == model_id else self._now() - started
            if before != model_id:
                self._loaded = (self._last_load_seconds, self._now())
            if before != self.current_model and self._has("set_publisher") is None:
                self._publish(self.current_model)

    def drop_cache(self) -> None:
        self._call("drop_cache")

    def mark_busy(self) -> None:
        self._call("mark_busy")

    def mark_idle(self) -> None:
        self._call("mark_idle")

    def is_idle_too_long(self) -> bool:
        return bool(self._call("is_idle_too_long"))

    def reap_idle_once(self) -> bool:
        return bool(self._call("reap_idle_once"))


def adapted(cache: RequiresModels | None) -> ModelCache | None:
    """Return an app's cache as a `ModelCache`; a `ModelCache` and None are returned as they are."""
    return cache if cache is None or isinstance(cache, ModelCache) else _AppCache(cache)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _clear_frames(error: BaseException) -> None:
    """Drop the locals that a traceback keeps alive: half a model can be gigabytes."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        pending += [current.__cause__, current.__context__]


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
