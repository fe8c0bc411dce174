"""The worker around its jobs: leases, guards, control, outages, against a real db."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest

import queue_workflows
from queue_workflows import (
    claim_worker,
    db,
    dispatcher,
    errors,
    jobs,
    node_queue,
    run_store,
    worker_control,
    workers,
)
from tests.support import constants, factories, flow, lost_replies, transitions, wait
from tests.support.worker_views import node_row

Row = dict[str, Any]


class Body:
    """A node handler that reports when it runs and waits until it is released."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.release = threading.Event()
        self.runs = 0
        self.cancelled = False

    def __call__(
        self, cancel_event: threading.Event, status_callback: Callable[..., object]
    ) -> Row:
        self.runs += 1
        status_callback(0.25)
        self.started.set()
        while not self.release.wait(0.01) and not cancel_event.is_set():
            pass
        self.cancelled = cancel_event.is_set()
        return {"runs": self.runs}


@pytest.fixture
def body(db: Any) -> Generator[Body]:
    made = Body()
    queue_workflows.register_node("body", made)
    queue_workflows.register_node("quick", lambda: {"done": True})
    yield made
    made.release.set()


def queued(node_module: str = "body", *, node_id: str = "n", **more: Any) -> str:
    run = run_store.insert_run(workflow_name="w", status="running")
    return node_queue.enqueue_node_job(
        run_id=run["id"], node_id=node_id, node_module=node_module, queue="cpu", **more
    )


def sql(statement: str, *parameters: Any) -> list[Row]:
    with db.connection() as conn:
        cursor = conn.execute(statement, parameters)  # pyright: ignore[reportArgumentType]
        return cursor.fetchall() if cursor.description else []


def event_types(job_id: str) -> list[str]:
    rows = sql("SELECT event_type FROM workflow_node_events WHERE job_id = %s ORDER BY id", job_id)
    return [row["event_type"] for row in rows]


@contextmanager
def running(worker: claim_worker.ClaimWorker) -> Generator[None]:
    thread = threading.Thread(target=worker.run_forever, name="test-worker")
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        thread.join(30)
        assert not thread.is_alive()


def worker(**more: Any) -> claim_worker.ClaimWorker:
    return claim_worker.ClaimWorker(queue="cpu", host="box", **more)


def test_runs_one_job_and_records_it_with_its_events_and_its_outbox_row(body: Body) -> None:
    job_id = queued("quick")
    assert worker().run_once() is True
    assert worker().run_once() is False
    row = node_row(job_id)
    assert (row["status"], row["context_delta"]) == ("completed", {"done": True})
    assert (row["worker_id"], row["lease_expires_at"]) == (None, None)
    assert row["claimed_by"] == "box"
    assert event_types(job_id) == ["claimed", "completed"]
    events = node_queue.list_unprocessed_dispatch_events()
    assert [(e["kind"], e["claim_no"]) for e in events if e["job_id"] == job_id] in (
        [("completed", 1)],
        [],  # the worker has dispatched it already
    )


def test_run_once_may_be_called_until_the_queue_is_empty(body: Body) -> None:
    ids = [queued("quick", node_id=f"n{i}") for i in range(3)]
    subject = worker()
    assert [subject.run_once() for _ in range(4)] == [True, True, True, False]
    assert {node_row(each)["status"] for each in ids} == {"completed"}


def test_an_idle_worker_is_woken_by_the_insert(body: Body, monkeypatch: Any) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_CLAIM_POLL_S", "3600")
    with running(worker()):
        wait.until(lambda: sql("SELECT 1 FROM workers WHERE host_label = 'box'"))
        job_id = queued("quick")
        wait.until(lambda: node_row(job_id)["status"] == "completed")


def test_a_lease_is_renewed_while_the_handler_runs(body: Body) -> None:
    job_id = queued()
    with running(worker(lease_s=1.2)):
        assert body.started.wait(30)
        first = node_row(job_id)["lease_expires_at"]
        wait.until(lambda: node_row(job_id)["lease_expires_at"] > first)
        assert node_queue.reclaim_expired_leases() == []
        body.release.set()
        wait.until(lambda: node_row(job_id)["status"] == "completed")
    assert body.runs == 1


def test_progress_is_stored_while_the_handler_runs(body: Body) -> None:
    job_id = queued()
    with running(worker(lease_s=1.2)):
        wait.until(lambda: node_row(job_id)["progress"] == 0.25)
        body.release.set()


@pytest.mark.parametrize("how", ["run by SQL", "run", "job"])
def test_a_cancel_reaches_the_running_handler(body: Body, how: str) -> None:
    job_id = queued()
    with running(worker()):
        assert body.started.wait(30)
        run_id = node_row(job_id)["run_id"]
        if how == "run by SQL":
            sql(
                "UPDATE workflow_runs SET status = 'cancelled', finished_at = now() WHERE id = %s",
                run_id,
            )
        elif how == "run":
            queue_workflows.cancel_run(run_id)
        else:
            queue_workflows.cancel_job(job_id)
        wait.until(lambda: body.cancelled)
        wait.until(lambda: node_row(job_id)["status"] == "cancelled")
    run = run_store.get_run(run_id)
    assert run is not None
    assert run["status"] == "cancelled"
    assert event_types(job_id) == ["claimed", "cancelled"]


def test_a_timeout_requeues_up_to_the_cap_then_fails_with_its_event(
    body: Body, monkeypatch: Any
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_WATCHDOG_MAX_RETRIES", "1")
    job_id = queued()
    sql("UPDATE workflow_node_jobs SET timeout_s = 0.05 WHERE id = %s", job_id)
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        body.release.set()

    worker(on_exit=leave).run_once()
    row = node_row(job_id)
    assert codes == [75]
    assert (row["status"], row["watchdog_retries"], row["attempts"]) == ("queued", 1, 0)
    assert node_queue.list_unprocessed_dispatch_events() == []

    body.release.clear()
    worker(on_exit=leave).run_once()
    row = node_row(job_id)
    assert codes == [75, 75]
    assert (row["status"], row["watchdog_retries"]) == ("failed", 2)
    assert "budget" in row["error"]
    events = node_queue.list_unprocessed_dispatch_events()
    assert [(e["job_id"], e["kind"]) for e in events] == [(job_id, "failed")]


@pytest.mark.parametrize("state", [None, "dead", "busy"])
def test_an_exit_by_a_guard_ages_the_heartbeat_unless_another_worker_there_lives(
    body: Body, monkeypatch: Any, state: str | None
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DISABLE_WORKER_HEARTBEAT", "1")
    node_queue.upsert_worker_heartbeat(host_label="box", queue="cpu", concurrency=1)
    if state:
        sql(
            "INSERT INTO workers (worker_id, host_label, queue, pid, state)"
            " VALUES ('box:1:m:r', 'box', 'cpu', 1, %s)",
            state,
        )
    sql("UPDATE workflow_node_jobs SET timeout_s = 0.05 WHERE id = %s", queued())
    worker(on_exit=lambda _: body.release.set()).run_once()
    (beat,) = sql("SELECT last_seen < now() - interval '5 minutes' AS aged FROM worker_heartbeats")
    assert beat["aged"] is (state != "busy")


def test_a_worker_that_lost_its_claim_writes_nothing_and_leaves_with_77(body: Body) -> None:
    job_id = queued()
    codes: list[int] = []
    slow = worker(lease_s=0.6, on_exit=lambda code: (codes.append(code), body.release.set()))
    thread = threading.Thread(target=slow.run_once)
    thread.start()
    assert body.started.wait(30)
    with db.transaction() as conn:
        conn.execute(
            "UPDATE workflow_node_jobs SET lease_expires_at = now() - interval '1 s' WHERE id = %s",
            (job_id,),
        )
        assert [r["id"] for r in transitions.reclaim_lapsed(conn, "node")] == [job_id]
    successor = transitions.who("cpu", "other:1:b:r", host="other")

    def taken() -> bool:  # not at once: a renewal of the first one may lock the row for a moment
        with db.connection() as conn:
            return bool(transitions.claim(conn, successor))

    wait.until(taken)
    thread.join(30)
    row = node_row(job_id)
    assert codes[:1] == [77]
    assert (row["status"], row["worker_id"], row["claim_no"]) == ("running", "other:1:b:r", 2)
    assert (row["crash_count"], row["priority"]) == (0, 10), "it lives, so that it did not crash"


def test_a_connection_that_dies_under_the_handler_costs_nothing(body: Body) -> None:
    job_id = queued()
    with running(worker()):
        assert body.started.wait(30)
        sql(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        body.release.set()
        wait.until(lambda: node_row(job_id)["status"] == "completed")
        again = queued("quick", node_id="m")
        wait.until(lambda: node_row(again)["status"] == "completed")
    assert body.runs == 1
    assert node_row(job_id)["claim_no"] == 1


def test_an_outage_and_its_end_are_logged_once_for_any_error_text(
    body: Body, caplog: pytest.LogCaptureFixture
) -> None:
    with running(worker()):
        wait.until(lambda: sql("SELECT 1 FROM workers WHERE state = 'idle'"))
        with lost_replies.of_thread("worker-loop", ["it closed", "it starts up"]):
            job_id = queued("quick")
            wait.until(lambda: node_row(job_id)["status"] == "completed")
    words = ("waiting for the database", "the database is back")
    said = [text for text in caplog.messages if text.startswith(words)]
    assert said == ["waiting for the database: it closed", "the database is back"]


@contextmanager
def lost_completion(job_id: str) -> Generator[None]:
    """Let the reply to the statement be lost that completes this job."""
    query = "SELECT status = 'completed' FROM workflow_node_jobs WHERE id = %s"

    def is_over(conn: db.Connection) -> bool:
        return factories.one(conn, query, job_id)

    with lost_replies.after(is_over, "worker-loop") as lost:
        yield
    assert lost.is_set()


def test_a_commit_whose_reply_was_lost_is_not_written_twice(body: Body) -> None:
    job_id = queued("quick")
    with lost_completion(job_id), running(worker()):
        wait.until(lambda: node_row(job_id)["status"] == "completed")
    assert node_row(job_id)["status"] == "completed"
    assert event_types(job_id) == ["claimed", "completed"]


def test_off_takes_the_job_back_and_leaves_with_79(body: Body) -> None:
    job_id = queued()
    codes: list[int] = []
    left: list[Row] = []

    def leave(code: int) -> None:
        left.extend(sql("SELECT state, job_ids FROM workers"))
        codes.append(code)
        body.release.set()

    with running(worker(on_exit=leave)):
        assert body.started.wait(30)
        workers.disable("box", "cpu", by="test")
        wait.until(lambda: codes == [79])
        row = node_row(job_id)
        assert (row["status"], row["watchdog_retries"], row["crash_count"], row["attempts"]) == (
            "queued",
            0,
            0,
            0,
        )
        assert left == [{"state": "stopped", "job_ids": []}]
    assert node_row(job_id)["priority"] == 10


def test_an_app_stops_the_worker_with_the_policies_and_names_of_0_3_0(body: Body) -> None:
    job_id = queued()
    found: dict[int, tuple[Row, Row]] = {}

    def leave(code: int) -> None:
        """Read the rows; the worker also calls this, by 77, if it meets the lost claim."""
        old = "SELECT now() - last_seen > interval '1 minute' AS old FROM worker_heartbeats"
        found[code] = (node_row(job_id), sql(old)[0])
        body.release.set()

    subject = worker(on_exit=leave)
    with running(subject):
        assert body.started.wait(30)
        worker_control.STOP_POLICIES["hard"](subject, on_exit=leave)
    job, heartbeat = found[79]
    assert (job["status"], job["priority"], job["attempts"]) == ("queued", 10, 0)
    assert heartbeat == {"old": True}
    subject.requeue_inflight_for_control()  # an idle worker has nothing to return
    assert event_types(job_id)[:2] == ["claimed", "requeued"]


@pytest.fixture
def policy() -> Generator[Callable[[Any], None]]:
    """Registers a stop policy `own` of the app."""

    def register(own: Any) -> None:
        worker_control.STOP_POLICIES["own"] = own

    yield register
    worker_control.STOP_POLICIES.pop("own", None)


def test_a_policy_of_an_app_knows_its_worker(body: Body, policy: Callable[[Any], None]) -> None:
    job_id = queued()
    seen: list[Any] = []

    def own(worker: Any, *, on_exit: Callable[[int], object]) -> None:
        worker.requeue_inflight_for_control("for the night")
        seen.extend([worker.queue, worker.host, worker.host_priority, worker.lease_s])
        seen.append(node_row(job_id)["status"])
        worker.heartbeat.send()
        worker.clear_model()
        on_exit(3)
        seen.append("went on")

    policy(own)
    codes: list[int] = []
    subject = worker(
        host_priority=-1,
        lease_s=60,
        on_exit=lambda code: (codes.append(code), body.release.set()),
    )
    with running(subject):
        assert body.started.wait(30)
        workers.disable("box", "cpu", stop_policy="own")
        wait.until(lambda: codes)
    assert (seen, codes) == (["cpu", "box", -1, 60, "queued"], [3])
    assert (subject.queue, subject.host, subject.host_priority) == ("cpu", "box", -1)
    assert (subject.lease_s, subject.model_cache) == (60, None)
    subject.heartbeat.send()  # without effect, as it does not run
    found = sql("SELECT detail FROM workflow_node_events WHERE event_type = 'requeued'")
    assert [each["detail"]["reason"] for each in found] == ["for the night"]


@pytest.mark.parametrize("how", ["raises", "takes too long", "requeues and raises"])
def test_a_policy_of_an_app_that_fails_is_hard(
    body: Body,
    policy: Callable[[Any], None],
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    over = threading.Event()

    def own(worker: Any, *, on_exit: Callable[[int], object]) -> None:
        del on_exit
        if how == "takes too long":
            over.wait(60)
        elif how == "requeues and raises":
            worker.requeue_inflight_for_control()
        raise ValueError("no")

    constants.put(monkeypatch, "run.stop_policy.WITHIN_S", 60.0 if how != "takes too long" else 0.2)
    policy(own)
    job_id = queued()
    codes: list[int] = []
    with running(worker(on_exit=lambda code: (codes.append(code), body.release.set()))):
        assert body.started.wait(30)
        workers.disable("box", "cpu", stop_policy="own")
        wait.until(lambda: codes)
        over.set()
    row = node_row(job_id)
    assert (codes, row["status"], row["attempts"], row["crash_count"]) == ([79], "queued", 0, 0)
    why = "takes more than" if how == "takes too long" else "has failed: ValueError: no"
    assert any(f"stop policy own {why}" in text for text in caplog.messages)


def test_a_policy_in_the_place_of_ours_is_the_apps(
    body: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = threading.Event()
    monkeypatch.setitem(
        worker_control.STOP_POLICIES, "hard", lambda worker, *, on_exit: called.set()
    )
    job_id = queued()
    with running(worker()):
        assert body.started.wait(30)
        workers.disable("box", "cpu")
        assert called.wait(30)
        body.release.set()
        wait.until(lambda: node_row(job_id)["status"] == "completed")


def test_a_requeue_by_the_app_ends_a_worker_whose_handler_goes_on(
    body: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants.put(monkeypatch, "run.stop_policy.WITHIN_S", 0.5)
    job_id = queued()
    codes: list[int] = []
    subject = worker(on_exit=lambda code: (codes.append(code), body.release.set()))
    with running(subject):
        assert body.started.wait(30)
        subject.requeue_inflight_for_control()
        assert (node_row(job_id)["status"], codes) == ("queued", [])
        wait.until(lambda: codes == [77])


def test_off_with_a_hand_back_that_fails_leaves_all_the_same(
    body: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants.put(monkeypatch, "worker.desk.EXIT_WITHIN_S", 1.0)
    job_id = queued()
    found: list[tuple[int, str]] = []

    def leave(code: int) -> None:
        found.append((code, node_row(job_id)["status"]))
        body.release.set()

    with running(worker(on_exit=leave)):
        assert body.started.wait(30)
        with lost_replies.at_statement("'requeued'", None):
            workers.disable("box", "cpu", by="test")
            wait.until(lambda: found)
    assert found == [(79, "running")], "its lease brings it back"


LISTENING = (
    "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'LISTEN%%' AND datname = current_database()"
)


def test_without_listening_the_polls_find_work_and_off(body: Body, monkeypatch: Any) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_POLL_ONLY", "1")
    monkeypatch.setenv("QUEUE_WORKFLOWS_CLAIM_POLL_S", "0.05")
    monkeypatch.setenv("QUEUE_WORKFLOWS_WORKER_CONTROL_POLL_S", "0.1")
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        body.release.set()

    with running(worker(on_exit=leave)):
        wait.until(lambda: sql("SELECT 1 FROM workers"))
        job_id = queued()
        assert body.started.wait(30)
        assert sql(LISTENING) == []
        workers.disable("box", "cpu")
        wait.until(lambda: codes == [79])
    assert node_row(job_id)["priority"] == 10


def test_an_off_worker_claims_nothing_is_parked_and_resumes_in_place(
    body: Body, monkeypatch: Any
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_CLAIM_POLL_S", "0.05")
    monkeypatch.setenv("DL_HEARTBEAT_SEC", "0.2")
    workers.disable("box", "cpu")
    job_id = queued("quick")
    with running(worker()):
        wait.until(lambda: [r["state"] for r in sql("SELECT state FROM workers")] == ["parked"])
        assert sql("SELECT 1 FROM worker_heartbeats") == []
        assert node_row(job_id)["status"] == "queued"
        workers.enable("box", "cpu")
        wait.until(lambda: node_row(job_id)["status"] == "completed")
        wait.until(lambda: sql("SELECT 1 FROM worker_heartbeats WHERE host_label = 'box'"))


@pytest.mark.parametrize("policy", ["drain", "pause"])
def test_a_soft_off_lets_the_job_end_and_then_claims_nothing(
    body: Body, monkeypatch: Any, policy: str
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_CLAIM_POLL_S", "0.05")
    monkeypatch.setenv("QUEUE_WORKFLOWS_DL_HEARTBEAT_SEC", "0.05")
    first, second = queued(), queued("quick")
    codes: list[int] = []
    with running(worker(on_exit=codes.append)):
        assert body.started.wait(30)
        workers.disable("box", "all", stop_policy=policy)
        wait.until(lambda: [r["state"] for r in sql("SELECT state FROM workers")] == ["draining"])
        body.release.set()
        wait.until(lambda: node_row(first)["status"] == "completed")
        idle = "paused" if policy == "pause" else "parked"
        wait.until(lambda: [r["state"] for r in sql("SELECT state FROM workers")] == [idle])
        assert (node_row(second)["status"], codes) == ("queued", [])
        workers.enable("box", "all")
        wait.until(lambda: node_row(second)["status"] == "completed")


def test_a_worker_that_drains_keeps_its_machines_heartbeat_fresh(
    body: Body, monkeypatch: Any
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DL_HEARTBEAT_SEC", "0.05")
    queued()
    with running(worker()):
        assert body.started.wait(30)
        workers.disable("box", "cpu", stop_policy="drain")
        wait.until(lambda: [r["state"] for r in sql("SELECT state FROM workers")] == ["draining"])
        sql("UPDATE worker_heartbeats SET last_seen = now() - interval '1 hour'")
        wait.until(
            lambda: sql("SELECT 1 FROM worker_heartbeats WHERE last_seen > now() - interval '9 s'")
        )
        body.release.set()


def test_an_off_that_ends_by_itself_resumes_the_worker_in_place(
    body: Body, monkeypatch: Any
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_CLAIM_POLL_S", "0.05")
    monkeypatch.setenv("QUEUE_WORKFLOWS_WORKER_CONTROL_POLL_S", "0.1")
    workers.disable("box", "cpu")
    job_id = queued("quick")
    with running(worker()):
        wait.until(lambda: [r["state"] for r in sql("SELECT state FROM workers")] == ["parked"])
        sql("UPDATE worker_controls SET until_at = now() + interval '0.3 s'")
        wait.until(lambda: node_row(job_id)["status"] == "completed")


def test_stop_gives_the_job_back_after_its_deadline(body: Body, monkeypatch: Any) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_SHUTDOWN_TIMEOUT_S", "0.2")
    job_id = queued()
    codes: list[int] = []
    left: list[Row] = []

    def leave(code: int) -> None:
        left.extend(sql("SELECT state, job_ids FROM workers"))
        codes.append(code)
        body.release.set()

    subject = worker(on_exit=leave)
    with running(subject):
        assert body.started.wait(30)
        subject.stop()
        wait.until(lambda: codes == [0])
    row = node_row(job_id)
    assert left == [{"state": "stopped", "job_ids": []}]
    assert (row["status"], row["attempts"], row["crash_count"]) == ("queued", 0, 0)
    assert event_types(job_id) == ["claimed", "requeued"]


def test_stop_lets_a_short_job_end(body: Body) -> None:
    job_id = queued()
    codes: list[int] = []
    subject = worker(on_exit=codes.append)
    with running(subject):
        assert body.started.wait(30)
        subject.stop()
        body.release.set()
    assert node_row(job_id)["status"] == "completed"
    assert codes == []


def test_two_workers_of_one_label_never_touch_each_others_job(body: Body) -> None:
    """The label only displays; a renewal or OFF of one does not reach the other's claim."""
    job_id = queued()
    first, second = worker(), worker()
    thread = threading.Thread(target=first.run_once)
    thread.start()
    assert body.started.wait(30)
    with running(second):
        wait.until(lambda: second.worker_id is not None)
        row = node_row(job_id)
        assert row["worker_id"] == first.worker_id
        stranger = row | {"worker_id": second.worker_id}
        with db.transaction() as conn:
            assert transitions.renew(conn, stranger) == []
            assert transitions.fail(conn, stranger) is None
            assert transitions.hand_back(conn, stranger) is None
        body.release.set()
        thread.join(30)
    assert node_row(job_id)["status"] == "completed"


def ingest_rows() -> list[Row]:
    return sql("SELECT * FROM ingest_jobs ORDER BY seq")


def test_batches_record_each_result_and_each_failure_once(db: Any) -> None:
    seen: list[int] = []

    def task(reason: str, args: Row) -> Row:
        seen.append(args["i"])
        if args["i"] == 3:
            raise RuntimeError("three")
        return {"i": args["i"]}

    queue_workflows.register_ingest_task("t", task)
    jobs.enqueue_many(task_name="t", queue="load", args=[{"i": i} for i in range(25)])
    subject = claim_worker.ClaimWorker(queue="load", host="box", batch=10)
    with running(subject):
        wait.until(lambda: all(r["status"] in ("completed", "failed") for r in ingest_rows()))
    rows = ingest_rows()
    assert seen == list(range(25))
    assert [r["status"] for r in rows].count("failed") == 1
    assert all(r["result"] == {"i": i} for i, r in enumerate(rows) if i != 3)
    events = sql("SELECT job_id, event_type FROM ingest_job_events")
    assert len(events) == 50


def test_a_batch_that_lost_one_claim_records_the_others(db: Any) -> None:
    runs: list[int] = []

    def task(reason: str, args: Row) -> None:
        runs.append(args["i"])
        if runs == [0]:
            # In one transaction: a renewal in between would save it.
            with db.transaction() as conn:
                conn.execute(
                    "UPDATE ingest_jobs SET lease_expires_at = now() - interval '1 s'"
                    " WHERE status = 'running' AND (args ->> 'i')::int = 0"
                )
                assert len(transitions.reclaim_lapsed(conn, "ingest")) == 1

    queue_workflows.register_ingest_task("t", task)
    jobs.enqueue_many(task_name="t", queue="load", args=[{"i": i} for i in range(3)])
    subject = claim_worker.ClaimWorker(queue="load", host="box", batch=3)
    with running(subject):
        wait.until(lambda: [r["status"] for r in ingest_rows()].count("completed") == 3)
    rows = ingest_rows()
    assert (runs.count(0), runs.count(1), runs.count(2)) == (2, 1, 1)
    assert [r["claim_no"] for r in rows[1:]] == [1, 1]
    assert [r["crash_count"] for r in rows[1:]] == [0, 0]


@pytest.mark.parametrize(
    ("queue", "more"), [("nope", {}), ("cpu", {"lease_s": 0}), ("load", {"batch": 0})]
)
def test_what_cannot_work_is_refused(queue: str, more: Row) -> None:
    with pytest.raises(ValueError, match=queue if queue == "nope" else "must|batch"):
        claim_worker.ClaimWorker(queue=queue, **more)
    assert issubclass(errors.UnknownQueue, ValueError)


def test_the_worker_dispatches_what_it_finished_without_an_orchestrator(body: Body) -> None:
    workflow = {"name": "w", "steps": [{"id": "s", "kind": "pipeline", "pipeline": "p"}]}
    pipeline = {
        "name": "p",
        "nodes": [
            {"id": "a", "node": "quick"},
            {"id": "b", "node": "quick", "depends_on": ["a"]},
            {"id": "c", "node": "quick", "depends_on": ["b"]},
        ],
    }
    queue_workflows.set_workflow_provider(lambda _: workflow, lambda _: pipeline)
    run = run_store.insert_run(workflow_name="w")
    assert dispatcher.start_run(run["id"]) == 1
    with running(worker()):
        wait.until(lambda: (run_store.get_run(run["id"]) or {})["status"] == "completed")
    assert node_queue.count_unprocessed_dispatch_events() == 0


def test_a_job_claimed_by_a_commit_whose_reply_was_lost_is_given_back(body: Body) -> None:
    first = queued("quick")
    run_id = node_row(first)["run_id"]
    second = node_queue.enqueue_node_job(
        run_id=run_id, node_id="m", node_module="quick", queue="cpu"
    )
    with lost_completion(first), running(worker()):
        wait.until(lambda: node_row(second)["status"] == "completed")
    assert node_row(first)["claim_no"] == 1
    assert node_row(second)["claim_no"] == 2
    assert event_types(second) == ["claimed", "requeued", "claimed", "completed"]
    assert node_row(second)["crash_count"] == 0


def test_a_slow_hook_holds_no_claim_of_the_next_job(body: Body) -> None:
    """The app's hook runs after the commit, when no lock or connection may be in use."""
    seen: list[int] = []
    told: list[tuple[Row, Row]] = []

    def hook(job: Row, run: Row, delta: Row) -> None:
        rows = sql("SELECT count(*) AS n FROM workflow_node_jobs WHERE status = 'running'")
        seen.append(rows[0]["n"])
        told.append((job, run))

    queue_workflows.set_on_node_completed(hook)
    ids = [queued("quick", node_id=f"n{i}") for i in range(3)]
    with running(worker()):
        wait.until(lambda: {node_row(each)["status"] for each in ids} == {"completed"})
    assert seen == [0, 0, 0]
    for job, run in told:
        stored = node_row(job["id"])
        assert job == {name: stored[name] for name in job}
        assert run == run_store.get_run(run["id"])


def test_a_node_cancelled_then_retried_before_its_handler_ends_runs_again(body: Body) -> None:
    workflow = {"name": "w", "steps": [{"id": "s", "kind": "pipeline", "pipeline": "p"}]}
    pipeline = {"name": "p", "nodes": [{"id": "a", "node": "body"}]}
    queue_workflows.set_workflow_provider(lambda _: workflow, lambda _: pipeline)
    run = run_store.insert_run(workflow_name="w")
    dispatcher.start_run(run["id"])
    (found,) = node_queue.list_jobs_for_run(run["id"])
    with db.transaction() as conn:
        held = transitions.claim_node(conn, transitions.who("cpu", "w:1:b:r", host="other"))
    queue_workflows.cancel_job(found["id"])
    queue_workflows.retry_run(run["id"])
    with db.transaction() as conn:
        transitions.hand_back(conn, held, "cancelled")
    assert node_row(found["id"])["status"] == "queued"
    dispatcher.start_run(run["id"])
    body.release.set()
    with running(worker()):
        wait.until(lambda: (run_store.get_run(run["id"]) or {})["status"] == "completed")


@pytest.fixture
def refusing(db: Any) -> Generator[None]:
    """An app's trigger refuses the first completion of s/a; a failed node is tried again."""
    sql(
        "CREATE FUNCTION refuses() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " IF NEW.status = 'completed' AND NEW.node_id = 's/a' AND NEW.claim_no = 1 THEN"
        " RAISE EXCEPTION 'the host refuses'; END IF; RETURN NEW; END $$;"
        " CREATE TRIGGER refuses BEFORE UPDATE ON workflow_node_jobs FOR EACH ROW"
        " EXECUTE FUNCTION refuses();"
    )
    try:
        yield
    finally:
        sql("DROP TRIGGER refuses ON workflow_node_jobs; DROP FUNCTION refuses")


def test_a_join_counts_on_nothing_that_was_not_committed(body: Body, refusing: None) -> None:
    workflow = {"name": "w", "steps": [{"id": "s", "kind": "pipeline", "pipeline": "p"}]}
    pipeline = {
        "name": "p",
        "nodes": [
            {"id": "a", "node": "quick", "retries": 2},
            {"id": "b", "node": "quick"},
            {"id": "c", "node": "quick", "depends_on": ["a", "b"]},
        ],
    }
    queue_workflows.set_workflow_provider(lambda _: workflow, lambda _: pipeline)
    run = run_store.insert_run(workflow_name="w")
    dispatcher.start_run(run["id"])

    def states() -> dict[str, str]:
        return {row["node_id"]: row["status"] for row in node_queue.list_jobs_for_run(run["id"])}

    with running(worker()):
        wait.until(lambda: states().get("s/b") == "completed")
        flow.dispatch_all()
        assert states() == {"s/a": "queued", "s/b": "completed"}


@pytest.fixture
def never_failed(db: Any) -> Generator[None]:
    """An app's trigger refuses every failure."""
    sql(
        "CREATE FUNCTION refuses() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " IF NEW.status = 'failed' THEN RAISE EXCEPTION 'the host refuses'; END IF;"
        " RETURN NEW; END $$;"
        " CREATE TRIGGER refuses BEFORE UPDATE ON workflow_node_jobs FOR EACH ROW"
        " EXECUTE FUNCTION refuses();"
    )
    try:
        yield
    finally:
        sql("DROP TRIGGER refuses ON workflow_node_jobs; DROP FUNCTION refuses")


@pytest.mark.parametrize(("crashes", "counted", "event"), [(3, 2, "reclaimed"), (1, 0, "requeued")])
def test_a_failure_that_the_database_never_takes_holds_up_no_worker(
    body: Body,
    never_failed: None,
    monkeypatch: pytest.MonkeyPatch,
    crashes: int,
    counted: int,
    event: str,
) -> None:
    constants.put(monkeypatch, "claim.recovery.MAX_CRASHES", crashes)

    def fails() -> None:
        raise ValueError("no")

    queue_workflows.register_node("fails", fails)
    job_id = queued("fails")
    other = queued("quick", node_id="m")
    with running(worker()):
        wait.until(lambda: node_row(other)["status"] == "completed", timeout_s=30)
    found = node_row(job_id)
    assert (found["status"], found["crash_count"]) == ("queued", counted)
    assert found["available_at"] is not None
    assert event_types(job_id)[-1] == event
