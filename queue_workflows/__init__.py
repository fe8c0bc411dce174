"""Postgres as queue, message bus and memory of a workflow engine for the machines people own."""

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
    set_on_node_completed,
    set_workflow_provider,
)
from queue_workflows.errors import Discard, Retry, Snooze

if TYPE_CHECKING:
    from queue_workflows.declare import OFFERED, ask, node, pipeline, workflow
    from queue_workflows.dispatcher import (
        cancel_job,
        cancel_run,
        cancel_run_async,
        retry_job,
        retry_run,
        retry_run_async,
        submit_input,
        submit_input_async,
    )
    from queue_workflows.tasks import current_job, register_ingest_task

__version__ = "0.4.0"

_OPERATIONS = frozenset(
    {
        "cancel_job", "cancel_run", "cancel_run_async", "retry_job", "retry_run",
        "retry_run_async", "submit_input", "submit_input_async",
    }
)  # fmt: skip
_DECLARING = frozenset({"OFFERED", "ask", "node", "pipeline", "workflow"})
_TASKS = frozenset({"current_job", "register_ingest_task"})
_MODULES = frozenset(
    {
        "cgroup_attribution", "check", "claim_worker", "config", "db", "declare", "dispatcher",
        "embedded", "errors", "gpu_model_cache", "history", "hw_metrics", "ingest_executor",
        "input_listener", "jobs", "migrations", "model_cache", "model_control", "model_registry",
        "node_executor", "node_pool", "node_queue", "orchestrator", "queues", "refs", "retention",
        "run_store", "scheduler", "tasks", "testing", "types", "waiting", "worker_control",
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
    "cancel_job",
    "cancel_run",
    "cancel_run_async",
    "configure",
    "current_job",
    "get_config",
    "node",
    "pipeline",
    "register_ingest_task",
    "register_input_widget",
    "register_node",
    "retry_job",
    "retry_run",
    "retry_run_async",
    "set_builtin_model_registrar",
    "set_ingest_schedule",
    "set_invoke_context",
    "set_node_module_package",
    "set_node_resolver",
    "set_on_node_completed",
    "set_workflow_provider",
    "submit_input",
    "submit_input_async",
    "workflow",
]


def __getattr__(name: str) -> Any:
    """Modules and operations load on first use, so that a bare import costs next to nothing."""
    import importlib

    if name in _OPERATIONS:
        return getattr(importlib.import_module("queue_workflows.dispatcher"), name)
    if name in _DECLARING:
        return getattr(importlib.import_module("queue_workflows.declare"), name)
    if name in _TASKS:
        return getattr(importlib.import_module("queue_workflows.tasks"), name)
    if name in _MODULES:
        return importlib.import_module(f"queue_workflows.{name}")
    raise AttributeError(f"module 'queue_workflows' has no attribute {name!r}")
