"""Track the model of a gpu worker's executor, run requests to load or unload, and sample its GPU.

A measurement may take seconds, so it runs on a thread of its own. The loop reads the results.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from typing import Final

from queue_workflows import config, model_registry
from queue_workflows.claim import outcomes
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.model_cache import gpu_should_unload
from queue_workflows.run import executors
from queue_workflows.runtime import clock, external_tool, service
from queue_workflows.telemetry import gpu_overview, worker_usage
from queue_workflows.types import JsonDict, Row
from queue_workflows.worker import claimed_job, guards, queue_state, shapes

_log = logging.getLogger(__name__)
REAP_S: Final = 5.0
SAMPLE_CHECK_S: Final = 1.0
READ_S: Final = 5.0
"""Seconds between two readings of the GPU for the job that runs."""
PUBLISH_WAIT_S: Final = 5.0
"""Seconds for which the first claim waits until the size of the GPU memory is published, a little
more than `shapes.TIMEOUT_S`."""
NAME_CHARS: Final = 400
FAULT_FIRST_S, FAULT_MAX_S = 5.0, 300.0
"""First and longest pause in seconds after a job could not use the GPU; it doubles each time."""
UNKNOWN_S = 60.0
"""Seconds between two measurements of the GPU memory's size, until it is known."""
REAP: Final[Row] = {"action": "reap", "model": None}
"""The worker's own request to unload a model that has been idle too long."""
Later = Callable[..., object]


class GpuModels:
    """The models and the GPU of a worker's gpu queue.

    `wake` lets the loop read the results of the measuring thread.
    """

    def __init__(self, *, card: int | None, wake: Callable[[], object]) -> None:
        self._known, self._card = [*model_registry.known_ids()] or None, card
        self._wake, self._now = wake, clock.boot_s
        self._queue: queue_state.Queue
        self._later: Later
        self._changed: Callable[[], object]
        self._seen: JsonDict = executors.NO_MODEL
        self._since = self._used_at = self._now()
        self._load_s = 0.0
        """Seconds that the current request has spent loading."""
        self._waiting: Row | None = None
        self._running: Row | None = None
        """The requests to load or unload a model that wait and run, or None."""
        self._began, self._request_no = math.inf, 0
        self._polls = 0
        """How many polls for requests wait for their answers."""
        self._latest: JsonDict | None = None
        self._poll_at = self._reap_at = 0.0
        self.probe = worker_usage.Sampler(card=card)
        """Samples the process that runs the handlers."""
        self._tool = external_tool.Tool("nvidia-smi")
        self._vram_mb: int | None = None
        """The size of the GPU memory, or None if it is unknown."""
        self._is_measured = False
        """Whether it was measured, even without a result."""
        self._sampled: tuple[float, worker_usage.Sample] | None = None
        self._shown: worker_usage.Sample | None = None
        self._wanted = self._blind = False
        self._cards = gpu_overview.Reader()
        self._working: claimed_job.ClaimedJob | None = None
        """The job that runs."""
        self._fault = ""
        """Why the last job could not use the GPU; empty once another job has completed."""
        self._fault_s, self._fault_until = FAULT_FIRST_S, -math.inf
        self._without: str = ""
        self._works = False
        """Id of the last job that could not use the GPU; whether another has completed since."""
        self.published = config.DISABLE_WORKER_HEARTBEAT.read()
        """Whether the database has the size of the GPU memory, or never gets it."""
        self._publish_by = self._now() + PUBLISH_WAIT_S
        self._sizes: dict[str, float] = {}
        size = service.Task(
            "gpu-memory",
            lambda: UNKNOWN_S if self._vram_mb is None else math.inf,
            self._measure,
        )
        sample = service.Task("sample", SAMPLE_CHECK_S, self._sample)
        cards = service.Task("cards", READ_S, self._read)
        self._thread = service.Loop("worker-gpu", [size, sample, cards])

    def serve(self, own: queue_state.Queue, later: Later, changed: Callable[[], object]) -> None:
        """Serve this queue from now on; claims wait for the size of the GPU memory.

        `later` runs a script on the second connection, best effort. `changed` asks for a heartbeat.
        """
        self._queue, self._later, self._changed = own, later, changed
        own.models = self._known
        self._thread.start()

    def close(self) -> None:
        """End the measuring thread."""
        self._thread.stop()
        self._cards.close()

    # --- The measuring thread.

    def _measure(self) -> None:
        self._vram_mb = vram_total_mb(self._tool)
        self._is_measured = True
        self._wake()

    def _sample(self) -> None:
        if self._wanted and not self.probe.is_stopped:
            now = self._now()
            self._sampled = now, self.probe.sample()
            self._wake()

    def _read(self) -> None:
        """Read the use of the running job's GPU, or the maxima of all GPUs if it may use any."""
        if (job := self._working) is None:
            return
        every = self._cards.read()
        if own := [card for card in every if card.id == self._card] or every:
            most = max(each.use_pct for each in own), max(each.vram_used_mb for each in own)
            job.gpu_readings.append(most)

    # --- The loop.

    @property
    def may_claim(self) -> bool:
        """Return whether the GPU works, and claims know which models fit."""
        now = self._now()
        return now >= self._fault_until and (self.published or now >= self._publish_by)

    @property
    def holds_model(self) -> bool:
        """Return whether a model is loaded or being loaded."""
        return bool(self._seen["current"] or self._seen["loading"])

    @property
    def is_changing(self) -> bool:
        """Return whether a request is loading or unloading a model."""
        return self._running is not None

    def overdue(self, now: float, stop_at: float) -> str:
        """Return why a request for a model has to be stopped now; empty if it may go on.

        It may take as long as a gpu job, unless the worker stops earlier.
        """
        if not self.is_changing or now < min(stop_at, self._began + guards.GPU_S):
            return ""
        return "its worker stops" if now >= stop_at else "the request took too long"

    def report(self) -> JsonDict:
        """Return `columns` and `detail` of the worker's row that describe the GPU and the model."""
        seen, vram_mb = self._seen, self._vram_mb
        current, loading, known = seen["current"], seen["loading"], self._known or []
        model = None if loading is None else {"id": loading, "loading": True}
        if current is not None:
            model = {
                "id": current,
                "loading": False,
                "est_vram_gb": seen["vram_gb"],
                "load_s": round(seen["load_s"], 3),
                "held_s": round(self._now() - self._since, 3),
            }
        return {
            "columns": {"current_model": current, "known_models": known, "vram_total_mb": vram_mb},
            "gpu": self._shown._asdict() if self._shown else None,
            "model": model,
            "request": self._latest,
            "gpu_fault": self._fault or None,
            **({} if self._card is None else {"card": self._card}),
        }

    def reported_size(self) -> None:
        """Note that a heartbeat was stored, which has the GPU memory's size if that is measured."""
        if self._is_measured and not self.published:
            self.published = True
            self._queue.may_claim = True
        sizes = {name: model_registry.get(name).est_vram_gb for name in self._known or ()}
        if sizes != self._sizes:
            self._sizes = sizes
            publish = statements.models.publish_sizes.script(
                host=self._queue.who.host,
                models=[*sizes],
                sizes=[size or None for size in sizes.values()],
            )
            self._later(publish, "the sizes of the models are not stored")

    def tick(self, now: float) -> float:
        """Pass samples to the guards, and poll if due; return when to call this again."""
        jobs = [*self._queue.jobs.values()]
        self._working = next((job for job in jobs if job.has_started), None)
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
        if now >= self._poll_at and self._queue.who.obey and not self._polls:
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
                note = claimed_job.note(job, "stall_suspected", detail=detail)
                self._later(note, f"the suspected stall of job {job.id} is not recorded")

    # --- Reports of the executor.

    def reported(self, model: JsonDict) -> None:
        """Note the model of the executor."""
        before, self._seen = self._seen, model
        if model["current"] not in (None, before["current"]):
            self._load_s += model["load_s"]
        self._since = self._now() - model["held_s"]
        self._queue.model = model["current"]
        if any(model[name] != before[name] for name in ("current", "loading")):
            self._changed()

    def _used(self) -> None:
        """Restart the idle time, since a job has ended or a request has begun."""
        self._used_at, self._load_s = self._now(), 0.0

    def ended(self, job: claimed_job.ClaimedJob, outcome: outcomes.Outcome) -> outcomes.Outcome:
        """Pause claims after a job that could not use the GPU; return the outcome to record.

        A job that sees no GPU is delayed without counting an attempt. If another job has completed
        since its last try, it fails like any other, as the cause may be its own.
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
            # Another job runs first, which shows whether this job is the cause.
            raised = raised._replace(after_s=2 * pause_s)
            _log.warning("no gpu job is claimed for %g s: %s", pause_s, outcome.error)
        if before != self._fault:
            self._changed()
        return outcome._replace(raised=raised)

    def learn(self, model: str | None, seconds: float) -> None:
        """Remember how long a load has taken, so that the next claim can weigh it."""
        learn = statements.models.learn_load.script(
            host=self._queue.who.host, model=model, seconds=seconds
        )
        self._later(learn, "how long a model has loaded is not stored")

    # --- Requests to load and unload.

    def poll(self) -> None:
        """Read the latest request from the database; it replaces one that still waits."""
        self._poll_at = self._now() + config.WORKER_CONTROL_POLL_S.read()
        self._polls += 1
        who = self._queue.who
        newest = statements.models.newest_request.script(
            host=who.host, worker=who.worker_id, after=self._request_no
        )

        def not_polled() -> None:
            self._polls -= 1

        def polled(found: Row | None) -> None:
            self._polls -= 1
            if found is not None:
                self._request_no, self._waiting = found["request_no"], found
                self._set_report(found, "waiting")
                self.begin()

        self._later(newest, "requests for models cannot be read", polled, not_polled)

    def _reap(self) -> None:
        """Request the unload of a model that is idle too long, unless the worker is paused."""
        if config.DISABLE_GPU_IDLE_REAPER.read() or self._queue.off == "pause":
            return
        idle_s, ttl_s = self._now() - self._used_at, config.GPU_MODEL_IDLE_TTL_S.read()
        held = self._seen["current"] is not None
        if gpu_should_unload(held, bool(self._queue.jobs), idle_s, ttl_s):
            self._waiting = self._waiting or REAP

    def begin(self) -> None:
        """Let the executor carry out the next request, once it is idle."""
        own = self._queue
        idle = not any(job.place for job in own.jobs.values())
        if self._running is None and self._waiting is not None and idle:
            request, self._waiting = self._waiting, None
            self._begin(request)
        own.changing = bool(self._waiting or self._running)

    def _begin(self, request: Row) -> None:
        loads, off = request["action"] == "load", self._queue.off
        if self._queue.who.obey and request is not REAP:
            off = off or request["off_policy"]  # the worker may not have seen the switch yet
        change = {"model": request["model"] if loads else None, "idle_only": request is REAP}
        if loads and off is not None:
            self._set_report(request, "refused", error=f"the worker is OFF by policy {off}")
        elif not loads and request["model"] not in (None, self._seen["current"]):
            self._set_report(request, "done", seconds=0.0)
        elif not self._queue.runner.change_model(change):
            self._waiting = None if request is REAP else request
        else:
            self._running, self._began = request, self._now()
            if request is not REAP:
                self._used()
                self._set_report(request, "running")

    def changed(self, error: str | None) -> None:
        """Note that the executor has carried out a request, or that it failed with `error`."""
        request, self._running = self._running, None
        seconds, self._began = round(self._now() - self._began, 3), math.inf
        self._queue.changing = False
        if request is None or request is REAP:
            return
        # The text of an app's error, which has to fit into the detail of the heartbeat.
        error = None if error is None else payload.error_text(error)
        state = "done" if error is None else "failed"
        self._set_report(request, state, seconds=seconds, error=error)
        if error is None and request["action"] == "load" and self._load_s > 0:
            self.learn(request["model"], self._load_s)

    def _set_report(self, request: Row, state: str, **more: object) -> None:
        if state in ("failed", "refused"):
            model = request["model"] or "all models"
            _log.warning("request to %s %s %s: %s", request["action"], model, state, more["error"])
        # Plain SQL may have written long names, but the size of a report is limited.
        names = {name: (request[name] or "")[:NAME_CHARS] or None
                 for name in ("model", "requested_by")}  # fmt: skip
        given = {"no": request["request_no"], "action": request["action"], "state": state}
        self._latest = {"seconds": None, "error": None, **given, **names, **more}
        self._changed()


def vram_total_mb(tool: external_tool.Tool) -> int | None:
    """Return the MiB that nvidia-smi reports for the largest GPU.

    Only visible GPUs count. Returns None if unknown; then every model counts as fitting. Blocks for
    up to TIMEOUT_S.
    """
    return largest_mb(
        shapes.listed_gpus(tool),
        os.environ.get("CUDA_VISIBLE_DEVICES"),
        by_bus=os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID",
    )


def largest_mb(text: str, visible: str | None, *, by_bus: bool = False) -> int | None:
    """Return the size of the largest visible GPU in a list with one `index, uuid, MiB` per line.

    `visible` has indexes or UUID prefixes as in CUDA_VISIBLE_DEVICES; None means all. Returns None
    if no GPU is visible, or a visible one has no size (`[N/A]`). Without `by_bus`, an index among
    GPUs of different sizes also gives None, as CUDA and nvidia-smi may number them differently.
    """
    cards = shapes.gpu_rows(text)
    sizes = [size for _, _, size in cards]
    if visible is not None:
        wanted = [part.strip() for part in visible.split(",")]
        if not by_bus and len(set(sizes)) > 1 and any(part.isdigit() for part in wanted):
            return None
        sizes = [size for index, uuid, size in cards if _is_one_of(index, uuid, wanted)]
    if not sizes or not all(size.isascii() and size.isdigit() for size in sizes):
        return None
    return max(map(int, sizes))


def _is_one_of(index: str, uuid: str, wanted: list[str]) -> bool:
    return any(part == index or (part and uuid.startswith(part)) for part in wanted)
