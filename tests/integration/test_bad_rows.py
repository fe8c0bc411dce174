"""`doctor` and `audit` read any row, and name the bad ones with the command that ends them."""

from __future__ import annotations

import shlex

from psycopg import sql

from queue_workflows import db
from tests.support import console, factories, flow, rows_before_checks, transitions

DEEP = "[" * 1500 + "]" * 1500
DIGITS = "9" * 5000
EXTREMES = [
    ("workflow_runs", column, value)
    for column in ("created_at", "queued_at", "available_at", "started_at", "updated_at")
    for value in ("infinity", "-infinity", "294276-12-31", "4713-01-01 BC")
]
EXTREMES += [
    (table, column, value)
    for table in ("workflow_node_jobs", "ingest_jobs")
    for column in ("created_at", "available_at", "started_at", "lease_expires_at")
    for value in ("infinity", "-infinity")
]
EXTREMES += [
    ("workflow_runs", "definition", text)
    for text in (DEEP, '"x"', '{"nodes": 5}', '{"nodes": [{"deps": 7}]}')
]
EXTREMES += [
    ("workflow_runs", "context", DIGITS),
    ("ingest_jobs", "args", DEEP),
    ("ingest_jobs", "args", f'{{"n": {DIGITS}}}'),
    ("workflow_node_jobs", "inputs", DEEP),
    ("workflow_runs", "start_attempts", "-2147483648"),
    ("ingest_jobs", "attempts", "-2147483648"),
    ("ingest_jobs", "claim_no", "9223372036854775807"),
]
HARMLESS = {"updated_at"}


def put(conn: db.Connection, table: str, column: str, value: str) -> str:
    """Write the value into a new row past its bounds; its run's or job's id."""
    run_id = factories.run(conn, mode="node", status="queued")
    row_id = run_id
    if table == "workflow_node_jobs":
        row_id = factories.node(conn, run_id)["id"]
    elif table == "ingest_jobs":
        row_id = run_id = factories.ingest(conn)["id"]
    rows_before_checks.change(conn, table, row_id, **{column: rows_before_checks.quoted(value)})
    return run_id


def bad() -> list[dict[str, str]]:
    """Return the bad rows that `audit` names."""
    return console.reply("audit")["bad_rows"]


def found(check: str) -> list[dict[str, str]]:
    """Return what a check of `doctor` finds."""
    return [each for each in console.reply("doctor")["findings"] if each["check"] == check]


def test_both_commands_read_the_rows_and_name_them(conn: db.Connection) -> None:
    owners = {put(conn, *each): each for each in EXTREMES}
    for since in ("all", "1h"):
        states = {each["state"] for each in console.reply("audit", "--since", since)["invariants"]}
        assert states <= {"ok", "broken", "elsewhere"}
    named = found("bad rows")
    for owner, (table, column, value) in owners.items():
        wrong_shape = column == "definition" and value != DEEP
        if column not in HARMLESS and not wrong_shape:
            of_it = [each for each in named if owner in each["text"]]
            assert of_it, (table, column, value)
            assert owner in of_it[0]["remedy"] and "queue-workflows" in of_it[0]["remedy"]


def test_a_row_that_failed_is_named_with_its_reason(conn: db.Connection) -> None:
    run_id = factories.run(
        conn, mode="node", status="queued", start_attempts=3, error="no such table",
        available_at="2100-01-01",
    )  # fmt: skip
    (row,) = bad()
    assert [row[key] for key in ("kind", "id", "text", "command")] == [
        "run", run_id, "it could not start 3 times: no such table",
        f"queue-workflows cancel {run_id}",
    ]  # fmt: skip


def test_a_job_that_is_blocked_as_set_aside_is_named_and_its_command_ends_it(
    conn: db.Connection,
) -> None:
    node = factories.node(conn)
    job = factories.ingest(conn)
    for table, row in (("workflow_node_jobs", node), ("ingest_jobs", job)):
        change = sql.SQL("UPDATE {} SET blocked_reason = 'set_aside' WHERE id = %s")
        conn.execute(change.format(sql.Identifier(table)), (row["id"],))
    of_node, of_job = bad()
    assert (of_node["kind"], of_node["id"]) == ("run", node["run_id"])
    assert f"node {node['node_id']} is blocked as set_aside" in of_node["text"]
    assert (of_job["kind"], of_job["id"]) == ("job", job["id"])
    assert "it is blocked as set_aside" in of_job["text"]
    commands = [row["command"] for row in (of_node, of_job)]
    assert [each["remedy"] for each in found("bad rows")] == [f"`{each}`" for each in commands]
    for each in commands:
        console.printed(*shlex.split(each)[1:])
    assert bad() == []


def test_doctor_does_not_request_an_orchestrator_if_one_runs(
    conn: db.Connection, toy: flow.Flow
) -> None:
    stuck = factories.run(conn, mode="node", status="queued", queued_at="2001-01-01")
    (finding,) = found("runs")
    assert "start queue-orchestrator" in finding["remedy"]
    toy.dag(a="")
    toy.started()
    (finding,) = found("runs")
    assert f"cancel {stuck}" in finding["remedy"] and "orchestrator runs" in finding["remedy"]


def test_healthy_rows_are_not_named(conn: db.Connection) -> None:
    factories.run(conn, mode="node", status="queued", context={"a": {"b": [1.5, 2]}})
    factories.ingest(conn, args={"text": "x" * 5000})
    transitions.claim_ingest(conn)
    factories.node(conn)
    assert bad() == []
