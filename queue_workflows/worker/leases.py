"""Renew leases, send heartbeats, read switches and store logs on a worker's second connection.

So long statements of the claiming connection do not delay renewals.
"""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from queue_workflows import config, db, workers
from queue_workflows.claim import claims, job_steps, row_isolation
from queue_workflows.dag import payload
from queue_workflows.db import link, statements
from queue_workflows.runtime import clock
from queue_workflows.types import JsonDict, NowFn
from queue_workflows.worker import claimed_job, desk, job_logs, queue_state

if TYPE_CHECKING:
    from queue_workflows.worker import gpu_models

_log = logging.getLogger(__name__)
Reports: TypeAlias = "Mapping[claimed_job.ClaimedJob, str | None]"
"""The progress of jobs as JSON texts."""
Held: TypeAlias = "Sequence[tuple[queue_state.Queue, Sequence[claimed_job.ClaimedJob]]]"
AGAIN_S: Final = 1.0
"""Seconds until the next try after another session had locked a row."""
AGAIN: Final = 1 / 16
"""Longest pause, as a share of the lease, before a failed renewal is tried again. A job without a
renewal has to end before the launcher's deadline, which would end all jobs."""
PROGRESS_S: Final = 1.0
"""Shortest time in seconds between two writes of one job's progress."""
EARLY_S: Final = 0.25
"""Seconds before a lease may expire on the server at which the launcher kills the executors."""


def _ignore(*_: object) -> None:
    return


def _request(
    script: db.Script[Any],
    what: str,
    done: Callable[[Any], object] = _ignore,
    failed: Callable[[], object] = _ignore,
) -> link.Request:
    """Return the request of a script; an error is logged, and it or a lost reply calls `failed`.

    `what` names in the log the work that the error prevents.
    """

    def refused(error: Exception) -> None:
        _log.warning("%s: %s", what, str(error).strip())
        failed()

    return link.Request(script, done, refused, failed)


class Leases:
    """The statements of a worker's second connection, as a `db.link.Source`.

    `hold` moves the deadline at which the launcher kills the executors of a silent worker, and
    returns False if it could not, which is then tried again.
    `report` returns the detail of the worker rows, except for their jobs. `is_own_policy` returns
    whether the app defines a stop policy. `run_policy` is called at each switch of a queue with the
    policy of the app to run, or None; it ends one that runs because of an earlier switch.
    """

    def __init__(
        self,
        desk_: desk.Desk,
        logs: job_logs.JobLogs,
        *,
        hold: Callable[[float], bool],
        ring: Callable[[], object],
        report: Callable[[], JsonDict],
        wake_at: Callable[[float], object] = _ignore,
        models: gpu_models.GpuModels | None = None,
        is_own_policy: Callable[[str], bool] = lambda _: False,
        run_policy: Callable[[queue_state.Queue, str | None], object] = _ignore,
        now_fn: NowFn = clock.boot_s,
    ) -> None:
        self._desk, self._logs, self._models = desk_, logs, models
        self._hold, self._held_until = hold, -math.inf
        self._ring, self._report, self._wake_at, self._now = ring, report, wake_at, now_fn
        self._is_own_policy, self._run_policy = is_own_policy, run_policy
        self.locked = False
        """Whether this session holds the advisory lock that shows that the worker lives."""
        self._renew_at = self._beat_at = self._control_at = 0.0
        self._calls: deque[link.Request] = deque()
        """Other scripts to run on this connection, best effort."""
        self._leaving = False
        self.left = False
        """Whether the rows of the workers say that they have stopped."""

    # --- Times.

    def due_at(self) -> float:
        """Return when the next statement is due."""
        at = min(self._renew_at, self._beat_at, self._control_at, self._logs.store_at)
        return 0.0 if self._calls or self._leaving else at

    def tick(self, now: float) -> float:
        """Ask for `next` if a statement is due; return when to call this again."""
        own = self._desk
        if any(job.progress is not None and now - job.renewed >= PROGRESS_S for job in own.jobs):
            self._renew_at = min(self._renew_at, now)
        if own.may_be_cancelled:
            own.may_be_cancelled = False
            self.renew_now()
        if now >= (due := self.due_at()):
            self._ring()
        # Without renewals, on a stuck connection, the deadline would also end idle executors.
        moves_at = self._held_until - own.queues[0].who.lease_s / 3
        if now >= moves_at and self._safe_until(now) > self._held_until:
            self._keep_hold(now)
        return max(now + 0.05, min(due if due > now else math.inf, moves_at))

    def renew_now(self) -> None:
        """Renew, and poll for cancels and switches, at once."""
        self._renew_at = self._control_at = 0.0
        self._ring()

    def beat_now(self) -> None:
        """Send a heartbeat at once."""
        self._beat_at = 0.0
        self._ring()

    @property
    def is_behind(self) -> bool:
        """Return whether calls of `later` wait, as they do while the database does not answer."""
        return bool(self._calls)

    def later(
        self,
        script: db.Script[Any],
        what: str,
        done: Callable[[Any], object] = _ignore,
        failed: Callable[[], object] = _ignore,
    ) -> None:
        """Run a script on this connection; call `done` with its result, or `failed` without one.

        `what` says in the log what an error prevents.
        """
        self._calls.append(_request(script, what, done, failed))
        self._ring()

    def leave(self) -> None:
        """Store the last logs, and record that the workers have stopped."""
        self._leaving = True
        self._ring()

    # --- A `db.link.Source`.

    def next(self) -> link.Request | None:
        """Return the next request of the second connection, or None."""
        now = self._now()
        self._wake_at(now + 0.05)  # then `tick` returns when the next statement is due
        if self._leaving:
            return self._store_logs() or (None if self.left else self._stop())
        if now >= self._renew_at and (found := self._renew(now)) is not None:
            return found
        # Read the switches before the calls, as a request for a model may follow a switch.
        if now >= self._control_at and (found := self._check_control(now)) is not None:
            return found
        if self._calls:
            return self._calls.popleft()
        if now >= self._beat_at:
            return self._beat(now)
        return self._store_logs() if now >= self._logs.store_at else None

    def notified(self, channel: str, text: str) -> None:
        """Act on a cancel, and on a switch of a queue."""
        own = self._desk
        if channel == "job_cancel":
            if any(text in (job.id, job.run_id) for job in own.jobs):
                self.renew_now()
            elif any(each.claiming for each in own.queues):
                own.heard_cancel = True
        whose = [(each.who.host, each.who.queue) for each in own.queues]
        named = any(text in (f"{host}:{queue}", f"{host}:{workers.ALL}") for host, queue in whose)
        if channel == "worker_control" and named:
            self._control_at = 0.0
            self._ring()
            if self._models is not None:
                self._models.poll()
            self._desk.look()

    def connected(self) -> None:
        """Read everything again, since notifications were lost while there was no connection."""
        self.locked = not config.POLL_ONLY.read()
        self.renew_now()
        self.beat_now()

    def disconnected(self) -> None:
        """Note that the advisory lock ended with its session."""
        self.locked = False

    # --- Leases.

    def _renew(self, now: float) -> link.Request | None:
        held = [(own, [*own.jobs.values()]) for own in self._desk.queues if own.jobs]
        lease_s = self._desk.queues[0].who.lease_s
        self._renew_at = now + min(config.DL_HEARTBEAT_SEC.read(), lease_s / 3)
        if not held:
            self._keep_hold(now)
            return None
        reports = {job: job.progress for _, jobs in held for job in jobs}
        for job in reports:
            job.progress = None

        def failed() -> None:
            for job, progress in reports.items():
                job.progress = job.progress or progress
            self._renew_at = min(self._renew_at, self._now() + AGAIN_S)

        def renewed(found: list[claims.Renewal]) -> None:
            self._renewed(reports, found, now)
            if (ended := self._now()) - now > AGAIN_S:
                # One by one they may take long. Other statements, such as of OFF, come in between.
                self._renew_at = max(self._renew_at, ended + min(AGAIN_S, AGAIN * lease_s))
            self._keep_hold(ended)
            if any(job.cursors for job in reports):
                self._store_cursors([*reports])

        what = "the leases of running jobs are not renewed, which is tried again"
        return _request(_renewals(held, reports, self._now), what, renewed, failed)

    def _renewed(self, reports: Reports, renewals: Sequence[claims.Renewal], sent: float) -> None:
        found = {(each.job_id, each.claim_no): each for each in renewals}
        for job in reports:
            if job.queue.jobs.get(job.id) is not job:
                continue
            row = found.get((job.id, job.lease.claim_no))
            if row is None:
                self._desk.lose(job)
                continue
            if row.renewed:
                job.lease_end.beat(sent)
                job.renewed = sent
            else:
                again_s = min(AGAIN_S, AGAIN * job.queue.who.lease_s)
                self._renew_at = min(self._renew_at, self._now() + again_s)
            if row.cancel:
                self._desk.cancel(job)

    def _keep_hold(self, now: float) -> None:
        """Set the deadline at which the launcher kills all executors if this process hangs."""
        if self._hold(until := self._safe_until(now)):
            self._held_until = until

    def _safe_until(self, now: float) -> float:
        """Return the time before which no job's lease ends, even without any further renewal."""
        own, lease_s = self._desk, self._desk.queues[0].who.lease_s
        ends = [job.lease_end.ends for job in own.jobs if not job.is_over]
        # The jobs of a claim that has no reply yet may start before the next renewal.
        starts_by = now - desk.LATE * lease_s
        asked = [each.asked for each in own.queues if each.claiming and each.asked >= starts_by]
        return min([*ends, *(each + lease_s for each in asked), now + lease_s]) - EARLY_S

    def _store_cursors(self, jobs: Sequence[claimed_job.ClaimedJob]) -> None:
        moved = {
            job.lease: [(name, key, at) for (name, key), at in job.cursors.items()]
            for job in jobs
            if job.cursors
        }
        for job in jobs:
            job.cursors = {}

        def store_apart() -> None:
            for lease, cursors in moved.items():
                what = f"the cursors of job {lease.job_id} are not stored"
                self.later(job_steps.store_cursors({lease: cursors}), what)

        what = f"the cursors of {len(moved)} jobs are stored one by one"
        self.later(job_steps.store_cursors(moved), what, failed=store_apart)

    # --- Switches and reports.

    def _check_control(self, now: float) -> link.Request | None:
        self._control_at = now + config.WORKER_CONTROL_POLL_S.read()
        if not any(own.who.obey for own in self._desk.queues):
            return None

        def check() -> db.Script[list[tuple[queue_state.Queue, str | None]]]:
            found: list[tuple[queue_state.Queue, str | None]] = []
            for own in self._desk.queues:
                if own.who.obey:
                    policy = statements.controls.off_policy.script
                    found.append((own, (yield from policy(host=own.who.host, queue=own.who.queue))))
            return found

        def checked(found: list[tuple[queue_state.Queue, str | None]]) -> None:
            for own, policy in found:
                is_new, is_own = own.off != policy, policy and self._is_own_policy(policy)
                handler = None if policy is None or is_own else workers.stop_policy(policy)
                self._desk.switch(own, policy, hard=handler is workers.HARD)
                if is_new:
                    self._run_policy(own, policy if is_own else None)

        what = "whether the queues are OFF cannot be read, which is tried again"
        return _request(check(), what, checked)

    def _beat(self, now: float) -> link.Request | None:
        self._beat_at = now + config.DL_HEARTBEAT_SEC.read()
        if config.DISABLE_WORKER_HEARTBEAT.read():
            self._desk.begin()
            return None

        def reported(_: None) -> None:
            if self._desk.begin():
                for own in self._desk.queues:
                    # Logged only now, as `queue-workflows run` looks for the row of a worker.
                    _log.info("worker %s works on %s", own.who.worker_id, db.describe())
            if self._models is not None:
                self._models.reported_size()

        def refused(error: Exception) -> None:
            _log.warning("the heartbeat of this worker is not stored: %s", str(error).strip())
            self._desk.begin()

        return link.Request(self._reports(), reported, refused, _ignore)

    def _reports(self) -> db.Script[None]:
        shown = self._report()
        columns = shown.pop("columns")
        for own in self._desk.queues:
            who, ids = own.who, [*own.jobs]
            claim = claim_detail(who)
            detail = {"lease_s": who.lease_s, "lock": self.locked, "claim": claim, **shown}
            try:
                yield from statements.workers.report.script(
                    worker_id=who.worker_id, host_label=who.host, queue=who.queue, pid=os.getpid(),
                    state="busy" if ids else "throttled" if self._desk.throttled else "idle",
                    job_ids=ids, detail=payload.encode(detail, "detail"), obey=who.obey,
                    concurrency=own.shape.slots, **columns,
                )  # fmt: skip
            except db.Error as error:
                if error.sqlstate != desk.LOCKED:
                    raise
                self._beat_at = min(self._beat_at, self._now() + AGAIN_S)

    def _stop(self) -> link.Request:
        def stop() -> db.Script[None]:
            for who in [own.who for own in self._desk.queues]:
                yield from statements.workers.stop.script(worker=who.worker_id)
                if self._desk.exit_code:
                    yield from statements.workers.clear_heartbeat.script(
                        host=who.host, queue=who.queue, gone=who.worker_id,
                        live_s=config.STALE_WORKER_AFTER_S.read(),
                    )  # fmt: skip

        def left(*_: object) -> None:
            self.left = True

        return link.Request(stop(), left, left, left)

    def _store_logs(self) -> link.Request | None:
        self._logs.store_at = math.inf
        if not (logs := self._logs.take()):
            return None

        def failed() -> None:
            self._logs.put_back(logs, keep=not self._leaving)

        what = f"the logs of {len(logs)} jobs are not stored"
        return _request(job_logs.store(logs), what, failed=failed)


def _renewals(held: Held, reports: Reports, now_fn: NowFn) -> db.Script[list[claims.Renewal]]:
    """Renew the leases of jobs, with their progress.

    If the statement fails because of a row, each lease is renewed by a statement of its own, so
    that the others are. For example, a trigger of the app refuses a row, waits for a lock, or is
    slow. All of these may take as long as a lease, so each renewal counts at once.
    """
    found: list[claims.Renewal] = []
    for own, jobs in held:
        try:
            found += yield from _renewal(own, jobs, reports)
        except db.Error as error:
            if not _is_of_rows(error):
                raise
            for job in jobs:
                sent = now_fn()
                try:
                    renewed = yield from _renewal(own, [job], reports)
                except db.Error as refusal:
                    if not _is_of_rows(refusal):
                        raise
                    what = "the lease of job %s is not renewed, which is tried again: %s"
                    _log.warning(what, job.id, str(refusal).strip())
                    renewed = [claims.Renewal(job.id, job.lease.claim_no, False, renewed=False)]
                if any(each.renewed for each in renewed):
                    job.lease_end.beat(sent)
                found += renewed
    return found


def _is_of_rows(error: db.Error) -> bool:
    """Return whether a row may be the reason that a statement about many rows has failed."""
    is_slow = error.sqlstate == row_isolation.TIMED_OUT
    return is_slow or row_isolation.is_busy(error) or row_isolation.is_about_rows(error)


def _renewal(
    own: queue_state.Queue, jobs: Sequence[claimed_job.ClaimedJob], reports: Reports
) -> db.Script[list[claims.Renewal]]:
    progress = [reports[job] for job in jobs]
    return claims.renew([job.lease for job in jobs], lease_s=own.who.lease_s, progress=progress)


def claim_detail(who: claims.Claimant) -> JsonDict:
    """Return the settings by which a worker chooses jobs, for the detail of its row."""
    chosen: JsonDict = {"newest": who.newest, "obey": who.obey}
    if who.versions:
        chosen["versions"] = who.versions
    if who.queue in config.DAG_QUEUES and (nodes := config.node_names()) is not None:
        chosen["nodes"] = nodes
    if who.queue == "gpu":
        chosen |= {"policy": who.policy, "grace_s": who.grace_s, "bound_s": who.bound_s}
    return chosen
