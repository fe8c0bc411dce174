"""Define types that every layer shares: states, rows, keywords of public functions, callables.

It is long since each column of a row has a line. A test compares them with the database.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias, TypedDict, get_args

Row: TypeAlias = dict[str, Any]
"""One table row by column name: jsonb decoded (or `Unreadable`), timestamps as aware datetimes."""

Rows: TypeAlias = list[Row]
"""Several table rows, for modules whose function `list` hides the type of that name."""

JsonDict: TypeAlias = dict[str, Any]
"""A JSON object."""

NowFn: TypeAlias = Callable[[], float]
"""A monotonic clock in seconds."""

SleepFn: TypeAlias = Callable[[float], object]
"""Waits that many seconds."""

ExitFn: TypeAlias = Callable[[int], None]
"""Ends the process with an exit code; `os._exit` in production."""


class Unreadable:
    """Takes the place of a stored JSON value that this process refuses to load.

    `reason` is the cause, as a sentence. `raw` is the JSON text from the server, or its beginning
    if the text is too long to be loaded.
    """

    __slots__ = ("raw", "reason")

    def __init__(self, reason: str, raw: bytes) -> None:
        self.reason = reason
        self.raw = raw

    def __repr__(self) -> str:
        return f"<unreadable JSON: {self.reason}>"


TerminalRunStatus: TypeAlias = Literal["completed", "failed", "cancelled"]
RunStatus: TypeAlias = Literal["queued", "running", TerminalRunStatus]
"""The states that the engine gives a run. An app may store any other text."""
TerminalJobStatus: TypeAlias = Literal[TerminalRunStatus, "skipped"]
JobStatus: TypeAlias = Literal["queued", "running", "completed", "failed", "cancelled"]
"""The states of an ingest job."""
NodeStatus: TypeAlias = Literal["queued", "running", "awaiting_input", TerminalJobStatus]
"""The states of a node job."""
DesiredState: TypeAlias = Literal["on", "off"]
StopPolicy: TypeAlias = Literal["hard", "drain", "pause"]
"""How a worker that is switched off stops. An app may register others."""
RunMode: TypeAlias = Literal["step", "node"]
DagQueue: TypeAlias = Literal["cpu", "gpu"]
"""The queues of node jobs."""

TERMINAL_RUN_STATUSES: Final[frozenset[str]] = frozenset(get_args(TerminalRunStatus))
TERMINAL_JOB_STATUSES: Final[frozenset[str]] = frozenset(get_args(TerminalJobStatus))
"""The terminal states of both job families; only nodes are `skipped`."""


class Run(TypedDict):
    """A row of `workflow_runs`."""

    id: str
    parcel_id: str | None
    workflow_name: str
    status: str
    priority: int
    current_step_id: str | None
    progress_pct: float
    steps_done: Any
    context: Any
    input_spec: Any
    error: str | None
    out_dir: str | None
    mode: RunMode
    resume_count: int
    created_at: datetime.datetime
    updated_at: datetime.datetime
    queued_at: datetime.datetime | None
    started_at: datetime.datetime | None
    finished_at: datetime.datetime | None
    definition: Any
    definition_hash: str | None
    generation: int
    start_attempts: int
    available_at: datetime.datetime | None
    headers: Any
    parent_run_id: str | None
    parent_node_id: str | None
    revision: int
    upgrades: Any


class NodeChange(TypedDict):
    """How a node differs from today's code: names of `fields`, and its versions."""

    id: str
    fields: list[str]
    version_before: int | None
    version_after: int | None


class RunPage(NamedTuple):
    """A part of a list of runs."""

    items: Rows
    next: tuple[datetime.datetime, str] | None
    """`created_at` and `id` of the last run before the next page; None on the last page."""


class Upgrade(TypedDict):
    """How a run differs from today's code, and whether it was moved there."""

    run_id: str
    outcome: Literal["same", "would move", "moved", "refused"]
    blocked: list[str]
    added: list[str]
    removed: list[str]
    changed: list[NodeChange]
    edges_added: list[list[str]]
    edges_removed: list[list[str]]
    unknown: list[str]
    """New and changed nodes whose code no live worker has."""


class Job(TypedDict):
    """The columns that both job tables have."""

    id: str
    priority: int
    error: str | None
    seconds: float | None
    created_at: datetime.datetime
    started_at: datetime.datetime | None
    finished_at: datetime.datetime | None
    claimed_by: str | None
    lease_expires_at: datetime.datetime | None
    watchdog_retries: int
    seq: int
    claim_no: int
    worker_id: str | None
    generation: int
    attempts: int
    max_attempts: int
    crash_count: int
    available_at: datetime.datetime | None
    blocked_reason: str | None
    cancel_requested_at: datetime.datetime | None
    heartbeat_at: datetime.datetime | None
    progress: Any
    timeout_s: float | None
    policy: Any
    lock_key: str | None
    partition_key: str | None
    resume_host: str | None
    resume_at: datetime.datetime | None
    resume_until: datetime.datetime | None
    lapse_count: int


class NodeJob(Job):
    """A row of `workflow_node_jobs`."""

    run_id: str
    node_id: str
    node_module: str
    pipeline_name: str | None
    queue: DagQueue
    required_model: str | None
    required_version: str | None
    status: NodeStatus
    worker_lane: int | None
    inputs: Any
    resolved_inputs: Any
    input_spec: Any
    context_delta: Any
    host_label: str | None
    celery_task_id: str | None
    vm_rss_mb_peak: int | None
    input_template: Any
    ref_heads: list[str] | None
    child_run_id: str | None


class IngestJob(Job):
    """A row of `ingest_jobs`."""

    task_name: str
    queue: str
    reason: str
    status: JobStatus
    result: Any
    args: Any
    idempotency_key: str | None
    headers: Any
    idempotency_window_s: float | None
    idempotency_released: bool
    admitted_at: datetime.datetime | None


class WorkerControl(TypedDict):
    """A row of `worker_controls`."""

    host_label: str
    queue: str
    desired_state: DesiredState
    stop_policy: str
    requested_by: str | None
    updated_at: datetime.datetime
    reason: str | None
    until_at: datetime.datetime | None


class JobId(str):
    """An ingest job's id; `created` is False if its idempotency key already had this job."""

    created: bool = True


class JobOptions(TypedDict, total=False):
    """The options of an ingest job in addition to its task, queue and args."""

    reason: str
    priority: int | None
    """-32768 to 32767, by default 100; the smallest number is claimed first."""
    idempotency_key: str | None
    """While a job has this key, no other job is queued with it."""
    idempotency_window_s: float | None
    """Seconds after its creation for which an ended job keeps its key; by default a day."""
    lock_key: str | None
    """Jobs with the same key run one at a time."""
    partition_key: str | None
    """Jobs with the same key share the partition limits of their queue."""
    available_at: datetime.datetime | None
    """The earliest time of its start, with a time zone."""
    max_attempts: int | None
    """How many attempts may fail; by default one."""
    backoff: float | Mapping[str, Any] | None
    """Wait between attempts in seconds, or `kind`, `base_s`, `cap_s`, `jitter`."""
    timeout_s: float | None
    """Longest time in seconds that an attempt may take; by default its queue's budget."""
    headers: Mapping[str, str] | None
    """Texts besides the args, such as trace ids."""


class JobKeywords(JobOptions, total=False):
    """The keywords of `jobs.enqueue` other than the task's name."""

    queue: str
    args: Mapping[str, Any] | None


class NewIngestJob(JobKeywords, total=False):
    """One of the jobs of `jobs.enqueue_many`: the keywords of `jobs.enqueue`."""

    task_name: str


class Who(TypedDict, total=False):
    """The author of a requested change (200 characters) and the reason (1,000); see `acts`."""

    by: str | None
    reason: str | None


class NewRun(TypedDict, total=False):
    """The keywords of `runs.submit`, all of them optional."""

    run_id: str | None
    parcel_id: str | None
    out_dir: str | None
    status: str
    priority: int
    mode: str
    inputs: dict[str, Any] | None
    headers: Mapping[str, str] | None


WorkflowLoader: TypeAlias = Callable[[str], Mapping[str, Any]]
PipelineLoader: TypeAlias = Callable[[str], Mapping[str, Any]]
RefResolver: TypeAlias = Callable[[Any, Mapping[str, Any]], Any]
WidgetSpec: TypeAlias = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]
NodeHook: TypeAlias = Callable[[Row, Row, JsonDict], None]
FailureHook: TypeAlias = Callable[[JsonDict], object]


def is_name(value: object, most: int = 400) -> bool:
    """Return whether this may name a host, worker or model: 1 to `most` bytes, no NUL."""
    try:
        return isinstance(value, str) and "\x00" not in value and 1 <= len(value.encode()) <= most
    except UnicodeEncodeError:
        return False


class WorkflowDocuments(Protocol):
    """A workflow with pipelines of its own, each named `<workflow>.<step>`."""

    def document(self) -> Mapping[str, Any]:
        """`{"name", "steps"}`."""
        ...

    def pipelines(self) -> Mapping[str, Mapping[str, Any]]:
        """`{"name", "nodes"}` by name."""
        ...

    def check_inputs(self, given: Any) -> None:
        """Raise `ArgsRefused` unless a run of the workflow can have these inputs."""
        ...

    def accepts_input(self, key: str, value: Any) -> bool:
        """Return whether the inputs of a run may hold this value under this key."""
        ...
