"""What this process remembers beside its configuration."""

from __future__ import annotations

from queue_workflows import model_registry
from queue_workflows.runtime import log_context, trace_context


def forget() -> None:
    """Forget the models of the app, and the job and trace that log lines name."""
    log_context.reset_for_tests()
    trace_context.reset_for_tests()
    model_registry.clear_for_tests()
