"""The claims of a reaped worker are handed back at once, and those of no other worker."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from types import ModuleType

import pytest

from queue_workflows import config, jobs, node_queue, run_store
from tests.support import app_triggers, deaths, factories, transitions
from tests.support.wait import patience, until

LABEL = "box"
CLAIM_AND_DIE = """
import os, signal
from queue_workflows import db, node_queue
assert node_queue.claim_next_cpu_job(host="box")
os.kill(os.getpid(), signal.SIGKILL)
"""


def queued(*node_ids: str) -> str:
    run = run_store.insert_run(workflow_name="w", status="running")
    for node_id in node_ids:
        node_queue.enqueue_node_job(run_id=run["id"], node_id=node_id, node_module="m", queue="cpu")
    return run["id"]


def job(run_id: str, node_id: str) -> dict[str, object]:
    return next(j for j in node_queue.list_jobs_for_run(run_id) if j["node_id"] == node_id)


def a_worker_that_dies() -> deaths.Death:
    dead = subprocess.Popen([sys.executable, "-c", CLAIM_AND_DIE])
    assert dead.wait(30) == -signal.SIGKILL
    return deaths.killed(dead.pid)


def count_connects(db: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    tries: list[int] = []
    connect = db.connect

    def counted(**more: float) -> object:
        try:
            return connect(**more)
        finally:
            tries.append(1)

    monkeypatch.setattr(db, "connect", counted)
    return tries


def test_only_the_dead_ones_claim_comes_back_with_its_crash_counted(db: ModuleType) -> None:
    run_id = queued("a", "b", "c")
    alive = node_queue.claim_next_cpu_job(host=LABEL)
    assert alive
    ended = a_worker_that_dies()
    with db.connect() as conn:
        rows = deaths.recover(conn, ended, LABEL)
        assert deaths.recover(conn, ended, LABEL) == []
    assert [row["node_id"] for row in rows] == ["b"]
    back = job(run_id, "b")
    assert (back["status"], back["crash_count"], back["priority"]) == ("queued", 1, 10)
    assert job(run_id, "a")["worker_id"] == alive["worker_id"]
    assert job(run_id, "c")["crash_count"] == 0


def test_ingest_claims_come_back_too(db: ModuleType) -> None:
    config.register_ingest_task("t", lambda reason: {})
    job_id = jobs.enqueue(task_name="t", queue="fetch")
    assert node_queue.claim_next_ingest_job("fetch", host=LABEL)
    ended = deaths.Death(code=1)
    with db.connect() as conn:
        deaths.recover(conn, ended, LABEL)
    row = node_queue.get_ingest_job(job_id)
    assert row
    assert (row["status"], row["crash_count"]) == ("queued", 1)


KILLED = deaths.killed()


@pytest.mark.parametrize(
    ("executors", "death", "oom_kills", "crashes"),
    [
        pytest.param(True, KILLED, None, 1, id="a signal"),
        pytest.param(True, KILLED, 1, 0, id="out of memory: not its handlers' memory"),
        pytest.param(True, deaths.Death(code=1), None, 0, id="its launcher or its own error"),
        pytest.param(True, deaths.Death(code=77), None, 0, id="a lost lease"),
        pytest.param(True, deaths.Death(), None, 0, id="unknown"),
        pytest.param(False, KILLED, None, 1, id="inline, a signal"),
        pytest.param(False, KILLED, 1, 1, id="inline, out of memory"),
        pytest.param(False, deaths.Death(code=1), None, 1, id="inline, an exit code"),
    ],
)
def test_jobs_of_a_worker_are_charged_if_a_signal_or_one_of_its_handlers_has_ended_it(
    db: ModuleType, executors: bool, death: deaths.Death, oom_kills: int | None, crashes: int
) -> None:
    config.register_ingest_task("t", lambda reason: {})
    jobs.enqueue_many(task_name="t", queue="fetch", args=[{}] * 3)
    worker_id = deaths.id_with_executors(LABEL) if executors else deaths.worker_id(LABEL)
    who = transitions.who("fetch", worker_id)
    with db.connect() as conn:
        assert len(transitions.claim(conn, who, 3)) == 3
        changed = deaths.recover(conn, death, LABEL, oom_kills=oom_kills)
        rows = conn.execute("SELECT * FROM ingest_jobs ORDER BY seq").fetchall()
        events = conn.execute("SELECT event_type AS type, detail FROM ingest_job_events").fetchall()
    assert len(changed) == 3
    assert {row["status"] for row in rows} == {"queued"}
    assert [row["crash_count"] for row in rows] == [crashes] * 3
    assert [row["priority"] for row in rows] == [10 if crashes else 100] * 3
    assert sum(event["type"] == "death" for event in events) == 3 * crashes
    assert sum(event["type"] == "requeued" for event in events) == 3 - 3 * crashes


@pytest.mark.parametrize(("column", "count"), [("crash_count", 2), ("lapse_count", 9)])
def test_a_job_that_waited_to_run_alone_is_not_charged_for_another(
    db: ModuleType, column: str, count: int
) -> None:
    """The next charge is its last. Its worker starts it once it has no other job."""
    config.register_ingest_task("t", lambda reason: {})
    last, other = jobs.enqueue_many(task_name="t", queue="fetch", args=[{}] * 2)
    with db.connect() as conn:
        conn.execute(f"UPDATE ingest_jobs SET {column} = {count} WHERE id = %s", (last,))
        for number in range(2):
            who = transitions.who("fetch", deaths.worker_id(LABEL, suffix=f"ex-{number}"))
            assert len(transitions.claim(conn, who)) == 1
        found = {row["id"]: row for row in deaths.recover(conn, deaths.killed(), LABEL)}
        before = found[last]["crash_count"]
        assert before == (count if column == "crash_count" else 0)
        assert [row["status"] for row in found.values()] == ["queued", "queued"]
        assert found[other]["crash_count"] == 1
        conn.execute("DELETE FROM ingest_jobs WHERE id = %s", (other,))
        assert transitions.claim(conn, transitions.who("fetch", deaths.worker_id(LABEL)))
        (row,) = deaths.recover(conn, deaths.killed(), LABEL)
    assert row["crash_count"] == before + 1


@pytest.mark.parametrize("code", [0, 77, 79, None])
def test_jobs_of_an_inline_worker_that_may_have_left_by_itself_are_left_to_their_leases(
    db: ModuleType, code: int | None
) -> None:
    """It left them as it had no database, or a handler has ended it: a lapse bounds both."""
    config.register_ingest_task("t", lambda reason: {})
    job_id = jobs.enqueue(task_name="t", queue="fetch")
    with db.connect() as conn:
        transitions.claim(conn, transitions.who("fetch", deaths.worker_id(LABEL)))
        assert deaths.recover(conn, deaths.Death(code=code), LABEL) == []
    row = node_queue.get_ingest_job(job_id)
    assert row and (row["status"], row["crash_count"]) == ("running", 0)


def test_the_claims_of_every_queue_of_a_pool_come_back_uncounted(db: ModuleType) -> None:
    config.register_ingest_task("t", lambda reason: {})
    queues = ["fetch", "load"]
    ended = deaths.Death(code=77)
    with db.connect() as conn:
        for queue in queues:
            jobs.enqueue_many(task_name="t", queue=queue, args=[{}] * 2)
            who = transitions.who(queue, deaths.id_with_executors(LABEL))
            assert len(transitions.claim(conn, who, 2)) == 2
        changed = deaths.recover(conn, ended, LABEL)
        rows = conn.execute("SELECT * FROM ingest_jobs").fetchall()
        events = conn.execute(
            "SELECT e.worker_id = c.worker_id AS own FROM ingest_job_events e"
            " JOIN ingest_job_events c ON c.job_id = e.job_id AND c.event_type = 'claimed'"
            " WHERE e.event_type = 'requeued'"
        ).fetchall()
    assert len(changed) == len(rows) == 4
    assert {(row["status"], row["crash_count"]) for row in rows} == {("queued", 0)}
    assert [event["own"] for event in events] == [True] * 4, "each event names its own worker"


def test_each_job_of_the_dead_gets_its_death_certificate(db: ModuleType) -> None:
    config.register_ingest_task("t", lambda reason: {})
    ingest_id = jobs.enqueue(task_name="t", queue="fetch")
    run_id = queued("a")
    held = (
        node_queue.claim_next_ingest_job("fetch", host=LABEL),
        node_queue.claim_next_cpu_job(host=LABEL),
    )
    ended = deaths.killed()
    with db.connect() as conn:
        conn.execute("""UPDATE workflow_node_jobs SET progress = '{"step": 3}'""")
        conn.execute(
            "INSERT INTO workers (worker_id, host_label, queue, pid, detail)"
            " VALUES (%s, 'box', 'cpu', 1, '{\"gpu\": {\"use_pct\": 7}}')",
            (deaths.worker_id(LABEL, suffix="y"),),
        )
        deaths.recover(conn, ended, LABEL, oom_kills=1)
        for table, job_id, progress, claim in (
            ("workflow_node_events", job(run_id, "a")["id"], {"step": 3}, held[1]),
            ("ingest_job_events", ingest_id, None, held[0]),
        ):
            rows = conn.execute(
                f"SELECT * FROM {table} WHERE event_type = 'death' AND job_id = %s", (job_id,)
            ).fetchall()
            assert len(rows) == 1
            assert claim
            event = rows[0]
            assert (event["worker_id"], event["claim_no"]) == (claim["worker_id"], 1)
            detail = event["detail"]
            assert detail.pop("last_beat") is not None
            assert detail == {
                "exit_code": None,
                "signal": 9,
                "max_rss_mb": 42,
                "seconds": 0.5,
                "oom_kills": 1,
                "progress": progress,
                "gpu": {"use_pct": 7},
            }


def test_a_poisoned_jobs_error_names_the_last_worker_how_it_died_and_its_last_beat(
    db: ModuleType,
) -> None:
    run_id = queued("a")
    with db.connect() as conn:
        conn.execute("UPDATE workflow_node_jobs SET crash_count = 2")
        claim = node_queue.claim_next_cpu_job(host=LABEL)
        assert claim
        ended = deaths.Death(signum=signal.SIGSEGV)
        deaths.recover(conn, ended, LABEL)
    dead = job(run_id, "a")
    assert dead["status"] == "failed"
    assert re.fullmatch(
        f"poison: took down 3 workers, the last one {re.escape(claim['worker_id'])}; killed by"
        r" SIGSEGV, peak memory 42 MB; last beat \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC",
        dead["error"],
    )


def events_of(db: ModuleType, run_id: str, node_id: str) -> dict[str, dict[str, object]]:
    with db.connect() as conn:
        rows = conn.execute(
            "SELECT * FROM workflow_node_events WHERE run_id = %s AND node_id = %s",
            (run_id, node_id),
        ).fetchall()
    return {row["event_type"]: row for row in rows}


def test_a_worker_killed_as_it_did_not_stop_gives_its_jobs_back_uncounted(db: ModuleType) -> None:
    run_id = queued("a", "b")
    claims = [node_queue.claim_next_cpu_job(host=LABEL) for _ in range(2)]
    assert claims[0]
    ended = deaths.Death(code=0, overdue="did not stop within 12.0 s")
    with db.connect() as conn:
        conn.execute(
            "INSERT INTO workers (worker_id, host_label, queue, pid) VALUES (%s, %s, 'cpu', %s)",
            (claims[0]["worker_id"], LABEL, os.getpid()),
        )
        deaths.recover(conn, ended, LABEL)
        assert conn.execute("SELECT state FROM workers").fetchall() == [{"state": "stopped"}]
    for name in "ab":
        back = job(run_id, name)
        assert (back["status"], back["priority"]) == ("queued", 100)
        assert (back["watchdog_retries"], back["crash_count"]) == (0, 0)
        said = events_of(db, run_id, name)
        assert {*said} == {"claimed", "requeued"}
        assert said["requeued"]["detail"] == {"reason": "shutdown"}


def test_a_death_is_written_into_the_workers_row(db: ModuleType) -> None:
    worker_id, other = deaths.worker_id(LABEL, 4321), deaths.worker_id(LABEL, 43210)
    with db.connect() as conn:
        for name in (worker_id, other):
            conn.execute(
                "INSERT INTO workers (worker_id, host_label, queue, pid)"
                " VALUES (%s, 'box', 'cpu', 1)",
                (name,),
            )
        ended = deaths.killed(4321)
        deaths.recover(conn, ended, LABEL)
        rows = conn.execute("SELECT worker_id, state, detail FROM workers").fetchall()
    found = {row["worker_id"]: (row["state"], row["detail"].get("signal")) for row in rows}
    assert found == {worker_id: ("dead", 9), other: ("idle", None)}


def test_a_death_is_recovered_once_the_database_is_back(
    db: ModuleType, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = queued("a")
    ended = a_worker_that_dies()
    deaths.retry_after(monkeypatch, 0.05)
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", "postgresql://127.0.0.1:1/none_test")
    tries = count_connects(db, monkeypatch)
    with deaths.parent(LABEL) as report:
        report(ended)
        until(lambda: len(tries) >= 2)
        monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", dsn)
        until(lambda: job(run_id, "a")["status"] == "queued")


def test_a_claim_executed_after_the_workers_death_is_handed_back_too(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finish that was under way at the death, and with it the claim of the next job."""
    run_id = queued("a", "b")
    ended = a_worker_that_dies()
    deaths.look_again_after(monkeypatch, patience(1.0))
    who = transitions.who("cpu", deaths.worker_id(LABEL, ended.pid))
    with deaths.parent(LABEL) as report, db.connect() as conn:
        report(ended)
        until(lambda: job(run_id, "a")["crash_count"] == 1)
        late = transitions.claim_node(conn, who)
        until(lambda: job(run_id, late["node_id"])["status"] == "queued")
    back = job(run_id, late["node_id"])
    assert (back["claim_no"], back["crash_count"]) == (late["claim_no"], 1), "it never started"


def test_the_end_of_recovery_retries_what_is_still_open(
    db: ModuleType, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = queued("a")
    ended = a_worker_that_dies()
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", "postgresql://127.0.0.1:1/none_test")
    deaths.retry_after(monkeypatch, 60.0)
    tries = count_connects(db, monkeypatch)
    with deaths.parent(LABEL) as report:
        report(ended)
        until(lambda: tries)
        monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", dsn)
    assert job(run_id, "a")["status"] == "queued"


def test_while_the_database_is_away_the_log_says_it_once(
    db: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", "postgresql://127.0.0.1:1/none_test")
    deaths.retry_after(monkeypatch, 0.01)
    tries = count_connects(db, monkeypatch)
    with deaths.parent(LABEL) as report:
        report(deaths.killed(deaths.dead_pid()))
        until(lambda: len(tries) > 3)
    assert caplog.text.count("crash-recovery: recover waits for the database") == 1
    assert caplog.text.count("are left to their leases") == 1


def test_a_pid_in_use_again_proves_nothing(db: ModuleType) -> None:
    run_id = queued("a")
    assert node_queue.claim_next_cpu_job(host=LABEL)
    ended = deaths.killed()
    with deaths.parent(LABEL) as report:
        report(ended)
    assert job(run_id, "a")["status"] == "running"


@pytest.mark.parametrize(
    ("code", "signum", "rss", "said"),
    [
        (None, signal.SIGKILL, 42, "killed by SIGKILL, peak memory 42 MB"),
        (1, None, 0, "ended with exit code 1"),
        (None, 63, 0, "killed by 63"),
        (None, None, 0, "ended for an unknown reason"),
    ],
)
def test_the_history_has_the_cause_of_death(
    db: ModuleType, code: int | None, signum: int | None, rss: int, said: str
) -> None:
    config.register_ingest_task("t", lambda reason: {})
    jobs.enqueue(task_name="t", queue="fetch")
    with db.connect() as conn:
        transitions.claim_ingest(conn, transitions.who("fetch", deaths.id_with_executors(LABEL)))
        deaths.recover(conn, deaths.Death(code=code, signum=signum, rss_mb=rss), LABEL)
        query = (
            "SELECT coalesce(error, detail ->> 'reason') FROM ingest_job_events"
            " WHERE event_type IN ('requeued', 'reclaimed')"
        )
        assert factories.one(conn, query) == (said if signum else f"its worker {said}")


DEEP = """(repeat('{"a":', %s) || '1' || repeat('}', %s))::jsonb"""


def dies_holding(db: ModuleType, *node_ids: str) -> tuple[str, deaths.Death]:
    """A worker of `box` that died with these nodes claimed; the run, and its death record."""
    run_id = queued(*node_ids)
    ended = deaths.killed(deaths.dead_pid())
    who = transitions.who("cpu", deaths.worker_id(LABEL, ended.pid))
    with db.connect() as conn:
        assert len([transitions.claim_node(conn, who) for _ in node_ids]) == len(node_ids)
    return run_id, ended


@pytest.mark.parametrize("levels", [100, 1200])
def test_progress_that_no_record_can_hold_keeps_no_job_from_coming_back(
    db: ModuleType, levels: int
) -> None:
    run_id, ended = dies_holding(db, "a", "b")
    with db.connect() as conn:
        conn.execute(
            f"UPDATE workflow_node_jobs SET progress = {DEEP} WHERE node_id = 'a'",
            (levels, levels),
        )
        rows = deaths.recover(conn, ended, LABEL)
    assert sorted(row["node_id"] for row in rows) == ["a", "b"]
    death = events_of(db, run_id, "a")["death"]
    detail = death["detail"]
    assert isinstance(detail, dict)
    said = str(detail["progress"])
    assert said.startswith("{'a': {'a'" if levels == 100 else "<unreadable JSON: it is nested")


@pytest.mark.parametrize("sentenced", [False, True])
def test_a_job_that_cannot_be_written_is_left_to_its_lease_and_the_others_come_back(
    db: ModuleType, sentenced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run_id, ended = dies_holding(db, "a", "b", "c")
    if sentenced:
        ended = ended._replace(overdue="did not stop in time")
    with (
        db.connect() as conn,
        app_triggers.refusing(conn, "workflow_node_jobs", "OLD.node_id = 'b'"),
    ):
        rows = deaths.recover(conn, ended, LABEL)
    assert sorted(str(row["node_id"]) for row in rows) == ["a", "c"]
    assert job(run_id, "b")["status"] == "running"
    assert job(run_id, "a")["crash_count"] == (0 if sentenced else 1)
    assert "is left to its lease" in caplog.text


def test_a_dead_worker_that_cannot_be_recovered_holds_up_no_other(
    db: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    _, first = dies_holding(db, "a")
    run_id, second = dies_holding(db, "b")
    worker_id = deaths.worker_id(LABEL, first.pid)
    with db.connect() as conn:
        factories.insert(
            conn, "workers", worker_id=worker_id, host_label=LABEL, queue="cpu", pid=first.pid
        )
        # Its death can never be recorded.
        conn.execute("ALTER TABLE workers ADD CONSTRAINT no_death CHECK (state <> 'dead')")
        try:
            with deaths.parent(LABEL) as report:
                report(first)
                report(second)
                until(lambda: job(run_id, "b")["status"] == "queued")
        finally:
            conn.execute("ALTER TABLE workers DROP CONSTRAINT no_death")
    assert "its claims end with their leases" in caplog.text
