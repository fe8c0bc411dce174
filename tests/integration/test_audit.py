"""`audit` finds each broken invariant, finds none in a busy healthy database, and only reads."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Generator
from types import ModuleType
from typing import Any

import psycopg
import pytest

import queue_workflows
from queue_workflows import db as engine
from queue_workflows import errors
from queue_workflows.__main__ import main
from queue_workflows.admin import audit
from queue_workflows.cli import audit as command
from queue_workflows.engine import handback
from tests.support import factories, transitions
from tests.support.flow import Flow
from tests.support.wait import patience

CHECKED = [each for each in audit.INVARIANTS if each.statement is not None]
DEFINITION = {"version": 1, "nodes": [{"id": "a", "deps": []}, {"id": "b", "deps": ["a"]}]}
NODE = "(run_id, node_id, node_module, queue"
OLD = "now() - interval '1 h'"


def parameters(conn: Any, since_s: float | None = None, **more: Any) -> dict[str, Any]:
    return audit.parameters(conn, since_s=since_s, **{"limit": None, **more})


def broken(conn: Any, since_s: float | None = None, **more: Any) -> dict[int, list[audit.Offender]]:
    """Return what breaks each broken invariant; fail if one could not be checked."""
    values = parameters(conn, since_s, **more)
    found: dict[int, list[audit.Offender]] = {}
    for invariant in CHECKED:
        outcome = audit.check(conn, invariant, values)
        assert not isinstance(outcome, str), f"invariant {invariant.number}: {outcome}"
        if outcome:
            found[invariant.number] = outcome
    return found


@pytest.fixture
def conn(db: ModuleType) -> Generator[Any]:
    """A database with two nodes and an ingest job, without the triggers that refuse changes.

    Run `r` is running, with node `a` (job `done`) completed and `b` (job `held`) running.
    """
    with engine.connect() as own:
        factories.run(own, id="r", definition=DEFINITION)
        for name, node_id in (("done", "a"), ("held", "b")):
            factories.node(own, "r", node_id, id=name)
            job = transitions.claim_node(own, transitions.who(worker_id=name))
            if name == "done":
                transitions.complete_node(own, job)
        factories.ingest(own, id="in")
        transitions.complete_ingest(own, transitions.claim_ingest(own))
        assert broken(own) == {}
        own.execute("SET session_replication_role = replica")
        yield own


# --- what breaks an invariant --------------------------------------------------------------------

MUTANTS: dict[str, tuple[int, str, str]] = {
    "claimed after its end": (
        1, "done",
        "INSERT INTO workflow_node_events (run_id, node_id, job_id, event_type, claim_no)"
        " SELECT run_id, node_id, id, 'claimed', 2 FROM workflow_node_jobs WHERE id = 'done'",
    ),
    "an ingest job that ended twice": (
        1, "in",
        "INSERT INTO ingest_job_events (job_id, event_type, claim_no) VALUES ('in', 'failed', 1)",
    ),
    "two outbox rows": (
        2, "done",
        "INSERT INTO workflow_dispatch_events (run_id, node_id, kind, job_id, claim_no)"
        " SELECT run_id, node_id, 'failed', id, claim_no FROM workflow_node_jobs WHERE id = 'done'",
    ),
    "the result of a superseded claim": (2, "in", "UPDATE ingest_jobs SET claim_no = 2"),
    "a claim that skipped a number": (
        3, "in",
        "INSERT INTO ingest_job_events (job_id, event_type, claim_no) VALUES ('in', 'claimed', 3)",
    ),
    "a claim without its event": (
        3, "held", "UPDATE workflow_node_jobs SET claim_no = 5 WHERE id = 'held'",
    ),
    "a number that went back": (
        3, "held", "UPDATE workflow_node_jobs SET claim_no = 0 WHERE id = 'held'",
    ),
    "a write in another's name": (
        4, "done", "UPDATE workflow_node_events SET worker_id = 'w9' WHERE event_type='completed'",
    ),
    "running without a lease": (5, "held", "UPDATE workflow_node_jobs SET lease_expires_at = NULL"),
    "done and still held": (5, "in", "UPDATE ingest_jobs SET worker_id = 'w'"),
    "a node before its dependency": (
        6, "held", "UPDATE workflow_node_jobs SET node_id = 'z' WHERE id = 'done'",
    ),
    "an end without its outbox row": (7, "done", "DELETE FROM workflow_dispatch_events"),
    "an outbox row without the end": (
        7, "done", "UPDATE workflow_node_jobs SET status = 'cancelled' WHERE id = 'done'",
    ),
    "an outbox row of another commit": (
        7, "done", "UPDATE workflow_dispatch_events SET created_at = created_at + interval '1 ms'",
    ),
    "completed beside a running node": (8, "r", "UPDATE workflow_runs SET status = 'completed'"),
    "completed with a node missing": (
        8, "r",
        "DELETE FROM workflow_node_jobs WHERE id = 'held';"
        " UPDATE workflow_runs SET status = 'completed'",
    ),
    "a node that waits under a failed run": (
        8, "r",
        f"INSERT INTO workflow_node_jobs {NODE}, created_at)"
        f" VALUES ('r', 'late', 'm', 'cpu', {OLD});"
        f" UPDATE workflow_runs SET status = 'failed', finished_at = {OLD}",
    ),
    "claimed after the cancel": (
        9, "done", f"UPDATE workflow_runs SET status = 'cancelled', finished_at = {OLD}",
    ),
    "one key, two jobs": (
        10, "k2",
        "INSERT INTO ingest_jobs (id, task_name, queue, idempotency_key, idempotency_released)"
        " SELECT 'k' || n, 't', 'q', 'k', n = 2 FROM generate_series(1, 2) n",
    ),
    "one job, two fires": (
        11, "x", "INSERT INTO schedule_fires VALUES ('x', now(), 'j'), ('y', now(), 'j')",
    ),
    "another attempt than allowed": (12, "in", "UPDATE ingest_jobs SET attempts = 2"),
    "poison that is tried again": (
        12, "held", "UPDATE workflow_node_jobs SET crash_count = 3 WHERE id = 'held'",
    ),
    "claimed while OFF": (
        13, "in",
        "INSERT INTO worker_controls (host_label, queue, desired_state, updated_at)"
        f" VALUES ('box', 'fetch', 'off', {OLD})",
    ),
    "claimed while the host is OFF": (
        13, "in",
        "INSERT INTO worker_controls (host_label, queue, desired_state, updated_at)"
        f" VALUES ('box', 'all', 'off', {OLD})",
    ),
    "a map that counts what its items are not": (
        16, "r",
        "UPDATE workflow_runs SET updated_at = now(); INSERT INTO workflow_run_maps"
        " (run_id, node_id, generation, at_once, refill, may_fail, total, done_items, nodes)"
        " VALUES ('r', 'm', 0, 1, 1, 0, 1, 1, 1); INSERT INTO workflow_map_items"
        " (run_id, map_id, position, key, item) VALUES ('r', 'm', 0, 'a', '1')",
    ),
    "a stream with a gap": (
        17, "in", "INSERT INTO job_parts VALUES ('ingest_jobs', 'in', 1, 2, 'n', '1')",
    ),
    "a stream of a claim that never was": (
        17, "held", "INSERT INTO job_parts VALUES ('workflow_node_jobs', 'held', 9, 1, 'n', '1')",
    ),
    "a part of a node that had ended": (
        17, "done",
        "INSERT INTO job_parts SELECT 'workflow_node_jobs', id, claim_no, 1, 'n', '1',"
        " now() + interval '1 h' FROM workflow_node_jobs WHERE id = 'done'",
    ),
    "a part of an ingest job that had ended": (
        17, "in",
        "INSERT INTO ingest_job_events (job_id, event_type, queue, claim_no)"
        " SELECT id, 'completed', queue, claim_no FROM ingest_jobs WHERE id = 'in';"
        " INSERT INTO job_parts SELECT 'ingest_jobs', id, claim_no, 1, 'n', '1',"
        " now() + interval '1 h' FROM ingest_jobs WHERE id = 'in'",
    ),
    "a run that nothing will move": (
        15, "r",
        f"DELETE FROM workflow_node_jobs WHERE id = 'held'; DELETE FROM workflow_dispatch_events;"
        f" UPDATE workflow_runs SET updated_at = {OLD}, started_at = {OLD};"
        f" UPDATE workflow_node_jobs SET finished_at = {OLD}",
    ),
    "a step of a claim that its job never had": (
        18, "in",
        "INSERT INTO job_steps (job_table, job_id, kind, name, state, claim_no)"
        " SELECT 'ingest_jobs', id, 'step', 'fetch', 'running', claim_no + 1 FROM ingest_jobs",
    ),
    "a step that outlived its job": (
        18, "gone",
        "INSERT INTO job_steps (job_table, job_id, kind, name, state, claim_no)"
        " VALUES ('workflow_node_jobs', 'gone', 'step', 'fetch', 'failed', 1)",
    ),
    "a step that is done without an end": (
        18, "in",
        "INSERT INTO job_steps (job_table, job_id, kind, name, state, claim_no)"
        " SELECT 'ingest_jobs', id, 'step', 'fetch', 'done', claim_no FROM ingest_jobs",
    ),
    "a step with more crashes than attempts": (
        18, "in",
        "INSERT INTO job_steps (job_table, job_id, kind, name, state, claim_no, attempts, crashes)"
        " SELECT 'ingest_jobs', id, 'step', 'fetch', 'failed', claim_no, 1, 2 FROM ingest_jobs",
    ),
    "a wait whose event was sent": (
        18, "in",
        f"INSERT INTO events (name, created_at) VALUES ('paid', {OLD}); INSERT INTO job_steps"
        " (job_table, job_id, kind, name, state, claim_no, attempts, started_at)"
        f" SELECT 'ingest_jobs', id, 'event', 'paid', 'waiting', claim_no, 1, {OLD}"
        " FROM ingest_jobs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_invariant_is_named_with_what_breaks_it(conn: Any, mutant: str) -> None:
    number, offender, statement = MUTANTS[mutant]
    conn.execute(statement.encode())
    for since_s in (None, 60.0):
        found = broken(conn, since_s)
        assert offender in [row.id for row in found.get(number, [])], found
        assert all(row.text for rows in found.values() for row in rows)


def test_a_second_row_for_a_node_or_a_fire_is_named(
    migrated_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", migrated_database)
    with engine.connect() as own:
        own.execute("ALTER TABLE schedule_fires DROP CONSTRAINT schedule_fires_pkey")
        own.execute(
            "ALTER TABLE workflow_node_jobs DROP CONSTRAINT workflow_node_jobs_run_id_node_id_key"
        )
        run = factories.run(own)
        for _ in range(2):
            factories.node(own, run, "n")
            own.execute("INSERT INTO schedule_fires VALUES ('x', '2026-01-01', gen_random_uuid())")
        found = broken(own)
    assert sorted(found) == [6, 11]
    assert "has 2 jobs" in found[6][0].text
    assert found[11][0].id == "x"


def test_each_invariant_has_a_statement_and_a_mutant_or_a_note() -> None:
    assert [each.number for each in audit.INVARIANTS] == [*range(1, 19)]
    assert {number for number, *_ in MUTANTS.values()} == {each.number for each in CHECKED}
    assert [each.number for each in audit.INVARIANTS if each.note] == [14]


# --- what breaks none --------------------------------------------------------------------------


def test_a_busy_database_is_clean_at_every_moment(db: ModuleType) -> None:
    flow = Flow()
    flow.dag(a="", b="a", c="a", d="b c")
    for _ in range(6):
        flow.submit()
    with engine.connect() as own:
        for _ in range(40):
            factories.ingest(own)
    stop = threading.Event()

    def ingest() -> None:
        with engine.connect() as own:
            for _ in range(20):
                job = transitions.claim_ingest(own, transitions.who("fetch", worker_id="i"))
                if job["seq"] % 3:
                    transitions.complete_ingest(own, job)
                else:
                    transitions.hand_back(own, job, reason="test")

    def nodes() -> None:
        flow.go()
        stop.set()

    threads = [threading.Thread(target=body) for body in (nodes, ingest)]
    for thread in threads:
        thread.start()
    rounds = 0
    with engine.connect() as own:
        while not stop.is_set() or rounds < 2:
            assert broken(own, 3600) == {}
            rounds += 1
    for thread in threads:
        thread.join()
    flow.close()
    with engine.connect() as own:
        assert broken(own) == {}
        assert factories.column(own, "SELECT DISTINCT status FROM workflow_runs") == ["completed"]


def test_unfinished_changes_have_a_grace_period(conn: Any) -> None:
    conn.execute(
        f"INSERT INTO workflow_node_jobs {NODE}) VALUES ('r', 'late', 'm', 'cpu');"
        " UPDATE workflow_runs SET status = 'cancelled',"
        " finished_at = now() - interval '5 seconds'".encode()
    )
    assert broken(conn) == {}
    assert sorted(broken(conn, commit_s=0, sweep_s=0)) == [8, 9]


def test_a_node_that_comes_in_late_is_left_to_the_sweep(conn: Any) -> None:
    conn.execute(f"UPDATE workflow_runs SET status = 'failed', finished_at = {OLD}".encode())
    factories.node(conn, "r", "late")
    assert broken(conn) == {}
    conn.execute(f"UPDATE workflow_node_jobs SET created_at = {OLD}".encode())
    assert sorted(broken(conn)) == [8]


@pytest.mark.parametrize(
    "alive",
    [
        "UPDATE workflow_node_jobs SET finished_at = now() WHERE id = 'done';"
        " UPDATE workflow_dispatch_events SET created_at = now()",
        "UPDATE workflow_dispatch_events SET processed_at = NULL",
        "INSERT INTO workflow_input_submissions (run_id, node_id) VALUES ('r', 'b')",
        f"INSERT INTO workflow_node_jobs {NODE}, status)"
        " VALUES ('r', 'b', 'm', 'cpu', 'awaiting_input')",
        "UPDATE workflow_runs SET updated_at = now()",
        "UPDATE workflow_runs SET definition = NULL",
        "UPDATE workflow_runs SET mode = 'step'",
    ],
)
def test_a_run_that_will_go_on_breaks_nothing(conn: Any, alive: str) -> None:
    conn.execute(
        f"DELETE FROM workflow_node_jobs WHERE id = 'held';"
        f" UPDATE workflow_runs SET updated_at = {OLD}, started_at = {OLD};"
        f" UPDATE workflow_node_jobs SET finished_at = {OLD};"
        f" UPDATE workflow_dispatch_events SET processed_at = now(), created_at = {OLD}".encode()
    )
    assert sorted(broken(conn)) == [15]
    conn.execute(alive.encode())
    assert broken(conn) == {}


def test_a_dependency_that_was_reopened_beside_a_running_node_breaks_nothing(conn: Any) -> None:
    reopen = "UPDATE workflow_node_jobs SET status = 'queued', finished_at = NULL"
    conn.execute(f"{reopen} WHERE id = 'done'".encode())
    assert 6 in broken(conn)
    conn.execute(b"UPDATE workflow_node_jobs SET generation = 1 WHERE id = 'done'")
    assert broken(conn) == {}


def test_an_off_that_ended_or_is_on_breaks_nothing(conn: Any) -> None:
    conn.execute(
        "INSERT INTO worker_controls (host_label, queue, desired_state, updated_at, until_at)"
        f" VALUES ('box', 'fetch', 'off', {OLD}, now() - interval '30 min'),"
        f" ('box', 'cpu', 'on', {OLD}, NULL), ('other', 'all', 'off', {OLD}, NULL)".encode()
    )
    assert broken(conn) == {}


def test_crashes_retries_and_reopened_runs_break_nothing(db: ModuleType) -> None:
    with engine.connect() as own:
        job = factories.ingest(own, max_attempts=2)
        for _ in range(2):
            own.execute("UPDATE ingest_jobs SET available_at = NULL")
            claimed = transitions.claim_ingest(own)
            transitions.fail(own, claimed, error="x")
        poison = factories.node(own, factories.run(own, definition={"nodes": []}))
        for _ in range(3):
            own.execute("UPDATE workflow_node_jobs SET available_at = NULL")
            transitions.expire(own, transitions.claim_node(own))
            transitions.reclaim_lapsed(own, "node")
        assert factories.reread(own, job)["attempts"] == 2
        assert factories.reread(own, poison)["crash_count"] == 3
        assert factories.reread(own, poison)["status"] == "failed"
        assert broken(own) == {}
        assert queue_workflows.retry_job(job["id"])
        transitions.complete_ingest(own, transitions.claim_ingest(own))
        assert broken(own) == {}


def test_a_claim_by_an_older_engine_breaks_nothing(db: ModuleType) -> None:
    with engine.connect() as own:
        job = factories.ingest(own)
        handback.hand_back(own, transitions.lease_of(transitions.claim_ingest(own)), reason="test")
        own.execute("UPDATE ingest_jobs SET status = 'running', claimed_by = 'old'")
        assert factories.reread(own, job)["claim_no"] == 2
        assert broken(own) == {}
        transitions.expire(own, job)
        transitions.reclaim_lapsed(own, "ingest")
        assert transitions.claim_ingest(own)["claim_no"] == 3
        assert broken(own) == {}


def test_events_that_an_app_records_break_nothing(db: ModuleType) -> None:
    with engine.connect() as own:
        job = factories.node(own)
        record = (
            "INSERT INTO workflow_node_events (run_id, node_id, job_id, event_type)"
            " SELECT run_id, node_id, id, e FROM workflow_node_jobs,"
            " unnest(ARRAY['completed', 'error', 'failed']) e"
        )
        own.execute(record)
        transitions.complete_node(own, transitions.claim_node(own))
        own.execute(record)
        assert factories.reread(own, job)["status"] == "completed"
        assert broken(own) == {}


# --- bounds ------------------------------------------------------------------------------------


def test_rows_older_than_the_window_are_not_checked(conn: Any) -> None:
    conn.execute(
        f"DELETE FROM workflow_dispatch_events; UPDATE workflow_node_events SET created_at = {OLD};"
        f" UPDATE workflow_node_jobs SET finished_at = {OLD} WHERE id = 'done'".encode()
    )
    assert sorted(broken(conn)) == [7]
    assert broken(conn, 60) == {}
    assert sorted(broken(conn, 7200)) == [7]


def test_an_outbox_row_of_a_long_transaction_does_not_hide_those_before_it(conn: Any) -> None:
    conn.execute(
        "INSERT INTO workflow_dispatch_events (run_id, node_id, kind, created_at)"
        " VALUES ('r', 'b', 'awaiting_input', now() - interval '20 min')"
    )
    assert broken(conn, 60) == {}


def test_an_end_past_the_retention_needs_no_outbox_row(
    conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    conn.execute(f"UPDATE workflow_node_jobs SET finished_at = {OLD} WHERE id = 'done'".encode())
    conn.execute("DELETE FROM workflow_dispatch_events")
    assert sorted(broken(conn)) == [7]
    monkeypatch.setenv("QUEUE_WORKFLOWS_NODE_EVENT_RETENTION_DAYS", "0")
    assert broken(conn) == {}


def test_a_window_reads_no_table_of_jobs_from_end_to_end(conn: Any) -> None:
    conn.execute("SET statement_timeout = '60s'")  # 80,000 rows with their triggers
    conn.execute(
        "INSERT INTO ingest_jobs (id, task_name, queue, status, finished_at)"
        f" SELECT 'x' || n, 't', 'q', 'completed', {OLD} FROM generate_series(1, 40000) n;"
        " INSERT INTO workflow_node_jobs (id, run_id, node_id, node_module, queue, status)"
        " SELECT 'x' || n, 'r' || n / 9, 'n' || n, 'm', 'cpu', 'completed'"
        " FROM generate_series(1, 40000) n; ANALYZE".encode()
    )
    values = parameters(conn, 60, limit=6)
    for each in CHECKED:
        assert each.statement is not None
        plan = conn.execute(b"EXPLAIN " + each.statement, values).fetchall()
        text = "\n".join(row["QUERY PLAN"] for row in plan)
        assert "Seq Scan on ingest_jobs" not in text, f"invariant {each.number}\n{text}"
        assert "Seq Scan on workflow_node_jobs" not in text, f"invariant {each.number}\n{text}"
    conn.execute("TRUNCATE ingest_jobs, workflow_node_jobs")


def test_the_list_of_broken_rows_ends_at_the_limit(conn: Any) -> None:
    conn.execute(
        "INSERT INTO ingest_jobs (task_name, queue, attempts)"
        " SELECT 't', 'q', 2 FROM generate_series(1, 9)"
    )
    assert len(broken(conn)[12]) == 9
    assert len(broken(conn, limit=3)[12]) == 3
    (found,) = (each for each in command.collect(conn, None) if each["state"] == "broken")
    assert (found["invariant"], len(found["offenders"]), found["more"]) == (12, command.SHOWN, True)


def invariant_of(statement: bytes) -> audit.Invariant:
    return audit.Invariant(99, "test", "A test.", statement)


def test_nothing_can_be_written(conn: Any) -> None:
    invariant = invariant_of(
        b"WITH gone AS (DELETE FROM ingest_jobs RETURNING id)"
        b" SELECT id, 'gone' AS text FROM gone LIMIT %(limit)s"
    )
    outcome = audit.check(conn, invariant, parameters(conn))
    assert isinstance(outcome, str)
    assert "read-only" in outcome
    assert factories.column(conn, "SELECT id FROM ingest_jobs") == ["in"]


def test_a_check_that_takes_too_long_is_given_up(
    conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "STATEMENT_TIMEOUT_S", 0.05)
    invariant = invariant_of(b"SELECT 'x' AS id, pg_sleep(9)::text AS text LIMIT %(limit)s")
    began = time.monotonic()
    assert "not finished within 0.05 s" in str(audit.check(conn, invariant, parameters(conn)))
    assert time.monotonic() - began < patience(5)
    assert isinstance(conn.execute("SELECT 1").fetchone(), dict)


def test_a_lost_connection_is_no_finding(conn: Any, dsn: str) -> None:
    values = parameters(conn)
    with psycopg.connect(dsn, autocommit=True) as other:
        other.execute("SELECT pg_terminate_backend(%s, 5000)", (conn.info.backend_pid,))
    with pytest.raises(psycopg.OperationalError):
        audit.check(conn, audit.INVARIANTS[0], values)


# --- the command -------------------------------------------------------------------------------


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs the command in this process: its exit code and what it printed."""

    def call(*argv: str) -> tuple[int, str]:
        code = main(("audit", *argv))
        return code, capfd.readouterr().out

    return call


def test_one_line_an_invariant_and_what_breaks_it_below(
    conn: Any, said: Callable[..., tuple[int, str]]
) -> None:
    code, text = said()
    assert (code, len(text.splitlines())) == (0, 18)
    conn.execute("UPDATE ingest_jobs SET attempts = 2, id = E'a\\x1b[31m'")
    with factories.unguarded(conn, "ingest_job_events"):
        conn.execute("UPDATE ingest_job_events SET job_id = E'a\\x1b[31m'")
    code, text = said()
    lines = text.splitlines()
    assert (code, len(lines)) == (1, 19)
    at = next(n for n, line in enumerate(lines) if "BROKEN" in line)
    assert lines[at].startswith("invariant 12  BROKEN")
    assert r"a\x1b[31m: completed after 2 attempts (of 1)" in lines[at + 1]


def test_an_unfinished_check_fails_too(
    conn: Any, said: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "INVARIANTS", (invariant_of(b"SELECT nothing"),))
    code, text = said("--json")
    (found,) = json.loads(text)["invariants"]
    assert (code, found["state"]) == (1, "unfinished")
    assert "try a shorter --since" in found["note"]


def test_how_far_back_is_read_from_words() -> None:
    assert [command.window(text) for text in ("90m", "24h", "7d", "5s", "all")] == [
        5400, 86400, 604800, 5, None,
    ]  # fmt: skip
    for text in ("", "1", "h", "-1h", "1w", "1.5h", "1h "):
        with pytest.raises(errors.InvalidConfig, match="--since"):
            command.window(text)
