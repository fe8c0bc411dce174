"""Keep the leases of jobs that run in executors, and end those executors.

Its length: a decision is carried out after the end of an executor, or with that of the worker.
"""

from __future__ import annotations

import contextlib
import logging
import threading
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
    shutdown,
    slot,
)

_log = logging.getLogger(__name__)
TERM_S = 1.0
"""Seconds between SIGTERM and SIGKILL for an executor whose job must not run on."""
LOST_WITHIN_S = 0.5
"""Seconds that a worker whose claim is lost has for its records before it exits."""
HOLD_AGAIN = 1 / 8
"""Share of the lease by which the launcher's deadline may lag behind the leases."""


class Decision(NamedTuple):
    """Why an executor is killed, and what is written about its job after its end."""

    why: str
    write: Callable[[db.Connection], object]
    at: float
    code: int
    """The exit code of a worker that ends with its job."""


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
        self._abrupt = False
        """Whether executors get no SIGTERM first, as the worker ends with them."""
        self._on_announce: Callable[[int], object] = lambda _: None
        self.on_ended: Callable[[int], object] = lambda _: None
        """Called with the exit code of a decision that has ended a job."""

    def end_worker_by(
        self, leave: Callable[[int], object], announce: Callable[[int], object]
    ) -> None:
        """End the worker with its job, by this function of the exit code.

        `announce` is called before, if the database is used first.
        """
        self._abrupt = True
        self.on_exit = self.on_ended = leave
        self._on_announce = announce

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
        self.hand_back(work, "cancelled", code=guards.EXIT_CONTROL)

    def hand_back(
        self,
        work: current_job.Work,
        reason: str,
        *,
        front: bool = False,
        now: bool = False,
        code: int = 0,
    ) -> None:
        """Hand a job back for this reason once its executor has ended; kill that `now`, or soon."""
        lease = work.lease
        self._end(
            work,
            f"its job must end: {reason}",
            lambda conn: handback.hand_back(conn, lease, reason=reason, front=front),
            code,
            at_once=now,
        )

    def end_by_guard(self, work: current_job.Work, failure: guards.Failure) -> None:
        """Requeue or fail the job as its guard demands, once its executor has ended."""
        if failure.code == guards.EXIT_LOST:
            # If the claim is held even so, after the end of its handler another worker may have it.
            lapses = work.lease_end.check(self._now()) is not None
            at_once = lapses or not self._gentle(work)
            self.hand_back(work, failure.reason, now=at_once, code=failure.code)
            return
        seconds, lease = self._now() - work.started, work.lease
        self._end(
            work,
            failure.reason,
            lambda conn: job_ending.record_failure(conn, lease, failure, seconds),
            failure.code,
        )

    def escalate(self, works: Sequence[current_job.Work]) -> None:
        """Kill the executors that SIGTERM has not ended in TERM_S.

        A worker that ends with its job ends without the record if SIGKILL has not ended it either:
        then the kernel does not let it go, and its lease has to lapse.
        """
        for work in works:
            known = self._decisions.get(work.lease)
            if known is None or work.settling or self._now() - known.at < TERM_S:
                continue
            self._kill(work, True)
            if self._abrupt:
                self.on_exit(known.code)

    def announce(self, code: int) -> None:
        """Prepare an exit after the end of the executors, if the worker ends with its job."""
        self._on_announce(code)

    def exit_with(self, code: int) -> None:
        """Free what an exit would free: this worker holds nothing but its executors."""
        self.on_exit(code)

    def ended(self, work: current_job.Work) -> None:
        """Note that what was decided about a job has ended it."""
        if (known := self.decision(work)) is not None:
            self.on_ended(known.code)

    def _end(
        self,
        work: current_job.Work,
        why: str,
        write: Callable[[db.Connection], object],
        code: int,
        *,
        at_once: bool = False,
    ) -> None:
        now = self._now()
        known = self._decisions.get(work.lease)
        if known is None:
            _log.warning("job %s: %s; killing its executor", work.job["id"], why, extra=work.ids)
            self._decisions[work.lease] = known = Decision(why, write, now, code)
        self._kill(work, at_once or self._abrupt or now - known.at >= TERM_S)
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
        self._exit_lock = threading.Lock()
        self.exit_code = 0
        """The exit code of the process, if the worker has ended with a job."""

    def follow(self, pid: int) -> None:
        """Sample this executor for the guards of its jobs from now on."""
        self._gpu.follow(pid)

    def arm(self) -> None:
        """Set the deadline of the executors before the first claim."""
        self._keep_kill_timers()

    def end_with(self, code: int) -> None:
        """Let the process end with this code soon, even if the database does not answer."""
        self.exit_code = self.exit_code or code
        self.arm_exit(self.exit_code)
        self.stop_by(self._now())

    def arm_exit(self, code: int) -> None:
        """Exit with this code soon, whatever delays it, and leave the note for the next worker."""
        with self._exit_lock:
            if self._exit is not None:
                return
            self._exit = kill_timer.KillTimer(code)
            within_s = LOST_WITHIN_S if code == guards.EXIT_LOST else kill_timers.EXIT_WITHIN_S
            self._exit.arm(within_s)
        self._leave_note(code)

    def _check_guards(self) -> None:
        super()._check_guards()
        self._endings.escalate(self._jobs.running)
        deadline = self.stop_deadline
        if deadline is not None and self._now() >= deadline:
            self.arm_exit(self.exit_code)

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """Run on threads of its own while the block runs."""
        try:
            with super().running():
                yield
        finally:
            if self._exit is not None and not self.exit_code:
                self._exit.close()
                self._exit = None

    def job_ids(self) -> set[str]:
        """Return the ids of the jobs whose claims are held."""
        return {work.job["id"] for work in self._jobs.running}

    def holds_crashed(self) -> bool:
        """Return whether a job that is held may have killed a worker."""
        return any(work.job["crash_count"] > 0 for work in self._jobs.running)

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
        elif self.stop_deadline is None:
            self.excuses.fence()
        else:
            self._leave_note(self.exit_code)

    def _leave_note(self, code: int) -> None:
        """Excuse the claims that are left behind, as a worker does that runs handlers itself."""
        if code == guards.EXIT_LOST:
            self.excuses.fence()
        elif code in shutdown.ORDERLY:
            self.excuses.leave_note()

    def requeue(self, own: slot.Slot, reason: str) -> None:
        """Hand the running jobs back to the front once their executors have ended."""
        for work in self._jobs.running_in(own):
            self._endings.hand_back(work, reason, front=True, now=True)
