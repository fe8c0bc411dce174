"""Find the functions that run on five ways through the engine, in all processes together.

`python -m tests.support.tracer ingest` prints those of a way by file, in the order of their first
calls. A way is done several times in processes that are warm, and a function counts if it runs most
of the times: so what happens to run beside it, such as a heartbeat, does not count.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from queue_workflows import db, node_queue, workers
from tests.support import call_recorder, commands, constants, database, factories, reaper, toy_app
from tests.support.wait import until

TIMES, ENOUGH = 5, 3
"""So often a way is recorded, and in so many of the records is a function that counts."""
QUIET_S = 0.6
"""A way has ended when its last state is visible and no function is new for so long.

It is more than the 0.5 s between two checks of a worker's guards, which so always count. It does
not grow on a busy machine: the longer a record, the more periodic work is in it.
"""
HOST = "box"
QUEUE = "notes"
LEASE_S = 3600
PACE = {
    "QUEUE_WORKFLOWS_HOST_LABEL": HOST,
    "QUEUE_WORKFLOWS_STALE_WORKER_AFTER_S": "3600",
    "DL_HEARTBEAT_SEC": "600",
    "QUEUE_WORKFLOWS_CLAIM_POLL_S": "600",
    "QUEUE_WORKFLOWS_WORKER_CONTROL_POLL_S": "600",
    "QUEUE_WORKFLOWS_DEAD_WORKER_SWEEP_INTERVAL_S": "600",
    "QUEUE_WORKFLOWS_LEASE_RECLAIM_INTERVAL_S": "600",
    "QUEUE_WORKFLOWS_DISABLE_HW_METRICS": "1",
    "MEMORY_CHECK_INTERVAL": "600",
    **constants.env({"db.notifications.PING_S": 600, "history.COUNT_EVERY_S": 600}),
}
"""Long intervals: the work of a way is found by notifications, and the periodic work is rare."""


class Function(NamedTuple):
    """A function of the package: its file in it, its first line, and its name with its class."""

    file: str
    line: int
    name: str


class Width(NamedTuple):
    """How many functions run on a way, and in how many files they are."""

    functions: int
    files: int


class Fleet:
    """Processes of the toy app whose calls are recorded, and the database that they share."""

    def __init__(self, cli: commands.Commands, conn: db.Connection, folder: Path) -> None:
        self.conn = conn
        self.folder = folder
        self._cli = cli
        self._mark = 0
        (folder / call_recorder.MARK).write_bytes(b"\0")
        (folder / call_recorder.CALLS).touch()
        self.env = cli.env
        self.env |= PACE | {call_recorder.FOLDER: str(folder)}

    def start(self, script: str, *options: str) -> commands.Command:
        """Start a console script under the recorder."""
        run = (sys.executable, "-m", "tests.support.call_recorder")
        return self._cli.start(*run, script, *options)

    def orchestrator(self) -> commands.Command:
        """Start an orchestrator of the toy app."""
        return self.start("queue-orchestrator", "--app", commands.TOYHOST)

    def worker(self, queue: str) -> commands.Command:
        """Start a worker of the toy app."""
        lease = ("--lease-seconds", str(LEASE_S))
        return self.start("queue-claim-worker", "--queue", queue, *lease, "--app", commands.TOYHOST)

    def record(self, way: Callable[[], object]) -> list[Function]:
        """Return the functions that run from now on until the way has ended, in their order."""
        self._mark += 1
        self._set(self._mark)
        try:
            way()
            self._settle()
        finally:
            self._set(0)
        found = call_recorder.calls(self.folder, self._mark)
        return [*dict.fromkeys(Function(call.file, call.line, call.name) for call in found)]

    def trace(
        self, way: Callable[[], object], before: Callable[[], object] = lambda: None
    ) -> list[Function]:
        """Return the functions of a way; `before` makes the processes ready each time.

        The first time is a warm-up, which does what processes do once.
        """
        found: list[list[Function]] = []
        for _ in range(TIMES + 1):
            before()
            found.append(self.record(way))
        times = collections.Counter(itertools.chain(*found[1:]))
        return [function for function, count in times.items() if count >= ENOUGH]

    def _set(self, mark: int) -> None:
        with (self.folder / call_recorder.MARK).open("r+b") as marked:
            marked.write(bytes([mark]))

    def _settle(self) -> None:
        """Wait until no process calls a function that it has not called since the mark."""
        calls = self.folder / call_recorder.CALLS
        size, since = -1, 0.0

        def is_quiet() -> bool:
            nonlocal size, since
            if (now := calls.stat().st_size) != size:
                size, since = now, time.monotonic()
            return time.monotonic() - since > QUIET_S

        until(is_quiet, timeout_s=60)


def job(fleet: Fleet, **args: str | bool) -> str:
    """Insert an ingest job by SQL; return its id."""
    row = factories.ingest(
        fleet.conn, task_name="note", queue=QUEUE, args={"reason": "traced"} | args
    )
    return str(row["id"])


def run(fleet: Fleet) -> str:
    """Insert a run of two nodes by SQL; return its id."""
    context = {"folder": str(fleet.folder)}
    return factories.run(fleet.conn, workflow_name="chain", status="queued", context=context)


def has_ended(fleet: Fleet, table: str, row_id: str) -> bool:
    """Return whether the row is completed; it may not end in another way."""
    status = factories.one(fleet.conn, f"SELECT status FROM {table} WHERE id = %s", row_id)
    assert status in {"queued", "running", "completed"}
    return status == "completed"


def complete_job(fleet: Fleet) -> None:
    """Insert an ingest job and wait for its end."""
    job_id = job(fleet)
    until(lambda: has_ended(fleet, "ingest_jobs", job_id))


def complete_run(fleet: Fleet) -> None:
    """Insert a run and wait for its end."""
    run_id = run(fleet)
    until(lambda: has_ended(fleet, "workflow_runs", run_id))


def ingest(fleet: Fleet) -> list[Function]:
    """An ingest job, from its INSERT to its end, with a worker and the orchestrator."""
    fleet.orchestrator()
    fleet.worker("cpu")
    fleet.worker(QUEUE)
    fleet.record(lambda: complete_run(fleet))
    return fleet.trace(lambda: complete_job(fleet))


def run_of_two_nodes(fleet: Fleet) -> list[Function]:
    """A run of two nodes, from its INSERT to its end, with a worker and the orchestrator."""
    fleet.orchestrator()
    fleet.worker("cpu")
    return fleet.trace(lambda: complete_run(fleet))


def off(fleet: Fleet) -> list[Function]:
    """OFF `hard` while a job runs, from the row that orders it to the end of the worker."""
    started: list[commands.Command] = []
    fleet.orchestrator()

    def begin() -> None:
        workers.enable(HOST, QUEUE)
        fleet.conn.execute("UPDATE ingest_jobs SET status = 'cancelled' WHERE status = 'queued'")
        started.append(fleet.worker(QUEUE))
        complete_job(fleet)
        starts = len(toy_app.pids(fleet.folder, "note"))
        job(fleet, folder=str(fleet.folder), wait=True)
        until(lambda: len(toy_app.pids(fleet.folder, "note")) > starts)

    def switch_off() -> None:
        workers.disable(HOST, QUEUE, stop_policy="hard")
        assert started[-1].wait() == 79, started[-1].err

    return fleet.trace(switch_off, lambda: fleet.record(begin))


def lost_lease(fleet: Fleet) -> list[Function]:
    """A lease that has lapsed, in the orchestrator, from the lapse until the job is queued."""
    fleet.env["QUEUE_WORKFLOWS_LEASE_RECLAIM_INTERVAL_S"] = "0.5"
    fleet.orchestrator()

    def claim() -> None:
        job(fleet)
        claimed = node_queue.claim_next_ingest_job(QUEUE)
        assert claimed is not None

    def lapse() -> None:
        fleet.conn.execute(
            "UPDATE ingest_jobs SET lease_expires_at = now() - interval '1 second'"
            " WHERE status = 'running'"
        )
        running = "SELECT count(*) FROM ingest_jobs WHERE status = 'running'"
        until(lambda: not factories.one(fleet.conn, running))

    return fleet.trace(lapse, claim)


def show(fleet: Fleet) -> list[Function]:
    """`queue-workflows show RUN`, from the start of its process to its end."""
    roles = [
        fleet.orchestrator(),
        fleet.worker("cpu"),
    ]
    run_id = run(fleet)
    until(lambda: has_ended(fleet, "workflow_runs", run_id))
    for role in roles:
        role.send(signal.SIGTERM)
        assert role.wait() == 0, role.err

    def shown() -> None:
        command = fleet.start("queue-workflows", "show", run_id)
        assert command.wait() == 0, command.err
        assert "completed" in command.out

    return fleet.trace(shown)


WAYS: dict[str, Callable[[Fleet], list[Function]]] = {
    "ingest": ingest, "run": run_of_two_nodes, "off": off, "lost-lease": lost_lease, "show": show,
}  # fmt: skip


def width(functions: Sequence[Function]) -> Width:
    """Return the width of a way."""
    return Width(len(functions), len({function.file for function in functions}))


def text(functions: Sequence[Function]) -> str:
    """Return the functions by file, in the order of their first calls, and how many they are."""
    files: dict[str, list[str]] = {}
    for function in functions:
        files.setdefault(function.file, []).append(f"  {function.line:>4} {function.name}")
    total = f"{len(functions)} functions in {len(files)} files"
    return "\n".join([*itertools.chain(*([file, *names] for file, names in files.items())), total])


def main(argv: Sequence[str] | None = None) -> int:
    """Trace a way on a server of its own and print it; return 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.tracer", description=__doc__)
    parser.add_argument("way", choices=WAYS)
    way = parser.parse_args(argv).way
    reaper.start()
    with contextlib.ExitStack() as stack:
        dsn = stack.enter_context(database.throw_away_server())
        stack.enter_context(database.Database(dsn)).migrate()
        stack.enter_context(database.environment(QUEUE_WORKFLOWS_DB_URL=dsn))
        stack.callback(db.close_pool)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        conn = stack.enter_context(db.connect())
        cli = stack.enter_context(commands.commands(QUEUE_WORKFLOWS_DB_URL=dsn))
        found = WAYS[way](Fleet(cli, conn, folder))
    print(text(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
