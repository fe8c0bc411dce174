"""The loader of named statements: what it accepts, what it refuses, and what each kind returns."""

from __future__ import annotations

import re
from typing import Any

import pytest

from queue_workflows import sql
from queue_workflows.db import scripts, statements
from tests.support import tabled

SHARED = """-- name: touch many
-- tables: ingest_jobs workflow_node_jobs
-- Touch a job.
WITH done AS (UPDATE ingest_jobs j SET progress = '1' WHERE j.id = %(job)s RETURNING j.*)
INSERT INTO ingest_job_events (job_id) SELECT id FROM done;
"""


def one(source: str) -> statements.Named:
    """Return the only statement of a file."""
    (found,) = statements.parse(source, "x.sql").values()
    assert isinstance(found, statements.Named)
    return found


def test_a_statement_has_its_name_its_comment_and_its_text_without_the_semicolon() -> None:
    source = "-- name: one value\n-- Return 1.\n-- Always.\nSELECT 1;\n"
    assert list(statements.parse(source, "x.sql")) == ["one"]
    found = one(source)
    assert (found.comment, found.text, found.kind) == ("Return 1.\nAlways.", b"SELECT 1", "value")


def test_a_statement_for_both_families_is_given_for_each_table() -> None:
    found = statements.parse(SHARED, "x.sql")["touch"]
    assert isinstance(found, dict)
    assert b"UPDATE ingest_jobs j" in found["ingest_jobs"].text
    node = found["workflow_node_jobs"].text
    assert b"UPDATE workflow_node_jobs j" in node
    assert b"INSERT INTO workflow_node_events" in node
    assert b"ingest" not in node


def test_a_line_for_one_family_is_left_out_of_the_text_for_the_other() -> None:
    text = "SELECT 1\n  , 2  -- nodes only\n  , 3  -- ingest only\n"
    assert sql.of_table(text, "ingest_jobs") == "SELECT 1\n  , 3\n"
    assert sql.of_table(text, "workflow_node_jobs") == "SELECT 1\n  , 2\n"


def test_what_stands_once_for_both_tables_is_joined_by_a_union() -> None:
    both = "-- both:\nSELECT id FROM ingest_jobs\n-- end\n"
    ingest, nodes = "SELECT id FROM ingest_jobs\n", "SELECT id FROM workflow_node_jobs\n"
    assert sql.written(both) == f"{ingest}UNION ALL\n{nodes}"


def test_a_function_for_both_families_is_written_for_each() -> None:
    text = "CREATE FUNCTION queue_workflows_{}_x() RETURNS text\nSELECT id FROM {}\n$$;\n"
    ingest, nodes = text.format("ingest", "ingest_jobs"), text.format("node", "workflow_node_jobs")
    assert sql.written(f"{sql.TABLES_LINE}{ingest}") == f"{ingest}\n{nodes}"


def test_a_fragment_is_written_out_with_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        "waits": (["row"], "row.status = 'queued'"),
        "first": (["row", "which"], "SELECT row.id FROM ingest_jobs row WHERE which"),
    }
    monkeypatch.setattr(sql, "_fragments", lambda: known)
    waits = "SELECT j.id FROM {} j WHERE j.status = 'queued'"
    assert sql.written("{first(j, {waits(j)})}") == waits.format("ingest_jobs")
    assert sql.written("{node:first(j, {waits(j)})}") == waits.format("workflow_node_jobs")
    assert sql.written("'{a}' {} {1,2}") == "'{a}' {} {1,2}", "what is no fragment stays"
    for wrong in ("{unknown(j)}", "{first(j)}"):
        with pytest.raises((KeyError, ValueError)):
            sql.written(wrong)


def test_every_fragment_is_used() -> None:
    source = (sql.FOLDER / "fragments.sql").read_text("utf-8")
    texts = source + "".join(path.read_text("utf-8") for path in sql.FOLDER.glob("*/*.sql"))
    names = re.findall(r"^-- fragment: (\w+)", source, re.MULTILINE)
    assert [name for name in names if not re.search(rf"[{{:]{name}\(", texts)] == []


def test_invalid_statement_files_are_refused() -> None:
    cases: list[Any] = [
        "SELECT 1;\n-- name: one row\n-- Return 1.\nSELECT 1;\n",
        "-- name: one row\nSELECT 1;\n",
        "-- name: one row\n-- Return 1.\n;\n",
        "-- name: one row\n-- Return 1.\nSELECT 1;\n-- name: one row\n-- Return 2.\nSELECT 2;\n",
        "-- name: one\n-- Return 1.\nSELECT 1;\n",
        "-- name: one rows\n-- Return 1.\nSELECT 1;\n",
        "-- name: one row quickly\n-- Return 1.\nSELECT 1;\n",
        "-- name: one row prepared\n-- Return all columns.\nSELECT t.*, 1 FROM t;\n",
    ]
    for source in cases:
        with tabled.case(source), pytest.raises(ValueError, match=r"^x\.sql: "):
            statements.parse(source, "x.sql")


class Fake:
    """A connection and cursor with these rows, which notes what it executes."""

    rowcount = 7

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.executed: list[Any] = []

    def execute(self, *given: Any, prepare: bool | None = None) -> Fake:
        self.executed.append((*given, prepare))
        return self

    def fetchone(self) -> dict[str, Any] | None:
        return self.rows[0] if self.rows else None

    def fetchall(self) -> list[dict[str, Any]]:
        return self.rows


ROWS = [{"a": 1, "b": 2}, {"a": 3, "b": 4}]


def test_the_kind_says_what_a_call_and_a_script_return() -> None:
    cases: list[Any] = [
        ("one", ROWS, ROWS[0]),
        ("one", [], None),
        ("row", ROWS[:1], ROWS[0]),
        ("value", ROWS, 1),
        ("value", [], None),
        ("many", ROWS, ROWS),
        ("many", [], []),
        ("column", ROWS, [1, 3]),
        ("count", ROWS, 7),
        ("none", ROWS, None),
    ]
    for kind, rows, returned in cases:
        with tabled.case(kind, rows, returned):
            statement = one(f"-- name: it {kind}\n-- Do it.\nSELECT %(x)s;\n")
            conn: Any = Fake(rows)
            assert statement(conn, x=5) == returned
            assert conn.executed == [(b"SELECT %(x)s", {"x": 5}, None)]
            script = statement.script(x=5)
            assert next(script) == scripts.Statement(b"SELECT %(x)s", {"x": 5})
            with pytest.raises(StopIteration) as end:
                script.send(rows)
            assert end.value.value == (None if kind == "count" else returned)


@pytest.mark.parametrize("rows", [[], ROWS])
def test_a_statement_of_kind_row_has_exactly_one(rows: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="unpack"):
        one("-- name: it row\n-- Do it.\nSELECT 1;\n")(Fake(rows))  # pyright: ignore


@pytest.mark.parametrize(("word", "prepare"), [("prepared", True), ("unprepared", False)])
def test_a_statement_may_say_whether_it_is_prepared(word: str, prepare: bool) -> None:
    conn: Any = Fake([])
    one(f"-- name: it many {word}\n-- Do it.\nSELECT 1;\n")(conn)
    assert conn.executed == [(b"SELECT 1", prepare)]


def test_the_comment_of_a_statement_is_one_line() -> None:
    comments = statements.comments("schedules")
    assert list(comments) == ["now", "last_fires", "prune"]
    assert statements.comments("schedule_definitions")["find"].endswith(
        "fires that queued nothing, and jobs and runs that are gone or not over, do not count, nor "
        "do fires past their retention, except the last. `read_at`: the time of this read."
    )


def test_an_unknown_file_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=re.escape("sql/queries/nowhere.sql")):
        statements.nowhere  # noqa: B018


def test_every_statement_can_be_named_by_its_attribute() -> None:
    for path in sql.QUERIES.glob("*.sql"):
        names = statements.parse(path.read_text("utf-8"), path.name)
        assert vars(getattr(statements, path.stem)).keys() == names.keys()
