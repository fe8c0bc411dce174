"""Use a model cache of an app as a `ModelCache`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any, Protocol

from queue_workflows.model_cache import cache as own
from queue_workflows.model_cache import entries


class RequiresModels(Protocol):
    """The one member that a model cache of an app must have."""

    def require_model(self, model_id: str, /) -> Any:
        """Return the model's handle, loaded if need be."""
        ...


class _AppCache(own.ModelCache):
    """A model cache of an app, of whose members only `require_model` has to exist."""

    def __init__(self, cache: RequiresModels) -> None:
        super().__init__()
        self._app = cache
        self._loaded = (0.0, 0.0)
        """How long the resident model's load took, and when it ended."""

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
    def resident(self) -> entries.ResidentModel | None:
        model = self.current_model
        if model is None:
            return None
        load_s, at = self._loaded
        return entries.ResidentModel(model, 0.0, load_s, self._now() - at)

    def set_publisher(self, publish_current_model: Callable[[str | None], object] | None) -> None:
        self._publish_current_model = publish_current_model
        if (setter := self._has("set_publisher")) is not None:
            setter(publish_current_model)

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

    @contextlib.contextmanager
    def using(self, model_id: str) -> Generator[Any]:
        yield self.require_model(model_id)

    @property
    def residents(self) -> list[entries.ResidentModel]:
        resident = self.resident
        return [resident] if resident else []

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


def adapted(cache: RequiresModels | None) -> own.ModelCache | None:
    """Return an app's cache as a `ModelCache`; a `ModelCache` and None are returned as they are."""
    return cache if cache is None or isinstance(cache, own.ModelCache) else _AppCache(cache)
