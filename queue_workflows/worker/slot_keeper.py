"""The lease keeper of a worker whose handlers run in executors: it ends those, never itself."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

from queue_workflows import db, hw_metrics
from queue_workflows.engine import handback, job_tables
from queue_workflows.executor import launcher_client
from queue_workflows.runtime import clock, kill_timer
from queue_workflows.types import NowFn
from queue_workflows.worker import (
    capture,
    current_job,
    guards,
    job_ending,
    kill_timers,
    lease_keeper,
    model_requests,
    slot,
)

_log = logging.getLogger(__name__)
TERM_S = 1.0
"""Seconds between SIGTERM and SIGKILL for an executor whose job must not run on."""
HOLD_AGAIN = 1 / 8
"""Share of the lease by which the launcher's deadline may lag behind the leases."""


class Decision(NamedTuple):
    """Why an executor is killed, and what is written about its job after its end."""

    why: str
    write: Callable[[db.Connection], object]
    at: float


class Endings:
    """Kill the executors of jobs that must not run on, and keep why, for after their end.

    Called on the lease keeper's threads. `kill` ends the executor of a job by SIGTERM, or at once;
    it does nothing once the handler has ended.
    """

    left_behind = False

    def __init__(
        self,
        kill: Callable[[current_job.Work, bool], object],
        wake: Callable[[], object],
        *,
        gentle: Callable[[current_job.Work], bool] = lambda _: False,
        now_fn: NowFn = clock.boot_s,
    ) -> None:
        """`gentle`: whether a handler whose claim is lost gets TERM_S, as others die with it."""
        self._gentle = gentle
        self._kill = kill
        self._wake = wake
        self._now = now_fn
        self._decisions: dict[job_tables.Lease, Decision] = {}
        self.on_exit: Callable[[int], object] = lambda _: None
        """Called instead of an exit, after the executors of jobs were killed."""

    def decision(self, work: current_job.Work) -> Decision | None:
        """Return what was decided about a job, or None."""
        return self._decisions.get(work.lease)

    def forget(self, work: current_job.Work) -> None:
        """Forget what was decided about a job that has ended."""
        self._decisions.pop(work.lease, None)

    def give_back(self, work: current_job.Work) -> None:
        """Hand the job of a stopping worker back, uncounted, once its executor has ended."""
        self.hand_back(work, "shutdown", now=True)

    def stop_cancelled(self, work: current_job.Work) -> None:
        """Cancel the job once its executor has ended."""
        self.hand_back(work, "cancelled")

    def hand_back(
        self, work: current_job.Work, reason: str, *, front: bool = False, now: bool = False
    ) -> None:
        """Hand a job back for this reason once its executor has ended; kill that `now`, or soon."""
        lease = work.lease
        self._end(
            work,
            f"its job must end: {reason}",
            lambda conn: handback.hand_back(conn, lease, reason=reason, front=front),
            at_once=now,
        )

    def end_by_guard(self, work: current_job.Work, failure: guards.Failure) -> None:
        """Requeue or fail the job as its guard demands, once its executor has ended."""
        if failure.code == guards.EXIT_LOST:
            # If the claim is held even so, after the end of its handler another worker may have it.
            lapses = work.lease_end.check(self._now()) is not None
            self.hand_back(work, failure.reason, now=lapses or not self._gentle(work))
            return
        seconds, lease = self._now() - work.started, work.lease
        self._end(
            work,
            failure.reason,
            lambda conn: job_ending.record_failure(conn, lease, failure, seconds),
        )

    def escalate(self, works: Sequence[current_job.Work]) -> None:
        """Kill the executors that SIGTERM has not ended in TERM_S."""
        for work in works:
            known = self._decisions.get(work.lease)
            if known is not None and self._now() - known.at >= TERM_S:
                self._kill(work, True)

    def announce(self, code: int) -> None:
        """Do nothing: this process does not exit."""

    def exit_with(self, code: int) -> None:
        """Free what an exit would free: this worker holds nothing but its executors."""
        _log.debug("exit with code %d is not needed: executors are killed", code)
        self.on_exit(code)

    def _end(
        self,
        work: current_job.Work,
        why: str,
        write: Callable[[db.Connection], object],
        *,
        at_once: bool = False,
    ) -> None:
        now = self._now()
        known = self._decisions.get(work.lease)
        if known is None:
            _log.warning("job %s: %s; killing its executor", work.job["id"], why, extra=work.ids)
            self._decisions[work.lease] = known = Decision(why, write, now)
        self._kill(work, at_once or now - known.at >= TERM_S)
        self._wake()


class Deadline(kill_timers.KillTimers):
    """The deadline at which the launcher kills all executors of a worker that is silent.

    It is never later than the first lease end of a running job. A lease that begins while it is
    armed ends later, so a claim needs no message.
    """

    def __init__(
        self, hold: Callable[[float | None], object], lease_s: float, now_fn: NowFn = clock.boot_s
    ) -> None:
        super().__init__(enabled=False, now_fn=now_fn)
        self._hold = hold
        self._lease_s = lease_s
        self._at: float | None = None

    def keep(self, lease_ends: float | None, budget_ends: float | None) -> None:  # noqa: ARG002  the base's
        """Move the deadline to the first lease end, or to that of a claim made now."""
        ends = self._now() + self._lease_s if lease_ends is None else lease_ends
        at = ends - kill_timers.EARLY_S
        if self._at is None or not self._at <= at <= self._at + self._lease_s * HOLD_AGAIN:
            with contextlib.suppress(launcher_client.LauncherLost):  # the loop learns it too
                self._hold(at)
            self._at = at


class SlotKeeper(lease_keeper.LeaseKeeper):
    """Keep the leases of one worker's jobs, which run in executors."""

    def __init__(
        self,
        slots: Sequence[slot.Slot],
        endings: Endings,
        hold: Callable[[float | None], object],
        *,
        metrics: hw_metrics.Sampler | None = None,
        models: model_requests.Models | None = None,
        known_models: Callable[[], list[str] | None] = lambda: None,
        card: int | None = None,
        now_fn: NowFn = clock.boot_s,
    ) -> None:
        super().__init__(
            slots,
            model_cache=models,
            known_models=known_models,
            metrics=metrics,
            card=card,
            on_exit=endings.exit_with,
            ending=endings,
            now_fn=now_fn,
        )
        self._endings = endings
        self._kill_timers = Deadline(hold, self._who().lease_s, now_fn)
        self._logs = capture.Source(lambda: None, streams=False)
        self._exit: kill_timer.KillTimer | None = None
        """Ends a stopping process even if the database does not answer."""

    def follow(self, pid: int) -> None:
        """Sample this executor for the guards of its jobs from now on."""
        self._gpu.follow(pid)

    def arm(self) -> None:
        """Set the deadline of the executors before the first claim."""
        self._keep_kill_timers()

    def _check_guards(self) -> None:
        super()._check_guards()
        self._endings.escalate(self._jobs.running)
        deadline = self.stop_deadline
        if deadline is not None and self._now() >= deadline and self._exit is None:
            self._exit = kill_timer.KillTimer(0)
            self._exit.arm(kill_timers.EXIT_WITHIN_S)
            self.excuses.leave_note()

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """Run on threads of its own while the block runs."""
        try:
            with super().running():
                yield
        finally:
            if self._exit is not None:
                self._exit.close()
                self._exit = None

    def job_ids(self) -> set[str]:
        """Return the ids of the jobs whose claims are held."""
        return {work.job["id"] for work in self._jobs.running}

    def begin(self, work: current_job.Work) -> None:
        """Note that a job runs in an executor."""
        with self._lock:
            self._jobs.add(work)

    def end(self, work: current_job.Work) -> None:
        """Note that the outcome of a job is written, or that its claim is gone."""
        with self._lock:
            self._jobs.remove(work)
        self._endings.forget(work)

    def printed(self, work: current_job.Work, data: bytes) -> None:
        """Keep what the handler of a job has printed."""
        self._logs.add(work.lease, data)

    def claimed(self, sent_at: float) -> None:
        """Look for cancels and switches that were notified since this claim was sent."""
        if self._notified_at >= sent_at:
            self.wake("renew", "control")

    def leave(self, *, settled: bool) -> None:
        """Note for the next worker, unless all is `settled`, that the database was away."""
        if settled:
            self.excuses.withdraw_note()
        elif self.stop_deadline is not None:
            self.excuses.leave_note()
        else:
            self.excuses.fence()

    def requeue(self, own: slot.Slot, reason: str) -> None:
        """Hand the running jobs back to the front once their executors have ended."""
        for work in self._jobs.running_in(own):
            self._endings.hand_back(work, reason, front=True, now=True)
