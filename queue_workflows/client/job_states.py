"""Define `JobStatus`, the service's job states, and the final states of jobs and runs."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

JobState = Literal["queued", "running", "succeeded", "failed", "canceled", "lost"]
"""The service's names of states: `lost` is a running job whose lease has lapsed."""
FINAL = frozenset({"succeeded", "failed", "canceled"})
FINAL_RUN = frozenset({"completed", "failed", "cancelled"})


class JobStatus(TypedDict):
    """How far a job is; times in ISO 8601."""

    job_id: str
    status: JobState
    attempt: int
    started_at: str | None
    finished_at: str | None
    heartbeat_at: str | None
    error: str | None
    progress: Any
