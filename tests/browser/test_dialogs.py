"""Questions before an act: what they say, where the focus is, and that each form acts once."""

from __future__ import annotations

import contextlib
import re

from playwright.sync_api import Browser, Locator, Page, Route, expect

from tests.browser.browsers import Site, Visitor, settled
from tests.support import factories
from tests.support.wait import until

CHOICES = {"ann": "oak", "bob": "steel"}
"""Who answers a question, and with what."""


def live_run(site: Site, name: str = "w") -> str:
    """Insert a run with a node that waits; return its id."""
    with site.database() as conn:
        run_id = factories.run(conn, workflow_name=name)
        factories.node(conn, run_id, "work", blocked_reason="unserved")
        return run_id


def status(site: Site, run_id: str) -> str:
    with site.database() as conn:
        return factories.one(conn, "SELECT status FROM workflow_runs WHERE id = %s", run_id)


def question(page: Page, label: str) -> Locator:
    """Open the question of a button, and return it."""
    page.locator("summary", has_text=label).click()
    box = page.locator("details.act[open]")
    expect(box).to_have_count(1)
    return box


def test_the_safe_button_has_the_focus_and_escape_goes_back(visitor: Visitor, site: Site) -> None:
    run_id = live_run(site)
    page = settled(visitor.open(f"/runs/{run_id}"))
    box = question(page, "Cancel")
    expect(box).to_contain_text("1 of its nodes wait and are cancelled")
    safe = box.get_by_role("button", name="Leave it")
    expect(safe).to_be_focused()
    page.keyboard.press("Escape")
    expect(box).to_have_count(0)
    expect(page.locator("summary", has_text="Cancel")).to_be_focused()
    question(page, "Cancel").get_by_role("button", name="Leave it").click()
    expect(box).to_have_count(0)
    assert status(site, run_id) == "running"


def test_a_run_is_cancelled_once_with_a_reason(visitor: Visitor, site: Site) -> None:
    run_id = live_run(site)
    page = settled(visitor.open(f"/runs/{run_id}"))
    box = question(page, "Cancel")
    box.get_by_label("Reason").fill("wrong inputs")
    box.get_by_role("button", name="Cancel", exact=True).dblclick()
    expect(page.locator("[data-flash]")).to_contain_text("The run is cancelled.")
    expect(page.locator("main")).to_contain_text("cancel by ann: wrong inputs")
    assert visitor.posts.count(f"/runs/{run_id}/cancel") == 1
    assert status(site, run_id) == "cancelled"


def test_a_message_is_shown_once(visitor: Visitor, site: Site) -> None:
    run_id = live_run(site)
    page = settled(visitor.open(f"/runs/{run_id}"))
    question(page, "Cancel").get_by_role("button", name="Cancel", exact=True).click()
    expect(page.locator("[data-flash]")).to_be_visible()
    expect(page).to_have_url(re.compile(r"^[^?]*$"))
    page.reload()
    expect(page.locator("h1")).to_be_visible()
    expect(page.locator("[data-flash]")).to_have_count(0)


def test_opening_a_question_closes_the_other(visitor: Visitor) -> None:
    page = settled(visitor.open("/failures"))
    buttons = page.locator("summary", has_text="Retry")
    assert buttons.count() > 1
    buttons.nth(0).click()
    buttons.nth(1).click()
    expect(page.locator("details.act[open]")).to_have_count(1)


def test_more_than_twenty_need_their_number(visitor: Visitor, site: Site) -> None:
    ids = [live_run(site, "many") for _ in range(21)]
    page = settled(visitor.open("/runs?workflow=many"))
    page.get_by_role("checkbox", name="All runs shown").check()
    assert (
        page.get_by_role("checkbox", name="Choose run").and_(page.locator(":checked")).count() == 21
    )
    page.get_by_role("button", name="Cancel the chosen runs").click()
    expect(page.get_by_role("link", name="Leave them")).to_be_focused()
    field = page.get_by_label("Type 21 to confirm")
    field.fill("20")
    page.get_by_role("button", name="Cancel 21 runs").click()
    assert not field.evaluate("field => field.validity.valid"), "the browser refuses it"
    assert status(site, ids[0]) == "running"
    field.fill("21")
    page.get_by_role("button", name="Cancel 21 runs").click()
    expect(page.locator("[data-flash]")).to_contain_text("21 cancelled")
    assert {status(site, run_id) for run_id in ids} == {"cancelled"}


def test_a_retry_of_more_than_twenty_says_what_it_does_and_needs_no_number(
    visitor: Visitor, site: Site
) -> None:
    """It ends nothing. One that is over in another way is left out."""
    with site.database() as conn:
        ids = [factories.run(conn, workflow_name="again", status="failed") for _ in range(21)]
        done = factories.run(conn, workflow_name="again", status="completed")
    page = settled(visitor.open("/runs?workflow=again"))
    page.get_by_role("checkbox", name="All runs shown").check()
    page.get_by_role("button", name="Retry the chosen runs").click()
    expect(page.locator("main .lead")).to_contain_text(
        "Run 21 runs again: completed nodes keep their outputs. 1 of the chosen ones is left out."
    )
    expect(page.get_by_label("to confirm")).to_have_count(0)
    page.get_by_role("button", name="Retry 21 runs").click()
    expect(page.locator("[data-flash]")).to_contain_text("21 queued")
    assert {status(site, run_id) for run_id in ids} == {"queued"}
    assert status(site, done) == "completed"
    with site.database() as conn:
        # Else a bar soon says on every page that no orchestrator takes them up.
        conn.execute("UPDATE workflow_runs SET status = 'cancelled' WHERE id = ANY (%s)", [ids])


def test_of_two_answers_at_the_same_instant_one_wins_and_the_other_hears_whose(
    site: Site, chromium: Browser
) -> None:
    """Both forms are held back on their way until both are sent."""
    with site.database() as conn:
        run_id = factories.run(conn, workflow_name="frames")
        factories.node(
            conn, run_id, "choose", node_module="__input__choose_one", status="awaiting_input",
            inputs={"target": "answer"}, input_spec={
                "widget": "choose_one", "prompt": "Which frame", "options": list(CHOICES.values()),
            },
        )  # fmt: skip
    with contextlib.ExitStack() as stack:
        people, pages, held = list[Visitor](), list[Page](), list[Route]()
        for name, choice in CHOICES.items():
            context = stack.enter_context(contextlib.closing(chromium.new_context()))
            visitor = Visitor(context, site.base).login(name)
            page = settled(visitor.open(f"/inbox/question?run={run_id}&node=choose"))
            context.route("**/inbox/answer", lambda route: held.append(route))
            page.get_by_label(choice).check()
            page.get_by_role("button", name="Answer", exact=True).focus()
            people.append(visitor)
            pages.append(page)
        for page in pages:
            page.keyboard.press("Enter")

        def both_are_held() -> bool:
            for page in pages:
                page.title()  # meanwhile Playwright calls what waits for an event
            return len(held) == 2

        until(both_are_held)
        for route in held:
            route.continue_()
        query = "SELECT value FROM workflow_input_submissions WHERE run_id = %s"
        with site.database() as conn:
            (taken,) = until(lambda: factories.column(conn, query, run_id))
        faster = [*CHOICES.values()].index(taken)
        winner = [*CHOICES][faster]
        expect(pages[faster].locator("[data-flash]")).to_contain_text("Answered: choose takes")
        main = pages[1 - faster].locator("main")
        expect(main).to_contain_text(re.compile(rf"answered by {winner} \d+\.\d s ago"))
        expect(main).to_contain_text("Nothing was changed.")
        assert not people[faster].noise
        noise = people[1 - faster].noise
        assert all("409" in each for each in noise), noise


def test_a_pause_is_undone(visitor: Visitor, site: Site) -> None:
    page = settled(visitor.open("/queues"))
    row = page.locator("tr", has=page.get_by_role("link", name="mail", exact=True))
    row.locator("summary", has_text="Pause").click()
    row.get_by_role("button", name="Pause").click()
    flash = page.locator("[data-flash]")
    expect(flash).to_contain_text("Paused queue mail.")
    expect(row.locator(".state")).to_have_text("paused")
    flash.get_by_role("button", name="Undo").click()
    expect(row.locator(".state")).to_have_text("open")


def test_an_id_is_copied(visitor: Visitor, site: Site) -> None:
    visitor.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = settled(visitor.open("/runs"))
    button = page.locator("tr[data-row]").first.get_by_role("button", name="Copy")
    named = str(button.get_attribute("aria-label")).removeprefix("Copy ")
    button.click()
    expect(button).to_have_text("copied")
    assert page.evaluate("navigator.clipboard.readText()") == named


def test_a_scope_that_may_not_act_sees_no_button(site: Site, chromium: Browser) -> None:
    with site.visitor(chromium, scope="look") as visitor:
        for path in ("/runs", "/failures", "/queues", f"/machines/{site.scene.host}", "/health"):
            page = settled(visitor.open(path))
            expect(page.locator("main form[method=post] button:not(.copy)")).to_have_count(0)
            expect(page.locator("main details.act")).to_have_count(0)
            page.close()
