"""`run` and `up` print output, questions and retries while handlers run; Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from types import ModuleType

import pytest

from queue_workflows import node_queue, run_store, runs
from tests.support import toy_app
from tests.support.commands import ROOT, TOYHOST, Command, Commands
from tests.support.wait import until

QW = "queue-workflows"
HOST = """
import itertools
from pathlib import Path

import queue_workflows

NODES = {
    name: [{"id": name, "node": name, "inputs": [{"name": "folder", "from": "pipeline.folder"}],
            "retries": 2, "backoff": 2}]
    for name in ("talk", "fail_once")
}


def talk(folder, cancel_event):
    print("begun")
    while not (Path(folder) / "go").exists() and not cancel_event.wait(0.02):
        pass


def fail_once(folder):
    if not (Path(folder) / "failed").exists():
        (Path(folder) / "failed").touch()
        raise ValueError("told to")


def setup():
    for body in (talk, fail_once):
        queue_workflows.register_node(body.__name__, body)
    queue_workflows.set_workflow_provider(
        lambda name: {"name": name, "steps": [{
            "id": "s", "kind": "pipeline", "pipeline": name,
            "inputs": {"folder": {"$from": "folder"}}}]},
        lambda name: {"name": name, "nodes": NODES[name]},
    )
"""
APP = ("--app", "whilehost:setup")
ONE = {"QUEUE_WORKFLOWS_WORKFLOW_CPU_WORKERS": "1"}


@pytest.fixture
def app(cli: Commands, tmp_path: Path) -> Commands:
    """Commands that find the app of this file."""
    (tmp_path / "whilehost.py").write_text(HOST)
    # As a user has it: what is printed to a pipe or a file is buffered unless somebody cares.
    cli.env |= {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PYTHONUNBUFFERED": ""}
    return cli


def folder_of(path: Path) -> tuple[str, str]:
    return "--input", f"folder={path}"


def served(cli: Commands, *app: str) -> Command:
    """An `up` of one worker that serves the database."""
    up = cli.start(QW, "up", *app, "--cpu", "1", "--gpu", "0", "--no-ingest")
    until(lambda: "works on" in up.err and "dispatches" in up.err, timeout_s=40)
    return up


def ended(process: Command) -> int:
    process.send(signal.SIGINT)
    return process.wait()


# --- prints


def test_run_shows_what_handlers_print_while_they_run(app: Commands, tmp_path: Path) -> None:
    run = app.start(QW, "run", "talk", *APP, *folder_of(tmp_path), **ONE)
    until(lambda: "begun" in run.err, timeout_s=40)
    assert run.process.poll() is None
    (tmp_path / "go").touch()
    assert run.wait() == 0, run.err
    assert run.err.count("begun") == 1


def test_up_and_a_run_that_it_serves_show_what_handlers_print(
    app: Commands, tmp_path: Path
) -> None:
    up = served(app, *APP)
    run = app.start(QW, "run", "talk", *APP, *folder_of(tmp_path))
    until(lambda: "begun\n" in up.out, timeout_s=40)
    until(lambda: "s/talk | begun\n" in run.err)
    assert run.process.poll() is None
    (tmp_path / "go").touch()
    assert run.wait() == 0, run.err
    assert run.err.count("begun") == 1
    assert ended(up) == 0


# --- questions


def test_run_and_up_name_the_command_that_answers(cli: Commands, tmp_path: Path) -> None:
    up = served(cli, "--app", TOYHOST)
    run = cli.start(QW, "run", "asking", "--app", TOYHOST, *folder_of(tmp_path))
    until(lambda: "ask waits for an answer" in run.err, timeout_s=40)
    run_id = runs.list()[0]["id"]
    named = f"`queue-workflows answer {run_id} ask VALUE`"
    until(lambda: f"ask waits for an answer; {named} answers it: Left or right?" in run.err)
    until(lambda: f"run {run_id} waits for an answer to node ask: {named}" in up.err)
    runs.answer(run_id, "ask", "l")
    assert run.wait() == 0
    assert ended(up) == 0


# --- attempts to come


def test_a_failed_attempt_shows_when_the_next_one_starts(app: Commands, tmp_path: Path) -> None:
    up = served(app, *APP)
    run = app.start(QW, "run", "fail_once", "--watch", *APP, *folder_of(tmp_path))
    again = r"attempt 1 of 3 failed, it runs again at (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) UTC"
    until(
        lambda: re.search(rf"s/fail_once: queued, {again}, ValueError: told to", run.out),
        timeout_s=40,
    )
    shown = app.run(QW, "show", runs.list()[0]["id"]).out
    logged = re.search(rf"s/fail_once \(\S+\): {again}", up.err)
    assert logged, up.err
    assert run.wait() == 0
    watched = re.search(again, run.out)
    assert watched
    assert watched[1] == logged[1]
    if "queued" in shown:
        assert f"it runs again at {logged[1]} UTC" in shown
    assert ended(up) == 0


# --- Ctrl-C


def test_ctrl_c_of_a_run_that_others_serve_stops_the_view_only(
    cli: Commands, db: ModuleType, tmp_path: Path
) -> None:
    up = served(cli, "--app", TOYHOST)
    # Without --no-up it starts an orchestrator of its own if the run waits for 2 s.
    hold = ("run", "hold", "--watch", "--no-up", "--app", TOYHOST)
    run = cli.start(QW, *hold, *folder_of(tmp_path))
    until(lambda: toy_app.pids(tmp_path, "hold"), timeout_s=40)
    until(lambda: "work: running" in run.out)
    assert ended(run) == 130
    run_id = runs.list()[0]["id"]
    assert "stopping the view; the run continues\n" in run.err
    assert f"stopped the view of run {run_id}, which continues: " in run.err
    assert f"`queue-workflows show {run_id} --follow` shows it again" in run.err
    (tmp_path / "go").touch()
    until(lambda: (run_store.get_run(run_id) or {})["status"] == "completed")
    job = next(j for j in node_queue.list_jobs_for_run(run_id) if j["node_id"] == "work/hold")
    assert job["claim_no"] == 1, "the worker was not disturbed"
    assert ended(up) == 0


def test_ctrl_c_of_a_run_with_workers_of_its_own_reports_that_they_stop(
    cli: Commands, tmp_path: Path
) -> None:
    run = cli.start(QW, "run", "hold", "--watch", "--app", TOYHOST, *folder_of(tmp_path), **ONE)
    until(lambda: toy_app.pids(tmp_path, "hold"), timeout_s=40)
    run.send(signal.SIGINT)
    until(lambda: "stopping; Ctrl-C once more hands running jobs back at once" in run.err)
    run.send(signal.SIGINT)
    assert run.wait(20) == 130, run.err
    run_id = runs.list()[0]["id"]
    assert "stopped the processes that this command started; left run" in run.err
    assert f"`queue-workflows cancel {run_id}` ends it" in run.err
