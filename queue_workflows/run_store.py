"""Runs: insert, read, change. The hosts' door; a call is one transaction, or joins the caller's."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any, cast

from queue_workflows import config, db, errors
from queue_workflows.dag import payload
from queue_workflows.db import app_connections, check_violations
from queue_workflows.engine import runs
from queue_workflows.types import NewRun, Row, Run

if TYPE_CHECKING:
    from typing_extensions import Unpack


@check_violations.translated()
def insert_run(
    *,
    run_id: str | None = None,
    workflow_name: str,
    parcel_id: str | None = None,
    out_dir: str | None = None,
    status: str = "queued",
    priority: int = 100,
    mode: str = "node",
    context: dict[str, Any] | None = None,
    conn: Any = None,
) -> Run:
    """Insert a run and return its row; a queued one of mode `node` is started by an orchestrator.

    `run_id` None: a new id. `conn` (psycopg, SQLAlchemy, Django): join the caller's transaction.
    Raises before any write: `InvalidPayload` for a context that cannot be stored, `ArgsRefused` for
    one that a workflow declared in Python does not take (both ValueErrors).
    """
    values = {
        "run_id": run_id or str(uuid.uuid4()),
        "workflow_name": workflow_name,
        "parcel_id": parcel_id,
        "out_dir": None if out_dir is None else str(out_dir),
        "status": status,
        "priority": priority,
        "mode": mode,
        "context": _object(context or {}, "context"),
    }
    if mode == "node":
        check_inputs(workflow_name, context or {})
    if conn is None:
        with db.statement() as own:
            return cast("Run", runs.submit(own, values))
    with app_connections.transaction(conn) as own:
        return cast("Run", runs.submit(own, values))


async def insert_run_async(*, conn: Any = None, **run: Unpack[NewRun]) -> Run:
    """`insert_run` for an event loop, which it does not block.

    `conn`: an AsyncConnection of psycopg or SQLAlchemy, or an AsyncSession; None: a connection of
    the engine's, in another thread. A call that is cancelled may have inserted the run all the
    same.
    """
    return await app_connections.call_async(insert_run, conn, **run)


def check_inputs(workflow_name: str, context: Any) -> None:
    """Raise `ArgsRefused` for a context that a workflow declared in this process does not take.

    It names what is missing, unknown or of the wrong type. The inputs of other workflows are not
    known here, and are not checked.
    """
    declared = config.get_config().workflow_map.get(workflow_name)
    if declared is not None:
        declared.check_inputs(context)


def _object(value: Any, what: str) -> str:
    if what == "context" and not isinstance(value, dict):
        raise errors.InvalidPayload(f"{what}: must be a JSON object")
    return payload.encode(value, what)


def get_run(run_id: str) -> Run | None:
    """The run, or None."""
    with db.statement() as conn:
        return cast("Run | None", runs.get(conn, run_id))


@check_violations.translated()
def update_run(run_id: str, **columns: Any) -> Run | None:
    """Set columns; the row, or None: no such run, or one that is over and would change status.

    A cancelled run stays cancelled; only `failed|cancelled -> queued` reopens one. Raises
    `UnknownColumn` (a ValueError) and `InvalidPayload`, with nothing written.
    """
    unknown = sorted(columns.keys() - runs.WRITABLE)
    if unknown:
        raise errors.UnknownColumn(
            f"update_run: {', '.join(unknown)}: columns are {', '.join(sorted(runs.WRITABLE))}"
        )
    if not columns:
        return get_run(run_id)
    values = {
        name: _object(value, name) if name in runs.JSON_COLUMNS and value is not None else value
        for name, value in columns.items()
    }
    if isinstance(values.get("error"), str):
        values["error"] = payload.error_text(values["error"])
    with db.transaction() as conn:
        return cast("Run | None", runs.update(conn, run_id, values))


def delete_run(run_id: str) -> bool:
    """Delete a run with its jobs, files, events and answers; whether there was one."""
    with db.transaction() as conn:
        return runs.delete(conn, run_id)


def reenqueue_running_for_resume() -> int:
    """Every running run → queued at priority 10, `resume_count` + 1; how many. For operators."""
    with db.transaction() as conn:
        return runs.requeue_running(conn)


def list_runs(*, limit: int = 50, status: str | None = None) -> list[Row]:
    """The newest runs, each with its node counts by status under `nodes` and `nodes_total`."""
    with db.statement() as conn:
        return runs.newest(conn, limit=limit, status=status)
