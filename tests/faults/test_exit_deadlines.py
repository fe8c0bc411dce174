"""A worker exits in time although a handler keeps the GIL or the database is frozen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest
from psycopg import conninfo, sql

from queue_workflows import db, jobs, node_queue, run_store
from tests.support import constants, hanging_app, proxy
from tests.support.commands import Command, Commands
from tests.support.wait import patience, until

APP = "tests.support.hanging_app:setup"
WORKER = ("queue-claim-worker", "--queue", "work", "--app", APP)
SLACK_S = 1.5
"""What a busy machine takes to notice."""


@pytest.fixture(params=[(), ("--inline",)], ids=["executor", "inline"])
def how(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The options for where handlers run."""
    return request.param


class Run:
    """A worker that has begun a job."""

    def __init__(
        self,
        cli: Commands,
        folder: Path,
        task: str,
        *more: str,
        timeout_s: float | None = None,
        **env: str,
    ) -> None:
        hanging_app.setup()
        self.job_id = jobs.enqueue(task_name=task, queue="work", args={"folder": str(folder)})
        with db.connect() as conn:
            conn.execute("UPDATE ingest_jobs SET timeout_s = %s", (timeout_s,))
        self.worker: Command = cli.start(*WORKER, *more, **env)
        begun = folder / "started"
        until(lambda: begun.exists() and begun.read_text(), timeout_s=30)
        self.begun = time.monotonic()

    @property
    def job(self) -> dict[str, Any]:
        found = node_queue.get_ingest_job(self.job_id)
        assert found is not None
        return found

    def events(self) -> list[str]:
        with db.connect() as conn:
            rows = conn.execute(
                "SELECT event_type FROM ingest_job_events WHERE job_id = %s ORDER BY id",
                (self.job_id,),
            ).fetchall()
        return [row["event_type"] for row in rows]

    def ended(self, code: int, within_s: float) -> None:
        assert self.worker.wait(within_s + 10) == code, self.worker.err
        assert time.monotonic() - self.begun <= patience(within_s)


def test_a_handler_past_its_budget_ends_with_75_and_its_job_fails(
    cli: Commands, tmp_path: Path, how: tuple[str, ...]
) -> None:
    run = Run(cli, tmp_path, "deaf", *how, timeout_s=1)
    run.ended(75, 1 + SLACK_S)
    assert run.job["status"] == "failed"
    assert "budget of 1 s" in run.job["error"]
    assert {"budget_trip", "failed"} <= {*run.events()}


def test_the_budget_ends_a_handler_that_keeps_the_gil(
    cli: Commands, tmp_path: Path, how: tuple[str, ...]
) -> None:
    run = Run(cli, tmp_path, "hog", *how, timeout_s=1)
    run.ended(75, 1 + constants.value("worker.inline.LATE_S") + SLACK_S)
    # Inline nobody could write: its lease or its parent decides.
    assert run.job["status"] == ("running" if how else "failed")


@pytest.mark.parametrize("task", ["deaf", "hog"])
def test_a_worker_that_cannot_renew_is_gone_before_its_lease_is(
    cli: Commands, wire: proxy.Proxy, tmp_path: Path, how: tuple[str, ...], task: str
) -> None:
    # It ends a quarter of the lease before the lease does, but no more than 2 s.
    run = Run(cli, tmp_path, task, *how, "--lease-seconds", "8", QUEUE_WORKFLOWS_DB_URL=wire.dsn)
    handler = Path("/proc", (tmp_path / "started").read_text())
    wire.freeze()
    if how:
        run.ended(77, 8 + SLACK_S)
    until(lambda: how or not handler.exists())
    with db.connect() as conn:
        row = conn.execute("SELECT lease_expires_at > now() AS held FROM ingest_jobs").fetchone()
    assert row == {"held": True}, "the lease had not lapsed yet"
    run.ended(77, 8 + SLACK_S)
    assert run.job["status"] == "running"


def test_the_budgets_exit_does_not_wait_for_a_frozen_database(
    cli: Commands, wire: proxy.Proxy, tmp_path: Path, how: tuple[str, ...]
) -> None:
    run = Run(cli, tmp_path, "deaf", *how, timeout_s=1.5, QUEUE_WORKFLOWS_DB_URL=wire.dsn)
    wire.freeze()
    run.ended(75, 1.5 + 5)


def test_sigterm_does_not_wait_for_a_frozen_database(
    cli: Commands, wire: proxy.Proxy, tmp_path: Path, how: tuple[str, ...]
) -> None:
    run = Run(
        cli, tmp_path, "deaf", *how, "--shutdown-timeout", "0.5", QUEUE_WORKFLOWS_DB_URL=wire.dsn
    )
    wire.freeze()
    run.worker.send(signal.SIGTERM)
    run.begun = time.monotonic()
    run.ended(0, 0.5 + 5)


def state_of(worker: Command) -> str:
    with db.connect() as conn:
        row = conn.execute(
            "SELECT state FROM workers WHERE pid = %s", (worker.process.pid,)
        ).fetchone()
    assert row is not None
    return row["state"]


@pytest.mark.parametrize("hurried", [False, True])
def test_sigterm_is_received_while_the_handler_is_in_c_code(
    cli: Commands, tmp_path: Path, how: tuple[str, ...], hurried: bool
) -> None:
    timeout_s = 60.0 if hurried else 1.0
    run = Run(cli, tmp_path, "stuck", *how, "--shutdown-timeout", str(timeout_s))
    run.worker.send(signal.SIGTERM)
    run.begun = time.monotonic()
    if hurried:
        run.worker.send(signal.SIGINT)
    run.ended(0, (0 if hurried else timeout_s) + 1 + SLACK_S)
    job = run.job
    assert (job["status"], job["attempts"], job["crash_count"]) == ("queued", 0, 0)
    assert run.events() == ["claimed", "requeued"]
    assert state_of(run.worker) == "stopped"


def test_a_worker_that_is_stopped_in_the_middle_of_a_job_needs_no_connection_more(
    cli: Commands, dsn: str, tmp_path: Path, how: tuple[str, ...]
) -> None:
    often = {"QUEUE_WORKFLOWS_DL_HEARTBEAT_SEC": "0.2"}
    run = Run(cli, tmp_path, "deaf", *how, "--shutdown-timeout", "0.5", **often)
    with db.connect() as conn:
        holds = "SELECT FROM workers WHERE state = 'busy' AND (detail ->> 'lock')::boolean"
        until(lambda: conn.execute(holds).fetchone() is not None)
    name = sql.Identifier(str(conninfo.conninfo_to_dict(dsn)["dbname"]))
    change = sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}")
    with psycopg.connect(conninfo.make_conninfo(dsn, dbname="postgres"), autocommit=True) as admin:
        admin.execute(change.format(name, sql.SQL("false")))
        try:
            run.worker.send(signal.SIGTERM)
            code = run.worker.wait(10)
        finally:
            admin.execute(change.format(name, sql.SQL("true")))
    assert code == 0, run.worker.err
    assert run.events() == ["claimed", "requeued"]
    assert state_of(run.worker) == "stopped"


def test_a_cancelled_handler_that_goes_on_ends_with_its_worker(
    cli: Commands, tmp_path: Path, how: tuple[str, ...]
) -> None:
    run = Run(cli, tmp_path, "deaf", *how, QUEUE_WORKFLOWS_CANCEL_GRACE_S="0.5")
    jobs.cancel(run.job_id)
    run.begun = time.monotonic()
    run.ended(79, 0.5 + SLACK_S)
    assert run.job["status"] == "cancelled"
    assert run.job["crash_count"] == 0
    assert state_of(run.worker) == "stopped"


FAKE_GPU = """#!/bin/sh
case "$*" in
*pmon*) printf '# gpu pid type sm mem enc dec command\n# Idx # C/G %% %% %% %% name\n'
        printf '    0 %s C 0 0 0 0 python\n' "$PPID" ;;
*) echo 0 ;;
esac
"""
IDLE_GPU = {
    # The RAM may be that of a container in which other tests run.
    **constants.env({"worker.guards.STALL_TIMEOUT_S": 1, "worker.guards.STATIC_RAM_MB": 1e6}),
    "QUEUE_WORKFLOWS_STALL_CONFIRM_POLL_S": "0.2",
    "QUEUE_WORKFLOWS_GPU_HEALTH_LOAD_GRACE_S": "3",
}


@pytest.mark.parametrize(
    ("node", "code", "trip"), [("beats_once", 76, "stall_trip"), ("silent", 78, "gpu_health_trip")]
)
def test_a_gpu_job_that_does_nothing_ends_its_worker_and_is_queued_again(
    cli: Commands, tmp_path: Path, how: tuple[str, ...], node: str, code: int, trip: str
) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(FAKE_GPU)
    tool.chmod(0o755)
    run = run_store.insert_run(workflow_name="w", status="running", context={})
    job_id = node_queue.enqueue_node_job(
        run_id=run["id"],
        node_id="n",
        node_module=node,
        queue="gpu",
        inputs={"folder": str(tmp_path)},
    )
    worker = cli.start(
        "queue-claim-worker",
        "--queue",
        "gpu",
        *how,
        "--app",
        APP,
        **IDLE_GPU,
        PATH=f"{tool.parent}:{os.environ['PATH']}",
    )
    assert worker.wait(30) == code, worker.err
    job = node_queue.get_node_job(job_id)
    assert job is not None
    assert (job["status"], job["watchdog_retries"], job["crash_count"]) == ("queued", 1, 0)
    with db.connect() as conn:
        rows = conn.execute(
            "SELECT event_type FROM workflow_node_events WHERE job_id = %s ORDER BY id", (job_id,)
        ).fetchall()
    said = [row["event_type"] for row in rows]
    assert said[0] == "claimed"
    assert {trip, "requeued"} <= {*said}
    assert ("stall_suspected" in said) is (code == 76)
    assert node_queue.count_unprocessed_dispatch_events() == 0


TWICE = """
import ctypes
from queue_workflows import claim_worker, config, node_queue
config.configure(ingest_queues=("work",))
config.register_ingest_task("quick", lambda reason: {})
config.register_ingest_task("hog", lambda reason: ctypes.PyDLL(None).sleep(60))
worker = claim_worker.ClaimWorker(queue="work", lease_s=3)
for task in ("quick", "hog"):
    node_queue.enqueue_ingest_job(task_name=task, queue="work")
    worker.run_once()
"""


def test_the_timers_outlive_a_workers_first_job(db: ModuleType, dsn: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", TWICE],
        env={**os.environ, "QUEUE_WORKFLOWS_DB_URL": dsn},
        timeout=30,
        check=False,
    )
    assert ended.returncode == 77
