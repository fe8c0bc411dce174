"""Poll requests to load or unload a model, and track the newest one until it has ended."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from queue_workflows import db
from queue_workflows.engine import claims, models
from queue_workflows.model_cache import ResidentModel
from queue_workflows.types import JsonDict, NowFn, Row

_log = logging.getLogger(__name__)
NAME_CHARS = 400


class Models(Protocol):
    """What a worker knows of its models: a `ModelCache`, or that of its executor from afar."""

    @property
    def current_model(self) -> str | None:
        """Return the id of the loaded model, or None."""
        ...

    @property
    def loading_model(self) -> str | None:
        """Return the id of the model that is being loaded, or None."""
        ...

    @property
    def resident(self) -> ResidentModel | None:
        """Return the loaded model, or None."""
        ...

    @property
    def last_load_seconds(self) -> float:
        """Return the seconds that the last request for a model spent loading it."""
        ...

    def is_idle_too_long(self) -> bool:
        """Return whether no job has used the loaded model for the TTL."""
        ...

    def reap_idle_once(self) -> bool:
        """Unload a model that is idle too long; return whether one was unloaded by now."""
        ...


class ModelRequests:
    """The newest request for this worker, and its outcome.

    The lease keeper calls `poll`; the thread that runs jobs calls `begin` and `end`. `on_request`
    is called for a new request, `on_report` when its state changes.
    """

    def __init__(
        self,
        who: Callable[[], claims.Claimant],
        cache: Models,
        *,
        now_fn: NowFn = time.monotonic,
    ) -> None:
        self._who = who
        self._cache = cache
        self._now = now_fn
        self._lock = threading.Lock()
        self._seen = 0
        self._waiting: Row | None = None
        self._latest: JsonDict | None = None
        self._began: float | None = None
        self.on_request: Callable[[], object] = lambda: None
        self.on_report: Callable[[], object] = lambda: None

    @property
    def waiting(self) -> bool:
        """Return whether a request is to be carried out before the next job."""
        return self._waiting is not None

    def takes_s(self) -> float:
        """Return for how many seconds a request has been running; 0 if none runs."""
        began = self._began
        return 0.0 if began is None else self._now() - began

    def poll(self, conn: db.Connection) -> None:
        """Read the newest request; it replaces one that still waits.

        Runs one statement in a transaction of its own.
        """
        who = self._who()
        found = models.newest_request(
            conn, host=who.host, worker_id=who.worker_id, after=self._seen
        )
        if found is None:
            return
        self._seen = found["request_no"]
        with self._lock:
            self._waiting = found
            self._set_report(found, "waiting")
        self.on_request()

    def begin(self, off_policy: str | None) -> Row | None:
        """Return the pending request, which is to be carried out now and then to `end`; or None.

        `off_policy` is the policy by which the worker is OFF now, or None. An OFF worker unloads
        but does not load.
        """
        with self._lock:
            request, self._waiting = self._waiting, None
            if request is None:
                return None
            if off_policy is not None and request["action"] == "load":
                self._set_report(
                    request, "refused", error=f"the worker is OFF by policy {off_policy}"
                )
                return None
            self._set_report(request, "running")
        self._began = self._now()
        return request

    def end(self, request: Row, error: str | None) -> tuple[str, float] | None:
        """Note how a request ended; return the model that was loaded and the seconds it took.

        None if nothing was loaded.
        """
        seconds, self._began = round(self.takes_s(), 3), None
        state = "done" if error is None else "failed"
        with self._lock:
            self._set_report(request, state, seconds=seconds, error=error)
        loaded_s = self._cache.last_load_seconds
        if error is None and request["action"] == "load" and loaded_s > 0:
            return request["model"], loaded_s
        return None

    def concerns(self, request: Row) -> bool:
        """Return whether there is anything to do: an unload may name a model that is not loaded."""
        return request["action"] == "load" or request["model"] in (None, self._cache.current_model)

    def _set_report(self, request: Row, state: str, **more: object) -> None:
        if state in ("failed", "refused"):
            _log.warning(
                "request to %s %s: %s", request["action"], request["model"] or "", more["error"]
            )
        self._latest = {
            "no": request["request_no"],
            "action": request["action"],
            # Plain SQL may write long names; the worker's report has a limit.
            "model": request["model"] and request["model"][:NAME_CHARS],
            "requested_by": request["requested_by"] and request["requested_by"][:NAME_CHARS],
            "state": state,
            "seconds": None,
            "error": None,
            **more,
        }
        self.on_report()

    def report(self) -> JsonDict:
        """Return the model and the last request for the worker's row; each may be None.

        `model` has id and loading; once loaded also est_vram_gb, load_s and held_s.
        """
        resident, loading = self._cache.resident, self._cache.loading_model
        model = None
        if resident is not None:
            model = {
                "id": resident.id,
                "loading": False,
                "est_vram_gb": resident.est_vram_gb,
                "load_s": round(resident.load_s, 3),
                "held_s": round(resident.held_s, 3),
            }
        elif loading is not None:
            model = {"id": loading, "loading": True}
        return {"model": model, "request": self._latest}
