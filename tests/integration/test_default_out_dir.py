"""A run that is submitted without `out_dir` gets a folder when it starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import queue_workflows
from queue_workflows import claim_worker, config, dispatcher, node_queue, run_store
from tests.support import console, factories, flow


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUEUE_WORKFLOWS_OUTPUTS_DIR", str(tmp_path / "outputs"))
    return tmp_path / "outputs"


@pytest.fixture
def app(toy: flow.Flow, folder: Path) -> flow.Flow:
    return toy


def writes(out: Path) -> None:
    (out / "file").write_text("x")


@pytest.mark.parametrize("status", ["queued", "running"])
def test_a_run_without_a_folder_gets_one_when_it_starts(
    app: flow.Flow, folder: Path, status: str
) -> None:
    queue_workflows.register_node("ok", writes)
    app.dag(a="")
    run_id = app.submit(status=status)
    assert dispatcher.start_run(run_id) == 1
    assert flow.run(run_id)["out_dir"] == str(folder / run_id)
    assert claim_worker.ClaimWorker(queue="cpu", host="box").run_once()
    assert (folder / run_id / "s" / "a" / "file").read_text() == "x"


def test_the_orchestrator_gives_it_too_and_keeps_a_folder_that_there_is(
    app: flow.Flow, folder: Path, tmp_path: Path
) -> None:
    app.dag(a="")
    none, own = app.submit(), app.submit(out_dir=str(tmp_path / "own"))
    app.look()
    assert flow.run(none)["out_dir"] == str(folder / none)
    assert flow.run(own)["out_dir"] == str(tmp_path / "own")


def test_a_job_that_an_app_queued_into_its_own_run_has_a_folder(
    app: flow.Flow, folder: Path
) -> None:
    queue_workflows.register_node("ok", writes)
    run_id = run_store.insert_run(run_id="mine", workflow_name="none", status="running")["id"]
    node_queue.enqueue_node_job(run_id=run_id, node_id="n", node_module="ok", queue="cpu")
    assert claim_worker.ClaimWorker(queue="cpu", host="box").run_once()
    assert (folder / "mine" / "n" / "file").exists()
    assert flow.run(run_id)["out_dir"] == str(folder / "mine")


def folder_of(toy: flow.Flow, run_id: str = "r") -> Path:
    """Return the folder that a run with this id gets, which plain SQL has inserted."""
    toy.dag(a="")
    factories.execute("INSERT INTO workflow_runs (id, workflow_name) VALUES (%s, 'w')", run_id)
    toy.look()
    found = flow.run(run_id)["out_dir"]
    assert run_store.delete_run(run_id)
    return Path(found)


@pytest.mark.parametrize("run_id", ["../../x", "/etc", ".hidden", "a/b", "", "x" * 500, "a\nb"])
def test_no_id_leads_out_of_the_folder(app: flow.Flow, folder: Path, run_id: str) -> None:
    found = folder_of(app, run_id)
    assert found.parent == folder
    assert found.name.startswith("run-")
    assert found == folder_of(app, run_id), "the same for every run of this id"


def test_the_folder_is_the_knobs_then_the_first_root_then_the_data_folder(
    toy: flow.Flow, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_OUT_ROOTS", f"{tmp_path}{os.pathsep}/other")
    monkeypatch.setenv("QUEUE_WORKFLOWS_OUTPUTS_DIR", str(tmp_path / "named"))
    assert folder_of(toy).parent == tmp_path / "named"
    monkeypatch.delenv("QUEUE_WORKFLOWS_OUTPUTS_DIR")
    assert folder_of(toy).parent == tmp_path / "runs"
    monkeypatch.delenv("QUEUE_WORKFLOWS_OUT_ROOTS")
    assert folder_of(toy).parent == config.data_folder() / "outputs"


def test_machines_are_counted_that_run_nodes(
    conn: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("QUEUE_WORKFLOWS_OUTPUTS_DIR")
    for number, (host, queue) in enumerate((("a", "cpu"), ("a", "gpu"), ("b", "load"))):
        factories.insert(
            conn, "workers", worker_id=str(number), host_label=host, queue=queue, pid=1
        )
    assert "on each of" not in console.command("doctor").out
    factories.insert(conn, "workers", worker_id="9", host_label="b", queue="cpu", pid=1)
    assert ", on each of 2 machines" in console.command("doctor").out
