"""Open pages of the dashboard in this process, as a browser without JavaScript does."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import httpx

from queue_workflows import service
from tests.support import http_service

T = TypeVar("T")
LOOK = "a-token-that-looks-0123456789"
EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{7*7}}"
"""A text that is markup and a template, for every column."""


class Browser:
    """A browser that has logged in."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def open(self, path: str, status: int = 200, **query: Any) -> str:
        """Return the page at this path below the mount, which has to have this status."""
        reply = await self.http.get(f"/ui{path}", params=query or None)
        assert reply.status_code == status, reply.text[-3000:]
        if reply.headers["content-type"].startswith("text/html"):
            _check(reply)
        return reply.text

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
        shown = await self.http.get(reply.headers["location"])
        assert shown.status_code == status, shown.text[-3000:]
        return shown.text


def _check(reply: httpx.Response) -> None:
    """A page has no markup of a value, and no inline style or script."""
    assert "<script>alert" not in reply.text
    assert "<img src=x" not in reply.text
    assert not re.search(r"<[^>]*\sstyle=", reply.text)
    assert ">49<" not in reply.text
    assert "unsafe" not in reply.headers["content-security-policy"]


def browse(
    use: Callable[[Browser], Coroutine[Any, Any, T]], token: str = http_service.TOKEN, **more: Any
) -> T:
    """Return what a function does with a browser that has logged in as ann."""

    async def run() -> T:
        given = {"workers_json": "", "app_read_only": False} | more
        app = service.app(token=http_service.TOKEN, token_look=LOOK, **given)
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as http,
        ):
            reply = await http.post("/ui/login", data={"token": token, "name": "ann"})
            assert reply.status_code == 303, reply.text
            return await use(Browser(http))

    return asyncio.run(run())


def opened(path: str, *, token: str = http_service.TOKEN, status: int = 200, **query: Any) -> str:
    """Return one page."""
    return browse(lambda browser: browser.open(path, status, **query), token)


def words(page: str) -> str:
    """Return the words of a page's main part, or of a fragment."""
    main = page.partition('<main id="main"')[2].partition("</main>")[0] or page
    found = html.unescape(re.sub(r"<[^>]*>", " ", re.sub(r"<title>.*?</title>", "", main)))
    return " ".join(found.split())
