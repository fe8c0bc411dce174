"""End a worker during a job: write a bounded record first, then exit."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Generator, Sequence

from queue_workflows import config, db
from queue_workflows.engine import (
    claims,
    handback,
    outcomes,
    workers,
)
from queue_workflows.types import ExitFn, NowFn
from queue_workflows.worker import (
    claim_writes,
    claims_in_flight,
    current_job,
    guards,
    job_ending,
    kill_timers,
)

_log = logging.getLogger(__name__)
BOOKKEEPING_S = 2.0
ANSWER_S = 0.5
"""Seconds for which the lease keeper's connection may be busy or silent, before another is opened.
"""
ORDERLY = (0, guards.EXIT_CONTROL)
"""Exit codes of a worker that exited on request, so that it needs no death record."""
RENEW_MARGIN_S = 2.5
"""A claim lost so few seconds before its lease would end is left without a record."""


class Shutdown:
    """Carry out what guards, a stop or a cancel have decided about a running job.

    The exit is armed before the database is used, and happens only if that job still runs:
    `in_flight` returns the claims in flight of each slot, or None once it does not. Other running
    jobs are handed back first, uncounted. The record uses the lease keeper's connection
    `dedicated`, or another one if that is busy or silent. `fence` (for EXIT_LOST) or `leave_note`
    (for an exit on request) is called before the database is used. `withdraw_note` is called if
    the process stays, or has handed everything back.
    """

    def __init__(
        self,
        whos: Sequence[Callable[[], claims.Claimant]],
        in_flight: Callable[
            [current_job.Work | None], Sequence[claims_in_flight.ClaimsInFlight] | None
        ],
        *,
        dedicated: db.DedicatedConnection,
        kill_timers_: kill_timers.KillTimers,
        fence: Callable[[], object],
        leave_note: Callable[[], object],
        withdraw_note: Callable[[], object],
        on_exit: ExitFn,
        now_fn: NowFn,
    ) -> None:
        self._whos = whos
        self._in_flight = in_flight
        self._dedicated = dedicated
        self._kill_timers = kill_timers_
        self._fence = fence
        self._leave_note = leave_note
        self._withdraw_note = withdraw_note
        self.left_behind = False
        """Whether a record or a claim to hand back could not be written."""
        self._on_exit = on_exit
        self._now = now_fn

    def give_back(self, work: current_job.Work) -> None:
        """Hand back the job of a stopping worker that did not end in time, uncounted; exit."""
        _log.warning("job %s did not end in time; handing it back", work.job["id"], extra=work.ids)
        self._end(
            work,
            0,
            lambda conn: handback.hand_back(conn, work.lease, reason="shutdown"),
            others="shutdown",
        )

    def stop_cancelled(self, work: current_job.Work) -> None:
        """Exit because a cancelled handler has not ended within its grace."""
        _log.warning(
            "job %s was cancelled and did not end; exiting", work.job["id"], extra=work.ids
        )
        self._end(
            work,
            guards.EXIT_CONTROL,
            lambda conn: handback.hand_back(conn, work.lease, reason="cancelled"),
        )

    def end_by_guard(self, work: current_job.Work, failure: guards.Failure) -> None:
        """Requeue or fail the job as its guard demands, with its events; then exit."""
        _log.error(
            "job %s: %s; exiting with code %d",
            work.job["id"],
            failure.reason,
            failure.code,
            extra=work.ids,
        )
        if failure.code == guards.EXIT_LOST:
            late = self._now() >= work.lease_end.ends - RENEW_MARGIN_S
            self._end(work, failure.code, None if late else lambda _: True)
            return
        seconds = self._now() - work.started
        self._end(
            work,
            failure.code,
            lambda conn: job_ending.record_failure(conn, work.lease, failure, seconds),
            # Another write may have ended the job meanwhile: then there is no reason to exit.
            only_if_written=True,
        )

    def announce(self, code: int) -> None:
        """Arm the exit, and leave the note that excuses the claims which it may leave behind.

        The kill timer may fire while the database is used, and no note can be written then.
        """
        self._kill_timers.leave(code)
        if code in ORDERLY:
            self._leave_note()
        elif code == guards.EXIT_LOST:
            self._fence()

    def exit_with(self, code: int) -> None:
        """Exit without a running job, after a stop policy or a load request that took too long."""
        self.announce(code)
        with self._writing(), self._bookkeeping_connection() as conn:
            self._release(conn, None, "its worker was turned off")
            self._deregister(conn, code)
            self._exit(code)
        self._stay()

    def _end(
        self,
        work: current_job.Work,
        code: int,
        write: Callable[[db.Connection], object] | None,
        *,
        only_if_written: bool = False,
        others: str = "its worker had to exit",
    ) -> None:
        if self._in_flight(work) is None:
            return
        self.announce(code)
        if write is None:
            # The lock may wait for a renewal that has no reply.
            with self._writing():
                self._release(None, work, others)
            self._exit(code)
            self._stay()
            return
        with self._writing(), self._bookkeeping_connection() as conn:
            written = self._record(conn, work, write, code)
            if self._in_flight(work) is not None and (written or not only_if_written):
                if code == guards.EXIT_LOST:
                    self._fence()  # the database may have failed only now
                self._release(conn, work, others)
                if not written:
                    self._deregister(conn, code)
                self._exit(code)
        self._stay()

    def _exit(self, code: int) -> None:
        if code in ORDERLY:
            # The claims left behind end with their leases, and would count a crash without a fault.
            (self._leave_note if self.left_behind else self._withdraw_note)()
        self._on_exit(code)

    @contextlib.contextmanager
    def _writing(self) -> Generator[None]:
        """Hold the lock of statements about many jobs, so that nothing is claimed any more.

        Enter it before `_bookkeeping_connection`, in the order of a renewal. The other order lets
        the two wait for each other while the handler of a job runs on that is handed back already.
        """
        every = self._in_flight(None)
        with every[0].writing() if every else contextlib.nullcontext():
            yield

    def _stay(self) -> None:
        self._kill_timers.stay()
        self._withdraw_note()
        self.left_behind = False

    @contextlib.contextmanager
    def _bookkeeping_connection(self) -> Generator[db.Connection | None]:
        """Yield a connection with a statement timeout of BOOKKEEPING_S, or None."""
        with self._dedicated.lend(within_s=ANSWER_S, statement_s=BOOKKEEPING_S) as conn:
            if conn is not None:
                yield conn
                return
        try:
            conn = db.connect(timeout_s=BOOKKEEPING_S, connect_s=BOOKKEEPING_S)
        except db.Error as error:
            _log.warning("exiting without a record, the database cannot be reached: %s", error)
            yield None
            return
        with contextlib.closing(conn):
            yield conn

    def _record(
        self,
        conn: db.Connection | None,
        work: current_job.Work,
        write: Callable[[db.Connection], object],
        code: int,
    ) -> bool:
        """Write the record; return False only if it was not needed.

        Returns True too if the database could not be reached. The worker is deregistered in the
        same transaction, since its handler runs on until the exit.
        """
        rest = self._in_flight(work)
        if rest is None:
            return False
        for each in rest:
            each.return_waiting("its batch ended")
        if conn is None:
            self.left_behind = True
            return True
        try:
            with conn.transaction():
                written = write(conn)
                if written:
                    self._deregister(conn, code)
                    self._expire_heartbeat(conn)
            for each in rest:
                claim_writes.write(conn, each)
            return bool(written)
        except db.Error as error:
            _log.warning(
                "cannot record the end of job %s: %s", work.job["id"], error, extra=work.ids
            )
            self.left_behind = True
            return True

    def _release(
        self, conn: db.Connection | None, work: current_job.Work | None, reason: str
    ) -> None:
        """Hand back the other running jobs, whose handlers end with the process. Best effort.

        Call it inside `_writing`, so that a claim that was in progress is among those in flight.
        """
        for each in self._in_flight(work) or ():
            each.return_all(reason, exclude=work and work.lease)
            if conn is None or conn.closed:
                self.left_behind |= bool(each.ids())
                continue
            try:
                claim_writes.write(conn, each)
            except db.Error as error:
                _log.warning("cannot hand back the other running jobs: %s", error)
                self.left_behind = True

    def _deregister(self, conn: db.Connection | None, code: int) -> None:
        """Deregister the workers, so that nobody counts them as idle and later as dead."""
        if conn is None or code not in ORDERLY:
            return
        try:
            with conn.transaction():
                for who in self._whos:
                    workers.stop(conn, who().worker_id)
        except db.Error as error:
            _log.debug("cannot deregister: %s", error)

    def _expire_heartbeat(self, conn: db.Connection) -> None:
        """Expire the heartbeat of these queues unless another worker serves them."""
        live_s = config.STALE_WORKER_AFTER_S.read()
        try:
            with conn.transaction():
                for each in self._whos:
                    who = each()
                    workers.clear_heartbeat(conn, who.host, who.queue, who.worker_id, live_s)
        except db.Error as error:
            _log.debug("cannot expire the heartbeat: %s", error)


def exit_if_forked(pid: int, outcome: outcomes.Outcome) -> None:
    """Exit if this process is a child that the handler forked: its parent has the claim."""
    if os.getpid() != pid:
        os._exit(outcome.kind != "completed")
