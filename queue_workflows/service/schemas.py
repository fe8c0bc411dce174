"""Define the bodies of responses and the base of those of requests, with examples."""

from __future__ import annotations

from typing import Any, Final, cast

import pydantic
from pydantic import Field

from queue_workflows.requests.catalog import JobState
from queue_workflows.service import problems as service_problems
from queue_workflows.service import request_parts

REF: Final = "#/components/schemas/{model}"
_AT = "2026-03-01T09:30:00+00:00"
_JOB = "0198f3a2-5b1c-7d3e-8f90-000000000001"


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


TRIGGER: Final[dict[str, Any]] = {
    "queue": "load.cbr", "task": "load.rates", "args": {"day": "2026-03-01"},
    "idempotency_key": "rates 2026-03-01", "lock_key": "rates",
}  # fmt: skip
"""The example of a job."""


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


def problems(method: str, *statuses: int, public: bool = False) -> dict[int | str, dict[str, Any]]:
    """Return the error responses for the OpenAPI document: these, and those of the guard."""
    every = {400, 414, 431, *statuses}
    if not public:
        every |= {401, 403, 421, 503}
    if method not in request_parts.SAFE:
        every |= {408, 413, 415}
    schema = {"application/problem+json": {"schema": {"$ref": REF.format(model="Problem")}}}
    return {
        code: {"content": schema, "description": service_problems.TITLES[code]}
        for code in sorted(every)
    }
