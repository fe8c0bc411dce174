"""Questions of people, answered from the first page by visible links and fields alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from datetime import datetime, timezone

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.browsers import Site, settled
from tests.support import factories


@pytest.fixture
def burning(shown: Callable[[str], Site]) -> Site:
    """The service that shows a system on fire."""
    return shown("on fire")


@pytest.fixture
def page(burning: Site, chromium: Browser) -> Generator[Page]:
    """The page Now of a system on fire; no complaint of it or a later page is allowed."""
    with burning.visitor(chromium) as made:
        yield settled(made.open("/"))
    assert not made.noise


def go(page: Page, label: str) -> None:
    link = page.get_by_role("navigation", name="Pages").first.get_by_role("link", name=label)
    where = link.get_attribute("href")
    link.click()
    page.wait_for_url(f"**{where}")
    settled(page)


def search(page: Page, text: str) -> None:
    page.get_by_role("searchbox").first.fill(text)
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"/ui/(?!$)"))
    settled(page)


def test_why_does_this_job_wait(page: Page, burning: Site) -> None:
    search(page, burning.scene.waits)
    page.get_by_role("link", name="Why does it wait?").click()
    expect(page.locator("main .lead")).to_contain_text(re.compile("turn|limit|worker"))


def test_which_error_is_new(page: Page, burning: Site) -> None:
    """A visit half an hour later, by the cookie that says when the last one was."""
    go(page, "Failures")
    cookies = page.context.cookies()
    (visit,) = (each for each in cookies if each["name"] == "queue_workflows_failures")
    _, last = visit["value"].split(".")
    earlier = f"{int(last) - 7200}.{int(last) - 3600}"
    page.context.add_cookies([{**visit, "value": earlier}])
    with burning.database() as conn:
        conn.execute(
            "INSERT INTO ingest_jobs (task_name, queue, status, error, finished_at)"
            " VALUES ('t', 'load', 'failed', 'BrandNewError: never seen', now())"
        )
    page.reload()
    row = page.locator("tr", has_text="BrandNewError")
    expect(row).to_contain_text("new since your last visit")


def test_only_the_jobs_of_one_error_are_retried(page: Page, burning: Site) -> None:
    """Neither those of another error, nor one that fails while the question is open."""
    with burning.database() as conn:
        of_error = "SELECT count(*) FROM ingest_jobs WHERE status = 'failed' AND error LIKE %s"
        price, refused = (
            factories.one(conn, of_error, f"%{text}%") for text in ("no price", "refused")
        )
        go(page, "Failures")
        row = page.locator("tr", has_text="has no price")
        row.locator("summary", has_text=re.compile(r"Retry all \d+")).click()
        box = row.locator("details.act[open]")
        expect(box).to_contain_text("Jobs that failed since are not included.")
        late = factories.ingest(
            conn, queue="load", status="failed", error="ValueError: row 9999 has no price",
            finished_at=datetime.now(timezone.utc),
        )  # fmt: skip
        box.get_by_role("button", name=re.compile("^Retry")).click()
        expect(page.locator("[data-flash]")).to_contain_text("queued again")
        assert price > 1
        left = "SELECT id FROM ingest_jobs WHERE status = 'failed' AND error LIKE %s"
        assert factories.column(conn, left, "%no price%") == [late["id"]]
        assert factories.one(conn, of_error, "%refused%") == refused


def test_who_switched_the_machine_off(page: Page) -> None:
    go(page, "Machines")
    page.get_by_role("link", name="box-2", exact=True).click()
    expect(page.locator("main")).to_contain_text("by ann: it smells of smoke")


def test_what_the_failed_run_cost(page: Page, burning: Site) -> None:
    go(page, "Runs")
    page.locator("select[name=status]").select_option("failed")
    page.get_by_role("button", name="Filter").click()
    page.get_by_role("link", name=burning.scene.run, exact=True).click()
    expect(page.locator("main .cost")).to_contain_text(re.compile(r"\d attempts, .* lost"))
