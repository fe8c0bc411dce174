"""A job that has waited goes on where it began to wait, for a bounded time, then anywhere."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from queue_workflows import db, events, jobs, node_queue, queues, runs, workers
from tests.support import console, constants, factories, transitions

pytestmark = pytest.mark.usefixtures("invariants_hold")
Row = dict[str, Any]
NODES, INGEST = (transitions.TABLES[kind] for kind in transitions.KINDS)
BOTH = pytest.mark.parametrize("table", [INGEST, NODES], ids=["ingest", "nodes"])
WAITS_S = 600.0
"""A setting that no test outlasts."""


@pytest.fixture(autouse=True)
def setting(clean_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    constants.put(monkeypatch, "claim.job_steps.RESUME_ON_HOST_S", WAITS_S)


def at(host: str, table: str = INGEST, **more: Any) -> transitions.Claimant:
    queue = more.pop("queue", "cpu" if table == NODES else "fetch")
    return transitions.who(queue, worker_id=f"worker of {host}", host=host, **more)


def queued(conn: db.Connection, table: str, **columns: Any) -> str:
    made = factories.node if table == NODES else factories.ingest
    return made(conn, **columns)["id"]


def claimed(
    conn: db.Connection, who: transitions.Claimant, count: int = 1, *, promote: bool = False
) -> list[str]:
    return [job["id"] for job in transitions.claim(conn, who, count, promote=promote)]


def waits(conn: db.Connection, who: transitions.Claimant, **wait: Any) -> Row:
    """Let the next job of a host wait, for an event if one is named, and return it."""
    (job,) = transitions.claim(conn, who)
    return transitions.wait(conn, job, **wait)


def passes(conn: db.Connection, table: str, *, hold: bool = False) -> None:
    """Let the time of the waits pass, and with `hold` also the time for which jobs are kept."""
    left = "now()" if hold else f"now() + interval '{WAITS_S} seconds'"
    conn.execute(
        f"UPDATE {table} SET resume_at = now() - interval '1 second', available_at = {left},"
        f" resume_until = {left} WHERE status = 'queued' AND blocked_reason = 'not_due'".encode()
    )
    conn.execute(b"UPDATE job_steps SET due_at = now() WHERE state = 'waiting'")


def job(conn: db.Connection, table: str, job_id: str) -> Row:
    row = conn.execute(f"SELECT * FROM {table} WHERE id = %s".encode(), (job_id,)).fetchone()
    assert row is not None
    return row


@BOTH
@pytest.mark.parametrize("count", [1, 5], ids=["one", "several"])
def test_a_job_whose_event_came_is_claimed_where_it_was(
    conn: db.Connection, table: str, count: int
) -> None:
    job_id = queued(conn, table)
    waits(conn, at("a", table), event="go", after_s=None)
    assert claimed(conn, at("a", table), count=count, promote=True) == []
    events.send("go")
    assert claimed(conn, at("b", table), count=count, promote=True) == []
    assert transitions.promote_due(conn) == 0
    assert claimed(conn, at("a", table), count=count) == [job_id]
    row = job(conn, table, job_id)
    assert (row["blocked_reason"], row["available_at"], row["claim_no"]) == (None, None, 2)


@BOTH
def test_a_job_that_has_slept_is_claimed_where_it_was_and_later_anywhere(
    conn: db.Connection, table: str
) -> None:
    ids = [queued(conn, table) for _ in range(2)]
    for _ in ids:
        waits(conn, at("a", table))
    assert claimed(conn, at("a", table), promote=True) == []
    passes(conn, table)
    assert claimed(conn, at("b", table), promote=True) == []
    assert claimed(conn, at("a", table)) == ids[:1]
    passes(conn, table, hold=True)
    assert claimed(conn, at("b", table), promote=True) == ids[1:]


@BOTH
def test_the_time_is_as_set_and_zero_keeps_nothing(
    conn: db.Connection, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued(conn, table)
    row = waits(conn, at("a", table), event="go")
    assert (row["available_at"] - row["resume_at"]).total_seconds() == WAITS_S
    assert row["resume_host"] == "a"
    events.send("go")
    row = job(conn, table, row["id"])
    assert (row["available_at"] - row["resume_at"]).total_seconds() == WAITS_S
    constants.put(monkeypatch, "claim.job_steps.RESUME_ON_HOST_S", 0)
    row = waits(conn, at("a", table), after_s=60.0)
    assert (row["resume_at"], row["resume_until"]) == (None, None)
    conn.execute(f"UPDATE {table} SET available_at = now()".encode())
    assert claimed(conn, at("b", table), promote=True) == [row["id"]]


@BOTH
def test_a_second_event_keeps_the_job_no_longer(conn: db.Connection, table: str) -> None:
    queued(conn, table)
    row = waits(conn, at("a", table), event="go")
    conn.execute(
        b"INSERT INTO job_steps (job_table, job_id, kind, name, state, claim_no)"
        b" VALUES (%s, %s, 'event', 'also', 'waiting', 1)", (table, row["id"])
    )  # fmt: skip
    events.send("go")
    first = job(conn, table, row["id"])["available_at"]
    events.send("also")
    assert job(conn, table, row["id"])["available_at"] == first


@BOTH
@pytest.mark.parametrize("count", [1, 5], ids=["one", "several"])
def test_a_better_priority_goes_first_and_the_kept_job_stays_kept(
    conn: db.Connection, table: str, count: int
) -> None:
    kept = queued(conn, table, priority=50)
    waits(conn, at("a", table), event="go")
    events.send("go")
    urgent, later = queued(conn, table, priority=10), queued(conn, table, priority=90)
    assert claimed(conn, at("a", table)) == [urgent]
    assert claimed(conn, at("b", table), count=count) == [later]
    equal = queued(conn, table, priority=50)
    got = claimed(conn, at("a", table), count=count)
    assert got == [kept, equal][:count]


@BOTH
def test_a_claim_of_several_takes_kept_jobs_and_others(conn: db.Connection, table: str) -> None:
    *kept, later = [queued(conn, table) for _ in range(4)]
    for _ in (*kept, later):
        waits(conn, at("a", table))
    passes(conn, table)
    not_yet = f"UPDATE {table} SET resume_at = now() + interval '1 minute' WHERE id = %s"
    conn.execute(not_yet.encode(), (later,))
    others = [queued(conn, table) for _ in range(4)]
    assert set(claimed(conn, at("a", table), count=5)) == {*kept, *others[:2]}
    assert set(claimed(conn, at("a", table), count=5)) == set(others[2:])


@BOTH
@pytest.mark.parametrize("place", [0, 1], ids=["first", "second"])
def test_a_job_that_may_have_killed_its_worker_is_claimed_alone(
    conn: db.Connection, table: str, place: int
) -> None:
    ids = [queued(conn, table) for _ in range(3)]
    for _ in ids[:2]:
        waits(conn, at("a", table))
    passes(conn, table)
    crash = f"UPDATE {table} SET crash_count = 1 WHERE id = %s"
    conn.execute(crash.encode(), (ids[place],))
    rounds = [[ids[place]], [job_id for job_id in ids if job_id != ids[place]]]
    for expected in rounds[:: 1 - 2 * place]:
        assert sorted(claimed(conn, at("a", table), count=5)) == sorted(expected)


@BOTH
def test_workers_of_the_host_that_claim_at_once_take_different_jobs(
    conn: db.Connection, table: str
) -> None:
    ids = [queued(conn, table) for _ in range(2)]
    for _ in ids:
        waits(conn, at("a", table))
    passes(conn, table)
    with db.connect() as other, other.transaction():
        first = claimed(other, at("a", table))
        second = claimed(conn, at("a", table))
    assert sorted(first + second) == sorted(ids)


@BOTH
def test_a_host_that_is_off_takes_nothing_and_others_do_after_the_time(
    conn: db.Connection, table: str
) -> None:
    who = at("a", table)
    job_id = queued(conn, table)
    waits(conn, who, event="go")
    events.send("go")
    workers.disable("a", who.queue)
    assert claimed(conn, who, promote=True) == []
    passes(conn, table, hold=True)
    assert claimed(conn, at("b", table), promote=True) == [job_id]


def test_a_paused_queue_and_a_limit_hold_a_kept_job_too(conn: db.Connection) -> None:
    ids = [queued(conn, INGEST) for _ in range(3)]
    waits(conn, at("a"), event="go")
    events.send("go")
    queues.pause("fetch")
    assert claimed(conn, at("a"), count=5) == []
    queues.resume("fetch")
    queues.limit("fetch", max_running=2)
    assert set(claimed(conn, at("a"), count=5)) == set(ids[:2])
    assert claimed(conn, at("a"), count=5) == []


def test_a_job_with_a_lock_key_or_a_limited_partition_waits_for_its_turn_instead(
    conn: db.Connection,
) -> None:
    queues.limit("fetch", partition_max_running=1)
    locked = queued(conn, INGEST, lock_key="k")
    assert waits(conn, at("a"), event="go")["resume_until"] is None
    limited = queued(conn, INGEST, partition_key="p")
    assert waits(conn, at("a"), event="go")["resume_until"] is None
    events.send("go")
    assert sorted(claimed(conn, at("b"), count=5)) == sorted([locked, limited])


def test_a_limit_that_is_set_while_a_job_is_kept_does_not_lose_it(conn: db.Connection) -> None:
    job_id = queued(conn, INGEST, partition_key="p")
    waits(conn, at("a"), event="go")
    queues.limit("fetch", partition_max_running=1)
    events.send("go")
    assert claimed(conn, at("a"), promote=True) == []
    assert job(conn, INGEST, job_id)["blocked_reason"] == "not_due"
    passes(conn, INGEST, hold=True)
    transitions.promote_due(conn)
    assert claimed(conn, at("b"), promote=True) == [job_id]


@BOTH
def test_a_lock_key_that_is_set_while_a_job_is_kept_counts(conn: db.Connection, table: str) -> None:
    owner = queued(conn, table, lock_key="k", priority=90)
    assert claimed(conn, at("b", table)) == [owner]
    job_id = queued(conn, table)
    waits(conn, at("a", table), event="go")
    conn.execute(f"UPDATE {table} SET lock_key = 'k' WHERE id = %s".encode(), (job_id,))
    events.send("go")
    assert claimed(conn, at("a", table), promote=True) == []
    passes(conn, table, hold=True)
    transitions.promote_due(conn)
    assert job(conn, table, job_id)["blocked_reason"] == "locked"


@BOTH
def test_a_kept_job_is_cancelled_and_a_retry_runs_anywhere(conn: db.Connection, table: str) -> None:
    job_id = queued(conn, table)
    row = waits(conn, at("a", table), event="go")
    events.send("go")
    if table == NODES:
        runs.cancel(row["run_id"])
    else:
        jobs.cancel(job_id)
    assert job(conn, table, job_id)["status"] == "cancelled"
    assert claimed(conn, at("a", table), promote=True) == []
    if table == NODES:
        return
    jobs.retry(job_id)
    assert claimed(conn, at("b"), promote=True) == [job_id]


def lost(conn: db.Connection, job: Row) -> None:
    factories.change(conn, job, "lapse_count = 1")
    transitions.expire(conn, job)
    transitions.reclaim_lapsed(conn, transitions.kind_of(job))


ENDS: dict[str, Callable[[db.Connection, Row], Any]] = {
    "retry": lambda conn, job: transitions.fail(conn, job, most=5, after_s=3600),
    "snooze": lambda conn, job: transitions.hand_back(conn, job, after_s=3600),
    "lost": lost,
}


@BOTH
@pytest.mark.parametrize("end", ENDS)
def test_an_attempt_that_ends_otherwise_is_not_resumed_early(
    conn: db.Connection, table: str, end: str
) -> None:
    job_id = queued(conn, table)
    waits(conn, at("a", table), event="go")
    events.send("go")
    (row,) = transitions.claim(conn, at("a", table))
    ENDS[end](conn, row)
    assert (job(conn, table, job_id)["status"], job(conn, table, job_id)["blocked_reason"]) == (
        "queued",
        "not_due",
    )
    assert claimed(conn, at("a", table), promote=True) == []


def test_a_change_of_its_time_by_hand_counts(conn: db.Connection) -> None:
    job_id = queued(conn, INGEST)
    waits(conn, at("a"), event="go")
    events.send("go")
    conn.execute(b"UPDATE ingest_jobs SET available_at = now() + interval '1 day'")
    assert claimed(conn, at("a"), promote=True) == []
    conn.execute(b"UPDATE ingest_jobs SET available_at = NULL")
    assert claimed(conn, at("b")) == [job_id]


def test_a_node_of_a_version_or_model_that_the_worker_lacks_is_left(
    conn: db.Connection,
) -> None:
    gpu = at("a", NODES, queue="gpu", models=["m", "n"], versions=["x@1"])
    ids = [
        queued(conn, NODES, queue="gpu", required_model="m"),
        queued(conn, NODES, queue="gpu", required_version="x@1"),
    ]
    for _ in ids:
        waits(conn, gpu)
    passes(conn, NODES)
    other = queued(conn, NODES, queue="gpu", required_model="n")
    assert claimed(conn, gpu._replace(models=["n"], versions=None)) == [other]
    assert sorted(claimed(conn, gpu) + claimed(conn, gpu)) == sorted(ids)


def test_a_kept_gpu_job_comes_before_jobs_of_the_loaded_model(conn: db.Connection) -> None:
    gpu = at("a", NODES, queue="gpu", model="m", models=["m", "n"])
    job_id = queued(conn, NODES, queue="gpu", required_model="n")
    waits(conn, gpu, event="go")
    queued(conn, NODES, queue="gpu", required_model="m")
    events.send("go")
    assert claimed(conn, gpu) == [job_id]


@pytest.mark.parametrize("newest", [False, True])
def test_a_worker_with_versions_takes_a_kept_node(conn: db.Connection, newest: bool) -> None:
    cpu = at("a", NODES, versions=["x@1"], newest=newest)
    job_id = queued(conn, NODES, required_version="x@1")
    waits(conn, cpu, event="go")
    others = [queued(conn, NODES, required_version="x@1") for _ in range(2)]
    events.send("go")
    assert claimed(conn, cpu, count=2)[0] == job_id
    assert len(claimed(conn, cpu, count=2)) == len(others) - 1


def test_a_kept_node_of_a_run_that_is_over_is_left(conn: db.Connection) -> None:
    queued(conn, NODES)
    row = waits(conn, at("a", NODES), event="go")
    events.send("go")
    conn.execute(b"SET session_replication_role = replica")
    conn.execute(b"UPDATE workflow_runs SET status = 'failed' WHERE id = %s", (row["run_id"],))
    conn.execute(b"SET session_replication_role = origin")
    assert claimed(conn, at("a", NODES)) == []
    conn.execute(b"UPDATE workflow_node_jobs SET status = 'cancelled'")


@BOTH
def test_a_kept_job_that_the_database_refuses_to_run_holds_up_no_other(
    conn: db.Connection, table: str
) -> None:
    bad = queued(conn, table)
    waits(conn, at("a", table), event="go")
    events.send("go")
    good = queued(conn, table, priority=120)
    conn.execute(
        f"ALTER TABLE {table} ADD CONSTRAINT never"
        f" CHECK (id <> '{bad}' OR status <> 'running') NOT VALID".encode()
    )
    try:
        with pytest.raises(psycopg.errors.CheckViolation):
            claimed(conn, at("a", table))
        if table == NODES:
            found = node_queue.claim_next_cpu_job(host="a")
        else:
            found = node_queue.claim_next_ingest_job("fetch", host="a")
        assert found is not None and found["id"] == good
        assert job(conn, table, bad)["status"] == "failed"
    finally:
        conn.execute(f"ALTER TABLE {table} DROP CONSTRAINT never".encode())


HOSTILE = (
    {"resume_host": "x" * 100_000},
    {"resume_at": "infinity"},
    {"resume_at": "-infinity"},
    {"resume_until": "infinity"},
    {"resume_until": "0044-03-15 BC"},
)


@BOTH
@pytest.mark.parametrize("values", HOSTILE, ids=str)
def test_values_out_of_range_are_refused(
    conn: db.Connection, table: str, values: dict[str, Any]
) -> None:
    with pytest.raises(psycopg.errors.CheckViolation):
        queued(conn, table, **values)
    job_id = queued(conn, table)
    (column, value) = next(iter(values.items()))
    with pytest.raises(psycopg.errors.CheckViolation):
        conn.execute(f"UPDATE {table} SET {column} = %s WHERE id = %s".encode(), (value, job_id))


@BOTH
def test_a_row_that_claims_to_be_kept_holds_up_nobody(conn: db.Connection, table: str) -> None:
    far = "9999-12-30+00"
    at_once, delayed = queued(conn, table), queued(conn, table, available_at=far)
    conn.execute(
        f"UPDATE {table} SET resume_host = 'a', resume_at = '2000-01-01+00',"
        f" resume_until = '{far}'".encode()
    )
    own = queued(conn, table)
    waits(conn, at("b", table))  # the first one, which counts as any other
    assert claimed(conn, at("b", table), count=5, promote=True) == [own]
    conn.execute(
        b"INSERT INTO job_steps (job_table, job_id, kind, name, state, claim_no)"
        b" VALUES (%s, %s, 'event', 'go', 'waiting', 1)", (table, at_once)
    )  # fmt: skip
    conn.execute(
        f"UPDATE {table} SET available_at = '{far}', resume_until = '{far}',"
        " resume_at = now() + interval '1 day' WHERE id = %s".encode(), (at_once,)
    )  # fmt: skip
    events.send("go")
    row = job(conn, table, at_once)
    assert (row["available_at"] - row["resume_at"]).total_seconds() == 86400
    assert set(claimed(conn, at("a", table), count=5)) == {delayed}


INSERTS = """
SET ROLE {role};
INSERT INTO {table} ({columns}, queue, lock_key, priority, available_at, resume_host, resume_at,
                     resume_until)
SELECT {values}, '{queue}', CASE WHEN i % 2 = 0 THEN 'k' || i END, 32767,
       now() + interval '1 hour', 'a', '2000-01-01+00', now() + interval '1 hour'
  FROM generate_series(1, 300) i;
RESET ROLE
"""


@BOTH
def test_who_may_insert_jobs_keeps_none_of_a_host_from_resuming(
    conn: db.Connection, table: str
) -> None:
    job_id = queued(conn, table)
    row = waits(conn, at("a", table))
    passes(conn, table)
    columns, values = "task_name", "'t'"
    if table == NODES:
        columns, values = "run_id, node_id, node_module", f"'{row['run_id']}', 'n' || i, 'm'"
    role, queue = f"kept_guest_{secrets.token_hex(4)}", at("a", table).queue
    with conn.transaction(force_rollback=True):
        conn.execute(
            f"CREATE ROLE {role}; GRANT INSERT ON {table} TO {role};"
            f" GRANT USAGE ON SEQUENCE {table}_seq_seq TO {role}".encode()
        )
        conn.execute(
            INSERTS.format(
                role=role, table=table, columns=columns, values=values, queue=queue
            ).encode()
        )
        stored = (
            f"SELECT count(*) FROM {table}"
            " WHERE num_nonnulls(resume_host, resume_at, resume_until) > 0"
        )
        assert factories.one(conn, stored) == 1
        assert claimed(conn, at("a", table), promote=True) == [job_id]


@BOTH
def test_jobs_that_get_a_lock_key_while_kept_hide_no_other(conn: db.Connection, table: str) -> None:
    ids = [queued(conn, table) for _ in range(101)]
    for _ in ids:
        waits(conn, at("a", table))
    passes(conn, table)
    conn.execute(
        f"UPDATE {table} SET lock_key = 'k', resume_at = resume_at - interval '1 hour'"
        " WHERE id <> %s".encode(),
        (ids[-1],),
    )
    assert claimed(conn, at("a", table), promote=True) == [ids[-1]]


@BOTH
def test_why_names_the_host_and_the_time(conn: db.Connection, table: str) -> None:
    job_id = queued(conn, table)
    row = waits(conn, at("a", table), event="go", after_s=7200.0)
    due = row["resume_at"].strftime("%H:%M:%S")
    said = f"waits for event 'go' until {row['resume_at']:%Y-%m-%d} {due}"
    assert said in console.command("why", job_id).out
    events.send("go")
    explained = jobs.explain(job_id)
    assert explained is not None and explained["clause"] == "kept"
    until = job(conn, table, job_id)["available_at"]
    said = f"it is kept for host a until {until:%Y-%m-%d %H:%M:%S} UTC, then for any"
    assert said in console.command("why", job_id).out


def test_lists_show_when_a_wait_ends(conn: db.Connection) -> None:
    job_id = queued(conn, INGEST)
    row = waits(conn, at("a"))
    (listed,) = jobs.list()
    state = jobs.state(job_id)
    assert state is not None
    assert listed["available_at"] == state["available_at"] == row["resume_at"]
    said = f"not due until {row['resume_at']:%Y-%m-%d %H:%M:%S}"
    assert said in console.command("show", job_id).out


def test_a_kept_job_completes(conn: db.Connection) -> None:
    queued(conn, INGEST)
    waits(conn, at("a"), event="go")
    events.send("go")
    (row,) = transitions.claim(conn, at("a"))
    assert transitions.record(conn, row) == "completed"
