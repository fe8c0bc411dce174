"""Mutants of what keeps a hostile row from stopping others: loader, rights, isolation, display."""

from __future__ import annotations

import json

from tests.soak.mutant import Conn, Mutant

_TABLES = ("workflow_runs", "workflow_node_jobs", "workflow_input_submissions", "ingest_jobs")
_BOUND = "_bound"
"""What the names of the triggers end with that refuse a row out of range."""
HOLE = "{x}"
"""A row that says so cannot be written again: it stands for a defect that nobody knows of."""


def _no_bounds(conn: Conn) -> None:
    """Rows out of range are taken."""
    found = conn.execute(
        "SELECT tgname, tgrelid::regclass::text AS name FROM pg_trigger"
        " WHERE tgrelid = ANY (%s::regclass[]) AND right(tgname, %s) = %s AND NOT tgisinternal",
        ([*_TABLES], len(_BOUND), _BOUND),
    ).fetchall()
    assert found, "no trigger bounds the rows any more"
    for row in found:
        conn.execute(f"DROP TRIGGER {row['tgname']} ON {row['name']}".encode())


def _load_anything() -> None:
    from queue_workflows.db import loading

    def load(data: str | bytes) -> object:
        return json.loads(data)

    assert loading.load_json is not None
    loading.load_json = load


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
    """Every error counts as the server's: nobody looks for the row that raised."""
    from queue_workflows.store import isolation, quarantine

    assert quarantine.is_about_rows is not None
    assert isolation.is_outage is not None
    quarantine.is_about_rows = lambda _: False
    isolation.is_outage = lambda _: True


def _print_raw() -> None:
    from queue_workflows.runtime import display

    def raw(value: object, limit: int | None = None) -> str:
        return str(value)

    assert display.line is not None
    assert display.block is not None
    display.line = raw
    display.block = raw


def _follow_anywhere() -> None:
    from queue_workflows.dag import confinement

    assert confinement.roots is not None
    confinement.roots = list


MUTANTS = {
    "loader": Mutant(
        "rows of any depth and size are taken, and loaded as they are",
        "crashes charged without evidence",
        _load_anything, _no_bounds, hostile=("args", "context", "value", "headers"),
        values="1200 levels|5000",
    ),
    "columns": Mutant(
        "a role that submits may set every column, within no range",
        "crashes charged without evidence", None, _no_bounds, hostile=("crash_count",),
        grants="INSERT ON workflow_runs, ingest_jobs, workflow_input_submissions",
    ),
    "functions": Mutant(
        "everybody may call every function", "hostile roles that got their way",
        None, _open_functions, calls=0.9,
    ),
    "isolation": Mutant(
        "one row that raises stops the loop that meets it", "stuck",
        _isolate_nothing, _hole, hostile=("reason", "parcel_id"), values=r"^\{x\}$",
    ),
    "display": Mutant(
        "what came from rows is printed as it is", "commands, logs and folders", _print_raw,
        hostile=("id", "task_name", "workflow_name"),
    ),
    "folders": Mutant(
        "a run's folder may be anywhere", "commands, logs and folders", _follow_anywhere,
        hostile=("out_dir",),
    ),
}  # fmt: skip
