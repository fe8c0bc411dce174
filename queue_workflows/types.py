"""Types that every layer shares."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, TypedDict

Row: TypeAlias = dict[str, Any]
"""One table row by column name: jsonb decoded (or `Unreadable`), timestamps as aware datetimes."""

JsonDict: TypeAlias = dict[str, Any]
"""A JSON object."""

NowFn: TypeAlias = Callable[[], float]
"""A monotonic clock in seconds."""

SleepFn: TypeAlias = Callable[[float], object]
"""Waits that many seconds."""

ExitFn: TypeAlias = Callable[[int], None]
"""Leaves the process with an exit code; `os._exit` in production."""


class Unreadable:
    """A stored JSON value that this process refuses to load; it stands where the value would.

    `reason` says why in a sentence for people; `raw` is the JSON text as the server sent it,
    or its beginning if that is longer than is loaded.
    """

    __slots__ = ("raw", "reason")

    def __init__(self, reason: str, raw: bytes) -> None:
        self.reason = reason
        self.raw = raw

    def __repr__(self) -> str:
        return f"<unreadable JSON: {self.reason}>"


class JobId(str):
    """An ingest job's id, a text; `created` is False when its idempotency key had the job."""

    created: bool = True


class JobOptions(TypedDict, total=False):
    """What an ingest job may be given besides its task, queue and args; all of it optional."""

    reason: str
    priority: int
    """-32768 to 32767, the smallest first; 100."""
    idempotency_key: str | None
    """While a job has it, no other is queued with it."""
    idempotency_window_s: float | None
    """For how long after its creation a job that has ended keeps its key; None: a day."""
    lock_key: str | None
    """Of the jobs of a key one runs at a time."""
    partition_key: str | None
    """What the limits of its queue count together."""
    available_at: datetime.datetime | None
    """Not before then; with a time zone."""
    max_attempts: int | None
    """How often it may fail; None: 1."""
    backoff: float | Mapping[str, Any] | None
    """Wait between attempts in seconds, or `kind`, `base_s`, `cap_s`, `jitter`."""
    timeout_s: float | None
    """Longest time that an attempt takes; None: its queue's budget."""
    headers: Mapping[str, str] | None
    """Texts beside the args: trace ids and the like."""


class NewIngestJob(JobOptions, total=False):
    """The keywords of `enqueue_ingest_job`."""

    task_name: str
    queue: str
    args: Mapping[str, Any] | None


class _OfWorkflow(TypedDict):
    workflow_name: str


class NewRun(_OfWorkflow, total=False):
    """The keywords of `run_store.insert_run`; all but `workflow_name` are optional."""

    run_id: str | None
    parcel_id: str | None
    out_dir: str | None
    status: str
    priority: int
    mode: str
    context: dict[str, Any] | None


WorkflowLoader: TypeAlias = Callable[[str], Mapping[str, Any]]
PipelineLoader: TypeAlias = Callable[[str], Mapping[str, Any]]
RefResolver: TypeAlias = Callable[[Any, Mapping[str, Any]], Any]
WidgetSpec: TypeAlias = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]
NodeHook: TypeAlias = Callable[[Row, Row, JsonDict], None]


def is_name(value: object) -> bool:
    """Whether the database takes it for a host, worker or model: 1 to 400 bytes, no NUL."""
    try:
        return isinstance(value, str) and "\x00" not in value and 1 <= len(value.encode()) <= 400
    except UnicodeEncodeError:
        return False


class WorkflowDocuments(Protocol):
    """A workflow that brings its own pipelines, each named `<workflow>.<step>`."""

    def document(self) -> Mapping[str, Any]:
        """`{"name", "steps"}`."""
        ...

    def pipelines(self) -> Mapping[str, Mapping[str, Any]]:
        """`{"name", "nodes"}` by name."""
        ...

    def check_inputs(self, given: Any) -> None:
        """Raise `ArgsRefused` unless this is a context that a run of the workflow can have."""
        ...

    def accepts_input(self, key: str, value: Any) -> bool:
        """Return whether a run's context may hold this value under this key."""
        ...
