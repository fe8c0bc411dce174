"""`audit` finds each broken invariant, finds none in a busy healthy database, and only reads."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import pytest

import queue_workflows
from queue_workflows import db
from tests.support import console, factories, tabled, transitions
from tests.support.flow import Flow
from tests.support.invariants import breaches as broken

DEFINITION = {"version": 1, "nodes": [{"id": "a", "deps": []}, {"id": "b", "deps": ["a"]}]}
NODE = "(run_id, node_id, node_module, queue"
OLD = "now() - interval '1 h'"


@pytest.fixture
def forger(conn: Any) -> Any:
    """A connection without the triggers that refuse changes, to two nodes and an ingest job.

    Run `r` is running, with node `a` (job `done`) completed and `b` (job `held`) running.
    """
    factories.run(conn, id="r", definition=DEFINITION)
    for name, node_id in (("done", "a"), ("held", "b")):
        factories.node(conn, "r", node_id, id=name)
        job = transitions.claim_node(conn, transitions.who(worker_id=name))
        if name == "done":
            transitions.complete_node(conn, job)
    factories.ingest(conn, id="in")
    transitions.complete_ingest(conn, transitions.claim_ingest(conn))
    assert broken(conn) == {}
    conn.execute("SET session_replication_role = replica")
    return conn


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
    "running without a worker": (
        5, "held", "UPDATE workflow_node_jobs SET worker_id = NULL WHERE id = 'held'",
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
    "lapses without end": (
        12, "held", "UPDATE workflow_node_jobs SET lapse_count = 10 WHERE id = 'held'",
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


def test_a_broken_invariant_is_named_with_what_breaks_it(forger: Any) -> None:
    for mutant in MUTANTS:
        with tabled.undone(forger, mutant):
            number, offender, statement = MUTANTS[mutant]
            forger.execute(statement.encode())
            for since_s in (None, 60.0):
                found = broken(forger, since_s)
                assert offender in [row.id for row in found.get(number, [])], found
                assert all(row.text for rows in found.values() for row in rows)


def test_a_second_row_for_a_node_or_a_fire_is_named(
    migrated_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", migrated_database)
    with db.connect() as own:
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


def test_each_invariant_has_a_mutant_or_a_note(db: ModuleType) -> None:
    found = console.reply("audit")["invariants"]
    assert [each["invariant"] for each in found] == [*range(1, 19)]
    assert [each["invariant"] for each in found if each["note"]] == [14]
    assert {number for number, *_ in MUTANTS.values()} == {*range(1, 19)} - {14}


# --- what breaks none --------------------------------------------------------------------------


def test_a_busy_database_is_clean_at_every_moment(toy: Flow, conn: Any) -> None:
    toy.dag(a="", b="a", c="a", d="b c")
    for _ in range(6):
        toy.submit()
    for _ in range(40):
        factories.ingest(conn)
    stop = threading.Event()

    def ingest() -> None:
        with db.connect() as own:
            for _ in range(20):
                job = transitions.claim_ingest(own, transitions.who("fetch", worker_id="i"))
                if job["seq"] % 3:
                    transitions.complete_ingest(own, job)
                else:
                    transitions.hand_back(own, job, reason="test")

    def nodes() -> None:
        toy.go()
        stop.set()

    threads = [threading.Thread(target=body) for body in (nodes, ingest)]
    for thread in threads:
        thread.start()
    rounds = 0
    while not stop.is_set() or rounds < 2:
        assert broken(conn, 3600) == {}
        rounds += 1
    for thread in threads:
        thread.join()
    assert broken(conn) == {}
    assert factories.column(conn, "SELECT DISTINCT status FROM workflow_runs") == ["completed"]


def test_unfinished_changes_have_a_grace_period(forger: Any) -> None:
    forger.execute(
        f"INSERT INTO workflow_node_jobs {NODE}) VALUES ('r', 'late', 'm', 'cpu');"
        " UPDATE workflow_runs SET status = 'cancelled',"
        " finished_at = now() - interval '5 seconds'".encode()
    )
    assert broken(forger) == {}
    assert sorted(broken(forger, commit_s=0, sweep_s=0)) == [8, 9]


def test_a_node_that_comes_in_late_is_left_to_the_sweep(forger: Any) -> None:
    forger.execute(f"UPDATE workflow_runs SET status = 'failed', finished_at = {OLD}".encode())
    factories.node(forger, "r", "late")
    assert broken(forger) == {}
    forger.execute(f"UPDATE workflow_node_jobs SET created_at = {OLD}".encode())
    assert sorted(broken(forger)) == [8]


def test_a_run_that_will_go_on_breaks_nothing(forger: Any) -> None:
    cases: list[Any] = [
        "UPDATE workflow_node_jobs SET finished_at = now() WHERE id = 'done';"
        " UPDATE workflow_dispatch_events SET created_at = now()",
        "UPDATE workflow_dispatch_events SET processed_at = NULL",
        "INSERT INTO workflow_input_submissions (run_id, node_id) VALUES ('r', 'b')",
        f"INSERT INTO workflow_node_jobs {NODE}, status)"
        " VALUES ('r', 'b', 'm', 'cpu', 'awaiting_input')",
        "UPDATE workflow_runs SET definition = NULL",
        "UPDATE workflow_runs SET mode = 'step'",
    ]
    for alive in cases:
        with tabled.undone(forger, alive):
            forger.execute(
                f"DELETE FROM workflow_node_jobs WHERE id = 'held';"
                f" UPDATE workflow_runs SET updated_at = {OLD}, started_at = {OLD};"
                f" UPDATE workflow_node_jobs SET finished_at = {OLD};"
                " UPDATE workflow_dispatch_events"
                f" SET processed_at = now(), created_at = {OLD}".encode()
            )
            assert sorted(broken(forger)) == [15]
            forger.execute(alive.encode())
            assert broken(forger) == {}


def test_a_dependency_that_was_reopened_beside_a_running_node_breaks_nothing(forger: Any) -> None:
    reopen = "UPDATE workflow_node_jobs SET status = 'queued', finished_at = NULL"
    forger.execute(f"{reopen} WHERE id = 'done'".encode())
    assert 6 in broken(forger)
    forger.execute(b"UPDATE workflow_node_jobs SET generation = 1 WHERE id = 'done'")
    assert broken(forger) == {}


def test_an_off_that_ended_or_is_on_breaks_nothing(forger: Any) -> None:
    forger.execute(
        "INSERT INTO worker_controls (host_label, queue, desired_state, updated_at, until_at)"
        f" VALUES ('box', 'fetch', 'off', {OLD}, now() - interval '30 min'),"
        f" ('box', 'cpu', 'on', {OLD}, NULL), ('other', 'all', 'off', {OLD}, NULL)".encode()
    )
    assert broken(forger) == {}


def test_crashes_retries_and_reopened_runs_break_nothing(conn: Any) -> None:
    job = factories.ingest(conn, max_attempts=2)
    for _ in range(2):
        conn.execute("UPDATE ingest_jobs SET available_at = NULL")
        claimed = transitions.claim_ingest(conn)
        transitions.fail(conn, claimed, error="x")
    poison = factories.node(conn, factories.run(conn, definition={"nodes": []}))
    for _ in range(3):
        conn.execute("UPDATE workflow_node_jobs SET available_at = NULL")
        transitions.charge(conn, transitions.claim_node(conn))
    lapsed = factories.node(conn, factories.run(conn, definition={"nodes": []}))
    for _ in range(10):
        conn.execute("UPDATE workflow_node_jobs SET available_at = NULL")
        transitions.expire(conn, transitions.claim_node(conn))
        transitions.reclaim_lapsed(conn, "node")
    assert factories.reread(conn, lapsed)["status"] == "failed"
    assert factories.reread(conn, job)["attempts"] == 2
    assert factories.reread(conn, poison)["crash_count"] == 3
    assert factories.reread(conn, poison)["status"] == "failed"
    assert broken(conn) == {}
    assert queue_workflows.retry_job(job["id"])
    transitions.complete_ingest(conn, transitions.claim_ingest(conn))
    assert broken(conn) == {}


def test_a_claim_by_an_older_engine_breaks_nothing(conn: Any) -> None:
    job = factories.ingest(conn)
    transitions.hand_back(conn, transitions.claim_ingest(conn))
    conn.execute("UPDATE ingest_jobs SET status = 'running', claimed_by = 'old'")
    assert factories.reread(conn, job)["claim_no"] == 2
    assert broken(conn) == {}
    transitions.expire(conn, job)
    transitions.reclaim_lapsed(conn, "ingest")
    assert transitions.claim_ingest(conn)["claim_no"] == 3
    assert broken(conn) == {}


def test_events_that_an_app_records_break_nothing(conn: Any) -> None:
    job = factories.node(conn)
    record = (
        "INSERT INTO workflow_node_events (run_id, node_id, job_id, event_type)"
        " SELECT run_id, node_id, id, e FROM workflow_node_jobs,"
        " unnest(ARRAY['completed', 'error', 'failed']) e"
    )
    conn.execute(record)
    transitions.complete_node(conn, transitions.claim_node(conn))
    conn.execute(record)
    assert factories.reread(conn, job)["status"] == "completed"
    assert broken(conn) == {}


# --- bounds ------------------------------------------------------------------------------------


def test_rows_older_than_the_window_are_not_checked(forger: Any) -> None:
    forger.execute(
        f"DELETE FROM workflow_dispatch_events; UPDATE workflow_node_events SET created_at = {OLD};"
        f" UPDATE workflow_node_jobs SET finished_at = {OLD} WHERE id = 'done'".encode()
    )
    assert sorted(broken(forger)) == [7]
    assert broken(forger, 60) == {}
    assert sorted(broken(forger, 7200)) == [7]


def test_an_outbox_row_of_a_long_transaction_does_not_hide_those_before_it(forger: Any) -> None:
    forger.execute(
        "INSERT INTO workflow_dispatch_events (run_id, node_id, kind, created_at)"
        " VALUES ('r', 'b', 'awaiting_input', now() - interval '20 min')"
    )
    assert broken(forger, 60) == {}


def test_an_end_past_the_retention_needs_no_outbox_row(
    forger: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forger.execute(f"UPDATE workflow_node_jobs SET finished_at = {OLD} WHERE id = 'done'".encode())
    forger.execute("DELETE FROM workflow_dispatch_events")
    assert sorted(broken(forger)) == [7]
    monkeypatch.setenv("QUEUE_WORKFLOWS_NODE_EVENT_RETENTION_DAYS", "0")
    assert broken(forger) == {}


def test_the_list_of_broken_rows_ends_at_the_limit(forger: Any) -> None:
    forger.execute(
        "INSERT INTO ingest_jobs (task_name, queue, attempts)"
        " SELECT 't', 'q', 2 FROM generate_series(1, 9)"
    )
    assert len(broken(forger)[12]) == 9
    assert len(broken(forger, limit=3)[12]) == 3
    report = console.reply("audit", "--since", "all")
    (found,) = (each for each in report["invariants"] if each["state"] == "broken")
    assert (found["invariant"], len(found["offenders"]), found["more"]) == (12, 5, True)


# --- the command -------------------------------------------------------------------------------


def test_one_line_an_invariant_and_what_breaks_it_below(forger: Any) -> None:
    assert len(console.printed("audit").splitlines()) == 18
    forger.execute("UPDATE ingest_jobs SET attempts = 2, id = E'a\\x1b[31m'")
    with factories.unguarded(forger, "ingest_job_events"):
        forger.execute("UPDATE ingest_job_events SET job_id = E'a\\x1b[31m'")
    done = console.command("audit")
    lines = done.out.splitlines()
    assert (done.code, len(lines)) == (1, 19)
    at = next(n for n, line in enumerate(lines) if "BROKEN" in line)
    assert lines[at].startswith("invariant 12  BROKEN")
    assert r"a\x1b[31m: completed after 2 attempts (of 1)" in lines[at + 1]


def test_how_far_back_is_read_from_words(db: ModuleType) -> None:
    for text in ("90m", "24h", "7d", "5s", "all"):
        console.printed("audit", "--since", text)
    for text in ("", "1", "h", "-1h", "1w", "1.5h", "1h ", "1 h", "1H", "1000000d", "1h1m", "ALL"):
        assert "--since" in console.refusal("audit", "--since", text)


@pytest.mark.parametrize(
    ("age", "far", "near"),
    [("50 s", "90s", "5s"), ("80 min", "90m", "70m"), ("110 min", "2h", "1h"),
     ("110 min", "1d", "100m"), ("40 h", "2d", "1d")],
)  # fmt: skip
def test_the_command_looks_as_far_back_as_its_unit_says(
    forger: Any, age: str, far: str, near: str
) -> None:
    ago = f"now() - interval '{age}'"
    forger.execute(
        f"DELETE FROM workflow_dispatch_events; UPDATE workflow_node_events SET created_at = {ago};"
        f" UPDATE workflow_node_jobs SET finished_at = {ago} WHERE id = 'done'".encode()
    )
    assert [console.command("audit", "--since", text).code for text in (far, near)] == [1, 0]
