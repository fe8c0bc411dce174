"""The loader of named statements: what it accepts, what it refuses, and the stub that it needs."""

from __future__ import annotations

import re

import pytest

from queue_workflows import sql
from queue_workflows.db import statements
from tests.support import stubgen

SHARED = """-- name: touch
-- tables: ingest_jobs workflow_node_jobs
-- Touch a job.
WITH done AS (UPDATE ingest_jobs j SET progress = '1' WHERE j.id = %(job)s RETURNING j.*)
INSERT INTO ingest_job_events (job_id) SELECT id FROM done;
"""


def test_a_statement_has_its_name_its_comment_and_its_text_without_the_semicolon() -> None:
    found = statements.parse("-- name: one\n-- Return 1.\n-- Always.\nSELECT 1;\n", "x.sql")
    assert list(found) == ["one"]
    assert (found["one"].comment, found["one"].text) == ("Return 1.\nAlways.", b"SELECT 1")


def test_a_statement_for_both_families_is_given_for_each_table() -> None:
    texts = statements.parse(SHARED, "x.sql")["touch"].texts
    assert texts is not None
    assert b"UPDATE ingest_jobs j" in texts["ingest_jobs"]
    node = texts["workflow_node_jobs"]
    assert b"UPDATE workflow_node_jobs j" in node
    assert b"INSERT INTO workflow_node_events" in node
    assert b"ingest" not in node


@pytest.mark.parametrize(
    "source",
    [
        "SELECT 1;\n-- name: one\n-- Return 1.\nSELECT 1;\n",
        "-- name: one\nSELECT 1;\n",
        "-- name: one\n-- Return 1.\n;\n",
        "-- name: one\n-- Return 1.\nSELECT 1;\n-- name: one\n-- Return 2.\nSELECT 2;\n",
    ],
)
def test_invalid_statement_files_are_refused(source: str) -> None:
    with pytest.raises(ValueError, match=r"^x\.sql: "):
        statements.parse(source, "x.sql")


def test_the_comment_of_a_statement_is_one_line() -> None:
    comments = statements.comments("schedules")
    assert list(comments) == ["now", "fire", "last_fires", "prune"]
    assert comments["fire"].endswith(
        "No row: the instant was claimed before. One statement, so that neither exists without the "
        "other."
    )


def test_an_unknown_file_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=re.escape("sql/queries/nowhere.sql")):
        statements.nowhere  # noqa: B018


def test_every_statement_can_be_named_by_its_attribute() -> None:
    for path in sql.QUERIES.glob("*.sql"):
        loaded = getattr(statements, path.stem)
        for name, one in statements.parse(path.read_text("utf-8"), path.name).items():
            assert getattr(loaded, name) == (one.texts or one.text)


def test_the_stub_is_the_one_that_the_files_make() -> None:
    remedy = "run python -m tests.support.stubgen"
    assert stubgen.STUB.read_text(encoding="utf-8") == stubgen.stub(), remedy
