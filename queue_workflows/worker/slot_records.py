"""Record what the executors of a worker report, several jobs at a time, and claim the next ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from queue_workflows import db, errors
from queue_workflows.engine import finish, job_tables, outcomes
from queue_workflows.runtime import clock
from queue_workflows.types import Row
from queue_workflows.worker import (
    claimer,
    claims_in_flight,
    current_job,
    renewal_failures,
    slot_keeper,
)

_log = logging.getLogger(__name__)


class Records:
    """The outcomes of handlers, and the ends of jobs whose executors have died, until written.

    All statements run on the calling thread. While the database is away everything waits, and the
    claims are renewed by the lease keeper once it is back. Each write is fenced by its claim.
    """

    def __init__(
        self,
        table: job_tables.JobTable,
        claimer_: claimer.Claimer,
        keeper: slot_keeper.SlotKeeper,
        writing: claims_in_flight.ClaimsInFlight,
    ) -> None:
        self._table = table
        self._claimer = claimer_
        self._keeper = keeper
        self._in_flight = writing
        self.on_ended: Callable[[current_job.Work, bool], object] = lambda _, __: None
        """Called with a job of which nothing more is written, and whether it has completed."""
        self.meanwhile: Callable[[int], object] = lambda _: None
        """Runs executors while a statement waits for its reply on this descriptor."""
        self._done: list[claims_in_flight.Done] = []
        self.outcomes_since = 0.0
        """When the first of the outcomes that wait was added (`clock.boot_s`)."""
        self._endings: list[tuple[current_job.Work, Callable[[db.Connection], object]]] = []
        self._undispatched: set[str] = set()
        """The runs of recorded nodes of which nothing was planned."""
        self._unsure = False
        """Whether a commit may have happened whose reply was lost."""

    def add(self, work: current_job.Work, outcome: outcomes.Outcome) -> None:
        """Record the outcome of a handler at the next step."""
        if not self._done:
            self.outcomes_since = clock.boot_s()
        self._done.append((work, outcome))

    def add_ending(self, work: current_job.Work, write: Callable[[db.Connection], object]) -> None:
        """Write the end of a job whose executor has died at the next step.

        `write` returns None if the claim was lost. Then the crash that its loss may have counted is
        subtracted.
        """
        self._endings.append((work, write))

    @property
    def waiting(self) -> bool:
        """Return whether anything is to be written."""
        return bool(self._done or self._endings)

    @property
    def has_outcomes(self) -> bool:
        """Return whether outcomes of handlers wait."""
        return bool(self._done)

    @property
    def has_delays(self) -> bool:
        """Return whether outcomes wait that may queue their jobs again with a time."""
        return any(outcome.kind != "completed" for _, outcome in self._done)

    @property
    def has_only_outcomes(self) -> bool:
        """Return whether outcomes of handlers wait, and nothing else."""
        return bool(self._done) and not self._endings

    def dispatch(self) -> bool:
        """Queue what follows from the recorded nodes; return whether there is anything new."""
        runs, self._undispatched = self._undispatched, set()
        return sum(map(self._claimer.dispatch.drain, runs)) > 0

    def step(self, free: int, *, promote: bool) -> list[Row]:
        """Write all that waits, claim up to `free` jobs, and return them.

        The completed jobs and the claim share one statement. Raises database errors after which
        the rest still waits.
        """
        try:
            if self._unsure:
                self._drop_recorded()
            self._write_endings()
            self._record_others()
        except db.Error:
            self._claimer.lose()
            raise
        done, jobs = [*self._done], list[Row]()
        if done or free:
            jobs = self._record_and_claim(done, free, promote=promote)
        return jobs

    def _record_and_claim(
        self, done: Sequence[claims_in_flight.Done], free: int, *, promote: bool
    ) -> list[Row]:
        results = self._claimer.dispatch.planned(done)
        try:
            with self._in_flight.writing(), self._claimer.serving(self.meanwhile):
                jobs = self._claimer.claim_batch(free, results, promote=promote)
        except errors.ClaimLost as error:
            _log.debug("results are recorded job by job: %s", error)
        except Exception as error:
            self._unsure = bool(done)
            self._claimer.lose()
            if not done or renewal_failures.may_pass(error):
                raise
            _log.debug("results are recorded job by job: %s", error)
        else:
            self._forget(done)
            open_ids = {each.lease.job_id for each in results if each.ahead is None}
            for work, _ in done:
                self._claimer.dispatch.note(work.job)
                if self._table.in_run and work.lease.job_id in open_ids:
                    self._undispatched.add(work.job["run_id"])
                self._ended(work, completed=True)
            return jobs
        self._forget(done)
        for work, outcome in done:
            self._record_alone(work, outcome)
        return []

    def _forget(self, done: Sequence[claims_in_flight.Done]) -> None:
        """Keep the outcomes alone that came while a statement about these ran."""
        del self._done[: len(done)]
        self.outcomes_since = clock.boot_s()

    def _record_alone(self, work: current_job.Work, outcome: outcomes.Outcome) -> None:
        """Record one outcome, as a failure if the database refuses its data."""
        completed = outcome.kind == "completed"
        try:
            self._claimer.finish(work, outcome, claim=False)
        except errors.ClaimLost as error:
            _log.warning("nothing was written: %s", error, extra=work.ids)
            completed = False
        if completed and self._table.in_run:
            self._undispatched.add(work.job["run_id"])
        self._ended(work, completed=completed)

    def _ended(self, work: current_job.Work, *, completed: bool = False) -> None:
        self._keeper.end(work)
        self.on_ended(work, completed)

    def _record_others(self) -> None:
        """Record the outcomes that are not `completed`, each in a statement of its own."""
        for work, outcome in [each for each in self._done if each[1].kind != "completed"]:
            try:
                finish.finish(self._claimer.connection(), [finish.Done(work.lease, outcome)])
            except errors.ClaimLost as error:
                _log.warning("nothing was written: %s", error, extra=work.ids)
                self._keeper.lost(work.lease)
            except Exception as error:
                self._unsure = True
                if renewal_failures.may_pass(error):
                    raise
                self._claimer.lose()
                self._done.remove((work, outcome))
                self._record_alone(work, outcome)
                continue
            self._done.remove((work, outcome))
            self._ended(work)

    def _write_endings(self) -> None:
        while self._endings:
            work, write = self._endings[0]
            try:
                if write(self._claimer.connection()) is None:
                    self._keeper.lost(work.lease)
            except Exception as error:
                if renewal_failures.may_pass(error):
                    raise
                self._claimer.lose()
                _log.warning(
                    "the end of job %s is left to its lease: %s",
                    work.job["id"],
                    error,
                    extra=work.ids,
                )
            self._endings.pop(0)
            self._ended(work)

    def _drop_recorded(self) -> None:
        """Forget outcomes that were committed although the reply was lost."""
        for work, outcome in [*self._done]:
            if finish.is_recorded(self._claimer.connection(), work.lease, outcome):
                self._done.remove((work, outcome))
                self._ended(work, completed=outcome.kind == "completed")
        self._unsure = False
