"""A reaped worker's claims come back at once, and nobody else's do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import ModuleType

import pytest

from queue_workflows import config, node_queue, run_store
from queue_workflows.runtime import supervisor
from queue_workflows.worker import burial
from tests.support.wait import until

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


def a_worker_that_dies() -> supervisor.Exit:
    dead = subprocess.Popen([sys.executable, "-c", CLAIM_AND_DIE])
    assert dead.wait(30) == -signal.SIGKILL
    return supervisor.Exit("cpu-1", dead.pid, None, signal.SIGKILL, 42, 0.5)


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
        rows = burial.bury(conn, ended, host_label=LABEL)
        assert burial.bury(conn, ended, host_label=LABEL) == []
    assert [row["node_id"] for row in rows] == ["b"]
    back = job(run_id, "b")
    assert (back["status"], back["crash_count"], back["priority"]) == ("queued", 1, 10)
    assert job(run_id, "a")["worker_id"] == alive["worker_id"]
    assert job(run_id, "c")["crash_count"] == 0


def test_ingest_claims_come_back_too(db: ModuleType) -> None:
    config.register_ingest_task("t", lambda reason: {})
    job_id = node_queue.enqueue_ingest_job(task_name="t", queue="fetch")
    assert node_queue.claim_next_ingest_job("fetch", host=LABEL)
    ended = supervisor.Exit("fetch", os.getpid(), 1, None, 0, 1.0)
    with db.connect() as conn:
        burial.bury(conn, ended, host_label=LABEL)
    row = node_queue.get_ingest_job(job_id)
    assert row
    assert (row["status"], row["crash_count"]) == ("queued", 1)


def test_a_death_is_written_into_the_workers_row(db: ModuleType) -> None:
    from queue_workflows.runtime import identity

    worker_id = identity.process_prefix(LABEL, 4321) + "x"
    other = identity.process_prefix(LABEL, 43210) + "x"
    with db.connect() as conn:
        for name in (worker_id, other):
            conn.execute(
                "INSERT INTO workers (worker_id, host_label, queue, pid)"
                " VALUES (%s, 'box', 'cpu', 1)",
                (name,),
            )
        ended = supervisor.Exit("cpu-1", 4321, None, signal.SIGKILL, 42, 0.5)
        burial.bury(conn, ended, host_label=LABEL)
        rows = conn.execute("SELECT worker_id, state, detail FROM workers").fetchall()
    found = {row["worker_id"]: (row["state"], row["detail"].get("signal")) for row in rows}
    assert found == {worker_id: ("dead", 9), other: ("idle", None)}


def test_a_death_is_buried_once_the_database_is_back(
    db: ModuleType, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = queued("a")
    ended = a_worker_that_dies()
    monkeypatch.setattr(burial, "RETRY_S", 0.05)
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", "postgresql://127.0.0.1:1/none_test")
    tries = count_connects(db, monkeypatch)
    with burial.Burials(LABEL) as burials:
        burials.report(ended)
        until(lambda: len(tries) >= 2)
        monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", dsn)
        until(lambda: job(run_id, "a")["status"] == "queued")


def test_leaving_tries_what_is_still_open(
    db: ModuleType, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = queued("a")
    ended = a_worker_that_dies()
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", "postgresql://127.0.0.1:1/none_test")
    monkeypatch.setattr(burial, "RETRY_S", 60.0)
    tries = count_connects(db, monkeypatch)
    with burial.Burials(LABEL) as burials:
        until(lambda: not burials._loop._woken)
        burials.report(ended)
        until(lambda: tries)
        monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", dsn)
    assert job(run_id, "a")["status"] == "queued"


def test_a_pid_in_use_again_proves_nothing(db: ModuleType) -> None:
    run_id = queued("a")
    assert node_queue.claim_next_cpu_job(host=LABEL)
    ended = supervisor.Exit("cpu-1", os.getpid(), None, signal.SIGKILL, 0, 0.5)
    with burial.Burials(LABEL) as burials:
        burials.report(ended)
    assert job(run_id, "a")["status"] == "running"


@pytest.mark.parametrize(
    ("code", "signum", "rss", "said"),
    [
        (None, signal.SIGKILL, 42, "killed by SIGKILL, peak memory 42 MB"),
        (1, None, 0, "ended with exit code 1"),
        (None, 63, 0, "killed by 63"),
        (None, None, 0, "ended for a reason unknown"),
    ],
)
def test_the_evidence_says_how(code: int | None, signum: int | None, rss: int, said: str) -> None:
    assert burial.evidence(supervisor.Exit("c", 1, code, signum, rss, 1.0)) == said
