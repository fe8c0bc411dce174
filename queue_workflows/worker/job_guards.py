"""Choose the guards of a job, and its wall-clock budget."""

from __future__ import annotations

from queue_workflows import config
from queue_workflows.dag import policy
from queue_workflows.types import Row
from queue_workflows.worker import guards

GPU_S = 8100.0
VIDEO_S = 1800.0
CPU_S = 2100.0
INPUT_S = 120.0
INGEST_S = {"fetch": 7200.0, "load": 3600.0}
"""Wall-clock budgets in seconds, as the contract names them."""


def budget_for(job: Row) -> float:
    """Return the wall-clock budget in seconds: its `timeout_s`, else its task's, else by kind."""
    if (own_s := _own_s(job)) is not None:
        return own_s
    cfg = config.get_config()
    queue = job["queue"]
    if _is_ingest(job):
        task = cfg.ingest_task_policies.get(job.get("task_name", ""), {})
        if "timeout_s" in task:
            return float(task["timeout_s"])
        return INGEST_S.get(queue, float(cfg.ingest_default_budget_s))
    if _is_input(job):
        return INPUT_S
    if queue == "gpu":
        return VIDEO_S if _is_video(job) else GPU_S
    return CPU_S


def _own_s(job: Row) -> float | None:
    """Return the `timeout_s` of the row, or None; NaN or -1 from plain SQL count as none."""
    # A node's row comes as JSON, in which NaN and infinity are strings.
    timeout_s = float(job.get("timeout_s") or 0.0)
    return min(timeout_s, policy.MAX_WAIT_S) if timeout_s > 0 else None


def guards_for(job: Row, started: float) -> list[guards.Guard]:
    """Return the guards of a job claimed now, except the one of its lease.

    All jobs but gpu nodes have a wall-clock budget. A gpu node is checked by its activity. Its
    budget counts only if it has a `timeout_s`, or while no probe reports.
    """
    budget_s = budget_for(job)
    if _is_ingest(job) or job["queue"] != "gpu" or _is_input(job):
        return [guards.Budget(started, budget_s)]
    found: list[guards.Guard] = [guards.GpuHealth(started, budget_s)]
    if _own_s(job) is not None:
        found.append(guards.Budget(started, budget_s))
    if not _is_video(job):
        found.append(guards.Stall(started))
    return found


def _is_ingest(job: Row) -> bool:
    return "task_name" in job or job["queue"] not in config.DAG_QUEUES


def _is_input(job: Row) -> bool:
    return str(job.get("node_module")).startswith("__input__")


def _is_video(job: Row) -> bool:
    return job.get("required_model") in config.get_config().video_model_ids
