"""A client may take a response slowly; one that takes nothing of it is cut off."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from starlette.responses import PlainTextResponse

from queue_workflows.service import guard, server


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


def test_the_time_of_a_request_is_not_that_of_taking_its_response() -> None:
    """What a client takes slowly delays the next response, also beyond the time for a result."""
    settings: Any = SimpleNamespace(
        app_request_timeout_sec=0.05, app_max_connections=9, app_max_requests=9, app_max_body_kb=1,
        app_read_only=False, hosts=["localhost"],
    )  # fmt: skip
    known: Any = SimpleNamespace(scope_of=lambda _: "read")
    own: Any = SimpleNamespace(open_connections=lambda: 1)
    guarded = guard.Guard(PlainTextResponse("x" * 9), settings=settings, known=known, own=own)
    sent: list[str] = []

    async def send(message: Any) -> None:
        await anyio.sleep(0.2)  # four times what a result may take
        sent.append(message["type"])

    async def receive() -> Any:
        raise AssertionError("a GET has no body that is read")

    headers = [(b"host", b"localhost"), (b"authorization", b"Bearer t")]
    scope = {"type": "http", "method": "GET", "path": "/api/v1/jobs", "headers": headers,
             "query_string": b"", "raw_path": b"/api/v1/jobs"}  # fmt: skip
    anyio.run(guarded, scope, receive, send)
    assert sent == ["http.response.start", "http.response.body"]
