"""Define the bodies of requests and responses, with examples for the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

import pydantic
from pydantic import AwareDatetime, Field, StrictInt

MAX_ATTEMPTS = 5
"""Attempts of a job that is triggered without `max_attempts`."""
_AT = "2026-03-01T09:30:00+00:00"
_JOB = "0198f3a2-5b1c-7d3e-8f90-000000000001"

Name = Annotated[str, Field(min_length=1, max_length=1000)]
Key = Annotated[str, Field(min_length=1, max_length=1000)]
JobState = Literal["queued", "running", "succeeded", "failed", "canceled", "lost"]


class Body(pydantic.BaseModel):
    """A request's body: an unknown member is refused."""

    model_config = pydantic.ConfigDict(extra="forbid")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _few(cls, given: Any) -> Any:
        """Refuse many unknown members at once: an error for each of 100,000 takes a second."""
        members = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
        known = cls.model_fields
        if len(members) > len(known):
            unknown = [name for name in members if name not in known]
            named = ", ".join(f"{name[:80]!r}" for name in unknown[:3])
            more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
            raise ValueError(f"unknown members: {named}{more}")
        return cast("Any", given)


class Trigger(Body):
    """A job to queue."""

    queue: Name
    task: Name
    args: dict[str, Any] = Field(default_factory=dict)
    idempotency_key: Key | None = None
    lock_key: Key
    partition_key: Key | None = None
    priority: StrictInt | None = Field(default=None, description="smaller runs first; default 100")
    available_at: AwareDatetime | None = None
    max_attempts: StrictInt = Field(default=MAX_ATTEMPTS, ge=1)

    model_config = pydantic.ConfigDict(
        extra="forbid",
        json_schema_extra={
            "example": {
                "queue": "load.cbr",
                "task": "load.rates",
                "args": {"day": "2026-03-01"},
                "idempotency_key": "rates 2026-03-01",
                "lock_key": "rates",
            }
        },
    )


class Triggered(pydantic.BaseModel):
    """The job of a trigger."""

    job_id: str = Field(examples=[_JOB])
    status: JobState = Field(examples=["queued"])


class JobStatus(pydantic.BaseModel):
    """How far a job is."""

    job_id: str = Field(examples=[_JOB])
    status: JobState = Field(examples=["running"])
    attempt: int = Field(examples=[1])
    started_at: str | None = Field(default=None, examples=[_AT])
    finished_at: str | None = None
    heartbeat_at: str | None = Field(default=None, examples=[_AT])
    error: str | None = None
    progress: Any = Field(examples=[0.5])


class Page(pydantic.BaseModel):
    """A page of a list; `next` is the `cursor` of the next page, null on the last one."""

    items: list[dict[str, Any]]
    next: str | None = None


class Part(pydantic.BaseModel):
    """A part of a stream, or with `reset` the mark that an attempt begins."""

    id: str = Field(examples=["1-20"])
    reset: bool
    claim_no: int
    seq: int
    name: str = Field(examples=["text"])
    value: Any = Field(examples=["word"])
    created_at: str | None = Field(examples=[_AT])


class PartsPage(pydantic.BaseModel):
    """Parts of a stream; `next`: the `cursor` of the next page, null where no more are stored.

    `over`: the job has ended, so that no more will come. Without it, go on later with the id of the
    last item as the cursor.
    """

    items: list[Part]
    next: str | None = None
    over: bool


class Problem(pydantic.BaseModel):
    """An error, as RFC 9457 defines it."""

    type: str = Field(examples=["urn:queue-workflows:unknown-job"])
    title: str = Field(examples=["Not found"])
    status: int = Field(examples=[404])
    detail: str = Field(examples=["no job 'x'"])


class Submit(Body):
    """A run to submit."""

    workflow: Name
    inputs: dict[str, Any] = Field(default_factory=dict, examples=[{"wish": "tea"}])
    priority: StrictInt = Field(default=100, description="smaller runs first")
    idempotency_key: Key | None = None


class RetryRun(Body):
    """From which node a run is run again; null: from those that did not complete."""

    from_node: Name | None = None


class Answer(Body):
    """An answer to an input node."""

    value: Any = Field(examples=["yes"])


class Switch(Body):
    """Why workers are switched."""

    reason: str | None = Field(default=None, max_length=1000)


class Drain(Switch):
    """Also for how many seconds; null: until they are switched on."""

    for_s: float | None = Field(default=None, gt=0, le=366 * 86400.0)


class SwitchOff(Drain):
    """A switch to OFF: `hard` returns running jobs to the queue, `pause` lets them finish."""

    policy: Name = "hard"


class Pause(Body):
    """For how many seconds a queue, or one partition of it, is paused; null: until `resume`."""

    partition: Key | None = None
    for_s: float | None = Field(default=None, gt=0, le=366 * 86400.0)


class Resume(Body):
    """The partition that is resumed; null: the queue."""

    partition: Key | None = None


class Limits(Body):
    """The limits to set; a member that is null removes its limit, one that is absent keeps it."""

    partition: Key | None = None
    max_running: StrictInt | None = None
    rate: str | None = Field(default=None, max_length=40, examples=["100/m"])
    partition_max_running: StrictInt | None = None
    partition_rate: str | None = Field(default=None, max_length=40)
