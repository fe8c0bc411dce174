"""Read the parts of a request that the guard checks, and the scope that it needs."""

from __future__ import annotations

import re
from collections import Counter
from typing import Final, Literal, NamedTuple
from urllib.parse import parse_qsl, unquote

from starlette.responses import Response
from starlette.types import Scope

from queue_workflows.service import problems, tokens

_ESCAPED: Final = re.compile("%2f", re.IGNORECASE)
_STAND_IN: Final = "\0"
"""Stands for an escaped slash until the endpoint is called. No URL that is served holds it."""
LONGEST_WAIT_S: Final = 60.0
"""Seconds for which a long poll may wait, in addition to the time of a request."""
MAX_HEAD_BYTES: Final = 16_384
MAX_TARGET_BYTES: Final = 4_096
PUBLIC: Final = frozenset({"/health", "/ready", "/status"})
"""Paths that need no token, and take any Host: probes call a machine by its address."""
Kind = Literal["request", "stream", "page", "viewer"]
PAGES: Final = "/ui"
"""Where the dashboard is."""
SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
STREAMS: Final = re.compile(
    r"/api/v1/(?:events|jobs/[^/]+/stream|runs/[^/]+/nodes/.+/stream)|/ui/live", re.DOTALL
)
"""Paths of responses that stay open."""
LONG_POLLS: Final = re.compile(r"/api/v1/(?:jobs/[^/]+/status|runs/[^/]+)")
"""Paths that take the parameter `wait`."""
_SUBMIT: Final = re.compile(
    r"/api/v1/(?:jobs/trigger|jobs/(?:[^/]+/)?(?:cancel|retry)"
    r"|runs|runs/(?:[^/]+/)?(?:cancel|retry)|runs/[^/]+/nodes/.+/answer)",
    re.DOTALL,
)
"""Paths of unsafe methods for which the scope `submit` is enough."""
_LOOK: Final = re.compile(
    r"/metrics|/api/v1/(?:events|workers|queues(?:/[^/]+)?|schedules(?:/[^/]+/preview)?"
    r"|jobs(?:/[^/]+(?:/status|/events)?)?|runs(?:/[^/]+(?:/nodes)?)?)"
)
"""Paths for which the scope `look` is enough, as their answers are rows of states and times."""
_LOOK_QUERY: Final = frozenset({
    "cursor", "days", "job_id", "kind", "limit", "queue", "run_id", "since", "status", "task",
    "until", "wait", "workflow",
})  # fmt: skip
"""Parameters that such a request may have. Others, such as a search, would help to guess values."""
_ONCE: Final = frozenset({
    b"authorization", b"content-length", b"content-type", b"host", b"idempotency-key",
    b"last-event-id", b"origin", b"sec-fetch-site",
})  # fmt: skip
"""Headers that a request has once: a proxy and the service may choose different ones of two."""
HOST: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([\w.-]+))(?::[0-9]{0,5})?", re.ASCII)


class Request(NamedTuple):
    """A request as the guard checks it before it is served."""

    method: str
    path: str
    headers: dict[bytes, bytes]
    scope: Scope

    @property
    def is_public(self) -> bool:
        return self.path in PUBLIC and self.method in SAFE

    @property
    def needed(self) -> tokens.Scope:
        """Return the scope that the request needs."""
        if self.method in SAFE:
            query: bytes = self.scope["query_string"]
            names = {name for name, _ in parse_qsl(query.decode("latin-1"), True)} if query else ()
            is_open = _LOOK.fullmatch(self.path) is not None and _LOOK_QUERY.issuperset(names)
            return "look" if is_open else "read"
        return "submit" if _SUBMIT.fullmatch(self.path) else "operate"

    @property
    def is_page(self) -> bool:
        """Return whether it is one to the dashboard."""
        return self.path == PAGES or self.path.startswith(f"{PAGES}/")

    @property
    def kind(self) -> Kind:
        """Return the kind of the request. Each kind has its own limit of requests at once.

        Streams and viewers stay open for long. Anyone may send the form of the login page slowly.
        """
        if self.method == "GET" and STREAMS.fullmatch(self.path) is not None:
            return "viewer" if self.is_page else "stream"
        if self.is_page:
            return "page"
        return "request" if self.wait_s is None else "stream"

    @property
    def wait_s(self) -> float | None:
        """Return the seconds of a long poll, 0 if they are refused; None for other requests."""
        query: bytes = self.scope["query_string"]
        if not query or self.method != "GET" or LONG_POLLS.fullmatch(self.path) is None:
            return None
        found = [text for name, text in parse_qsl(query.decode("latin-1"), True) if name == "wait"]
        if not found:
            return None
        try:
            wait_s = float(found[-1])
        except ValueError:
            return 0.0
        return wait_s if 0.0 <= wait_s <= LONGEST_WAIT_S else 0.0


def of(scope: Scope) -> Request:
    """Return the request to check and to serve; HEAD is served as GET, the server cuts the body.

    Its path is that below the one at which the application is mounted. An escaped slash (`a%2Fb`)
    is a part of its segment, unless a server or an application in front has changed the path.
    """
    raw = (scope.get("raw_path") or b"").decode("latin-1")
    if _ESCAPED.search(raw) is not None and unquote(raw) == scope["path"]:
        scope = {**scope, "path": unquote(_ESCAPED.sub(_STAND_IN, raw))}
    path: str = scope["path"]
    mounted: str = scope.get("root_path", "")
    if path.startswith(mounted) and path[len(mounted) : len(mounted) + 1] in ("", "/"):
        path = path[len(mounted) :]
    if scope["method"] == "HEAD" and STREAMS.fullmatch(path) is None:
        scope = {**scope, "method": "GET"}
    return Request(scope["method"], path, dict(scope["headers"]), scope)


def below(scope: Scope, prefix: str) -> Scope:
    """Return the scope of a request below the path of a proxy, which may have taken it away.

    An application that mounts the service knows the path itself.
    """
    if scope.get("root_path"):
        return scope
    path, raw = scope["path"], scope.get("raw_path") or b""
    if path != prefix and not path.startswith(f"{prefix}/"):
        path, raw = prefix + path, prefix.encode() + raw
    return {**scope, "root_path": prefix, "path": path, "raw_path": raw}


def refused_head(request: Request) -> Response | None:
    """Return the refusal of a request whose headers or URL are too large or ambiguous."""
    size = sum(len(name) + len(value) for name, value in request.scope["headers"])
    if size > MAX_HEAD_BYTES:
        return problems.problem(
            431, f"the headers have {size:,} bytes; at most {MAX_HEAD_BYTES:,} are read"
        )
    raw = request.scope.get("raw_path") or b""
    query = request.scope["query_string"]
    if len(raw) + len(query) > MAX_TARGET_BYTES:
        text = f"the URL is too long; at most {MAX_TARGET_BYTES:,} bytes of it are read"
        return problems.problem(414, text)
    if len(request.headers) < len(request.scope["headers"]):
        names = Counter(name for name, _ in request.scope["headers"])
        if twice := sorted(name for name in _ONCE if names[name] > 1):
            return problems.problem(400, f"the header {twice[0].decode()} came twice; send it once")
    if b"content-length" in request.headers and b"transfer-encoding" in request.headers:
        # A proxy that reads the other length would take the end of this body for a request.
        return problems.problem(
            400,
            "a body has Content-Length or Transfer-Encoding, not both",
            headers={"connection": "close"},
        )
    return None


def unescaped(segment: str) -> str:
    """Return a segment of the path as the client meant it."""
    return segment.replace(_STAND_IN, "/")
