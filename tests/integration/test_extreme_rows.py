"""With any value in any column of a job, the worker lives and the next job completes."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

import queue_workflows
from queue_workflows import config, db, jobs
from queue_workflows.types import Row
from tests.integration.test_unreadable_rows import batches, serving
from tests.support import commands, factories, flow, rows_before_checks, slot_app, timeouts
from tests.support.transitions import TABLES, Kind
from tests.support.wait import until

QUEUE = "load"
NODE_COLUMNS = (
    *("id", "run_id", "node_id", "node_module", "pipeline_name", "priority"),
    *("worker_lane", "inputs", "resolved_inputs", "input_spec", "context_delta", "host_label"),
    *("error", "vm_rss_mb_peak", "seconds", "created_at", "started_at", "finished_at"),
    *("claimed_by", "lease_expires_at", "watchdog_retries", "seq", "claim_no", "worker_id"),
    *("generation", "attempts", "max_attempts", "crash_count", "available_at", "blocked_reason"),
    *("cancel_requested_at", "heartbeat_at", "progress", "timeout_s", "policy", "lock_key"),
    *("partition_key", "input_template", "ref_heads", "celery_task_id"),
    *("required_version", "resume_host", "resume_at", "resume_until", "lapse_count"),
    *("child_run_id", "required_model"),
)
"""The last ones make rows that no claim takes, past which each later claim goes row by row."""
INGEST_COLUMNS = (
    *("id", "task_name", "reason", "priority", "result", "error", "seconds", "claimed_by"),
    *("lease_expires_at", "created_at", "started_at", "finished_at", "args", "seq", "claim_no"),
    *("worker_id", "generation", "attempts", "max_attempts", "crash_count", "watchdog_retries"),
    *("available_at", "blocked_reason", "cancel_requested_at", "heartbeat_at", "progress"),
    *("timeout_s", "policy", "lock_key", "partition_key", "idempotency_key", "headers"),
    *("idempotency_window_s", "idempotency_released", "admitted_at"),
    *("resume_host", "resume_at", "resume_until", "lapse_count"),
)
RUN_COLUMNS = (
    *("workflow_name", "priority", "context", "out_dir", "created_at", "definition"),
    *("definition_hash", "generation", "start_attempts", "steps_done", "parcel_id", "mode"),
    *("revision", "upgrades"),
)
NOT_SWEPT = {"status", "queue"}
"""A job of another status or queue is not claimed; their domains refuse what is none."""


@pytest.fixture
def conn(conn: db.Connection) -> db.Connection:
    def fails(reason: str) -> None:
        raise RuntimeError("boom")

    config.configure(ingest_queues={QUEUE})
    config.register_ingest_task("t", lambda reason, args: {"ok": True})
    config.register_ingest_task("fails", fails)
    queue_workflows.register_node("m", lambda: {"ok": True})
    queue_workflows.register_node("fails", lambda: fails("node"))
    return conn


def put_extremes(
    conn: db.Connection, table: str, columns: Iterable[str], **given: str
) -> list[str]:
    """Insert a row for each extreme value of each column; return the ids that could be stored."""
    rows = [
        {"id": f"'{column}-{number}'"} | given | {column: own}
        for column in columns
        for number, own in enumerate(own_values(conn, table, column))
    ]
    taken = rows_before_checks.put_each(conn, table, rows)
    return [row["id"].strip("'") for row, one in zip(rows, taken, strict=True) if one]


def own_values(conn: db.Connection, table: str, column: str) -> list[str]:
    """Return the extreme values of a column, as SQL; for an id, another one each."""
    kind = rows_before_checks.columns(conn, table)[column]
    values = rows_before_checks.EXTREMES.get(kind, ())
    if column in ("id", "run_id"):
        return [f"{value} || '{number}'" for number, value in enumerate(values)]
    return [*values]


def are_completed(conn: db.Connection, kind: Kind, *ids: str) -> bool:
    query = f"SELECT bool_and(status = 'completed') FROM {TABLES[kind]} WHERE id = ANY(%s)"
    return factories.one(conn, query, [*ids])


def work_until(conn: db.Connection, kind: Kind, queue: str, good: str, rows: int) -> None:
    """Let workers claim all that they can, until the good job behind so many rows has completed.

    With a time limit next to zero in a row its worker may leave, as it must after a time-out.
    """
    left: list[int] = []
    for _ in range(10):
        worker = flow.Emptying(queue=queue, host="box", on_exit=left.append)
        worker.left = 3 * rows
        worker.run_once()
        if are_completed(conn, kind, good):
            break
    assert are_completed(conn, kind, good)
    assert set(left) <= {75}
    # Nothing of it is left with a worker that is gone.
    query = f"SELECT id FROM {TABLES[kind]} WHERE status = 'running' AND worker_id LIKE 'box%%'"
    assert factories.column(conn, query) == []


def test_every_column_is_swept(conn: db.Connection) -> None:
    for table, swept in (
        ("workflow_node_jobs", NODE_COLUMNS),
        ("ingest_jobs", INGEST_COLUMNS),
    ):
        found = rows_before_checks.columns(conn, table)
        assert set(found) == {*swept} | NOT_SWEPT
        assert {kind for name, kind in found.items() if name not in NOT_SWEPT} <= {
            *rows_before_checks.EXTREMES,
            "bool",
        }


@pytest.fixture
def few_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the database refuses four times is given up at once."""
    timeouts.shorten_claim_retries(monkeypatch, 0.01)


@pytest.mark.parametrize("task", ["t", "fails"])
def test_an_ingest_job_behind_any_row_completes(
    conn: db.Connection, few_retries: None, task: str
) -> None:
    given = {"task_name": f"'{task}'", "queue": f"'{QUEUE}'", "priority": "0"}
    bad = put_extremes(conn, "ingest_jobs", INGEST_COLUMNS, **given)
    assert len(bad) > 150
    good = factories.ingest(conn, id="good", task_name="t", queue=QUEUE)["id"]
    work_until(conn, "ingest", QUEUE, good, len(bad))


@pytest.mark.parametrize("node", ["m", "fails"])
def test_a_node_behind_any_row_completes(conn: db.Connection, few_retries: None, node: str) -> None:
    run_ids = iter([factories.run(conn) for _ in range(500)])
    given = {"node_id": "'n'", "node_module": f"'{node}'", "queue": "'cpu'", "priority": "0"}
    rows = [
        {"id": f"'{column}-{number}'", "run_id": f"'{next(run_ids)}'"} | given | {column: own}
        for column in NODE_COLUMNS
        for number, own in enumerate(own_values(conn, "workflow_node_jobs", column))
    ]
    taken = rows_before_checks.put_each(conn, "workflow_node_jobs", rows)
    assert sum(taken) > 150
    good = factories.node(conn, id="good", node_id="good")["id"]
    work_until(conn, "node", "cpu", good, sum(taken))


def test_a_node_behind_those_of_any_run_completes(conn: db.Connection, few_retries: None) -> None:
    given = {"workflow_name": "'w'", "status": "'running'"}
    runs = put_extremes(conn, "workflow_runs", RUN_COLUMNS, **given)
    assert len(runs) > 50
    for run_id in runs:
        asks: Row = {"x": {"$from": "x"}}
        factories.node(conn, run_id, input_template=asks, ref_heads=["x"], priority=0)
    good = factories.node(conn, id="good", node_id="good")["id"]
    work_until(conn, "node", "cpu", good, len(runs))


def test_batches_get_past_all_of_them_at_once(conn: db.Connection, few_retries: None) -> None:
    columns = [each for each in INGEST_COLUMNS if each != "timeout_s"]  # it would leave after it
    given = {"task_name": "'t'", "queue": f"'{QUEUE}'", "priority": "0"}
    put_extremes(conn, "ingest_jobs", columns, **given)
    good = [factories.ingest(conn, task_name="t", queue=QUEUE)["id"] for _ in range(5)]
    with serving(batches(QUEUE)):
        until(lambda: are_completed(conn, "ingest", *good), timeout_s=60)


def test_a_pool_gets_past_all_of_them_at_once(conn: db.Connection, dsn: str) -> None:
    slot_app.setup()
    given = {"task_name": "'quick'", "queue": f"'{slot_app.QUEUE}'", "priority": "0"}
    put_extremes(conn, "ingest_jobs", INGEST_COLUMNS, **given)
    good = jobs.enqueue_many(task_name="quick", queue=slot_app.QUEUE, args=[{"number": 1}] * 5)
    pool = json.dumps([{"queue": slot_app.QUEUE, "concurrency": 3}])
    with commands.commands(QUEUE_WORKFLOWS_DB_URL=dsn, WORKERS_JSON=pool) as cli:
        cli.start("queue-claim-worker", "--workers", "--app", "tests.support.slot_app:setup")
        until(lambda: are_completed(conn, "ingest", *good), timeout_s=60)
