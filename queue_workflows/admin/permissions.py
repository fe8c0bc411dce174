"""Find privileges that a role lacks or does not need, and the statements that correct them."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from queue_workflows import db
from queue_workflows.db import functions, statements
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


def lacking(conn: db.Connection, purpose: str) -> list[MissingRight]:
    """Return the rights that this role lacks for a purpose, on existing tables and functions."""
    wanted = PURPOSES[purpose]
    pairs = [(table, right) for table, rights in wanted.items() for right in rights]
    filled = [table for table, right in pairs if right == "INSERT"]
    rows = statements.permissions.closed_tables(
        conn, tables=[table for table, _ in pairs], privileges=[right for _, right in pairs]
    )
    if purpose == "submit":
        filled = list(SUBMITTED)
        rows += _closed_columns(conn)
    rows += [
        {"right": "USAGE", "kind": "SEQUENCE", "name": name}
        for name in statements.permissions.closed_sequences(conn, tables=filled)
    ]
    rows += statements.permissions.closed_functions(
        conn,
        internal=list(functions.INTERNAL),
        works=purpose in {"work", "migrate"},
        named=list(functions.SUBMIT) if purpose == "submit" else [],
    )
    if purpose == "migrate":
        rows += statements.permissions.not_owned(conn, tables=list(_READ))
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


def revokes(found: list[ExcessRight]) -> list[str]:
    """Return the REVOKE statements for these privileges, one for each grantee and object."""
    merged: dict[tuple[str, str, str], list[str]] = {}
    for one in found:
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
            found += [f"ALTER TABLE {name} OWNER TO {role}" for name in names]
        else:
            found.append(f"GRANT {', '.join(rights)} ON {kind} {', '.join(names)} TO {role}")
    return found
