"""What each claim does beside the order of its queue: of one job or several, of either family."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from psycopg import sql

from queue_workflows import db, errors, queues
from tests.support import factories, transitions

COUNTS = [
    pytest.param(kind, count, id=f"{kind}-{count}")
    for kind in transitions.KINDS
    for count in (1, 3)
]
of_each_claim = pytest.mark.parametrize(("kind", "count"), COUNTS)


def claimant(kind: transitions.Kind) -> transitions.Claimant:
    return transitions.who("cpu" if kind == "node" else "fetch")


def change(conn: db.Connection, kind: transitions.Kind, text: str, *values: Any) -> None:
    """Execute a statement whose `{}` is the table of the family."""
    name = sql.Identifier(transitions.TABLES[kind])
    conn.execute(sql.SQL(text).format(name), values)  # pyright: ignore[reportArgumentType]


@of_each_claim
def test_a_claim_passes_a_job_that_another_transaction_has_locked(
    conn: db.Connection, db: ModuleType, kind: transitions.Kind, count: int
) -> None:
    first, second = factories.of(conn, kind), factories.of(conn, kind)
    with db.connect() as other, other.transaction(), conn.transaction():
        change(other, kind, "SELECT FROM {} WHERE id = %s FOR UPDATE", first["id"])
        conn.execute("SET LOCAL lock_timeout = '1s'")
        claimed = transitions.claim(conn, claimant(kind), count)
        assert [job["id"] for job in claimed] == [second["id"]]


@of_each_claim
def test_a_machine_that_is_off_in_every_queue_claims_nothing(
    conn: db.Connection, kind: transitions.Kind, count: int
) -> None:
    factories.of(conn, kind)
    factories.insert(conn, "worker_controls", host_label="box", queue="all", desired_state="off")
    assert transitions.claim(conn, claimant(kind), count) == []
    factories.empty(conn, "worker_controls")
    assert len(transitions.claim(conn, claimant(kind), count)) == 1


@of_each_claim
def test_an_attempt_begins_without_the_error_and_the_progress_of_the_last_one(
    conn: db.Connection, kind: transitions.Kind, count: int
) -> None:
    factories.of(conn, kind, max_attempts=3)
    (job,) = transitions.claim(conn, claimant(kind), count)
    transitions.renew(conn, job, progress=["0.5"])
    waiting = transitions.fail(conn, job, "broke")
    assert waiting is not None
    assert (waiting["status"], waiting["error"], waiting["progress"]) == ("queued", "broke", 0.5)
    change(conn, kind, "UPDATE {} SET available_at = NULL WHERE id = %s", job["id"])
    (again,) = transitions.claim(conn, claimant(kind), count)
    running = factories.reread(conn, again)
    assert (running["status"], running["error"], running["progress"]) == ("running", None, None)


@of_each_claim
def test_the_history_names_the_claim_that_it_records(
    conn: db.Connection, kind: transitions.Kind, count: int
) -> None:
    factories.of(conn, kind, claim_no=6)
    (job,) = transitions.claim(conn, claimant(kind), count)
    events = conn.execute(
        sql.SQL("SELECT event_type, claim_no, worker_id, host_label FROM {}").format(
            sql.Identifier(transitions.EVENTS[kind])
        )
    ).fetchall()
    assert [tuple(event.values()) for event in events] == [("claimed", 7, "w1", "box")]
    assert job["claim_no"] == 7


@pytest.mark.parametrize("count", [1, 3])
def test_a_node_without_refs_has_received_its_inputs_when_it_is_claimed(
    conn: db.Connection, count: int
) -> None:
    factories.of(conn, "node", inputs={"rows": 3}, ref_heads=[])
    (job,) = transitions.claim(conn, claimant("node"), count)
    assert factories.reread(conn, job)["resolved_inputs"] == {"rows": 3}


@of_each_claim
def test_a_claim_takes_the_best_priority_and_of_it_the_oldest(
    conn: db.Connection, kind: transitions.Kind, count: int
) -> None:
    ids = [factories.of(conn, kind, priority=priority)["id"] for priority in (9, 5, 7, 5, 1)]
    claimed: list[str] = []
    while jobs := transitions.claim(conn, claimant(kind), min(count, 2)):
        claimed += [
            job["id"] for job in sorted(jobs, key=lambda job: (job["priority"], job["seq"]))
        ]
    assert claimed == [ids[place] for place in (4, 1, 3, 2, 0)]


@of_each_claim
def test_a_paused_queue_gives_nothing(
    conn: db.Connection, kind: transitions.Kind, count: int
) -> None:
    factories.of(conn, kind)
    queues.pause(claimant(kind).queue)
    assert transitions.claim(conn, claimant(kind), count) == []
    queues.resume(claimant(kind).queue)
    assert len(transitions.claim(conn, claimant(kind), count)) == 1


@pytest.mark.parametrize("count", [1, 3])
def test_a_worker_without_versions_leaves_nodes_that_have_one(
    conn: db.Connection, count: int
) -> None:
    factories.of(conn, "node", required_version="m@1")
    plain = factories.of(conn, "node")
    claimed = transitions.claim(conn, claimant("node"), count)
    assert [job["id"] for job in claimed] == [plain["id"]]


@pytest.mark.parametrize("count", [1, 3])
def test_versioned_nodes_of_a_run_that_is_over_change_no_order(
    conn: db.Connection, count: int
) -> None:
    over = factories.run(conn, status="cancelled")
    factories.of(conn, "node", run_id=over, required_version="m@1", priority=1)
    last = factories.of(conn, "node", required_version="m@1", priority=9)
    first = factories.of(conn, "node", priority=5)
    worker = transitions.who(versions=["m@1"])
    claimed = [job["id"] for _ in range(2) for job in transitions.claim(conn, worker, count)]
    assert claimed == [first["id"], last["id"]]


def test_if_the_nodes_of_one_model_are_locked_another_models_are_claimed(
    conn: db.Connection, db: ModuleType
) -> None:
    first, second = (factories.of(conn, "node", queue="gpu", required_model=name) for name in "ab")
    worker = transitions.who("gpu", models=["a", "b"])
    with db.connect() as other, other.transaction():
        change(other, "node", "SELECT FROM {} WHERE id = %s FOR UPDATE", first["id"])
        assert transitions.claim_node(conn, worker)["id"] == second["id"]


def test_an_overflow_machine_that_claims_one_node_gets_no_other(conn: db.Connection) -> None:
    over, waiting = factories.of(conn, "node", status="completed"), factories.of(conn, "node")
    claim = (
        "SELECT queue_workflows_node_step('w', 'box', 'cpu', 600, true, true, true, true, NULL,"
        " NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, p_only => %s) ->> 'id'"
    )
    assert factories.one(conn, claim, over["id"]) is None
    assert factories.one(conn, claim, waiting["id"]) == waiting["id"]


@pytest.mark.parametrize("kind", transitions.KINDS)
def test_a_renewal_is_a_heartbeat(conn: db.Connection, kind: transitions.Kind) -> None:
    factories.of(conn, kind)
    (job,) = transitions.claim(conn, claimant(kind))
    change(conn, kind, "UPDATE {} SET heartbeat_at = now() - interval '1 hour'")
    transitions.renew(conn, job)
    assert factories.one(
        conn, f"SELECT heartbeat_at > now() - interval '1 minute' FROM {transitions.TABLES[kind]}"
    )


@of_each_claim
def test_no_worker_records_the_results_of_another(
    conn: db.Connection, kind: transitions.Kind, count: int
) -> None:
    for _ in range(count):
        factories.of(conn, kind)
    jobs = transitions.claim(conn, claimant(kind), count)
    other = transitions.who(claimant(kind).queue, "w2")
    with pytest.raises(errors.ClaimLost):
        transitions.complete_and_claim(conn, jobs, other, count)
    assert {factories.reread(conn, job)["status"] for job in jobs} == {"running"}


@pytest.mark.parametrize("kind", transitions.KINDS)
def test_a_kept_job_that_is_claimed_alone_leaves_the_others_free(
    conn: db.Connection, db: ModuleType, kind: transitions.Kind
) -> None:
    crashed, second = factories.of(conn, kind, crash_count=1), factories.of(conn, kind)
    change(
        conn, kind,
        "UPDATE {} SET blocked_reason = 'not_due', available_at = now() + interval '1 hour',"
        " resume_at = now(), resume_until = now() + interval '1 hour', resume_host = 'box'",
    )  # fmt: skip
    with db.connect() as other, conn.transaction():
        claimed = transitions.claim(conn, claimant(kind), 3)
        assert [job["id"] for job in claimed] == [crashed["id"]]
        (beside,) = transitions.claim(other, transitions.who(claimant(kind).queue, "w2"))
        assert beside["id"] == second["id"]


@pytest.mark.parametrize("count", [1, 3])
def test_a_node_gets_the_outputs_of_completed_nodes_alone(conn: db.Connection, count: int) -> None:
    run_id = factories.run(conn)
    for node_id, status in (("done", "completed"), ("broke", "failed")):
        factories.node(conn, run_id, node_id, status=status, context_delta={"of": node_id})
    factories.of(conn, "node", run_id=run_id, ref_heads=["done", "broke"])
    (job,) = transitions.claim(conn, claimant("node"), count)
    assert job["context"] == {"done": {"of": "done"}}
