"""Workers of two versions of an app run beside each other, and each does its own work."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from pathlib import Path
from types import ModuleType

import pytest

from queue_workflows import db, jobs, run_store
from tests.support import commands, constants, factories, invariants
from tests.support.commands import Command, Commands
from tests.support.wait import until

APP = """
import os
import time
from pathlib import Path
from typing import TypedDict

import queue_workflows
from queue_workflows import node, workflow

CODE = {code}


class Clip(TypedDict):
    clip: str


def note(what: str) -> None:
    run = queue_workflows.current_job().run_id
    fd = os.open(os.environ["QW_JOURNAL"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, f"{{run}} {{what}} {{CODE}}\\n".encode())
    os.close(fd)


@node
def gate(clip: str) -> Clip:
    note("gate")
    while Path(clip).exists():
        time.sleep(0.05)
    return {{"clip": clip}}


@node(version=CODE)
def cut(clip: str) -> Clip:
    note("cut")
    return {{"clip": clip}}


@node(version=CODE)
def join(clip: str) -> Clip:
    note("join")
    return {{"clip": clip}}


@workflow
def film(clip: str) -> None:
    join(cut(gate(clip)["clip"])["clip"])
"""


class Versions:
    """The folders of both versions of the app, and what their handlers have noted."""

    def __init__(self, cli: Commands, folder: Path) -> None:
        self.cli = cli
        self.folder = folder
        self.journal = folder / "journal"
        self.hold = folder / "hold"
        for code in (1, 2):
            (folder / str(code)).mkdir()
            (folder / str(code) / "films_app.py").write_text(APP.format(code=code))

    def env(self, code: int) -> dict[str, str]:
        paths = [str(self.folder / str(code)), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONPATH": os.pathsep.join(paths), "QW_JOURNAL": str(self.journal)}

    def start(self, code: int, name: str, *more: str) -> Command:
        return self.cli.start(name, "--app", "films_app", *more, **self.env(code))

    def worker(self, code: int) -> Command:
        return self.start(code, "queue-claim-worker", "--queue=cpu")

    def frozen(self, code: int, *run_ids: str, clip: str = "none") -> None:
        """Submit runs, and let an orchestrator of this version start them."""
        for run_id in run_ids:
            run_store.insert_run(run_id=run_id, workflow_name="film", context={"clip": clip})
        orchestrator = self.start(code, "queue-orchestrator")
        until(lambda: all(state(run_id) == "running" for run_id in run_ids))
        orchestrator.send(signal.SIGTERM)
        assert orchestrator.wait() == 0

    def done(self) -> set[tuple[str, str, int]]:
        """Return run, node and version of the code for each handler that was called."""
        text = self.journal.read_text() if self.journal.exists() else ""
        words = [line.split() for line in text.splitlines()]
        return {(run_id, node, int(code)) for run_id, node, code in words}


def state(run_id: str) -> str:
    row = run_store.get_run(run_id)
    assert row is not None
    return row["status"]


@pytest.fixture
def versions(db: ModuleType, dsn: str, tmp_path: Path) -> Generator[Versions]:
    with commands.commands(QUEUE_WORKFLOWS_DB_URL=dsn) as made:
        yield Versions(made, tmp_path)
    with db.connect() as conn:
        assert invariants.broken(conn, slack_s=5) == []


def test_each_run_is_done_by_the_code_that_it_started_with(versions: Versions) -> None:
    old, new = ("a1", "a2", "a3"), ("b1", "b2", "b3")
    versions.frozen(1, *old)
    versions.frozen(2, *new)
    versions.start(2, "queue-orchestrator")
    versions.worker(2)
    until(lambda: all(state(run_id) == "completed" for run_id in new), timeout_s=120)
    # Any worker has done the node without a version; those of version 1 wait for their worker.
    until(lambda: {(run_id, "gate", 2) for run_id in old} <= versions.done())
    with db.connect() as conn:
        waiting = (
            "SELECT id FROM workflow_node_jobs WHERE status = 'queued' AND node_id = 'cut/cut'"
        )
        until(lambda: len(factories.column(conn, waiting)) == len(old))
        found = jobs.explain(factories.column(conn, waiting)[0], conn=conn)
    assert found is not None
    assert found["clause"] == "version"
    versions.worker(1)
    until(lambda: all(state(run_id) == "completed" for run_id in old), timeout_s=120)
    versioned = {each for each in versions.done() if each[1] != "gate"}
    assert versioned == {
        (run_id, node, code)
        for run_ids, code in ((old, 1), (new, 2))
        for run_id in run_ids
        for node in ("cut", "join")
    }


def test_a_run_that_is_moved_under_way_is_continued_by_the_new_code(versions: Versions) -> None:
    versions.hold.touch()
    versions.frozen(1, "moved", clip=str(versions.hold))
    versions.worker(1)
    until(lambda: ("moved", "gate", 1) in versions.done(), timeout_s=120)
    versions.worker(2)
    upgrade = versions.cli.run(
        "queue-workflows", "upgrade", "moved", "--app", "films_app", "--by", "ann",
        timeout_s=120, **versions.env(2),
    )  # fmt: skip
    assert upgrade.process.returncode == 0, upgrade.err
    assert "~ cut/cut: version 1 to 2" in upgrade.out
    # The old worker ends the node, and has planned what follows by the graph of before.
    versions.start(2, "queue-orchestrator")
    versions.hold.unlink()
    until(lambda: state("moved") == "completed", timeout_s=120)
    assert versions.done() == {("moved", "gate", 1), ("moved", "cut", 2), ("moved", "join", 2)}
    shown = versions.cli.run("queue-workflows", "show", "moved", timeout_s=120)
    assert "by ann: cut/cut: version 1 to 2, join/join: version 1 to 2" in shown.out


@pytest.fixture
def new_node(versions: Versions) -> str:
    """Return a run of the new app, whose first node only that app knows."""
    path = versions.folder / "2" / "films_app.py"
    path.write_text(path.read_text().replace("gate", "door"))
    versions.frozen(2, "new")
    return "new"


def events(run_id: str) -> list[str]:
    with db.connect() as conn:
        found = "SELECT event_type FROM workflow_node_events WHERE run_id = %s ORDER BY id"
        return factories.column(conn, found, run_id)


def test_a_node_that_old_workers_do_not_know_is_left_to_new_ones(
    versions: Versions, new_node: str
) -> None:
    versions.start(2, "queue-orchestrator")
    versions.worker(1)
    until(lambda: events(new_node).count("requeued") >= 2, timeout_s=120)
    assert state(new_node) == "running"
    with db.connect() as conn:
        (job_id,) = factories.column(conn, "SELECT id FROM workflow_node_jobs")
        (worker,) = factories.column(conn, "SELECT worker_id FROM workers WHERE queue = 'cpu'")
        until(lambda: (jobs.explain(job_id, conn=conn) or {})["clause"] == "unknown_node")
        found = jobs.explain(job_id, conn=conn)
    assert found is not None
    assert f"no live worker of queue cpu knows node module door; these met it: {worker};" in (
        found["detail"] or ""
    )
    assert not found["can_run"]
    said = (
        "queue cpu: no worker so far knows node module door of 1 job; "
        "`queue-workflows why new` names the workers that met it"
    )
    until(lambda: said in versions.cli.run("queue-workflows", "status", timeout_s=120).out)
    versions.worker(2)
    until(lambda: state(new_node) == "completed", timeout_s=120)
    assert "retried" not in events(new_node)
    with db.connect() as conn:
        counted = "SELECT attempts + crash_count FROM workflow_node_jobs WHERE run_id = %s"
        assert {*factories.column(conn, counted, new_node)} == {0}


def test_a_node_that_no_live_worker_knows_fails_and_names_who_met_it(
    versions: Versions, new_node: str
) -> None:
    bound = constants.env({"claim.job_tables.UNKNOWN_NODE_S": 2})
    for _ in range(2):
        versions.cli.start(
            "queue-claim-worker", "--queue=cpu", "--app", "films_app", **versions.env(1), **bound
        )
    versions.start(2, "queue-orchestrator")
    until(lambda: state(new_node) == "failed", timeout_s=120)
    with db.connect() as conn:
        error = "SELECT error FROM workflow_node_jobs WHERE run_id = %s"
        (found,) = factories.column(conn, error, new_node)
        ids = factories.column(conn, "SELECT worker_id FROM workers WHERE queue = 'cpu'")
        met = "SELECT DISTINCT worker_id FROM workflow_node_events WHERE event_type = 'claimed'"
        met_by = factories.column(conn, met)
    assert "'door' is not registered" in found
    assert "no live worker has known it for 2 s; these met it: " in found
    # A worker that reports its nodes is known not to know it, and need not meet it.
    assert len(ids) == 2
    assert met_by
    assert {each for each in ids if each in found} == {*met_by}
