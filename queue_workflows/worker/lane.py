"""Describe one queue of a worker: who claims, how many jobs at once and ahead, and its jobs."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from queue_workflows import config, db
from queue_workflows.db import statements
from queue_workflows.engine import claim_isolation, claims, job_events, job_tables
from queue_workflows.types import NowFn
from queue_workflows.worker import claim_times, claimed_job, node_plans, shapes

if TYPE_CHECKING:
    from queue_workflows.run import executors

MOST: Final = 500
"""How many results one statement records at most."""

SHORT_S: Final = 0.02
"""Seconds that handlers take at most if jobs are claimed ahead: a claim and a commit take 1 to
10 ms, so a longer handler gains nothing."""
EACH: Final = 32
"""How many jobs may wait for each slot, if no `batch` says otherwise."""
TINY_S: Final = 0.005
"""Seconds that handlers take on the average if a job may wait in an executor behind the one that
runs: a longer one hides what it takes to send the next job."""
LONGEST_PAUSE: Final = 8
"""How many claims in a row, at most, must find all they look for until jobs are claimed ahead again
after the queue was empty. So in a chain, where one node can be claimed, one claim in nine looks for
more."""
ROUNDS: Final = 2
"""How often each slot has run a short handler before jobs are claimed ahead."""
_FOLLOW: Final = 0.1
"""Weight of the last time in the moving averages."""
_quoted: Final = json.encoder.encode_basestring_ascii
_NOTHING: Final = claims.completed(None, None)


class Window:
    """How many jobs to claim beyond the free executors: as many as end during one statement.

    A job that waits starts as soon as an executor is free, while the statement that records the
    results before it still runs.
    """

    def __init__(self, slots: int, most: int) -> None:
        """`most`: how many jobs may wait for each slot; 0: none."""
        self._slots = slots
        self._most = most
        self._short = 0
        """How many handlers ended since the last one that was not short."""
        self._handler_s: float | None = None
        self._statement_s = 0.002
        self._full = self._pause = 0
        """How many claims in a row found all they looked for, and how many must."""

    def ended(self, seconds: float) -> None:
        """Note how long a handler has run."""
        self._short = self._short + 1 if seconds <= SHORT_S else 0
        before = seconds if self._handler_s is None else self._handler_s
        self._handler_s = before + _FOLLOW * (seconds - before)

    def stated(self, seconds: float) -> None:
        """Note how long a statement took that recorded jobs."""
        self._statement_s += _FOLLOW * (seconds - self._statement_s)

    def reset(self) -> None:
        """Claim no job ahead until handlers have proved to be short again."""
        self._short = 0

    def claimed(self, found: int, wanted: int, *, ahead: bool) -> None:
        """Note a claim. To look for more jobs than there are takes longer than to claim one.

        `ahead`: whether some of those wanted were to wait.
        """
        if found < wanted:
            self._full = 0
            if ahead:
                self._pause = min(LONGEST_PAUSE, 2 * self._pause + 1)
        else:
            self._full += 1
            if ahead:
                self._pause = 0

    @property
    def is_tiny(self) -> bool:
        """Return whether handlers take less than it takes to send a job to an executor."""
        own = self._handler_s
        return own is not None and own < TINY_S and self._short >= ROUNDS * self._slots

    @property
    def ahead(self) -> int:
        """Return how many claimed jobs may wait."""
        handler_s = self._handler_s
        if handler_s is None or self._short < ROUNDS * self._slots or self._full < self._pause:
            return 0
        during = math.ceil(self._slots * self._statement_s / max(handler_s, 1e-6))
        return min(during, self._slots * self._most)


class Lane:
    """One queue of a worker, and its jobs between claim and record.

    The desk decides what happens to the jobs; here is what is known of them.
    """

    def __init__(
        self,
        who: claims.Claimant,
        shape: shapes.Shape,
        runner: executors.Executors,
        *,
        isolated: frozenset[str] = frozenset(),
        async_tasks: frozenset[str] = frozenset(),
        announces: bool = False,
        now_fn: NowFn,
    ) -> None:
        """`isolated`: names of tasks or nodes each of whose jobs has a fresh executor."""
        self.who = who
        self.shape = shape
        self.runner = runner
        self.table = job_tables.of_queue(who.queue)
        self._isolated = isolated
        self._async = async_tasks
        self.announces = announces and self.table.in_run
        lone = shape.concurrent or shape.gpu or self.announces
        most = 0 if lone else shape.batch if shape.batch > 1 else EACH
        self.window = Window(shape.slots, most)
        self.times = claim_times.ClaimTimes(now_fn)
        self.jobs: dict[str, claimed_job.ClaimedJob] = {}
        """All jobs whose claims are held, by id."""
        self.waiting: deque[claimed_job.ClaimedJob] = deque()
        """Those for which no executor is free yet, in the order of their claims."""
        self.done: list[node_plans.Done] = []
        """Completed jobs that wait for their record."""
        self.may_claim = True
        self.left = math.inf
        """How many jobs it still takes."""
        self.claiming = False
        """Whether a claim has no reply yet."""
        self.asked = 0.0
        """When the last claim was sent."""
        self.promote = True
        self.off: str | None = None
        """The policy by which the queue is OFF; None: it is ON."""
        self.unsure = False
        """Whether a commit may have happened whose reply was lost."""
        self.unsure_at = math.inf
        """When to look again: the server may have gone on with the statement for a while."""
        self.by_row = False
        """Whether the next claim tries row by row, as a row makes the ordinary claim fail."""
        self.changing = False
        """Whether a model is to be changed before the next job."""
        self.model: str | None = None
        """The loaded model of a gpu queue."""
        self.models: list[str] | None = None

    def place_of(self, job: claimed_job.ClaimedJob) -> tuple[bool, bool]:
        """Return whether an executor is for a job alone, and whether it runs several at once."""
        shared = self.shape.concurrent or job.name in self._async
        if self.shape.gpu:
            return False, shared  # a fresh executor for each job would load the model for each
        return job.name in self._isolated or (shared and job.is_last), shared

    @property
    def looks(self) -> bool:
        """Return whether the next claim may find something that this lane takes."""
        return self.may_claim and self.left > 0 and not self.off

    def claimable(self, *, records: bool) -> tuple[int, bool]:
        """Return how many jobs to claim now, and whether some of them are to wait.

        `records`: whether the statement records results anyway, which is the time to claim for
        executors that are not free.
        """
        if not self.looks or not self.runner.accepts:
            return 0, False
        self.runner.queues = False  # what is to wait in an executor is claimed ahead, too
        room, held = self.runner.room, self.jobs.values()
        free = max(0, room - len(self.waiting))
        # Each job that waits would end with the process if one that has killed one kills it too.
        if records and not any(job.crash_count or job.lapse_count for job in held):
            waiting = sum(not job.has_started for job in held)
            ahead = self.window.ahead - max(0, waiting - room)
            if ahead > 0:
                return free + ahead, True
        return free, False

    # --- Statements.

    def claim(
        self, count: int, done: Sequence[node_plans.Done], *, promote: bool, ahead_s: float
    ) -> db.Script[list[tuple[bytes | None, ...]]]:
        """Record completed jobs, and claim up to `count`; return the rows of `ClaimedJob`.

        `ahead_s`: how far ahead it looks for delayed jobs. This is one transaction, after what a
        handler logged.
        """
        given: dict[str, Any] = {
            "worker": self.who.worker_id,
            "host": self.who.host,
            "queue": self.who.queue,
            "lease_s": self.who.lease_s,
            "obey": self.who.obey,
            "promote": promote,
            "look_ahead_s": ahead_s if count else None,
        }
        if not self.table.in_run:
            for job, outcome in done:
                if outcome.error:
                    yield from job_events.note_logged_error(job.lease, outcome.error)
            given |= {"claim": count, "done": _array(map(_ingest_json, done)) if done else None}
            return (yield db.Statement(statements.claims.ingest_rows.text, given, is_raw=True))
        given |= {"newest": self.who.newest, "versions": self.who.versions}
        plans: list[claims.Ahead | None] = []
        if done:
            yield from node_plans.learned(done)
            plans = node_plans.after(done)
        single = len(done) <= 1 and count <= 1
        if self.shape.gpu or (single and not (done and _queues_many(plans[0]))):
            single_done = claims.completed(_result(done[0]), plans[0]) if done else _NOTHING
            given |= self._gpu() | single_done | {"claim": count > 0}
            return (yield db.Statement(statements.claims.node_rows.text, given, is_raw=True))
        texts = map(claims.node_json, map(_result, done), plans)
        given |= {"claim": count, "done": _array(texts) if done else None}
        return (yield db.Statement(statements.claims.nodes_rows.text, given, is_raw=True))

    def claim_by_row(self) -> db.Script[list[tuple[bytes | None, ...]]]:
        """Claim one job row by row, as a row makes the ordinary claim fail; return its row."""
        who = self.who._replace(models=self.models or self.who.models)
        found = yield from claim_isolation.claim_apart(self.table, who, promote=True)
        if found.job_id is None:
            return []
        text = statements.claimed_jobs.ingest_rows.text
        if self.table.in_run:
            text = statements.claimed_jobs.node_rows.text
        given = {"job": found.job_id, "worker": who.worker_id}
        return (yield db.Statement(text, given, is_raw=True))

    def _gpu(self) -> dict[str, Any]:
        if not self.shape.gpu:
            names = ("model", "models", "lane", "policy", "grace_s", "bound_s")
            return {name: getattr(self.who, name) for name in names}
        return {
            "model": self.model,
            "models": self.models,
            "lane": None,
            "policy": config.gpu_claim_policy(),
            "grace_s": config.GPU_URGENT_GRACE_S.read(),
            "bound_s": config.GPU_MAX_WAIT_S.read(),
        }

    def take(
        self, rows: Sequence[Sequence[bytes | None]], asked: float
    ) -> tuple[list[claimed_job.ClaimedJob], claims.Wait]:
        """Return the jobs of a claim's rows, and when to claim again."""
        found: list[claimed_job.ClaimedJob] = []
        wait = claims.Wait()
        for row in rows:
            if row[0] is None:
                wait = claims.Wait(*(None if each is None else float(each) for each in row[10:12]))
            else:
                found.append(claimed_job.ClaimedJob(self, row, asked))
        return found, wait

    def check_at(self) -> float:
        """Return when the first waiting job has waited too long.

        A job that is to run alone waits for as long as the jobs before it take.
        """
        if not self.waiting or self.waiting[0].is_last:
            return math.inf
        return self.waiting[0].asked + claimed_job.WAIT_S


def _queues_many(ahead: claims.Ahead | None) -> bool:
    """Return whether a plan queues more than one node, for which other workers are to be woken."""
    return node_plans.rows_planned(ahead) > 1


def _array(texts: Any) -> bytes:
    return f"[{','.join(texts)}]".encode("utf-8", "surrogatepass")


def _ingest_json(done: node_plans.Done) -> str:
    # The result is checked JSON text already; encoding it again would cost a second walk.
    job, outcome = done
    return (
        f'{{"id":{_quoted(job.id)},"claim_no":{job.lease.claim_no},'
        f'"seconds":{outcome.seconds!r},"result":{outcome.result}}}'
    )


def _result(done: node_plans.Done) -> claims.NodeResult:
    job, outcome = done
    return claims.NodeResult(
        job.lease,
        outcome.result,
        outcome.seconds,
        outcome.vm_rss_mb_peak,
        outcome.resolved_inputs,
    )
