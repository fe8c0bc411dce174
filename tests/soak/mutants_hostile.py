"""Define mutants that let a hostile row stop others: loader, rights, isolation, display."""

from __future__ import annotations

import json

from queue_workflows.db import pool, statements
from tests.soak.mutant import Conn, Mutant, edit, replace, rewrite

HOLE = "{x}"
"""A row with it cannot be written again: it stands for an unknown defect."""


def _take_any_payload(conn: Conn) -> None:
    edit(conn, "queue_workflows_check_payload", ("<= 256 THEN", "<= 2000000000 THEN"))


def _load_anything() -> None:

    def load(data: str | bytes) -> object:
        return json.loads(data)

    replace(pool, "load_json", load)


def _open_functions(conn: Conn) -> None:
    conn.execute("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA public TO PUBLIC")


def _hole(conn: Conn) -> None:
    conn.execute(
        "CREATE FUNCTION soak_hole() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " RAISE EXCEPTION 'a defect' USING ERRCODE = '22003'; END $$"
    )
    for table, column in (("ingest_jobs", "reason"), ("workflow_runs", "parcel_id")):
        conn.execute(
            f"CREATE TRIGGER soak_hole BEFORE UPDATE ON {table} FOR EACH ROW"
            f" WHEN (OLD.{column} = '{HOLE}') EXECUTE FUNCTION soak_hole()".encode()
        )


def _isolate_nothing() -> None:
    """Count every error as the server's, so that no row is found to be the cause."""
    from queue_workflows.claim import row_isolation

    replace(row_isolation, "is_about_rows", lambda _: False)
    replace(row_isolation, "is_outage", lambda _: True)


def _print_raw() -> None:
    from queue_workflows.runtime import display

    def raw(value: object, limit: int | None = None) -> str:
        return str(value)

    replace(display, "line", raw)
    replace(display, "block", raw)


def _follow_anywhere() -> None:
    from queue_workflows.dag import confinement

    replace(confinement, "roots", list)


def _wake_in_the_transaction(conn: Conn) -> None:
    """Let whoever inserts an event write the rows of the jobs that wait for it."""
    body = (
        "PERFORM queue_workflows_ingest_wake(e.name, e.key, 1000),"
        " queue_workflows_node_wake(e.name, e.key, 1000) FROM added e;"
    )
    changes = (r"BEGIN\s", f"BEGIN {body} RETURN NULL; ")
    edit(conn, "queue_workflows_event_sent", changes)


def _patient_schedulers() -> None:
    """Let a scheduler wait for each lock as long as a worker does: 3 s."""

    real = pool.set_local

    def no_limit(conn: pool.Connection, settings: dict[str, str]) -> None:
        real(conn, {name: value for name, value in settings.items() if name != "lock_timeout"})

    replace(pool, "set_local", no_limit)


def _patient_commits(conn: Conn) -> None:
    changes = (
        ("least\\(nullif\\(v_timeout::interval, '0'\\), '1 s'\\)", "interval '3 s'"),
        ("BETWEEN 1 AND 1000", "BETWEEN 1 AND 3000"),
    )
    edit(conn, "queue_workflows_take_locks", *changes)


def _charge_lapses() -> None:
    """Count a crash of each job whose lease has lapsed, though nobody knows why it did."""
    rewrite(statements.recovery.count_lapse, b"lapse_count", b"crash_count")


MUTANTS = {
    "loader": Mutant(
        "rows of any depth and size are accepted and loaded",
        "crashes charged without evidence",
        _load_anything, _take_any_payload, hostile=("args", "context", "value", "headers"),
        values="1200 levels|5000",
    ),
    "columns": Mutant(
        "a submitter may set every column, also counters",
        "crashes charged without evidence", hostile=("crash_count",),
        grants="INSERT ON workflow_runs, ingest_jobs, workflow_input_submissions",
    ),
    "functions": Mutant(
        "every role may call every function", "hostile roles that succeeded",
        None, _open_functions, calls=0.9,
    ),
    "isolation": Mutant(
        "one row that raises stops the loop that processes it", "stuck",
        _isolate_nothing, _hole, hostile=("reason", "parcel_id"), values=r"^\{x\}$",
    ),
    "display": Mutant(
        "values from rows are printed without escaping", "commands, logs and folders", _print_raw,
        hostile=("id", "task_name", "workflow_name"),
    ),
    "folders": Mutant(
        "a run's folder may be anywhere", "commands, logs and folders", _follow_anywhere,
        hostile=("out_dir",),
    ),
    "event-sender": Mutant(
        "whoever sends an event writes the rows of the jobs that wait for it",
        "held up by a stranger's transaction", None, _wake_in_the_transaction,
        jobs={"waits": 24}, strangers="events",
    ),
    "fire-locks": Mutant(
        "a scheduler waits 3 s for each lock",
        "held up by a stranger's transaction", _patient_schedulers, strangers="keys",
    ),
    "commit-locks": Mutant(
        "a commit waits 3 s for the locks of its lock keys and partitions",
        "held up by a stranger's transaction", None, _patient_commits,
        jobs={"locked": 24, "limited": 12}, strangers="constraints",
    ),
    "charges": Mutant(
        "a lapsed lease counts as a crash",
        "crashes charged without evidence", _charge_lapses, None, "freeze", {"long": 3}, 4.0,
    ),
}  # fmt: skip
