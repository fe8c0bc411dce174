"""`queue-workflows up` with real processes and real signals."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import psycopg

from queue_workflows import config, db, jobs, node_queue, run_store, schedules
from tests.support import commands, toy_app
from tests.support.commands import TOYHOST, Command, Commands
from tests.support.wait import patience, until

UP = ("queue-workflows", "up", "--app", TOYHOST)
SMALL = (*UP, "--cpu", "2", "--gpu", "0", "--no-ingest")


def queued(workflow: str, folder: Path, **more: object) -> str:
    context = {"folder": str(folder)}
    return run_store.insert_run(workflow_name=workflow, context=context, **more)["id"]  # type: ignore[arg-type]


def status(run_id: str) -> str:
    run = run_store.get_run(run_id)
    assert run
    return run["status"]


def stopped(up: Command) -> None:
    """Ctrl-C ends it with 0 and leaves no process."""
    up.send(signal.SIGINT)
    assert up.wait() == 0, up.err
    until(lambda: not up.family())


def test_all_roles_run_and_ctrl_c_leaves_no_process(cli: Commands, tmp_path: Path) -> None:
    up = cli.start(*UP, "--cpu", "1")
    run_id = queued("full", tmp_path)
    until(lambda: toy_app.pids(tmp_path, "predict"), timeout_s=30)
    config.register_ingest_task("note", toy_app.note)
    config.configure(ingest_queues={"notes"})
    job_id = jobs.enqueue(task_name="note", queue="notes", args={"folder": str(tmp_path)})
    until(lambda: (node_queue.get_ingest_job(job_id) or {})["status"] == "completed")
    for part in ("orchestrator --with-scheduler", "--queue cpu", "--queue gpu", '"notes"'):
        assert len(up.pids(part)) == 1, part
    assert up.pids("--queue cpu") == up.pids('"notes"'), "one worker has both queues"
    assert status(run_id) == "running"
    assert "starting orchestrator, 1 cpu, 1 gpu, 1 notes, scheduler" in up.err
    stopped(up)


def test_a_killed_workers_job_runs_elsewhere_within_seconds(cli: Commands, tmp_path: Path) -> None:
    up = cli.start(*SMALL)
    run_id = queued("hold", tmp_path)
    first = until(lambda: toy_app.pids(tmp_path, "hold"), timeout_s=30)[0]
    killed_at = time.monotonic()
    os.kill(first, signal.SIGKILL)
    until(lambda: len(toy_app.pids(tmp_path, "hold")) == 2)
    until(lambda: status(run_id) == "completed")
    assert time.monotonic() - killed_at < patience(5)
    job = next(j for j in node_queue.list_jobs_for_run(run_id) if j["node_id"] == "work/hold")
    assert (job["crash_count"], job["claim_no"]) == (1, 2)
    assert len(up.pids("--queue cpu")) == 1, "one worker with two slots"
    stopped(up)


def test_a_worker_that_a_signal_ends_is_charged_to_its_job_and_replaced(
    cli: Commands, tmp_path: Path
) -> None:
    up = cli.start(*SMALL)
    run_id = queued("hold", tmp_path)
    until(lambda: toy_app.pids(tmp_path, "hold"), timeout_s=30)
    (worker,) = up.pids("--queue cpu")
    os.kill(worker, signal.SIGKILL)
    until(lambda: len(toy_app.pids(tmp_path, "hold")) == 2)
    until(lambda: status(run_id) == "completed")
    job = next(j for j in node_queue.list_jobs_for_run(run_id) if j["node_id"] == "work/hold")
    assert (job["crash_count"], job["claim_no"]) == (1, 2)
    assert f"pid {worker} ended after" in up.err
    assert worker not in up.pids("--queue cpu")
    stopped(up)


def test_a_killed_ingest_workers_job_runs_again(cli: Commands, tmp_path: Path) -> None:
    config.register_ingest_task("note", toy_app.note)
    config.configure(ingest_queues={"notes"})
    args = {"folder": str(tmp_path), "wait": True}
    job_id = jobs.enqueue(task_name="note", queue="notes", args=args)
    up = cli.start("queue-workflows", "up", "--app", "tests.support.toy_app:ingest_only")
    first = until(lambda: toy_app.pids(tmp_path, "note"), timeout_s=30)[0]
    assert up.pids("--queue cpu") == [], "an app without nodes has no node workers"
    os.kill(first, signal.SIGKILL)
    (tmp_path / "go").touch()
    until(lambda: (node_queue.get_ingest_job(job_id) or {})["status"] == "completed")
    assert (node_queue.get_ingest_job(job_id) or {})["crash_count"] == 1
    stopped(up)


OURS = "application_name = 'queue_workflows' AND datname = current_database()"


def test_at_rest_it_has_few_processes_and_connections(cli: Commands, conn: Any) -> None:
    """One process dispatches and schedules, another has all queues, and no executor waits."""

    def count(table: str, condition: str) -> int:
        found = conn.execute(f"SELECT count(*) AS n FROM {table} WHERE {condition}").fetchone()
        return next(iter(found.values() if isinstance(found, dict) else found))

    before = count("pg_stat_activity", OURS)
    up = cli.start(*UP, "--cpu", "4", "--gpu", "0")
    until(lambda: "works on" in up.err and "dispatches on" in up.err, timeout_s=30)
    until(lambda: "following 1 schedule entries" in up.err, timeout_s=30)
    # `up`, its two children, and the launcher; a tool that one of them asks ends soon.
    until(lambda: len(up.family()) == 4)
    # One too many may be left from the start; it goes after a minute.
    assert count("pg_stat_activity", OURS) - before <= 7
    config.register_ingest_task("note", toy_app.note)
    config.configure(ingest_queues={"notes"})
    schedules.add("late", every="1s", task_name="note", queue="notes", conn=conn)
    # It is told of the row: it reads the table by itself every 30 s.
    until(lambda: count("ingest_jobs", "queue = 'notes'"), timeout_s=20)
    stopped(up)


STUBBORN = ("queue-workflows", "up", "--app", "tests.support.hanging_app:setup", "--cpu", "0")
POOL = '[{"queue": "work", "concurrency": 3}, {"queue": "more"}]'


def test_a_pool_is_one_of_the_processes_and_hands_back_at_once(
    cli: Commands, tmp_path: Path
) -> None:
    config.register_ingest_task("lingers_once", print)
    config.configure(ingest_queues={"work", "more"})
    ids: list[str] = []
    for queue in ("work", "work", "more"):
        folder = tmp_path / str(len(ids))
        folder.mkdir()
        args = {"folder": str(folder)}
        ids.append(jobs.enqueue(task_name="lingers_once", queue=queue, args=args))
    up = cli.start(*STUBBORN, WORKERS_JSON=POOL)
    until(lambda: len([*tmp_path.glob("*/started")]) == 3, timeout_s=30)
    (pid,) = up.pids("--workers")
    assert len({path.read_text() for path in tmp_path.glob("*/started")}) == 3
    assert "starting orchestrator, 3 work, 1 more, scheduler; Ctrl-C" in up.err
    assert len(up.pids("claim_worker")) == 1, "none beside the pool"
    listed = json.loads(cli.run("queue-workflows", "workers", "--json").out)
    assert {(row["queue"], row["pid"], row["state"]) for row in listed} == {
        ("work", pid, "busy"), ("more", pid, "busy"),
    }  # fmt: skip
    os.kill(pid, signal.SIGKILL)
    killed_at = time.monotonic()

    def column(name: str) -> set[object]:
        return {(node_queue.get_ingest_job(each) or {})[name] for each in ids}

    until(lambda: 1 not in column("claim_no"))
    assert time.monotonic() - killed_at < patience(10), "not by its lease of ten minutes"
    until(lambda: column("status") == {"completed"}, timeout_s=30)
    assert column("crash_count") == {1}
    stopped(up)


def test_a_pool_that_cannot_be_is_refused_before_anything_starts(cli: Commands) -> None:
    refused = [
        (["--workers", '[{"queue": "work", "concurrency": 0}]'], "workers[0]: concurrency 0"),
        (["--workers", POOL, "--no-ingest"], "--no-ingest excludes --workers"),
    ]
    for options, said in refused:
        assert said in commands.refused(cli.run(*STUBBORN, *options))
    said = commands.refused(cli.run(*STUBBORN, WORKERS_JSON='[{"queue": "work"}, 5]'))
    assert "WORKERS_JSON[1]: 5 is not an object" in said


def test_a_killed_orchestrator_comes_back(cli: Commands, tmp_path: Path) -> None:
    up = cli.start(*SMALL)
    first = until(lambda: up.pids("queue_workflows.orchestrator"), timeout_s=30)[0]
    until(lambda: "dispatches" in up.err, timeout_s=30)
    os.kill(first, signal.SIGKILL)
    run_id = queued("chain", tmp_path)
    until(lambda: status(run_id) == "completed")
    assert up.pids("queue_workflows.orchestrator") != [first]
    stopped(up)


def test_two_on_one_database_share_the_work_and_one_may_go(cli: Commands, tmp_path: Path) -> None:
    one, two = cli.start(*SMALL), cli.start(*SMALL)
    until(lambda: all("works on" in up.err for up in (one, two)), timeout_s=30)
    runs = [queued("chain", tmp_path) for _ in range(5)]
    stopped(one)
    runs += [queued("chain", tmp_path) for _ in range(5)]
    until(lambda: all(status(run_id) == "completed" for run_id in runs))
    assert len(toy_app.pids(tmp_path, "quick")) == 20, "every node once"
    stopped(two)


def test_runs_of_another_app_are_reported_before_they_fail(cli: Commands) -> None:
    run_id = run_store.insert_run(workflow_name="theirs")["id"]
    up = cli.start(*SMALL)
    until(lambda: "starting orchestrator" in up.err, timeout_s=30)
    warning = next(line for line in up.err.splitlines() if "WARNING" in line)
    assert f"does not know (1 run of 'theirs': {run_id})" in warning
    stopped(up)


def test_a_database_that_is_away_is_waited_for(
    cli: Commands, dsn: str, db: ModuleType, tmp_path: Path
) -> None:
    name = "queue_workflows_late_test"
    away = urlsplit(dsn)._replace(path=f"/{name}").geturl()
    up = cli.start(*SMALL, QUEUE_WORKFLOWS_DB_URL=away)
    until(lambda: "does not answer, waiting for it" in up.err)
    assert "starting" not in up.err
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}")
        try:
            until(lambda: "works on" in up.err, timeout_s=30)
            stopped(up)
        finally:
            up.close()
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


def test_ctrl_c_ends_the_wait_for_a_database(cli: Commands) -> None:
    up = cli.start(*SMALL, QUEUE_WORKFLOWS_DB_URL="postgresql://127.0.0.1:1/none")
    until(lambda: "does not answer, waiting for it" in up.err)
    stopped(up)


def test_a_schedule_that_is_added_while_an_app_without_any_runs_fires(
    cli: Commands, tmp_path: Path
) -> None:
    app = tmp_path / "plain.py"
    app.write_text(
        "import queue_workflows\n"
        "queue_workflows.configure(ingest_queues={'notes'})\n"
        "queue_workflows.register_ingest_task('note', lambda: None)\n"
    )
    up = cli.start("queue-workflows", "up", "--app", "plain", PYTHONPATH=str(tmp_path))
    until(lambda: "the schedule is empty" in up.err, timeout_s=60)
    with db.connect() as conn:
        conn.execute(
            "INSERT INTO schedules (name, expression, task_name, queue)"
            " VALUES ('s', 'every 1s', 'note', 'notes')"
        )
    until(lambda: any(job["status"] == "completed" for job in jobs.list()), timeout_s=30)
    stopped(up)


EDITED = """
from queue_workflows.declare import node, workflow

@node
def greet(name: str) -> str:
    return name

@workflow
def hello(name: str) -> None:
    greet(name)
"""


def test_a_run_says_that_up_on_a_server_of_your_own_serves_older_code(
    cli: Commands, tmp_path: Path
) -> None:
    app = tmp_path / "edited_later.py"
    app.write_text(EDITED)
    up = cli.start("queue-workflows", "up", "--app", "edited_later", "--gpu", "0", cwd=tmp_path)
    until(lambda: "starting orchestrator" in up.err, timeout_s=30)
    argv = ("queue-workflows", "run", "hello", "--app", "edited_later", "--input", "name=x")
    for edited in (False, True):
        if edited:
            app.write_text(EDITED + "# edited\n")
        done = cli.run(*argv, cwd=tmp_path, timeout_s=60)
        assert done.process.returncode == 0, done.err
        assert ("older code" in done.err) == edited
    assert f"`queue-workflows up` of edited_later with pid {up.process.pid} runs" in done.err
    stopped(up)
    assert "older code" not in cli.run(*argv, "--no-wait", cwd=tmp_path, timeout_s=60).err
