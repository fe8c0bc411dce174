"""What a worker has besides its jobs: a warm model, a card, and the samples of both."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Generator, Sequence

from queue_workflows import config, db, hw_metrics, model_registry, worker_control
from queue_workflows.model_cache import ModelCache
from queue_workflows.runtime import command, service
from queue_workflows.store import claims, events, fleet, payload, samples
from queue_workflows.telemetry import gpu_health
from queue_workflows.types import JsonDict, NowFn
from queue_workflows.worker import card, current, guards, requests

_log = logging.getLogger(__name__)
REAP_S = 5.0
SAMPLE_CHECK_S = 1.0
CARD_S = 3600.0


class Gear:
    """The part of a watch that minds models and the GPU; over the watch's connection `kept`.

    `works` gives the jobs that run, `wake` makes tasks of the watch due. `sampler` tells what the
    GPU and the memory do; by default on the gpu queue. `metrics`: whose samples of the box it
    stores.
    """

    def __init__(
        self,
        who: Callable[[], claims.Claimant],
        *,
        kept: db.Kept,
        works: Callable[[], Sequence[current.Work]],
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
        self.requests = requests.Requests(who, model_cache) if model_cache else None
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
        self._vram_mb: int | None = None
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
        if self._cache is not None:
            tasks.append(service.Task("reap", REAP_S, self._reap))
        if self._metrics is not None:
            tasks.append(service.Task("metrics", math.inf, self._store_samples))
        return tasks

    @contextlib.contextmanager
    def sampling(self) -> Generator[None]:
        """Sample while the block runs, where guards may ask for it."""
        if self._sampler is None:
            yield
            return
        # Apart: a probe may take seconds, in which leases have to be renewed.
        tool = command.Tool("nvidia-smi")
        tasks = [
            service.Task("sample", SAMPLE_CHECK_S, self._sample),
            service.Task("card", CARD_S, lambda: self._measure(tool)),
        ]
        with service.Loop("worker-samples", tasks):
            yield

    def loads_too_long(self, deadline: float) -> bool:
        """Whether a load that was asked for goes on past the instant at which the worker ends."""
        cache = self._cache
        if cache is None or not cache.loading_model or self._now() < deadline:
            return False
        _log.warning("loading %s did not end in time; leaving", cache.loading_model)
        return True

    def columns(self) -> JsonDict:
        """What the worker's row says of it."""
        return {
            "current_model": self._cache.current_model if self._cache else None,
            "known_models": self._known_models() or [],
            "vram_total_mb": self._vram_mb,
        }

    def detail(self) -> JsonDict:
        """What the row's `detail` says of it."""
        seen = self._seen._asdict() if self._seen else None
        return {"gpu": seen, **(self.requests.report() if self.requests else {})}

    def publish_sizes(self, conn: db.Connection, known: Sequence[str]) -> None:
        """Tell the fleet how large these models are, when that has changed."""
        sizes = {name: model_registry.get(name).est_vram_gb for name in known}
        if sizes != self._sizes:
            fleet.publish_sizes(conn, self._who().host, sizes)
            self._sizes = sizes

    def doubt(self, work: current.Work) -> None:
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
                    events.note(conn, table, work.job, "stall_suspected", detail=detail)

    def _look_for_requests(self) -> None:
        if self.requests is not None:
            with self._kept.using() as conn:
                self.requests.look(conn)

    def _store_samples(self) -> None:
        for each in self._metrics.take() if self._metrics else ():
            with self._kept.using() as conn:
                samples.put(conn, self._who().host, each.every_s, each.text, tell=each.tell)

    def _measure(self, tool: command.Tool) -> None:
        """See how large the card is, which decides what is claimed."""
        found = card.vram_total_mb(tool)
        if found != self._vram_mb:
            self._vram_mb = found
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
        if cache is None or cache.current_model is None:
            return
        if who.obey and cache.is_idle_too_long():
            with self._kept.using() as conn:
                if worker_control.stop_policy_for(conn, who.host, who.queue) == "pause":
                    return
        cache.reap_idle_once()
