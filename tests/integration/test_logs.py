"""Logs of attempts: stored per claim in the background, and deleted with their job."""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import Any

import pytest

import queue_workflows
from queue_workflows import claim_worker, db, history, node_queue, run_store
from queue_workflows import jobs as jobs_api
from tests.support import console, factories, flow, lost_replies, timeouts, transitions
from tests.support.flow import Flow
from tests.support.transitions import write_log as write
from tests.support.wait import until


def texts(job_id: str) -> list[str | None]:
    """The log of each attempt."""
    job = history.get_job(job_id)
    assert job is not None
    return [attempt["log"] and attempt["log"]["text"] for attempt in job["attempts"]]


def stored(conn: db.Connection) -> int:
    return factories.one(conn, "SELECT count(*) FROM job_attempt_logs")


def test_a_bodys_log_is_stored_with_its_attempt(toy: Flow) -> None:
    def talk() -> dict[str, Any]:
        print("to stdout \0 \ud800")
        print("to stderr", file=sys.stderr)
        return {}

    flow.body(talk, name="ok")
    toy.dag(a="")
    run_id = toy.started()
    toy.work()
    (text,) = texts(flow.job(run_id, "s/a")["id"])
    assert text == "to stdout \N{REPLACEMENT CHARACTER} \\ud800\nto stderr\n"


def test_a_thread_that_a_handler_left_behind_prints_for_no_other(toy: Flow) -> None:
    go, left = threading.Event(), list[threading.Thread]()

    def late() -> None:
        assert go.wait(30)
        print("late")

    def leaves() -> None:
        left.append(threading.Thread(target=late))
        left[0].start()
        print("first")

    def talks() -> None:
        go.set()
        left[0].join()
        own = threading.Thread(target=print, args=("mine",))
        own.start()
        own.join()

    bodies = iter([leaves, talks])
    flow.body(lambda: next(bodies)(), name="ok")
    toy.dag(a="", b="a")
    run_id = toy.started()
    assert toy.work() == 2
    assert [texts(flow.job(run_id, f"s/{name}")["id"]) for name in "ab"] == [
        ["first\n"],
        ["mine\n"],
    ]


def test_a_handler_that_fails_leaves_its_log(toy: Flow) -> None:
    def talk() -> None:
        print("so far so good")
        raise ValueError

    flow.body(talk, name="ok")
    toy.dag(a="")
    run_id = toy.started()
    toy.work()
    assert texts(flow.job(run_id, "s/a")["id"]) == ["so far so good\n"]


def test_the_end_of_a_worker_stores_what_is_left(
    toy: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts.store_logs_every(monkeypatch, 600.0)
    flow.body(lambda: print("last words"), name="ok")
    toy.dag(a="")
    run_id = toy.started()
    toy.work()
    assert texts(flow.job(run_id, "s/a")["id"]) == ["last words\n"]


def test_a_silent_handler_costs_no_statement(toy: Flow, conn: db.Connection) -> None:
    toy.dag(a="", b="a")
    toy.started()
    with lost_replies.at_statement("INSERT INTO job_attempt_logs") as seen:
        assert toy.work() == 2
        assert (seen, stored(conn)) == ([], 0)
        flow.body(lambda: print("words"), name="ok")
        toy.started()
        toy.work()
        assert seen, "a handler that prints does cost one"


def test_jobs_of_a_batch_keep_their_own(db: ModuleType) -> None:
    def speak(reason: str, args: dict[str, Any]) -> None:
        if args["n"] != 1:
            print("number", args["n"])

    queue_workflows.register_ingest_task("speak", speak)
    ids = [jobs_api.enqueue(task_name="speak", queue="fetch", args={"n": n}) for n in range(3)]
    worker = claim_worker.ClaimWorker(queue="fetch", host="box", batch=3)
    thread = threading.Thread(target=worker.run_forever)
    thread.start()
    until(lambda: all((node_queue.get_ingest_job(i) or {})["status"] == "completed" for i in ids))
    worker.stop()
    thread.join()
    assert [texts(each) for each in ids] == [["number 0\n"], [None], ["number 2\n"]]


def test_each_attempt_has_its_own_log(db: ModuleType) -> None:
    tries: list[int] = []

    def speak(reason: str) -> None:
        tries.append(1)
        print("try", len(tries))
        if len(tries) == 1:
            raise ValueError

    queue_workflows.register_ingest_task("speak", speak)
    job_id = jobs_api.enqueue(task_name="speak", queue="fetch")
    with db.connect() as conn:
        conn.execute("UPDATE ingest_jobs SET max_attempts = 2")
    worker = claim_worker.ClaimWorker(queue="fetch", host="box")
    worker.run_once()
    with db.connect() as conn:
        conn.execute("UPDATE ingest_jobs SET available_at = NULL, blocked_reason = NULL")
    worker.run_once()
    assert texts(job_id) == ["try 1\n", "try 2\n"]


def test_a_log_grows_while_its_handler_runs(toy: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts.store_logs_every(monkeypatch, 0.05)
    go = threading.Event()
    seen: list[list[str | None]] = []

    def talk() -> None:
        print("first")
        assert go.wait(30)
        print("second")

    flow.body(talk, name="ok")
    toy.dag(a="")
    job_id = flow.job(toy.started(), "s/a")["id"]
    thread = threading.Thread(target=toy.work)
    thread.start()
    try:
        until(lambda: texts(job_id) == ["first\n"])
        seen.append(texts(job_id))
    finally:
        go.set()
        thread.join()
    assert texts(job_id) == ["first\nsecond\n"]


def test_a_longer_log_loses_its_middle_and_reports_the_size(
    toy: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_LOG_CAPTURE_KB", "1")
    flow.body(lambda: print("a" * 600 + "b" * 600), name="ok")
    toy.dag(a="")
    run_id = toy.started()
    toy.work()
    (text,) = texts(flow.job(run_id, "s/a")["id"])
    assert text == "a" * 512 + "\n[... 177 bytes cut ...]\n" + "b" * 511 + "\n"


def test_another_claim_refuses_the_log_of_the_one_before(conn: db.Connection) -> None:
    factories.node(conn)
    first = transitions.claim_node(conn)
    assert write(conn, first, "begun") == 1
    transitions.expire(conn, first)
    node_queue.reclaim_expired_leases()
    assert write(conn, first, "taken back, not yet claimed") == 1
    second = transitions.claim_node(conn, transitions.who(worker_id="w2"))
    assert write(conn, first, "too late") == 0
    assert write(conn, second, "mine") == 1
    assert texts(first["id"]) == ["taken back, not yet claimed", "mine"]


def test_a_head_left_out_stays(conn: db.Connection) -> None:
    factories.ingest(conn)
    job = transitions.claim_ingest(conn)
    write(conn, job, "head", "t1")
    write(conn, job, None, "t2", 5)
    assert texts(job["id"]) == ["head\n[... 5 bytes cut ...]\nt2"]


def test_a_log_goes_with_its_run_and_with_its_job(conn: db.Connection) -> None:
    for n in range(2):
        factories.node(conn, factories.run(conn, id=f"r{n}"))
        assert write(conn, transitions.claim_node(conn), "x") == 1
    # An ingest job may have the id of a node job.
    factories.ingest(conn, id=factories.one(conn, "SELECT id FROM workflow_node_jobs LIMIT 1"))
    assert write(conn, transitions.claim_ingest(conn), "x") == 1
    run_store.delete_run("r0")
    assert stored(conn) == 2
    conn.execute("DELETE FROM ingest_jobs")
    assert factories.column(conn, "SELECT job_table FROM job_attempt_logs") == [
        "workflow_node_jobs"
    ]
    conn.execute("DELETE FROM workflow_node_jobs")
    assert stored(conn) == 0


def test_a_job_does_not_show_the_log_of_one_of_the_other_kind(conn: db.Connection) -> None:
    factories.node(conn, id="same")
    transitions.claim_node(conn)
    factories.ingest(conn, id="same")
    assert write(conn, transitions.claim_ingest(conn), "x") == 1
    assert texts("same") == [None]


def test_a_followed_node_has_the_logs_of_its_attempts_in_their_order(conn: db.Connection) -> None:
    run_id = factories.run(conn)
    factories.node(conn, run_id, "s/a", max_attempts=3)
    for text in ("one", "two", "three"):
        job = transitions.claim_node(conn)
        write(conn, job, f"{text}\n")
        transitions.hand_back(conn, job)
    transitions.complete(conn, transitions.claim_node(conn))
    conn.execute("UPDATE workflow_runs SET status = 'completed', finished_at = now()")
    conn.execute("UPDATE workflow_dispatch_events SET processed_at = now()")
    shown = console.printed("show", run_id, "--follow")
    assert shown.index("one") < shown.index("two") < shown.index("three")


def test_old_logs_are_pruned_with_the_events(conn: db.Connection) -> None:
    for days in (29, 31):
        factories.ingest(conn)
        write(conn, transitions.claim_ingest(conn), "x")
        conn.execute(
            "UPDATE job_attempt_logs SET created_at = now() - %s * interval '1 day'"
            " WHERE created_at > now() - interval '1 day'",
            (days,),
        )
    assert history.prune()["logs"] == 1
    assert stored(conn) == 1


def test_a_log_that_cannot_be_stored_fails_no_job(
    toy: Flow, conn: db.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    flow.body(lambda: print("x"), name="ok")
    toy.dag(a="", b="")
    run_id = toy.started()
    conn.execute("ALTER TABLE job_attempt_logs RENAME TO away")
    try:
        assert toy.work() == 2
    finally:
        conn.execute("ALTER TABLE away RENAME TO job_attempt_logs")
    assert set(flow.states(run_id).values()) == {"completed"}
    assert "are not stored" in caplog.text


def test_a_log_that_could_not_be_stored_is_stored_later(
    toy: Flow, conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts.store_logs_every(monkeypatch, 0.05)
    tried = threading.Event()

    def talk(word: str) -> None:
        print(word)

    flow.body(talk, name="talk")
    inputs = [{"name": "word", "from": "pipeline._implicit(one)"}]
    again = [{"name": "word", "from": "pipeline._implicit(two)"}]
    toy.define(
        flow.step("s"),
        s=[
            {"id": "a", "node": "talk", "inputs": inputs},
            {"id": "b", "node": "talk", "inputs": again},
        ],
    )
    run_id = toy.started()
    worker = claim_worker.ClaimWorker(queue="cpu", host="box")
    thread = threading.Thread(target=worker.run_forever)
    try:
        with lost_replies.at_statement("INSERT INTO job_attempt_logs", None, meanwhile=tried.set):
            thread.start()
            until(lambda: set(flow.states(run_id).values()) == {"completed"})
            assert tried.wait(30)
            assert stored(conn) == 0
        until(lambda: stored(conn) == 2)
    finally:
        worker.stop()
        thread.join()
    found = [texts(job["id"]) for job in flow.jobs(run_id).values()]
    assert sorted(found) == [["one\n"], ["two\n"]]
