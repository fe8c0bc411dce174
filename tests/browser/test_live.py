"""Pages follow changes, and leave alone what a person does on them."""

from __future__ import annotations

import contextlib
import itertools
import re
from typing import Any
from urllib.parse import quote

from playwright.sync_api import Browser, Page, expect

from queue_workflows import db
from queue_workflows.types import Row
from tests.browser import browsers, scenes
from tests.browser.browsers import Site, Visitor, settled
from tests.support import factories, transitions
from tests.support.dashboard import TOKENS
from tests.support.wait import until
from tests.support.worker_reports import report

FOCUSED = "document.activeElement.value ?? document.activeElement.id"
CHOSEN = "getSelection().selectAllChildren(document.querySelector('h1'))"
FETCHED = """performance.getEntriesByType("resource")
  .filter((each) => each.initiatorType === "xmlhttprequest" && each.name.endsWith("/ui/runs"))
  .map((each) => each.startTime)"""
"""When the page of runs has fetched its rows, in ms."""
ODD = ("a/b%2F", "50%", "#top", "what?x=1&y=2", "two\nlines")
"""Ids whose characters mean something in an address."""
TOP = "row => row.getBoundingClientRect().top"
BELL = """() => { window.Notification = class {
  constructor(title, given) { window.rung = `${title}: ${given.body}`; }
  static async requestPermission() { return "granted"; }
}; }"""
"""Stands in for the notifications of a desktop, which a headless browser does not have."""


def row_of(page: Page, run_id: str) -> Any:
    return page.locator(f'[id="run-{run_id}"]')


def end(conn: db.Connection, run_id: str) -> None:
    """Let a run complete, which every open page is told."""
    conn.execute(
        "UPDATE workflow_runs SET status = 'completed', finished_at = now() WHERE id = %s", [run_id]
    )


def complete(conn: db.Connection, job: Row) -> None:
    """Let a node complete. Its event counts as dispatched: else a bar soon moves every page."""
    transitions.complete_node(conn, job)
    conn.execute("UPDATE workflow_dispatch_events SET processed_at = now()")


def test_a_row_changes_in_place(visitor: Visitor, site: Site) -> None:
    with site.database() as conn:
        run_id = factories.run(conn, workflow_name="watched")
        page = visitor.context.new_page()
        page.set_viewport_size({"width": 1280, "height": 420})
        settled(visitor.open("/runs", page))
        row = row_of(page, run_id)
        expect(row.locator(".state")).to_have_text("running")
        box = row.get_by_role("checkbox")
        box.check()
        box.focus()
        page.evaluate("scrollTo(0, 90)")
        before = page.evaluate("scrollY")
        order = page.locator("tr[data-row]").evaluate_all("rows => rows.map(row => row.id)")
        end(conn, run_id)
        expect(row.locator(".state")).to_have_text("completed")
        expect(box).to_be_checked()
        assert page.evaluate(FOCUSED) == run_id
        assert page.evaluate("scrollY") == before
        now = page.locator("tr[data-row]").evaluate_all("rows => rows.map(row => row.id)")
        assert now == order


def test_a_page_follows_changes_also_while_the_service_refuses_the_stream(
    visitor: Visitor, site: Site
) -> None:
    """As it does while more browsers follow changes than APP_MAX_VIEWERS."""
    with site.database() as conn:
        run_id = factories.run(conn, workflow_name="watched")
        visitor.context.route("**/ui/live", lambda route: route.fulfill(status=503))
        page = visitor.open("/runs")
        row = row_of(page, run_id)
        expect(row.locator(".state")).to_have_text("running")
        end(conn, run_id)
        expect(row.locator(".state")).to_have_text("completed")
    page.close()
    assert all("503" in each for each in visitor.noise), visitor.noise
    visitor.noise.clear()


def test_new_rows_wait_while_the_list_is_used(visitor: Visitor, site: Site) -> None:
    page = settled(visitor.open("/runs"))
    page.keyboard.press("j")
    first = page.locator("tr[data-row]").first
    before = first.get_attribute("id")
    with site.database() as conn:
        run_id = factories.run(conn, workflow_name="watched")
    button = page.get_by_role("button", name="1 new")
    expect(button).to_be_visible()
    expect(first).to_have_attribute("id", str(before))
    button.click()
    expect(first).to_have_attribute("id", f"run-{run_id}")
    expect(button).to_have_count(0)


def test_rows_that_were_let_in_come_under_the_pointer_and_later_ones_wait_again(
    visitor: Visitor, site: Site
) -> None:
    page = settled(visitor.open("/runs"))
    first = page.locator("tr[data-row]").first
    button = page.get_by_role("button", name="1 new")
    page.locator("tr[data-row]").nth(3).hover()
    for _ in range(2):
        with site.database() as conn:
            run_id = factories.run(conn, workflow_name="watched")
        expect(button).to_be_visible()
        # By the keyboard, as the pointer stays where it is.
        button.focus()
        page.keyboard.press("Enter")
        expect(first).to_have_attribute("id", f"run-{run_id}")
        expect(button).to_have_count(0)


def test_new_machines_wait_while_their_list_is_used(visitor: Visitor, site: Site) -> None:
    page = settled(visitor.open("/machines"))
    row = page.locator("tr[id^=machine-]").first
    row.hover()
    before = row.evaluate(TOP)
    with site.database() as conn:
        report(conn, transitions.who("cpu", "box-5:1:a", host="box-5"))
        button = page.get_by_role("button", name="1 new")
        expect(button).to_be_visible()
        assert row.evaluate(TOP) == before, "the button moves no row"
        machine = page.get_by_role("link", name="box-5", exact=True)
        expect(machine).to_have_count(0)
        button.click()
        expect(machine).to_be_visible()


def test_new_rows_come_by_themselves_while_nobody_is_there(visitor: Visitor, site: Site) -> None:
    page = settled(visitor.open("/runs"))
    with site.database() as conn:
        run_id = factories.run(conn, workflow_name="watched")
    expect(page.locator("tr[data-row]").first).to_have_attribute("id", f"run-{run_id}")


def test_a_run_whose_id_has_a_space_is_followed(visitor: Visitor, site: Site) -> None:
    with site.database() as conn:
        run_id = factories.run(conn, id="two words", workflow_name="watched")
        page = settled(visitor.open(f"/runs/{quote(run_id)}"))
        sentence = page.locator("#run-state .sentence")
        expect(sentence).to_contain_text("runs for")
        end(conn, run_id)
        expect(sentence).to_contain_text("completed in")


def test_runs_of_any_id_are_found_listed_and_followed(visitor: Visitor, site: Site) -> None:
    page = visitor.context.new_page()
    with site.database() as conn:
        for run_id in ODD:
            factories.run(conn, id=run_id, workflow_name="odd")
            where = f"/ui/runs/{quote(run_id, safe='')}"
            if "\n" in run_id:  # which nobody can type into a field
                visitor.open(f"/search?q={quote(run_id, safe='')}", page)
            else:
                settled(visitor.open("/queues", page))
                page.get_by_role("searchbox").first.fill(run_id)
                page.keyboard.press("Enter")
            expect(page).to_have_url(re.compile(f"{re.escape(where)}$"))
            settled(visitor.open("/runs?workflow=odd", page))
            page.locator(f'table.rows a[href="{where}"]').click()
            expect(page).to_have_url(re.compile(f"{re.escape(where)}$"))
            sentence = settled(page).locator("#run-state .sentence")
            expect(sentence).to_contain_text("runs for")
            end(conn, run_id)
            expect(sentence).to_contain_text("completed in")


def test_the_graph_follows_its_run(visitor: Visitor, site: Site) -> None:
    with site.database() as conn:
        run_id = factories.run(
            conn, workflow_name="watched", definition=scenes.definition("watched", first=""),
            definition_hash="scene watched",
        )  # fmt: skip
        factories.node(conn, run_id, "first")
        (job,) = transitions.claim(conn, transitions.who("cpu", "box-9:2:a", host="box-9"))
        assert job["node_id"] == "first"
        page = settled(visitor.open(f"/runs/{run_id}?show=graph"))
        expect(page.locator(".box.is-running")).to_have_count(1)
        complete(conn, job)
        expect(page.locator(".box.is-completed")).to_have_count(1)


def test_a_run_that_has_ended_cannot_be_cancelled(visitor: Visitor, site: Site) -> None:
    with site.database() as conn:
        run_id = factories.run(conn, workflow_name="watched")
        page = settled(visitor.open(f"/runs/{run_id}"))
        cancel = page.locator("#run-actions summary", has_text="Cancel")
        expect(cancel).to_be_visible()
        end(conn, run_id)
        expect(cancel).to_have_count(0)


def test_a_screen_reader_hears_what_a_run_has_come_to(visitor: Visitor, site: Site) -> None:
    with site.database() as conn:
        run_id = factories.run(conn, workflow_name="watched")
        # Its sentence has no time, so that nothing is said before the end.
        factories.node(conn, run_id, "work", blocked_reason="unserved")
        page = settled(visitor.open(f"/runs/{run_id}"))
        expect(page.locator("#run-state .sentence")).to_contain_text("waits: 1 node for a worker")
        said = page.get_by_role("status")
        expect(said).to_be_empty()
        end(conn, run_id)
        expect(said).to_contain_text("completed in")


def test_a_person_is_notified_of_the_end_of_a_run(visitor: Visitor, site: Site) -> None:
    with site.database() as conn:
        run_id = factories.run(conn, workflow_name="watched")
        page = settled(visitor.open(f"/runs/{run_id}"))
        page.evaluate(BELL)
        bell = page.get_by_role("button", name="Tell me when it ends")
        bell.click()
        expect(bell).to_have_attribute("aria-pressed", "true")
        end(conn, run_id)
        expect(bell).to_have_count(0)
    assert run_id in page.evaluate("window.rung")
    assert "completed" in page.evaluate("window.rung")


def test_nothing_changes_while_text_is_selected(visitor: Visitor, site: Site) -> None:
    with site.database() as conn:
        run_id = factories.run(conn, workflow_name="watched")
        reader, other = (settled(visitor.open("/runs")) for _ in range(2))
        reader.evaluate(CHOSEN)
        end(conn, run_id)
        expect(row_of(other, run_id).locator(".state")).to_have_text("completed")
        assert row_of(reader, run_id).locator(".state").inner_text() == "running"
        reader.evaluate("getSelection().removeAllRanges()")
        expect(row_of(reader, run_id).locator(".state")).to_have_text("completed")


def test_nothing_changes_while_a_question_is_open(visitor: Visitor, site: Site) -> None:
    with site.database() as conn:
        run_id = factories.run(conn, workflow_name="watched")
        factories.node(conn, run_id, "work")
        (job,) = transitions.claim(conn, transitions.who("cpu", "box-9:1:a", host="box-9"))
        asked, other = (settled(visitor.open(f"/runs/{run_id}")) for _ in range(2))
        asked.locator("summary", has_text="Cancel").click()
        reason = asked.get_by_label("Reason")
        reason.fill("not finished")
        complete(conn, job)
        expect(other.locator("#run-state")).to_contain_text("1 completed")
        assert "1 completed" not in asked.locator("#run-state").inner_text()
        expect(reason).to_have_value("not finished")
        asked.keyboard.press("Escape")
        expect(asked.locator("#run-state")).to_contain_text("1 completed")
        expect(reason).to_have_value("not finished")


def test_a_paused_page_waits(visitor: Visitor, site: Site) -> None:
    with site.database() as conn:
        run_id = factories.run(conn, workflow_name="watched")
        paused, other = (settled(visitor.open("/runs")) for _ in range(2))
        paused.keyboard.press("p")
        end(conn, run_id)
        expect(row_of(other, run_id).locator(".state")).to_have_text("completed")
        assert row_of(paused, run_id).locator(".state").inner_text() == "running"
        paused.keyboard.press("p")
        expect(row_of(paused, run_id).locator(".state")).to_have_text("completed")


def test_what_is_open_stays_open(visitor: Visitor, site: Site) -> None:
    """The menu, the chosen filter and an opened question outlast the updates of a page."""
    page = settled(visitor.open("/runs"))
    page.locator("header .menu > summary").click()
    page.locator("input[name=workflow]").fill("half a na")
    with site.database() as conn:
        run_id = factories.run(conn, workflow_name="watched")
        expect(row_of(page, run_id)).to_be_visible()
    expect(page.locator("header .menu")).to_have_attribute("open", "")
    expect(page.locator("input[name=workflow]")).to_have_value("half a na")


def test_one_stream_serves_all_tabs_of_a_browser(visitor: Visitor, site: Site) -> None:
    """A browser opens six connections to a site: a stream of each tab would leave none."""
    with site.database() as conn:
        run_id = factories.run(conn, workflow_name="watched")
        visitor.streams.clear()  # of the page behind the login
        tabs = [settled(visitor.open("/runs")) for _ in range(10)]
        end(conn, run_id)
        for tab in tabs:
            expect(row_of(tab, run_id).locator(".state")).to_have_text("completed")
        tabs.append(settled(visitor.open("/runs")))
        later = factories.run(conn, workflow_name="watched")
        for tab in tabs:
            expect(row_of(tab, later)).to_be_visible()
    assert len(visitor.streams) == 1


def test_another_tab_takes_the_stream_over(visitor: Visitor, site: Site) -> None:
    first, second = (settled(visitor.open("/runs")) for _ in range(2))
    first.close()
    with site.database() as conn:
        run_id = factories.run(conn, workflow_name="watched")
        expect(row_of(second, run_id)).to_be_visible()
        end(conn, run_id)
        expect(row_of(second, run_id).locator(".state")).to_have_text("completed")


def test_a_page_says_that_it_is_not_live_and_recovers(site: Site, chromium: Browser) -> None:
    with site.visitor(chromium) as visitor:
        page = settled(visitor.open("/machines"))
        visitor.context.set_offline(True)
        expect(page.locator("#live")).to_have_text("not live since")
        expect(page.locator("table.rows").first).to_be_visible()
        visitor.context.set_offline(False)
        expect(page.locator("#live")).to_have_text("live")


def test_a_page_fetches_at_most_once_a_second(visitor: Visitor, site: Site) -> None:
    with site.database() as conn:
        page = settled(visitor.open("/runs"))

        def fetched_at() -> list[float]:
            factories.run(conn, workflow_name="watched")
            return page.evaluate(FETCHED)

        until(lambda: len(fetched_at()) > 4, every_s=0.2)
    found = page.evaluate(FETCHED)
    gaps_ms = [later - before for before, later in itertools.pairwise(found)]
    assert min(gaps_ms) > 900, found


def test_a_page_whose_session_has_ended_leads_to_the_login_and_back(
    site: Site, chromium: Browser
) -> None:
    with site.visitor(chromium) as visitor:
        page = settled(visitor.open("/queues"))
        visitor.context.clear_cookies()
        page.get_by_label("Token").fill(TOKENS["operate"])
        page.get_by_label("Your name").fill("ann")
        page.get_by_role("button", name="Log in").click()
        page.wait_for_url("**/ui/queues")
        settled(page)


def test_pages_below_the_path_of_a_proxy(site: Site, chromium: Browser) -> None:
    """Each address, the stream and the cookies have it: another one would be another site's."""
    with (
        browsers.serving(site.dsn, QUEUE_WORKFLOWS_APP_ROOT_PATH="/queue") as base,
        contextlib.closing(chromium.new_context(timezone_id="UTC")) as context,
        site.database() as conn,
    ):
        visitor = Visitor(context, f"{base}/queue").login()
        run_id = factories.run(conn, workflow_name="watched")
        page = settled(visitor.open("/runs"))
        expect(row_of(page, run_id).locator(".state")).to_have_text("running")
        end(conn, run_id)
        expect(row_of(page, run_id).locator(".state")).to_have_text("completed")
        page.keyboard.press("g")
        page.keyboard.press("q")
        page.wait_for_url(f"{base}/queue/ui/queues")
        assert {each["path"] for each in context.cookies()} == {"/queue/ui"}
        assert not visitor.noise


def test_the_title_has_the_number_of_needs(visitor: Visitor, site: Site) -> None:
    page = settled(visitor.open("/queues"))

    def number() -> int:
        found = re.match(r"\((\d+)\) ", page.title())
        return int(found[1]) if found else 0

    before = number()
    with site.database() as conn:
        conn.execute("UPDATE schedules SET error = 'no zone' WHERE name = 'weekly'")
        until(lambda: number() > before, timeout_s=60, every_s=0.2)
        conn.execute("UPDATE schedules SET error = NULL WHERE name = 'weekly'")
