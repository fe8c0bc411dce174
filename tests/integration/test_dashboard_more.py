"""Pages of jobs, queues, schedules, acts and health: usual, empty and hostile ones, and actions."""

from __future__ import annotations

import html
import json
import re
import threading
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import quote

import pytest

import queue_workflows
from queue_workflows import acts, db, failures, jobs, queues, schedules
from tests.support import constants, factories, named_statements, pages, tabled, transitions, wait
from tests.support.pages import EVIL, Browser

NOW = datetime.now(timezone.utc)
Row = dict[str, Any]
PAGES = ("/jobs", "/queues", "/schedules", "/acts", "/health")


@pytest.fixture(autouse=True)
def _app(db: Any) -> None:
    queue_workflows.configure(ingest_queues={"load"})
    queue_workflows.register_ingest_task("t", lambda args: None)


def load(conn: Any, **columns: Any) -> str:
    return factories.ingest(conn, **({"queue": "load"} | columns))["id"]


def failed(conn: Any, error: str = "no price", **columns: Any) -> str:
    return load(conn, status="failed", error=error, finished_at=NOW, **columns)


def status_of(job_id: str) -> str | None:
    row = jobs.get(job_id)
    return None if row is None else row["status"]


def done() -> list[tuple[str, str, str, str]]:
    """Actor, way, action and subject of each act, the oldest first."""
    rows = acts.list()[::-1]
    return [(row["actor"], row["via"], row["action"], row["subject"]) for row in rows]


# --- all of them -------------------------------------------------------------------------------


def test_each_page_is_empty_at_first_and_names_its_command() -> None:
    async def use(browser: Browser) -> None:
        for path, text, command in (
            ("/jobs", "No job has failed or runs", "jobs list"),
            ("/queues", "No queue is used", "queues list"),
            ("/schedules", "There is no schedule.", "schedules list"),
            ("/acts", "Nobody has changed anything on request.", "acts"),
            ("/health", "It has no result since this service was started.", "doctor"),
        ):
            with tabled.case(path):
                page = await browser.open(path)
                assert f'<code class="command">queue-workflows {command}</code>' in page
                assert f'href="/ui{path}" data-key="{path[1]}" aria-current="page"' in page
                if path != "/queues":  # the app has a queue
                    assert text in pages.words(page)

    pages.browse(use)


def test_unknown_things_are_not_found() -> None:
    async def use(browser: Browser) -> None:
        for path in (
            "/jobs/nothing", "/jobs/nothing/again", "/jobs/" + quote("a/b\x01", safe=""),
            "/schedules/nothing", "/schedules/" + quote(EVIL, safe=""),
        ):  # fmt: skip
            await browser.open(path, 404)

    pages.browse(use)


def test_an_unknown_job_leads_to_the_jobs_whose_id_begins_so(conn: Any) -> None:
    job = load(conn)
    node = factories.node(conn, factories.run(conn), "s/a")["id"]

    async def use(browser: Browser) -> None:
        for one in (job, node):
            assert f'href="/ui/jobs/{one}"' in await browser.open(f"/jobs/{one[:-2]}", 404)
        assert ">all jobs</a>" in await browser.open("/jobs/nothing", 404)

    pages.browse(use)


def test_hostile_filters_are_refused_in_a_sentence() -> None:
    async def use(browser: Browser) -> None:
        for path, status in (
            ("/jobs?status=nothing", 422), ("/jobs?before=x", 422), (f"/jobs?before={2**63}", 422),
            (f"/jobs?queue={quote(EVIL)}", 200), (f"/jobs?key={quote(EVIL)}", 200),
            ("/jobs?task=%ED%A0%80&status=failed", 400), ("/jobs?queue=" + "x" * 2000, 422),
            ("/jobs?node=x", 422), ("/jobs?node=1", 422), (f"/jobs?node=1.{10**18}", 422),
            ("/jobs?node=-1.7", 200), ("/jobs?at=x", 422), ("/jobs?at=2026-01-01T00:00Z", 200),
            ("/acts?since=never", 422), (f"/acts?actor={quote(EVIL)}", 200),
            ("/acts?subject=%ED%A0%80", 400), (f"/acts?before={2**63}", 422),
        ):  # fmt: skip
            with tabled.case(path):
                await browser.open(path, status)

    pages.browse(use)


def test_hostile_values_run_nothing_and_every_page_opens(conn: Any) -> None:
    job = failed(conn, EVIL, id=f"{EVIL}/?#", task_name=EVIL, lock_key=EVIL, args={EVIL: EVIL})
    load(conn, task_name=EVIL, idempotency_key=EVIL, partition_key=EVIL)
    factories.node(conn, factories.run(conn), EVIL, node_module=EVIL)
    transitions.claim(conn, transitions.who("cpu", "w1", host=EVIL[:100]))
    factories.insert(conn, "queue_settings", queue=EVIL, paused_at=NOW, paused_by=EVIL)
    factories.insert(conn, "queue_partitions", queue="load", partition_key=EVIL, max_running=1)
    factories.insert(
        conn, "schedules", name=f"{EVIL}/?#", expression=EVIL, tz=EVIL, task_name=EVIL, queue=EVIL,
        error=EVIL,
    )  # fmt: skip
    factories.insert(
        conn, "schedule_fires", name=f"{EVIL}/?#", fire_at=NOW, job_id=EVIL, skipped=EVIL
    )
    for kind in ("run", "job", "queue", "schedule", "machine", EVIL):
        factories.insert(
            conn, "operator_acts", actor=EVIL, action=EVIL[:100], kind=kind[:100], subject=EVIL,
            reason=EVIL, detail={EVIL: EVIL},
        )  # fmt: skip

    async def use(browser: Browser) -> None:
        for path in PAGES:
            await browser.open(path)
        for queue in ("load", EVIL):
            await browser.open("/queues", queue=queue)
        where = quote(job, safe="")
        await browser.open(f"/jobs/{where}")
        await browser.open(f"/jobs/{where}/again")
        await browser.open("/schedules/" + quote(f"{EVIL}/?#", safe=""))
        page = await browser.open("/jobs")
        links = {html.unescape(one) for one in re.findall(r'href="(/ui/jobs/[^"]+)"', page)}
        assert len(links) == 2
        for link in links:
            await browser.open(link.removeprefix("/ui"))

    pages.browse(use)


def test_the_scope_look_sees_states_and_no_values(conn: Any) -> None:
    job = failed(conn, "value hush is wrong", args={"x": "hush"}, lock_key="key-hush", seconds=1.0)
    load(conn, partition_key="key-hush")
    queues.pause("load", by="ann-hush", reason="reason-hush")
    queues.limit("load", partition="key-hush", max_running=1)
    schedules.add("nightly", "0 3 * * *", task_name="t", queue="load")
    conn.execute("UPDATE schedules SET error = 'error hush'")
    failures.mark_seen("ValueError: hush", NOW)

    async def use(browser: Browser) -> None:
        for path in (*PAGES, f"/jobs/{job}", "/queues?queue=load", "/schedules/nightly"):
            page = await browser.open(path)
            assert "hush" not in page, path
            assert not re.search(r'action="/ui/(jobs|queues|schedules|health)/', page), path
        for path in (
            "/jobs?key=key-hush", "/acts?actor=ann-hush", "/acts?subject=ValueError%3A+hush",
            "/acts?kind=failures&subject=ValueError%3A+hush", f"/jobs/{job}/again",
            f"/jobs/{job}/value?name=inputs",
        ):  # fmt: skip
            await browser.open(path, 403)
        assert "pause" in pages.words(await browser.open("/acts?kind=queue&subject=load"))

    pages.browse(use, "look")


def test_the_redactor_of_an_app_hides_reasons_and_causes(
    conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = factories.run(conn)
    factories.insert(
        conn, "operator_acts", actor="ann", action="retry", kind="run", subject=run_id,
        reason="customer 4711",
    )  # fmt: skip
    schedules.add("nightly", "0 3 * * *", task_name="t", queue="load")
    conn.execute("UPDATE schedules SET error = 'customer 4711'")
    factories.insert(
        conn, "workers", worker_id="w", host_label="box", queue="load", pid=1, state="idle"
    )
    factories.insert(
        conn, "worker_controls", host_label="box", queue="load", desired_state="off",
        stop_policy="pause", requested_by="ann", reason="customer 4711",
    )  # fmt: skip
    _, job = [load(conn, lock_key="customer 4711") for _ in range(2)]

    def redactor(value: Any) -> Any:
        return value.replace("4711", "N") if isinstance(value, str) else value

    monkeypatch.setattr(queue_workflows.get_config(), "redactor", redactor)

    async def use(browser: Browser) -> None:
        for path in ("/", f"/runs/{run_id}", "/machines?host=box", "/schedules/nightly", "/acts"):
            page = await browser.open(path)
            assert "customer N" in page, path
            assert "4711" not in page, path
        for path in ("/waiting", f"/waiting?job={job}"):
            assert "4711" not in await browser.open(path), path

    pages.browse(use)


@pytest.mark.parametrize("scope", ["look", "read", "submit"])
def test_a_scope_that_may_not_act_is_refused(conn: Any, scope: str) -> None:
    job = failed(conn)
    schedules.add("nightly", "0 3 * * *", task_name="t", queue="load")
    before = done()

    async def use(browser: Browser) -> None:
        page = await browser.open("/jobs")
        (csrf,) = set(re.findall(r'name="csrf" value="([^"]*)"', page))
        form = re.findall(r'name="form" value="([^"]*)"', page)[0]
        for path in (
            f"/jobs/{job}/delete", "/queues/switch", "/queues/limit", "/schedules/pause",
            "/schedules/run", "/health/doctor", "/health/audit",
        ):  # fmt: skip
            data = {"csrf": csrf, "form": form, "queue": "load", "to": "paused"}
            reply = await browser.http.post(f"/ui{path}", data=data)
            assert (reply.status_code, "is needed" in reply.text) == (403, True), path

    pages.browse(use, scope)
    assert done() == before
    assert status_of(job) == "failed"


# --- jobs --------------------------------------------------------------------------------------


def test_failed_jobs_of_both_families_come_first(conn: Any) -> None:
    run_id = factories.run(conn, workflow_name="nightly")
    factories.node(conn, run_id, "cut", status="failed", error="no disk", finished_at=NOW)
    factories.node(conn, factories.run(conn), "runs")
    transitions.claim(conn, transitions.who("cpu", "w1", host="box-1"))
    bad, waits = failed(conn), load(conn, lock_key="row-7")

    async def use(browser: Browser) -> None:
        words = pages.words(await browser.open("/jobs"))
        places = [words.index(text) for text in ("no disk", "Nodes of runs: running", waits)]
        assert places == sorted(places)
        assert words.index(bad) < words.index("Nodes of runs")
        assert words.count(bad) == 1
        only = pages.words(await browser.open("/jobs?status=failed"))
        assert bad in only and "no disk" in only and waits not in only and "box-1" not in only
        assert "no disk" in pages.words(await browser.open("/jobs?task=nightly"))
        keyed = pages.words(await browser.open("/jobs?key=row-7"))
        assert waits in keyed and bad not in keyed
        queued = await browser.open("/jobs?queue=load&status=queued")
        assert waits in queued and bad not in pages.words(queued)
        assert "queue-workflows jobs list --queue load --status queued" in queued
        assert "No job matches" in pages.words(await browser.open("/jobs?queue=none"))

    pages.browse(use)


def test_a_long_list_has_pages_that_keep_the_filter(conn: Any) -> None:
    ids = [load(conn) for _ in range(60)]

    async def use(browser: Browser) -> None:
        page = await browser.open("/jobs?queue=load")
        assert [one for one in ids if f'id="job-{one}"' in page] == ids[10:]
        older = await browser.open(pages.next_page(page) or "")
        assert [one for one in ids if f'id="job-{one}"' in older] == ids[:10]
        assert 'rel="next"' not in older

    pages.browse(use)


def test_live_nodes_are_read_by_the_indexes_of_their_states(conn: Any) -> None:
    conn.execute(
        "INSERT INTO workflow_node_jobs (run_id, node_id, node_module, queue, status, finished_at)"
        " SELECT %s, 'n' || n, 'm', 'cpu', 'completed', now() FROM generate_series(1, 2000) n",
        [factories.run(conn)],
    )
    conn.execute("ANALYZE workflow_node_jobs")  # else the statistics are those of an earlier test
    text = b"EXPLAIN " + named_statements.texts()["pages.node_jobs"]
    given: Row = {"queue": None, "task": None, "key": None, "limit": 50}
    for status, index in (("running", "_running_idx"), ("queued", "_claim_idx")):
        for place in ({"priority": None, "seq": None}, {"priority": 100, "seq": 7}):
            plan = str(conn.execute(text, given | place | {"status": status}).fetchall())
            assert f"workflow_node_jobs{index}" in plan, plan
            assert "Seq Scan" not in plan, plan


async def rows_of_pages(browser: Browser, address: str | None) -> list[list[str]]:
    """Return the ids of the jobs of each page, from an address on."""
    found: list[list[str]] = []
    while address is not None:
        page = await browser.open(address)
        found.append(re.findall(r'<tr id="job-([^"]*)"', page))
        address = pages.next_page(page)
    return found


def test_nodes_come_in_pages_in_the_order_of_the_claim(conn: Any) -> None:
    conn.execute(
        "INSERT INTO workflow_node_jobs (id, run_id, node_id, node_module, queue, priority)"
        " SELECT 'j' || n, %s, 'n' || n, 'm', 'cpu', n %% 3 FROM generate_series(1, 120) n",
        [factories.run(conn)],
    )
    ids = [f"j{n}" for n in sorted(range(1, 121), key=lambda n: n % 3)]

    async def use(browser: Browser) -> None:
        found = await rows_of_pages(browser, "/jobs?status=queued&queue=cpu")
        assert [len(page) for page in found] == [50, 50, 20]
        assert [one for page in found for one in page] == ids
        page = await browser.open("/jobs?status=queued")
        assert '<code class="command">queue-workflows why</code>' in page

    pages.browse(use)


def test_failed_jobs_come_in_pages_that_skip_and_repeat_none(conn: Any) -> None:
    ids = [failed(conn) for _ in range(30)]  # all at the same time
    run_id = factories.run(conn)
    nodes = [
        factories.node(conn, run_id, f"n{n}", status="failed", finished_at=NOW - timedelta(hours=n))
        for n in range(30)
    ]

    async def use(browser: Browser) -> None:
        found = await rows_of_pages(browser, "/jobs?status=failed")
        assert [len(page) for page in found] == [25, 25, 10]
        wanted = sorted([*ids, nodes[0]["id"]]) + [row["id"] for row in nodes[1:]]
        assert [one for page in found for one in page] == wanted

    pages.browse(use)


def test_a_search_for_jobs_says_how_far_it_went(conn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    constants.put(monkeypatch, "service.dashboard.jobs_page.EXAMINED", 10)
    constants.put(monkeypatch, "failures.NEWEST", 10)
    old = load(conn, lock_key="sought")
    ends = [{"status": "failed", "finished_at": NOW - timedelta(minutes=n)} for n in range(16)]
    lost = load(conn, queue="fetch", **ends.pop())
    for end in ends:
        load(conn)
        load(conn, **end)

    async def use(browser: Browser) -> None:
        page = await browser.open("/jobs?key=sought")
        assert "No job matches" in pages.words(page)
        assert "searched 10 jobs, back to 20" in pages.words(page)
        assert await rows_of_pages(browser, "/jobs?key=sought") == [[], [], [], [old]]
        page = await browser.open("/jobs?status=failed&queue=fetch")
        assert "searched 10 failed jobs" in pages.words(page)
        assert await rows_of_pages(browser, "/jobs?status=failed&queue=fetch") == [[], [lost]]

    pages.browse(use)


def test_a_page_of_failed_jobs_has_the_one_that_fits_behind_many_others(
    conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants.put(monkeypatch, "service.dashboard.jobs_page.QUICK", 5)
    for _ in range(12):
        failed(conn)
    old = load(conn, queue="fetch", status="failed", finished_at=NOW - timedelta(hours=1))

    async def use(browser: Browser) -> None:
        assert await rows_of_pages(browser, "/jobs?status=failed&queue=fetch") == [[old]]
        (page,) = await rows_of_pages(browser, "/jobs?status=failed")
        assert len(page) == 13

    pages.browse(use)


def test_a_search_goes_on_behind_many_jobs_that_failed_at_once(
    conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants.put(monkeypatch, "failures.NEWEST", 10)
    for _ in range(12):
        failed(conn)
    old = load(conn, status="failed", finished_at=NOW - timedelta(hours=1))

    async def use(browser: Browser) -> None:
        found = await rows_of_pages(browser, "/jobs?status=failed")
        assert [len(page) for page in found] == [10, 0, 1]
        assert found[-1] == [old]
        address = pages.next_page(await browser.open("/jobs?status=failed"))
        assert address is not None
        words = pages.words(await browser.open(address))
        assert "not all of those that failed at 20" in words

    pages.browse(use)


def test_a_search_for_jobs_reads_the_newest_by_their_index(conn: Any) -> None:
    conn.execute(
        "INSERT INTO ingest_jobs (task_name, queue, status, finished_at)"
        " SELECT 't', 'load', 'completed', now() FROM generate_series(1, 5000) n"
    )
    conn.execute("ANALYZE ingest_jobs")
    text = b"EXPLAIN (ANALYZE) " + named_statements.texts()["pages.task_jobs"]
    given: Row = {
        "queue": "none", "task": None, "key": None, "statuses": ["queued"], "before": None,
        "most": 100, "limit": 50,
    }  # fmt: skip
    for before in (None, 4000):
        plan = str(conn.execute(text, given | {"before": before}).fetchall())
        assert "ingest_jobs_seq_idx" in plan, plan
        assert "Seq Scan" not in plan, plan


def test_the_job_of_a_node_is_shown_with_its_run(conn: Any) -> None:
    run_id = factories.run(conn)
    node = factories.node(conn, run_id, "s/a")

    async def use(browser: Browser) -> None:
        reply = await browser.http.get(f"/ui/jobs/{node['id']}")
        assert reply.status_code == 303
        assert reply.headers["location"] == f"/ui/runs/{run_id}?node=s%2Fa"
        await browser.open(f"/jobs/{node['id']}/again", 404)
        await browser.open(f"/jobs/{run_id}", 404)

    pages.browse(use)


def test_a_job_shows_its_attempts_args_and_log(conn: Any) -> None:
    job = load(conn, args={"row": 7, "password": "hidden5"})
    (claimed,) = transitions.claim(conn, transitions.who("load", "w1", host="box-1"))
    assert claimed["id"] == job

    async def use(browser: Browser) -> None:
        page = await browser.open(f"/jobs/{job}")
        words = pages.words(page)
        assert "running 0 of 1 attempts failed" in words and "box-1" in words
        assert '"row": 7' in words and "hidden5" not in page
        assert "/delete" not in page, "a running job is not deleted"
        assert f"queue-workflows jobs show {job}" in page

    pages.browse(use)


def test_large_values_and_logs_of_a_job_are_downloads(conn: Any) -> None:
    big = "y" * 100_000
    job = load(conn, args={"big": big, "password": "hidden5"})
    (claimed,) = transitions.claim(conn, transitions.who("load", "w1", host="box-1"))
    transitions.complete(conn, claimed, big=big)
    factories.insert(
        conn, "job_attempt_logs", job_table="ingest_jobs", job_id=job, claim_no=1,
        head="h" * 40_000, tail="t" * 40_000, cut_bytes=7,
    )  # fmt: skip
    other = load(conn, args={"big": 3 * big})

    async def use(browser: Browser) -> None:
        page = await browser.open(f"/jobs/{job}")
        assert len(page) < 30_000
        huge = pages.words(await browser.open(f"/jobs/{other}"))
        assert "Download the args : they are too large" in huge and "characters" not in huge
        for name, part in (("inputs", big), ("output", big), ("log", "[... 7 bytes cut ...]")):
            link = f"/ui/jobs/{job}/value?name={name}"
            assert link in html.unescape(page), name
            reply = await browser.http.get(link)
            assert reply.headers["content-disposition"].startswith("attachment")
            assert part in reply.text and "hidden5" not in reply.text
            assert name == "log" or json.loads(reply.text)["big"] == big
        await browser.open(f"/jobs/{other}/value?name=log", 404)
        await browser.open(f"/jobs/{other}/value?name=args", 422)

    pages.browse(use)


def test_a_job_is_retried_cancelled_and_deleted(conn: Any) -> None:
    job = failed(conn)

    async def use(browser: Browser) -> None:
        page = await browser.open(f"/jobs/{job}")
        assert f"Queue job {job} again, with all its attempts." in pages.words(page)
        page = await browser.follow(
            await browser.send(page, f"/jobs/{job}/retry", label="Retry", reason="new price")
        )
        assert f"Job {job}: queued." in page
        assert status_of(job) == "queued"
        page = await browser.follow(await browser.send(page, f"/jobs/{job}/cancel", label="Cancel"))
        assert status_of(job) == "cancelled"
        stale = page
        page = await browser.follow(await browser.send(page, f"/jobs/{job}/delete", label="Delete"))
        assert f"Job {job}: deleted." in page
        reply = await browser.send(stale, f"/jobs/{job}/retry", label="Retry")
        assert "unknown, there is no such job" in await browser.follow(reply)

    pages.browse(use)
    assert status_of(job) is None
    assert done() == [("ann", "http", name, job) for name in ("retry", "cancel", "delete")]
    assert acts.list(action="retry")[0]["reason"] == "new price"


def test_another_job_is_queued_with_changed_args(conn: Any) -> None:
    job = failed(conn, args={"row": 7}, priority=5, partition_key="p", lock_key="l")
    hidden = failed(conn, args={"password": "hidden5"})

    async def use(browser: Browser) -> str:
        page = await browser.open(f"/jobs/{job}/again")
        assert '"row": 7' in html.unescape(page)
        for bad in ("{", "[1]", ""):
            reply = await browser.send(page, f"/jobs/{job}/again", args=bad)
            assert reply.status_code == 422, bad
            page = await browser.open(f"/jobs/{job}/again")
        reply = await browser.send(page, f"/jobs/{job}/again", args='{"row": 8}')
        assert "is queued." in await browser.follow(reply)
        masked = await browser.open(f"/jobs/{hidden}/again")
        assert "hidden5" not in masked and "<textarea" not in masked
        return reply.headers["location"].partition("?")[0].rpartition("/")[2]

    made = jobs.get(pages.browse(use), kind="ingest")
    assert made is not None
    assert (made["args"], made["priority"], made["queue"], made["status"]) == (
        {"row": 8}, 5, "load", "queued",
    )  # fmt: skip
    assert (made["partition_key"], made["lock_key"]) == ("p", "l")
    assert made["headers"] == {"again_of": job}


# --- runs --------------------------------------------------------------------------------------


def test_runs_are_found_by_schedule_and_machine(conn: Any) -> None:
    one, two = factories.run(conn), factories.run(conn)
    factories.insert(conn, "schedule_fires", name="night/ly", fire_at=NOW, run_id=one)
    factories.node(conn, two, status="completed", host_label=EVIL)

    async def use(browser: Browser) -> None:
        for query, has_one, has_two in (
            ("schedule=night%2Fly", True, False), (f"machine={quote(EVIL)}", False, True),
            (f"machine={quote(EVIL)}&schedule=night%2Fly", False, False), ("machine=", True, True),
        ):  # fmt: skip
            with tabled.case(query):
                page = await browser.open(f"/runs?{query}")
                assert (f"run-{one}" in page, f"run-{two}" in page) == (has_one, has_two)
        page = await browser.open("/runs?schedule=night%2Fly")
        assert "queue-workflows runs --schedule night/ly</code>" in page
        assert 'name="schedule" value="night/ly"' in page
        folded = "<summary>By time, schedule or machine</summary>"
        assert f"<details open>{folded}" in page
        assert f"<details>{folded}" in await browser.open("/runs?status=running")

    for scope in ("operate", "look"):
        pages.browse(use, scope)


def test_rows_that_are_fetched_again_need_one_statement(
    conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = factories.run(conn, workflow_name="nightly")

    async def use(browser: Browser) -> None:
        assert "The last 1 run" in pages.words(await browser.open("/runs", workflow="nightly"))
        calls = named_statements.executed(monkeypatch)
        assert f"run-{run_id}" in await browser.part("/runs", workflow="nightly")
        assert len(calls) == 1, calls

    pages.browse(use)


def test_the_error_of_a_run_may_be_very_long(conn: Any) -> None:
    factories.run(conn, status="failed", error="E: " + "x" * 1_000_000)
    page = pages.opened("/runs")
    assert "E: xxx" in page
    assert len(page) < 150_000


# --- queues ------------------------------------------------------------------------------------


def test_a_queue_shows_what_waits_and_is_paused_and_resumed_with_undo(conn: Any) -> None:
    for number in range(3):
        load(conn, available_at=NOW + timedelta(hours=1) if number == 0 else None)

    def state() -> tuple[str, bool]:
        row = queues.get("load")
        return row["state"], row["paused_until"] is None

    async def use(browser: Browser) -> None:
        page = await browser.open("/queues")
        assert re.search(r"load open 0 2 0 0 1 ", pages.words(page))
        assert "3 jobs wait." in pages.words(page)
        assert 'action="/ui/queues/switch"' in await browser.part("/queues")
        reply = await browser.send(page, "/queues/switch", label="Pause", queue="load", reason="x")
        page = await browser.follow(reply)
        assert "Paused queue load." in page
        assert state() == ("paused", True)
        page = await browser.follow(await browser.send(page, "/queues/switch", label="Undo"))
        assert state() == ("open", True)
        queues.pause("load", until=timedelta(hours=2), by="bob")
        page = await browser.open("/queues")
        assert "by bob" in pages.words(page)
        assert "3 jobs wait, 3 of them in paused queues: load." in pages.words(page)
        page = await browser.follow(
            await browser.send(page, "/queues/switch", label="Resume", queue="load")
        )
        assert state() == ("open", True)
        await browser.follow(await browser.send(page, "/queues/switch", label="Undo"))
        assert state() == ("paused", False), "until the same time"

    pages.browse(use)
    assert acts.list(action="pause")[-1]["reason"] == "x"


def test_the_limits_of_a_queue_are_set_and_removed(conn: Any) -> None:
    load(conn)
    queues.limit("load", partition="p", max_running=2)

    async def use(browser: Browser) -> None:
        page = await browser.open("/queues", queue="load")
        assert re.search(
            r"Partition State Limits Actions p open Jobs at once: 2 ", pages.words(page)
        )
        page = await browser.follow(
            await browser.send(
                page, "/queues/limit", label="Set the limits", queue="load", max_running="3",
                rate="100/m", partition_max_running="", partition_rate="",
            )
        )  # fmt: skip
        assert "Set the limits of queue load." in page
        row = queues.get("load")
        assert (row["max_running"], row["rate"]) == (3, "100/m")
        undone = await browser.follow(await browser.send(page, "/queues/limit", label="Undo"))
        row = queues.get("load")
        assert (row["max_running"], row["rate"]) == (None, None)
        page = await browser.follow(await browser.send(undone, "/queues/limit", label="Undo"))
        row = queues.get("load")
        assert (row["max_running"], row["rate"]) == (3, "100/m"), "an Undo can be undone"
        for bad in ({"max_running": "x"}, {"max_running": "0"}, {"rate": "fast"}, {"rate": "100"}):
            reply = await browser.send(
                page, "/queues/limit", label="Set the limits", queue="load", **bad
            )
            assert reply.status_code == 422, bad
        page = await browser.follow(
            await browser.send(page, "/queues/limit", label="Set the limits", queue="load")
        )
        assert queues.get("load")["max_running"] is None
        reply = await browser.send(page, "/queues/switch", queue="load", partition="p", to="paused")
        page = await browser.follow(reply)
        assert "Paused queue load, partition p." in page
        reply = await browser.send(page, "/queues/switch", queue="load", to="stopped")
        assert reply.status_code == 422
        reply = await browser.send(page, "/queues/switch", queue="nothing", to="paused")
        assert reply.status_code == 422

    pages.browse(use)
    assert queues.get("load")["partitions"][0]["state"] == "paused"


# --- schedules ---------------------------------------------------------------------------------


def test_a_schedule_shows_its_next_fires_in_both_zones_and_the_last_ones(conn: Any) -> None:
    schedules.add("nightly", "0 3 * * *", tz="Asia/Tokyo", task_name="t", queue="load")
    job = load(conn, status="completed", finished_at=NOW)
    for hours, made in ((1, {"job_id": job}), (2, {"skipped": "overlap"}), (3, {"job_id": "gone"})):
        at = NOW - timedelta(hours=hours)
        factories.insert(conn, "schedule_fires", name="nightly", fire_at=at, **made)

    async def use(browser: Browser) -> None:
        listed = pages.words(await browser.open("/schedules"))
        assert "nightly" in listed and "0 3 * * * Asia/Tokyo" in listed
        assert re.search(r"The next one fires at (\S+ )?18:00:00 in ", listed)
        page = await browser.open("/schedules/nightly")
        assert len(re.findall(r"<td>[\d-]+ 03:00:00</td>", page)) == 5
        words = pages.words(page)
        assert words.count(" 18:00:00") == 5, "in the zone of the session, UTC"
        places = [words.index(text) for text in (job, "nothing: overlap", "gone")]
        assert places == sorted(places)
        assert "deleted" in words
        assert "queue-workflows schedules preview nightly" in page

    pages.browse(use)


def test_a_schedule_beyond_the_end_of_the_list_has_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    constants.put(monkeypatch, "schedules.MOST", 1)
    for name in ("a", "b"):
        schedules.add(name, "0 3 * * *", task_name="t", queue="load")
    schedules.set([schedules.ScheduleEntry("old", 5, "t", "load")])

    async def use(browser: Browser) -> None:
        assert ">b</a>" not in await browser.open("/schedules")
        for name in ("b", "old"):
            words = pages.words(await browser.open("/schedules", name=name))
            assert "Starts t on load" in words, name
        for name in ("", " ", "c", "x" * 1000):
            await browser.open("/schedules", 404, name=name)

    pages.browse(use)


def test_a_schedule_is_paused_resumed_and_fired(conn: Any) -> None:
    schedules.add("a/b", "0 3 * * *", task_name="t", queue="load")
    factories.empty(conn, "operator_acts")
    where = "/schedules/a%2Fb"

    def is_paused() -> bool:
        (row,) = schedules.list()
        return row["paused"]

    async def use(browser: Browser) -> None:
        page = await browser.open(where)
        assert "Start t now, beside the instants of the schedule." in pages.words(page)
        page = await browser.follow(await browser.send(page, "/schedules/pause", label="Pause"))
        assert is_paused()
        assert "It is paused: instants of the pause never fire." in page
        page = await browser.follow(await browser.send(page, "/schedules/resume", label="Undo"))
        assert not is_paused()
        page = await browser.follow(await browser.send(page, "/schedules/run", label="Run now"))
        assert "Schedule a/b has fired." in page
        page = await browser.follow(await browser.send(page, "/schedules/run", label="Run now"))
        assert "Schedule a/b made nothing: overlap." in page
        assert "<h2>Error</h2>" not in page

    pages.browse(use)
    assert [row["task_name"] for row in factories.ingest_jobs()] == ["t"]
    assert done() == [("ann", "http", name, "a/b") for name in ("pause", "resume", "run now")]


def test_a_form_whose_reply_was_lost_acts_once(conn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    constants.put(monkeypatch, "service.dashboard.forms.REPEAT_S", 0.0)
    schedules.add("nightly", "0 3 * * *", task_name="t", queue="load")
    fire = schedules.fire_now

    def lost(name: str) -> Any:
        fire(name)
        raise db.OperationalError("the connection was lost after the COMMIT")

    async def use(browser: Browser) -> None:
        page = await browser.open("/schedules/nightly")
        with monkeypatch.context() as own:
            own.setattr(schedules, "fire_now", lost)
            reply = await browser.send(page, "/schedules/run", label="Run now")
        assert reply.status_code == 503
        reply = await browser.send(page, "/schedules/run", label="Run now")
        assert (reply.status_code, "its outcome is not known" in reply.text) == (409, True)

    pages.browse(use)
    assert len(factories.ingest_jobs()) == 1


def test_the_list_of_schedules_names_problems(conn: Any) -> None:
    for name in ("gone", "wrong", "still"):
        schedules.add(name, "every 1h", task_name="t", queue="load")
    conn.execute("UPDATE schedules SET gone_at = now() WHERE name = 'gone'")
    conn.execute("UPDATE schedules SET error = 'no zone' WHERE name = 'wrong'")
    conn.execute("UPDATE schedules SET paused = true WHERE name = 'still'")
    words = pages.words(pages.opened("/schedules"))
    assert "gone from the code" in words and "cannot fire: no zone" in words and "paused" in words
    assert "1 of 3 schedules needs you: wrong." in words


# --- acts --------------------------------------------------------------------------------------


def test_acts_are_filtered_and_link_to_what_they_changed(conn: Any) -> None:
    job = failed(conn)
    jobs.retry(job, by="ann", reason="new price")
    queues.pause("load", by="bob")

    async def use(browser: Browser) -> None:
        page = await browser.open("/acts")
        words = pages.words(page)
        assert words.index("pause") < words.index("retry"), "the newest first"
        assert "new price" in words and f'href="/ui/jobs/{job}"' in page
        for query, has_ann, has_bob in (
            ("actor=bob", False, True), ("action=retry", True, False), ("kind=queue", False, True),
            (f"kind=job&subject={job}", True, False), ("since=1h", True, True),
        ):  # fmt: skip
            with tabled.case(query):
                words = pages.words(await browser.open(f"/acts?{query}"))
                assert ("new price" in words, " bob " in words) == (has_ann, has_bob)
        page = await browser.open("/acts?actor=nobody&since=1h")
        assert "No act matches" in pages.words(page)
        assert "queue-workflows acts --since 1h --actor nobody" in page

    pages.browse(use)


def test_many_acts_come_in_pages(conn: Any) -> None:
    for number in range(60):
        factories.insert(
            conn, "operator_acts", actor="ann", action="retry", kind="job", subject=f"job {number}."
        )

    async def use(browser: Browser) -> None:
        page = await browser.open("/acts?kind=job")
        assert "job 59." in page and "job 10." in page and "job 9." not in page
        older = await browser.open(pages.next_page(page) or "")
        assert "job 9." in older and "job 10." not in older and 'rel="next"' not in older

    pages.browse(use)


# --- health ------------------------------------------------------------------------------------


def test_health_has_the_schema_tables_retention_and_versions(conn: Any) -> None:
    words = pages.words(pages.opened("/health"))
    version = factories.one(conn, "SELECT max(version) FROM queue_schema_version")
    assert f"ok at version {version}" in words
    assert "Doctor and audit have no result yet." in words
    assert f"queue_workflows {queue_workflows.__version__}, Python" in words
    for text in ("RUN_RETENTION_DAYS 365 days", "workflow_runs", "Dead rows"):
        assert text in words, text


def test_doctor_and_audit_run_on_request_and_keep_their_results(conn: Any) -> None:
    run_id = factories.run(conn, status="completed", finished_at=NOW - timedelta(hours=1))
    factories.node(conn, run_id, "left")

    async def use(browser: Browser) -> None:
        page = await browser.open("/health")
        for name in ("doctor", "audit"):
            reply = await browser.send(page, f"/health/{name}", label=f"Run {name}")
            page = await browser.follow(reply)
            assert f"The result of {name} is below." in page
        words = pages.words(await browser.open("/health"))
        assert words.count("As of ") == 2
        assert re.search(r"Doctor found (no|\d+) problems?\. Audit found \d+ problems?\.", words)
        assert re.search(r"(ok|warning) dead rows ", words)
        assert "ok terminal stays The status of a terminal job never changes" in words
        assert "error run agrees A completed run has only" in words
        assert f"{run_id}: completed with node left" in words

    pages.browse(use)
    assert not done(), "neither changes anything"


def test_a_check_that_takes_long_goes_on_without_its_reader(
    conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the service would end the request after its time, and a second one would run beside."""
    constants.put(monkeypatch, "service.dashboard.system_page.WAITS_S", 0.0)
    may_end, begun = threading.Event(), list[str]()
    findings = constants.value("admin.checks.findings")

    def slow(own: Any, purpose: str) -> Any:
        begun.append(purpose)
        assert may_end.wait(60)
        return findings(own, purpose)

    constants.put(monkeypatch, "admin.checks.findings", slow)

    async def use(browser: Browser) -> None:
        page = await browser.open("/health")
        for _ in range(2):
            reply = await browser.send(page, "/health/doctor", label="Run doctor")
            page = await browser.follow(reply)
            assert "Doctor is still running. Reload this page later for its result." in page
            assert "It is running. Reload this page for its result." in page
        may_end.set()
        deadline = wait.Deadline(30)
        while "It is running." in page:
            assert not deadline.is_over()
            page = await browser.open("/health")
        assert "Doctor found" in page
        assert begun == ["work"]

    try:
        pages.browse(use)
    finally:
        may_end.set()
