"""Register ingest tasks, check their args, call them, and report to them about their job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from queue_workflows.tasks.registry import (
    TaskPolicy,
    check_args,
    register_ingest_task,
    row_defaults,
)

if TYPE_CHECKING:
    from queue_workflows.tasks.job import Job, NodeJob, current_job

__all__ = [
    "Job", "NodeJob", "TaskPolicy", "check_args", "current_job", "register_ingest_task",
    "row_defaults",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load what handlers need on first use: a process that only queues jobs runs none."""
    if name in ("Job", "NodeJob", "current_job"):
        from queue_workflows.tasks import job

        return getattr(job, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
