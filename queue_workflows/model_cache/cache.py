"""Keep models loaded in a process: load them on demand, evict them for others or when idle.

A cache of an app is used as a `ModelCache`, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, Protocol

from queue_workflows import config, errors, model_registry, types
from queue_workflows.model_cache import loading

_log = logging.getLogger("queue_workflows.model_cache")
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


@dataclasses.dataclass(slots=True, eq=False)
class _Change:
    """A load or unload in progress. Until its end the model counts against the capacity."""

    size_gb: float
    is_load: bool
    over: bool = False
    error: BaseException | None = None
    """Why a load has failed, for all threads that wait for it."""


class _Local(threading.local):
    """What this thread does with a cache."""

    loading: str | None = None
    """The model whose loader runs."""
    using = 0
    """How many `using` blocks it is in."""


class ModelCache:
    """Keep up to `capacity` models loaded, of at most `capacity_gb` GPU memory together.

    A model that does not fit evicts the least recently used ones; threads that share models hold
    them by `using`, since only a model in use is never evicted. Each model is loaded once for all
    threads that wait for it, and several may load at once. `publish_current_model(model_or_None)`
    gets the latest model that is left when a change starts and when a load is done; its errors are
    logged. `idle_ttl_s` None reads `GPU_MODEL_IDLE_TTL_S`. `register_builtins` None uses the app's
    `set_builtin_model_registrar`. Every method may be called from any thread; readers never wait.
    """

    def __init__(
        self,
        *,
        capacity: int | None = 1,
        capacity_gb: float | None = None,
        publish_current_model: Callable[[str | None], object] | None = None,
        idle_ttl_s: float | None = None,
        register_builtins: Callable[[], object] | None = None,
        now_fn: types.NowFn = time.monotonic,
    ) -> None:
        if capacity is not None and capacity < 1:
            raise errors.InvalidConfig(f"capacity={capacity!r}: a cache holds at least one model")
        if capacity_gb is not None and not capacity_gb > 0:
            raise errors.InvalidConfig(f"capacity_gb={capacity_gb!r}: it must be more than 0")
        self._capacity = math.inf if capacity is None else capacity
        self._capacity_gb = math.inf if capacity_gb is None else capacity_gb
        self._publish_current_model = publish_current_model
        self._idle_ttl_s = idle_ttl_s
        self._register_builtins = register_builtins
        self._now = now_fn
        self._changed = threading.Condition(threading.RLock())
        self._resident: dict[str, loading.Loaded] = {}
        """The loaded models, the least recently used first."""
        self._changes: dict[str, _Change] = {}
        self._current: loading.Loaded | None = None
        """The last of `_resident`."""
        self.loading_model: str | None = None
        """The id of the model that is being loaded or waits for an unload."""
        self.last_load_seconds = 0.0
        """How long the last `require_model` was loading; 0.0 if the model was loaded before."""
        self._local = _Local()
        self._reaping = False
        self._busy = 0

    @property
    def current_model(self) -> str | None:
        """Return the id of the model that was required last; None if no model is loaded.

        It is None during a swap if one model is resident at a time.
        """
        current = self._current
        return current.spec.id if current else None

    @property
    def current_handle(self) -> Any:
        """Return the handle of that model, from its loader; None if no model is loaded."""
        current = self._current
        return current.handle if current else None

    @property
    def resident(self) -> ResidentModel | None:
        """Return the model that was required last; None if none is loaded, and during a swap."""
        current = self._current
        return self._described(current) if current else None

    @property
    def residents(self) -> list[ResidentModel]:
        """Return the loaded models, the least recently used first."""
        with self._changed:
            return [self._described(each) for each in self._resident.values()]

    def _described(self, model: loading.Loaded) -> ResidentModel:
        held_s = self._now() - model.at
        return ResidentModel(model.spec.id, model.spec.est_vram_gb, model.load_s, held_s)

    def set_publisher(self, publish_current_model: Callable[[str | None], object] | None) -> None:
        """Call this function on each change from now on; None calls nothing."""
        with self._changed:
            self._publish_current_model = publish_current_model

    def require_model(self, model_id: str) -> Any:
        """Return the model's handle; load the model if it is not resident.

        Another thread may evict the model afterwards: threads that share models call `using`.
        Raises `UnknownModel` for an unknown id and `ModelLoadFailed` for a failed registrar; both
        keep the resident models. A failed unload or load raises `ModelLoadFailed` from its cause;
        then the model is not loaded, and the next call loads it again.
        """
        with self._changed:
            return self._required(model_id).handle

    @contextlib.contextmanager
    def using(self, model_id: str) -> Generator[Any]:
        """Yield the model's handle; the model is not evicted before the block ends.

        If the models in use leave no room, it waits for the end of a `using` block. Inside another
        `using` block it raises `ModelLoadFailed` instead, since two threads could wait for each
        other. Raises what `require_model` raises.
        """
        with self._changed:
            model = self._required(model_id)
            model.users += 1
            self._local.using += 1
        try:
            yield model.handle
        finally:
            with self._changed:
                self._local.using -= 1
                model.users -= 1
                if self._resident.get(model_id) is model:
                    self._touch(model)
                self._changed.notify_all()

    def _required(self, model_id: str) -> loading.Loaded:
        """Return a resident model, loaded if need be; the lock is held, but not during the load."""
        if self._local.loading is not None:
            alone = "one model is resident at a time" if self._capacity == 1 else "it must not"
            raise errors.ModelLoadFailed(
                f"the loader of {self._local.loading!r} asked for model {model_id!r}: {alone}"
            )
        self.last_load_seconds = 0.0
        while (model := self._resident.get(model_id)) is None:
            if (change := self._changes.get(model_id)) is not None:
                self._changed.wait_for(lambda change=change: change.over)
                if change.error is None:
                    continue
                raise errors.ModelLoadFailed(
                    f"loading model {model_id!r} failed in another thread: "
                    f"{loading.reason(change.error)}"
                ) from change.error
            spec = loading.find(model_id, self._register_builtins)
            evicted = self._evicted_for(spec)
            if evicted is not None:
                return self._swap(spec, evicted)
            if self._local.using:
                raise errors.ModelLoadFailed(
                    f"no room for model {model_id!r}: the others are in use, and this thread uses "
                    "one itself; raise the capacity of the cache"
                )
            self._changed.wait()
        self._touch(model)
        return model

    def _touch(self, model: loading.Loaded) -> None:
        model.used_at = self._now()
        self._resident[model.spec.id] = self._resident.pop(model.spec.id)
        self._current = model

    def _evicted_for(self, spec: model_registry.ModelSpec) -> list[loading.Loaded] | None:
        """Return the models to evict for another one; None while the models in use leave no room.

        Raises `ModelLoadFailed` for a model that is larger than the cache.
        """
        needed_gb = spec.est_vram_gb
        if needed_gb > self._capacity_gb:
            raise errors.ModelLoadFailed(
                f"model {spec.id!r} needs {needed_gb:g} GB: the cache has {self._capacity_gb:g} GB"
            )
        # Each unload makes room for a load that is counted already, so it is not counted itself.
        loads = [each.size_gb for each in self._changes.values() if each.is_load]
        left = [*self._resident.values()]
        idle = iter([each for each in left if not each.users])
        evicted: list[loading.Loaded] = []
        while not self._holds([needed_gb, *loads, *(each.spec.est_vram_gb for each in left)]):
            model = next(idle, None)
            if model is None:
                return None
            evicted.append(model)
            left.remove(model)
        return evicted

    def _holds(self, sizes_gb: list[float]) -> bool:
        fits = sum(sizes_gb) <= self._capacity_gb + ROUNDING_GB
        return fits and len(sizes_gb) <= self._capacity

    def drop_cache(self) -> None:
        """Unload every resident model, even in the middle of a job; waits for loads.

        Raises `ModelLoadFailed` when an unloader raised; the cache is empty then too.
        """
        with self._changed:
            if self._local.loading is not None:
                return
            self._changed.wait_for(lambda: not self._changes)
            self._unload([*self._resident.values()])

    def mark_busy(self) -> None:
        """Note that a job uses the cache: no idle unload until the matching `mark_idle`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._reaping)
            self._busy += 1

    def mark_idle(self) -> None:
        """Note that a job has ended; the idle time of the model that it used last starts now."""
        with self._changed:
            self._busy = max(0, self._busy - 1)
            if self._current is not None:
                self._current.used_at = self._now()

    def reap_idle_once(self) -> bool:
        """Unload the models that no job has used for the TTL; return whether any was unloaded.

        False at once while a load or unload is in progress. A failing unloader is logged.
        """
        ttl_s, now = self._idle_ttl_s, self._now()
        if ttl_s is None:
            ttl_s = config.GPU_MODEL_IDLE_TTL_S.read()
        if not self._changed.acquire(blocking=False):
            return False
        active, idle = self._busy > 0 or bool(self._changes), list[loading.Loaded]()
        try:
            for each in self._resident.values():
                if gpu_should_unload(True, active or each.users > 0, now - each.used_at, ttl_s):
                    idle.append(each)
            if idle:
                names = ", ".join(each.spec.id for each in idle)
                idle_s = now - max(each.used_at for each in idle)
                _log.info("model %s unloaded after %.0f s without a job", names, idle_s)
                self._reaping = True
                with contextlib.suppress(errors.ModelLoadFailed):  # _unload has logged it
                    self._unload(idle)
        finally:
            self._reaping = False
            self._changed.notify_all()
            self._changed.release()
        return bool(idle)

    def _swap(
        self, spec: model_registry.ModelSpec, evicted: list[loading.Loaded]
    ) -> loading.Loaded:
        """Evict models and load another one; the lock is held, but not while app code runs."""
        self._changes[spec.id] = change = _Change(spec.est_vram_gb, is_load=True)
        self.loading_model = spec.id
        try:
            if evicted:
                self._unload(evicted)
            else:
                self._publish()
            # A model that another thread evicts keeps its memory until its unload is over.
            self._changed.wait_for(
                lambda: self._holds(
                    [each.size_gb for each in self._changes.values()]
                    + [each.spec.est_vram_gb for each in self._resident.values()]
                )
            )
            model = self._load(spec)
        except BaseException as error:
            change.error = error
            self._end(spec.id, change)
            self._publish()
            raise
        self._end(spec.id, change)
        self._resident[spec.id] = model
        self._touch(model)
        taken = {"duration_s": round(model.load_s, 3)}
        _log.info("model %s loaded in %.1f s", spec.id, model.load_s, extra=taken)
        self._publish()
        return model

    def _end(self, model_id: str, change: _Change) -> None:
        """Note that a change is over, and wake the threads that wait for it."""
        del self._changes[model_id]
        change.over = True
        if change.is_load:
            loads = [name for name, each in self._changes.items() if each.is_load]
            self.loading_model = loads[-1] if loads else None
        self._changed.notify_all()

    def _load(self, spec: model_registry.ModelSpec) -> loading.Loaded:
        started = self._now()
        self._local.loading = spec.id
        try:
            with self._unlocked():
                handle = loading.load(spec)
        finally:
            self._local.loading = None
            self.last_load_seconds = self._now() - started
        now = self._now()
        return loading.Loaded(spec, handle, self.last_load_seconds, now, used_at=now)

    def _unload(self, models: list[loading.Loaded]) -> None:
        """Unload models one after the other; raise the first error once all are unloaded."""
        failed: BaseException | None = None
        # All at once: while one is unloaded, other threads could use or evict the next.
        changes = [_Change(model.spec.est_vram_gb, is_load=False) for model in models]
        for model, change in zip(models, changes, strict=True):
            self._changes[model.spec.id] = change
            del self._resident[model.spec.id]
        self._current = next(reversed(self._resident.values()), None)
        for model, change in zip(models, changes, strict=True):
            self._publish()
            try:
                with self._unlocked():
                    loading.unload(model)
            except BaseException as error:  # noqa: BLE001  an unloader may exit
                failed = failed or error
            finally:
                self._end(model.spec.id, change)
        if failed is not None:
            raise failed

    @contextlib.contextmanager
    def _unlocked(self) -> Generator[None]:
        """Release the lock while the block runs, so that others can use their models."""
        self._changed.release()
        try:
            yield
        finally:
            self._changed.acquire()

    def _publish(self) -> None:
        if self._publish_current_model is None:
            return
        model_id = self.current_model
        try:
            self._publish_current_model(model_id)
        except Exception:  # noqa: BLE001  boundary around app code
            _log.exception("announcing current model %s failed", model_id)


class RequiresModels(Protocol):
    """The one member that a model cache of an app must have."""

    def require_model(self, model_id: str, /) -> Any:
        """Return the model's handle, loaded if need be."""
        ...


class _AppCache(ModelCache):
    """A model cache of an app, as far as workers use one; only `require_model` has to exist."""

    def __init__(self, cache: RequiresModels) -> None:
        super().__init__()
        self._app = cache
        self._loaded = (0.0, 0.0)
        """How long the resident model's load took, and when it ended."""

    def _call(self, name: str, *given: Any) -> Any:
        """Call a method of the app's cache; return None if it lacks the method."""
        member = getattr(self._app, name, None)
        return member(*given) if callable(member) else None

    @property
    def current_model(self) -> str | None:
        return getattr(self._app, "current_model", None)

    @property
    def resident(self) -> ResidentModel | None:
        model = self.current_model
        if model is None:
            return None
        load_s, at = self._loaded
        return ResidentModel(model, 0.0, load_s, self._now() - at)

    def set_publisher(self, publish_current_model: Callable[[str | None], object] | None) -> None:
        self._publish_current_model = publish_current_model
        self._call("set_publisher", publish_current_model)

    def require_model(self, model_id: str) -> Any:
        started, before = self._now(), self.current_model
        self.loading_model = None if before == model_id else model_id
        try:
            return self._app.require_model(model_id)
        finally:
            self.loading_model = None
            self.last_load_seconds = 0.0 if before == model_id else self._now() - started
            if before != model_id:
                self._loaded = (self.last_load_seconds, self._now())
            publishes = callable(getattr(self._app, "set_publisher", None))
            if before != self.current_model and not publishes:
                self._publish()

    def drop_cache(self) -> None:
        self._call("drop_cache")

    def mark_busy(self) -> None:
        self._call("mark_busy")

    def mark_idle(self) -> None:
        self._call("mark_idle")

    def reap_idle_once(self) -> bool:
        return bool(self._call("reap_idle_once"))


def adapted(cache: RequiresModels | None) -> ModelCache | None:
    """Return an app's cache as a `ModelCache`; a `ModelCache` and None are returned as they are."""
    return cache if cache is None or isinstance(cache, ModelCache) else _AppCache(cache)
