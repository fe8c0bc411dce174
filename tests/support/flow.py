"""Run toy workflows step by step, or by real workers in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

import queue_workflows
from queue_workflows import (
    claim_worker,
    db,
    dispatcher,
    node_executor,
    node_pool,
    node_queue,
    run_store,
)
from queue_workflows.db import statements
from queue_workflows.dispatch import advance, drain, run_cache
from queue_workflows.run import node_call
from queue_workflows.worker import node_plans

Spec = dict[str, Any]
ROUNDS = 200


def nodes(**deps: str) -> list[Spec]:
    """Return pipeline nodes made of `name="dep dep"`, each with the handler `ok`."""
    return [
        {"id": name, "node": "ok", "depends_on": text.split()}
        if text
        else {"id": name, "node": "ok"}
        for name, text in deps.items()
    ]


def step(step_id: str, pipeline: str | None = None, **more: Any) -> Spec:
    """Return a step of kind pipeline, by default of the pipeline that has its name."""
    return {"id": step_id, "kind": "pipeline", "pipeline": pipeline or step_id, **more}


def ask(step_id: str, widget: str = "file_upload", **more: Any) -> Spec:
    """Return a step of kind input whose answer is stored as `answer`."""
    return {"id": step_id, "kind": "input", "widget": widget, "target": "answer", **more}


def nothing() -> Spec:
    """Do nothing: a handler without arguments and result."""
    return {}


class Emptying(claim_worker.ClaimWorker):
    """A worker whose `run_once` runs all jobs that it finds, up to `left`, which it lowers.

    A worker for each job would take ten times as long as a short job.
    """

    left = ROUNDS

    @contextmanager
    def _running(self, *given: Any, **more: Any) -> Generator[Any]:
        with super()._running(*given, **more) as worker:
            (own,) = worker._desk.queues
            own.left = self.left
            yield worker
            self.left = int(own.left)


class Flow:
    """The provider of workflows that a test writes down, and a pool that dispatches its runs."""

    def __init__(self) -> None:
        self.workflows: dict[str, Any] = {}
        self.pipelines: dict[str, Any] = {}
        self.pool = node_pool.NodePool()
        self.provide()
        queue_workflows.register_node("ok", nothing)

    def provide(self, **more: Any) -> None:
        """Set this as the workflow provider of the process."""
        queue_workflows.set_workflow_provider(
            self.workflows.__getitem__, self.pipelines.__getitem__, **more
        )

    def define(self, *steps: Spec, name: str = "w", **pipelines: list[Spec]) -> None:
        """Define the workflow `name`, and pipelines by keyword."""
        self.workflows[name] = {"name": name, "steps": list(steps)}
        for key, members in pipelines.items():
            self.pipelines[key] = {"name": key, "nodes": members}

    def dag(self, *members: Spec, **deps: str) -> None:
        """Define the workflow `w` of one step `s` with these nodes."""
        self.define(step("s"), s=[*members, *nodes(**deps)])

    def submit(self, **columns: Any) -> str:
        """Submit a queued run of `w`; return its id."""
        return run_store.insert_run(**{"workflow_name": "w"} | columns)["id"]

    def started(self, **columns: Any) -> str:
        """Start a run of `w`, so that its first nodes are queued; return its id."""
        run_id = self.submit(**columns)
        dispatcher.start_run(run_id)
        return run_id

    def look(self) -> None:
        """Let the orchestrator check once."""
        self.pool.check()

    def close(self) -> None:
        self.pool.stop()

    def work(self, queue: str = "cpu", **more: Any) -> int:
        """Run what is queued with a worker of its own; how many jobs."""
        worker = Emptying(queue=queue, host="box", **more)
        worker.run_once()
        if not worker.left:
            raise AssertionError(f"the {queue} queue does not get empty")
        return ROUNDS - worker.left

    def go(self, *queues: str) -> None:
        """Run workers and orchestrator in turn until nothing is left to do."""
        idle = 0
        for _ in range(ROUNDS):
            self.look()
            done = sum(self.work(queue) for queue in queues or ("cpu",) if waits(queue))
            idle = 0 if done or pending() else idle + 1
            if idle == 2:
                return
        raise AssertionError("the run does not end")


def waits(queue: str) -> bool:
    """Return whether a job of a queue waits, be it due or not."""
    with db.transaction() as conn:
        found = conn.execute(
            "SELECT FROM workflow_node_jobs WHERE queue = %(queue)s AND status = 'queued' UNION ALL"
            " SELECT FROM ingest_jobs WHERE queue = %(queue)s AND status = 'queued' LIMIT 1",
            {"queue": queue},
        )
        return found.fetchone() is not None


def pending() -> bool:
    """Return whether an orchestrator has something to do for what has ended by now."""
    with db.transaction() as conn:
        found = conn.execute(
            "SELECT FROM workflow_dispatch_events WHERE processed_at IS NULL LIMIT 1"
        )
        return found.fetchone() is not None


def runs(worker: claim_worker.ClaimWorker, most: int) -> Generator[None]:
    """Run jobs one by one until there is none, at most so many; yield after each."""
    for _ in range(most):
        if not worker.run_once():
            return
        yield


def run(run_id: str) -> Spec:
    """Return the run's row; there must be one."""
    found = run_store.get_run(run_id)
    assert found is not None
    return found


def status(run_id: str) -> str:
    return run(run_id)["status"]


def jobs(run_id: str) -> dict[str, Spec]:
    """Return the run's jobs by node id, in the order of their queueing."""
    rows = sorted(node_queue.list_jobs_for_run(run_id), key=lambda row: row["seq"])
    return {row["node_id"]: row for row in rows}


def job(run_id: str, node_id: str) -> Spec:
    """Return a node's job; there must be one. What the other nodes have returned is not read."""
    with db.transaction() as conn:
        found = conn.execute(
            "SELECT * FROM workflow_node_jobs WHERE run_id = %s AND node_id = %s", (run_id, node_id)
        ).fetchone()
    assert found is not None, f"{node_id} is not among {[*states(run_id)]}"
    return found


def states(run_id: str) -> dict[str, str]:
    """Return the status of each node by its id, in the order of their queueing.

    What the nodes have returned is not read: it may be hundreds of megabytes.
    """
    with db.transaction() as conn:
        found = conn.execute(
            "SELECT node_id, status FROM workflow_node_jobs WHERE run_id = %s ORDER BY seq",
            (run_id,),
        )
        return {row["node_id"]: row["status"] for row in found}


def dispatch(run_id: str, **more: Any) -> int:
    """Dispatch the events of a run; how many rows are new."""
    return drain.drain_run(run_id, **more)


def dispatch_all(**more: Any) -> int:
    """Dispatch the events of all runs; return of how many."""
    return drain.drain_outbox(**more)


def dispatch_on(conn: db.Connection, run_id: str) -> int:
    """Dispatch the events of a run on a connection in autocommit mode; how many rows are new."""
    return drain.drain_run(run_id, begin=run_cache.on_connection(conn))


def dispatch_within(conn: db.Connection, run_id: str) -> int:
    """Dispatch the events of a run in the open transaction of a connection."""
    return drain.drain_run(run_id, begin=run_cache.in_open_transaction(conn))


def start_on(conn: db.Connection, run_id: str) -> int:
    """Start a run on a connection in autocommit mode; how many rows are new."""
    return advance.start_run(run_id, begin=run_cache.on_connection(conn))


def start_queued() -> int:
    """Start the queued runs that are due, as an orchestrator does; return how many."""
    return advance.start_queued()[0]


def before_input_reads(patch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    """Call this before a worker reads the inputs of a node; what it raises, the read raises."""
    read = node_call.inputs_of

    def reading(job: Spec, context: Callable[[list[str] | None], Any]) -> node_call.Inputs:
        context(None)
        return read(job, context)

    def answered(*_: object) -> Spec:
        call()
        return {}

    patch.setattr(node_call, "inputs_of", reading)
    patch.setattr(node_executor, "_context", answered)


def fail_dispatches(patch: pytest.MonkeyPatch, error: Exception) -> None:
    """Let all that workers plan raise this."""

    def fail(*_: object, **__: object) -> Any:
        raise error

    for module, names in (
        (node_plans, ("plan_ahead",)),
        (run_cache, ("unknown", "learned", "recall")),
    ):
        for name in names:
            patch.setattr(module, name, fail)


@contextmanager
def unplanned() -> Generator[None]:
    """Let workers leave what follows from their nodes to a later dispatch."""
    plan, node_plans.plan_ahead = node_plans.plan_ahead, lambda done: None
    try:
        yield
    finally:
        node_plans.plan_ahead = plan


@contextmanager
def elsewhere() -> Generator[None]:
    """Let a block read and remember runs as another process does, apart from this one."""
    ours, run_cache._cache = run_cache._cache, type(run_cache._cache)(run_cache.CACHED_RUNS)
    try:
        yield
    finally:
        run_cache._cache = ours


def forget(run_id: str) -> None:
    """Forget what this process has read of a run, as another process has not read it."""
    run_cache.forget(run_id)


def forget_all() -> None:
    """Forget what this process has read of all runs."""
    run_cache._cache = type(run_cache._cache)(run_cache.CACHED_RUNS)


def count_items(
    conn: db.Connection, run_id: str, map_id: str, done: list[str], failed: Mapping[str, str]
) -> list[str]:
    """Count items of a map as ended, those that failed with their errors; return which this opens.

    An item is named by its key.
    """
    given = {"run_id": run_id, "map": map_id, "done": done, "failed": json.dumps(failed)}
    found = statements.maps.step(conn, **given)
    assert found is not None
    return [item["key"] for item in found["items"]]


def complete(run_id: str, node_id: str, **delta: Any) -> None:
    """Complete a node by hand, without dispatching it."""
    done = node_queue.mark_completed(job(run_id, node_id)["id"], context_delta=delta)
    assert done is not None


def finish(run_id: str, node_id: str, **delta: Any) -> int:
    """Complete a node by hand and dispatch it; how many rows are new."""
    complete(run_id, node_id, **delta)
    return dispatch(run_id)


def fail(run_id: str, node_id: str, error: str = "broke") -> None:
    """Fail a node by hand and dispatch it."""
    assert node_queue.mark_failed(job(run_id, node_id)["id"], error=error) is not None
    dispatch(run_id)


def body(returns: Callable[..., Any] | Mapping[str, Any], name: str = "body") -> None:
    """Register a handler under a name; a mapping is what it returns."""
    given = returns if callable(returns) else lambda: dict(returns)
    queue_workflows.register_node(name, given)
