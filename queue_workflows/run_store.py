"""Keep the 0.3.0 functions for runs; each calls `runs`."""

from __future__ import annotations

from typing import Any

from queue_workflows import runs
from queue_workflows.types import Run


def insert_run(
    *,
    run_id: str | None = None,
    workflow_name: str,
    parcel_id: str | None = None,
    out_dir: str | None = None,
    status: str = "queued",
    priority: int = 100,
    mode: str = "node",
    context: dict[str, Any] | None = None,
    conn: Any = None,
) -> Run:
    """Call `runs.submit`."""
    return runs.submit(
        workflow_name,
        run_id=run_id,
        parcel_id=parcel_id,
        out_dir=out_dir,
        status=status,
        priority=priority,
        mode=mode,
        inputs=context,
        conn=conn,
    )


get_run = runs.get
update_run = runs.update
delete_run = runs.delete
reenqueue_running_for_resume = runs.requeue_running
