"""Read the path of a request: below the mount point, with segments that hold escaped slashes."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

from starlette.types import Scope

_ESCAPED: Final = re.compile("%2f", re.IGNORECASE)
_STAND_IN: Final = "\0"
"""Stands for an escaped slash until the endpoint is called. No URL that is served holds it."""


def of(scope: Scope) -> str:
    """Return the path below the one at which the application is mounted."""
    path: str = scope["path"]
    mounted: str = scope.get("root_path", "")
    is_below = path.startswith(mounted) and path[len(mounted) : len(mounted) + 1] in ("", "/")
    return path[len(mounted) :] if is_below else path


def holds_nul(scope: Scope) -> bool:
    """Return whether the URL has a NUL character, escaped or not."""
    query: bytes = scope["query_string"]
    return "\0" in scope["path"] or b"%00" in query or b"\0" in query


def with_escaped_slashes(scope: Scope) -> Scope:
    """Return a scope whose path has one segment for `a%2Fb`; `unescaped` returns `a/b` for it.

    The scope is the given one if its URL has no escaped slash, or if a server or an application in
    front has changed the path.
    """
    raw = (scope.get("raw_path") or b"").decode("latin-1")
    if _ESCAPED.search(raw) is None or unquote(raw) != scope["path"]:
        return scope
    return {**scope, "path": unquote(_ESCAPED.sub(_STAND_IN, raw))}


def unescaped(segment: str) -> str:
    """Return a segment of the path as the client meant it."""
    return segment.replace(_STAND_IN, "/")
