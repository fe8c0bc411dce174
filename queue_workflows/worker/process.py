"""Run a worker process: one loop over two connections, a launcher, and its executors.

Its length: it wires the parts, and runs the app's stop policies, which call nearly all of them.
An inline worker needs little of what this imports, so `claim_worker` imports it late.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from queue_workflows import config, errors, gpu_model_cache, hw_metrics, model_cache, workers
from queue_workflows.claim import claims, recovery
from queue_workflows.db import link, statements
from queue_workflows.run import executors, job_output, launcher, loaded_app, stop_policy
from queue_workflows.runtime import app_loading, clock, forking, identity, io_loop, service
from queue_workflows.types import ExitFn, JsonDict
from queue_workflows.worker import (
    desk,
    gpu_models,
    guards,
    job_logs,
    lane,
    leases,
    memory_watch,
    shapes,
)
from queue_workflows.worker import inline as inline_jobs

_log = logging.getLogger("queue_workflows.claim_worker")
Launched: TypeAlias = "tuple[launcher.Launcher, loaded_app.Registered]"
LEAVE_S: Final = 4.0
"""Seconds in which a worker that has nothing left to do stores its logs."""


class Inline(NamedTuple):
    """How the calling thread runs the handlers, instead of executors."""

    on_exit: ExitFn
    once: bool = False
    """Whether it runs one job at most, and then leaves."""
    known_models: list[str] | None = None


class _Policy(NamedTuple):
    """A stop policy of the app that runs."""

    name: str
    end: socket.socket
    """Where it calls the worker."""
    until: float


class Worker:
    """A worker of some queues, by their shapes.

    `launched`: the launcher whose executors run the handlers, and what the app registered there.
    `inline` instead: the thread that calls `run_inline` does. The other arguments are those of
    `claim_worker.ClaimWorker`.
    """

    def __init__(
        self,
        launched: tuple[launcher.Launcher, loaded_app.Registered] | None,
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
        """Wire the parts. Its length: an argument is a line, and so is each part."""
        self._launcher, registered = launched or (None, None)
        self._own_policies = registered.stop_policies if registered else []
        self._hold: Callable[[float], object] = launched[0].hold if launched else lambda _: None
        self._limits = limits
        self._inline = inline
        self._ends_by_itself = bool(inline or limits.burst) or limits.idle_exit_s is not None
        default_s = config.SHUTDOWN_TIMEOUT_S.read()
        self._shutdown_s = default_s if shutdown_timeout_s is None else shutdown_timeout_s
        self._loop = loop = io_loop.IoLoop()
        self._claims_flow, self._renewals_flow = io_loop.Flow(loop), io_loop.Flow(loop)
        self._printer = job_output.Printer(loop.wake_at)
        self._bell, self._rope = socket.socketpair()
        for each in (self._bell, self._rope):
            each.setblocking(False)
        logs = job_logs.JobLogs(loop.wake_at)
        gpu = next((shape for shape in served.values() if shape.gpu), None)
        self._models: gpu_models.GpuModels | None = None
        if gpu is not None:
            known = inline.known_models if inline else None
            if registered is not None:
                known = sorted(registered.models) or None
            self._models = gpu_models.GpuModels(known, card=gpu.card, wake=self._wake)
        self._desk = desk.Desk(
            self._claims_flow.ring,
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
            self._desk.lanes.append(self._lane(who, shape, registered))
        self._leases = leases.Leases(
            self._desk,
            logs,
            hold=self._hold,
            ring=self._renewals_flow.ring,
            report=self._report,
            models=self._models,
            is_own_policy=self._is_own_policy,
            run_policy=self._run_policy,
        )
        self._memory = memory_watch.MemoryWatch(
            self._desk, post=self.post, later=self._leases.later, changed=self._leases.beat_now
        )
        sampled = not (config.DISABLE_HW_METRICS.read() or (inline and inline.once))
        self._metrics = hw_metrics.Sampler(host, ready=self._wake) if sampled else None
        self._claims: link.Link
        self._renewals: link.Link
        self._posted: deque[Callable[[], object]] = deque()
        self._policies: dict[lane.Lane, _Policy] = {}
        """The stop policies of the app that run, by the queue that is OFF."""
        self._thread = 0
        """The thread of the loop."""
        self._lost: launcher.LauncherLost | None = None
        self._leave_by = math.inf

    def _lane(
        self,
        who: claims.Claimant,
        shape: shapes.Shape,
        registered: loaded_app.Registered | None,
    ) -> lane.Lane:
        parts = self._loop, self._launcher, self._printer, self._desk
        if registered is None:
            assert self._inline is not None
            runner = inline_jobs.InlineExecutors(*parts, on_exit=self._inline.on_exit)
            self._hold = runner.hold
            announces = config.get_config().on_node_completed is not None
            own = lane.Lane(who, shape, runner, announces=announces, now_fn=clock.boot_s)
            own.left = 1 if self._inline.once else math.inf
            return own
        in_run = who.queue in config.DAG_QUEUES
        names = registered.isolated_nodes if in_run else registered.isolated_tasks
        runner = executors.Executors(
            *parts,
            slots=shape.slots,
            shared=shape.concurrent or shape.mixed,
            lone=shape.gpu,
            end_s=self._shutdown_s,
            max_jobs=self._limits.max_jobs,
            max_rss_mb=self._limits.max_rss_mb,
        )
        return lane.Lane(
            who,
            shape,
            runner,
            isolated=frozenset(names),
            async_tasks=frozenset(registered.async_tasks if shape.mixed else ()),
            announces=registered.announces,
            now_fn=clock.boot_s,
        )

    @property
    def worker_ids(self) -> dict[str, str]:
        """Return the identity under which each queue is claimed."""
        return {own.who.queue: own.who.worker_id for own in self._desk.lanes}

    @property
    def exit_code(self) -> int:
        """Return the exit code of a worker that has ended with its job, else 0."""
        return self._desk.exit_code

    # --- Any thread, and signal handlers.

    def stop(self) -> None:
        """Take no further job; those that run get the shutdown timeout."""
        self.post(lambda: self._desk.stop(self._shutdown_s))

    def stop_now(self) -> None:
        """Give the running jobs back at once and leave."""
        self.post(lambda: self._desk.stop(0.0))

    def requeue(self, reason: str) -> None:
        """Return the running jobs to the front of their queues, uncounted, as OFF does.

        It waits until that is written, but for WITHIN_S at most. In this process a handler goes on,
        so that the worker leaves after this time.
        """
        done = threading.Event()
        self.post(lambda: self._desk.requeue(reason, done.set))
        if threading.get_ident() != self._thread:
            done.wait(stop_policy.WITHIN_S)

    def beat(self) -> None:
        """Report soon."""
        self.post(lambda: self._leases.beat_now())

    def post(self, call: Callable[[], object]) -> None:
        """Let the loop call this soon."""
        self._posted.append(call)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it wakes anyway; closed: nothing waits
            self._rope.send(b"!")

    # --- The loop.

    def run_forever(self) -> None:
        """Run jobs as they come until `stop`; survive the loss of the database.

        Raises `LauncherLost`, after all jobs were handed back, if the launcher has ended.
        """
        self._thread = threading.get_ident()
        loop, lanes = self._loop, self._desk.lanes
        locks = [recovery.LIFE_LOCK + own.who.worker_id for own in lanes]
        channels = sorted({own.table.ready_channel for own in lanes})
        self._claims = link.Link(loop, self._desk, flow=self._claims_flow, channels=channels)
        self._renewals = link.Link(
            loop,
            self._leases,
            flow=self._renewals_flow,
            channels=["worker_control", "job_cancel"],
            locks=locks,
        )
        loop.read(self._bell.fileno(), self._rang)
        if self._launcher is not None:
            loop.read(self._launcher.fileno(), self._from_launcher)
        if self._models is not None:
            self._models.serve(lanes[0], self._leases.later, self._leases.beat_now)
        try:
            with self._woken_by_signals(), self._memory, self._metrics or contextlib.nullcontext():
                loop.wake_at(0.0)
                loop.run(self._tick, self._is_over if self._ends_by_itself else None)
        finally:
            self.close()
        if self._lost is not None and not self.exit_code:
            raise self._lost

    @contextlib.contextmanager
    def _woken_by_signals(self) -> Generator[None]:
        """Let a signal wake the loop, also one that comes just before the loop waits.

        Python calls its handler only after the wait, which may be long.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.set_wakeup_fd(self._rope.fileno(), warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)  # an event loop of the app has it
        try:
            yield
        finally:
            if before == -1:
                signal.set_wakeup_fd(-1)

    def run_inline(self, models: model_cache.ModelCache | None) -> bool:
        """Run jobs in this thread until `stop`, or one if `once`; return whether there was one."""
        assert self._inline is not None
        runner = self._desk.lanes[0].runner
        assert isinstance(runner, inline_jobs.InlineExecutors)
        failed: list[BaseException] = []

        def run() -> None:
            try:
                self.run_forever()
            except BaseException as error:  # noqa: BLE001  raised in the waiting thread
                failed.append(error)
            if self._inline is not None and (self.exit_code or runner.cut_at is not None):
                self._inline.on_exit(self.exit_code)

        with service.Pool("worker-loop", 1, lambda _: run()):
            runner.serve(models)
        if failed:
            raise failed[0]
        return self._desk.lanes[0].left == 0

    def _is_over(self) -> bool:
        """Return whether it has left.

        A worker that leaves, or ends by itself, is asked at each turn: its end waits for no timer.
        """
        own = self._desk
        if self._ends_by_itself and not own.stopping:
            self._end_by_itself(clock.boot_s())
        if not own.stopping or own.busy:
            return False
        if self._leave_by == math.inf:
            self._loop.wake_at(0.0)
        return self._leases.left and self._are_gone()

    def _rang(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(4096)
        while self._posted:
            self._posted.popleft()()
        self._loop.wake_at(0.0)

    def _tick(self, now: float) -> float:
        if now >= self._printer.again_at:
            self._printer.flush(now)
        due = [self._printer.again_at, self._claims.tick(now), self._renewals.tick(now)]
        models = self._models
        stopped = models is not None and models.is_stopped
        due.append(self._desk.tick(now, stopped=stopped))
        due.append(self._leases.tick(now))
        if models is not None:
            due.append(models.tick(now))
        due += [own.runner.tick(now) for own in self._desk.lanes]
        for own, policy in [*self._policies.items()]:
            if now >= policy.until:
                self._end_policy(own, f"takes more than {stop_policy.WITHIN_S:.0f} s")
            else:
                due.append(policy.until)
        if self._metrics is not None:
            self._store_samples(self._metrics)
        if self._desk.stopping:
            self._leave(now)
        due += [self._desk.exit_by, self._leave_by if now < self._leave_by else math.inf]
        return min(due)

    def _store_samples(self, metrics: hw_metrics.Sampler) -> None:
        for each in metrics.take():
            put = statements.samples.put.script(
                host=self._desk.lanes[0].who.host,
                every_s=each.every_s,
                sample=each.text,
                notify=each.tell,
            )
            self._leases.later(put, "a sample")

    def _end_by_itself(self, now: float) -> None:
        """Stop a worker that is to end when no job is left, or none came for a while."""
        if (cut_at := self._runs_no_more_since) is not None:
            if now >= cut_at + stop_policy.WITHIN_S:
                self._desk.leave(guards.EXIT_LOST)
            return
        idle_s = self._limits.idle_exit_s
        ends = self._limits.burst or (self._inline is not None and self._inline.once)
        looked = self._claims.is_open and self._desk.has_looked
        if not self._claims.is_open:
            self._desk.worked_at = math.inf  # nobody knows whether there is a job
        elif looked:
            self._desk.worked_at = min(self._desk.worked_at, now)
        if (ends and looked and not self._desk.busy) or (
            idle_s is not None and not self._desk.busy and now >= self._desk.worked_at + idle_s
        ):
            self._desk.stop(self._shutdown_s)

    @property
    def _runs_no_more_since(self) -> float | None:
        """Return since when the calling thread runs a job that is not this worker's any more."""
        runner = self._desk.lanes[0].runner
        return runner.cut_at if isinstance(runner, inline_jobs.InlineExecutors) else None

    def _leave(self, now: float) -> None:
        """End step by step: store what is left, end the executors, then the loop."""
        own, self._loop.over = self._desk, self._is_over
        if now >= own.exit_by or (self._lost is not None and not own.busy):
            self._loop.stop()
        elif not own.busy:
            self._leave_by = min(self._leave_by, now + LEAVE_S)
            if self._are_gone() and (self._leases.left or now >= self._leave_by):
                self._loop.stop()
                return
            if self._runs_no_more_since is not None:
                own.exit_by = min(own.exit_by, now + desk.LOST_WITHIN_S)
            self._leases.leave()
            for each in own.lanes:
                each.runner.closing = True
                for place in each.runner:
                    each.runner.let_go(place)

    def _are_gone(self) -> bool:
        return not any(True for own in self._desk.lanes for _ in own.runner)

    # --- Stop policies of the app.

    def _is_own_policy(self, policy: str) -> bool:
        """Return whether the app runs this stop policy."""
        return policy in self._own_policies or policy in workers.app_stop_policies()

    def _begin_policy(
        self, policy: str, about: JsonDict, on_exit: ExitFn | None = None
    ) -> socket.socket:
        """Let the launcher run a stop policy, or a thread of this process; return where it calls.

        `on_exit`: what the policy calls in a thread, instead of letting the worker leave.
        """
        if self._launcher is not None:
            return self._launcher.run_policy(policy, about)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)

        def run(_: object) -> None:
            with theirs:
                stop_policy.call(theirs, about, workers.stop_policy(policy), on_exit)

        service.Pool("stop-policy", 1, run).start()
        return ours

    def _run_policy(self, own: lane.Lane, policy: str) -> None:
        """Begin a stop policy of the app; stop by `hard` if it fails."""
        if own in self._policies:
            return
        about = {
            "host": own.who.host,
            "queue": own.who.queue,
            "host_priority": -1 if own.who.newest else 0,
            "lease_s": own.who.lease_s,
        }
        end = self._begin_policy(policy, about)
        self._policies[own] = _Policy(policy, end, clock.boot_s() + stop_policy.WITHIN_S)
        self._loop.read(end.fileno(), lambda: self._from_policy(own))
        self._loop.wake_at(self._policies[own].until)

    def _from_policy(self, own: lane.Lane) -> None:
        """Do what a stop policy requests, and answer once it is done."""
        end = self._policies[own].end
        try:
            data = end.recv(launcher.PACKET)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        packet: JsonDict = (
            json.loads(data) if data else {"call": "failed", "error": "its process has ended"}
        )

        def answer(*_: object) -> None:
            with contextlib.suppress(OSError):
                end.send(b"{}")

        call = packet["call"]
        if call == "requeue":
            self._desk.requeue(packet["reason"], answer)
        elif call == "clear_model":
            script = statements.workers.clear_model.script(
                host=own.who.host, queue=own.who.queue, mark_stale=True
            )
            self._leases.later(script, "clearing the model", answer)
        elif call == "beat":
            self._leases.beat_now()
            answer()
        elif call == "exit":
            self._desk.leave(packet["code"])
            answer()
        else:
            self._end_policy(own, f"has failed: {packet['error']}" if call == "failed" else "")

    def _end_policy(self, own: lane.Lane, failed: str) -> None:
        """Note that a stop policy has ended; stop hard if it has failed."""
        policy = self._policies.pop(own, None)
        if policy is None:
            return  # it has taken too long
        self._loop.forget(policy.end.fileno())
        policy.end.close()
        if not failed:
            return
        _log.error("stop policy %s %s; stopping hard", policy.name, failed)
        if own.off is not None:
            self._desk.switch(own, own.off, hard=True)
            if self._runs_no_more_since is not None:
                self._desk.leave(guards.EXIT_CONTROL)

    # --- The launcher.

    def _from_launcher(self) -> None:
        assert self._launcher is not None
        try:
            packets = self._launcher.receive()
        except launcher.LauncherLost as error:
            self._lose(error)
            return
        for packet in packets:
            for own in self._desk.lanes:
                if "died" in packet:
                    own.runner.died(packet)
                elif (pid := own.runner.forked(packet)) and self._models is not None:
                    self._models.follow(pid)
        self._loop.wake_at(0.0)

    def _lose(self, error: launcher.LauncherLost) -> None:
        """End all jobs: the executors have ended with the launcher.

        They count a crash if a signal has killed it, and are handed back otherwise.
        """
        _log.error("%s", error)
        self._lost = error
        assert self._launcher is not None
        self._loop.forget(self._launcher.fileno())
        self._desk.stop(0.0)  # first, so that no outcome that is still read lets a job start
        for own in self._desk.lanes:
            own.runner.lose(error)

    def _report(self) -> JsonDict:
        """Return what the rows of the worker show besides its jobs."""
        columns: JsonDict = {"current_model": None, "known_models": [], "vram_total_mb": None}
        shown: JsonDict = {"columns": columns, "gpu": None}
        if self._models is not None:
            shown = self._models.report()
        return shown | self._memory.detail()

    def close(self) -> None:
        """End the launcher and the executors; also of a worker that never ran."""
        if self._launcher is not None:
            self._launcher.close()
        if self._models is not None:
            self._models.close()
        for policy in self._policies.values():
            policy.end.close()
        self._policies.clear()
        for own in self._desk.lanes:
            own.runner.close()
        for each in (getattr(self, "_claims", None), getattr(self, "_renewals", None)):
            if each is not None:
                each.close()
        self._loop.close()
        self._bell.close()
        self._rope.close()


def launch(
    load: Callable[[], object],
    models: Callable[[], model_cache.RequiresModels | None] = lambda: None,
) -> Launched | None:
    """Fork the launcher, let it load the app, and take over the app's settings.

    `models` returns the cache of models of an executor, in which it is called.

    To be called before the first thread or connection. Returns None, with one warning, where that
    is not safe: then handlers run in this process. Raises the errors of loading the app.
    """
    app = loaded_app.App(load, models, stop_policies=workers.app_stop_policies)
    try:
        found, registered = launcher.Launcher.load(app)
    except launcher.ForkRefused as refused:
        _log.warning(
            "handlers run in this process, one at a time: it cannot fork executors, since %s; start"
            " queue-claim-worker with --app, so that a process without threads loads the app",
            refused,
        )
        return None
    loaded_app.apply(registered)
    return found, registered


def launch_or_refuse(load: Callable[[], object]) -> Launched:
    """Do as `launch` does; raise `InvalidConfig` where this process must not fork."""
    reason = forking.unsafe()
    launched = launch(load) if reason is None else None
    if launched is None:
        raise errors.InvalidConfig(
            f"a pool runs its jobs in processes that it forks, which is not safe here: {reason}; "
            "start it before any thread, or start queue-claim-worker --workers with --app"
        )
    return launched


def serve(options: argparse.Namespace, serve_: Callable[[Worker], int]) -> int | None:
    """Serve the worker of the command's options with `serve_`; return its exit code.

    Returns None if the handlers have to run in this process.
    """
    limits = shapes.limits(options)
    shapes.check_times(options.lease_seconds, options.shutdown_timeout)
    queue: str | None = options.queue
    shape = None if queue is None else shapes.shape_of(options)
    entries = [] if options.workers is None else shapes.option(options.workers)
    served = shapes.shapes_of(entries)
    if queue is not None and shape is not None:
        served = {queue: shape} | served
    launched = _launch(options.app, shape, entries)
    if launched is None:
        if limits != shapes.NO_LIMITS:
            raise errors.InvalidConfig(
                "--max-jobs, --max-rss-mb, --idle-exit and --burst need a process that can fork, "
                "and this one cannot; start queue-claim-worker by itself, with --app"
            )
        return None
    try:
        if queue is not None:
            shapes.check_nodes(queue, launched[1].knows_nodes)
    except BaseException:
        launched[0].close()
        raise
    worker = Worker(
        launched,
        served,
        host=config.host_label(),
        newest=config.host_priority() < 0,
        lease_s=options.lease_seconds,
        shutdown_timeout_s=options.shutdown_timeout,
        limits=limits,
        ends_with_job=shapes.is_plain(options),
    )
    try:
        return serve_(worker)
    except launcher.LauncherLost:
        return worker.exit_code or 1
    finally:
        worker.close()


def _launch(
    app: str | None, shape: shapes.Shape | None, entries: Sequence[shapes.Entry]
) -> Launched | None:
    """Launch the app for a queue of this shape, for a pool, or for both."""
    gpu = shape is not None and shape.gpu

    def load() -> None:
        app_loading.load_app(app)
        if entries:
            shapes.add_queues(entries)
        if gpu:
            config.get_config().builtin_model_registrar()

    if entries:
        return launch_or_refuse(load)
    if shape is not None and shape.card is not None:
        # Before the app is loaded: a library may read them only once.
        os.environ.update(shapes.card_environment(shape.card))
    return launch(load, gpu_model_cache.gpu_model_cache if gpu else lambda: None)
