"""Return pages that are one live part, and pages of lists that are read whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, TypeVar
from urllib.parse import urlencode

import fastapi
from starlette.requests import Request
from starlette.responses import Response

from queue_workflows.service.dashboard import view
from queue_workflows.types import JsonDict

T = TypeVar("T")
PAGE: Final = 50
Start = Annotated[int, fastapi.Query(ge=0, le=1_000_000)]
"""The type of the place in a list at which a page of it begins."""


async def live(
    request: Request, part: str, read: Callable[..., JsonDict], *args: Any, title: str, command: str
) -> Response:
    """Return a page that is one live part, or for htmx, which fetches it again, the part alone.

    `read(conn, *args)` returns the values of the template `part`.
    """

    async def make() -> JsonDict:
        return await view.read(request, read, *args)

    if "hx-request" in request.headers:
        return await view.fragment(request, part, make)
    found = await make()
    return view.Page(request, "live.html", title=title, command=command, part=part, **found)


def link(path: str, **query: str) -> str:
    """Return where the page of one thing is, whatever its name is."""
    return f"{path}?{urlencode(query)}"


def paged(
    rows: list[T], start: int, path: str, *, most: int = PAGE, **query: str
) -> tuple[list[T], view.Pager]:
    """Return a page of a list that is read whole, and the links to the others.

    A place behind the end, as the list has become shorter, leads to the first page.
    """
    start = start if start < len(rows) else 0
    following = {**query, "start": start + most} if len(rows) > start + most else None
    return rows[start : start + most], view.Pager(path, query, following, start == 0)
