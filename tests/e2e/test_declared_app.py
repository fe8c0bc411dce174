"""An app that is declared in Python is checked, run and answered by its module's name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from queue_workflows import errors, node_queue, run_store, runs
from tests.support import typed_app
from tests.support.commands import Commands
from tests.support.wait import until

APP = """
from pathlib import Path
from typing import TypedDict

from queue_workflows import OFFERED, ask, node, pipeline, workflow


class Counted(TypedDict):
    words: int
    longest: str


@node
def count(text: str, least: int = 2) -> Counted:
    words = [word for word in text.split() if len(word) >= least]
    return {"words": len(words), "longest": max(words, key=len)}


@node
def write(words: int, name: str, out: Path = OFFERED) -> Path:
    (out / "answer.txt").write_text(f"{words} {name}\\n")
    return out / "answer.txt"


@node
def read(file: Path) -> str:
    return file.read_text()


@node
def never() -> None:
    raise RuntimeError("it was to be skipped")


@pipeline
def report(words: int, name: str) -> str:
    return read(write(words, name))


@workflow
def hello(text: str) -> str:
    counted = count(text)
    said = report(words=counted["words"], name=counted["longest"])
    never.options(skip_if=counted["words"] == 4)()
    count.options("again", after=[said])(text=said, least=1)
    return said


@workflow
def asking(text: str) -> None:
    write(words=ask("how-many", "turnout", int, turnout_options=[1, 2]), name=text)


@workflow
def wrong(text: str) -> None:
    count(words=text)
"""
FEW = {"QUEUE_WORKFLOWS_WORKFLOW_CPU_WORKERS": "1"}


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """What lets commands find the app."""
    (tmp_path / "declared_app.py").write_text(APP)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), **FEW}


def test_a_python_app_is_run_by_its_name(
    cli: Commands, env: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = cli.run(
        "queue-workflows", "run", "hello", "--app", "declared_app",
        "--input", "text=to be or not to bee", "--out", str(out), "--json", timeout_s=60, **env,
    )  # fmt: skip
    assert done.process.returncode == 1, done.err
    assert "it was to be skipped" in done.out + done.err
    done = cli.run(
        "queue-workflows", "run", "hello", "--app", "declared_app",
        "--input", "text=to not be", "--input", 'text="to be, or no"',
        "--out", str(out), "--json", timeout_s=60, **env,
    )  # fmt: skip
    assert done.process.returncode == 0, done.err
    run_id = json.loads(done.out)["id"]
    jobs = {job["node_id"]: job for job in node_queue.list_jobs_for_run(run_id)}
    assert json.loads(done.out)["output"] == {"result": "4 be,\n"}
    assert (out / "report" / "write" / "answer.txt").read_text() == "4 be,\n"
    shown = cli.run("queue-workflows", "show", run_id)
    assert r"output: 4 be,\n" in shown.out.splitlines()
    shown = cli.run("queue-workflows", "show", run_id, "--json")
    assert json.loads(shown.out)["output"] == {"result": "4 be,\n"}
    assert jobs["report/read"]["context_delta"] == {"result": "4 be,\n"}
    assert jobs["never/never"]["status"] == "skipped"
    assert jobs["again/count"]["context_delta"] == {"words": 2, "longest": "be,"}


def test_inputs_that_the_workflow_does_not_take_are_refused_before_anything_starts(
    cli: Commands, env: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "wrong.json").write_text('{"text": [1]}')
    for given, words in (
        ((), "'text' missing"),
        (("--input", "txet=a"), "'text' missing; 'txet' (did you mean 'text'?) unknown"),
        (("--input", f"@{tmp_path}/wrong.json"), "'text': str, not [1]"),
    ):
        done = cli.run("queue-workflows", "run", "hello", "--app", "declared_app", *given, **env)
        assert done.process.returncode == 2
        (line,) = done.err.splitlines()
        assert f"inputs of workflow 'hello': {words}" in line
        assert "--input KEY=VALUE" in line
    assert runs.list() == []
    done = cli.run(
        "queue-workflows", "run", "hello", "--app", "declared_app",
        "--no-wait", "--input", "text=123", **env,
    )  # fmt: skip
    assert done.process.returncode == 0, done.err
    row = run_store.get_run(done.out.strip())
    assert row is not None
    assert row["context"] == {"text": "123"}


def test_each_input_of_a_command_comes_back_as_its_type(cli: Commands, tmp_path: Path) -> None:
    given = [
        f"{key}={case.stored if isinstance(case.stored, str) else json.dumps(case.stored)}"
        for key, case in typed_app.CASES.items()
    ]
    done = cli.run(
        "queue-workflows", "run", "every", "--app", "tests.support.typed_app",
        *(word for text in given for word in ("--input", text)),
        "--out", str(tmp_path), timeout_s=60, **FEW,
    )  # fmt: skip
    assert done.process.returncode == 0, done.err
    expected = [f"{key} {case.value!r}" for key, case in typed_app.CASES.items()]
    assert (tmp_path / "made" / "made" / "got.txt").read_text().splitlines() == expected


def test_a_question_in_python_waits_for_its_answer(
    cli: Commands, env: dict[str, str], tmp_path: Path
) -> None:
    run_id = "asked"
    run_store.insert_run(
        run_id=run_id, workflow_name="asking", out_dir=str(tmp_path), context={"text": "cats"}
    )
    orchestrator = cli.start("queue-orchestrator", "--app", "declared_app", **env)
    worker = cli.start("queue-claim-worker", "--queue=cpu", "--app", "declared_app", **env)

    def spec() -> object:
        jobs = node_queue.list_jobs_for_run(run_id)
        return jobs and jobs[0]["status"] == "awaiting_input" and jobs[0]["input_spec"]

    until(spec, timeout_s=60)
    runs.answer(run_id, "how-many", 2)
    until(lambda: (run_store.get_run(run_id) or {}).get("status") == "completed", timeout_s=60)
    assert (tmp_path / "write" / "write" / "answer.txt").read_text() == "2 cats\n"
    for each in (worker, orchestrator):
        each.process.terminate()
        assert each.wait() == 0, each.err


def test_check_as_a_command_exits_with_0_1_or_2(env: dict[str, str], cli: Commands) -> None:
    good = cli.run("queue-workflows", "check", "hello", "--app", "declared_app", **env)
    assert (good.process.returncode, good.err) == (0, "")
    assert "report" in good.out
    assert good.out.endswith("hello: no problems found\n")
    every = cli.run("queue-workflows", "check", "--app", "declared_app", **env)
    assert every.process.returncode == 1
    assert "hello: no problems found" in every.out
    assert "'words'; count takes text, least" in every.out
    unknown = cli.run("queue-workflows", "check", "helo", "--app", "declared_app", **env)
    assert unknown.process.returncode == 2
    assert "declared are asking, hello, wrong" in unknown.err


GPU_NODES = """
from queue_workflows import node, workflow


@node
def scan() -> list[str]:
    return ["a", "b"]


@node(queue="gpu")
def see(file: str) -> str:
    return f"saw {file}"


@workflow
def mapped() -> list[str]:
    return see.map(scan())


@workflow
def parent() -> list[str]:
    return mapped()


@workflow
def each() -> None:
    one.map(scan())


@workflow
def one(name: str) -> None:
    see(name)
"""


@pytest.mark.parametrize("workflow", ["mapped", "parent", "each"])
def test_a_run_starts_the_workers_that_its_maps_and_child_runs_need(
    cli: Commands, env: dict[str, str], tmp_path: Path, workflow: str
) -> None:
    (tmp_path / "gpu_nodes.py").write_text(GPU_NODES)
    done = cli.run(
        "queue-workflows", "run", workflow, "--app", "gpu_nodes", "--out", str(tmp_path),
        timeout_s=40, **env,
    )  # fmt: skip
    assert done.process.returncode == 0, done.err
    assert "starting orchestrator, 1 cpu, 1 gpu" in done.err
    lines = done.out.splitlines()
    assert ('output: ["saw a", "saw b"]' in lines) == (workflow != "each"), "it returns nothing"


def test_up_starts_a_gpu_worker_for_nodes_without_a_model(
    cli: Commands, env: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "gpu_nodes.py").write_text(GPU_NODES)
    cli.start("queue-workflows", "up", "--app", "gpu_nodes", **env)
    run_id = runs.submit("mapped", out_dir=str(tmp_path))["id"]
    until(lambda: (runs.get(run_id) or {}).get("status") == "completed", timeout_s=40)


def test_an_answer_of_another_type_is_refused_by_every_way_in(
    cli: Commands, env: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "typed_app.py").write_text(
        "from queue_workflows import ask, node, workflow, register_input_widget\n"
        "register_input_widget('number', lambda step, run: {'least': 1})\n"
        "@node\ndef tell(n: int) -> int:\n    return n\n"
        "@workflow\ndef asking() -> int:\n    return tell(ask('q', 'number', int))\n"
    )
    run_id = run_store.insert_run(workflow_name="asking", out_dir=str(tmp_path))["id"]
    cli.start("queue-orchestrator", "--app", "typed_app", **env)
    cli.start("queue-claim-worker", "--queue=cpu", "--app", "typed_app", **env)
    until(lambda: any(job["input_spec"] for job in node_queue.list_jobs_for_run(run_id)))
    for wrong in ('"abc"', "true", "1.5"):
        done = cli.run("queue-workflows", "answer", run_id, "q", wrong)
        assert done.process.returncode == 2, done.err
        assert f"does not take {wrong}: its answer is of type integer" in done.err
        with pytest.raises(errors.InputRefused, match="its answer is of type integer"):
            runs.answer(run_id, "q", json.loads(wrong))
    assert cli.run("queue-workflows", "answer", run_id, "q", "3").process.returncode == 0
