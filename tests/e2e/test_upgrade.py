"""Follow docs/upgrade.md: a fleet of 0.3.0 at work is replaced step by step, and back."""

from __future__ import annotations

import shlex
import signal
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from queue_workflows import db
from queue_workflows.types import Row
from tests.support import (
    commands,
    database,
    engine_0_3,
    factories,
    invariants,
    markdown,
    two_engine_app,
)
from tests.support.commands import Command, Commands
from tests.support.wait import until

OURS = [*range(13, db.REQUIRED_VERSION + 1)]

PAGE = commands.ROOT / "docs" / "upgrade.md"
SHOWN = {
    command.text: command.output
    for block in markdown.blocks(PAGE)
    if block.language == "console"
    for command in markdown.commands(block)
}
APP = "tests.support.two_engine_app:setup"


class World:
    """A database as 0.3.0 makes it, with traffic: what is submitted, run and recorded."""

    def __init__(self, dsn: str, folder: Path, conn: Any, cli: Commands, stack: ExitStack) -> None:
        self.dsn = dsn
        self.folder = folder
        self.conn = conn
        self.cli = cli
        self.stack = stack
        self.runs: list[str] = []
        self.fetches: list[str] = []

    def enter(self, process: Any) -> Any:
        return self.stack.enter_context(process)

    def body(self, job: Row) -> None:
        """What a worker of 0.3.0 runs."""
        if "task_name" in job:
            two_engine_app.fetch("tick")
            return
        two_engine_app.run(self.folder / job["run_id"] / job["node_id"])

    def old_worker(self, host: str, queue: str = "cpu", **more: Any) -> engine_0_3.Worker:
        return self.enter(engine_0_3.Worker(self.dsn, host, self.body, queue=queue, **more))

    def old_orchestrator(self) -> engine_0_3.Orchestrator:
        return self.enter(engine_0_3.Orchestrator(self.dsn, two_engine_app.GRAPHS))

    def orchestrator(self) -> Command:
        return self.cli.start("queue-orchestrator", "--app", APP)

    def worker(self, queue: str = "cpu", host: str = "new", *more: str) -> Command:
        argv = ("queue-claim-worker", f"--queue={queue}", "--app", APP, *more)
        return self.cli.start(*argv, QUEUE_WORKFLOWS_HOST_LABEL=host)

    def submit(self, count: int) -> None:
        """Runs and ingest jobs as an app for 0.3.0 writes them."""
        for _ in range(count):
            run = f"r{len(self.runs)}"
            out = str(self.folder / run)
            engine_0_3.do(self.conn, engine_0_3.SUBMIT, run=run, workflow="w", out_dir=out)
            self.runs.append(run)
            job = f"f{len(self.fetches)}"
            engine_0_3.do(self.conn, engine_0_3.SUBMIT_INGEST, job=job, task="fetch")
            self.fetches.append(job)

    def count(self, what: str) -> int:
        return factories.one(self.conn, f"SELECT count(*) FROM {what}")

    def over(self) -> bool:
        live = "status NOT IN ('completed', 'failed', 'cancelled')"
        return not self.count(f"workflow_runs WHERE {live}") + self.count(
            f"ingest_jobs WHERE {live}"
        )

    def settle(self) -> None:
        until(self.over, timeout_s=60, every_s=0.1)

    def bodies(self) -> Counter[str]:
        """How often each handler was started."""
        return Counter((self.folder / "journal").read_text().split())

    def hosts(self) -> set[str]:
        """Who has completed a node."""
        rows = "SELECT host_label FROM workflow_node_jobs WHERE status = 'completed' GROUP BY 1"
        return set(factories.column(self.conn, rows))

    def results(self) -> set[tuple[str, str]]:
        """Who holds a node at its end, and who wrote its result."""
        rows = self.conn.execute(
            "SELECT host_label, context_delta->>'by' AS by FROM workflow_node_jobs GROUP BY 1, 2"
        ).fetchall()
        return {(row["host_label"], row["by"]) for row in rows}

    def running(self) -> list[str]:
        """The host labels with a claimed node."""
        held = "SELECT host_label FROM workflow_node_jobs WHERE status = 'running' ORDER BY 1"
        return factories.column(self.conn, held)

    def begun(self, host: str) -> bool:
        """Whether it holds a node whose handler has been started."""
        held = "run_id || '/' || node_id FROM workflow_node_jobs WHERE status = 'running'"
        names = factories.column(self.conn, f"SELECT {held} AND host_label = %s", host)
        return any(name in self.bodies() for name in names)

    def hold(self) -> None:
        """Handlers of nodes that start from now on do not end."""
        (self.folder / "hold").touch()

    def release(self) -> None:
        (self.folder / "hold").unlink()

    def nothing_is_lost(self) -> None:
        """Every run is completed, by the result of each of its nodes, with one outbox row each."""
        for table, names in (("workflow_runs", self.runs), ("ingest_jobs", self.fetches)):
            rows = self.conn.execute(f"SELECT id, status::text FROM {table}").fetchall()
            assert {row["id"]: row["status"] for row in rows} == dict.fromkeys(names, "completed")
        rows = self.conn.execute(
            "SELECT run_id, node_id, status::text, context_delta->>'by' AS by"
            " FROM workflow_node_jobs"
        ).fetchall()
        assert Counter((row["run_id"], row["node_id"]) for row in rows) == Counter(
            (run, node) for run in self.runs for node in two_engine_app.NODES
        )
        assert {row["status"] for row in rows} == {"completed"}
        assert {row["by"] for row in rows} <= {"legacy", "ours"}
        events = self.conn.execute(
            "SELECT run_id, node_id, processed_at IS NULL AS open FROM workflow_dispatch_events"
            " WHERE kind = 'completed'"
        ).fetchall()
        assert Counter((row["run_id"], row["node_id"]) for row in events) == Counter(
            (run, node) for run in self.runs for node in two_engine_app.NODES
        )
        assert not [row for row in events if row["open"]]

    def nobody_stole(self) -> None:
        """Every handler was started once."""
        assert self.bodies() == Counter(
            [f"{run}/{node}" for run in self.runs for node in two_engine_app.NODES]
        ) + Counter({"fetched": len(self.fetches)})

    def page(self, command: str, code: int = 0) -> Command:
        """Run a command that the page shows; its exit code is checked."""
        assert command in SHOWN, f"docs/upgrade.md does not show: {command}"
        done = self.cli.run(*shlex.split(command))
        assert done.process.returncode == code, done.out + done.err
        return done


@pytest.fixture
def world(
    own_database: database.Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Generator[World]:
    name = own_database.fresh_name()
    dsn = own_database.create(name)
    journal = tmp_path / "journal"
    journal.touch()
    monkeypatch.setenv("QW_JOURNAL", str(journal))
    with (
        commands.commands(
            QUEUE_WORKFLOWS_DB_URL=dsn,
            QW_JOURNAL=str(journal),
            QUEUE_WORKFLOWS_LEASE_RECLAIM_INTERVAL_S="0.5",
        ) as cli,
        psycopg.connect(dsn, autocommit=True, row_factory=dict_row) as conn,
        ExitStack() as stack,
    ):
        conn.prepare_threshold = None  # what was prepared before a migration is not what it gives
        engine_0_3.make_schema(conn)
        yield World(dsn, tmp_path, conn, cli, stack)
    own_database.drop(name)


def end(*started: Command) -> None:
    """SIGTERM, and a clean exit; one that has only just been started comes up first."""
    for each in started:
        until(lambda each=each: each.catches(signal.SIGTERM), timeout_s=30)
        each.send(signal.SIGTERM)
    for each in started:
        assert each.wait() == 0, each.err


# --- side by side ------------------------------------------------------------------------------


def test_fleets_of_both_versions_share_one_database(world: World) -> None:
    world.page("queue-workflows migrate")
    world.old_worker("old-1")
    world.old_worker("old-fetch", "fetch")
    ours = [world.orchestrator(), world.worker(), world.worker("fetch", "new-fetch")]
    world.submit(5)
    until(lambda: world.hosts() == {"old-1", "new"}, timeout_s=60)
    world.hold()
    world.submit(5)
    until(lambda: world.running() == ["new", "old-1"], timeout_s=60)
    assert invariants.broken(world.conn) == []
    world.release()
    world.settle()
    world.nothing_is_lost()
    world.nobody_stole()
    assert invariants.broken(world.conn) == []
    assert world.results() == {("old-1", "legacy"), ("new", "ours")}
    end(*ours)


def test_jobs_of_a_dead_worker_of_either_version_are_recovered_by_the_other(world: World) -> None:
    world.page("queue-workflows migrate")
    hangs, thaw = threading.Event(), threading.Event()

    def hang(job: Row) -> None:
        world.body(job)
        hangs.set()
        thaw.wait(60)

    world.submit(1)
    ours = [world.orchestrator()]
    hung = world.enter(engine_0_3.Worker(world.dsn, "old-1", hang, lease_s=2))
    assert hangs.wait(60)
    world.hold()
    ours.append(world.worker())
    until(lambda: world.running() == ["new"], timeout_s=60)
    thaw.set()
    until(lambda: hung.deaths, timeout_s=60)
    assert "is held by new" in hung.deaths[0]
    assert world.running() == ["new"]
    until(lambda: world.bodies()["r0/s/a"] == 2, timeout_s=60)
    ours[1].send(signal.SIGKILL)
    ours.pop().wait()
    world.conn.execute("UPDATE workflow_node_jobs SET lease_expires_at = now()")
    until(lambda: world.running() == ["old-1"], timeout_s=60)
    world.release()
    world.old_worker("old-fetch", "fetch")
    world.settle()
    world.nothing_is_lost()
    assert world.bodies()["r0/s/a"] == 3
    assert invariants.broken(world.conn) == []
    end(*ours)


def listed(versions: list[int]) -> str:
    return ", ".join(map(str, versions))


# --- the swap ----------------------------------------------------------------------------------


def test_a_fleet_at_work_is_replaced_as_documented(world: World) -> None:
    old_orchestrator = world.old_orchestrator()
    old = [world.old_worker("old-1"), world.old_worker("old-fetch", "fetch")]
    world.submit(6)
    until(lambda: world.count("workflow_runs WHERE status = 'completed'"), timeout_s=60)
    assert f"would apply {listed(OURS)}" in world.page("queue-workflows migrate --dry-run").out
    assert world.count("queue_schema_version") == 12
    old_orchestrator.stop()
    for process in old:
        process.stop()
    world.submit(6)
    assert f"applied {listed(OURS)}" in world.page("queue-workflows migrate").out
    old = [world.old_worker("old-1"), world.old_worker("old-fetch", "fetch")]
    ours = [world.orchestrator()]
    until(lambda: world.count("workflow_runs WHERE definition IS NOT NULL"), timeout_s=60)
    world.submit(3)
    ours += [world.worker(), world.worker("fetch", "new-fetch")]
    for process in old:
        process.stop()
    world.settle()
    world.nothing_is_lost()
    world.nobody_stole()
    assert world.results() == {("old-1", "legacy"), ("new", "ours")}
    assert invariants.broken(world.conn) == []
    world.page("queue-workflows audit")
    end(*ours)


def test_workers_of_before_that_go_on_meanwhile_repeat_at_most_the_job_at_hand(
    world: World,
) -> None:
    old_orchestrator = world.old_orchestrator()
    old = [world.old_worker(host, lease_s=3) for host in ("old-1", "old-2")]
    fetches = world.old_worker("old-fetch", "fetch", lease_s=3)
    world.submit(6)
    until(lambda: world.count("workflow_runs WHERE status = 'completed'"), timeout_s=60)
    old_orchestrator.stop()
    world.page("queue-workflows migrate")
    ours = [world.orchestrator(), world.worker()]
    world.submit(3)
    world.settle()
    world.nothing_is_lost()
    assert all(process.deaths for process in (*old, fetches))
    deaths = [death for process in (*old, fetches) for death in process.deaths]
    assert all("cached plan" in death or "deadlock" in death for death in deaths)
    again = sum(times - 1 for body, times in world.bodies().items() if body != "fetched")
    assert again <= len(deaths)
    assert invariants.broken(world.conn) == []
    end(*ours)


def test_an_orchestrator_of_before_that_starts_by_mistake_costs_repeats_only(world: World) -> None:
    world.page("queue-workflows migrate")
    ours = [world.orchestrator(), world.worker("cpu", "new", "--supervise")]
    world.hold()
    world.submit(4)
    until(lambda: world.running() == ["new"], timeout_s=60)
    theirs = world.old_orchestrator()
    until(lambda: world.running() == [], timeout_s=60)
    world.release()
    world.old_worker("old-fetch", "fetch")
    world.settle()
    world.nothing_is_lost()
    theirs.stop()
    assert invariants.broken(world.conn) == []
    end(*ours)


# --- and back ----------------------------------------------------------------------------------


def test_the_way_back_leaves_the_fleet_of_before_at_work(world: World) -> None:
    world.page("queue-workflows migrate")
    ours = [world.orchestrator(), world.worker(), world.worker("fetch", "new-fetch")]
    world.submit(4)
    until(lambda: world.count("workflow_runs WHERE status = 'completed'"), timeout_s=60)
    world.hold()
    world.submit(2)
    until(lambda: "new" in world.running(), timeout_s=60)
    killed = world.worker("cpu", "killed")
    until(lambda: world.begun("killed"), timeout_s=60)
    killed.send(signal.SIGKILL)
    killed.wait()
    world.release()
    end(*ours)
    world.submit(2)
    refused = world.page("queue-workflows migrate --to 12", code=2)
    assert "add --allow-data-loss" in refused.err
    assert world.count("queue_schema_version") == OURS[-1]
    done = world.page("queue-workflows migrate --to 12 --allow-data-loss")
    assert f"reverted {listed(OURS[::-1])}" in done.out
    assert world.running() == ["killed"]
    world.conn.execute(
        "UPDATE workflow_node_jobs SET lease_expires_at = lease_expires_at - interval '10 min'"
    )
    world.enter(engine_0_3.Orchestrator(world.dsn, two_engine_app.GRAPHS, at_boot=""))
    world.old_worker("old-1")
    world.old_worker("old-fetch", "fetch")
    world.submit(2)
    world.settle()
    world.nothing_is_lost()
    again = {body: n for body, n in world.bodies().items() if n > 1 and body != "fetched"}
    assert list(again.values()) == [2], "the one of the worker that was killed"
    assert world.results() == {("old-1", "legacy"), ("new", "ours")}
