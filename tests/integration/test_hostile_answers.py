"""Hostile answers: each fails with its reason, and delays no other answer."""

from __future__ import annotations

import uuid
from collections.abc import Generator

import pytest

from queue_workflows import db, input_listener, node_pool, runs
from tests.support import app_triggers, constants, factories, flow, rows_before_checks, timeouts

DEEP = "[" * 1500 + "]" * 1500
DIGITS = "9" * 5000


@pytest.fixture
def flows(toy: flow.Flow) -> flow.Flow:
    toy.define(flow.ask("q"))
    return toy


@pytest.fixture(autouse=True)
def without_triggers(conn: db.Connection) -> Generator[None]:
    yield
    app_triggers.accept(conn)


def waiting(flows: flow.Flow) -> str:
    """A run whose input node waits."""
    run_id = flows.started()
    flows.work()
    flows.look()
    assert flow.states(run_id) == {"q": "awaiting_input"}
    return run_id


def answer(conn: db.Connection, run_id: str, value: str, created_at: str = "now") -> str:
    """A submission as SQL writes it, or wrote it when nothing was refused; its id."""
    submission_id = str(uuid.uuid4())
    columns = {"id": submission_id, "run_id": run_id, "node_id": "q", "value": value}
    rows_before_checks.put(
        conn,
        "workflow_input_submissions",
        **{name: rows_before_checks.quoted(text) for name, text in columns.items()},
        created_at=rows_before_checks.quoted(created_at),
    )
    return submission_id


def outcome(conn: db.Connection, submission_id: str) -> tuple[str, str | None]:
    row = conn.execute(
        "SELECT status, error FROM workflow_input_submissions WHERE id = %s", (submission_id,)
    ).fetchone()
    assert row is not None
    return row["status"], row["error"]


@pytest.mark.parametrize("value", [DEEP, DIGITS, f'{{"a": {DIGITS}}}', "[" * 100 + "]" * 100])
def test_an_answer_that_cannot_be_read_fails_and_its_node_waits_on(
    flows: flow.Flow, conn: db.Connection, value: str
) -> None:
    bad_run, good_run = waiting(flows), waiting(flows)
    bad = answer(conn, bad_run, value, "2001-01-01")
    good = answer(conn, good_run, "5")
    flows.look()
    status, error = outcome(conn, bad)
    assert status == "failed"
    assert error is not None and ("cannot be read" in error or "nested deeper" in error)
    assert outcome(conn, good)[0] == "processed"
    flows.look()
    assert (flow.status(good_run), flow.states(bad_run)) == (
        "completed",
        {"q": "awaiting_input"},
    )
    answer(conn, bad_run, "6")
    flows.look()
    flows.look()
    assert flow.status(bad_run) == "completed"


@pytest.mark.parametrize("inputs", [DEEP, '"x"', "[1]"])
def test_a_node_whose_inputs_cannot_be_read_takes_no_answer_and_stops_no_other(
    flows: flow.Flow, conn: db.Connection, inputs: str
) -> None:
    bad_run, good_run = waiting(flows), waiting(flows)
    conn.execute(
        "UPDATE workflow_node_jobs SET inputs = %s::jsonb WHERE run_id = %s", (inputs, bad_run)
    )
    bad, good = answer(conn, bad_run, "1", "2001-01-01"), answer(conn, good_run, "5")
    flows.look()
    status, error = outcome(conn, bad)
    assert status == "failed" and "inputs of node 'q'" in (error or "")
    assert outcome(conn, good)[0] == "processed"
    assert flow.states(bad_run) == {"q": "awaiting_input"}


@pytest.mark.parametrize("state", ["P0001", "22003", "57P01", "08006"])
def test_an_answer_that_raises_rests_counts_and_fails_at_its_bound(
    flows: flow.Flow, conn: db.Connection, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    constants.put(monkeypatch, "claim.recovery.MAX_FAILURES", 2)
    bad_run, good_run = waiting(flows), waiting(flows)
    app_triggers.refuse(conn, "workflow_node_jobs", f"NEW.run_id = '{bad_run}'", state=state)
    bad, good = answer(conn, bad_run, "1", "2001-01-01"), answer(conn, good_run, "5")
    flows.look()
    assert outcome(conn, bad)[0] == "pending"
    assert "the app refuses" in (outcome(conn, bad)[1] or "")
    assert outcome(conn, good)[0] == "processed"
    conn.execute("UPDATE workflow_input_submissions SET available_at = NULL")
    flows.look()
    status, error = outcome(conn, bad)
    assert status == "failed" and "could not be taken in 2 tries" in (error or "")


def test_an_answer_whose_row_cannot_be_written_stops_no_other(
    flows: flow.Flow, conn: db.Connection
) -> None:
    bad_run, good_run = waiting(flows), waiting(flows)
    bad, good = answer(conn, bad_run, "1", "2001-01-01"), answer(conn, good_run, "5")
    app_triggers.refuse(conn, "workflow_input_submissions", f"NEW.id = '{bad}'")
    flows.look()
    assert (outcome(conn, bad)[0], outcome(conn, good)[0]) == ("pending", "processed")


@pytest.mark.parametrize("attempts", [2147483647, -2147483648])
def test_a_counter_at_its_end_stops_no_answer(
    flows: flow.Flow, conn: db.Connection, attempts: int
) -> None:
    bad_run, good_run = waiting(flows), waiting(flows)
    bad, good = answer(conn, bad_run, "1", "2001-01-01"), answer(conn, good_run, "5")
    rows_before_checks.change(conn, "workflow_input_submissions", bad, attempts=str(attempts))
    flows.look()
    assert (outcome(conn, bad)[0], outcome(conn, good)[0]) == ("processed", "processed")


def test_an_answer_claimed_in_the_future_is_taken_back(
    flows: flow.Flow, conn: db.Connection
) -> None:
    run_id = waiting(flows)
    held = answer(conn, run_id, "1")
    rows_before_checks.change(
        conn, "workflow_input_submissions", held, status="'processing'", claimed_at="'infinity'"
    )
    flows.look()
    assert outcome(conn, held)[0] == "processed"


def test_an_early_answer_waits_without_using_up_its_attempts(
    flows: flow.Flow, conn: db.Connection
) -> None:
    run_id = flows.started()
    early = answer(conn, run_id, "1")
    listener = input_listener.InputListener()
    for _ in range(3):
        conn.execute("UPDATE workflow_input_submissions SET available_at = NULL")
        assert listener.process_once()
    assert outcome(conn, early)[0] == "pending"
    assert factories.one(conn, "SELECT attempts FROM workflow_input_submissions") == 0


def test_a_node_that_a_submitter_holds_delays_neither_its_answer_nor_its_end(
    flows: flow.Flow, conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`queue_workflows_hold_node` may be called by every role that may answer."""
    timeouts.shorten_lock_waits(monkeypatch, 0.2)
    answered, cancelled = waiting(flows), waiting(flows)
    with db.connection() as submitter:
        for run_id in (answered, cancelled):
            submitter.execute("SELECT queue_workflows_hold_node(%s, 'q')", (run_id,))
        taken = answer(conn, answered, "1")
        flows.look()
        assert outcome(conn, taken)[0] == "processed"
        runs.cancel(cancelled)
        assert flow.states(cancelled) == {"q": "cancelled"}


def test_an_answer_to_a_locked_node_delays_no_other(
    flows: flow.Flow, conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts.shorten_lock_waits(monkeypatch, 0.2)
    held_run, free_run = waiting(flows), waiting(flows)
    held, free = answer(conn, held_run, "1", "2001-01-01"), answer(conn, free_run, "1")
    with db.connection() as other:
        other.execute(
            "UPDATE workflow_node_jobs SET host_label = 'x' WHERE run_id = %s", (held_run,)
        )
        flows.look()
        assert (outcome(conn, held)[0], outcome(conn, free)[0]) == ("pending", "processed")


def test_a_flood_of_answers_delays_no_run_and_nothing_that_becomes_due(
    flows: flow.Flow, conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_pool, "ANSWERS_A_ROUND", 3)
    run_id = waiting(flows)
    for number in range(12):
        conn.execute(
            "INSERT INTO workflow_input_submissions (run_id, node_id, value) VALUES (%s, %s, '1')",
            (run_id, f"no such node {number}"),
        )
    # As the first one is refused, a run is submitted, and a job that is due a moment later.
    conn.execute(
        "CREATE FUNCTION app_refuses() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " INSERT INTO workflow_runs (id, workflow_name) VALUES ('late', 'w') ON CONFLICT"
        " DO NOTHING;"
        " INSERT INTO ingest_jobs (id, task_name, queue, available_at) VALUES ('due', 't', 'fetch',"
        " clock_timestamp() + interval '1 microsecond') ON CONFLICT DO NOTHING; RETURN NEW; END $$;"
        "CREATE TRIGGER app_refuses AFTER UPDATE ON workflow_input_submissions FOR EACH ROW"
        " WHEN (NEW.status = 'failed') EXECUTE FUNCTION app_refuses()"
    )
    flows.look()
    assert factories.one(
        conn,
        "SELECT r.started_at < max(s.processed_at) AND count(*) = 12"
        " FROM workflow_runs r, workflow_input_submissions s WHERE r.id = %s GROUP BY r.id",
        "late",
    )
    assert factories.one(conn, "SELECT blocked_reason FROM ingest_jobs WHERE id = 'due'") is None
