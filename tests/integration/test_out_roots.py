"""QUEUE_WORKFLOWS_OUT_ROOTS: a run keeps its files in the folders that it names, or fails."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import queue_workflows
from queue_workflows import config, dispatcher, node_executor, node_queue, run_store
from tests.support import flow, transitions

KNOB = "QUEUE_WORKFLOWS_OUT_ROOTS"
PICK = {
    "id": "w",
    "steps": [{"id": "ask", "kind": "input", "widget": "choose_one",
               "source": {"$from": "scan.files"}}],
}  # fmt: skip


@pytest.fixture(autouse=True)
def app(db: ModuleType) -> None:
    queue_workflows.set_workflow_provider(lambda _: PICK, lambda _: {})


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    monkeypatch.setenv(KNOB, str(folder))
    return folder


def run_of(out_dir: object, **more: Any) -> str:
    return run_store.insert_run(workflow_name="w", out_dir=str(out_dir), **more)["id"]


def executed(out_dir: object, body: Any, node_id: str = "n") -> dict[str, Any]:
    """The row of a node after its claim was seen through."""
    queue_workflows.register_node("body", body)
    run_id = run_of(out_dir, status="running")
    job_id = node_queue.enqueue_node_job(
        run_id=run_id, node_id="n", node_module="body", queue="cpu"
    )
    with queue_workflows.db.connect() as conn:
        # As a writer of plain SQL forges it: the function would refuse it.
        conn.execute("UPDATE workflow_node_jobs SET node_id = %s WHERE id = %s", (node_id, job_id))
    job = node_queue.claim_next_cpu_job(host="box")
    assert job is not None
    node_executor.execute_node(job)
    found = node_queue.get_node_job(job_id)
    assert found is not None
    return found


def test_a_run_outside_of_the_roots_fails_at_its_start_naming_folder_and_knob(
    root: Path, tmp_path: Path
) -> None:
    (root / "link").symlink_to(tmp_path)
    inside = run_of(root / "run")
    outside = [run_of(tmp_path / "elsewhere"), run_of(root / "link"), run_of(root / "..")]
    assert flow.start_queued() == 4
    assert flow.run(inside)["status"] == "running"
    for run_id in outside:
        row = flow.run(run_id)
        assert row["status"] == "failed"
        assert row["out_dir"] in row["error"]
        assert KNOB in row["error"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["root"]


def test_a_row_by_plain_sql_is_checked_as_any_other(root: Path, db: ModuleType) -> None:
    with db.connect() as conn:
        conn.execute("INSERT INTO workflow_runs (id, workflow_name, mode, out_dir)"
                     " VALUES ('r', 'w', 'node', '/etc')")  # fmt: skip
    flow.start_queued()
    assert (flow.run("r")["status"], KNOB in flow.run("r")["error"]) == ("failed", True)


@pytest.mark.parametrize("asks", [True, False])
def test_a_job_fails_where_its_worker_does_not_allow_the_folder(
    root: Path, tmp_path: Path, asks: bool
) -> None:
    ran: list[object] = []

    def with_out(out: Path) -> None:
        ran.append(out)

    def without() -> None:
        ran.append(None)

    row = executed(tmp_path / "elsewhere", with_out if asks else without)
    assert row["status"] == "failed"
    assert str(tmp_path / "elsewhere") in row["error"]
    assert KNOB in row["error"]
    assert ran == []
    assert not (tmp_path / "elsewhere").exists()


def test_inside_of_the_roots_all_is_as_without(root: Path) -> None:
    def body(out: Path, scratch: Path) -> dict[str, str]:
        (out / "x").touch()
        (scratch / "y").touch()
        return {"out": str(out), "scratch": str(scratch)}

    row = executed(root / "not" / "yet", body)
    assert row["status"] == "completed", row["error"]
    assert (root / "not" / "yet" / "n" / "x").exists()
    assert not Path(row["context_delta"]["scratch"]).exists()


def touch(out: Path) -> None:
    (out / "written").touch()


@pytest.mark.parametrize("knob", [True, False])
@pytest.mark.parametrize("node_id", ["/tmp/absolute", "n" * 5000, "a/" * 2500])
def test_a_forged_node_id_fails_its_job_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knob: bool, node_id: str
) -> None:
    out_dir = tmp_path / "root" / "run"
    out_dir.mkdir(parents=True)
    if knob:
        monkeypatch.setenv(KNOB, str(tmp_path / "root"))
    row = executed(out_dir, touch, node_id)
    assert row["status"] == "failed"
    assert "leads outside" in row["error"] or "too long" in row["error"]
    assert [path for path in tmp_path.rglob("*") if path.name not in {"root", "run"}] == []


@pytest.mark.parametrize("knob", [True, False])
@pytest.mark.parametrize(
    ("node_id", "folder"),
    [
        ("../../x", "%2E%2E/%2E%2E/x"),
        ("..", "%2E%2E"),
        (".", "%2E"),
        ("n/../../../x", "n/%2E%2E/%2E%2E/%2E%2E/x"),
        ("s/..", "s/%2E%2E"),
    ],
)
def test_dots_in_a_node_id_stay_in_the_folder_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knob: bool, node_id: str, folder: str
) -> None:
    out_dir = tmp_path / "root" / "run"
    out_dir.mkdir(parents=True)
    if knob:
        monkeypatch.setenv(KNOB, str(tmp_path / "root"))
    row = executed(out_dir, touch, node_id)
    assert row["status"] == "completed", row["error"]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [out_dir / folder / "written"]


def test_a_choice_lists_no_folder_outside_of_the_roots(root: Path, tmp_path: Path) -> None:
    for out_dir in (root / "run", tmp_path / "secret"):
        (out_dir / "scan").mkdir(parents=True)
        (out_dir / "scan" / "a.txt").touch()
    specs: list[Any] = []
    for out_dir in (root / "run", tmp_path / "secret"):
        run_id = run_of(root)
        dispatcher.start_run(run_id)
        # The folder of a run that was started is changed by plain SQL.
        with queue_workflows.db.connect() as conn:
            conn.execute("UPDATE workflow_runs SET out_dir = %s", (str(out_dir),))
        job = node_queue.claim_next_cpu_job(host="box")
        assert job is not None
        with queue_workflows.db.connect() as conn:
            transitions.park(conn, job)
        flow.dispatch_all()
        specs.append(node_queue.get_node_job(job["id"]))
    options = [[each["rel_path"] for each in row["input_spec"]["options"]] for row in specs]
    assert options == [["scan/a.txt"], []]


def test_the_knob_is_read_when_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.OUT_ROOTS.read() == ""
    first, second = tmp_path / "one", tmp_path / "two"
    for folder in (first, second):
        folder.mkdir()
    monkeypatch.setenv(KNOB, f"{first}:{second}")
    for folder in (first, second):
        assert executed(folder / "run", lambda: None)["status"] == "completed"
