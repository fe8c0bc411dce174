"""`queue-workflows show`: what it prints, by which ids, and how it follows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest

from queue_workflows import db, history, node_queue, run_store
from queue_workflows.__main__ import main
from tests.support import console, factories, flow, transitions
from tests.support.commands import ROOT, Command, Commands, script
from tests.support.flow import Flow
from tests.support.proxy import Proxy
from tests.support.wait import until

QW = "queue-workflows"


def show(*argv: str) -> console.Done:
    """Run `show` in this process, which takes a tenth of the time of a new one."""
    return console.command("show", *argv)


def broken_run(toy: Flow) -> str:
    """A run of which s/a is completed, s/b failed and s/c never came."""

    def broken(word: str) -> None:
        raise ValueError(f"no \x1b[31m{word}")

    flow.body(broken, name="broken")
    inputs = [{"name": "word", "from": "pipeline.word"}]
    bad = {"id": "b", "node": "broken", "depends_on": ["a"], "inputs": inputs}
    toy.define(
        flow.step("s", inputs={"word": {"$from": "word"}}),
        s=[*flow.nodes(a="", c="b"), bad],
    )
    run_id = toy.started(context={"word": "luck"})
    toy.go()
    return run_id


def test_a_failed_run_is_shown_node_by_node(toy: Flow) -> None:
    run_id = broken_run(toy)
    job_id = flow.job(run_id, "s/b")["id"]
    done = show(run_id)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].startswith(f"run {run_id} (w): failed, 1/3 nodes, ")
    assert "s/a: completed" in lines
    assert "s/c (after s/b): waiting" in lines
    assert "s/b (after s/a): failed" in lines
    assert f"  job {job_id}, module broken" in lines
    assert '  inputs: {"word": "luck"}' in lines
    assert "  traceback (all of it: --full):" in lines
    assert '        raise ValueError(f"no \\x1b[31m{word}")' in lines
    (tried,) = (line for line in lines if line.startswith("  attempt 1: ") and "ValueError" in line)
    assert " box pid " in tried
    assert ", waited " in tried
    assert tried.endswith(r" s, failed: ValueError: no \x1b[31mluck")
    assert "\x1b" not in done.out


def test_json_has_what_the_text_has_with_iso_times(toy: Flow) -> None:
    run_id = broken_run(toy)
    found = json.loads(show(run_id, "--json").out)
    assert (found["kind"], found["id"], found["status"]) == ("run", run_id, "failed")
    assert found["counts"] == {"completed": 1, "failed": 1, "waiting": 1}
    by_id = {node["node_id"]: node for node in found["nodes"]}
    assert by_id["s/b"]["inputs"] == {"word": "luck"}
    assert by_id["s/b"]["attempts"][0]["claimed_at"].endswith("+00:00")
    assert by_id["s/c"]["attempts"] == []
    one = json.loads(show(by_id["s/b"]["id"], "--json").out)
    assert one == by_id["s/b"]


def test_a_chosen_node_is_shown_in_detail(toy: Flow) -> None:
    run_id = broken_run(toy)
    done = show(run_id, "--node", "s/a")
    assert not [line for line in done.out.splitlines() if line.startswith("s/b")]
    assert f"job {flow.job(run_id, 's/a')['id']}, module ok" in done.out
    refused = show(run_id, "--node", "s/x")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == f"queue-workflows show: run {run_id} has no --node s/x\n"


def test_a_large_run_shows_what_failed_and_the_rest_as_numbers(toy: Flow) -> None:
    with db.connect() as conn:
        run_id = factories.run(conn)
        for n in range(70):
            state = {"status": "failed", "error": "no"} if n == 69 else {"status": "completed"}
            factories.node(conn, run_id, f"s/n{n}", **state)
    lines = show(run_id).out.splitlines()
    assert "nodes: 69 completed, 1 failed" in lines
    assert "s/n69: failed: no" in lines
    assert lines[-1] == "and 69 nodes more: --node NODE, --full or --json"
    assert "s/n0: completed" in show(run_id, "--full").out


def logged_run(conn: db.Connection, *, nodes: int, failed: int) -> str:
    """A run whose nodes each stored a log, `n of s/nN`, and of which the last ones failed."""
    run_id = factories.run(conn)
    for n in range(nodes):
        job = factories.node(conn, run_id, f"s/n{n}")
        held = transitions.claim_node(conn)
        assert held["id"] == job["id"]
        transitions.write_log(conn, held, f"n of s/n{n}\nrest")
        if n < nodes - failed:
            transitions.complete_node(conn, held)
        else:
            transitions.fail(conn, held, "no")
    conn.execute(
        "UPDATE workflow_runs SET status = %s, finished_at = now() WHERE id = %s",
        ("failed" if failed else "completed", run_id),
    )
    return run_id


def rows_read(monkeypatch: pytest.MonkeyPatch, table: bytes) -> list[int]:
    """Return a list that gets how many rows each statement about a table reads."""
    seen: list[int] = []
    execute = psycopg.Cursor.execute

    def counted(self: psycopg.Cursor[Any], query: Any, *args: Any, **more: Any) -> Any:
        found = execute(self, query, *args, **more)
        if isinstance(query, bytes) and b"FROM " + table in query:
            seen.append(self.rowcount)
        return found

    monkeypatch.setattr(psycopg.Cursor, "execute", counted)
    return seen


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many logs each statement reads."""
    return rows_read(monkeypatch, b"job_attempt_logs")


def test_logs_are_read_of_what_is_printed_only_and_few_at_a_time(
    db: ModuleType, asked: list[int]
) -> None:
    with db.connect() as conn:
        run_id = logged_run(conn, nodes=70, failed=2)
    out = show(run_id).out
    assert [f"n of s/n{n}\n" in out for n in (0, 67, 68, 69)] == [False, False, True, True]
    assert sum(asked) == 2
    asked.clear()
    full = show(run_id, "--full").out
    assert all(f"n of s/n{n}\n" in full for n in range(70))
    assert (sum(asked), max(asked)) == (70, 20)
    asked.clear()
    out = show(run_id, "--follow", "--node", "s/n1").out
    assert (out.count("s/n1 | n of s/n1\n"), out.count("s/n1 | rest\n")) == (1, 1)
    assert out.count("n of") == 1
    assert max(asked) == 1


def test_json_of_a_large_run_has_every_log_with_full_only(db: ModuleType, asked: list[int]) -> None:
    with db.connect() as conn:
        run_id = logged_run(conn, nodes=61, failed=0)
    shown = json.loads(show(run_id, "--json").out)
    assert shown["logs_left_out"]
    assert sum(asked) == 0
    assert {node["attempts"][0]["log"] for node in shown["nodes"]} == {None}
    one = json.loads(show(run_id, "--json", "--node", "s/n7").out)
    assert one["nodes"][0]["attempts"][0]["log"]["text"] == "n of s/n7\nrest"
    every = json.loads(show(run_id, "--json", "--full").out)
    texts = {node["node_id"]: node["attempts"][0]["log"]["text"] for node in every["nodes"]}
    assert texts == {f"s/n{n}": f"n of s/n{n}\nrest" for n in range(61)}
    assert len(every["nodes"]) == 61
    assert not every["logs_left_out"]


def test_a_large_run_is_read_by_pages(toy: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.dag(a="")
    run_id = toy.started()
    with db.connect() as conn:
        factories.node(conn, run_id, "x/failed", status="failed", error="no")
        conn.execute(
            "INSERT INTO workflow_node_jobs (run_id, node_id, node_module, queue)"
            " SELECT %s, 'x/' || n, 'ok', 'cpu' FROM generate_series(1, 1000) n",
            (run_id,),
        )
    read = rows_read(monkeypatch, b"workflow_node_jobs")
    lines = show(run_id).out.splitlines()
    assert "x/failed: failed: no" in lines
    assert lines[-1] == "and 1001 nodes more: --node NODE, --full or --json"
    assert 0 < max(read) <= 61
    read.clear()
    everything = json.loads(show(run_id, "--json").out)
    names = [node["node_id"] for node in everything["nodes"]]
    assert len(names) == 1002
    assert {*names} == {"s/a", "x/failed", *(f"x/{n}" for n in range(1, 1001))}
    assert ([*everything][-1], everything["logs_left_out"]) == ("nodes", True)
    assert show(run_id, "--full").out.count("\nx/") == 1001
    assert 0 < max(read) <= 201


def test_an_ingest_job_is_shown(db: ModuleType) -> None:
    with db.connect() as conn:
        job = factories.ingest(conn, args={"n": 1})
        transitions.complete_ingest(conn, transitions.claim_ingest(conn), rows=3)
    lines = show(job["id"]).out.splitlines()
    assert lines[0] == f"ingest job {job['id']} (t): completed"
    assert '  inputs: {"n": 1}' in lines
    assert '  output: {"rows": 3}' in lines
    refused = show(job["id"], "--node", "x")
    assert (refused.code, "has no nodes of its own" in refused.err) == (2, True)


def test_the_start_of_an_id_will_do_when_only_one_has_it(db: ModuleType) -> None:
    ids = [f"{start}-1b2c-4d5e-8f60-0123456789ab" for start in ("ab000001", "ab000002", "cd000000")]
    for run_id in (*ids, "kind-1"):
        run_store.insert_run(run_id=run_id, workflow_name="w")
    assert show("c").out.startswith(f"run {ids[2]} (w): queued")
    assert show("ab000002-1b").out.startswith(f"run {ids[1]} (w): queued")
    several = show("ab")
    assert (several.code, several.out) == (2, "")
    assert several.err == (
        f"queue-workflows show: 'ab' is the start of several ids: run {ids[0]}, run {ids[1]}\n"
    )
    # No index orders an app's own ids by their prefixes.
    assert show("kind").code == 1
    assert show("kind-1").code == 0


@pytest.mark.parametrize("name", ["nope", "", "%", "\udcff"])
def test_an_unknown_id_exits_with_1(db: ModuleType, name: str) -> None:
    run_store.insert_run(workflow_name="w")
    done = show(name)
    assert (done.code, done.out) == (1, "")
    assert done.err == f"queue-workflows show: there is no run or job {name!r}\n"


def test_no_line_is_wider_than_a_narrow_terminal(
    toy: Flow, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = broken_run(toy)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "30")
    assert main(["show", run_id]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 30
    assert any(line.startswith("  attempt 1: ") for line in lines)


def test_a_reader_that_goes_away_is_no_error(cli: Commands) -> None:
    run_id = run_store.insert_run(workflow_name="w")["id"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [script(QW), "show", run_id], env={**os.environ, **cli.env}, stdout=writer,
        stderr=subprocess.PIPE, text=True, timeout=30, check=False,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_without_an_id_or_with_a_wrong_option_it_is_a_usage_error() -> None:
    for argv in ((), ("x", "--nope")):
        done = show(*argv)
        assert (done.code, "Traceback" in done.err) == (2, False)


# --- follow


def test_follow_of_a_finished_run_exits_with_its_code(toy: Flow) -> None:
    run_id = broken_run(toy)
    assert show(run_id, "--follow").code == 1
    toy.dag(a="")
    good = toy.started()
    toy.work()
    toy.look()
    assert show(good, "--follow").code == 0
    assert json.loads(show(good, "--follow", "--json").out)["status"] == "completed"
    assert show(flow.job(run_id, "s/b")["id"], "--follow").code == 1
    assert show(flow.job(run_id, "s/a")["id"], "--follow").code == 0


HOST = """
import time
from pathlib import Path

import queue_workflows

NODES = [{"id": "talk", "node": "talk", "inputs": [{"name": "folder", "from": "pipeline.folder"}]}]
GIVEN = {"folder": {"$from": "folder"}}
STEPS = [{"id": "s", "kind": "pipeline", "pipeline": "p", "inputs": GIVEN}]


def talk(folder, cancel_event):
    print("begun", flush=True)
    while not (Path(folder) / "go").exists() and not cancel_event.wait(0.02):
        pass
    print("over \\x1b[31m")
    if (Path(folder) / "fail").exists():
        raise ValueError("told to")
    return {"said": 2}


def note(reason, args):
    talk(args["folder"], __import__("threading").Event())


def setup():
    queue_workflows.register_node("talk", talk)
    queue_workflows.register_ingest_task("note", note)
    queue_workflows.set_workflow_provider(
        lambda name: {"name": name, "steps": STEPS}, lambda name: {"name": name, "nodes": NODES}
    )
"""


class Host:
    """The toy of this file, its processes, and the folder in which its handlers wait for `go`."""

    def __init__(self, cli: Commands, folder: Path) -> None:
        self.cli, self.folder = cli, folder
        (folder / "showhost.py").write_text(HOST)
        cli.env["PYTHONPATH"] = f"{folder}{os.pathsep}{ROOT}"

    def start(self, *argv: str) -> Command:
        return self.cli.start(*argv, "--app", "showhost:setup")

    def queued(self) -> str:
        return run_store.insert_run(workflow_name="w", context={"folder": str(self.folder)})["id"]

    def follow(self, *argv: str) -> Command:
        return self.cli.start(QW, "show", *argv, "--follow")


@pytest.fixture
def host(cli: Commands, tmp_path: Path) -> Host:
    return Host(cli, tmp_path)


@pytest.mark.parametrize("fails", [False, True])
def test_follow_shows_the_log_while_it_grows(host: Host, fails: bool) -> None:
    if fails:
        (host.folder / "fail").touch()
    run_id = host.queued()
    following = host.follow(run_id)
    host.start("queue-orchestrator")
    host.start("queue-claim-worker", "--queue", "cpu")
    until(lambda: "s/talk | begun\n" in following.out, timeout_s=40)
    assert "s: running" in following.out
    (host.folder / "go").touch()
    assert following.wait() == int(fails)
    assert "s/talk | over \\x1b[31m\n" in following.out
    assert following.out.count("| begun") == 1
    assert ("raise ValueError" in following.err) is fails
    assert f"run {run_id} (w): {'failed' if fails else 'completed'} in " in following.out


def test_follow_of_an_ingest_job(host: Host) -> None:
    job = {"task_name": "note", "queue": "fetch", "args": {"folder": str(host.folder)}}
    with db.connect() as conn:
        job_id = factories.ingest(conn, **job)["id"]
    following = host.follow(job_id)
    until(lambda: f"{job_id} (note): queued\n" in following.out, timeout_s=40)
    host.start("queue-claim-worker", "--queue", "fetch")
    until(lambda: "attempt 1 | begun\n" in following.out, timeout_s=40)
    (host.folder / "go").touch()
    assert following.wait() == 0
    lines = following.out.splitlines()
    assert lines[-2:] == [
        f"ingest job {job_id} (note): completed",
        '  output: {"result": null}',
    ]
    assert [line.split()[-1] for line in lines if line.startswith("attempt 1: ")][-1] == "s"
    assert r"attempt 1 | over \x1b[31m" in lines


def test_a_follower_that_is_stopped_leaves_the_run(host: Host) -> None:
    run_id = host.queued()
    following = host.follow(run_id)
    until(lambda: f"run {run_id} (w): queued" in following.out, timeout_s=40)
    following.send(signal.SIGINT)
    assert following.wait() == 130
    assert following.err == (
        "queue-workflows: stopping the view; the run continues\n"
        f"queue-workflows: stopped the view of run {run_id}, which continues: `queue-workflows show"
        f" {run_id} --follow` shows it again, `queue-workflows cancel {run_id}` ends it\n"
    )
    assert "Traceback" not in following.err
    assert flow.status(run_id) == "queued"


def test_a_follower_of_a_job_can_be_stopped_while_the_database_is_away(
    cli: Commands, dsn: str
) -> None:
    with db.connect() as conn:
        job_id = factories.ingest(conn)["id"]
    with Proxy(dsn) as wire:
        env = {"QUEUE_WORKFLOWS_DB_URL": wire.dsn}
        following = cli.start(QW, "show", job_id, "--follow", **env)
        until(lambda: "queued" in following.out, timeout_s=40)
        until(lambda: wire.connections == 2)  # it has read the job and its stream
    until(lambda: "waiting for the database: " in following.err, timeout_s=15)
    following.send(signal.SIGINT)
    assert following.wait() == 130
    assert f"stopped the view of ingest job {job_id}, which continues" in following.err


def test_a_follower_that_nobody_reads_leaves_the_job(host: Host) -> None:
    with db.connect() as conn:
        job_id = factories.ingest(conn)["id"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [script(QW), "show", job_id, "--follow"], env={**os.environ, **host.cli.env},
        stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    os.close(writer)
    assert done.returncode == 130
    assert f"stopped the view of ingest job {job_id}, which continues" in done.stderr


def test_a_killed_worker_leaves_what_was_stored_by_then(host: Host) -> None:
    run_id = host.queued()
    host.start("queue-orchestrator")
    worker = host.start("queue-claim-worker", "--queue", "cpu")

    def log() -> str | None:
        jobs = node_queue.list_jobs_for_run(run_id)
        found: Any = history.get_job(jobs[0]["id"]) if jobs else None
        return found and found["attempts"] and (found["attempts"][0]["log"] or {}).get("text")

    until(lambda: log() == "begun\n", timeout_s=40)
    worker.send(signal.SIGKILL)
    worker.wait()
    assert worker.out == "begun\n"  # its own stream has it too
    assert "    begun" in show(run_id).out.splitlines()
