"""What the end of a claim writes and what it leaves alone: results, steps, maps, cancellations."""

from __future__ import annotations

import json
import threading
from types import ModuleType
from typing import Any

import pytest

from queue_workflows import db, jobs
from queue_workflows.types import Row
from tests.support import factories, transitions
from tests.support.wait import until

COUNTS = [
    pytest.param(kind, count, id=f"{kind}-{count}")
    for kind in transitions.KINDS
    for count in (1, 3)
]
of_each_end = pytest.mark.parametrize(("kind", "count"), COUNTS)
of_each_kind = pytest.mark.parametrize("kind", transitions.KINDS)


def claimant(kind: transitions.Kind, worker_id: str = "w1") -> transitions.Claimant:
    return transitions.who("cpu" if kind == "node" else "fetch", worker_id)


def claimed(
    conn: db.Connection, kind: transitions.Kind, worker_id: str = "w1", **columns: Any
) -> Row:
    """Queue and claim a job."""
    factories.of(conn, kind, **columns)
    (job,) = transitions.claim(conn, claimant(kind, worker_id))
    return job


def claimed_again(conn: db.Connection, kind: transitions.Kind) -> tuple[Row, Row]:
    """Return the lost claim of a job and the current one, of the same worker."""
    lost = claimed(conn, kind, max_attempts=9)
    transitions.hand_back(conn, lost)
    (held,) = transitions.claim(conn, claimant(kind))
    assert (held["id"], held["claim_no"]) == (lost["id"], 2)
    return lost, held


@of_each_end
def test_a_completed_job_keeps_the_last_message_of_its_progress(
    conn: db.Connection, kind: transitions.Kind, count: int
) -> None:
    running = [claimed(conn, kind) for _ in range(count)]
    told = ['{"done": 3}', '"nearly"', "0.5"][:count]
    transitions.renew(conn, *running, progress=told)
    transitions.complete_and_claim(conn, running, claimant(kind), count)
    kept = [factories.reread(conn, job)["progress"] for job in running]
    assert kept == [{"done": 3}, "nearly", 1][:count]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("ends", [False, True], ids=["queues", "ends"])
def test_a_worker_does_not_continue_a_run_that_is_over(
    conn: db.Connection, count: int, ends: bool
) -> None:
    runs = [factories.run(conn) for _ in range(count)]
    nodes = [claimed(conn, "node", run_id=run_id) for run_id in runs]
    conn.execute("UPDATE workflow_runs SET status = 'cancelled'")
    plan = transitions.plan(complete=True) if ends else transitions.plan("next")
    transitions.complete_with_plans(conn, [(node, plan) for node in nodes])
    assert set(factories.column(conn, "SELECT status FROM workflow_runs")) == {"cancelled"}
    assert factories.column(conn, "SELECT status FROM workflow_node_jobs") == ["completed"] * count
    closed = "SELECT processed_at IS NOT NULL FROM workflow_dispatch_events"
    assert factories.column(conn, closed) == [False] * count


@pytest.mark.parametrize("count", [1, 2])
def test_a_worker_leaves_a_run_that_is_locked_to_the_orchestrator(
    conn: db.Connection, db: ModuleType, count: int
) -> None:
    nodes = [claimed(conn, "node") for _ in range(count)]
    with db.connect() as other, other.transaction(), conn.transaction():
        other.execute("SELECT FROM workflow_runs FOR NO KEY UPDATE")
        conn.execute("SET LOCAL lock_timeout = '1s'")
        transitions.complete_with_plans(conn, [(node, transitions.plan("next")) for node in nodes])
        closed = "SELECT processed_at IS NOT NULL FROM workflow_dispatch_events"
        assert factories.column(conn, closed) == [False] * count


def test_a_watchdog_queues_a_node_again_as_often_as_the_knob_says(
    conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_WATCHDOG_MAX_RETRIES", "2")
    factories.node(conn)
    ended: list[str] = []
    while jobs_left := transitions.claim(conn, claimant("node")):
        row = transitions.end_by_watchdog(conn, jobs_left[0])
        assert row is not None
        ended.append(row["status"])
    assert ended == ["queued", "queued", "failed"]


def test_a_trip_that_cannot_be_noted_ends_no_attempt(conn: db.Connection) -> None:
    held = claimed(conn, "ingest")
    conn.execute(
        "CREATE FUNCTION test_refuse() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN IF NEW.event_type = 'budget_trip' THEN RAISE EXCEPTION 'no trip'; END IF;"
        " RETURN NEW; END $$;"
        " CREATE TRIGGER zz_refuse BEFORE INSERT ON ingest_job_events"
        " FOR EACH ROW EXECUTE FUNCTION test_refuse()"
    )
    try:
        with pytest.raises(db.Error, match="no trip"):
            transitions.end_by_watchdog(conn, held)
    finally:
        conn.execute("DROP FUNCTION test_refuse CASCADE")
    assert factories.reread(conn, held)["status"] == "running"
    ended = transitions.end_by_watchdog(conn, held)
    assert ended is not None
    assert "budget_trip" in factories.events(conn, held["id"])


def test_a_lost_claim_stores_no_received_inputs(conn: db.Connection) -> None:
    lost, held = claimed_again(conn, "node")
    more = {"error": "broke", "resolved_inputs": '{"of": "lost"}'}
    assert transitions.record(conn, lost, "failed", **more) == "skipped"
    assert factories.reread(conn, held)["resolved_inputs"] is None
    assert factories.reread(conn, held)["status"] == "running"


@of_each_kind
def test_a_worker_keeps_the_claims_that_it_knows(
    conn: db.Connection, kind: transitions.Kind
) -> None:
    known, stray, other = (claimed(conn, kind, worker_id=each) for each in ("w1", "w1", "w2"))
    (back,) = transitions.release_strays(conn, kind, known=[known])
    assert back["id"] == stray["id"]
    assert factories.reread(conn, known)["status"] == "running"
    assert factories.reread(conn, other)["status"] == "running"


@of_each_kind
def test_a_job_that_is_queued_again_names_no_host(
    conn: db.Connection, kind: transitions.Kind
) -> None:
    job = claimed(conn, kind)
    assert factories.reread(conn, job)["claimed_by"] == "box"
    transitions.hand_back(conn, job)
    again = factories.reread(conn, job)
    assert (again["status"], again["claimed_by"], again["started_at"]) == ("queued", None, None)


@of_each_kind
def test_a_plain_update_that_ends_a_claim_of_0_3_0_clears_it(
    conn: db.Connection, kind: transitions.Kind
) -> None:
    make = factories.node if kind == "node" else factories.ingest
    job = make(conn, status="running", claimed_by="old")
    assert job["worker_id"] == "legacy:old" and job["lease_expires_at"] is not None
    factories.change(conn, job, "status = 'completed', finished_at = now()")
    ended = factories.reread(conn, job)
    assert (ended["worker_id"], ended["lease_expires_at"]) == (None, None)


# --- plans and maps


@pytest.mark.parametrize(("failed_in", "inserted"), [(0, 1), (1, 0)], ids=["before", "in it"])
def test_a_plan_opens_what_failed_in_an_earlier_generation(
    conn: db.Connection, failed_in: int, inserted: int
) -> None:
    run_id = factories.run(conn, generation=1)
    node = factories.node(conn, run_id, status="failed", generation=failed_in)
    rows = transitions.plan("n").rows
    made = factories.one(conn, "SELECT queue_workflows_insert_nodes(%s, %s::jsonb)", run_id, rows)
    assert made == inserted
    status = factories.reread(conn, node)["status"]
    assert status == ("queued" if inserted else "failed")


@pytest.mark.parametrize("status", ["completed", "awaiting_input"])
def test_a_node_that_no_worker_runs_has_no_counter_of_the_one_that_failed(
    conn: db.Connection, status: str
) -> None:
    """An upgrade has made it a step of another kind."""
    run_id = factories.run(conn, generation=1)
    node = factories.node(
        conn, run_id, status="failed", attempts=2, max_attempts=3, crash_count=1, pipeline_name="p"
    )
    row: dict[str, Any] = {
        "node_id": "n", "node_module": "m", "queue": "cpu", "status": status, "inputs": {"i": 1},
        "input_template": {}, "ref_heads": [], "context_delta": {"r": 1},
    }  # fmt: skip
    insert = "SELECT queue_workflows_insert_nodes(%s, %s::jsonb)"
    assert factories.one(conn, insert, run_id, json.dumps([row])) == 1
    found = factories.reread(conn, node)
    counters = [found[name] for name in ("attempts", "max_attempts", "crash_count")]
    assert (found["status"], found["pipeline_name"], counters) == (status, None, [0, 1, 0])
    sent = "SELECT kind FROM workflow_dispatch_events WHERE processed_at IS NOT NULL"
    assert factories.column(conn, sent) == (["completed"] if status == "completed" else [])
    assert factories.one(conn, insert, run_id, json.dumps([row])) == 0


def test_an_item_of_a_map_is_counted_once_however_often_it_is_named(
    conn: db.Connection,
) -> None:
    run_id = factories.run(conn)
    items = json.dumps([{"key": key, "item": key} for key in "abcd"])
    opened = "SELECT queue_workflows_open_map(%s, 'm', %s::jsonb, 2, 1, 1, 4, 'm')"
    factories.one(conn, opened, run_id, items)

    def step(done: list[str], failed: dict[str, str]) -> Row:
        counted = "SELECT queue_workflows_step_map(%s, 'm', %s, %s::jsonb)"
        return factories.one(conn, counted, run_id, done, json.dumps(failed))

    assert [item["key"] for item in step([], {})["items"]] == ["a", "b"]
    first = step(["a", "a"], {"b": "broke"})
    assert (first["done"], first["failed"], first["open"]) == (1, 1, 2)
    again = step(["a"], {"b": "broke"})
    assert again == first | {"items": []}


# --- steps


def begun(conn: db.Connection, job: Row, kind: str, claim_no: int, **columns: Any) -> Row:
    """Insert a step of a job that runs under a claim."""
    table = transitions.TABLES[transitions.kind_of(job)]
    given = {"job_table": table, "job_id": job["id"], "kind": kind, "name": "s",
             "claim_no": claim_no, "state": "running"}  # fmt: skip
    return factories.insert(conn, "job_steps", **(given | columns))


@of_each_kind
def test_a_crash_counts_for_the_steps_of_its_claim(
    conn: db.Connection, kind: transitions.Kind
) -> None:
    _, held = claimed_again(conn, kind)
    begun(conn, held, "step", 1, key="earlier")
    begun(conn, held, "step", 2, key="now")
    transitions.charge(conn, held)
    crashes = "SELECT crashes FROM job_steps ORDER BY key"
    assert factories.column(conn, crashes) == [0, 1]


@of_each_kind
def test_a_cursor_never_goes_back(conn: db.Connection, kind: transitions.Kind) -> None:
    job = claimed(conn, kind)
    begun(conn, job, "cursor", 1, position=0)
    for position, stored in ((5, 5), (3, 5), (6, 6)):
        transitions.store_position(conn, job, "s", position)
        assert factories.one(conn, "SELECT position FROM job_steps") == stored


@of_each_kind
def test_a_claim_ends_only_steps_that_it_has_begun(
    conn: db.Connection, kind: transitions.Kind
) -> None:
    _, held = claimed_again(conn, kind)
    begun(conn, held, "step", 1)
    assert transitions.end_step(conn, held, "s", 1) == {"state": "lost"}
    conn.execute("UPDATE job_steps SET claim_no = 2")
    assert transitions.end_step(conn, held, "s", 1) == {"state": "done", "output": "1"}


@of_each_kind
def test_a_step_that_ends_while_it_is_begun_again_stays_done(
    conn: db.Connection, db: ModuleType, kind: transitions.Kind
) -> None:
    """A request that is repeated, as its reply was lost, meets the end of the first one."""
    job = claimed(conn, kind)
    begun(conn, job, "step", 1)
    found: list[Row] = []
    with db.connect() as other, db.connect() as observer:
        repeated = threading.Thread(
            target=lambda: found.append(transitions.begin_step(other, job, "s"))
        )
        with conn.transaction():
            conn.execute("UPDATE job_steps SET state = 'done', output = '7', ended_at = now()")
            repeated.start()
            waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND pid = %s"
            until(
                lambda: factories.one(observer, waits, other.info.backend_pid) or found, timeout_s=5
            )
        repeated.join()
    assert found == [{"state": "lost"}], "it does not run again"
    assert factories.one(conn, "SELECT state FROM job_steps") == "done"


# --- cancellations


@of_each_kind
def test_a_second_request_to_cancel_leaves_the_first(
    conn: db.Connection, kind: transitions.Kind
) -> None:
    job = claimed(conn, kind)
    early = "cancel_requested_at = now() - interval '1 hour'"
    factories.change(conn, job, early)
    first = factories.reread(conn, job)["cancel_requested_at"]
    jobs.cancel(job["id"], conn=conn)
    assert factories.reread(conn, job)["cancel_requested_at"] == first


def test_a_run_that_is_reopened_asks_no_running_node_to_end(conn: db.Connection) -> None:
    job = claimed(conn, "node")
    conn.execute("UPDATE workflow_runs SET status = 'cancelled'")
    factories.change(conn, job, "cancel_requested_at = now()")
    conn.execute("UPDATE workflow_runs SET status = 'queued'")
    row = factories.reread(conn, job)
    assert (row["status"], row["cancel_requested_at"]) == ("running", None)


def test_the_end_of_a_run_is_notified_to_the_workers_of_its_running_nodes(
    conn: db.Connection, heard: Any
) -> None:
    job = claimed(conn, "node")
    idle = factories.run(conn)
    heard()
    conn.execute("UPDATE workflow_runs SET status = 'cancelled'")
    told = [payload for channel, payload in heard() if channel == "job_cancel"]
    assert told == [job["run_id"]] and idle not in told


def test_an_event_behind_a_postponed_one_of_its_run_wakes_the_orchestrator(
    conn: db.Connection, heard: Any
) -> None:
    job = claimed(conn, "node")

    def event(**columns: Any) -> list[tuple[str, str]]:
        heard()
        given = {"run_id": job["run_id"], "node_id": "n", "kind": "completed", "job_id": job["id"]}
        factories.insert(conn, "workflow_dispatch_events", **given, claim_no=1, **columns)
        return heard()

    woken = [("orchestrator_work", "event")]
    assert event() == woken
    assert event() == []
    conn.execute("UPDATE workflow_dispatch_events SET available_at = now() + interval '1 hour'")
    assert event() == woken
