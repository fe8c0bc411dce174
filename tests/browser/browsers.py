"""Start Chromium and a service that shows a scene, and visit it as a person who has logged in."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Generator
from typing import Any, NamedTuple

from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from queue_workflows import db
from tests.browser import scenes
from tests.support import commands
from tests.support.commands import TOYHOST
from tests.support.dashboard import TOKENS
from tests.support.database import Database
from tests.support.wait import until

LINK = re.compile(r"(http://127\.0\.0\.1:\d+)/ui/login\?link=\S+")
"""The address that a dashboard beside `up` prints once it serves."""
WAIT_MS = 30_000
SAY_VIOLATIONS = """
document.addEventListener("securitypolicyviolation", (event) => console.error(
  `policy: ${event.violatedDirective} ${event.blockedURI} ${event.sourceFile}`));
"""
expect.set_options(timeout=WAIT_MS)


@contextlib.contextmanager
def chromium() -> Generator[Browser]:
    """Yield Debian's Chromium. Raises where it is not installed, as its tests are never skipped.

    Until it ends, this thread has a running event loop, so that `asyncio.run` raises.
    """
    path = shutil.which("chromium")
    if path is None:
        raise AssertionError("chromium is not installed: apt-get install chromium")
    with sync_playwright() as playwright:
        arguments = ["--disable-gpu", "--disable-quic"]
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


class Visitor:
    """A browser's session with its pages, and the complaints of all of them."""

    def __init__(self, context: BrowserContext, base: str) -> None:
        self.context = context
        self.noise: list[str] = []
        """Console messages, uncaught errors, violations of the policy, boxes, other sites."""
        self.posts: list[str] = []
        """The paths of the forms that were sent."""
        self.streams: list[str] = []
        """The pages that have opened the stream of changes."""
        self._base = base
        context.set_default_timeout(WAIT_MS)
        context.add_init_script(SAY_VIOLATIONS)
        context.on("console", lambda said: self._add(said.type, said.text, said.location))
        context.on("weberror", lambda error: self._add("uncaught", error.error))
        context.on("dialog", self._refuse)
        context.on("request", self._note)

    def _add(self, *parts: object) -> None:
        self.noise.append(" ".join(map(str, parts)))

    def _refuse(self, box: Any) -> None:
        self._add("opens a box", box.message)
        box.dismiss()

    def _note(self, request: Any) -> None:
        if not request.url.startswith((f"{self._base}/", "data:", "about:")):
            self._add("asks another site", request.url)
        path = request.url.removeprefix(f"{self._base}/ui").partition("?")[0]
        if request.method == "POST":
            self.posts.append(path)
        if path == "/live":
            self.streams.append(path)

    def open(self, path: str, page: Page | None = None) -> Page:
        """Go to a path below the mount, in a new tab or in this one."""
        page = page or self.context.new_page()
        page.goto(f"{self._base}/ui{path}")
        return page

    def login(self, name: str = "ann", token: str = TOKENS["operate"]) -> Visitor:
        """Log in without a tab: Chromium may never answer if one is closed while its page loads."""
        origin = re.match(r"\w+://[^/]+", self._base)
        assert origin is not None
        reply = self.context.request.post(
            f"{self._base}/ui/login",
            form={"name": name, "token": token, "next": ""},
            headers={"origin": origin[0]},
        )
        assert reply.ok, reply.text()[-2000:]
        assert reply.url == f"{self._base}/ui/", reply.url
        return self


@contextlib.contextmanager
def entered(browser: Browser, link: re.Match[str], **options: Any) -> Generator[Visitor]:
    """Yield a visitor that has logged in as ann by a LINK; `options` as those of `Site.visitor`."""
    given = {"locale": "en-GB", "timezone_id": "UTC"} | options
    with contextlib.closing(browser.new_context(**given)) as context:
        visitor = Visitor(context, link[1])
        page = context.new_page()
        page.goto(link[0])
        page.get_by_label("Your name").fill("ann")
        page.get_by_role("button", name="Log in").click()
        page.wait_for_url(f"{link[1]}/ui/")
        settled(page).close()
        yield visitor


def settled(page: Page) -> Page:
    """Return a page once its scripts have begun and no part of it is being fetched."""
    expect(page.locator("#live")).to_have_text("live")
    expect(page.locator(".htmx-request")).to_have_count(0)
    return page


class Site(NamedTuple):
    """A service that shows a scene."""

    base: str
    """Its address, without the mount."""
    dsn: str
    scene: scenes.Scene

    @contextlib.contextmanager
    def visitor(
        self, browser: Browser, *, scope: str = "operate", **options: Any
    ) -> Generator[Visitor]:
        """Yield a visitor that has logged in; `options` are those of a context of Playwright."""
        given = {"locale": "en-GB", "timezone_id": "UTC"} | options
        with contextlib.closing(browser.new_context(**given)) as context:
            yield Visitor(context, self.base).login(token=TOKENS[scope])

    @contextlib.contextmanager
    def database(self) -> Generator[db.Connection]:
        """Yield a connection to its database, in autocommit mode."""
        with db.connect(url=self.dsn) as conn:
            yield conn

    def refresh(self) -> None:
        """Let its workers report themselves now."""
        with self.database() as conn:
            scenes.refresh(conn)


@contextlib.contextmanager
def serving(dsn: str, **env: str) -> Generator[str]:
    """Yield the address of a service of this database, which leaves its rows alone."""
    given = {
        "QUEUE_WORKFLOWS_DB_URL": dsn, "QUEUE_WORKFLOWS_APP_DASHBOARD": "1",
        "QUEUE_WORKFLOWS_TOKEN": TOKENS["operate"], "QUEUE_WORKFLOWS_TOKEN_LOOK": TOKENS["look"],
    }  # fmt: skip
    argv = ("queue-workflows", "serve", "--beside-up", "/", "--port", "0", "--app", TOYHOST)
    with commands.commands(**given, **env) as cli:
        serve = cli.start(*argv, "--workers-json", "[]", "--log-level", "warning")
        yield until(lambda: LINK.search(serve.err), timeout_s=60)[1]


@contextlib.contextmanager
def showing(database: Database, name: str, **env: str) -> Generator[Site]:
    """Yield a service that shows the scene of this name, in a database of its own."""
    own = database.fresh_name()
    dsn = database.create_migrated(own)
    try:
        with db.connect(url=dsn) as conn:
            scene = scenes.SCENES[name](conn)
        with serving(dsn, **env) as base:
            yield Site(base, dsn, scene)
    finally:
        database.drop(own)
