"""What a worker of several jobs holds, shared by those who run it and the one that watches."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from queue_workflows import db, errors
from queue_workflows.engine import claims, finish, handback, job_tables, outcomes, quarantine
from queue_workflows.runtime import clock
from queue_workflows.types import NowFn, Row
from queue_workflows.worker import current_job, guards

_log = logging.getLogger(__name__)
FLUSH_AFTER_S = 1.0
"""A result that has waited so long for the rest of its batch is recorded without it."""
LONG_S = 1.5
"""Behind a body that has run for so long nothing waits: others may be free."""
TURN_S = 5.0
"""Nor does anything wait for its turn for longer."""
WRITING_S = 1.0
"""What a worker that leaves has left for this: half of BOOKKEEPING_S."""


Done: TypeAlias = tuple[current_job.Work, outcomes.Outcome]
"""A job whose body has ended, and what it left."""


class Found(NamedTuple):
    """Of the claims that were renewed those that are lost, and those that were asked to end."""

    lost: list[job_tables.Lease]
    asked: list[job_tables.Lease]


class ClaimsInFlight:
    """Jobs that wait, those that run, outcomes that are to be recorded, jobs that leave.

    One lock decides what becomes of each: what has left never begins, and a result is with one
    thread at a time. All is kept in claim order.
    """

    def __init__(
        self,
        *,
        writing: threading.Lock | None = None,
        patient: bool = False,
        now_fn: NowFn = clock.boot_s,
    ) -> None:
        self._patient = patient
        """Whether what waits for its turn does so for as long as it takes."""
        self._now = now_fn
        self._lock = threading.Lock()
        self._claims: dict[str, tuple[job_tables.Lease, guards.LeaseEnd]] = {}
        """By job id, of which a claim made anew is the last."""
        self._waiting: deque[tuple[job_tables.Lease, Row, guards.LeaseEnd]] = deque()
        self._added = 0.0
        self._running: dict[str, current_job.Work] = {}
        """By job id, in the order in which they began."""
        self._done: list[Done] = []
        self._done_since = 0.0
        self._leaving: dict[job_tables.Lease, str] = {}
        self._writing = writing or threading.Lock()
        self.on_lost: Callable[[job_tables.Lease], object] = lambda _: None
        """Called with a claim whose outcome was not written, as it is held no longer."""

    @contextlib.contextmanager
    def writing(self) -> Generator[None]:
        """Around a statement about many jobs: no two at once, as each locks rows in its own order.

        Waits for another thread's up to WRITING_S.
        """
        alone = self._writing.acquire(timeout=WRITING_S)
        try:
            yield
        finally:
            if alone:
                self._writing.release()

    # The thread that runs the jobs.

    def add(self, jobs: Sequence[Row], lease_end: guards.LeaseEnd) -> None:
        """These were claimed, and wait."""
        with self._lock:
            self._added = self._now()
            for job in jobs:
                lease = job_tables.lease_of(job_tables.INGEST_JOBS, job)
                self._claims.pop(lease.job_id, None)
                self._claims[lease.job_id] = lease, lease_end
                self._waiting.append((lease, job, lease_end))

    def next(self) -> current_job.Work | None:
        """The next to run, which runs from now on; None: none waits."""
        with self._lock:
            if not self._waiting:
                return None
            lease, job, end = self._waiting.popleft()
            work = current_job.Work(lease.table, job, end, now_fn=self._now, lease=lease)
            self._running[lease.job_id] = work
            return work

    def keep(self, done: Done) -> None:
        """One that ran has ended; its outcome waits."""
        with self._lock:
            if not self._done:
                self._done_since = self._now()
            self._done.append(done)
            self._running.pop(done[0].lease.job_id, None)

    def waits(self) -> bool:
        """Whether any waits for its turn."""
        return bool(self._waiting)

    def unrecorded(self) -> int:
        """How many results wait."""
        with self._lock:
            return len(self._done)

    def hurry(self) -> None:
        """The results that wait are to be recorded without the rest of their batch."""
        with self._lock:
            self._done_since = -math.inf

    # Either thread.

    def take_done(self, most: int | None = None) -> list[Done]:
        """Results that wait, which the caller records: then `settled`, else `put_back`."""
        with self._lock:
            done = self._done[:most]
            del self._done[:most]
            return done

    def put_back(self, done: Sequence[Done]) -> None:
        """These could not be recorded."""
        with self._lock:
            place = {job_id: number for number, job_id in enumerate(self._claims)}
            self._done = sorted(
                [*done, *self._done], key=lambda each: place.get(each[0].lease.job_id, -1)
            )
            self._done_since = self._now()

    def settled(self, leases: Iterable[job_tables.Lease]) -> None:
        """These claims are held no longer."""
        with self._lock:
            claims_, leaving, running = self._claims, self._leaving, self._running
            for lease in leases:
                claim = claims_.get(lease.job_id)
                if claim is not None and claim[0].claim_no == lease.claim_no:
                    del claims_[lease.job_id]
                if leaving:
                    leaving.pop(lease, None)
                work = running.get(lease.job_id)
                if work is not None and work.lease == lease:
                    del running[lease.job_id]

    def give_up(self, reason: str) -> None:
        """Nothing that waits begins any more: it leaves, for this reason."""
        with self._lock:
            self._give_up(reason)

    def abandon(self, reason: str, *, but: job_tables.Lease | None = None) -> None:
        """All that waits and runs leaves, `but` for one: the process ends, and does not end it."""
        with self._lock:
            self._give_up(reason)
            for work in self._running.values():
                if work.lease != but:
                    self._leaving[work.lease] = reason

    def running(self) -> list[current_job.Work]:
        """Those that run."""
        with self._lock:
            return [*self._running.values()]

    def _give_up(self, reason: str) -> None:
        while self._waiting:
            self._leaving[self._waiting.popleft()[0]] = reason

    def claims(self) -> dict[job_tables.Lease, guards.LeaseEnd]:
        """All that is held, and until when."""
        with self._lock:
            return dict(self._claims.values())

    def ids(self) -> set[str]:
        """The jobs that are held."""
        with self._lock:
            return set(self._claims)

    # The thread that watches.

    def cancel(self, name: str) -> bool:
        """A job of this name (1,000 characters of its id) was cancelled: whether it waited here."""
        with self._lock:
            return self._end([each for each, *_ in self._waiting if each.job_id[:1000] == name])

    def renewed(self, found: Found, stop_at: float) -> None:
        """A renewal found this; what was asked to end and runs is stopped at `stop_at`."""
        with self._lock:
            for lease in self._taken(found.lost):
                del self._claims[lease.job_id]
            self._end(found.asked)
            asked = [work for work in self._running.values() if work.lease in found.asked]
        for work in asked:
            work.cancelled_by(stop_at)

    def _end(self, leases: Sequence[job_tables.Lease]) -> bool:
        """Whether any of these waited, which now leave."""
        found = self._taken(leases)
        self._leaving |= dict.fromkeys(found, "cancelled")
        return bool(found)

    def _taken(self, leases: Sequence[job_tables.Lease]) -> list[job_tables.Lease]:
        """Those that waited, which do no longer."""
        if not leases:
            return []
        wanted = set(leases)
        found = [lease for lease, *_ in self._waiting if lease in wanted]
        self._waiting = deque(each for each in self._waiting if each[0] not in wanted)
        return found

    def is_due(self) -> bool:
        """Whether something has to be written now; what has waited for too long leaves."""
        with self._lock:
            now = self._now()
            behind = any(now - work.started >= LONG_S for work in self._running.values())
            if not self._patient and (behind or now - self._added >= TURN_S):
                self._give_up("waited too long for its turn")
            late = now - self._done_since >= FLUSH_AFTER_S
            return bool(self._leaving) or (bool(self._done) and late)

    def leaving(self) -> dict[str, list[job_tables.Lease]]:
        """What leaves, by reason, in claim order."""
        with self._lock:
            found: dict[str, list[job_tables.Lease]] = {}
            for lease, reason in self._leaving.items():
                found.setdefault(reason, []).append(lease)
            return found


def renew(
    conn: db.Connection,
    ends: Mapping[job_tables.Lease, guards.LeaseEnd],
    said: Mapping[job_tables.Lease, str | None],
    *,
    lease_s: float,
    sent: float,
) -> Found:
    """Push these claims out, now that it is `sent`, and store progress (JSON texts)."""
    progress = [said.get(lease) for lease in ends]
    refused: set[job_tables.Lease] = set()
    try:
        rows = claims.renew(conn, [*ends], lease_s=lease_s, progress=progress)
    except db.Error as error:
        if not quarantine.is_about_rows(error):
            raise
        rows = _renew_apart(conn, [*ends], said, lease_s, refused)
    kept = {(row.job_id, row.claim_no): row for row in rows}
    found = Found([], [])
    for lease, end in ends.items():
        row = kept.get((lease.job_id, lease.claim_no))
        if row is None:
            if lease not in refused:
                found.lost.append(lease)
            continue
        end.beat(sent)
        if row.cancel:
            found.asked.append(lease)
    return found


def _renew_apart(
    conn: db.Connection,
    leases: Sequence[job_tables.Lease],
    said: Mapping[job_tables.Lease, str | None],
    lease_s: float,
    refused: set[job_tables.Lease],
) -> list[claims.Renewal]:
    """Renew one by one, so that a row which cannot be written costs no other job its lease."""
    rows: list[claims.Renewal] = []
    for lease in leases:
        try:
            rows += claims.renew(conn, [lease], lease_s=lease_s, progress=[said.get(lease)])
        except db.Error as error:
            if not quarantine.is_about_rows(error):
                raise
            _log.warning("job %r cannot be renewed: %s", lease.job_id, str(error).strip())
            refused.add(lease)
    return rows


def write_back(conn: db.Connection, held: ClaimsInFlight) -> None:
    """Record the results that wait and hand back, uncounted and in its place, what leaves.

    A transaction for each. What the database does not take stays held, for whoever tries next;
    its errors pass.
    """
    with held.writing():
        write(conn, held)


def write(conn: db.Connection, held: ClaimsInFlight) -> None:
    """The same, for who has `writing` already."""
    done = held.take_done()
    unwritten = [*done]
    try:
        _record(conn, held, unwritten)
    finally:
        left = {work.lease for work, _ in unwritten}
        held.settled(work.lease for work, _ in done if work.lease not in left)
        if unwritten:
            held.put_back(unwritten)
    for reason, leases in held.leaving().items():
        handback.hand_back_all(conn, leases, reason=reason)
        held.settled(leases)


def completed(done: Iterable[Done]) -> list[finish.Done]:
    """Return those of the jobs that have completed, as `finish` takes them."""
    return [
        finish.Done(work.lease, outcome) for work, outcome in done if outcome.kind == "completed"
    ]


def _record(conn: db.Connection, held: ClaimsInFlight, unwritten: list[Done]) -> None:
    """Record results in one statement, or one by one; those that are settled leave the list."""
    if results := completed(unwritten):
        try:
            finish.finish(conn, results)
        except (errors.ClaimLost, db.Error) as error:
            if conn.closed:
                raise
            _log.debug("a batch is recorded job by job: %s", error)
        else:
            unwritten[:] = [each for each in unwritten if each[1].kind != "completed"]
    for work, outcome in [*unwritten]:
        try:
            found = finish.record(conn, work.lease, outcome)
        except db.Error as error:
            if conn.closed:
                raise
            _log.warning("the result of job %s waits: %s", work.job["id"], error)
            continue
        unwritten.remove((work, outcome))
        if found == "skipped" and not finish.is_recorded(conn, work.lease, outcome):
            _log.warning("nothing was written: job %s is held no longer", work.job["id"])
            held.on_lost(work.lease)
