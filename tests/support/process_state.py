"""Reset what a test may have changed of this process, and report what must not change."""

from __future__ import annotations

import logging
import os

from queue_workflows import config, model_registry
from queue_workflows.runtime import attempt_spans, log_context

PREFIXES = ("QUEUE_WORKFLOWS_", "AI_LEADS_")


def forget_environment() -> dict[str, str]:
    """Remove the variables of the library from the environment; return them."""
    names = [name for name in os.environ if name.startswith(PREFIXES)]
    return {name: os.environ.pop(name) for name in names}


def reset() -> None:
    """Forget what apps have registered, and the ids that this process puts into its log."""
    config.reset_for_tests()
    model_registry.clear_for_tests()
    log_context.reset_for_tests()
    attempt_spans.reset_for_tests()


def what_is_logged() -> tuple[object, ...]:
    """Return the root logger's level, the disabled level, and our loggers that drop warnings."""
    root = logging.getLogger()
    deaf = [
        name
        for name, logger in root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger)
        and name.startswith("queue_workflows")
        and not logger.isEnabledFor(logging.WARNING)
    ]
    return root.level, root.manager.disable, sorted(deaf)
