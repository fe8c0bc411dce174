"""Read the schema of a database from its catalog, independent of the server's version."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import psycopg
from psycopg import sql

PURPOSES = {
    "workflow_runs": "A run of a workflow: state, context, the definition frozen at its start.",
    "workflow_run_files": "Files that a host lists for a run; the engine leaves them alone.",
    "workflow_node_jobs": "One node of one run: queue, claim, inputs, result.",
    "workflow_input_submissions": "Answers of people to input nodes.",
    "workflow_dispatch_events": "The outbox: ends of nodes, which are dispatched once.",
    "worker_heartbeats": "Capacity, models and last heartbeat of a machine and queue.",
    "ingest_jobs": "Jobs that belong to no run.",
    "workflow_node_events": "The history of nodes: one row per transition, deleted by age.",
    "worker_controls": "The ON/OFF switch of a machine and queue; no row means ON.",
    "ingest_job_events": "The history of ingest jobs: one row per transition.",
    "job_attempt_logs": "The output of handlers: one row per attempt that printed, deleted by age.",
    "schedules": "One row per schedule, by code, commands or plain SQL; schedulers plan it.",
    "schedule_fires": "One row per schedule entry and time, inserted by the scheduler that fires.",
    "failure_alerts": "Failures that wait to be sent as alerts; written by triggers.",
    "failure_alert_state": "The time of the last sender of alerts, and the limit of all senders.",
    "event_exports": "How far each export of the history is: spans, audit logs, metric logs.",
    "event_export_runs": "Runs with exported events whose own end is not exported yet.",
    "metric_totals": "Counters and buckets of metrics: what the history of jobs amounts to.",
    "metric_position": "How far the history is counted into metric_totals.",
    "job_steps": "The steps of handlers, and what each returned; deleted with their job.",
    "job_parts": "What handlers stream, by claim and number; deleted with their job.",
    "operator_acts": "Who did what on request; deleted by age.",
    "failures_seen": "Signatures of failures that somebody has seen, and until when.",
    "events": "Events that handlers wait for; the first of a name and key counts.",
    "workflow_run_maps": "The maps of runs: how many of their items are open, done and failed.",
    "workflow_map_items": "The items of maps, as sealed when their source ended.",
    "workflow_input_timeouts": "The timeouts of input nodes that have one.",
    "queue_settings": "Pause, limits and retention of one queue; no row means the defaults.",
    "queue_partitions": "Pause and limits of one partition key of a queue.",
    "queue_starts": "The last starts of queues that have a rate.",
    "partition_starts": "The last starts of partitions that have a rate.",
    "partition_dues": "When limited partitions must be checked again.",
    "partition_turns": "Partitions that an open transaction has changed; otherwise empty.",
    "lock_turns": "Lock keys that an open transaction has changed; otherwise empty.",
    "model_controls": "Requests to load or unload a model on the workers of a machine.",
    "hw_samples": "Hardware samples: one ring of an hour and one of a day per machine.",
    "gpu_models": "A model on a machine: its size, and the average times of loads and runs.",
    "gpu_unassignable": "Models whose queued jobs no live worker can take, and why.",
    "workers": "One row per worker process, by its identity.",
    "queue_schema_version": "The ledger of applied migrations.",
    "queue_schema_objects": "Versions of the installed functions and triggers.",
}


EVENTS = {
    "queued": (
        "jobs", "an ingest job is queued over HTTP or by `jobs.enqueue_once`; not by others",
        "the caller", "",
    ),
    "claimed": ("both", "a worker claims the job", "the worker", ""),
    "model_load_start": ("nodes", "the node's model begins to load", "the worker", ""),
    "model_load_done": ("nodes", "the model is loaded; `elapsed_s` is the time", "the worker", ""),
    "completed": (
        "both", "the result is recorded, an answer is taken, or all items of a map have ended",
        "the worker; for an answer or a map the orchestrator too; an operator",
        "`used`; `by` is `input`, `timeout` or `operator` without a handler",
    ),
    "failed": (
        "both", "an attempt fails and is the last one, or a wait, a crash or a lapse is the last",
        "the worker; the orchestrator; the worker's parent; an operator",
        "`traceback`, `used`; `guard`, `exit_code` after a guard; `by` is `timeout`, `database` or"
        " `operator` without a handler",
    ),
    "cancelled": (
        "both", "the job is cancelled, its run ends, or its claim ends after a request to cancel",
        "the operator; the worker that gives the claim up; the transaction that ends the run",
        "`reason`; of a node that was deleted also `generation`, `revision`",
    ),
    "retried": (
        "both", "an attempt fails and another one is left, or an ingest job that has ended is"
        " queued again",
        "the worker; an operator", "`traceback`, `used`",
    ),
    "requeued": (
        "both", "the claim is given back without a failed attempt: at a stop, at OFF, for a wait, a"
        " snooze or a guard, or because the worker lacks the node",
        "the worker; its parent; the orchestrator; an operator",
        "`reason`; `unknown` if the worker lacks the node; `guard`, `exit_code`, `used` after a"
        " guard; `by` is `operator`",
    ),
    "reclaimed": (
        "both", "the claim is taken from a worker that died or was silent; `error` says why",
        "the worker's parent; the worker whose executor died; the orchestrator", "",
    ),
    "parked": (
        "nodes", "an input node begins to wait for its answer", "the worker; an operator",
        "`by` is `operator`",
    ),
    "cancel_requested": ("jobs", "a running ingest job is asked to end", "the operator", ""),
    "deleted": (
        "jobs", "an ingest job is deleted, other than by retention", "the operator",
        "`task_name`, `status`, `reason`, `created_at`, `idempotency_key`, `lock_key`,"
        " `partition_key`",
    ),
    "error": (
        "both", "a task that completes has logged an error; the first one is in `error`",
        "the worker; for nodes only an app", "",
    ),
    "death": (
        "both", "the process of the handler has died; `error` says how",
        "the worker; its parent",
        "`exit_code`, `signal`, `core`, `max_rss_mb`, `oom_kills`, `executor`, `other_jobs`,"
        " `last_lines`, `seconds`, `progress`, `last_beat`, `gpu`",
    ),
    "stall_suspected": (
        "nodes", "a gpu handler that had reported progress is silent for 120 s", "the worker",
        "`reason`",
    ),
    "budget_trip": (
        "both", "the job ran past its time limit; the event of its end comes before",
        "the worker", "`guard`, `exit_code`, `used`",
    ),
    "stall_trip": (
        "nodes", "samples confirm a stall; the event of the end comes before", "the worker",
        "`guard`, `exit_code`, `used`",
    ),
    "gpu_health_trip": (
        "nodes", "the GPU did nothing for a whole window, or has no room for the model; the event"
        " of the end comes before",
        "the worker", "`guard`, `exit_code`, `used`; `traceback` if there is no room",
    ),
    "unassignable": (
        "nodes", "no live worker can take the waiting gpu job; `error` says why",
        "the orchestrator", "`reason`",
    ),
    "assignable": ("nodes", "a live worker can take such jobs again", "the orchestrator", ""),
    **dict.fromkeys(
        ("lease_renew", "progress_beat", "reassigned", "skipped"),
        ("nodes", "never by this version", "workers of 0.3.0; apps", ""),
    ),
}  # fmt: skip
"""Each event: the histories that have it, when it is written, by whom, and its `detail`."""


class Column(NamedTuple):
    """A column as `CREATE TABLE` would spell it."""

    name: str
    type: str
    nullable: bool
    default: str


class Table(NamedTuple):
    """A table with what hangs on it, each as a line of SQL."""

    name: str
    purpose: str
    columns: list[Column]
    constraints: list[str]
    indexes: list[str]
    triggers: list[str]


class Catalog(NamedTuple):
    """A schema; `channels` are the names that are notified, each with the functions that do."""

    version: int
    tables: list[Table]
    domains: list[str]
    functions: list[str]
    channels: dict[str, list[str]]


def _plain(text: str) -> str:
    return " ".join(text.replace("public.", "").split())


def _rows(conn: psycopg.Connection[Any], query: sql.SQL, *values: Any) -> list[tuple[Any, ...]]:
    return conn.execute(query, values).fetchall()


_TABLES = sql.SQL(
    "SELECT c.oid, c.relname FROM pg_class c WHERE c.relkind = 'r'"
    " AND c.relnamespace = 'public'::regnamespace ORDER BY c.relname"
)
_COLUMNS = sql.SQL(
    "SELECT a.attname, format_type(a.atttypid, a.atttypmod), NOT a.attnotnull,"
    " coalesce(pg_get_expr(d.adbin, d.adrelid), '') FROM pg_attribute a"
    " LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum"
    " WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum"
)
# From PostgreSQL 18 on a NOT NULL is a constraint with a name ('n'); the columns say it already.
_CONSTRAINTS = sql.SQL(
    "SELECT conname || ' ' || pg_get_constraintdef(oid) FROM pg_constraint"
    " WHERE conrelid = %s AND contype IN ('c', 'f', 'p', 'u') ORDER BY contype DESC, conname"
)
_INDEXES = sql.SQL(
    "SELECT pg_get_indexdef(i.indexrelid) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid"
    " WHERE i.indrelid = %s AND NOT EXISTS (SELECT FROM pg_constraint k"
    " WHERE k.conindid = i.indexrelid AND k.contype IN ('p', 'u')) ORDER BY c.relname"
)
_TRIGGERS = sql.SQL(
    "SELECT pg_get_triggerdef(oid) FROM pg_trigger WHERE tgrelid = %s AND NOT tgisinternal"
    " ORDER BY tgname"
)
_DOMAINS = sql.SQL(
    "SELECT t.typname || ' AS ' || format_type(t.typbasetype, t.typtypmod) || coalesce(' ' ||"
    " string_agg(pg_get_constraintdef(k.oid), ' ' ORDER BY k.conname), '') FROM pg_type t"
    " LEFT JOIN pg_constraint k ON k.contypid = t.oid AND k.contype = 'c'"
    " WHERE t.typtype = 'd' AND t.typnamespace = 'public'::regnamespace GROUP BY t.oid"
    " ORDER BY t.typname"
)
_FUNCTIONS = sql.SQL(
    "SELECT p.proname, pg_get_function_identity_arguments(p.oid), pg_get_function_result(p.oid),"
    " p.prosrc FROM pg_proc p WHERE p.pronamespace = 'public'::regnamespace ORDER BY p.proname,"
    " p.oid::regprocedure::text"
)
_NOTIFIED = re.compile(r"pg_notify\(\s*(?:'(\w+)'|TG_ARGV\[0\])")
_CALLED = re.compile(r"EXECUTE FUNCTION (?:public\.)?(\w+)\((?:'(\w+)')?")


def _table(conn: psycopg.Connection[Any], oid: int, name: str) -> Table:
    if name not in PURPOSES:
        raise KeyError(f"tests/support/catalog.py: say in PURPOSES what the table {name!r} is for")
    return Table(
        name,
        PURPOSES[name],
        [
            Column(column, kind, nullable, _plain(default))
            for column, kind, nullable, default in _rows(conn, _COLUMNS, oid)
        ],
        *(
            [_plain(row[0]) for row in _rows(conn, q, oid)]
            for q in (_CONSTRAINTS, _INDEXES, _TRIGGERS)
        ),
    )


def _channels(tables: list[Table], sources: dict[str, str]) -> dict[str, list[str]]:
    """Return the channels that a function notifies: in its text, or passed by its triggers."""
    found: dict[str, set[str]] = {}
    for table in tables:
        for trigger in table.triggers:
            call = _CALLED.search(trigger)
            if call is None:
                continue
            function, argument = call.groups()
            for literal in _NOTIFIED.findall(sources[function]):
                channel = literal or argument
                found.setdefault(channel, set()).add(trigger.split()[2])
    return {name: sorted(by) for name, by in sorted(found.items())}


def read(dsn: str) -> Catalog:
    """Return the schema `public` of the database of this DSN."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        tables = [_table(conn, oid, name) for oid, name in _rows(conn, _TABLES)]
        functions = _rows(conn, _FUNCTIONS)
        return Catalog(
            _rows(conn, sql.SQL("SELECT max(version) FROM queue_schema_version"))[0][0],
            tables,
            [_plain(row[0]) for row in _rows(conn, _DOMAINS)],
            [_plain(f"{row[0]}({row[1]}) RETURNS {row[2]}") for row in functions],
            _channels(tables, {row[0]: row[3] for row in functions}),
        )
