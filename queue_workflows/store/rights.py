"""What a role may not do with our tables and functions, and the GRANTs that would let it."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from queue_workflows import db
from queue_workflows.store import health
from queue_workflows.types import Row

_Rights: TypeAlias = "dict[str, tuple[str, ...]]"
_READ: _Rights = dict.fromkeys((*health.TABLES, "queue_schema_version"), ("SELECT",))
_WORK: _Rights = dict.fromkeys(health.TABLES, ("SELECT", "INSERT", "UPDATE", "DELETE"))
_SUBMIT: _Rights = dict.fromkeys(
    ("workflow_runs", "ingest_jobs", "workflow_input_submissions"), ("SELECT", "INSERT")
)
PURPOSES: dict[str, _Rights] = {
    "work": {**_READ, **_WORK},
    "migrate": {**_READ, **_WORK},
    "submit": {**_READ, **_SUBMIT},
    "read": _READ,
}
"""What a role is for → what it needs on each table. `migrate`: it has to own them besides."""


class Lack(NamedTuple):
    """A missing right: SELECT, USAGE, EXECUTE, ownership ..., and on what, as SQL names it."""

    right: str
    kind: str
    """TABLE, SEQUENCE, FUNCTION or SCHEMA."""
    name: str


def lacking(conn: db.Connection, purpose: str) -> list[Lack]:
    """What this role lacks for a purpose, on those of our tables and functions that exist."""
    wanted = PURPOSES[purpose]
    pairs = [(table, right) for table, rights in wanted.items() for right in rights]
    filled = [table for table, rights in wanted.items() if "INSERT" in rights]
    rows = conn.execute(
        b"SELECT w.privilege AS right, 'TABLE' AS kind, to_regclass(w.name)::text AS name"
        b" FROM unnest(%(tables)s::text[], %(privileges)s::text[]) AS w (name, privilege)"
        b" WHERE NOT has_table_privilege(to_regclass(w.name), w.privilege)",
        {"tables": [table for table, _ in pairs], "privileges": [right for _, right in pairs]},
    ).fetchall()
    rows += [
        {"right": "USAGE", "kind": "SEQUENCE", "name": name}
        for name in health.closed_sequences(conn, filled)
    ]
    if purpose in {"work", "migrate"}:
        rows += _functions(conn)
    if purpose == "migrate":
        rows += _ownership(conn)
    return [Lack(**row) for row in rows]


def _functions(conn: db.Connection) -> list[Row]:
    """A trigger's function needs no right of who fires it; the others are called by name."""
    return conn.execute(
        b"SELECT 'EXECUTE' AS right, 'FUNCTION' AS kind, p.oid::regprocedure::text AS name"
        b" FROM pg_proc p JOIN pg_class c ON c.oid = to_regclass('workflow_runs')"
        b" WHERE p.pronamespace = c.relnamespace AND starts_with(p.proname, 'queue_workflows_')"
        b" AND p.prorettype <> 'trigger'::regtype AND NOT has_function_privilege(p.oid, 'EXECUTE')"
        b" ORDER BY 3"
    ).fetchall()


def _ownership(conn: db.Connection) -> list[Row]:
    return conn.execute(
        b"SELECT 'OWNER' AS right, 'TABLE' AS kind, c.oid::regclass::text AS name FROM pg_class c"
        b" WHERE c.oid IN (SELECT to_regclass(name) FROM unnest(%s::text[]) AS t (name))"
        b" AND NOT pg_has_role(c.relowner, 'USAGE')"
        b" UNION ALL SELECT 'CREATE', 'SCHEMA', current_schema()"
        b" WHERE NOT has_schema_privilege(current_schema(), 'CREATE')",
        (list(_READ),),
    ).fetchall()


def grants(lacks: list[Lack], role: str) -> list[str]:
    """The statements that give what is missing, as few as possible; `role` as SQL spells it."""
    wanted: dict[tuple[str, str], list[str]] = {}
    for lack in lacks:
        wanted.setdefault((lack.kind, lack.name), []).append(lack.right)
    merged: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (kind, name), rights in wanted.items():
        merged.setdefault((kind, tuple(rights)), []).append(name)
    found: list[str] = []
    for (kind, rights), names in merged.items():
        if "OWNER" in rights:
            found += [f"ALTER TABLE {name} OWNER TO {role}" for name in names]
        else:
            found.append(f"GRANT {', '.join(rights)} ON {kind} {', '.join(names)} TO {role}")
    return found


def ledger(conn: db.Connection) -> Row:
    """How this role sees the schema: found, readable, elsewhere, role, schema, may_create.

    `found`: its ledger is on the search path; `elsewhere`: schemas that have one all the same, as
    the path or a missing USAGE hides them. `role` and `schema` as SQL spells them.
    """
    row = conn.execute(
        b"SELECT to_regclass('queue_schema_version') IS NOT NULL AS found,"
        b" coalesce(has_table_privilege(to_regclass('queue_schema_version'), 'SELECT'), false)"
        b" AS readable,"
        b" ARRAY(SELECT quote_ident(n.nspname) FROM pg_class c"
        b" JOIN pg_namespace n ON n.oid = c.relnamespace"
        b" WHERE c.relname = 'queue_schema_version' AND c.relkind = 'r' ORDER BY 1) AS elsewhere,"
        b" quote_ident(current_user) AS role,"
        b" quote_ident(coalesce(current_schema(), 'public')) AS schema,"
        b" coalesce(has_schema_privilege(current_schema(), 'CREATE'), false) AS may_create"
    ).fetchone()
    assert row is not None
    return row


def newest(conn: db.Connection) -> tuple[int, int]:
    """The schema's version, and the oldest version of the code that may work on it."""
    row = conn.execute(
        b"SELECT coalesce(max(version), 0) AS version,"
        b" coalesce(max((to_jsonb(l)->>'compatible_with')::int), 0) AS needs"
        b" FROM queue_schema_version l"
    ).fetchone()
    assert row is not None
    return row["version"], row["needs"]


def pooled(conn: db.Connection) -> bool:
    """Whether a pooler answers here: the server's process is another than the one it announced."""
    row = conn.execute(b"SELECT pg_backend_pid() AS pid").fetchone()
    return row is not None and row["pid"] != conn.info.backend_pid
