"""Submit, start, complete, fail, cancel and reopen runs, and read them for the dispatcher.

Each function takes part in the transaction of its connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from queue_workflows import db
from queue_workflows.db import check_violations, statements
from queue_workflows.types import JsonDict, Row

WRITABLE = frozenset(
    {
        "parcel_id", "workflow_name", "status", "priority", "current_step_id", "progress_pct",
        "steps_done", "context", "input_spec", "error", "out_dir", "mode", "resume_count",
        "queued_at", "started_at", "finished_at", "available_at",
    }
)  # fmt: skip
"""The columns that `update` can set."""
JSON_COLUMNS = frozenset({"steps_done", "context", "input_spec"})


def submit(conn: db.Connection, values: dict[str, Any]) -> Row:
    """Insert a run and return its row; `context` and `headers` are JSON texts.

    A status or mode other than the default needs the right to insert these columns. Raises
    `InvalidConfig` for a value that is none of its column's type.
    """
    statement = statements.runs.insert
    if (values["status"], values["mode"]) == ("queued", "node"):
        plain = values.setdefault("headers", None) is None
        statement = statements.runs.submit if plain else statements.runs.submit_with_headers
    with check_violations.of_columns("workflow_runs", values):
        row = conn.execute(statement, values).fetchone()
    assert row is not None
    return row


def update(conn: db.Connection, run_id: str, values: dict[str, Any]) -> Row | None:
    """Set columns of WRITABLE (JSON ones as text) and return the row.

    Returns None if there is no such run, and if the status of a run that is over would change,
    but for `failed` or `cancelled` to `queued`, which reopens the run. Raises `InvalidConfig` for
    a value that is none of its column's type.
    """
    given = dict.fromkeys(WRITABLE) | values | {"run_id": run_id, "given": list(values)}
    with check_violations.of_columns("workflow_runs", values):
        return conn.execute(statements.runs.update, given).fetchone()


def delete(conn: db.Connection, run_id: str) -> bool:
    """Delete a run with everything that belongs to it; return whether there was one."""
    return conn.execute(statements.runs.delete, {"run_id": run_id}).rowcount == 1


# --- reads -------------------------------------------------------------------------------------


def get(conn: db.Connection, run_id: str) -> Row | None:
    """Return the run, or None."""
    return conn.execute(statements.runs.get, {"run_id": run_id}).fetchone()


def output(conn: db.Connection, run_id: str) -> JsonDict | None:
    """Return what a completed run returned, or None."""
    row = conn.execute(statements.runs.output, {"run_id": run_id}).fetchone()
    return None if row is None else row["output"]


def head(conn: db.Connection, run_id: str) -> Row | None:
    """Return the run without its definition and context, or None.

    `born`: when it was created, as an integer; a run that was deleted and submitted again has
    another one.
    """
    return conn.execute(statements.runs.head, {"run_id": run_id}, prepare=True).fetchone()


def lock(conn: db.Connection, run_id: str, *, nowait: bool = False) -> Row | None:
    """Lock the run's row against other dispatchers and return what `head` returns.

    Inserts of rows that reference the run pass the lock. Returns None if there is no such run, and
    if `nowait` and another transaction has it locked.
    """
    statement = statements.runs.lock_if_free if nowait else statements.runs.lock
    return conn.execute(statement, {"run_id": run_id}, prepare=True).fetchone()


def startable(
    conn: db.Connection, limit: int, *, undefined: bool = True, aside: Sequence[str] = ()
) -> list[Row]:
    """Return what `head` returns of queued runs that may start, in the order of their starts.

    `undefined`: also those that have no definition yet. `aside`: ids of runs to leave out.
    """
    parameters = {"undefined": undefined, "set_aside": list(aside), "limit": limit}
    return conn.execute(statements.runs.startable, parameters, prepare=True).fetchall()


def undefined(conn: db.Connection, limit: int) -> list[str]:
    """Return the ids of queued runs that may start and have no definition yet."""
    rows = conn.execute(statements.runs.undefined, {"limit": limit}).fetchall()
    return [row["id"] for row in rows]


def definition(conn: db.Connection, run_id: str) -> dict[str, Any] | None:
    """Return the frozen definition; None before the run's first start."""
    row = conn.execute(statements.runs.definition, {"run_id": run_id}, prepare=True).fetchone()
    return row["definition"] if row else None


def definition_texts(conn: db.Connection, run_ids: Sequence[str]) -> dict[str, str]:
    """Return the frozen definitions as JSON texts by run; a run has none before its first start.

    The same definition is always the same text, as jsonb has one form.
    """
    parameters = {"ids": list(run_ids), "most": None}
    rows = conn.execute(statements.runs.definition_texts, parameters, prepare=True).fetchall()
    return {row["id"]: row["text"] for row in rows}


def context_type(conn: db.Connection, run_id: str) -> str | None:
    """Return the JSON type of a run's context, as `object`; None if there is no such run."""
    row = conn.execute(statements.runs.context_type, {"run_id": run_id}, prepare=True).fetchone()
    return row["kind"] if row else None


def context(conn: db.Connection, run_id: str) -> Any:
    """Return the run's own context, without its nodes' outputs; None if there is no such run."""
    row = conn.execute(statements.runs.context, {"run_id": run_id}, prepare=True).fetchone()
    return row["context"] if row else None


def newest(
    conn: db.Connection,
    *,
    limit: int,
    status: str | None = None,
    workflow: str | None = None,
    before: tuple[datetime, str] | None = None,
) -> list[Row]:
    """Return the newest runs, each with its node counts by status under `nodes`.

    `nodes_total` is None before the run's first start. `status`, `workflow` None: every one.
    `before`: `created_at` and id of the run after which the list goes on.
    """
    at, run_id = before or (None, None)
    given = {"limit": limit, "status": status, "workflow": workflow}
    given |= {"before": at, "before_id": run_id}
    return conn.execute(statements.runs.newest, given).fetchall()


# --- transitions -------------------------------------------------------------------------------


def freeze_definition(conn: db.Connection, run_id: str, definition_json: str, digest: str) -> bool:
    """Store the definition of a run that has none; return whether it was stored."""
    parameters = {"run_id": run_id, "definition": definition_json, "digest": digest}
    found = conn.execute(statements.runs.freeze_definition, parameters, prepare=True)
    return found.rowcount == 1


def start(conn: db.Connection, run_id: str) -> bool:
    """Change a queued run to running; return False if it was not queued."""
    return conn.execute(statements.runs.start, {"run_id": run_id}, prepare=True).rowcount == 1


def start_fresh(
    conn: db.Connection, run: Row, definition_json: str, digest: str, rows_json: str
) -> int | None:
    """Freeze the definition, change the run to running and insert its first nodes.

    Returns how many rows are new. Returns None, with nothing written, for a run that has a
    definition or a node, differs from `run` by now, is locked, or whose context is no object.
    """
    parameters = {
        "run_id": run["id"],
        "generation": run["generation"],
        "born": run["born"],
        "definition": definition_json,
        "digest": digest,
        "nodes": rows_json,
        "out_dir": run["out_dir"],
        "version": run["version"],
    }
    row = conn.execute(statements.runs.start_fresh, parameters, prepare=True).fetchone()
    return row["n"] if row else None


def set_out_dir(conn: db.Connection, run_id: str, out_dir: str) -> str | None:
    """Store the folder of a run that has none; return the run's folder, None: no such run."""
    parameters = {"run_id": run_id, "out_dir": out_dir}
    row = conn.execute(statements.runs.set_out_dir, parameters, prepare=True).fetchone()
    return row["out_dir"] if row else None


def complete(conn: db.Connection, run_id: str) -> bool:
    """Complete a run that has started; return False if it was over or queued."""
    return conn.execute(statements.runs.complete, {"run_id": run_id}, prepare=True).rowcount == 1


def fail(conn: db.Connection, run_id: str, error: str) -> bool:
    """Fail a run, which cancels its waiting nodes; return False if it was over."""
    return conn.execute(statements.runs.fail, {"run_id": run_id, "error": error}).rowcount == 1


def cancel(conn: db.Connection, run_id: str, error: str | None = None) -> Row | None:
    """Cancel a run and return its row; None if there is no such run or it is over."""
    return conn.execute(statements.runs.cancel, {"run_id": run_id, "error": error}).fetchone()


def running(conn: db.Connection, after: str, limit: int) -> list[str]:
    """Return the ids of up to `limit` running runs after the id `after`, in their order."""
    rows = conn.execute(statements.runs.running, {"after": after, "limit": limit}).fetchall()
    return [row["id"] for row in rows]


def stalled(conn: db.Connection, ids: Sequence[str], quiet_s: float) -> list[str]:
    """Return the runs of these that run though nothing moves them, as plain SQL may leave them.

    `quiet_s`: how long ago their last node must have ended.
    """
    rows = conn.execute(statements.runs.stalled, {"ids": list(ids), "quiet_s": quiet_s}).fetchall()
    return [row["run_id"] for row in rows]


def is_stalled(conn: db.Connection, run_id: str) -> bool:
    """Return whether a run is running and nothing moves it forward."""
    return bool(conn.execute(statements.runs.is_stalled, {"run_id": run_id}).fetchall())


def stopper(conn: db.Connection, run_id: str) -> Row | None:
    """Return `node_id`, `status` (also `deleted`) and `error` of the node that stops a run."""
    return conn.execute(statements.runs.stopper, {"run_id": run_id}).fetchone()


def delay_start(conn: db.Connection, run_id: str, *, error: str, after_s: float) -> int:
    """Count a start that failed and delay the next one; return how many starts have failed."""
    parameters = {"run_id": run_id, "error": error, "after_s": after_s}
    row = conn.execute(statements.runs.delay_start, parameters).fetchone()
    return row["start_attempts"] if row else 0


def reopen(conn: db.Connection, run_id: str) -> Row | None:
    """Queue a failed or cancelled run in a new generation and return its row; None: neither."""
    return conn.execute(statements.runs.reopen, {"run_id": run_id}).fetchone()


def reopen_nodes(conn: db.Connection, run_id: str, node_ids: list[str]) -> Row | None:
    """Queue a run that is over, with these nodes to be run again, and return its row, or None.

    The run goes two generations on, and the nodes are cancelled in the one between, so that the
    start that follows opens them. Requests to end the nodes that still run are withdrawn.
    """
    parameters = {"run_id": run_id}
    row = conn.execute(statements.runs.reopen_two_generations_on, parameters).fetchone()
    if row is not None:
        between = {"generation": row["generation"] - 1, "nodes": node_ids}
        conn.execute(statements.runs.cancel_nodes_again, parameters | between)
        conn.execute(statements.runs.withdraw_cancel_requests, parameters)
    return row


def requeue_running(conn: db.Connection) -> int:
    """Queue every running run at the front and count a resume of each; return how many."""
    return conn.execute(statements.runs.requeue_running).rowcount
