"""Find privileges that a role lacks or does not need, and the statements that correct them."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from queue_workflows import db
from queue_workflows.db import functions, statements
from queue_workflows.runtime import display
from queue_workflows.types import Row

TABLES = (
    "workflow_runs", "workflow_node_jobs", "workflow_input_submissions",
    "workflow_run_maps", "workflow_map_items",
    "workflow_dispatch_events", "workflow_node_events", "ingest_jobs", "ingest_job_events",
    "schedule_fires", "schedules", "workers", "worker_heartbeats", "worker_controls",
    "job_attempt_logs", "workflow_input_timeouts", "queue_settings", "gpu_models",
    "gpu_unassignable",
    "model_controls", "hw_samples", "queue_partitions", "queue_starts", "partition_starts",
    "partition_dues", "failure_alerts", "failure_alert_state", "event_exports",
    "event_export_runs",
    "metric_totals", "metric_position", "job_steps", "events", "job_parts", "operator_acts",
    "failures_seen",
)  # fmt: skip
"""The tables that the engine writes, except for `lock_turns` and `partition_turns`, which only
functions of their owner write."""
_Rights: TypeAlias = "dict[str, tuple[str, ...]]"
_READ: _Rights = dict.fromkeys(
    (*TABLES, "queue_schema_version", "queue_schema_objects", "queue_partition_limits"), ("SELECT",)
)
_ALL = [*_READ, "lock_turns", "partition_turns", "workflow_run_files"]
_WORK: _Rights = dict.fromkeys(TABLES, ("SELECT", "INSERT", "UPDATE", "DELETE"))
PURPOSES: dict[str, _Rights] = {
    "work": {**_READ, **_WORK},
    "migrate": {**_READ, **_WORK},
    "submit": _READ,
    "read": _READ,
}
"""The privileges on each table that a role for this purpose needs. A role for `migrate` must also
own the tables."""
SUBMITTED: dict[str, tuple[str, ...]] = {
    "workflow_runs": (
        "id", "parcel_id", "workflow_name", "priority", "context", "out_dir", "available_at",
        "headers",
    ),
    "ingest_jobs": (
        "id", "task_name", "queue", "reason", "priority", "args", "idempotency_key",
        "idempotency_window_s", "lock_key", "partition_key", "available_at", "max_attempts",
        "timeout_s", "policy", "headers",
    ),
    "workflow_input_submissions": ("id", "run_id", "node_id", "value"),
    "events": ("name", "key", "value"),
    "operator_acts": ("actor", "via", "action", "kind", "subject", "reason", "detail"),
}  # fmt: skip
"""The columns that a role for `submit` inserts. Identity, counters, states, times and definitions
belong to the engine."""


class MissingRight(NamedTuple):
    """A missing privilege (SELECT, USAGE, EXECUTE, OWNER ...) on an object, as SQL names it."""

    right: str
    kind: str
    """TABLE, SEQUENCE, FUNCTION or SCHEMA."""
    name: str


class ExcessRight(NamedTuple):
    """A privilege that the purpose does not need, and its grantee, as SQL names it.

    The grantee is this role, PUBLIC, or a role of which this one is a member.
    """

    right: str
    kind: str
    name: str
    grantee: str


def lacking(
    conn: db.Connection, purpose: str, *, without: list[ExcessRight] | None = None
) -> list[MissingRight]:
    """Return the rights that this role lacks for a purpose, on existing tables and functions.

    A right that it may have only because PUBLIC has it counts as lacking if it is in `without`.
    """
    wanted, revoked = PURPOSES[purpose], [f"{one.right} {one.name}" for one in without or ()]
    pairs = [(table, right) for table, rights in wanted.items() for right in rights]
    filled = [table for table, right in pairs if right == "INSERT"]
    rows = statements.permissions.closed_tables(
        conn,
        tables=[table for table, _ in pairs],
        privileges=[right for _, right in pairs],
        revoked=revoked,
    )
    if purpose == "submit":
        filled = list(SUBMITTED)
        rows += _closed_columns(conn)
    rows += [
        {"right": "USAGE", "kind": "SEQUENCE", "name": name}
        for name in statements.permissions.closed_sequences(conn, tables=filled, revoked=revoked)
    ]
    rows += statements.permissions.closed_functions(
        conn,
        internal=list(functions.INTERNAL),
        works=purpose in {"work", "migrate"},
        named=list(functions.SUBMIT) if purpose == "submit" else [],
        revoked=revoked,
    )
    if purpose == "migrate":
        rows += statements.permissions.not_owned(
            conn, tables=_ALL, notifying=list(functions.NOTIFYING)
        )
    return [MissingRight(**row) for row in rows]


def _closed_columns(conn: db.Connection) -> list[Row]:
    """Return the INSERT on columns that a role for `submit` lacks, one row a table.

    A table-wide INSERT does not count, since its REVOKE takes the rights to the columns too.
    """
    wide = {one.name for one in excessive(conn, "submit") if one.right == "INSERT"}
    found: list[Row] = []
    for table, columns in SUBMITTED.items():
        row = statements.permissions.closed_columns(conn, table=table, columns=list(columns))
        if row and row["name"] and (row["name"] in wide or not row["is_open"]):
            right = f"INSERT ({', '.join(columns)})"
            found.append({"right": right, "kind": "TABLE", "name": row["name"]})
    return found


def excessive(conn: db.Connection, purpose: str) -> list[ExcessRight]:
    """Return the privileges beyond reading that a `submit` or `read` role has but does not need.

    MAINTAIN lets a role lock a table. UPDATE lets it set a sequence to its end. CREATE on the
    schema lets it replace one of our functions, which then runs as the owner of the tables. The
    owner of an object and a superuser cannot be confined, so the result is empty for them.
    """
    if purpose not in {"submit", "read"}:
        return []
    allowed = SUBMITTED if purpose == "submit" else {}
    return [
        ExcessRight(**row)
        for row in statements.permissions.excessive(
            conn,
            tables=list(_READ),
            allowed=[f"{table}.{name}" for table, names in allowed.items() for name in names],
            filled=list(allowed),
            callable=list(functions.SUBMIT) if purpose == "submit" else [],
            internal=list(functions.INTERNAL),
        )
    ]


def of_public(conn: db.Connection) -> list[ExcessRight]:
    """Return the rights of PUBLIC to functions, tables and sequences of the engine.

    A dump that is restored while a role of its GRANTs is missing leaves the functions without any
    grant or REVOKE, so that PUBLIC may execute them.
    """
    rows = statements.permissions.of_public(conn, tables=_ALL, notifying=list(functions.NOTIFYING))
    return [ExcessRight(**row) for row in rows]


def described(public: list[ExcessRight]) -> list[str]:
    """Return the rights of PUBLIC, as at most two texts."""
    found: list[str] = []
    if called := [one.name for one in public if one.kind == "FUNCTION"]:
        found.append(f"PUBLIC may execute {_first(called, 'function')}")
    if opened := [f"{one.right} on {one.name}" for one in public if one.kind != "FUNCTION"]:
        found.append(f"PUBLIC has {_first(opened, 'right')}")
    return found


def of_another_owner(conn: db.Connection) -> tuple[str, str] | None:
    """Return a fault with its remedy if functions have another owner than the tables, else None.

    Some of them run as their owner, who needs all rights to the tables, and should not have more.
    """
    rows = statements.permissions.others_functions(conn, notifying=list(functions.NOTIFYING))
    if not rows:
        return None
    owner, tables = rows[0]["owner"], rows[0]["owner_of_tables"]
    text = f"{owner} owns {_first([row['name'] for row in rows], 'function')}, {tables} the tables"
    change = f"ALTER FUNCTION {rows[0]['name']} OWNER TO {tables}"
    return text, f"as a superuser: {change}, and so for each"


def _first(names: list[str], noun: str) -> str:
    """Return how many there are, and the first."""
    return f"{display.counted(len(names), noun)} ({names[0]}{', ...' if names[1:] else ''})"


def revokes(found: list[ExcessRight]) -> list[str]:
    """Return the REVOKE statements for these privileges, one for each grantee and object."""
    merged: dict[tuple[str, str, str], list[str]] = {}
    for one in dict.fromkeys(found):
        merged.setdefault((one.kind, one.name, one.grantee), []).append(one.right)
    return [
        f"REVOKE {', '.join(rights)} ON {kind} {name} FROM {grantee}"
        for (kind, name, grantee), rights in merged.items()
    ]


def grants(lacks: list[MissingRight], role: str) -> list[str]:
    """Return the fewest statements that give these rights; `role` is quoted as SQL needs it."""
    wanted: dict[tuple[str, str], list[str]] = {}
    for lack in lacks:
        wanted.setdefault((lack.kind, lack.name), []).append(lack.right)
    merged: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (kind, name), rights in wanted.items():
        merged.setdefault((kind, tuple(rights)), []).append(name)
    found: list[str] = []
    for (kind, rights), names in merged.items():
        if "OWNER" in rights:
            found += [f"ALTER {kind} {name} OWNER TO {role}" for name in names]
        else:
            found.append(f"GRANT {', '.join(rights)} ON {kind} {', '.join(names)} TO {role}")
    return found
