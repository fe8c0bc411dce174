"""The watch: what renews, reports, obeys and judges for as long as the worker lives."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
from collections.abc import Callable, Generator, Sequence

from queue_workflows import config, db, hw_metrics, model_registry, worker_control
from queue_workflows.model_cache import ModelCache
from queue_workflows.runtime import clock, service
from queue_workflows.store import (
    claims,
    events,
    fleet,
    payload,
    samples,
    tables,
    transitions,
    workers,
)
from queue_workflows.telemetry import gpu_health
from queue_workflows.types import ExitFn, NowFn, Row
from queue_workflows.worker import (
    board,
    capture,
    card,
    current,
    fuses,
    guards,
    held,
    leaving,
    requests,
)

_log = logging.getLogger(__name__)
RENEW_MAX_S = 10.0
JUDGE_S = 0.5
DOUBTS_S = 0.5
BATCH_S = 0.5
PROGRESS_S = 1.0
"""How often progress is stored at most."""
REAP_S = 5.0
SAMPLE_CHECK_S = 1.0
INTRODUCE_S, INTRODUCED_S = 5.0, 0.1
"""How long the first claim waits for the card and a beat (`card.TIMEOUT_S`, and some more), and how
often it looks whether the worker stops."""


class Watch:
    """Renews the lease of the job that runs, beats, obeys OFF, and carries out what guards decide.

    Holds one connection of its own. `on_exit` leaves the process (a seam for tests, which turns the
    kernel timers off). `sampler` tells what the GPU and the memory do; by default on the gpu queue.
    `metrics`: whose samples of the box it stores.
    """

    def __init__(
        self,
        who: Callable[[], claims.Claimant],
        *,
        model_cache: ModelCache | None = None,
        known_models: Callable[[], list[str] | None] = lambda: None,
        on_exit: ExitFn = os._exit,
        now_fn: NowFn = clock.boot_s,
        sampler: Callable[[], gpu_health.Sample] | None = None,
        metrics: hw_metrics.Sampler | None = None,
    ) -> None:
        self._who = who
        self._cache = model_cache
        self._requests = requests.Requests(who, model_cache) if model_cache else None
        self._known_models = known_models
        self._now = now_fn
        self._fuses = fuses.Fuses(enabled=on_exit is os._exit, now_fn=now_fn)
        self._probe = gpu_health.Sampler()
        if sampler is None and who().queue == "gpu":
            sampler = self._probe.sample
        self._sampler = sampler
        self._metrics = metrics
        self._board = board.attach()
        self._seen: gpu_health.Sample | None = None
        self._said_blind = False
        self._card = card.Card()
        self._sizes: dict[str, float] = {}
        """The models' sizes in GB, as the database has heard them."""
        self._lock = threading.Lock()
        self._work: current.Work | None = None
        self._held = held.Held(now_fn=now_fn)
        self._batches = False
        self._told = 0.0
        """When it last heard of a cancel or a switch."""
        self._kept = db.Kept()
        self._logs = capture.Source(self._printing)
        self._leaving = leaving.Leaving(
            who, self._held_of, kept=self._kept, fuses_=self._fuses, on_exit=on_exit, now_fn=now_fn
        )
        self.stop_deadline: float | None = None
        """Instant (`clock.boot_s`) at which a stopping worker gives its job back."""
        self.locked = False
        """Whether a session of this worker holds its lock of life."""
        self._introduced = threading.Event()
        if sampler is None or config.DISABLE_WORKER_HEARTBEAT.read():
            self._introduced.set()
        lease_s = who().lease_s
        tasks = [
            service.Task("renew", lambda: min(RENEW_MAX_S, lease_s / 3), self._renew),
            service.Task("doubts", DOUBTS_S, self._note_doubts),
        ]
        if not config.DISABLE_WORKER_HEARTBEAT.read():
            tasks.append(service.Task("beat", config.HEARTBEAT_INTERVAL_S.read, self._beat))
        if not config.DISABLE_WORKER_CONTROL.read():
            control_s = config.WORKER_CONTROL_POLL_S.read
            tasks.append(service.Task("control", control_s, self._obey))
            if self._requests is not None:
                tasks.append(service.Task("models", control_s, self._look_for_requests))
        if metrics is not None:
            tasks.append(service.Task("metrics", math.inf, self._store_samples))
        self._tasks = tasks
        self._loop: service.Loop | None = None

    @property
    def model_requests(self) -> requests.Requests | None:
        """What the worker is asked to load or unload; None without a model cache."""
        return self._requests

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """Watch in a thread of its own while the block runs; joins a watch that runs already."""
        if self._loop is not None:
            yield
            return
        self._loop = service.Loop("worker-watch", self._tasks, now_fn=self._now)
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self._logs.listening())
                stack.enter_context(self._loop)
                # Apart: it asks no database, which may keep the others waiting.
                judging = [service.Task("judge", JUDGE_S, self._judge)]
                stack.enter_context(service.Loop("worker-judge", judging, now_fn=self._now))
                if self._cache is not None:
                    # Apart: a host's unloader may take minutes, in which leases have to be renewed.
                    reaping = [service.Task("reap", REAP_S, self._reap)]
                    stack.enter_context(service.Loop("worker-reap", reaping))
                if self._sampler is not None:
                    # Apart: a probe may take seconds, in which leases have to be renewed.
                    samples = [
                        service.Task("card", self._card.every_s, self._measure),
                        service.Task("sample", SAMPLE_CHECK_S, self._sample),
                    ]
                    stack.enter_context(service.Loop("worker-samples", samples))
                yield
        finally:
            self._loop = None
            self._fuses.release()
            self._board.clear()
            self._close()

    def wake(self, *tasks: str) -> None:
        """Make tasks (`renew`, `beat`, `control` ...) due at once, if not disabled."""
        self._told = self._now()
        loop, known = self._loop, {task.name for task in self._tasks}
        if loop is not None and (due := known.intersection(tasks)):
            loop.wake(*due)

    def introduce(self, stopped: Callable[[], bool]) -> None:
        """Wait until the fleet has heard of this worker's card, for INTRODUCE_S at most.

        A gpu claim before that takes what the card is too small for.
        """
        for _ in range(round(INTRODUCE_S / INTRODUCED_S)):
            if stopped() or self._introduced.wait(INTRODUCED_S):
                return

    def batches(self) -> held.Held:
        """For a worker of batches, before it is watched: what the watch has a hand in."""
        self._batches = True
        self._board.batches()
        self._tasks.append(service.Task("batch", BATCH_S, self._mind_batch))
        return self._held

    def hold(self, jobs: Sequence[Row], lease_end: guards.LeaseEnd, sent_at: float) -> None:
        """A batch was claimed by a statement that was sent then.

        From now on its leases are renewed; a job that was cancelled, and all whose turn has not
        come when the worker stops, is turned off, or is busy with one for LONG_S, are handed back;
        results are recorded after FLUSH_AFTER_S.
        """
        self._held.add(jobs, lease_end)
        if self._told >= sent_at:
            # Who was told may have looked before there was anything to see.
            self.wake("renew", "control")

    def record(self) -> None:
        """Record the results that wait, while the thread that calls goes on."""
        self._held.hurry()
        if (loop := self._loop) is not None:
            loop.wake("batch")

    @contextlib.contextmanager
    def recording(self, work: current.Work) -> Generator[None]:
        """An outcome is written apart from its batch: judged meanwhile as if its job ran."""
        with self._lock:
            self._work = work
        try:
            yield
        finally:
            self.end()

    def begin(self, work: current.Work) -> None:
        """A job runs from now on."""
        self._logs.begin()
        with self._lock:
            self._work = work
            self._fuses.begin(work.lease_end.ends, work.budget_ends)
            if self._batches:
                self._board.begin(seq=work.job["seq"])
            elif self._sampler is None:
                self._board.begin()
            else:
                work.heard = self._board.heard
                self._board.begin(self._account())

    def settle(self, work: current.Work) -> None:
        """The body has ended, and its outcome is about to be written."""
        work.settling = True
        self._logs.end()

    def _printing(self) -> tables.Lease | None:
        """The claim of the body that runs now."""
        work = self._work
        return None if work is None or work.settling else work.lease

    def end(self) -> None:
        """The job has ended; nothing is judged any more."""
        with self._lock:
            self._board.end()
            self._work = None

    def _close(self) -> None:
        """Say that the worker ends in good order, and close the connection."""
        try:
            self._held.give_up("shutdown")
            if self._held.ids():
                held.write_back(self._kept.get(), self._held)
            if (conn := self._kept.current) is not None:
                workers.leave(conn, self._who().worker_id)
        except db.Error as error:
            _log.debug("could not say goodbye: %s", error)
        self._kept.close()

    def cancelled(self, name: str) -> None:
        """A run or job of this name was cancelled: look at once if it is ours."""
        self._told = self._now()
        work = self._work
        if self._held.cancel(name):
            self.wake("batch")
        elif name in self._held.ids() or (
            work is not None and name in (work.job["id"][:1000], str(work.job.get("run_id"))[:1000])
        ):
            self.wake("renew")

    def _renew(self) -> None:
        said = dict[tables.Lease, str | None]()
        with self._held.writing():
            work, ends, sent = self._work, self._held.claims(), self._now()
            if work is not None:
                ends.setdefault(work.lease, work.lease_end)
                said[work.lease], work.unsaved = work.unsaved, None
            if not ends:
                return
            try:
                with self._kept.using() as conn:
                    found = held.renew(conn, ends, said, lease_s=self._who().lease_s, sent=sent)
            except db.Error:
                if work is not None:
                    work.unsaved = work.unsaved or said[work.lease]
                raise
        stop_at = sent + config.CANCEL_GRACE_S.read()
        self._held.renewed(found, stop_at)
        if work is not None and work.lease not in found.lost:
            work.renewed = sent
            if work.lease in found.asked:
                work.cancelled_by(stop_at)
        elif work is not None and not work.settling and self._is_running(work):
            trip = guards.Trip(guards.EXIT_LOST, "reassigned", "the claim is held no longer")
            self._leaving.trip(work, trip)
        self._keep_fuses()
        self._mind_batch()

    def _mind_batch(self) -> None:
        """Record results and hand back jobs, where either is due."""
        if self.stop_deadline is not None:
            self._held.give_up("shutdown")
        if self._held.is_due():
            with self._kept.using() as conn:
                held.write_back(conn, self._held)

    def _keep_fuses(self) -> None:
        with self._lock:
            work = self._work
            ends = (None, None) if work is None else (work.lease_end.ends, work.budget_ends)
            self._fuses.keep(*ends)

    def _account(self) -> Row:
        """What the parent needs to know to judge in our stead."""
        return board.account(self._who(), self._work, shown=self._probe.shown)

    def _judge(self) -> None:
        self._keep_fuses()
        with self._lock:
            self._board.beat(self._now(), self._account())
        work = self._work
        if work is None:
            self._bound_request()
            return
        trip = work.verdict()
        if trip is not None:
            self._logs.hurry()
            self._leaving.trip(work, trip)
        elif work.stop_at is not None and self._now() >= work.stop_at and not work.settling:
            self._leaving.stop_cancelled(work)
        elif self.stop_deadline is not None and self._now() >= self.stop_deadline:
            self._leaving.give_back(work)

    def _bound_request(self) -> None:
        """A load that was asked for has the time of a gpu job, and none once the worker stops."""
        deadline, cache = self.stop_deadline, self._cache
        if deadline is not None and cache and cache.loading_model and self._now() >= deadline:
            _log.warning("loading %s did not end in time; leaving", cache.loading_model)
            self._leaving.obeyed(0)
        elif self._requests and self._requests.takes_s() >= guards.GPU_S:
            _log.error("a request took longer than %g s; leaving", guards.GPU_S)
            self._leaving.obeyed(guards.EXIT_BUDGET)

    def _look_for_requests(self) -> None:
        if self._requests is not None:
            with self._kept.using() as conn:
                self._requests.look(conn)

    def _store_samples(self) -> None:
        for each in self._metrics.take() if self._metrics else ():
            with self._kept.using() as conn:
                samples.put(conn, self._who().host, each.every_s, each.text, tell=each.tell)

    def _beat(self) -> None:
        who, work = self._who(), self._work
        known, measured = self._known_models(), self._card.asked
        values = {
            "worker_id": who.worker_id,
            "host_label": who.host,
            "queue": who.queue,
            "pid": os.getpid(),
            "state": "busy" if work else "idle",
            "job_ids": [work.job["id"]] if work else [],
            "detail": payload.encode(
                {
                    "lease_s": who.lease_s,
                    "lock": self.locked,
                    "gpu": self._seen._asdict() if self._seen else None,
                    "claim": fleet.claim_detail(who),
                    **(self._requests.report() if self._requests else {}),
                },
                "detail",
            ),
            "obey": who.obey,
            "concurrency": 1,
            "current_model": self._cache.current_model if self._cache else None,
            "known_models": known or [],
            "vram_total_mb": self._card.vram_mb,
        }
        with self._kept.using() as conn:
            workers.report(conn, values)
            sizes = {name: model_registry.get(name).est_vram_gb for name in known or ()}
            if sizes != self._sizes:
                fleet.publish_sizes(conn, who.host, sizes)
                self._sizes = sizes
        if measured:
            self._introduced.set()

    def _measure(self) -> None:
        """See how large the card is, which decides what is claimed."""
        if self._card.measure():
            self.wake("beat")

    def _obey(self) -> None:
        """Read the ON/OFF row while a job runs or a model is warm.

        Without either there is nothing to stop: the claims refuse by themselves.
        """
        work, batch = self._work, bool(self._held.ids())
        if work is not None or batch:
            self._renew()  # which also sees a cancel that no notification told of
        elif self._cache is None or not (self._cache.current_model or self._cache.loading_model):
            return
        policy = self._policy()
        if policy is None:
            return
        if batch:
            # Nothing of it begins from now on, and nothing new is claimed.
            self._held.give_up("turned off")
            work = self._work
        if (work is not None or not batch) and self._is_running(work):
            handler = worker_control.handler(policy)
            if handler is worker_control.HARD:
                self._fuses.leave(guards.EXIT_CONTROL)
            handler(self, on_exit=self._leaving.obeyed)
        self._mind_batch()

    def _sample(self) -> None:
        """Look at the GPU and the memory for the guards that want to know."""
        work = self._work
        if work is None or self._sampler is None:
            return
        now = self._now()
        wanting = [guard for guard in work.guards if guard.wants_sample(now)]
        if wanting:
            self._seen = found = self._sampler()
            for guard in wanting:
                guard.sample(now, found)

    def _note_doubts(self) -> None:
        """Store progress, say what a guard suspects, and once that the GPU cannot be seen."""
        work, now = self._work, self._now()
        if work is None:
            return
        if work.unsaved is not None and now - work.renewed >= PROGRESS_S:
            self._renew()
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

    def _policy(self) -> str | None:
        who = self._who()
        with self._kept.using() as conn:
            return worker_control.stop_policy_for(conn, who.host, who.queue)

    def _reap(self) -> None:
        """Unload a model that has idled too long, unless the worker is paused with it."""
        cache, who = self._cache, self._who()
        if cache is None or cache.current_model is None:
            return
        if who.obey and cache.is_idle_too_long() and self._policy() == "pause":
            return
        cache.reap_idle_once()

    def _is_running(self, work: current.Work | None) -> bool:
        with self._lock:
            return self._work is work

    def _held_of(self, work: current.Work) -> held.Held | None:
        """What else is held while this job runs; None once it does not."""
        with self._lock:
            return self._held if self._work is work else None

    # What a stop policy may ask of the worker.

    def requeue_in_flight(self, reason: str) -> None:
        """Give what runs back, at the front, and what waits; record what is done; count nothing."""
        self._held.give_up(reason)
        work = self._work
        with self._kept.using() as conn:
            if work is not None:
                transitions.hand_back(conn, work.lease, reason=reason, front=True)
            held.write_back(conn, self._held)

    def clear_model(self) -> None:
        """Let the fleet know that this host's model is gone and the host with it."""
        who = self._who()
        with self._kept.using() as conn:
            workers.clear_model(conn, who.host, who.queue, mark_stale=True)
