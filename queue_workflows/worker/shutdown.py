"""How a worker leaves in the middle of a job: the record first, within bounds, then the exit."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Generator, Sequence

from queue_workflows import config, db
from queue_workflows.dag import payload
from queue_workflows.engine import (
    attempts,
    claims,
    handback,
    job_events,
    job_tables,
    outcomes,
    workers,
)
from queue_workflows.types import ExitFn, NowFn, Row
from queue_workflows.worker import claims_in_flight, current_job, guards, kill_timers

_log = logging.getLogger(__name__)
BOOKKEEPING_S = 2.0
ANSWER_S = 0.5
"""How long the watch's connection gets to be free and to answer, before another is opened."""
ORDERLY = (0, guards.EXIT_CONTROL)
"""Exit codes of a worker that was told to leave: nothing went wrong, and it is not missed."""
RENEW_MARGIN_S = 2.5
"""A lost claim is not tidied up after so shortly before its lease would have ended."""


class Shutdown:
    """Carries out what guards, a stop and a cancel have decided about a job that runs.

    An exit is armed before anything is asked of the database, and comes only if that job still
    runs: `held_` gives what is held, by lane, or None once it does not. What else runs then goes
    back first, uncounted. Asked is over the connection `kept` by the watch; if that is in use or
    does not answer, over one more. `fence` is called when an exit with EXIT_LOST is certain.
    """

    def __init__(
        self,
        whos: Sequence[Callable[[], claims.Claimant]],
        held_: Callable[
            [current_job.Work | None], Sequence[claims_in_flight.ClaimsInFlight] | None
        ],
        *,
        kept: db.DedicatedConnection,
        fuses_: kill_timers.KillTimers,
        fence: Callable[[], object],
        on_exit: ExitFn,
        now_fn: NowFn,
    ) -> None:
        self._whos = whos
        self._held = held_
        self._kept = kept
        self._fuses = fuses_
        self._fence = fence
        self._on_exit = on_exit
        self._now = now_fn
        self.decided = False
        """Whether the process is about to leave: nothing is claimed any more."""

    def give_back(self, work: current_job.Work) -> None:
        """A stopping worker's job did not end in time: it goes back, uncounted."""
        _log.warning("job %s did not end in time; handing it back", work.job["id"])
        self._end(
            work,
            0,
            lambda conn: handback.hand_back(conn, work.lease, reason="shutdown"),
            others="shutdown",
        )

    def stop_cancelled(self, work: current_job.Work) -> None:
        """A cancelled body that goes on past its grace ends with its process."""
        _log.warning("job %s was cancelled and did not end; leaving", work.job["id"])
        self._end(
            work,
            guards.EXIT_CONTROL,
            lambda conn: handback.hand_back(conn, work.lease, reason="cancelled"),
        )

    def trip(self, work: current_job.Work, trip: guards.Trip) -> None:
        """A guard's verdict takes effect: requeued or failed with its events, then the exit."""
        _log.error("job %s: %s; leaving with %d", work.job["id"], trip.reason, trip.code)
        if trip.code == guards.EXIT_LOST:
            late = self._now() >= work.lease_end.ends - RENEW_MARGIN_S
            self._end(work, trip.code, None if late else lambda _: True)
            return
        seconds = self._now() - work.started
        self._end(
            work,
            trip.code,
            lambda conn: record_trip(conn, work.lease, trip, seconds),
            # A job that another write has settled meanwhile is nobody's fault.
            only_if_written=True,
        )

    def obeyed(self, code: int) -> None:
        """Nothing runs any more, a stop policy has given it back or a load was all: the exit."""
        self._fuses.leave(code)
        with self._asking() as conn:
            self._release(conn, None, "its worker was turned off")
            self._take_leave(conn, code)
            self._on_exit(code)
        self._stay()

    def _end(
        self,
        work: current_job.Work,
        code: int,
        write: Callable[[db.Connection], object] | None,
        *,
        only_if_written: bool = False,
        others: str = "its worker had to leave",
    ) -> None:
        self._fuses.leave(code)
        with self._asking() if write else contextlib.nullcontext() as conn:
            written = write is None or self._record(conn, work, write, code)
            if self._held(work) is not None and (written or not only_if_written):
                if code == guards.EXIT_LOST:
                    # Before what follows, which waits for a renewal that has no reply: the kernel
                    # timer of the lease may end the process first.
                    self._fence()
                self._release(conn, work, others)
                if not written:
                    self._take_leave(conn, code)
                self._on_exit(code)
        self._stay()

    def _stay(self) -> None:
        self._fuses.stay()
        self.decided = False

    @contextlib.contextmanager
    def _asking(self) -> Generator[db.Connection | None]:
        """A connection whose statements have BOOKKEEPING_S; None: the database cannot be asked."""
        with self._kept.lend(within_s=ANSWER_S, statement_s=BOOKKEEPING_S) as conn:
            if conn is not None:
                yield conn
                return
        try:
            conn = db.connect(timeout_s=BOOKKEEPING_S, connect_s=BOOKKEEPING_S)
        except db.Error as error:
            _log.warning("leaving without a record, the database cannot be asked: %s", error)
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
        """Best effort; True too when the database could not be asked.

        The goodbye goes along, as a body goes on between the end of its claim and the exit.
        """
        rest = self._held(work)
        if rest is None:
            return False
        for each in rest:
            each.give_up("its batch ended")
        if conn is None:
            return True
        try:
            with conn.transaction():
                written = write(conn)
                if written:
                    self._take_leave(conn, code)
                    self._age(conn)
            with rest[0].writing():
                for each in rest:
                    claims_in_flight.write(conn, each)
            return bool(written)
        except db.Error as error:
            _log.warning("could not record the end of job %s: %s", work.job["id"], error)
            return True

    def _release(
        self, conn: db.Connection | None, work: current_job.Work | None, reason: str
    ) -> None:
        """Hand back what runs besides this job, as it ends with its process. Best effort."""
        self.decided = True
        rest = self._held(work)
        if not rest:
            return
        # What is being claimed right now is held once nobody else writes.
        with rest[0].writing():
            for each in rest:
                each.abandon(reason, but=work and work.lease)
            if conn is None:
                return
            try:
                for each in rest:
                    claims_in_flight.write(conn, each)
            except db.Error as error:
                _log.warning("could not hand back what else runs: %s", error)

    def _take_leave(self, conn: db.Connection | None, code: int) -> None:
        """Say goodbye, so that nobody takes the worker for idle, and then for dead."""
        if conn is None or code not in ORDERLY:
            return
        try:
            with conn.transaction():
                for who in self._whos:
                    workers.stop(conn, who().worker_id)
        except db.Error as error:
            _log.debug("could not say goodbye: %s", error)

    def _age(self, conn: db.Connection) -> None:
        """Nobody serves there until this worker is back, unless another does."""
        live_s = config.STALE_WORKER_AFTER_S.read()
        try:
            with conn.transaction():
                for each in self._whos:
                    who = each()
                    workers.clear_heartbeat(conn, who.host, who.queue, who.worker_id, live_s)
        except db.Error as error:
            _log.debug("could not age the heartbeat: %s", error)


def unless_forked(pid: int, outcome: outcomes.Outcome) -> None:
    """End a child that the body forked and that fell out of it: what it holds is its parent's."""
    if os.getpid() != pid:
        os._exit(outcome.kind != "completed")


def record_trip(
    conn: db.Connection, lease: job_tables.Lease, trip: guards.Trip, seconds: float, **more: object
) -> Row | None:
    """Requeue or fail a job as its guard demands, with its events, in one transaction; its row.

    `more` goes into the events' detail. None: the claim is lost, nothing was written.
    """
    detail = payload.encode({"guard": trip.event, "exit_code": trip.code, **more}, "detail")
    with conn.transaction():
        row = attempts.end_by_watchdog(
            conn, lease, error=trip.reason, seconds=seconds, detail=detail
        )
        if row is not None:
            job = row | {"worker_id": lease.worker_id}
            job_events.note(conn, lease.table, job, trip.event, detail=detail, elapsed_s=seconds)
    return row
