"""Read for a page, and render pages and fragments. INTERFACE: the bodies follow; the names stay."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from queue_workflows import db

T = TypeVar("T")


class TooSlow(Exception):
    """A read took longer than a page may; the page says to narrow the filter. Let it pass."""


class NotFound(Exception):
    """`raise view.NotFound("no run X: ...", near=[(text, href)])`: a page with status 404."""


async def read(request: Request, call: Callable[..., T], *args: Any, **keywords: Any) -> T:
    """Return `call(conn, *args, **keywords)`, run in a thread on the dashboard's own pool.

    It is one read-only transaction (REPEATABLE READ is not promised) with a statement_timeout of
    2 s; raises `TooSlow`. Put all reads of a page into one `call`: `def _read(conn, run_id): ...`,
    which passes `conn=conn` to the nouns. For acts use `forms.Form.run`.
    """
    raise NotImplementedError


def page(
    request: Request, template: str, *, title: str, command: str, status: int = 200, **values: Any
) -> Response:
    """Return a page: `template` (in templates/) extends `base.html` and fills `{% block main %}`.

    `command`: the command line that shows the same, printed at the foot. Every template has, beside
    `values`: `session` (`.scope`, `.name`, `.zone`, `.may(scope)`, `.sees_values`), `csrf`, `now`
    (aware datetime), `url(path, **query)` (path below the mount, e.g. `url('/runs/' ~ id|segment)`;
    None values are left out; lists repeat), `read_only`. Filters: `segment` (escapes a path
    segment), `shown` (a JSON value as redacted text, None for the scope `look`), `span` (seconds as
    "4 min"), `number` (1,234), `zoned` (datetime in the session's zone), `age`. StrictUndefined.
    """
    raise NotImplementedError


async def fragment(
    request: Request, template: str, make: Callable[[], Awaitable[dict[str, Any]]]
) -> Response:
    """Return a part of a page without layout, for htmx; kept for 1 s per scope, zone and URL.

    `make` reads the values; it is called only if none is kept. ETag and 304 as for pages. The page
    itself includes the same template: `{% include 'run_nodes.html' %}`.
    In the page: `<div id="nodes" hx-get="{{ url('/runs/x/nodes') }}" hx-trigger="refresh"
    hx-swap="innerHTML" data-live="run:ID">`. `data-live` says when it is fetched again: `run:ID`,
    `jobs`, `runs` (hints of the feed), `5s` (also without hints); several by spaces.
    """
    raise NotImplementedError


def redacted(value: Any) -> Any:
    """Return a JSON value without the members of APP_REDACT_KEYS, after the app's redactor."""
    raise NotImplementedError


def zoned(request: Request, at: datetime) -> datetime:
    """Return a time in the zone of the session."""
    raise NotImplementedError
