"""A person at the pages while workers run and the database goes away."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

from playwright.sync_api import Browser, expect

from tests.browser import browsers
from tests.browser.browsers import Visitor, settled
from tests.support import toy_app
from tests.support.commands import TOYHOST, Commands
from tests.support.proxy import Proxy
from tests.support.wait import until

UP = ("queue-workflows", "up", "--app", TOYHOST, "--cpu", "2", "--gpu", "0", "--no-ingest")


def test_a_run_is_watched_and_its_question_is_answered(
    cli: Commands, chromium: Browser, tmp_path: Path
) -> None:
    up = cli.start(*UP, QUEUE_WORKFLOWS_APP_DASHBOARD="1")
    link = until(lambda: browsers.LINK.search(up.err), timeout_s=60)
    with contextlib.closing(chromium.new_context(timezone_id="UTC")) as context:
        visitor = Visitor(context, link[1])
        page = context.new_page()
        page.goto(link[0])
        page.get_by_label("Your name").fill("ann")
        page.get_by_role("button", name="Log in").click()
        page.wait_for_url(f"{link[1]}/ui/")
        settled(visitor.open("/runs", page))
        expect(page.locator("tr[data-row]")).to_have_count(0)
        run_id = toy_app.submit(tmp_path, "asking")
        row = page.locator(f'[id="run-{run_id}"]')
        expect(row.locator(".state")).to_have_text("running")
        row.get_by_role("link").first.click()
        sentence = page.locator("#run-state .sentence")
        expect(sentence).to_contain_text("for an answer")
        expect(page.locator("table.timeline")).to_contain_text("work/second")
        asked = [settled(visitor.open(f"/inbox/question?run={run_id}&node=ask")) for _ in range(2)]
        for each in asked:
            each.get_by_label("Left").check()
        asked[0].get_by_role("button", name="Answer").click()
        expect(asked[0].locator("[data-flash]")).to_contain_text("Answered: ask takes")
        expect(sentence).to_contain_text("completed in")
        expect(page.locator("#run-state")).to_contain_text("3/3 nodes")
        assert not visitor.noise
        asked[1].get_by_role("button", name="Answer").click()
        expect(asked[1].locator("main")).to_contain_text("answered by ann")
    up.send(signal.SIGINT)
    assert up.wait() == 0, up.err


def test_a_database_that_is_away_is_shown_and_comes_back(
    chromium: Browser, wire: Proxy, tmp_path: Path
) -> None:
    """The last page stays, with the time of its data, and goes on by itself."""
    with (
        browsers.serving(wire.dsn) as base,
        contextlib.closing(chromium.new_context(timezone_id="UTC")) as context,
    ):
        page = settled(Visitor(context, base).login().open("/runs"))
        state = page.locator("#live")
        wire.freeze()
        expect(state).to_have_text("not live since", timeout=2 * browsers.WAIT_MS)
        expect(page.locator("h1")).to_have_text("Runs")
        wire.thaw()
        expect(state).to_have_text("live", timeout=2 * browsers.WAIT_MS)
        wire.cut()
        run_id = toy_app.submit(tmp_path)
        expect(page.locator(f'[id="run-{run_id}"]')).to_be_visible(timeout=2 * browsers.WAIT_MS)
