"""Check whether a worker is switched OFF, and if so, stop its jobs by the stop policy."""

from __future__ import annotations

from collections.abc import Callable

from queue_workflows import db, worker_control
from queue_workflows.engine import controls, workers
from queue_workflows.operations import stop_policies
from queue_workflows.worker import guards, job_ending, process_jobs, slot


class OffSwitch:
    """Check whether a slot's worker is OFF while it has a job or a model, and obey.

    A stop policy sees this as its worker. `requeue` hands the slot's running jobs back,
    `holds_model` returns whether a model is loaded.
    """

    def __init__(
        self,
        own: slot.Slot,
        jobs: process_jobs.ProcessJobs,
        dedicated: db.DedicatedConnection,
        *,
        holds_model: Callable[[], bool],
        requeue: Callable[[slot.Slot, str], object],
        ending: job_ending.Ending,
    ) -> None:
        self._own = own
        self.host, self.queue = own.who().host, own.who().queue
        self._jobs = jobs
        self._dedicated = dedicated
        self._holds_model = holds_model
        self._requeue = requeue
        self._ending = ending

    def check(self) -> None:
        """Read the switch, and run the stop policy if it is OFF."""
        own, who = self._own, self._own.who()
        works, holds = self._jobs.running_in(own), bool(own.in_flight.ids())
        if not (works or holds or self._holds_model()):
            return
        watcher = worker_control.WorkerControlWatcher(
            self,
            on_exit=self._ending.exit_with,
            host=who.host,
            queue=who.queue,
            read=self._stop_policy,
        )
        policy = watcher.policy()
        if policy is None:
            return
        if holds:
            # From now on no waiting job starts, and nothing new is claimed.
            own.in_flight.return_waiting("turned off")
            works = self._jobs.running_in(own)
        if not works and (holds or self._jobs.running_in(own)):
            return
        if not works or any(self._jobs.is_running(work) for work in works):
            if stop_policies.handler(policy) is stop_policies.HARD:
                self._ending.announce(guards.EXIT_CONTROL)
            watcher.obey(policy)

    def _stop_policy(self, host: str, queue: str) -> str | None:
        with self._dedicated.using() as conn:
            return controls.off_policy(conn, host, queue)

    def requeue_inflight_for_control(self, reason: str = "turned off") -> None:
        """Hand back all jobs without counting an attempt; record results."""
        self._requeue(self._own, reason)

    def clear_model(self) -> None:
        """Record that this worker's model is unloaded and that its heartbeat has ended."""
        who = self._own.who()
        with self._dedicated.using() as conn:
            workers.clear_model(conn, who.host, who.queue, mark_stale=True)
