"""An installation imports, answers, and runs a workflow on its own database."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
COMMANDS = (
    "queue-orchestrator",
    "queue-claim-worker",
    "queue-scheduler",
    "queue-worker-control",
    "queue-workflows",
)
APP = """
import queue_workflows

PIPELINE = {"nodes": [{"id": "double", "inputs": [{"name": "n", "from": "pipeline.n"}]}]}
STEP = {"id": "s", "kind": "pipeline", "pipeline": "p", "inputs": {"n": {"$from": "n"}}}
queue_workflows.register_node("double", lambda n: {"n": 2 * n})
queue_workflows.set_workflow_provider(
    {"smoke": {"name": "smoke", "steps": [STEP]}}.__getitem__, {"p": PIPELINE}.__getitem__
)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    # As root the embedded server runs under another account, which has to pass. What is above is
    # not ours to open.
    ours = Path(tempfile.gettempdir()).parent  # in which each test process has its own folder
    for parent in (tmp_path, *tmp_path.parents):
        if parent != ours and parent.is_relative_to(ours):
            parent.chmod(parent.stat().st_mode | 0o711)
    return tmp_path


def _run(folder: Path, *argv: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder),
        "LANG": "C.UTF-8",
        "QUEUE_WORKFLOWS_EMBEDDED_DIR": str(folder / "pg"),
        **{name: text for name, text in os.environ.items() if name.startswith("COVERAGE_")},
    }
    return subprocess.run(
        [str(BIN / argv[0]), *argv[1:]],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_command_answers_help(folder: Path, command: str) -> None:
    done = _run(folder, command, "--help")
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()
    assert not done.stderr


def test_import_is_quiet_and_has_a_version(folder: Path) -> None:
    done = _run(folder, "python", "-c", "import queue_workflows as q; print(q.__version__)")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count(".") == 2


def test_bootstrap_on_the_embedded_server(folder: Path) -> None:
    code = (
        "import queue_workflows as q; q.configure(embedded=True); q.db.bootstrap();"
        " print(q.db.current_schema_version(), q.db.REQUIRED_VERSION); q.db.close_pool()"
    )
    done = _run(folder, "python", "-c", code)
    assert done.returncode == 0, done.stderr
    found, required = done.stdout.split()
    assert found == required


def test_a_workflow_runs_on_the_embedded_server(folder: Path) -> None:
    done = _run(
        folder, "queue-workflows", "run", "smoke", "--app", "app", "--input", "n=21", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "completed"
    assert "embedded PostgreSQL" in done.stderr
