"""Define the example app `queue_workflows.demo:setup`, which makes a picture book of texts.

`workflow` has the nodes and the workflow, and `painter` the model that the gpu nodes share. `texts`
reads the folder, `page` writes the book, and `run_picture` draws the course of the run.
"""

from __future__ import annotations

import queue_workflows
from queue_workflows import declare, scheduler
from queue_workflows.demo import book_texts, painter, workflow


def setup() -> None:
    """Register this app with the engine, once in each process; safe to call again."""
    declare.install(workflow)
    queue_workflows.set_builtin_model_registrar(painter.register)
    queue_workflows.configure(ingest_queues={"fetch"})
    queue_workflows.register_ingest_task("count_texts", book_texts.count_texts)
    nightly = scheduler.ScheduleEntry(
        "nightly-count", minute=15, task_name="count_texts", queue="fetch", hours={3}
    )
    queue_workflows.set_ingest_schedule([nightly])
