"""A person at the pages while workers run and the database goes away."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

from playwright.sync_api import Browser, expect

from queue_workflows import db
from tests.browser import browsers
from tests.browser.browsers import Visitor, settled
from tests.soak import server as servers
from tests.support import database, embedded_servers, factories, toy_app
from tests.support.commands import TOYHOST, Command, Commands
from tests.support.proxy import Proxy
from tests.support.wait import until

UP = ("queue-workflows", "up", "--app", TOYHOST, "--cpu", "2", "--gpu", "0", "--no-ingest")


def started(cli: Commands) -> tuple[Command, re.Match[str]]:
    """Start `up` on box-1; return it with the link to its dashboard."""
    env = {
        "QUEUE_WORKFLOWS_APP_DASHBOARD": "1", "QUEUE_WORKFLOWS_HOST_LABEL": "box-1",
        "QUEUE_WORKFLOWS_CRASH_BACKOFF_S": "0.1",
    }  # fmt: skip
    up = cli.start(*UP, **env)
    return up, until(lambda: browsers.LINK.search(up.err), timeout_s=60)


def test_a_run_is_watched_and_its_question_is_answered(
    cli: Commands, chromium: Browser, tmp_path: Path
) -> None:
    up, link = started(cli)
    with browsers.entered(chromium, link) as visitor:
        page = settled(visitor.open("/runs"))
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


def test_a_worker_is_drained_and_switched_on_again(
    cli: Commands, chromium: Browser, tmp_path: Path
) -> None:
    """Its job ends, and the next one waits until the queue is on."""
    up, link = started(cli)
    run_id = toy_app.submit(tmp_path, "hold")
    until(lambda: toy_app.pids(tmp_path, "hold"), timeout_s=60)
    with browsers.entered(chromium, link) as visitor:
        page = settled(visitor.open("/machines?host=box-1"))
        main, row = page.locator("main"), page.locator("tr", has_text="queue cpu")
        expect(main.locator(".lead")).to_contain_text("1 job running")
        row.locator("summary", has_text="Drain").click()
        row.get_by_role("button", name="Drain").click()
        flash = page.locator("[data-flash]")
        expect(flash).to_contain_text("Queue cpu of box-1 is switched off (drain).")
        expect(row.locator(".state")).to_have_text("off")
        expect(main).to_contain_text("draining")
        (tmp_path / "go").touch()
        expect(main.locator(".lead")).to_contain_text("0 jobs running")
        expect(main).to_contain_text("parked")
        row.get_by_role("button", name="On", exact=True).click()
        expect(flash).to_contain_text("Queue cpu of box-1 is switched on.")
        expect(row.locator(".state")).to_have_text("on")
        visitor.open(f"/runs/{run_id}", page)
        expect(page.locator("#run-state .sentence")).to_contain_text("completed in")
        assert not visitor.noise
    up.send(signal.SIGINT)
    assert up.wait() == 0, up.err


def test_a_killed_process_is_seen_on_the_page_of_its_run(
    cli: Commands, chromium: Browser, tmp_path: Path
) -> None:
    """Its node is run once more; the page has both attempts, and what the first has cost."""
    up, link = started(cli)
    run_id = toy_app.submit(tmp_path, "hold")
    (pid,) = until(lambda: toy_app.pids(tmp_path, "hold"), timeout_s=60)
    with browsers.entered(chromium, link) as visitor:
        page = settled(visitor.open(f"/runs/{run_id}"))
        sentence = page.locator("#run-state .sentence")
        expect(sentence).to_contain_text("runs: 1 node on box-1")
        os.kill(pid, signal.SIGKILL)
        expect(sentence).to_contain_text("completed in", timeout=2 * browsers.WAIT_MS)
        expect(page.locator("table.timeline tr", has_text="work/hold")).to_contain_text(
            "2 attempts"
        )
        expect(page.locator("#run-state .cost")).to_contain_text("1 attempt, ")
        visitor.open(f"/runs/{run_id}?node=work%2Fhold&attempt=1", page)
        expect(page.locator("main")).to_contain_text("What happened in attempt 1")
        assert not visitor.noise
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


def test_a_restart_of_postgresql_is_seen_and_outlasted(chromium: Browser) -> None:
    """The page stays meanwhile, grey, with the time of its data, and is never loaded again."""
    with (
        servers.throw_away() as server,
        database.environment(QUEUE_WORKFLOWS_DB_URL=server.dsn),
    ):
        db.bootstrap()
        db.close_pool()
        with (
            browsers.serving(server.dsn) as base,
            contextlib.closing(chromium.new_context(timezone_id="UTC")) as context,
        ):
            visitor = Visitor(context, base).login()
            page = settled(visitor.open("/runs"))
            state, root = page.locator("#live"), page.locator("html")
            page.evaluate("window.isTheSame = true")
            os.kill(embedded_servers.running(server.folder).pid, signal.SIGQUIT)
            until(lambda: not embedded_servers.is_alive(server.folder))
            expect(state).to_have_text("not live since", timeout=2 * browsers.WAIT_MS)
            expect(page.locator("#clock")).to_have_text(re.compile(r"^\d\d:\d\d:\d\d$"))
            expect(root).to_have_class("stale")
            expect(page.locator("main")).to_contain_text("There is no run yet.")
            server.restart()
            with db.connect(url=server.dsn) as conn:
                run_id = factories.run(conn, workflow_name="watched")
            row = page.locator(f'[id="run-{run_id}"]')
            expect(row).to_be_visible(timeout=2 * browsers.WAIT_MS)
            expect(state).to_have_text("live", timeout=2 * browsers.WAIT_MS)
            expect(root).not_to_have_class("stale")
            assert page.evaluate("window.isTheSame")
            # Requests that failed meanwhile, and nothing else.
            assert all("503" in each or "timeout" in each for each in visitor.noise), visitor.noise
