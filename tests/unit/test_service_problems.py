"""Which status of the HTTP service an error of the database has."""

from __future__ import annotations

import json
from typing import Any

import psycopg
from psycopg import errors as pg

from queue_workflows import errors
from queue_workflows.service import problems
from tests.support import tabled


class StaysSo(psycopg.DatabaseError):
    """A refusal by a trigger, with a code of its own."""

    sqlstate = "QW002"


def test_a_request_is_blamed_for_its_own_values_only() -> None:
    cases: list[Any] = [
        (pg.UndefinedTable('relation "ingest_jobs" does not exist'), 503),
        (pg.UndefinedColumn("no column"), 503),
        (pg.UndefinedFunction("no function"), 503),
        (pg.ReadOnlySqlTransaction("a standby"), 503),
        (pg.AdminShutdown("the server stops"), 503),
        (pg.SerializationFailure("concurrent update"), 503),
        (pg.InternalError_("cache lookup failed"), 503),
        (psycopg.OperationalError("the connection is closed"), 503),
        (psycopg.InterfaceError("the connection is closed"), 503),
        (TimeoutError(), 503),
        (errors.SchemaTooNew("newer"), 503),
        (errors.EmbeddedUnavailable("gone"), 503),
        (pg.InsufficientPrivilege("permission denied"), 403),
        (pg.CheckViolation("violates a check"), 422),
        (pg.NumericValueOutOfRange("out of range"), 422),
        (pg.ProgramLimitExceeded("index row size 4000 exceeds 2704"), 422),
        (pg.RaiseException("refused"), 422),
        (pg.FeatureNotSupported("not here"), 422),
        (StaysSo("job j is completed, and stays so"), 422),
        (psycopg.DataError("a text cannot hold NUL"), 422),
        (errors.InvalidJob("wrong"), 422),
        (RuntimeError("a bug"), 500),
    ]
    for error, status in cases:
        with tabled.case(error, status):
            reply = problems.of_error(error)
            assert reply.status_code == status
            assert ("retry-after" in reply.headers) is (status == 503)


def test_a_database_without_the_schema_is_named() -> None:
    reply = problems.of_error(pg.UndefinedTable('relation "ingest_jobs" does not exist'))
    assert "queue-workflows migrate" in json.loads(bytes(reply.body))["detail"]


def test_a_right_that_is_missing_has_the_command_that_prints_it() -> None:
    reply = problems.of_error(pg.InsufficientPrivilege("permission denied"))
    detail = json.loads(bytes(reply.body))["detail"]
    assert "`queue-workflows connect --for work --sql` (with `--for read` for a read-only" in detail
