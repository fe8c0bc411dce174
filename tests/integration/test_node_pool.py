"""The orchestrator wakes at once, sweeps what is due, and changes nothing else."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import pytest

import queue_workflows
from queue_workflows import (
    config,
    db,
    events,
    ingest_executor,
    node_pool,
    node_queue,
    runs,
    steps,
)
from tests.support import constants, factories, flow, orchestrators, sweeps, transitions, wait

WAITS = "SELECT count(*) FROM job_steps WHERE state = 'waiting'"


@contextmanager
def running(**more: Any) -> Iterator[node_pool.NodePool]:
    """A started pool that is past its first polls, so that only notifications wake it."""
    pool = node_pool.NodePool(**more)
    pool.start()
    try:
        with db.connect() as conn:
            listening = "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'LISTEN%%'"
            wait.until(lambda: factories.column(conn, listening))
        yield pool
    finally:
        pool.stop()


@pytest.fixture
def hourly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever polls does so once an hour."""
    monkeypatch.setenv("QUEUE_WORKFLOWS_CLAIM_POLL_S", "3600")


# --- starting, waking, stopping


def test_a_new_run_starts_at_once_and_not_at_the_next_poll(toy: flow.Flow, hourly: None) -> None:
    toy.dag(a="")
    with running():
        run_id = toy.submit()
        wait.until(lambda: flow.status(run_id) == "running")


def test_an_event_and_an_answer_are_dispatched_at_once(toy: flow.Flow, hourly: None) -> None:
    toy.define(
        flow.step("s"), flow.ask("q", depends_on=["s"]), flow.step("t", depends_on=["q"]),
        s=flow.nodes(a=""), t=flow.nodes(b=""),
    )  # fmt: skip
    with running():
        run_id = toy.submit()
        wait.until(lambda: "s/a" in flow.jobs(run_id))
        flow.complete(run_id, "s/a")
        wait.until(lambda: "q" in flow.jobs(run_id))
        node_queue.mark_awaiting_input(flow.job(run_id, "q")["id"])
        wait.until(lambda: flow.job(run_id, "q")["input_spec"])
        runs.answer(run_id, "q", 1)
        wait.until(lambda: "t/b" in flow.jobs(run_id))


def test_a_job_that_waits_for_an_event_wakes_at_the_commit_of_a_plain_insert(
    conn: Any, hourly: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants.put(monkeypatch, "maintenance.periodic.EVENTS_S", 3600.0)
    queue_workflows.register_ingest_task("t", lambda: steps.wait_for_event("approved"))
    factories.ingest(conn)
    with running():
        ingest_executor.execute_ingest_job(transitions.claim_ingest(conn))
        conn.execute("INSERT INTO events (name) VALUES ('approved')")
        wait.until(lambda: factories.one(conn, WAITS) == 0)


def test_an_event_of_an_app_counts_also_when_a_check_is_due(
    conn: Any, hourly: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue_workflows.register_ingest_task("t", lambda: steps.wait_for_event("approved"))
    factories.ingest(conn)
    later = [0.0]
    swept = sweeps.first_of_waits(monkeypatch)
    with running(now_fn=lambda: time.monotonic() + later[0]):
        wait.until(swept.is_set)
        ingest_executor.execute_ingest_job(transitions.claim_ingest(conn))
        later[0] = 7200.0
        conn.execute("INSERT INTO events (name) VALUES ('approved')")
        wait.until(lambda: factories.one(conn, WAITS) == 0)


def test_all_jobs_that_wait_for_an_event_wake_soon(
    conn: Any, hourly: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "WAKE_BATCH", 10)
    conn.execute(
        "INSERT INTO ingest_jobs (id, task_name, queue, available_at, claim_no)"
        " SELECT 'j' || i, 't', 'fetch', now() + interval '1 h', 1 FROM generate_series(1, 45) i"
    )
    conn.execute(
        "INSERT INTO job_steps (job_table, job_id, kind, name, state, claim_no)"
        " SELECT 'ingest_jobs', id, 'event', 'approved', 'waiting', 1 FROM ingest_jobs"
    )
    swept = sweeps.first_of_waits(monkeypatch)
    with running():
        wait.until(swept.is_set)
        conn.execute("INSERT INTO events (name) VALUES ('approved')")
        wait.until(lambda: factories.one(conn, WAITS) == 0)


def test_an_event_that_came_in_beside_an_open_one_is_found_without_a_notification(
    toy: flow.Flow, conn: Any, hourly: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_pool, "STREAM_PAUSE_S", 1.0)
    closed = "SELECT 1 FROM workflow_dispatch_events WHERE processed_at IS NOT NULL"
    toy.dag(a="", b="", c="a", d="b")
    with running():
        run_id = toy.submit()
        wait.until(lambda: len(flow.jobs(run_id)) == 2)
        first, second = transitions.claim(conn, count=2)
        with db.connect(autocommit=False) as ours, db.connect(autocommit=False) as theirs:
            theirs.execute("SELECT FROM workflow_runs FOR NO KEY UPDATE")
            transitions.complete_node(conn, first)
            # It sees the event of a, which waits for the run's lock, and so wakes nobody.
            transitions.complete_node(ours, second)
            theirs.rollback()
            wait.until(lambda: factories.column(conn, closed))
            ours.commit()
        wait.until(lambda: {"s/c", "s/d"} <= {*flow.jobs(run_id)})


def test_work_from_before_the_start_is_done_too(toy: flow.Flow, hourly: None) -> None:
    toy.dag(a="", b="a")
    run_id = toy.submit()
    with running():
        wait.until(lambda: flow.status(run_id) == "running")


def test_a_lost_notification_is_made_good_by_the_poll(
    toy: flow.Flow, conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_CLAIM_POLL_S", "0.05")
    toy.dag(a="")
    with running():
        conn.execute("ALTER TABLE workflow_runs DISABLE TRIGGER USER")
        try:
            run_id = toy.submit()
        finally:
            conn.execute("ALTER TABLE workflow_runs ENABLE TRIGGER USER")
        wait.until(lambda: flow.status(run_id) == "running")


def test_it_goes_on_after_its_connections_were_cut(toy: flow.Flow, conn: Any) -> None:
    toy.dag(a="")
    with running():
        first = toy.submit()
        wait.until(lambda: flow.status(first) == "running")
        conn.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            " AND application_name = 'queue_workflows'"
        )
        db.close_pool()
        second = toy.submit()
        wait.until(lambda: flow.status(second) == "running")


def test_start_registers_models_once_and_stop_leaves_nothing_behind(db: ModuleType) -> None:
    calls: list[int] = []
    before = {*threading.enumerate()}
    pool = node_pool.NodePool(lambda: calls.append(1), cpu_workers=5, gpu_workers=1)
    assert calls == []
    pool.start()
    with pytest.raises(RuntimeError, match="started before"):
        pool.start()
    assert {t.name for t in {*threading.enumerate()} - before} >= {"dispatch", "maintenance"}
    pool.stop()
    pool.stop()
    assert calls == [1]
    with pytest.raises(RuntimeError, match="started before"):
        pool.start()


def test_a_pool_that_was_never_started_may_be_stopped(db: ModuleType) -> None:
    node_pool.NodePool().stop()


def test_what_becomes_due_is_seen_under_a_stream_of_notifications(
    toy: flow.Flow, conn: Any
) -> None:
    now = [0.0]
    pool = node_pool.NodePool(now_fn=lambda: now[0])
    toy.dag(a="")
    try:
        pool.check()
        run_id = toy.submit()
        conn.execute("UPDATE workflow_runs SET available_at = now() WHERE id = %s", (run_id,))
        orchestrators.notify(pool, "run")
        assert flow.status(run_id) == "queued"
        now[0] = config.CLAIM_POLL_S.read()
        orchestrators.notify(pool, "run")
        assert flow.status(run_id) == "running"
    finally:
        pool.stop()


def test_a_poll_promotes_jobs_that_have_become_due(toy: flow.Flow, conn: Any) -> None:
    later = "now() + interval '1 hour'"
    run_id = factories.run(conn)
    node = factories.node(conn, run_id)
    ingest = factories.ingest(conn)
    for table in ("workflow_node_jobs", "ingest_jobs"):
        conn.execute(f"UPDATE {table} SET available_at = {later}")
    toy.look()
    assert factories.reread(conn, node)["blocked_reason"] == "not_due"
    for table in ("workflow_node_jobs", "ingest_jobs"):
        conn.execute(f"UPDATE {table} SET available_at = now()")
    toy.look()
    for job in (node, ingest):
        row = factories.reread(conn, job)
        assert (row["blocked_reason"], row["available_at"]) == (None, None)


def test_an_idle_poll_is_one_statement(toy: flow.Flow) -> None:
    toy.look()
    asked = orchestrators.counter(toy.pool)
    toy.look()
    assert asked.statements == 1


# --- sweeps


def test_the_list_of_sweeps_and_their_knobs(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AI_LEADS_LEASE_RECLAIM_INTERVAL_S", "7")
    monkeypatch.setenv("AI_LEADS_DEAD_WORKER_SWEEP_INTERVAL_S", "8")
    with sweeps.tasks() as made:
        found = {
            task.name: task.every_s() if callable(task.every_s) else task.every_s
            for task in made.tasks()
        }
        assert found["check"] == 7
        assert found["dead-workers"] == 8
        assert found["lost-sessions"] == 10
        assert {*found} >= {"orphans", "input-timeouts", "lock-keys"}
        for task in made.tasks():
            task.run()


class Rounds:
    """The loop of the sweeps by a clock of its own, past its first round; it counts statements."""

    def __init__(self, stack: ExitStack) -> None:
        self.now = 1000.0
        made = stack.enter_context(sweeps.tasks(lambda: self.now))
        self._loop = made.loop()
        self._due_at = self.now + self._loop.run_due()
        self.asked = sweeps.counter(made)

    def go_on(self, seconds: float) -> None:
        end = self.now + seconds
        while self._due_at <= end:
            self.now = self._due_at
            self._due_at = self.now + self._loop.run_due()
        self.now = end


@pytest.fixture
def rounds(db: ModuleType) -> Iterator[Rounds]:
    with ExitStack() as stack:
        yield Rounds(stack)


@pytest.fixture
def counted_daily(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting events runs more statements while other databases of the server are busy."""
    constants.put(monkeypatch, "history.COUNT_EVERY_S", 86400.0)


def test_idle_sweeps_run_few_statements(counted_daily: None, rounds: Rounds) -> None:
    rounds.go_on(60)  # dead workers are not searched for at once
    before = rounds.asked.statements
    rounds.go_on(60)
    # 12 of them look for waiting jobs whose event was sent.
    assert 24 < rounds.asked.statements - before <= 52


def lapsed_node(conn: Any) -> str:
    factories.node(conn, factories.run(conn))
    transitions.expire(conn, transitions.claim_node(conn))
    return "SELECT status = 'queued' FROM workflow_node_jobs"


def lapsed_ingest(conn: Any) -> str:
    factories.ingest(conn)
    transitions.expire(conn, transitions.claim_ingest(conn))
    return "SELECT status = 'queued' FROM ingest_jobs"


def nobody_answers(conn: Any) -> str:
    job = factories.node(conn, factories.run(conn))
    conn.execute("UPDATE workflow_node_jobs SET status = 'awaiting_input'")
    conn.execute(
        "INSERT INTO workflow_input_timeouts VALUES (%s, %s, now())", (job["id"], job["claim_no"])
    )
    return "SELECT status = 'failed' FROM workflow_node_jobs"


def missed_turn(conn: Any) -> str:
    factories.ingest(conn, lock_key="k")
    passed_over(conn, "blocked_reason = 'locked'")
    return "SELECT blocked_reason IS NULL FROM ingest_jobs"


def turn_of_nobody(conn: Any) -> str:
    conn.execute(
        "INSERT INTO workers (worker_id, host_label, queue, pid, last_seen)"
        " VALUES ('w', 'box', 'fetch', 1, now() + interval '1 hour')"
    )
    for queue in ("ghost", "fetch"):
        factories.ingest(conn, queue=queue, lock_key="k")
    return "SELECT blocked_reason = 'unserved' FROM ingest_jobs WHERE queue = 'ghost'"


def turn_given_up(conn: Any) -> str:
    turn_of_nobody(conn)
    conn.execute("DELETE FROM ingest_jobs WHERE queue = 'fetch'")
    conn.execute("UPDATE ingest_jobs SET blocked_reason = 'unserved', queue = 'fetch'")
    return "SELECT blocked_reason IS NULL FROM ingest_jobs"


def missed_in_line(conn: Any) -> str:
    conn.execute("INSERT INTO queue_settings (queue, partition_max_running) VALUES ('fetch', 1)")
    factories.ingest(conn, partition_key="p")
    passed_over(conn, "blocked_reason = 'limited', admitted_at = NULL")
    return "SELECT blocked_reason IS NULL FROM ingest_jobs"


def line_that_is_due(conn: Any) -> str:
    conn.execute(
        "INSERT INTO partition_dues (queue, partition_key, due_at) VALUES ('fetch', 'p', now())"
    )
    return "SELECT count(*) = 0 FROM partition_dues"


def passed_over(conn: Any, waiting: str) -> None:
    """As when the row was locked by somebody while its turn came."""
    conn.execute("SET session_replication_role = replica")
    conn.execute(f"UPDATE ingest_jobs SET {waiting}")
    conn.execute("SET session_replication_role = origin")


@pytest.mark.parametrize(
    "make",
    [
        lapsed_node,
        lapsed_ingest,
        nobody_answers,
        missed_turn,
        turn_given_up,
        missed_in_line,
        line_that_is_due,
    ],
)
def test_what_a_poll_finds_is_done_in_its_round(
    conn: Any, rounds: Rounds, make: Callable[[Any], str]
) -> None:
    done = make(conn)
    rounds.go_on(4.9)
    assert not factories.one(conn, done)
    rounds.go_on(0.2)
    assert factories.one(conn, done)


def test_no_job_loses_its_lock_key_before_workers_could_report(conn: Any, rounds: Rounds) -> None:
    done = turn_of_nobody(conn)
    rounds.go_on(25)
    assert not factories.one(conn, done)
    rounds.go_on(10)
    assert factories.one(conn, done)


def silent_worker(conn: Any, worker_id: str | None, *, lock: bool) -> None:
    conn.execute(
        "INSERT INTO workers (worker_id, host_label, queue, pid, detail, last_seen) VALUES"
        " (%s, 'box', 'cpu', 1, jsonb_build_object('lock', %s::boolean), now() - interval '31 s')",
        (worker_id, lock),
    )


def test_a_worker_without_session_and_renewal_is_dead_before_its_lease_ends(conn: Any) -> None:
    run_id = factories.run(conn)
    for i in range(3):
        factories.node(conn, run_id, f"n{i}")
    ids = ["dead", "unlocked", "renewing"]
    dead, unlocked, renewing = (
        transitions.claim_node(conn, transitions.who(worker_id=name)) for name in ids
    )
    for worker_id, lock in zip(ids, (True, False, True), strict=True):
        silent_worker(conn, worker_id, lock=lock)
    session = transitions.session(ids[0])
    conn.execute(
        "UPDATE workflow_node_jobs SET heartbeat_at = now() - interval '31 s' WHERE node_id <> 'n2'"
    )
    now = [0.0]
    with sweeps.tasks(lambda: now[0]) as tasks:
        for now[0] in (10.0, 20.0, 29.0):
            tasks.reclaim()
        session.close()
        tasks.reclaim_lost_sessions()
        assert factories.reread(conn, dead)["status"] == "running", "we were not here for long"
        session = transitions.session(ids[0])
        now[0] = 31.0
        tasks.reclaim_lost_sessions()
        assert factories.reread(conn, dead)["status"] == "running", "its session lives"
        session.close()
        wait.until(lambda: not conn.execute(LOCKS).fetchall())
        tasks.reclaim_lost_sessions()
    row = factories.reread(conn, dead)
    assert (row["status"], row["lapse_count"], row["priority"]) == ("queued", 1, 10)
    for other in (unlocked, renewing):
        assert factories.reread(conn, other)["status"] == "running"


LOCKS = (
    "SELECT FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock'"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)


def test_reclaim_takes_back_what_is_lapsed_in_both_families_batch_after_batch(conn: Any) -> None:
    run_id = factories.run(conn)
    for i in range(3):
        factories.node(conn, run_id, f"n{i}")
    lapsed = transitions.claim_node(conn)
    fresh = transitions.claim_node(conn)
    conn.execute(
        "INSERT INTO ingest_jobs (task_name, queue, status, claim_no, worker_id, lease_expires_at)"
        " SELECT 't', 'fetch', 'running', 1, 'w', now() - interval '1 s'"
        " FROM generate_series(1, 150)"
    )
    transitions.expire(conn, lapsed)
    sweeps.reclaim(conn)
    row = factories.reread(conn, lapsed)
    assert (row["status"], row["lapse_count"], row["priority"]) == ("queued", 1, 10)
    assert factories.reread(conn, fresh)["status"] == "running"
    assert factories.column(conn, "SELECT DISTINCT status FROM ingest_jobs") == ["queued"]


def test_orphans_of_a_run_that_is_over_are_cancelled(conn: Any) -> None:
    over = factories.run(conn, status="cancelled")
    live = factories.run(conn)
    orphan, kept = factories.node(conn, over), factories.node(conn, live)
    sweeps.cancel_orphans(conn)
    assert factories.reread(conn, orphan)["status"] == "cancelled"
    assert factories.reread(conn, kept)["status"] == "queued"


def stale_worker(conn: Any) -> None:
    """A host whose heartbeat is a minute old and that owns a running job."""
    factories.node(conn)
    transitions.claim_node(conn)
    node_queue.upsert_worker_heartbeat(host_label="box", queue="cpu", concurrency=1)
    conn.execute("UPDATE worker_heartbeats SET last_seen = now() - interval '60 seconds'")


def flagged(conn: Any) -> bool:
    return factories.one(conn, "SELECT last_flagged_dead_at IS NOT NULL FROM worker_heartbeats")


def test_staleness_counts_only_once_the_database_was_there_for_a_whole_window(
    conn: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    stale_worker(conn)
    now = [1000.0]
    with sweeps.tasks(lambda: now[0]) as tasks:
        for _ in range(6):
            tasks.reclaim()
            tasks.flag_dead_workers()
            assert not flagged(conn)
            now[0] += 5
        now[0] += 40  # an outage: no sweep came through
        tasks.flag_dead_workers()
        assert not flagged(conn), "the first to come through does not know of it"
        tasks.reclaim()
        tasks.flag_dead_workers()
        assert not flagged(conn)
        for _ in range(6):
            now[0] += 5
            tasks.reclaim()
        tasks.flag_dead_workers()
        assert flagged(conn)
        assert caplog.messages[0].startswith("DEAD WORKER:")
        tasks.flag_dead_workers()
        assert len(caplog.messages) == 1


def test_a_sweep_that_fails_leaves_the_next_one_its_own_connection(
    conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sweeps.tasks() as tasks:
        tasks.reclaim()
        conn.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            " AND application_name = 'queue_workflows'"
        )
        with pytest.raises(db.Error):
            tasks.reclaim()
        tasks.reclaim()


def test_a_restart_under_work_touches_no_fresh_lease(toy: flow.Flow, conn: Any) -> None:
    run_id = factories.run(conn)
    job = factories.node(conn, run_id)
    ingest = factories.ingest(conn)
    held = [transitions.claim_node(conn), transitions.claim_ingest(conn)]
    before = [factories.reread(conn, each) for each in held]
    for _ in range(5):
        with running():
            pass
    assert [factories.reread(conn, each) for each in held] == before
    assert (job["id"], ingest["id"]) == (held[0]["id"], held[1]["id"])


def test_a_running_job_without_an_owner_is_taken_back(conn: Any) -> None:
    job = factories.node(conn)
    with factories.unguarded(conn, "workflow_node_jobs"):
        conn.execute("UPDATE workflow_node_jobs SET status = 'running', claimed_by = 'box'")
    sweeps.reclaim(conn)
    assert factories.reread(conn, job)["status"] == "queued"
