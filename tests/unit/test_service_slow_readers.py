"""A client may take a response slowly; one that takes nothing of it is cut off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from starlette.responses import PlainTextResponse

from queue_workflows.service import guard, server
from queue_workflows.service import settings as service_settings


class Connection:
    """A connection at a step that the test sets, which records how it ends."""

    def __init__(self) -> None:
        self.next: tuple[str, Any] = "take", 100
        self.ends: list[Any] = []
        self.transport = SimpleNamespace(
            abort=lambda: self.ends.append("aborted"), is_closing=lambda: False
        )

    def step(self) -> tuple[str, Any]:
        return self.next

    def refuse(self, status: int, reason: str, detail: str) -> None:
        self.ends.append(status)


@pytest.fixture
def connection() -> Any:
    """A connection, and a function that sets its step and lets almost a limit of 10 s pass."""
    made, clients, now = Connection(), server.SlowClients(head_s=10, write_s=10), 0.0

    def pass_time(*step: Any) -> list[Any]:
        nonlocal now
        made.next = (*step,) if step else made.next
        clients.close([made], now)
        now += 9
        clients.close([made], now)
        return made.ends

    return pass_time


def test_a_client_that_takes_a_part_in_time_is_waited_for(connection: Any) -> None:
    for left in (100, 60, 20):
        assert not connection("take", left)
    assert not connection("", None)


def test_a_client_that_takes_nothing_is_cut_off(connection: Any) -> None:
    assert not connection("take", 60)
    assert connection("take", 70) == ["aborted"]


@pytest.mark.parametrize("kind", ["head", "body"])
def test_a_client_that_does_not_send_the_rest_is_refused(connection: Any, kind: str) -> None:
    first, second = object(), object()
    assert not connection(kind, first)
    assert not connection(kind, second)
    assert connection() == [408]


def test_the_time_of_a_request_is_not_that_of_taking_its_response() -> None:
    """What a client takes slowly delays the next response, also beyond the time for a result."""
    settings = service_settings.load(app_request_timeout_sec=0.05, workers_json="")
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
