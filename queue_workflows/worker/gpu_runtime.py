"""Manage the model cache, the GPU memory and the GPU samples of one worker."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Generator, Sequence

from queue_workflows import config, db, hw_metrics, model_registry
from queue_workflows.dag import payload
from queue_workflows.engine import claims, controls, job_events, models, samples
from queue_workflows.runtime import service
from queue_workflows.telemetry import worker_usage
from queue_workflows.types import JsonDict, NowFn
from queue_workflows.worker import current_job, gpu_memory, guards, job_guards, model_requests

_log = logging.getLogger(__name__)
REAP_S = 5.0
SAMPLE_CHECK_S = 1.0
PUBLISH_WAIT_S, PUBLISH_CHECK_S = 5.0, 0.1
"""Seconds for which the first claim waits for the GPU's size and a heartbeat (a little more than
`gpu_memory.TIMEOUT_S`), and seconds between its checks for a stop."""


def claimant(
    base: claims.Claimant, model: str | None, known_models: list[str] | None
) -> claims.Claimant:
    """Return who claims for a GPU on which this model is loaded; `known_models` None: any model."""
    return base._replace(
        model=model,
        models=known_models,
        policy=config.gpu_claim_policy(),
        grace_s=config.GPU_URGENT_GRACE_S.read(),
        bound_s=config.GPU_MAX_WAIT_S.read(),
    )


class GpuRuntime:
    """The lease keeper's tasks for models and the GPU, on its connection `dedicated`.

    `works` returns the running jobs, `wake` makes tasks of the keeper due. `sampler` measures the
    GPU and the memory, by default only on the gpu queue. `metrics` samples the machine; this worker
    stores the samples. `card`: the GPU of the machine that this worker uses; None: all it sees.
    """

    def __init__(
        self,
        who: Callable[[], claims.Claimant],
        *,
        dedicated: db.DedicatedConnection,
        works: Callable[[], Sequence[current_job.Work]],
        wake: Callable[..., object],
        model_cache: model_requests.Models | None,
        known_models: Callable[[], list[str] | None],
        sampler: Callable[[], worker_usage.Sample] | None,
        metrics: hw_metrics.Sampler | None,
        now_fn: NowFn,
        card: int | None = None,
    ) -> None:
        self._who = who
        self._dedicated = dedicated
        self._works = works
        self._wake = wake
        self._cache = model_cache
        self.requests = model_requests.ModelRequests(who, model_cache) if model_cache else None
        """The pending load and unload requests; None without a model cache."""
        self._known_models = known_models
        self._card = card
        self._probe = worker_usage.Sampler(card=card)
        if sampler is None and who().queue == "gpu":
            sampler = self._probe.sample
        self._sampler = sampler
        self._metrics = metrics
        self._now = now_fn
        self._seen: worker_usage.Sample | None = None
        self._logged_blind = False
        self._memory = gpu_memory.GpuMemory()
        self.published = threading.Event()
        """Set once the database has the size of the GPU memory, or cannot have it."""
        if sampler is None or config.DISABLE_WORKER_HEARTBEAT.read():
            self.published.set()
        self._sizes: dict[str, float] = {}
        """The models' sizes in GB as they were last published."""

    def follow(self, pid: int) -> None:
        """Sample this process, which runs the handlers, from now on."""
        self._probe.follow(pid)

    @property
    def is_stopped(self) -> bool:
        """Return whether the process that runs the handlers is stopped; see `Work.verdict`."""
        return self._probe.is_stopped

    @property
    def holds_model(self) -> bool:
        """Return whether a model is loaded or being loaded."""
        cache = self._cache
        return cache is not None and bool(cache.current_model or cache.loading_model)

    def tasks(self) -> list[service.Task]:
        """Return the tasks that the lease keeper runs."""
        tasks: list[service.Task] = []
        if self.requests is not None and not config.DISABLE_WORKER_CONTROL.read():
            poll_s = config.WORKER_CONTROL_POLL_S.read
            tasks.append(service.Task("models", poll_s, self._poll_requests))
        if self._metrics is not None:
            tasks.append(service.Task("metrics", math.inf, self._store_samples))
        return tasks

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """Run slow tasks on threads of their own, so that they do not delay renewals."""
        with contextlib.ExitStack() as stack:
            if self._cache is not None:
                # An app's unloader may take minutes.
                reaping = [service.Task("reap", REAP_S, self._reap)]
                stack.enter_context(service.Loop("worker-reap", reaping))
            if self._sampler is not None:
                sampling = [
                    service.Task("gpu-memory", self._memory.every_s, self._measure),
                    service.Task("sample", SAMPLE_CHECK_S, self._sample),
                ]
                stack.enter_context(service.Loop("worker-samples", sampling))
            yield

    @property
    def is_measured(self) -> bool:
        """Return whether the size of the GPU memory was measured."""
        return self._memory.measured

    def wait_until_published(self, stopped: Callable[[], bool]) -> None:
        """Wait until the size of the GPU memory is published, for PUBLISH_WAIT_S at most.

        A gpu claim before that could take a job whose model does not fit.
        """
        for _ in range(round(PUBLISH_WAIT_S / PUBLISH_CHECK_S)):
            if stopped() or self.published.wait(PUBLISH_CHECK_S):
                return

    def requests_end(self, deadline: float | None) -> int | None:
        """Return the exit code of a worker whose request takes too long, or None.

        A request has the time of a gpu job. A load also ends when the worker's stop deadline
        passes.
        """
        cache = self._cache
        if deadline is not None and cache and cache.loading_model and self._now() >= deadline:
            _log.warning("loading %s did not end in time; exiting", cache.loading_model)
            return 0
        if self.requests and self.requests.takes_s() >= job_guards.GPU_S:
            _log.error("a request took longer than %g s; exiting", job_guards.GPU_S)
            return guards.EXIT_BUDGET
        return None

    def columns(self) -> JsonDict:
        """Return the columns of the worker's row about models and GPU memory."""
        return {
            "current_model": self._cache.current_model if self._cache else None,
            "known_models": self._known_models() or [],
            "vram_total_mb": self._memory.vram_mb,
        }

    def detail(self) -> JsonDict:
        """Return the part of the worker row's `detail` about the GPU and the model."""
        found: JsonDict = {"gpu": self._seen._asdict() if self._seen else None}
        if self._card is not None:
            found["card"] = self._card
        return found | (self.requests.report() if self.requests else {})

    def publish_sizes(self, conn: db.Connection, known: Sequence[str]) -> None:
        """Publish the sizes of these models if they have changed."""
        sizes = {name: model_registry.get(name).est_vram_gb for name in known}
        if sizes != self._sizes:
            models.publish_sizes(conn, self._who().host, sizes)
            self._sizes = sizes

    def report_suspicions(self, work: current_job.Work) -> None:
        """Record what a guard of this job suspects; warn once if no tool shows the GPU."""
        now = self._now()
        for guard in work.guards:
            if (
                isinstance(guard, guards.GpuHealth)
                and guard.is_blind(now)
                and not self._logged_blind
            ):
                self._logged_blind = True
                _log.warning(
                    "neither nvidia-smi nor rocm-smi reports the GPU's use: gpu jobs are limited "
                    "by their wall-clock budget"
                )
            if isinstance(guard, guards.Stall) and (reason := guard.suspicion(now)):
                _log.warning("job %s: %s", work.job["id"], reason, extra=work.ids)
                detail = payload.encode({"reason": reason}, "detail")
                with contextlib.suppress(db.Error), self._dedicated.using() as conn:
                    table = work.lease.table
                    job_events.note(conn, table, work.job, "stall_suspected", detail=detail)

    def _poll_requests(self) -> None:
        if self.requests is not None:
            with self._dedicated.using() as conn:
                self.requests.poll(conn)

    def _store_samples(self) -> None:
        for each in self._metrics.take() if self._metrics else ():
            with self._dedicated.using() as conn:
                samples.put(conn, self._who().host, each.every_s, each.text, notify=each.tell)

    def _measure(self) -> None:
        """Measure the GPU memory, which decides what may be claimed."""
        if self._memory.measure():
            self._wake("beat")

    def _sample(self) -> None:
        """Sample the GPU and the memory for the guards that want a sample."""
        now = self._now()
        every = [guard for work in self._works() for guard in work.guards]
        wanting = [guard for guard in every if guard.wants_sample(now)]
        if wanting and self._sampler is not None and not self.is_stopped:
            self._seen = found = self._sampler()
            for guard in wanting:
                guard.sample(now, found)

    def _reap(self) -> None:
        """Unload a model that was idle too long, unless the worker is paused with it."""
        cache, who = self._cache, self._who()
        if cache is None or cache.current_model is None or config.DISABLE_GPU_IDLE_REAPER.read():
            return
        if who.obey and cache.is_idle_too_long():
            with self._dedicated.using() as conn:
                if controls.off_policy(conn, who.host, who.queue) == "pause":
                    return
        cache.reap_idle_once()
