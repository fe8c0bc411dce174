"""Send hints about changes, for pages to fetch their fragments again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Final

import fastapi
from starlette.requests import Request
from starlette.responses import Response

from queue_workflows.service import changes, state
from queue_workflows.service.dashboard import view
from queue_workflows.service.routes import sent_events

HINT_S: Final = view.FRAGMENT_S
"""At most one hint in this time, so that a page fetches at most once a second."""
NAMED: Final = 200
"""Runs that a hint names; with more it stands for all."""
router = fastapi.APIRouter()


@router.get("/live")
async def live(request: Request) -> Response:
    """Return hints as long as the tab is open: ids of runs that changed, and whether jobs did.

    They have no values, so that every scope gets the same.
    """

    async def begin(reader: changes.Reader) -> AsyncIterator[bytes]:
        return _hints(reader)

    return sent_events.Stream(state.of(request), begin)


async def _hints(reader: changes.Reader) -> AsyncIterator[bytes]:
    hint: dict[str, object] = {"all": True, "jobs": True, "ids": []}
    repeats = True
    yield sent_events.retry()
    while True:
        # `sent_events.event` would set members to null that are not states, for the scope look.
        yield f"event: hint\ndata: {json.dumps(hint)}\n\n".encode()
        await asyncio.sleep(HINT_S)
        # Each is sent twice: at the first, the service may have kept a part from before the change.
        found = await reader.next(0 if repeats else sent_events.BEAT_S)
        if repeats and not found:
            repeats = False
            continue
        while not found:
            if reader.closed:
                return
            yield b": alive\n\n"
            found = await reader.next(sent_events.BEAT_S)
        repeats = True
        ids = sorted({str(run) for one in found if (run := one.data.get("run_id")) is not None})
        is_jobs = any(one.kind == "job" for one in found)
        hint = {"all": len(ids) > NAMED, "jobs": is_jobs, "ids": ids[:NAMED]}


@router.get("/head")
async def head(request: Request) -> Response:
    """Return the number of Now, and the bar about an absent orchestrator."""
    pages: view.Pages = request.app.state.pages

    async def values() -> dict[str, object]:
        return {"head": await pages.head(request)}

    return await view.fragment(request, "head.html", values)
