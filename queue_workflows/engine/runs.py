"""Runs as rows, and the one statement for each change of their status."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psycopg import sql

from queue_workflows import db
from queue_workflows.types import Row

WRITABLE = frozenset(
    {
        "parcel_id", "workflow_name", "status", "priority", "current_step_id", "progress_pct",
        "steps_done", "context", "input_spec", "error", "out_dir", "mode", "resume_count",
        "queued_at", "started_at", "finished_at", "available_at",
    }
)  # fmt: skip
JSON_COLUMNS = frozenset({"steps_done", "context", "input_spec"})


_HEAD_COLUMNS = (
    "SELECT id, workflow_name, status, priority, mode, out_dir, generation, start_attempts,"
    " definition IS NOT NULL AS has_definition,"
    " queue_workflows_born(created_at) AS born FROM workflow_runs"
)
"""`born` never raises, as an infinite time would in a bare cast; see `queue_workflows_born`."""


def insert(conn: db.Connection, values: dict[str, Any]) -> Row:
    """Insert a run and return its row; `context` is JSON text.

    Columns that have their default are not named: `status` and `mode` are not a submitter's to set.
    """
    named = [name for name in _INSERTED if values[name] != _DEFAULTS.get(name)]
    row = conn.execute(
        sql.SQL("INSERT INTO workflow_runs (id{}) VALUES (%(run_id)s{}) RETURNING *").format(
            sql.SQL("").join(sql.SQL(", {}").format(sql.Identifier(name)) for name in named),
            sql.SQL("").join(
                sql.SQL(", {}{}").format(
                    sql.Placeholder(name), sql.SQL("::jsonb" if name in JSON_COLUMNS else "")
                )
                for name in named
            ),
        ),
        values,
    ).fetchone()
    assert row is not None
    return row


_INSERTED = ("workflow_name", "parcel_id", "out_dir", "status", "priority", "mode", "context")
_DEFAULTS: dict[str, Any] = {"status": "queued", "mode": "node"}


def get(conn: db.Connection, run_id: str) -> Row | None:
    """The run, or None."""
    return conn.execute("SELECT * FROM workflow_runs WHERE id = %s", (run_id,)).fetchone()


def delete(conn: db.Connection, run_id: str) -> bool:
    """Delete a run and all that hangs on it; whether there was one."""
    return conn.execute("DELETE FROM workflow_runs WHERE id = %s", (run_id,)).rowcount == 1


def update(conn: db.Connection, run_id: str, values: dict[str, Any]) -> Row | None:
    """Set columns (JSON ones as text); None: no such run, or a terminal one would change status.

    `failed|cancelled -> queued` is let through: it reopens the run.
    """
    sets = [
        sql.SQL("{} = {}{}").format(
            sql.Identifier(name),
            sql.Placeholder(name),
            sql.SQL("::jsonb" if name in JSON_COLUMNS else ""),
        )
        for name in values
    ]
    return conn.execute(
        sql.SQL(
            "UPDATE workflow_runs SET {}, updated_at = now() WHERE id = %(run_id)s"
            " AND (%(to)s::text IS NULL OR mode <> 'node' OR status = %(to)s"
            " OR status NOT IN ('completed', 'failed', 'cancelled')"
            " OR (%(to)s = 'queued' AND status IN ('failed', 'cancelled'))) RETURNING *"
        ).format(sql.SQL(", ").join(sets)),
        values | {"run_id": run_id, "to": values.get("status")},
    ).fetchone()


def startable(
    conn: db.Connection, limit: int, *, undefined: bool = True, aside: Sequence[str] = ()
) -> list[Row]:
    """Queued runs that may start now, in the order in which they should, as `head` returns them.

    `undefined`: those too that have no definition yet. `aside`: ids to leave out.
    """
    return conn.execute(
        _HEAD_COLUMNS + " WHERE status = 'queued' AND mode = 'node' AND available_at IS NULL"
        " AND (%s OR definition IS NOT NULL) AND id <> ALL (%s)"
        " ORDER BY priority, queued_at, id LIMIT %s",
        (undefined, list(aside), limit),
        prepare=True,
    ).fetchall()


def undefined(conn: db.Connection, limit: int) -> list[str]:
    """Queued runs that have no definition yet."""
    rows = conn.execute(
        "SELECT id FROM workflow_runs WHERE status = 'queued' AND mode = 'node'"
        " AND available_at IS NULL AND definition IS NULL"
        " ORDER BY priority, queued_at, id LIMIT %s",
        (limit,),
    ).fetchall()
    return [row["id"] for row in rows]


def lock(conn: db.Connection, run_id: str, *, nowait: bool = False) -> Row | None:
    """The run, its row locked against other dispatchers; None: no such run, or `nowait` and locked.

    The definition stays in the database. The lock lets inserts that reference the run pass.
    """
    return conn.execute(_LOCK_SKIP if nowait else _LOCK, (run_id,), prepare=True).fetchone()


_HEAD = _HEAD_COLUMNS + " WHERE id = %s"
_LOCK = _HEAD + " FOR NO KEY UPDATE"
_LOCK_SKIP = _HEAD + " FOR NO KEY UPDATE SKIP LOCKED"


def head(conn: db.Connection, run_id: str) -> Row | None:
    """What `lock` returns, without the lock."""
    return conn.execute(_HEAD, (run_id,), prepare=True).fetchone()


def definition(conn: db.Connection, run_id: str) -> dict[str, Any] | None:
    """The frozen definition; None before the run's first start."""
    row = conn.execute(
        "SELECT definition FROM workflow_runs WHERE id = %s", (run_id,), prepare=True
    ).fetchone()
    return row["definition"] if row else None


def definition_text(conn: db.Connection, run_id: str) -> str | None:
    """Return the frozen definition as JSON text; None before the run's first start.

    The same definition is always the same text, as jsonb has one form.
    """
    row = conn.execute(
        "SELECT definition::text AS text FROM workflow_runs WHERE id = %s", (run_id,), prepare=True
    ).fetchone()
    return row["text"] if row else None


def context_type(conn: db.Connection, run_id: str) -> str | None:
    """Return the JSON type of a run's context, as `object`; None: no such run."""
    row = conn.execute(
        "SELECT jsonb_typeof(context) AS kind FROM workflow_runs WHERE id = %s",
        (run_id,),
        prepare=True,
    ).fetchone()
    return row["kind"] if row else None


def context(conn: db.Connection, run_id: str) -> Any:
    """Return the run's own context, without its nodes' outputs; None if there is no such run."""
    row = conn.execute(
        "SELECT context FROM workflow_runs WHERE id = %s", (run_id,), prepare=True
    ).fetchone()
    return row["context"] if row else None


def freeze(conn: db.Connection, run_id: str, definition_json: str, digest: str) -> bool:
    """Store the definition unless there is one; whether it was stored."""
    return (
        conn.execute(
            "UPDATE workflow_runs SET definition = %s::jsonb, definition_hash = %s,"
            " updated_at = now() WHERE id = %s AND definition IS NULL",
            (definition_json, digest, run_id),
            prepare=True,
        ).rowcount
        == 1
    )


def start(conn: db.Connection, run_id: str) -> bool:
    """queued → running; False when it was not queued."""
    return (
        conn.execute(
            "UPDATE workflow_runs SET status = 'running', started_at = coalesce(started_at, now()),"
            " error = NULL, available_at = NULL, updated_at = now()"
            " WHERE id = %s AND status = 'queued'",
            (run_id,),
            prepare=True,
        ).rowcount
        == 1
    )


def start_fresh(
    conn: db.Connection, run: Row, definition_json: str, digest: str, rows_json: str
) -> int | None:
    """Freeze the definition, flip queued → running and insert the first nodes: one statement.

    How many rows are new; None, and nothing written, for a run that has a definition or a node, is
    no longer as `run` says, is locked, or has a context that is no object.
    """
    row = conn.execute(
        "SELECT queue_workflows_start_run(r.id, %s::integer, %s::bigint, %s::jsonb, %s::text,"
        " %s::jsonb, %s::text) AS n FROM workflow_runs r"
        " WHERE r.id = %s AND jsonb_typeof(r.context) = 'object'",
        (
            *(run["generation"], run["born"], definition_json, digest, rows_json),
            *(run["out_dir"], run["id"]),
        ),
        prepare=True,
    ).fetchone()
    return row["n"] if row else None


def give_out_dir(conn: db.Connection, run_id: str, out_dir: str) -> str | None:
    """Store the folder of a run that has none; return the run's folder, None: no such run."""
    row = conn.execute(
        "UPDATE workflow_runs SET out_dir = coalesce(out_dir, %s) WHERE id = %s RETURNING out_dir",
        (out_dir, run_id),
        prepare=True,
    ).fetchone()
    return row["out_dir"] if row else None


def complete(conn: db.Connection, run_id: str) -> bool:
    """Any live state → completed; False when it was over or queued."""
    return (
        conn.execute(
            "UPDATE workflow_runs SET status = 'completed', finished_at = now(),"
            " progress_pct = 100, error = NULL, updated_at = now() WHERE id = %s"
            " AND status NOT IN ('queued', 'completed', 'failed', 'cancelled')",
            (run_id,),
            prepare=True,
        ).rowcount
        == 1
    )


def fail(conn: db.Connection, run_id: str, error: str) -> bool:
    """Any live state → failed, which cancels the waiting nodes; False when it was over."""
    return (
        conn.execute(
            "UPDATE workflow_runs SET status = 'failed', finished_at = now(), error = %s,"
            " updated_at = now() WHERE id = %s"
            " AND status NOT IN ('completed', 'failed', 'cancelled')",
            (error, run_id),
        ).rowcount
        == 1
    )


def cancel(conn: db.Connection, run_id: str) -> Row | None:
    """Any state that is not terminal → cancelled; None: no such run, or terminal."""
    return conn.execute(
        "UPDATE workflow_runs SET status = 'cancelled', finished_at = now(), updated_at = now()"
        " WHERE id = %s AND status NOT IN ('completed', 'failed', 'cancelled') RETURNING *",
        (run_id,),
    ).fetchone()


def delay(conn: db.Connection, run_id: str, *, error: str, after_s: float) -> int:
    """Count a start that failed and let the run rest; how many starts have failed."""
    row = conn.execute(
        "UPDATE workflow_runs SET error = %s,"
        " start_attempts = least(greatest(start_attempts, 0), 999999) + 1,"
        " available_at = now() + %s * interval '1 second', updated_at = now()"
        " WHERE id = %s AND status = 'queued' RETURNING start_attempts",
        (error, after_s, run_id),
    ).fetchone()
    return row["start_attempts"] if row else 0


def reopen(conn: db.Connection, run_id: str) -> Row | None:
    """failed or cancelled → queued in a new generation (the guard raises it); None: neither."""
    return conn.execute(
        "UPDATE workflow_runs SET status = 'queued', updated_at = now()"
        " WHERE id = %s AND status IN ('failed', 'cancelled') RETURNING *",
        (run_id,),
    ).fetchone()


def reopen_from(conn: db.Connection, run_id: str, node_ids: list[str]) -> Row | None:
    """A finished run → queued two generations on, with `node_ids` cancelled in the one between.

    So the start that follows opens them again, and no other write could leave their terminal state.
    Nobody asks any more for the end of the others that still run, as when the guard reopens a run.
    """
    row = conn.execute(
        "UPDATE workflow_runs SET status = 'queued', generation = generation + 2,"
        " finished_at = NULL, error = NULL, start_attempts = 0, available_at = NULL,"
        " queued_at = now(), updated_at = now()"
        " WHERE id = %s AND status IN ('completed', 'failed', 'cancelled') RETURNING *",
        (run_id,),
    ).fetchone()
    if row is not None:
        conn.execute(
            "UPDATE workflow_node_jobs SET status = 'cancelled', generation = %s"
            " WHERE run_id = %s AND node_id = ANY (%s) AND status <> 'running'",
            (row["generation"] - 1, run_id, node_ids),
        )
        conn.execute(
            "UPDATE workflow_node_jobs SET cancel_requested_at = NULL"
            " WHERE run_id = %s AND status = 'running' AND cancel_requested_at IS NOT NULL",
            (run_id,),
        )
    return row


def reenqueue_running(conn: db.Connection) -> int:
    """running → queued at the front, `resume_count` + 1; how many."""
    return conn.execute(
        "UPDATE workflow_runs SET status = 'queued', priority = least(priority, 10),"
        " resume_count = least(greatest(resume_count, 0), 29999) + 1,"
        " queued_at = now(), updated_at = now()"
        " WHERE status = 'running' AND mode = 'node'"
    ).rowcount


def listing(conn: db.Connection, *, limit: int, status: str | None = None) -> list[Row]:
    """The newest runs with their node counts by status under `nodes`."""
    return conn.execute(
        "SELECT r.id, r.workflow_name, r.status, r.priority, r.error, r.out_dir, r.mode,"
        " r.created_at, r.started_at, r.finished_at, r.generation,"
        " coalesce((SELECT jsonb_object_agg(status, n) FROM (SELECT status, count(*) AS n"
        " FROM workflow_node_jobs j WHERE j.run_id = r.id GROUP BY 1) c), '{}') AS nodes,"
        " CASE jsonb_typeof(r.definition -> 'nodes') WHEN 'array'"
        " THEN jsonb_array_length(r.definition -> 'nodes') END AS nodes_total"
        " FROM workflow_runs r WHERE %(status)s::text IS NULL OR r.status = %(status)s"
        " ORDER BY r.created_at DESC, r.id LIMIT %(limit)s",
        {"limit": limit, "status": status},
    ).fetchall()
