"""The four role scripts: what they refuse in one line, and how they stop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Generator
from pathlib import Path
from types import ModuleType

import pytest

from queue_workflows import (
    claim_worker,
    db,
    node_queue,
    orchestrator,
    run_store,
    scheduler,
    worker_control,
)
from tests.support import commands, toyhost
from tests.support.commands import TOYHOST, Command, Commands, refused
from tests.support.wait import until

WORKER = ("queue-claim-worker", "--queue", "cpu", "--app", TOYHOST)
SCRIPTS = {
    "queue-orchestrator": (orchestrator.main, ()),
    "queue-claim-worker": (claim_worker.main, ("--queue", "cpu", "--app", TOYHOST)),
    "queue-scheduler": (scheduler.main, ()),
    "queue-worker-control": (worker_control.main, ("--queue", "cpu", "--on")),
}


def hold(folder: Path) -> str:
    context = {"folder": str(folder)}
    return run_store.insert_run(workflow_name="hold", context=context)["id"]


def the_job(run_id: str) -> dict[str, object]:
    return next(j for j in node_queue.list_jobs_for_run(run_id) if j["node_id"] == "work/hold")


# --- refusals, in this process -----------------------------------------------------------------


@pytest.mark.parametrize("name", SCRIPTS)
def test_without_a_database_the_line_names_the_variable_and_the_way_out(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    main, argv = SCRIPTS[name]
    assert main(list(argv)) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith(f"{name}: ")
    assert "QUEUE_WORKFLOWS_DB_URL" in line
    assert "--embedded" in line


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize(
    ("app", "said"),
    [
        ("no_such_module", "no module 'no_such_module' here"),
        ("tests.support.toyhost:absent", "has no 'absent'"),
    ],
)
def test_a_wrong_app_is_named(
    name: str, app: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    main, argv = SCRIPTS[name]
    kept = [part for part in argv if part not in ("--app", TOYHOST)]
    assert main([*kept, "--app", app]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert [said in line for line in lines] == [True]


def test_an_unknown_queue_is_named_with_those_that_exist(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert claim_worker.main(["--queue", "nope", "--app", TOYHOST]) == 2
    line = capfd.readouterr().err.strip()
    assert "unknown queue 'nope': known are cpu, gpu, notes" in line


@pytest.mark.parametrize("queue", ["cpu", "gpu"])
def test_a_worker_that_knows_no_node_refuses(queue: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert claim_worker.main(["--queue", queue]) == 2
    assert "name the host app with --app" in capfd.readouterr().err


def test_a_queue_is_required(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        claim_worker.main([])
    assert refusal.value.code == 2
    assert "--queue" in capfd.readouterr().err


# --- as processes ------------------------------------------------------------------------------


@pytest.fixture
def no_dsn() -> Generator[Commands]:
    with commands.commands() as made:
        yield made


def test_the_scripts_refuse_as_their_mains_do(no_dsn: Commands) -> None:
    assert "unknown queue 'nope'" in refused(no_dsn.run("queue-claim-worker", "--queue", "nope"))
    assert "QUEUE_WORKFLOWS_DB_URL" in refused(no_dsn.run("queue-orchestrator"))


def test_the_control_row_is_written(cli: Commands, db: ModuleType) -> None:
    done = cli.run(
        "queue-worker-control", "--queue", "gpu", "--off", "--host", "box", "--requested-by", "me"
    )
    assert (done.process.returncode, done.out) == (0, "box gpu: off\n")
    row = worker_control.get_worker_control("box", "gpu")
    assert row
    assert (row["desired_state"], row["requested_by"]) == ("off", "me")


@pytest.fixture
def orchestrated(cli: Commands) -> Command:
    started = cli.start("queue-orchestrator", "--app", TOYHOST)
    until(lambda: "dispatches" in started.err, timeout_s=30)
    return started


def test_sigterm_lets_the_body_end_and_claims_no_more(
    cli: Commands, orchestrated: Command, tmp_path: Path
) -> None:
    run_id = hold(tmp_path)
    worker = cli.start(*WORKER)
    until(lambda: toyhost.pids(tmp_path, "hold"), timeout_s=30)
    worker.send(signal.SIGTERM)
    (tmp_path / "go").touch()
    assert worker.wait() == 0
    assert the_job(run_id)["status"] == "completed"
    until(lambda: len(node_queue.list_jobs_for_run(run_id)) == 2)
    assert toyhost.pids(tmp_path, "quick") == [], "the next node is left to others"
    orchestrated.send(signal.SIGTERM)
    assert orchestrated.wait() == 0


@pytest.mark.parametrize(
    ("signals", "shutdown_s"), [([signal.SIGTERM], "0.5"), ([signal.SIGTERM] * 2, "60")]
)
def test_a_body_that_does_not_end_is_handed_back_uncounted(
    cli: Commands,
    orchestrated: Command,
    tmp_path: Path,
    signals: list[signal.Signals],
    shutdown_s: str,
) -> None:
    run_id = hold(tmp_path)
    leaving = cli.start(*WORKER, QUEUE_WORKFLOWS_SHUTDOWN_TIMEOUT_S=shutdown_s)
    until(lambda: toyhost.pids(tmp_path, "hold"), timeout_s=30)
    staying = cli.start(*WORKER)
    until(lambda: "works on" in staying.err, timeout_s=30)
    for number, signum in enumerate(signals):
        if number:
            until(lambda: not is_pending(leaving.process.pid, signal.SIGTERM))
        leaving.send(signum)
    assert leaving.wait(10) == 0
    until(lambda: the_job(run_id)["status"] == "completed")
    job = the_job(run_id)
    assert (job["claim_no"], job["attempts"], job["crash_count"]) == (2, 0, 0)
    assert set(toyhost.pids(tmp_path, "hold")) == {leaving.process.pid, staying.process.pid}
    staying.send(signal.SIGTERM)
    assert staying.wait() == 0


def test_a_supervised_worker_that_is_killed_loses_nothing_and_comes_back(
    cli: Commands, orchestrated: Command, tmp_path: Path
) -> None:
    run_id = hold(tmp_path)
    parent = cli.start(*WORKER, "--supervise")
    first = until(lambda: toyhost.pids(tmp_path, "hold"), timeout_s=30)[0]
    assert first != parent.process.pid
    killed = time.monotonic()
    os.kill(first, signal.SIGKILL)
    again = until(lambda: toyhost.pids(tmp_path, "hold")[1:], timeout_s=10)
    assert time.monotonic() - killed <= 3
    assert again[0] not in (first, parent.process.pid)
    until(lambda: the_job(run_id)["status"] == "completed")
    job = the_job(run_id)
    assert (job["claim_no"], job["attempts"], job["crash_count"]) == (2, 0, 1)
    parent.send(signal.SIGTERM)
    assert parent.wait() == 0
    assert parent.family() == {}


def test_a_killed_worker_without_parent_is_found_by_its_lost_session(
    cli: Commands, tmp_path: Path
) -> None:
    started = cli.start(
        "queue-orchestrator", "--app", TOYHOST, QUEUE_WORKFLOWS_SILENT_WORKER_AFTER_S="1"
    )
    until(lambda: "dispatches" in started.err, timeout_s=30)
    run_id = hold(tmp_path)
    killed = cli.start(*WORKER)
    until(lambda: toyhost.pids(tmp_path, "hold"), timeout_s=30)
    until(lambda: states_said(run_id) == "busy")
    killed.send(signal.SIGKILL)
    until(lambda: the_job(run_id)["status"] == "queued", timeout_s=10)
    assert (the_job(run_id)["crash_count"], the_job(run_id)["attempts"]) == (1, 0)
    started.send(signal.SIGTERM)
    assert started.wait() == 0


def states_said(run_id: str) -> str | None:
    with db.connect() as conn:
        row = conn.execute(
            "SELECT w.state FROM workers w JOIN workflow_node_jobs USING (worker_id)"
            " WHERE run_id = %s AND (w.detail ->> 'lock')::boolean",
            (run_id,),
        ).fetchone()
    return row["state"] if row else None


def test_a_supervised_worker_that_refuses_to_start_is_given_up(cli: Commands) -> None:
    parent = cli.start(
        "queue-claim-worker", "--queue", "cpu", "--supervise", QUEUE_WORKFLOWS_APP=""
    )
    assert parent.wait(30) == 2
    assert "would fail every job" in parent.err


def test_the_shutdown_timeout_is_an_option(
    cli: Commands, orchestrated: Command, tmp_path: Path
) -> None:
    run_id = hold(tmp_path)
    worker = cli.start(*WORKER, "--shutdown-timeout", "0.3")
    until(lambda: toyhost.pids(tmp_path, "hold"), timeout_s=30)
    asked = time.monotonic()
    worker.send(signal.SIGTERM)
    assert worker.wait(10) == 0
    assert time.monotonic() - asked <= 3
    assert (the_job(run_id)["status"], the_job(run_id)["attempts"]) == ("queued", 0)


def is_pending(pid: int, signum: signal.Signals) -> bool:
    """Whether the process has not taken the signal yet: a second one would fold into it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(("ShdPnd:", "SigPnd:")) and int(line.split()[1], 16) >> signum - 1 & 1:
            return True
    return False


def test_the_scheduler_and_an_ingest_worker_end_by_sigterm(cli: Commands) -> None:
    started = [
        cli.start("queue-scheduler", "--app", TOYHOST),
        cli.start("queue-claim-worker", "--queue", "notes", "--app", TOYHOST),
    ]
    until(lambda: "following 1 schedule entries" in started[0].err, timeout_s=30)
    until(lambda: "works on" in started[1].err, timeout_s=30)
    for command in started:
        command.send(signal.SIGTERM)
    assert [command.wait() for command in started] == [0, 0]
