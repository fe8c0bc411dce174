"""Models that a worker is asked to load or unload: heard by its watch, obeyed between its jobs."""

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


class Requests:
    """The newest request for this worker, and what became of it.

    `look` runs on the watch's thread, `obey` on the one that runs jobs. `asked` is called when
    there is something to obey, `said` when there is news to report.
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
        self._answer: JsonDict | None = None
        self._began: float | None = None
        self.asked: Callable[[], object] = lambda: None
        self.said: Callable[[], object] = lambda: None

    @property
    def waiting(self) -> bool:
        """Whether a request is to be obeyed before the next job."""
        return self._waiting is not None

    def takes_s(self) -> float:
        """For how long the worker has been at a request; 0 when at none."""
        began = self._began
        return 0.0 if began is None else self._now() - began

    def look(self, conn: db.Connection) -> None:
        """See whether anything was asked since; a newer request takes the place of one that waits.

        One statement, in a transaction of its own.
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
            self._say(found, "waiting")
        self.asked()

    def obey(self, off_policy: str | None) -> tuple[str, float] | None:
        """Do what was asked last, if anything waits; nothing is raised but KeyboardInterrupt.

        `off_policy`: by which the worker is OFF now; then it loads nothing, but unloads. Returns
        the model that it had to load and the seconds that its load took; else None.
        """
        with self._lock:
            request, self._waiting = self._waiting, None
            if request is None:
                return None
            if off_policy is not None and request["action"] == "load":
                self._say(request, "refused", error=f"the worker is OFF by policy {off_policy}")
                return None
            self._say(request, "running")
        self._began = started = self._now()
        try:
            error = self._carry_out(request)
        finally:
            self._began = None
        seconds = round(self._now() - started, 3)
        state = "done" if error is None else "failed"
        with self._lock:
            self._say(request, state, seconds=seconds, error=error)
        if error is None and request["action"] == "load" and self._cache.last_load_seconds > 0:
            return request["model"], self._cache.last_load_seconds
        return None

    def _carry_out(self, request: Row) -> str | None:
        """Why it failed, or None."""
        cache, model = self._cache, request["model"]
        cache.mark_busy()
        try:
            if request["action"] == "load":
                cache.require_model(model)
            elif model in (None, cache.current_model):
                cache.drop_cache()
        except errors.QueueWorkflowsError as error:
            return str(error)[:ERROR_CHARS]
        except (Exception, SystemExit) as error:  # noqa: BLE001  the boundary around host code
            return f"{type(error).__name__}: {error}"[:ERROR_CHARS]
        finally:
            cache.mark_idle()
        return None

    def _say(self, request: Row, state: str, **more: object) -> None:
        if state in ("failed", "refused"):
            _log.warning(
                "request to %s %s: %s", request["action"], request["model"] or "", more["error"]
            )
        self._answer = {
            "no": request["request_no"],
            "action": request["action"],
            # As plain SQL wrote them; what the worker says of itself has a limit.
            "model": request["model"] and request["model"][:NAME_CHARS],
            "requested_by": request["requested_by"] and request["requested_by"][:NAME_CHARS],
            "state": state,
            "seconds": None,
            "error": None,
            **more,
        }
        self.said()

    def report(self) -> JsonDict:
        """What the worker says of its model, for its row: `model` and `request`, each or None.

        `model`: id, loading; once loaded est_vram_gb, load_s, and held_s at the time of the report.
        """
        held, loading = self._cache.held, self._cache.loading_model
        model = None
        if held is not None:
            model = {
                "id": held.id,
                "loading": False,
                "est_vram_gb": held.est_vram_gb,
                "load_s": round(held.load_s, 3),
                "held_s": round(held.held_s, 3),
            }
        elif loading is not None:
            model = {"id": loading, "loading": True}
        return {"model": model, "request": self._answer}
