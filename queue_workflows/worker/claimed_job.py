"""Describe one claimed job on its way through a worker, and answer its handler's questions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from queue_workflows import db, errors
from queue_workflows.claim import job_steps, job_tables, outcomes, record, recovery
from queue_workflows.dag import confinement, payload
from queue_workflows.db import statements
from queue_workflows.dispatch import run_cache
from queue_workflows.run import running, wire
from queue_workflows.runtime import exit_codes
from queue_workflows.types import JsonDict, Row
from queue_workflows.worker import guards

if TYPE_CHECKING:
    from queue_workflows.run import executors

WAIT_S: Final = 0.5
"""Seconds for which a job that was claimed ahead waits for an executor; then it is handed back."""


class Ending(NamedTuple):
    """Why a job must stop, and the outcome that is recorded after its handler has ended."""

    why: str
    make: Callable[[], db.Script[Any]] | None
    """Makes the script that records the outcome; None if the claim is lost."""
    code: int
    """The exit code of a worker that ends with its job."""
    at: float


class ClaimedJob:
    """A claimed job with its lease, its guards and the executor that runs it.

    `row` has these columns, all as text: id, claim_no, crash_count, timeout_s, name of the task or
    node module, run_id, node_id, required_model, the run as JSON (the last four are NULL for ingest
    jobs), the whole row as JSON for the handler, `wait_s`, `due_s`, lapse_count. `queue` is a
    `queue_state.Queue`. `asked` is when the claim was sent and `now` when its reply was received
    (`clock.boot_s`).
    """

    def __init__(self, queue: Any, row: Sequence[bytes | None], asked: float, now: float) -> None:
        job_id, claim_no, crashes, timeout_s, name, run_id, node_id, model, run, body = row[:10]
        assert job_id is not None
        assert claim_no is not None
        self.queue, self.in_run = queue, queue.table.in_run
        self.id = job_id.decode()
        self.lease = job_tables.Lease(queue.table, self.id, queue.who.worker_id, int(claim_no))
        self.crash_count, self.lapse_count = int(crashes or 0), int(row[12] or 0)
        self.timeout_s = float(timeout_s) if timeout_s else None
        self.name, self.run_id, self.node_id, self.model = (
            None if each is None else each.decode() for each in (name, run_id, node_id, model)
        )
        self._run, self.body = run, body or b""
        counts = self.crash_count, self.lapse_count
        self.is_last = any(counts) and recovery.is_last(*counts)
        """Whether one more crash or lapse exceeds its limit. Such a job runs alone in its worker,
        since the death of a worker with several jobs may have been caused by any of them."""
        self.received, self.started, self.renewed = now, asked, asked
        self.lease_end = guards.LeaseEnd(asked, queue.who.lease_s)
        self.has_started, self.guards = False, list[guards.Guard]()
        """Whether the handler runs; until then only the lease is checked."""
        self.key = 0
        self.place: executors.Executor | None = None
        self.is_over = False
        """Whether its handler has ended or will not start, and its outcome is to be recorded."""
        self.refusals = self.timeouts = 0
        """How often the database has refused to record its outcome, and how often in a row a
        statement about it took too long."""
        self.end: Ending | None = None
        self.cancel_requested, self.cancel_at = False, math.inf
        """`cancel_at` is when the grace period of a cancelled handler ends."""
        self.progress: str | None = None
        """Progress as JSON text that no renewal has stored yet."""
        self.cursors: dict[tuple[str, str], int] = {}
        """Positions of the handler's cursors that are not stored yet."""
        self.announced_in: executors.Executor | None = None
        """The executor that keeps the value of a completed node for the app's hook."""
        self.unwound = False
        """Whether the handler was interrupted because its worker stops, or because it waits."""
        self.gpu_readings: list[tuple[float, int]] = []
        """Use of its GPU in % and of the GPU memory in MB; another thread appends to this list."""

    @property
    def row(self) -> Row:
        """Return its ids and the columns that guards read, as a row."""
        more = {"task_name": self.name}
        if self.in_run:
            more = {"run_id": self.run_id, "node_id": self.node_id, "node_module": self.name}
        return {
            "id": self.id,
            "claim_no": self.lease.claim_no,
            "worker_id": self.lease.worker_id,
            "claimed_by": self.queue.who.host,
            "queue": self.queue.who.queue,
            "timeout_s": self.timeout_s,
            "required_model": self.model,
            **more,
        }

    @property
    def run(self) -> Row:
        """Return id, generation, revision and `born` of the run, which identify its graph."""
        known: Row = json.loads(self._run) if self._run else {}
        return {"id": self.run_id, "generation": None, "revision": None, "born": None} | known

    @property
    def ids(self) -> dict[str, str | int]:
        """Return the ids that log lines about this job carry."""
        found: dict[str, str | int | None] = {
            "job_id": self.id,
            "run_id": self.run_id,
            "node_id": self.node_id,
            "task": None if self.in_run else self.name,
            "queue": self.queue.who.queue,
            "attempt": self.lease.claim_no,
        }
        return {name: value for name, value in found.items() if value is not None}

    @property
    def starts_by(self) -> float:
        """Return by when it must start; after that it goes back to the queue.

        A job that runs alone may wait for as long as the jobs before it take.
        """
        place = self.place
        if self.has_started or self.unwound:
            return math.inf
        never = self.is_last if place is None else place.shared or place.job is self
        return math.inf if never else self.received + WAIT_S

    def start(self, now: float) -> None:
        """Start the guards, since the handler starts now."""
        self.started, self.has_started = now, True
        self.guards = guards.guards_for(self.row, now)

    def wait(self) -> None:
        """Remove the guards of a job that waits for others in its executor."""
        self.has_started, self.guards = False, []

    def beat(self, now: float, progress: str | None = None) -> None:
        """Note that the handler is active, with its progress as JSON text if it reported any."""
        for guard in self.guards:
            guard.beat(now)
        if progress is not None and len(progress) <= running.PROGRESS_LIMIT:
            self.progress = progress

    def verdict(self, now: float, *, stopped: bool = False) -> guards.Failure | None:
        """Return the first failure of a guard, or None; before the handler only check the lease.

        If a signal or a debugger has stopped its process (`stopped`), that is why the process is
        idle. Then the guards that use samples are not checked.
        """
        failure = self.lease_end.check(now)
        if failure is not None or not self.has_started:
            return failure
        for guard in self.guards:
            is_idle = stopped and isinstance(guard, (guards.GpuHealth, guards.Stall))
            if not is_idle and (failure := guard.check(now)) is not None:
                return failure
        return None

    def check_at(self, now: float) -> float:
        """Return the earliest time at which a guard may fail or another deadline passes."""
        margin_s = min(self.lease_end.MARGIN_S, self.queue.who.lease_s / 4)
        starts_by = math.inf if self.has_started else self.starts_by
        ends = (g.ends if isinstance(g, guards.Budget) else now + 1.0 for g in self.guards)
        return min([self.lease_end.ends - margin_s, self.cancel_at, starts_by, *ends])

    def used(self, seconds: float, ram_mb: int | None = None) -> JsonDict:
        """Return the resources it used as `{"used": ...}` for its last event; {} if unknown.

        `seconds` is how long its handler took. `ram_mb` is the peak memory of its process, which is
        ignored if other jobs run there at the same time.
        """
        if seconds < outcomes.USED_S or self.place is None:
            return {}
        found: JsonDict = {}
        if readings := self.gpu_readings:
            found["gpu_pct"] = round(sum(use for use, _ in readings) / len(readings))
            if memory := max(memory for _, memory in readings):
                found["vram_mb"] = memory
        if ram_mb and not self.place.shared:
            found["ram_mb"] = ram_mb
        return {"used": found} if found else {}

    def judged(self, outcome: outcomes.Outcome) -> outcomes.Outcome:
        """Return the outcome to record if a handler ended while it was being stopped by its limit.

        The time limit decides, unless the handler took less time. So the outcome does not depend on
        which of two writes comes first.
        """
        decided, timed = self.end, (guards.Budget, guards.GpuHealth)
        if decided is None or decided.code != exit_codes.BUDGET:
            return outcome
        limits_s = [each.budget_s for each in self.guards if isinstance(each, timed)]
        cancelled = outcome.kind == "cancelled" and self.cancel_requested
        if cancelled or outcome.seconds < min(limits_s, default=0.0):
            return outcome
        given = {"guard": "budget_trip", "exit_code": exit_codes.BUDGET}
        more: Any = {"detail": payload.encode(given, "detail"), "cursors": outcome.cursors}
        return outcomes.Outcome("timed_out", outcome.seconds, error=decided.why, **more)


def answered(value: Any = None, error: str | None = None, *, is_final: bool = False) -> JsonDict:
    """Return an answer to a handler with a value or an error, which another try may not cure."""
    return {"value": value, "error": error, "is_final": is_final}


def answer(job: ClaimedJob, question: JsonDict) -> db.Script[JsonDict]:
    """Return the answer to a handler's question for `step`, `rows`, `out_dir` or `context`."""
    what, run_id = question["what"], job.run_id or ""
    try:
        if what == "step":
            found = yield from job_steps.answer(job.lease, question["request"])
        elif what == "out_dir":
            default = confinement.of_run(run_id)
            stored = yield from statements.runs.set_out_dir.script(run_id=run_id, out_dir=default)
            found = stored or default
        elif what == "context":
            found = yield from run_cache.read_context(run_id, question["request"])
        else:
            found = yield from rows(job)
    except errors.UnreadableRow as error:
        text = f"run {run_id}: {error}" if what == "context" else str(error)
        return answered(error=text, is_final=True)
    except errors.QueueWorkflowsError as error:
        return answered(error=str(error))
    return answered(found)


def rows(job: ClaimedJob) -> db.Script[JsonDict]:
    """Return the rows of a node and of its run with all columns, as JSON values."""
    own = yield from statements.nodes.get.script(job=job.id)
    run = yield from statements.runs.get.script(run_id=job.run_id)
    return {"job": wire.tagged(own or job.row), "run": wire.tagged(run or {})}


def note(
    job: ClaimedJob, event_type: str, detail: str = "{}", *, once: bool = False, **more: Any
) -> db.Script[None]:
    """Append an event to the history of a job; with `once`, at most one of its type per claim."""
    if not (once and (yield from record.has_recorded(job.lease, [event_type]))):
        row = job.row | {"attempts": 0}
        yield from record.note(job.lease.table, row, event_type, detail=detail, **more)
