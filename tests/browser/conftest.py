"""A browser, and services that show the scenes, each for the tests of a file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator

import pytest
from playwright.sync_api import Browser

from tests.browser import browsers
from tests.browser.browsers import Site, Visitor
from tests.support.database import Database


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let a test that is skipped fail: nobody looks at the pages if these tests do not."""
    report = yield
    if report.skipped:
        report.outcome, report.longrepr = "failed", f"skipped: {report.longrepr}"
    return report


@pytest.fixture(scope="module")
def chromium() -> Generator[Browser]:
    """Debian's Chromium; it ends with the file, as other tests run event loops."""
    with browsers.chromium() as made:
        yield made


@pytest.fixture(scope="module")
def shown(own_database: Database) -> Generator[Callable[[str], Site]]:
    """Returns the service that shows a scene, by its name; it lives as long as the file's tests."""
    with contextlib.ExitStack() as stack:
        made: dict[str, Site] = {}

        def of(name: str) -> Site:
            if name not in made:
                made[name] = stack.enter_context(browsers.showing(own_database, name))
            made[name].refresh()
            return made[name]

        yield of


@pytest.fixture
def site(shown: Callable[[str], Site]) -> Site:
    """The service that shows usual work."""
    return shown("usual")


@pytest.fixture
def visitor(site: Site, chromium: Browser) -> Generator[Visitor]:
    """A person who has logged in there as ann; a complaint of a page fails the test."""
    with site.visitor(chromium) as made:
        yield made
    assert not made.noise
