"""Poll requests to load or unload a model, and carry them out between jobs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from queue_workflows import db, errors
from queue_workflows.engine import claims, models
from queue_workflows.model_cache import ModelCache
from queue_workflows.types import JsonDict, NowFn, Row

_log = logging.getLogger(__name__)
ERROR_CHARS = 1000
NAME_CHARS = 400


class ModelRequests:
    """The newest request for this worker, and its outcome.

    The lease keeper calls `poll`; the thread that runs jobs calls `run_pending`. `on_request` is
    called for a new request, `on_report` when its state changes.
    """

    def __init__(
        self,
        who: Callable[[], claims.Claimant],
        cache: ModelCache,
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

    def run_pending(self, off_policy: str | None) -> tuple[str, float] | None:
        """Carry out the pending request, if any; raise nothing but KeyboardInterrupt.

        `off_policy` is the policy by which the worker is OFF now, or None. An OFF worker unloads
        but does not load. Returns the model that was loaded and the seconds it took, else None.
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
        self._began = started = self._now()
        try:
            error = self._run(request)
        finally:
            self._began = None
        seconds = round(self._now() - started, 3)
        state = "done" if error is None else "failed"
        with self._lock:
            self._set_report(request, state, seconds=seconds, error=error)
        if error is None and request["action"] == "load" and self._cache.last_load_seconds > 0:
            return request["model"], self._cache.last_load_seconds
        return None

    def _run(self, request: Row) -> str | None:
        """Load or unload the model; return the error, or None."""
        cache, model = self._cache, request["model"]
        cache.mark_busy()
        try:
            if request["action"] == "load":
                cache.require_model(model)
            elif model in (None, cache.current_model):
                cache.drop_cache()
        except errors.QueueWorkflowsError as error:
            return str(error)[:ERROR_CHARS]
        except (Exception, SystemExit) as error:  # noqa: BLE001  the boundary around app code
            return f"{type(error).__name__}: {error}"[:ERROR_CHARS]
        finally:
            cache.mark_idle()
        return None

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
