"""`python -m benchmarks` measures, prints its table and writes its files."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__, bench, processes, server
from benchmarks.measurements import batch, idle
from tests.support import database

ROOT = Path(__file__).resolve().parents[2]
FIGURE = r" +[\d.,]+ \S+"
FIGURES = re.compile(FIGURE * 2 + r" +[\d.]+ \([\d.]+-[\d.]+\) +[≤≥] [\d.]+.* (ok|miss)")
HEAD = re.compile(r"^row +ours +bare +ratio +target", re.MULTILINE)


def benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, as a person types it in the checkout."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_cheap_run_measures_prints_and_writes_every_row(tmp_path: Path) -> None:
    files = [tmp_path / "figures.json", tmp_path / "page.md"]
    done = benchmark(
        *("--quick", "--only", "import", "enqueue"),
        *("--json", str(files[0]), "--markdown", str(files[1])),
    )
    assert done.returncode == 0, done.stderr
    data, page = json.loads(files[0].read_text()), files[1].read_text()
    assert {row["section"] for row in data["rows"]} == {"import", "enqueue"}
    assert HEAD.search(done.stdout)
    for row in data["rows"]:
        assert row["ours"] > 0 and row["bare"] > 0, row
        assert row["ratio_min"] <= row["ratio"] <= row["ratio_max"], row
        assert row["rounds"] >= 3, row
        assert row["met"] in (True, False), row
        lines = done.stdout.splitlines()
        line = next(line for line in lines if line.startswith(row["name"]))
        assert FIGURES.fullmatch(line.removeprefix(row["name"])), line
        assert f"| {row['name']} |" in page
    assert data["errors"] == {}
    assert {"CPU", "kernel", "PostgreSQL", "Python", "psycopg", "date"} <= data["machine"].keys()
    for value in data["machine"].values():
        assert value and value in page
    assert str(ROOT) not in page and "/tmp" not in page
    assert all(len(line) <= 100 for line in page.splitlines() if not line.startswith("|"))


@pytest.mark.parametrize("name", __main__.SECTIONS)
def test_every_section_can_be_measured(name: str) -> None:
    module = importlib.import_module(f"benchmarks.measurements.{__main__.SECTIONS[name]}")
    assert module.ABOUT and callable(module.run)


def test_database_of_another_name_is_refused() -> None:
    done = benchmark("--quick", "--only", "import", "--dsn", "postgresql:///production")
    assert done.returncode != 0
    assert "_bench" in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


class Shortest(bench.Bench):
    """Measures for an instant, and notes what runs on each database."""

    def pick(self, full: Any, quick: Any) -> Any:
        return 0.1

    @contextmanager
    def running(
        self, dsn: str, *commands: tuple[str, list[str]]
    ) -> Generator[list[processes.Process]]:
        with super().running(dsn, *commands) as started:
            yield started
            for process in started:
                kept = Path(f"/proc/{process.pid}")
                words = (kept / "cmdline").read_text() + (kept / "environ").read_text()
                tag = server.Server.name_of(dsn).removesuffix(server.SUFFIX).rpartition("idle_")[2]
                self.seen[tag] = words

    seen: dict[str, str]


@pytest.mark.usefixtures("clean_process")
def test_idle_rows_are_of_the_processes_that_they_name(
    own_database: database.Database, tmp_path: Path
) -> None:
    name = own_database.name.removesuffix("_test") + server.SUFFIX
    dsn = server.url(own_database.parts, name)
    with server.running(dsn, tmp_path) as where:
        run = Shortest(where, tmp_path, quick=True)
        run.seen = {}
        rows = {row.name: row for row in idle.run(run)}
    assert len(rows) == 9
    for process in ("worker", "worker that samples", "orchestrator"):
        memory = rows[f"idle {process}, memory"]
        assert memory.ours > 0 and memory.bare > 0
    modules = {
        "worker": "queue_workflows.claim_worker",
        "sampler": "queue_workflows.claim_worker",
        "orchestrator": "queue_workflows.orchestrator",
        "bare": "benchmarks.baseline",
    }
    assert [tag for tag in modules if modules[tag] in run.seen[tag]] == [*modules]
    assert [tag for tag in modules if idle.WITHOUT_SAMPLES in run.seen[tag]] == ["worker"]


@pytest.mark.usefixtures("clean_process")
def test_the_servers_cpu_is_that_of_batches_of_both_sides(
    own_database: database.Database, tmp_path: Path
) -> None:
    name = own_database.name.removesuffix("_test") + server.SUFFIX
    dsn = server.url(own_database.parts, name)
    with server.running(dsn, tmp_path) as where:
        row = batch.server_cpu(bench.Bench(where, tmp_path, quick=True), 2 * batch.SIZE)
    assert row.ours > 0 and row.bare is not None and row.bare > 0
    assert len(row.ratios) >= 1 and row.unit == "µs"
