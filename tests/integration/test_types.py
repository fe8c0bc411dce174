"""The states and rows in `types` are those of the database."""

from __future__ import annotations

import datetime
import re
import typing
from types import ModuleType
from typing import Any

from queue_workflows import jobs, types, worker_control
from tests.support import factories, tabled

ROWS = {
    "workflow_runs": types.Run,
    "workflow_node_jobs": types.NodeJob,
    "ingest_jobs": types.IngestJob,
    "worker_controls": types.WorkerControl,
}
KINDS: dict[str, Any] = {
    "text": str,
    "integer": int,
    "bigint": int,
    "smallint": int,
    "double precision": float,
    "real": float,
    "boolean": bool,
    "timestamp with time zone": datetime.datetime,
    "jsonb": Any,
    "text[]": list[str],
}
# Each column's type below its domain, and the texts of the CHECKs that list its values.
COLUMNS = """
SELECT a.attname AS name, a.attnotnull AS filled,
       format_type(coalesce(nullif(t.typbasetype, 0), t.oid), NULL) AS kind,
       ARRAY(SELECT pg_get_constraintdef(c.oid) FROM pg_constraint c
              WHERE c.contypid = t.oid
                 OR c.conrelid = a.attrelid AND c.contype = 'c' AND c.conkey = ARRAY[a.attnum])
           AS checks
  FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
 WHERE a.attrelid = %s::regclass AND a.attnum > 0 AND NOT a.attisdropped
"""


def _columns(db: ModuleType, table: str) -> dict[str, dict[str, Any]]:
    with db.connect() as conn:
        return {row["name"]: row for row in conn.execute(COLUMNS, (table,)).fetchall()}


def _plain(hint: Any) -> Any:
    """The type that a column's hint stands for: the texts of a Literal are texts."""
    parts = [_plain(part) if typing.get_args(part) else part for part in typing.get_args(hint)]
    if typing.get_origin(hint) is typing.Literal:
        return str
    if type(None) in parts:
        (hint,) = (part for part in parts if part is not type(None))
    return hint


def _values(hint: Any) -> set[str] | None:
    """The values that a hint allows; None: any."""
    if typing.get_origin(hint) is typing.Literal:
        return set(typing.get_args(hint))
    return None


def test_a_row_has_the_columns_of_its_table(db: ModuleType) -> None:
    for table in ROWS:
        with tabled.case(table):
            hints, columns = typing.get_type_hints(ROWS[table]), _columns(db, table)
            assert hints.keys() == columns.keys()
            for name, column in columns.items():
                assert _plain(hints[name]) == KINDS[column["kind"]], name
                optional = type(None) in typing.get_args(hints[name])
                assert optional == (not column["filled"] and column["kind"] != "jsonb"), name


def test_a_column_has_exactly_the_values_of_its_check(db: ModuleType) -> None:
    for table in ROWS:
        with tabled.case(table):
            hints = typing.get_type_hints(ROWS[table])
            for name, column in _columns(db, table).items():
                lists = [text for text in column["checks"] if "= ANY (ARRAY[" in text]
                found = {one for text in lists for one in re.findall(r"'(\w+)'", text)}
                assert _values(hints[name]) == (found or None), name


def test_a_job_as_the_api_returns_it_has_the_keys_of_its_type(db: ModuleType) -> None:
    with db.connect() as conn:
        node, job = factories.node(conn), factories.ingest(conn)
    from queue_workflows import node_queue, run_store

    run = run_store.get_run(node["run_id"])
    pairs = [
        (types.Run, run),
        (types.NodeJob, node_queue.get_node_job(node["id"])),
        (types.IngestJob, node_queue.get_ingest_job(job["id"])),
    ]
    for kind, row in pairs:
        assert type(row) is dict
        assert row.keys() == kind.__annotations__.keys()


def test_the_terminal_states_are_those_of_the_functions(db: ModuleType) -> None:
    every = {*typing.get_args(types.NodeStatus), *typing.get_args(types.RunStatus), "draft"}
    query = "SELECT array_agg(s) FROM unnest(%s::text[]) s WHERE queue_workflows_is_terminal_{}(s)"
    for noun, wanted in (
        ("job", types.TERMINAL_JOB_STATUSES),
        ("run", types.TERMINAL_RUN_STATUSES),
    ):
        with db.connect() as conn:
            found = conn.execute(query.format(noun).encode(), (sorted(every),)).fetchone()
        assert set(next(iter(found.values()))) == wanted
    assert set(typing.get_args(types.JobStatus)) == set(jobs.STATUSES)
    assert typing.get_args(types.RunStatus) == typing.get_args(types.JobStatus)
    assert set(typing.get_args(types.StopPolicy)) == worker_control.STOP_POLICIES.keys()
