"""The operator's commands as processes: exit codes, output streams, signals."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from queue_workflows import config, db, node_queue, run_store
from queue_workflows import workers as workers_api
from tests.support import factories, toy_app, transitions
from tests.support.commands import TOYHOST, Command, Commands, refused
from tests.support.wait import patience, until

QW = "queue-workflows"
CANCEL = (QW, "cancel")
SUPERVISE = (QW, "supervise", "--host", "box", "--every", "0.1")
NOWHERE = "postgresql://someone:canary77@127.0.0.1:1/none"


# --- cancel


def test_cancel_reports_its_outcome_by_text_and_exit_code(cli: Commands) -> None:
    run_id = run_store.insert_run(workflow_name="w")["id"]
    done = cli.run(*CANCEL, run_id)
    assert (done.process.returncode, done.out) == (0, f"run {run_id} (w): cancelled\n")
    again = cli.run(*CANCEL, run_id)
    assert (again.process.returncode, again.out, again.err) == (
        1, "", f"queue-workflows cancel: run {run_id} (w) is already over: cancelled\n",
    )  # fmt: skip
    unknown = cli.run(*CANCEL, "nope")
    assert (unknown.process.returncode, unknown.out, unknown.err) == (
        1, "", "queue-workflows cancel: there is no run or job 'nope'\n",
    )  # fmt: skip


def test_cancel_names_the_worker_of_what_still_runs(cli: Commands) -> None:
    with db.connect() as conn:
        run_id = factories.run(conn, workflow_name="w")
        factories.node(conn, run_id, "s/a")
        factories.node(conn, run_id, "s/b")
        job = transitions.claim_node(conn)
    done = cli.run(*CANCEL, job["id"])
    assert (done.process.returncode, done.err) == (0, "")
    assert done.out.splitlines() == [
        f"node job {job['id']} (s/a): asked to stop; run {run_id} is cancelled",
        "  s/a was asked to stop, runs on box cpu",
    ]
    again = cli.run(*CANCEL, run_id)
    assert again.process.returncode == 1
    assert again.out == "  s/a was asked to stop, runs on box cpu\n"


def test_cancel_as_json_is_json_for_every_outcome(cli: Commands) -> None:
    with db.connect() as conn:
        job = factories.ingest(conn)
    outcomes = []
    for any_id in (job["id"], job["id"], "nope"):
        done = cli.run(*CANCEL, any_id, "--json")
        found = json.loads(done.out)
        outcomes.append((done.process.returncode, found["outcome"], found["kind"], found["status"]))
    assert outcomes == [
        (0, "cancelled", "ingest job", "cancelled"),
        (1, "already over", "ingest job", "cancelled"),
        (1, "unknown", None, None),
    ]


def test_cancel_without_its_database_is_code_2(cli: Commands) -> None:
    assert "does not answer" in refused(cli.run(*CANCEL, "x", QUEUE_WORKFLOWS_DB_URL=NOWHERE))


def test_a_cancelled_run_of_a_real_worker_stops_and_stays_cancelled(
    cli: Commands, tmp_path: Path
) -> None:
    worker = cli.start("queue-claim-worker", "--queue", "cpu", "--app", TOYHOST)
    orchestrator = cli.start("queue-orchestrator", "--app", TOYHOST)
    run_id = run_store.insert_run(workflow_name="hold", context={"folder": str(tmp_path)})["id"]
    until(lambda: toy_app.pids(tmp_path, "hold"), timeout_s=30)
    done = cli.run(*CANCEL, run_id, "--json")
    (left,) = json.loads(done.out)["stopping"]
    assert (left["pid"], left["queue"]) == (worker.process.pid, "cpu")
    job_id = left["job_id"]
    until(lambda: (node_queue.get_node_job(job_id) or {})["status"] == "cancelled")
    assert (run_store.get_run(run_id) or {})["status"] == "cancelled"
    for process in (worker, orchestrator):
        process.send(signal.SIGTERM)
        assert process.wait() == 0


# --- workers


def test_workers_shows_a_switch_that_nobody_is_there_to_obey(cli: Commands) -> None:
    workers_api.disable("box", "gpu", by="ops", reason="heat")
    done = cli.run(QW, "workers", "--json")
    (row,) = json.loads(done.out)
    assert (done.process.returncode, row["state"], row["queue"]) == (0, "absent", "gpu")
    assert (row["desired_state"], row["stop_policy"], row["pid"]) == ("off", "hard", None)
    assert json.loads(cli.run(QW, "status", "--json").out)["workers"] == []


def test_workers_follows_a_real_worker_through_a_drain(cli: Commands, tmp_path: Path) -> None:
    worker = cli.start("queue-claim-worker", "--queue", "cpu", "--app", TOYHOST)
    orchestrator = cli.start("queue-orchestrator", "--app", TOYHOST)
    run_store.insert_run(workflow_name="hold", context={"folder": str(tmp_path)})
    until(lambda: toy_app.pids(tmp_path, "hold"), timeout_s=30)

    def seen() -> tuple[str, str, str | None]:
        (row,) = workers_api.list()
        assert row["pid"] == worker.process.pid
        return row["state"], row["desired_state"], row["reason"]

    assert seen() == ("busy", "on", None)
    label = config.host_label()
    workers_api.disable(label, "all", stop_policy="drain", reason="disk")
    assert seen() == ("draining", "off", "disk")
    (tmp_path / "go").touch()
    until(lambda: seen() == ("parked", "off", "disk"))
    workers_api.disable(label, "cpu", stop_policy="pause")
    workers_api.enable(label, "all")
    until(lambda: seen() == ("paused", "off", None))
    workers_api.enable(label, "cpu")
    until(lambda: seen() == ("idle", "on", None))
    for process in (worker, orchestrator):
        process.send(signal.SIGTERM)
        assert process.wait() == 0


# --- supervise

RESTART = """
import sys
from queue_workflows import node_queue
print("restarting", sys.argv[1])
with open(sys.argv[1], "a") as file:
    file.write("restarted\\n")
node_queue.upsert_worker_heartbeat(host_label="box", queue="cpu", concurrency=1)
"""


def flag(queue: str) -> None:
    with db.connect() as conn:
        factories.insert(conn, "worker_heartbeats", host_label="box", queue=queue)
        conn.execute("UPDATE worker_heartbeats SET last_seen = now() - interval '1 minute'")
        factories.node(conn, queue=queue, status="running", claimed_by="box")
    assert node_queue.flag_stale_workers_holding_running_jobs()


def stops(started: Command, signum: signal.Signals) -> None:
    """Check that it ends with 0, long before what it waits for, and leaves no process."""
    asked = time.monotonic()
    started.send(signum)
    assert started.wait() == 0, started.err
    assert time.monotonic() - asked < patience(10.0)
    until(lambda: not started.family())


def test_a_flagged_worker_is_restarted_by_its_command(cli: Commands, tmp_path: Path) -> None:
    script, done = tmp_path / "restart.py", tmp_path / "done"
    script.write_text(RESTART)
    watching = cli.start(*SUPERVISE, "--bounce", f"cpu={sys.executable} {script} {done}")
    until(lambda: "watching the workers of box on cpu" in watching.err)
    flag("cpu")
    until(lambda: "cpu: restarted" in watching.err)
    assert f"cpu: | restarting {done}" in watching.err
    assert done.read_text() == "restarted\n"
    with db.connect() as conn:
        flagged = "SELECT last_flagged_dead_at FROM worker_heartbeats"
        assert factories.one(conn, flagged) is None
    stops(watching, signal.SIGTERM)


QUICK = {
    "QUEUE_WORKFLOWS_DL_HEARTBEAT_SEC": "0.2",
    "QUEUE_WORKFLOWS_STALE_WORKER_AFTER_S": "1.5",
    "QUEUE_WORKFLOWS_DEAD_WORKER_SWEEP_INTERVAL_S": "0.3",
    "QUEUE_WORKFLOWS_HOST_LABEL": "box",
}


def test_a_worker_that_hangs_is_bounced_and_its_job_runs_again(
    cli: Commands, tmp_path: Path
) -> None:
    parent = cli.start(
        "queue-claim-worker", "--queue", "cpu", "--app", TOYHOST, "--supervise", **QUICK
    )
    orchestrator = cli.start("queue-orchestrator", "--app", TOYHOST, **QUICK)
    run_id = run_store.insert_run(workflow_name="hold", context={"folder": str(tmp_path)})["id"]
    until(lambda: toy_app.pids(tmp_path, "hold"), timeout_s=30)
    (hung,) = set(parent.pids("--queue cpu")) - {parent.process.pid}
    kill = f"cpu={sys.executable} -c 'import os; os.kill({hung}, 9)'"
    watching = cli.start(*SUPERVISE, "--bounce", kill, **QUICK)
    until(lambda: "watching the workers" in watching.err)
    os.kill(hung, signal.SIGSTOP)
    until(lambda: (run_store.get_run(run_id) or {})["status"] == "completed")
    assert len(toy_app.pids(tmp_path, "hold")) == 2
    assert watching.err.count("is flagged dead, last seen") == 1
    stops(watching, signal.SIGTERM)
    for process in (parent, orchestrator):
        process.send(signal.SIGTERM)
        assert process.wait() == 0


def test_a_unit_is_restarted_by_systemctl(cli: Commands, tmp_path: Path) -> None:
    fake = tmp_path / "systemctl"
    fake.write_text('#!/bin/sh\necho "$@" >>"$0.log"\n')
    fake.chmod(0o755)
    flag("gpu")
    path = f"{tmp_path}:/usr/bin:/bin"
    watching = cli.start(*SUPERVISE, "--unit", "gpu=queue-gpu.service", PATH=path)
    log = tmp_path / "systemctl.log"
    until(lambda: log.exists() and log.read_text() == "restart queue-gpu.service\n")
    stops(watching, signal.SIGINT)


def test_a_signal_ends_it_in_the_middle_of_a_command(cli: Commands, tmp_path: Path) -> None:
    flag("cpu")
    watching = cli.start(*SUPERVISE, "--bounce", "cpu=sleep 60")
    until(lambda: "sleep 60" in watching.family().values())
    stops(watching, signal.SIGTERM)


def test_it_waits_for_an_unreachable_database(cli: Commands) -> None:
    watching = cli.start(*SUPERVISE, "--bounce", "cpu=true", QUEUE_WORKFLOWS_DB_URL=NOWHERE)
    until(lambda: "bounce waits for the database: " in watching.err)
    assert "canary77" not in watching.err
    stops(watching, signal.SIGTERM)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "nothing to restart"),
        (("--bounce", "cpu"), "should look like"),
        (
            ("--bounce", "cpu=no-such-command-here"),
            "names no command: 'no-such-command-here'",
        ),
    ],
)
def test_options_that_cannot_work_are_one_line_and_code_2(
    db: ModuleType, cli: Commands, argv: tuple[str, ...], said: str
) -> None:
    assert said in refused(cli.run(*SUPERVISE, *argv))
