"""A response that begins as its time ends is the only one."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from queue_workflows.service import guard, settings, state, tokens
from tests.support import asgi_service, http_service


def test_a_response_that_begins_as_its_time_ends_is_the_only_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The application is woken in the turn of the loop in which its time ends."""
    sent: list[Any] = []

    async def app(_: Any, __: Any, send: Any) -> None:
        loop = asyncio.get_running_loop()
        ready = loop.create_future()
        loop.call_later(0.05, ready.set_result, None)
        loop.call_later(0.01, time.sleep, 0.3)
        await ready
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b"late"})

    async def run() -> None:
        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            raise AssertionError("a GET has no body")

        chosen = settings.load(token=http_service.TOKEN, app_request_timeout_sec=0.1)
        guarded = guard.Guard(
            app, settings=chosen, known=tokens.load(chosen), own=state.Service(chosen)
        )
        await guarded(asgi_service.scope_of("/api/v1/jobs"), receive, send)

    monkeypatch.delenv("WORKERS_JSON", raising=False)
    asyncio.run(run())
    assert [each["type"] for each in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == 503
