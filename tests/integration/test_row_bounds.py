"""Ranges of columns hold for every writer, and never stop the engine's own counters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from queue_workflows import node_queue
from tests.support import factories, tabled, transitions

FAMILIES = ("workflow_node_jobs", "ingest_jobs")
RUNS, ANSWERS = "workflow_runs", "workflow_input_submissions"
TIMES = (
    "infinity",
    "-infinity",
    "294276-12-31",
    "4714-11-24 BC",
    "1999-12-31",
    "9999-12-31 01:00+00",
)
COUNTERS = (
    "attempts", "max_attempts", "crash_count", "watchdog_retries", "generation",
)  # fmt: skip
JOB_TIMES = (
    "created_at", "available_at", "started_at", "finished_at", "heartbeat_at",
    "cancel_requested_at", "lease_expires_at",
)  # fmt: skip
INT, BIGINT = 2**31, 2**63
BAD: list[tuple[str, str, Any]] = [
    *((table, column, value) for table in FAMILIES for column in JOB_TIMES for value in TIMES),
    *(
        (table, column, value)
        for table in FAMILIES
        for column in COUNTERS
        for value in (-INT, -1, INT - 1, 1_000_001)
    ),
    *((table, "claim_no", value) for table in FAMILIES for value in (-BIGINT, -1, BIGINT - 1)),
    *((table, "seq", value) for table in FAMILIES for value in (-BIGINT, 0, BIGINT - 1)),
    *(
        (table, "timeout_s", value)
        for table in FAMILIES
        for value in ("NaN", "Infinity", "-Infinity", 0, -1, 1e308)
    ),
    *((table, "seconds", value) for table in FAMILIES for value in ("NaN", "Infinity", 1e308)),
    *((table, column, "x" * 1001) for table in FAMILIES for column in ("id", "lock_key")),
    *(("ingest_jobs", column, "x" * 1001) for column in ("task_name", "partition_key")),
    ("ingest_jobs", "idempotency_key", "x" * 1001),
    ("ingest_jobs", "reason", "x" * 8001),
    ("ingest_jobs", "admitted_at", "infinity"),
    ("workflow_node_jobs", "node_id", "x" * 1001),
    *(
        (RUNS, column, value)
        for column in ("created_at", "updated_at", "queued_at", "available_at", "finished_at")
        for value in TIMES
    ),
    *((RUNS, name, value) for name in ("generation", "start_attempts") for value in (-1, INT - 1)),
    *((RUNS, "resume_count", value) for value in (-1, 32767)),
    *((RUNS, "progress_pct", value) for value in ("NaN", "Infinity")),
    *((RUNS, column, "x" * 1001) for column in ("id", "workflow_name", "parcel_id")),
    (RUNS, "out_dir", "x" * 4097),
    *((ANSWERS, "created_at", value) for value in TIMES),
    *((ANSWERS, "attempts", value) for value in (-1, INT - 1)),
    (ANSWERS, "node_id", "x" * 1001),
]
DEEP = "[" * 129 + "]" * 129
PAYLOADS = {
    "levels of lists": DEEP,
    "levels of objects": '{"a":' * 129 + "1" + "}" * 129,
    "a number of 5,000 digits": '{"n": 1' + "0" * 5000 + "}",
    "a number with an exponent": '{"n": 1e5000}',
    "a negative number": '{"n": [-2e308]}',
    "bytes": json.dumps("x" * (16 * 1024 * 1024)),
}
SUBMITTED = [
    ("ingest_jobs", "args"), ("ingest_jobs", "headers"), ("ingest_jobs", "policy"),
    (RUNS, "context"), (ANSWERS, "value"),
]  # fmt: skip


def insert(conn: Any, table: str, **columns: Any) -> Any:
    """A row of the table whose other columns are as an app writes them."""
    given: dict[str, Any] = {}
    if table == "ingest_jobs":
        given = {"task_name": "t", "queue": "fetch"}
    elif table == RUNS:
        given = {"workflow_name": "w"}
    else:
        conn.execute("INSERT INTO workflow_runs (id, workflow_name) VALUES ('r', 'w')"
                     " ON CONFLICT DO NOTHING")  # fmt: skip
        given = {"run_id": "r", "node_id": "n"}
        more = {"node_module": "m", "queue": "cpu"} if table in FAMILIES else {"value": "1"}
        given |= more
    return factories.insert(conn, table, **given | columns)


@contextmanager
def as_before(conn: Any) -> Iterator[None]:
    """Write as there were no triggers: a row from a time without bounds."""
    with conn.transaction():
        conn.execute("SET LOCAL session_replication_role = replica")
        yield


def accepted(conn: Any, bad: list[tuple[str, str, Any]], write: Callable[..., object]) -> list[Any]:
    """What of `bad` a write takes, or refuses without naming the column; each is undone."""
    found: list[Any] = []
    for table, column, value in bad:
        said = "nothing"
        try:
            with conn.transaction(force_rollback=True):
                write(conn, table, **{column: value})
        except psycopg.errors.CheckViolation as error:
            said = str(error)
        if f"{table}.{column} must be" not in said:
            found.append((column, value, said))
    return found


@pytest.mark.parametrize("table", [*FAMILIES, RUNS, ANSWERS])
def test_no_insert_brings_a_value_that_is_out_of_its_range(conn: Any, table: str) -> None:
    assert accepted(conn, [bad for bad in BAD if bad[0] == table], insert) == []


@pytest.mark.parametrize("table", [*FAMILIES, RUNS, ANSWERS])
def test_no_update_does_either(conn: Any, table: str) -> None:
    row = insert(conn, table)

    def update(conn: Any, table: str, **columns: Any) -> None:
        ((column, value),) = columns.items()
        change = f"UPDATE {table} SET {column} = %s WHERE id = %s".encode()
        conn.execute(change, (value, row["id"]))

    bad = [bad for bad in BAD if bad[0] == table and bad[1] != "node_id"]
    assert accepted(conn, bad, update) == []


@pytest.mark.parametrize("table", FAMILIES)
def test_values_at_the_bounds_are_taken_and_counted_on(conn: Any, table: str) -> None:
    row = insert(
        conn, table, claim_no=10**9, attempts=10**6, generation=10**6, crash_count=10**6,
        watchdog_retries=10**6, created_at="2000-01-01+00", timeout_s=31_622_400,
    )  # fmt: skip
    changed = conn.execute(
        f"UPDATE {table} SET claim_no = claim_no + 1, attempts = attempts + 1,"
        " generation = generation + 1, crash_count = crash_count + 1 WHERE id = %s"
        " RETURNING claim_no, generation".encode(),
        (row["id"],),
    ).fetchone()
    assert tuple(changed.values()) == (10**9 + 1, 10**6 + 1)


@pytest.mark.parametrize(("table", "column"), SUBMITTED)
def test_a_payload_that_nobody_can_load_is_refused_where_it_is_written(
    conn: Any, table: str, column: str
) -> None:
    row = insert(conn, table)
    for payload, text in PAYLOADS.items():
        with tabled.case(payload):
            with pytest.raises(psycopg.errors.CheckViolation, match=f"{table}.{column}") as caught:
                insert(conn, table, **{column: text})
            assert caught.value.diag.message_hint
            with pytest.raises(psycopg.errors.CheckViolation, match=f"{table}.{column}"):
                conn.execute(
                    f"UPDATE {table} SET {column} = %s::jsonb WHERE id = %s".encode(),
                    (text, row["id"]),
                )


def test_what_the_engine_itself_takes_passes(conn: Any) -> None:
    nested: Any = 1
    for _ in range(64):
        nested = {"a": [nested]}
    for value in (nested, {"n": 1.7976931348623157e308}, {"digits": "7" * 5000}, ["x" * 10_000]):
        insert(conn, "ingest_jobs", args=json.dumps(value))
    assert factories.one(conn, "SELECT count(*) FROM ingest_jobs") == 4


# --- a running row that nobody claimed ---------------------------------------------------------


@pytest.mark.parametrize("table", FAMILIES)
def test_an_inserted_running_row_has_an_identity_and_a_lease_that_ends(
    conn: Any, table: str
) -> None:
    row = insert(conn, table, status="running", claimed_by="box")
    assert (row["claim_no"], row["worker_id"]) == (1, "legacy:box")
    left_s = (row["lease_expires_at"] - factories.one(conn, "SELECT now()")).total_seconds()
    assert 590 < left_s <= 600
    with pytest.raises(psycopg.errors.CheckViolation, match="over 7 days ahead"):
        insert(conn, table, status="running", lease_expires_at="9999-01-01")
    conn.execute(f"DELETE FROM {table}".encode())
    row = insert(conn, table, worker_id="w", lease_expires_at="2999-01-01")
    assert (row["worker_id"], row["lease_expires_at"]) == (None, None)


def test_a_forged_running_row_gives_up_its_lock_key(conn: Any) -> None:
    insert(conn, "ingest_jobs", id="forged", status="running", lock_key="k")
    insert(conn, "ingest_jobs", id="normal", lock_key="k")
    conn.execute("UPDATE ingest_jobs SET lease_expires_at = now() WHERE id = 'forged'")
    assert [row["id"] for row in node_queue.reclaim_expired_ingest_leases()] == ["forged"]
    conn.execute("UPDATE ingest_jobs SET status = 'cancelled' WHERE id = 'forged'")
    assert transitions.claim_ingest(conn)["id"] == "normal"


# --- rows from before there were bounds --------------------------------------------------------


def test_a_negative_count_of_attempts_is_none_and_waits_before_the_next(conn: Any) -> None:
    insert(conn, "ingest_jobs", id="j", max_attempts=2)
    with as_before(conn):
        conn.execute("UPDATE ingest_jobs SET attempts = -2147483648, max_attempts = 2147483647")
    job = transitions.claim_ingest(conn)
    row = transitions.fail(conn, job, error="e", most=3)
    assert row is not None
    assert (row["status"], row["attempts"], row["max_attempts"]) == ("queued", 1, 1_000_000)
    waits = "SELECT extract(epoch FROM available_at - now())::float8 FROM ingest_jobs"
    assert factories.one(conn, waits) == pytest.approx(30, abs=5)
    with as_before(conn):
        conn.execute(
            "UPDATE ingest_jobs SET attempts = 2147483647, blocked_reason = NULL,"
            " available_at = NULL"
        )
    job = transitions.claim_ingest(conn)
    row = transitions.fail(conn, job, error="e")
    assert row is not None
    assert (row["status"], row["attempts"]) == ("failed", 1_000_000)


@pytest.mark.parametrize(("count", "status"), [(-INT, "queued"), (INT - 1, "failed")])
def test_a_count_of_crashes_at_its_end_is_counted_on(conn: Any, count: int, status: str) -> None:
    insert(conn, "ingest_jobs", id="j")
    job = transitions.claim_ingest(conn)
    with as_before(conn):
        conn.execute("UPDATE ingest_jobs SET crash_count = %s", (count,))
    row = transitions.charge(conn, job)
    assert row is not None
    assert row["status"] == status


@pytest.mark.parametrize("count", [-INT, INT - 1])
def test_a_count_of_watchdog_retries_at_its_limit_can_still_grow(conn: Any, count: int) -> None:
    factories.node(conn)
    job = transitions.claim_node(conn)
    with as_before(conn):
        conn.execute("UPDATE workflow_node_jobs SET watchdog_retries = %s", (count,))
    row = transitions.end_by_watchdog(conn, job)
    assert row is not None
    assert row["status"] == ("failed" if count > 0 else "queued")


@pytest.mark.parametrize("created", ["infinity", "-infinity", "294276-12-31", "4714-11-24 BC"])
def test_a_row_from_before_the_ranges_can_be_ended(conn: Any, created: str) -> None:
    run = factories.run(conn)
    factories.node(conn, run)
    factories.ingest(conn, id="j", idempotency_key="k")
    with as_before(conn):
        conn.execute("UPDATE workflow_runs SET created_at = %s, updated_at = %s", (created,) * 2)
        conn.execute("UPDATE workflow_node_jobs SET created_at = %s, queue = 'gpu'", (created,))
        conn.execute("UPDATE ingest_jobs SET created_at = %s, generation = -5", (created,))
    job = transitions.claim_node(conn, transitions.who("gpu", models=["m"], policy="balanced"))
    assert isinstance(job["run"]["born"], int)
    transitions.complete_node(conn, job)
    transitions.complete_ingest(conn, transitions.claim_ingest(conn))
    assert node_queue.get_ingest_job("j")["status"] == "completed"  # pyright: ignore
    factories.ingest(conn, idempotency_key="other")
    conn.execute("UPDATE workflow_runs SET status = 'cancelled', finished_at = now()")


@pytest.mark.parametrize("wait", ['"abc"', '"1e999"', "1e5000", "-1e5000", "null", "{}"])
def test_a_policy_whose_wait_is_none_stops_no_input_node(conn: Any, wait: str) -> None:
    factories.node(conn, policy={"timeout_s": 1})
    with as_before(conn):
        conn.execute(
            "UPDATE workflow_node_jobs SET policy = jsonb_build_object('timeout_s', %s::jsonb)",
            (wait,),
        )
    job = transitions.claim_node(conn)
    row = transitions.park(conn, job)
    assert row is not None
    assert row["status"] == "awaiting_input"


# --- what operators and workers write ----------------------------------------------------------

PERIODS = ("'NaN'", "'Infinity'", "1e308", "0", "-1", "31622401")


def test_a_period_is_finite_and_at_most_366_days(conn: Any) -> None:
    cases: list[Any] = [
        "INSERT INTO queue_settings (queue, rate_limit, rate_period_s) VALUES ('q', 1, {})",
        "INSERT INTO queue_settings (queue, partition_rate_limit, partition_rate_period_s)"
        " VALUES ('q', 1, {})",
        "INSERT INTO queue_partitions (queue, partition_key, rate_limit, rate_period_s)"
        " VALUES ('q', 'k', 1, {})",
    ]
    for statement in cases:
        for period in PERIODS:
            with (
                tabled.case(period, statement),
                pytest.raises(psycopg.errors.CheckViolation),
            ):
                conn.execute(statement.format(period).encode())


def test_every_time_of_every_table_is_finite(conn: Any) -> None:
    """Tables of history are left out: nothing is computed with their times."""
    history = ("workflow_node_events", "ingest_job_events", "workflow_run_files",
               "queue_schema_version", "queue_schema_objects", "model_controls")  # fmt: skip
    rows = conn.execute(
        "SELECT c.relname || '.' || a.attname AS name, t.typname, c.relname FROM pg_attribute a"
        " JOIN pg_class c ON c.oid = a.attrelid AND c.relkind = 'r'"
        " JOIN pg_type t ON t.oid = a.atttypid WHERE NOT a.attisdropped"
        " AND c.relnamespace = current_schema()::regnamespace"
        " AND 'timestamptz'::regtype IN (t.oid, t.typbasetype)"
    ).fetchall()
    bounded = {(table, column) for table, column, _ in BAD}
    open_ones = [
        row["name"]
        for row in rows
        if row["relname"] not in history
        and row["typname"]
        not in ("queue_workflows_time", "queue_workflows_due", "queue_workflows_resume_time")
        and tuple(row["name"].split(".")) not in bounded
        and row["relname"] not in (RUNS, ANSWERS)
    ]
    assert open_ones == []


def test_a_forged_count_of_starts_begins_again(conn: Any) -> None:
    conn.execute(
        "INSERT INTO queue_settings (queue, rate_limit, rate_period_s) VALUES ('fetch', 5, 60)"
    )
    conn.execute("INSERT INTO queue_starts VALUES ('fetch', 1000000000000000000, now())")
    for _ in range(2):
        factories.ingest(conn)
        transitions.claim_ingest(conn)
    assert factories.column(conn, "SELECT n FROM queue_starts ORDER BY n") == [1, 2]


def test_a_worker_whose_detail_is_nonsense_stops_no_sweep(conn: Any) -> None:
    factories.ingest(conn)
    transitions.claim_ingest(conn)
    conn.execute("UPDATE ingest_jobs SET heartbeat_at = now() - interval '1 hour'")
    conn.execute(
        "INSERT INTO workers (worker_id, host_label, queue, pid, detail, last_seen)"
        " VALUES ('w1', 'box', 'fetch', 1, '{\"lock\": \"abc\"}', now() - interval '1 hour')"
    )
    assert transitions.reclaim_gone(conn, "ingest", 1.0) == []
