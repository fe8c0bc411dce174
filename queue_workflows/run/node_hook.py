"""Call the app's hook for a completed node, in the executor that has the node's value."""

from __future__ import annotations

import logging
from typing import Any

from queue_workflows import config
from queue_workflows.run import job_rows
from queue_workflows.runtime import log_context
from queue_workflows.types import JsonDict

_log = logging.getLogger(__name__)


def call(rows: JsonDict, value: Any) -> None:
    """Call `on_node_completed` with `job` and `run`, if the app has set it; log what it raises."""
    hook = config.get_config().on_node_completed
    if hook is None:
        return
    try:
        hook(job_rows.timed(rows["job"]), job_rows.timed(rows["run"]), value)
    except (Exception, SystemExit, KeyboardInterrupt):  # noqa: BLE001  app code
        _log.exception(
            "on_node_completed for node %s failed",
            rows["job"].get("node_id"),
            extra=log_context.ids_of_job(rows["job"]),
        )
