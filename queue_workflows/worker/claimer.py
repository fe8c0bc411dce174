"""Claim jobs and record outcomes on a connection that survives outages and unknown commits.

Its length: a lost reply of a claim or an outcome leaves claims that the other has to know.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, NoReturn

from queue_workflows import config, db, errors
from queue_workflows.dag import payload
from queue_workflows.engine import (
    claim_isolation,
    claimed_jobs,
    claims,
    finish,
    handback,
    job_tables,
    outcomes,
    recovery,
)
from queue_workflows.runtime import clock
from queue_workflows.types import Row
from queue_workflows.worker import claim_times, current_job, renewal_failures, run_dispatch

_log = logging.getLogger(__name__)
RETRY_FIRST_S = 0.1
RETRY_MAX_S = 2.0
LATE = 1 / 3
"""Share of the lease after which a claim whose reply comes late is handed back.

The first renewal may follow a third of the lease later, and a worker exits a quarter of it early.
"""
REFUSALS = 4
"""How often the database may refuse a failure by its values before the job is given up."""
REFUSED_WAIT_S = 60.0
"""Seconds for which a job waits if its end cannot be recorded, not even as poison."""


class _ClaimsOf(list[Any]):
    """Every claim of these jobs."""

    def __contains__(self, lease: Any) -> bool:
        return super().__contains__(lease.job_id)


class Claimer:
    """Claim jobs of one queue and record their outcomes, on one dedicated connection."""

    def __init__(
        self,
        table: job_tables.JobTable,
        who: Callable[[], claims.Claimant],
        *,
        dedicated: db.DedicatedConnection | None = None,
    ) -> None:
        """Use `dedicated`, whose owner calls `opened`, or a connection of its own if None."""
        self._table = table
        self._who = who
        self._dedicated = dedicated or db.DedicatedConnection(self.opened)
        self.dispatch = run_dispatch.RunDispatch(table, self._dedicated)
        """Dispatches what follows from recorded nodes."""
        self._was_lost = False
        self._own_jobs: set[str] = set()
        """The ids of the jobs that this worker knows to have claimed."""
        self._unsaved: list[job_tables.Lease] = []
        """Claims that ended before the database accepted their outcomes."""
        self.other_jobs: Callable[[], set[str]] = lambda: set()
        """Returns the ids of further jobs that this worker has claimed."""
        self.on_lost: Callable[[job_tables.Lease], object] = lambda _: None
        """Called with a claim whose outcome was not written because the claim was lost."""
        self._release_again = False
        self.sent_at = 0.0
        """Time (`clock.boot_s`) just before the last claim was sent: its lease starts no earlier.
        """
        self._asked_at: float | None = None
        """Time (`clock.boot_s`) of the first claim without a reply; None: each has its reply."""
        self.isolated = False
        """Whether a row made the last `claim_batch` try the rows one by one."""
        self._times = claim_times.ClaimTimes()
        self._last_on_wait: claims.OnWait | None = None
        self.held_back: Callable[[], bool] = lambda: False
        """Returns whether nothing may be claimed, whatever this worker records meanwhile."""
        self._pause = threading.Event()

    @property
    def wait_s(self) -> float:
        """Return the seconds until a claim may find more than the last one; inf: unknown.

        A limit admits a job then, or a delayed job is due. Those of more than CLAIM_POLL_S ahead
        are left to the poll.
        """
        return self._times.wait_s

    def connection(self) -> db.Connection:
        """Return the connection, and open it if there is none."""
        return self._dedicated.get()

    def serving(
        self, meanwhile: Callable[[int], object]
    ) -> contextlib.AbstractContextManager[None]:
        """Call `meanwhile` while a statement of the block waits for its reply."""
        return self._dedicated.serving(meanwhile)

    def opened(self, conn: db.Connection) -> None:
        """Release unknown claims and subtract crashes after a reconnect."""
        if self._was_lost:
            self._release_strays(conn)
            self._was_lost, self._release_again = False, True
        while self._unsaved:
            recovery.excuse(conn, self._unsaved[-1])
            self._unsaved.pop()

    def _release_strays(self, conn: db.Connection) -> None:
        """Hand back jobs that a commit with a lost reply may have claimed.

        If their leases have lapsed since, subtract the crashes: no handler of them has started.
        """
        held = sorted(self._own_jobs | self.other_jobs())
        worker_id = self._who().worker_id
        known = _ClaimsOf(held)
        db.run(conn, handback.release_strays(self._table, worker_id, known))
        if self._asked_at is not None:
            ago_s = clock.boot_s() - self._asked_at
            recovery.excuse_unanswered(conn, self._table, worker_id, asked_ago_s=ago_s, keep=held)
            self._asked_at = None

    def _release_strays_again(self) -> None:
        """Repeat the release once: the server may finish a lost statement after the first one."""
        if self._release_again:
            self._release_strays(self.connection())
            self._release_again = False

    def unanswered(self) -> dict[str, float]:
        """Return the time (`clock.boot_s`) of the first claim without a reply, by worker id."""
        asked_at = self._asked_at
        return {} if asked_at is None else {self._who().worker_id: asked_at}

    def may_hold_unknown_claims(self) -> bool:
        """Return whether the server may have executed a claim whose reply was lost."""
        return self._was_lost or self._release_again

    def close(self) -> None:
        """Close the connection; the next use opens another."""
        self._dedicated.close()

    def lose(self) -> None:
        """Close the connection after an error: what was sent last may have been committed."""
        self._was_lost = True
        self.close()

    def claim(self, *, promote: bool = False) -> Row | None:
        """Claim the next job and return it, or None; None too while claims are held back.

        Raises database errors after closing the connection. An error that a row causes is not
        raised: `claim_isolation.claim_apart` takes the row out of the way.
        """
        try:
            self._release_strays_again()
            if self.held_back():
                self._times.forget()
                return None
            try:
                job = next(iter(self._claim(1, promote=promote)), None)
            except db.Error as error:
                if not claim_isolation.is_about_rows(error):
                    raise
                job = self._claim_apart(promote=promote)
        except db.Error:
            self.lose()
            raise
        self._own_jobs = set()
        if job is None or self._is_late([job]):
            return None
        self._own_jobs = {job["id"]}
        return job

    def _is_late(self, jobs: Sequence[Row]) -> bool:
        """Hand the jobs back if the reply to their claim took too long; return whether it did.

        Their leases count from `sent_at`. One could end before its first renewal, and the worker
        would exit without a fault of its own.
        """
        took_s = clock.boot_s() - self.sent_at
        if not jobs or took_s < self._who().lease_s * LATE:
            return False
        _log.warning("a claim took %.1f s: jobs handed back: %d", took_s, len(jobs))
        leases = [job_tables.lease_of(self._table, job) for job in jobs]
        self._asked_at = self.sent_at  # if this fails, the next connection releases them
        try:
            # By claim: the worker may still hold an outcome of an earlier claim of such a job.
            db.run(
                self.connection(), handback.hand_back_all(leases, reason="its claim took too long")
            )
            for lease in leases:
                recovery.excuse(self.connection(), lease)  # of a lease that has lapsed since
            self._asked_at = None
        except db.Error:
            self.lose()  # the next connection releases them
        return True

    def _claim_apart(self, *, promote: bool) -> Row | None:
        """Claim one job row by row, after a row made the normal claim fail; or return None."""
        self.isolated = True
        conn, who = self.connection(), self._who()
        with self._asking(conn):
            found = db.run(conn, claim_isolation.claim_apart(self._table, who, promote=promote))
            if found.job_id is None:
                return None
            return db.run(conn, claimed_jobs.read(self._table, found.job_id, who.worker_id))

    @contextlib.contextmanager
    def _asking(self, conn: db.Connection) -> Generator[None]:
        """Note when a claim is sent, and whether it has its reply, which may be an error."""
        self.sent_at = clock.boot_s()
        if self._asked_at is None:
            self._asked_at = self.sent_at
        try:
            yield
        finally:
            if not conn.closed:
                self._asked_at = None

    def claim_batch(
        self, size: int, done: Sequence[finish.Done] = (), *, promote: bool = False
    ) -> list[Row]:
        """Record all of `done` and claim up to `size` jobs, in one transaction.

        Raises database errors after closing the connection, and `ClaimLost` if one of `done` is
        lost. If a row to be claimed causes an error, one job is claimed row by row instead. While
        claims are held back it only records.
        """
        self.isolated = False
        if self.held_back():
            size = 0
            self._times.forget()
        try:
            self._release_strays_again()
            try:
                if done:
                    jobs = self._finish(done, claim=size, promote=promote)
                else:
                    jobs = self._claim(size, promote=promote) if size else []
            except db.Error as error:
                if size < 1 or not claim_isolation.is_about_rows(error):
                    raise
                if done:
                    self._finish(done, claim=0)
                jobs = self._claim_one_apart(promote=promote, recorded=bool(done))
            return [] if self._is_late(jobs) else jobs
        except db.Error:
            self.lose()
            raise

    def _claim(self, count: int, *, promote: bool) -> list[Row]:
        conn = self.connection()
        promote |= self._times.is_due
        self._times.begin()
        with self._asking(conn):
            jobs = claims.claim(
                conn,
                self._table,
                self._who(),
                count=count,
                promote=promote,
                on_wait=self._on_wait(promote),
            )
        self._times.end(claimed=bool(jobs))
        return jobs

    def _finish(
        self, done: Sequence[finish.Done], *, claim: int, promote: bool = False
    ) -> list[Row]:
        conn = self.connection()
        on_wait = None
        if claim:
            promote |= self._times.is_due
            on_wait = self._on_wait(promote)
            self._times.begin()
        with self._asking(conn):
            jobs = finish.finish(
                conn, done, who=self._who(), claim=claim, promote=promote, on_wait=on_wait
            )
        if claim:
            self._times.end(claimed=bool(jobs))
        return jobs

    def _claim_one_apart(self, *, promote: bool, recorded: bool) -> list[Row]:
        try:
            job = self._claim_apart(promote=promote)
        except db.Error as error:
            if not recorded:
                raise
            # An error would say that the results were not recorded.
            _log.warning("claiming waits for the database: %s", error)
            self.lose()
            return []
        return [job] if job else []

    def finish(
        self, work: current_job.Work, outcome: outcomes.Outcome, *, claim: bool
    ) -> Row | None:
        """Record the outcome of a job and, if `claim`, claim the next one; return that job or None.

        While the database is unreachable the write is retried until the lease ends. If a commit's
        reply was lost, the claim number shows whether it happened. Any other error becomes that of
        the job. Raises `ClaimLost` if nothing was written.
        """
        ahead = self.dispatch.planned_after(work.job, outcome)
        try:
            following = self._finish_with_retries(work, outcome, ahead, claim=claim)
        finally:
            self._own_jobs.discard(work.job["id"])
        if following is None or self._is_late([following]):
            return None
        self._own_jobs.add(following["id"])
        return following

    def _finish_with_retries(
        self,
        work: current_job.Work,
        outcome: outcomes.Outcome,
        ahead: claims.Ahead | None,
        *,
        claim: bool,
    ) -> Row | None:
        delay, refusals, apart = RETRY_FIRST_S, 0, False
        claim = claim and not self.held_back()
        while True:
            try:
                following = self._record(work, outcome, ahead, claim=claim and not apart)
                return self._claim_after(work) if apart else following
            except errors.ClaimLost:
                self.on_lost(work.lease)
                raise
            except Exception as error:  # noqa: BLE001  no job may end its worker and stay running
                if claim and not apart and claim_isolation.is_about_rows(error):
                    # The row that would be claimed next may be what the database refuses.
                    apart = True
                    continue
                self.lose()
                refusals += outcome.kind != "completed" and not renewal_failures.may_pass(error)
                if refusals == REFUSALS:
                    self._stop_retrying(work, error)
                outcome = self._next_outcome(error, work, outcome, ahead)
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
            _log.warning("claiming after job %s waits: %s", work.job["id"], error, extra=work.ids)
            return None

    def _stop_retrying(self, work: current_job.Work, error: Exception) -> NoReturn:
        """Fail the job if its data cannot be stored, else count a crash.

        The crash count bounds how often the job runs. If the crash is refused too, the job waits.
        """
        why = f"its end cannot be recorded: {error}"
        _log.error("job %s: %s", work.job["id"], why, extra=work.ids)
        text = payload.error_text(why)
        try:
            ended = claim_isolation.is_about_data(error) and db.run(
                self.connection(), claim_isolation.set_aside(work.lease, error=text)
            )
            if not ended:
                db.run(self.connection(), recovery.charge(work.lease, evidence=text))
        except db.Error:
            self.lose()
            with contextlib.suppress(db.Error):
                db.run(
                    self.connection(),
                    handback.hand_back(work.lease, reason=why, after_s=REFUSED_WAIT_S),
                )
        raise errors.ClaimLost(f"job {work.job['id']}: {why}") from error

    def _next_outcome(
        self,
        error: Exception,
        work: current_job.Work,
        outcome: outcomes.Outcome,
        ahead: claims.Ahead | None,
    ) -> outcomes.Outcome:
        """Return the outcome to record after a refusal: the same, or a failure with the error."""
        if work.verdict() is not None:
            if renewal_failures.may_pass(error):
                self._unsaved.append(work.lease)
            raise errors.ClaimLost(f"job {work.job['id']}: lease over, unsaved") from error
        if renewal_failures.may_pass(error):
            _log.warning("the result of job %s waits: %s", work.job["id"], error, extra=work.ids)
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
        self.dispatch.note(work.job)
        return jobs[0] if jobs else None

    def _on_wait(self, promote: bool) -> claims.OnWait:
        """Return what a claim reports to. Reads the setting at each poll, not for each job."""
        if promote or self._last_on_wait is None:
            self._last_on_wait = claims.OnWait(self._times.note, config.CLAIM_POLL_S.read())
        return self._last_on_wait

    def _recorded(self, work: current_job.Work, outcome: outcomes.Outcome) -> bool:
        """Return whether a commit whose reply was lost did happen; False if that is unknown."""
        try:
            return db.run(self.connection(), finish.is_recorded(work.lease, outcome))
        except db.Error:
            self.lose()
            return False
