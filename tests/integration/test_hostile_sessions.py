"""A submitter's session changes nothing for others by its settings, schema or temporary tables."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import psycopg
import pytest

from queue_workflows import db, queues
from tests.hostile import roles
from tests.support import factories

SETTINGS = (
    "TimeZone = 'Asia/Kathmandu'", "DateStyle = 'SQL, DMY'", "IntervalStyle = 'sql_standard'",
    "bytea_output = 'escape'", "array_nulls = off", "transform_null_equals = on",
    "extra_float_digits = -15", "default_transaction_isolation = 'serializable'",
    "check_function_bodies = off", "plan_cache_mode = 'force_custom_plan'",
    "enable_indexscan = off", "enable_bitmapscan = off", "work_mem = '64kB'",
    "client_encoding = 'LATIN1'", "statement_timeout = '20s'", "row_security = off",
    "queue_workflows.retention = 'on'",
)  # fmt: skip
OWN = """
CREATE TABLE mine.trace (who name);
GRANT ALL ON mine.trace TO PUBLIC;
CREATE FUNCTION mine.octet_length(text) RETURNS integer LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO mine.trace VALUES (current_user); RETURN 0; END $$;
CREATE FUNCTION mine.now() RETURNS timestamptz LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO mine.trace VALUES (current_user); RETURN '2099-01-01'; END $$;
CREATE FUNCTION mine.queue_workflows_check_payload(jsonb, text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN INSERT INTO mine.trace VALUES (current_user); END $$;
CREATE FUNCTION mine.queue_workflows_ask_turn(name, text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN INSERT INTO mine.trace VALUES (current_user); END $$;
CREATE FUNCTION mine.never(timestamptz, timestamptz) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO mine.trace VALUES (current_user); RETURN false; END $$;
CREATE OPERATOR mine.> (LEFTARG = timestamptz, RIGHTARG = timestamptz, FUNCTION = mine.never);
CREATE OPERATOR mine.< (LEFTARG = timestamptz, RIGHTARG = timestamptz, FUNCTION = mine.never);
CREATE TEMP TABLE lock_turns (id bigint, xid xid8, jobs text, lock_key text, admits boolean);
CREATE TEMP TABLE queue_partition_limits AS SELECT 'x'::text AS queue WHERE false;
CREATE TEMP TABLE queue_settings (LIKE public.queue_settings);
CREATE TEMP TABLE ingest_jobs (LIKE public.ingest_jobs);
SET search_path = mine, pg_catalog, pg_temp, public;
"""
BAD = (
    ("available_at", "infinity"),
    ("idempotency_window_s", "NaN"),
    ("max_attempts", "-1"),
    ("lock_key", "x" * 1001),
    ("args", "[" * 200 + "]" * 200),
)


@pytest.fixture
def session(dsn: str, db: Any) -> Generator[psycopg.Connection[Any]]:
    """A session of a role for `submit`, which owns a schema, with every setting above."""
    with roles.role(dsn, "submit") as name:
        with db.connect() as owner:
            owner.execute(f"CREATE SCHEMA mine AUTHORIZATION {name}".encode())
        with psycopg.connect(roles.as_role(dsn, name), autocommit=True) as conn:
            for setting in SETTINGS:
                conn.execute(f"SET {setting}".encode())
            conn.execute(OWN.encode())
            yield conn
        with db.connect() as owner:
            owner.execute("DROP SCHEMA mine CASCADE")


def put(session: psycopg.Connection[Any], **columns: str) -> None:
    given = {"id": "j", "task_name": "t", "queue": "fetch"} | columns
    names, places = ", ".join(given), ", ".join(["%s"] * len(given))
    statement = f"INSERT INTO public.ingest_jobs ({names}) VALUES ({places})"
    session.execute(statement.encode(), [*given.values()])


def test_its_rows_are_checked_and_admitted_as_those_of_any_session(
    session: psycopg.Connection[Any],
) -> None:
    queues.limit("fetch", partition_max_running=1)
    for column, value in BAD:
        with pytest.raises(psycopg.errors.CheckViolation):
            put(session, **{column: value})
    for number in range(2):
        put(session, id=f"lock {number}", lock_key="k")
        put(session, id=f"part {number}", partition_key="p", queue="fetch")
        put(session, id=f"due {number}", available_at="2099-12-31")
    with db.connect() as conn:
        rows = conn.execute("SELECT id, blocked_reason FROM ingest_jobs ORDER BY id").fetchall()
        assert [(row["id"], row["blocked_reason"]) for row in rows] == [
            ("due 0", "not_due"), ("due 1", "not_due"), ("lock 0", None), ("lock 1", "locked"),
            # A transaction that may not see others' jobs leaves the limits to the next claim.
            ("part 0", "limited"), ("part 1", "limited"),
        ]  # fmt: skip
        due = "SELECT count(*) FROM partition_dues WHERE partition_key = 'p'"
        assert factories.one(conn, due) >= 1
        owner = factories.one(conn, "SELECT current_user")
        ran_as = factories.column(conn, "SELECT DISTINCT who::text FROM mine.trace")
    assert owner not in ran_as


FORBIDDEN = (
    "SET session_replication_role = replica",
    "SET LOCAL lc_messages = 'C'",
    "ALTER TABLE public.ingest_jobs DISABLE TRIGGER ALL",
    "CREATE TRIGGER t BEFORE INSERT ON public.ingest_jobs FOR EACH ROW"
    " EXECUTE FUNCTION suppress_redundant_updates_trigger()",
    "CREATE TRIGGER t AFTER INSERT ON pg_temp.ingest_jobs FOR EACH ROW"
    " EXECUTE FUNCTION public.queue_workflows_hold_ingest()",
    "DO $$ BEGIN LOCK TABLE public.ingest_jobs IN SHARE MODE; END $$",
    "SELECT FROM public.workflow_runs FOR UPDATE",
    "SELECT FROM public.workflow_node_jobs FOR SHARE",
    "SELECT setval('public.ingest_jobs_seq_seq', 1)",
    "INSERT INTO public.ingest_jobs (id, seq, task_name, queue) VALUES ('a', 1, 't', 'q')",
    "INSERT INTO public.ingest_jobs (id, task_name, queue) VALUES ('a', 't', 'q')"
    " ON CONFLICT (id) DO UPDATE SET queue = 'x'",
    "MERGE INTO public.ingest_jobs j USING (SELECT 'a' AS id) s ON j.id = s.id"
    " WHEN MATCHED THEN DELETE",
    "INSERT INTO public.failure_alerts (kind, subject, occurrence, reason)"
    " VALUES ('run', 'r', '0', 'failed')",
    "INSERT INTO public.schedules (name, expression, task_name) VALUES ('s', '@daily', 't')",
    "INSERT INTO public.ingest_job_events (job_id, event_type) VALUES ('j', 'failed')",
    "TRUNCATE public.workflow_runs",
)


def test_it_may_only_read_and_insert(session: psycopg.Connection[Any]) -> None:
    for statement in FORBIDDEN:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            session.execute(statement.encode())
