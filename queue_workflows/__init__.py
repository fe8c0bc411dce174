"""Run workflows and queued jobs with PostgreSQL as the only queue, message bus and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from queue_workflows.config import (
    EngineConfig,
    configure,
    get_config,
    register_input_widget,
    register_node,
    set_builtin_model_registrar,
    set_ingest_schedule,
    set_invoke_context,
    set_node_module_package,
    set_node_resolver,
    set_on_failed,
    set_on_node_completed,
    set_redactor,
    set_workflow_provider,
)
from queue_workflows.errors import Discard, Retry, Snooze

if TYPE_CHECKING:
    from queue_workflows.declare import OFFERED, ask, branch, loop, node, pipeline, workflow
    from queue_workflows.events import send as send_event
    from queue_workflows.jobs import cancel as cancel_job
    from queue_workflows.jobs import retry as retry_job
    from queue_workflows.runs import answer as submit_input
    from queue_workflows.runs import cancel as cancel_run
    from queue_workflows.runs import retry as retry_run
    from queue_workflows.tasks import current_job, register_ingest_task

__version__ = "0.4.0"

_OPERATIONS = {
    "cancel_job": ("jobs", "cancel"),
    "cancel_run": ("runs", "cancel"),
    "retry_job": ("jobs", "retry"),
    "retry_run": ("runs", "retry"),
    "send_event": ("events", "send"),
    "submit_input": ("runs", "answer"),
}
"""Names of the contract for functions of the API's modules."""
_DECLARING = frozenset({"OFFERED", "ask", "branch", "loop", "node", "pipeline", "workflow"})
_TASKS = frozenset({"current_job", "register_ingest_task"})
_MODULES = frozenset(
    {
        "acts", "cgroup_attribution", "check", "claim_worker", "config", "db", "declare",
        "dispatcher", "embedded", "errors", "events", "failures", "gpu_model_cache", "history",
        "hw_metrics", "ingest_executor", "input_listener", "jobs", "migrations", "model_cache",
        "model_registry", "models", "node_executor", "node_pool", "node_queue", "orchestrator",
        "queues", "refs", "run_store", "runs", "scheduler", "schedules", "service", "steps",
        "streams", "tasks", "testing", "types", "worker_control", "workers",
    }
)  # fmt: skip

__all__ = [
    "Discard",
    "EngineConfig",
    "OFFERED",
    "Retry",
    "Snooze",
    "__version__",
    "ask",
    "branch",
    "cancel_job",
    "cancel_run",
    "configure",
    "current_job",
    "get_config",
    "loop",
    "node",
    "pipeline",
    "register_ingest_task",
    "register_input_widget",
    "register_node",
    "retry_job",
    "retry_run",
    "send_event",
    "set_builtin_model_registrar",
    "set_ingest_schedule",
    "set_invoke_context",
    "set_node_module_package",
    "set_node_resolver",
    "set_on_failed",
    "set_on_node_completed",
    "set_redactor",
    "set_workflow_provider",
    "submit_input",
    "workflow",
]


def __getattr__(name: str) -> Any:
    """Load a module or function on first use, so that a bare import costs almost nothing."""
    import importlib

    if name in _OPERATIONS:
        module, function = _OPERATIONS[name]
        return getattr(importlib.import_module(f"queue_workflows.{module}"), function)
    if name in _DECLARING:
        return getattr(importlib.import_module("queue_workflows.declare"), name)
    if name in _TASKS:
        return getattr(importlib.import_module("queue_workflows.tasks"), name)
    if name in _MODULES:
        return importlib.import_module(f"queue_workflows.{name}")
    raise AttributeError(f"module 'queue_workflows' has no attribute {name!r}")
