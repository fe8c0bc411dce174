"""The soak's wrapper around handlers passes on all arguments."""

from __future__ import annotations

import inspect

import pytest

from queue_workflows import ingest_executor, node_executor
from queue_workflows.run import task_call
from tests.soak import handler_wrapper


@pytest.mark.parametrize(
    "run",
    [ingest_executor.run_task, task_call.call_async, node_executor.run_handler],
)
def test_all_arguments_are_passed_on(run: object) -> None:
    given: list[object] = []

    def stand_in(*args: object, **more: object) -> str:
        given.extend([*args, *more])
        return "ran"

    assert callable(run)
    count = len(inspect.signature(run).parameters)
    assert count > 1
    values = [{"id": "job"}, *range(1, count)]
    assert handler_wrapper.noting(stand_in)(*values) == "ran"
    assert given == values
