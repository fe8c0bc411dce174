"""A session of scope look: states and times on every page, and no value on any."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

import queue_workflows
from tests.browser.browsers import Site, Visitor, settled
from tests.browser.scenes import DETAILS, PAGES

PACKAGE = Path(queue_workflows.__path__[0], "service", "dashboard")
VALUES = (
    # Errors, a traceback and a log.
    "has no price", "read timed out", "'sku_", "CUDA out of memory", "/data/out/", "Mars/Base",
    "file-61.txt is empty", "model.encode", "of 400 encoded",
    # An input, an output, args, a lock key, and what a question asks.
    "harbour.mp4", '"result"', '"day"', "tenant-7", "Which colour has the poster",
    # What people said and who they are.
    "the disk is larger now", "new driver", "it smells of smoke", "bob <",
)  # fmt: skip
"""Parts of the values of the scene, each of which the scope operate sees somewhere."""
ADDRESSES = {
    "/": ["/"],
    "/acts": ["/acts", "/acts?kind=run&subject={run}", "/acts?actor=bob"],
    "/failures": ["/failures", "/failures?text=price"],
    "/failures/news": ["/failures/news?at=2020-01-01T00:00:00Z"],
    "/failures/{group}": ["/failures/{group}", "/failures/{group}?ids=1"],
    "/head": ["/head"],
    "/health": ["/health"],
    "/inbox": ["/inbox"],
    "/inbox/news": ["/inbox/news?at=2020-01-01T00:00:00Z"],
    "/inbox/question": ["/inbox/question?run={asks}&node=ask"],
    "/jobs": ["/jobs", "/jobs?status=failed", "/jobs?queue={queue}", "/jobs?key=tenant"],
    "/jobs/{job_id}": ["/jobs/{job}", "/jobs/{waits}"],
    "/jobs/{job_id}/again": ["/jobs/{job}/again"],
    "/jobs/{job_id}/value": ["/jobs/{job}/value?name=inputs", "/jobs/{job}/value?name=log"],
    "/machines": ["/machines", "/machines?host={host}"],
    "/machines/{host}": ["/machines/{host}"],
    "/queues": ["/queues", "/queues?queue={queue}"],
    "/runs": ["/runs", "/runs?status=failed", "/runs?workflow={workflow}", "/runs?text=price",
              "/runs?input=tenant%3D7"],
    "/runs/{run_id}": ["/runs/{run}", "/runs/{run}?show=graph", "/runs/{run}?show=list",
                       "/runs/{run}?node={node}", "/runs/{run}?node={node}&attempt=1",
                       "/runs/{run}?node={node}&attempt=2", "/runs/{run}?node=cut",
                       "/runs/{asks}?node=ask", "/runs/{asks}"],
    "/runs/{run_id}/again": ["/runs/{run}/again"],
    "/runs/{run_id}/file": ["/runs/{run}/file?path=a"],
    "/runs/{run_id}/files": ["/runs/{run}/files"],
    "/runs/{run_id}/map": ["/runs/{mapped}/map?node=each", "/runs/{mapped}/map?node=each&state=all",
                           "/runs/{mapped}/map?node=each&key=file-7"],
    "/runs/{run_id}/value": ["/runs/{run}/value?name=inputs", "/runs/{run}/value?name=output",
                             "/runs/{run}/value?name=log&node={node}&attempt=3"],
    "/runs/{run_id}/why": ["/runs/{asks}/why"],
    "/schedules": ["/schedules", "/schedules?name={schedule}"],
    "/schedules/{name}": ["/schedules/{schedule}"],
    "/search": ["/search?q={run}", "/search?q={job}"],
    "/waiting": ["/waiting", "/waiting?job={waits}"],
}  # fmt: skip
"""Addresses of every route that shows something of the database, with members of a `Scene`."""
WITHOUT = {"/live", "/login", "/static/{name}"}
"""The stream of hints, whose ids are no values, and routes that show nothing of the database."""
SEEN = (
    "graph", "node", "live run", "node that asks", "map", "item", "question", "why", "machine",
    "job", "schedule", "queue",
)  # fmt: skip
"""Of DETAILS the pages that the scope look sees; it is refused the others."""


@pytest.fixture
def burning(shown: Callable[[str], Site]) -> Site:
    """The service that shows a system on fire, which has values of all kinds."""
    return shown("on fire")


def replies(visitor: Visitor, site: Site) -> Iterator[tuple[str, int, str]]:
    """Yield each address with its status and text, as a page and as the part that is live."""
    for templates in ADDRESSES.values():
        for address in map(site.scene.address, templates):
            for headers in ({}, {"hx-request": "true"}):
                where = f"{site.base}/ui{address}"
                reply = visitor.context.request.get(where, headers=headers)
                yield address, reply.status, html.unescape(reply.text())


def test_every_route_is_asked() -> None:
    found = {
        path
        for file in PACKAGE.glob("*.py")
        for path in re.findall(r'^@router\.get\("([^"]+)"\)', file.read_text("utf-8"), re.MULTILINE)
    }
    assert found | {"/static/{name}"} == ADDRESSES.keys() | WITHOUT


def test_no_route_shows_a_value(burning: Site, chromium: Browser) -> None:
    with burning.visitor(chromium, scope="look") as visitor:
        found = [*replies(visitor, burning)]
    assert {status for _, status, _ in found} == {200, 403}
    leaks = [(where, value) for where, _, text in found for value in VALUES if value in text]
    assert not leaks


def test_the_values_are_there_for_others(burning: Site, chromium: Browser) -> None:
    """Else the test above would find nothing in any case."""
    with burning.visitor(chromium) as visitor:
        texts = [text for _, _, text in replies(visitor, burning)]
    assert not [value for value in VALUES if not any(value in text for text in texts)]


def test_no_page_shows_a_value_once_its_parts_have_come(burning: Site, chromium: Browser) -> None:
    with burning.visitor(chromium, scope="look") as visitor:
        page = visitor.context.new_page()
        for template in (*PAGES.values(), *(DETAILS[name] for name in SEEN)):
            settled(visitor.open(burning.scene.address(template), page))
            expect(page.locator("h1")).to_be_visible()
            text = html.unescape(page.content())
            assert not [value for value in VALUES if value in text], template
        assert not visitor.noise
