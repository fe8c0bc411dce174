"""Visit the dashboard in this process as a browser without JavaScript does."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Mapping
from html.parser import HTMLParser
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit

import httpx

from queue_workflows import service
from tests.support import asgi_service, http_service

T = TypeVar("T")
TOKENS: dict[str, str] = {
    "look": "look-token-of-the-tests", "read": "read-token-of-the-tests",
    "submit": "submit-token-of-the-tests", "operate": http_service.TOKEN,
}  # fmt: skip


class Form:
    """A form of a page: its address, method, fields with their values, and buttons."""

    def __init__(self, action: str, method: str) -> None:
        self.action, self.method = action, method
        self.fields: list[tuple[str, str]] = []
        self.names: list[str] = []
        """Of all its fields, also those without a value, such as boxes that are not checked."""
        self.text = ""

    def __repr__(self) -> str:
        return f"{self.method} {self.action} {self.names} {self.text!r}"


class Page(HTMLParser):
    """A response with its forms, links, element ids and words."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__()
        self.response = response
        self.status = response.status_code
        self.forms: list[Form] = []
        self.links: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._form: Form | None = None
        self._hidden = 0
        self._words: list[str] = []
        if "html" in response.headers.get("content-type", ""):
            self.feed(response.text)
        self.text = " ".join(" ".join(self._words).split()) or response.text

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append((tag, given))
        self._hidden += tag in ("script", "style", "title")
        if tag == "form":
            self._form = Form(given.get("action") or "", (given.get("method") or "get").lower())
            self.forms.append(self._form)
        elif tag == "a" and given.get("href") is not None:
            self.links.append(str(given["href"]))
        elif self._form is not None and given.get("name"):
            name, is_box = str(given["name"]), given.get("type") in ("checkbox", "radio")
            self._form.names.append(name)
            if tag in ("input", "select", "textarea") and not is_box:
                self._form.fields.append((name, given.get("value") or ""))

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style", "title")
        if tag == "form":
            self._form = None

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self._words.append(data)
        if self._form is not None:
            self._form.text += data

    def form(self, part: str) -> Form:
        """Return the only form whose address or text has this part."""
        found = [form for form in self.forms if part in form.action or part in form.text]
        assert len(found) == 1, (part, self.forms, self.text[:2000])
        return found[0]


class Browser:
    """Cookies, the last page, and requests as a browser makes them."""

    def __init__(self, app: Any, http: httpx.AsyncClient, mount: str) -> None:
        self.app = app
        """The service, as `service.app()` returns it."""
        self.http = http
        self.mount = mount
        self.page: Page

    async def open(self, path: str = "/", **more: Any) -> Page:
        """Go to a path below the mount, and follow where it leads."""
        return await self._go("GET", self.mount + path, **more)

    async def click(self, address: str, **more: Any) -> Page:
        """Follow an address of the last page."""
        return await self._go("GET", urljoin(str(self.page.response.url), address), **more)

    async def send(self, form: Form, values: Mapping[str, Any] | None = None, **more: Any) -> Page:
        """Send a form, with these values in the place of its own."""
        given = {name: value for name, value in form.fields if name not in (values or {})}
        there = urljoin(str(self.page.response.url), form.action)
        headers = {"sec-fetch-site": "same-origin", "origin": "null"} | more.pop("headers", {})
        data = given | dict(values or {})
        if form.method == "get":
            return await self._go("GET", there, params=data, **more)
        return await self._go("POST", there, data=data, headers=headers, **more)

    async def login(self, scope: str = "operate", name: str = "ann") -> Page:
        """Log in with the token of a scope."""
        page = await self.open("/login")
        return await self.send(page.form("/login"), {"token": TOKENS[scope], "name": name})

    async def stream(self, path: str, until: Callable[[str], bool]) -> tuple[int, str]:
        """Return the status and the text of a response that stays open, once `until` holds."""
        status, text, over = 0, "", asyncio.Event()

        async def receive() -> Any:
            await over.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal status, text
            status = message.get("status", status)
            text += message.get("body", b"").decode()
            if until(text):
                over.set()

        cookie = "; ".join(f"{each.name}={each.value}" for each in self.http.cookies.jar)
        scope = asgi_service.scope_of(self.mount + path, cookie=cookie)
        await asyncio.wait_for(self.app(scope, receive, send), asgi_service.TIMEOUT_S)
        return status, text

    async def _go(self, method: str, url: str, follow: bool = True, **more: Any) -> Page:
        response = await self.http.request(method, url, **more)
        for _ in range(5):
            if not (follow and response.has_redirect_location):
                break
            response = await self.http.get(urljoin(url, response.headers["location"]))
        self.page = Page(response)
        return self.page


def visited(
    use: Callable[[Browser], Coroutine[Any, Any, T]],
    *,
    scope: str | None = "operate",
    mount: str = "/ui",
    inside: str = "",
    address: str = "127.0.0.1",
    **settings: Any,
) -> T:
    """Return what a function does with a browser that has logged in, if a scope is given.

    `inside`: the path at which another application mounts the service.
    """

    async def run() -> T:
        given: dict[str, Any] = {
            "token": TOKENS["operate"], "token_submit": TOKENS["submit"],
            "token_read": TOKENS["read"], "token_look": TOKENS["look"], "workers_json": "",
            "app_dashboard": True,
        }  # fmt: skip
        app = served = service.app(**(given | settings))
        if inside:
            import fastapi

            app = fastapi.FastAPI()
            app.mount(inside, served)
        transport = httpx.ASGITransport(app=app, client=(address, 1234))
        async with (
            served.router.lifespan_context(served),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as http,
        ):
            browser = Browser(served, http, inside + mount)
            if scope is not None:
                await browser.login(scope)
            return await use(browser)

    return asyncio.run(run())


def path_of(address: str) -> str:
    """Return the path of an address."""
    return urlsplit(address).path


def inner_scripts(text: str) -> list[str]:
    """Return what would run or style inside a page: handlers, scripts, styles, other schemes."""
    found = re.findall(r"<script(?![^>]*\bsrc=)|<style|\sstyle\s*=|\son\w+\s*=\s*[\"']", text)
    return found + re.findall(r"(?:href|src|action)=\"(?![/#?])[^\"]*", text)
