"""A database of version 0.3.0 with unfinished work is migrated, and reverted."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import psycopg
import pytest

from queue_workflows import claim_worker, config, db, errors, node_pool, node_queue
from tests.support import (
    console,
    engine_0_3,
    factories,
    findings,
    schema_snapshot,
    transitions,
    wait,
)

OURS = [*range(13, db.REQUIRED_VERSION + 1)]
WORKFLOWS: dict[str, Any] = {
    "graph": {
        "name": "graph",
        "steps": [{"id": "s", "kind": "pipeline", "pipeline": "p", "inputs": {"base": 10}}],
    },
    "ask": {
        "name": "ask",
        "steps": [
            {"id": "pick", "kind": "input", "widget": "choose_one", "target": "chosen",
             "prompt": "?"},
            {"id": "use", "kind": "pipeline", "pipeline": "q", "depends_on": ["pick"],
             "inputs": {"x": {"$from": "pick.chosen"}}},
        ],
    },
    "single": {"name": "single", "steps": [{"id": "o", "kind": "pipeline", "pipeline": "o"}]},
}  # fmt: skip
PIPELINES: dict[str, Any] = {
    "p": {
        "name": "p",
        "nodes": [
            {"id": "a", "node": "add"},
            {"id": "b", "node": "add", "depends_on": ["a"]},
            {"id": "c", "node": "add", "depends_on": ["a"]},
            {"id": "e", "node": "add", "depends_on": ["a"]},
            {"id": "d", "node": "add", "depends_on": ["b", "c", "e"]},
        ],
    },
    "q": {
        "name": "q",
        "nodes": [{"id": "n", "node": "add", "inputs": [{"name": "x", "from": "pipeline.x"}]}],
    },
    "o": {"name": "o", "nodes": [{"id": "n", "node": "add"}]},
}


@pytest.fixture
def old(spare: str, clean_process: None, monkeypatch: pytest.MonkeyPatch) -> Generator[ModuleType]:
    """`queue_workflows.db` on a database as 0.3.0 makes it, with an app."""
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", spare)
    config.set_workflow_provider(WORKFLOWS.__getitem__, PIPELINES.__getitem__)
    config.register_node("add", lambda x=0: {"seen": x})
    config.register_ingest_task("t", lambda reason: {"reason": reason})
    with db.connect() as conn:
        conn.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        engine_0_3.make_schema(conn)
    yield db
    db.close_pool()


@pytest.fixture
def conn(old: ModuleType) -> Iterator[Any]:
    with old.connect() as conn:
        conn.prepare_threshold = None  # what was prepared before a migration is not what it gives
        yield conn


def node(conn: Any, run: str, node_id: str, status: str, **more: Any) -> Any:
    """A node job as that engine writes it."""
    given = {
        "id": f"{run}:{node_id}", "node_module": "add", "queue": "cpu", "inputs": {},
        "started_at": None if status == "queued" else "2024-01-01",
    }  # fmt: skip
    return factories.node(conn, run, node_id, status=status, **given | more)


def run_row(conn: Any, run: str, workflow: str, status: str = "running", **more: Any) -> str:
    given = {"id": run, "workflow_name": workflow, "mode": "node", "queued_at": "2024-01-01"}
    return factories.run(conn, status=status, **given | more)


def in_flight(conn: Any) -> None:
    """Rows of every kind, half way."""
    run_row(conn, "graph", "graph")
    node(conn, "graph", "s/a", "completed", context_delta={"seen": 0}, finished_at="2024-01-01")
    node(
        conn, "graph", "s/b", "running", claimed_by="box", host_label="box",
        lease_expires_at="2999-01-01",
    )  # fmt: skip
    node(conn, "graph", "s/c", "running")
    factories.insert(
        conn, "workflow_dispatch_events", run_id="graph", node_id="s/a", kind="completed"
    )

    run_row(conn, "ask", "ask")
    node(
        conn, "ask", "pick", "awaiting_input", node_module="__input__choose_one",
        inputs={"widget": "choose_one", "target": "chosen"},
    )  # fmt: skip
    factories.insert(
        conn, "workflow_dispatch_events", run_id="ask", node_id="pick", kind="awaiting_input"
    )
    factories.insert(
        conn, "workflow_input_submissions", id="sub", run_id="ask", node_id="pick",
        value=psycopg.types.json.Jsonb("5"),
    )  # fmt: skip

    run_row(conn, "new", "single", "queued")
    run_row(conn, "lost", "single", "running")
    node(conn, "lost", "o/n", "failed", error="it broke", finished_at="2024-01-01")
    factories.insert(conn, "workflow_dispatch_events", run_id="lost", node_id="o/n", kind="failed")
    run_row(conn, "steps", "host's own", mode="step")
    run_row(conn, "gone", "no such workflow", "queued")

    for name, status, more in (
        ("first", "queued", {"created_at": "2024-01-01"}),
        ("second", "queued", {"created_at": "2024-01-02"}),
        ("lapsed", "running", {"claimed_by": "box", "lease_expires_at": "2024-01-01"}),
        ("ended", "completed", {"claimed_by": "box", "lease_expires_at": "2024-01-01"}),
    ):
        factories.ingest(conn, id=name, status=status, **more)
    factories.insert(
        conn, "worker_heartbeats", host_label="box", queue="cpu", last_seen="2024-01-01"
    )
    factories.insert(conn, "worker_controls", host_label="other", queue="cpu", desired_state="off")


def settle(until: Callable[[], bool]) -> None:
    """The orchestrator's pieces and workers by turns, until it is so."""
    pool = node_pool.NodePool()
    try:
        for _ in range(40):
            pool.check()
            node_queue.reclaim_expired_leases()
            node_queue.reclaim_expired_ingest_leases()
            worked = [
                claim_worker.ClaimWorker(queue=queue, host="ours").run_once()
                for queue in ("cpu", "fetch")
            ]
            if until() and not any(worked):
                return
    finally:
        pool.stop()
    raise AssertionError("it does not come to its end")


def statuses(conn: Any, table: str) -> dict[str, str]:
    rows = conn.execute(f"SELECT id, status::text AS status FROM {table}").fetchall()
    return {row["id"]: row["status"] for row in rows}


# --- the swap ----------------------------------------------------------------------------------


def test_the_ledger_of_two_columns_is_taken_over(old: ModuleType, conn: Any) -> None:
    assert old.current_schema_version() == 12
    assert old.bootstrap() == OURS
    rows = conn.execute("SELECT * FROM queue_schema_version ORDER BY version").fetchall()
    assert [row["checksum"] is None for row in rows] == [True] * 12 + [False] * len(OURS)
    assert old.bootstrap() == []


def test_the_schema_taken_over_equals_a_new_schema(old: ModuleType, conn: Any) -> None:
    in_flight(conn)
    old.bootstrap()
    taken = schema_snapshot.snapshot(conn)
    conn.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    old.bootstrap()
    assert schema_snapshot.snapshot(conn) == taken


def test_an_empty_model_becomes_none(old: ModuleType, conn: Any) -> None:
    run_row(conn, "r", "w")
    node(conn, "r", "empty", "queued", queue="gpu", required_model="")
    old.bootstrap()
    assert factories.one(conn, "SELECT required_model IS NULL FROM workflow_node_jobs")
    assert transitions.claim_node(conn, transitions.who("gpu", models=["m"]))["node_id"] == "empty"


def test_everything_in_flight_goes_on_to_its_end(old: ModuleType, conn: Any) -> None:
    in_flight(conn)
    old.bootstrap()
    assert engine_0_3.do(conn, engine_0_3.COMPLETE, job="graph:s/b") is not None
    live = (
        "SELECT count(*) FROM workflow_runs WHERE status IN ('queued', 'running') AND mode = 'node'"
    )
    settle(lambda: factories.one(conn, live) == 0)
    assert statuses(conn, "workflow_runs") == {
        "graph": "completed",
        "ask": "completed",
        "new": "completed",
        "lost": "failed",
        "steps": "running",
        "gone": "failed",
    }
    runs = {row["id"]: row for row in conn.execute("SELECT * FROM workflow_runs").fetchall()}
    assert runs["lost"]["error"] == "node o/n failed: it broke"
    assert "no such workflow" in runs["gone"]["error"]
    assert all(runs[name]["definition_hash"] for name in ("graph", "ask", "new"))
    assert runs["steps"]["definition"] is None
    jobs = statuses(conn, "workflow_node_jobs")
    assert jobs.pop("lost:o/n") == "failed"
    assert set(jobs.values()) == {"completed"}
    assert factories.column(
        conn, "SELECT node_id FROM workflow_node_jobs WHERE run_id = 'graph' ORDER BY node_id"
    ) == ["s/a", "s/b", "s/c", "s/d", "s/e"]
    assert statuses(conn, "ingest_jobs") == dict.fromkeys(
        ("first", "second", "lapsed", "ended"), "completed"
    )
    answer = factories.one(conn, "SELECT status FROM workflow_input_submissions")
    used = factories.one(
        conn, "SELECT context_delta FROM workflow_node_jobs WHERE node_id = 'use/n'"
    )
    assert (answer, used) == ("processed", {"seen": "5"})
    assert node_queue.count_unprocessed_dispatch_events() == 0
    for table in ("workflow_node_jobs", "ingest_jobs"):
        held = (
            f"SELECT id FROM {table} WHERE coalesce(worker_id, lease_expires_at::text) IS NOT NULL"
        )
        assert factories.column(conn, held) == []


def test_the_definition_is_frozen_at_first_touch(
    old: ModuleType, conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_flight(conn)
    old.bootstrap()
    pool = node_pool.NodePool()
    pool.check()
    pool.stop()
    frozen = factories.one(conn, "SELECT definition FROM workflow_runs WHERE id = 'graph'")
    assert [entry["id"] for entry in frozen["nodes"]] == ["s/a", "s/b", "s/c", "s/e", "s/d"]
    monkeypatch.setitem(PIPELINES, "p", {"name": "p", "nodes": [{"id": "z", "node": "add"}]})
    engine_0_3.do(conn, engine_0_3.COMPLETE, job="graph:s/b")
    over = "SELECT count(*) FROM workflow_runs WHERE id = 'graph' AND status = 'completed'"
    settle(lambda: factories.one(conn, over) == 1)


def test_rows_keep_their_place_in_the_queue(old: ModuleType, conn: Any) -> None:
    run_row(conn, "r", "graph")
    for name, priority, created in (
        ("x", 100, "2024-03-01"),
        ("y", 100, "2024-01-01"),
        ("z", 5, "2024-05-01"),
    ):
        node(conn, "r", name, "queued", priority=priority, created_at=created)
    in_flight(conn)
    old.bootstrap()
    factories.node(conn, "r", "later")
    found = [transitions.claim_node(conn)["node_id"] for _ in range(4)]
    assert found == ["z", "y", "x", "later"]
    order = [transitions.claim_ingest(conn)["id"] for _ in range(2)]
    assert order == ["first", "second"]


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_migration_that_loses_a_deadlock_against_work_is_done_again(
    old: ModuleType, conn: Any, way: str
) -> None:
    if way == "down":
        old.bootstrap()
    migrate = old.bootstrap if way == "up" else lambda: old.downgrade(to_version=12)
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND database = (SELECT oid FROM"
    waiting += " pg_database WHERE datname = current_database())"
    with old.connect(autocommit=False, limited=False) as work, ThreadPoolExecutor(1) as pool:
        # The other one detects the deadlock first, which aborts the one that detects it.
        work.execute("SET deadlock_timeout = '1min'")
        work.execute("LOCK TABLE ingest_jobs IN ROW EXCLUSIVE MODE")
        done = pool.submit(migrate)
        wait.until(lambda: factories.one(conn, waiting) == 1)
        work.execute("LOCK TABLE workflow_runs IN ROW EXCLUSIVE MODE")
        work.commit()
        assert done.result(30) == (OURS if way == "up" else OURS[::-1])


# --- claims from before ------------------------------------------------------------------------


def test_a_claim_from_before_is_fenced_by_the_lease_it_has(old: ModuleType, conn: Any) -> None:
    in_flight(conn)
    old.bootstrap()
    rows = conn.execute(
        "SELECT id, claim_no, worker_id FROM workflow_node_jobs WHERE status = 'running'"
        " ORDER BY id"
    ).fetchall()
    assert [tuple(row.values()) for row in rows] == [
        ("graph:s/b", 1, "legacy:box"),
        ("graph:s/c", 1, "legacy:unknown"),
    ]
    reclaimed = [row["id"] for row in node_queue.reclaim_expired_leases()]
    assert reclaimed == ["graph:s/c"]
    assert [row["id"] for row in node_queue.reclaim_expired_ingest_leases()] == ["lapsed"]
    assert statuses(conn, "workflow_node_jobs")["graph:s/b"] == "running"


def test_while_its_lease_holds_the_old_worker_renews_and_finishes(
    old: ModuleType, conn: Any
) -> None:
    in_flight(conn)
    old.bootstrap()
    assert engine_0_3.do(conn, engine_0_3.RENEW, job="graph:s/b", host="box") is not None
    row = engine_0_3.do(conn, engine_0_3.COMPLETE, job="graph:s/b")
    assert row is not None
    assert (row["status"], row["worker_id"], row["lease_expires_at"]) == ("completed", None, None)


def test_after_a_reclaim_the_old_worker_can_not_finish_our_claim(
    old: ModuleType, conn: Any
) -> None:
    in_flight(conn)
    old.bootstrap()
    conn.execute("UPDATE workflow_node_jobs SET lease_expires_at = now() WHERE status = 'running'")
    assert len(node_queue.reclaim_expired_leases()) == 2
    ours = [transitions.claim_node(conn) for _ in range(2)]
    for job in ours:
        assert job["claim_no"] == 2
        with pytest.raises(psycopg.Error, match=r"claim 2 .* is held by w1"):
            engine_0_3.do(conn, engine_0_3.COMPLETE, job=job["id"])
        assert factories.reread(conn, job)["status"] == "running"
    open_events = "SELECT count(*) FROM workflow_dispatch_events WHERE node_id IN ('s/b', 's/c')"
    assert factories.one(conn, open_events) == 0
    transitions.complete_node(conn, ours[0], by="ours")
    assert factories.reread(conn, ours[0])["context_delta"] == {"by": "ours"}
    assert engine_0_3.do(conn, engine_0_3.COMPLETE, job=ours[0]["id"]) is None


def hostile(conn: Any) -> None:
    """Rows that the tables of 0.3.0 take, with values that are out of every range of ours."""
    run_row(conn, "far", "single", "queued", created_at="infinity", resume_count=-5)
    run_row(conn, "old", "graph", "running", created_at="4714-11-24 BC", updated_at="infinity")
    node(
        conn, "old", "s/a", "running", claimed_by="box", lease_expires_at="infinity",
        watchdog_retries=2147483647, created_at="-infinity",
    )  # fmt: skip
    run_row(conn, "asked", "ask", created_at="294276-12-31")
    node(
        conn, "asked", "pick", "awaiting_input", node_module="__input__choose_one",
        inputs={"widget": "choose_one", "target": "chosen"},
    )  # fmt: skip
    factories.insert(
        conn, "workflow_input_submissions", id="sub", run_id="asked", node_id="pick",
        value=psycopg.types.json.Jsonb("5"), created_at="-infinity",
    )  # fmt: skip
    factories.insert(
        conn, "workflow_dispatch_events", run_id="asked", node_id="pick", kind="awaiting_input",
        attempts=-32768, created_at="infinity",
    )  # fmt: skip
    factories.ingest(
        conn, id="held", status="running", claimed_by="box", lease_expires_at="infinity"
    )
    factories.ingest(conn, id="seconds", seconds="NaN", created_at="infinity")
    factories.ingest(conn, id="long", task_name="t", reason="x" * 9000)
    factories.insert(conn, "worker_heartbeats", host_label="far", queue="cpu", last_seen="infinity")


def test_rows_with_values_out_of_every_range_are_taken_over_and_end(
    old: ModuleType, conn: Any
) -> None:
    hostile(conn)
    assert old.bootstrap() == OURS
    lease = "SELECT max(lease_expires_at) < now() + interval '8 days' FROM {}"
    for table in ("workflow_node_jobs", "ingest_jobs"):
        assert factories.one(conn, lease.format(table))
        conn.execute(
            f"UPDATE {table} SET lease_expires_at = now() WHERE status = 'running'".encode()
        )
    live = "SELECT count(*) FROM workflow_runs WHERE status IN ('queued', 'running')"
    jobs = "SELECT count(*) FROM ingest_jobs WHERE status IN ('queued', 'running')"
    settle(lambda: factories.one(conn, live) + factories.one(conn, jobs) == 0)
    assert statuses(conn, "workflow_runs") == dict.fromkeys(("far", "old", "asked"), "completed")
    assert set(statuses(conn, "ingest_jobs").values()) == {"completed"}
    run_row(conn, "normal", "single", "queued")
    done = "SELECT status = 'completed' FROM workflow_runs WHERE id = 'normal'"
    settle(lambda: factories.one(conn, done))


def test_rows_with_such_values_go_back(old: ModuleType, conn: Any) -> None:
    hostile(conn)
    before = schema_snapshot.snapshot(conn)
    old.bootstrap()
    assert old.downgrade(to_version=12, allow_data_loss=True) == OURS[::-1]
    after = schema_snapshot.snapshot(conn)
    left = schema_snapshot.difference(before, after)
    assert {name for _, name, _, _ in left if "queue_schema" not in name} == set()
    assert factories.one(conn, "SELECT created_at = 'infinity' FROM workflow_runs WHERE id = 'far'")


# --- a worker of that engine beside ours --------------------------------------------------------


@pytest.fixture
def taken(old: ModuleType, conn: Any) -> str:
    """A run in a database that was just taken over."""
    old.bootstrap()
    return run_row(conn, "r", "graph")


def test_a_plain_claim_gets_an_identity(taken: str, conn: Any) -> None:
    job = factories.node(conn, taken)
    claimed = engine_0_3.do(conn, engine_0_3.CLAIM, host="box")
    assert claimed is not None
    assert (claimed["id"], claimed["claim_no"], claimed["worker_id"]) == (
        job["id"],
        1,
        "legacy:box",
    )
    assert claimed["lease_expires_at"] is not None
    assert transitions.who().worker_id == "w1"
    with pytest.raises(errors.ClaimLost):
        transitions.complete_node(conn, claimed | {"worker_id": "w1"})
    row = engine_0_3.do(conn, engine_0_3.COMPLETE, job=job["id"])
    assert row is not None
    assert (row["status"], row["worker_id"], row["lease_expires_at"]) == ("completed", None, None)
    assert row["claim_no"] == 1


def test_plain_claims_and_ours_count_on(taken: str, conn: Any) -> None:
    job = factories.node(conn, taken)
    for number in (1, 3):
        ours = transitions.claim_node(conn)
        assert ours["claim_no"] == number
        transitions.expire(conn, job)
        assert engine_0_3.do(conn, engine_0_3.RECLAIM) is not None
        theirs = engine_0_3.do(conn, engine_0_3.CLAIM, host="box")
        assert theirs is not None
        assert (theirs["claim_no"], theirs["worker_id"]) == (number + 1, "legacy:box")
        with pytest.raises(errors.ClaimLost):
            transitions.complete_node(conn, ours)
        node_queue.requeue_job_for_retry(job["id"])


def test_a_plain_ingest_claim_gets_an_identity_and_leaves_nothing_behind(
    taken: str, conn: Any
) -> None:
    job = factories.ingest(conn)
    claimed = engine_0_3.do(conn, engine_0_3.CLAIM_INGEST, host="box")
    assert claimed is not None
    assert (claimed["claim_no"], claimed["worker_id"]) == (1, "legacy:box")
    row = engine_0_3.do(conn, engine_0_3.COMPLETE_INGEST, job=job["id"])
    assert row is not None
    assert (row["worker_id"], row["lease_expires_at"]) == (None, None)


def test_a_plain_claim_without_lease_or_label_gets_both(taken: str, conn: Any) -> None:
    factories.node(conn, taken)
    conn.execute("UPDATE workflow_node_jobs SET status = 'running'")
    row = conn.execute("SELECT * FROM workflow_node_jobs").fetchone()
    assert row["worker_id"] == "legacy:unknown"
    assert row["lease_expires_at"] is not None


def test_a_plain_claim_of_what_was_not_due_leaves_no_block_behind(taken: str, conn: Any) -> None:
    job = factories.node(conn, taken, available_at="2999-01-01")
    engine_0_3.do(conn, engine_0_3.CLAIM, host="box")
    transitions.expire(conn, job)
    node_queue.reclaim_expired_leases()
    assert transitions.claim_node(conn)["claim_no"] == 2


def test_the_old_worker_can_not_finish_what_ours_claimed(taken: str, conn: Any) -> None:
    job = factories.node(conn, taken)
    ours = transitions.claim_node(conn)
    with pytest.raises(psycopg.Error, match=r"claim 1 .* is held by w1"):
        engine_0_3.do(conn, engine_0_3.COMPLETE, job=job["id"])
    transitions.complete_node(conn, ours)


# --- what an app built on the tables -------------------------------------------------------------


def test_views_triggers_and_indexes_of_the_app_stay(old: ModuleType, conn: Any) -> None:
    in_flight(conn)
    conn.execute(
        "CREATE VIEW host_jobs AS SELECT id, status, queue FROM workflow_node_jobs;"
        "CREATE VIEW host_ingest AS SELECT queue, status, count(*) FROM ingest_jobs GROUP BY 1, 2;"
        "CREATE VIEW host_events AS SELECT node_id, event_type FROM workflow_node_events;"
        "CREATE INDEX host_idx ON workflow_node_jobs (node_id) WHERE status = 'failed';"
        "CREATE FUNCTION host_note() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RETURN NULL; END $$;"
        "CREATE TRIGGER host_note AFTER UPDATE OF status ON workflow_node_jobs"
        " FOR EACH ROW EXECUTE FUNCTION host_note()"
    )
    before = schema_snapshot.snapshot(conn)
    old.bootstrap()
    assert factories.one(conn, "SELECT count(*) FROM host_jobs WHERE status = 'running'") == 2
    transitions.claim_ingest(conn)
    run_row(conn, "r", "graph")
    given: dict[str, dict[str, Any]] = {
        "workflow_node_jobs": {"run_id": "r", "node_id": "n", "node_module": "m", "queue": "cpu"},
        "ingest_jobs": {"task_name": "t", "queue": "q"},
        "workflow_node_events": {"run_id": "r", "node_id": "n", "event_type": "parked"},
    }
    for table, columns in (
        ("workflow_node_jobs", ("status", "queue")),
        ("ingest_jobs", ("status",)),
        ("workflow_node_events", ("event_type",)),
    ):
        factories.insert(conn, table, **given[table])
        for column in columns:
            with pytest.raises(psycopg.errors.CheckViolation):
                factories.insert(conn, table, **given[table] | {column: "nonsense"})
    old.downgrade(to_version=12, allow_data_loss=True)
    after = schema_snapshot.snapshot(conn)
    left = schema_snapshot.difference(before, after)
    assert {name for _, name, _, _ in left if "queue_schema" not in name} == set()


# --- and back ----------------------------------------------------------------------------------


def test_the_way_back_in_flight_leaves_the_old_engine_at_work(old: ModuleType, conn: Any) -> None:
    old.bootstrap()
    run_row(conn, "r", "graph")
    first, second = factories.node(conn, "r", "a"), factories.node(conn, "r", "b")
    transitions.claim_node(conn, transitions.who(host="ours"))
    with pytest.raises(errors.DataLossRefused, match="claim_no"):
        old.downgrade(to_version=12)
    assert old.downgrade(to_version=12, allow_data_loss=True) == OURS[::-1]
    row = factories.reread(conn, first)
    assert (row["status"], row["claimed_by"]) == ("running", "ours")
    assert row["lease_expires_at"] is not None
    claimed = engine_0_3.do(conn, engine_0_3.CLAIM, host="box")
    assert claimed is not None
    assert (claimed["id"], claimed["claimed_by"]) == (second["id"], "box")
    assert engine_0_3.do(conn, engine_0_3.COMPLETE, job=second["id"]) is not None
    conn.execute(
        "UPDATE workflow_node_jobs SET lease_expires_at = now() WHERE id = %s", (first["id"],)
    )
    assert engine_0_3.do(conn, engine_0_3.RECLAIM) is not None
    assert engine_0_3.do(conn, engine_0_3.CLAIM, host="box")["id"] == first["id"]  # pyright: ignore
    conn.execute("LISTEN node_job_ready")
    factories.node(conn, "r", "c", id="c", status="queued")
    assert [note.payload for note in conn.notifies(timeout=30, stop_after=1)] == ["cpu"]
    assert old.bootstrap() == OURS


# --- a database of a later version of 0.3.0's line -----------------------------------------------


@pytest.mark.parametrize(
    ("last", "which"), [(13, "migration 13"), (16, "migrations 13 to 16"), (40, "13 to 40")]
)
@pytest.mark.parametrize("with_checksums", [False, True], ids=["as 0.3.0", "touched by ours"])
def test_a_database_of_its_own_later_versions_is_recognised_and_left_alone(
    old: ModuleType, conn: Any, last: int, which: str, with_checksums: bool
) -> None:
    conn.execute(
        "CREATE TABLE its_own (id int); INSERT INTO queue_schema_version (version)"
        f" SELECT generate_series(13, {last})"
    )
    if with_checksums:
        conn.execute(
            "ALTER TABLE queue_schema_version ADD COLUMN checksum text,"
            " ADD COLUMN compatible_with integer NOT NULL DEFAULT 0"
        )
    before = schema_snapshot.snapshot(conn)
    text = f"at version {last} of another queue_workflows, whose .*{which} this code does not have"
    (step,) = [each for each in findings.of_connect(db.db_url()) if each.check == "schema"]
    assert (step.level, bool(re.fullmatch(text, step.text))) == (findings.ERROR, True), step
    found = findings.doctors("schema")
    assert (found.level, found.text, found.remedy) == (step.level, step.text, step.remedy)
    said = f"{step.text}: {step.remedy}"
    assert "db.downgrade(to_version=12)" in said
    assert said in console.printed("status")
    status = console.reply("status")
    assert (status["schema_version"], status["schema_problem"]) == (last, said)
    for argv in (["migrate", "--dry-run"], ["migrate"], ["migrate", "--to", "12"], ["runs"]):
        assert f"the database is {said}" in console.refusal(*argv), argv
    refused: list[Callable[[], object]] = [
        db.bootstrap,
        lambda: db.downgrade(to_version=12, allow_data_loss=True),
        lambda: db.wait_for_schema(db.REQUIRED_VERSION),
        lambda: db.wait_until_ready(stopped=lambda: False, pause=lambda _: None),
    ]
    for call in refused:
        with pytest.raises(errors.SchemaTooNew, match=text):
            call()
    assert schema_snapshot.snapshot(conn) == before


def test_after_its_own_downgrade_such_a_database_is_taken_over(old: ModuleType, conn: Any) -> None:
    conn.execute("INSERT INTO queue_schema_version (version) VALUES (13)")
    with pytest.raises(errors.SchemaTooNew):
        db.bootstrap()
    conn.execute("DELETE FROM queue_schema_version WHERE version = 13")
    assert db.bootstrap() == OURS
    assert db.current_schema_version() == OURS[-1]
    assert console.reply("status")["schema_problem"] is None
