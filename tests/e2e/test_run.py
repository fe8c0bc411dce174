"""`queue-workflows run` from the insert to the exit code, with processes of its own or others'."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path

import psycopg
import pytest
from psycopg import conninfo

from queue_workflows import embedded, node_queue, run_store, runs
from tests.support import commands, embedded_servers, flow, markdown, reaper, toy_app
from tests.support.commands import ROOT, TOYHOST, Command, Commands
from tests.support.terminal import SCREEN, Terminal
from tests.support.wait import until

RUN = ("queue-workflows", "run", "--app", TOYHOST)
FEW = {"QUEUE_WORKFLOWS_WORKFLOW_CPU_WORKERS": "2"}
ONE = {"QUEUE_WORKFLOWS_WORKFLOW_CPU_WORKERS": "1"}
"""Each worker that starts imports for a third of a second."""


def folder_of(path: Path) -> str:
    return f"folder={path}"


def stop_at_once(command: Command) -> None:
    """Ctrl-C twice, with the time between them that two signals need to be two."""
    command.send(signal.SIGINT)
    until(lambda: "stopping" in command.err)
    command.send(signal.SIGINT)


def test_a_run_brings_its_processes_and_takes_them_away(cli: Commands, tmp_path: Path) -> None:
    given = tmp_path / "context.json"
    given.write_text(json.dumps({"folder": str(tmp_path), "number": 3}))
    out = tmp_path / "out"
    done = cli.run(
        *RUN, "chain", "--input", f"@{given}", "--input", "number=4", "--input", "word=[x",
        "--out", str(out), "--priority", "7", "--json", **FEW,
    )  # fmt: skip
    assert done.process.returncode == 0, done.err
    assert done.family() == {}
    found = json.loads(done.out)
    assert (found["status"], found["nodes"], found["out_dir"]) == (
        "completed", {"completed": 2}, str(out),
    )  # fmt: skip
    assert found["longest_chain"]["nodes"] == ["work/first", "work/second"]
    (place,) = found["workers"]
    assert place["pid"] not in toy_app.pids(tmp_path, "quick"), "handlers run in executors"
    assert "starting orchestrator, 2 cpu" in done.err
    run = run_store.get_run(found["id"])
    assert run
    assert run["context"] == {"folder": str(tmp_path), "number": 4, "word": "[x"}
    assert run["priority"] == 7


def test_a_failed_run_exits_1_and_its_error_harms_no_terminal(
    cli: Commands, tmp_path: Path
) -> None:
    done = cli.run(*RUN, "fail", "--watch", "--input", folder_of(tmp_path), **ONE)
    assert done.process.returncode == 1
    assert "work/bad: failed" in done.out
    assert r"the toy broke \x1b[31m\n on purpose" in done.out
    assert "\x1b" not in done.out


def test_a_failed_run_shows_the_apps_frames(cli: Commands, tmp_path: Path) -> None:
    done = cli.run(*RUN, "fail", "--input", folder_of(tmp_path), **ONE)
    lines = done.err.partition("traceback of work/bad (all of it: --debug):\n")[2].splitlines()
    assert re.search(r'^  File ".*toy_app\.py", line \d+, in fail$', lines[0]), done.err
    assert any(line.startswith("ValueError: the toy broke") for line in lines)
    assert "longest chain" not in done.out, "no node came to an end"
    debug = cli.run(*RUN, "fail", "--debug", "--input", folder_of(tmp_path), **ONE)
    whole = debug.err.partition("traceback of work/bad:\n")[2].splitlines()
    assert whole[:2] == ["Traceback (most recent call last):", lines[0]], debug.err
    found = json.loads(cli.run(*RUN, "fail", "--json", "--input", folder_of(tmp_path), **ONE).out)
    assert [node["node_id"] for node in found["failed"]] == ["work/bad"]
    assert "in fail" in found["failed"][0]["traceback"]


def test_the_end_counts_the_items_of_a_map_that_could_not_decide(
    cli: Commands, tmp_path: Path
) -> None:
    done = cli.run(*RUN, "each", "--input", folder_of(tmp_path), **ONE)
    assert done.process.returncode == 0, done.err
    no_arm = "branch 'each[{0}]/arm': no arm for '{0}'; its arms are good: add one"
    lines = done.out.splitlines()
    at = lines.index("items of each: 1/3 done, 2 failed")
    assert lines[at + 1].startswith(f"  bad: {no_arm.format('bad')}"), done.out
    assert lines[at + 2].startswith(f"  worse: {no_arm.format('worse')}"), done.out
    given = ("--json", "--input", folder_of(tmp_path))
    (found,) = json.loads(cli.run(*RUN, "each", *given, **ONE).out)["maps"]
    assert (found["node_id"], found["total"], found["done"], found["failed"]) == ("each", 3, 1, 2)
    assert [item["key"] for item in found["items_failed"]] == ["bad", "worse"]


def test_a_run_that_was_given_no_folder_has_one_of_its_own(cli: Commands, tmp_path: Path) -> None:
    found = json.loads(cli.run(*RUN, "chain", "--input", folder_of(tmp_path), "--json", **ONE).out)
    assert found["out_dir"] == str(ROOT / "queue-workflows-out" / found["id"])
    assert not Path(found["out_dir"]).exists(), "made by the node that asks for it"


def test_a_run_that_others_serve_makes_no_folder(cli: Commands, tmp_path: Path) -> None:
    """They may run as another user, and could not write there."""
    run = (*RUN, "chain", "--input", folder_of(tmp_path), "--no-wait")
    row = run_store.get_run(cli.run(*run).out.strip())
    assert row is not None and row["out_dir"] is None
    named = tmp_path / "theirs"
    row = run_store.get_run(cli.run(*run, "--out", str(named)).out.strip())
    assert row is not None and row["out_dir"] == str(named)
    assert not named.exists()


def test_a_run_that_waits_for_others_reports_it(cli: Commands, tmp_path: Path) -> None:
    older = [run_store.insert_run(workflow_name="hold")["id"] for _ in range(2)]
    run_store.insert_run(workflow_name="hold", priority=200)
    run = cli.start(*RUN, "chain", "--input", folder_of(tmp_path), **ONE)
    said = f"2 older runs of hold are ahead, `queue-workflows cancel {older[0]}` ends the first"
    until(lambda: said in run.err, timeout_s=30)
    stop_at_once(run)
    assert run.wait(20) == 130, run.err


def test_watch_prints_lines_and_others_answer(cli: Commands, tmp_path: Path) -> None:
    run = cli.start(*RUN, "asking", "--watch", "--input", folder_of(tmp_path), **ONE)
    until(lambda: "ask waits for an answer" in run.out, timeout_s=30)
    assert "work: 2/2 completed" in run.out
    runs.answer(runs.list()[0]["id"], "ask", "l")
    assert run.wait() == 0
    assert "ask: completed" in run.out


def test_a_killed_worker_does_not_stop_a_run(cli: Commands, tmp_path: Path) -> None:
    run = cli.start(*RUN, "hold", "--watch", "--input", folder_of(tmp_path), **FEW)
    os.kill(until(lambda: toy_app.pids(tmp_path, "hold"), timeout_s=30)[0], signal.SIGKILL)
    assert run.wait(20) == 0, run.err
    assert "taken back from dead workers: 1 time" in run.out
    assert len(toy_app.pids(tmp_path, "hold")) == 2


def test_ctrl_c_leaves_the_run_to_others_and_no_process(cli: Commands, tmp_path: Path) -> None:
    patient = {"QUEUE_WORKFLOWS_SHUTDOWN_TIMEOUT_S": "60"}
    run = cli.start(*RUN, "hold", "--input", folder_of(tmp_path), **FEW, **patient)
    until(lambda: toy_app.pids(tmp_path, "hold"), timeout_s=30)
    stop_at_once(run)
    assert run.wait(20) == 130, run.err
    until(lambda: not run.family())
    run_id = runs.list()[0]["id"]
    assert f"left run {run_id} as it is" in run.err
    assert f"`queue-workflows cancel {run_id}` ends it" in run.err
    assert flow.status(run_id) == "running"


def test_a_run_uses_those_who_serve_and_starts_its_own_when_they_go(
    cli: Commands, tmp_path: Path
) -> None:
    up = cli.start(
        "queue-workflows", "up", "--app", TOYHOST, "--cpu", "1", "--gpu", "0", "--no-ingest"
    )
    until(lambda: "works on" in up.err and "dispatches" in up.err, timeout_s=30)
    served = cli.run(*RUN, "chain", "--input", folder_of(tmp_path))
    assert served.process.returncode == 0
    # A busy machine may keep the run waiting for 2 s: then it starts an orchestrator, no worker.
    assert "starting orchestrator," not in served.err
    plain = ("queue-workflows", "run", "chain", "--input", folder_of(tmp_path))
    assert cli.run(*plain).process.returncode == 0, "no --app is needed where others serve"
    run_id = cli.run(*plain, "--no-wait").out.strip()
    until(lambda: flow.status(run_id) == "completed")

    left = cli.start(*RUN, "hold", "--input", folder_of(tmp_path), **FEW)
    until(lambda: toy_app.pids(tmp_path, "hold"), timeout_s=30)
    stop_at_once(up)
    assert up.wait() == 0
    assert left.wait(40) == 0, left.err
    assert "starting orchestrator, 2 cpu" in left.err


@pytest.fixture
def worker_dsn(migrated_database: str) -> Generator[str]:
    """The DSN of a migrated database for a role with the rights that the app guide grants."""
    guide = markdown.blocks(ROOT / "docs" / "postgresql.md")
    grants = next(block.text for block in guide if "CREATE ROLE texts_worker" in block.text)
    role = f"letters_{os.getpid()}_test"
    with psycopg.connect(migrated_database, autocommit=True) as admin:
        for statement in grants.replace("texts_worker", role).split(";"):
            admin.execute(statement.encode())
        if admin.info.server_version < 150000:
            admin.execute("REVOKE CREATE ON SCHEMA public FROM public")
        yield conninfo.make_conninfo(migrated_database, options=f"-c role={role}")
        admin.execute(f"DROP OWNED BY {role}".encode())
        admin.execute(f"DROP ROLE {role}".encode())


def test_workers_and_apps_need_no_more_rights_than_the_guide_grants(
    migrated_database: str, worker_dsn: str, tmp_path: Path
) -> None:
    with (
        commands.commands(QUEUE_WORKFLOWS_DB_URL=migrated_database) as owner,
        commands.commands(QUEUE_WORKFLOWS_DB_URL=worker_dsn) as limited,
    ):
        owner.start("queue-orchestrator", "--app", TOYHOST)
        worker = limited.start("queue-claim-worker", "--queue=cpu", "--app", TOYHOST)
        asked = ("chain", "--no-up", "--input", folder_of(tmp_path), "--json")
        done = limited.run("queue-workflows", "run", *asked)
        assert done.process.returncode == 0, done.err + worker.err
        found = json.loads(done.out)
        assert found["nodes"] == {"completed": 2}
        assert Path(found["out_dir"]).parts[-2:] == ("outputs", found["id"]), "the workers chose it"
        assert limited.run("queue-workflows", "audit").process.returncode == 0
        assert "permission denied" not in worker.err


def test_on_a_terminal_it_draws_a_tree_and_prompts(
    cli: Commands, tmp_path: Path, terminal: Terminal
) -> None:
    run = cli.start(
        *RUN, "asking", "--watch", "--input", folder_of(tmp_path), terminal=terminal.theirs,
        **FEW, **SCREEN, TMPDIR=str(tmp_path),
    )  # fmt: skip
    asked = r"Left or right\? .*2 Right .*Enter: l"
    until(lambda: terminal.shows(asked), timeout_s=30)
    terminal.type("3\n")
    until(lambda: terminal.shows("'3' is none of the choices"))
    terminal.type("Right\n")
    until(lambda: terminal.shows(r"completed in .*longest chain"))
    assert terminal.shows("✔ ask completed")
    assert run.wait() == 0
    jobs = node_queue.list_jobs_for_run(runs.list()[0]["id"])
    ask = next(job for job in jobs if job["node_id"] == "ask")
    assert ask["context_delta"] == {"way": "r"}


def test_a_killed_worker_is_reported_above_the_tree(
    cli: Commands, tmp_path: Path, terminal: Terminal
) -> None:
    run = cli.start(
        *RUN, "hold", "--watch", "--input", folder_of(tmp_path), terminal=terminal.theirs,
        **FEW, **SCREEN, TMPDIR=str(tmp_path),
    )  # fmt: skip
    until(lambda: toy_app.pids(tmp_path, "hold"), timeout_s=30)
    (victim,) = run.pids("--queue cpu")
    os.kill(victim, signal.SIGKILL)
    shown_line = rf"pid {victim} ended after [\d.]+ s with signal 9; restart in"
    until(lambda: terminal.shows(shown_line))
    until(
        lambda: terminal.shows(r"killed by SIGKILL, peak memory \d+ MB; node work/hold is queued")
    )
    until(lambda: terminal.shows("✔ hold completed"))
    until(lambda: terminal.shows("longest chain"))
    assert run.wait() == 0


def test_a_killed_executor_is_a_crash_of_its_node_and_its_cause_is_logged(
    cli: Commands, tmp_path: Path, terminal: Terminal
) -> None:
    run = cli.start(
        *RUN, "hold", "--watch", "--input", folder_of(tmp_path), terminal=terminal.theirs,
        **FEW, **SCREEN, TMPDIR=str(tmp_path),
    )  # fmt: skip
    victim = until(lambda: toy_app.pids(tmp_path, "hold"), timeout_s=30)[0]
    os.kill(victim, signal.SIGKILL)
    until(lambda: terminal.shows("✔ hold completed.*taken back from a dead worker 1 time"))
    until(lambda: terminal.shows("longest chain"))
    assert run.wait() == 0
    (log,) = tmp_path.glob("queue-workflows-*.log")
    said = r"killed by SIGKILL, peak memory \d+ MB; node work/hold is queued"
    assert re.search(said, log.read_text())


@pytest.fixture
def own_server() -> Generator[tuple[Commands, Path]]:
    """Commands without a DSN, whose embedded server lives in a folder of its own."""
    base = Path(tempfile.mkdtemp(prefix="qw-e2e-"))
    reaper.own(base)
    base.chmod(0o711)
    try:
        with commands.commands(QUEUE_WORKFLOWS_EMBEDDED_DIR=str(base / "pg"), **FEW) as made:
            yield made, base
    finally:
        shutil.rmtree(base)


def test_without_a_dsn_it_brings_the_embedded_server_and_stops_it(
    own_server: tuple[Commands, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cli, base = own_server
    work = base / "work"
    work.mkdir()
    done = cli.run(*RUN, "chain", "--input", folder_of(work), timeout_s=60)
    assert done.process.returncode == 0, done.err
    said = r"embedded PostgreSQL 18, database (\w+) of {}, in {} \(started\)"
    found = re.search(said.format(re.escape(str(ROOT)), re.escape(str(base / "pg"))), done.err)
    assert found is not None, done.err
    own = found[1]
    assert not embedded_servers.is_alive(base / "pg")
    found = json.loads(cli.run("queue-workflows", "status", "--json").out)
    assert (found["embedded"], found["runs"]) == (True, {"completed": 1})
    assert not embedded_servers.is_alive(base / "pg")

    monkeypatch.setenv("QUEUE_WORKFLOWS_EMBEDDED_DIR", str(base / "pg"))
    with embedded.ensure(create=False) as server:
        shown_line = cli.run("queue-workflows", "status").out.splitlines()[1]
        given = shlex.split(shown_line.partition(" connects to it")[0])
        assert given[0] == "psql"
        with psycopg.connect(given[1]) as by_hand, psycopg.connect(server.dsn_of(own)) as ours:
            where = "SELECT current_user, current_database(), pg_postmaster_start_time()"
            assert by_hand.execute(where).fetchone() == ours.execute(where).fetchone()
        joined = cli.run("queue-workflows", "runs")
        assert "completed" in joined.out
        assert embedded_servers.is_alive(base / "pg"), "it is stopped by the last one only"
