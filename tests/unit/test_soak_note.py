"""The soak's note of the claim whose body runs is in nobody's way."""

from __future__ import annotations

import inspect

import pytest

from queue_workflows import ingest_executor, node_executor
from tests.soak import work


@pytest.mark.parametrize(
    "run",
    [ingest_executor.run_task, ingest_executor.run_task_async, node_executor.run_body],
)
def test_whatever_a_body_is_run_with_is_passed_on(run: object) -> None:
    given: list[object] = []

    def stand_in(*args: object, **more: object) -> str:
        given.extend([*args, *more])
        return "ran"

    assert callable(run)
    count = len(inspect.signature(run).parameters)
    assert count > 1
    values = [{"id": "job"}, *range(1, count)]
    assert work.noting(stand_in)(*values) == "ran"
    assert given == values
