"""Register ingest tasks, check their args, call them, and report to them about their job."""

from __future__ import annotations

from queue_workflows.tasks.args import check_args
from queue_workflows.tasks.handlers import is_async
from queue_workflows.tasks.job import Job, NodeJob, current_job, running
from queue_workflows.tasks.registry import TaskPolicy, register_ingest_task, row_defaults

__all__ = [
    "Job",
    "NodeJob",
    "TaskPolicy",
    "check_args",
    "current_job",
    "is_async",
    "register_ingest_task",
    "row_defaults",
    "running",
]
