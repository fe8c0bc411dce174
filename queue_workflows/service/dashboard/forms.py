"""Check POSTs of the dashboard, sign selections, and answer with a message and Undo. INTERFACE."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, NamedTuple, TypeVar

from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response

from queue_workflows.service import tokens

T = TypeVar("T")


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
    count: int = 1
    asks_reason: bool = False


class Selection(NamedTuple):
    """The objects of a bulk action: what was on the screen, signed for this session."""

    kind: str
    """`runs`, `jobs`, `group`, ...: what the page calls it; another kind is refused."""
    ids: tuple[str, ...] = ()
    filter: Mapping[str, Any] = {}
    at: datetime | None = None
    """With a filter: only what was there at that time."""
    count: int = 0


class Form:
    """A POST that may act: `by` (name), `reason` (or None), `values` (first of each), `selection`."""

    by: str
    reason: str | None
    values: Mapping[str, str]
    files: Mapping[str, UploadFile]
    selection: Selection | None
    """Of the hidden field `selection`; with checkboxes named `id`, only the checked ones."""

    async def run(self, call: Callable[..., T], *args: Any, **keywords: Any) -> T:
        """Return `call(*args, **keywords)`, run in a thread of the service as this actor, via http.

        Inside, `acts` has the actor and the reason: no `by=` is needed. Errors of the library
        become a page with their text, to which the reader can come back.
        """
        raise NotImplementedError

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
        raise NotImplementedError


async def act(request: Request, needs: tokens.Scope, *, kind: str | None = None) -> Form:
    """Return the form of a POST, after all checks: session, scope, --read-only, CSRF, form id.

    Origin and Sec-Fetch-Site were checked by the guard. A repeated POST (same form id) never
    returns: its answer is that of the first. `kind`: that of the selection, if it must have one.
    """
    raise NotImplementedError


def sign_selection(request: Request, chosen: Selection) -> str:
    """Return the text for the hidden field `selection` of a form (`Action.fields`)."""
    raise NotImplementedError


def selection(request: Request, text: str, kind: str) -> Selection:
    """Return a signed selection; a forged one, or one of another kind or session, is refused."""
    raise NotImplementedError
