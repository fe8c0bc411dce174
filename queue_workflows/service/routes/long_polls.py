"""Answer requests that wait until a job or a run has changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import fastapi
from starlette.responses import Response

from queue_workflows.service import responses, state
from queue_workflows.types import JsonDict

RECHECK_S: Final = 1.0
"""Longest time between two reads of a state that a long poll waits for."""


async def watched(
    request: fastapi.Request,
    wait_s: float | None,
    read: Callable[[], JsonDict],
    *,
    final: Callable[[JsonDict], bool],
    **wanted: Any,
) -> Response:
    """Return what `read` returns, at once or when it has changed; `wanted`: which changes."""
    own = state.of(request)
    found = await own.calls.run(read)
    if not wait_s or _is_news(request, found, final):
        return responses.tagged(request, found)
    deadline = time.monotonic() + wait_s
    async with own.changes.reading(**wanted) as reader:
        while True:
            found = await own.calls.run(read)
            left_s = deadline - time.monotonic()
            if left_s <= 0 or reader.closed or _is_news(request, found, final):
                return responses.tagged(request, found)
            await reader.next(min(left_s, RECHECK_S))
            if await request.is_disconnected():
                return responses.tagged(request, found)  # nobody reads it; the slot is free


def _is_news(request: fastapi.Request, found: JsonDict, final: Callable[[JsonDict], bool]) -> bool:
    """Return whether a long poll ends with this state."""
    if "if-none-match" in request.headers:
        return not responses.matches(request, responses.etag(responses.body(found)))
    return final(found)
