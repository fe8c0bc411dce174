"""Keep the session of a browser in a signed cookie, and admit its requests."""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import hmac
import json
import re
import secrets
import time
import zoneinfo
from collections import deque
from datetime import datetime, timezone, tzinfo
from typing import Any, Final, NamedTuple, cast
from urllib.parse import urlencode

from fastapi import exceptions
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from queue_workflows.service import responses, tokens
from queue_workflows.service import settings as service_settings
from queue_workflows.service.routes import endpoints

LASTS_S: Final = 7 * 86_400
LINK_S: Final = 300.0
TRIES: Final = 5
TRIES_S: Final = 60.0
"""So many wrong tokens or links of an address within this time; then it has to wait."""
ADDRESSES: Final = 10_000
"""Addresses of which wrong tries are counted; the oldest are forgotten."""
ZONE: Final = "queue_workflows_zone"
OPEN: Final = re.compile(r"/(?:login|static/[^/]+)")
"""Paths below the mount that need no session."""
ZONE_NAME: Final = re.compile(r"[A-Za-z0-9_+/-]{1,60}")


class Session(NamedTuple):
    """Who looks at a page: scope of the token, name (actor of acts), chosen zone."""

    scope: tokens.Scope
    name: str
    zone: str
    key: bytes
    """The secret of this session, from which its forms have their token."""
    shared: bytes
    """The secret of all sessions of the same token, which signs selections."""

    def may(self, needs: tokens.Scope) -> bool:
        """Return whether the session has this scope."""
        return tokens.RANK[self.scope] >= tokens.RANK[needs]

    @property
    def sees_values(self) -> bool:
        """Return whether inputs, outputs, logs and errors may be shown: not with `look`."""
        return self.may("read")

    @property
    def csrf(self) -> str:
        """Return the token of this session's forms."""
        return hmac.new(self.key, b"csrf", hashlib.sha256).hexdigest()


def of(request: Request) -> Session:
    """Return the session of a request; every route but login and static files has one."""
    return request.state.session


def url(request: Request, path: str, /, **query: Any) -> str:
    """Return the address of a path below the mount; None values are left out, lists repeat."""
    pairs = [
        (name, each)
        for name, given in query.items()
        for each in (cast("list[Any]", given) if isinstance(given, (list, tuple)) else [given])
        if each is not None
    ]
    return request.scope["root_path"] + path + (f"?{urlencode(pairs)}" if pairs else "")


@functools.lru_cache(maxsize=200)
def zone_of(name: str) -> tzinfo | None:
    """Return the time zone of a name, or None if this machine knows none."""
    if ZONE_NAME.fullmatch(name) is None:
        return None
    try:
        return zoneinfo.ZoneInfo(name)
    except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError):
        return None


class Doors:
    """Opens sessions and reads their cookies; counts wrong tries.

    A cookie is an HMAC over scope, name and time with a key from the token. So it survives a
    restart, and ends after seven days or with the token.
    """

    def __init__(self, settings: service_settings.Settings, known: tokens.Tokens) -> None:
        self._settings, self._known = settings, known
        self._links: dict[str, float] = {}
        self._failed: dict[str, deque[float]] = {}
        digests = b"".join(digest for digest, _ in known.digests)
        # Browsers share the cookies of all ports of a host.
        self.cookie = f"queue_workflows_{hashlib.sha256(digests).hexdigest()[:8]}"

    def link(self) -> str:
        """Return a new word for the address `/login?link=`: it opens one session, for 5 minutes."""
        word = secrets.token_urlsafe(24)
        self._links[word] = time.monotonic() + LINK_S
        return word

    def scope_of(self, request: Request, token: str, link: str) -> tokens.Scope | None:
        """Return the scope that a token or a link opens, or None, which counts as a wrong try."""
        now, address = time.monotonic(), self._address(request)
        ends = self._links.pop(link, None) if link else None
        found = "operate" if ends is not None and ends > now else None
        found = found or (self._known.scope_of(token.encode()) if token else None)
        if found is None:
            tried = self._failed.pop(address, None) or deque(maxlen=TRIES)
            tried.append(now)
            self._failed[address] = tried
            while len(self._failed) > ADDRESSES:
                self._failed.pop(next(iter(self._failed)))
        return found

    def must_wait(self, request: Request) -> bool:
        """Return whether the address of a request has tried too often."""
        tried = self._failed.get(self._address(request), ())
        return len(tried) == TRIES and time.monotonic() - tried[0] < TRIES_S

    def _address(self, request: Request) -> str:
        passed = request.headers.getlist("x-forwarded-for")
        if self._settings.app_behind_proxy and passed:
            return passed[-1].rpartition(",")[2].strip()[:100]  # the proxy has added the last one
        return request.client.host if request.client else ""

    def session(self, request: Request) -> Session | None:
        """Return the session of a request's cookie, if it is one of ours and has not ended."""
        text, _, given = request.cookies.get(self.cookie, "").rpartition(".")
        signed = [
            each
            for each in self._known.digests
            if hmac.compare_digest(_signature(each[0], text).encode(), given.encode())
        ]
        if not signed:
            return None
        digest, scope = signed[0]
        try:
            content = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
            of_scope, issued, _, name = cast("list[Any]", json.loads(content))
        except (ValueError, binascii.Error):
            return None
        age_s = datetime.now(timezone.utc).timestamp() - issued
        if of_scope != scope or not -60 <= age_s < LASTS_S:
            return None
        zone = request.cookies.get(ZONE, "UTC")
        key = hmac.new(digest, f"key of {text}".encode(), hashlib.sha256).digest()
        shared = hmac.new(digest, b"selections", hashlib.sha256).digest()
        try:
            who = endpoints.user(request) or name
        except exceptions.RequestValidationError:
            return None  # a proxy names two persons
        return Session(scope, who, zone if zone_of(zone) else "UTC", key, shared)

    def open(self, response: Response, request: Request, scope: tokens.Scope, name: str) -> None:
        """Add the cookie of a new session to a response."""
        issued = int(datetime.now(timezone.utc).timestamp())
        content = json.dumps([scope, issued, secrets.token_hex(8), name])
        text = base64.urlsafe_b64encode(content.encode()).decode().rstrip("=")
        digest = next(digest for digest, each in self._known.digests if each == scope)
        value = f"{text}.{_signature(digest, text)}"
        response.set_cookie(self.cookie, value, max_age=LASTS_S, **self.attributes(request))

    def attributes(self, request: Request) -> dict[str, Any]:
        """Return the attributes of the cookies."""
        secure = self._settings.app_behind_proxy or request.url.scheme == "https"
        path = request.scope["root_path"] or "/"
        return {"path": path, "httponly": True, "samesite": "lax", "secure": secure}


def _signature(digest: bytes, text: str) -> str:
    return hmac.new(digest, f"dashboard session {text}".encode(), hashlib.sha256).hexdigest()


class Gate:
    """Let requests with a session through, and send all others to the login."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; its `state.session` is its session, None on the open paths."""
        request = Request(scope, receive)
        path: str = scope["path"][len(scope["root_path"]) :]
        request.state.session = found = request.app.state.doors.session(request)
        if found is None and OPEN.fullmatch(path) is None:
            await self._refused(request, path)(scope, receive, send)
            return
        before = responses.scope.set(found.scope if found else "look")
        try:
            await self._app(scope, receive, send)
        finally:
            responses.scope.reset(before)
        # A form that has no answer has changed nothing, unless its request was cancelled.
        scope["state"].pop("forget", _nothing)()

    def _refused(self, request: Request, path: str) -> Response:
        if request.method not in ("GET", "HEAD") or "hx-request" in request.headers:
            return Response("log in again: nothing was changed", 401, media_type="text/plain")
        query = request.url.query
        there = path + (f"?{query}" if query else "")
        return RedirectResponse(url(request, "/login", next=None if there == "/" else there), 303)


def _nothing() -> None:
    pass
