"""Read for a page, and render pages and fragments."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import re
import secrets
import shlex
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timezone
from importlib import resources
from typing import Annotated, Any, Final, NamedTuple, TypeVar, cast
from urllib.parse import quote, urlencode

import fastapi
import jinja2
import pydantic
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from queue_workflows import config, db, errors
from queue_workflows.admin import attention
from queue_workflows.runtime import display
from queue_workflows.runtime.masking import MASK
from queue_workflows.service import request_parts, responses, state
from queue_workflows.service.dashboard import forms, session

T = TypeVar("T")
PAGE: Final = 50
"""Rows of a list on a page."""
FRAGMENT_S: Final = 1.0
"""How long a rendered fragment is kept."""
HEAD_S: Final = 5.0
"""How long the facts in the head of every page are kept."""
FOLDED: Final = 4 * 1024
DOWNLOADED: Final = 64 * 1024
"""Characters from which a value is folded, and from which it is a download."""
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
NAVIGATION: Final = (
    ("/", "Now", "n"), ("/runs", "Runs", "r"), ("/failures", "Failures", "f"),
    ("/inbox", "Inbox", "i"), ("/machines", "Machines", "m"), ("/waiting", "Waiting", "w"),
    ("/jobs", "Jobs", "j"), ("/queues", "Queues", "q"), ("/schedules", "Schedules", "s"),
    ("/acts", "Acts", "a"), ("/health", "Health", "h"),
)  # fmt: skip
"""Path, label and key of the pages."""
_KINDS: Final = {
    "done": ("completed", "succeeded", "ok", "on", "open", "done"),
    "failed": ("failed", "dead", "error", "died"),
    "running": ("running", "busy", "load"),
    "queued": ("queued", "waiting", "not due", "ready", "idle"),
    "asks": ("awaiting_input", "asks", "question"),
    "ended": ("cancelled", "canceled", "skipped", "stopped", "absent"),
    "warning": ("lost", "late", "warning", "throttled", "reclaimed"),
    "off": ("off", "paused", "parked", "draining"),
}
"""The states of each kind, which has a colour and an icon; other states are `other`."""
_KIND_OF: Final = {state: kind for kind, states in _KINDS.items() for state in states}
_GLYPHS: Final = {
    "done": "✓", "failed": "✕", "running": "▶", "queued": "○", "asks": "?",
    "ended": "\N{EN DASH}",
}  # fmt: skip
"""The shape of each kind where icons would make a page too large."""
_METHODS: Final = frozenset(dir(dict))
_MEDIA: Final = {
    "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}  # fmt: skip
_PACKAGE: Final = "queue_workflows.service.dashboard"
_CANCELLED: Final = "57014"
_UNREAD: Final = (forms.Refused, db.Error, errors.QueueWorkflowsError)
"""The errors of `read` that the database causes."""
_CSRF: Final = f"csrf-{secrets.token_hex(16)}"
_FORM: Final = f"form-{secrets.token_hex(16)}"
"""Rendered texts have these in place of the words of each session and form."""
_AGES: Final = re.compile(r'(data-at="[^"]*">)[^<]*')
_WORDS: Final = re.compile(r"[A-Z]?[^\W\d_A-Z]+|[A-Z]+(?![^\W\d_A-Z])|\d+")
Segment = Annotated[str, pydantic.AfterValidator(request_parts.unescaped)]
"""The type of an id in a path: a slash in it was escaped."""
Text = Annotated[str | None, fastapi.Query(max_length=1000)]
"""The type of a filter or a name in an address."""
Start = Annotated[int, fastapi.Query(ge=0, le=1_000_000)]
"""The type of the position in a list of the first row that a page shows."""


class NotFound(forms.Refused):
    """A page with status 404."""

    def __init__(self, text: str, near: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(404, text, near)


class Pager(NamedTuple):
    """The links between the pages of a list, for the macro `pager`."""

    path: str
    query: Mapping[str, Any]
    """The filters."""
    next: Mapping[str, Any] | None
    """The query of the next page; None on the last."""
    first: bool
    searched: str | None = None
    """How far the search went, if it ended before the page was full."""


class _Environment(jinja2.Environment):
    """Jinja's, for rows: a member is not first sought as an attribute, whose error takes long."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return the value of `obj.attribute` in a template."""
        if isinstance(obj, dict) and attribute not in _METHODS:
            return self.getitem(cast("Any", obj), attribute)
        return super().getattr(obj, attribute)


@functools.cache
def _environment() -> Any:
    """Return the templates, which all applications of a process share: each is compiled once."""
    made: Any = _Environment(
        loader=jinja2.PackageLoader(_PACKAGE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        auto_reload=False,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(_FILTERS)
    made.globals.update(
        folded=FOLDED, downloaded=DOWNLOADED, navigation=NAVIGATION, csrf=_CSRF, form_id=_FORM,
        action=forms.Action, typed_above=forms.TYPED_ABOVE,
    )  # fmt: skip
    return made


class Pages:
    """The templates, the static files, and the facts and fragments of a moment ago."""

    def __init__(self) -> None:
        self.env = _environment()
        self.files: dict[str, tuple[bytes, str]] = {}
        self.names: dict[str, str] = {}
        """Static files by their names with a hash, and these by the plain names."""
        for file in (resources.files(_PACKAGE) / "static").iterdir():
            stem, _, kind = file.name.rpartition(".")
            if kind in _MEDIA:
                content = file.read_bytes()
                named = f"{stem}.{hashlib.sha256(content).hexdigest()[:12]}.{kind}"
                self.files[named], self.names[file.name] = (content, _MEDIA[kind]), named
        self.last_head = attention.Facts()
        """The facts of the head as they were read last."""
        self._kept: dict[tuple[str, ...], tuple[float, asyncio.Future[Any]]] = {}
        """Until when each outcome counts, by the monotonic clock, and the outcome."""

    async def kept(
        self, key: tuple[str, ...], lasts_s: float, make: Callable[[], Awaitable[T]]
    ) -> T:
        """Return the outcome of this key, made once in this time, also for many at once."""
        now = time.monotonic()
        if key not in self._kept or self._kept[key][0] <= now:
            self._kept = {k: each for k, each in self._kept.items() if each[0] > now}
            self._kept[key] = now + lasts_s, asyncio.ensure_future(make())
        return await asyncio.shield(self._kept[key][1])

    async def head(self, request: Request) -> attention.Facts:
        """Return the facts of the head, read once for all viewers together.

        Raises the errors of `read`, as unread facts do not mean that all is well.
        """

        async def facts() -> attention.Facts:
            self.last_head = await read(request, attention.facts, self.last_head)
            return self.last_head

        return await self.kept(("head",), HEAD_S, facts)


async def read(request: Request, call: Callable[..., T], *args: Any, **keywords: Any) -> T:
    """Return `call(conn, *args, **keywords)`, run in a thread on the dashboard's own pool.

    It is one read-only transaction with a statement_timeout of 2 s; a page says when it is over.
    Put all reads of a page into one `call`, which passes `conn=conn` to the nouns. For acts use
    `forms.Form.run`.
    """

    def run() -> T:
        with db.read_only() as conn:
            return call(conn, *args, **keywords)

    try:
        return await state.of(request).reads.run(run)
    except db.Error as error:
        if getattr(error, "sqlstate", None) == _CANCELLED:
            raise forms.Refused(503, "This took too long: narrow the filter.") from error
        raise


def path(base: str, *segments: str, **query: str) -> str:
    """Return a path below the mount with segments and a query of any text: `/runs/a%2Fb?node=c`."""
    text = base + "/".join(quote(each, safe="") for each in segments)
    return f"{text}?{urlencode(query)}" if query else text


def here(request: Request) -> str:
    """Return the path below the mount and the query of a page, as its reader has them.

    A page that answers a form cannot be opened by its path, so it gets the path of Now.
    """
    if request.method == "POST":
        return "/"
    raw = (request.scope.get("raw_path") or request.scope["path"].encode()).decode("latin-1")
    query = [(name, each) for name, each in request.query_params.multi_items() if name != "did"]
    return raw[len(request.scope["root_path"]) :] + (f"?{urlencode(query)}" if query else "")


def paged(
    rows: list[T], start: int, path: str, *, most: int = PAGE, **query: str
) -> tuple[list[T], Pager]:
    """Return a page of a list that is read whole, and the links to the others.

    If the list has become shorter than the place, the first page is returned.
    """
    start = start if start < len(rows) else 0
    following = {**query, "start": start + most} if len(rows) > start + most else None
    return rows[start : start + most], Pager(path, query, following, start == 0)


def command(words: str, query: Mapping[str, str]) -> str:
    """Return a command line with an option for each filter."""
    return " ".join([words, *(f"--{name} {shlex.quote(text)}" for name, text in query.items())])


class Page(Response):
    """A page whose `template` (in templates/) extends `base.html` and fills `{% block main %}`.

    `command`: the command line that shows the same, printed at the foot. Each template has, beside
    `values`: `session`, `csrf`, `form_id`, `now`, `url(path, **query)`, `static(name)`, `here`
    (path and query of the page), `read_only`, `app`, `action` (`forms.Action`), and the filters of
    this module. It is rendered when it is sent, by a thread, as large values and the app's redactor
    take their time.
    """

    def __init__(
        self, request: Request, template: str, *, title: str, command: str, status: int = 200,
        **values: Any,
    ) -> None:  # fmt: skip
        super().__init__(status_code=status)
        self._request, self._template = request, template
        self._values = values | {"title": title, "command": command}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the facts of the head, which a page of an error does without; render and send."""
        request, pages = self._request, self._request.app.state.pages
        own: session.Session | None = getattr(request.state, "session", None)
        message = None
        if own is not None:
            did = request.query_params.get("did", "")
            message = request.app.state.posts.message(own.csrf, did)
            if self.status_code == 200:
                with contextlib.suppress(*_UNREAD):
                    await pages.head(request)
        given = {**self._values, "head": pages.last_head, "message": message}
        rendered = await _rendered(request, self._template, own, given)
        reply = _reply(request, rendered, own.csrf if own else "", self.status_code)
        reply.raw_headers += [each for each in self.raw_headers if each[0] == b"set-cookie"]
        await reply(scope, receive, send)


async def fragment(
    request: Request, template: str, make: Callable[[], Awaitable[dict[str, Any]]]
) -> Response:
    """Return a part of a page without layout, for htmx; kept for 1 s per scope, zone and URL.

    `make` reads the values; it is called only if none is kept. The name of the session is not in
    it, as others get the same text.
    """
    own = session.of(request)
    shown = own._replace(name="", csrf="")

    async def render() -> _Rendered:
        return await _rendered(request, template, shown, await make())

    pages: Pages = request.app.state.pages
    key = (template, str(request.url), own.scope, own.zone)
    return _reply(request, await pages.kept(key, FRAGMENT_S, render), own.csrf)


async def live(
    request: Request, part: str, read_values: Callable[..., dict[str, Any]], *args: Any, title: str,
    command: str, page: str = "live.html",
) -> Response:  # fmt: skip
    """Return a page with a live part, or for htmx, which fetches it again, the part alone.

    `read_values(conn, *args)` returns the values of both templates. A page with only this part uses
    `live.html`.
    """

    async def make() -> dict[str, Any]:
        return await read(request, read_values, *args)

    if "hx-request" in request.headers:
        return await fragment(request, part, make)
    found = await make()
    return Page(request, page, title=title, command=command, part=part, **found)


class _Rendered(NamedTuple):
    """A text without the words of a session, and its ETag."""

    text: str
    tag: str


async def _rendered(
    request: Request, template: str, own: session.Session | None, values: Mapping[str, Any]
) -> _Rendered:
    pages: Pages = request.app.state.pages

    def url(path: str, /, **query: Any) -> str:
        return session.url(request, path, **query)

    def static(name: str) -> str:
        return url(f"/static/{pages.names[name]}")

    given = {
        "session": own,
        "now": datetime.now(timezone.utc),
        "url": url,
        "static": static,
        "path": request.scope["path"][len(request.scope["root_path"]) :],
        "here": here(request),
        "read_only": state.of(request).settings.app_read_only,
        "app": config.get_config().app or "APP",
    }

    def render() -> _Rendered:
        text = pages.env.get_template(template).render(given, **values)
        return _Rendered(text, responses.etag(_AGES.sub(r"\1", text).encode()))

    return await state.of(request).renders.run(render)


def _reply(request: Request, rendered: _Rendered, csrf: str, status: int = 200) -> Response:
    """Return a rendered text with the words of this session, or 304 if its reader has it."""
    text, tag = rendered
    headers = {"etag": tag, "content-security-policy": POLICY, "vary": "cookie"}
    if status == 200 and responses.matches(request, tag):
        return Response(status_code=304, headers=headers)
    base = f"{request.app.state.posts.word}-{secrets.token_hex(8)}"
    first, *rest = text.replace(_CSRF, csrf).split(_FORM)
    parts = [f"{base}-{number}{part}" for number, part in enumerate(rest)]
    return Response("".join([first, *parts]), status, headers, "text/html; charset=utf-8")


# --- values ------------------------------------------------------------------------------------


def redacted(value: Any) -> Any:
    """Return a JSON value without the members of APP_REDACT_KEYS, after the app's redactor.

    An error of the redactor hides the value.
    """
    cfg = config.get_config()
    if cfg.redactor is not None:
        try:
            value = cfg.redactor(value)
        except Exception:  # noqa: BLE001  app code
            return MASK
    hidden = frozenset("".join(_WORDS.findall(name)).lower() for name in cfg.redact_keys)
    return _without(value, hidden)


def _editable(value: Any) -> str | None:
    """Return a JSON object as text for a form; None if it is too large or not shown as a whole.

    A form that has a mask in the place of a member would store the mask.
    """
    if not isinstance(value, dict):
        return None
    members = cast("dict[str, Any]", value)
    text = "\n".join(display.pretty(members))
    is_whole = redacted(members) == members == json.loads(text)
    return text if is_whole and len(text) <= DOWNLOADED else None


def _without(value: Any, hidden: frozenset[str]) -> Any:
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        return {
            name: MASK if _is_hidden(str(name)[:200], hidden) else _without(member, hidden)
            for name, member in members.items()
        }
    if isinstance(value, (list, tuple)):
        return [_without(each, hidden) for each in cast("Sequence[Any]", value)]
    return value


@functools.lru_cache(maxsize=1000)
def _is_hidden(name: str, hidden: frozenset[str]) -> bool:
    """Return whether some words of a name form a hidden one, as `apiKey` contains `api_key`."""
    words, most = _WORDS.findall(name), max(map(len, hidden), default=0)
    return any(
        "".join(words[first:last]).lower() in hidden
        for first in range(len(words))
        for last in range(first + 1, min(first + most, len(words)) + 1)
    )


def _sees_values(context: jinja2.runtime.Context) -> bool:
    own: session.Session | None = context["session"]
    return own is not None and own.sees_values


@jinja2.pass_context
def _shown(context: jinja2.runtime.Context, value: Any) -> str | None:
    """Return a JSON value as text without secrets; None for the scope `look`.

    If it is too large for a page, returns blanks of its length, since formatting takes long.
    """
    if not _sees_values(context):
        return None
    size = len(json.dumps(value, default=str))  # as stored, before code of the app changes it
    return " " * size if size > DOWNLOADED else "\n".join(display.pretty(redacted(value)))


@jinja2.pass_context
def _text(context: jinja2.runtime.Context, value: str | None) -> str | None:
    """Return a text such as an error, without secrets; None for none, and for the scope `look`."""
    is_shown = value is not None and _sees_values(context)
    return display.block(redacted(value)) if is_shown else None


@jinja2.pass_context
def _zoned(context: jinja2.runtime.Context, at: datetime, form: str = "") -> str:
    """Return a time in the zone of the session: `14:02:11` today, else with its date."""
    own: session.Session | None = context["session"]
    zone = session.zone_of(own.zone if own else "UTC") or timezone.utc
    try:
        local, now = at.astimezone(zone), context["now"].astimezone(zone)
    except (OverflowError, ValueError):
        return display.moment(at)
    today = local.date() == now.date()
    return local.strftime(form or ("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S"))


@jinja2.pass_context
def _age(context: jinja2.runtime.Context, at: datetime) -> str:
    """Return how long ago a time was, or in how long it comes."""
    seconds = (context["now"] - at).total_seconds()
    return f"{span(seconds)} ago" if seconds >= 0 else f"in {span(-seconds)}"


def span(seconds: Any) -> str:
    """Return seconds in two units at most: `40 s`, `3 min 02 s`, `40 min`, `3 h 07 min`, `1 d 3 h`.

    `time.js` does the same for the ages that go on.
    """
    if not isinstance(seconds, (int, float)) or not 0 <= seconds < 1e9:
        return display.duration(seconds)
    if seconds < 10:
        return f"{seconds:.1f} s" if seconds else "0 s"
    minutes, rest = divmod(int(seconds), 60)
    if not minutes:
        return f"{rest} s"
    if minutes < 10:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes} min"
    if hours < 24:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours and days < 10 else f"{days} d"


def _kind(state: str) -> str:
    """Return the class of a state: its colour, and the name of its icon."""
    return _KIND_OF.get(state, "other")


def _glyph(state: str) -> str:
    return _GLYPHS.get(_kind(state), "◆")


_FILTERS: Final[Mapping[str, Callable[..., Any]]] = {
    "segment": functools.partial(path, ""),
    "shown": _shown,
    "editable": _editable,
    "text": _text,
    "line": display.line,
    "kind": _kind,
    "glyph": _glyph,
    "zoned": _zoned,
    "age": _age,
    "span": span,
    "iso": datetime.isoformat,
    "utc": display.moment,
    "number": "{:,}".format,
    "counted": display.counted,
    "quoted": shlex.quote,
}
