"""Run jobs in threads of one process that share its models; no server is needed."""

from __future__ import annotations

from queue_workflows.local_queue.job_queue import Job, JobQueue, Refusal
from queue_workflows.local_queue.manager import JobQueueManager
from queue_workflows.local_queue.plan import ExecutionPlan, MemoryPlan

__all__ = ["ExecutionPlan", "Job", "JobQueue", "JobQueueManager", "MemoryPlan", "Refusal"]
