"""Async nodes and generators: in a worker that runs them itself, and in one with executors."""

from __future__ import annotations

import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import queue_workflows
from queue_workflows import node_queue, run_store
from tests.support import slot_app
from tests.support.commands import Command, Commands
from tests.support.wait import until

Row = dict[str, Any]
ENDED = ("node_awaits", "node_yields", "node_streams")


@pytest.fixture(params=[(), ("--slots", "2")], ids=["plain", "slots"])
def way(request: pytest.FixtureRequest, db: ModuleType) -> tuple[str, ...]:
    """The options of the worker."""
    slot_app.setup()
    return request.param


def worker(cli: Commands, *more: str) -> Command:
    app = "tests.support.slot_app:setup"
    return cli.start("queue-claim-worker", "--queue", "cpu", "--app", app, *more)


def node(module: str, folder: Path) -> str:
    """A node of a run of its own."""
    run_id = run_store.insert_run(workflow_name="single", status="running")["id"]
    return node_queue.enqueue_node_job(
        run_id=run_id, node_id="n", node_module=module, queue="cpu", inputs={"folder": str(folder)}
    )


def row(job_id: str) -> Row:
    found = node_queue.get_node_job(job_id)
    assert found is not None
    return dict(found)


def stopped(command: Command) -> None:
    command.send(signal.SIGTERM)
    assert command.wait() == 0, command.err


@pytest.mark.parametrize("module", ["node_yields", "node_streams"])
def test_a_nodes_yields_are_its_progress_and_its_result_is_stored(
    cli: Commands, way: tuple[str, ...], module: str, tmp_path: Path
) -> None:
    job_id = node(module, tmp_path)
    running = worker(cli, *way)
    until(lambda: row(job_id)["progress"] == 0.25)
    slot_app.let_go(tmp_path)
    until(lambda: row(job_id)["status"] == "completed")
    assert row(job_id)["context_delta"] == {"pid": slot_app.starts_of(tmp_path)[0]}
    stopped(running)


@pytest.mark.parametrize("module", ENDED)
def test_a_cancel_ends_a_node_where_it_yields_or_awaits_and_its_worker_goes_on(
    cli: Commands, way: tuple[str, ...], module: str, tmp_path: Path
) -> None:
    job_id = node(module, tmp_path)
    running = worker(cli, *way)
    until(lambda: slot_app.starts_of(tmp_path))
    queue_workflows.cancel_run(row(job_id)["run_id"])
    until(lambda: row(job_id)["status"] == "cancelled")
    until(lambda: (tmp_path / "tidied").exists())
    (tmp_path / "next").mkdir()
    slot_app.let_go(tmp_path / "next")
    after = node("node_yields", tmp_path / "next")
    until(lambda: row(after)["status"] == "completed")
    stopped(running)


@pytest.mark.parametrize("module", ENDED)
def test_at_sigterm_a_node_that_yields_or_awaits_is_handed_back(
    cli: Commands, way: tuple[str, ...], module: str, tmp_path: Path
) -> None:
    job_id = node(module, tmp_path)
    running = worker(cli, *way, "--shutdown-timeout", "3")
    until(lambda: slot_app.starts_of(tmp_path))
    stopped(running)
    assert (tmp_path / "tidied").exists()
    found = row(job_id)
    assert (found["status"], found["attempts"], found["crash_count"]) == ("queued", 0, 0)
