"""What a host says of its ingest tasks, and what their bodies can ask."""

from __future__ import annotations

from queue_workflows.tasks.args import check_args
from queue_workflows.tasks.bodies import is_async
from queue_workflows.tasks.job import Job, current_job
from queue_workflows.tasks.registering import TaskPolicy, register_ingest_task, row_defaults

__all__ = [
    "Job",
    "TaskPolicy",
    "check_args",
    "current_job",
    "is_async",
    "register_ingest_task",
    "row_defaults",
]
