"""Keys move, search and open, and never act."""

from __future__ import annotations

import re
import string

from playwright.sync_api import Page, expect

from tests.browser.browsers import Site, Visitor, settled
from tests.browser.scenes import PAGES


def test_the_search_box_takes_what_is_typed(visitor: Visitor, site: Site) -> None:
    page = settled(visitor.open("/queues"))
    page.keyboard.press("/")
    box = page.get_by_role("search").get_by_role("searchbox")
    expect(box).to_be_focused()
    page.keyboard.type(f"?gp{site.scene.run}")
    expect(box).to_have_value(f"?gp{site.scene.run}")
    expect(page.get_by_role("dialog")).to_have_count(0)
    box.fill(site.scene.run)
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(re.escape(site.scene.address(PAGES["run"])) + "$"))


def test_rows_are_chosen_and_opened(visitor: Visitor) -> None:
    page = settled(visitor.open("/runs"))
    runs = page.locator("tr[data-row]")
    first, second = (runs.nth(number).locator("a[href*='/runs/']").first for number in (0, 1))
    page.keyboard.press("j")
    expect(first).to_be_focused()
    page.keyboard.press("j")
    expect(second).to_be_focused()
    page.keyboard.press("k")
    expect(first).to_be_focused()
    page.keyboard.press("k")
    expect(first).to_be_focused()
    where = first.get_attribute("href")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**{where}")


def test_g_and_a_letter_lead_to_each_page(visitor: Visitor) -> None:
    page = settled(visitor.open("/health"))  # the last one, so that each key leads elsewhere
    links = page.locator("header nav a[data-key]")
    keys = {each.get_attribute("data-key"): each.get_attribute("href") for each in links.all()}
    assert len(keys) == 11
    for key, where in keys.items():
        page.keyboard.press("g")
        page.keyboard.press(str(key))
        page.wait_for_url(f"**{where}")
        settled(page)
        current = page.locator("header nav a[aria-current]")
        expect(current.first).to_have_attribute("href", str(where))


def test_the_list_of_keys(visitor: Visitor) -> None:
    page = settled(visitor.open("/"))
    for _ in range(2):
        page.keyboard.press("?")
        box = page.get_by_role("dialog")
        expect(box).to_be_visible()
        for text in ("search", "next and previous row", "g r", "pause updates"):
            expect(box).to_contain_text(text)
        page.keyboard.press("Escape")
        expect(box).to_be_hidden()
    page.keyboard.press("?")
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    expect(page.get_by_role("dialog")).to_be_hidden()


def test_keys_can_be_switched_off(visitor: Visitor) -> None:
    """Somebody who dictates, or whose keyboard slips, presses none of them on purpose."""
    page = settled(visitor.open("/runs"))
    page.get_by_role("button", name="All keys").click()
    box = page.get_by_role("dialog")
    box.get_by_label("Keys are on").uncheck()
    box.get_by_role("button", name="Close").click()
    for key in ("?", "p"):
        page.keyboard.press(key)
    expect(page.get_by_role("dialog")).to_be_hidden()
    expect(page.locator("#live")).to_have_text("live")
    page.get_by_role("button", name="All keys").click()
    box.get_by_label("Keys are on").check()
    page.keyboard.press("Escape")
    page.keyboard.press("p")
    expect(page.locator("#live")).to_have_text("paused at")


def test_updates_are_paused_and_go_on(visitor: Visitor) -> None:
    page = settled(visitor.open("/"))
    page.keyboard.press("p")
    expect(page.locator("#live")).to_have_text("paused at")
    page.keyboard.press("p")
    expect(page.locator("#live")).to_have_text("live")


def test_no_key_acts(visitor: Visitor, site: Site) -> None:
    """On the pages with most actions. Escape behind each key ends what it has begun."""
    sent = [*visitor.posts]
    keys = (*string.ascii_letters, *string.digits, "?", "Delete", "Backspace", "Control+Enter")
    page: Page | None = None
    for path in (PAGES["run"], "/failures", "/machines/{host}", "/runs"):
        page = settled(visitor.open(site.scene.address(path), page))
        for key in keys:
            page.keyboard.press(key)
            page.keyboard.press("Escape")
        page.keyboard.press("Enter")
    # Chromium may never answer if a tab is closed while its next page loads.
    settled(visitor.open("/acts", page))
    assert visitor.posts == sent
