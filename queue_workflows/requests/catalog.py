"""List the operations, one class for each, in the order of the nouns that carry them out.

Its length: each operation is a class.
"""

from __future__ import annotations

import json
import sys
import time
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, TypedDict, TypeVar, cast

from queue_workflows import errors, types
from queue_workflows.requests import request
from queue_workflows.requests.request import (
    KEEP,
    Field,
    Items,
    Keep,
    Pages,
    Request,
    Row,
    RowOrNone,
    operation,
)
from queue_workflows.runtime import clock
from queue_workflows.types import TERMINAL_RUN_STATUSES, JsonDict

T = TypeVar("T")
WAIT_S: Final = 30.0
"""Seconds of one long poll; a longer wait repeats it."""
MAX_ATTEMPTS: Final = 5
"""Attempts of a job that is queued over HTTP without `max_attempts`."""

JobState = Literal["queued", "running", "succeeded", "failed", "canceled", "lost"]
"""The service's names of states: `lost` is a running job whose lease has lapsed."""
FINAL: Final = frozenset({"succeeded", "failed", "canceled"})

JobId = Annotated[str, Field("the id of a job", bounds={"max_length": 1000})]
RunId = Annotated[str, Field("the id of a run", bounds={"max_length": 1000})]
NodeId = Annotated[str, Field("the id of a node of the run", bounds={"max_length": 1000})]
QueueName = Annotated[str, Field("the name of a queue", bounds={"max_length": 200})]
HostLabel = Annotated[str, Field("the label of a machine", bounds={"max_length": 400})]
ScheduleName = Annotated[str, Field("the name of a schedule", bounds={"max_length": 1000})]
Filter = Annotated["str | None", Field(bounds={"max_length": 1000})]
Key = Annotated["str | None", request.text()]
FirstPage = Annotated[int, Field("items of a page", default=50, bounds={"ge": 1, "le": 1000})]
Page = Annotated[int, Field("items of a page", default=200, bounds={"ge": 1, "le": 1000})]
_ONE_KEY = request.text("Only this partition key of the queue.", metavar="KEY")
Partition = Annotated["str | None", _ONE_KEY]
Until = Annotated[
    "timedelta | float | None",
    Field(
        "how long it lasts",
        name="for_s",
        metavar="WHEN",
        forms="30s, 45m, 2h, 1d, or the ISO time of its end",
        parse=clock.parse_until,
        kind=float | None,
        send=request.seconds,
        take=request.span,
        bounds={"gt": 0, "le": 366 * 86400.0},
    ),
]
_JOB_STATUSES: Final = f"STATUS {'|'.join(typing.get_args(types.JobStatus))}"
"""The statuses that a command takes; the service has its own names."""
StreamName = Annotated["str | None", Field("only the parts of it", bounds={"max_length": 400})]
LastId = Annotated[
    "str | None", Field(name="last-event-id", header=True, bounds={"max_length": 100})
]
After = Annotated[
    "str | None",
    Field("the id of the last part that is known", name="cursor", bounds={"max_length": 100}),
]


def _filter(help_: str, metavar: str, most: int = 1000, **more: Any) -> Field:
    return Field(help_, metavar=metavar, bounds={"max_length": most}, **more)


def _moment(help_: str) -> Field:
    how: Any = {"kind": datetime | None, "send": request.instant, "parse": clock.parse_since}
    forms = "90m, 24h, 7d ago, or an ISO time with its zone"
    return Field(help_, metavar="TIME", forms=forms, **how)


def _number(help_: str) -> Field:
    return Field(help_, kind=int | None, strict=True, metavar="N|none", parse=_number_of)


def _rate(help_: str) -> Field:
    return Field(
        help_,
        kind=str | None,
        metavar="N/PERIOD|none",
        parse=lambda word: None if word == "none" else word,
        bounds={"max_length": 40, "examples": ["100/m"]},
    )


def _number_of(word: str) -> int | None:
    if word == "none":
        return None
    if not word.isascii() or not word.isdigit() or len(word) > 9:
        raise errors.InvalidConfig(f"{word[:40]!r} should be a whole number from 1, or none")
    return int(word)


class JobStatus(TypedDict):
    """The state and progress of a job; times are in ISO 8601."""

    job_id: str
    status: JobState
    attempt: int
    started_at: str | None
    finished_at: str | None
    heartbeat_at: str | None
    error: str | None
    progress: Any


class Event(NamedTuple):
    """A change of a job or run: its `id`, the `kind` (`job` or `run`) and its data."""

    id: str
    kind: str
    data: JsonDict


class Part(NamedTuple):
    """A part of a stream, or a reset mark, after which the parts of a new attempt follow."""

    claim_no: int
    """The claim of the attempt."""
    seq: int
    """The number within the attempt, counted over all names; 0 for a reset mark."""
    name: str
    value: Any
    created_at: str | None
    """In ISO 8601."""

    @property
    def is_reset(self) -> bool:
        """Return whether this is a reset mark, after which a new attempt begins, and not a part."""
        return self.seq == 0

    @property
    def id(self) -> str:
        """Return the place in the stream, for `after`."""
        return f"{self.claim_no}-{self.seq}"


def part_of(data: JsonDict) -> Part:
    """Return the part that the service has sent. Raises `ServiceFailed` for any other value."""
    try:
        return Part(*(data[name] for name in Part._fields))
    except KeyError:
        raise errors.ServiceFailed("a part lacks a member: this is not the service") from None


class _Status(Request[JobStatus]):
    def read(self, found: Any) -> JobStatus:
        return cast("JobStatus", request.row(found))


class _Nothing(Request[None]):
    def read(self, found: Any) -> None:
        del found


@dataclass(frozen=True)
class _Act:
    """The base of operations that change something, which is recorded as an act."""

    _: KW_ONLY
    by: Annotated[str | None, request.text("who does it, for the record", most=200)] = None
    reason: Annotated[str | None, request.text("why, for the record")] = None


def _several(given: str | Iterable[str] | None) -> list[str] | None:
    return [given] if isinstance(given, str) else None if given is None else [*given]


_SEVERAL = Field(
    "1 to 500 ids", kind=list[str], send=_several, bounds={"min_length": 1, "max_length": 500}
)


@dataclass(frozen=True)
class _Many(_Act, Items):
    ids: Annotated[Iterable[str], _SEVERAL]


class Stream(Request[T]):
    """An operation whose client yields items from a connection that stays open."""

    ends: ClassVar[bool] = True
    """Whether the event `end` is the last one."""

    @property
    def last_id(self) -> str | None:
        """Return the id of the last event that the caller knows, which is sent as a header."""
        names = (name for name, mark in request.marks(type(self)).items() if mark.header)
        return getattr(self, next(names))

    def item(self, event: Event) -> T:
        """Return the item for an event."""
        raise NotImplementedError


class _Parts(Pages[Part]):
    def item(self, found: JsonDict) -> Part:
        return part_of(found)


class _PartsFrom(Stream[Part]):
    def item(self, event: Event) -> Part:
        return part_of(event.data)


def _wait(
    what: str, asked: Request[Any], final: Collection[str], timeout_s: float | None
) -> request.Steps[Any]:
    """Return the long polls until the state that `asked` reads is final.

    They raise `WaitTimeout` after `timeout_s`, `ServiceFailed` for an answer without a status.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        wait_s = WAIT_S
        if deadline is not None:
            wait_s = round(min(wait_s, max(0.0, deadline - time.monotonic())), 3)
        found = yield asked.call(request.row, wait_s=wait_s, wait=wait_s or None)
        status = found.get("status")
        if not isinstance(status, str):
            raise errors.ServiceFailed(f"{what}: the answer has no status")
        if status in final:
            return found
        if deadline is not None and time.monotonic() >= deadline:
            raise errors.WaitTimeout(f"{what} is {status} after the time to wait")


# --- jobs --------------------------------------------------------------------------------------


@operation("POST jobs/trigger", "jobs.enqueue_once", body="Trigger", once=True, refuses=(409,))
class Enqueue(Request[str]):
    """Queue a job and return its id; of jobs with the same `lock_key` one runs at a time.

    While a job has the `idempotency_key`, its id is returned. Without a key a request whose
    answer was lost is not repeated, and raises `ServiceUnavailable`: the job may be there.
    `max_attempts`: default 5. Raises `IdempotencyClash`, `UnknownTask`, `UnknownQueue`,
    `ArgsRefused`, `InvalidJob` (all ValueErrors).
    """

    task_name: Annotated[str, request.text(name="task")]
    _: KW_ONLY
    queue: Annotated[str, request.text()]
    lock_key: Annotated[str, request.text()]
    args: Annotated[Mapping[str, Any] | None, Field(kind=dict[str, Any], default=dict)] = None
    priority: Annotated[int | None, Field("smaller runs first; default 100", strict=True)] = None
    idempotency_key: Key = None
    partition_key: Key = None
    available_at: Annotated[datetime | None, Field(send=request.instant)] = None
    max_attempts: Annotated[
        int | None, Field(kind=int, default=MAX_ATTEMPTS, strict=True, bounds={"ge": 1})
    ] = None

    def read(self, found: Any) -> str:
        return str(request.row(found)["job_id"])


@operation("GET jobs/{job_id}", "history.get_job")
class GetJob(RowOrNone):
    """Return a job with its attempts, their events and logs.

    Returns None if there is none.
    """

    job_id: JobId


@operation("GET jobs/{job_id}/status", "jobs.state")
class GetJobStatus(_Status):
    """Return how far a job is.

    Raises `UnknownJob` if there is none.
    """

    job_id: JobId


@dataclass(frozen=True)
class WaitForJob(_Status):
    """Return how far a job is once it is succeeded, failed or canceled.

    Raises `WaitTimeout` (a TimeoutError) after `timeout_s`; None has no limit.
    """

    job_id: JobId
    _: KW_ONLY
    timeout_s: float | None = None

    def steps(self) -> request.Steps[JobStatus]:
        return _wait(f"job {self.job_id!r:.80}", GetJobStatus(self.job_id), FINAL, self.timeout_s)


@operation("POST jobs/{job_id}/cancel", "jobs.cancel_many", body="CancelJob")
class CancelJob(_Act, _Status):
    """Cancel a queued job, or request that a running one ends; return how far it is."""

    job_id: JobId


@operation(
    "POST jobs/{job_id}/retry", "jobs.retry_many", body="RetryJob", once=True, refuses=(409,)
)
class RetryJob(_Act, _Status):
    """Queue a failed or canceled job again, with all its attempts; return how far it is.

    Raises `InvalidConfig` for another one.
    """

    job_id: JobId


@operation("POST jobs/cancel", "jobs.cancel_many", name="cancel_many", body="CancelJobs")
class CancelJobs(_Many):
    """Cancel jobs; return for each `id`, `outcome`, `status` before, and `reason` of a refusal.

    `outcome`: `cancelled`, `asked to stop`, `refused`, `unknown`. A node's run ends, too.
    """


@operation("POST jobs/retry", "jobs.retry_many", name="retry_many", body="RetryJobs", once=True)
class RetryJobs(_Many):
    """Queue failed and canceled jobs again; `outcome`: `queued`, `refused`, `unknown`.

    Returns what `cancel_many` does. The run of a node's job runs again.
    """


@operation("GET jobs", "jobs.list")
class ListJobs(Pages[JsonDict]):
    """Return the jobs that match every filter, up to `limit`, the newest first.

    `text`: in an id, task, key or error.
    """

    _: KW_ONLY
    queue: Annotated[str | None, _filter("only jobs of this queue", "Q")] = None
    task_name: Annotated[str | None, _filter("only jobs of this task", "NAME", name="task")] = None
    status: Annotated[
        str | Iterable[str] | None,
        _filter("only jobs of this status; repeatable", _JOB_STATUSES, 10,
                kind=list[str] | None, send=_several),
    ] = None  # fmt: skip
    since: Annotated[datetime | timedelta | None, _moment("queued, started or ended since")] = None
    key: Annotated[str | None, _filter("of this idempotency, lock or partition key", "KEY")] = None
    text: Annotated[
        str | None, _filter("with this part of id, task, key or error", "TEXT", 200, name="q")
    ] = None
    limit: FirstPage = 100


@operation("GET jobs/{job_id}/events", "history.events")
class GetJobEvents(Items):
    """Return the events of a job, the oldest first, from `queued` on.

    Raises `UnknownJob` if there is none.
    """

    job_id: JobId

    member = "events"


@operation("GET jobs/{job_id}/why", "jobs.explain")
class ExplainJob(RowOrNone):
    """Return why a job does not run, for each live worker.

    Returns None if there is no such job.
    """

    job_id: JobId


@operation("GET jobs/{job_id}/parts")
class GetJobParts(_Parts):
    """Return the parts that the handler of a job has streamed, with reset marks.

    `name`: only of this stream. `after`: the `id` of the last part that is known. Raises
    `UnknownJob`.
    """

    job_id: JobId
    _: KW_ONLY
    name: StreamName = None
    after: After = None
    limit: Page = sys.maxsize


@operation("GET jobs/{job_id}/stream")
class FollowJob(_PartsFrom):
    """Yield the parts that the handler of a job streams, until the job has ended.

    An interrupted stream is resumed, without a gap and without repeating what was yielded.
    Raises `UnknownJob`, and `ServiceUnavailable` as `events` does.
    """

    job_id: JobId
    _: KW_ONLY
    name: StreamName = None
    after: LastId = None


# --- runs --------------------------------------------------------------------------------------


@operation("POST runs", "runs.submit", name="submit", body="Submit", once=True, refuses=(409,))
class Submit(Row):
    """Submit a run after its inputs were checked, and return it.

    While a run has the `idempotency_key`, it is returned. Raises `UnknownWorkflow`,
    `InvalidWorkflow`, `ArgsRefused`, `InvalidPayload`, `IdempotencyClash`.
    """

    workflow_name: Annotated[str, request.text(name="workflow")]
    _: KW_ONLY
    inputs: Annotated[
        Mapping[str, Any] | None,
        Field(kind=dict[str, Any], default=dict, bounds={"examples": [{"wish": "tea"}]}),
    ] = None
    priority: Annotated[int, Field("smaller runs first", strict=True)] = 100
    idempotency_key: Key = None


@operation("GET runs/{run_id}", "runs.get")
class GetRun(RowOrNone):
    """Return a run with its output.

    Returns None if there is none.
    """

    run_id: RunId


@dataclass(frozen=True)
class WaitForRun(Row):
    """Return a run once it is completed, failed or cancelled.

    Raises `UnknownJob`, and `WaitTimeout` (a TimeoutError) after `timeout_s`; None stands for
    no limit.
    """

    run_id: RunId
    _: KW_ONLY
    timeout_s: float | None = None

    def steps(self) -> request.Steps[JsonDict]:
        asked = _RunState(self.run_id)
        return _wait(f"run {self.run_id!r:.80}", asked, TERMINAL_RUN_STATUSES, self.timeout_s)


class _RunState(GetRun):
    missing = False


def json_object(text: str) -> JsonDict:
    """Return the JSON object of a text. Raises `InvalidConfig` for any other text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise errors.InvalidConfig('input should be a JSON object, such as {"tenant": 7}')
    return cast("JsonDict", found)


def _taken(text: str | None) -> JsonDict | None:
    return None if text is None else json_object(text)


@operation("GET runs", "runs.page")
class ListRuns(Pages[JsonDict]):
    """Return the runs that match every filter, up to `limit`, the newest first.

    Each has its node counts as `nodes`. `since`, `until`: when they were created; a time span means
    so long ago. `text`: the beginning of an id, or a part of an error. `input`: members that the
    inputs have. The service searches 10,000 runs for each request, so a text, an input or a machine
    that few runs have may take many requests.
    """

    _: KW_ONLY
    status: Annotated[str | None, _filter("only runs of this status", "STATUS")] = None
    workflow_name: Annotated[
        str | None, _filter("only of this workflow", "NAME", name="workflow")
    ] = None
    since: Annotated[datetime | timedelta | None, _moment("created since")] = None
    until: Annotated[datetime | timedelta | None, _moment("created until")] = None
    text: Annotated[
        str | None, _filter("the beginning of an id, or a part of an error", "TEXT", 200)
    ] = None
    input: Annotated[
        Mapping[str, Any] | None,
        Field("only runs that have these inputs, a JSON object", kind=str | None,
              send=json.dumps, take=_taken,
              bounds={"max_length": 2000, "examples": ['{"tenant": 7}']}),
    ] = None  # fmt: skip
    schedule: Annotated[str | None, _filter("only runs that this schedule started", "NAME")] = None
    machine: Annotated[
        str | None, _filter("only runs with a node on this machine", "HOST", 400)
    ] = None
    limit: FirstPage = 50


@operation("GET runs/{run_id}/nodes", "history.get_run_page")
class ListNodes(Pages[JsonDict]):
    """Return the nodes of a run with their attempts: the workflow's, then the items'. The first are
    in the workflow's order; nodes of items are in the order of their ids. Pages have logs if
    `limit`, or the number of the run's nodes, is at most 60.

    Raises `UnknownJob` if there is no run.
    """

    run_id: RunId
    _: KW_ONLY
    limit: Page = sys.maxsize

    member = "nodes"

    def steps(self) -> request.Steps[list[JsonDict]]:
        return (yield from super().steps())[: self.limit]

    def size(self, left: int) -> int:
        """Return the same size for all pages, since the size decides whether they have logs."""
        return min(max(left, self.limit), request.PAGE)


@operation("GET runs/{run_id}/why", "runs.explain")
class ExplainRun(RowOrNone):
    """Return why each node of a run that does not run yet waits.

    Returns None if there is no run.
    """

    run_id: RunId


@operation("POST runs/{run_id}/cancel", "runs.cancel", body="CancelRun")
class CancelRun(_Act, Row):
    """Cancel a run with its nodes; a run that is over stays as it is. Return the run."""

    run_id: RunId


@operation("POST runs/{run_id}/retry", "runs.retry", body="RetryRun", once=True, refuses=(409,))
class RetryRun(_Act, Row):
    """Run a run that is over again, from a node or from all that did not complete; return it.

    Raises `UnknownJob`, and `InputRefused` (a ValueError) for a run that is not over.
    """

    run_id: RunId
    _: KW_ONLY
    from_node: Key = None


@operation("POST runs/cancel", "runs.cancel_many", name="cancel_many", body="CancelRuns")
class CancelRuns(_Many):
    """Cancel runs; return for each `id`, `outcome`, `status` before, and `reason` of a refusal.

    `outcome`: `cancelled`, `refused`, `unknown`.
    """


@operation("POST runs/retry", "runs.retry_many", name="retry_many", body="RetryRuns", once=True)
class RetryRuns(_Many):
    """Run failed and cancelled runs again; `outcome`: `queued`, `refused`, `unknown`.

    Returns what `cancel_many` does.
    """


@operation(
    "POST runs/{run_id}/nodes/{node_id:path}/answer",
    "runs.answer",
    body="Answer",
    once=True,
    refuses=(409,),
)
class AnswerNode(_Act, Request[str]):
    """Answer an input node; the first answer counts, and must be one that the node allows.

    Returns the submission's id. Raises `UnknownJob`, and `InputRefused` (a ValueError) for a node
    that does not wait, and for an answer that it does not allow.
    """

    run_id: RunId
    node_id: NodeId
    value: Annotated[Any, Field(bounds={"examples": ["yes"]})]

    def read(self, found: Any) -> str:
        return str(request.row(found)["submission_id"])


@operation("GET runs/{run_id}/nodes/{node_id:path}/parts", name="node_parts")
class GetNodeParts(_Parts):
    """Return the parts that a node of a run has streamed, with reset marks.

    `name`: only of this stream. `after`: the `id` of the last part that is known. Raises
    `UnknownJob`.
    """

    run_id: RunId
    node_id: NodeId
    _: KW_ONLY
    name: StreamName = None
    after: After = None
    limit: Page = sys.maxsize


@operation("GET runs/{run_id}/nodes/{node_id:path}/stream", name="node_stream")
class FollowNode(_PartsFrom):
    """Yield the parts that a node of a run streams, until its job has ended.

    An interrupted stream is resumed, without a gap and without repeating what was yielded.
    Raises `UnknownJob`, and `ServiceUnavailable` as `events` does.
    """

    run_id: RunId
    node_id: NodeId
    _: KW_ONLY
    name: StreamName = None
    after: LastId = None


# --- workers -----------------------------------------------------------------------------------


@operation("GET workers", "workers.list")
class ListWorkers(Items):
    """Return the worker processes seen within a day, and switches without a worker."""


@operation("POST workers/{host}/{queue}/on", "workers.enable", body="Switch")
class EnableWorkers(_Act, Row):
    """Switch the workers of a machine and queue on; `all`: of each queue of the machine.

    Returns the control row.
    """

    host: HostLabel
    queue: QueueName


@operation("POST workers/{host}/{queue}/off", "workers.disable", body="SwitchOff")
class DisableWorkers(_Act, Row):
    """Switch the workers of a machine and queue off, by a stop policy.

    `hard` returns running jobs to the queue, `pause` lets them finish. They are on again after
    `until` (a timedelta or seconds); None means not before `enable`. Returns the control row.
    """

    host: HostLabel
    queue: QueueName
    _: KW_ONLY
    stop_policy: Annotated[str, request.text(name="policy")] = "hard"
    until: Until = None


@operation("POST workers/{host}/{queue}/drain", "workers.drain", body="Drain")
class DrainWorkers(_Act, Row):
    """Switch the workers of a machine and queue off once their running jobs have ended.

    `until`: as in `disable`. Returns the control row.
    """

    host: HostLabel
    queue: QueueName
    _: KW_ONLY
    until: Until = None


# --- queues ------------------------------------------------------------------------------------


@operation("GET queues", "queues.list")
class ListQueues(Items):
    """Return the queues with their depth, age, rates, limits and state."""


@operation("GET queues/{queue}", "queues.get")
class GetQueue(Row):
    """Return one queue.

    Raises `UnknownQueue` (a ValueError) if there is none.
    """

    queue: QueueName


@operation("POST queues/{queue}/pause", "queues.pause", body="Pause")
class PauseQueue(_Act, Row):
    """Stop claims of a queue, or of one partition; running jobs go on.

    The pause ends after `until` (a timedelta or seconds), or with None at `resume`. Returns its
    settings.
    """

    queue: QueueName
    _: KW_ONLY
    partition: Partition = None
    until: Until = None


@operation("POST queues/{queue}/resume", "queues.resume", body="Resume")
class ResumeQueue(_Act, Request[bool]):
    """Resume a queue, or one partition, if it is paused.

    Returns False if it was not.
    """

    queue: QueueName
    _: KW_ONLY
    partition: Partition = None

    def read(self, found: Any) -> bool:
        return bool(request.row(found)["resumed"])


@operation("POST queues/{queue}/limits", "queues.limit", body="Limits")
class LimitQueue(_Act, Row):
    """Set or remove limits of an ingest queue, or of one partition.

    None removes a limit, one that is not given stays. Returns its settings.
    """

    queue: QueueName
    _: KW_ONLY
    partition: Partition = None
    max_running: Annotated[int | Keep | None, _number("How many run at once.")] = KEEP
    rate: Annotated[str | Keep | None, _rate("Starts in any period: 100/m, 5/30s, 1/d.")] = KEEP
    partition_max_running: Annotated[
        int | Keep | None, _number("The same for each partition key.")
    ] = KEEP
    partition_rate: Annotated[str | Keep | None, _rate("The same for each partition key.")] = KEEP


# --- schedules ---------------------------------------------------------------------------------


@operation("GET schedules", "schedules.list")
class ListSchedules(Items):
    """Return the schedules, the next to fire first."""


@operation("GET schedules/{name}/preview", "schedules.preview")
class PreviewSchedule(Items):
    """Return the coming instants of a schedule.

    Raises `UnknownSchedule` if there is none.
    """

    name: ScheduleName
    _: KW_ONLY
    days: Annotated[float, Field(bounds={"gt": 0, "le": 366, "allow_inf_nan": False})] = 7.0
    limit: Annotated[int, Field("items of a page", default=100, bounds={"ge": 1, "le": 1000})] = (
        1000
    )


@operation("POST schedules/{name}/pause", "schedules.pause", body="PauseSchedule")
class PauseSchedule(_Act, _Nothing):
    """Stop a schedule until it is resumed."""

    name: ScheduleName


@operation("POST schedules/{name}/resume", "schedules.resume", body="ResumeSchedule")
class ResumeSchedule(_Act, _Nothing):
    """Let a paused schedule fire again."""

    name: ScheduleName


@operation("POST schedules/{name}/run", "schedules.fire_now", body="RunSchedule", once=True)
class RunSchedule(_Act, Request["str | None"]):
    """Fire a schedule now; `id` is null, and `skipped` says why, if something holds it back.

    Returns the id of the job or run, or None.
    """

    name: ScheduleName

    def read(self, found: Any) -> str | None:
        return request.row(found)["id"]


# --- acts --------------------------------------------------------------------------------------


@operation("GET acts", "acts.list")
class ListActs(Pages[JsonDict]):
    """Return the acts (requested changes) that match every filter, the newest first.

    `kind` and `subject` name the object, as `run` and its id.
    """

    _: KW_ONLY
    since: Annotated[datetime | timedelta | None, _moment("since")] = None
    actor: Annotated[str | None, _filter("only acts of this actor", "WHO")] = None
    action: Annotated[str | None, _filter("only of this name, as cancel, pause, off", "DID")] = None
    kind: Annotated[
        str | None, _filter("only of run, job, queue, schedule, machine or failures", "KIND")
    ] = None
    subject: Annotated[str | None, _filter("only of the object with this id or name", "ID")] = None
    limit: FirstPage = 100


# --- the service -------------------------------------------------------------------------------


@operation("GET events", name="stream", refuses=(410,))
class FollowEvents(Stream[Event]):
    """Yield changes of jobs and runs from now on, or all after `last_event_id`.
    Each has an id, the kind `job` or `run`, and JSON data.

    The stream never ends by itself. An interrupted one is resumed, without a gap and without
    repeating a change. Raises `EventsLost` if too much happened meanwhile, `ServiceUnavailable`
    if the service cannot be reached `retries` times in a row.
    """

    _: KW_ONLY
    kind: Literal["job", "run"] | None = None
    job_id: Filter = None
    run_id: Filter = None
    queue: Filter = None
    last_event_id: LastId = None

    ends = False

    def item(self, event: Event) -> Event:
        return event


@operation("GET /health")
class Health(Row):
    """Check that the process of the service runs; the database is not checked."""


@operation("GET /ready", refuses=(503,))
class Ready(Row):
    """Check that the service can work; raise `ServiceUnavailable` with the reason if it cannot."""


@operation("GET /status")
class ServiceStatus(Row):
    """Return the version and the uptime of the service."""
