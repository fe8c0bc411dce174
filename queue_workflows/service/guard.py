"""Check each request before the application sees it: size, host, origin, token, time and number."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import anyio
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from queue_workflows.service import messages, paths, problems, state, tokens
from queue_workflows.service import settings as service_settings

MAX_HEAD_BYTES: Final = 16_384
MAX_TARGET_BYTES: Final = 4_096
PUBLIC: Final = frozenset({"/health", "/ready", "/status"})
"""Paths that need no token, and take any Host: probes call a machine by its address."""
SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
STREAMS: Final = re.compile(
    r"/api/v1/(?:events|jobs/[^/]+/stream|runs/[^/]+/nodes/.+/stream)", re.DOTALL
)
"""Paths of responses that stay open."""
LONGEST_WAIT_S: Final = 60.0
"""Seconds for which a long poll may wait, beside the time of a request."""
_SUBMIT: Final = re.compile(
    r"/api/v1/(?:jobs/trigger|jobs/[^/]+/(?:cancel|retry)"
    r"|runs|runs/[^/]+/(?:cancel|retry)|runs/[^/]+/nodes/.+/answer)",
    re.DOTALL,
)
"""Paths of unsafe methods for which the scope `submit` is enough."""
_ONCE: Final = frozenset({
    b"authorization", b"content-length", b"content-type", b"host", b"idempotency-key",
    b"last-event-id", b"origin", b"sec-fetch-site",
})  # fmt: skip
"""Headers that a request has once: a proxy and the service may choose different ones of two."""
_HOST: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([\w.-]+))(?::[0-9]{0,5})?", re.ASCII)
Check = Callable[["_Request"], "Response | None"]


class _ClientGone(Exception):
    """The client has closed the connection before its request was complete."""


class _Request(NamedTuple):
    """The parts of a request that are checked."""

    method: str
    path: str
    headers: dict[bytes, bytes]
    scope: Scope

    @property
    def is_public(self) -> bool:
        return self.path in PUBLIC and self.method in SAFE

    @property
    def is_stream(self) -> bool:
        """Return whether it may stay open: an event stream, or a long poll."""
        return self.method == "GET" and (self.stays_open or _waits(self.scope))

    @property
    def stays_open(self) -> bool:
        """Return whether the path is that of an event stream, which has no time limit."""
        return STREAMS.fullmatch(self.path) is not None


def _waits(scope: Scope) -> bool:
    query: bytes = scope["query_string"]
    return bool(query) and any(
        name == "wait" for name, _ in parse_qsl(query.decode("latin-1"), True)
    )


def _request(scope: Scope) -> _Request:
    """Return the request to check and to serve; HEAD is served as GET, the server cuts the body."""
    served = paths.with_escaped_slashes(scope)
    path = paths.of(served)
    if scope["method"] == "HEAD" and STREAMS.fullmatch(path) is None:
        served = {**served, "method": "GET"}
    return _Request(served["method"], path, dict(scope["headers"]), served)


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
        reply = messages.Reply(send)
        if paths.holds_nul(scope):
            await problems.problem(400, "a URL holds no NUL character")(scope, receive, reply)
            return
        request = _request(scope)
        refused = self._refusal(request)
        if refused is None and request.is_public:
            await self._app(request.scope, receive, reply)
            return
        refused = self._is_crowded() or refused or self._is_full(request)
        if refused is not None:
            await refused(scope, receive, reply)
            return
        await self._counted(request, receive, reply)

    def _refusal(self, request: _Request) -> Response | None:
        checks: tuple[Check, ...] = (_head, self._host, self._origin, self._access, self._content)
        for check in checks:
            if (refused := check(request)) is not None:
                return refused
        return None

    def _host(self, request: _Request) -> Response | None:
        if request.is_public:
            return None
        given = request.headers.get(b"host", b"").decode("latin-1")
        if _hostname(given) in self._settings.hosts:
            return None
        return problems.problem(
            421, f"host {given!r:.80} is not served; APP_ALLOWED_HOSTS names those that are"
        )

    def _origin(self, request: _Request) -> Response | None:
        if request.method in SAFE:
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

    def _access(self, request: _Request) -> Response | None:
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
        needed = needed_scope(request.method, request.path)
        if tokens.RANK[found] < tokens.RANK[needed]:
            return problems.problem(403, f"this token has scope {found}; {needed} is needed")
        if self._settings.app_read_only and needed != "read":
            return problems.problem(403, "the service is read-only")
        request.scope["queue_workflows.scope"] = found
        return None

    def _content(self, request: _Request) -> Response | None:
        if request.method in SAFE:
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

    def _is_full(self, request: _Request) -> Response | None:
        used, most = (
            (self._streams, self._settings.app_max_streams)
            if request.is_stream
            else (self._requests, self._settings.app_max_requests)
        )
        if used < most:
            return None
        return problems.problem(503, f"{used} requests are being served; try again")

    async def _counted(self, request: _Request, receive: Receive, reply: messages.Reply) -> None:
        if request.is_stream:
            self._streams += 1
            try:
                if request.stays_open:
                    await self._app(request.scope, receive, reply)
                else:
                    await self._limited(request, receive, reply, more_s=LONGEST_WAIT_S)
            finally:
                self._streams -= 1
            return
        self._requests += 1
        try:
            await self._limited(request, receive, reply)
        finally:
            self._requests -= 1

    async def _limited(
        self, request: _Request, receive: Receive, reply: messages.Reply, *, more_s: float = 0.0
    ) -> None:
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
                    scope.deadline = anyio.current_time() + limit_s + more_s
                    await self._app(request.scope, messages.Replay(body, receive), reply)
        except _ClientGone:
            return
        except TimeoutError:
            if reply.started:
                raise
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

    async def _body(self, request: _Request, receive: Receive) -> bytes | None:
        """Return the body, or None if it is too large."""
        if request.method in SAFE:
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


def needed_scope(method: str, path: str) -> tokens.Scope:
    """Return the scope that a request needs."""
    if method in SAFE:
        return "read"
    return "submit" if _SUBMIT.fullmatch(path) else "operate"


def _head(request: _Request) -> Response | None:
    size = sum(len(name) + len(value) for name, value in request.scope["headers"])
    if size > MAX_HEAD_BYTES:
        return problems.problem(431, f"headers have at most {MAX_HEAD_BYTES} bytes")
    raw = request.scope.get("raw_path") or b""
    query = request.scope["query_string"]
    if len(raw) + len(query) > MAX_TARGET_BYTES:
        return problems.problem(414, f"a URL has at most {MAX_TARGET_BYTES} bytes")
    if len(request.headers) < len(request.scope["headers"]):
        names = Counter(name for name, _ in request.scope["headers"])
        if twice := sorted(name for name in _ONCE if names[name] > 1):
            return problems.problem(400, f"the header {twice[0].decode()} is there twice")
    if b"content-length" in request.headers and b"transfer-encoding" in request.headers:
        # A proxy that reads the other length would take the end of this body for a request.
        return problems.problem(
            400,
            "a body has Content-Length or Transfer-Encoding, not both",
            headers={"connection": "close"},
        )
    return None


def _hostname(host: str) -> str:
    """Return the name of a Host header, without its port; "" if it is none."""
    found = _HOST.fullmatch(host)
    return "" if found is None else (found[1] or found[2]).lower()
