"""A row that no claim can take is failed, blocked or skipped, and stops no queue."""

from __future__ import annotations

import logging
import threading
from typing import Any

import psycopg
import pytest

import queue_workflows
from queue_workflows import claim_worker, config, db, node_queue
from queue_workflows.types import Row
from tests.support import app_triggers, factories, rows_before_checks, transitions
from tests.support.wait import until

pytestmark = pytest.mark.usefixtures("invariants_hold")
QUEUE = "load"
LAST = "9223372036854775807"
ENDED = {"completed", "failed"}


@pytest.fixture(autouse=True)
def app(clean_process: None) -> None:
    config.configure(ingest_queues={QUEUE})
    config.register_ingest_task("t", lambda reason: {})
    queue_workflows.register_node("m", lambda: {"ok": True})


def bad_ingest(conn: db.Connection, name: str = "bad", **more: str) -> None:
    given = {"task_name": "'t'", "queue": f"'{QUEUE}'", "priority": "1", "claim_no": LAST}
    rows_before_checks.put(conn, "ingest_jobs", id=f"'{name}'", **given | more)


def bad_node(conn: db.Connection, queue: str = "cpu", name: str = "bad", **more: str) -> str:
    run_id = factories.run(conn)
    given = {"node_module": "'m'", "queue": f"'{queue}'", "priority": "1", "claim_no": LAST}
    identity = {"id": f"'{name}'", "run_id": f"'{run_id}'", "node_id": "'n'"}
    rows_before_checks.put(conn, "workflow_node_jobs", **identity | given | more)
    return run_id


def rows(conn: db.Connection, table: str) -> dict[str, Row]:
    found = conn.execute(f"SELECT * FROM {table}".encode()).fetchall()
    return {row["id"]: row for row in found}


def test_a_job_at_the_end_of_claim_no_fails_and_the_next_is_claimed(
    conn: db.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    bad_ingest(conn)
    good = factories.ingest(conn, queue=QUEUE)["id"]
    worker = claim_worker.ClaimWorker(queue=QUEUE, host="box")
    with caplog.at_level(logging.WARNING):
        assert worker.run_once()
    found = rows(conn, "ingest_jobs")
    assert found[good]["status"] == "completed"
    assert found["bad"]["status"] == "failed"
    assert "the database refuses its claim: bigint out of range" in found["bad"]["error"]
    assert (found["bad"]["attempts"], found["bad"]["crash_count"]) == (0, 0)
    assert "queue-workflows jobs delete 'bad'" in caplog.text
    assert not worker.run_once()


def test_the_ordinary_claim_does_raise_there(conn: db.Connection) -> None:
    bad_ingest(conn)
    with pytest.raises(psycopg.errors.NumericValueOutOfRange):
        transitions.claim(conn, transitions.who(QUEUE))


@pytest.mark.parametrize("queue", ["cpu", "gpu"])
@pytest.mark.parametrize("newest", [False, True])
def test_a_node_at_the_end_of_claim_no_fails_with_its_event_and_outbox_row(
    conn: db.Connection, caplog: pytest.LogCaptureFixture, queue: str, newest: bool
) -> None:
    claim = node_queue.claim_next_cpu_job if queue == "cpu" else node_queue.claim_next_gpu_job
    factories.node(conn, queue=queue)
    usual = claim(3)
    assert usual is not None
    run_id = bad_node(conn, queue)
    good = factories.node(conn, queue=queue, priority=1)["id"]
    with caplog.at_level(logging.WARNING):
        claimed = [claim(3, host_priority=-newest) for _ in range(2)]
    assert [job and job["id"] for job in claimed] == [good, None]
    job = rows(conn, "workflow_node_jobs")[good]
    assert (job["status"], job["worker_lane"]) == ("running", 3)
    for column in ("worker_id", "claimed_by"):
        assert job[column] == usual[column], "that of this process, as in the ordinary claim"
    # An overflow machine may have claimed the good one first.
    if rows(conn, "workflow_node_jobs")["bad"]["status"] == "queued":
        assert newest
        return
    assert rows(conn, "workflow_node_jobs")["bad"]["status"] == "failed"
    events = conn.execute(
        "SELECT event_type FROM workflow_node_events WHERE job_id = 'bad'"
    ).fetchall()
    assert [event["event_type"] for event in events] == ["failed"]
    assert (
        len(
            conn.execute(
                "SELECT 1 FROM workflow_dispatch_events WHERE job_id = 'bad' AND kind = 'failed'"
            ).fetchall()
        )
        == 1
    )
    assert f"queue-workflows cancel '{run_id}'" in caplog.text


def test_a_worker_of_models_gets_none_that_it_does_not_know(conn: db.Connection) -> None:
    bad_node(conn, "gpu", required_model="'a'")
    factories.node(conn, queue="gpu", required_model="b", priority=1)
    known = factories.node(conn, queue="gpu", required_model="a", priority=2)["id"]
    found = node_queue.claim_next_gpu_job(known_models=["a"])
    assert found is not None and found["id"] == known


MODES: dict[str, dict[str, Any]] = {
    "executor": {}, "inline": {"inline": True}, "batches": {"batch": 2},
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_completions_are_kept_although_the_next_claim_raises(
    conn: db.Connection, mode: str
) -> None:
    """What a worker had finished was recorded as failed when the claim in its statement raised."""
    first = [factories.ingest(conn, queue=QUEUE, priority=0)["id"] for _ in range(2)]
    nodes = [factories.node(conn, priority=0)["id"] for _ in range(2)]
    bad = [f"bad-{number}" for number in range(3)]
    for name in bad:
        bad_ingest(conn, name)
        bad_node(conn, name=name)
    last = factories.ingest(conn, queue=QUEUE)["id"]
    for queue, table in ((QUEUE, "ingest_jobs"), ("cpu", "workflow_node_jobs")):
        more = {} if (mode, queue) == ("batches", "cpu") else MODES[mode]
        worker = claim_worker.ClaimWorker(queue=queue, host="box", **more)

        def stop_at_the_end(worker: Any = worker, table: str = table) -> None:
            with db.connect() as own:
                until(lambda: {row["status"] for row in rows(own, table).values()} <= ENDED)
            worker.stop()

        stopper = threading.Thread(target=stop_at_the_end)
        stopper.start()
        worker.run_forever()
        stopper.join()
    found = rows(conn, "ingest_jobs")
    assert {found[each]["status"] for each in (*first, last)} == {"completed"}
    assert {found[each]["status"] for each in bad} == {"failed"}
    found = rows(conn, "workflow_node_jobs")
    assert {found[each]["status"] for each in nodes} == {"completed"}
    assert {found[each]["status"] for each in bad} == {"failed"}


def test_a_job_that_an_apps_trigger_refuses_is_ended_or_blocked_or_skipped(
    conn: db.Connection,
) -> None:
    for name in ("claim", "end", "any"):
        factories.ingest(conn, id=name, queue=QUEUE, priority=1)
    good = factories.ingest(conn, queue=QUEUE)["id"]
    when = (
        "OLD.id = 'any' OR OLD.id IN ('claim', 'end') AND NEW.status = 'running'"
        " OR OLD.id = 'end' AND NEW.status = 'failed'"
    )
    with app_triggers.refusing(conn, "ingest_jobs", when):
        found = node_queue.claim_next_ingest_job(QUEUE)
        assert found is not None and found["id"] == good
        assert not claim_worker.ClaimWorker(queue=QUEUE, host="box").run_once()
    found = rows(conn, "ingest_jobs")
    became = {name: (row["status"], row["blocked_reason"]) for name, row in found.items()}
    assert became == {
        "claim": ("failed", None), "end": ("queued", "set_aside"), "any": ("queued", None),
        good: ("running", None),
    }  # fmt: skip
    assert "the app refuses claim" in found["claim"]["error"]


def test_a_temporarily_refused_job_is_retried_if_nothing_else_can_be_claimed(
    conn: db.Connection,
) -> None:
    for _ in range(2):
        factories.ingest(conn, queue=QUEUE)
    with app_triggers.refusing(conn, "ingest_jobs", "NEW.status = 'running'"):
        assert node_queue.claim_next_ingest_job(QUEUE) is None
    for row in rows(conn, "ingest_jobs").values():
        assert (row["status"], row["blocked_reason"], row["error"]) == ("queued", "not_due", None)


SYSTEM = {
    "42501": "RAISE EXCEPTION 'no right' USING ERRCODE = 'insufficient_privilege'",
    "42P01": "PERFORM FROM no_such_table",
    "57014": "PERFORM pg_cancel_backend(pg_backend_pid()), pg_sleep(30)",
}
"""By SQLSTATE, what an app's trigger may do that ends in an error whose cause is not the row."""


@pytest.mark.parametrize("state", SYSTEM)
def test_nobody_is_ended_for_an_error_of_the_system(conn: db.Connection, state: str) -> None:
    for _ in range(2):
        factories.ingest(conn, queue=QUEUE)
    when = "NEW.status = 'running' AND OLD.seq % 2 = 0"
    with (
        app_triggers.doing(conn, "ingest_jobs", when, SYSTEM[state]),
        pytest.raises(psycopg.Error) as seen,
    ):
        _ = [node_queue.claim_next_ingest_job(QUEUE) for _ in range(2)]
    assert seen.value.sqlstate == state
    for row in rows(conn, "ingest_jobs").values():
        assert row["status"] in ("queued", "running")
        assert row["blocked_reason"] is None


@pytest.mark.parametrize("state", ["55000", "53100"])
def test_the_sqlstate_that_a_trigger_raises_with_stops_no_queue(
    conn: db.Connection, state: str
) -> None:
    """Of the server itself, such an error would say that it is not ready, or full."""
    factories.ingest(conn, id="bad", queue=QUEUE, priority=1)
    good = factories.ingest(conn, queue=QUEUE)["id"]
    when = "OLD.id = 'bad' AND NEW.status = 'running'"
    with app_triggers.refusing(conn, "ingest_jobs", when, state):
        assert claim_worker.ClaimWorker(queue=QUEUE, host="box").run_once()
    found = rows(conn, "ingest_jobs")
    assert found[good]["status"] == "completed"
    assert found["bad"]["status"] == "failed"
    assert "the app refuses bad" in found["bad"]["error"]


def test_a_row_that_another_worker_tries_is_left_to_it(
    conn: db.Connection,
) -> None:
    bad_ingest(conn)
    good = factories.ingest(conn, queue=QUEUE)["id"]
    with db.connect() as other, other.transaction():
        other.execute("SELECT 1 FROM ingest_jobs WHERE id = 'bad' FOR UPDATE")
        found = node_queue.claim_next_ingest_job(QUEUE)
        assert found is not None and found["id"] == good
    assert rows(conn, "ingest_jobs")["bad"]["status"] == "queued"


def test_a_due_row_that_raises_keeps_no_other_from_coming_due(conn: db.Connection) -> None:
    for name in ("bad", "good"):
        factories.ingest(conn, id=name, queue=QUEUE)
    conn.execute(
        "UPDATE ingest_jobs SET available_at = now() + interval '1 hour' WHERE queue = %s", (QUEUE,)
    )
    conn.execute("SET session_replication_role = replica")
    conn.execute("UPDATE ingest_jobs SET available_at = now() - interval '1 hour'")
    conn.execute("SET session_replication_role = origin")
    with app_triggers.refusing(conn, "ingest_jobs", "OLD.id = 'bad' AND NEW.available_at IS NULL"):
        assert claim_worker.ClaimWorker(queue=QUEUE, host="box").run_once()
    found = rows(conn, "ingest_jobs")
    assert found["good"]["status"] == "completed"
    assert found["bad"]["status"] in ("failed", "queued")


@pytest.mark.parametrize("family", ["node", "ingest"])
def test_apps_that_claim_by_themselves_get_past_it_too(conn: db.Connection, family: str) -> None:
    bad_ingest(conn)
    bad_node(conn)
    if family == "node":
        good = factories.node(conn)["id"]
        job = node_queue.claim_next_cpu_job()
    else:
        good = factories.ingest(conn, queue=QUEUE)["id"]
        job = node_queue.claim_next_ingest_job(QUEUE)
    assert job is not None
    assert (job["id"], job["status"], job["claim_no"]) == (good, "running", 1)


def test_an_end_that_the_data_forbids_fails_the_job_uncharged(conn: db.Connection) -> None:
    def fails(reason: str) -> None:
        raise RuntimeError("boom")

    config.register_ingest_task("fails", fails)
    factories.ingest(conn, id="bad", queue=QUEUE, task_name="fails")
    with app_triggers.refusing(
        conn,
        "ingest_jobs",
        "OLD.status = 'running' AND NEW.status <> 'running' AND NEW.attempts > 0",
        "22003",
    ):
        assert claim_worker.ClaimWorker(queue=QUEUE, host="box").run_once()
    row = rows(conn, "ingest_jobs")["bad"]
    assert (row["status"], row["crash_count"]) == ("failed", 0)
    assert "its end cannot be recorded: the app refuses bad" in row["error"]


@pytest.mark.parametrize("way", ["hand back", "strays", "dead"])
def test_a_hand_back_of_several_jobs_skips_a_row_that_refuses(
    conn: db.Connection, way: str
) -> None:
    for number in range(3):
        factories.ingest(conn, id=f"j{number}", queue=QUEUE)
    jobs = transitions.claim(conn, transitions.who(QUEUE), 3)
    with app_triggers.refusing(conn, "ingest_jobs", "OLD.id = 'j1'"), conn.transaction():
        if way == "hand back":
            changed = transitions.hand_back_all(conn, jobs)
        elif way == "strays":
            changed = transitions.release_strays(conn, "ingest")
        else:
            changed = transitions.reclaim_dead(conn, "ingest", "w1")
    assert sorted(row["id"] for row in changed) == ["j0", "j2"]
    assert {row["status"] for row in changed} == {"queued"}
    assert rows(conn, "ingest_jobs")["j1"]["status"] == "running"
