"""Kill a role right before or after its n-th commit, for every n."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Generator
from pathlib import Path
from signal import SIGKILL, SIGTERM
from types import ModuleType
from typing import NamedTuple

import pytest

from queue_workflows import db
from tests.support import (
    deaths,
    failpoints,
    fork_server,
    invariants,
    schema_snapshot,
    workloads,
)
from tests.support.commands import Commands
from tests.support.failpoints import Point
from tests.support.fork_server import ForkServer, Role
from tests.support.wait import until

HOST = "box"
QUICK = {
    "QUEUE_WORKFLOWS_HOST_LABEL": HOST,
    "QUEUE_WORKFLOWS_CLAIM_POLL_S": "0.02",
}
WORKER = ("queue-claim-worker", "--queue", "cpu")
NOTES = ("queue-claim-worker", "--queue", failpoints.QUEUE)
INLINE = ("--inline",)
SIDE_BY_SIDE = 3
POOL = (
    "queue-claim-worker",
    "--workers",
    json.dumps([{"queue": failpoints.QUEUE, "concurrency": SIDE_BY_SIDE}]),
)
ORCHESTRATOR = ("queue-orchestrator",)
SCHEDULER = ("queue-scheduler", "--boot-kick")
LOOK_S = 0.02
ENDED_WELL = (0, -SIGTERM)
"""SIGTERM ends a process that it meets before its handlers are set."""
ALLOW_ONE_RETRY = "ALTER TABLE ingest_jobs ALTER max_attempts SET DEFAULT {0}"


class World:
    """The roles on one database, and what they have journalled."""

    def __init__(self, forking: ForkServer, folder: Path, **env: str) -> None:
        self.folder = folder
        self._nursery = forking
        self._env = {**os.environ, **QUICK, failpoints.FOLDER: str(folder), **env}
        self._env[fork_server.BEFORE] = f"{failpoints.__name__}:{failpoints.install.__name__}"
        self.started: list[Role] = []

    def start(self, *argv: str, point: Point | None = None, **env: str) -> Role:
        """A role; `point`: where it dies."""
        at = {failpoints.AT: point.text} if point else {}
        log = self.folder / f"log-{len(self.started)}"
        command = (*argv, "--app", failpoints.APP)
        role = self._nursery.role(*command, env={**self._env, **at, **env}, log=log)
        self.started.append(role)
        return role

    def places(self, what: str, *roles: Role) -> list[str]:
        """Where these roles have committed (`commit`) or died (`killed`), in order."""
        pids = {role.pid for role in roles}
        found = failpoints.lines(self.folder / "commits")
        return [line["place"] for line in found if line["pid"] in pids and line["what"] == what]

    def close(self) -> None:
        codes = [role.stop() for role in self.started]
        assert {*codes} <= {*ENDED_WELL, -SIGKILL}, codes


@pytest.fixture(scope="module")
def forking() -> Generator[ForkServer]:
    with fork_server.started(*fork_server.ROLES, failpoints.__name__) as made:
        yield made


@pytest.fixture
def world(db: ModuleType, forking: ForkServer, tmp_path: Path) -> Generator[World]:
    made = World(forking, tmp_path)
    with db.connect() as conn:
        conn.execute(ALLOW_ONE_RETRY.format(2).encode())
        try:
            yield made
        finally:
            made.close()
            conn.execute(ALLOW_ONE_RETRY.format(1).encode())


class Sweep(NamedTuple):
    """A role to kill, what is worked on meanwhile, and the roles beside it."""

    role: tuple[str, ...]
    thread: str
    """The one to die at each of its commits; otherwise, and with "", at the first of each place."""
    work: type[workloads.Workload]
    beside: tuple[str, ...] = ()
    env: dict[str, str] = {}  # noqa: RUF012  never changed
    places: tuple[str, ...] = ()
    """Where it must at least have died; `at`: in this function itself, not in one that it calls."""
    sides: tuple[str, ...] = ("before", "after")


HOOKS = {failpoints.HOOKS: "1"}
CLAIMING = "at claim.claims.claim"
"""Also records what is completed, in the same transaction."""
WORKING = (CLAIMING, "record._fail", "leases.stop", "leases._reports")
SETS_ASIDE = "at claim.record.end"
"""Parks a node for its answer, or suspends a job until its time or event."""
DISPATCHING = (
    "advance._start",
    "drain._batch",
    "input_nodes.store_question",
    "input_listener.process_once",
)
MAIN = "MainThread"
LOOP = "worker-loop"
"""The thread of a worker whose main thread runs the handlers."""
BEFORE = ("before",)
"""What is committed before one commit is what is committed after the last: one side meets every
state of the rows. What a handler does between the two is tried by the sweeps of plain runs."""
SWEEPS = {
    "worker": Sweep(
        (*WORKER, *INLINE),
        LOOP,
        workloads.Runs,
        ORCHESTRATOR,
        places=(*WORKING, SETS_ASIDE),
    ),
    "hooked-worker": Sweep(
        (*WORKER, *INLINE), "", workloads.ShortRuns, ORCHESTRATOR, HOOKS, WORKING
    ),
    "orchestrator": Sweep(
        ORCHESTRATOR, "dispatch", workloads.Runs, WORKER, {}, DISPATCHING, BEFORE
    ),
    "hooked-orchestrator": Sweep(
        ORCHESTRATOR, "", workloads.ShortRuns, WORKER, HOOKS, (*DISPATCHING, "_learn_without_lock")
    ),
    "growing-worker": Sweep(
        WORKER,
        MAIN,
        workloads.Growing,
        ORCHESTRATOR,
        {},
        (CLAIMING,),
        BEFORE,
    ),
    "growing-orchestrator": Sweep(
        ORCHESTRATOR, "dispatch", workloads.Growing, WORKER, {}, ("advance._start",), BEFORE
    ),
    "map-worker": Sweep(WORKER, MAIN, workloads.MapRuns, ORCHESTRATOR, {}, (CLAIMING,), BEFORE),
    "map-orchestrator": Sweep(
        ORCHESTRATOR,
        "dispatch",
        workloads.MapRuns,
        WORKER,
        HOOKS,
        ("advance.plan_and_write",),
        BEFORE,
    ),
    "mapped-runs-worker": Sweep(
        WORKER,
        MAIN,
        workloads.MappedRuns,
        ORCHESTRATOR,
        {},
        (CLAIMING,),
        BEFORE,
    ),
    "mapped-runs-orchestrator": Sweep(
        ORCHESTRATOR, "dispatch", workloads.MappedRuns, WORKER, {}, ("advance._start",), BEFORE
    ),
    "deciding-map-worker": Sweep(
        WORKER,
        MAIN,
        workloads.Deciding,
        ORCHESTRATOR,
        {},
        (CLAIMING,),
        BEFORE,
    ),
    "deciding-map-orchestrator": Sweep(
        ORCHESTRATOR,
        "dispatch",
        workloads.Deciding,
        WORKER,
        HOOKS,
        ("advance.plan_and_write",),
        BEFORE,
    ),
    "ingest": Sweep((*NOTES, *INLINE), LOOP, workloads.Notes, places=WORKING),
    "steps": Sweep(
        NOTES, MAIN, workloads.Stepped, places=("claimed_job.answer", SETS_ASIDE, CLAIMING)
    ),
    "steps-pool": Sweep(
        POOL, "", workloads.Stepped, (), {}, ("claimed_job.answer", SETS_ASIDE), BEFORE
    ),
    "batch": Sweep(
        (*NOTES, "--batch", str(workloads.BATCH)),
        MAIN,
        workloads.Batches,
        places=(CLAIMING, "record._fail"),
    ),
    "pool": Sweep(POOL, MAIN, workloads.Notes, places=(CLAIMING, "record._fail")),
    "scheduler": Sweep(
        SCHEDULER, MAIN, workloads.Ticks, NOTES, {}, ("enqueue_boot_kick", "run_once"), BEFORE
    ),
}


def recover_claims(pid: int) -> None:
    """What the parent of a worker does when it reaps it."""
    with db.connect() as conn:
        deaths.recover(conn, deaths.killed(pid), HOST)


def past(world: World, sweep: Sweep, point: Point) -> list[Role]:
    """Bring a workload to its end past one death; the roles that it took."""
    # With a number, as a point that no process reached is tried again.
    tag = f"{len(world.started)}-{point.side}-{point.nth}-{point.place}"
    work = sweep.work(tag[:200])
    env = work.submit() | sweep.env
    role = world.start(*sweep.role, point=point, **env)
    until(lambda: role.ended() is not None or work.is_over(), timeout_s=60, every_s=LOOK_S)
    if died := role.stop() == -SIGKILL:
        recover_claims(role.pid)
    roles = [role]
    if not work.is_over():
        assert died, role.log
        roles.append(world.start(*sweep.role, **env))
        until(work.is_over, timeout_s=60, every_s=LOOK_S)
        assert roles[-1].stop() in ENDED_WELL, roles[-1].log
    # All that a worker holds counts a crash if it is killed, also what waits in it.
    crashes = sum(job.crash_count for job in work.judge(world.folder))
    assert not crashes or (died and sweep.role[0] == WORKER[0])
    return roles


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "side"), [(name, side) for name, sweep in SWEEPS.items() for side in sweep.sides]
)
def test_a_role_killed_at_any_commit_loses_and_doubles_nothing(
    world: World, name: str, side: str
) -> None:
    sweep = SWEEPS[name]
    failpoints.register()
    if sweep.beside:
        world.start(*sweep.beside, **sweep.env)
    seen, died = set[str](), list[str]()

    def dies(point: Point) -> bool:
        try:
            roles = past(world, sweep, point)
        except AssertionError as error:
            where = world.places("killed", *world.started)[-1:]
            raise AssertionError(f"{point}, dead at {where}: {error}") from error
        seen.update(world.places("commit", *roles))
        died.extend(world.places("killed", *roles))
        return roles[0].ended() == -SIGKILL

    for nth in itertools.count(1) if sweep.thread else [0]:
        if not dies(Point(nth, side, sweep.thread)):
            break
    # Other threads, and what came earlier or later in the line each time.
    tried = set[str]()
    while left := seen - {*died} - tried:
        for place in left:
            tried.add(place)
            sure = any(part in f"at {place}" for part in sweep.places)
            any(dies(Point(1, side, place=place)) for _ in range(3 if sure else 1))
    with db.connect() as conn:
        assert invariants.broken(conn, slack_s=5) == []
    missed = [place for place in sweep.places if not any(place in f"at {where}" for where in died)]
    assert not missed, died


def test_the_installed_script_dies_there_too(cli: Commands, world: World) -> None:
    failpoints.register()
    work = workloads.Notes("script")
    point = Point(3, "before", LOOP)  # after its report and a claim
    env = work.submit() | QUICK
    env |= {failpoints.AT: point.text, failpoints.FOLDER: str(world.folder)}
    script = cli.start(*NOTES, *INLINE, "--app", failpoints.APP, **env)
    assert script.wait() == -SIGKILL, script.err
    recover_claims(script.process.pid)
    world.start(*NOTES)
    until(work.is_over, timeout_s=60)
    assert sum(job.crash_count for job in work.judge(world.folder)) == 1


_WRITTEN = {
    "workflow_runs": "true",
    "workflow_node_jobs": "true",
    "workflow_node_events": "true",
    "workflow_dispatch_events": "true",
    "workflow_input_submissions": "true",
    "ingest_jobs": "true",
    "ingest_job_events": "true",
    "workers": "true",
    "worker_heartbeats": "true",
}
"""The rows that a role has written last, once everything is over."""


def test_no_row_comes_from_a_commit_that_was_not_counted(world: World) -> None:
    failpoints.register()
    works = [workloads.Runs("runs"), workloads.Notes("notes"), workloads.Ticks("ticks")]
    env = {name: value for work in works for name, value in work.submit().items()}
    for argv in (ORCHESTRATOR, WORKER, (*NOTES, "--batch", "2"), SCHEDULER):
        world.start(*argv, **env)
    for work in works:
        until(work.is_over, timeout_s=60)
    world.close()
    counted = {line["xid"] % 2**32 for line in failpoints.lines(world.folder / "commits")}
    with db.connect() as conn:
        written = {
            (table, row["xid"])
            for table, where in _WRITTEN.items()
            for row in conn.execute(
                f"SELECT DISTINCT xmin::text::bigint AS xid FROM {table} WHERE {where}".encode()
            )
        }
        fires = conn.execute(
            "SELECT DISTINCT extract(epoch FROM created_at)::text AS began FROM schedule_fires"
            " WHERE job_id IS NOT NULL"
        ).fetchall()
    assert {table for table, _ in written} == _WRITTEN.keys()
    # Each fire is written in a savepoint, which has a transaction id of its own.
    assert fires
    assert {row["began"] for row in fires} <= {
        line["began"] for line in failpoints.lines(world.folder / "commits")
    }
    assert [(table, xid) for table, xid in written if xid not in counted] == []


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_schema_brought_by_a_process_that_dies_at_its_commit_is_whole_or_not_there(
    db: ModuleType, forking: ForkServer, fresh_database: str, tmp_path: Path, side: str
) -> None:
    world = World(forking, tmp_path, QUEUE_WORKFLOWS_DB_URL=fresh_database)
    dies = world.start(*ORCHESTRATOR, point=Point(1, side))
    until(lambda: dies.ended() is not None, timeout_s=60)
    assert dies.stop() == -SIGKILL
    with db.connect(url=fresh_database) as conn:
        # Ledger, tables, functions and triggers are one commit.
        assert any(schema_snapshot.snapshot(conn).values()) == (side == "after")
    lives = world.start(*ORCHESTRATOR)
    until(lambda: "dispatches on" in lives.log, timeout_s=60)
    with db.connect(url=fresh_database) as conn, db.connect() as usual:
        is_, should_be = schema_snapshot.snapshot(conn), schema_snapshot.snapshot(usual)
        assert schema_snapshot.difference(should_be, is_) == []
        query = b"SELECT version, checksum FROM queue_schema_version ORDER BY version"
        assert conn.execute(query).fetchall() == usual.execute(query).fetchall()
    world.close()
