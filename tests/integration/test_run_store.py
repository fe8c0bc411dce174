"""Apps insert, read and change runs; a finished run refuses changes of its status."""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import psycopg
import pytest

from queue_workflows import errors, history, jobs, run_store
from queue_workflows import runs as runs_api
from tests.support import factories, tabled, transitions

COLUMNS = {
    "id", "parcel_id", "workflow_name", "status", "priority", "current_step_id", "progress_pct",
    "steps_done", "context", "input_spec", "error", "out_dir", "mode", "resume_count",
    "created_at", "updated_at", "queued_at", "started_at", "finished_at",
}  # fmt: skip
TERMINAL = ("completed", "failed", "cancelled")


def insert(**given: Any) -> str:
    return run_store.insert_run(**{"workflow_name": "w"} | given)["id"]


# --- insert ------------------------------------------------------------------------------------


def test_a_run_comes_back_with_every_column_and_its_defaults(db: ModuleType) -> None:
    row = run_store.insert_run(run_id="r", workflow_name="w")
    assert row.keys() >= COLUMNS
    assert (row["id"], row["workflow_name"], row["status"], row["mode"]) == (
        "r", "w", "queued", "node",
    )  # fmt: skip
    assert (row["priority"], row["context"], row["parcel_id"]) == (100, {}, None)
    assert row["queued_at"] is not None and row["queued_at"].tzinfo is not None
    assert run_store.get_run("r") == row
    assert run_store.get_run("nope") is None


def test_a_run_takes_the_values_that_the_app_gives(db: ModuleType) -> None:
    context = {"a": [1, {"ü": None}], "$from": "data"}
    row = run_store.insert_run(
        run_id="r",
        workflow_name="w",
        parcel_id="p",
        out_dir="/out",
        status="draft",
        priority=5,
        mode="step",
        context=context,
    )
    assert row["context"] == context
    assert (row["parcel_id"], row["out_dir"], row["status"], row["priority"], row["mode"]) == (
        "p", "/out", "draft", 5, "step",
    )  # fmt: skip


def test_a_run_without_an_id_gets_one(db: ModuleType) -> None:
    assert insert() != insert()


def test_a_queued_run_wakes_the_orchestrator(db: ModuleType, heard: Callable[[], Any]) -> None:
    insert()
    assert heard() == [("orchestrator_work", "run")]
    insert(mode="step")
    insert(status="draft")
    assert heard() == []


def test_with_conn_run_and_wake_up_leave_with_the_callers_commit(
    db: ModuleType, heard: Callable[[], Any]
) -> None:
    with db.connection() as conn:
        run_store.insert_run(run_id="r", workflow_name="w", conn=conn)
        assert run_store.get_run("r") is None
        assert heard() == []
    assert run_store.get_run("r") is not None
    assert heard() == [("orchestrator_work", "run")]


def test_a_context_that_cannot_be_stored_is_refused_before_any_write(db: ModuleType) -> None:
    cases: list[Any] = [{"a": "\x00"}, {"a": {1}}, {1: 2}, {"a": float("nan")}, [1]]
    for context in cases:
        with tabled.case(context):
            with pytest.raises(errors.InvalidPayload, match="inputs"):
                run_store.insert_run(run_id="r", workflow_name="w", context=context)
            assert run_store.get_run("r") is None


def test_inputs_that_are_no_object_are_named_as_both_functions_call_them(db: ModuleType) -> None:
    wrong: Any = [1]
    with pytest.raises(errors.InvalidPayload, match=r"^inputs \(insert_run: context\) must be"):
        run_store.insert_run(workflow_name="w", context=wrong)


def test_the_key_of_a_run_is_not_that_of_another_workflow(db: ModuleType) -> None:
    first, is_new = runs_api.submit_once("w", key="k")
    assert is_new
    again, is_new = runs_api.submit_once("w", key="k")
    assert (again["id"], is_new) == (first["id"], False)
    with pytest.raises(errors.IdempotencyClash, match="another workflow"):
        runs_api.submit_once("v", key="k")
    with pytest.raises(errors.IdempotencyClash, match="another workflow or inputs"):
        runs_api.submit_once("w", key="k", inputs={"a": 1})


# --- update ------------------------------------------------------------------------------------


def test_update_sets_columns_and_gives_the_row(db: ModuleType) -> None:
    insert(run_id="r")
    row = run_store.update_run(
        "r", context={"a": 1}, steps_done=["s"], input_spec={"k": 1}, progress_pct=50, parcel_id="p"
    )
    assert row is not None
    assert (row["context"], row["steps_done"], row["input_spec"]) == ({"a": 1}, ["s"], {"k": 1})
    assert (row["progress_pct"], row["parcel_id"]) == (50, "p")
    assert run_store.update_run("r", input_spec=None) == run_store.get_run("r")
    assert run_store.update_run("nope", progress_pct=1) is None
    assert run_store.update_run("r") == run_store.get_run("r")


NOON = datetime.datetime(2026, 1, 2, 12, tzinfo=datetime.timezone.utc)
GIVEN = {
    "parcel_id": "p", "workflow_name": "v", "status": "running", "priority": 7,
    "current_step_id": "s", "progress_pct": 12.5, "steps_done": ["s"], "context": {"a": 1},
    "input_spec": {"k": 1}, "error": "e", "out_dir": "/o", "mode": "step", "resume_count": 3,
    "queued_at": NOON, "started_at": NOON, "finished_at": NOON, "available_at": NOON,
}  # fmt: skip


def test_update_sets_one_column_and_leaves_the_others(db: ModuleType) -> None:
    for name in sorted(GIVEN):
        with tabled.case(name):
            before = run_store.insert_run(
                workflow_name="w", context={"kept": True}, out_dir="/kept"
            )
            row = run_store.update_run(before["id"], **{name: GIVEN[name]})
            assert row is not None
            assert row == before | {name: GIVEN[name], "updated_at": row["updated_at"]}
            assert row["updated_at"] > before["updated_at"]


def test_update_does_not_rewrite_a_large_context(db: ModuleType, conn: Any) -> None:
    large = {f"k{n}": random.randbytes(16).hex() for n in range(2000)}
    run_id = insert(context=large)
    toast = factories.one(
        conn, "SELECT reltoastrelid::regclass::text FROM pg_class WHERE relname = 'workflow_runs'"
    )
    chunks = f"SELECT array_agg(DISTINCT chunk_id) FROM {toast}"
    before = factories.one(conn, chunks)
    assert len(before) == 1
    run_store.update_run(run_id, progress_pct=50)
    assert factories.one(conn, chunks) == before


@pytest.mark.parametrize("name", ["nonsense", "id", "definition", "generation", "status; DROP"])
def test_an_unknown_column_is_refused_before_any_write(db: ModuleType, name: str) -> None:
    insert(run_id="r")
    with pytest.raises(ValueError, match="update_run: ") as caught:
        run_store.update_run("r", **{name: 1, "progress_pct": 50})
    assert isinstance(caught.value, errors.UnknownColumn)
    assert str(caught.value).startswith(f"update_run: {name}")
    assert str(caught.value).endswith(f": columns are {', '.join(sorted(GIVEN))}")
    assert run_store.get_run("r")["progress_pct"] == 0  # pyright: ignore


def test_an_update_that_cannot_be_stored_is_refused_before_any_write(db: ModuleType) -> None:
    insert(run_id="r")
    with pytest.raises(errors.InvalidPayload, match="context"):
        run_store.update_run("r", status="failed", context={"a": float("inf")})
    assert run_store.get_run("r")["status"] == "queued"  # pyright: ignore


def test_an_error_text_is_cut_and_made_storable(db: ModuleType) -> None:
    insert(run_id="r")
    row = run_store.update_run("r", error="a\x00" + "b" * 9000)
    assert row is not None
    assert len(row["error"]) == 8000
    assert row["error"].startswith("a\N{REPLACEMENT CHARACTER}b")


@pytest.mark.parametrize("over", TERMINAL)
def test_a_finished_run_keeps_its_status(db: ModuleType, over: str) -> None:
    for late in ("running", "completed", "failed", "cancelled", "draft"):
        insert(run_id=late, status=over)
        row = run_store.update_run(late, status=late, progress_pct=7)
        after = run_store.get_run(late)
        assert after is not None
        assert after["status"] == over, late
        assert (row is None) == (late != over)
        assert after["progress_pct"] == (7 if late == over else 0)


@pytest.mark.parametrize("over", TERMINAL)
def test_other_columns_of_a_run_that_is_over_may_change(db: ModuleType, over: str) -> None:
    insert(run_id="r", status=over)
    row = run_store.update_run("r", parcel_id="p")
    assert row is not None
    assert (row["status"], row["parcel_id"]) == (over, "p")


@pytest.mark.parametrize("over", ["failed", "cancelled"])
def test_an_app_reopens_a_failed_or_cancelled_run(
    db: ModuleType, conn: Any, heard: Callable[[], Any], over: str
) -> None:
    insert(run_id="r", status=over)
    conn.execute(
        "UPDATE workflow_runs SET error = 'e', finished_at = now(), start_attempts = 4,"
        " available_at = now()"
    )
    row = run_store.update_run("r", status="queued")
    assert row is not None
    assert (row["status"], row["generation"]) == ("queued", 1)
    assert (row["error"], row["finished_at"]) == (None, None)
    assert (row["start_attempts"], row["available_at"]) == (0, None)
    assert heard() == [("orchestrator_work", "run")]


def test_a_step_run_belongs_to_the_app(db: ModuleType) -> None:
    insert(run_id="r", mode="step", status="completed")
    assert run_store.update_run("r", status="running") is not None
    assert run_store.update_run("r", status="cancelled") is not None
    assert run_store.update_run("r", status="queued") is not None
    assert run_store.get_run("r")["generation"] == 0  # pyright: ignore


# --- by plain SQL ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("over", "late"),
    [(over, late) for over in TERMINAL for late in ("running", "completed", "failed", "cancelled")
     if over != late] + [("completed", "queued"), ("failed", "archived")],
)  # fmt: skip
def test_no_plain_update_leaves_a_terminal_state_but_to_reopen(
    db: ModuleType, conn: Any, over: str, late: str
) -> None:
    factories.run(conn, id="r", status=over)
    with pytest.raises(psycopg.Error, match=r"run r is .* and stays so") as caught:
        conn.execute("UPDATE workflow_runs SET status = %s", (late,))
    assert caught.value.sqlstate == "QW002"


def test_a_plain_update_reopens_and_counts_the_generation(db: ModuleType, conn: Any) -> None:
    factories.run(conn, id="r", status="cancelled")
    conn.execute("UPDATE workflow_runs SET status = 'queued'")
    conn.execute("UPDATE workflow_runs SET status = 'failed'")
    conn.execute("UPDATE workflow_runs SET status = 'queued'")
    assert factories.one(conn, "SELECT generation FROM workflow_runs") == 2


def test_cancel_by_a_plain_update_cancels_what_waits_in_the_same_transaction(
    db: ModuleType, conn: Any, heard: Callable[[], Any]
) -> None:
    for name in ("r", "other"):
        factories.run(conn, id=name)
        factories.node(conn, name, "queued")
        factories.node(conn, name, "waiting", status="awaiting_input")
        factories.node(conn, name, "done", status="completed")
    running = transitions.claim_node(conn)
    assert running["run_id"] == "r"
    factories.node(conn, "r", "queued 2", available_at="2999-01-01")
    heard()
    with conn.transaction():
        conn.execute(
            "UPDATE workflow_runs SET status = 'cancelled', finished_at = now() WHERE id = 'r'"
        )
        found = conn.execute(
            "SELECT node_id, status::text, finished_at IS NOT NULL AS ended, blocked_reason"
            " FROM workflow_node_jobs WHERE run_id = 'r' ORDER BY seq"
        ).fetchall()
    assert [tuple(row.values()) for row in found] == [
        ("queued", "running", False, None),
        ("waiting", "cancelled", True, None),
        ("done", "completed", False, None),
        ("queued 2", "cancelled", True, None),
    ]
    assert heard() == [("job_cancel", "r")]
    assert (
        factories.column(
            conn,
            "SELECT detail ->> 'reason' FROM workflow_node_events WHERE event_type = 'cancelled'",
        )
        == ["run cancelled"] * 2
    )
    other = "SELECT status::text FROM workflow_node_jobs WHERE run_id = 'other' ORDER BY seq"
    assert factories.column(conn, other) == ["queued", "awaiting_input", "completed"]


def test_a_cancel_without_running_nodes_notifies_no_worker(
    db: ModuleType, conn: Any, heard: Callable[[], Any]
) -> None:
    factories.node(conn)
    heard()
    conn.execute("UPDATE workflow_runs SET status = 'cancelled'")
    assert heard() == []


def test_a_step_runs_jobs_are_left_alone(db: ModuleType, conn: Any) -> None:
    run = factories.run(conn, mode="step")
    job = factories.node(conn, run)
    conn.execute("UPDATE workflow_runs SET status = 'cancelled'")
    assert factories.reread(conn, job)["status"] == "queued"


# --- the rest ----------------------------------------------------------------------------------


def test_a_row_in_place_of_its_id_is_refused_with_what_to_pass(db: ModuleType, conn: Any) -> None:
    row, job = runs_api.submit("w"), factories.ingest(conn)
    of_a_run: list[Callable[[Any], object]] = [
        runs_api.get, runs_api.output, runs_api.nodes, runs_api.explain, runs_api.cancel,
        runs_api.retry, runs_api.upgrade, runs_api.delete, runs_api.cancel_many,
        lambda run: runs_api.update(run, priority=5), lambda run: runs_api.retry_many([run]),
        history.get_run,
    ]  # fmt: skip
    of_a_job: list[Callable[[Any], object]] = [
        jobs.get, jobs.state, jobs.steps, jobs.explain, jobs.cancel, jobs.retry, jobs.delete,
        history.get_job,
    ]  # fmt: skip
    for call in of_a_run:
        with pytest.raises(errors.InvalidConfig, match=r"pass its id, row\['id'\]"):
            call(row)
    for call in of_a_job:
        with pytest.raises(errors.InvalidConfig, match=r"pass its id, row\['id'\]"):
            call(jobs.get(job["id"]))
    with pytest.raises(errors.InvalidConfig, match="5: an id is a text"):
        of_a_run[0](5)
    assert runs_api.get(row["id"]) == row


def test_delete_returns_whether_there_was_one(db: ModuleType) -> None:
    insert(run_id="r")
    assert run_store.delete_run("r") is True
    assert run_store.delete_run("r") is False
    assert run_store.get_run("r") is None


def test_running_runs_are_queued_again_for_a_resume(
    db: ModuleType, conn: Any, heard: Callable[[], Any]
) -> None:
    for name, status, mode, priority in (
        ("a", "running", "node", 100),
        ("b", "running", "node", 3),
        ("c", "running", "step", 100),
        ("d", "queued", "node", 100),
        ("e", "failed", "node", 100),
    ):
        factories.run(conn, id=name, status=status, mode=mode, priority=priority)
    heard()
    assert run_store.reenqueue_running_for_resume() == 2
    rows = conn.execute("SELECT * FROM workflow_runs ORDER BY id").fetchall()
    assert [(r["id"], r["status"], r["priority"], r["resume_count"]) for r in rows] == [
        ("a", "queued", 10, 1),
        ("b", "queued", 3, 1),
        ("c", "running", 100, 0),
        ("d", "queued", 100, 0),
        ("e", "failed", 100, 0),
    ]
    assert heard() == [("orchestrator_work", "run")]


def test_the_listing_has_the_newest_first_with_their_nodes(db: ModuleType, conn: Any) -> None:
    for name in ("a", "b", "c"):
        insert(run_id=name, status="running" if name == "b" else "queued")
    for number in range(3):
        factories.node(conn, "b", f"n{number}", status="completed" if number else "queued")
    rows = runs_api.list(limit=2)
    assert [row["id"] for row in rows] == ["c", "b"]
    assert rows[1]["nodes"] == {"completed": 2, "queued": 1}
    assert [row["id"] for row in runs_api.list(status="running")] == ["b"]
