"""Know the model of a gpu worker's executor, carry out requests about it, and sample its GPU.

What measures a GPU may take seconds: that runs on a thread of its own, and its results wait here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, Final

from queue_workflows import config, db, model_registry
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.engine import job_events, outcomes
from queue_workflows.model_cache import gpu_should_unload
from queue_workflows.runtime import clock, service
from queue_workflows.telemetry import worker_usage
from queue_workflows.types import JsonDict, NowFn, Row
from queue_workflows.worker import claimed_job, gpus, guards, lane

_log = logging.getLogger(__name__)
REAP_S: Final = 5.0
SAMPLE_CHECK_S: Final = 1.0
PUBLISH_WAIT_S: Final = 5.0
"""Seconds for which the first claim waits for the GPU's size and a heartbeat: a little more than
`gpus.TIMEOUT_S`."""
NAME_CHARS: Final = 400
FAULT_FIRST_S, FAULT_MAX_S = 5.0, 300.0
"""Pauses in seconds after a job that could not use the GPU; each one in a row doubles it."""
Later = Callable[..., object]
NOTHING: Final[JsonDict] = {
    "current": None, "loading": None, "load_s": 0.0, "held_s": 0.0, "vram_gb": 0.0,
}  # fmt: skip


class GpuModels:
    """The models and the GPU of a worker's one gpu lane.

    `wake` lets the loop look at what the measuring thread has found.
    """

    def __init__(
        self,
        known: list[str] | None,
        *,
        card: int | None,
        wake: Callable[[], object],
        now_fn: NowFn = clock.boot_s,
    ) -> None:
        self._known = known
        self._card = card
        self._wake = wake
        self._now = now_fn
        self._lane: lane.Lane
        self._later: Later
        self._changed: Callable[[], object]
        self._seen: JsonDict = NOTHING
        self._since = self._used_at = now_fn()
        self._load_s = 0.0
        """Seconds that the change under way has spent loading."""
        self._waiting: Row | None = None
        self._running: Row | None = None
        self._began = math.inf
        self._request_no = 0
        self._latest: JsonDict | None = None
        self._reaps = False
        self._poll_at = self._reap_at = 0.0
        self._probe = worker_usage.Sampler(card=card)
        self._memory = gpus.GpuMemory()
        self._sampled: tuple[float, worker_usage.Sample] | None = None
        self._shown: worker_usage.Sample | None = None
        self._wanted = False
        self._blind = False
        self._fault = ""
        """Why the last job that ended could not use the GPU."""
        self._fault_s = FAULT_FIRST_S
        self._fault_until = -math.inf
        self._without: str = ""
        """The last job that could not use it."""
        self._works = False
        """Whether another one has completed since."""
        self.published = config.DISABLE_WORKER_HEARTBEAT.read()
        """Whether the database has the size of the GPU memory, or cannot have it."""
        self._publish_by = now_fn() + PUBLISH_WAIT_S
        self._sizes: dict[str, float] = {}
        self._thread = service.Loop(
            "worker-gpu",
            [
                service.Task("gpu-memory", self._memory.every_s, self._measure),
                service.Task("sample", SAMPLE_CHECK_S, self._sample),
            ],
        )

    def serve(self, own: lane.Lane, later: Later, changed: Callable[[], object]) -> None:
        """Serve this lane from now on; claims wait for the size of the GPU.

        `later` runs a script on the second connection, best effort; `changed` lets it report.
        """
        self._lane, self._later, self._changed = own, later, changed
        own.models = self._known
        self._thread.start()

    def close(self) -> None:
        """End the measuring thread."""
        self._thread.stop()

    # --- The measuring thread.

    def _measure(self) -> None:
        if self._memory.measure():
            self._wake()

    def _sample(self) -> None:
        if self._wanted and not self._probe.is_stopped:
            now = self._now()
            self._sampled = now, self._probe.sample()
            self._wake()

    # --- The loop.

    def follow(self, pid: int) -> None:
        """Sample this process, which runs the handlers, from now on."""
        self._probe.follow(pid)

    @property
    def is_stopped(self) -> bool:
        """Return whether the process that runs the handlers is stopped; see `Desk.tick`."""
        return self._probe.is_stopped

    @property
    def may_claim(self) -> bool:
        """Return whether the GPU can be used, and a claim takes no job whose model does not fit."""
        now = self._now()
        return now >= self._fault_until and (self.published or now >= self._publish_by)

    @property
    def holds_model(self) -> bool:
        """Return whether a model is loaded or being loaded."""
        return bool(self._seen["current"] or self._seen["loading"])

    @property
    def is_changing(self) -> bool:
        """Return whether a model is being loaded or unloaded, but for a job."""
        return self._running is not None

    @property
    def change_ends(self) -> float:
        """Return when the request under way has taken too long: it has the time of a gpu job."""
        return self._began + guards.GPU_S

    def columns(self) -> JsonDict:
        """Return the columns of the worker's row about models and GPU memory."""
        return {
            "current_model": self._seen["current"],
            "known_models": self._known or [],
            "vram_total_mb": self._memory.vram_mb,
        }

    def detail(self) -> JsonDict:
        """Return the part of the worker row's `detail` about the GPU and the model."""
        shown, seen = self._shown, self._seen
        found: JsonDict = {"gpu": shown._asdict() if shown else None}
        if self._card is not None:
            found["card"] = self._card
        model: JsonDict | None = None
        if seen["current"] is not None:
            model = {
                "id": seen["current"],
                "loading": False,
                "est_vram_gb": seen["vram_gb"],
                "load_s": round(seen["load_s"], 3),
                "held_s": round(self._now() - self._since, 3),
            }
        elif seen["loading"] is not None:
            model = {"id": seen["loading"], "loading": True}
        return found | {"model": model, "request": self._latest, "gpu_fault": self._fault or None}

    def reported_size(self) -> None:
        """Note that a heartbeat has published the size of the GPU, if it was measured by then."""
        if self._memory.measured and not self.published:
            self.published = True
            self._lane.may_claim = True
        sizes = {name: model_registry.get(name).est_vram_gb for name in self._known or ()}
        if sizes != self._sizes:
            self._sizes = sizes
            given: JsonDict = {"host": self._lane.who.host, "models": [*sizes]}
            given["sizes"] = [size or None for size in sizes.values()]
            self._later(db.one(statements.models.publish_sizes, given), "the sizes of models")

    def tick(self, now: float) -> float:
        """Take samples to the guards, and do what is due; return when to be called again."""
        jobs = [*self._lane.jobs.values()]
        every = [guard for job in jobs for guard in job.guards]
        self._wanted = any(guard.wants_sample(now) for guard in every)
        if self._sampled is not None:
            (at, found), self._sampled = self._sampled, None
            self._shown = found
            for guard in every:
                if guard.wants_sample(now):
                    guard.sample(at, found)
        for job in jobs:
            self._report_suspicions(job, now)
        if now >= self._poll_at and not config.DISABLE_WORKER_CONTROL.read():
            self.poll()
        if now >= self._reap_at:
            self._reap_at = now + REAP_S
            self._reap()
        self.begin()
        return now + (SAMPLE_CHECK_S if jobs else REAP_S)

    def _report_suspicions(self, job: claimed_job.ClaimedJob, now: float) -> None:
        for guard in job.guards:
            if isinstance(guard, guards.GpuHealth) and guard.is_blind(now) and not self._blind:
                self._blind = True
                _log.warning(
                    "neither nvidia-smi nor rocm-smi reports the GPU's use: gpu jobs are limited "
                    "by their wall-clock budget"
                )
            if isinstance(guard, guards.Stall) and (reason := guard.suspicion(now)):
                _log.warning("job %s: %s", job.id, reason, extra=job.ids)
                detail = payload.encode({"reason": reason}, "detail")
                note = _note(job, "stall_suspected", detail=detail)
                self._later(note, f"the suspicion of job {job.id}")

    # --- What the executor reports.

    def reported(self, model: JsonDict) -> None:
        """Note the model of the executor."""
        if model["current"] != self._seen["current"] and model["current"] is not None:
            self._load_s += model["load_s"]
        self._since = self._now() - model["held_s"]
        changed = (model["current"], model["loading"]) != (
            self._seen["current"],
            self._seen["loading"],
        )
        self._seen = model
        self._lane.model = model["current"]
        if changed:
            self._changed()

    def _used(self) -> None:
        """Note that a job has ended, or a request has begun: the idle time starts again."""
        self._used_at, self._load_s = self._now(), 0.0

    def ended(self, job: claimed_job.ClaimedJob, outcome: outcomes.Outcome) -> outcomes.Outcome:
        """Claim nothing for a while after a job that could not use the GPU; return what to record.

        A job that sees no GPU waits uncounted. If another one has completed since it did so the
        last time, it fails as any other: it may hide the GPU from itself.
        """
        self._used()
        raised, before = outcome.raised, self._fault
        if outcome.kind == "completed":
            self._fault, self._fault_s, self._works = "", FAULT_FIRST_S, True
        elif raised.wish == "no_gpu" and self._works and job.id == self._without:
            raised = raised._replace(wish="")
        elif raised.wish in ("no_gpu", "no_memory"):
            pause_s, self._fault_s = self._fault_s, min(FAULT_MAX_S, 2 * self._fault_s)
            self._fault, self._fault_until = outcome.error, self._now() + pause_s
            self._without, self._works = job.id, False
            # Another job comes first, which tells whether it is this one that is at fault.
            raised = raised._replace(after_s=2 * pause_s)
            _log.warning("no gpu job is claimed for %g s: %s", pause_s, outcome.error)
        if before != self._fault:
            self._changed()
        return outcome._replace(raised=raised)

    def event(
        self, job: claimed_job.ClaimedJob, event_type: str, elapsed_s: float | None
    ) -> db.Script[Any]:
        """Return what records that the model of a node is loaded, or is about to be."""
        if event_type == "model_load_done" and elapsed_s is not None:
            self._learn(job.model, elapsed_s)
        return _note(job, event_type, detail="{}", elapsed_s=elapsed_s)

    def _learn(self, model: str | None, seconds: float) -> None:
        given = {"host": self._lane.who.host, "model": model, "seconds": seconds}
        self._later(db.one(statements.models.learn_load, given), "the time of a load")

    # --- Requests to load and unload.

    def poll(self) -> None:
        """Look for a request; it replaces one that still waits."""
        self._poll_at = self._now() + config.WORKER_CONTROL_POLL_S.read()
        who = self._lane.who
        given = {"host": who.host, "worker": who.worker_id, "after": self._request_no}
        self._later(
            db.one(statements.models.newest_request, given), "requests for models", self._polled
        )

    def _polled(self, found: Row | None) -> None:
        if found is not None:
            self._request_no = found["request_no"]
            self._waiting = found
            self._set_report(found, "waiting")
            self.begin()

    def _reap(self) -> None:
        """Unload a model that is idle too long, unless the worker is paused with it."""
        if config.DISABLE_GPU_IDLE_REAPER.read() or self._lane.off == "pause":
            return
        idle_s, ttl_s = self._now() - self._used_at, config.GPU_MODEL_IDLE_TTL_S.read()
        held = self._seen["current"] is not None
        self._reaps |= gpu_should_unload(held, bool(self._lane.jobs), idle_s, ttl_s)

    def begin(self) -> None:
        """Let the executor carry out what is due, once it has no job."""
        own = self._lane
        own.changing = self._waiting is not None or self._running is not None or self._reaps
        if self._running is not None or any(job.place for job in own.jobs.values()):
            return
        if (request := self._waiting) is not None:
            self._waiting = None
            self._begin(request)
        elif self._reaps:
            self._reaps = False
            if own.runner.change_model({"model": None, "idle_only": True}):
                self._running = {"action": "reap"}
        own.changing = self._running is not None

    def _begin(self, request: Row) -> None:
        loads = request["action"] == "load"
        off = self._lane.off
        if self._lane.who.obey and not config.DISABLE_WORKER_CONTROL.read():
            off = off or request["off_policy"]  # it may not have looked since
        if loads and off is not None:
            why = f"the worker is OFF by policy {off}"
            self._set_report(request, "refused", error=why)
            return
        if not loads and request["model"] not in (None, self._seen["current"]):
            self._set_report(request, "done", seconds=0.0)
            return
        change = {"model": request["model"] if loads else None, "idle_only": False}
        if not self._lane.runner.change_model(change):
            self._waiting = request
            return
        self._used()
        self._running, self._began = request, self._now()
        self._set_report(request, "running")

    def changed(self, error: str | None) -> None:
        """Note that the executor has carried out a change, or why not."""
        request, self._running = self._running, None
        self._lane.changing = False
        if request is None or request["action"] == "reap":
            return
        seconds = round(self._now() - self._began, 3)
        self._began = math.inf
        self._set_report(
            request, "done" if error is None else "failed", seconds=seconds, error=error
        )
        if error is None and request["action"] == "load" and self._load_s > 0:
            self._learn(request["model"], self._load_s)

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
        self._changed()


def _note(job: claimed_job.ClaimedJob, event_type: str, **more: Any) -> db.Script[Any]:
    return job_events.note(job.lease.table, job.row | {"attempts": 0}, event_type, **more)
