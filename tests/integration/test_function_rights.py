"""Only roles with a GRANT may call the functions of the database."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support import (
    factories,
    installed_functions,
    markdown,
    rights,
    rows_before_checks,
    transitions,
)

OURS = (
    " FROM pg_proc p WHERE p.pronamespace = current_schema()::regnamespace"
    " AND p.proowner = (SELECT relowner FROM pg_class WHERE oid = 'workflow_runs'::regclass)"
)
CHECKED = {
    "queue_workflows_put_jobs": '\'x\', \'[{"task_name": "t", "queue": "q"}]\'',
    "queue_workflows_queue_room": "'q', 1",
    "queue_workflows_hold_back": "'q', 1, 1",
    "queue_workflows_mend_lines": "",
    "queue_workflows_mend_turns": "'ingest_jobs'",
    "queue_workflows_hold_node": "'r', 'n'",
    "queue_workflows_wake_waiting": "NULL, NULL, 9",
}
"""The functions that run as their owner and may be granted: each with arguments for a call."""
RIGHTS = {
    "queue_workflows_put_jobs": "INSERT (args) ON ingest_jobs",
    "queue_workflows_hold_node": "INSERT (value) ON workflow_input_submissions",
}


@contextmanager
def as_guest(conn: Any, *grants: str) -> Iterator[None]:
    """The statements of `conn` are those of a role with these grants, and are undone."""
    with conn.transaction(force_rollback=True):
        conn.execute("CREATE ROLE queue_workflows_guest")
        for grant in grants:
            conn.execute(f"GRANT {grant} TO queue_workflows_guest".encode())
        conn.execute("SET LOCAL SESSION AUTHORIZATION queue_workflows_guest")
        yield


def refused(conn: Any, statement: str) -> str:
    with pytest.raises(psycopg.errors.InsufficientPrivilege) as caught, conn.transaction():
        conn.execute(statement.encode())
    return str(caught.value)


def test_public_may_execute_no_function(conn: Any) -> None:
    public = (
        "SELECT p.oid::regprocedure::text"
        + OURS
        + " AND EXISTS (SELECT FROM aclexplode(coalesce(p.proacl, acldefault('f', p.proowner)))"
        " WHERE grantee = 0)"
    )
    assert factories.column(conn, public) == []
    assert factories.one(conn, "SELECT count(*)" + OURS) > 60


def test_a_function_that_runs_as_its_owner_has_a_path_of_its_own(conn: Any) -> None:
    path = (
        "SELECT p.oid::regprocedure::text" + OURS + " AND p.prosecdef AND NOT coalesce("
        "'search_path=' || current_schema() || ', pg_temp' = ANY (p.proconfig), false)"
    )
    assert factories.column(conn, path) == []


def test_security_definer_functions_are_triggers_or_check_their_caller(conn: Any) -> None:
    named = (
        "SELECT p.proname::text" + OURS + " AND p.prosecdef"
        " AND p.prorettype <> 'trigger'::regtype ORDER BY 1"
    )
    assert factories.column(conn, named) == sorted(CHECKED)


@pytest.mark.parametrize("function", CHECKED)
def test_execute_alone_lets_no_role_act_as_the_owner(conn: Any, function: str) -> None:
    call = f"SELECT * FROM {function}({CHECKED[function]})"
    with as_guest(conn):
        assert f"permission denied for function {function}" in refused(conn, call)
    with as_guest(conn, f"EXECUTE ON FUNCTION {function}"):
        assert "queue_workflows_guest lacks" in refused(conn, call)
    right = RIGHTS.get(function, "UPDATE (status) ON ingest_jobs")
    with as_guest(conn, f"EXECUTE ON FUNCTION {function}", right):
        conn.execute(call.encode())


def test_a_role_that_is_set_is_the_caller(conn: Any) -> None:
    with conn.transaction(force_rollback=True):
        conn.execute("CREATE ROLE queue_workflows_guest")
        conn.execute(
            "GRANT EXECUTE ON FUNCTION queue_workflows_mend_lines TO queue_workflows_guest"
        )
        conn.execute("SET LOCAL ROLE queue_workflows_guest")
        assert "queue_workflows_guest lacks" in refused(conn, "SELECT queue_workflows_mend_lines()")


def test_a_worker_that_lacks_a_right_on_a_new_function_reports_it(conn: Any) -> None:
    lacks = permissions_of(conn)
    with as_guest(conn, *lacks):
        assert rights.missing(conn) == []
    with as_guest(conn, *(each for each in lacks if "queue_workflows_record" not in each)):
        assert [each.partition("(")[0] for each in rights.missing(conn)] == [
            "EXECUTE on queue_workflows_record"
        ] * 2


def permissions_of(conn: Any) -> list[str]:
    """What a role needs to work, each as `GRANT` takes it."""
    with as_guest(conn):
        lacks = rights.lacking(conn, "work")
    return [f"{each.right} ON {each.kind} {each.name}" for each in lacks]


def test_a_role_without_a_right_spends_no_partitions_rate(conn: Any) -> None:
    conn.execute(
        "INSERT INTO queue_settings (queue, partition_rate_limit, partition_rate_period_s)"
        " VALUES ('fetch', 2, 3600)"
    )
    spend = "SELECT queue_workflows_ask_partition('fetch', 'k', 2000000000)"
    with as_guest(conn, "SELECT, INSERT ON ingest_jobs"):
        assert "permission denied for function" in refused(conn, spend)
    with as_guest(conn, "EXECUTE ON ALL FUNCTIONS IN SCHEMA public"):
        assert "permission denied for table partition_turns" in refused(conn, spend)
        for call in (
            "queue_workflows_ask_turn('ingest_jobs', 'k')",
            "queue_workflows_release_key('k')",
            "queue_workflows_admit('fetch', 'k', 1000000)",
            "queue_workflows_note_starts('fetch', 1000000)",
            "queue_workflows_give_turns('ingest_jobs', '{k}')",
        ):
            assert "permission denied for table" in refused(conn, f"SELECT {call}")
    factories.ingest(conn, partition_key="k")
    assert transitions.claim_ingest(conn)["partition_key"] == "k"


def test_the_work_of_a_start_is_bounded_by_the_rate(conn: Any) -> None:
    """Even for a role that may write everything: two billion rows would take hours."""
    conn.execute(
        "INSERT INTO queue_settings (queue, rate_limit, rate_period_s, partition_rate_limit,"
        " partition_rate_period_s) VALUES ('fetch', 3, 60, 2, 60)"
    )
    conn.execute("SELECT queue_workflows_ask_partition('fetch', 'k', 2000000000)")
    conn.execute("SELECT queue_workflows_note_starts('fetch', 2000000000)")
    assert factories.one(conn, "SELECT count(*) FROM partition_starts") == 2
    assert factories.one(conn, "SELECT count(*) FROM queue_starts") == 3


@pytest.mark.parametrize("family", ["ingest", "node"])
def test_a_role_that_works_claims_past_a_row_that_raises(conn: Any, family: str) -> None:
    who = transitions.who("fetch" if family == "ingest" else "cpu")
    for each in ("bad", "good"):
        priority = 1 if each == "bad" else 2
        if family == "ingest":
            factories.ingest(conn, id=each, priority=priority)
        else:
            factories.node(conn, id=each, priority=priority)
    rows_before_checks.change(conn, transitions.TABLES[family], "bad", claim_no=str(2**63 - 1))
    with conn.transaction(force_rollback=True):
        conn.execute("CREATE ROLE queue_workflows_guest")
        conn.execute("SET LOCAL SESSION AUTHORIZATION queue_workflows_guest")
        lacks = rights.lacking(conn, "work")
        conn.execute("RESET SESSION AUTHORIZATION")
        for lack in lacks:
            conn.execute(
                f"GRANT {lack.right} ON {lack.kind} {lack.name} TO queue_workflows_guest".encode()
            )
        conn.execute("SET LOCAL SESSION AUTHORIZATION queue_workflows_guest")
        assert transitions.claim_apart(conn, who) == "good"
        assert factories.reread(conn, {"id": "good"} | NODE[family])["status"] == "running"
        assert factories.reread(conn, {"id": "bad"} | NODE[family])["status"] == "failed"


NODE: dict[str, dict[str, str]] = {"node": {"node_id": "n"}, "ingest": {}}


def test_an_insert_of_any_kind_needs_no_function(conn: Any) -> None:
    conn.execute("INSERT INTO queue_partitions (queue, partition_key, max_running)"
                 " VALUES ('fetch', 'p', 1)")  # fmt: skip
    columns = "task_name, queue, lock_key, partition_key, idempotency_key, args, available_at"
    with as_guest(
        conn, f"INSERT ({columns}) ON ingest_jobs", "USAGE ON SEQUENCE ingest_jobs_seq_seq"
    ):
        for _ in range(2):
            conn.execute(
                f"INSERT INTO ingest_jobs ({columns}) VALUES ('t', 'fetch', 'l', 'p',"
                " gen_random_uuid(), %s::jsonb, NULL)".encode(),
                ('{"a": "' + "x" * 500 + '"}',),
            )
        conn.execute("SET CONSTRAINTS ALL IMMEDIATE")
        conn.execute("RESET SESSION AUTHORIZATION")
        found = "SELECT count(*) FROM ingest_jobs WHERE blocked_reason IS NULL"
        assert factories.one(conn, found) == 1


def test_rights_that_no_submitter_needs_are_named_until_they_are_gone(conn: Any) -> None:
    row = conn.execute("SELECT current_setting('server_version_num')::int AS v").fetchone()
    with conn.transaction(force_rollback=True):
        schema = conn.execute("SELECT quote_ident(current_schema()) AS name").fetchone()["name"]
        conn.execute("CREATE ROLE queue_workflows_guest")
        for grant in (
            f"ALL ON ALL TABLES IN SCHEMA {schema}",
            f"ALL ON ALL SEQUENCES IN SCHEMA {schema}",
            f"USAGE, CREATE ON SCHEMA {schema}",
        ):
            conn.execute(f"GRANT {grant} TO queue_workflows_guest".encode())
        conn.execute("GRANT REFERENCES (id) ON workflow_runs TO queue_workflows_guest")
        conn.execute(f"GRANT CREATE ON SCHEMA {schema} TO PUBLIC".encode())
        conn.execute("SET LOCAL ROLE queue_workflows_guest")
        excess = rights.excessive(conn, "submit")
        lacks = rights.lacking(conn, "submit")
        found = {(one.right, one.kind, one.name) for one in excess}
        assert ("REFERENCES", "TABLE", "workflow_runs") in found
        assert (("MAINTAIN", "TABLE", "workflow_runs") in found) == (row["v"] >= 170000)
        assert ("UPDATE", "SEQUENCE", "ingest_jobs_seq_seq") in found
        assert ("USAGE", "SEQUENCE", "workflow_node_jobs_seq_seq") in found
        assert ("USAGE", "SEQUENCE", "ingest_jobs_seq_seq") not in found
        grantees = {one.grantee for one in excess if one.kind == "SCHEMA"}
        assert grantees == {"PUBLIC", "queue_workflows_guest"}
        conn.execute("RESET ROLE")
        for statement in [
            *rights.revokes(excess),
            *rights.grants(lacks, "queue_workflows_guest"),
        ]:
            conn.execute(statement.encode())
        conn.execute("SET LOCAL ROLE queue_workflows_guest")
        assert rights.excessive(conn, "submit") == rights.lacking(conn, "submit") == []
        refused(conn, f"CREATE FUNCTION {schema}.mine() RETURNS int LANGUAGE sql AS 'SELECT 1'")
        refused(conn, "LOCK TABLE workflow_runs IN ACCESS EXCLUSIVE MODE")
        refused(conn, "SELECT setval('ingest_jobs_seq_seq', 9223372036854775807)")


# --- functions that an upgrade adds ---------------------------------------------------------------

GUEST = "queue_workflows_guest"
ADDED = {
    "queue_workflows_served_queues": {"read", "submit", "work"},
    "queue_workflows_hold_node": {"submit", "work"},
    "queue_workflows_nodes_step": {"work"},
    "queue_workflows_refuse": set[str](),
}
"""One function of each kind, and the purposes whose roles may call it."""


def lacks(conn: Any, purpose: str) -> list[rights.Missing]:
    """What the guest lacks for this purpose."""
    with conn.transaction():
        conn.execute(f"SET LOCAL ROLE {GUEST}".encode())
        found = rights.lacking(conn, purpose)
        conn.execute("RESET ROLE")
    return found


def upgrade(conn: Any) -> None:
    """Install the functions over those of a release that lacked some."""
    for name in ADDED:
        conn.execute(f"DROP FUNCTION {name}".encode())
    installed_functions.install(conn, "functions")


def callable_by_guest(conn: Any) -> set[str]:
    return {
        name
        for name in ADDED
        if factories.one(
            conn,
            "SELECT has_function_privilege(%s, %s::regproc, 'EXECUTE')",
            GUEST,
            name,
        )
    }


@pytest.fixture
def guest(conn: Any, request: pytest.FixtureRequest) -> Iterator[str]:
    """The purpose of a role that has exactly the rights of it; nothing of it stays."""
    purpose: str = request.param
    with conn.transaction(force_rollback=True):
        conn.execute(f"CREATE ROLE {GUEST}".encode())
        conn.execute(f"GRANT USAGE ON SCHEMA public TO {GUEST}".encode())
        while missing := lacks(conn, purpose):
            for statement in rights.grants(missing, GUEST):
                conn.execute(statement.encode())
        yield purpose


@pytest.mark.parametrize("guest", ["read", "submit", "work"], indirect=True)
def test_a_role_of_a_documented_purpose_gets_the_functions_that_an_upgrade_adds(
    conn: Any, guest: str
) -> None:
    upgrade(conn)
    assert lacks(conn, guest) == []
    assert callable_by_guest(conn) == {name for name, who in ADDED.items() if guest in who}
    conn.execute(f"SET LOCAL ROLE {GUEST}".encode())
    assert rights.excessive(conn, guest) == []


@pytest.mark.parametrize("guest", ["submit", "work"], indirect=True)
@pytest.mark.parametrize(
    ("taken", "left"),
    [
        ("queue_workflows_is_off", set[str]()),
        ("queue_workflows_put_jobs", {"queue_workflows_served_queues"}),
    ],
    ids=["one that reads", "one that submits"],
)
def test_a_role_that_lacks_a_function_of_its_purpose_gets_none_of_that_kind_or_above(
    conn: Any, guest: str, taken: str, left: set[str]
) -> None:
    conn.execute(f"REVOKE EXECUTE ON FUNCTION {taken} FROM {GUEST}".encode())
    upgrade(conn)
    assert callable_by_guest(conn) == left


@pytest.mark.parametrize("guest", ["work"], indirect=True)
def test_a_function_that_was_taken_from_a_role_is_not_given_back(conn: Any, guest: str) -> None:
    conn.execute(f"REVOKE EXECUTE ON FUNCTION queue_workflows_nodes_step FROM {GUEST}".encode())
    installed_functions.install(conn, "functions")
    assert "queue_workflows_nodes_step" not in callable_by_guest(conn)


def test_the_installed_text_has_the_names_of_both_lists() -> None:
    text = installed_functions.text("functions")
    assert not re.search(r"'\{(submit|internal)\}'", text)
    for name in ("enqueue", "refuse"):
        assert re.search(rf"'\{{[a-z_,]*queue_workflows_{name}[a-z_,]*\}}'", text)


# --- what a statement of a role calls -------------------------------------------------------------

CALLS = """
SELECT p.proname::text || ' calls ' || c.proname
  FROM pg_proc p
  JOIN pg_proc c ON c.pronamespace = p.pronamespace AND c.proname <> p.proname
 WHERE p.pronamespace = current_schema()::regnamespace
   AND starts_with(c.proname, 'queue_workflows_')
   AND NOT p.prosecdef AND p.prosrc ~ (c.proname || '\\s*\\(')
   AND NOT has_function_privilege(%(role)s, c.oid, 'EXECUTE')
   AND (%(fires)s AND p.prorettype = 'trigger'::regtype
        OR has_function_privilege(%(role)s, p.oid, 'EXECUTE'))
"""
"""What functions call as `role` although it may not; `fires`: also those of triggers."""


@pytest.mark.parametrize("guest", ["read", "submit", "work"], indirect=True)
def test_a_function_calls_as_its_caller_only_what_that_role_may_call(conn: Any, guest: str) -> None:
    given = {"role": GUEST, "fires": guest == "work"}
    assert conn.execute(CALLS.encode(), given).fetchall() == []


@pytest.mark.parametrize("guest", ["work"], indirect=True)
def test_a_role_that_works_writes_schedules(conn: Any, guest: str) -> None:
    conn.execute(f"SET LOCAL ROLE {GUEST}".encode())
    conn.execute("INSERT INTO schedules (name, expression, task_name) VALUES ('s', '@daily', 't')")
    conn.execute("UPDATE schedules SET args = '{\"a\": 1}', paused = true")
    conn.execute("UPDATE schedules SET paused = false, wake_at = now()")
    conn.execute("DELETE FROM schedules")


# --- the statements of the docs -------------------------------------------------------------------

DOCS = Path(__file__).parents[2] / "docs"
SUBMITTED = re.compile(
    r"INSERT INTO (workflow_runs|ingest_jobs|workflow_input_submissions|events)\b"
)


def least_purpose(statement: str) -> str | None:
    """Return the purpose of a role that runs a statement of the docs; None: only the owner does."""
    if SUBMITTED.match(statement):
        return "submit"
    if statement.startswith("SELECT"):
        return "read"
    return "work" if re.match(r"(WITH|INSERT|UPDATE|DELETE)\b", statement) else None


def documented(purpose: str) -> list[str]:
    texts = [
        re.sub(r"--.*", "", block.text)
        for page in sorted(DOCS.glob("*.md"))
        for block in markdown.blocks(page)
        if block.language == "sql"
    ]
    found = [one.strip() for text in texts for one in text.split(";\n")]
    return [one for one in found if least_purpose(one) == purpose]


@pytest.mark.parametrize("guest", ["read", "submit", "work"], indirect=True)
def test_a_role_may_run_the_documented_statements_of_its_purpose(conn: Any, guest: str) -> None:
    conn.execute(f"SET LOCAL ROLE {GUEST}".encode())
    statements = documented(guest)
    assert len(statements) > 8
    denied: list[str] = []
    for statement in statements:
        try:
            with conn.transaction():
                conn.execute(statement.encode())
                conn.execute("SET CONSTRAINTS ALL IMMEDIATE")
        except psycopg.errors.InsufficientPrivilege as error:
            denied.append(f"{error}: {statement}")
        except psycopg.DatabaseError:
            pass  # its page has made a row before, or shows that it is refused
    assert denied == []
