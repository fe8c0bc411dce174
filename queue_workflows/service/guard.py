"""Check a request's size, host, origin and token before it is served; limit number and time."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import urlsplit

import anyio
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from queue_workflows.service import problems, request_parts, state, tokens
from queue_workflows.service import settings as service_settings

SECURITY: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
)
Check = Callable[[request_parts.Request], "Response | None"]


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


class _ClientGone(Exception):
    """The client has closed the connection before its request was complete."""


class Guard:
    """Refuse what must not reach the application, each with its status; limit time and number."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: service_settings.Settings,
        known: tokens.Tokens,
        own: state.Service,
    ) -> None:
        self._app = app
        self._own = own
        self._settings = settings
        self._tokens = known
        self._requests = 0
        self._streams = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection of ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        reply = Reply(send)
        if request_parts.holds_nul(scope):
            await problems.problem(400, "a URL holds no NUL character")(scope, receive, reply)
            return
        request = request_parts.of(scope)
        refused = self._refusal(request)
        if refused is None and request.is_public:
            await self._app(request.scope, receive, reply)
            return
        refused = self._is_crowded() or refused or self._is_full(request)
        if refused is not None:
            await refused(scope, receive, reply)
            return
        await self._counted(request, receive, reply)

    def _refusal(self, request: request_parts.Request) -> Response | None:
        checks: tuple[Check, ...] = (
            request_parts.refused_head,
            self._host,
            self._origin,
            self._access,
            self._content,
        )
        for check in checks:
            if (refused := check(request)) is not None:
                return refused
        return None

    def _host(self, request: request_parts.Request) -> Response | None:
        if request.is_public:
            return None
        given = request.headers.get(b"host", b"").decode("latin-1")
        if request_parts.hostname(given) in self._settings.hosts:
            return None
        return problems.problem(
            421, f"host {given!r:.80} is not served; APP_ALLOWED_HOSTS names those that are"
        )

    def _origin(self, request: request_parts.Request) -> Response | None:
        if request.method in request_parts.SAFE:
            return None
        site = request.headers.get(b"sec-fetch-site", b"none")
        origin = request.headers.get(b"origin")
        if site in (b"cross-site", b"same-site"):
            return problems.problem(403, "a page of another site may not change anything")
        if origin is None:
            return None
        try:
            name = urlsplit(origin.decode("latin-1")).hostname
        except ValueError:
            name = None
        if name is not None and name in self._settings.hosts:
            return None
        return problems.problem(403, "the request's Origin is another site")

    def _access(self, request: request_parts.Request) -> Response | None:
        if request.is_public:
            return None
        kind, _, given = request.headers.get(b"authorization", b"").partition(b" ")
        found = self._tokens.scope_of(given.strip()) if kind.lower() == b"bearer" else None
        if found is None:
            return problems.problem(
                401,
                "a bearer token is needed in the header Authorization; QUEUE_WORKFLOWS_TOKEN, or "
                "the file that the service names when it starts, has it",
                headers={"www-authenticate": 'Bearer realm="queue_workflows"'},
            )
        needed = request_parts.needed_scope(request.method, request.path)
        if tokens.RANK[found] < tokens.RANK[needed]:
            return problems.problem(403, f"this token has scope {found}; {needed} is needed")
        if self._settings.app_read_only and needed != "read":
            return problems.problem(403, "the service is read-only")
        request.scope["queue_workflows.scope"] = found
        return None

    def _content(self, request: request_parts.Request) -> Response | None:
        if request.method in request_parts.SAFE:
            return None
        length = request.headers.get(b"content-length")
        if length is not None and (not length.isdigit() or len(length) > 18):
            return problems.problem(400, "Content-Length is no number")
        if int(length or 0) > self._settings.app_max_body_kb * 1024:
            return self._too_large()
        if not int(length or 0) and b"transfer-encoding" not in request.headers:
            return None
        kind = request.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind == b"application/json":
            return None
        return problems.problem(415, "send JSON, with `Content-Type: application/json`")

    def _too_large(self) -> Response:
        return problems.problem(
            413, f"a body has at most {self._settings.app_max_body_kb} KiB (APP_MAX_BODY_KB)"
        )

    def _is_crowded(self) -> Response | None:
        if self._own.open_connections() <= self._settings.app_max_connections:
            return None
        return problems.problem(
            503,
            f"more than {self._settings.app_max_connections} connections are open "
            "(APP_MAX_CONNECTIONS); try again",
            headers={"connection": "close"},
        )

    def _is_full(self, request: request_parts.Request) -> Response | None:
        used, most = (
            (self._streams, self._settings.app_max_streams)
            if request.is_stream
            else (self._requests, self._settings.app_max_requests)
        )
        if used < most:
            return None
        return problems.problem(503, f"{used} requests are being served; try again")

    async def _counted(
        self, request: request_parts.Request, receive: Receive, reply: Reply
    ) -> None:
        if request.is_stream:
            self._streams += 1
            try:
                await self._limited(request, receive, reply)
            finally:
                self._streams -= 1
            return
        self._requests += 1
        try:
            await self._limited(request, receive, reply)
        finally:
            self._requests -= 1

    async def _limited(
        self, request: request_parts.Request, receive: Receive, reply: Reply
    ) -> None:
        """Serve a request whose body arrives, and whose response begins, in time."""
        limit_s = self._settings.app_request_timeout_sec
        body: bytes | None = None
        refused: Response | None = None
        try:
            # One timer for both: to set a second one takes longer than all other checks.
            with anyio.fail_after(limit_s) as scope:
                body = await self._body(request, receive)
                if body is None:
                    refused = self._too_large()
                else:
                    limit_s += request.wait_s or 0
                    scope.deadline = anyio.current_time() + limit_s
                    # A client that takes responses too slowly is cut off by the server.
                    reply.on_start = lambda: setattr(scope, "deadline", math.inf)
                    await self._app(request.scope, Replay(body, receive), reply)
        except _ClientGone:
            return
        except TimeoutError:
            if body is None:
                refused = problems.problem(408, f"the body did not arrive within {limit_s:g} s")
            else:
                refused = problems.problem(
                    503, f"no result within {limit_s:g} s; the request may still take effect"
                )
        if refused is not None:
            if body is None:
                # What the client still sends is not read, so the connection cannot be used again.
                refused.headers["connection"] = "close"
            await refused(request.scope, receive, reply)

    async def _body(self, request: request_parts.Request, receive: Receive) -> bytes | None:
        """Return the body, or None if it is too large."""
        if request.method in request_parts.SAFE:
            return b""
        parts: list[bytes] = []
        size, most = 0, self._settings.app_max_body_kb * 1024
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise _ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > most:
                return None
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)
