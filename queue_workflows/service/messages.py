"""Replay the body that the guard has read, and add the security headers to each response."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from starlette.types import Message, Receive, Send

SECURITY: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
)


class Reply:
    """Sends the response with the security headers; calls `on_start` before its first part."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.on_start: Callable[[], object] = lambda: None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.on_start()
            message["headers"] = [*message.get("headers", []), *SECURITY]
        await self._send(message)


class Replay:
    """Gives the application the body that was read, then what else the client sends."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive: Callable[[], Awaitable[Any]] = receive

    async def __call__(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        return await self._receive()
