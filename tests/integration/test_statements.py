"""The server accepts every named statement, the code uses each, and a call executes it."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from types import ModuleType

import psycopg
import pytest

import queue_workflows
from queue_workflows import db as engine_db
from queue_workflows.db import statements
from tests.support import factories, named_statements, stubgen

PACKAGE = Path(queue_workflows.__file__).parent


def test_the_server_takes_each(db: ModuleType) -> None:
    refused: dict[str, str] = {}
    with db.connect() as conn:
        for name, one in named_statements.every().items():
            try:
                with conn.transaction(force_rollback=True):
                    conn.pgconn.prepare(b"this_statement", stubgen.numbered(one.text)[0])
                    described = conn.pgconn.describe_prepared(b"this_statement")
                    conn.execute(b"DEALLOCATE this_statement")
                columns = described.nfields
                fits = columns == 1 if one.kind in ("value", "column") else columns > 0
                if one.kind in ("row", "value", "column") and not fits:
                    refused[name] = f"{columns} columns of a statement of the kind {one.kind}"
            except psycopg.Error as error:
                refused[name] = str(error)
    assert refused == {}


def test_the_code_uses_every_statement() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    attributes = set(re.findall(r"\.(\w+)", code))
    whole = set(re.findall(r"\b(?:vars\(statements\.|statements\.comments\(.)(\w+)", code))
    names = {tuple(name.partition("[")[0].split(".")) for name in named_statements.texts()}
    unused = {each for each in names if each[0] not in whole and each[1] not in attributes}
    assert sorted(unused) == []


def test_the_stub_is_the_one_that_the_files_make(db: ModuleType) -> None:
    with db.connect() as conn:
        made = stubgen.stub(conn)
    remedy = "run python -m tests.support.stubgen"
    assert stubgen.STUB.read_text(encoding="utf-8") == made, remedy


@pytest.mark.parametrize("is_script", [False, True])
def test_a_statement_is_executed_by_a_call_and_by_a_script(
    conn: engine_db.Connection, is_script: bool
) -> None:
    def do(own: statements.Named, **given: object) -> object:
        if is_script:
            return engine_db.run(conn, own.script(**given))
        return own(conn, **given)

    job = factories.ingest(conn)["id"]
    assert isinstance(do(statements.schedules.now), datetime)
    found = do(statements.ingest_jobs.get, job=job)
    assert isinstance(found, dict)
    assert found["status"] == "queued"
    assert do(statements.ingest_jobs.get, job="none") is None
    assert do(statements.ingest_jobs.delete, ids=[job]) is None
    assert factories.one(conn, "SELECT count(*) FROM ingest_jobs") == 0
    assert do(statements.runs.delete, run_id="none") == (None if is_script else 0)
    assert do(statements.queues.settings, queue=None) == []


def test_a_statement_of_both_families_reads_the_table_by_which_it_is_named(
    conn: engine_db.Connection,
) -> None:
    job = factories.ingest(conn)["id"]
    for table, is_there in zip(statements.JOB_TABLES, (True, False), strict=True):
        found = statements.waiting_facts.job[table](conn, job=job)
        assert (found is not None) == is_there
