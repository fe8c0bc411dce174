"""Track the model of a GPU's executor, and send it requests to load or unload one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from queue_workflows import config, db
from queue_workflows.engine import claims, controls, job_events, models
from queue_workflows.executor import protocol
from queue_workflows.model_cache import ResidentModel, gpu_should_unload
from queue_workflows.types import NowFn, Row
from queue_workflows.worker import current_job, executors, model_requests

_log = logging.getLogger(__name__)


class ExecutorModels:
    """The model of one executor as it reported it; a `model_requests.Models` for any thread.

    Only the executor loads and unloads. It reports each change, and a new one has no model.
    """

    def __init__(self, now_fn: NowFn = time.monotonic) -> None:
        self._now = now_fn
        self._seen = protocol.Model(None, None, 0.0, 0.0, 0.0)
        self._since = self._used_at = now_fn()
        self._load_s = 0.0
        self.busy: Callable[[], object] = lambda: False
        """Returns whether a job uses the model."""
        self.on_change: Callable[[], object] = lambda: None
        """Called when the model has changed."""
        self.on_reap: Callable[[], object] = lambda: None
        """Called when a model is to be unloaded, on any thread."""
        self.reap_due = False
        """Whether the executor is to unload a model that is idle too long."""

    @property
    def current_model(self) -> str | None:
        """Return the id of the loaded model; None if there is none, and during a swap."""
        return self._seen.current

    @property
    def loading_model(self) -> str | None:
        """Return the id of the model that is being loaded, or None."""
        return self._seen.loading

    @property
    def resident(self) -> ResidentModel | None:
        """Return the loaded model, or None."""
        seen, held_s = self._seen, self._now() - self._since
        if seen.current is None:
            return None
        return ResidentModel(seen.current, seen.vram_gb, seen.load_s, held_s)

    @property
    def last_load_seconds(self) -> float:
        """Return the seconds that the request that ended last spent loading; 0.0 for none."""
        return self._load_s

    def is_idle_too_long(self) -> bool:
        """Return whether a model is loaded that no job has used for the TTL."""
        idle_s = self._now() - self._used_at
        ttl_s = config.GPU_MODEL_IDLE_TTL_S.read()
        return gpu_should_unload(self._seen.current is not None, bool(self.busy()), idle_s, ttl_s)

    def reap_idle_once(self) -> bool:
        """Let the executor unload a model that is idle too long; it takes its own time."""
        if self.is_idle_too_long():
            self.reap_due = True
            self.on_reap()
        return False

    # --- The loop's thread.

    def changed(self, seen: protocol.Model) -> None:
        """Note what the executor reports."""
        if seen.current != self._seen.current and seen.current is not None:
            self._load_s += seen.load_s
        self._since = self._now() - seen.held_s
        self._seen = seen
        self.on_change()

    def used(self) -> None:
        """Note that a job has ended, or a request has begun: the idle time starts again."""
        self._used_at, self._load_s = self._now(), 0.0

    def gone(self) -> None:
        """Note that the executor has ended, and its model with it."""
        self.changed(protocol.Model(None, None, 0.0, 0.0, 0.0))


class Changes:
    """Carry out requests to load or unload a model, and write what executors report of models.

    For the loop's thread. `connection` returns the loop's connection; `lose` closes it.
    """

    def __init__(
        self,
        known: ExecutorModels,
        requests: model_requests.ModelRequests,
        who: claims.Claimant,
        *,
        connection: Callable[[], db.Connection],
        lose: Callable[[], object],
    ) -> None:
        self.known = known
        self._requests = requests
        self._who = who
        self._connection = connection
        self._lose = lose
        self._running: tuple[executors.Handle, Row | None] | None = None
        self._loads: list[tuple[str, float]] = []
        """Loads on request of which the fleet has not learned yet."""
        self._events: list[tuple[current_job.Work, protocol.Event]] = []

    @property
    def due(self) -> bool:
        """Return whether a model is to be changed before the next job."""
        return self._requests.waiting or self.known.reap_due

    @property
    def running(self) -> bool:
        """Return whether an executor loads or unloads a model on request."""
        return self._running is not None

    def begin(self, handle: executors.Handle | None) -> None:
        """Let this executor, which has no job, carry out what is due. Raises database errors."""
        while handle is not None and self.due and not self.running:
            request = None
            if self._requests.waiting:
                request = self._requests.begin(self._off_policy())
                if request is None:
                    continue
                if not self._requests.concerns(request):
                    self._requests.end(request, None)
                    continue
            self._send(handle, request)

    def _off_policy(self) -> str | None:
        if not self._who.obey:
            return None
        try:
            return controls.off_policy(self._connection(), self._who.host, self._who.queue)
        except db.Error:
            self._lose()
            raise

    def _send(self, handle: executors.Handle, request: Row | None) -> None:
        self._running, handle.changing = (handle, request), True
        self.known.reap_due = False
        if request is not None:
            self.known.used()
        load = request is not None and request["action"] == "load"
        message: protocol.Message = protocol.Unload(idle_only=request is None)
        if request is not None and load:
            message = protocol.Load(request["model"])
        try:
            handle.forked.jobs.send(message)
        except protocol.ChannelLost as error:
            _log.warning("the model is not changed: %s", error)  # its end is noticed soon

    def done(self, handle: executors.Handle, error: str | None) -> None:
        """Note that an executor has carried out a change, or why not."""
        if self._running is None or self._running[0] is not handle:
            return
        request, self._running = self._running[1], None
        handle.changing = False
        if request is not None and (loaded := self._requests.end(request, error)) is not None:
            self._loads.append(loaded)

    def died(self, handle: executors.Handle) -> None:
        """Note that an executor has ended, with its model and what it was to change."""
        self.done(
            handle,
            f"its executor was ended for {handle.killed_for}"
            if handle.killed_for
            else "its executor has ended",
        )
        self.known.gone()

    def reported(self, work: current_job.Work, event: protocol.Event) -> None:
        """Note an event for the history of a node."""
        self._events.append((work, event))

    def write(self) -> None:
        """Write the events and what the fleet learns of loads, best effort, before the outcomes."""
        while self._events or self._loads:
            try:
                if self._events:
                    self._note(*self._events.pop(0))
                else:
                    models.learn_load(self._connection(), self._who.host, *self._loads.pop(0))
            except db.Error as error:
                self._lose()
                _log.warning("an event of a model was not recorded: %s", error)

    def _note(self, work: current_job.Work, event: protocol.Event) -> None:
        conn, job, table = self._connection(), work.job, work.lease.table
        with conn.transaction():
            job_events.note(conn, table, job, event.type, detail="{}", elapsed_s=event.elapsed_s)
            if event.type == "model_load_done" and event.elapsed_s is not None:
                models.learn_load(conn, job["claimed_by"], job["required_model"], event.elapsed_s)
