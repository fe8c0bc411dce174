"""Async nodes and generators: in a worker that runs them itself, and in one with executors."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

import queue_workflows
from tests.support import constants, slot_app
from tests.support.commands import Command, Commands
from tests.support.wait import until
from tests.support.worker_views import node, node_row, stopped

ENDED = ("node_awaits", "node_yields", "node_streams")


@pytest.fixture(params=[(), ("--slots", "2")], ids=["plain", "slots"])
def way(request: pytest.FixtureRequest, db: ModuleType) -> tuple[str, ...]:
    """The options of the worker."""
    slot_app.setup()
    return request.param


def worker(cli: Commands, *more: str, **env: str) -> Command:
    app = "tests.support.slot_app:setup"
    return cli.start("queue-claim-worker", "--queue", "cpu", "--app", app, *more, **env)


@pytest.mark.parametrize("module", ["node_yields", "node_streams"])
def test_a_nodes_yields_are_its_progress_and_its_result_is_stored(
    cli: Commands, way: tuple[str, ...], module: str, tmp_path: Path
) -> None:
    job_id = node(module, folder=str(tmp_path))
    running = worker(cli, *way)
    until(lambda: node_row(job_id)["progress"] == 0.25)
    slot_app.let_go(tmp_path)
    until(lambda: node_row(job_id)["status"] == "completed")
    assert node_row(job_id)["context_delta"] == {"pid": slot_app.starts_of(tmp_path)[0]}
    stopped(running)


@pytest.mark.parametrize("module", ENDED)
def test_a_cancel_ends_a_node_where_it_yields_or_awaits_and_its_worker_goes_on(
    cli: Commands, way: tuple[str, ...], module: str, tmp_path: Path
) -> None:
    job_id = node(module, folder=str(tmp_path))
    running = worker(cli, *way)
    until(lambda: slot_app.starts_of(tmp_path))
    queue_workflows.cancel_run(node_row(job_id)["run_id"])
    until(lambda: node_row(job_id)["status"] == "cancelled")
    until(lambda: (tmp_path / "tidied").exists())
    (tmp_path / "next").mkdir()
    slot_app.let_go(tmp_path / "next")
    after = node("node_yields", folder=str(tmp_path / "next"))
    until(lambda: node_row(after)["status"] == "completed")
    stopped(running)


@pytest.mark.parametrize("module", ENDED)
def test_at_sigterm_a_node_that_yields_or_awaits_is_handed_back(
    cli: Commands, way: tuple[str, ...], module: str, tmp_path: Path
) -> None:
    job_id = node(module, folder=str(tmp_path))
    # It is interrupted at once, and not two seconds before the end of the timeout.
    at_once = constants.env({"worker.desk.UNWIND_S": 59.9})
    running = worker(cli, *way, "--shutdown-timeout", "60", **at_once)
    until(lambda: slot_app.starts_of(tmp_path))
    stopped(running)
    assert (tmp_path / "tidied").exists()
    found = node_row(job_id)
    assert (found["status"], found["attempts"], found["crash_count"]) == ("queued", 0, 0)
