"""A worker treats each job that it has claimed ahead as if it had been claimed alone.

Handlers run in this process. Job 0 runs alone: the statement that records it claims the others.
"""

from __future__ import annotations

import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from queue_workflows import db, jobs, node_queue, workers
from queue_workflows.types import Row
from tests.support import constants, hanging_app, lost_replies, timeouts, transitions
from tests.support.batch_worker import (
    QUEUE,
    Bodies,
    are,
    enqueue,
    events,
    rows,
    running,
    states,
    worker,
)
from tests.support.commands import Commands
from tests.support.wait import until

pytestmark = pytest.mark.usefixtures("invariants_hold")


@pytest.fixture(autouse=True)
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each job claimed with others: whether a handler is short does not depend on this machine."""
    timeouts.claim_ahead(monkeypatch)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No job waits too long for the handler before it."""
    timeouts.let_claimed_jobs_wait(monkeypatch)


def renewed(conn: db.Connection) -> None:
    """Wait for a renewal of the job that runs."""
    before = rows(conn)[1]["lease_expires_at"]
    until(lambda: rows(conn)[1]["lease_expires_at"] > before)


LISTENS = "SELECT FROM workers WHERE (detail ->> 'lock')::boolean"
"""The worker's session of life is the one that listens."""
CANCEL = "UPDATE ingest_jobs SET cancel_requested_at = now() WHERE id = %s"


# --- cancelled before its turn ----------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancel_job", "by SQL", "without notifications"])
def test_a_job_that_is_cancelled_before_it_begins_never_runs(
    conn: db.Connection, bodies: Bodies, patient: None, monkeypatch: Any, how: str
) -> None:
    if how == "cancel_job":
        # The word alone is enough: the next renewal comes in minutes.
        monkeypatch.setenv("DL_HEARTBEAT_SEC", "600")
    if how == "without notifications":
        monkeypatch.setenv("QUEUE_WORKFLOWS_POLL_ONLY", "1")
        monkeypatch.setenv("QUEUE_WORKFLOWS_WORKER_CONTROL_POLL_S", "0.1")
        monkeypatch.setenv("DL_HEARTBEAT_SEC", "0.2")
    bodies.stay = {1}
    ids = enqueue(5)
    with running(worker(), bodies):
        assert bodies.started.wait(30)
        until(are(conn, "completed", *["running"] * 4))
        if how == "cancel_job":
            until(lambda: conn.execute(LISTENS).fetchone() is not None)
            jobs.cancel(ids[3])
        else:
            conn.execute(CANCEL, (ids[3],))
        until(are(conn, "completed", "running", "running", "cancelled", "running"))
        bodies.release.set()
        until(are(conn, *["completed"] * 3, "cancelled", "completed"))
    assert bodies.ran == [0, 1, 2, 4]
    assert events(conn, ids[3]) == ["claimed", "cancel_requested", "cancelled"]


def test_a_cancelled_job_is_ended_after_its_grace_and_what_waits_behind_it_goes_back(
    conn: db.Connection, bodies: Bodies, patient: None, monkeypatch: Any
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_CANCEL_GRACE_S", "0.2")
    left: list[tuple[int, list[str]]] = []
    bodies.stay = {1}
    ids = enqueue(4)

    def leave(code: int) -> None:
        left.append((code, states(conn)))
        bodies.release.set()

    with running(worker(on_exit=leave), bodies):
        assert bodies.started.wait(30)
        jobs.cancel(ids[1])
        until(lambda: left)
    assert left[0] == (79, ["completed", "cancelled", "queued", "queued"])
    assert bodies.ran == [0, 1]
    assert [row["crash_count"] for row in rows(conn)] == [0] * 4


# --- turned off, stopped ----------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["drain", "pause"])
def test_off_hands_back_at_once_all_but_the_job_that_runs(
    conn: db.Connection, bodies: Bodies, patient: None, policy: str
) -> None:
    bodies.stay = {1}
    ids = enqueue(5)
    with running(worker(), bodies):
        assert bodies.started.wait(30)
        until(are(conn, "completed", *["running"] * 4))
        workers.disable("box", QUEUE, stop_policy=policy)
        until(are(conn, "completed", "running", *["queued"] * 3))
        found = rows(conn)
        assert {(r["crash_count"], r["attempts"], r["priority"]) for r in found} == {(0, 0, 100)}
        bodies.release.set()
        until(are(conn, "completed", "completed", *["queued"] * 3))
        workers.enable("box", QUEUE)
        until(are(conn, *["completed"] * 5))
    assert bodies.ran == [0, 1, 2, 3, 4]
    assert events(conn, ids[1]) == ["claimed", "completed"]
    assert events(conn, ids[4]) == ["claimed", "requeued", "claimed", "completed"]


def test_a_hard_off_records_what_is_done_and_hands_all_else_back(
    conn: db.Connection, bodies: Bodies, patient: None
) -> None:
    left: list[tuple[int, list[Row]]] = []
    bodies.stay = {1}
    enqueue(4)

    def leave(code: int) -> None:
        left.append((code, rows(conn)))
        bodies.release.set()

    with running(worker(on_exit=leave), bodies):
        assert bodies.started.wait(30)
        until(are(conn, "completed", *["running"] * 3))
        workers.disable("box", QUEUE)
        until(lambda: left)
    code, found = left[0]
    assert code == 79
    assert [row["status"] for row in found] == ["completed", "queued", "queued", "queued"]
    assert [row["crash_count"] for row in found] == [0] * 4
    assert [row["priority"] for row in found] == [100, 10, 100, 100]
    assert bodies.ran == [0, 1]


def test_a_stop_hands_back_at_once_all_but_the_job_that_runs(
    conn: db.Connection, bodies: Bodies, patient: None
) -> None:
    bodies.stay = {1}
    ids = enqueue(4)
    subject = worker(shutdown_timeout_s=60)
    with running(subject, bodies):
        assert bodies.started.wait(30)
        until(are(conn, "completed", *["running"] * 3))
        subject.stop()
        until(are(conn, "completed", "running", "queued", "queued"))
        bodies.release.set()
    assert states(conn) == ["completed", "completed", "queued", "queued"]
    assert bodies.ran == [0, 1]
    assert [row["crash_count"] for row in rows(conn)] == [0] * 4
    assert events(conn, ids[3]) == ["claimed", "requeued"]


def test_a_stop_between_two_handlers_hands_back_what_has_not_begun(
    conn: db.Connection, bodies: Bodies, patient: None
) -> None:
    ids = enqueue(4)
    subject = worker()
    bodies.tell = lambda i: i == 1 and subject.stop()
    with running(subject, bodies):
        until(lambda: states(conn)[:2] == ["completed"] * 2)
    assert states(conn) == ["completed", "completed", "queued", "queued"]
    assert bodies.ran == [0, 1]
    assert events(conn, ids[3]) == ["claimed", "requeued"]


def test_an_exit_by_a_guard_records_finished_jobs_and_hands_back_the_rest(
    conn: db.Connection, bodies: Bodies, patient: None
) -> None:
    left: list[tuple[int, list[str]]] = []
    bodies.stay = {1}
    ids = enqueue(4)
    conn.execute("UPDATE ingest_jobs SET timeout_s = 0.1 WHERE id = %s", (ids[1],))

    def leave(code: int) -> None:
        left.append((code, states(conn)))
        bodies.release.set()

    with running(worker(on_exit=leave), bodies):
        until(lambda: left)
    assert left[0] == (75, ["completed", "failed", "queued", "queued"])
    assert bodies.ran == [0, 1]
    assert events(conn, ids[3]) == ["claimed", "requeued"]


def test_a_stop_waits_no_longer_for_a_database_that_is_away(
    conn: db.Connection, bodies: Bodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants.put(monkeypatch, "worker.desk.EXIT_WITHIN_S", 1.0)
    bodies.stay = {1}
    enqueue(2)
    subject = worker(shutdown_timeout_s=0.5)
    with running(subject, bodies) as thread:
        assert bodies.started.wait(30)
        with lost_replies.away():
            bodies.release.set()
            subject.stop()
            until(lambda: not thread.is_alive())
    assert states(conn) == ["completed", "running"]


def test_sigterm_gives_all_jobs_of_a_worker_with_batches_back(
    cli: Commands, tmp_path: Path, db: ModuleType
) -> None:
    hanging_app.setup()
    args = {"folder": str(tmp_path)}
    ids = jobs.enqueue_many(task_name="deaf", queue="work", args=[args] * 3)
    subject = cli.start(
        *("queue-claim-worker", "--queue", "work", "--batch", "3", "--shutdown-timeout", "1"),
        *("--app", "tests.support.hanging_app:setup"),
    )
    until((tmp_path / "started").exists, timeout_s=30)
    subject.send(signal.SIGTERM)
    assert subject.wait() == 0, subject.err
    found = [node_queue.get_ingest_job(each) or {} for each in ids]
    assert [(row["status"], row["crash_count"]) for row in found] == [("queued", 0)] * 3
    assert found[0]["claim_no"] == 1


# --- a handler that takes long --------------------------------------------------------------------


def test_behind_a_long_handler_results_are_recorded_and_others_take_the_rest(
    conn: db.Connection, bodies: Bodies
) -> None:
    bodies.stay = {1}
    ids = enqueue(6)
    with running(worker(size=6), bodies):
        until(are(conn, "completed", "running", *["queued"] * 4))
        assert {(r["crash_count"], r["attempts"], r["priority"]) for r in rows(conn)} == {
            (0, 0, 100)
        }
        with running(worker(size=6, host="other"), bodies):
            until(are(conn, "completed", "running", *["completed"] * 4))
        bodies.release.set()
        until(are(conn, *["completed"] * 6))
    assert bodies.ran == [0, 1, 2, 3, 4, 5]
    assert [row["result"]["i"] for row in rows(conn)] == bodies.ran
    assert [row["claimed_by"] for row in rows(conn)] == ["box"] * 2 + ["other"] * 4
    assert events(conn, ids[1]) == ["claimed", "completed"]
    assert events(conn, ids[2]) == ["claimed", "requeued", "claimed", "completed"]


def test_a_result_whose_recording_got_no_answer_is_recorded_once(
    conn: db.Connection, bodies: Bodies
) -> None:
    bodies.stay = {2}
    ids = enqueue(4)

    def two_are_recorded(own: db.Connection) -> bool:
        return states(own)[:2] == ["completed"] * 2

    with lost_replies.after(two_are_recorded) as lost, running(worker(), bodies):
        until(lambda: lost.is_set() and states(conn)[:3] == ["completed", "completed", "running"])
        bodies.release.set()
        until(are(conn, *["completed"] * 4))
    assert bodies.ran == [0, 1, 2, 3]
    assert [row["claim_no"] for row in rows(conn)][:3] == [1, 1, 1]
    assert events(conn, ids[1]) == ["claimed", "completed"]


def test_a_result_that_the_server_refuses_holds_up_no_other(
    conn: db.Connection, bodies: Bodies, patient: None
) -> None:
    """While job 1 is recorded, jobs 2 and 3 end: one statement is to record both."""
    conn.execute(
        "CREATE FUNCTION refuses() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " IF NEW.status = 'completed' AND NEW.args = '{\"i\": 1}' THEN"
        " PERFORM pg_sleep(0.3); END IF;"
        " IF NEW.status = 'completed' AND NEW.args = '{\"i\": 2}' THEN"
        " RAISE EXCEPTION 'not this one'; END IF; RETURN NEW; END $$"
    )
    conn.execute(
        "CREATE TRIGGER refuses BEFORE UPDATE ON ingest_jobs"
        " FOR EACH ROW EXECUTE FUNCTION refuses()"
    )
    bodies.stay = {4}
    enqueue(5)
    try:
        with running(worker(), bodies):
            until(are(conn, "completed", "completed", "failed", "completed", "running"))
            bodies.release.set()
            until(are(conn, "completed", "completed", "failed", "completed", "completed"))
    finally:
        conn.execute("DROP FUNCTION refuses CASCADE")
    assert bodies.ran == [0, 1, 2, 3, 4]


def test_a_claim_that_is_lost_before_it_begins_does_not_run(
    conn: db.Connection, bodies: Bodies, patient: None
) -> None:
    bodies.stay = {1}
    ids = enqueue(5)
    with running(worker(lease_s=1.5), bodies):
        assert bodies.started.wait(30)
        until(are(conn, "completed", *["running"] * 4))
        with conn.transaction():
            conn.execute(
                "UPDATE ingest_jobs SET lease_expires_at = now() - interval '1 s' WHERE id = %s",
                (ids[3],),
            )
            assert len(transitions.reclaim_lapsed(conn, "ingest")) == 1
        # The renewal that reports the loss may not be the one that is under way.
        renewed(conn)
        renewed(conn)
        conn.execute("UPDATE ingest_jobs SET status = 'cancelled' WHERE id = %s", (ids[3],))
        bodies.release.set()
        until(are(conn, *["completed"] * 3, "cancelled", "completed"))
    assert bodies.ran == [0, 1, 2, 4]


def test_the_results_of_a_batch_are_recorded_while_a_job_of_the_next_one_runs(
    conn: db.Connection, bodies: Bodies, patient: None
) -> None:
    bodies.stay = {5}
    enqueue(8)
    with running(worker(), bodies):
        assert bodies.started.wait(30)
        until(are(conn, *["completed"] * 5, *["running"] * 3))
        bodies.release.set()
        until(are(conn, *["completed"] * 8))


def test_a_batch_claimed_by_a_commit_whose_reply_was_lost_is_given_back(
    conn: db.Connection, bodies: Bodies
) -> None:
    enqueue(5)

    def all_are_claimed(own: db.Connection) -> bool:
        return states(own) == ["completed", *["running"] * 4]

    with lost_replies.after(all_are_claimed) as lost, running(worker(), bodies):
        until(are(conn, *["completed"] * 5))
    assert lost.is_set()
    assert bodies.ran == [*range(5)]
    assert [(row["claim_no"], row["crash_count"]) for row in rows(conn)] == (
        [(1, 0)] + [(2, 0)] * 4
    )
