"""Check size, host, origin and token of requests; limit, time and log them, each with an id."""

from __future__ import annotations

import logging
import math
import re
import secrets
import time
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

import anyio
import anyio.lowlevel
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from queue_workflows.runtime import display, log_context, trace_context
from queue_workflows.service import problems, request_parts, responses, state, tokens
from queue_workflows.service import settings as service_settings

ID_HEADER: Final = b"x-request-id"
_ID: Final = re.compile(rb"[A-Za-z0-9._:-]{1,64}")
_QUIET: Final = frozenset({"/health", "/ready", "/status", "/metrics"})
"""Paths that probes read again and again: their lines have the level debug."""
_FORMS: Final = frozenset({b"application/x-www-form-urlencoded", b"multipart/form-data"})
_log = logging.getLogger("queue_workflows.service.requests")
SECURITY: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
)


class Reply:
    """Adds our headers to a response that lacks them; calls `on_start` before it is sent."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._headers = [*SECURITY, (ID_HEADER, request_id.encode())]
        self.on_start: Callable[[], object] = lambda: None
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            # A task that is about to run is not cancelled at once when its time is over.
            await anyio.lowlevel.checkpoint_if_cancelled()
            self.on_start()
            self.status = message["status"]
            given = message.get("headers", [])
            own = {name for name, _ in given}
            message["headers"] = [*given, *(each for each in self._headers if each[0] not in own)]
        await self._send(message)


class _ClientGone(Exception):
    """The client has closed the connection before its request was complete."""


class Guard:
    """Refuse requests that the application must not get; limit their time and number."""

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
        self._most: dict[request_parts.Kind, tuple[int, str]] = {
            "request": (settings.app_max_requests, "APP_MAX_REQUESTS"),
            "page": (settings.app_max_requests, "APP_MAX_REQUESTS"),
            "stream": (settings.app_max_streams, "APP_MAX_STREAMS"),
            "viewer": (settings.app_max_viewers, "APP_MAX_VIEWERS"),
        }
        """How many requests of each kind are served at once, and the setting that says so."""
        self._served: dict[request_parts.Kind, int] = dict.fromkeys(self._most, 0)
        """How many requests of each kind are being served."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection of ASGI.

        The lines of a request's log have its id, and its `traceparent` is continued. The id is the
        header X-Request-Id if that is a short name, else a new one; the response has it too.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._settings.app_root_path:
            scope = request_parts.below(scope, self._settings.app_root_path)
        headers = dict(scope["headers"])
        given = headers.get(ID_HEADER, b"")
        request_id = given.decode() if _ID.fullmatch(given) else secrets.token_hex(8)
        trace = headers.get(trace_context.HEADER.encode(), b"").decode("latin-1")
        reply, begun = Reply(send, request_id), time.monotonic()
        path = scope["path"].removeprefix(self._settings.app_root_path)
        with log_context.bound(request_id=request_id), trace_context.continuing(trace):
            try:
                await self._serve(scope, receive, reply)
            finally:
                # Without the query, which may hold anything.
                status, taken_s = reply.status, round(time.monotonic() - begun, 6)
                level = logging.DEBUG if path in _QUIET and status < 500 else logging.INFO
                more = {"duration_s": taken_s, "status": status}
                _log.log(level, "%s %.200s %s", scope["method"], path, status or "-", extra=more)

    async def _serve(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        query: bytes = scope["query_string"]
        request = request_parts.of(scope)
        if "\0" in scope["path"] or b"%00" in query or b"\0" in query:
            refused = problems.problem(400, "the URL has a NUL character, which no name has")
            await self._refuse(request, refused, receive, reply)
            return
        refused = request_parts.refused_head(request)
        if refused is None and request.is_public:
            await self._app(request.scope, receive, reply)
            return
        kind = request.kind
        refused = self._is_crowded() or refused or self._refusal(request) or self._is_full(kind)
        if refused is not None:
            await self._refuse(request, refused, receive, reply)
            return
        self._served[kind] += 1
        before = responses.scope.set(request.scope["queue_workflows.scope"])
        try:
            await self._limited(request, receive, reply)
        finally:
            responses.scope.reset(before)
            self._served[kind] -= 1

    def _refusal(self, request: request_parts.Request) -> Response | None:
        refused = self._host(request)
        if request.method in request_parts.SAFE:
            return refused or self._access(request)
        return refused or self._origin(request) or self._access(request) or self._content(request)

    def _host(self, request: request_parts.Request) -> Response | None:
        given = request.headers.get(b"host", b"").decode("latin-1")
        named = request_parts.HOST.fullmatch(given)
        if named is not None and (named[1] or named[2]).lower() in self._settings.hosts:
            return None
        return problems.problem(
            421, f"host {given!r:.80} is not served; APP_ALLOWED_HOSTS names those that are"
        )

    def _origin(self, request: request_parts.Request) -> Response | None:
        site = request.headers.get(b"sec-fetch-site", b"none")
        origin = request.headers.get(b"origin")
        if site in (b"cross-site", b"same-site"):
            return problems.problem(403, "a page of another site may not change anything")
        # A form of a page without referrers has no origin, but the browser names its site.
        if origin is None or (origin == b"null" and site == b"same-origin"):
            return None
        try:
            name = urlsplit(origin.decode("latin-1")).hostname
        except ValueError:
            name = None
        if name is not None and name in self._settings.hosts:
            return None
        return problems.problem(
            403,
            f"Origin {origin.decode('latin-1')!r:.80} is another site; APP_ALLOWED_HOSTS names the "
            "service's own",
        )

    def _access(self, request: request_parts.Request) -> Response | None:
        if request.is_page and self._settings.app_dashboard:
            request.scope["queue_workflows.scope"] = "look"  # its session may allow more
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
        needed = request.needed
        if tokens.RANK[found] < tokens.RANK[needed]:
            return problems.problem(403, f"this token has scope {found}; {needed} is needed")
        if self._settings.app_read_only and tokens.RANK[needed] > tokens.RANK["read"]:
            return problems.problem(403, "the service is read-only (APP_READ_ONLY)")
        request.scope["queue_workflows.scope"] = found
        return None

    def _content(self, request: request_parts.Request) -> Response | None:
        length = request.headers.get(b"content-length")
        if length is not None and (not length.isdigit() or len(length) > 18):
            return problems.problem(400, "the header Content-Length is not a number")
        if int(length or 0) > self._settings.app_max_body_kb * 1024:
            return self._too_large()
        if not int(length or 0) and b"transfer-encoding" not in request.headers:
            return None
        kind = request.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if request.is_page and self._settings.app_dashboard:
            if kind in _FORMS:
                return None
            return problems.problem(415, "send a form")
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

    def _is_full(self, kind: request_parts.Kind) -> Response | None:
        most, setting = self._most[kind]
        if self._served[kind] < most:
            return None
        limit = display.counted(most, "request")
        text = f"the limit of {limit} at once is reached ({setting}); try again"
        return problems.problem(503, text)

    async def _limited(
        self, request: request_parts.Request, receive: Receive, reply: Reply
    ) -> None:
        """Serve a request whose body arrives, and whose response begins, in time."""
        limit_s = self._settings.app_request_timeout_sec
        body: bytes | None = None
        try:
            # One timer for both: to set a second one takes longer than all other checks.
            with anyio.fail_after(limit_s) as scope:
                body = await self._body(request, receive)
                if body is not None:
                    limit_s += request.wait_s or 0
                    scope.deadline = anyio.current_time() + limit_s
                    # A client that takes responses too slowly is cut off by the server.
                    reply.on_start = lambda: setattr(scope, "deadline", math.inf)
                    first = iter([{"type": "http.request", "body": body, "more_body": False}])

                    async def replay() -> Message:
                        return next(first, None) or await receive()

                    await self._app(request.scope, replay, reply)
                    return
            refused = self._too_large()
        except _ClientGone:
            return
        except TimeoutError:
            refused = (
                problems.problem(
                    408, f"the body did not arrive within {limit_s:g} s (APP_REQUEST_TIMEOUT_SEC)"
                )
                if body is None
                else problems.problem(
                    503,
                    f"no result within {limit_s:g} s; the request may still take effect "
                    "(APP_REQUEST_TIMEOUT_SEC)",
                )
            )
        if body is None:
            # The rest of the body is not read, so the connection cannot be used again.
            refused.headers["connection"] = "close"
        await self._refuse(request, refused, receive, reply)

    async def _refuse(
        self, request: request_parts.Request, refused: Response, receive: Receive, reply: Reply
    ) -> None:
        """Send a refusal, to a reader of the dashboard as a page."""
        if request.is_page and self._settings.app_dashboard:
            home = f"{request.scope.get('root_path', '')}{request_parts.PAGES}/"
            refused = problems.page(refused, home)
        await refused(request.scope, receive, reply)

    async def _body(self, request: request_parts.Request, receive: Receive) -> bytes | None:
        """Return the body, or None if it is too large."""
        if request.method in request_parts.SAFE:
            return b""
        most = self._settings.app_max_body_kb * 1024
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                raise _ClientGone
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > most:
                return None
            more = message.get("more_body", False)
        return b"".join(parts)
