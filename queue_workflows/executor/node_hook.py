"""Call the app's hook for a completed node, in the executor that has the node's value."""

from __future__ import annotations

import logging
from typing import Any

from queue_workflows import config
from queue_workflows.executor import protocol
from queue_workflows.runtime import log_context

_log = logging.getLogger(__name__)


def call(message: protocol.Announce, value: Any) -> None:
    """Call `on_node_completed`, if the app has set it; log what it raises."""
    hook = config.get_config().on_node_completed
    if hook is None:
        return
    try:
        hook(message.job, message.run, value)
    except (Exception, SystemExit, KeyboardInterrupt):  # noqa: BLE001  app code
        _log.exception(
            "on_node_completed for node %s failed",
            message.job.get("node_id"),
            extra=log_context.ids_of_job(message.job),
        )
