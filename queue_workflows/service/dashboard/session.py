"""Keep the session of a browser in a signed cookie, and count wrong tries to open one."""

from __future__ import annotations

import base64
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
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

from fastapi import exceptions
from starlette.requests import Request
from starlette.responses import Response

from queue_workflows.service import state, tokens
from queue_workflows.service.routes import endpoints

LASTS_S: Final = 7 * 86_400
LINK_S: Final = 300.0
TRIES: Final = 5
TRIES_S: Final = 60.0
"""So many wrong tokens or links of an address within this time; then it has to wait."""
COUNTED: Final = 10_000
"""Wrong tries that are remembered, the newest."""
ZONE: Final = "queue_workflows_zone"
ZONE_NAME: Final = re.compile(r"[A-Za-z0-9_+/-]{1,60}")


class Session(NamedTuple):
    """The viewer of a page: scope of the token, name (actor of acts), chosen zone."""

    scope: tokens.Scope
    name: str
    zone: str
    csrf: str
    """The token of its forms, which is another one in each session."""
    digest: bytes
    """The digest of its token, by which selections are signed."""

    def may(self, needs: tokens.Scope) -> bool:
        """Return whether the session has this scope."""
        return tokens.RANK[self.scope] >= tokens.RANK[needs]

    @property
    def sees_values(self) -> bool:
        """Return whether inputs, outputs, logs and errors may be shown: not with `look`."""
        return self.may("read")


def of(request: Request) -> Session:
    """Return the session of a request; every route but login and static files has one."""
    return request.state.session


def url(request: Request, path: str, /, **query: Any) -> str:
    """Return the address of a path below the mount; None values are left out, lists repeat."""
    given = {name: value for name, value in query.items() if value is not None}
    text = urlencode(given, doseq=True)
    return request.scope["root_path"] + path + (f"?{text}" if text else "")


@functools.lru_cache(maxsize=200)
def zone_of(name: str) -> tzinfo | None:
    """Return the time zone of a name, or None if this machine knows none."""
    if ZONE_NAME.fullmatch(name) is None:
        return None
    try:
        return zoneinfo.ZoneInfo(name)
    except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError):
        return None


def signed(digest: bytes, kind: str, content: Any) -> str:
    """Return JSON with its signature, as a text for a cookie or a form; times become texts."""
    raw = json.dumps(content, default=datetime.isoformat).encode()
    text = base64.urlsafe_b64encode(raw).decode().rstrip("=")
    return f"{text}.{_signature(digest, kind, text)}"


def content_of(digest: bytes, kind: str, given: str) -> Any:
    """Return the content of a text that `signed` has made; None for any other text."""
    text, _, signature = given.rpartition(".")
    if not hmac.compare_digest(_signature(digest, kind, text).encode(), signature.encode()):
        return None
    return json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))


def _signature(digest: bytes, kind: str, text: str) -> str:
    return hmac.new(digest, f"dashboard {kind} {text}".encode(), hashlib.sha256).hexdigest()


class Sessions:
    """Opens sessions and reads their cookies; counts wrong tries.

    A cookie is an HMAC over scope, name and time with a key from the token. So it survives a
    restart, and ends after seven days or with the token.
    """

    def __init__(self, known: tokens.Tokens) -> None:
        self._known = known
        self._links: dict[str, float] = {}
        self._wrong: deque[tuple[str, float]] = deque(maxlen=COUNTED)
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
        now = time.monotonic()
        if self._links.pop(link, now) > now:
            return "operate"
        found = self._known.scope_of(token.encode()) if token else None
        if found is None:
            self._wrong.append((_address(request), now))
        return found

    def must_wait(self, request: Request) -> bool:
        """Return whether the address of a request has tried too often."""
        address, since = _address(request), time.monotonic() - TRIES_S
        return sum(who == address and at > since for who, at in self._wrong) >= TRIES

    def session(self, request: Request) -> Session | None:
        """Return the session of a request's cookie, if it is one of ours and has not ended."""
        given, now = request.cookies.get(self.cookie, ""), datetime.now(timezone.utc).timestamp()
        for digest, scope in self._known.digests:
            of_scope, issued, _, name = content_of(digest, "session", given) or ("", 0, "", "")
            if of_scope == scope and -60 <= now - issued < LASTS_S:
                break
        else:
            return None
        try:
            who = endpoints.user(request) or name
        except exceptions.RequestValidationError:
            return None  # a proxy names two persons
        zone = request.cookies.get(ZONE, "UTC")
        csrf = _signature(digest, "forms", given)
        return Session(scope, who, zone if zone_of(zone) else "UTC", csrf, digest)

    def open(self, response: Response, request: Request, scope: tokens.Scope, name: str) -> None:
        """Add the cookie of a new session to a response."""
        issued = int(datetime.now(timezone.utc).timestamp())
        digest = next(digest for digest, each in self._known.digests if each == scope)
        value = signed(digest, "session", [scope, issued, secrets.token_hex(8), name])
        response.set_cookie(self.cookie, value, max_age=LASTS_S, **self.attributes(request))

    def attributes(self, request: Request) -> dict[str, Any]:
        """Return the attributes of the cookies."""
        behind_proxy = state.of(request).settings.app_behind_proxy
        secure = behind_proxy or request.url.scheme == "https"
        path = request.scope["root_path"] or "/"
        return {"path": path, "httponly": True, "samesite": "lax", "secure": secure}


def _address(request: Request) -> str:
    passed = request.headers.getlist("x-forwarded-for")
    if state.of(request).settings.app_behind_proxy and passed:
        return passed[-1].rpartition(",")[2].strip()[:100]  # the proxy has added the last one
    return request.client.host if request.client else ""
