"""Serve an ingest queue in PostgreSQL with the threads of one process, which share its models."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any, cast

from queue_workflows import config, db, errors, ingest_executor
from queue_workflows.dag import payload
from queue_workflows.engine import claims as engine_claims
from queue_workflows.engine import finish, ingest_jobs, job_tables, outcomes
from queue_workflows.handlers import task_call
from queue_workflows.local_queue import ingest_claims, ingest_keeper, job_queue, plan
from queue_workflows.runtime import clock, identity
from queue_workflows.tasks import job as current
from queue_workflows.types import TERMINAL_JOB_STATUSES, ExitFn, Row
from queue_workflows.worker import claimer, guards, renewal_failures

_log = logging.getLogger("queue_workflows.local_queue")
REFUSED_WAIT_S = 60.0
"""Seconds for which a job waits if the database refuses its end by its values."""


class IngestPlan(plan.ClaimingPlan):
    """The jobs of one ingest queue, for the `JobQueueManager` of this process.

    Any number of such processes and of ordinary workers may serve the queue. Each job is claimed,
    renewed, fenced and recorded as a worker does it; its own attempts, delays and time-outs count,
    not those of the manager. `limit`: claims at once, by default the manager's workers. `lease_s`:
    seconds. `on_exit` ends the process after an OFF by policy `hard`; None: the process stays, and
    only the jobs are handed back. Raises `UnknownQueue` and `InvalidConfig` (both ValueErrors).
    """

    def __init__(
        self,
        queue: str,
        *,
        limit: int | None = None,
        host: str | None = None,
        host_priority: int | None = None,
        lease_s: float = 600.0,
        on_exit: ExitFn | None = None,
    ) -> None:
        config.check_queue(queue)
        if queue in config.DAG_QUEUES:
            raise errors.InvalidConfig(f"queue {queue!r}: a plan serves ingest queues only")
        if not 0 < lease_s < math.inf or (limit is not None and limit < 1):
            raise errors.InvalidConfig(f"lease_s={lease_s!r}, limit={limit!r}: must be positive")
        label = host or config.host_label()
        priority = config.host_priority() if host_priority is None else host_priority
        self._who = engine_claims.Claimant(
            identity.new_worker_id(label),
            label,
            queue,
            lease_s,
            newest=priority < 0,
            obey=not config.DISABLE_WORKER_CONTROL.read(),
        )
        self._limit = limit
        self._on_exit = on_exit
        self._held = ingest_claims.Claims()
        self._claimer = claimer.Claimer(job_tables.INGEST_JOBS, lambda: self._who)
        self._claimer.other_jobs = self._held.ids
        self._promote = True
        self._more = False
        """Whether there may be a job to claim as soon as a thread is free."""
        self._claimed = False
        """Whether the last `fetch_ready` has sent a claim and has its reply."""
        self._owner: plan.Owner | None = None
        self._keeper: ingest_keeper.Keeper | None = None
        self._closed = False

    @property
    def worker_id(self) -> str:
        """Return the identity under which this process claims."""
        return self._who.worker_id

    # --- For the manager.

    @property
    def others_fill_memory(self) -> bool:
        """Return whether, at the last heartbeat, a job of another worker filled the same memory."""
        return self._keeper is not None and self._keeper.heartbeat.others_fill_memory

    def open(self, owner: plan.Owner, /) -> None:
        """Begin to listen; raise RuntimeError the second time."""
        if self._owner is not None:
            raise RuntimeError("the plan was opened before; make a new one")
        self._owner = owner
        self._keeper = ingest_keeper.Keeper(
            self._who,
            self._held,
            owner,
            claim_soon=self._claim_soon,
            limit=self._limit or owner.workers,
            on_exit=self._on_exit,
        )
        self._keeper.start()

    def close(self) -> None:
        """Hand back every claim, and deregister the worker."""
        self._closed = True
        if self._keeper is not None:
            self._keeper.stop()
        self._claimer.close()

    def _claim_soon(self, promote: bool) -> None:
        self._promote |= promote
        if self._owner is not None:
            self._owner.wake()

    def _over(self, claim: ingest_claims.Claim) -> None:
        """Forget a claim that is over; another job may take its place."""
        if self._held.drop(claim) and (self._more or self._held.has_suspects()):
            self._claim_soon(False)

    # --- The thread of the master.

    @property
    def wait_s(self) -> float:
        """Return the seconds until a limit admits a job or a delayed one is due; inf: unknown."""
        return self._claimer.wait_s if self._claimed else math.inf

    def fetch_ready(self) -> list[job_queue.Job]:
        """Claim jobs for the threads that are free."""
        self._claimed = False
        if self._owner is None or self._closed:
            return []
        if (alone := self._held.next_alone()) is not None:
            return [alone]
        free = self._held.free(self._limit or self._owner.workers)
        if free < 1:
            self._more = True
            return []
        promote, self._promote = self._promote, False
        try:
            rows = self._claimer.claim_batch(free, promote=promote)
        except db.Error:
            self._promote |= promote
            raise
        self._claimed = True
        self._more = len(rows) == free or (bool(rows) and self._claimer.isolated)
        jobs = [job for row in rows if (job := self._hold(row)) is not None]
        return [*jobs] if jobs or (alone := self._held.next_alone()) is None else [alone]

    def _hold(self, row: Row) -> ingest_claims.ClaimedJob | None:
        """Hold a claimed job; return it unless it has to run alone."""
        lease_end = guards.LeaseEnd(self._claimer.sent_at, self._who.lease_s)
        claim = ingest_claims.Claim(row, lease_end)
        job = ingest_claims.as_job(row, claim)
        # A crash counts for all jobs that run, so one whose next crash is its last runs alone.
        if 0 < config.MAX_CRASHES.read() - 1 <= row["crash_count"]:
            self._held.add_suspect(job, claim)
            return None
        self._held.add(claim)
        return job

    # --- The threads of the workers.

    def mark_running(self, job: job_queue.Job, /) -> bool:
        """Note that a job begins; return False if its claim is over."""
        claim = _claim_of(job)
        return claim is not None and self._held.start(claim)

    def is_currently_running(self, job_id: str, /) -> bool:
        """Return whether a handler of the job runs here."""
        claim = self._held.get(job_id)
        return claim is not None and not claim.work.waiting

    def call(self, job: job_queue.Job, execute: Callable[[job_queue.Job], Any] | None, /) -> Any:
        """Run a job; return its result, or raise `NotCompleted` with its error."""
        claim = _claim_of(job)
        assert claim is not None  # `mark_running` has found it
        if execute is None:
            outcome = ingest_executor.run_task(claim.work.job, claim.work)
        else:
            outcome = _execute(job, claim, execute)
        claim.outcome = outcome
        claim.work.settling = True
        if outcome.kind == "completed":
            return outcome.value
        raise plan.NotCompleted(outcome.error or outcome.kind)

    def mark_done(self, job: job_queue.Job, result: Any, /) -> None:
        """Record the result unless the claim was lost."""
        del result  # the outcome has it as checked JSON
        claim = _claim_of(job)
        if claim is not None and claim.outcome is not None:
            self._record(claim, claim.outcome)

    def mark_failed(self, job: job_queue.Job, error: str, final: bool, /) -> bool:
        """Record the failure by the policy of the job; return whether the job has failed for good.

        `final` is the manager's view, and does not count.
        """
        del final
        claim = _claim_of(job)
        if claim is None:
            return False
        work = claim.work
        if claim.outcome is None:
            work.interrupt(error)
            claim.outcome = outcomes.Outcome(
                "failed", clock.boot_s() - work.started, error=payload.error_text(error)
            )
            work.settling = True
        if self._record(claim, claim.outcome) != "failed":
            return False
        with db.statement() as conn:
            row = ingest_jobs.get(conn, claim.job_id)
        return row is not None and row["status"] in TERMINAL_JOB_STATUSES

    def give_back(self, job: job_queue.Job, reason: str, /) -> None:
        """Hand a job back that did not start or did not end; it counts no attempt."""
        claim = _claim_of(job)
        if claim is not None and self._held.holds(claim):
            claim.work.interrupt(reason)
            claim.hand_back(reason)
            self._over(claim)

    def _record(self, claim: ingest_claims.Claim, outcome: outcomes.Outcome) -> str:
        """Record an outcome; raise database errors after which the same write may succeed."""
        lease = claim.work.lease
        try:
            with db.transaction() as conn:
                found = finish.record(conn, lease, outcome)
        except db.Error as error:
            if renewal_failures.may_pass(error):
                raise
            if outcome.kind != "completed":
                _log.error(
                    "job %s: its end cannot be recorded: %s",
                    claim.job_id,
                    error,
                    extra={"job_id": claim.job_id},
                )
                claim.hand_back(f"its end cannot be recorded: {error}", after_s=REFUSED_WAIT_S)
                self._over(claim)
                return "skipped"
            what = f"recording job {claim.job_id}"
            claim.outcome = outcomes.of_error(error, outcome.seconds, what)
            return self._record(claim, claim.outcome)
        if found == "skipped" and outcome.kind != "cancelled":
            self._check_lost(claim, outcome)
        self._over(claim)
        return found

    def _check_lost(self, claim: ingest_claims.Claim, outcome: outcomes.Outcome) -> None:
        with db.statement() as conn:
            if db.run(conn, finish.is_recorded(claim.work.lease, outcome)):
                return  # the reply of an earlier commit was lost
        _log.warning(
            "nothing was written: the claim of job %s was lost",
            claim.job_id,
            extra={"job_id": claim.job_id},
        )
        if self._keeper is not None:
            self._keeper.lost(claim)


def _claim_of(job: job_queue.Job) -> ingest_claims.Claim | None:
    return job.claim if isinstance(job, ingest_claims.ClaimedJob) else None


def _execute(
    job: job_queue.Job, claim: ingest_claims.Claim, execute: Callable[[job_queue.Job], Any]
) -> outcomes.Outcome:
    """Run a job by the app's function; whatever it raises is an outcome."""
    row, work, started = claim.work.job, claim.work, time.monotonic()
    refused = ingest_executor.refused(row)
    if refused is not None:
        return refused
    try:
        with current.running(current.Job(row, work)):
            value = outcomes.unless_signal(execute(job))
        found = cast("dict[str, Any]", value) if isinstance(value, dict) else {"result": value}
        text = payload.encode(found, f"result of job {claim.job_id}")
        outcome = outcomes.Outcome("completed", time.monotonic() - started, text, value=value)
    except BaseException as error:  # noqa: BLE001  the boundary around app code: it may exit
        outcome = task_call.failed(row, error, time.monotonic() - started)
    if work.cancel_requested:
        return outcomes.Outcome("cancelled", time.monotonic() - started, error="cancelled")
    return outcome
