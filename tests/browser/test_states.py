"""Pages of what is missing: a worker, an orchestrator, samples, a log, the schema."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from playwright.sync_api import Browser, expect

from tests.browser import browsers
from tests.browser.browsers import Site, Visitor, settled
from tests.browser.scenes import PAGES
from tests.support import factories, transitions


def test_every_page_says_that_no_orchestrator_runs(
    shown: Callable[[str], Site], chromium: Browser
) -> None:
    site = shown("on fire")
    with site.database() as conn:
        # A run that started within the last minute shows that an orchestrator lives.
        conn.execute(
            "UPDATE workflow_runs SET started_at = now() - interval '2 minutes'"
            " WHERE started_at > now() - interval '2 minutes'"
        )
    with site.visitor(chromium) as visitor:
        page = visitor.context.new_page()
        for template in PAGES.values():
            settled(visitor.open(site.scene.address(template), page))
            bar = page.get_by_role("complementary", name="Alarm")
            expect(bar).to_contain_text("Runs do not go on. No orchestrator has taken up work for")
            expect(bar).to_contain_text("queue-workflows up --app")
        assert not visitor.noise


def test_a_queue_without_a_worker_has_the_command_that_starts_one(visitor: Visitor) -> None:
    page = settled(visitor.open("/waiting"))
    row = page.locator("tr", has_text="no live worker serves queue mail")
    expect(row.locator("code.command")).to_contain_text("queue-claim-worker --queue mail --app")


def test_a_machine_without_samples_says_why(
    shown: Callable[[str], Site], chromium: Browser
) -> None:
    with shown("on fire").visitor(chromium) as visitor:
        page = settled(visitor.open("/machines?host=box-3"))
        expect(page.locator("main")).to_contain_text(
            "No samples: psutil or the driver of the GPU is missing there"
        )
        assert not visitor.noise


def test_an_attempt_without_a_log_and_samples_says_why(visitor: Visitor, site: Site) -> None:
    with site.database() as conn:
        run_id = factories.run(conn, workflow_name="quiet")
        factories.node(conn, run_id, "work")
        (job,) = transitions.claim(conn, transitions.who("cpu", "box-9:4:a", host="box-9"))
        transitions.complete_node(conn, job)
        # Else a bar soon says that no orchestrator takes up its event.
        conn.execute("UPDATE workflow_dispatch_events SET processed_at = now()")
    page = settled(visitor.open(f"/runs/{run_id}?node=work"))
    main = page.locator("main")
    expect(main).to_contain_text("No log. The handler printed nothing, LOG_CAPTURE_KB is 0")
    expect(main).to_contain_text("No samples: they last a day, and need psutil")


def test_a_database_without_the_schema_has_the_command_that_makes_it(
    fresh_database: str, chromium: Browser
) -> None:
    with (
        browsers.serving(fresh_database) as base,
        contextlib.closing(chromium.new_context(java_script_enabled=False)) as context,
    ):
        visitor = Visitor(context, base).login()
        page = context.new_page()
        for path in ("/", "/runs", "/failures", "/inbox", "/waiting", "/acts"):
            visitor.open(path, page)
            expect(page.locator("main .lead")).to_have_text(
                "the database has no schema of this version; `queue-workflows migrate` makes it"
            )
        assert all("503" in each for each in visitor.noise), visitor.noise
