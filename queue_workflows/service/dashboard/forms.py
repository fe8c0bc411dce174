"""Check POSTs of the dashboard, sign selections, and answer with a message and Undo."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from queue_workflows import acts
from queue_workflows.service import state, tokens
from queue_workflows.service.dashboard import session

T = TypeVar("T")
KEPT: Final = 5_000
"""Answered forms that are remembered, the newest."""
UNDO_S: Final = 30.0
REPEAT_S: Final = 8.0
"""Seconds for which a repeated POST waits for the answer of the first."""
MOST_FIELDS: Final = 2_000
TYPED_ABOVE: Final = 20
"""With more objects than this, an action that ends or deletes needs their number typed."""


class Action(NamedTuple):
    """A button of a page, for the macro `action(form)`: a POST to `path` (below the mount).

    The macro shows it only if the session's scope is `needs` and the service is not read-only.
    `kind`: `now` (reversible: at once), `makes` (work: a dialog with `text` first), `ends` (ends or
    deletes: a dialog whose safe button has the focus; with `count` > 20 the number must be typed).
    """

    path: str
    label: str
    needs: tokens.Scope
    fields: Mapping[str, str] = {}
    kind: Literal["now", "makes", "ends"] = "now"
    text: str = ""
    count: int = 1  # pyright: ignore[reportIncompatibleMethodOverride]
    asks_reason: bool = False

    @property
    def typed(self) -> bool:
        """Return whether the number of objects must be typed."""
        return self.kind == "ends" and self.count > TYPED_ABOVE


class Selection(NamedTuple):
    """The objects of a bulk action, as the page had them, signed for sessions of its scope."""

    kind: str
    """The name that the page gives it, such as `runs`; another kind is refused."""
    ids: tuple[str, ...] = ()
    filter: Mapping[str, Any] = {}
    at: datetime | None = None
    """With a filter, the objects are those of that time."""
    count: int = 0  # pyright: ignore[reportIncompatibleMethodOverride]


class Refused(Exception):
    """A form that is refused with a status and a sentence for its page; nothing was changed."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


class Repeated(Exception):
    """A form that was answered before, with the address to which it was sent then."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.where = where


class Message(NamedTuple):
    """The message that the page after a form shows."""

    text: str
    links: Sequence[tuple[str, str]]
    undo: Action | None


class _Posted:
    """A form that was sent: where its answer led, and its message."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.where = ""
        self.message: Message | None = None
        self.at = time.monotonic()


class Posts:
    """The forms that were sent, so that a repeated POST does nothing twice.

    Ids of forms begin with a word of this process: a form from before a restart is refused, since
    nobody knows whether it was sent.
    """

    def __init__(self) -> None:
        self.word = secrets.token_hex(4)
        self._posted: OrderedDict[tuple[bytes, str], _Posted] = OrderedDict()

    def begin(self, key: bytes, form_id: str) -> _Posted | None:
        """Note a form; return its earlier POST if there was one."""
        found = self._posted.get((key, form_id))
        if found is None:
            self._posted[key, form_id] = _Posted()
            while len(self._posted) > KEPT:
                self._posted.popitem(last=False)
        return found

    def forget(self, key: bytes, form_id: str) -> None:
        """Let a form that changed nothing be sent again."""
        found = self._posted.pop((key, form_id), None)
        if found is not None:
            found.over.set()

    def answer(self, key: bytes, form_id: str, where: str, message: Message) -> None:
        """Note where the answer of a form leads, and its message."""
        found = self._posted.setdefault((key, form_id), _Posted())
        found.where, found.message = where, message
        found.over.set()

    def message(self, key: bytes, form_id: str) -> Message | None:
        """Return the message of a form, with its Undo for UNDO_S; None if there is none."""
        found = self._posted.get((key, form_id))
        if found is None or found.message is None:
            return None
        is_late = time.monotonic() - found.at > UNDO_S
        return found.message._replace(undo=None) if is_late else found.message


class Form:
    """A POST that may act: `by` (name), `reason` or None, its `values`, and `selection`."""

    def __init__(self, request: Request, form_id: str, sent: Mapping[str, Any]) -> None:
        self._request, self._id = request, form_id
        self._session = session.of(request)
        self.by = self._session.name
        texts = {name: text for name, text in sent.items() if isinstance(text, str)}
        self.values: Mapping[str, str] = texts
        self.reason = texts.get("reason", "").strip()[: acts.MOST_REASON] or None
        self.selection: Selection | None = None
        """Of the hidden field `selection`; with checkboxes named `id`, only the checked ones."""

    @property
    def back(self) -> str:
        """Return the path and the query of the page that it was on, from its field `back`."""
        return local(self.values.get("back", ""))

    async def run(self, call: Callable[..., T], *args: Any, **keywords: Any) -> T:
        """Return `call(*args, **keywords)`, run in a thread of the service as this actor, via http.

        Inside, `acts` has the actor and the reason: no `by=` is needed. Errors of the library
        become a page with their text, to which the reader can come back.
        """
        with acts.acting(self.by, reason=self.reason, via="http"):
            return await state.of(self._request).calls.run(call, *args, **keywords)

    def confirm(self, count: int) -> None:
        """Refuse the form if so many objects need their number typed, and it was not."""
        if count > TYPED_ABOVE and self.values.get("typed", "").strip() != str(count):
            raise Refused(422, f"Type {count} to confirm. Nothing was changed.")

    def done(
        self,
        message: str,
        *,
        back: str,
        undo: Action | None = None,
        links: Sequence[tuple[str, str]] = (),
    ) -> Response:
        """Return the redirect (303) to `back` (path below the mount, with its query).

        The next page shows `message`, `links` (text, path) and for 30 s the button of `undo`.
        """
        where = session.url(self._request, back)
        where += ("&" if "?" in where else "?") + f"did={self._id}"
        posts: Posts = self._request.app.state.posts
        posts.answer(self._session.key, self._id, where, Message(message, links, undo))
        self._request.scope["state"].pop("forget", None)
        return RedirectResponse(where, 303)


def local(path: str) -> str:
    """Return a path below the mount; `/` for another text."""
    is_path = path.startswith("/") and path.isascii() and path.isprintable() and "\\" not in path
    return path if is_path else "/"


async def act(
    request: Request, needs: tokens.Scope, *, kind: str | None = None, once: bool = True
) -> Form:
    """Return the form of a POST, after all checks: session, scope, --read-only, CSRF, form id.

    Origin and Sec-Fetch-Site were checked by the guard. A repeated POST (same form id) never
    returns: its answer is that of the first. `kind`: that of the selection, if it must have one.
    `once` False: for a form that changes nothing, such as one that leads to a question.
    """
    own = session.of(request)
    sent = await request.form(max_files=0, max_fields=MOST_FIELDS)
    csrf, form_id = str(sent.get("csrf", "")), str(sent.get("form", ""))
    if not hmac.compare_digest(csrf.encode(), own.csrf.encode()):
        raise Refused(403, "This form is not of your session: go back, reload the page, try again.")
    if not own.may(needs):
        raise Refused(403, f"Your session has scope {own.scope}; {needs} is needed.")
    changes = tokens.RANK[needs] > tokens.RANK["read"]
    if changes and state.of(request).settings.app_read_only:
        raise Refused(403, "The service is read-only.")
    posts: Posts = request.app.state.posts
    if not form_id.startswith(f"{posts.word}-") or len(form_id) > 100:
        raise Refused(
            409,
            "The service was started again since this page was shown. Nothing was changed: go "
            "back, reload the page, and see whether it is still needed.",
        )
    form = Form(request, form_id, sent)
    if kind is not None:
        chosen = selection(request, form.values.get("selection", ""), kind)
        checked = [] if "whole" in sent else [str(each) for each in sent.getlist("id")]
        form.selection = _checked(chosen, checked)
    if once:
        await _begin(request, posts, own.key, form_id)
    return form


async def _begin(request: Request, posts: Posts, key: bytes, form_id: str) -> None:
    before = posts.begin(key, form_id)
    if before is None:
        request.scope["state"]["forget"] = lambda: posts.forget(key, form_id)
        return
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(before.over.wait(), REPEAT_S)
    if before.where:
        raise Repeated(before.where)
    raise Refused(409, "This form was sent already, and its outcome is not known: see Acts.")


def _checked(chosen: Selection, ids: Sequence[str]) -> Selection:
    """Return the part of a selection whose boxes are checked; all of it without boxes."""
    if not ids:
        return chosen
    if not set(ids) <= set(chosen.ids):
        raise Refused(403, "One of these was not on the page. Nothing was changed.")
    return chosen._replace(ids=tuple(ids), count=len(ids))


# --- selections --------------------------------------------------------------------------------


def sign_selection(request: Request, chosen: Selection) -> str:
    """Return the text for the hidden field `selection` of a form (`Action.fields`)."""
    at = chosen.at and chosen.at.isoformat()
    content = json.dumps([chosen.kind, chosen.ids, chosen.filter, at, chosen.count])
    text = base64.urlsafe_b64encode(content.encode()).decode()
    return f"{text}.{_signature(request, text)}"


def selection(request: Request, text: str, kind: str) -> Selection:
    """Return a signed selection; a forged one, or another kind or scope, is refused."""
    content, _, signature = text.rpartition(".")
    try:
        if not hmac.compare_digest(_signature(request, content).encode(), signature.encode()):
            raise ValueError
        named, ids, chosen, at, count = json.loads(base64.urlsafe_b64decode(content))
    except (ValueError, binascii.Error):
        text = "This selection was changed or is of another scope. Nothing was done."
        raise Refused(403, text) from None
    if named != kind:
        raise Refused(403, f"This selection is of {named}, not of {kind}. Nothing was changed.")
    return Selection(kind, tuple(ids), chosen, at and datetime.fromisoformat(at), count)


def _signature(request: Request, text: str) -> str:
    key = session.of(request).shared
    return hmac.new(key, f"selection {text}".encode(), hashlib.sha256).hexdigest()
