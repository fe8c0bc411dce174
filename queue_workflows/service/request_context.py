"""Give each request an id and the caller's trace, and log how it ended and how long it took."""

from __future__ import annotations

import logging
import re
import secrets
import time
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from queue_workflows.runtime import log_context, trace_context

HEADER: Final = b"x-request-id"
_GIVEN: Final = re.compile(rb"[A-Za-z0-9._:-]{1,64}")
_QUIET: Final = frozenset({"/health", "/ready", "/status", "/metrics"})
"""Paths that probes read again and again: their lines have the level debug."""
_log = logging.getLogger("queue_workflows.service.requests")


class RequestContext:
    """Bind the id of a request to what is logged for it, and continue its `traceparent`.

    The id is that of the header X-Request-Id if it is a short name, else a new one. The response
    has it in the same header. The query is not logged, since it may hold anything.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection of ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = _id_of(headers.get(HEADER))
        given = headers.get(trace_context.HEADER.encode(), b"").decode("latin-1")
        with log_context.bound(request_id=request_id), trace_context.continuing(given):
            await self._logged(scope, receive, send, request_id)

    async def _logged(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        begun, status = time.monotonic(), 0

        async def reply(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                given: list[Any] = [*message.get("headers", [])]
                message = {**message, "headers": [*given, (HEADER, request_id.encode())]}
            await send(message)

        try:
            await self._app(scope, receive, reply)
        finally:
            path = scope["path"]
            level = logging.DEBUG if path in _QUIET and status < 500 else logging.INFO
            taken = {"duration_s": round(time.monotonic() - begun, 6), "status": status}
            _log.log(level, "%s %.200s %s", scope["method"], path, status or "-", extra=taken)


def _id_of(given: bytes | None) -> str:
    if given is not None and _GIVEN.fullmatch(given):
        return given.decode()
    return secrets.token_hex(8)
