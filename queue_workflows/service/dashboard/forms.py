"""Check POSTs of the dashboard, sign selections, and answer with a message and Undo."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple, TypeVar

from starlette import exceptions
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from queue_workflows import acts, db
from queue_workflows.dag import payload
from queue_workflows.service import state, tokens
from queue_workflows.service.dashboard import session

T = TypeVar("T")
KEPT: Final = 100
"""Forms of a session that were sent and are remembered, the newest."""
SESSIONS: Final = 50
"""The number of sessions, the most recent ones, whose forms are remembered."""
UNDO_S: Final = 30.0
REPEAT_S: Final = 8.0
"""Seconds for which a repeated POST waits for the answer of the first."""
MOST_FIELDS: Final = 2_000
TYPED_ABOVE: Final = 20
"""With more objects than this, an action that ends or deletes needs their number typed."""


class Refused(Exception):
    """A page with a status, a sentence and suggested links, each as text and path."""

    def __init__(self, status: int, text: str, near: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(text)
        self.status, self.text, self.near = status, text, near


class Action(NamedTuple):
    """A button of a page, for the macro `action(form)`: a POST to `path` (below the mount).

    The macro shows it only if the session's scope is `needs` and the service is not read-only.
    `kind`: `now` (reversible: at once), `makes` (work: a dialog with `text` first), `ends` (ends or
    deletes: a dialog whose safe button has the focus). `objects`: how many it ends or deletes.
    """

    path: str
    label: str
    needs: tokens.Scope
    fields: Mapping[str, str] = {}
    kind: Literal["now", "makes", "ends"] = "now"
    text: str = ""
    asks_reason: bool = False
    objects: int = 1


class Selection(NamedTuple):
    """The objects of a bulk action, as the page had them, signed for sessions of its scope."""

    kind: str
    """The name that the page gives it, such as `runs`; another kind is refused."""
    ids: tuple[str, ...]
    at: datetime | None = None
    """The time up to which the act counts, if it has one."""


class Answer(NamedTuple):
    """Where a form led, and the message that the page there shows."""

    where: str
    text: str
    links: Sequence[tuple[str, str]]
    undo: Action | None
    at: float


class Posts:
    """The forms that were sent, so that a repeated POST has no second effect.

    Ids of forms begin with a word of this process. A form from before a restart is refused, since
    it is unknown whether it was sent.
    """

    def __init__(self) -> None:
        self.word = secrets.token_hex(4)
        self._sent: dict[str, dict[str, asyncio.Future[Answer]]] = {}
        """By the token of the session, then the form's id, so that no session crowds out others."""

    async def begin(self, csrf: str, form_id: str) -> asyncio.Future[Answer]:
        """Note a form; return the future of its answer, to be cancelled if the form did nothing.

        Raises `HTTPException`, a redirect to the first answer, if the form was sent before, and
        `Refused` if that answer is not known.
        """
        while (known := self._known(csrf, form_id)) is not None:
            if known.done():
                raise exceptions.HTTPException(303, headers={"location": known.result().where})
            await asyncio.wait([known], timeout=REPEAT_S)
            if not known.done():
                text = "This form was sent already, and its outcome is not known: see Acts."
                raise Refused(409, text)
        sent = self._sent[csrf] = self._sent.pop(csrf, {})
        made = sent[form_id] = asyncio.get_running_loop().create_future()
        if len(sent) > KEPT:
            del sent[next(iter(sent))]
        if len(self._sent) > SESSIONS:
            del self._sent[next(iter(self._sent))]
        return made

    def _known(self, csrf: str, form_id: str) -> asyncio.Future[Answer] | None:
        """Return where the answer of a form goes; None for one that has changed nothing."""
        known = self._sent.get(csrf, {}).get(form_id)
        return None if known is None or known.cancelled() else known

    def message(self, csrf: str, form_id: str) -> Answer | None:
        """Return the answer of a form, with its Undo for UNDO_S; None if there is none."""
        known = self._known(csrf, form_id)
        if known is None or not known.done():
            return None
        found = known.result()
        return found._replace(undo=None) if time.monotonic() - found.at > UNDO_S else found


class Form:
    """A POST that may act, after all checks of `act`."""

    def __init__(
        self, request: Request, form_id: str, sent: FormData, selection: Selection | None
    ) -> None:
        self._request, self._id = request, form_id
        texts = {name: text for name, text in sent.items() if isinstance(text, str)}
        self.values: Mapping[str, str] = texts
        self.reason = texts.get("reason", "").strip()[: acts.MOST_REASON] or None
        files = [each for _, each in sent.multi_items() if isinstance(each, UploadFile)]
        self.file = next((each for each in files if each.filename), None)
        """The uploaded file, if one was chosen."""
        self.selection = selection
        """From the hidden field `selection`; with checkboxes named `id`, only the checked ones."""
        self.back = local(texts.get("back", ""))
        """The path and the query of the page that it was on, from its field `back`."""

    async def run(self, call: Callable[..., T], *args: Any, **keywords: Any) -> T:
        """Return `call(*args, **keywords)`, run in a thread of the service as this actor, via http.

        Inside, `acts` has the actor and the reason: no `by=` is needed. Errors of the library
        become a page with their text, to which the reader can come back.
        """
        with acts.acting(session.of(self._request).name, reason=self.reason, via="http"):
            try:
                return await state.of(self._request).calls.run(call, *args, **keywords)
            except (db.OperationalError, db.InterfaceError) as error:
                if error.sqlstate is None:
                    # The connection was perhaps lost after a COMMIT, so the form counts as sent.
                    self._request.state.answer = None
                raise

    def confirm(self, count: int) -> None:
        """Refuse the form if so many objects need their number typed, and it was not.

        The number is the page's own (field `shown`), since objects come and go meanwhile.
        """
        shown = self.values.get("shown", str(count))
        if count > TYPED_ABOVE and self.values.get("typed", "").strip() != shown:
            raise Refused(
                422,
                f"This would end {count} at once, and the number was not typed. Nothing was "
                "changed: reload the page, and type the number that it shows.",
            )

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
        found = RedirectResponse(where, 303)  # which escapes characters that a header cannot have
        answer = Answer(found.headers["location"], message, links, undo, time.monotonic())
        self._request.state.answer.set_result(answer)
        return found


def local(path: str) -> str:
    """Return a path below the mount; `/` for another text, also for one that leads out of it."""
    is_path = path.startswith("/") and path.isascii() and path.isprintable() and "\\" not in path
    # Browsers take an escaped dot for a dot.
    steps = path.partition("?")[0].partition("#")[0].lower().replace("%2e", ".").split("/")
    return path if is_path and ".." not in steps else "/"


async def fields(request: Request, max_files: int = 0) -> FormData:
    """Return the fields of a POST.

    Raises `Refused` for a form that cannot be read, and for a text that no database can store.
    """
    refused = Refused(400, "A field has characters that cannot be stored. Nothing was changed.")
    kind = request.headers.get("content-type", "").strip().lower()
    if not kind.startswith("multipart/") and (await request.body()).count(b"&") >= MOST_FIELDS:
        # Some versions of starlette read any number of them, which blocks the event loop.
        raise Refused(400, f"A form has at most {MOST_FIELDS:,} fields. Nothing was changed.")
    try:
        sent = await request.form(max_files=max_files, max_fields=MOST_FIELDS)
        request.state.sent = sent
    except UnicodeError:  # of the character set that the form names
        raise refused from None
    except ValueError:  # of its parser, which some versions of starlette do not catch
        raise Refused(400, "The form cannot be read. Nothing was changed.") from None
    if not all(payload.is_storable(f"{name}{given}") for name, given in sent.multi_items()):
        raise refused
    return sent


async def act(
    request: Request, needs: tokens.Scope, *, kind: str | None = None, max_files: int = 0
) -> Form:
    """Return the form of a POST, after all checks: session, scope, --read-only, CSRF, form id.

    Origin and Sec-Fetch-Site were checked by the guard. A repeated POST (same form id) raises the
    answer of the first. `kind`: the kind of the selection, if it must have one.
    """
    own = session.of(request)
    sent = await fields(request, max_files)
    csrf, form_id = str(sent.get("csrf", "")), str(sent.get("form", ""))
    if not hmac.compare_digest(csrf.encode(), own.csrf.encode()):
        raise Refused(
            403, "This form belongs to another session. Go back, reload the page, and try again."
        )
    if not own.may(needs):
        text = f"Your session has scope {own.scope}; {needs} is needed. Nothing was changed: log "
        raise Refused(403, f"{text}out, and log in with a token that has this scope.")
    changes = tokens.RANK[needs] > tokens.RANK["read"]
    if changes and state.of(request).settings.app_read_only:
        raise Refused(403, "The service is read-only (APP_READ_ONLY). Nothing was changed.")
    posts: Posts = request.app.state.posts
    if not form_id.startswith(f"{posts.word}-") or len(form_id) > 100:
        raise Refused(
            409,
            "The service was started again since this page was shown. Nothing was changed: go "
            "back, reload the page, and see whether it is still needed.",
        )
    chosen = None if kind is None else _selected(own, sent, kind)
    request.state.answer = await posts.begin(csrf, form_id)
    return Form(request, form_id, sent, chosen)


# --- selections --------------------------------------------------------------------------------


def sign_selection(request: Request, chosen: Selection) -> str:
    """Return the text for the hidden field `selection` of a form (`Action.fields`)."""
    return session.signed(session.of(request).digest, "selection", chosen)


def _selected(own: session.Session, sent: FormData, kind: str) -> Selection:
    """Return the signed selection of a form, or the part of it whose boxes are checked.

    The box `whole` counts if none is. A forged one, and another kind or scope, is refused.
    """
    found = session.content_of(own.digest, "selection", str(sent.get("selection", "")))
    if found is None or found[0] != kind:
        raise Refused(
            403, "This selection was altered, or belongs to another page or scope. Nothing was "
            "changed. Reload the page, and choose again.",
        )  # fmt: skip
    _, ids, at = found
    checked = [str(each) for each in sent.getlist("id")]
    if not set(checked) <= set(ids):
        raise Refused(
            403, "One of the chosen rows was not on the page. Nothing was changed. Reload it, and "
            "choose again.",
        )  # fmt: skip
    when = datetime.fromisoformat(at) if at else None
    return Selection(kind, tuple(checked or ids), when)
