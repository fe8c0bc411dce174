"""Every page: without a complaint, for narrow screens, for screen readers, and without motion."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import axe_playwright_python
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser import contact_sheet
from tests.browser.browsers import Site, Visitor, settled
from tests.browser.scenes import DETAILS, PAGES, SCENES
from tests.support import factories
from tests.support.wait import patience, until

ALL = PAGES | DETAILS
AXE = "axe.min.js"
CHECKED = {"rules": {"target-size": {"enabled": True}}, "resultTypes": ["violations"]}
"""All rules of axe that are not experimental; the one about sizes is off by default."""
BUSY = [name for name in SCENES if name != "empty"]
# Scrolled parts of a page may be wider than the screen, but not the page.
TOO_WIDE = """() => {
  const width = document.documentElement.clientWidth;
  const scrolls = (each) => {
    for (let up = each.parentElement; up; up = up.parentElement) {
      if (getComputedStyle(up).overflowX !== "visible") return true;
    }
    return false;
  };
  const wide = [...document.body.querySelectorAll("*")]
    .filter((each) => each.getBoundingClientRect().right > width + 0.5 && !scrolls(each))
    .map((each) => each.outerHTML.replace(/\\s+/g, " ").slice(0, 120));
  return document.documentElement.scrollWidth > width ? ["the page scrolls", ...wide] : [];
}"""
PAINTED = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
PAINT_MS = 500
MOVING = """() => [...document.querySelectorAll("*")].filter((each) => {
  const style = getComputedStyle(each);
  return style.animationName !== "none" || /[1-9]/.test(style.transitionDuration)
    || style.scrollBehavior === "smooth";
}).map((each) => each.outerHTML.slice(0, 80))"""


def pages_of(
    visitor: Visitor, site: Site, templates: Mapping[str, str]
) -> Iterator[tuple[str, Page]]:
    """Yield the name of each page, and the page in the only tab."""
    page = visitor.context.new_page()
    for name, template in templates.items():
        yield name, settled(visitor.open(site.scene.address(template), page))


@pytest.mark.parametrize("scene", SCENES)
def test_no_page_complains_or_asks_another_site(
    shown: Callable[[str], Site], chromium: Browser, scene: str
) -> None:
    site, given = shown(scene), dict(ALL if scene in BUSY else PAGES)
    if scene not in BUSY:
        del given["run"]  # an unknown one, whose status the browser's console notes
    with site.visitor(chromium) as visitor:
        for _, page in pages_of(visitor, site, given):
            expect(page.locator("h1")).to_be_visible()
            expect(page.locator("main")).not_to_be_empty()
        assert not visitor.noise


def test_an_unknown_page_only_has_its_status_noted(site: Site, chromium: Browser) -> None:
    with site.visitor(chromium) as visitor:
        page = settled(visitor.open("/runs/nothing"))
        expect(page.locator("main")).to_contain_text("it never was here")
        assert all("404" in each for each in visitor.noise), visitor.noise


def test_the_beginning_of_an_id_leads_to_its_run(site: Site, chromium: Browser) -> None:
    with site.database() as conn:
        run_id = factories.run(conn)
    with site.visitor(chromium) as visitor:
        page = settled(visitor.open(f"/runs/{run_id[:13]}"))
        expect(page.locator("main")).to_contain_text(f"no run {run_id[:13]}: it never was here")
        assert all("404" in each for each in visitor.noise), visitor.noise
        visitor.noise.clear()
        page.locator("main").get_by_role("link", name=run_id, exact=True).click()
        expect(page.locator("h1")).to_have_text(f"Run {run_id}")
        assert not visitor.noise


@pytest.mark.parametrize("scheme", contact_sheet.SCHEMES)
@pytest.mark.parametrize("scene", contact_sheet.SHEET)
def test_axe_finds_nothing(
    shown: Callable[[str], Site], chromium: Browser, scene: str, scheme: Any
) -> None:
    """WCAG 2.2 AA and good practice. axe is not of the page, so its policy is set aside here."""
    site = shown(scene)
    given = ALL if scene == "on fire" else PAGES
    (script,) = Path(axe_playwright_python.__path__[0]).rglob(AXE)
    found: list[str] = []
    with site.visitor(chromium, bypass_csp=True, color_scheme=scheme) as visitor:
        for name, page in pages_of(visitor, site, given):
            page.evaluate(script.read_text(encoding="utf-8"))
            result = page.evaluate("(options) => axe.run(document, options)", CHECKED)
            for rule in result["violations"]:
                places = [node["html"][:160] for node in rule["nodes"][:3]]
                found.append(f"{name}: {rule['id']} ({rule['help']}): {places}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("scene", SCENES)
def test_no_page_scrolls_sideways_on_a_narrow_screen(
    shown: Callable[[str], Site], chromium: Browser, scene: str
) -> None:
    site, given = shown(scene), ALL if scene in BUSY else PAGES
    with site.visitor(chromium, viewport={"width": 320, "height": 640}) as visitor:
        found = {
            name: wide[:4]
            for name, page in pages_of(visitor, site, given)
            if (wide := page.evaluate(TOO_WIDE))
        }
    assert not found


def test_a_narrow_screen_is_enough_to_read_a_failure_and_retry_it(
    site: Site, chromium: Browser
) -> None:
    with site.visitor(chromium, viewport={"width": 320, "height": 640}) as visitor:
        page = visitor.open("/failures")
        page.locator("table.rows a", has_text="has no price").first.click()
        expect(page.locator("main")).to_contain_text("The newest")
        page.locator("summary", has_text="Try one first").first.click()
        page.get_by_role("button", name="Try one first", exact=True).click()
        expect(page.locator("[data-flash]")).to_contain_text("queued again")
        page = visitor.open(site.scene.address(PAGES["run"]), page)
        page.get_by_role("link", name="encode-b").first.click()
        expect(page.locator("pre.log")).to_contain_text("frame 392 of 400 encoded")
        assert not visitor.noise


def test_nothing_moves_where_less_motion_is_asked_for(site: Site, chromium: Browser) -> None:
    with site.visitor(chromium, reduced_motion="reduce") as visitor:
        for name, page in pages_of(visitor, site, ALL):
            assert not page.evaluate(MOVING), name
            assert not page.evaluate("document.getAnimations().length"), name


def test_a_print_has_the_content_alone(visitor: Visitor, site: Site) -> None:
    page = settled(visitor.open(site.scene.address(PAGES["run"])))
    page.emulate_media(media="print")
    for part in ("header", "footer", ".actions", ".tabs"):
        expect(page.locator(f"{part}:visible")).to_have_count(0)
    expect(page.locator(".sentence")).to_be_visible()
    expect(page.locator("table.timeline")).to_be_visible()


def test_forced_colours_mark_the_current_page(visitor: Visitor) -> None:
    """They take away backgrounds and shadows."""
    page = settled(visitor.open("/runs"))
    current = page.locator("header nav a[aria-current]")
    expect(current).to_have_css("outline-style", "none")
    page.emulate_media(forced_colors="active")
    expect(current).to_have_css("outline-style", "solid")


def test_a_screen_reader_hears_the_summary_alone(site: Site, chromium: Browser) -> None:
    """Live regions are the sentence and messages, and no table, chart or clock."""
    with site.visitor(chromium) as visitor:
        for name, page in pages_of(visitor, site, ALL):
            for each in page.locator("[aria-live], [role=status], [role=alert], [role=log]").all():
                assert not each.locator("table, svg[role], time[id]").count(), name
                assert len(each.inner_text()) < 500, name


def test_pages_are_painted_at_once(site: Site, chromium: Browser) -> None:
    """The second time, when the browser has the styles and the server its templates."""
    with site.visitor(chromium) as visitor:
        for templates in (PAGES, PAGES):
            took = {
                name: page.evaluate(PAINTED) for name, page in pages_of(visitor, site, templates)
            }
        slow = {name: each for name, each in took.items() if each > patience(PAINT_MS)}
    assert not slow


def test_back_keeps_the_filter_and_the_place(visitor: Visitor) -> None:
    page = visitor.context.new_page()
    page.set_viewport_size({"width": 1280, "height": 420})
    settled(visitor.open("/runs?status=completed", page))
    page.evaluate("scrollTo(0, 240)")
    page.locator("tr[data-row] a[href*='/runs/']").nth(6).click()
    page.wait_for_url("**/runs/nightly-*")
    page.go_back()
    expect(page).to_have_url(re.compile(r"/runs\?status=completed$"))
    until(lambda: page.evaluate("scrollY") > 100)


def test_times_are_in_the_zone_of_the_browser(site: Site, chromium: Browser) -> None:
    with site.visitor(chromium, timezone_id="Asia/Tokyo") as visitor:
        page = settled(visitor.open("/acts"))
        expect(page.locator("header .menu > summary")).to_contain_text("Asia/Tokyo")
        shown = page.locator("main time").first
        at = datetime.fromisoformat(str(shown.get_attribute("datetime")))
        there = at.astimezone(timezone(timedelta(hours=9)))
        expect(shown).to_have_text(re.compile(f"{there:%H:%M:%S}$"))
        expect(shown).to_have_attribute("title", f"{at.astimezone(timezone.utc):%F %T} UTC")


def test_the_first_tab_leads_past_the_head(visitor: Visitor) -> None:
    page = settled(visitor.open("/runs"))
    page.keyboard.press("Tab")
    skip = page.locator(":focus")
    expect(skip).to_have_text("Skip to the content")
    expect(skip).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
