"""Messages of commands that would do harm or that find nothing to do, run in this process."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from queue_workflows import config, db, queues, run_store, runs, workers
from tests.support import console, constants, factories, tabled, transitions
from tests.support.commands import TOYHOST
from tests.support.wait import until

RUN = ("run", "chain", "--app", TOYHOST, "--input", "folder=/tmp")


def invoke(*argv: str) -> console.Done:
    config.reset_for_tests()
    return console.command(*argv)


def test_run_refuses_a_database_with_unfinished_runs_of_another_app(db: ModuleType) -> None:
    theirs = run_store.insert_run(workflow_name="slow", status="running")["id"]
    said = invoke(*RUN)
    assert said.code == 2
    line = said.err.splitlines()[-1]
    for part in (f"1 run of 'slow': {theirs}", "`queue-workflows cancel RUN`", "--no-up"):
        assert part in line
    for variable in ("QUEUE_WORKFLOWS_DB_URL", "--db NAME"):
        assert variable in line
    assert [run["id"] for run in runs.list()] == [theirs]
    assert "starting" not in said.err
    assert invoke(*RUN, "--no-wait").code == 0, "it starts no process that could harm them"


def test_a_status_that_no_run_has_is_refused(db: ModuleType) -> None:
    said = invoke("runs", "--status", "bogus")
    assert said.code == 2
    assert "cancelled, completed, failed, queued, running" in said.err
    run_store.insert_run(workflow_name="w", status="drafted")
    assert "drafted" in invoke("runs", "--status", "bogus").err
    assert len(json.loads(invoke("runs", "--status", "drafted", "--json").out)) == 1
    assert invoke("runs", "--status", "failed").code == 0


def test_runs_are_listed_by_what_they_have(conn: db.Connection) -> None:
    for number in range(3):
        columns: dict[str, Any] = {"workflow_name": f"w{number}", "context": {"n": number}}
        if number == 1:
            columns |= {"status": "failed", "error": "ValueError: no price"}
        factories.run(
            conn, id=f"r{number}", created_at=f"2026-01-0{number + 1} 00:00+00", **columns
        )
    cases = {
        ("--workflow", "w2"): ["r2"],
        ("--since", "2026-01-02T00:00Z"): ["r2", "r1"],
        ("--until", "2026-01-02T01:00+01:00"): ["r1", "r0"],
        ("--text", "price"): ["r1"],
        ("--text", "r2"): ["r2"],
        ("--input", "n=2"): ["r2"],
        ("--input", '{"n": 0}'): ["r0"],
        ("--input", "n=1", "--input", "n=2"): ["r2"],
        ("--status", "failed", "--text", "none"): [],
        ("--since", "1d"): [],
        (): ["r2", "r1", "r0"],
    }
    for options, wanted in cases.items():
        with tabled.case(options):
            assert [row["id"] for row in console.reply("runs", *options)] == wanted
    wrong = {
        ("--since", "yesterday"): "--since yesterday should look like 90m",
        ("--until", "2026-01-02"): "--until 2026-01-02 should look like 90m",
        ("--input", "n"): "--input 'n' should be key=value",
        ("--input", "{n}"): "a JSON object",
        ("--since", "999999d"): "since",
    }
    for options, text in wrong.items():
        with tabled.case(options):
            assert text in console.refusal("runs", *options)


def test_a_search_for_runs_says_how_far_it_went(
    conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants.put(monkeypatch, "runs.EXAMINED", 2)
    for number in range(25):
        error = "rare" if number in (1, 20) else None
        factories.run(conn, id=f"r{number:02}", created_at=_minute(number), error=error)
    done = invoke("runs", "--text", "rare", "--json")
    assert (done.code, [row["id"] for row in json.loads(done.out)]) == (0, ["r20"])
    assert done.err == (
        "queue-workflows runs: searched 20 runs, back to 2026-01-01 00:05:00 UTC;"
        " `--until 2026-01-01T00:05:00+00:00` searches earlier ones\n"
    )
    done = invoke("runs", "--text", "rare", "--until", "2026-01-01T00:05:00+00:00", "--json")
    assert ([row["id"] for row in json.loads(done.out)], done.err) == (["r01"], "")
    assert invoke("runs", "--text", "rare", "--limit", "1").err == ""


def _minute(number: int) -> str:
    return f"2026-01-01 00:{number:02}:00+00"


def test_the_demo_refuses_a_folder_without_texts(db: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "program.py").touch()
    (tmp_path / "folder.txt").mkdir()
    said = invoke("demo", str(tmp_path), "--yes", "--out", str(tmp_path / "out"))
    assert said.code == 2
    assert f"{tmp_path} has no .txt or .md file" in said.err
    assert not (tmp_path / "out").exists()


def test_status_shows_the_switches_that_are_off(db: ModuleType) -> None:
    workers.disable("box 2", "cpu", by="ops")
    workers.enable("box", "gpu")
    assert (
        "box 2 cpu is switched off by ops:"
        " `queue-worker-control --queue=cpu --on --host 'box 2'` turns it on\n"
    ) in (text := invoke("status").out)
    assert text.count("switched off") == 1
    found: list[dict[str, Any]] = json.loads(invoke("status", "--json").out)["switched_off"]
    assert [(row["host_label"], row["queue"]) for row in found] == [("box 2", "cpu")]


def test_where_there_is_no_server_the_way_to_one_names_the_app(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_EMBEDDED_DIR", str(tmp_path / "pg"))
    assert "`queue-workflows up --app MODULE[:CALLABLE]`" in invoke("status").err


def test_show_says_why_a_job_went_back_to_its_queue(conn: db.Connection) -> None:
    factories.ingest(conn)
    factories.node(conn)
    for job in (transitions.claim_ingest(conn), transitions.claim_node(conn)):
        transitions.hand_back(conn, job, "turned off")
        assert ", queued again: turned off" in console.printed("show", job["id"], "--full")


def test_jobs_show_shows_a_job_whose_id_a_run_has_too(conn: db.Connection) -> None:
    factories.run(conn, id="both")
    factories.ingest(conn, id="both", task_name="the job")
    assert json.loads(invoke("jobs", "show", "both", "--json").out)["task_name"] == "the job"
    assert json.loads(invoke("show", "both", "--json").out)["id"] == "both"


@pytest.mark.parametrize(
    "argv", [("why", "nothing"), ("jobs", "show", "nothing"), ("samples", "--job", "nothing")]
)
def test_an_unknown_id_is_reported_under_the_name_of_the_command(
    db: ModuleType, argv: tuple[str, ...]
) -> None:
    said = invoke(*argv)
    name = " ".join(argv[: 1 + (argv[0] == "jobs")])
    line = f"queue-workflows {name}: there is no run or job 'nothing'\n"
    assert (said.code, said.out, said.err) == (1, "", line)


def test_a_command_that_is_named_takes_the_id_as_one_word(conn: db.Connection) -> None:
    run_id = "nightly; true"
    factories.run(conn, id=run_id)
    for argv in (
        ("show", run_id, "--steps"), ("retry", run_id, "--from-step", "s"),
        ("samples", "--job", run_id),
    ):  # fmt: skip
        assert "`queue-workflows show 'nightly; true'" in console.refusal(*argv), argv


def test_inputs_of_a_run_that_is_not_there_are_none_of_a_run_that_waits_for_nobody(
    db: ModuleType,
) -> None:
    said = invoke("inputs", "nothing")
    assert (said.code, said.out) == (1, "")
    assert said.err == "queue-workflows inputs: there is no run 'nothing'\n"
    theirs = run_store.insert_run(workflow_name="slow")["id"]
    assert invoke("inputs", theirs)[:2] == (0, f"run {theirs} waits for no person\n")
    assert invoke("inputs", theirs, "--json")[:2] == (0, "[]\n")


def test_status_prints_how_to_resume_a_paused_queue(db: ModuleType) -> None:
    queues.pause("cpu", by="ops")
    queues.pause("load", partition="a b")
    lines = invoke("status").out.splitlines()
    assert "queue cpu is paused by ops: `queue-workflows queues resume cpu` resumes it" in lines
    again = "`queue-workflows queues resume load --partition 'a b'` resumes it"
    assert f"queue load, partition a b is paused: {again}" in lines


def test_run_reports_that_its_queue_is_paused(db: ModuleType) -> None:
    def cancel() -> None:
        (run,) = until(runs.list)
        runs.cancel(run["id"])

    queues.pause("cpu")
    ending = threading.Thread(target=cancel)
    ending.start()
    said = invoke(*RUN, "--no-up")
    ending.join()
    note = "queue cpu is paused: `queue-workflows queues resume cpu` resumes it"
    assert f"queue-workflows: {note}\n" in said.err


def test_an_unknown_action_is_reported_in_plain_words(db: ModuleType) -> None:
    said = invoke("queues", "paus", "load")
    assert said.code == 2
    assert said.err.splitlines()[-1] == (
        "queue-workflows queues: 'paus' is none of list, pause, resume, limit"
        "; did you mean 'pause'?"
    )
    assert invoke("models", "drop").err.splitlines()[-1] == (
        "queue-workflows models: 'drop' is none of list, load, unload"
    )
    said = invoke("statsu", "--json")
    assert (said.code, said.out) == (2, "")
    assert said.err == "queue-workflows: there is no command 'statsu'; did you mean 'status'?\n"
    for argv, known in (
        (("check", "w", "--format", "tre"), "tree, json, mermaid; did you mean 'tree'?"),
        (("jobs", "list", "--status", "waiting"), "queued, running, completed, failed, cancelled"),
        (("up", "--log-level", "loud"), "debug, info, warning, error"),
        (("doctor", "--for", "reed"), "work, migrate, submit, read; did you mean 'read'?"),
    ):
        said = invoke(*argv)
        assert (said.code, said.err.count("\n")) == (2, 1)
        assert said.err.endswith(f": {argv[-2]} {argv[-1]!r} is none of {known}\n")
    said = invoke("jobs", "list", "--limit")
    reason = "queue-workflows jobs list: Option '--limit' requires an argument\n"
    assert (said.code, said.err) == (2, reason)
    lists = "`queue-workflows --help` lists them"
    assert invoke("zzz").err == f"queue-workflows: there is no command 'zzz'; {lists}\n"


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (("show",), " show: it needs the RUN|JOB: show RUN|JOB"),
        (("status", "--jsno"), " status: --jsno is no option; did you mean '--json'?"),
        (("show", "--zz"), " show: --zz is no option; `queue-workflows show --help` lists them"),
        (("runs", "--limit"), " runs: Option '--limit' requires an argument"),
        (("jobs", "--limit", "3"), " jobs: --limit is an option of list"),
        (("--jsn",), ": there is no command '--jsn'; `queue-workflows --help` lists them"),
    ],
)
def test_wrong_arguments_of_any_command_are_refused_in_one_line(
    argv: tuple[str, ...], reason: str
) -> None:
    assert console.refusal(*argv) == f"queue-workflows{reason}\n"


@pytest.mark.parametrize("argv", [("runs", "--limit", "many"), ("status", "now")])
def test_a_value_that_a_command_does_not_take_is_named(argv: tuple[str, ...]) -> None:
    said = console.refusal(*argv)
    assert said.startswith(f"queue-workflows {argv[0]}: ")
    assert argv[-1] in said


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
def test_a_number_that_is_not_finite_is_refused(db: ModuleType, value: str) -> None:
    for argv in (
        ("health", "--within"), ("connect", "--timeout"),
        ("supervise", "--bounce", "cpu=true", "--every"),
        ("schedules", "add", "s", "every 1h", "--task", "t", "--jitter-s"),
    ):  # fmt: skip
        said = invoke(*argv, value)
        assert (said.code, said.out) == (2, "")
        assert argv[-1] in said.err.splitlines()[-1]
        assert "Traceback" not in said.err


@pytest.mark.parametrize(("option", "example"), [("--bounce", "COMMAND"), ("--unit", "NAME")])
def test_supervise_shows_what_its_option_takes(option: str, example: str) -> None:
    said = invoke("supervise", option, "cpu=")
    assert said.code == 2
    assert said.err.endswith(f"{option} 'cpu=' should look like cpu={example}\n")
