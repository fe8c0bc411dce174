"""The demo's workflow from the first node to the report, with workers of both queues."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Generator
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import queue_workflows
from queue_workflows import (
    claim_worker,
    config,
    demo,
    model_cache,
    model_registry,
    node_pool,
    node_queue,
    run_store,
)

TERMINAL = frozenset({"completed", "failed", "cancelled"})
FUNCTION = (
    "def {name}(values):\n"
    + "    total = 0\n    for value in values:\n        total += value\n" * 4
)
SOURCES = {
    "alpha/__init__.py": '"""Alpha."""\nimport beta\n',
    "alpha/sums.py": FUNCTION.format(name="first") + "\n\n" + FUNCTION.format(name="second"),
    "alpha/deep/er.py": "from alpha import sums\n\n\ndef look(a):\n    return a and sums\n",
    "beta/__init__.py": "# nothing but a comment\n",
    "beta/sums.py": FUNCTION.format(name="third") + "\nclass Box:\n    '''A box.'''\n",
    "gamma.py": "X = [\n" + "    'socket', 'port',\n" * 25 + "]\n",
    "empty.py": "",
    "broken.py": "def (:\n",
    "tests/test_x.py": "assert False\n",
}


class Outcome(NamedTuple):
    """How a run ended: its row, its jobs by node, and where its files are."""

    run: dict[str, Any]
    jobs: dict[str, dict[str, Any]]
    out: Path

    def written(self) -> tuple[bytes, bytes]:
        """The two files of the report."""
        folder = self.out / "report" / "write"
        return (folder / "report.html").read_bytes(), (folder / "report.md").read_bytes()


class Fleet:
    """An orchestrator, a cpu and a gpu worker in this process, which take turns."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.pool = node_pool.NodePool()
        self.cache = model_cache.ModelCache()
        self.numbers = itertools.count()

    def report(self, folder: str | None, *, answer: str = "size") -> Outcome:
        """Run the workflow to its end, with this answer to its question."""
        out = self.tmp_path / f"out-{next(self.numbers)}"
        run_id = run_store.insert_run(
            workflow_name="code_report", out_dir=str(out), context={"folder": folder}
        )["id"]
        answered = False
        for _ in range(200):
            self.pool.look()
            run = run_store.get_run(run_id)
            assert run is not None
            if run["status"] in TERMINAL:
                return Outcome(run, self.jobs(run_id), out)
            asking = self.jobs(run_id).get("choose_focus", {"status": None})["status"]
            if asking == "awaiting_input" and not answered:
                queue_workflows.submit_input(run_id, "choose_focus", answer)
                answered = True
            else:
                _ = self.work("gpu", self.cache) or self.work("cpu", None)
        raise AssertionError(f"the run does not end: {self.jobs(run_id)}")

    def work(self, queue: str, cache: model_cache.ModelCache | None) -> bool:
        """Let a worker take one job; whether there was one."""
        return claim_worker.ClaimWorker(queue=queue, model_cache=cache).run_once()

    def jobs(self, run_id: str) -> dict[str, dict[str, Any]]:
        return {job["node_id"]: job for job in node_queue.list_jobs_for_run(run_id)}


@pytest.fixture
def fleet(db: ModuleType, tmp_path: Path) -> Generator[Fleet]:
    model_registry.clear_for_tests()
    demo.setup()
    made = Fleet(tmp_path)
    yield made
    made.pool.stop()
    made.cache.drop_cache()
    model_registry.clear_for_tests()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with what folders have: good sources, broken ones, links in circles."""
    root = tmp_path / "project"
    for name, text in SOURCES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "latin.py").write_bytes(b"X = 1\n\n# \xe9\n")
    (root / "huge.py").write_bytes(b"# padding\n" * 220_000)
    (root / "alpha" / "round").symlink_to(root)
    (root / "self.py").symlink_to("self.py")
    Path(os.fsdecode(os.fsencode(root) + b"/odd\xff.py")).write_text("def odd():\n    pass\n")
    return root


def test_a_folder_becomes_a_report(fleet: Fleet, folder: Path, db: ModuleType) -> None:
    first = fleet.report(str(folder), answer="complexity")
    assert (first.run["error"], first.run["status"]) == (None, "completed")
    assert {job["status"] for job in first.jobs.values()} == {"completed"}
    assert len(first.jobs) == 32
    check_figures(first, folder)
    check_texts(first, folder)
    check_model_was_loaded_once(first, db)

    again = fleet.report(str(folder), answer="complexity")
    assert again.written() == first.written()


def check_figures(outcome: Outcome, folder: Path) -> None:
    """The survey against counts made in another way, by lines and by hand."""
    made = json.loads((outcome.out / "survey" / "merge" / "survey.json").read_text())
    parsed = [text for name, text in SOURCES.items() if not name.startswith(("broken", "tests/"))]
    lines = [line for text in parsed for line in text.splitlines()]
    total = made["total"]
    assert total["files"] == len(list(folder.glob("**/*.py"))) - 2  # the test, the link to itself
    assert total["functions"] == sum(line.startswith("def ") for line in lines) + 1  # odd
    assert total["comments"] == sum(line.startswith("#") for line in lines)
    blank = sum(not line for line in lines)
    assert total["code"] == len(lines) - blank - total["comments"] - 2 + 2  # docstrings, odd
    assert (total["classes"], total["docstrings"], total["documented"]) == (1, 2, 2)
    packages = {package["name"]: package for package in made["packages"]}
    assert packages["alpha"]["imports"] == {"beta": 1}
    assert packages["alpha.deep"]["imports"] == {"alpha": 1}
    assert made["histogram"] == [1, 1, 3, 0, 0, 0, 0]
    assert {p["path"]: p["problem"] for p in made["problems"]} == {
        "broken.py": "line 1: invalid syntax",
        "huge.py": "larger than 2,048 KB",
        "latin.py": "byte 0xe9 at 9 is not utf-8",
    }
    assert made["left_out"] == {"folders of tests": 1, "links and special files": 2}
    groups = json.loads((outcome.out / "compare" / "functions" / "groups.json").read_text())
    assert [place["name"] for place in groups["largest"][0]["places"]] == [
        "first",
        "second",
        "third",
    ]
    assert groups["repeated"] == 26
    reports = (job["context_delta"] for node, job in outcome.jobs.items() if "/part-" in node)
    assert sum(report["files"] for report in reports) == total["files"]


def check_texts(outcome: Outcome, folder: Path) -> None:
    page, text = (content.decode().replace("<wbr>", "") for content in outcome.written())
    assert text.index("## Complexity") < text.index("## Size")
    assert page.index('id="complexity"') < page.index('id="size"')
    for shown in (str(folder), "broken.py", "larger than 2,048 KB", "odd?.py:1", "Near-duplicates"):
        assert shown in page
    assert str(outcome.out) not in page + text
    options = outcome.jobs["choose_focus"]["input_spec"]["turnout_options"]
    assert [option["value"] for option in options] == [
        "size", "complexity", "documentation", "imports",
    ]  # fmt: skip
    assert options[3]["label"] == "Imports: alpha is imported by 1 of 8 other packages"
    delta = outcome.jobs["report/write"]["context_delta"]
    assert Path(delta["html"]).read_bytes() == outcome.written()[0]
    assert delta["summary"].startswith("11 files, 9 packages, ")


def check_model_was_loaded_once(outcome: Outcome, db: ModuleType) -> None:
    gpu = [job for job in outcome.jobs.values() if job["queue"] == "gpu"]
    assert [job["required_model"] for job in gpu] == ["code-words"] * 4
    with db.connection() as conn:
        loads = conn.execute(
            "SELECT count(*) AS n FROM workflow_node_events WHERE event_type = 'model_load_done'"
        ).fetchone()
    assert loads["n"] == 1


def test_an_empty_folder_becomes_an_empty_report(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    outcome = fleet.report(str(tmp_path / "nothing"))
    assert (outcome.run["error"], outcome.run["status"]) == (None, "completed")
    assert outcome.jobs["report/write"]["context_delta"]["summary"].startswith(
        "0 files, 0 packages"
    )


def test_a_missing_folder_fails_the_run_by_name(fleet: Fleet, tmp_path: Path) -> None:
    outcome = fleet.report(str(tmp_path / "gone"))
    assert outcome.run["status"] == "failed"
    assert f"'{tmp_path}/gone' does not exist" in outcome.run["error"]
    assert "survey/list" in outcome.run["error"]


def test_an_answer_that_is_no_option_fails_the_run_with_the_options(
    fleet: Fleet, tmp_path: Path
) -> None:
    (tmp_path / "nothing").mkdir()
    outcome = fleet.report(str(tmp_path / "nothing"), answer="colour")
    assert outcome.run["status"] == "failed"
    assert "'colour': choose from size, complexity, documentation, imports" in outcome.run["error"]


def test_the_snapshot_runs_as_an_ingest_job(fleet: Fleet, folder: Path) -> None:
    job_id = node_queue.enqueue_ingest_job(
        task_name="snapshot_folder", queue="fetch", args={"folder": str(folder)}
    )
    assert claim_worker.ClaimWorker(queue="fetch").run_once()
    job = node_queue.get_ingest_job(job_id)
    assert job is not None
    assert (job["status"], job["result"]["files"], job["result"]["reason"]) == (
        "completed",
        11,
        "tick",
    )


def test_setup_may_be_called_again_and_schedules_the_snapshot_once() -> None:
    demo.setup()
    demo.setup()
    (entry,) = config.get_config().ingest_schedule
    evening = datetime(2024, 5, 1, 18, tzinfo=timezone.utc)
    assert entry.next_fire_at(evening) == datetime(2024, 5, 2, 3, 15, tzinfo=timezone.utc)
    assert entry.task_name in config.get_config().ingest_task_map
    assert config.queues() == {"cpu", "gpu", "fetch"}
