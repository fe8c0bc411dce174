"""Read what the handlers of jobs stream: in pages, and as server-sent events."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import fastapi
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from queue_workflows import db, errors
from queue_workflows import streams as api
from queue_workflows.requests import catalog
from queue_workflows.service import changes, job_states, responses, state
from queue_workflows.service.routes import endpoints, events
from queue_workflows.types import JsonDict

_log = logging.getLogger("queue_workflows.service")
router = fastapi.APIRouter()
PAUSE_S: Final = 5.0
"""Longest time between two reads of a stream that no notification and no event of its job wakes."""
_AWAY: Final = (db.OperationalError, db.InterfaceError, errors.DatabaseUnavailable, TimeoutError)
_STREAM: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {"text/event-stream": {}}, "description": "Parts of the stream"}
}


def _parts(asked: catalog.GetJobParts, _: object) -> JsonDict:
    return _page(asked.job_id, asked)


def _node_parts(asked: catalog.GetNodeParts, _: object) -> JsonDict:
    return _page(api.job_of_node(asked.run_id, asked.node_id), asked)


endpoints.add(router, catalog.GetJobParts, _parts)
endpoints.add(router, catalog.GetNodeParts, _node_parts)


def _page(job_id: str, asked: catalog.GetJobParts | catalog.GetNodeParts) -> JsonDict:
    page = api.read_page(job_id, asked.name, after=asked.after, limit=asked.limit)
    items = [_item(part) for part in page.parts]
    return {"items": items, "next": page.after if page.full else None, "over": page.over}


async def _stream(asked: catalog.FollowJob, http: fastapi.Request) -> Response:
    return _Stream(state.of(http), asked.job_id, asked.name, asked.after)


async def _node_stream(asked: catalog.FollowNode, http: fastapi.Request) -> Response:
    own = state.of(http)
    job_id = await own.calls.run(api.job_of_node, asked.run_id, asked.node_id)
    return _Stream(own, job_id, asked.name, asked.after)


endpoints.add(router, catalog.FollowJob, _stream, responses=_STREAM)
endpoints.add(router, catalog.FollowNode, _node_stream, responses=_STREAM)


def _item(part: api.Part) -> JsonDict:
    return {"id": part.id, "reset": part.is_reset, **part._asdict()}


class _Stream(Response):
    """The parts behind an id, and all later ones.

    It begins to wait for notifications before it reads: a part between the two is in one of them.
    """

    def __init__(
        self, own: state.Service, job_id: str, name: str | None, last_id: str | None
    ) -> None:
        super().__init__(media_type="text/event-stream")
        self._own = own
        self._job_id = job_id
        self._name = name
        self._last_id = last_id or None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. Raises `UnknownJob`, and `InvalidConfig` for an id that no part has."""
        async with self._own.changes.reading_parts(self._job_id) as reader:
            await reader.begun(events.BEGIN_S)
            first = await self._read(self._last_id)
            await events.response(self._events(reader, first))(scope, receive, send)

    async def _read(self, after: str | None) -> api.Page:
        return await self._own.calls.run(api.read_page, self._job_id, self._name, after=after)

    async def _events(self, reader: changes.Reader, page: api.Page) -> AsyncIterator[bytes]:
        yield f"retry: {events.RETRY_MS}\n\n".encode()
        sent_at = time.monotonic()
        while not reader.closed:
            for part in page.parts:
                yield _text(part)
                sent_at = time.monotonic()
            page = page._replace(parts=[])
            if page.over:
                yield self._end(job_states.name(page.status))
                return
            if not page.full:
                await reader.next(PAUSE_S)
                if time.monotonic() - sent_at >= events.BEAT_S:
                    yield b": alive\n\n"
                    sent_at = time.monotonic()
            try:
                page = await self._read(page.after)
            except errors.UnknownJob:
                yield self._end(None)
                return
            except errors.UnreadableRow as error:
                _log.warning("a stream of parts ends: %s", error)
                return  # who comes again gets the reason
            except _AWAY as error:
                _log.warning("a stream of parts waits for the database: %s", str(error).strip())
                page = page._replace(full=False)

    def _end(self, status: str | None) -> bytes:
        """Return the last event; `status` None: the job was deleted."""
        data = responses.body({"job_id": self._job_id, "status": status})
        return b"event: end\ndata: " + data + b"\n\n"


def _text(part: api.Part) -> bytes:
    kind = "reset" if part.is_reset else "part"
    return f"id: {part.id}\nevent: {kind}\ndata: ".encode() + responses.body(_item(part)) + b"\n\n"
