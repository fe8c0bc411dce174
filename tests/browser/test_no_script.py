"""Without JavaScript: every page, and the actions by links and forms."""

from __future__ import annotations

from collections.abc import Callable, Generator

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.browsers import Site, Visitor
from tests.browser.scenes import DETAILS, PAGES
from tests.support import factories


@pytest.fixture
def plain(site: Site, chromium: Browser) -> Generator[Visitor]:
    """A person who has logged in there, and runs no scripts."""
    with site.visitor(chromium, java_script_enabled=False) as made:
        yield made
    assert not made.noise


def test_every_page_has_its_content(plain: Visitor, site: Site) -> None:
    page = plain.context.new_page()
    for name, template in (PAGES | DETAILS).items():
        plain.open(site.scene.address(template), page)
        expect(page.locator("h1")).not_to_be_empty()
        assert len(page.locator("main").inner_text()) > 40, name
        expect(page.locator("#live")).to_have_text("as of")


def test_what_needs_scripts_is_not_shown(plain: Visitor, site: Site) -> None:
    with site.database() as conn:
        live = factories.run(conn)
    for path in (f"/runs/{live}", site.scene.address(DETAILS["node"])):
        page = plain.open(path)
        for part in (".copy", "[data-bell]", "[data-script]", "[data-close]"):
            expect(page.locator(f"{part}:visible")).to_have_count(0)
        page.close()


def test_all_pages_are_reached_by_links(plain: Visitor) -> None:
    page = plain.open("/")
    for number in range(page.locator("header nav a").count()):
        link = page.locator("header nav a").nth(number)
        where = link.get_attribute("href")
        link.click()
        page.wait_for_url(f"**{where}")
        expect(page.locator("main")).not_to_be_empty()


def test_runs_are_filtered_chosen_and_cancelled(plain: Visitor, site: Site) -> None:
    with site.database() as conn:
        ids = [factories.run(conn, workflow_name="plain") for _ in range(2)]
    page = plain.open("/runs")
    page.locator("input[name=workflow]").fill("plain")
    page.get_by_role("button", name="Filter").click()
    page.wait_for_url("**workflow=plain**")
    expect(page.locator("tr[data-row]")).to_have_count(2)
    page.locator(f'[id="run-{ids[0]}"]').get_by_role("checkbox").check()
    page.get_by_role("button", name="Cancel the chosen runs").click()
    page.get_by_role("button", name="Cancel 1 run").click()
    expect(page.locator("[data-flash]")).to_contain_text("1 cancelled")
    expect(page.locator(f'[id="run-{ids[0]}"] .state')).to_have_text("cancelled")
    expect(page.locator(f'[id="run-{ids[1]}"] .state')).to_have_text("running")


def test_a_question_is_opened_and_answered(plain: Visitor, site: Site) -> None:
    """One of its own, as other tests open that of the scene."""
    with site.database() as conn:
        run_id = factories.run(conn, workflow_name="frames")
        factories.node(
            conn, run_id, "choose", node_module="__input__choose_one", status="awaiting_input",
            inputs={"target": "answer"}, input_spec={
                "widget": "choose_one", "prompt": "Which frame", "options": ["oak", "steel"],
            },
        )  # fmt: skip
    page = plain.open("/inbox")
    question = page.locator("article", has_text="Which frame")
    question.get_by_label("steel").check()
    question.get_by_role("button", name="Answer").click()
    expect(page.locator("[data-flash]")).to_contain_text('Answered: choose takes "steel"')
    expect(question).to_contain_text("an answer has come in")


def test_failures_are_retried_and_marked_as_seen(plain: Visitor) -> None:
    page = plain.open("/failures")
    group = page.locator("tr", has_text="has no price")
    group.locator("summary", has_text="Try one first").click()
    group.get_by_role("button", name="Try one first", exact=True).click()
    expect(page.locator("[data-flash]")).to_contain_text("queued again")
    group.get_by_role("button", name="Mark as seen").click()
    expect(page.locator("[data-flash]")).to_contain_text("Hidden until it fails again")
    expect(group).to_have_count(0)
    page.locator("[data-flash]").get_by_role("button", name="Undo").click()
    expect(group).to_have_count(1)


def test_the_time_zone_is_chosen(plain: Visitor) -> None:
    page = plain.open("/acts")
    page.locator("header .menu > summary").click()
    page.get_by_label("Time zone").fill("Asia/Tokyo")
    page.get_by_role("button", name="Show times in it").click()
    expect(page.locator("header .menu > summary")).to_contain_text("Asia/Tokyo")


def test_searching_and_logging_out(plain: Visitor, site: Site) -> None:
    page = plain.open("/")
    page.get_by_role("searchbox").fill(site.scene.run)
    page.get_by_role("button", name="Go", exact=True).click()
    expect(page.locator("h1")).to_contain_text(site.scene.run)
    page.locator("header .menu > summary").click()
    page.get_by_role("button", name="Log out").click()
    page.wait_for_url("**/login**")
    plain.open("/runs", page)
    expect(page.get_by_label("Token")).to_be_visible()


def test_an_empty_system_says_how_to_begin(shown: Callable[[str], Site], chromium: Browser) -> None:
    site = shown("empty")
    with site.visitor(chromium, java_script_enabled=False) as plain:
        page = plain.open("/")
        expect(page.locator("main")).to_contain_text("Nothing needs you.")
        expect(page.locator("main")).to_contain_text("queue-workflows up --app")
