"""The four role scripts refuse wrong input in one line, and stop on signals."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from types import ModuleType

import pytest
from psycopg import conninfo, sql

from queue_workflows import (
    claim_worker,
    db,
    node_queue,
    orchestrator,
    run_store,
    scheduler,
    worker_control,
)
from queue_workflows.__main__ import main as commands_main
from tests.support import commands, toy_app
from tests.support.commands import TOYHOST, Command, Commands, refused
from tests.support.database import Database
from tests.support.wait import patience, until

BUSY_S = 3.0
"""The factor for a busy machine; the soak checks these times on a quiet one."""
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
def test_a_database_of_the_embedded_server_and_a_dsn_are_not_both_taken(
    name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", "postgresql:///x")
    main, argv = SCRIPTS[name]
    assert main([*argv, "--db", "letters"]) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith(f"{name}: --db letters names a database of the embedded server")


@pytest.mark.parametrize("name", SCRIPTS)
def test_without_a_database_the_line_names_the_variable_and_the_way_out(
    name: str,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_EMBEDDED_DIR", str(tmp_path))
    main, argv = SCRIPTS[name]
    assert main(list(argv)) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith(f"{name}: ")
    assert "QUEUE_WORKFLOWS_DB_URL" in line
    # queue-worker-control joins an embedded server that is there by itself.
    assert ("queue-workflows up" if name == "queue-worker-control" else "--embedded") in line


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize(
    ("app", "said"),
    [
        ("no_such_module", "no module 'no_such_module' here"),
        ("tests.support.toy_app:absent", "has no 'absent'"),
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
    assert "name the app with --app" in capfd.readouterr().err


def test_a_queue_is_required(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        claim_worker.main([])
    assert refusal.value.code == 2
    assert "--queue" in capfd.readouterr().err


# --- a user without rights, in this process ----------------------------------------------------


@pytest.fixture
def low(own_database: Database) -> Generator[str]:
    """The name of a role without rights."""
    name = f"low_{secrets.token_hex(4)}"
    own_database.admin.execute(sql.SQL("CREATE ROLE {}").format(sql.Identifier(name)))
    yield name
    own_database.admin.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


def as_user(dsn: str, user: str) -> str:
    return conninfo.make_conninfo(dsn, options=f"-c role={user}")


def one_line(capfd: pytest.CaptureFixture[str]) -> str:
    lines = [x for x in capfd.readouterr().err.splitlines() if " INFO " not in x]
    lines = [x for x in lines if not x.startswith("queue-workflows: database ")]
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize(
    "argv",
    [
        ["queue-orchestrator"],
        ["migrate"],
        ["up", "--app", TOYHOST],
        ["run", "chain", "--app", TOYHOST],
        ["demo", "--yes"],
    ],
    ids=lambda argv: argv[0],
)
def test_a_user_who_may_create_no_table_gets_the_grant_in_the_message(
    argv: list[str],
    low: str,
    fresh_database: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with db.connect(url=fresh_database) as conn:
        conn.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", as_user(fresh_database, low))
    name, *more = argv
    main = SCRIPTS[name][0] if name in SCRIPTS else commands_main
    assert main(more if name in SCRIPTS else argv) == 2
    line = one_line(capfd)
    assert f"user {low} may not use or create tables in schema public of database " in line
    assert f": GRANT USAGE, CREATE ON SCHEMA public TO {low}, or migrate as the owner" in line


@pytest.mark.parametrize(
    "argv",
    [
        ["queue-claim-worker", "--queue", "cpu", "--app", TOYHOST],
        ["queue-worker-control", "--queue", "cpu", "--on"],
        ["queue-scheduler"],
        ["status"],
        ["runs"],
        ["run", "quick", "--no-wait"],
    ],
    ids=lambda argv: argv[0],
)
def test_a_user_without_rights_on_the_tables_gets_the_grant_in_the_message(
    argv: list[str],
    low: str,
    own_database: Database,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", as_user(own_database.dsn, low))
    name, *more = argv
    main = SCRIPTS[name][0] if name in SCRIPTS else commands_main
    assert main(more if name in SCRIPTS else argv) == 2
    db.close_pool()
    line = one_line(capfd)
    assert f"user {low} lacks a right on database " in line
    assert "permission denied for table" in line
    assert line.endswith(f"TO {low}")


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


@pytest.mark.parametrize("argv", [WORKER, ("queue-scheduler",)], ids=lambda argv: argv[0])
def test_a_wait_for_the_schema_is_logged_once(
    cli: Commands, db: ModuleType, fresh_database: str, argv: tuple[str, ...]
) -> None:
    waiting = cli.start(*argv, QUEUE_WORKFLOWS_DB_URL=fresh_database)
    at_once = cli.start(*argv)
    said = f"waiting for schema version {db.REQUIRED_VERSION} (run `queue-workflows migrate` or"
    until(lambda: said in waiting.err, timeout_s=30)
    migrate = cli.run("queue-workflows", "migrate", QUEUE_WORKFLOWS_DB_URL=fresh_database)
    assert migrate.process.returncode == 0
    ready = "works on" if argv is WORKER else "the schedule is empty"
    for started in (waiting, at_once):
        until(lambda started=started: ready in started.err, timeout_s=30)
        started.send(signal.SIGTERM)
        assert started.wait(20) == 0
    assert waiting.err.count("waiting for schema") == 1
    assert "waiting for schema" not in at_once.err


@pytest.mark.parametrize(
    "argv",
    [
        ("queue-worker-control", "--queue", "cpu", "--on"),
        ("queue-workflows", "run", "chain", "--app", TOYHOST),
        ("queue-workflows", "run", "chain", "--no-wait"),
        ("queue-workflows", "demo", "--yes"),
    ],
    ids=" ".join,
)
def test_a_command_that_does_one_thing_does_not_wait_for_a_database_that_is_not_there(
    cli: Commands, dsn: str, argv: tuple[str, ...]
) -> None:
    gone = conninfo.make_conninfo(dsn, dbname="no_such_test")
    done = cli.run(*argv, QUEUE_WORKFLOWS_DB_URL=gone, timeout_s=9)
    assert done.process.returncode == 2
    assert "refuses the connection" in done.err.splitlines()[-1]
    assert "Traceback" not in done.err


def test_ctrl_c_while_the_commands_are_imported_ends_quietly(tmp_path: Path) -> None:
    # The first heavy import stands still until the signal is there. It sleeps in short pieces: a
    # signal that comes just before a sleep begins does not interrupt that sleep.
    (tmp_path / "typer.py").write_text(
        "import time\nprint('importing', flush=True)\nfor _ in range(600): time.sleep(0.1)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "queue_workflows", "status"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as started:  # fmt: skip
        assert started.stdout is not None
        assert started.stderr is not None
        assert started.stdout.readline() == "importing\n"
        started.send_signal(signal.SIGINT)
        assert (started.wait(20), started.stderr.read()) == (130, "")


@pytest.fixture
def orchestrated(cli: Commands) -> Command:
    started = cli.start("queue-orchestrator", "--app", TOYHOST)
    until(lambda: "dispatches" in started.err, timeout_s=30)
    return started


def test_sigterm_lets_the_handler_end_and_claims_no_more(
    cli: Commands, orchestrated: Command, tmp_path: Path
) -> None:
    run_id = hold(tmp_path)
    worker = cli.start(*WORKER)
    until(lambda: toy_app.pids(tmp_path, "hold"), timeout_s=30)
    worker.send(signal.SIGTERM)
    (tmp_path / "go").touch()
    assert worker.wait() == 0
    assert the_job(run_id)["status"] == "completed"
    until(lambda: len(node_queue.list_jobs_for_run(run_id)) == 2)
    assert toy_app.pids(tmp_path, "quick") == [], "the next node is left to others"
    orchestrated.send(signal.SIGTERM)
    assert orchestrated.wait() == 0


@pytest.mark.parametrize(
    ("signals", "shutdown_s"), [([signal.SIGTERM], "0.5"), ([signal.SIGTERM] * 2, "60")]
)
def test_a_handler_that_does_not_end_is_handed_back_uncounted(
    cli: Commands,
    orchestrated: Command,
    tmp_path: Path,
    signals: list[signal.Signals],
    shutdown_s: str,
) -> None:
    run_id = hold(tmp_path)
    leaving = cli.start(*WORKER, QUEUE_WORKFLOWS_SHUTDOWN_TIMEOUT_S=shutdown_s)
    until(lambda: toy_app.pids(tmp_path, "hold"), timeout_s=30)
    staying = cli.start(*WORKER)
    until(lambda: "works on" in staying.err, timeout_s=30)
    for number, signum in enumerate(signals):
        if number:
            until(lambda: not is_pending(leaving.process.pid, signal.SIGTERM))
        leaving.send(signum)
    assert leaving.wait(30) == 0
    until(lambda: the_job(run_id)["status"] == "completed")
    job = the_job(run_id)
    assert (job["claim_no"], job["attempts"], job["crash_count"]) == (2, 0, 0)
    assert len({*toy_app.pids(tmp_path, "hold")}) == 2
    staying.send(signal.SIGTERM)
    assert staying.wait() == 0


def test_a_supervised_worker_that_is_killed_loses_nothing_and_comes_back(
    cli: Commands, orchestrated: Command, tmp_path: Path
) -> None:
    run_id = hold(tmp_path)
    parent = cli.start(*WORKER, "--supervise")
    first = until(lambda: toy_app.pids(tmp_path, "hold"), timeout_s=30)[0]
    assert first != parent.process.pid
    killed = time.monotonic()
    os.kill(first, signal.SIGKILL)
    again = until(lambda: toy_app.pids(tmp_path, "hold")[1:])
    assert time.monotonic() - killed <= patience(3 + BUSY_S)
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
        "queue-orchestrator", "--app", TOYHOST, QUEUE_WORKFLOWS_STALE_WORKER_AFTER_S="1"
    )
    until(lambda: "dispatches" in started.err, timeout_s=30)
    run_id = hold(tmp_path)
    killed = cli.start(*WORKER)
    until(lambda: toy_app.pids(tmp_path, "hold"), timeout_s=30)
    until(lambda: states_said(run_id) == "busy")
    killed.send(signal.SIGKILL)
    until(lambda: the_job(run_id)["status"] == "queued")
    job = the_job(run_id)
    assert (job["lapse_count"], job["crash_count"], job["attempts"]) == (1, 0, 0)
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
    until(lambda: toy_app.pids(tmp_path, "hold"), timeout_s=30)
    asked = time.monotonic()
    worker.send(signal.SIGTERM)
    assert worker.wait(30) == 0
    assert time.monotonic() - asked <= patience(3 + BUSY_S)
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


@pytest.mark.parametrize(
    "argv",
    [
        ("queue-claim-worker", "--queue", "cpu", "--superv"),
        ("queue-orchestrator", "--ap", "nowhere"),
        ("queue-scheduler", "--ap", "nowhere"),
        ("queue-worker-control", "--host", "h", "--queue", "cpu", "--on", "--reas", "x"),
    ],
)
def test_an_abbreviated_option_is_refused(cli: Commands, argv: tuple[str, ...]) -> None:
    """A later option could make it another one; and the parent knows its own by the whole word."""
    done = cli.run(*argv)
    assert done.process.returncode == 2
    assert "error: unrecognized arguments: --" in done.err
