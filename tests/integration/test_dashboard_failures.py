"""The pages of failures and of waiting jobs: usual, empty and hostile ones, and their actions."""

from __future__ import annotations

import base64
import html
import re
import string
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

import queue_workflows
from queue_workflows import acts, failures
from tests.support import factories, named_statements, pages, transitions
from tests.support.pages import EVIL, Browser
from tests.support.worker_reports import report

NOW = datetime.now(timezone.utc)
Row = dict[str, Any]
PRICE = "ValueError: row # has no price"
pytestmark = pytest.mark.usefixtures("db")


def failed(conn: Any, error: str, minutes: float = 1, **columns: Any) -> str:
    given = {"status": "failed", "error": error, "finished_at": NOW - timedelta(minutes=minutes)}
    return factories.ingest(conn, **(given | columns))["id"]


def states(conn: Any) -> dict[str, str]:
    rows = conn.execute("SELECT id, status::text FROM ingest_jobs").fetchall()
    return {row["id"]: row["status"] for row in rows}


# --- failures ----------------------------------------------------------------------------------


def test_nothing_has_failed() -> None:
    assert "Nothing has failed." in pages.words(pages.opened("/failures"))


def test_groups_with_their_machines_and_trend(conn: Any) -> None:
    for n in range(3):
        failed(conn, f"ValueError: row {n} has no price", n + 1, claimed_by="box-2")
    failed(conn, "KeyError: 'x'", 9)
    page = pages.opened("/failures")
    words = pages.words(page)
    assert "2 causes of 4 failures" in words
    assert PRICE in words
    assert "all on box-2" in words
    assert page.count('<path fill="currentColor" d="M') == 2
    assert "queue-workflows failures list" in page
    found = pages.words(pages.opened("/failures", queue="none"))
    assert "No failure matches:" in found
    assert "The newest 4 failures were read, back to " in found


def test_a_group_has_its_members_and_the_last_traceback(conn: Any) -> None:
    first, last = (failed(conn, f"ValueError: row {n} has no price", 3 - n) for n in (1, 2))
    factories.insert(
        conn, "ingest_job_events", job_id=last, event_type="failed",
        detail={"traceback": "File x.py, line 7"},
    )  # fmt: skip
    name = failures.group_id(PRICE)

    async def use(browser: Browser) -> None:
        words = pages.words(await browser.open(f"/failures/{name}"))
        assert "File x.py, line 7" in words
        assert words.index(last) < words.index(first)
        ids = await browser.http.get(f"/ui/failures/{name}?ids=1")
        assert ids.text.split() == [last, first]
        assert "attachment" in ids.headers["content-disposition"]
        await browser.open("/failures/0000000000000000", 404)
        await browser.open("/failures/" + "%2F..%2F", 404)

    pages.browse(use)


GROUP = f"/failures/{failures.group_id(PRICE)}"


@pytest.mark.parametrize("path", ["/failures", GROUP])
def test_the_jobs_that_a_page_names_are_retried_and_none_that_failed_since(
    conn: Any, path: str
) -> None:
    old = [failed(conn, f"ValueError: row {n} has no price", n + 1) for n in range(3)]
    other = failed(conn, "KeyError: 'x'", 9)

    async def use(browser: Browser) -> None:
        page = await browser.open(path)
        assert re.search(r"Retry 3 jobs of `ValueError: row # has no price`, as of \d\d:\d\d", page)
        new = failed(conn, "ValueError: row 9 has no price", -1)
        earlier = failed(conn, "ValueError: row 8 has no price", 5)  # it became visible later
        reply = await browser.send(page, "/failures/retry", label="Retry all 3")
        shown = await browser.follow(reply)
        assert "3 queued again." in shown
        left = {other: "failed", new: "failed", earlier: "failed"}
        assert states(conn) == dict.fromkeys(old, "queued") | left
        again = await browser.send(page, "/failures/retry", label="Retry all 3")
        assert again.headers["location"] == reply.headers["location"], "a form acts once"
        other_form = re.findall(r'name="form" value="([^"]+)"', shown)[-1]
        again = await browser.send(page, "/failures/retry", label="Retry all 3", form=other_form)
        assert "0 queued again, 3 refused: " in await browser.follow(again)
        assert states(conn) == dict.fromkeys(old, "queued") | left

    pages.browse(use)
    assert {(act["actor"], act["action"], act["via"]) for act in acts.list()} == {
        ("ann", "retry", "http")
    }


def test_of_many_jobs_the_newest_are_retried(conn: Any) -> None:
    """The groups of a list name 500 jobs together, and so does the page of a group."""
    for letter in string.ascii_lowercase[:24]:
        failed(conn, f"{letter}: x", 60)
    conn.execute(
        "INSERT INTO ingest_jobs (id, task_name, queue, status, error, finished_at)"
        " SELECT 'j' || n, 't', 'fetch', 'failed', 'ValueError: row ' || n || ' has no price',"
        " %s::timestamptz - n * interval '1 second' FROM generate_series(1, 530) n",
        [NOW],
    )

    async def use(browser: Browser) -> None:
        for path, count, failed, done in (("/failures", 20, 530, 20), (GROUP, 500, 510, 520)):
            page = await browser.open(path)
            assert f"Retry the newest {count} of {failed} jobs of" in page
            label = f"Retry the newest {count}"
            reply = await browser.send(page, "/failures/retry", label=label)
            await browser.follow(reply)
            queued = {name for name, state in states(conn).items() if state == "queued"}
            assert queued == {f"j{n}" for n in range(1, done + 1)}

    pages.browse(use)


@pytest.mark.parametrize("path", ["/failures", GROUP])
def test_one_job_of_a_group_is_retried_as_a_sample(conn: Any, path: str) -> None:
    ids = [failed(conn, f"ValueError: row {n} has no price", n + 1) for n in range(3)]

    async def use(browser: Browser) -> None:
        page = await browser.open(path)
        await browser.follow(await browser.send(page, "/failures/retry", label="Try one first"))

    pages.browse(use)
    assert states(conn) == dict.fromkeys(ids, "failed") | {ids[0]: "queued"}


def test_the_question_about_a_node_says_that_its_run_goes_on(conn: Any) -> None:
    ended: Row = {"status": "failed", "finished_at": NOW}
    run_id = factories.run(conn, **ended)
    for name in "AB":
        factories.node(conn, run_id, name, error=f"{name}: x", **ended)
    failed(conn, "C: x")
    sentence = "A node runs again with all nodes of its run that are not completed."

    async def use(browser: Browser) -> None:
        words = pages.words(await browser.open("/failures"))
        assert words.count(sentence) == 2, "the group of a task has no run"
        page = await browser.open(f"/failures/{failures.group_id('A: x')}")
        assert pages.words(page).count(sentence) == 1
        await browser.follow(await browser.send(page, "/failures/retry", label="Retry it"))

    pages.browse(use)
    assert factories.one(conn, "SELECT status FROM workflow_runs") == "queued"


def test_a_group_of_a_schedule_has_no_job_to_retry(conn: Any) -> None:
    factories.insert(conn, "schedules", name="nightly", expression="0 3 * * *", task_name="t")
    conn.execute("UPDATE schedules SET error = 'E: x'")  # an insert takes none

    async def use(browser: Browser) -> None:
        page = await browser.open(f"/failures/{failures.group_id('E: x')}")
        assert "/failures/retry" not in page
        assert 'href="/ui/schedules?name=nightly"' in page

    pages.browse(use)


def test_a_forged_selection_is_refused(conn: Any) -> None:
    failed(conn, "ValueError: row 1 has no price", 1)
    failed(conn, "KeyError: 'x'", 2)

    async def use(browser: Browser) -> None:
        page = await browser.open(GROUP)
        for text in ("", "x", "e30.x"):
            reply = await browser.send(page, "/failures/retry", selection=text)
            assert reply.status_code == 403
        retry, mark = dict.fromkeys(re.findall(r'name="selection" value="([^"]+)"', page))
        for text in (retry[:-1] + "x", mark):
            reply = await browser.send(page, "/failures/retry", selection=text)
            assert reply.status_code == 403
        reply = await browser.send(page, "/failures/retry", id="another job")
        assert reply.status_code == 403

    pages.browse(use)
    assert {*states(conn).values()} == {"failed"}


def test_a_seen_group_is_hidden_and_undo_shows_it(conn: Any) -> None:
    failed(conn, "ValueError: row 1 has no price", 1)

    async def use(browser: Browser) -> None:
        page = await browser.open("/failures")
        page = await browser.follow(await browser.send(page, "/failures/seen"))
        assert "All causes of failures are marked as seen." in page
        everything = await browser.open("/failures", seen="1")
        assert "seen by ann" in pages.words(everything)
        page = await browser.follow(await browser.send(page, "/failures/unseen"))
        assert PRICE in pages.words(page)

    pages.browse(use)


def test_a_group_is_marked_by_its_id_and_only_while_it_has_failures(
    conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def redactor(value: Any) -> Any:
        return value.replace("hush", "-") if isinstance(value, str) else value

    monkeypatch.setattr(queue_workflows.get_config(), "redactor", redactor)
    failed(conn, "ValueError: hush of row 1", 1)

    async def use(browser: Browser) -> None:
        page = await browser.open("/failures")
        selections = re.findall(r'name="selection" value="([\w-]+)', page)
        contents = [base64.urlsafe_b64decode(f"{each}===") for each in selections]
        assert contents and not any(b"hush" in each for each in contents)
        failed(conn, "ValueError: hush of row 2", 0.1)
        shown = await browser.follow(await browser.send(page, "/failures/seen"))
        assert "ValueError: - of row #" in pages.words(shown), "it has failed since"
        await browser.follow(await browser.send(shown, "/failures/seen", label="Mark as seen"))
        assert failures.list().groups == []
        seen = await browser.open("/failures", seen="1")
        factories.empty(conn, "ingest_jobs")
        assert (await browser.send(seen, "/failures/unseen")).status_code == 409

    pages.browse(use)


def test_acts_lead_back_to_the_same_address(conn: Any) -> None:
    failed(conn, "ValueError: row 1 has no price", 1)

    async def use(browser: Browser) -> None:
        page = await browser.open("/failures", seen="1")
        for label in ("Mark as seen", "Show again", "Mark as seen"):
            action = "/failures/seen" if label == "Mark as seen" else "/failures/unseen"
            reply = await browser.send(page, action, label=label)
            where = reply.headers["location"]
            assert where.startswith("/ui/failures?seen=1&did=")
            assert where.count("did=") == 1
            page = await browser.follow(reply)

    pages.browse(use)


def test_what_is_new_since_the_last_visit(conn: Any) -> None:
    failed(conn, "A: x", 60 * 24)

    async def use(browser: Browser) -> None:
        assert "new since" not in await browser.open("/failures")
        assert browser.http.cookies["queue_workflows_failures"], "the page notes the visit"
        long_ago = int((NOW - timedelta(hours=5)).timestamp())
        browser.http.cookies.set("queue_workflows_failures", f"{long_ago}.{long_ago}", path="/ui")
        failed(conn, "B: x", 1)
        page = await browser.open("/failures")
        assert page.count("new since your last visit") == 1
        assert "new since your last visit" in await browser.open("/failures"), "in the same visit"
        failed(conn, "A: x", 2)
        page = await browser.open("/failures", since="30m")
        assert "A: x" in page
        assert "new since" not in page, "the search does not reach back to the last visit"
        for text in ("x", "1.2.3", "99999999999999999999.1", "."):
            browser.http.cookies.set("queue_workflows_failures", text, path="/ui")
            await browser.open("/failures")

    pages.browse(use)


def test_a_first_visit_marks_what_began_within_the_last_hour(conn: Any) -> None:
    for minutes in (200, 5):
        failed(conn, "A: x", minutes)
    failed(conn, "B: x", 4)

    async def use(browser: Browser) -> None:
        page = pages.words(await browser.open("/failures"))
        assert page.count("new within the last hour") == 1
        assert "B: x new within the last hour" in page
        assert "This is your first visit" in page
        page = pages.words(await browser.open("/failures", since="30m"))
        assert "new within" not in page, "the search does not reach back so far"
        assert "This is your first visit" not in page

    pages.browse(use)


def test_a_cause_whose_message_says_nothing_has_an_example(conn: Any) -> None:
    failed(conn, "KeyError: 'sku_7'", 2)
    failed(conn, "KeyError: 'sku_8'", 1)
    failed(conn, "ValueError: row 7 has no price", 3)
    failed(conn, "KeyError", 4)
    words = pages.words(pages.opened("/failures"))
    assert "KeyError: '…' KeyError: 'sku_8'" in words
    assert "row 7" not in words

    async def use(browser: Browser) -> None:
        assert "sku_8" not in await browser.open("/failures")

    pages.browse(use, "look")


def test_not_all_failed_on_a_machine_while_one_is_unknown(conn: Any) -> None:
    for n, host in enumerate(("box-2", "box-2", None)):
        failed(conn, f"ValueError: row {n} has no price", n + 1, claimed_by=host)
    words = pages.words(pages.opened("/failures"))
    assert "2 on box-2 , 1 unknown" in words and "all on" not in words
    words = pages.words(pages.opened(GROUP))
    assert "3 failures, 2 on box-2" in words and "The machine of 1 is unknown." in words


def test_the_bars_of_all_causes_have_one_scale(conn: Any) -> None:
    for n in range(10):
        failed(conn, f"ValueError: row {n} has no price", 1)
    failed(conn, "KeyError: 'x'", 60)
    page = pages.opened("/failures")
    assert sorted(re.findall(r"h3v-(\d+)", page), key=int) == ["2", "20"]
    assert "its bars have one scale, up to 10 failures." in pages.words(page)


def test_news(conn: Any) -> None:
    failed(conn, "A: x", 10)
    at = (NOW - timedelta(minutes=5)).isoformat()

    async def use(browser: Browser) -> None:
        assert await browser.open("/failures/news", at=at) == ""
        failed(conn, "A: x", 1)
        await browser.http.get("/ui/failures/news", params={"at": at + "0"})
        reply = await browser.http.get("/ui/failures/news", params={"at": at, "again": "1"})
        assert "1 more failure since" in reply.text

    pages.browse(use)


def test_filters_are_kept_and_bad_ones_refused(conn: Any) -> None:
    failed(conn, "A: x", 10)

    async def use(browser: Browser) -> None:
        page = await browser.open("/failures", since="1h", queue="fetch", text="x")
        assert 'name="queue" value="fetch"' in page
        assert "--since 1h --queue fetch --text x" in page
        link = re.search(r'href="(/ui/failures/[0-9a-f]{16}\?[^"]*)"', page)
        assert link is not None and "queue=fetch" in link[1]
        for query in (
            {"since": "x"}, {"since": "2026-01-01"}, {"newest": "0"}, {"newest": "x"},
            {"newest": "10001"}, {"newest": "9" * 900}, {"queue": "x" * 1001}, {"at": "x"},
        ):  # fmt: skip
            assert (await browser.http.get("/ui/failures", params=query)).status_code == 422
        everything = await browser.open("/failures", seen="1", newest="10000")
        assert "queue-workflows failures list --newest 10000 --all" in everything
        link = re.search(r'href="/ui(/failures/[0-9a-f]{16}\?[^"]*)"', everything)
        assert link is not None
        one = await browser.open(html.unescape(link[1]))
        assert f"failures show {failures.group_id('A: x')} --newest 10000</code>" in one

    pages.browse(use)


def test_many_groups_come_in_pages_that_skip_and_repeat_none(conn: Any) -> None:
    letters = string.ascii_lowercase + "äëïö"
    for letter in letters:
        failed(conn, f"{letter}: x")  # all at the same time

    async def use(browser: Browser) -> None:
        page = await browser.open("/failures", queue="fetch")
        assert page.count('<tr>\n<td class="n"') == 25
        address = pages.next_page(page)
        assert address is not None
        failed(conn, "later: x", -1)
        rest = await browser.open(address)
        assert rest.count('<tr>\n<td class="n"') == 5
        assert 'name="queue" value="fetch"' in rest
        assert pages.next_page(rest) is None
        shown = re.findall(r">(.): x</a>", page + rest)
        assert sorted(shown) == sorted(letters)
        last = await browser.open("/failures", at=(NOW - timedelta(days=1)).isoformat())
        assert "No failure matches." in pages.words(last), "jobs were retried meanwhile"

    pages.browse(use)


def test_the_members_of_a_group_come_in_pages_that_skip_and_repeat_none(conn: Any) -> None:
    ids = [failed(conn, f"ValueError: row {n} has no price", n // 2) for n in range(30)]

    async def use(browser: Browser) -> None:
        page = await browser.open(GROUP)
        address = pages.next_page(page)
        assert address is not None
        failed(conn, "ValueError: row 31 has no price", -1)
        rest = await browser.open(address)
        shown = re.findall(r'<td><span class="ident"><a href="/ui/jobs/([^"]+)"', page + rest)
        assert sorted(shown) == sorted(ids)
        assert rest.count('<span class="ident">') == 5
        assert pages.next_page(rest) is None

    pages.browse(use)


HOSTILE = [
    EVIL, "x" * 1_000_000, "\u202e\x1b[31m", "'" * 300, "%s {0} {{x}} {% y %}",
    "\u2067rtl\u2069 \u200f", "\U0001f600" * 100,
]  # fmt: skip


def test_hostile_values(conn: Any) -> None:
    for n, text in enumerate(HOSTILE):
        failed(conn, text, n + 1, queue="q", task_name=text[:200] or "t", claimed_by=text[:100],
               id=f"{text[:50]}/?#{n}")  # fmt: skip
    run_id = factories.run(conn, id=f"{EVIL}/?#", workflow_name=EVIL)
    ended = {"status": "failed", "error": "E", "finished_at": NOW}
    factories.node(conn, run_id, EVIL, node_module=EVIL, **ended)

    async def use(browser: Browser) -> None:
        page = await browser.open("/failures")
        links = re.findall(r'href="/ui(/failures/[0-9a-f]{16})"', page)
        assert len(links) == len(HOSTILE) + 1
        for link in links:
            one = await browser.open(link)
            assert "Export the ids" in one
            await browser.open(f"{link}?ids=1")
            await browser.follow(await browser.send(one, "/failures/retry"))
        failed(conn, EVIL, 1)
        page = await browser.open("/failures", seen="1")
        await browser.follow(await browser.send(page, "/failures/seen"))
        for query in ({"text": EVIL}, {"queue": EVIL}, {"machine": "\x01"}, {"after": EVIL}):
            given: Row = query
            await browser.open("/failures", **given)

    pages.browse(use)


@pytest.mark.parametrize("name", ["since", "text", "queue", "newest", "after", "other"])
def test_a_lone_surrogate_in_an_address_is_refused(name: str) -> None:
    async def use(browser: Browser) -> None:
        for text in ("%ED%A0%80", "a%ff", "%ED%B0%80x"):
            for path in ("/failures", f"/failures/{'0' * 16}", "/jobs", "/runs", "/search"):
                await browser.open(f"{path}?{name}={text}", 400)

    pages.browse(use)


def test_the_scope_look_sees_the_type_alone(conn: Any) -> None:
    secret = "the price of Ann"
    failed(conn, f"ValueError: {secret}", 1)
    failed(conn, "Ann", 2)
    failed(conn, "Ann: lost", 2)
    failures.mark_seen("Ann", NOW, by="bob")
    ids = [failures.group_id(text) for text in (f"ValueError: {secret}", "Ann", "Ann: lost")]

    async def use(browser: Browser) -> None:
        for query in ({}, {"seen": "1"}):
            given: Row = query
            page = await browser.open("/failures", **given)
            assert "ValueError" in page
            assert "an error" in page
            assert secret not in page
            assert "Ann" not in page
            assert "bob" not in page
            assert "/failures/retry" not in page
            assert "/failures/seen" not in page
            assert not [name for name in ids if name in page], "a guess has the same id"
        for name in ids:
            await browser.open(f"/failures/{name}", 403)
            await browser.open(f"/failures/{name}?ids=1", 403)
        await browser.open("/failures", 403, text="Ann")
        await browser.open("/failures/news", 403, text="Ann", at=NOW.isoformat())

    pages.browse(use, "look")


def test_the_scope_look_pages_through_groups(conn: Any) -> None:
    texts = [f"{letter}: x" for letter in string.ascii_lowercase]
    for n, text in enumerate(texts):
        failed(conn, text, n + 1)

    async def use(browser: Browser) -> None:
        page = await browser.open("/failures")
        address = pages.next_page(page)
        assert address is not None
        rest = await browser.open(address)
        assert rest.count('<tr>\n<td class="n"') == 1
        assert not [text for text in texts if failures.group_id(text) in page + rest]

    pages.browse(use, "look")


def test_a_read_only_service_offers_no_act(conn: Any) -> None:
    failed(conn, "A: x", 1)

    async def use(browser: Browser) -> None:
        for path in ("/failures", f"/failures/{failures.group_id('A: x')}"):
            page = await browser.open(path)
            assert "/failures/retry" not in page
            assert "/failures/seen" not in page

    pages.browse(use, app_read_only=True)


def test_a_page_needs_few_statements(conn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(60):
        failed(conn, f"E{n}: x {n}", n + 1)
        factories.ingest(conn, queue=f"q{n % 20}")

    async def use(browser: Browser) -> None:
        await browser.open("/")  # reads what is in the head of each page
        calls = named_statements.executed(monkeypatch)
        group = f"/failures/{failures.group_id('E1: x #')}"
        for path in ("/failures", group, "/jobs", "/runs", "/waiting", "/inbox", "/machines"):
            calls.clear()
            await browser.open(path)
            assert len(calls) <= 6, (path, calls)
            assert all(b"LIMIT" in text or b"FROM" not in text for text in calls), path

    pages.browse(use)


# --- waiting -----------------------------------------------------------------------------------


def test_no_job_waits() -> None:
    assert "No job waits." in pages.words(pages.opened("/waiting"))


def test_waiting_jobs_and_one_of_them(conn: Any) -> None:
    report(conn, transitions.who("load", "l1", host="box"))
    *_, job = [factories.ingest(conn, queue="load") for _ in range(3)]
    factories.ingest(conn, queue="nobody")
    factories.ingest(conn, queue="still")
    factories.insert(conn, "queue_settings", queue="still", paused_at=NOW)

    async def use(browser: Browser) -> None:
        page = await browser.open("/waiting")
        words = pages.words(page)
        assert "they wait for their turn" in words
        assert "1 worker ( box ): can take them" in words
        assert "no live worker serves queue nobody" in words
        assert "queue-claim-worker --queue nobody" in words
        said = "queue still is paused, and no live worker serves its queue"
        assert re.search(rf'{said}\s+<a href="/ui/queues\?queue=still">', page)
        assert "5 jobs wait." in words
        part = await browser.part("/waiting")
        assert "no live worker serves queue nobody" in part
        one = await browser.open("/waiting", job=job["id"])
        assert "behind 2 older jobs of its priority" in pages.words(one)
        assert 'href="/ui/queues?queue=load"' in one
        await browser.open("/waiting", 404, job="nothing")
        await browser.open("/waiting", 404, job="a\x01\x7f")

    pages.browse(use)


def test_the_reason_of_most_jobs_comes_first(conn: Any) -> None:
    report(conn, transitions.who("load", "l1", host="box"))
    for queue in ("load", "still", "still", "still"):
        factories.ingest(conn, queue=queue)
    factories.insert(conn, "queue_settings", queue="still", paused_at=NOW, paused_by="bob")
    run_id = factories.run(conn)
    factories.node(conn, run_id, "each", node_module="__map__", blocked_reason="items")
    words = pages.words(pages.opened("/waiting"))
    said = "queue still is paused by bob, and no live worker serves its queue."
    assert f"4 jobs wait, besides 1 map of items. Most of them (3): {said}" in words
    words = pages.words(pages.opened("/waiting", scope="look"))
    assert "Most of them (3): paused." in words and "bob" not in words


def test_now_counts_the_jobs_that_wait_as_waiting_does(conn: Any) -> None:
    run_id = factories.run(conn)
    factories.node(conn, run_id, "each", node_module="__map__", blocked_reason="items")
    conn.execute("UPDATE workflow_node_jobs SET created_at = now() - interval '9 min'")
    factories.ingest(conn, queue="load")
    words = pages.words(pages.opened("/"))
    assert re.search(r"0 run,? 1 wait, the oldest [\d.]+ s", words), "a map needs no worker"
    assert "1 job waits, besides 1 map of items." in pages.words(pages.opened("/waiting"))


def test_hostile_values_of_waiting_jobs(conn: Any) -> None:
    report(conn, transitions.who("load", "l1", host=EVIL[:100]))
    factories.ingest(conn, queue="load", lock_key=EVIL, id=EVIL)
    factories.ingest(conn, queue="load", lock_key=EVIL)
    factories.ingest(conn, queue=EVIL[:100])

    async def use(browser: Browser) -> None:
        page = await browser.open("/waiting")
        for link in re.findall(r'href="(/ui/waiting\?[^"]*)"', page):
            await browser.open(link.removeprefix("/ui").replace("&amp;", "&"))

    pages.browse(use)


def test_the_scope_look_sees_clauses_alone(conn: Any) -> None:
    report(conn, transitions.who("load", "l1"))
    _, job = [factories.ingest(conn, queue="load", lock_key="the key of Ann") for _ in range(2)]

    async def use(browser: Browser) -> None:
        for job_id in ("", job["id"]):
            page = await browser.open("/waiting", job=job_id)
            assert "the key of Ann" not in page
            assert "locked" in page

    pages.browse(use, "look")
