"""The processes of `run` are forked from a parent that has nothing of the app."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from queue_workflows import node_queue, runs
from tests.support import flow, loading_app, toy_app
from tests.support.commands import ROOT, Command, Commands
from tests.support.wait import until

APP = "tests.support.loading_app:setup"
RUN = ("queue-workflows", "run", "hold", "--app", APP)
PARENT = "queue_workflows parent of"
ROLES = ("queue_workflows.orchestrator", "queue_workflows.claim_worker")


@pytest.fixture(autouse=True)
def noting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the app note in the folder of the test what loads it."""
    monkeypatch.setenv(loading_app.FOLDER, str(tmp_path))
    monkeypatch.setenv("QUEUE_WORKFLOWS_WORKFLOW_CPU_WORKERS", "1")
    monkeypatch.setenv("QUEUE_WORKFLOWS_SHUTDOWN_TIMEOUT_S", "0.5")


def started(cli: Commands, folder: Path, *more: str) -> Command:
    """Return a run whose node waits for the file `go`."""
    run = cli.start(*RUN, "--input", f"folder={folder}", *more)
    until(lambda: toy_app.pids(folder, "hold") or run.process.poll() is not None, timeout_s=30)
    assert toy_app.pids(folder, "hold"), run.err
    return run


def process(run: Command, part: str) -> int:
    (found,) = run.pids(part)
    return found


def opened(pid: int) -> set[str]:
    """Return what the descriptors of a process are."""
    return {str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()}


@pytest.mark.parametrize("thread", ["", "1"])
def test_they_have_nothing_that_the_app_opened_in_the_command(
    cli: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thread: str
) -> None:
    monkeypatch.setenv(loading_app.THREAD, thread)
    run = started(cli, tmp_path)
    command, parent = run.process.pid, process(run, PARENT)
    orchestrator, worker = (process(run, role) for role in ROLES)
    loaded = loading_app.noted(tmp_path, "loaded")
    assert {command, orchestrator} <= loaded.keys()
    assert not {parent, worker} & loaded.keys()
    for pid in run.family():
        assert pid == command or loaded[command] not in opened(pid)
    assert not {command, parent, worker} & loading_app.noted(tmp_path, "forks").keys()
    (tmp_path / "go").touch()
    assert run.wait() == 0, run.err
    assert run.family() == {}
    assert {command, orchestrator} <= loading_app.noted(tmp_path, "ended").keys()


def test_they_keep_no_pipe_of_the_command(cli: Commands, tmp_path: Path) -> None:
    """The command reads to its end what the parent says."""
    run = started(cli, tmp_path)
    pipes = {each for each in opened(run.process.pid) if each.startswith("pipe:")}
    assert len(pipes & opened(process(run, PARENT))) == 1
    for role in ROLES:
        assert not pipes & opened(process(run, role))


def test_an_app_may_leave_a_child_that_has_all_descriptors(
    cli: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the pipe on which the parent waits for its order, so that this has no end."""
    monkeypatch.setenv(loading_app.FORK, "1")
    run = started(cli, tmp_path)
    (tmp_path / "go").touch()
    assert run.wait() == 0, run.err
    until(lambda: not run.family())
    alone = cli.run(*RUN, "--input", f"folder={tmp_path}", "--db", "x")
    assert alone.process.returncode == 2, alone.err
    until(lambda: not alone.family())


def test_ctrl_c_hands_back_and_leaves_no_process(cli: Commands, tmp_path: Path) -> None:
    run = started(cli, tmp_path)
    run.send(signal.SIGINT)
    assert run.wait() == 130, run.err
    assert run.family() == {}
    (row,) = runs.list()
    assert flow.status(row["id"]) == "running"
    (job,) = node_queue.list_jobs_for_run(row["id"])
    assert (job["status"], job["crash_count"]) == ("queued", 0)


def test_a_killed_command_leaves_no_process(cli: Commands, tmp_path: Path) -> None:
    run = started(cli, tmp_path)
    run.send(signal.SIGKILL)
    until(lambda: not run.family())
    (job,) = node_queue.list_jobs_for_run(runs.list()[0]["id"])
    assert (job["status"], job["crash_count"]) == ("queued", 0)


def test_a_killed_parent_is_replaced(cli: Commands, tmp_path: Path) -> None:
    run = started(cli, tmp_path)
    before = process(run, PARENT)
    os.kill(before, signal.SIGKILL)
    until(lambda: "the parent of our processes ended with signal 9: starting" in run.err)
    assert run.wait() == 0, run.err
    assert len(toy_app.pids(tmp_path, "hold")) == 2
    assert run.family() == {}


def test_a_parent_that_dies_before_it_has_an_order_is_replaced(
    cli: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(loading_app.KILL, "1")
    (tmp_path / "go").touch()
    done = cli.run(*RUN, "--input", f"folder={tmp_path}", timeout_s=60)
    assert done.process.returncode == 0, done.err
    assert "the parent of our processes ended with signal 9: starting" in done.err


def test_a_command_that_is_refused_leaves_no_process(cli: Commands, tmp_path: Path) -> None:
    done = cli.run(*RUN, "--input", f"folder={tmp_path}", "--db", "x")
    assert done.process.returncode == 2, done.err
    assert done.family() == {}


def test_processes_that_refuse_to_start_end_the_run_with_2(
    cli: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(loading_app.REFUSE, "1")
    done = cli.run(*RUN, "--input", f"folder={tmp_path}", timeout_s=60)
    assert done.process.returncode == 2, done.err
    assert "a process refused to start 3 times" in done.err.splitlines()[-1]
    assert "the second one is refused" in done.err
    assert done.family() == {}


def test_what_they_print_goes_to_stderr(cli: Commands, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    run = started(cli, tmp_path, "--json")
    assert run.wait() == 0, run.err
    assert run.out.startswith("printed while loading\n{"), "what the command's own app printed"
    assert run.err.count("printed while loading") >= 2


@pytest.mark.usefixtures("db")
def test_a_program_that_calls_the_command_forks_none_of_them(tmp_path: Path, dsn: str) -> None:
    """It may have an app of its own, which they must not share."""
    (tmp_path / "go").touch()
    arguments = [*RUN[1:], "--input", f"folder={tmp_path}"]
    program = (
        "import os, sys; from queue_workflows import __main__;"
        "os.register_at_fork(before=lambda: print('forks', flush=True));"
        f"sys.exit(__main__.main({arguments!r}))"
    )
    env = {**os.environ, "QUEUE_WORKFLOWS_DB_URL": dsn}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "completed in" in done.stdout
    assert "forks" not in done.stdout
