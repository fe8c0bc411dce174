"""Policies end to end: jobs that fail, snooze, or time out without an answer."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import psycopg
import pytest

import queue_workflows
from queue_workflows import claim_worker, config, db, node_queue, runs
from queue_workflows.db import Connection
from tests.support import factories, flow, sweeps
from tests.support.flow import Flow

pytestmark = pytest.mark.usefixtures("invariants_hold")


class Flaky:
    """A handler that raises these in turn, then ends well."""

    def __init__(self, *raised: BaseException) -> None:
        self.raised = list(raised)
        self.calls = 0

    def __call__(self) -> dict[str, Any]:
        self.calls += 1
        if self.calls <= len(self.raised):
            raise self.raised[self.calls - 1]
        return {"calls": self.calls}


def node_events(db: ModuleType, run_id: str) -> list[tuple[str, str | None]]:
    with db.connect() as conn:
        rows = conn.execute(
            "SELECT event_type, error FROM workflow_node_events WHERE run_id = %s ORDER BY id",
            (run_id,),
        ).fetchall()
    return [(row["event_type"], row["error"]) for row in rows]


def one_node(toy: Flow, body: Any, **policy: Any) -> str:
    flow.body(body)
    toy.define(flow.step("s"), s=[{"id": "a", "node": "body", **policy}])
    return toy.started()


def test_a_flaky_node_is_tried_again_and_its_run_completes(toy: Flow, db: ModuleType) -> None:
    body = Flaky(OSError("first"), OSError("second"))
    run_id = one_node(toy, body, retries=2, backoff=0)
    toy.go()
    assert (flow.status(run_id), body.calls) == ("completed", 3)
    job = flow.job(run_id, "s/a")
    assert (job["attempts"], job["max_attempts"], job["claim_no"]) == (2, 3, 3)
    assert (job["crash_count"], job["watchdog_retries"]) == (0, 0)
    assert node_events(db, run_id) == [
        ("claimed", None), ("retried", "OSError: first"),
        ("claimed", None), ("retried", "OSError: second"),
        ("claimed", None), ("completed", None),
    ]  # fmt: skip
    with db.connect() as conn:
        kinds = factories.column(conn, "SELECT kind FROM workflow_dispatch_events ORDER BY id")
        traces = factories.column(
            conn,
            "SELECT detail ->> 'traceback' FROM workflow_node_events"
            " WHERE event_type = 'retried' ORDER BY id",
        )
    assert kinds == ["completed"]
    assert ["first" in traces[0], "second" in traces[1]] == [True, True]


def test_the_last_attempt_fails_the_run(toy: Flow) -> None:
    body = Flaky(*[ValueError("no")] * 9)
    run_id = one_node(toy, body, retries=1, backoff=0)
    toy.go()
    assert (flow.status(run_id), body.calls) == ("failed", 2)
    assert flow.job(run_id, "s/a")["attempts"] == 2


def test_a_retry_waits_as_long_as_its_backoff(toy: Flow, db: ModuleType) -> None:
    backoff = {"kind": "exponential", "base_s": 500}
    run_id = one_node(toy, Flaky(ValueError("no")), retries=5, backoff=backoff)
    toy.work()
    job = flow.job(run_id, "s/a")
    assert (job["status"], job["blocked_reason"], job["attempts"]) == ("queued", "not_due", 1)
    with db.connect() as conn:
        wait_s = factories.one(
            conn, "SELECT extract(epoch FROM available_at - now()) FROM workflow_node_jobs"
        )
    assert 440 < wait_s <= 500


@pytest.mark.parametrize(
    ("policy", "calls"),
    [
        ({"retry_on": ["ConnectionError"]}, 1),
        ({"retry_on": ["builtins.LookupError"]}, 3),
        ({"discard_on": ["Exception"]}, 1),
        ({"discard_on": ["OSError"]}, 3),
    ],
)
def test_only_what_the_policy_names_is_tried_again(
    toy: Flow, policy: dict[str, Any], calls: int
) -> None:
    body = Flaky(*[KeyError("k")] * 9)
    run_id = one_node(toy, body, retries=2, backoff=0, **policy)
    toy.go()
    assert (flow.status(run_id), body.calls) == ("failed", calls)


def test_a_policy_that_sql_wrote_wrongly_is_no_worse_than_none(db: ModuleType) -> None:
    queue_workflows.register_ingest_task("t", Flaky(ValueError("no")))
    with db.connect() as conn:
        job = factories.ingest(conn, policy={"backoff": "soon"}, max_attempts=2)
    worker = claim_worker.ClaimWorker(queue="fetch", host="box")
    assert worker.run_once()
    row = node_queue.get_ingest_job(job["id"])
    assert row is not None
    assert (row["status"], row["blocked_reason"]) == ("queued", "not_due")


def test_a_policy_is_in_the_nodes_row(toy: Flow) -> None:
    toy.workflows["w"] = {"name": "w", "steps": [flow.step("s")]}
    toy.pipelines["s"] = {
        "nodes": [{"id": "a", "node": "ok", "priority": 7}, {"id": "b", "node": "ok"}],
        "defaults": {"retries": 4, "timeout_s": 9, "lock_key": "k", "retry_on": "OSError"},
    }
    run_id = toy.started(priority=50)
    first, second = flow.job(run_id, "s/a"), flow.job(run_id, "s/b")
    columns = ("priority", "max_attempts", "timeout_s", "lock_key", "policy")
    rest = (5, 9.0, "k", {"retry_on": ["OSError"]})
    assert tuple(first[name] for name in columns) == (7, *rest)
    assert tuple(second[name] for name in columns) == (50, *rest)


def test_a_bad_policy_fails_the_run_with_the_node_that_has_it(toy: Flow) -> None:
    toy.define(flow.step("s"), s=[{"id": "a", "retries": -2}])
    run_id = toy.started()
    assert flow.status(run_id) == "failed"
    assert "node 'a': 'retries' must be 0 to 1000, not -2" in flow.run(run_id)["error"]


def test_a_snoozed_node_counts_no_attempt(toy: Flow, conn: Connection) -> None:
    body = Flaky(*[queue_workflows.Snooze(300)] * 4)
    run_id = one_node(toy, body)
    toy.go()
    for _ in range(4):
        with db.connect() as conn:
            conn.execute(
                "UPDATE workflow_node_jobs SET available_at = now() WHERE status = 'queued'"
            )
        toy.go()
    job = flow.job(run_id, "s/a")
    assert (flow.status(run_id), body.calls) == ("completed", 5)
    assert (job["attempts"], job["claim_no"]) == (0, 5)
    kinds = [kind for kind, _ in node_events(db, run_id)]
    assert kinds == ["claimed", "requeued"] * 4 + ["claimed", "completed"]


def test_a_snooze_waits(toy: Flow, db: ModuleType) -> None:
    one_node(toy, Flaky(queue_workflows.Snooze(300)))
    toy.work()
    with db.connect() as conn:
        wait_s = factories.one(
            conn, "SELECT extract(epoch FROM available_at - now()) FROM workflow_node_jobs"
            " WHERE blocked_reason = 'not_due'",
        )  # fmt: skip
    assert 240 < wait_s <= 300


def test_a_handler_that_requests_a_retry_gets_it_against_its_policy(toy: Flow) -> None:
    body = Flaky(queue_workflows.Retry(0))
    run_id = one_node(toy, body, retries=1, backoff=99, discard_on=["Exception"])
    toy.go()
    assert (flow.status(run_id), body.calls) == ("completed", 2)


def test_a_requested_retry_is_bounded_by_the_attempts(toy: Flow) -> None:
    body = Flaky(*[queue_workflows.Retry(0)] * 9)
    run_id = one_node(toy, body, retries=2)
    toy.go()
    assert (flow.status(run_id), body.calls) == ("failed", 3)


def test_a_handler_that_discards_its_job_fails_at_once(toy: Flow) -> None:
    body = Flaky(queue_workflows.Discard("the source is gone"))
    run_id = one_node(toy, body, retries=9, backoff=0)
    toy.go()
    assert (flow.status(run_id), body.calls) == ("failed", 1)
    assert "the source is gone" in flow.run(run_id)["error"]


@pytest.mark.parametrize(
    ("signal", "status", "attempts"),
    [
        (queue_workflows.Snooze(60), "queued", 0),
        (queue_workflows.Retry(60), "queued", 1),
        (queue_workflows.Discard("no"), "failed", 1),
    ],
)
def test_a_task_may_return_its_signal(
    db: ModuleType, signal: Any, status: str, attempts: int
) -> None:
    queue_workflows.register_ingest_task("t", lambda reason: signal)
    with db.connect() as conn:
        job = factories.ingest(conn, max_attempts=3)
    worker = claim_worker.ClaimWorker(queue="fetch", host="box")
    assert worker.run_once()
    row = node_queue.get_ingest_job(job["id"])
    assert row is not None
    assert (row["status"], row["attempts"]) == (status, attempts)


def waiting(toy: Flow, **more: Any) -> str:
    toy.define(
        flow.ask("ask", **more),
        flow.step("s", depends_on=["ask"]),
        s=flow.nodes(a=""),
    )
    run_id = toy.started()
    toy.work()
    toy.look()
    assert flow.states(run_id)["ask"] == "awaiting_input"
    return run_id


OVERDUE = "UPDATE workflow_input_timeouts SET due_at = now() - interval '1 second'"


def test_an_input_nobody_answers_takes_its_default(toy: Flow, conn: Connection) -> None:
    run_id = waiting(toy, timeout_s=3600, default="blue")
    sweeps.expire_inputs(conn)
    assert flow.states(run_id)["ask"] == "awaiting_input"
    conn.execute(OVERDUE)
    sweeps.expire_inputs(conn)
    toy.go()
    assert flow.status(run_id) == "completed"
    assert flow.job(run_id, "ask")["context_delta"] == {"answer": "blue"}
    assert factories.one(conn, "SELECT count(*) FROM workflow_input_timeouts") == 0


@pytest.mark.parametrize(("default", "delta"), [(None, {}), (5, {"answer": 5})])
def test_a_default_may_be_no_answer_to_a_question_with_a_type(
    toy: Flow, conn: Connection, default: int | None, delta: dict[str, int]
) -> None:
    typed = {"widget": "amount", "$answer_type": "integer"}
    run_id = waiting(toy, timeout_s=3600, default=default, **typed)
    conn.execute(OVERDUE)
    sweeps.expire_inputs(conn)
    assert flow.job(run_id, "ask")["context_delta"] == delta
    assert flow.states(run_id)["ask"] == "completed"


def test_an_input_without_a_default_fails_its_run(toy: Flow, conn: Connection) -> None:
    run_id = waiting(toy, timeout_s=3600)
    conn.execute(OVERDUE)
    sweeps.expire_inputs(conn)
    toy.go()
    assert flow.status(run_id) == "failed"
    assert "nobody answered within 3600 s" in flow.run(run_id)["error"]


def test_an_answer_that_came_before_the_timeout_wins(toy: Flow, conn: Connection) -> None:
    run_id = waiting(toy, timeout_s=3600, default="blue")
    runs.answer(run_id, "ask", "red")
    conn.execute(OVERDUE)
    sweeps.expire_inputs(conn)
    toy.go()
    conn.execute(OVERDUE)
    sweeps.expire_inputs(conn)
    assert flow.job(run_id, "ask")["context_delta"] == {"answer": "red"}
    assert flow.status(run_id) == "completed"


def test_a_timeout_that_sql_wrote_as_text_works_too(toy: Flow, conn: Connection) -> None:
    run_id = waiting(toy, timeout_s=3600)
    conn.execute("""UPDATE workflow_node_jobs SET policy = '{"timeout_s": "1"}'""")
    conn.execute(OVERDUE)
    sweeps.expire_inputs(conn)
    assert flow.job(run_id, "ask")["error"] == "nobody answered within 1 s"


def test_an_answer_that_is_being_handed_in_wins(toy: Flow, conn: Connection) -> None:
    run_id = waiting(toy, timeout_s=3600, default="blue")
    conn.execute(OVERDUE)
    with db.transaction() as mine:
        runs.answer(run_id, "ask", "red", conn=mine)
        sweeps.expire_inputs(conn)
    toy.go()
    conn.execute(OVERDUE)
    sweeps.expire_inputs(conn)
    assert flow.job(run_id, "ask")["context_delta"] == {"answer": "red"}


def test_an_answer_that_a_killed_listener_had_claimed_wins(toy: Flow, conn: Connection) -> None:
    run_id = waiting(toy, timeout_s=3600, default="blue")
    runs.answer(run_id, "ask", "red")
    claimed = "UPDATE workflow_input_submissions SET status = 'processing', claimed_at = now()"
    conn.execute(claimed)
    conn.execute(OVERDUE)
    sweeps.expire_inputs(conn)
    assert flow.states(run_id)["ask"] == "awaiting_input"
    conn.execute("UPDATE workflow_input_submissions SET claimed_at = now() - interval '1 hour'")
    toy.go()
    assert flow.job(run_id, "ask")["context_delta"] == {"answer": "red"}
    assert flow.status(run_id) == "completed"


def test_an_answer_that_comes_after_the_check_waits_for_its_outcome(
    toy: Flow, conn: Connection
) -> None:
    run_id = waiting(toy, timeout_s=3600, default="blue")
    conn.execute(OVERDUE)
    with db.transaction() as sweep, db.transaction() as other:
        job_id = flow.job(run_id, "ask")["id"]
        assert sweeps.hold_overdue_input(sweep, job_id)
        other.execute("SET LOCAL lock_timeout = '200ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            runs.answer(run_id, "ask", "red", conn=other)


def test_an_input_without_a_timeout_waits_for_ever(toy: Flow, conn: Connection) -> None:
    waiting(toy, default="blue")
    assert factories.one(conn, "SELECT count(*) FROM workflow_input_timeouts") == 0


def test_the_node_pool_sweeps_inputs_and_lock_queues() -> None:
    with sweeps.tasks() as made:
        assert {"input-timeouts", "lock-keys"} <= {task.name for task in made.tasks()}
    assert config.LEASE_RECLAIM_INTERVAL_S.read() <= 5
