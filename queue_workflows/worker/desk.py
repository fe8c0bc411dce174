"""Decide which statement a worker sends next, and how its jobs react to each event.

This module does no I/O. The worker's loop passes replies, outcomes, deaths, signals and the time to
it, and carries out its decisions. Its length: whatever ends a job, the same few functions do it.
"""

from __future__ import annotations

import functools
import logging
import math
import random
import signal
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from queue_workflows import config, db, errors
from queue_workflows.claim import claims, outcomes, record, recovery, row_isolation
from queue_workflows.dag import payload
from queue_workflows.db import link
from queue_workflows.run import node_call, wire
from queue_workflows.runtime import clock, exit_codes, log_context
from queue_workflows.types import JsonDict, NowFn
from queue_workflows.worker import claimed_job, guards, job_logs, node_plans, queue_state

if TYPE_CHECKING:
    from queue_workflows.run import executors
    from queue_workflows.worker import gpu_models

_log = logging.getLogger(__name__)
TERM_S: Final = 1.0
"""Seconds between SIGTERM and SIGKILL for an executor whose job has to end."""
UNWIND_S: Final = 2.0
"""Seconds before the stop deadline at which a handler that yields or awaits is interrupted."""
LATE: Final = 1 / 3
"""If the reply to a claim takes longer than this share of the lease, its jobs are handed back.

The first renewal may come a third of the lease later, and a job is ended a quarter before its end.
"""
REFUSALS: Final = 4
"""How often the database may refuse the values of a job's outcome before the job is given up."""
TIMEOUTS: Final = 60
"""How often in a row statements about a job may take too long before the next counts as refused.
With the pauses, that takes about as long as a lease, so the lease was renewed meanwhile."""
REFUSED_WAIT_S: Final = 60.0
"""Seconds for which a job is delayed if neither its outcome nor its failure can be recorded."""
RETRY_FIRST_S: Final = 0.1
RETRY_MAX_S: Final = 5.0
UNSURE_S: Final = 1.0
"""Seconds after a lost reply until a worker looks again for claims that it does not know of."""
WAITED: Final = "waited too long for an executor"
STOPPED_WITH: Final = "its executor was stopped with job "
LOST_WITHIN_S: Final = 0.5
"""Seconds that a worker has to record outcomes before it exits because a claim is lost."""
EXIT_WITHIN_S: Final = 4.0
"""Seconds that any other exit may take, for example while the database does not answer."""
INPUT_PREFIX: Final = "__input__"
MOST: Final = 500
"""The most results that one statement records. While so many jobs are set aside, the worker claims
none, since the lock of one session, for example, may prevent that any result is recorded."""
FEW: Final = 5
"""Fewer than FEW squared results that cannot be recorded together are recorded one by one."""
LOCKED: Final = "55P03"
"""SQLSTATE of a statement that did not get its locks within `pool.LOOP_LOCK_S`."""
SHORTEST_S: Final = 0.001
"""The shortest time limit that can be enforced, since the loop's timer counts milliseconds."""
COMPLETED: Final = "completed"
"""Returned by `_record` once the result is recorded."""
ASIDE_S: Final = 0.5
"""Least seconds between two tries of writes that have failed for now."""
_READ_ONLY: Final = "25"
"""The SQLSTATE class of a read-only server."""
MakeScript = Callable[[], "db.Script[Any]"]


class Write(NamedTuple):
    """A script that the claiming connection repeats until the database has answered.

    After a lost reply it may run twice; then the check of its claim, or a lookup, prevents harm.
    """

    make: MakeScript
    done: Callable[[Any], object]
    """Called with the result."""
    refused: Callable[[Exception], object]
    """Called with an error that a repetition would not cure."""
    job: claimed_job.ClaimedJob
    """The job that it is about. Writes about the same job keep their order."""
    ends: bool = False
    """Whether it records the outcome of the job."""


def may_pass(error: Exception) -> bool:
    """Return whether the same write may succeed later, after a lost connection for example.

    False for an error that the database did not raise, such as a failure to adapt a value, and for
    one of a row, such as an error that a trigger raises or a value that is too large.
    """
    passing = isinstance(error, (db.OperationalError, db.InterfaceError))
    passing = passing or _sqlstate(error).startswith(_READ_ONLY)
    return passing and not row_isolation.is_about_rows(error)


class Desk:
    """The state of a worker, which is its queues, their jobs and the pending writes.

    `ring` makes the claiming connection call `next`, `wake_at` makes the loop call `tick` in time.
    `ends_with_job`: if the worker has to kill a handler, it exits, as the plain command promises.
    `is_known`: whether the database has a row of this worker, so that others notice its death. If
    not, it claims no job before `begin`.
    """

    def __init__(
        self,
        ring: Callable[[], object],
        wake_at: Callable[[float], object],
        logs: job_logs.JobLogs,
        models: gpu_models.GpuModels | None = None,
        *,
        ends_with_job: bool = False,
        is_known: bool = True,
        now_fn: NowFn = clock.boot_s,
    ) -> None:
        self._ring, self._wake_at = ring, wake_at
        self._logs, self._models = logs, models
        self.printed = logs.add
        """Stores a part of a handler's output."""
        self.ends_with_job, self._is_known = ends_with_job, is_known
        self.now = now_fn
        self.queues: list[queue_state.Queue] = []
        """In the order of their turns; a queue that has sent a statement moves to the end."""
        self._writes: deque[Write] = deque()
        """All other writes than claims and records of completed jobs, sent one by one."""
        self._wrote = False
        """Whether the last statement was one of these that frees no slot, such as a step or a job
        that waited and is handed back. Then claims and records come first, since these writes may
        be many or never end. Records come first, too, while the worker stops."""
        self._aside: dict[claimed_job.ClaimedJob, bool] = {}
        """The jobs whose next write has failed for now, the first to be tried again first, and
        whether its own row may be the cause, as another session has locked it or it is slow."""
        self._aside_at = 0.0
        """When a write of these jobs is tried again. As a try may take long, any other statements
        get as much time before the next one."""
        self._retry_at, self._retry_s = math.inf, RETRY_FIRST_S
        self._logged = ""
        self._poll_at, self._poll_s = 0.0, config.CLAIM_POLL_S.read()
        self.heard_cancel = self.may_be_cancelled = False
        """Whether a cancel arrived during the claim that runs, as it may concern one of its jobs.
        Whether that claim has ended since. Then a renewal shows which jobs are cancelled."""
        self._lone: claimed_job.ClaimedJob | None = None
        """A job that runs, or has to run, alone in this worker; no other is claimed meanwhile."""
        self.throttled = False
        """Whether memory is full, so that the worker may not claim."""
        self._returned: list[tuple[list[claimed_job.ClaimedJob], Callable[[], object]]] = []
        """Jobs that are being handed back, and the function to call once all of them are."""
        self.stopping = False
        self.stop_at = math.inf
        """When a stopping worker hands its jobs back."""
        self.exit_code, self.exit_by = 0, math.inf
        """`exit_by` is when the process exits, even with pending writes."""
        self.worked_at = now_fn()
        """When the worker last had something to do."""

    @property
    def jobs(self) -> list[claimed_job.ClaimedJob]:
        """Return the jobs whose claims are held."""
        return [job for each in self.queues for job in each.jobs.values()]

    @property
    def busy(self) -> bool:
        """Return whether jobs are or may be claimed, a model changes, or writes are pending."""
        changes = self._models is not None and self._models.is_changing
        claims_jobs = any(each.jobs or each.claiming or each.unsure for each in self.queues)
        return bool(changes or self._writes or claims_jobs)

    # --- The claiming connection: a `db.link.Source`.

    def next(self) -> link.Request | None:
        """Return the next request of the claiming connection, or None."""
        now = self.now()
        if now < self._retry_at < math.inf:
            return None
        self._retry_at = math.inf
        for own in self.queues:
            if now >= own.unsure_at:
                own.unsure, own.unsure_at = True, math.inf
            if own.unsure:
                return self._resolve(own)
        wrote, self._wrote = self._wrote, False
        write = self._due_write(now) if self._writes else None
        for at, own in enumerate(self.queues if wrote or write is None or self.stopping else ()):
            if (found := self._record_and_claim(own, now)) is not None:
                self.queues = self.queues[at + 1 :] + self.queues[: at + 1]
                return found
        if write is None:
            return None
        self._wrote = not (write.ends and write.job.has_started)
        return self._request(write, now)

    def _due_write(self, now: float) -> Write | None:
        """Return the write to send now. The writes of a job that is set aside wait for its turn.

        For example, a handler sends parts of a stream before the earlier parts are stored.
        """
        if self._aside and now >= self._aside_at:
            job = next(iter(self._aside))
            return next(each for each in self._writes if each.job is job)
        return next((each for each in self._writes if each.job not in self._aside), None)

    def _request(self, write: Write, now: float) -> link.Request:
        """Return the request of a write, which keeps its place until it is answered for good."""

        def ended() -> None:
            self._writes.remove(write)
            if self._aside.pop(write.job, None) is not None:
                self._aside_at = 0.0  # the others may succeed at once, too

        def done(found: Any) -> None:
            ended()
            write.job.timeouts = 0
            write.done(found)

        def refused(error: Exception) -> None:
            state = _sqlstate(error)
            write.job.timeouts += state == row_isolation.TIMED_OUT
            is_slow = state == row_isolation.TIMED_OUT and write.job.timeouts >= TIMEOUTS
            if state == LOCKED or (may_pass(error) and not is_slow):
                self._set_aside(write.job, now, by_row=state in (LOCKED, row_isolation.TIMED_OUT))
                what = f"a statement about job {write.job.id}"
                if state == row_isolation.TIMED_OUT:
                    self._log_wait(error, what)  # other statements are sent at once
                elif state != LOCKED:
                    self._retry_later(error, what)
            else:
                ended()
                write.refused(error)

        return link.Request(write.make(), done, refused, lambda: None)

    def _set_aside(self, job: claimed_job.ClaimedJob, sent: float, *, by_row: bool) -> None:
        """Try a write of this job again later, behind the other jobs that are set aside."""
        self._aside.pop(job, None)
        self._aside[job] = by_row
        if (now := self.now()) >= self._aside_at:
            others = not self.stopping or any(own.done for own in self.queues)
            others = others or any(each.job not in self._aside for each in self._writes)
            self._aside_at = now + max(ASIDE_S, others * (now - sent))
        self._wake_at(self._aside_at)
        if self._lone is not None:
            self.start(self._lone.queue)

    def _write(self, write: Write) -> None:
        self._writes.append(write)
        self._ring()

    def notified(self, channel: str, text: str) -> None:
        """Let the queue that was notified claim again."""
        for own in self.queues:
            if own.table.ready_channel == channel and own.who.queue == text:
                own.may_claim = True

    def begin(self) -> bool:
        """Claim from now on; return whether the worker could not claim before."""
        was_known, self._is_known = self._is_known, True
        if not was_known:
            self.look()
        return not was_known

    def look(self, *, promote: bool = False) -> None:
        """Let each queue claim again; with `promote`, first admit jobs that have become due."""
        for own in self.queues:
            own.may_claim = True
            own.promote |= promote
        self._ring()

    connected = disconnected = look  # notifications sent without a connection are lost

    # --- Claims and completed jobs.

    def _record_and_claim(self, own: queue_state.Queue, now: float) -> link.Request | None:
        done = own.done[: 1 if own.shape.gpu else min(MOST, own.together)]
        count, ahead = 0, False
        measured = self._models is None or self._models.may_claim
        halted = self.stopping or self.throttled or self._lone or len(self._aside) >= MOST
        if measured and self._is_known and not halted:
            # The node that follows a completed one is claimed by the statement that records it.
            own.may_claim |= bool(done) and own.table.in_run
            count, ahead = own.claimable(records=bool(done))
        if not done and count < 1:
            return None
        promote, by_row = count > 0 and own.promote, count > 0 and own.by_row
        own.asked = now
        if count:
            # Before the claim, so that a notification during it counts.
            own.may_claim = own.promote = own.by_row = False
            own.claiming = True
        script = own.claim(count, done, promote=promote, by_row=by_row, ahead_s=self._poll_s)
        return link.Request(
            script,
            functools.partial(self._answered_step, own, done, count, ahead),
            functools.partial(self._not_claimed, own, done, count, by_row),
            functools.partial(self._unknown, own, done),
        )

    def _answered_step(
        self, own: queue_state.Queue, done: Sequence[node_plans.Done], count: int, ahead: bool,
        rows: Sequence[Sequence[bytes | None]],
    ) -> None:  # fmt: skip
        """Remove the recorded jobs, and add the claimed ones."""
        now = self.now()
        self._answered(own)
        self._retry_s, self._logged = RETRY_FIRST_S, ""
        if done:
            own.window.stated(now - own.asked)
            del own.done[: len(done)]
            own.together += 1
            for job, _ in done:
                self._forget(job, completed=True)
        jobs, wait = list[claimed_job.ClaimedJob](), claims.Wait()
        for row in rows:
            if row[0] is None:
                wait = claims.Wait(*(None if each is None else float(each) for each in row[10:12]))
            else:
                jobs.append(claimed_job.ClaimedJob(own, row, own.asked, now))
        if count:
            own.window.claimed(len(jobs), count, ahead=ahead)
            own.most += len(jobs) == own.most
            own.may_claim |= len(jobs) == count
            again_at = own.times.after(own.asked, now, wait, claimed=bool(jobs))
            self._poll_at = min(self._poll_at, again_at)
            self._wake_at(self._poll_at)
        if jobs:
            own.left -= len(jobs)
            self.worked_at = now
            self._take(own, jobs, now)
        self.start(own)

    def _answered(self, own: queue_state.Queue) -> None:
        """Note that no claim runs; the next one may follow at once, before `tick` is called."""
        own.claiming = False
        if self.heard_cancel:
            self.heard_cancel, self.may_be_cancelled = False, True
            self._wake_at(self.now())

    def _take(
        self, own: queue_state.Queue, jobs: Sequence[claimed_job.ClaimedJob], now: float
    ) -> None:
        """Add claimed jobs, or hand them back if they cannot run here."""
        why = "shutdown" if self.stopping else "turned off" if own.off else ""
        if now - own.asked > LATE * own.who.lease_s:
            why = "its claim took too long"
            text = "a claim took %.1f s, too long for a lease of %g s, so its jobs go back: %d"
            _log.warning(text, now - own.asked, own.who.lease_s, len(jobs))
        for job in jobs:
            before = own.jobs.setdefault(job.id, job)
            if before is not job:
                # The lease of the earlier claim has lapsed unnoticed. Its handler may still run.
                self.lose(before)
                why_not = "an earlier claim of it has not ended in this worker"
                self.hand_back(job, why_not, after_s=TERM_S)  # else it is claimed again at once
            elif why:
                self.hand_back(job, why)
            elif job.is_last and self._lone is not None:
                self.hand_back(job, "another job is to run alone in this worker")
            elif (outcome := _without_handler(job)) is not None:
                self._end(job, outcome)
            else:
                own.waiting.append(job)
                self._lone = job if job.is_last else self._lone

    def _not_claimed(
        self, own: queue_state.Queue, done: Sequence[node_plans.Done], count: int, by_row: bool,
        error: Exception,
    ) -> None:  # fmt: skip
        """Find whether a result, the row of a job, or the state of the database is the cause."""
        own.may_claim |= count > 0
        self._answered(own)
        state = _sqlstate(error)
        is_slow = state == row_isolation.TIMED_OUT
        own.most = max(1, count // 2) if count and is_slow else own.most
        of_row = (is_slow and count == 1) or row_isolation.is_about_rows(error)
        apart = is_slow or state in (LOCKED, claims.CLAIM_LOST) or not may_pass(error)
        if done and apart:  # one result is refused, or they take too long together
            if (root := math.isqrt(len(done))) >= FEW:
                own.together = root
            else:
                self._record_apart(own, done)
        elif state == LOCKED:
            own.may_claim, own.promote = False, True  # until the next poll
        elif of_row and not by_row and not done:
            own.by_row = True
        else:
            self._retry_later(error)

    def _record_apart(self, own: queue_state.Queue, done: Sequence[node_plans.Done]) -> None:
        """Record each of these completed jobs by itself."""
        del own.done[: len(done)]
        for job, outcome in done:
            self.write(job, functools.partial(_record, job, outcome))

    def _log_wait(self, error: Exception, what: str) -> None:
        """Log the work that an error delays, once until a claim succeeds or the error changes."""
        if self._logged != (logged := _sqlstate(error) or "away"):
            self._logged = logged
            line = (str(error).strip() or type(error).__name__).splitlines()[0]
            _log.warning("%s waits for the database, and is tried again: %s", what, line)

    def _retry_later(self, error: Exception, what: str = "claiming") -> None:
        self._log_wait(error, what)
        self._retry_at = self.now() + self._retry_s * random.uniform(0.5, 1.0)  # noqa: S311  jitter
        self._retry_s = min(RETRY_MAX_S, self._retry_s * 2)
        self._wake_at(self._retry_at)

    def _unknown(self, own: queue_state.Queue, done: Sequence[node_plans.Done]) -> None:
        """Note that a reply was lost, and that its statement may have been committed."""
        self._record_apart(own, done)
        self._answered(own)
        own.unsure = own.may_claim = True
        own.unsure_at = self.now() + UNSURE_S
        self._wake_at(own.unsure_at)

    def _resolve(self, own: queue_state.Queue) -> link.Request:
        """Hand back the jobs of a claim whose reply was lost."""

        def resolved(_: object) -> None:
            own.unsure = False

        def refused(error: Exception) -> None:
            # The row of one of them may be slow or locked for long, so the others go on meanwhile.
            own.unsure, own.unsure_at = False, self.now() + RETRY_MAX_S
            self._retry_later(error, "handing back a lost claim")
            self._wake_at(own.unsure_at)

        known = {job.lease for job in own.jobs.values()}
        strays = record.release_strays(own.table, own.who.worker_id, known)
        return link.Request(strays, resolved, refused, lambda: None)

    # --- Ends of jobs that are not completed.

    def write(self, job: claimed_job.ClaimedJob, make: MakeScript | None) -> None:
        """Record the outcome of a job whose handler has ended.

        The script returns None or False if the claim is lost; `make` is None if that is known.
        """
        job.is_over = True
        self._lone = None if self._lone is job else self._lone
        if make is None:
            self._forget(job)
            return

        def done(found: Any) -> None:
            if found is None or found is False:
                what = "the end of job %s is not recorded, since its claim is lost"
                _log.warning(what, job.id, extra=job.ids)
            else:
                job.queue.runner.recorded(job, found)
            self._forget(job, completed=found is COMPLETED)
            # The job may be queued again, and be due before the next poll.
            job.queue.may_claim = job.queue.promote = True

        def refused(error: Exception) -> None:
            job.refusals += 1
            if job.refusals < REFUSALS:
                self._retry_later(error, f"the end of job {job.id}")
                self.write(job, make)
            elif job.refusals == REFUSALS:
                why = f"its end cannot be recorded: {str(error).strip()}"
                _log.error("job %s: %s", job.id, why, extra=job.ids)
                self.write(job, functools.partial(_give_up, job, why, error))
            elif job.refusals == REFUSALS + 1:
                given = {"reason": payload.error_text(error), "after_s": REFUSED_WAIT_S}
                self.write(job, functools.partial(record.hand_back, job.lease, **given))
            else:
                text = "the end of job %s cannot be recorded, so its claim ends with its lease: %s"
                _log.warning(text, job.id, error, extra=job.ids)
                self._forget(job)

        self._write(Write(make, done, refused, job, ends=True))

    def _end(self, job: claimed_job.ClaimedJob, outcome: outcomes.Outcome) -> None:
        self.write(job, functools.partial(record.end, job.lease, outcome))

    def _forget(self, job: claimed_job.ClaimedJob, *, completed: bool = False) -> None:
        own = job.queue
        if own.jobs.get(job.id) is job:
            del own.jobs[job.id]
        self.worked_at = self.now()
        if completed and job.in_run:
            node_plans.noted(job)
        if job.announced_in is not None:
            self._announce(job, completed=completed)
        if self._returned:
            self._call_returned()
        if self._lone is not None:
            self.start(self._lone.queue)

    def _announce(self, job: claimed_job.ClaimedJob, *, completed: bool) -> None:
        """Call the app's hook for a recorded node, in the executor that has its value."""
        assert job.announced_in is not None
        announce = functools.partial(job.queue.runner.announce, job.announced_in, job.key)
        job.announced_in = None

        def answered(found: JsonDict | Exception) -> None:
            announce(None if isinstance(found, Exception) else wire.encoded(found))

        if completed:
            self._write(Write(functools.partial(claimed_job.rows, job), answered, answered, job))
        else:
            announce(None)

    # --- Handlers: the owner of `run.executors.Executors`.

    def start(self, own: queue_state.Queue) -> None:
        """Give waiting jobs to executors that have room.

        A job that runs alone waits until all others are recorded, except for records that fail
        because of their rows. So if the worker dies with several jobs, its parent knows that this
        one had not begun.
        """
        now = self.now()
        while own.waiting and not own.changing:
            if own.waiting[0] is self._lone:
                failing = {job for job, by_row in self._aside.items() if by_row and job.is_over}
                if not failing.issuperset(job for job in self.jobs if job is not self._lone):
                    if len(own.waiting) == 1:
                        break
                    own.waiting.rotate(-1)
            job = own.waiting[0]
            if (failure := job.lease_end.check(now)) is not None:
                self._fail(job, failure, now)  # this process was stopped for so long
                continue
            shared = own.shape.concurrent or job.name in own.async_tasks
            # On a GPU a fresh executor for each job would load the model for each.
            isolated = not own.shape.gpu and (job.name in own.isolated or (shared and job.is_last))
            own.runner.queues = own.window.is_tiny and not (
                isolated or own.shape.gpu or own.announces or job.crash_count or job.lapse_count
            )
            if own.runner.room < 1:
                break
            own.waiting.popleft()
            job.start(now)
            own.runner.start(job, isolated=isolated, shared=shared)
            self._wake_at(job.check_at(now))
        if own.waiting:
            self._wake_at(own.waiting[0].starts_by)

    def room(self) -> None:
        """Give waiting jobs to an executor that has become free, and claim more."""
        for own in self.queues:
            if own.waiting:
                self.start(own)
        self._ring()

    def ended(self, job: claimed_job.ClaimedJob, outcome: outcomes.Outcome) -> None:
        """Record the outcome of a handler, unless something else was decided about its job."""
        own, decided = job.queue, job.end
        if job.has_started:
            own.window.ended(outcome.seconds)
        if self._logs.open:
            self._logs.end(job)
        if own.left < math.inf:
            # `run_once` does not wait for another worker that may know the node.
            outcome = outcomes.without_others(outcome)
        if self._models is not None:
            outcome = self._models.ended(job, outcome)
        used = job.used(outcome.seconds, outcome.vm_rss_mb_peak)
        place, job.place = job.place, None
        if decided is not None and (decided.make is None or outcome.kind == "cancelled"):
            # Its claim is lost, or it has ended on request, or it never started.
            self.write(job, decided.make)
            return
        outcome = outcomes.with_used(job.judged(outcome) if decided else outcome, used)
        if outcome.kind == "completed":
            if own.announces and place is not None:
                job.announced_in = place
                own.runner.expect_announcement(place)
            if self._writes and any(each.job is job for each in self._writes):
                # An event of its model, for example, is not to come after its end.
                self.write(job, functools.partial(_record, job, outcome))
            else:
                job.is_over = True
                self._lone = None if self._lone is job else self._lone
                own.done.append((job, outcome))
                self._ring()
        else:
            self._end(job, outcome)
        if outcome.kind == "timed_out" and decided is not None:
            self._leave(decided.code)

    def died(self, job: claimed_job.ClaimedJob, death: executors.Death) -> None:
        """Record the decided outcome of a job whose executor has died, else count a crash."""
        log = self._logs.end(job)
        job.place = None
        if job.end is not None:
            self.write(job, job.end.make)
            self._leave(job.end.code)
        elif death.by_deadline:
            self.hand_back(job, "its worker was silent")
            self._leave(exit_codes.LOST)
        elif death.killed_for:
            self.hand_back(job, death.killed_for)
        elif not job.has_started:
            self.hand_back(job, "its executor ended before it started")
        else:
            _log.error("job %s: its executor %s", job.id, death.evidence, extra=job.ids)
            seconds, lines = self.now() - job.started, [] if log is None else log.last_lines
            detail = death.detail | {"last_lines": lines, "seconds": round(seconds, 3)}
            self.write(job, functools.partial(_charge, job, death.evidence, detail))

    def started(self, job: claimed_job.ClaimedJob) -> None:
        """Start the guards of a job that had to wait for others in its executor."""
        now = self.now()
        job.start(now)
        job.unwound = False
        self._wake_at(job.check_at(now))

    def waits(self, job: claimed_job.ClaimedJob) -> None:
        """Note that a job waits for others in its executor; ask for it back if all shall stop."""
        job.wait()
        if self.stopping or job.queue.off is not None:
            job.queue.runner.interrupt(job, "shutdown" if self.stopping else "turned off")

    def event(self, job: claimed_job.ClaimedJob, event_type: str, elapsed_s: float | None) -> None:
        """Record an event about the model of a node, before its outcome is recorded."""
        if self._models is None:
            return
        if event_type == "model_load_done" and elapsed_s is not None:
            self._models.learn(job.model, elapsed_s)

        def answered(error: Exception | None) -> None:
            if error is not None:
                text = "job %s: its event %s is not recorded: %s"
                _log.warning(text, job.id, event_type, error, extra=job.ids)

        make = functools.partial(claimed_job.note, job, event_type, elapsed_s=elapsed_s, once=True)
        self._write(Write(make, answered, answered, job))

    def model(self, model: JsonDict) -> None:
        """Note the model that the executor of a GPU reports."""
        if self._models is not None:
            self._models.reported(model)

    def changed(self, error: str | None) -> None:
        """Note that a requested load or unload of a model has ended, with its error if any."""
        if self._models is not None:
            self._models.changed(error)
        self.room()

    def asked(self, job: claimed_job.ClaimedJob, question: JsonDict) -> None:
        """Answer a question of a handler as soon as the claiming connection can."""
        job.beat(self.now())
        assert job.place is not None
        answer = functools.partial(job.queue.runner.answer, job.place, question["no"])

        def refused(error: Exception) -> None:
            why = f"the database refuses a step: {str(error).strip()}"
            answer(claimed_job.answered(error=why))

        make = functools.partial(claimed_job.answer, job, question)
        self._write(Write(make, answer, refused, job))

    # --- Decisions.

    def decide(
        self, job: claimed_job.ClaimedJob, why: str, make: MakeScript | None, *, code: int = 0,
        now: bool = False,
    ) -> None:  # fmt: skip
        """Stop the handler of a job, and record the outcome of `make` once it has ended.

        `make` is None if the claim is lost. With `now`, SIGKILL stops the handler at once.
        """
        if job.is_over:
            return
        if job.place is None:
            if job in job.queue.waiting:
                job.queue.waiting.remove(job)
            self.write(job, make)
            return
        if job.end is None:
            _log.warning("job %s: %s; ending its handler", job.id, why, extra=job.ids)
            job.end = claimed_job.Ending(why, make, code, self.now())
        if not now and (job.place.shared or not job.has_started):
            job.queue.runner.interrupt(job, "it must end")
        else:
            signum = signal.SIGKILL if now or self.ends_with_job else signal.SIGTERM
            job.queue.runner.kill(job.place, signum, STOPPED_WITH + job.id)
        self._wake_at(job.end.at + TERM_S)

    def hand_back(
        self, job: claimed_job.ClaimedJob, reason: str, *, front: bool = False,
        after_s: float = 0.0, now: bool = False, code: int = 0,
    ) -> None:  # fmt: skip
        """Stop a job and return it to its queue, without counting an attempt."""
        # The reason may be the text of an executor's error, with characters no database stores.
        given = {"reason": payload.error_text(reason), "front": front, "after_s": after_s}
        make = functools.partial(record.hand_back, job.lease, **given)
        self.decide(job, f"it goes back to its queue: {reason}", make, now=now, code=code)

    def lose(self, job: claimed_job.ClaimedJob) -> None:
        """Stop a job whose claim is lost, since another worker may run it already."""
        if job.end is None:
            at_once = job.place is None or not job.place.shared or len(job.place.jobs) == 1
            self.decide(job, "the claim was lost", None, code=exit_codes.LOST, now=at_once)

    def cancel(self, job: claimed_job.ClaimedJob) -> None:
        """Ask the handler of a cancelled job to end within CANCEL_GRACE_S."""
        if job.cancel_requested:
            return
        job.cancel_requested = True
        if job.place is None:
            self.hand_back(job, "cancelled")
            return
        job.cancel_at = self.now() + config.CANCEL_GRACE_S.read()
        job.queue.runner.interrupt(job, "cancelled")
        self._wake_at(job.cancel_at)

    def switch(self, own: queue_state.Queue, policy: str | None, *, hard: bool) -> None:
        """Switch a queue OFF by this stop policy, or ON if it is None."""
        was, own.off = own.off, policy
        if policy is None:
            if was is not None:
                self.look()
        elif not hard:
            self._return_waiting(own, "turned off")
        else:
            self._return_all(own, "turned off", exit_codes.CONTROL)
            if self._models is not None and self._models.holds_model and not own.jobs:
                own.runner.kill_idle("its executor was stopped, since its worker was turned off")
                self._leave(exit_codes.CONTROL)

    def requeue(
        self, reason: str, done: Callable[[], object], only: queue_state.Queue | None = None
    ) -> None:
        """Return the jobs of all queues, or of one, to the front, uncounted; then call `done`."""
        reason = payload.error_text(reason)  # an app's stop policy may have written it
        queues = self.queues if only is None else [only]
        self._returned.append(([job for own in queues for job in own.jobs.values()], done))
        for own in queues:
            self._return_all(own, reason)
        self._call_returned()

    def _call_returned(self) -> None:
        held = {*self.jobs}
        for each in [*self._returned]:
            if held.isdisjoint(each[0]):
                self._returned.remove(each)
                each[1]()

    def _return_all(self, own: queue_state.Queue, reason: str, code: int = 0) -> None:
        self._return_waiting(own, reason)
        for job in [*own.jobs.values()]:
            self.hand_back(job, reason, front=True, now=True, code=code)

    def _return_waiting(self, own: queue_state.Queue, reason: str) -> None:
        own.window.reset()
        while own.waiting:
            self.hand_back(own.waiting.popleft(), reason)
        waits = [job for job in own.jobs.values() if job.place is not None and not job.has_started]
        if waits:
            own.runner.catch_up()  # one may have begun
        for job in waits:
            if job.place is not None and not job.has_started:
                own.runner.interrupt(job, reason)

    def stop(self, within_s: float) -> None:
        """Claim no more, and hand back the jobs that still run after so many seconds."""
        self.stopping = True
        self.stop_at = min(self.stop_at, self.now() + within_s)
        self.exit_by = min(self.exit_by, self.stop_at + EXIT_WITHIN_S)
        for own in self.queues:
            self._return_waiting(own, "shutdown")
        self._wake_at(self.now())

    def _leave(self, code: int) -> None:
        """Exit after a job that the worker has stopped, if it `ends_with_job`."""
        if self.ends_with_job and code:
            self.leave(code)

    def leave(self, code: int) -> None:
        """Stop the worker now, so that it exits with this code."""
        self.exit_code = self.exit_code or code
        self.stop(0.0)
        within_s = LOST_WITHIN_S if code == exit_codes.LOST else EXIT_WITHIN_S
        self.exit_by = min(self.exit_by, self.now() + within_s)

    # --- Time.

    def tick(self, now: float, *, stopped: bool = False) -> float:
        """Do everything that is due; return when to call this again.

        `stopped` is True while a signal or a debugger has stopped the process that runs a gpu job.
        """
        if now >= self._poll_at:
            self._poll_s = config.CLAIM_POLL_S.read()
            self._poll_at = now + self._poll_s
            self.look(promote=True)
        aside_at = self._aside_at if self._aside else math.inf
        asks = [self._retry_at, aside_at, *(own.unsure_at for own in self.queues)]
        if now >= min(asks):
            self._ring()
        due = [self._poll_at, self.exit_by, *(at for at in asks if at > now)]
        if self._models is not None and (why := self._models.overdue(now, self.stop_at)):
            self.queues[0].runner.kill_idle(f"its executor was stopped, since {why}")
            self._leave(exit_codes.BUDGET if now < self.stop_at else 0)
        return min([*due, *(self._check(job, now, stopped=stopped) for job in self.jobs)])

    def _check(self, job: claimed_job.ClaimedJob, now: float, *, stopped: bool) -> float:
        """Stop a job whose time is over; return when to check again."""
        unwind_at = math.inf if job.unwound else self.stop_at - UNWIND_S
        if job.is_over or job.end is not None:
            pass
        elif (failure := job.verdict(now, stopped=stopped)) is not None:
            self._fail(job, failure, now)
        elif now >= job.cancel_at:
            self.hand_back(job, "cancelled", code=exit_codes.CONTROL)
        elif now >= self.stop_at:
            self.hand_back(job, "shutdown", now=True)
        elif now >= unwind_at and job.place is not None:
            self._unwind(job, "shutdown")
        elif now >= job.starts_by:
            if job.place is None:
                self._return_waiting(job.queue, WAITED)  # also the jobs behind it
            else:
                self._unwind(job, WAITED)
        if job.is_over:
            return math.inf
        if job.end is not None:
            return self._escalate(job, job.end, now)
        return min(job.check_at(now), max(now, unwind_at), self.stop_at)

    def _unwind(self, job: claimed_job.ClaimedJob, why: str) -> None:
        """Interrupt a handler that yields or awaits, or that has not begun."""
        job.unwound = True
        job.queue.runner.interrupt(job, why)

    def _escalate(self, job: claimed_job.ClaimedJob, end: claimed_job.Ending, now: float) -> float:
        """Kill the executor of a job that SIGTERM has not ended; return when to check again."""
        if now < end.at + TERM_S:
            return end.at + TERM_S
        assert job.place is not None
        job.queue.runner.kill(job.place, signal.SIGKILL, STOPPED_WITH + job.id)
        # If the kernel does not end the process, the lease has to lapse.
        self._leave(end.code)
        return now + TERM_S

    def _fail(self, job: claimed_job.ClaimedJob, failure: guards.Failure, now: float) -> None:
        """Stop a job because a guard has failed."""
        if failure.code == exit_codes.LOST:
            # If the database still has this claim, the job is handed back after its handler's end.
            self.hand_back(job, failure.reason, now=True, code=failure.code)
            return
        more = {"guard": failure.event, "exit_code": failure.code}
        detail = payload.encode(more | job.used(now - job.started), "detail")
        given = {"error": failure.reason, "seconds": now - job.started, "detail": detail}
        make = functools.partial(record.end_by_guard, job.lease, failure.event, **given)
        self.decide(job, failure.reason, make, code=failure.code)


def _sqlstate(error: Exception) -> str:
    """Return the SQLSTATE of an error; empty if the server did not raise it."""
    return getattr(error, "sqlstate", None) or ""


def _without_handler(job: claimed_job.ClaimedJob) -> outcomes.Outcome | None:
    """Return the outcome of a claimed job that ends without a handler, else None."""
    if (size := len(job.body)) > wire.MAX_BYTES:
        why = f"its row has {size} bytes as JSON, more than {wire.MAX_BYTES}"
        return outcomes.of_error(errors.UnreadableRow(why), 0.0, f"job {job.id}")
    if 0.0 < (limit_s := job.timeout_s or 0.0) < SHORTEST_S:
        why = f"its time limit of {limit_s:g} s is over before it can begin"
        return outcomes.Outcome("timed_out", 0.0, error=why)
    if job.in_run and (job.name or "").startswith(INPUT_PREFIX):
        return node_call.refused(wire.load_row(job.body)) or outcomes.Outcome("parked", 0.0)
    return None


def _record(job: claimed_job.ClaimedJob, outcome: outcomes.Outcome) -> db.Script[Any]:
    """Record one completed job, if not recorded yet; fail it if its result is refused.

    Returns COMPLETED, the result of `record.end` for a failure, or None if its claim is lost.
    """
    try:
        if not (yield from record.is_recorded(job.lease, outcome)):
            yield from job.queue.claim(0, [(job, outcome)])
    except db.Error as error:
        if error.sqlstate == claims.CLAIM_LOST:
            return None
        if error.sqlstate == LOCKED or may_pass(error):
            raise
        failed = outcomes.of_error(error, outcome.seconds, f"recording job {job.id}")
        return (yield from record.end(job.lease, failed))
    return COMPLETED


def _give_up(job: claimed_job.ClaimedJob, why: str, error: Exception) -> db.Script[bool]:
    """Fail a job whose outcome cannot be stored; if that fails too, count a crash."""
    text, lease, ended = payload.error_text(why), job.lease, None
    if row_isolation.is_about_data(error):
        ended = yield from row_isolation.set_aside(lease.table, job.id, error=text, lease=lease)
    if ended is None:
        yield from recovery.charge(lease, evidence=text)
    return True


def _charge(job: claimed_job.ClaimedJob, evidence: str, detail: JsonDict) -> db.Script[bool]:
    """Count a crash of the job, and record how its executor died, in one transaction.

    Returns True even if the claim is lost.
    """
    lease = job.lease
    yield db.BEGIN
    row = yield from recovery.charge(lease, evidence=payload.error_text(evidence))
    if row is not None:
        named = row | {"claimed_by": job.queue.who.host}
        yield from recovery.note_death(lease.table, named, lease.worker_id, detail, evidence)
    yield db.COMMIT
    if row is not None:
        what = f"node {row['node_id']}" if lease.table.in_run else f"ingest job {row['id']}"
        ids = log_context.ids_of_job(row)
        _log.warning("%s; %s is %s", evidence, what, row["status"], extra=ids)
    return True
