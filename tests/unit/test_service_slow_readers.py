"""A client may take a response slowly; one that takes nothing of it is cut off."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from queue_workflows.service import server


@pytest.fixture
def connection() -> Any:
    """A protocol with a loop whose timers the test fires, and a transport that counts."""
    timers: list[tuple[Callable[..., None], tuple[Any, ...], SimpleNamespace]] = []

    def call_later(_: float, call: Callable[..., None], *args: Any) -> SimpleNamespace:
        handle = SimpleNamespace(cancelled=False)
        handle.cancel = lambda: setattr(handle, "cancelled", True)
        timers.append((call, args, handle))
        return handle

    made: Any = object.__new__(server._Protocol)
    made.loop = SimpleNamespace(call_later=call_later)
    made.flow = SimpleNamespace(pause_writing=lambda: None, resume_writing=lambda: None)
    aborted: list[bool] = []
    made.transport = SimpleNamespace(
        left=100,
        get_write_buffer_size=lambda: made.transport.left,
        abort=lambda: aborted.append(True),
    )

    def pass_time() -> bool:
        """Fire the timer that runs; return whether the connection is cut off."""
        running = [each for each in timers if not each[2].cancelled]
        timers.clear()
        for call, args, _ in running:
            call(*args)
        return bool(aborted)

    return made, pass_time


def test_a_client_that_takes_a_part_in_time_is_waited_for(connection: Any) -> None:
    made, pass_time = connection
    made.pause_writing()
    for left in (60, 20):
        made.transport.left = left
        assert not pass_time()
    made.transport.left = 0
    made.resume_writing()
    assert not pass_time()


def test_a_client_that_takes_nothing_is_cut_off(connection: Any) -> None:
    made, pass_time = connection
    made.pause_writing()
    made.transport.left = 60
    assert not pass_time()
    assert pass_time()
