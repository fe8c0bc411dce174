"""Install and verify the SQL functions and triggers of `queue_workflows/sql/`.

The set has two parts. A part is installed if the checksum of its files differs from the recorded
one, so that a change of functions alone locks no table. See decision 0023.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import psycopg
from psycopg import sql

import queue_workflows
from queue_workflows import errors
from queue_workflows import sql as texts
from queue_workflows.db import pool, statements

TABLE = "queue_schema_objects"
"""The table that records the installed parts, one row each; migration 0013 creates it."""
_TABLE = re.compile(r"\sON (\w+)")
_DROPPED = re.compile(r"^DROP TRIGGER IF EXISTS \w+ ON (\w+)", re.MULTILINE)
_NAME = re.compile(r"^CREATE (?:OR REPLACE |CONSTRAINT )?(?:FUNCTION|TRIGGER) (\w+)", re.MULTILINE)


class TablesInUse(errors.MigrationFailed):
    """The triggers cannot be replaced now, since transactions use their tables."""


class Part(NamedTuple):
    """Part of the set: "functions" or "triggers", and the text that installs it."""

    name: str
    text: str

    @property
    def checksum(self) -> str:
        """Return the SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def tables(self) -> list[str]:
        """Return the tables of the triggers, which replacing them locks."""
        return sorted(set(_TABLE.findall(self.text))) if self.name == "triggers" else []

    @property
    def objects(self) -> list[str]:
        """Return the names of the functions or triggers that the text creates."""
        return _NAME.findall(self.text)


class Problem(NamedTuple):
    """One fault of the installed set, as a sentence without a full stop."""

    part: Part
    text: str
    is_newer: bool = False
    """Whether a newer package has installed the part."""
    is_damage: bool = False
    """Whether an object is missing, or was changed after the part was installed."""


@functools.cache
def parts() -> tuple[Part, Part]:
    """Return the functions and the triggers of this code, in the order of installation."""
    functions = sorted((texts.FOLDER / "functions").glob("*.sql"))
    rights = filled((texts.FOLDER / "privileges.sql").read_text("utf-8"))
    triggers = sorted((texts.FOLDER / "triggers").glob("*.sql"))
    return (
        Part(
            "functions",
            "\n".join([*(texts.written(p.read_text("utf-8")) for p in functions), rights]),
        ),
        Part("triggers", "\n".join(path.read_text("utf-8") for path in triggers)),
    )


def stale(conn: pool.Connection) -> list[Part]:
    """Return the parts that this code must install, which are missing, or differ and are not newer.

    The parts of a newer package work with older code and are never overwritten.
    """
    recorded = _recorded(conn)
    return [
        part
        for part in parts()
        if not _is_newer(row := recorded.get(part.name)) and not _is_same(part, row)
    ]


def is_ready(conn: pool.Connection) -> bool:
    """Return whether each installed part is this code's own, or not from an older package."""
    recorded = _recorded(conn)
    return all(
        (row := recorded.get(part.name)) is not None
        and (_is_same(part, row) or _release(row["package_version"]) >= _ours())
        for part in parts()
    )


def install(conn: pool.Connection, part: Part) -> None:
    """Create or replace the part's objects and record them; joins the caller's transaction.

    It sets the transaction's search_path, which `SET search_path FROM CURRENT` stores with each
    SECURITY DEFINER function, so that a temporary table cannot replace one of ours. Raises
    `TablesInUse` if the tables of triggers cannot be locked soon.
    """
    statements.installed_objects.settings(conn)
    _lock(conn, part)
    conn.execute(part.text.encode())
    statements.installed_objects.record(
        conn,
        part=part.name,
        checksum=part.checksum,
        package_version=queue_workflows.__version__,
        objects=json.dumps(_described(conn, part)),
    )


def _lock(conn: pool.Connection, part: Part) -> None:
    """Lock the part's tables, or give up before a deadlock with a worker could end the worker."""
    if not part.tables:
        return
    statements.installed_objects.limit_lock_wait(conn)
    # Dropping a trigger locks out readers too.
    dropped_from = sorted(set(_DROPPED.findall(part.text)))
    try:
        for tables, lock in (
            (part.tables, sql.SQL("LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE")),
            (dropped_from, sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE")),
        ):
            conn.execute(lock.format(sql.SQL(", ").join(map(sql.Identifier, tables))))
    except psycopg.errors.QueryCanceled as error:
        raise TablesInUse("the triggers cannot be replaced: their tables are in use") from error
    pool.set_local(conn, {"statement_timeout": "0"})


def problems(conn: pool.Connection) -> list[Problem]:
    """Return the parts and objects that are missing, changed or of another package version.

    It only reads the catalogs and the record, so any role may call it. It does not compare the
    objects of a part that another package version has installed.
    """
    recorded, found = _recorded(conn), list[Problem]()
    for part in parts():
        row = recorded.get(part.name)
        if row is None:
            found.append(Problem(part, f"the {part.name} are not installed"))
        elif not _is_same(part, row):
            theirs, ours = row["package_version"], queue_workflows.__version__
            text = f"the {part.name} are those of queue_workflows {theirs}, not of this {ours}"
            found.append(Problem(part, text, is_newer=_is_newer(row)))
        else:
            found += _damaged(conn, part, row["objects"])
    return found


def _damaged(conn: pool.Connection, part: Part, recorded: dict[str, str]) -> Iterator[Problem]:
    there = _described(conn, part)
    for name, described in sorted(recorded.items()):
        if name not in there:
            yield Problem(part, f"{part.name[:-1]} {name} is missing", is_damage=True)
        elif there[name] != described:
            text = f"{part.name[:-1]} {name} was changed after it was installed"
            yield Problem(part, text, is_damage=True)


def forget(conn: pool.Connection) -> None:
    """Delete the record, so that the code of an older release installs its own set."""
    if statements.sessions.has_table(conn, table=TABLE):
        statements.installed_objects.forget(conn)


def _recorded(conn: pool.Connection) -> dict[str, dict[str, Any]]:
    if not statements.sessions.has_table(conn, table=TABLE):
        return {}
    return {row["part"]: row for row in statements.installed_objects.recorded(conn)}


def _described(conn: pool.Connection, part: Part) -> dict[str, str]:
    if part.name == "triggers":
        read = statements.installed_objects.triggers
    else:
        read = statements.installed_objects.functions
    return {row["name"]: row["hash"] for row in read(conn, names=part.objects)}


def _is_same(part: Part, row: dict[str, Any] | None) -> bool:
    return row is not None and row["checksum"] == part.checksum


def _is_newer(row: dict[str, Any] | None) -> bool:
    return row is not None and _release(row["package_version"]) > _ours()


def _ours() -> tuple[int, ...]:
    return _release(queue_workflows.__version__)


def _release(version: str) -> tuple[int, ...]:
    """Return a version as comparable numbers; a pre-release is below its release.

    `0.4.0rc1` is (0, 4, 0, 0, 0) and `0.4` is (0, 4, 0, 0, 1); all pre-releases compare as equal.
    """
    match = re.match(r"(\d+(?:\.\d+)*)([.-]?(?:a|b|c|rc|dev|pre))?", version)
    if match is None:
        raise errors.MigrationFailed(f"{TABLE} has a package_version {version!r} without a number")
    numbers = [*map(int, match[1].split(".")), 0, 0, 0][:4]
    return (*numbers, int(match[2] is None))


SUBMIT = ("queue_workflows_enqueue", "queue_workflows_put_jobs", "queue_workflows_hold_node")
INTERNAL = (
    "queue_workflows_admit", "queue_workflows_alert", "queue_workflows_ask_partition",
    "queue_workflows_ask_turn",
    "queue_workflows_audit", "queue_workflows_charge_steps", "queue_workflows_check_payload",
    "queue_workflows_demand", "queue_workflows_end_parent_node", "queue_workflows_forget_parts",
    "queue_workflows_forget_steps", "queue_workflows_give_turns",
    "queue_workflows_give_turns_singly",
    "queue_workflows_leave_partition", "queue_workflows_limit_gate", "queue_workflows_partitions",
    "queue_workflows_rate_room", "queue_workflows_refuse", "queue_workflows_release_key",
    "queue_workflows_ingest_wake", "queue_workflows_node_wake", "queue_workflows_take_locks",
)  # fmt: skip
"""Functions that only the owner's functions call, so that no role gets EXECUTE on them."""
NOTIFYING = (
    "notify_node_job_ready", "notify_ingest_job_ready", "notify_worker_control",
    "notify_orchestrator", "notify_dispatch_event",
)  # fmt: skip
"""Our functions whose names do not begin with `queue_workflows_`."""


def filled(text: str) -> str:
    """Return the text of `sql/privileges.sql` with the lists in place of its arrays of one name."""
    for name, functions in (("submit", SUBMIT), ("internal", INTERNAL), ("notifying", NOTIFYING)):
        text = text.replace(f"'{{{name}}}'", f"'{{{','.join(functions)}}}'")
    return text
