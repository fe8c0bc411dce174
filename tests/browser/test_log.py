"""The log of a node: it follows at its end, stays where somebody reads, and links to its lines."""

from __future__ import annotations

from playwright.sync_api import expect

from queue_workflows import db
from queue_workflows.types import Row
from tests.browser.browsers import Site, Visitor, settled
from tests.support import factories, transitions
from tests.support.wait import until

LINES = 200
BELOW = "log => log.scrollHeight - log.scrollTop - log.clientHeight"
"""How much of a log is below what is in view."""
SCROLLED = """log => new Promise((done) => {
  log.addEventListener("scroll", () => requestAnimationFrame(done), {once: true});
  log.scrollTo(0, 100);
})"""
NEAR_END = 24


def writing(conn: db.Connection) -> Row:
    """Insert a node that runs and has printed 200 lines; return its job."""
    run_id = factories.run(conn, workflow_name="logged")
    factories.node(conn, run_id, "write")
    (job,) = transitions.claim(conn, transitions.who("cpu", "box-9:3:a", host="box-9"))
    factories.insert(
        conn, "job_attempt_logs", job_table="workflow_node_jobs", job_id=job["id"],
        claim_no=job["claim_no"], head="".join(f"line {n}\n" for n in range(1, LINES + 1)),
    )  # fmt: skip
    return job


def append(conn: db.Connection, job: Row, text: str) -> None:
    conn.execute(
        "UPDATE job_attempt_logs SET head = head || %s, updated_at = now() WHERE job_id = %s",
        [f"{text}\n", job["id"]],
    )


def test_a_log_follows_until_somebody_scrolls_up(visitor: Visitor, site: Site) -> None:
    with site.database() as conn:
        job = writing(conn)
        page = settled(visitor.open(f"/runs/{job['run_id']}?node=write"))
        log = page.locator("pre.log")
        until(lambda: log.evaluate(BELOW) < NEAR_END)
        append(conn, job, "this is new")
        expect(log).to_contain_text("this is new")
        until(lambda: log.evaluate(BELOW) < NEAR_END)
        log.evaluate(SCROLLED)
        append(conn, job, "this is newer")
        expect(log).to_contain_text("this is newer")
        assert log.evaluate("log => log.scrollTop") == 100


def test_a_link_to_a_line_shows_it_also_when_the_log_grows(visitor: Visitor, site: Site) -> None:
    with site.database() as conn:
        job = writing(conn)
        page = settled(visitor.open(f"/runs/{job['run_id']}?node=write#L3"))
        line, last = page.locator("#L3"), page.locator(f"#L{LINES}")
        expect(line).to_be_in_viewport()
        expect(last).not_to_be_in_viewport()
        append(conn, job, "this is new")
        expect(page.locator("pre.log")).to_contain_text("this is new")
        expect(line).to_be_in_viewport()
        expect(last).not_to_be_in_viewport()


def test_lines_are_wrapped_or_not_as_chosen(visitor: Visitor, site: Site) -> None:
    with site.database() as conn:
        job = writing(conn)
        page = settled(visitor.open(f"/runs/{job['run_id']}?node=write"))
        log, box = page.locator("pre.log"), page.get_by_label("Wrap long lines")
        expect(log).to_have_css("white-space", "pre-wrap")
        box.uncheck()
        expect(log).to_have_css("white-space", "pre")
        append(conn, job, "this is new")
        expect(log).to_contain_text("this is new")
        expect(box).not_to_be_checked()
        expect(log).to_have_css("white-space", "pre")
