"""The example host: reports on the Python code in a folder. `--app queue_workflows.demo:setup`.

`setup()` is all that the engine needs of a host: where nodes, workflows and models are found, which
ingest tasks exist, and when they run. Each worker process calls it once, before it takes work.

A run of `code_report` has the context `{"folder": path}` (null: the standard library) and an
`out_dir`; it leaves `report/write/report.html` and `report.md` there. On the way it asks, at the
node `choose_focus`, what the report leads with.
"""

from __future__ import annotations

import queue_workflows
from queue_workflows import scheduler
from queue_workflows.demo import models, tasks, workflows


def setup() -> None:
    """Wire this host into the engine; safe to call again."""
    queue_workflows.configure(ingest_queues={"fetch"})
    queue_workflows.set_node_module_package("queue_workflows.demo.nodes")
    queue_workflows.set_workflow_provider(workflows.load_workflow, workflows.load_pipeline)
    queue_workflows.set_builtin_model_registrar(models.register)
    queue_workflows.register_ingest_task("snapshot_folder", tasks.snapshot_folder)
    queue_workflows.set_ingest_schedule(
        [
            scheduler.ScheduleEntry(
                "nightly-snapshot", minute=15, task_name="snapshot_folder", queue="fetch", hours={3}
            )
        ]
    )
