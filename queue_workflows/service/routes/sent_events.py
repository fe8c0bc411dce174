"""Send server-sent events: changes of jobs and runs, and the parts of handlers, also in pages."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import fastapi
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from queue_workflows import db, errors
from queue_workflows import streams as api
from queue_workflows.requests import catalog
from queue_workflows.service import changes, problems, responses, state
from queue_workflows.types import JsonDict

_log = logging.getLogger("queue_workflows.service")
BEAT_S: Final = 15.0
"""Seconds without an event after which a comment shows that the stream is alive."""
RETRY_MS: Final = 2000
BEGIN_S: Final = 5.0
"""Longest wait for the database before a stream begins; changes meanwhile may be missed then."""
PAUSE_S: Final = 5.0
"""Seconds after which a stream is read again if no notification and no event of its job came."""
_AWAY: Final = (db.OperationalError, db.InterfaceError, errors.DatabaseUnavailable, TimeoutError)


class Stream(Response):
    """Events that are sent as long as the response is open.

    It follows the matching changes before it searches for missed ones, so that no change is lost in
    between. `begin` returns the events, or the response if there are none.
    """

    def __init__(
        self,
        own: state.Service,
        begin: Callable[[changes.Reader], Awaitable[AsyncIterator[bytes] | Response]],
        **wanted: str | None,
    ) -> None:
        super().__init__(media_type="text/event-stream")
        self._own, self._begin, self._wanted = own, begin, wanted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. Raises the errors of `begin`."""
        async with self._own.changes.reading(**self._wanted) as reader:
            await reader.begun(BEGIN_S)
            begun = await self._begin(reader)
            if not isinstance(begun, Response):
                # No proxy is to collect the events before it sends them.
                headers = {"x-accel-buffering": "no"}
                begun = StreamingResponse(begun, headers=headers, media_type=self.media_type)
            await begun(scope, receive, send)


def event(kind: str, data: Any, number: str = "") -> bytes:
    """Return an event as it is sent."""
    head = f"id: {number}\n" if number else ""
    return f"{head}event: {kind}\ndata: ".encode() + responses.body(data) + b"\n\n"


def retry() -> bytes:
    """Return the line that tells a client when to come again."""
    return f"retry: {RETRY_MS}\n\n".encode()


# --- changes of jobs and runs ------------------------------------------------------------------


async def changed(asked: catalog.FollowEvents, http: fastapi.Request) -> Response:
    """Return the changes behind an id, and all later ones."""
    own = state.of(http)
    given = {name: getattr(asked, name) for name in ("kind", "job_id", "run_id", "queue")}
    wanted = {name: text for name, text in given.items() if text is not None}

    async def begin(reader: changes.Reader) -> AsyncIterator[bytes] | Response:
        missed: list[changes.Change] = []
        if asked.last_event_id:
            try:
                missed = await own.calls.run(changes.replay, asked.last_event_id, wanted)
            except LookupError:
                text = (
                    "too many changes since the event of Last-Event-ID: read the jobs and runs "
                    "again, and follow the changes without an id"
                )
                return problems.problem(410, text, kind="TooFarBehind")
        return _sent_changes(reader, missed)

    return Stream(own, begin, **wanted)


async def _sent_changes(
    reader: changes.Reader, found: list[changes.Change]
) -> AsyncIterator[bytes]:
    yield retry()
    while True:
        for change in found:
            yield event(change.kind, change.data, change.id)
        if reader.closed:
            return
        found = await reader.next(BEAT_S)
        if not found and not reader.closed:
            yield b": alive\n\n"


# --- the parts of a job ------------------------------------------------------------------------


def page(asked: catalog.GetJobParts | catalog.GetNodeParts, _: object) -> JsonDict:
    """Return a page of the parts of a job."""
    own = isinstance(asked, catalog.GetJobParts)
    job_id = asked.job_id if own else api.job_of_node(asked.run_id, asked.node_id)
    found = api.read_page(job_id, asked.name, after=asked.after, limit=asked.limit)
    items = [_item(part) for part in found.parts]
    return {"items": items, "next": found.after if found.full else None, "over": found.over}


def _item(part: api.Part) -> JsonDict:
    return {"id": part.id, "reset": part.is_reset, **part._asdict()}


async def followed(
    asked: catalog.FollowJob | catalog.FollowNode, http: fastapi.Request
) -> Response:
    """Return the parts behind an id, and later ones; it may raise `UnknownJob`, `InvalidConfig`."""
    own = state.of(http)
    if isinstance(asked, catalog.FollowJob):
        job_id = asked.job_id
    else:
        job_id = await own.calls.run(api.job_of_node, asked.run_id, asked.node_id)

    async def read(after: str | None) -> api.Page:
        return await own.calls.run(api.read_page, job_id, asked.name, after=after)

    async def begin(reader: changes.Reader) -> AsyncIterator[bytes]:
        return _sent_parts(job_id, reader, read, await read(asked.after or None))

    return Stream(own, begin, job_id=job_id, parts_of=job_id)


async def _sent_parts(
    job_id: str,
    reader: changes.Reader,
    read: Callable[[str | None], Awaitable[api.Page]],
    page: api.Page,
) -> AsyncIterator[bytes]:
    """Yield the parts of pages, until the job has ended; the last event has its state."""
    yield retry()
    sent_at = time.monotonic()
    while not reader.closed:
        for part in page.parts:
            yield event("reset" if part.is_reset else "part", _item(part), part.id)
            sent_at = time.monotonic()
        page = page._replace(parts=[])
        if page.over:
            yield event("end", {"job_id": job_id, "status": responses.state_name(page.status)})
            return
        if not page.full:
            await reader.next(PAUSE_S)
            if time.monotonic() - sent_at >= BEAT_S:
                yield b": alive\n\n"
                sent_at = time.monotonic()
        try:
            page = await read(page.after)
        except errors.UnknownJob:
            yield event("end", {"job_id": job_id, "status": None})  # it was deleted
            return
        except errors.UnreadableRow as error:
            _log.warning("a stream of parts ends: %s", error)
            return  # the client gets the reason when it reconnects
        except _AWAY as error:
            _log.warning("a stream of parts waits for the database: %s", str(error).strip())
            page = page._replace(full=False)
