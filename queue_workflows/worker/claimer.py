"""The worker's own connection: claim, finish, drain; survives outages and unknown commits."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from queue_workflows import db, errors
from queue_workflows.dag import payload
from queue_workflows.dispatch import drain, fast_path, run_cache
from queue_workflows.engine import (
    claimed_jobs,
    claims,
    finish,
    handback,
    job_tables,
    outcomes,
    quarantine,
    recovery,
)
from queue_workflows.runtime import clock
from queue_workflows.types import Row
from queue_workflows.worker import current_job, fencing

T = TypeVar("T")
_log = logging.getLogger(__name__)
RETRY_FIRST_S = 0.1
RETRY_MAX_S = 2.0
LATE = 1 / 3
"""A claim whose reply takes this share of its lease is handed back.

The first renewal may come another third later, and a worker ends itself a quarter early.
"""
REFUSALS = 4
"""How often the database may refuse a failure for what it is, before the job is given up."""
REFUSED_WAIT_S = 60.0
"""How long a job waits whose end nothing records, not even as poison."""


class Claimer:
    """Takes jobs of one queue and records how they ended, over one connection that it keeps."""

    def __init__(
        self,
        table: job_tables.JobTable,
        who: Callable[[], claims.Claimant],
        *,
        kept: db.DedicatedConnection | None = None,
    ) -> None:
        """`kept`: a connection shared with other claimers, whose owner calls `opened`."""
        self._table = table
        self._who = who
        self._kept = kept or db.DedicatedConnection(self.opened)
        self._begin = run_cache.on_connection(self._kept)
        self._was_lost = False
        self._held: set[str] = set()
        """The jobs that this worker knows to hold."""
        self._unsaved: list[job_tables.Lease] = []
        """Claims that ended while the database kept their outcomes from being recorded."""
        self.also_held: Callable[[], set[str]] = lambda: set()
        """The jobs that it holds besides."""
        self.on_lost: Callable[[job_tables.Lease], object] = lambda _: None
        """Called with a claim whose outcome was not written, as it is held no longer."""
        self._look_again = False
        self.sent_at = 0.0
        """Just before the last claim was sent, by `clock.boot_s`: its lease began no earlier."""
        self.isolated = False
        """Whether a row made the last claim fail, so that the rows were tried one by one."""
        self.wait_s = math.inf
        """Of the last claim that got no job: in how many seconds a limit lets the next one in."""
        self._pause = threading.Event()

    def connection(self) -> db.Connection:
        """The connection, opened when there is none."""
        return self._kept.get()

    def opened(self, conn: db.Connection) -> None:
        """The connection is a new one."""
        if self._was_lost:
            self._release_strays(conn)
            self._was_lost, self._look_again = False, True
        while self._unsaved:
            recovery.excuse(conn, self._unsaved[-1])
            self._unsaved.pop()

    def _release_strays(self, conn: db.Connection) -> None:
        """Give back what a commit whose reply was lost has claimed without anybody here knowing."""
        held = sorted(self._held | self.also_held())
        handback.release_strays(conn, self._table, self._who().worker_id, held)

    def _look(self) -> None:
        """Look once more: the server may have finished a lost statement after the first look."""
        if self._look_again:
            self._release_strays(self.connection())
            self._look_again = False

    def close(self) -> None:
        """Close the connection; the next use opens another."""
        self._kept.close()

    def _lose(self) -> None:
        self._was_lost = True
        self.close()

    def claim(self, *, promote: bool = False) -> Row | None:
        """The next job, claimed, or None. Database errors pass, with the connection dropped.

        An error that a row causes does not: that row is taken out of the way, see `isolation`.
        """
        self.isolated = False
        try:
            self._look()
            try:
                job = next(iter(self._claim(1, promote=promote)), None)
            except db.Error as error:
                if not quarantine.is_about_rows(error):
                    raise
                job = self._claim_apart(promote=promote)
        except db.Error:
            self._lose()
            raise
        self._held = set()
        if job is None or self._is_late([job]):
            return None
        self._held = {job["id"]}
        return job

    def _is_late(self, jobs: Sequence[Row]) -> bool:
        """Return whether the reply to a claim took too long; then its jobs are handed back.

        Their leases count from `sent_at`. The worker would end itself over one that may be over
        before its first renewal, although it has done nothing wrong.
        """
        took_s = clock.boot_s() - self.sent_at
        if not jobs or took_s < self._who().lease_s * LATE:
            return False
        _log.warning("a claim took %.1f s: jobs handed back: %d", took_s, len(jobs))
        leases = [job_tables.lease_of(self._table, job) for job in jobs]
        try:
            # By claim: the worker may still hold an outcome of an earlier claim of such a job.
            handback.hand_back_all(self.connection(), leases, reason="its claim took too long")
        except db.Error:
            self._lose()  # the next connection releases them
        return True

    def _claim_apart(self, *, promote: bool) -> Row | None:
        """Claim one job although a row makes the ordinary claim fail; None: there was none."""
        self.isolated = True
        conn, who = self.connection(), self._who()
        self.sent_at = clock.boot_s()
        found = quarantine.claim_apart(conn, self._table, who, promote=promote)
        if found.job_id is None:
            return None
        return claimed_jobs.read(conn, self._table, found.job_id, who.worker_id)

    def claim_batch(
        self, size: int, done: Sequence[finish.Done] = (), *, promote: bool = False
    ) -> list[Row]:
        """Record all of `done` and claim up to `size` ingest jobs, in one transaction.

        Database errors pass, with the connection dropped; `ClaimLost` when one of `done` is lost.
        An error that a row to be claimed causes does not pass: then one job is claimed, apart.
        """
        self.isolated = False
        try:
            self._look()
            try:
                if done:
                    jobs = self._finish(done, claim=size, promote=promote)
                else:
                    jobs = self._claim(size, promote=promote)
            except db.Error as error:
                if size < 1 or not quarantine.is_about_rows(error):
                    raise
                if done:
                    self._finish(done, claim=0)
                jobs = self._one_apart(promote=promote, recorded=bool(done))
            return [] if self._is_late(jobs) else jobs
        except db.Error:
            self._lose()
            raise

    def _claim(self, count: int, *, promote: bool) -> list[Row]:
        conn = self.connection()
        self.sent_at, self.wait_s = clock.boot_s(), math.inf
        return claims.claim(
            conn,
            self._table,
            self._who(),
            count=count,
            promote=promote,
            tell=self._told,
        )

    def _finish(
        self, done: Sequence[finish.Done], *, claim: int, promote: bool = False
    ) -> list[Row]:
        conn = self.connection()
        self.sent_at, self.wait_s = clock.boot_s(), math.inf
        return finish.finish(
            conn,
            done,
            who=self._who(),
            claim=claim,
            promote=promote,
            tell=self._told,
        )

    def _one_apart(self, *, promote: bool, recorded: bool) -> list[Row]:
        try:
            job = self._claim_apart(promote=promote)
        except db.Error as error:
            if not recorded:
                raise
            # An error would say that the results were not recorded.
            _log.warning("claiming waits for the database: %s", error)
            self._lose()
            return []
        return [job] if job else []

    def finish(
        self, work: current_job.Work, outcome: outcomes.Outcome, *, claim: bool
    ) -> Row | None:
        """Record how the job ended and, if `claim`, take the next; the next job, or None.

        While the database is away the write is retried until the lease ends; an outcome that may
        have been committed is looked up by its claim. Raises `ClaimLost` with nothing written.
        """
        ahead = None
        if self._table.in_run and outcome.kind == "completed":
            ahead = self._best_effort(
                work.job["run_id"], lambda: fast_path.look(work.job, outcome.result)
            )
        try:
            following = self._insist(work, outcome, ahead, claim=claim)
        finally:
            self._held.discard(work.job["id"])
        if following is None or self._is_late([following]):
            return None
        self._held.add(following["id"])
        return following

    def _insist(
        self,
        work: current_job.Work,
        outcome: outcomes.Outcome,
        ahead: claims.Ahead | None,
        *,
        claim: bool,
    ) -> Row | None:
        delay, refusals, apart = RETRY_FIRST_S, 0, False
        while True:
            try:
                following = self._record(work, outcome, ahead, claim=claim and not apart)
                return self._claim_after(work) if apart else following
            except errors.ClaimLost:
                self.on_lost(work.lease)
                raise
            except db.Error as error:
                if claim and not apart and quarantine.is_about_rows(error):
                    # The row that would be claimed next may be what the database refuses.
                    apart = True
                    continue
                self._lose()
                refusals += outcome.kind != "completed" and not fencing.may_pass(error)
                if refusals == REFUSALS:
                    self._give_up(work, error)
                outcome = self._after(error, work, outcome, ahead)
                ahead = None
                self._pause.wait(delay * random.uniform(0.5, 1.0))  # noqa: S311  jitter
                delay = min(RETRY_MAX_S, delay * 2)
                if self._recorded(work, outcome):
                    return None

    def _claim_after(self, work: current_job.Work) -> Row | None:
        """Claim the next job after the outcome of this one was recorded without a claim."""
        try:
            return self.claim()
        except db.Error as error:
            _log.warning("claiming after job %s waits: %s", work.job["id"], error)
            return None

    def _give_up(self, work: current_job.Work, error: db.Error) -> NoReturn:
        """End the job if its data is what the database refuses, else count a crash.

        The count bounds how often it runs. A job whose crash is refused as well waits.
        """
        why = f"its end cannot be recorded: {error}"
        _log.error("job %s: %s", work.job["id"], why)
        text = payload.error_text(why)
        try:
            ended = quarantine.is_about_data(error) and quarantine.set_aside(
                self.connection(), work.lease, error=text
            )
            if not ended:
                recovery.charge(self.connection(), work.lease, evidence=text)
        except db.Error:
            self._lose()
            with contextlib.suppress(db.Error):
                handback.hand_back(
                    self.connection(), work.lease, reason=why, after_s=REFUSED_WAIT_S
                )
        raise errors.ClaimLost(f"job {work.job['id']}: {why}") from error

    def _after(
        self,
        error: db.Error,
        work: current_job.Work,
        outcome: outcomes.Outcome,
        ahead: claims.Ahead | None,
    ) -> outcomes.Outcome:
        """What to record after the database refused: the same, or a failure that says why."""
        if work.verdict() is not None:
            if fencing.may_pass(error):
                self._unsaved.append(work.lease)
            raise errors.ClaimLost(f"job {work.job['id']}: lease over, unsaved") from error
        if fencing.may_pass(error):
            _log.warning("the result of job %s waits: %s", work.job["id"], error)
            return outcome
        if ahead is not None or outcome.kind != "completed":
            return outcome
        return outcomes.of_error(error, outcome.seconds, f"recording job {work.job['id']}")

    def _record(
        self,
        work: current_job.Work,
        outcome: outcomes.Outcome,
        ahead: claims.Ahead | None,
        *,
        claim: bool,
    ) -> Row | None:
        done = [finish.Done(work.lease, outcome, ahead)]
        if outcome.kind != "completed":
            finish.finish(self.connection(), done)
            return None
        jobs = self._finish(done, claim=int(claim))
        if self._table.in_run:
            self._best_effort(work.job["run_id"], lambda: fast_path.note(work.job))
        return jobs[0] if jobs else None

    def _told(self, wait_s: float) -> None:
        self.wait_s = wait_s

    def _recorded(self, work: current_job.Work, outcome: outcomes.Outcome) -> bool:
        """Whether a commit whose reply was lost did happen; unknown counts as no."""
        try:
            return finish.is_recorded(self.connection(), work.lease, outcome)
        except db.Error:
            self._lose()
            return False

    def drain(self, run_id: str) -> int:
        """Dispatch what this worker just finished, if nothing stands in the way; new rows.

        Best effort: whatever goes wrong is the orchestrator's, whose outbox row is still open.
        """
        return (
            self._best_effort(
                run_id, lambda: drain.drain_run(run_id, begin=self._begin, nowait=True)
            )
            or 0
        )

    def _best_effort(self, run_id: str, dispatch: Callable[[], T]) -> T | None:
        """Return what a dispatching step gives, or None if it raises.

        A run's row may hold anything, and its orchestrator ends it with the reason.
        """
        try:
            return dispatch()
        except db.Error as error:
            _log.debug("run %s is left to the orchestrator: %s", run_id, error)
            self.close()
        except errors.QueueWorkflowsError as error:
            _log.debug("run %s is left to the orchestrator: %s", run_id, error)
        except Exception as error:  # noqa: BLE001  best effort: a hostile run must not end the worker
            _log.warning("run %s is left to the orchestrator: %r", run_id, error)
        return None
