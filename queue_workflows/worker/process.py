"""Run a worker process, which is one loop over two connections, a launcher and its executors.

Its length: it connects the parts, and runs the app's stop policies, which call nearly all of them.
An inline worker needs few of these imports, so `claim_worker` imports this module late.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import math
import os
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from queue_workflows import config, errors, gpu_model_cache, hw_metrics, model_cache, workers
from queue_workflows.claim import claims, recovery
from queue_workflows.db import link, statements
from queue_workflows.run import executors, job_output, launcher, loaded_app, stop_policy
from queue_workflows.runtime import (
    app_loading,
    clock,
    exit_codes,
    identity,
    io_loop,
    service,
    signals,
)
from queue_workflows.types import ExitFn, JsonDict
from queue_workflows.worker import (
    desk,
    gpu_models,
    job_logs,
    leases,
    memory_watch,
    queue_state,
    shapes,
)
from queue_workflows.worker import inline as inline_jobs

_log = logging.getLogger("queue_workflows.claim_worker")
Launched: TypeAlias = "tuple[launcher.Launcher, loaded_app.Registered]"
LEAVE_S: Final = 4.0
"""Seconds that a worker without any work left has to store its logs."""


class Inline(NamedTuple):
    """How the calling thread runs the handlers, instead of executors."""

    on_exit: ExitFn
    once: bool = False
    """Whether it runs at most one job and then exits."""
    stops_by_signal: bool = False
    """Whether SIGTERM and SIGINT stop it, also while the calling thread runs C code (Linux)."""


class _Policy(NamedTuple):
    """A running stop policy that the app supplied."""

    name: str
    end: socket.socket
    """The socket over which it calls the worker."""
    until: float


class Worker:
    """A worker of some queues, each with its shape.

    `launched` has the launcher whose executors run the handlers, and the app's registrations. With
    `inline` instead, the thread that calls `run_inline` runs them. For the other arguments see
    `claim_worker.ClaimWorker`.
    """

    def __init__(
        self,
        launched: Launched | None,
        served: Mapping[str, shapes.Shape],
        *,
        host: str,
        newest: bool,
        lease_s: float,
        shutdown_timeout_s: float | None,
        limits: shapes.Limits = shapes.NO_LIMITS,
        ends_with_job: bool = False,
        inline: Inline | None = None,
    ) -> None:
        """Connect the parts. Its length: each argument and each part takes a line."""
        self._launcher, registered = launched or (None, None)
        self._own_policies = registered.stop_policies if registered else []
        self._limits, self._inline = limits, inline
        self._inline_runner: inline_jobs.InlineExecutors | None = None
        self._ends_by_itself = bool(inline or limits.burst) or limits.idle_exit_s is not None
        default_s = config.SHUTDOWN_TIMEOUT_S.read()
        self._shutdown_s = default_s if shutdown_timeout_s is None else shutdown_timeout_s
        self._loop = loop = io_loop.IoLoop()
        claiming, renewing = io_loop.Flow(loop), io_loop.Flow(loop)
        self._printer = job_output.Printer(loop, self.post)
        self._bell, self._rope = socket.socketpair()
        for each in (self._bell, self._rope):
            each.setblocking(False)
        logs = job_logs.JobLogs(loop.wake_at)
        self._models: gpu_models.GpuModels | None = None
        for shape in [each for each in served.values() if each.gpu]:
            self._models = gpu_models.GpuModels(card=shape.card, wake=self._wake)
        self._desk = desk.Desk(
            claiming.ring,
            loop.wake_at,
            logs,
            self._models,
            ends_with_job=ends_with_job or inline is not None,
            is_known=False,
        )
        obey = not config.DISABLE_WORKER_CONTROL.read()
        for queue, shape in served.items():
            who = claims.Claimant(
                identity.new_worker_id(host, executors=inline is None), host, queue, lease_s,
                newest=newest, obey=obey,
                versions=config.node_version_keys() if queue in config.DAG_QUEUES else None,
            )  # fmt: skip
            self._desk.queues.append(self._queue_of(who, shape, registered))
        queues, holder = self._desk.queues, self._launcher or self._inline_runner
        self._leases = leases.Leases(
            self._desk,
            logs,
            hold=holder.hold if holder else lambda _: True,
            ring=renewing.ring,
            report=self._report,
            wake_at=loop.wake_at,
            models=self._models,
            is_own_policy=self._is_own_policy,
            run_policy=self._run_policy,
        )
        channels = sorted({own.table.ready_channel for own in queues})
        self._claims = link.Link(loop, self._desk, flow=claiming, channels=channels)
        self._renewals = link.Link(
            loop,
            self._leases,
            flow=renewing,
            channels=["worker_control", "job_cancel"],
            locks=[recovery.LIFE_LOCK + own.who.worker_id for own in queues],
        )
        self._memory = memory_watch.MemoryWatch(
            self._desk, post=self.post, later=self._leases.later, changed=self._leases.beat_now
        )
        sampled = not (config.DISABLE_HW_METRICS.read() or (inline and inline.once))
        self._metrics = hw_metrics.Sampler(host, ready=self._wake) if sampled else None
        self._posted: deque[Callable[[], object]] = deque()
        self._policies: dict[queue_state.Queue, _Policy] = {}
        """The app's stop policies that run now, by the queue that is OFF."""
        self._thread = 0
        """Id of the loop's thread."""
        self._lost: launcher.LauncherLost | None = None
        self._leave_by = math.inf

    def _queue_of(
        self, who: claims.Claimant, shape: shapes.Shape, registered: loaded_app.Registered | None
    ) -> queue_state.Queue:
        parts = self._loop, self._launcher, self._printer, self._desk
        if registered is None:
            assert self._inline is not None
            runner = inline_jobs.InlineExecutors(*parts, on_exit=self._inline.on_exit)
            self._inline_runner = runner
            announces = config.get_config().on_node_completed is not None
            own = queue_state.Queue(who, shape, runner, announces=announces)
            own.left = 1 if self._inline.once else math.inf
            return own
        in_run = who.queue in config.DAG_QUEUES
        runner = executors.Executors(
            *parts,
            slots=shape.slots,
            shared=shape.concurrent or shape.mixed,
            lone=shape.gpu,
            end_s=self._shutdown_s,
            max_jobs=self._limits.max_jobs,
            max_rss_mb=self._limits.max_rss_mb,
        )
        return queue_state.Queue(
            who,
            shape,
            runner,
            isolated=registered.isolated_nodes if in_run else registered.isolated_tasks,
            async_tasks=registered.async_tasks if shape.mixed else (),
            announces=registered.announces,
        )

    @property
    def worker_ids(self) -> dict[str, str]:
        """Return the worker id of each queue."""
        return {own.who.queue: own.who.worker_id for own in self._desk.queues}

    @property
    def exit_code(self) -> int:
        """Return the exit code if the worker ended because it stopped a job, else 0."""
        return self._desk.exit_code

    # --- Any thread, and signal handlers.

    def stop(self) -> None:
        """Claim no further job; running jobs have the shutdown timeout to end."""
        self.post(lambda: self._desk.stop(self._shutdown_s))

    def stop_now(self) -> None:
        """Hand the running jobs back at once and exit."""
        self.post(lambda: self._desk.stop(0.0))

    def requeue(self, reason: str) -> None:
        """Return the running jobs to the front of their queues, uncounted, as OFF does.

        It waits until that is recorded, at most WITHIN_S. A handler that runs in this process
        cannot be stopped, so the worker exits after this time.
        """
        done = threading.Event()
        self.post(lambda: self._desk.requeue(reason, done.set))
        if threading.get_ident() != self._thread:
            done.wait(stop_policy.WITHIN_S)

    def beat(self) -> None:
        """Send a heartbeat soon."""
        self.post(self._leases.beat_now)

    def post(self, call: Callable[[], object]) -> None:
        """Let the loop call this soon."""
        self._posted.append(call)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # a full socket wakes the loop too, or it has ended
            self._rope.send(b"!")

    # --- The loop.

    def run_forever(self) -> None:
        """Run jobs until `stop`; keep on trying while the database is away.

        Raises `LauncherLost` if the launcher has ended, after all jobs were handed back.
        """
        self._thread = threading.get_ident()
        self._loop.read(self._bell.fileno(), self._rang)
        if self._launcher is not None:
            self._loop.read(self._launcher.fileno(), self._from_launcher)
        if self._models is not None:
            self._models.serve(self._desk.queues[0], self._leases.later, self._leases.beat_now)
        try:
            watches = self._memory, self._metrics or contextlib.nullcontext()
            with self._woken_by_signals(), self._printer.takes_log(), watches[0], watches[1]:
                self._loop.wake_at(0.0)
                self._loop.run(self._tick, self._is_over if self._ends_by_itself else None)
        finally:
            self.close()
        if self._lost is not None and not self.exit_code:
            raise self._lost

    @contextlib.contextmanager
    def _woken_by_signals(self) -> Generator[None]:
        """Let a signal wake the loop, even one that arrives just before the loop waits.

        Python runs the signal's handler only after that wait, which may be long.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.set_wakeup_fd(self._rope.fileno(), warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)  # an event loop of the app uses it
        try:
            yield
        finally:
            if before == -1:
                signal.set_wakeup_fd(-1)

    def run_inline(self, models: model_cache.ModelCache | None) -> bool:
        """Run jobs in this thread until `stop`, or one job if `once`; return whether any ran.

        A handler in C code delays signal handlers of the main thread. So with `stops_by_signal` the
        loop reads signals itself.
        """
        assert self._inline is not None
        assert self._inline_runner is not None
        inline, runner, failed = self._inline, self._inline_runner, list[BaseException]()

        def run(_: object) -> None:
            try:
                self.run_forever()
            except BaseException as error:  # noqa: BLE001  raised in the waiting thread
                failed.append(error)
            if self.exit_code or runner.cut_at is not None:
                inline.on_exit(self.exit_code)

        in_main_thread = threading.current_thread() is threading.main_thread()
        hears = inline.stops_by_signal and in_main_thread and sys.platform == "linux"
        with signals.Wakeups() if hears else contextlib.nullcontext() as wakeups:
            if wakeups is not None:
                self._loop.read(wakeups.fileno(), functools.partial(self._signalled, wakeups))
            with service.Thread("worker-loop", run):
                runner.serve(models, wakeups.take if wakeups is not None else lambda: None)
        if failed:
            raise failed[0]
        return self._desk.queues[0].left == 0

    def _signalled(self, wakeups: signals.Wakeups) -> None:
        if count := wakeups.received():
            self._desk.stop(self._shutdown_s if count == 1 else 0.0)
            self._loop.wake_at(0.0)

    def _rang(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(4096)
        while self._posted:
            self._posted.popleft()()
        self._loop.wake_at(0.0)

    def _tick(self, now: float) -> float:
        own, models = self._desk, self._models
        due = [self._claims.tick(now), self._renewals.tick(now)]
        due += [own.tick(now, stopped=models is not None and models.probe.is_stopped)]
        due += [self._leases.tick(now), *(each.runner.tick(now) for each in own.queues)]
        if models is not None:
            due.append(models.tick(now))
        for each, policy in [*self._policies.items()]:
            if now >= policy.until:
                self._end_policy(each, f"takes more than {stop_policy.WITHIN_S:.0f} s")
            else:
                due.append(policy.until)
        # While other calls wait, as in an outage, keep samples in `_metrics`, which drops old ones.
        takes = self._metrics is not None and not self._leases.is_behind
        for sample in self._metrics.take() if self._metrics is not None and takes else ():
            put = statements.samples.put.script(
                host=own.queues[0].who.host,
                every_s=sample.every_s,
                sample=sample.text,
                notify=sample.tell,
            )
            self._leases.later(put, "a sample of the machine is not stored")
        if own.stopping:
            self._loop.over = self._is_over
        due.append(self._leave_by if now < self._leave_by else math.inf)
        return min(*due, own.exit_by)

    # --- Its end.

    def _is_over(self) -> bool:
        """Return whether the loop ends.

        While a worker stops, or may end by itself, the loop calls this after each wait.
        """
        own = self._desk
        if not own.stopping:
            if self._ends_by_itself:
                self._end_by_itself(clock.boot_s())
            return False
        now = clock.boot_s()
        if now >= own.exit_by or (self._lost is not None and not own.busy):
            return True
        if own.busy:
            return False
        if self._leave_by == math.inf:  # store the rest, end the executors, then the loop
            self._leave_by = now + LEAVE_S
            if self._cut_at is not None:
                own.exit_by = min(own.exit_by, now + desk.LOST_WITHIN_S)
            self._loop.wake_at(now)
            self._leases.leave()
            for each in own.queues:
                each.runner.closing = True
                for place in each.runner:
                    each.runner.let_go(place)
        is_gone = not any(True for each in own.queues for _ in each.runner)
        return is_gone and (self._leases.left or now >= self._leave_by)

    def _end_by_itself(self, now: float) -> None:
        """Stop a worker that has to exit once no job is left, or after it was idle."""
        own, limits = self._desk, self._limits
        if self._cut_at is not None:
            if now >= self._cut_at + stop_policy.WITHIN_S:
                own.leave(exit_codes.LOST)
            return
        looks = own.throttled or any(each.looks or each.claiming for each in own.queues)
        looked = self._claims.is_open and not looks
        if looked or not self._claims.is_open:  # without a connection, jobs may wait unseen
            own.worked_at = min(own.worked_at, now) if looked else math.inf
        ends = looked and (limits.burst or (self._inline is not None and self._inline.once))
        is_idle = limits.idle_exit_s is not None and now >= own.worked_at + limits.idle_exit_s
        if (ends or is_idle) and not own.busy:
            own.stop(self._shutdown_s)

    @property
    def _cut_at(self) -> float | None:
        """Return when a job was given up whose handler still runs in that thread, or None."""
        return None if self._inline_runner is None else self._inline_runner.cut_at

    # --- Stop policies of the app.

    def _is_own_policy(self, policy: str) -> bool:
        """Return whether the app runs this stop policy."""
        return policy in self._own_policies or policy in workers.app_stop_policies()

    def _begin_policy(
        self, policy: str, about: JsonDict, on_exit: ExitFn | None = None
    ) -> socket.socket:
        """Run a stop policy in a launcher's child, or else a thread; return the socket to it.

        In a thread, the policy calls `on_exit` instead of asking the worker to exit.
        """
        if self._launcher is not None:
            return self._launcher.run_policy(policy, about)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)

        def run(_: object) -> None:
            with theirs:
                stop_policy.call(theirs, about, workers.stop_policy(policy), on_exit)

        service.Thread("stop-policy", run).start()
        return ours

    def _run_policy(self, own: queue_state.Queue, policy: str | None) -> None:
        """Start a stop policy of the app, if given; stop by `hard` if it cannot start.

        One that still runs is ended, since it must not stop jobs by a switch that is over.
        """
        if own in self._policies:
            self._end_policy(own, "")
        if policy is None:
            return
        who = own.who
        about = {"host": who.host, "queue": who.queue, "lease_s": who.lease_s,
                 "host_priority": -1 if who.newest else 0}  # fmt: skip
        until = clock.boot_s() + stop_policy.WITHIN_S
        try:
            end = self._begin_policy(policy, about)
        except OSError as error:  # no descriptor is left
            _log.error("stop policy %s cannot begin: %s; stopping hard", policy, error)
            self._desk.switch(own, policy, hard=True)
            return
        self._policies[own] = _Policy(policy, end, until)
        self._loop.read(end.fileno(), lambda: self._from_policy(own))
        self._loop.wake_at(until)

    def _from_policy(self, own: queue_state.Queue) -> None:
        """Obey a request of a stop policy, and answer once it is done."""
        end, data = self._policies[own].end, b""
        try:
            data = end.recv(launcher.PACKET)
        except BlockingIOError:
            return
        except OSError:
            pass
        failed = {"call": "failed", "error": "its process has ended"}
        packet: JsonDict = json.loads(data) if data else failed

        def answer(*_: object) -> None:
            with contextlib.suppress(OSError):
                end.send(b"{}")

        call = packet["call"]
        if call == "requeue":
            self._desk.requeue(packet["reason"], answer, own)
        elif call == "clear_model":
            clear = statements.workers.clear_model.script
            script = clear(host=own.who.host, queue=own.who.queue, mark_stale=True)
            self._leases.later(script, "the model stays in the worker's row", answer)
        elif call in ("beat", "exit"):
            if call == "beat":
                self._leases.beat_now()
            else:
                self._desk.leave(packet["code"])
            answer()
        else:
            self._end_policy(own, f"has failed: {packet['error']}" if call == "failed" else "")

    def _end_policy(self, own: queue_state.Queue, failed: str) -> None:
        """Note that a stop policy has ended; stop hard if it has failed."""
        if (policy := self._policies.pop(own, None)) is None:
            return
        self._loop.forget(policy.end.fileno())
        policy.end.close()
        if not failed:
            return
        _log.error("stop policy %s %s; stopping hard", policy.name, failed)
        if own.off is not None:
            self._desk.switch(own, own.off, hard=True)
            if self._cut_at is not None:
                self._desk.leave(exit_codes.CONTROL)

    # --- The launcher.

    def _from_launcher(self) -> None:
        assert self._launcher is not None
        try:
            packets = self._launcher.receive()
        except launcher.LauncherLost as error:
            # The executors died with the launcher. If a signal killed it, their jobs count a crash.
            _log.error("%s", error)
            self._lost = error
            self._loop.forget(self._launcher.fileno())
            self._desk.stop(0.0)  # first, so that an outcome that is still read starts no job
            for own in self._desk.queues:
                own.runner.lose(error)
            return
        for packet in packets:
            for own in self._desk.queues:
                if "died" in packet:
                    own.runner.died(packet)
                elif (pid := own.runner.forked(packet)) and self._models is not None:
                    self._models.probe.follow(pid)
        self._loop.wake_at(0.0)

    def _report(self) -> JsonDict:
        """Return the detail of the worker's rows, except for its jobs."""
        columns: JsonDict = {"current_model": None, "known_models": [], "vram_total_mb": None}
        without: JsonDict = {"columns": columns, "gpu": None}
        return (self._models.report() if self._models else without) | self._memory.detail()

    def close(self) -> None:
        """End the launcher and the executors, even if the worker never ran."""
        if self._launcher is not None:
            self._launcher.close()
        if self._models is not None:
            self._models.close()
        policies = [policy.end for policy in self._policies.values()]
        runners = [own.runner for own in self._desk.queues]
        links = self._claims, self._renewals
        for each in (*policies, *runners, *links, self._loop, self._bell, self._rope):
            each.close()


def launch(
    load: Callable[[], object],
    models: Callable[[], model_cache.RequiresModels | None] = lambda: None,
    *,
    is_pool: bool = False,
) -> Launched | None:
    """Fork the launcher, let it load the app, and apply the app's settings here.

    Each executor calls `models` to make its model cache.

    Call this before the first thread or connection. Where a fork is not safe, it raises
    `InvalidConfig` for a pool, or else warns and returns None, and handlers run in this process.
    Raises the errors of loading the app.
    """
    app = loaded_app.App(load, models, stop_policies=workers.app_stop_policies)
    try:
        found, registered = launcher.Launcher.load(app)
    except launcher.ForkRefused as refused:
        if is_pool:
            raise errors.InvalidConfig(
                "a pool runs its jobs in processes that it forks, which is not safe here: "
                f"{refused}; start it before any thread, or start queue-claim-worker --workers "
                "with --app"
            ) from None
        _log.warning(
            "handlers run in this process, one at a time: it cannot fork executors, since %s; start"
            " queue-claim-worker with --app, so that a process without threads loads the app",
            refused,
        )
        return None
    loaded_app.apply(registered)
    return found, registered


def serve(options: argparse.Namespace, serve_: Callable[[Worker], int]) -> int | None:
    """Make the worker that the options describe, and call `serve_` with it; return the exit code.

    Returns None if the handlers have to run in this process.
    """
    limits = shapes.limits(options)
    shapes.check_times(options.lease_seconds, options.shutdown_timeout)
    queue: str | None = options.queue
    own = {} if queue is None else {queue: shapes.shape_of(options)}
    entries = [] if options.workers is None else shapes.option(options.workers)
    launched = _launch(options.app, own, entries)
    if launched is None:
        if limits != shapes.NO_LIMITS:
            raise errors.InvalidConfig(
                "--max-jobs, --max-rss-mb, --idle-exit and --burst need a process that can fork, "
                "and this one cannot; start queue-claim-worker by itself, with --app"
            )
        return None
    with contextlib.closing(launched[0]):
        if queue is not None:
            shapes.check_nodes(queue, launched[1].knows_nodes)
        worker = Worker(
            launched,
            own | shapes.shapes_of(entries),
            host=config.host_label(),
            newest=config.host_priority() < 0,
            lease_s=options.lease_seconds,
            shutdown_timeout_s=options.shutdown_timeout,
            limits=limits,
            ends_with_job=shapes.is_plain(options),
        )
        with contextlib.closing(worker):
            try:
                return serve_(worker)
            except launcher.LauncherLost:
                return worker.exit_code or 1


def _launch(
    app: str | None, own: Mapping[str, shapes.Shape], entries: Sequence[shapes.Entry]
) -> Launched | None:
    """Launch the app for the queue of the options, for a pool, or for both."""
    gpus = [shape for shape in own.values() if shape.gpu]

    def load() -> None:
        app_loading.load_app(app)
        if entries:
            shapes.add_queues(entries)
        if gpus:
            config.get_config().builtin_model_registrar()

    for shape in own.values():
        if shape.card is not None:
            # Set before the app is loaded, since a library may read these only once.
            os.environ.update(shapes.card_environment(shape.card))
    models = gpu_model_cache.gpu_model_cache if gpus else lambda: None
    return launch(load, models, is_pool=bool(entries))
