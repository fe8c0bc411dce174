"""Run jobs in threads of one process that share its models; no server is needed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from queue_workflows.local_queue.execution_plan import ExecutionPlan, MemoryPlan
from queue_workflows.local_queue.job_queue import Job, JobQueue, Refusal
from queue_workflows.local_queue.manager import JobQueueManager
from queue_workflows.runtime import logs

if TYPE_CHECKING:
    from queue_workflows.local_queue.ingest_plan import IngestPlan

__all__ = [
    "ExecutionPlan", "IngestPlan", "Job", "JobQueue", "JobQueueManager", "MemoryPlan", "Refusal",
]  # fmt: skip


logging.getLogger("queue_workflows.local_queue").addFilter(logs.escape_arguments)


def __getattr__(name: str) -> Any:
    if name == "IngestPlan":  # late, since only this class imports the engine
        from queue_workflows.local_queue import ingest_plan

        return ingest_plan.IngestPlan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
