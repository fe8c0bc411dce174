"""Define tasks that run the code which a test gives them: `--app tests.support.code_app:setup`."""

from __future__ import annotations

import ast
import contextvars
import inspect
import os
from typing import Any

import queue_workflows
from queue_workflows import jobs
from queue_workflows.types import Row

QUEUE = "code"
AT_IMPORT = "QW_TEST_AT_IMPORT"
"""The variable with the code that loading the app runs."""
variable: contextvars.ContextVar[str] = contextvars.ContextVar("code_app", default="unset")


def runs(*, code: str) -> dict[str, Any]:
    """Run the code; the result has what it gives the name `found`."""
    scope: dict[str, Any] = {}
    exec(code, scope)
    return {"found": scope.get("found"), "pid": os.getpid()}


async def runs_async(*, code: str) -> dict[str, Any]:
    """Run code that may await."""
    scope: dict[str, Any] = {}
    compiled = compile(code, "given", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    found = eval(compiled, scope)
    if inspect.isawaitable(found):
        await found
    return {"found": scope.get("found"), "pid": os.getpid()}


def enqueued(code: str, *, in_loop: bool = False, **more: Any) -> str:
    """Queue a job that runs this code; `in_loop`: on an event loop."""
    name = (runs_async if in_loop else runs).__name__
    return jobs.enqueue(task_name=name, queue=QUEUE, args={"code": code}, **more)


def found(row: Row) -> Any:
    """Return what the code of a completed job has found."""
    return row["result"]["found"]


def setup() -> None:
    """Register the tasks, after the code of the environment."""
    exec(os.environ.get(AT_IMPORT, ""), {})
    queue_workflows.configure(ingest_queues=(QUEUE,))
    for task in (runs, runs_async):
        queue_workflows.register_ingest_task(task.__name__, task)
