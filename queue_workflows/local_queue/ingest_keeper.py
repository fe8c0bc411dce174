"""Keep the claims of an `IngestPlan`: leases, cancels, OFF, budgets, heartbeat, wake-ups.

Its length: the three threads that do this may each end the same claim.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from queue_workflows import config, db
from queue_workflows.engine import claim_isolation, claims, controls, job_tables, recovery, workers
from queue_workflows.local_queue import ingest_claims, ingest_heartbeat, plan
from queue_workflows.operations import stop_policies
from queue_workflows.runtime import clock, service
from queue_workflows.types import ExitFn
from queue_workflows.worker import guards, notes, renewal_failures, settings

_log = logging.getLogger("queue_workflows.local_queue")
END_S = 2.0
"""Seconds that the threads, and then the database, may take when the plan is closed."""
SHUTDOWN = "shutdown"
CHECK_S = 0.5
PROGRESS_S = 1.0
"""Shortest time in seconds between two writes of a job's progress."""


class RenewalResult(NamedTuple):
    """The claims that a renewal found lost, and those whose cancel was requested."""

    lost: list[job_tables.Lease]
    cancelled: list[job_tables.Lease]


class Keeper:
    """Renew the leases on one thread, check the guards on another, and listen on a third.

    A handler cannot be ended: where a worker's process would exit, the attempt is abandoned, so
    that its late result is dropped. `on_exit` None: a hard OFF leaves the process running.
    """

    def __init__(
        self,
        who: claims.Claimant,
        held: ingest_claims.Claims,
        owner: plan.Owner,
        *,
        claim_soon: Callable[[bool], object],
        limit: int,
        on_exit: ExitFn | None,
    ) -> None:
        self._who = who
        self.host, self.queue = who.host, who.queue
        self._held = held
        self._owner = owner
        self._claim_soon = claim_soon
        self._on_exit = on_exit or _stay
        self.heartbeat = ingest_heartbeat.Heartbeat(who, held, owner, limit=limit)
        self._dedicated = db.DedicatedConnection()
        self._renewals = renewal_failures.Renewals(who.lease_s, self._dedicated)
        self._excusable = deque[job_tables.Lease](maxlen=notes.MAX_LEASES)
        """Claims that were lost although this process lives and has not stalled."""
        self._loop = service.Loop("local-queue-leases", self._tasks())
        guarding = [service.Task("guards", CHECK_S, self._check_guards)]
        self._guards = service.Loop("local-queue-guards", guarding)
        listener = db.listen(
            "ingest_job_ready",
            "worker_control",
            "job_cancel",
            poll_s=config.CLAIM_POLL_S.read,
            locks=[recovery.LIFE_LOCK + who.worker_id],
        )
        self._follow = service.Follow("local-queue-listen", listener, self._on_wake)

    def _tasks(self) -> list[service.Task]:
        lease_s = self._who.lease_s

        def renew_s() -> float:
            return settings.renew_every_s(lease_s)

        tasks = [service.Task("renew", renew_s, self._renew)]
        if not config.DISABLE_WORKER_HEARTBEAT.read():
            tasks.append(service.Task("beat", config.HEARTBEAT_INTERVAL_S.read, self._beat))
        if self._who.obey:
            control_s = config.WORKER_CONTROL_POLL_S.read
            tasks.append(service.Task("control", control_s, self._check_control))
        self._known = {task.name for task in tasks}
        return tasks

    def start(self) -> None:
        """Start the threads."""
        for each in (self._loop, self._guards, self._follow):
            each.start()

    def stop(self) -> None:
        """Stop the threads, hand back every claim, and deregister the worker."""
        for each in (self._follow, self._guards, self._loop):
            each.stop(0.0)
        until = time.monotonic() + END_S
        for each in (self._follow, self._guards, self._loop):
            each.stop(max(0.0, until - time.monotonic()))
        for claim in self._held.all():
            claim.work.interrupt(SHUTDOWN)
        try:
            # One of the pool would be waited for much longer while the database does not reply.
            conn = db.connect(timeout_s=END_S, connect_s=END_S)
            with contextlib.closing(conn):
                self._write_all(conn)
        except db.Error as error:
            _log.warning("claims are left to their leases, the database is away: %s", error)
            # The next worker of this machine reports that no handler was at fault.
            notes.write_note((), [each.work.lease for each in self._held.all()])
        self._dedicated.close()

    def _write_all(self, conn: db.Connection) -> None:
        """Hand back every claim, and deregister the worker."""
        for claim in self._held.all():
            with conn.transaction():
                (claim.unwritten or functools.partial(claim.hand_back, SHUTDOWN))(conn)
            self._held.drop(claim)
        workers.stop(conn, self._who.worker_id)

    def wake(self, *names: str) -> None:
        """Make tasks due at once."""
        if due := self._known.intersection(names):
            self._loop.wake(*due)

    def lost(self, claim: ingest_claims.Claim) -> None:
        """Note that an outcome was not written, as the claim was lost."""
        if not self._renewals.starved:
            self._excusable.append(claim.work.lease)
            self.wake("renew")

    # --- The thread that listens.

    def _on_wake(self, wake: db.Wake) -> None:
        if wake.reason != "notify":
            if wake.reason == "connected":
                # Notifications that were sent while there was no connection are lost.
                self.heartbeat.locked = True
                self.wake("beat", "renew", "control")
            self._claim_soon(True)
            return
        for channel, text in wake.notified:
            if channel == "job_cancel":
                if any(each.job_id[:1000] == text for each in self._held.all()):
                    self.wake("renew")
            elif channel == "worker_control":
                host = self._who.host
                if text in (f"{host}:{self._who.queue}", f"{host}:{controls.ALL}"):
                    self.wake("control", "beat")
                    self._claim_soon(False)
            elif text == self._who.queue:
                self._claim_soon(False)

    # --- The thread that renews.

    def _renew(self) -> None:
        held, sent = self._held.all(), clock.boot_s()
        if not held and not self._excusable:
            return
        ends = {each.work.lease: each.work.lease_end for each in held}
        reports: dict[job_tables.Lease, str | None] = {}
        for each in held:
            reports[each.work.lease], each.work.unsaved = each.work.unsaved, None
        found = RenewalResult([], [])
        try:
            with self._dedicated.using() as conn:
                if ends:
                    found = _renew(conn, ends, reports, lease_s=self._who.lease_s, sent=sent)
                self._excuse(conn)
        except db.Error as error:
            self._renewals.refused(error)
            for each in held:
                each.work.unsaved = each.work.unsaved or reports[each.work.lease]
            raise
        starved = self._renewals.starved
        self._renewals.renewed(sent)
        self._apply(held, found, sent, starved=starved)

    def _apply(
        self,
        held: list[ingest_claims.Claim],
        found: RenewalResult,
        sent: float,
        *,
        starved: bool,
    ) -> None:
        stop_at = sent + config.CANCEL_GRACE_S.read()
        for claim in held:
            lease = claim.work.lease
            if lease in found.lost:
                if not claim.work.settling and self._lose(claim, "the claim was lost"):
                    self._excusable.extend([] if starved else [lease])
                continue
            claim.work.renewed = sent
            if lease in found.cancelled:
                self._cancel(claim, stop_at)

    def _excuse(self, conn: db.Connection) -> None:
        """Subtract the crashes that lost claims may have counted, since this process lives."""
        while self._excusable:
            recovery.excuse(conn, self._excusable[0], ended=False)
            self._excusable.popleft()

    def _lose(self, claim: ingest_claims.Claim, reason: str) -> bool:
        """Forget a claim that is lost; return whether it was held."""
        if not self._held.drop(claim):
            return False
        _log.warning(
            "job %s: %s; its result will be dropped",
            claim.job_id,
            reason,
            extra={"job_id": claim.job_id},
        )
        claim.work.interrupt(reason)
        if not self._owner.abandon(claim.job_id, reason):
            self._owner.withdraw(claim.job_id)
        self._claim_soon(False)
        return True

    def _cancel(self, claim: ingest_claims.Claim, stop_at: float) -> None:
        if claim.work.waiting:
            self._hand_back(claim, "cancelled")
        else:
            claim.work.cancelled_by(stop_at)

    def _hand_back(self, claim: ingest_claims.Claim, reason: str, *, front: bool = False) -> None:
        self._end(claim, reason, lambda conn: claim.hand_back(reason, conn, front=front))

    def _end(self, claim: ingest_claims.Claim, reason: str, write: ingest_claims.Write) -> None:
        """End a claim whose job waits or runs, and write it; until that succeeds it is renewed."""
        if self._held.withdraw(claim, write):
            self._owner.withdraw(claim.job_id)
        elif self._owner.abandon(claim.job_id, reason):
            claim.unwritten = write
        else:
            return  # its handler begins now, or has just ended and its outcome is being stored
        claim.work.interrupt(reason)
        self._write(claim)

    def _write(self, claim: ingest_claims.Claim) -> None:
        write = claim.unwritten
        if write is None or not self._held.holds(claim):
            return
        try:
            write(None)
        except db.Error as error:
            _log.warning(
                "the end of job %s waits for the database: %s",
                claim.job_id,
                error,
                extra={"job_id": claim.job_id},
            )
            return
        if self._held.drop(claim):
            self._claim_soon(False)

    def _check_control(self) -> None:
        if not self._held.all():
            return
        with self._dedicated.using() as conn:
            policy = controls.off_policy(conn, self._who.host, self._who.queue)
        if policy is None:
            return
        for claim in self._held.all():
            if claim.work.waiting and claim.unwritten is None:
                self._hand_back(claim, "turned off")
        stop_policies.handler(policy)(self, on_exit=self._on_exit)

    def requeue_inflight_for_control(self, reason: str = "turned off") -> None:
        """Hand back every job to the front, for a stop policy; no attempt is counted."""
        for claim in self._held.all():
            if claim.unwritten is None and not claim.work.settling:
                self._hand_back(claim, reason, front=True)

    def _beat(self) -> None:
        with self._dedicated.using() as conn:
            self.heartbeat.beat(conn)

    def clear_model(self) -> None:
        """Record that the heartbeat of this worker has ended, for a stop policy."""
        with self._dedicated.using() as conn:
            workers.clear_model(conn, self._who.host, self._who.queue, mark_stale=True)

    # --- The thread that checks the guards.

    def _check_guards(self) -> None:
        self._renewals.watched()
        now, unsaved = clock.boot_s(), False
        for claim in self._held.all():
            work = claim.work
            if claim.unwritten is not None:
                self._write(claim)
                continue
            failure = work.verdict()
            if failure is not None:
                self._end_by_guard(claim, failure)
            elif work.stop_at is not None and now >= work.stop_at and not work.settling:
                self._hand_back(claim, "cancelled")
            unsaved |= work.unsaved is not None and now - work.renewed >= PROGRESS_S
        if unsaved:
            self.wake("renew")

    def _end_by_guard(self, claim: ingest_claims.Claim, failure: guards.Failure) -> None:
        work = claim.work
        if failure.code == guards.EXIT_LOST:
            if not work.settling and self._lose(claim, failure.reason):
                self.lost(claim)
            return
        seconds = clock.boot_s() - work.started
        _log.error("job %s: %s", claim.job_id, failure.reason, extra={"job_id": claim.job_id})
        self._end(claim, failure.reason, lambda conn: claim.fail_by(failure, seconds, conn))


def _stay(code: int) -> None:
    _log.warning(
        "turned off by policy hard: the jobs are handed back, the process stays (%d)", code
    )


def _renew(
    conn: db.Connection,
    ends: Mapping[job_tables.Lease, guards.LeaseEnd],
    reports: Mapping[job_tables.Lease, str | None],
    *,
    lease_s: float,
    sent: float,
) -> RenewalResult:
    """Renew the claims as of `sent` and store progress (JSON texts)."""
    progress = [reports.get(lease) for lease in ends]
    refused: set[job_tables.Lease] = set()
    try:
        rows = claims.renew(conn, [*ends], lease_s=lease_s, progress=progress)
    except db.Error as error:
        if not claim_isolation.is_about_rows(error):
            raise
        rows = _renew_apart(conn, [*ends], reports, lease_s, refused)
    rows_by_claim = {(row.job_id, row.claim_no): row for row in rows}
    found = RenewalResult([], [])
    for lease, end in ends.items():
        row = rows_by_claim.get((lease.job_id, lease.claim_no))
        if row is None:
            if lease not in refused:
                found.lost.append(lease)
            continue
        end.beat(sent)
        if row.cancel:
            found.cancelled.append(lease)
    return found


def _renew_apart(
    conn: db.Connection,
    leases: Sequence[job_tables.Lease],
    reports: Mapping[job_tables.Lease, str | None],
    lease_s: float,
    refused: set[job_tables.Lease],
) -> list[claims.Renewal]:
    """Renew claim by claim, so that a row that cannot be written costs no other job its lease."""
    rows: list[claims.Renewal] = []
    for lease in leases:
        try:
            rows += claims.renew(conn, [lease], lease_s=lease_s, progress=[reports.get(lease)])
        except db.Error as error:
            if not claim_isolation.is_about_rows(error):
                raise
            _log.warning(
                "job %r cannot be renewed: %s",
                lease.job_id,
                str(error).strip(),
                extra={"job_id": lease.job_id},
            )
            refused.add(lease)
    return rows
