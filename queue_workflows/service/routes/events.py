"""Stream the changes of jobs and runs as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import fastapi
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from queue_workflows.requests import catalog
from queue_workflows.service import changes, problems, responses, state
from queue_workflows.service.routes import endpoints

router = fastapi.APIRouter()
BEAT_S = 15.0
"""Seconds without a change after which a comment shows that the stream is alive."""
RETRY_MS = 2000
BEGIN_S = 5.0
"""Longest wait for the database before a stream begins; changes meanwhile may be missed then."""

_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "Changes"}
}


async def _stream(asked: catalog.FollowEvents, http: fastapi.Request) -> Response:
    given = {name: getattr(asked, name) for name in ("kind", "job_id", "run_id", "queue")}
    wanted = {name: text for name, text in given.items() if text is not None}
    return _Stream(state.of(http), wanted, asked.last_event_id)


endpoints.add(router, catalog.FollowEvents, _stream, responses=_RESPONSES)


def response(events: AsyncIterator[bytes]) -> Response:
    """Return the response of server-sent events, which no proxy is to collect before it sends."""
    headers = {"x-accel-buffering": "no"}
    return StreamingResponse(events, headers=headers, media_type="text/event-stream")


class _Stream(Response):
    """The changes behind an id, and all later ones.

    It begins to read before it searches for what was missed: a change between the two is in one of
    them.
    """

    def __init__(self, own: state.Service, wanted: dict[str, str], last_id: str | None) -> None:
        super().__init__(media_type="text/event-stream")
        self._own = own
        self._wanted = wanted
        self._last_id = last_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, or a problem document if too much was missed."""
        async with self._own.changes.reading(**self._wanted) as reader:
            await reader.begun(BEGIN_S)
            begun = await self._response(reader)
            await begun(scope, receive, send)

    async def _response(self, reader: changes.Reader) -> Response:
        missed: list[changes.Change] = []
        if self._last_id:
            try:
                missed = await self._own.calls.run(changes.replay, self._last_id, self._wanted)
            except LookupError:
                return problems.problem(
                    410,
                    "too many changes since then: read the state again",
                    kind="TooFarBehind",
                )
        return response(_events(reader, missed))


async def _events(reader: changes.Reader, missed: list[changes.Change]) -> AsyncIterator[bytes]:
    yield f"retry: {RETRY_MS}\n\n".encode()
    for change in missed:
        yield _text(change)
    while not reader.closed:
        change = await reader.next(BEAT_S)
        if change is not None:
            yield _text(change)
        elif not reader.closed:
            yield b": alive\n\n"


def _text(change: changes.Change) -> bytes:
    head = f"id: {change.id}\nevent: {change.kind}\ndata: ".encode()
    return head + responses.body(change.data) + b"\n\n"
