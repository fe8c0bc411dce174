"""What a role may not do with our tables and functions, and the GRANTs that would let it."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from queue_workflows import db
from queue_workflows.store import health
from queue_workflows.types import Row

_Rights: TypeAlias = "dict[str, tuple[str, ...]]"
_READ: _Rights = dict.fromkeys(
    (*health.TABLES, "queue_schema_version", "queue_schema_objects", "queue_partition_limits"),
    ("SELECT",),
)
_WORK: _Rights = dict.fromkeys(health.TABLES, ("SELECT", "INSERT", "UPDATE", "DELETE"))
PURPOSES: dict[str, _Rights] = {
    "work": {**_READ, **_WORK},
    "migrate": {**_READ, **_WORK},
    "submit": _READ,
    "read": _READ,
}
"""What a role is for → what it needs on each table. `migrate`: it has to own them besides."""
SUBMITTED: dict[str, tuple[str, ...]] = {
    "workflow_runs": (
        "id", "parcel_id", "workflow_name", "priority", "context", "out_dir", "available_at",
    ),
    "ingest_jobs": (
        "id", "task_name", "queue", "reason", "priority", "args", "idempotency_key",
        "idempotency_window_s", "lock_key", "partition_key", "available_at", "max_attempts",
        "timeout_s", "policy", "headers",
    ),
    "workflow_input_submissions": ("id", "run_id", "node_id", "value"),
}  # fmt: skip
"""The columns that a role for `submit` inserts; identity, counters, states, times and definitions
belong to the engine."""
_SUBMIT = ("queue_workflows_enqueue", "queue_workflows_put_jobs", "queue_workflows_hold_node")
_INTERNAL = (
    "queue_workflows_admit", "queue_workflows_ask_partition", "queue_workflows_ask_turn",
    "queue_workflows_audit", "queue_workflows_check_payload", "queue_workflows_demand",
    "queue_workflows_limit_gate", "queue_workflows_partitions", "queue_workflows_rate_room",
    "queue_workflows_refuse", "queue_workflows_release_key",
)  # fmt: skip
"""Functions that only functions of the tables' owner call: nobody is granted them."""


class Lack(NamedTuple):
    """A missing right: SELECT, USAGE, EXECUTE, ownership ..., and on what, as SQL names it."""

    right: str
    kind: str
    """TABLE, SEQUENCE, FUNCTION or SCHEMA."""
    name: str


class Excess(NamedTuple):
    """A right that the purpose does not need, and the role, as SQL names it, that was granted it.

    That role is this one, PUBLIC, or a role that this one is a member of.
    """

    right: str
    kind: str
    """TABLE, SEQUENCE, FUNCTION or SCHEMA."""
    name: str
    grantee: str


def lacking(conn: db.Connection, purpose: str) -> list[Lack]:
    """Return what this role lacks for a purpose, of our tables and functions that exist."""
    wanted = PURPOSES[purpose]
    pairs = [(table, right) for table, rights in wanted.items() for right in rights]
    filled = [table for table, rights in wanted.items() if "INSERT" in rights]
    rows = conn.execute(
        b"SELECT w.privilege AS right, 'TABLE' AS kind, to_regclass(w.name)::text AS name"
        b" FROM unnest(%(tables)s::text[], %(privileges)s::text[]) AS w (name, privilege)"
        b" WHERE NOT has_table_privilege(to_regclass(w.name), w.privilege)",
        {"tables": [table for table, _ in pairs], "privileges": [right for _, right in pairs]},
    ).fetchall()
    if purpose == "submit":
        filled = list(SUBMITTED)
        rows += _closed_columns(conn)
    rows += [
        {"right": "USAGE", "kind": "SEQUENCE", "name": name}
        for name in health.closed_sequences(conn, filled)
    ]
    rows += _closed_functions(conn, purpose)
    if purpose == "migrate":
        rows += _ownership(conn)
    return [Lack(**row) for row in rows]


def _closed_columns(conn: db.Connection) -> list[Row]:
    """Count a table-wide INSERT as none, since its REVOKE takes the rights to columns too."""
    wide = {one.name for one in excessive(conn, "submit") if one.right == "INSERT"}
    found: list[Row] = []
    for table, columns in SUBMITTED.items():
        row = conn.execute(
            b"SELECT to_regclass(%(table)s)::text AS name, bool_and(has_column_privilege("
            b"to_regclass(%(table)s), c.name, 'INSERT')) AS open FROM unnest(%(columns)s::text[])"
            b" AS c (name) WHERE to_regclass(%(table)s) IS NOT NULL",
            {"table": table, "columns": list(columns)},
        ).fetchone()
        if row and row["name"] and (row["name"] in wide or not row["open"]):
            right = f"INSERT ({', '.join(columns)})"
            found.append({"right": right, "kind": "TABLE", "name": row["name"]})
    return found


_CALLABLE = (
    b" FROM pg_proc p JOIN pg_class c ON c.oid = to_regclass('workflow_runs')"
    b" WHERE p.pronamespace = c.relnamespace AND starts_with(p.proname, 'queue_workflows_')"
    b" AND p.prorettype <> 'trigger'::regtype"
)


def _closed_functions(conn: db.Connection, purpose: str) -> list[Row]:
    """A trigger's function needs no right of who fires it; the others are called by name.

    Roles that do not work call those that only read, and to submit those that enqueue.
    """
    return conn.execute(
        b"SELECT 'EXECUTE' AS right, 'FUNCTION' AS kind, p.oid::regprocedure::text AS name"
        + _CALLABLE
        + b" AND p.proname <> ALL (%(internal)s::text[]) AND (%(works)s OR p.provolatile <> 'v'"
        b" OR p.proname = ANY (%(named)s::text[]))"
        b" AND NOT has_function_privilege(p.oid, 'EXECUTE') ORDER BY 3",
        {
            "internal": list(_INTERNAL),
            "works": purpose in {"work", "migrate"},
            "named": list(_SUBMIT) if purpose == "submit" else [],
        },
    ).fetchall()


def excessive(conn: db.Connection, purpose: str) -> list[Excess]:
    """Return the rights past reading that a role for `submit` or `read` has and does not need.

    MAINTAIN lets a role lock a table. UPDATE lets it set a sequence to its end. CREATE on the
    schema lets it put a function in the place of one of ours, which then runs as the owner of the
    tables. The owner of an object, and a superuser, cannot be confined: nothing is found for them.
    """
    if purpose not in {"submit", "read"}:
        return []
    allowed = SUBMITTED if purpose == "submit" else {}
    rows = conn.execute(
        b" UNION ALL ".join(_GRANTED),
        {
            "tables": list(_READ),
            "allowed": [f"{table}.{name}" for table, names in allowed.items() for name in names],
            "filled": list(allowed),
            "callable": list(_SUBMIT) if purpose == "submit" else [],
            "internal": list(_INTERNAL),
        },
    ).fetchall()
    return [Excess(**row) for row in rows]


_GRANTEE = b" CASE x.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(x.grantee)) END"
_IS_MINE = b" (x.grantee = 0 OR pg_has_role(x.grantee, 'USAGE'))"
_GRANTED_TABLES = (
    b"SELECT x.privilege_type AS right, 'TABLE' AS kind, c.oid::regclass::text AS name,"
    + _GRANTEE
    + b" AS grantee FROM unnest(%(tables)s::text[]) AS t (name)"
    b" JOIN pg_class c ON c.oid = to_regclass(t.name) CROSS JOIN LATERAL aclexplode(c.relacl) x"
    b" WHERE x.privilege_type <> 'SELECT'"
    b" AND NOT pg_has_role(c.relowner, 'USAGE') AND" + _IS_MINE
)
_GRANTED_COLUMNS = (
    b"SELECT x.privilege_type || ' (' || quote_ident(a.attname) || ')', 'TABLE',"
    b" c.oid::regclass::text," + _GRANTEE + b" FROM unnest(%(tables)s::text[]) AS t (name)"
    b" JOIN pg_class c ON c.oid = to_regclass(t.name) JOIN pg_attribute a ON a.attrelid = c.oid"
    b" CROSS JOIN LATERAL aclexplode(a.attacl) x"
    b" WHERE (x.privilege_type IN ('UPDATE', 'REFERENCES') OR x.privilege_type = 'INSERT'"
    b" AND c.relname || '.' || a.attname <> ALL (%(allowed)s::text[]))"
    b" AND NOT pg_has_role(c.relowner, 'USAGE') AND" + _IS_MINE
)
_GRANTED_FUNCTIONS = (
    b"SELECT x.privilege_type, 'FUNCTION', p.oid::regprocedure::text,"
    + _GRANTEE
    + b" FROM pg_proc p JOIN pg_class c ON c.oid = to_regclass('workflow_runs')"
    b" CROSS JOIN LATERAL aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) x"
    b" WHERE p.pronamespace = c.relnamespace AND starts_with(p.proname, 'queue_workflows_')"
    b" AND (p.provolatile = 'v' OR p.proname = ANY (%(internal)s::text[]))"
    b" AND p.proname <> ALL (%(callable)s::text[])"
    b" AND NOT pg_has_role(p.proowner, 'USAGE') AND" + _IS_MINE
)
_GRANTED_SEQUENCES = (
    b"SELECT x.privilege_type, 'SEQUENCE', s.oid::regclass::text,"
    + _GRANTEE
    + b" FROM pg_class s JOIN pg_depend d ON d.objid = s.oid AND d.classid = 'pg_class'::regclass"
    b" AND d.deptype IN ('a', 'i') JOIN pg_class c ON c.oid = d.refobjid"
    b" JOIN pg_class r ON r.oid = to_regclass('workflow_runs') AND r.relnamespace = c.relnamespace"
    b" CROSS JOIN LATERAL aclexplode(CASE s.relkind WHEN 'S' THEN s.relacl END) x"
    b" WHERE (c.relname = ANY (%(tables)s::text[]) OR c.relname = 'lock_turns')"
    b" AND (x.privilege_type = 'UPDATE' OR x.privilege_type = 'USAGE'"
    b" AND c.relname <> ALL (%(filled)s::text[]))"
    b" AND NOT pg_has_role(s.relowner, 'USAGE') AND" + _IS_MINE
)
_GRANTED_SCHEMA = (
    b"SELECT x.privilege_type, 'SCHEMA', quote_ident(n.nspname),"
    + _GRANTEE
    + b" FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
    b" CROSS JOIN LATERAL aclexplode(coalesce(n.nspacl, acldefault('n', n.nspowner))) x"
    b" WHERE c.oid = to_regclass('workflow_runs') AND x.privilege_type = 'CREATE'"
    b" AND NOT pg_has_role(c.relowner, 'USAGE') AND NOT pg_has_role(n.nspowner, 'USAGE')"
    b" AND" + _IS_MINE
)
_GRANTED = (
    _GRANTED_TABLES,
    _GRANTED_COLUMNS,
    _GRANTED_FUNCTIONS,
    _GRANTED_SEQUENCES,
    _GRANTED_SCHEMA,
)


def _ownership(conn: db.Connection) -> list[Row]:
    return conn.execute(
        b"SELECT 'OWNER' AS right, 'TABLE' AS kind, c.oid::regclass::text AS name FROM pg_class c"
        b" WHERE c.oid IN (SELECT to_regclass(name) FROM unnest(%s::text[]) AS t (name))"
        b" AND NOT pg_has_role(c.relowner, 'USAGE')"
        b" UNION ALL SELECT 'CREATE', 'SCHEMA', current_schema()"
        b" WHERE NOT has_schema_privilege(current_schema(), 'CREATE')",
        (list(_READ),),
    ).fetchall()


def revokes(found: list[Excess]) -> list[str]:
    """Return the statements that take these rights away, one a grantee and object."""
    merged: dict[tuple[str, str, str], list[str]] = {}
    for one in found:
        merged.setdefault((one.kind, one.name, one.grantee), []).append(one.right)
    return [
        f"REVOKE {', '.join(rights)} ON {kind} {name} FROM {grantee}"
        for (kind, name, grantee), rights in merged.items()
    ]


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
