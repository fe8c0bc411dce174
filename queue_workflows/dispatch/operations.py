"""Cancel and retry runs and jobs; each call is one transaction."""

from __future__ import annotations

from typing import Any

from queue_workflows import db, errors
from queue_workflows.dag import frozen_definition
from queue_workflows.db import app_connections, check_violations
from queue_workflows.engine import cancellation, job_tables, nodes, retry, runs
from queue_workflows.types import Row


def cancel_run(run_id: str, *, conn: Any = None) -> Row | None:
    """Cancel a run and its waiting nodes in one transaction; running nodes get `cancel_event`.

    Returns the run's row, or None if there is no such run or it is over. `conn` (psycopg,
    SQLAlchemy, Django): join the caller's transaction.
    """
    with app_connections.transaction(conn) as own:
        return runs.cancel(own, run_id)


async def cancel_run_async(run_id: str, *, conn: Any = None) -> Row | None:
    """`cancel_run` for an event loop, which it does not block.

    `conn`: an AsyncConnection of psycopg or SQLAlchemy, or an AsyncSession; None: a connection of
    the engine's, in another thread. A call that is cancelled may have cancelled the run all the
    same.
    """
    return await app_connections.call_async(cancel_run, conn, run_id)


def cancel_job(job_id: str, *, conn: db.Connection | None = None) -> Row | None:
    """Cancel a job of either family: a waiting one at once, a running one through `cancel_event`.

    A cancelled node cancels its run too, since its dependents can never run. Returns the job's row,
    or None if there is no such job or it is over. `conn`: join a transaction.
    """
    with db.transaction(conn) as own:
        job = nodes.get(own, job_id)
        if job is None:
            return cancellation.cancel_job(own, job_tables.INGEST_JOBS, job_id)
        runs.lock(own, job["run_id"])
        row = cancellation.cancel_job(own, job_tables.NODE_JOBS, job_id)
        if row is not None:
            runs.cancel(own, job["run_id"])
        return row


@check_violations.translated()
def retry_run(run_id: str, *, from_node: str | None = None, conn: Any = None) -> Row:
    """Run a finished run again in a new generation; return its row.

    `conn` (psycopg, SQLAlchemy, Django): join the caller's transaction.
    Completed nodes keep their outputs, but for `from_node` and what depends on it. Raises
    `UnknownJob` (a KeyError) for no such run or node, `InvalidConfig` (a ValueError) for a run that
    is not over, a completed one without `from_node`, and while a node to be run again still runs.
    """
    with app_connections.transaction(conn) as own:
        # This statement begins the caller's transaction if there is none; otherwise the block
        # below would begin and commit one. The block is for autocommit connections, on which the
        # row's lock would not last from one statement to the next.
        if runs.head(own, run_id) is None:
            raise errors.UnknownJob(f"no run {run_id!r}")
        with own.transaction():
            return _retry(own, run_id, from_node)


async def retry_run_async(run_id: str, *, from_node: str | None = None, conn: Any = None) -> Row:
    """`retry_run` for an event loop, which it does not block.

    `conn`: an AsyncConnection of psycopg or SQLAlchemy, or an AsyncSession; None: a connection of
    the engine's, in another thread. A call that is cancelled may have reopened the run all the
    same.
    """
    return await app_connections.call_async(retry_run, conn, run_id, from_node=from_node)


def _retry(conn: db.Connection, run_id: str, from_node: str | None) -> Row:
    run = runs.lock(conn, run_id)
    if run is None:
        raise errors.UnknownJob(f"no run {run_id!r}")
    if run["status"] not in job_tables.TERMINAL:
        raise errors.InvalidConfig(
            f"run {run_id!r} is {run['status']}: only a finished one is retried"
        )
    if run["generation"] > job_tables.LAST_GENERATION - 2:
        raise errors.InvalidConfig(
            f"run {run_id!r} is in generation {run['generation']}, the last one that can be "
            "stored: submit it again as a new run"
        )
    if from_node is not None:
        again = _with_dependents(conn, run_id, from_node)
        _refuse_running(conn, run_id, again)
        reopened = runs.reopen_nodes(conn, run_id, sorted(again))
    elif run["status"] == "completed":
        raise errors.InvalidConfig(f"run {run_id!r} is completed: name the node to retry from")
    else:
        reopened = runs.reopen(conn, run_id)
    assert reopened is not None
    return reopened


def _with_dependents(conn: db.Connection, run_id: str, node_id: str) -> set[str]:
    """Return a node and all nodes that depend on it."""
    stored = runs.definition(conn, run_id)
    walk = None if stored is None else frozen_definition.check(stored)
    if walk is None or node_id not in walk.nodes:
        raise errors.UnknownJob(f"run {run_id!r} has no node {node_id!r}")
    found, todo = {node_id}, [node_id]
    while todo:
        following = set(walk.downstream(todo.pop())) - found
        found |= following
        todo += following
    return found


def _refuse_running(conn: db.Connection, run_id: str, again: set[str]) -> None:
    """Refuse if a node still runs: it would add a result of the old generation."""
    for node_id in sorted(nodes.running_among(conn, run_id, again)):
        raise errors.InvalidConfig(
            f"node {node_id!r} of run {run_id!r} still runs: retry once it has ended"
        )


@check_violations.translated()
def retry_job(job_id: str, *, conn: db.Connection | None = None) -> Row:
    """Run a failed or cancelled job again in a new generation; return its row.

    A node's retry reopens its run, whose start queues the node. Raises `UnknownJob` (a KeyError),
    `InvalidConfig` (a ValueError), and `IdempotencyClash` if another job has its idempotency key by
    now. `conn`: join a transaction.
    """
    with db.transaction(conn) as own:
        job = nodes.get(own, job_id)
        if job is None:
            row = retry.reopen_ingest(own, job_id)
            if row is None:
                raise errors.UnknownJob(
                    f"no failed or cancelled job {job_id!r} with a generation to go"
                )
            return row
        if job["status"] not in ("failed", "cancelled"):
            raise errors.InvalidConfig(
                f"job {job_id!r} is {job['status']}: only a failed or cancelled one is retried"
            )
        _retry(own, job["run_id"], None)
        return nodes.get(own, job_id) or job
