"""A row that no claim can take is failed, blocked or skipped, and stops no queue."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import psycopg
import pytest

import queue_workflows
from queue_workflows import claim_worker, config, node_queue, workers
from queue_workflows import db as engine
from queue_workflows.engine import (
    claim_isolation,
    finish,
    handback,
    job_tables,
    outcomes,
    recovery,
)
from queue_workflows.types import Row
from queue_workflows.worker import claim_writes, claimer, claims_in_flight
from tests.support import factories, invariants, rows_before_checks, transitions
from tests.support.wait import until

QUEUE = "load"
LAST = "9223372036854775807"
ENDED = {"completed", "failed"}


@pytest.fixture
def conn(db: ModuleType) -> Generator[engine.Connection]:
    config.configure(ingest_queues={QUEUE})
    config.register_ingest_task("t", lambda reason: {})
    queue_workflows.register_node("m", lambda: {"ok": True})
    with engine.connect() as conn:
        yield conn
        assert invariants.broken(conn, slack_s=5) == []


def bad_ingest(conn: engine.Connection, name: str = "bad", **more: str) -> None:
    given = {"task_name": "'t'", "queue": f"'{QUEUE}'", "priority": "1", "claim_no": LAST}
    rows_before_checks.put(conn, "ingest_jobs", id=f"'{name}'", **given | more)


def bad_node(conn: engine.Connection, queue: str = "cpu", name: str = "bad", **more: str) -> str:
    run_id = factories.run(conn)
    given = {"node_module": "'m'", "queue": f"'{queue}'", "priority": "1", "claim_no": LAST}
    identity = {"id": f"'{name}'", "run_id": f"'{run_id}'", "node_id": "'n'"}
    rows_before_checks.put(conn, "workflow_node_jobs", **identity | given | more)
    return run_id


def rows(conn: engine.Connection, table: str) -> dict[str, Row]:
    found = conn.execute(f"SELECT * FROM {table}").fetchall()  # pyright: ignore[reportArgumentType]
    return {row["id"]: row for row in found}


@contextmanager
def refusing(conn: engine.Connection, table: str, when: str, state: str = "P0001") -> Any:
    """An app's trigger that raises for every UPDATE of a row of which this holds."""
    for statement in (
        "CREATE FUNCTION app_refuses() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" IF {when} THEN RAISE EXCEPTION 'the app refuses %', OLD.id USING ERRCODE = '{state}';"
        " END IF; RETURN NEW; END $$",
        f"CREATE TRIGGER a_app_refuses BEFORE UPDATE ON {table}"
        " FOR EACH ROW EXECUTE FUNCTION app_refuses()",
    ):
        conn.execute(statement)  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        conn.execute(f"DROP TRIGGER a_app_refuses ON {table}")  # pyright: ignore[reportArgumentType]
        conn.execute("DROP FUNCTION app_refuses()")


def test_a_job_at_the_end_of_claim_no_fails_and_the_next_is_claimed(
    conn: engine.Connection, caplog: pytest.LogCaptureFixture
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


def test_the_ordinary_claim_does_raise_there(conn: engine.Connection) -> None:
    bad_ingest(conn)
    with pytest.raises(psycopg.errors.NumericValueOutOfRange):
        transitions.claim(conn, transitions.who(QUEUE))


@pytest.mark.parametrize("queue", ["cpu", "gpu"])
@pytest.mark.parametrize("newest", [False, True])
def test_a_node_at_the_end_of_claim_no_fails_with_its_event_and_outbox_row(
    conn: engine.Connection, caplog: pytest.LogCaptureFixture, queue: str, newest: bool
) -> None:
    run_id = bad_node(conn, queue)
    good = factories.node(conn, queue=queue, priority=1)["id"]
    who = transitions.who(queue, newest=newest, lane=3)
    subject = claimer.Claimer(job_tables.NODE_JOBS, lambda: who)
    try:
        with caplog.at_level(logging.WARNING):
            claimed = [subject.claim(), subject.claim()]
    finally:
        subject.close()
    assert [job and job["id"] for job in claimed] == [good, None]
    job = rows(conn, "workflow_node_jobs")[good]
    assert (job["status"], job["worker_id"], job["worker_lane"]) == ("running", "w1", 3)
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


def test_a_worker_of_models_gets_none_that_it_does_not_know(conn: engine.Connection) -> None:
    bad_node(conn, "gpu", required_model="'a'")
    factories.node(conn, queue="gpu", required_model="b", priority=1)
    known = factories.node(conn, queue="gpu", required_model="a", priority=2)["id"]
    who = transitions.who("gpu", models=["a"])
    found = claim_isolation.claim_apart(conn, job_tables.NODE_JOBS, who, promote=False)
    assert found.job_id == known


@pytest.mark.parametrize("inline", [False, True], ids=["executor", "inline"])
def test_a_completion_is_kept_although_the_next_claim_raises(
    conn: engine.Connection, inline: bool
) -> None:
    first = factories.ingest(conn, queue=QUEUE, priority=0)["id"]
    node = factories.node(conn, priority=0)["id"]
    bad_ingest(conn)
    bad_node(conn)
    last = factories.ingest(conn, queue=QUEUE)["id"]
    for queue, table in ((QUEUE, "ingest_jobs"), ("cpu", "workflow_node_jobs")):
        worker = claim_worker.ClaimWorker(queue=queue, host="box", inline=inline)

        def stop_at_the_end(worker: Any = worker, table: str = table) -> None:
            with engine.connect() as own:
                until(lambda: {row["status"] for row in rows(own, table).values()} <= ENDED)
            worker.stop()

        stopper = threading.Thread(target=stop_at_the_end)
        stopper.start()
        worker.run_forever()
        stopper.join()
    found = rows(conn, "ingest_jobs")
    assert [found[each]["status"] for each in (first, last, "bad")] == [
        "completed",
        "completed",
        "failed",
    ]
    found = rows(conn, "workflow_node_jobs")
    assert (found[node]["status"], found["bad"]["status"]) == ("completed", "failed")


def test_a_batch_is_kept_although_the_next_claim_raises(conn: engine.Connection) -> None:
    config.register_ingest_task("counts", lambda reason: {"ran": True})
    for _ in range(4):
        factories.ingest(conn, queue=QUEUE, task_name="counts", priority=0)
    who = transitions.who(QUEUE)
    subject = claimer.Claimer(job_tables.INGEST_JOBS, lambda: who)
    try:
        first = subject.claim_batch(4)
        for number in range(3):
            bad_ingest(conn, f"bad-{number}")
        after = factories.ingest(conn, queue=QUEUE)["id"]
        results = [
            finish.Done(
                job_tables.lease_of(job_tables.INGEST_JOBS, job),
                outcomes.Outcome("completed", 0.1),
            )
            for job in first
        ]
        assert [job["id"] for job in subject.claim_batch(4, results)] == [after]
        assert subject.isolated
        assert subject.claim_batch(4) == []
        assert not subject.isolated
    finally:
        subject.close()
    statuses = [row["status"] for row in rows(conn, "ingest_jobs").values()]
    assert sorted(statuses) == ["completed"] * 4 + ["failed"] * 3 + ["running"]


def test_a_job_that_an_apps_trigger_refuses_is_ended_or_blocked_or_skipped(
    conn: engine.Connection,
) -> None:
    for name in ("claim", "end", "any"):
        factories.ingest(conn, id=name, queue=QUEUE, priority=1)
    good = factories.ingest(conn, queue=QUEUE)["id"]
    when = (
        "OLD.id = 'any' OR OLD.id IN ('claim', 'end') AND NEW.status = 'running'"
        " OR OLD.id = 'end' AND NEW.status = 'failed'"
    )
    with refusing(conn, "ingest_jobs", when):
        found = claim_isolation.claim_apart(
            conn, job_tables.INGEST_JOBS, transitions.who(QUEUE), promote=True
        )
        assert found.job_id == good
        assert {each["id"]: each["became"] for each in found.aside} == {
            "claim": "failed",
            "end": "set_aside",
            "any": "skipped",
        }
        assert not claim_worker.ClaimWorker(queue=QUEUE, host="box").run_once()
    found = rows(conn, "ingest_jobs")
    assert found["end"]["blocked_reason"] == "set_aside"
    assert found["claim"]["status"] == "failed"
    assert "the app refuses claim" in found["claim"]["error"]


def test_a_temporarily_refused_job_is_retried_if_nothing_else_can_be_claimed(
    conn: engine.Connection,
) -> None:
    first = factories.ingest(conn, queue=QUEUE)["id"]
    factories.ingest(conn, queue=QUEUE)
    with refusing(conn, "ingest_jobs", "NEW.status = 'running'"):
        found = claim_isolation.claim_apart(
            conn, job_tables.INGEST_JOBS, transitions.who(QUEUE), promote=False
        )
        assert (found.job_id, {e["became"] for e in found.aside}) == (None, {"postponed"})
    row = rows(conn, "ingest_jobs")[first]
    assert (row["status"], row["blocked_reason"], row["error"]) == ("queued", "not_due", None)


@pytest.mark.parametrize("state", ["42501", "53100", "57014"])
def test_nobody_is_ended_for_an_error_of_the_system(conn: engine.Connection, state: str) -> None:
    for _ in range(2):
        factories.ingest(conn, queue=QUEUE)
    with refusing(conn, "ingest_jobs", "NEW.status = 'running' AND OLD.seq % 2 = 0", state):
        subject = claimer.Claimer(job_tables.INGEST_JOBS, lambda: transitions.who(QUEUE))
        claimed: list[Row | None] = []
        with pytest.raises(psycopg.Error), contextlib.closing(subject):
            claimed += [subject.claim() for _ in range(2)]
    for row in rows(conn, "ingest_jobs").values():
        assert row["status"] in ("queued", "running")
        assert row["blocked_reason"] is None


def test_the_classes_of_errors_are_the_same_in_sql(conn: engine.Connection) -> None:
    letters = "0123456789ABCDFHPQVWXZ"
    states = {first + second for first in letters for second in letters}
    assert states > claim_isolation.SYSTEMIC | claim_isolation.DATA
    for state in sorted(states):
        row = conn.execute(
            "SELECT queue_workflows_is_systemic(%s) AS systemic,"
            " queue_workflows_is_about_data(%s) AS data",
            (state + "000", state + "000"),
        ).fetchone()
        assert row == {
            "systemic": state in claim_isolation.SYSTEMIC,
            "data": state in claim_isolation.DATA,
        }


def test_a_row_that_another_worker_tries_is_left_to_it(
    conn: engine.Connection,
) -> None:
    bad_ingest(conn)
    good = factories.ingest(conn, queue=QUEUE)["id"]
    with engine.connect() as other, other.transaction():
        other.execute("SELECT 1 FROM ingest_jobs WHERE id = 'bad' FOR UPDATE")
        found = claim_isolation.claim_apart(
            conn, job_tables.INGEST_JOBS, transitions.who(QUEUE), promote=False
        )
        assert (found.job_id, found.aside) == (good, [])
    assert rows(conn, "ingest_jobs")["bad"]["status"] == "queued"


def test_limits_lock_keys_pauses_and_off_hold_there_too(conn: engine.Connection) -> None:
    from queue_workflows import queues

    bad_ingest(conn)
    for number in range(2):
        factories.ingest(conn, id=f"k{number}", queue=QUEUE, lock_key="k", priority=2)
    factories.ingest(conn, id="free", queue=QUEUE, priority=3)
    who = transitions.who(QUEUE)

    def claimed() -> str | None:
        return claim_isolation.claim_apart(conn, job_tables.INGEST_JOBS, who, promote=False).job_id

    workers.disable("box", QUEUE)
    assert claimed() is None
    workers.enable("box", QUEUE)
    queues.pause(QUEUE)
    assert claimed() is None
    queues.resume(QUEUE)
    assert [claimed(), claimed(), claimed()] == ["k0", "free", None]
    queues.limit(QUEUE, max_running=2)
    factories.ingest(conn, queue=QUEUE)
    assert claimed() is None
    queues.limit(QUEUE, max_running=3)
    assert claimed() is not None


def test_a_due_row_that_raises_keeps_no_other_from_coming_due(conn: engine.Connection) -> None:
    for name in ("bad", "good"):
        factories.ingest(conn, id=name, queue=QUEUE)
    conn.execute(
        "UPDATE ingest_jobs SET available_at = now() + interval '1 hour' WHERE queue = %s", (QUEUE,)
    )
    conn.execute("SET session_replication_role = replica")
    conn.execute("UPDATE ingest_jobs SET available_at = now() - interval '1 hour'")
    conn.execute("SET session_replication_role = origin")
    with refusing(conn, "ingest_jobs", "OLD.id = 'bad' AND NEW.available_at IS NULL"):
        assert claim_worker.ClaimWorker(queue=QUEUE, host="box").run_once()
    found = rows(conn, "ingest_jobs")
    assert found["good"]["status"] == "completed"
    assert found["bad"]["status"] in ("failed", "queued")


@pytest.mark.parametrize("family", ["node", "ingest"])
def test_apps_that_claim_by_themselves_get_past_it_too(
    conn: engine.Connection, family: str
) -> None:
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


def test_an_end_that_the_data_forbids_fails_the_job_uncharged(conn: engine.Connection) -> None:
    def fails(reason: str) -> None:
        raise RuntimeError("boom")

    config.register_ingest_task("fails", fails)
    factories.ingest(conn, id="bad", queue=QUEUE, task_name="fails")
    with refusing(
        conn,
        "ingest_jobs",
        "OLD.status = 'running' AND NEW.status <> 'running' AND NEW.attempts > 0",
        "22003",
    ):
        assert claim_worker.ClaimWorker(queue=QUEUE, host="box").run_once()
    row = rows(conn, "ingest_jobs")["bad"]
    assert (row["status"], row["crash_count"]) == ("failed", 0)
    assert "its end cannot be recorded: the app refuses bad" in row["error"]


def leases(conn: engine.Connection, count: int) -> list[job_tables.Lease]:
    who = transitions.who(QUEUE)
    for number in range(count):
        factories.ingest(conn, id=f"j{number}", queue=QUEUE)
    jobs = transitions.claim(conn, who, count)
    return [job_tables.lease_of(job_tables.INGEST_JOBS, job) for job in jobs]


def test_a_renewal_that_one_row_refuses_renews_the_others(conn: engine.Connection) -> None:
    from queue_workflows.worker import guards

    ends = {lease: guards.LeaseEnd(0.0, 5.0) for lease in leases(conn, 3)}
    with refusing(conn, "ingest_jobs", "OLD.id = 'j1'"):
        found = claim_writes.renew(conn, ends, {}, lease_s=60.0, sent=100.0)
    assert found == claims_in_flight.RenewalResult([], [])
    assert {lease.job_id: end.ends for lease, end in ends.items()} == {
        "j0": 105.0,
        "j1": 5.0,
        "j2": 105.0,
    }


@pytest.mark.parametrize("way", ["hand back", "strays", "dead"])
def test_a_hand_back_of_several_jobs_skips_a_row_that_refuses(
    conn: engine.Connection, way: str
) -> None:
    held_ = leases(conn, 3)
    with refusing(conn, "ingest_jobs", "OLD.id = 'j1'"), conn.transaction():
        if way == "hand back":
            changed = handback.hand_back_all(conn, held_, reason="test")
        elif way == "strays":
            changed = transitions.release_strays(conn, "ingest", "w1", [])
        else:
            changed = recovery.reclaim_dead(
                conn, job_tables.INGEST_JOBS, prefix="w1", evidence="died"
            )
    assert sorted(row["id"] for row in changed) == ["j0", "j2"]
    assert {row["status"] for row in changed} == {"queued"}
    assert rows(conn, "ingest_jobs")["j1"]["status"] == "running"


def test_an_outcome_is_never_a_failure_of_the_job_behind(conn: engine.Connection) -> None:
    """What a worker had finished was recorded as failed when the claim in its statement raised."""
    job = factories.ingest(conn, queue=QUEUE, max_attempts=1, priority=0)["id"]
    bad_ingest(conn)
    who = transitions.who(QUEUE)
    subject = claimer.Claimer(job_tables.INGEST_JOBS, lambda: who)
    from queue_workflows.worker import current_job, guards

    try:
        row = subject.claim()
        assert row is not None
        work = current_job.Work(job_tables.INGEST_JOBS, row, guards.LeaseEnd(subject.sent_at, 60))
        assert subject.finish(work, outcomes.Outcome("completed", 0.1), claim=True) is None
    finally:
        subject.close()
    assert rows(conn, "ingest_jobs")[job]["status"] == "completed"
