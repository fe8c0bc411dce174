"""Serve an ingest queue in PostgreSQL with the threads of one process, which share its models.

The loop of a worker claims the jobs, and the threads of the manager run them. A thread cannot be
killed. Instead of killing an executor, it abandons the attempt, so that its late result is dropped.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import socket
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any, Final, TypeAlias, cast

from queue_workflows import config, errors, workers
from queue_workflows.claim import claims, outcomes
from queue_workflows.dag import payload
from queue_workflows.local_queue import execution_plan, job_queue
from queue_workflows.local_queue import manager as managers
from queue_workflows.run import executors, loaded_app, running, task_call, wire
from queue_workflows.runtime import clock, identity, service
from queue_workflows.tasks import handlers
from queue_workflows.tasks import job as current
from queue_workflows.telemetry import pressure
from queue_workflows.types import ExitFn, JsonDict, Row, Unreadable
from queue_workflows.worker import claimed_job, memory_watch, process, queue_state, shapes

_log = logging.getLogger("queue_workflows.local_queue")
_STAYS: Final = (workers.STOP_POLICIES["drain"], workers.STOP_POLICIES["pause"])
END_S = 6.0
"""Seconds that the loop may take to hand back the claims when the plan is closed."""
Post: TypeAlias = Callable[[Callable[[], object]], object]


class QueuedJob(job_queue.Job):
    """A job of the queue that knows its claim: the id alone may be claimed again."""

    held: Held


class Held:
    """A claimed job from its start to its end; for the worker it is the executor of this job."""

    shared = False

    def __init__(self, job: claimed_job.ClaimedJob, threads: Threads) -> None:
        self.job = job
        self.jobs = {job.key: job}
        self.row = wire.load_row(job.body)
        job.body = b""
        args = self.row["args"]
        self.queued = QueuedJob(
            job.id, job.name or "", {} if isinstance(args, Unreadable) else args
        )
        self.queued.held = self

        def send(kind: int, _: int, body: bytes) -> None:
            threads.post(lambda: threads.report(self, kind, body))

        self.control = running.Running(job.key, send, lambda: threads.post(threads.flush_soon))
        self.begun = False
        """Whether a thread has taken it."""
        self.over = False
        """Whether its claim is not held any more, or another end was decided."""
        self.outcome: outcomes.Outcome | None = None
        """How its handler has ended."""
        self.asked: dict[int, futures.Future[JsonDict]] = {}
        """Questions of the handler that have no answer yet."""

    def end(self) -> None:
        """Note that it is over; the handler, which may go on, gets no more answers."""
        self.over = True
        for number in [*self.asked]:
            value = self.asked.pop(number, None)  # None if another thread has taken it
            if value is not None and value.set_running_or_notify_cancel():
                value.set_exception(errors.NoCurrentJob("the job of this step has ended"))


class Threads(executors.Executors):
    """The threads of a manager in place of a worker's executors; `limit`: claims at once.

    The threads call `begins`, `ends` and `ask`; the rest is for the thread of the loop.
    """

    def __init__(
        self, *parts: Any, manager: managers.JobQueueManager, limit: int, post: Post
    ) -> None:
        super().__init__(*parts, slots=limit)
        self._manager = manager
        self.post = post
        self._held: dict[int, Held] = {}
        self._numbers = itertools.count(1)
        self._flush_at = math.inf

    @property
    def room(self) -> int:
        """Return how many jobs can start now; a job without a thread waits for one."""
        return self._slots - len(self._held)

    @property
    def accepts(self) -> bool:
        """Return whether jobs may be claimed."""
        return self._manager.accepts

    def start(self, job: Any, *, isolated: bool = False, shared: bool = False) -> None:
        """Give a job to the manager."""
        del isolated, shared
        job.key = next(self._numbers)
        job.place = held = self._held[job.key] = Held(job, self)
        job.wait()
        if (refusal := self._manager.take(held.queued)) is not None:
            self._over(held, cancelled(str(refusal)))

    def interrupt(self, job: Any, reason: str) -> None:
        """Take back a job that waits for a thread, else let its handler end."""
        held: Held = job.place
        held.control.request(reason)
        if not held.begun and self._manager.queue.remove(job.id):
            self._over(held, cancelled(reason))

    def kill(self, place: Any, signum: int, why: str) -> None:
        """Abandon the attempt, unless it has just ended; then its outcome is about to come."""
        del signum
        held: Held = place
        if held.over:
            return
        why = held.job.end.why if held.job.end else why
        held.control.interrupt(why)
        job, manager = held.job, self._manager
        if self.closing or manager.queue.remove(job.id) or manager.threads.abandon(job.id, why):
            self._drop(held)
            self._owner.died(job, executors.Death(why, {}, False, why))
            self._owner.room()

    def recorded(self, job: Any, found: Any) -> None:
        """Count a job that has failed for good."""
        del job
        if isinstance(found, dict) and cast("Row", found).get("status") == "failed":
            self._manager.statistics.add(failed=1)

    def _over(self, held: Held, outcome: outcomes.Outcome) -> None:
        if not held.over:
            self._drop(held)
            self._owner.ended(held.job, outcome)
            self._owner.room()

    def _drop(self, held: Held) -> None:
        held.end()
        del self._held[held.job.key]

    def report(self, held: Held, kind: int, body: bytes) -> None:
        """Take a report of a handler."""
        if not held.over:
            self._on_report(held.job, kind, body)

    def answer(self, place: Any, number: int, answer: JsonDict) -> None:
        """Answer a question of a job's handler."""
        kind = errors.UnreadableRow if answer["is_final"] else errors.DatabaseUnavailable
        held: Held = place
        asked = held.asked.pop(number, None)
        if asked and asked.set_running_or_notify_cancel():
            if answer["error"] is None:
                asked.set_result(answer["value"])
            else:
                asked.set_exception(kind(answer["error"]))

    def flush_soon(self) -> None:
        """Take soon the reports that handlers made too early to be sent at once."""
        self._flush_at = min(self._flush_at, clock.boot_s() + running.EVERY_S)

    def tick(self, now: float) -> float:
        """Let handlers' delayed reports be sent; return when to be called again."""
        if now >= self._flush_at:
            self._flush_at = math.inf
            for held in [*self._held.values()]:
                held.control.flush()
        return self._flush_at

    def close(self) -> None:
        """Let no handler wait for an answer any more."""
        super().close()
        for held in [*self._held.values()]:
            held.end()

    # --- The threads of the manager.

    def runs(self, job_id: str) -> bool:
        """Return whether a handler of the job runs here."""
        return any(held.begun and held.job.id == job_id for held in [*self._held.values()])

    def begins(self, held: Held) -> bool:
        """Note that a handler begins; return False if its claim has ended or must end now.

        After this process was suspended, another worker may have the job before the loop notices.
        """
        late = held.job.lease_end.check(clock.boot_s())
        why = held.control.interrupted or (late and late.reason)
        if why:
            self.ends(held, cancelled(why))
        if why or held.over:
            return False
        held.begun = True
        self.post(lambda: None if held.over else self._owner.started(held.job))
        return True

    def ends(self, held: Held, outcome: outcomes.Outcome) -> None:
        """Record this outcome, unless the claim has ended with another one."""
        self.post(lambda: self._over(held, outcome))

    def ask(self, held: Held, request: JsonDict) -> futures.Future[JsonDict]:
        """Return a future for the answer to a request about the steps of a job."""
        value = futures.Future[JsonDict]()
        number = next(self._numbers)
        question = {"no": number, "what": "step", "request": request}
        held.asked[number] = value
        if held.over:
            held.end()
        else:
            self.post(lambda: None if held.over else self._owner.asked(held.job, question))
        return value


def cancelled(reason: str) -> outcomes.Outcome:
    """Return the outcome of a job that is handed back, uncounted."""
    return outcomes.Outcome("cancelled", 0.0, error=reason)


class _Memory(memory_watch.MemoryWatch):
    """The decisions of the manager about memory, and the state of other workers that share it."""

    def __init__(self, manager: managers.JobQueueManager, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._manager = manager
        self._resources = frozenset[str]()  # so its own thread reads nothing
        self._memory = pressure.Memory()
        self.others_fill = False

    def detail(self) -> JsonDict:
        if full := pressure.nearly_full(self._memory.read()):
            fills = self._fills(pressure.ids(full))
            what = "whether jobs of other workers fill the memory cannot be read"
            self._later(fills, what, self._found)
        else:
            self.others_fill = False
        return {"throttle": self._manager.throttled_by, "memory": pressure.ids(self._memory.within)}

    def _found(self, row: Any) -> None:
        self.others_fill = row is not None


class ThreadWorker(process.Worker):
    """A worker of one ingest queue whose handlers run in the threads of a manager.

    `on_exit` ends the process after an OFF by policy `hard`; if None, the process stays.
    """

    def __init__(
        self,
        manager: managers.JobQueueManager,
        who: claims.Claimant,
        limit: int,
        on_exit: ExitFn | None,
    ) -> None:
        self._manager = manager
        self._who = who
        self._on_exit = on_exit
        self.threads: Threads
        super().__init__(
            None,
            {who.queue: shapes.Shape(limit, concurrent=True)},
            host=who.host,
            newest=who.newest,
            lease_s=who.lease_s,
            shutdown_timeout_s=0.0,
        )
        self._metrics = None
        self._memory = self.memory = _Memory(
            manager, self._desk, post=self.post, later=self._leases.later, changed=lambda: None
        )

    def _queue_of(
        self, who: claims.Claimant, shape: shapes.Shape, registered: loaded_app.Registered | None
    ) -> queue_state.Queue:
        del who, registered
        parts = self._loop, None, self._printer, self._desk
        self.threads = Threads(*parts, manager=self._manager, limit=shape.slots, post=self.post)
        return queue_state.Queue(self._who, shape, self.threads)

    def _tick(self, now: float) -> float:
        self._desk.throttled = self._manager.throttled_by is not None
        return super()._tick(now)

    def serve(self, _: object) -> None:
        """Run the loop until `close_now`; then leave the process if that was decided."""
        self.run_forever()
        if self.exit_code and self._on_exit is not None:
            self._on_exit(self.exit_code)

    def look(self) -> None:
        """Claim if there is room; to be called when jobs may start again."""
        self.post(self._desk.room)

    def close_now(self) -> None:
        """Hand back every claim, and end the loop."""

        def close() -> None:
            self.threads.closing = True
            self._desk.stop(0.0)

        self.post(close)

    # --- Stop policies, which run in this process, on a thread of their own.

    def _is_own_policy(self, policy: str) -> bool:
        found = workers.stop_policy(policy)
        return found not in _STAYS and (found is not workers.HARD or bool(self._on_exit))

    def _run_policy(self, own: queue_state.Queue, policy: str | None) -> None:
        super()._run_policy(own, policy if own.jobs else None)

    def _begin_policy(
        self, policy: str, about: JsonDict, on_exit: ExitFn | None = None
    ) -> socket.socket:
        return super()._begin_policy(policy, about, on_exit if self._on_exit else _stay)


def _stay(code: int) -> None:
    text = "the queue was turned off, so its jobs go back; this process stays (on_exit takes %d)"
    _log.warning(text, code)


class IngestPlan(execution_plan.ClaimingPlan):
    """The jobs of one ingest queue, for the `JobQueueManager` of this process.

    Any number of such processes and of ordinary workers may serve the queue. Each job is claimed,
    renewed, fenced and recorded as by a worker; the job's attempts, delays and time-outs count, the
    manager's do not. `limit`: claims at once, by default the manager's workers. `lease_s`: seconds.
    `on_exit` ends the process after an OFF by policy `hard`; if None, the process goes on, and only
    the jobs are handed back. Raises `UnknownQueue` and `InvalidConfig` (both ValueErrors).
    """

    def __init__(
        self,
        queue: str,
        *,
        limit: int | None = None,
        host: str | None = None,
        host_priority: int | None = None,
        lease_s: float = 600.0,
        on_exit: ExitFn | None = None,
    ) -> None:
        config.check_queue(queue)
        if queue in config.DAG_QUEUES:
            raise errors.InvalidConfig(f"queue {queue!r}: a plan serves ingest queues only")
        shapes.check_times(lease_s, None)
        if limit is not None and (type(limit) is not int or limit < 1):
            raise errors.InvalidConfig(
                f"limit={limit!r:.40}: it must be a whole number from 1, or None for the manager's "
                "workers"
            )
        label = host or config.host_label()
        priority = config.host_priority() if host_priority is None else host_priority
        self._who = claims.Claimant(
            identity.new_worker_id(label),
            label,
            queue,
            lease_s,
            newest=priority < 0,
            obey=not config.DISABLE_WORKER_CONTROL.read(),
        )
        self._limit = limit
        self._on_exit = on_exit
        self._worker: ThreadWorker | None = None
        self._loop: service.Thread | None = None

    @property
    def worker_id(self) -> str:
        """Return the identity under which this process claims."""
        return self._who.worker_id

    # --- For the manager.

    @property
    def others_fill_memory(self) -> bool:
        """Return whether, at the last heartbeat, a job of another worker filled the same memory."""
        return self._worker is not None and self._worker.memory.others_fill

    def open(self, owner: managers.JobQueueManager, /) -> None:
        """Begin to claim; raise RuntimeError the second time."""
        if self._worker is not None:
            raise RuntimeError("the plan was opened before; make a new one")
        limit = self._limit or owner.settings.workers
        self._worker = ThreadWorker(owner, self._who, limit, self._on_exit)
        self._loop = service.Thread("local-queue-worker", self._worker.serve)
        self._loop.start()

    def close(self) -> None:
        """Hand back every claim, and deregister the worker."""
        if self._worker is not None and self._loop is not None:
            self._worker.close_now()
            self._loop.stop(END_S)

    def fetch_ready(self) -> list[job_queue.Job]:
        """Let the worker claim jobs, which it gives to the manager by itself; return none."""
        if self._worker is not None:
            self._worker.look()
        return []

    # --- The threads of the workers.

    @property
    def _threads(self) -> Threads:
        assert self._worker is not None
        return self._worker.threads

    def mark_running(self, job: job_queue.Job, /) -> bool:
        """Note that a job begins; return False if its claim is over."""
        held = _held(job)
        return held is not None and self._threads.begins(held)

    def is_currently_running(self, job_id: str, /) -> bool:
        """Return whether a handler of the job runs here."""
        return self._worker is not None and self._threads.runs(job_id)

    def call(self, job: job_queue.Job, execute: Callable[[job_queue.Job], Any] | None, /) -> Any:
        """Run a job; return its result, or raise `NotCompleted` with its error."""
        held = _held(job)
        assert held is not None  # `mark_running` has found it
        outcome = task_call.refused(held.row)
        if outcome is None and execute is not None:
            outcome = _execute(job, held, execute)
        elif outcome is None:
            ask = functools.partial(self._threads.ask, held)
            with contextlib.closing(handlers.Runner()) as runner:
                outcome = task_call.call(held.row, held.control, runner, ask)
        held.outcome = outcome
        if outcome.kind == "completed":
            return outcome.value
        raise execution_plan.NotCompleted(outcome.error or outcome.kind)

    def mark_done(self, job: job_queue.Job, result: Any, /) -> None:
        """Let the worker record the result unless the claim was lost."""
        del result  # the outcome has it as checked JSON
        held = _held(job)
        if held is not None and held.outcome is not None:
            self._threads.ends(held, held.outcome)

    def mark_failed(self, job: job_queue.Job, error: str, final: bool, /) -> bool:
        """Let the worker record the failure by the policy of the job; return False.

        `final` is the manager's view, and does not count. A job that has failed for good is counted
        when that is recorded.
        """
        del final
        held = _held(job)
        if held is not None:
            outcome = held.outcome
            if outcome is None:
                held.control.interrupt(error)
                seconds = clock.boot_s() - held.job.started
                outcome = outcomes.Outcome("failed", seconds, error=payload.error_text(error))
            self._threads.ends(held, outcome)
        return False

    def give_back(self, job: job_queue.Job, reason: str, /) -> None:
        """Hand a job back that did not start or did not end; it counts no attempt."""
        held = _held(job)
        if held is not None:
            held.control.interrupt(reason)
            self._threads.ends(held, cancelled(reason))


def _held(job: job_queue.Job) -> Held | None:
    return job.held if isinstance(job, QueuedJob) else None


def _execute(
    job: job_queue.Job, held: Held, execute: Callable[[job_queue.Job], Any]
) -> outcomes.Outcome:
    """Run a job by the app's function; whatever it raises is an outcome."""
    row, control, started = held.row, held.control, time.monotonic()
    try:
        with current.running(current.Job(row, control)):
            value = handlers.unless_signal(execute(job))
        found = cast("dict[str, Any]", value) if isinstance(value, dict) else {"result": value}
        text = payload.encode(found, f"result of job {held.job.id}")
        outcome = outcomes.Outcome("completed", time.monotonic() - started, text, value=value)
    except BaseException as error:  # noqa: BLE001  the boundary around app code: it may exit
        outcome = task_call.failed(row, error, time.monotonic() - started)
    if control.cancel_requested:
        return outcomes.Outcome("cancelled", time.monotonic() - started, error="cancelled")
    return outcome
