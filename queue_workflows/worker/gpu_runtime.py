"""What a worker has besides its jobs: a warm model, a card, and the samples of both."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Generator, Sequence

from queue_workflows import config, db, hw_metrics, model_registry
from queue_workflows.dag import payload
from queue_workflows.engine import claims, controls, job_events, models, samples
from queue_workflows.model_cache import ModelCache
from queue_workflows.runtime import service
from queue_workflows.telemetry import gpu_health
from queue_workflows.types import JsonDict, NowFn
from queue_workflows.worker import current_job, gpu_memory, guards, model_requests

_log = logging.getLogger(__name__)
REAP_S = 5.0
SAMPLE_CHECK_S = 1.0
INTRODUCE_S, INTRODUCED_S = 5.0, 0.1
"""How long the first claim waits for the card and a beat (`card.TIMEOUT_S`, and some more), and how
often it looks whether the worker stops."""


class GpuRuntime:
    """The part of a watch that minds models and the GPU; over the watch's connection `kept`.

    `works` gives the jobs that run, `wake` makes tasks of the watch due. `sampler` tells what the
    GPU and the memory do; by default on the gpu queue. `metrics`: whose samples of the box it
    stores.
    """

    def __init__(
        self,
        who: Callable[[], claims.Claimant],
        *,
        kept: db.DedicatedConnection,
        works: Callable[[], Sequence[current_job.Work]],
        wake: Callable[..., object],
        model_cache: ModelCache | None,
        known_models: Callable[[], list[str] | None],
        sampler: Callable[[], gpu_health.Sample] | None,
        metrics: hw_metrics.Sampler | None,
        now_fn: NowFn,
    ) -> None:
        self._who = who
        self._kept = kept
        self._works = works
        self._wake = wake
        self._cache = model_cache
        self.requests = model_requests.Requests(who, model_cache) if model_cache else None
        """What the worker is asked to load or unload; None without a model cache."""
        self._known_models = known_models
        self._probe = gpu_health.Sampler()
        if sampler is None and who().queue == "gpu":
            sampler = self._probe.sample
        self._sampler = sampler
        self._metrics = metrics
        self._now = now_fn
        self._seen: gpu_health.Sample | None = None
        self._said_blind = False
        self._card = gpu_memory.GpuMemory()
        self.introduced = threading.Event()
        """The fleet has heard how large this worker's card is, as far as that can be told."""
        if sampler is None or config.DISABLE_WORKER_HEARTBEAT.read():
            self.introduced.set()
        self._sizes: dict[str, float] = {}
        """The models' sizes in GB, as the database has heard them."""

    @property
    def samples(self) -> bool:
        """Whether guards may go by samples."""
        return self._sampler is not None

    @property
    def shown(self) -> bool:
        """Whether the GPU's tools have shown a number yet."""
        return self._probe.shown

    @property
    def holds_model(self) -> bool:
        """Whether a model is in memory, or on its way there."""
        cache = self._cache
        return cache is not None and bool(cache.current_model or cache.loading_model)

    def tasks(self) -> list[service.Task]:
        """What the watch does for it."""
        tasks: list[service.Task] = []
        if self.requests is not None and not config.DISABLE_WORKER_CONTROL.read():
            poll_s = config.WORKER_CONTROL_POLL_S.read
            tasks.append(service.Task("models", poll_s, self._look_for_requests))
        if self._metrics is not None:
            tasks.append(service.Task("metrics", math.inf, self._store_samples))
        return tasks

    @contextlib.contextmanager
    def beside(self) -> Generator[None]:
        """While the block runs, do what may take long, in which leases have to be renewed."""
        with contextlib.ExitStack() as stack:
            if self._cache is not None:
                # A host's unloader may take minutes.
                reaping = [service.Task("reap", REAP_S, self._reap)]
                stack.enter_context(service.Loop("worker-reap", reaping))
            if self._sampler is not None:
                sampling = [
                    service.Task("card", self._card.every_s, self._measure),
                    service.Task("sample", SAMPLE_CHECK_S, self._sample),
                ]
                stack.enter_context(service.Loop("worker-samples", sampling))
            yield

    @property
    def is_measured(self) -> bool:
        """Whether the card was asked for its size."""
        return self._card.asked

    def introduce(self, stopped: Callable[[], bool]) -> None:
        """Wait until the fleet has heard of this worker's card, for INTRODUCE_S at most.

        A gpu claim before that takes what the card is too small for.
        """
        for _ in range(round(INTRODUCE_S / INTRODUCED_S)):
            if stopped() or self.introduced.wait(INTRODUCED_S):
                return

    def requests_end(self, deadline: float | None) -> int | None:
        """The code with which a worker leaves that is at a request for too long; None: it stays.

        A request has the time of a gpu job; a load none past the instant at which the worker stops.
        """
        cache = self._cache
        if deadline is not None and cache and cache.loading_model and self._now() >= deadline:
            _log.warning("loading %s did not end in time; leaving", cache.loading_model)
            return 0
        if self.requests and self.requests.takes_s() >= guards.GPU_S:
            _log.error("a request took longer than %g s; leaving", guards.GPU_S)
            return guards.EXIT_BUDGET
        return None

    def columns(self) -> JsonDict:
        """What the worker's row says of it."""
        return {
            "current_model": self._cache.current_model if self._cache else None,
            "known_models": self._known_models() or [],
            "vram_total_mb": self._card.vram_mb,
        }

    def detail(self) -> JsonDict:
        """What the row's `detail` says of it."""
        seen = self._seen._asdict() if self._seen else None
        return {"gpu": seen, **(self.requests.report() if self.requests else {})}

    def publish_sizes(self, conn: db.Connection, known: Sequence[str]) -> None:
        """Tell the fleet how large these models are, when that has changed."""
        sizes = {name: model_registry.get(name).est_vram_gb for name in known}
        if sizes != self._sizes:
            models.publish_sizes(conn, self._who().host, sizes)
            self._sizes = sizes

    def doubt(self, work: current_job.Work) -> None:
        """Say what a guard of this job suspects, and once that the GPU cannot be seen."""
        now = self._now()
        for guard in work.guards:
            if isinstance(guard, guards.GpuHealth) and guard.is_blind(now) and not self._said_blind:
                self._said_blind = True
                _log.warning(
                    "nothing shows what the GPU does (nvidia-smi, rocm-smi): gpu jobs are judged "
                    "by their wall-clock budget"
                )
            if isinstance(guard, guards.Stall) and (reason := guard.suspicion(now)):
                _log.warning("job %s: %s", work.job["id"], reason)
                detail = payload.encode({"reason": reason}, "detail")
                with contextlib.suppress(db.Error), self._kept.using() as conn:
                    table = work.lease.table
                    job_events.note(conn, table, work.job, "stall_suspected", detail=detail)

    def _look_for_requests(self) -> None:
        if self.requests is not None:
            with self._kept.using() as conn:
                self.requests.look(conn)

    def _store_samples(self) -> None:
        for each in self._metrics.take() if self._metrics else ():
            with self._kept.using() as conn:
                samples.put(conn, self._who().host, each.every_s, each.text, notify=each.tell)

    def _measure(self) -> None:
        """See how large the card is, which decides what is claimed."""
        if self._card.measure():
            self._wake("beat")

    def _sample(self) -> None:
        """Look at the GPU and the memory for the guards that want to know."""
        now = self._now()
        every = [guard for work in self._works() for guard in work.guards]
        wanting = [guard for guard in every if guard.wants_sample(now)]
        if wanting and self._sampler is not None:
            self._seen = found = self._sampler()
            for guard in wanting:
                guard.sample(now, found)

    def _reap(self) -> None:
        """Unload a model that has idled too long, unless the worker is paused with it."""
        cache, who = self._cache, self._who()
        if cache is None or cache.current_model is None or config.DISABLE_GPU_IDLE_REAPER.read():
            return
        if who.obey and cache.is_idle_too_long():
            with self._kept.using() as conn:
                if controls.off_policy(conn, who.host, who.queue) == "pause":
                    return
        cache.reap_idle_once()
