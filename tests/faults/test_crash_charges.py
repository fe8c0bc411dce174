"""A crash needs evidence: an outage, a stop or a lost reply counts none, a seen death does."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from queue_workflows import db, jobs
from tests.support import constants, hanging_app, proxy
from tests.support.commands import Command, Commands
from tests.support.wait import until
from tests.support.worker_views import row as row_of

APP = ("--app", "tests.support.hanging_app:setup")
LEASE_S = "4"
SERVE = ("queue-claim-worker", *APP, "--lease-seconds", LEASE_S)
QUEUE = ("--queue", "work")
POOL = ("--workers", '[{"queue": "work", "concurrency": 2}]')
BATCH = (*QUEUE, "--batch", "3")
WAYS = {
    "plain": (*SERVE, *QUEUE),
    "inline": (*SERVE, *QUEUE, "--inline"),
    "batch": (*SERVE, *BATCH),
    "pool": (*SERVE, *POOL),
    "supervised": (*SERVE, *QUEUE, "--supervise"),
    "inline, supervised": (*SERVE, *QUEUE, "--inline", "--supervise"),
}
GOES_ON = ("pool", "supervised")
"""Their executor is killed, and the worker goes on."""
STOPS_AT_ONCE = ("--shutdown-timeout", "0.2", "--lease-seconds", "60")
"""So that the stop comes before the end of the lease, which would end the worker too."""
QUICK = {
    "QUEUE_WORKFLOWS_CRASH_BACKOFF_S": "0.1",
    "QUEUE_WORKFLOWS_CLAIM_POLL_S": "0.2",
    "QUEUE_WORKFLOWS_LEASE_RECLAIM_INTERVAL_S": "0.2",
    **constants.env(
        {
            "runtime.supervisor.BACKOFF_MAX_S": 0.2,
            "db.database_url.CONNECT_TIMEOUT_S": 2,
            "db.notifications.PING_S": 1,
        }
    ),
}
CLAIM = b"\0\0\0\4work\0\0\0\3" + repr(float(LEASE_S)).encode()
"""A claim's bytes on the wire, which other statements lack: its queue and then its lease."""
STALLS = 3
"""As many as the crashes that make a job poison."""


def enqueued(folder: Path, task: str) -> str:
    hanging_app.setup()
    folder.mkdir()
    return jobs.enqueue(task_name=task, queue="work", args={"folder": str(folder)})


def has_reported_its_lock() -> bool:
    with db.connect() as conn:
        return bool(
            conn.execute("SELECT 1 FROM workers WHERE detail -> 'lock' = 'true'").fetchall()
        )


def lapsed(job_id: str) -> bool:
    """Whether nobody holds the job, or nobody renews it any more."""
    row = row_of(job_id)
    with db.connect() as conn:
        now = conn.execute("SELECT now() AS now").fetchone()
    assert now is not None
    return row["status"] != "running" or row["lease_expires_at"] < now["now"]


def starts(folder: Path) -> list[int]:
    try:
        return [int(line) for line in (folder / "starts").read_text().split()]
    except FileNotFoundError:
        return []


def has_ended(pid: int) -> bool:
    return not Path("/proc", str(pid)).exists()


class Worker:
    """A worker that is restarted when it ends, as systemd or Docker does it."""

    def __init__(self, cli: Commands, argv: tuple[str, ...], **env: str) -> None:
        self._cli, self._argv, self._env = cli, argv, env
        self.runs: list[Command] = []
        self.start()

    def start(self) -> None:
        self.runs.append(self._cli.start(*self._argv, **self._env))

    @property
    def err(self) -> str:
        return "\n".join(run.err for run in self.runs)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("everybody", [False, True], ids=["worker alone", "orchestrator too"])
@pytest.mark.parametrize("way", ["plain", "inline", "batch", "pool", "supervised"])
def test_three_outages_longer_than_the_lease_charge_a_job_no_crash(
    cli: Commands, wire: proxy.Proxy, tmp_path: Path, way: str,
    everybody: bool,
) -> None:  # fmt: skip
    behind = {**QUICK, "QUEUE_WORKFLOWS_DB_URL": wire.dsn}
    orchestrator = cli.start("queue-orchestrator", *APP, **(behind if everybody else QUICK))
    until(lambda: "dispatches" in orchestrator.err, timeout_s=60)
    folder = tmp_path / "job"
    job_id = enqueued(folder, "lingers_thrice")
    worker = Worker(cli, WAYS[way], **behind)
    for stall in range(1, STALLS + 1):
        until(lambda: len(starts(folder)) == stall, timeout_s=30)  # noqa: B023  waited for
        wire.freeze()
        if way in GOES_ON:
            until(lambda: has_ended(starts(folder)[-1]))
        else:
            assert worker.runs[-1].wait(20) == 77, worker.err
        until(lambda: lapsed(job_id))
        if not everybody:
            until(lambda: row_of(job_id)["status"] != "running")
        if way not in GOES_ON:
            worker.start()
        wire.thaw()
        row = row_of(job_id)
        assert (row["crash_count"], row["attempts"]) == (0, 0), worker.err
    until(lambda: row_of(job_id)["status"] == "completed", timeout_s=30)
    row = row_of(job_id)
    assert (row["crash_count"], row["lapse_count"], row["attempts"]) == (0, 0, 0), worker.err
    assert len(starts(folder)) == 4


@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", ["plain", "inline", "batch", "pool"])
def test_a_result_that_a_stall_kept_from_being_written_costs_no_crash(
    cli: Commands, wire: proxy.Proxy, tmp_path: Path, way: str
) -> None:
    orchestrator = cli.start("queue-orchestrator", *APP, **QUICK)
    until(lambda: "dispatches" in orchestrator.err, timeout_s=60)
    worker = Worker(cli, WAYS[way], **QUICK, QUEUE_WORKFLOWS_DB_URL=wire.dsn)
    hanging_app.setup()
    args = {"folder": str(tmp_path), "seconds": 0.5}
    job_id = jobs.enqueue(task_name="lasts", queue="work", args=args)
    until((tmp_path / "started").exists, timeout_s=30)
    wire.freeze()
    until(lambda: row_of(job_id)["lapse_count"] == 1)
    wire.thaw()

    def completed() -> bool:
        if worker.runs[-1].process.poll() is not None:
            worker.start()  # it may end itself, as its result can be written no more
        return row_of(job_id)["status"] == "completed"

    until(completed, timeout_s=30)
    assert (row_of(job_id)["crash_count"], row_of(job_id)["lapse_count"]) == (0, 0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", ["plain", "inline", "batch", "pool", "supervised"])
def test_a_claim_that_was_under_way_during_a_stall_is_handed_back_and_made_again(
    cli: Commands, wire: proxy.Proxy, tmp_path: Path, way: str
) -> None:
    worker = Worker(cli, WAYS[way], **QUICK, QUEUE_WORKFLOWS_DB_URL=wire.dsn)
    hanging_app.setup()
    first = jobs.enqueue(task_name="hogs_once", queue="work", args={})
    until(lambda: row_of(first)["status"] == "completed", timeout_s=30)
    wire.freeze_at(CLAIM)
    job_id = jobs.enqueue(task_name="hogs_once", queue="work", args={})
    time.sleep(float(LEASE_S) + 1)  # the lease of that claim is over before it is made
    wire.thaw()
    until(lambda: row_of(job_id)["status"] == "completed", timeout_s=30)
    assert row_of(job_id)["crash_count"] == 0
    assert worker.err.count("so its jobs go back: 1") == 1, worker.err


@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", ["plain", "inline", "batch", "pool"])
def test_a_stop_while_the_database_is_away_charges_nothing(
    cli: Commands, wire: proxy.Proxy, tmp_path: Path, way: str
) -> None:
    soon = {**QUICK, "QUEUE_WORKFLOWS_STALE_WORKER_AFTER_S": "1"}
    orchestrator = cli.start("queue-orchestrator", *APP, **soon)
    until(lambda: "dispatches" in orchestrator.err, timeout_s=60)
    folder = tmp_path / "job"
    job_id = enqueued(folder, "lingers_thrice")
    behind = {**QUICK, "QUEUE_WORKFLOWS_DB_URL": wire.dsn}
    worker = Worker(cli, (*WAYS[way], *STOPS_AT_ONCE), **behind)
    until(lambda: len(starts(folder)) == 1, timeout_s=30)
    until(has_reported_its_lock)  # otherwise only the end of the lease shows that it is gone
    wire.freeze()
    worker.runs[-1].send(signal.SIGTERM)
    assert worker.runs[-1].wait(30) == 0, worker.err
    wire.thaw()
    worker.start()
    until(lambda: len(starts(folder)) == 2, timeout_s=30)
    assert row_of(job_id)["crash_count"] == 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", ["plain", "inline", "batch", "pool"])
def test_a_claim_without_a_reply_is_handed_back_after_a_stop(
    cli: Commands, wire: proxy.Proxy, way: str
) -> None:
    soon = {**QUICK, "QUEUE_WORKFLOWS_STALE_WORKER_AFTER_S": "1"}
    orchestrator = cli.start("queue-orchestrator", *APP, **soon)
    until(lambda: "dispatches" in orchestrator.err, timeout_s=60)
    behind = {**QUICK, "QUEUE_WORKFLOWS_DB_URL": wire.dsn}
    worker = Worker(cli, WAYS[way], **behind)
    hanging_app.setup()
    first = jobs.enqueue(task_name="hogs_once", queue="work", args={})
    until(lambda: row_of(first)["status"] == "completed", timeout_s=30)
    wire.freeze_at(CLAIM)
    job_id = jobs.enqueue(task_name="hogs_once", queue="work", args={})
    wire.mute()  # the server executes that claim
    until(lambda: row_of(job_id)["status"] == "running", timeout_s=30)
    worker.runs[-1].send(signal.SIGTERM)
    wire.cut()
    assert worker.runs[-1].wait(30) == 0, worker.err
    wire.thaw()
    worker.start()
    until(lambda: row_of(job_id)["status"] == "completed", timeout_s=30)
    assert (row_of(job_id)["claim_no"], row_of(job_id)["crash_count"]) == (2, 0)


@pytest.mark.timeout(120)
def test_a_parent_charges_nothing_for_a_child_stopped_while_the_database_is_away(
    cli: Commands, wire: proxy.Proxy, tmp_path: Path
) -> None:
    folder = tmp_path / "job"
    job_id = enqueued(folder, "lingers_thrice")
    behind = {**QUICK, "QUEUE_WORKFLOWS_DB_URL": wire.dsn}
    worker = Worker(cli, (*WAYS["supervised"], *STOPS_AT_ONCE), **behind)
    until(lambda: len(starts(folder)) == 1, timeout_s=30)
    parent = worker.runs[-1]
    (child,) = set(parent.pids("--lease-seconds")) - {parent.process.pid}
    wire.freeze()
    os.kill(child, signal.SIGTERM)
    until(lambda: "with exit code 0" in worker.err)
    wire.thaw()
    until(lambda: len(starts(folder)) == 2, timeout_s=30)
    assert row_of(job_id)["crash_count"] == 0, worker.err


@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", ["plain", "supervised", "inline, supervised"])
def test_a_handler_that_kills_its_process_is_poison_at_the_bound(
    cli: Commands, db: object, tmp_path: Path, way: str
) -> None:
    orchestrator = cli.start("queue-orchestrator", *APP, **QUICK)
    until(lambda: "dispatches" in orchestrator.err, timeout_s=60)
    folder = tmp_path / "job"
    job_id = enqueued(folder, "kills_itself")
    worker = Worker(cli, WAYS[way], **QUICK)
    until(lambda: row_of(job_id)["status"] == "failed", timeout_s=60)
    row = row_of(job_id)
    assert (row["crash_count"], row["claim_no"], len(starts(folder))) == (3, 3, 3), worker.err
    assert row["error"].startswith("poison: took down 3 workers"), row["error"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("task", "code"), [("kills_itself", -signal.SIGKILL), ("hog", 77)])
def test_an_inline_worker_that_nobody_watches_leaves_a_lapse_and_no_crash(
    cli: Commands, db: object, tmp_path: Path, task: str, code: int
) -> None:
    orchestrator = cli.start("queue-orchestrator", *APP, **QUICK)
    until(lambda: "dispatches" in orchestrator.err, timeout_s=60)
    job_id = enqueued(tmp_path / "job", task)
    worker = Worker(cli, WAYS["inline"], **QUICK)
    assert worker.runs[-1].wait(30) == code, worker.err
    until(lambda: row_of(job_id)["status"] == "queued", timeout_s=30)
    assert (row_of(job_id)["lapse_count"], row_of(job_id)["crash_count"]) == (1, 0)
