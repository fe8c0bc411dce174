"""`queue_workflows.jobs` and `queue-workflows jobs`: list, retry, cancel, delete, refusals."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from queue_workflows import config, db, errors, history, ingest_executor, jobs, node_queue, runs
from tests.support import console, factories, tabled, transitions

pytestmark = pytest.mark.usefixtures("invariants_hold")


def said(*argv: str) -> console.Done:
    """Run `jobs` as a process does that knows no app."""
    config.reset_for_tests()
    done = console.command("jobs", *argv)
    db.close_pool()
    return done


def failed(conn: Any, job_id: str, **columns: Any) -> str:
    """A job that a worker took and that failed."""
    factories.ingest(conn, id=job_id, **columns)
    fail(conn, job_id)
    return job_id


def fail(conn: Any, job_id: str, error: Exception | None = None) -> None:
    def task(reason: str) -> None:
        raise error or ValueError("no such feed")

    config.register_ingest_task("t", task)
    job = transitions.claim_ingest(conn)
    assert job["id"] == job_id
    ingest_executor.execute_ingest_job(job)


def completed(conn: Any, job_id: str, **columns: Any) -> str:
    factories.ingest(conn, id=job_id, **columns)
    transitions.complete_ingest(conn, transitions.claim_ingest(conn))
    return job_id


def statuses(conn: Any) -> dict[str, str]:
    rows = conn.execute("SELECT id, status::text FROM ingest_jobs ORDER BY seq").fetchall()
    return {row["id"]: row["status"] for row in rows}


def history_of(conn: Any, job_id: str) -> list[tuple[str, str | None]]:
    rows = conn.execute(
        "SELECT event_type, actor FROM ingest_job_events WHERE job_id = %s ORDER BY id", (job_id,)
    ).fetchall()
    return [(row["event_type"], row["actor"]) for row in rows]


def ids(rows: list[Any]) -> list[str]:
    return [row["id"] for row in rows]


# --- list ----------------------------------------------------------------------------------------


@pytest.fixture
def some(conn: Any) -> None:
    failed(conn, "dead")
    completed(conn, "done", lock_key="feed")
    factories.ingest(conn, id="waits", queue="load", idempotency_key="k-1")
    factories.ingest(conn, id="later", task_name="other", partition_key="p",
                     available_at=datetime.now(timezone.utc) + timedelta(days=1))  # fmt: skip


def test_jobs_are_found_by_queue_task_status_and_key(some: None) -> None:
    cases: list[Any] = [
        ({}, ["later", "waits", "done", "dead"]),
        ({"limit": 2}, ["later", "waits"]),
        ({"queue": "load"}, ["waits"]),
        ({"task_name": "other"}, ["later"]),
        ({"status": "failed"}, ["dead"]),
        ({"status": ["failed", "completed"], "limit": None}, ["done", "dead"]),
        ({"key": "k-1"}, ["waits"]),
        ({"key": "feed"}, ["done"]),
        ({"key": "p"}, ["later"]),
        ({"key": "t"}, []),
        ({"queue": "fetch", "status": "queued"}, ["later"]),
    ]
    for wanted, found in cases:
        with tabled.case(wanted, found):
            assert ids(jobs.list(**wanted)) == found


def test_running_jobs_are_found_by_whether_their_lease_has_lapsed(conn: Any, some: None) -> None:
    for name, lease in (("lapsed", "-1 s"), ("alive", "1 h")):
        factories.ingest(conn, id=name)
        conn.execute(
            "UPDATE ingest_jobs SET status = 'running', worker_id = 'w', claimed_by = 'w',"
            " claim_no = claim_no + 1, started_at = now(), lease_expires_at = now() + %s::interval"
            " WHERE id = %s",
            (lease, name),
        )
    assert ids(jobs.list(status="running", lost=True)) == ["lapsed"]
    assert ids(jobs.list(status=["running", "queued"], lost=False)) == ["alive", "later", "waits"]
    assert {row["id"] for row in jobs.list() if row["lost"]} == {"lapsed"}
    for job_id in ("lapsed", "alive", "dead"):
        shown, why = history.get_job(job_id), jobs.explain(job_id)
        assert shown is not None and why is not None
        assert shown["lost"] is why["lost"] is (job_id == "lapsed")


def test_since_is_the_last_that_happened_to_a_job(conn: Any, some: None) -> None:
    conn.execute(
        "UPDATE ingest_jobs SET created_at = now() - interval '3 hours',"
        " started_at = started_at - interval '3 hours', finished_at = CASE id"
        " WHEN 'done' THEN now() - interval '2 hours' WHEN 'dead' THEN now() END"
        " WHERE id IN ('done', 'dead')"
    )
    assert ids(jobs.list(since=timedelta(hours=1))) == ["later", "waits", "dead"]
    assert ids(jobs.list(since=timedelta(hours=2.5))) == ["later", "waits", "done", "dead"]
    moment = datetime.now(timezone.utc) - timedelta(hours=1)
    assert ids(jobs.list(since=moment, status="failed")) == ["dead"]


def test_a_status_that_there_is_not_and_a_time_without_a_zone_are_refused() -> None:
    with pytest.raises(errors.InvalidConfig, match="'lost' is none of queued, running"):
        jobs.list(status="lost")
    with pytest.raises(errors.InvalidConfig, match="no time zone"):
        jobs.list(since=datetime(2026, 1, 1))


def test_a_filter_that_is_none_is_refused_not_left_out() -> None:
    cases: list[Any] = [
        {"since": "2h"}, {"since": 3600}, {"since": timedelta.max}, {"limit": -1}, {"limit": "9"},
        {"queue": 5}, {"key": b"k"},
    ]  # fmt: skip
    for wrong in cases:
        with (
            tabled.case(wrong),
            pytest.raises(errors.InvalidConfig, match=next(iter(wrong))),
        ):
            jobs.list(**wrong)


def test_one_id_is_an_id_and_not_its_letters(conn: Any, some: None) -> None:
    (done,) = jobs.retry_many("dead", by="ann")
    assert (done["id"], done["outcome"]) == ("dead", "queued")
    assert [each["id"] for each in jobs.delete_many("later")] == ["later"]


@pytest.mark.parametrize("change", [jobs.retry_many, jobs.cancel_many, jobs.delete_many])
def test_an_invalid_id_is_unknown_or_refused(conn: Any, some: None, change: Any) -> None:
    assert [each["outcome"] for each in change(["a\x00", "\ud800"])] == ["unknown"] * 2
    assert jobs.list(queue="a\x00") == jobs.list(key="\ud800") == []
    with pytest.raises(errors.InvalidConfig, match="an id is a text"):
        change([5])


@pytest.mark.parametrize("far", ["infinity", "-infinity"])
def test_a_time_without_an_end_of_a_row_from_before_is_shown_as_the_farthest(
    conn: Any, far: str
) -> None:
    factories.ingest(conn, id="far")
    with conn.transaction():  # as a row of before there were bounds
        conn.execute("SET LOCAL session_replication_role = replica")
        conn.execute("UPDATE ingest_jobs SET available_at = %s", (far,))
    year = {"infinity": 9999, "-infinity": 1}[far]
    (row,) = jobs.list()
    for found in (row, history.get_job("far"), node_queue.get_ingest_job("far")):
        assert found is not None
        assert (found["available_at"].year, found["available_at"].tzinfo) == (year, timezone.utc)
    assert said("list").code == 0


def test_the_list_as_a_table_and_as_json(some: None) -> None:
    done = said("list", "--limit", "4")
    assert (done.code, done.err) == (0, "")
    lines = {line.split()[0]: line for line in done.out.splitlines()}
    assert lines["dead"].endswith("ValueError: no such feed")
    assert " t  " in lines["dead"] and " 1/1 " in lines["dead"] and " failed " in lines["dead"]
    assert "not due until 2" in lines["later"] and " 0/1 " in lines["later"]
    (row,) = json.loads(said("list", "--queue", "load", "--json").out)
    assert (row["id"], row["idempotency_key"], row["status"]) == ("waits", "k-1", "queued")
    assert "args" not in row and "result" not in row
    assert said("list", "--since", "90m", "--status", "failed", "--json").out.count('"id"') == 1


# --- show ----------------------------------------------------------------------------------------


def test_a_dead_job_shows_each_attempt_with_its_own_traceback(conn: Any) -> None:
    factories.ingest(conn, id="j", max_attempts=3, headers={"by": "billing"}, lock_key="feed")
    for error in (OSError("no route"), OSError("no route"), ValueError("a bad row")):
        conn.execute("UPDATE ingest_jobs SET available_at = NULL, blocked_reason = NULL")
        fail(conn, "j", error)
    shown = history.get_job("j")
    assert shown is not None
    assert [a["outcome"] for a in shown["attempts"]] == ["retried", "retried", "failed"]
    assert [a["error"] for a in shown["attempts"]] == [
        "OSError: no route", "OSError: no route", "ValueError: a bad row",
    ]  # fmt: skip
    assert [str(a["traceback"]).splitlines()[-1] for a in shown["attempts"]] == [
        "OSError: no route", "OSError: no route", "ValueError: a bad row",
    ]  # fmt: skip
    out = said("show", "j").out
    assert "ingest job j (t): failed: ValueError: a bad row" in out
    assert 'lock key feed, headers {"by": "billing"}' in out
    assert out.count("    OSError: no route\n") == 1
    assert "traceback of attempt 2: as of attempt 1" in out
    assert "traceback of attempt 3" in out and out.count("    ValueError: a bad row\n") == 1


def test_manual_changes_are_shown_with_their_author(conn: Any) -> None:
    failed(conn, "j")
    assert jobs.retry_many(["j"], by="ann@box")[0]["outcome"] == "queued"
    assert jobs.cancel_many(["j"], by="bob@box")[0]["outcome"] == "cancelled"
    shown = history.get_job("j")
    assert shown is not None
    acts = [(act["event_type"], act["actor"]) for act in shown["acts"]]
    assert acts == [("retried", "ann@box"), ("cancelled", "bob@box")]
    out = said("show", "j").out
    assert " retried by ann@box\n" in out and " cancelled by bob@box\n" in out
    assert json.loads(said("show", "j", "--json").out)["acts"][0]["actor"] == "ann@box"


def test_a_run_is_no_job(conn: Any) -> None:
    run_id = factories.run(conn)
    done = said("show", run_id)
    assert (done.code, "is a run" in done.err) == (2, True)
    assert said("show", "nothing").code == 1


@pytest.mark.parametrize("bad", ["a\x00", "\ud800"])
def test_an_id_that_no_row_can_hold_is_that_of_nothing(conn: Any, bad: str) -> None:
    reads: list[Callable[[str], object]] = [
        jobs.get, jobs.explain, jobs.cancel, runs.get, runs.output, runs.explain, runs.cancel,
        history.get_job, history.get_run, history.get_run_page,
    ]  # fmt: skip
    acts: list[Callable[[str], object]] = [
        jobs.retry, runs.retry, lambda one: runs.answer(one, "n", 1),
        lambda one: runs.answer("r", one, 1),
    ]  # fmt: skip
    assert [read(bad) for read in reads] == [None] * len(reads)
    none: Any = None  # as in a row of an app that has no job yet
    assert jobs.get(none) is runs.get(none) is None
    for act in acts:
        with pytest.raises(errors.UnknownJob):
            act(bad)


# --- retry, cancel, delete -----------------------------------------------------------------------


def test_each_job_gets_an_outcome_or_a_reason(conn: Any, some: None) -> None:
    factories.node(conn, id="n")
    answers = jobs.retry_many(["done", "dead", "n", "nobody", "dead"], by="ann")
    assert answers == [
        {"id": "done", "outcome": "refused", "status": "completed",
         "reason": "it is completed: only a failed or cancelled one is retried"},
        {"id": "dead", "outcome": "queued", "status": "failed", "reason": None},
        {"id": "n", "outcome": "refused", "status": "queued",
         "reason": "it is queued: only a failed or cancelled one is retried"},
        {"id": "nobody", "outcome": "unknown", "status": None, "reason": "there is no such job"},
    ]  # fmt: skip
    row = factories.reread(conn, {"id": "dead"})
    assert (row["status"], row["generation"], row["attempts"], row["error"]) == (
        "queued",
        1,
        0,
        None,
    )
    assert history_of(conn, "dead")[-1] == ("retried", "ann")
    assert history_of(conn, "done") == [("claimed", None), ("completed", None)]


def test_a_job_that_is_retried_has_no_count_and_no_request_of_before(conn: Any) -> None:
    failed(conn, "j")
    conn.execute(
        "UPDATE ingest_jobs SET crash_count = 1, lapse_count = 2, watchdog_retries = 1,"
        " cancel_requested_at = now()"
    )
    jobs.retry("j")
    row = factories.job(conn)
    counts = ("attempts", "crash_count", "lapse_count", "watchdog_retries")
    assert [row[name] for name in counts] == [0, 0, 0, 0]
    assert (row["status"], row["cancel_requested_at"]) == ("queued", None)


def test_waiting_jobs_are_cancelled_and_running_ones_requested_to_stop(
    conn: Any, some: None
) -> None:
    failed(conn, "dead2")
    factories.ingest(conn, id="runs")
    job = transitions.claim_ingest(conn)
    answers = jobs.cancel_many(["waits", "runs", "done"], by="ann")
    assert [one["outcome"] for one in answers] == ["cancelled", "asked to stop", "refused"]
    assert answers[2]["reason"] == "it is completed"
    assert history_of(conn, "runs")[-1] == ("cancel_requested", "ann")
    assert history_of(conn, "waits") == [("cancelled", "ann")]
    again = jobs.cancel_many(["runs"])
    assert again[0]["outcome"] == "asked to stop"
    assert len(history_of(conn, "runs")) == 2, "asked once"
    transitions.hand_back(conn, job, reason="asked")
    assert statuses(conn)["runs"] == "cancelled"


def test_running_jobs_may_be_left_alone(conn: Any) -> None:
    factories.ingest(conn, id="runs")
    transitions.claim_ingest(conn)
    (answers,) = jobs.cancel_many(["runs"], running=False)
    assert (answers["outcome"], answers["reason"]) == ("refused", "it is running")
    assert factories.reread(conn, {"id": "runs"})["cancel_requested_at"] is None


def test_deleting_spares_what_runs_and_keeps_the_history(conn: Any, some: None) -> None:
    conn.execute("UPDATE ingest_jobs SET priority = 1 WHERE id = 'later'")
    factories.ingest(conn, id="runs")
    transitions.claim_ingest(conn)
    answers = jobs.delete_many(["runs", "dead", "waits", "done"], by="ann")
    assert [one["outcome"] for one in answers] == ["refused", "deleted", "deleted", "deleted"]
    assert answers[0]["reason"] == "it is running: cancel it first"
    assert set(statuses(conn)) == {"runs", "later"}
    assert history_of(conn, "dead")[-1] == ("deleted", "ann")
    assert history_of(conn, "waits") == [("deleted", "ann")]


def test_a_call_joins_the_transaction_that_it_is_given(conn: Any, some: None) -> None:
    with conn.transaction(force_rollback=True):
        assert ids(jobs.list(status="failed", conn=conn)) == ["dead"]
        jobs.retry_many(["dead"], by="ann", conn=conn)
        jobs.cancel_many(["waits"], by="ann", conn=conn)
        jobs.delete_many(["done"], by="ann", conn=conn)
        assert statuses(conn) == {"dead": "queued", "waits": "cancelled", "later": "queued"}
    assert statuses(conn)["dead"] == "failed" and "done" in statuses(conn)


def test_many_go_in_batches_and_of_two_people_one_retries_each(conn: Any) -> None:
    names = factories.column(
        conn,
        "INSERT INTO ingest_jobs (id, task_name, queue, status, finished_at) SELECT"
        " 'j' || n, 't', 'fetch', 'failed', now() FROM generate_series(1, 1200) n RETURNING id",
    )
    answers: list[Any] = []
    people = [
        threading.Thread(target=lambda line=line: answers.extend(jobs.retry_many(line)))
        for line in (names, names[::-1])
    ]
    for person in people:
        person.start()
    for person in people:
        person.join(30)
    assert len(answers) == 2400
    assert sum(one["outcome"] == "queued" for one in answers) == 1200, "each once"
    assert set(statuses(conn).values()) == {"queued"}


# --- the commands --------------------------------------------------------------------------------


def test_a_filter_selects_dead_jobs_and_prints_their_number(conn: Any) -> None:
    for n in range(25):
        failed(conn, f"d{n}")
    completed(conn, "fine")
    factories.ingest(conn, id="c", status="cancelled", finished_at=datetime.now(timezone.utc))
    done = said("retry", "--queue", "fetch", "--since", "1h", "--dry-run")
    lines = done.out.splitlines()
    assert (done.code, lines[0], lines[1]) == (0, "would retry: 25 jobs", "  d0")
    assert lines[-1] == "  and 5 more" and len(lines) == 22
    assert statuses(conn)["d0"] == "failed"
    done = said("retry", "--queue", "fetch", "--since", "1h")
    assert (done.code, done.out, done.err) == (0, "25 queued\n", "")
    assert {s for i, s in statuses(conn).items() if i.startswith("d")} == {"queued"}
    assert (statuses(conn)["c"], statuses(conn)["fine"]) == ("cancelled", "completed")
    ((_, who),) = history_of(conn, "d0")[-1:]
    assert who and "@" in who
    assert said("retry", "--status", "cancelled", "--by", "ann").out == "job c: queued\n"
    assert history_of(conn, "c") == [("retried", "ann")]
    done = said("retry", "--queue", "fetch")
    assert (done.code, done.out) == (0, "no such jobs\n")


def test_cancel_and_delete_by_filter(conn: Any, some: None) -> None:
    factories.ingest(conn, id="runs", priority=1)
    transitions.claim_ingest(conn)
    assert said("cancel", "--status", "queued", "--task", "other").out == "job later: cancelled\n"
    done = said("cancel", "--queue", "fetch")
    assert done.out == "job runs: asked to stop\n"
    done = said("delete", "--queue", "fetch", "--json")
    assert sorted(ids(json.loads(done.out))) == ["dead", "done", "later"]
    assert set(statuses(conn)) == {"waits", "runs"}
    assert said("delete", "waits").out == "job waits: deleted\n"


def test_a_job_is_named_by_the_start_of_its_generated_id(conn: Any) -> None:
    job_id = factories.ingest(conn, id="0a1b2c3d-0000-4000-8000-000000000000")["id"]
    factories.ingest(conn, id="0a1b2c3e-0000-4000-8000-000000000000")
    assert said("cancel", "0a1b2c3d").out == f"job {job_id}: cancelled\n"
    both = said("delete", "0a1b2c3")
    assert (both.code, "'0a1b2c3' is the start of several ids" in both.err) == (2, True)
    assert said("delete", job_id[:8]).out == f"job {job_id}: deleted\n"


def test_a_filter_by_text_selects_jobs(some: None) -> None:
    assert ids(json.loads(said("list", "--text", "DEA", "--json").out)) == ["dead"]
    assert said("delete", "--text", "dea", "--dry-run").out == "would delete: 1 job\n  dead\n"


def test_a_job_that_has_begun_since_it_was_listed_as_waiting_runs_on(
    conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    factories.ingest(conn, id="begun")
    waiting = jobs.list()
    transitions.claim_ingest(conn)
    monkeypatch.setattr(jobs, "list", lambda **_: waiting)
    done = said("cancel", "--status", "queued")
    assert (done.code, "job begun: it is running" in done.err) == (1, True)
    assert factories.reread(conn, {"id": "begun"})["cancel_requested_at"] is None


def test_refusals_are_printed_on_stderr_and_change_the_exit_code(conn: Any, some: None) -> None:
    done = said("retry", "dead", "done", "no\x1b[31mbody\udcff")
    assert (done.code, done.out) == (1, "job dead: queued\n")
    assert done.err.splitlines() == [
        "queue-workflows jobs retry: job done: it is completed: only a failed or cancelled one is"
        " retried",
        r"queue-workflows jobs retry: job no\x1b[31mbody\udcff: there is no such job",
    ]
    done = said("retry", "dead", "--json")
    assert (done.code, json.loads(done.out)[0]["outcome"]) == (1, "refused")


def test_what_cannot_be_is_one_line_and_exit_code_2(some: None, conn: Any) -> None:
    cases: list[Any] = [
        (("retry",), "name jobs or give a filter: --queue"),
        (("delete", "--dry-run"), "name jobs or give a filter: --queue"),
        (("cancel", "j", "--queue", "fetch"), "not both"),
        (("list", "--since", "yesterday"), "--since yesterday should look like 90m"),
        (("retry", "--since", "2026-01-31T09:00"), "should look like 90m"),
        (("list", "--status", "dead"), "--status 'dead' is none of queued, running"),
        (("list", "--limit", "0"), "--limit"),
        (("mend",), "mend"),
    ]
    for argv, message in cases:
        with tabled.case(argv, message):
            before = statuses(conn)
            done = said(*argv)
            assert (done.code, message in done.err) == (2, True), done.err
            assert statuses(conn) == before


@pytest.mark.parametrize(
    ("age", "far", "near"),
    [
        ("50 s", "90s", "5s"),
        ("80 min", "90m", "70m"),
        ("110 min", "2h", "1h"),
        ("40 h", "2d", "1d"),
    ],
)
def test_a_list_looks_as_far_back_as_its_unit_says(
    conn: Any, age: str, far: str, near: str
) -> None:
    factories.ingest(conn, id="old")
    conn.execute("SET session_replication_role = replica")
    conn.execute(f"UPDATE ingest_jobs SET created_at = now() - interval '{age}'".encode())
    found = [json.loads(said("list", "--since", text, "--json").out) for text in (far, near)]
    assert [[row["id"] for row in rows] for rows in found] == [["old"], []]


def test_an_iso_time_with_its_zone_is_a_since(some: None) -> None:
    past, future = "2020-01-01T00:00Z", "2999-01-01T00:00+01:00"
    assert len(json.loads(said("list", "--since", past, "--json").out)) == 4
    assert json.loads(said("list", "--since", future, "--json").out) == []


def test_a_job_that_lost_its_key_is_refused_and_the_rest_is_retried(conn: Any) -> None:
    for name in ("a", "b", "c"):
        failed(conn, name, idempotency_key=f"key of {name}", idempotency_window_s=0)
    factories.ingest(conn, idempotency_key="key of b")
    done = said("retry", "--task", "t")
    assert (done.code, done.out) == (1, "job a: queued\njob c: queued\n")
    assert "job b: another job has its idempotency key by now" in done.err
    assert {i: s for i, s in statuses(conn).items() if len(i) == 1} == {
        "a": "queued", "b": "failed", "c": "queued",
    }  # fmt: skip
    assert [kind for kind, _ in history_of(conn, "a")] == ["claimed", "failed", "retried"]
    assert [kind for kind, _ in history_of(conn, "b")] == ["claimed", "failed"]
