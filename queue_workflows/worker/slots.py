"""Run the main loop of a worker with slots: one thread over the sockets of its executors.

Its length: what happens while a statement runs, and while none does, changes the same state.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence

from queue_workflows import config, db, errors, hw_metrics
from queue_workflows.engine import job_tables, recovery
from queue_workflows.executor import launcher_client, loaded_app
from queue_workflows.runtime import clock, service
from queue_workflows.worker import (
    current_job,
    executor_shape,
    guards,
    loop,
    multiplexer,
    slot,
    slot_keeper,
    slot_models,
    slot_queue,
    slot_wakes,
)

_log = logging.getLogger(__name__)
TURN_S = 1.0
"""Longest wait in seconds: a signal handler sets no event."""
SERVE_S = 0.1
"""Longest wait in seconds beside a statement: psycopg checks its socket as often."""
PRINT_AGAIN_S = 0.05
"""Seconds until a reader that is too slow is tried again."""


class SlotLoop:
    """Run the jobs of some queues in executors; claim and record on this thread.

    All that has happened is read before one statement for each queue records the finished jobs and
    claims as many as executors are free. An executor that dies is replaced; its job is charged if
    nobody killed it. Whatever runs, it needs three connections.
    """

    def __init__(
        self,
        served: Sequence[tuple[slot.Slot, executor_shape.Shape]],
        launcher: launcher_client.Launcher,
        registered: loaded_app.Registered,
        *,
        limits: executor_shape.Limits,
        metrics: hw_metrics.Sampler | None = None,
        models: slot_models.ExecutorModels | None = None,
        ends_with_job: bool = False,
    ) -> None:
        """Wire the parts. Its length: an argument is a line, and so is each part.

        `models`: the model of the one executor of a gpu worker, which uses its shape's card.
        """
        self._limits = limits
        self._wakes = slot_wakes.Wakes()
        self._mux = multiplexer.Multiplexer(launcher)
        self._queues: list[slot_queue.SlotQueue] = []
        endings = slot_keeper.Endings(self._kill, self._wakes.wake, gentle=self._has_neighbours)
        self.keeper = slot_keeper.SlotKeeper(
            [own for own, _ in served],
            endings,
            launcher.hold_until,
            metrics=metrics,
            models=models,
            known_models=lambda: sorted(registered.models) or None if models else None,
            card=served[0][1].card,
        )
        self._memory = self.keeper.memory
        self._dedicated = db.DedicatedConnection(
            self._opened,
            channel=job_tables.of_queue(served[0][0].who().queue).ready_channel,
            on_notify=self._notified,
            closed=self._lost,
        )
        self._socket = slot_wakes.ClaimSocket(self._mux.selector, self._dedicated.read)
        for own, shape in served:
            self._queues.append(
                slot_queue.SlotQueue(
                    own,
                    shape,
                    limits=limits,
                    mux=self._mux,
                    registered=registered,
                    keeper=self.keeper,
                    endings=endings,
                    dedicated=self._dedicated,
                )
            )
        for each in self._queues:
            each.records.meanwhile = self._serve
        self._serves = True
        """Whether executors get jobs while a statement runs."""
        self._waits = False
        """Whether it waits for sockets, or is about to, after what there is to do was found."""
        self._served = False
        """Whether executors got jobs so, and wake-ups were read that must still be acted on."""
        self._failed: Exception | None = None
        """What made that fail; it is raised after the statement."""
        self._connect_keeper()
        if models is not None:
            self._add_models(models, endings)
        if ends_with_job:
            endings.end_worker_by(self._leave, self.keeper.arm_exit)
        self._poll_at = self._retry_at = 0.0
        self._retry_s = 0.1
        self._logged = ""
        self._worked_at = time.monotonic()
        self._stopping = self._shed = False

    def _connect_keeper(self) -> None:
        claimers = [each.claimer for each in self._queues]
        self.keeper.excuses.may_hold_unknown_claims = lambda: any(
            each.may_hold_unknown_claims() for each in claimers
        )
        self.keeper.excuses.unanswered = lambda: {
            worker: at for each in claimers for worker, at in each.unanswered().items()
        }
        self._memory.gives_back = lambda: any(each.executors.gives_back for each in self._queues)
        self._memory.on_full = self._on_full
        self._memory.on_released = self._ready

    def _add_models(self, known: slot_models.ExecutorModels, endings: slot_keeper.Endings) -> None:
        """Add what changes the model of a gpu worker's executor; such a worker has one queue."""
        (queue,), requests = self._queues, self.keeper.model_requests
        if requests is None:
            return
        known.busy = lambda: queue.runs.busy
        known.on_change = requests.on_report = lambda: self.keeper.wake("beat")
        known.on_reap = requests.on_request = self._wakes.wake
        endings.on_exit = self._free_gpu
        queue.models = queue.runs.models = slot_models.Changes(
            known,
            requests,
            queue.who,
            connection=queue.claimer.connection,
            lose=queue.claimer.lose,
        )

    # --- Any thread.

    def _free_gpu(self, code: int) -> None:
        """End an executor that has a model, or loads one, but no job."""
        budget = code == guards.EXIT_BUDGET
        for each in self._queues:
            each.executors.kill_idle("a request that took too long" if budget else "OFF")

    def stop(self) -> None:
        """Claim no further job; safe in a signal handler."""
        self._stopping = True

    def _leave(self, code: int) -> None:
        """Let the worker end with this exit code, as soon as what has ended is recorded."""
        if code:
            self.keeper.end_with(code)
            self.stop()
            self._wakes.wake()

    def _kill(self, work: current_job.Work, now: bool) -> None:
        for each in self._queues:
            each.kill(work, now)

    def _has_neighbours(self, work: current_job.Work) -> bool:
        return any(each.runs.has_neighbours(work) for each in self._queues)

    def _ready(self) -> None:
        """Let each queue look for jobs."""
        for each in self._queues:
            each.mark()
            if each.executors.idle and self._waits:
                self._wakes.wake()

    def _on_full(self) -> None:
        self._shed = True
        self._wakes.wake()

    # --- The loop's thread.

    def _opened(self, conn: db.Connection) -> None:
        self._socket.open(conn)
        for each in self._queues:
            each.claimer.opened(conn)

    def _lost(self) -> None:
        """Claim again soon: without a connection, notifications are lost."""
        self._socket.close()
        self._ready()

    def _notified(self, queue: str) -> None:
        for each in self._queues:
            if queue == each.who.queue:
                each.mark()

    def run_forever(self) -> None:
        """Run jobs until `stop` and the end of what runs then; survive the loss of the database.

        Raises `LauncherLost`, and `ForkRefused` if no executor can be forked.
        """
        listener = db.listen(
            "worker_control",
            "job_cancel",
            poll_s=3600.0,
            locks=[recovery.LIFE_LOCK + each.who.worker_id for each in self._queues],
        )
        whos = [each.who for each in self._queues]
        notified = slot_wakes.Notifications(whos, self.keeper, self._ready)
        self._wakes.register(self._mux.selector)
        self.keeper.arm()
        self.keeper.wait_until_published(lambda: self._stopping)
        try:
            self._mux.start()
            for each in self._queues:
                each.executors.start(each.runs)
            self._worked_at = time.monotonic()
            with service.Follow("worker-listen", listener, notified.on_wake):
                while not self._is_over():
                    self._waits = True
                    self._mux.select(self._timeout())
                    self._waits = False
                    self._step()
        finally:
            self._close()

    def _is_over(self) -> bool:
        if not self._stopping:
            self._stopping = self._is_done()
            return False
        busy = any(each.runs.busy for each in self._queues)
        if not busy and not any(each.records.waiting for each in self._queues):
            return True
        deadline = self.keeper.stop_deadline
        late = deadline is not None and clock.boot_s() >= deadline
        return late and not busy

    def _is_done(self) -> bool:
        """Return whether nothing is left to do for a worker that ends by itself."""
        if any(each.busy for each in self._queues) or self._retry_at > time.monotonic():
            self._worked_at = time.monotonic()
            return False
        if self._limits.burst:
            left = any(each.may_claim for each in self._queues)
            return not (left or self._memory.active) and self._poll_at > 0.0
        idle_s = self._limits.idle_exit_s
        return idle_s is not None and time.monotonic() - self._worked_at >= idle_s

    def _timeout(self) -> float:
        now = time.monotonic()
        if self._mux.unheard or self._served:
            self._served = False
            return 0.0
        if self._mux.unprinted:
            return PRINT_AGAIN_S
        if self._retry_at > now:
            return min(TURN_S, self._retry_at - now)
        due = [each.timeout(now, stopping=self._stopping) for each in self._queues]
        return max(0.0, min(TURN_S, self._poll_at - now, *due))

    def _step(self) -> None:
        """Let each queue record what has ended, claim, and start what it claimed."""
        now = time.monotonic()
        if now >= self._poll_at:
            self._poll_at = now + config.CLAIM_POLL_S.read()
            for each in self._queues:
                each.mark(promote=True)
        if self._shed:
            self._shed = False
            for each in self._queues:
                each.executors.shed()
        for each in self._queues:
            each.replace(now, fork=not self._stopping)
        if now < self._retry_at:
            return
        try:
            for each in self._queues:
                each.step(stopping=self._stopping)
            self._retry_s, self._logged = 0.1, ""
        except db.Error as error:
            self._retry_after(error, now)
        if self._failed is not None:
            raise self._failed

    def _serve(self, fd: int) -> None:
        """Run executors until a statement has its reply, which comes on this descriptor."""
        if not self._serves or not any(each.runs.busy for each in self._queues):
            return
        self._served = True
        try:
            with self._mux.watching(fd) as readable:
                began = time.monotonic()
                while not readable and time.monotonic() - began < SERVE_S:
                    self._mux.select(SERVE_S)
                    if not self._stopping:
                        for each in self._queues:
                            each.start_meanwhile()
        except (errors.QueueWorkflowsError, OSError) as error:
            self._serves, self._failed = False, error

    def _retry_after(self, error: db.Error, now: float) -> None:
        # The message changes during one outage, from "closed" to "starting up".
        if self._logged != (logged := error.sqlstate or "away"):
            self._logged = logged
            _log.warning("claiming waits for the database: %s", loop.brief(error))
        for each in self._queues:
            each.mark()
        self._retry_at = now + self._retry_s * random.uniform(0.5, 1.0)  # noqa: S311  jitter
        self._retry_s = min(loop.BACKOFF_MAX_S, self._retry_s * 2)

    def _close(self) -> None:
        """End the executors, and write what can still be written."""
        self._serves = False
        self._mux.launcher.close()
        settled = [each.end() for each in self._queues]
        self.keeper.leave(settled=all(settled))
        self._dedicated.close()
        self.close()

    def close(self) -> None:
        """End the launcher, and close the descriptors; also of a loop that never ran."""
        self._mux.launcher.close()
        self._wakes.close()
        self._mux.selector.close()
