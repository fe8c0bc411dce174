"""Processes that log JSON: every line parses and has the ids of its job or run."""

from __future__ import annotations

import json
import signal
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from queue_workflows import history, jobs, node_queue, runs
from tests.support import commands, log_app
from tests.support.commands import Command, Commands
from tests.support.wait import until

APP = "tests.support.log_app:setup"


@pytest.fixture
def cli(db: ModuleType, dsn: str) -> Generator[Commands]:
    log_app.setup()
    with commands.commands(QUEUE_WORKFLOWS_DB_URL=dsn) as made:
        yield made


def status(job_id: str) -> str:
    found = node_queue.get_ingest_job(job_id)
    assert found is not None
    return found["status"]


def lines_of(command: Command) -> list[dict[str, Any]]:
    command.send(signal.SIGTERM)
    assert command.wait() == 0, command.err
    return [json.loads(line) for line in command.err.splitlines()]


@pytest.mark.parametrize(
    ("more", "task"),
    [([], "logs"), (["--slots", "1"], "logs"), (["--slots", "2", "--async"], "logs_async")],
)
def test_what_a_task_logs_has_its_job_and_fields(cli: Commands, more: list[str], task: str) -> None:
    worker = cli.start(
        "queue-claim-worker", "--queue", log_app.QUEUE, "--app", APP, "--log-format", "json", *more
    )
    made = {
        text: jobs.enqueue(task_name=task, queue=log_app.QUEUE, args={"text": text})
        for text in ("one", "two")
    }
    until(lambda: all(status(each) == "completed" for each in made.values()))
    lines = lines_of(worker)
    for text, job_id in made.items():
        (line,) = [each for each in lines if each["message"] == f"step {text}"]
        assert (line["job_id"], line["task"], line["queue"]) == (job_id, task, log_app.QUEUE)
        assert (line["attempt"], line["rows"], line["api_key"]) == (1, 3, "***")
        assert line["worker"].partition(":")[0]
    assert "c4nary" not in worker.err


SLOTS = [
    ([], "prints"),
    (["--slots", "1"], "prints"),
    (["--slots", "1", "--batch", "2"], "prints"),
    (["--slots", "2", "--async"], "prints_async"),
    (["--inline"], "prints"),
]


@pytest.mark.parametrize(("more", "task"), SLOTS)
def test_each_line_that_a_task_prints_is_json_with_its_job(
    cli: Commands, more: list[str], task: str
) -> None:
    worker = cli.start(
        "queue-claim-worker", "--queue", log_app.QUEUE, "--app", APP, "--log-format", "json", *more
    )
    made = {
        text: jobs.enqueue(task_name=task, queue=log_app.QUEUE, args={"text": text})
        for text in ("one", "two")
    }
    until(lambda: all(status(each) == "completed" for each in made.values()))
    logged = lines_of(worker)
    printed = [json.loads(line) for line in worker.out.splitlines()]
    for text, job_id in made.items():
        whole = [f"out {text} token=***", f"bytes \u00e9 {text}", f"open {text}"]
        if "--async" in more:  # several jobs share the executor, whose bytes are of no known job
            assert whole.pop(1) in [each["message"] for each in printed if "job_id" not in each]
        for stream, lines, messages in (
            ("stdout", printed, whole),
            ("stderr", logged, [f"err {text}", "last line of two"]),
        ):
            of_job = [each for each in lines if each.get("job_id") == job_id]
            found = [each for each in of_job if each["logger"] == "print"]
            assert [each["message"] for each in found] == messages
            for each in found:
                assert (each["stream"], each["level"], each["attempt"]) == (stream, "INFO", 1)
                assert (each["task"], each["queue"]) == (task, log_app.QUEUE)
                assert each["pid"] and each["time"].endswith("Z")
                assert "--inline" in more or each["worker"]
    assert "c4nary" not in worker.err + worker.out
    log = history.get_job(made["one"])
    assert log is not None and "open one" in log["attempts"][0]["log"]["text"]


def test_what_is_written_past_python_is_json_in_an_executor(cli: Commands) -> None:
    worker = cli.start(
        "queue-claim-worker", "--queue", log_app.QUEUE, "--app", APP, "--log-format", "json",
        "--slots", "1",
    )  # fmt: skip
    job_id = jobs.enqueue(task_name="writes", queue=log_app.QUEUE, args={"text": "one"})
    until(lambda: status(job_id) == "completed")
    logged = lines_of(worker)
    (line,) = [json.loads(line) for line in worker.out.splitlines()]
    assert (line["message"], line["job_id"], line["stream"]) == ("raw one", job_id, "stdout")
    (line,) = [each for each in logged if each["logger"] == "print"]
    assert (line["message"], line["job_id"], line["stream"]) == ("raw \\xff", job_id, "stderr")
    assert worker.process.pid != line["pid"]


def test_text_logs_leave_what_a_task_prints(cli: Commands) -> None:
    worker = cli.start("queue-claim-worker", "--queue", log_app.QUEUE, "--app", APP)
    job_id = jobs.enqueue(task_name="prints", queue=log_app.QUEUE, args={"text": "one"})
    until(lambda: status(job_id) == "completed")
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0, worker.err
    assert worker.out == "out one token=c4nary5\nbytes \u00e9 one\nopen one"


def test_a_failure_has_its_job_and_duration(cli: Commands) -> None:
    worker = cli.start(
        "queue-claim-worker", "--queue", log_app.QUEUE, "--app", APP, "--log-format", "json",
        "--slots", "1",
    )  # fmt: skip
    job_id = jobs.enqueue(task_name="fails", queue=log_app.QUEUE, args={"text": "no"})
    until(lambda: status(job_id) == "failed")
    (line,) = [each for each in lines_of(worker) if "failed after" in each["message"]]
    assert line["job_id"] == job_id
    assert line["duration_s"] >= 0
    assert "c4nary" not in worker.err


def test_up_and_its_processes_log_json_with_run_and_node(cli: Commands, tmp_path: Path) -> None:
    up = cli.start(
        "queue-workflows", "up", "--app", APP, "--cpu", "1", "--no-ingest", "--log-format", "json",
        LOG_PATH=str(tmp_path),
    )  # fmt: skip
    run_id = runs.submit("one")["id"]
    until(lambda: (runs.get(run_id) or {}).get("status") == "completed")
    up.send(signal.SIGTERM)
    assert up.wait() == 0, up.err
    written = (tmp_path / "app.log").read_text()
    lines = [json.loads(line) for line in written.splitlines()]
    (line,) = [each for each in lines if each["message"] == "step hello"]
    assert (line["run_id"], line["node_id"], line["queue"]) == (run_id, "step/node", "cpu")
    assert len({each["pid"] for each in lines}) >= 3
