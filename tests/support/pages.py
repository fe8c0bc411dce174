"""Open pages of the dashboard and send their forms in one line each, with checks of every page."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import httpx

from tests.support import dashboard

T = TypeVar("T")
EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{7*7}}"
"""A text that is markup and a template, for every column."""


class Browser:
    """A browser that has logged in."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def open(self, path: str, /, status: int = 200, **query: Any) -> str:
        """Return the page at this path below the mount, which has to have this status."""
        return _checked(await self.http.get(f"/ui{path}", params=query or None), status)

    async def part(self, path: str, /, **query: Any) -> str:
        """Return the live part of the page at this path, as htmx fetches it again."""
        headers = {"hx-request": "true"}
        found = await self.http.get(f"/ui{path}", params=query or None, headers=headers)
        assert "<html" not in found.text
        return _checked(found, 200)

    async def send(
        self, page: str, action: str, place: int = 0, *, label: str = "", **values: str
    ) -> httpx.Response:
        """Send a form of a page with this action, with its hidden fields and values.

        `label`: one whose button has it; else the one at `place`.
        """
        forms = re.findall(
            rf'<form method="post" action="/ui{re.escape(action)}".*?</form>', page, re.DOTALL
        )
        found = [form for form in forms if f">{label}</button>" in form] if label else forms
        assert found, (action, label, page)
        fields = re.findall(r'<input type="hidden" name="([\w-]+)" value="([^"]*)">', found[place])
        given = {name: html.unescape(value) for name, value in fields} | values
        return await self.http.post(f"/ui{action}", data=given)

    async def follow(self, reply: httpx.Response, status: int = 200) -> str:
        """Return the page to which the reply of a form leads."""
        assert reply.status_code == 303, reply.text[-3000:]
        return _checked(await self.http.get(reply.headers["location"]), status)


def _checked(reply: httpx.Response, status: int) -> str:
    """Return a page; it has no markup of a value, no inline style or script, and forbids both."""
    assert reply.status_code == status, (reply.url, reply.text[-3000:])
    if reply.headers["content-type"].startswith("text/html"):
        assert not dashboard.inner_scripts(reply.text), reply.url
        assert "<img src=x" not in reply.text
        assert not re.search(r"alert\(2\)(?:>|&gt;)49", reply.text)
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
    return reply.text


def browse(
    use: Callable[[Browser], Coroutine[Any, Any, T]], scope: str = "operate", **settings: Any
) -> T:
    """Return what a function does with a browser that has logged in as ann."""
    return dashboard.visited(lambda own: use(Browser(own.http)), scope=scope, **settings)


def opened(path: str, /, *, scope: str = "operate", status: int = 200, **query: Any) -> str:
    """Return one page."""
    return browse(lambda browser: browser.open(path, status, **query), scope)


def words(page: str) -> str:
    """Return the words of a page's main part, or of a fragment."""
    main = page.partition('<main id="main"')[2].partition("</main>")[0] or page
    found = html.unescape(re.sub(r"<[^>]*>", " ", re.sub(r"<title>.*?</title>", "", main)))
    return " ".join(found.split())


def next_page(page: str) -> str | None:
    """Return the path below the mount of the next page of a list, or None on the last."""
    link = re.search(r'rel="next" href="/ui([^"]+)"', page)
    return link and html.unescape(link[1])
