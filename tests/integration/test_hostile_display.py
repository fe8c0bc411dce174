"""Every command that reads or removes works on every row, and prints nothing that harms."""

from __future__ import annotations

import functools
import json
import random
import unicodedata
from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple

import pytest
import typer.main
from psycopg import Error, sql

from queue_workflows import config, db
from queue_workflows.__main__ import main
from tests.support import timeouts

pytestmark = pytest.mark.slow

_built = functools.cache(typer.main.get_command)
HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
RUN = {"status": "queued"}
NODE = {"run_id": "parent", "queue": "cpu"}
INGEST = {"queue": "fetch"}
ESCAPES = "\x1b[31m[red]x[/]\u202e\u200b\x9b\x07\n2026-01-01T00:00:00.000Z ERROR root: %s forged \\"
DEEP = "[" * 1200 + "]" * 1200
GRAPHS = (
    '{"nodes": 5}',
    '{"nodes": [5, {"id": 5}, {"id": "n", "deps": 5}, {"id": "m", "deps": [[], "n", "gone"]}]}',
    '{"version": 1, "workflow": "w", "nodes": [{"id": "n", "deps": ["n"]}]}',
)
VALUES: dict[str, tuple[str | None, ...]] = {
    "text": (ESCAPES, "", "-rf --json", "x" * 2000),
    "jsonb": (
        "null", "[]", "5", '"x"', "{}", '{"n": 1e5000}', "1e5000", DEEP, f'{{"a": {DEEP}}}',
        '{"n": ' + "9" * 5000 + "}", '[{"prompt": []}]', *GRAPHS,
        '{"prompt": {"\\u001b": []}, "options": 7, "traceback": [], "reason": {}, "claim": 3,'
        ' "model": 3, "request": [], "signal": {}, "exit_code": "\\u001b",'
        ' "throttle": {"\\u001b": []}, "memory": 7, "card": {"\\u001b": []},'
        ' "gpus": [1, {"id": []}]}',
        '{"throttle": "\\u001b[31m\\u202e", "memory": ["\\u001b"], "card": "\\u001b[31m\\u202e"}',
    ),
    "timestamptz": ("infinity", "-infinity", "294276-12-31", "4713-01-01 BC", "0001-01-01"),
    "int2": ("-32768", "32767", "0"),
    "int4": ("-2147483648", "2147483647", "0"),
    "int8": ("-9223372036854775808", "9223372036854775807", "0"),
    "float4": ("NaN", "Infinity", "-Infinity", "0"),
    "float8": ("NaN", "Infinity", "-Infinity", "1e308", "-1"),
    "numeric": ("NaN", "Infinity", "1e5000", "-1"),
    "interval": ("178000000 years",),
    "bool": ("true", "false"),
    "_text": ("{}", "{NULL}", '{"\x1b[31m","[/]"}'),
}  # fmt: skip
LEAVE = object()
"""Stands for no value: the column keeps its default."""


class Column(NamedTuple):
    """A column: its type, whether it may be NULL, and whether an INSERT must name it."""

    name: str
    kind: str
    nullable: bool
    required: bool


class Written(NamedTuple):
    """A row with extreme values, by its id; `what`: the columns and the values."""

    id: str
    what: str


def without_checks(conn: db.Connection) -> None:
    """Let the database take every value that its types have, as rows of before the checks do."""
    rows = conn.execute(
        "SELECT c.conname, c.contypid <> 0 AS of_domain, coalesce(t.relname, d.typname) AS name"
        " FROM pg_constraint c LEFT JOIN pg_class t ON t.oid = c.conrelid"
        " LEFT JOIN pg_type d ON d.oid = c.contypid"
        " WHERE c.contype = 'c' AND c.connamespace = 'public'::regnamespace"
    ).fetchall()
    for row in rows:
        conn.execute(
            sql.SQL("ALTER {} {} DROP CONSTRAINT {}").format(
                sql.SQL("DOMAIN" if row["of_domain"] else "TABLE"),
                sql.Identifier(row["name"]),
                sql.Identifier(row["conname"]),
            )
        )
    conn.execute("SET session_replication_role = replica")


def fill(
    conn: db.Connection, table: str, base: dict[str, Any], key: str, *, singles: int = 0
) -> list[Written]:
    """Insert rows of which every column has its first extreme value, its second, and so on.

    `base` has the values that stay ordinary; each row has an id of its own in column `key`, and two
    have extreme ones. `singles`: so many more rows, picked at random, with one extreme value each.
    What the types and indexes of the database refuse is left out.
    """
    kinds = [one for one in columns(conn, table) if one.name not in (*base, key)]
    most = max((len(VALUES.get(one.kind, ())) for one in kinds), default=0)
    wanted = [
        {one.name: value for one in kinds if (value := _value(one, number)) is not LEAVE}
        for number in range(most + 1)
    ]
    alone = [
        {one.name: value}
        for one in kinds
        for value in (*VALUES.get(one.kind, ()), *([None] if one.nullable else []))
    ]
    wanted += random.Random(13).sample(alone, min(singles, len(alone)))
    ids = [f"{table}.{number}" for number in range(len(wanted))] + [ESCAPES, "-rf --json"]
    written: list[Written] = []
    for row_id, given in zip(ids, [*wanted, *({}, {})], strict=True):
        needed = {one.name: row_id for one in kinds if one.required and one.kind == "text"}
        fixed = base | {key: row_id}
        kept = given
        if not _inserted(conn, table, needed | kept | fixed):
            # A value that is refused takes no other with it.
            tries = {name: needed | {name: value} | fixed for name, value in given.items()}
            kept = {name: given[name] for name, row in tries.items() if _taken(conn, table, row)}
            if not _inserted(conn, table, needed | kept | fixed):
                continue
        written.append(Written(row_id, str(kept)[:100]))
    return written


def _value(column: Column, number: int) -> Any:
    values = VALUES.get(column.kind, ())
    if not values:
        return LEAVE
    return None if column.nullable and number == len(values) else values[number % len(values)]


def columns(conn: db.Connection, table: str) -> list[Column]:
    """Return the columns of a table that can be written."""
    rows = conn.execute(
        "SELECT column_name, udt_name, is_nullable = 'YES' AS nullable,"
        " is_nullable = 'NO' AND column_default IS NULL AS required"
        " FROM information_schema.columns WHERE table_schema = 'public' AND table_name = %s"
        " AND is_generated = 'NEVER' AND identity_generation IS DISTINCT FROM 'ALWAYS'"
        " ORDER BY ordinal_position",
        (table,),
    ).fetchall()
    return [Column(*row.values()) for row in rows]


def _taken(conn: db.Connection, table: str, values: dict[str, Any]) -> bool:
    """Return whether the database accepts this row; it is not kept."""
    with conn.transaction(force_rollback=True):
        return _inserted(conn, table, values)


def _inserted(conn: db.Connection, table: str, values: dict[str, Any]) -> bool:
    kinds = {one.name: one.kind for one in columns(conn, table)}
    statement = sql.SQL("INSERT INTO {} ({}) VALUES ({})").format(
        sql.Identifier(table),
        sql.SQL(", ").join(map(sql.Identifier, values)),
        sql.SQL(", ").join(
            sql.SQL("{}::{}").format(sql.Placeholder(name), sql.SQL(kinds[name])) for name in values
        ),
    )
    try:
        with conn.transaction():
            conn.execute(statement, values)
    except Error:
        return False
    return True


class Said(NamedTuple):
    argv: tuple[str, ...]
    code: int
    out: str
    err: str

    def check(self) -> None:
        """Check that it ended in order and printed nothing that a terminal would obey."""
        text = (self.out + self.err).replace("\n", "")
        assert not {unicodedata.category(char) for char in text} & HIDDEN, self
        assert "Traceback" not in self.err and "unexpected error" not in self.err, self
        assert self.code in (0, 1, 2), self
        assert self.code == 0 or self.err.startswith("queue-workflows") or self.out, self
        if "retry" not in self.argv:
            # A generation at its end cannot be raised; nothing else may stop at a value.
            assert "the database refused" not in self.err, self
        if self.code == 2:
            assert self.err.count("\n") == 1, self
        if "--json" in self.argv and self.out:
            json.loads(self.out, parse_constant=_refuse)


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


@pytest.fixture
def said(
    migrated_database: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> Generator[Callable[..., Said]]:
    """Runs a command in this process, on a database whose constraints are gone."""
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", migrated_database)
    close = db.close_pool
    # A thousand commands would open as many pools, and typer would build all commands as often.
    monkeypatch.setattr(db, "close_pool", lambda: None)
    monkeypatch.setattr(typer.main, "get_command", _built)

    def call(*argv: str) -> Said:
        config.reset_for_tests()
        caplog.clear()
        done = Said(argv, main(argv), *capfd.readouterr())
        # pytest's handler, not the command's own, takes what is logged in this process.
        return done._replace(err=done.err + "".join(map(str, caplog.messages)))

    yield call
    close()


@pytest.fixture
def conn(said: object) -> Generator[Any]:
    with db.connect() as own:
        without_checks(own)
        yield own


LISTS = [
    ("runs", "--limit", "1000"), ("runs",), ("status",), ("inputs",), ("queues",), ("workers",),
    ("models",), ("jobs", "list", "--limit", "10000"), ("doctor",), ("audit",),
    ("prune", "--dry-run"), ("health",), ("samples", "--past", "1d", "--host", "h"),
    ("schedules",),
]  # fmt: skip


def check(said: Callable[..., Said], calls: Iterable[tuple[str, ...]]) -> None:
    """Make these calls; what is wrong with any of them is in the message."""
    wrong: list[str] = []
    for argv in calls:
        try:
            said(*argv).check()
        except Exception as error:
            wrong.append(f"{argv}: {type(error).__name__}: {str(error)[-1500:]}")
    assert not wrong, f"{len(wrong)} calls:\n" + "\n".join(wrong[:5])


def lists() -> list[tuple[str, ...]]:
    return [(*argv, *more) for argv in LISTS for more in ((), ("--json",))]


def of(rows: Iterable[Written], *commands: str) -> list[tuple[str, ...]]:
    return [(*command.split(), "--", row.id) for row in rows for command in commands]


def states(conn: Any, table: str, rows: Iterable[Written]) -> set[str]:
    found = conn.execute(
        f"SELECT DISTINCT status::text FROM {table} WHERE id = ANY (%s)",
        ([row.id for row in rows],),
    ).fetchall()
    return {row["status"] for row in found}


def test_any_run_is_listed_shown_and_cancelled(conn: Any, said: Callable[..., Said]) -> None:
    rows = fill(conn, "workflow_runs", RUN, "id", singles=4)
    assert len(rows) > 15
    check(said, lists())
    check(said, of(rows, "show", "show --json --full", "why", "inputs", "cancel"))
    assert states(conn, "workflow_runs", rows) == {"cancelled"}
    check(said, of(rows, "retry", "cancel"))
    assert not states(conn, "workflow_runs", rows) & {"queued", "running"}


@pytest.mark.parametrize("status", ["queued", "running", "awaiting_input"])
def test_any_node_is_shown_explained_and_cancelled(
    conn: Any, said: Callable[..., Said], status: str
) -> None:
    conn.execute(
        "INSERT INTO workflow_runs (id, workflow_name, status) VALUES ('parent', 'w', 'running')"
    )
    rows = fill(conn, "workflow_node_jobs", NODE | {"status": status}, "id", singles=4)
    assert len(rows) > 15
    check(said, [*lists(), *[("show", "parent", *m) for m in ((), ("--json",), ("--full",))]])
    check(said, of(rows, "show", "show --json", "why", "why --json"))
    if status == "awaiting_input":
        check(said, [("answer", "parent", row.node_id, "1") for row in nodes_of(conn)])
        check(said, [("answer", "--unchecked", "parent", n.node_id, "1") for n in nodes_of(conn)])
    check(said, of(rows, "cancel", "retry"))
    # It is over already where the last retry of a node was refused.
    assert said("cancel", "parent").code in (0, 1)
    left = states(conn, "workflow_node_jobs", rows) - {"cancelled", "completed", "failed"}
    # A running job gets a stop request: its worker, or the sweep of lapsed leases, ends it.
    assert left <= ({"running"} if status == "running" else set())


def nodes_of(conn: Any) -> list[Any]:
    query = "SELECT node_id FROM workflow_node_jobs WHERE run_id = 'parent' AND node_id <> ''"
    return [Node(row["node_id"]) for row in conn.execute(query).fetchall()]


class Node(NamedTuple):
    node_id: str


@pytest.mark.parametrize("status", ["queued", "failed"])
def test_any_job_is_listed_shown_retried_and_deleted(
    conn: Any, said: Callable[..., Said], status: str
) -> None:
    rows = fill(conn, "ingest_jobs", INGEST | {"status": status}, "id", singles=4)
    assert len(rows) > 15
    check(said, lists())
    check(said, of(rows, "show", "show --json", "jobs show", "why"))
    check(said, of(rows, "jobs retry", "jobs cancel", "retry", "cancel"))
    assert not states(conn, "ingest_jobs", rows) & {"queued", "running"}
    check(said, of(rows, "jobs delete"))
    assert states(conn, "ingest_jobs", rows) == set()


BESIDE: list[tuple[str, dict[str, Any], str]] = [
    (
        "workflow_node_events",
        {"run_id": "parent", "node_id": "n", "job_id": "j", "event_type": "failed"},
        "error",
    ),
    ("ingest_job_events", {"job_id": "i", "event_type": "failed"}, "error"),
    ("workflow_input_submissions", {"run_id": "parent"}, "id"),
    ("workflow_dispatch_events", {"run_id": "parent"}, "error"),
    ("job_attempt_logs", {"job_id": "j", "job_table": "workflow_node_jobs"}, "tail"),
    ("workers", {"queue": "gpu", "last_seen": "now", "state": "idle"}, "worker_id"),
    ("worker_heartbeats", {"queue": "gpu"}, "host_label"),
    ("worker_controls", {"desired_state": "off", "queue": "gpu"}, "host_label"),
    ("queue_settings", {"paused_at": "now"}, "queue"),
    ("queue_partitions", {"queue": "fetch"}, "partition_key"),
    ("hw_samples", {"sampled_at": "now"}, "host_label"),
    ("model_controls", {}, "host_label"),
    ("gpu_unassignable", {}, "model"),
    ("schedule_fires", {"fire_at": "now"}, "name"),
    ("failure_alerts", {"occurrence": "0"}, "subject"),
    ("events", {}, "name"),
    (
        "job_parts",
        {"job_table": "ingest_jobs", "claim_no": 1, "seq": 1, "name": "n", "part": "{}"},
        "job_id",
    ),
    (
        "job_steps",
        {"job_id": "i", "job_table": "ingest_jobs", "kind": "step", "state": "done", "claim_no": 1},
        "name",
    ),
]


def test_what_is_stored_beside_runs_and_jobs_is_shown(conn: Any, said: Callable[..., Said]) -> None:
    conn.execute(
        "INSERT INTO workflow_runs (id, workflow_name, status) VALUES ('parent', 'w', 'running')"
    )
    conn.execute(
        "INSERT INTO workflow_node_jobs (id, run_id, node_id, node_module, queue, status)"
        " VALUES ('j', 'parent', 'n', 'm', 'gpu', 'queued')"
    )
    conn.execute("INSERT INTO ingest_jobs (id, task_name, queue) VALUES ('i', 't', 'fetch')")
    for table, base, key in BESIDE:
        assert fill(conn, table, base, key), table
    check(said, lists())
    check(said, [(*c, *m) for c in (("show", "parent"), ("show", "j"), ("show", "i"), ("why", "j"),
                                    ("why", "i")) for m in ((), ("--json",))])  # fmt: skip
    check(said, [("show", "i", "--steps", *m) for m in ((), ("--full",), ("--json",))])
    check(said, [("cancel", "parent"), ("cancel", "i"), ("jobs", "delete", "i")])


def test_any_schedule_is_listed_previewed_paused_and_removed(
    conn: Any, said: Callable[..., Said]
) -> None:
    rows = fill(conn, "schedules", {}, "name", singles=12)
    assert len(rows) > 15
    check(said, lists())
    check(said, of(rows, "schedules preview", "schedules preview --json"))
    check(said, of(rows, "schedules pause", "schedules resume", "schedules remove"))
    assert conn.execute("SELECT name FROM schedules").fetchall() == []


def test_an_id_is_named_as_it_was_printed(conn: Any, said: Callable[..., Said]) -> None:
    (run_id,) = [row.id for row in fill(conn, "workflow_runs", RUN, "id") if "\x1b" in row.id]
    printed = said("runs", "--limit", "100", "--json").out
    (shown,) = [
        line.partition('"id": "')[2].rpartition('"')[0]
        for line in printed.splitlines()
        if '"id": "\\u001b' in line
    ]
    done = said("cancel", shown.replace("\\\\", "\\"))
    assert (done.code, "cancelled" in done.out) == (0, True)
    assert states(conn, "workflow_runs", [Written(run_id, "")]) == {"cancelled"}


def test_markup_and_percent_signs_are_text(conn: Any, said: Callable[..., Said]) -> None:
    conn.execute("INSERT INTO ingest_jobs (id, task_name, queue) VALUES ('[red]%s[/]', '%d', 'q')")
    assert "[red]%s[/]" in said("jobs", "list").out
    assert said("cancel", "[red]%s[/]").out.startswith("ingest job [red]%s[/] (%d): cancelled")


def test_a_row_that_another_session_locks_is_named_as_that(
    conn: Any, said: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts.shorten_lock_waits(monkeypatch, 0.2)
    conn.execute(
        "INSERT INTO workflow_runs (id, workflow_name, status) VALUES ('r', 'w', 'queued')"
    )
    with db.connect(autocommit=False) as other:
        other.execute("SELECT FROM workflow_runs WHERE id = 'r' FOR UPDATE")
        done = said("cancel", "r")
    assert done.code == 2 and "canceling statement due to lock timeout" in done.err
    assert said("cancel", "r").code == 0
