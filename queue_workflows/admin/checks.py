"""List the checks of an installation, each with its question and a function that answers it.

`doctor` runs all of them, `connect` some besides its own steps on the way to the server. Its
length: each check is a short function.
"""

from __future__ import annotations

import datetime
import os
import secrets
import shlex
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

import psycopg

from queue_workflows import config, db, errors
from queue_workflows import schedules as schedule_api
from queue_workflows.admin import permissions, waiting_reasons
from queue_workflows.dag import confinement
from queue_workflows.db import functions as installed
from queue_workflows.db import ledger, statements
from queue_workflows.runtime import display
from queue_workflows.types import Row

OK, WARNING, ERROR = "ok", "warning", "error"
MIN_SERVER = 140000
"""PostgreSQL 14, the oldest tested version."""
CLOCK_WARN_S = 5.0
"""No decision uses a machine's clock, but logs with larger differences are hard to compare."""
LISTEN_WAIT_S = 5.0
"""A notification takes milliseconds; the listener itself gives up on a connection after 4 s."""
NOTIFY_QUEUE_WARN = 0.5
"""PostgreSQL itself warns at half; once the queue is full, writers fail."""
TRANSACTION_WARN_S = 300.0
"""Engine transactions end within 5 s. A longer one keeps vacuum from removing dead rows."""
IDLE_WARN_S = 60.0
"""A transaction without a statement for a minute was forgotten."""
CONNECTIONS_WARN, CONNECTIONS_ERROR = 0.8, 0.95
"""Above this share, a restart of the fleet (two connections per worker) may fail."""
DANGERS = {
    "fsync": "a crash of the machine may destroy the database",
    "full_page_writes": "a crash of the machine may leave torn pages",
    "synchronous_commit": "a crash of the server loses acknowledged commits",
}
OUTBOX_WARN_S, OUTBOX_ERROR_S = 10.0, 60.0
"""The orchestrator polls every second; a service manager restarts it within a minute."""
LAPSED_WARN_S = 60.0
"""Lapsed leases are swept every 5 s."""
WAIT_WARN_S = 30.0
"""Seconds that a worker needs to restart."""
ALERT_WARN_S = 150.0
"""A sender reports every 15 s that it runs. Its rate limit delays alerts by at most a minute."""
SHOWN_BAD = 20
"""Bad rows that are shown per kind."""
DEAD_ROWS_WARN, DEAD_SHARE_WARN = 10_000, 0.5
"""Autovacuum starts at a fifth. At half of a large table, it is too slow or blocked."""
UPDATES_JUDGED = 1_000
"""With fewer updates a ratio is meaningless."""
HOT_SHARE_WARN = 0.5
"""Least share of HOT updates in `workers`, where all updates are renewals and should be HOT."""
COLD_UPDATES_WARN = 10.0
"""Updates per job that are not HOT. Its claim and its end make two, each requeue two more."""
MANY_RUNS = 100_000
"""With more runs, a search by inputs takes over ten steps without an index."""
MIGRATE = "run `queue-workflows migrate`"
RENEWED = {
    "workflow_node_jobs": ["lease_expires_at", "heartbeat_at", "progress"],
    "ingest_jobs": ["lease_expires_at", "heartbeat_at", "progress"],
    "workers": ["last_seen", "state", "job_ids", "detail"],
}
"""The columns that each renewal writes, by table."""
HOT_TABLES = [*RENEWED, "workflow_runs", "workflow_dispatch_events", "worker_heartbeats"]
"""The tables whose rows are updated often."""
LATE_S = 60
"""Seconds after which a due row must have been tried several times, as sweeps take seconds."""
UNDEFINED = (
    psycopg.errors.UndefinedFunction,
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedColumn,
)
"""The database lacks a function, table or column that a statement names."""
EXAMINED = 20_000
"""Live rows of a table whose payloads and times are read; reading more would take long."""


class Finding(NamedTuple):
    """A line with the checked fact, its level (`ok`, `warning`, `error`), and the remedy."""

    check: str
    level: str
    text: str
    remedy: str = ""


Findings: TypeAlias = Iterator[Finding]
_Ask: TypeAlias = Callable[..., Finding | Iterable[Finding]]
A = TypeVar("A", bound=_Ask)


class Check(NamedTuple):
    """A question about an installation, and the function that finds the answer."""

    names: str
    """The names of its findings; the first is its own name."""
    worst: str
    """The worst level of its findings."""
    ask: _Ask
    by_purpose: bool
    """Whether the answer depends on the purpose of this role (`permissions.PURPOSES`)."""

    @property
    def question(self) -> str:
        """Return the docstring of the function, with the values of its limits."""
        return " ".join((self.ask.__doc__ or "").format_map(globals()).split())

    def answer(self, conn: db.Connection, purpose: str) -> Findings:
        """Yield its findings, or one finding if the server refused the question.

        Raises `db.Error` if the connection is lost.
        """
        try:
            found = self.ask(conn, purpose) if self.by_purpose else self.ask(conn)
            yield from (found,) if isinstance(found, Finding) else found
        except db.Error as error:
            if conn.closed or conn.broken:
                raise
            remedy = "grant this role what it needs, or try again when the server is less busy"
            if isinstance(error, UNDEFINED):
                remedy = f"{MIGRATE}, which installs what is missing"
            name = self.names.partition(",")[0]
            yield Finding(name, ERROR, f"cannot be read: {reason(error)}", remedy)


CHECKS: list[Check] = []
"""In the order of `doctor`. Checks after `schema` need the tables."""


def _check(names: str, worst: str, *, by_purpose: bool = False) -> Callable[[A], A]:
    """Return a decorator that adds a function to the list; its docstring is the question."""

    def add(ask: A) -> A:
        CHECKS.append(Check(names, worst, ask, by_purpose))
        return ask

    return add


def findings(conn: db.Connection, purpose: str) -> Findings:
    """Yield the findings of all checks; a wrong schema is the last one that is examined."""
    for check in CHECKS:
        found = [*check.answer(conn, purpose)]
        yield from found
        if check.ask is schema and any(each.level == ERROR for each in found):
            yield Finding("tables", WARNING, "not checked: the schema comes first")
            return


def _each(check: str, ok: str, wrong: Iterable[tuple[str, str]]) -> Iterable[Finding]:
    """Yield a warning for each text and remedy, or `ok` if there are none."""
    found = [Finding(check, WARNING, text, remedy) for text, remedy in wrong]
    return found or [Finding(check, OK, ok)]


def driver() -> tuple[str, str, int]:
    """Return psycopg's version, its implementation (`c`, `binary`, `python`), libpq's version."""
    return psycopg.__version__, psycopg.pq.__impl__, psycopg.pq.version()


def reason(error: db.Error) -> str:
    """Return the server's sentence with the reason why it refused a statement."""
    return " ".join((error.diag.message_primary or str(error)).split()) or type(error).__name__


def in_force(conn: db.Connection, names: list[str]) -> dict[str, str]:
    """Return the values that settings have for this role and database."""
    return {row["name"]: row["setting"] for row in statements.doctor.settings(conn, names=names)}


def notify(conn: db.Connection, channel: str) -> float:
    """Notify a channel; return how full the server's queue of notifications is, 0 to 1."""
    statements.doctor.notify(conn, channel=channel)
    return float(statements.doctor.notification_queue_usage(conn))


# --- the server --------------------------------------------------------------------------------


@_check("server", ERROR)
def server(conn: db.Connection) -> Finding:
    """Is it PostgreSQL 14 or later, a primary and writable?"""
    found = statements.doctor.server(conn)
    text = f"PostgreSQL {found['version']}, role {found['role']}"
    if found["version_num"] < MIN_SERVER:
        return Finding("server", ERROR, text, "upgrade to PostgreSQL 14 or later")
    if found["standby"]:
        return Finding("server", ERROR, f"{text}: a standby", "name the primary in the DSN")
    if found["read_only"]:
        remedy = "turn default_transaction_read_only off for this role and database"
        return Finding("server", ERROR, f"{text}: read-only", remedy)
    return Finding("server", OK, text)


@_check("settings, fsync, full_page_writes, synchronous_commit, autovacuum", ERROR)
def settings(conn: db.Connection) -> Findings:
    """Are the settings on without which data is lost or the queue gets slower?"""
    found = in_force(conn, [*DANGERS, "autovacuum", "track_counts"])
    for name, danger in DANGERS.items():
        if found[name] == "off":
            yield Finding(name, ERROR, f"off: {danger}", f"set {name} = on")
        else:
            yield Finding(name, OK, found[name])
    for name in ("autovacuum", "track_counts"):
        if found[name] == "off":
            text = f"{name} is off: the queue gets slower by the hour"
            yield Finding("autovacuum", WARNING, text, f"set {name} = on")
            return
    yield Finding("autovacuum", OK, "on")


@_check("clock", WARNING)
def clock(conn: db.Connection) -> Finding:
    """Is the server's clock within {CLOCK_WARN_S:g} s of this machine's?"""
    offsets: list[tuple[float, float]] = []
    for _ in range(3):
        before = datetime.datetime.now(datetime.timezone.utc)
        there = statements.doctor.clock(conn)
        after = datetime.datetime.now(datetime.timezone.utc)
        trip_s = (after - before).total_seconds()
        offsets.append((trip_s, (there - before).total_seconds() - trip_s / 2))
    offset_s = min(offsets)[1]
    text = f"the server is {abs(offset_s):.2f} s {'ahead' if offset_s >= 0 else 'behind'}"
    if abs(offset_s) <= CLOCK_WARN_S:
        return Finding("clock", OK, text)
    remedy = "let both follow a time server; jobs are not affected, logs are"
    return Finding("clock", WARNING, text, remedy)


@_check("listen", ERROR)
def listen(conn: db.Connection) -> Finding:
    """Does a notification come back, or is POLL_ONLY set?

    Is the queue of notifications less than {NOTIFY_QUEUE_WARN:.0%} full?
    """
    poll_only = config.POLL_ONLY.variables[0]
    if config.POLL_ONLY.read():
        text = f"{poll_only} is set: all processes poll, through a pooler too"
        return Finding("listen", OK, text)
    channel = f"queue_workflows_doctor_{os.getpid()}_{secrets.token_hex(4)}"
    began, used = time.monotonic(), 0.0
    ear = db.listen(channel, poll_s=LISTEN_WAIT_S)
    wakes = iter(ear)
    try:
        wake = next(wakes)
        if wake.reason == "connected":
            began = time.monotonic()
            used = notify(conn, channel)
            wake = next(wakes)
    finally:
        ear.close()
        next(wakes, None)
    took_ms = (time.monotonic() - began) * 1000
    # If another process than the announced one executes, there is a pooler in between.
    pooled = statements.doctor.backend_pid(conn) != conn.info.backend_pid
    waited = f"within {LISTEN_WAIT_S:g} s"
    if wake.reason != "notify" and pooled:
        waited = waited.replace("within", "in")
        text = f"a pooler in transaction mode is in between: no notification {waited}"
        remedy = (
            f"set {poll_only}=1 for every process that connects through it, "
            "or name the server itself in the DSN, or a pooler in session mode"
        )
        return Finding("listen", ERROR, text, remedy)
    if wake.reason != "notify":
        remedy = "connect directly, or through a pooler in session mode; until then workers poll"
        return Finding("listen", WARNING, f"no notification {waited}", remedy)
    if used > NOTIFY_QUEUE_WARN:
        remedy = "end the oldest transaction of a session that listens"
        return Finding("listen", WARNING, f"the server's queue is {used:.0%} full", remedy)
    way = ", through a pooler" if pooled else ""
    return Finding("listen", OK, f"a notification came back within {took_ms:.1f} ms{way}")


@_check("transactions", WARNING)
def transactions(conn: db.Connection) -> Finding:
    """Is each transaction open for at most {TRANSACTION_WARN_S:g} s, idle for {IDLE_WARN_S:g} s?"""
    rows = statements.doctor.transactions(conn)
    idle = [row for row in rows if (row["idle_s"] or 0.0) > IDLE_WARN_S]
    if not rows:
        return Finding("transactions", OK, "none is open")
    worst = max(idle, key=lambda row: row["idle_s"]) if idle else rows[0]
    text = f"the oldest is open for {display.duration(worst['age_s'])}: {worst['what']}"
    if idle:
        idle_for = display.duration(worst["idle_s"])
        text = f"{worst['what']} has been idle in a transaction for {idle_for}"
    if idle or worst["age_s"] > TRANSACTION_WARN_S:
        remedy = "end it: it keeps vacuum from removing dead rows, and may hold locks"
        return Finding("transactions", WARNING, text, remedy)
    return Finding("transactions", OK, text)


@_check("connections", ERROR)
def connections(conn: db.Connection) -> Finding:
    """Are less than {CONNECTIONS_WARN:.0%} of the connections in use?

    From {CONNECTIONS_ERROR:.0%} on it is an error.
    """
    found = statements.doctor.connections(conn)
    share = found["used"] / max(1, found["allowed"])
    text = f"{found['used']} of {found['allowed']} in use"
    level = ERROR if share >= CONNECTIONS_ERROR else WARNING if share >= CONNECTIONS_WARN else OK
    remedy = "" if level == OK else "raise max_connections; each worker holds two connections"
    return Finding("connections", level, text, remedy)


# --- the schema, its functions and its rights --------------------------------------------------


def rights_of(conn: db.Connection, purpose: str) -> Finding:
    """Report the rights that this role lacks for a purpose, or has and does not need.

    PUBLIC needs no right of its own, so its rights are reported, too.
    """
    lacks = permissions.lacking(conn, purpose)
    excess = permissions.excessive(conn, purpose)
    public = permissions.described(permissions.of_public(conn))
    if not lacks and not excess and not public:
        return Finding("rights", OK, f"all that it takes to {purpose}")
    role = statements.doctor.schema_seen(conn)["role"]
    parts: list[str] = []
    for verb, found in (("lacks", lacks), ("need not have", excess)):
        names = ", ".join(f"{one.right} on {one.name}" for one in found[:5])
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        parts += [f"{verb} {names}{more}"] if found else []
    text = "; ".join([*([f"to {purpose}, {role} {' and '.join(parts)}"] if parts else []), *public])
    level = ERROR if parts else WARNING
    return Finding("rights", level, text, "; ".join(rights_sql(conn, purpose, role)))


def rights_sql(conn: db.Connection, purpose: str, role: str) -> list[str]:
    """Return the statements that give a role the rights for a purpose, and no others.

    They also revoke the rights of PUBLIC, and grant the role the ones that it needs.
    """
    public = permissions.of_public(conn)
    # A REVOKE on a table removes the rights to its columns too, so the GRANTs come after it.
    return [
        *permissions.revokes([*permissions.excessive(conn, purpose), *public]),
        *permissions.grants(permissions.lacking(conn, purpose, without=public), role),
    ]


@_check("rights", ERROR, by_purpose=True)
def rights(conn: db.Connection, purpose: str) -> Finding:
    """Has this role the rights for its purpose, and no others, and has PUBLIC none?"""
    found = rights_of(conn, purpose)
    script = f"`queue-workflows connect --for {purpose} --sql`"
    remedy = f"run what {script} prints, as the owner of the tables"
    return found._replace(remedy=remedy if found.remedy else "")


@_check("schema", ERROR)
def schema(conn: db.Connection, purpose: str = "work") -> Finding:
    """Has the database the schema that this code needs?"""
    seen = statements.doctor.schema_seen(conn)
    role = seen["role"]
    if seen["found"] and seen["readable"]:
        return _version(conn, purpose)
    if seen["found"]:
        remedy = f"GRANT SELECT ON queue_schema_version TO {role}"
        return Finding("schema", ERROR, "its version cannot be read", remedy)
    if seen["elsewhere"]:
        name = seen["elsewhere"][0]
        remedy = f"GRANT USAGE ON SCHEMA {name} TO {role}, and have it on the search_path"
        text = f"it is in schema {name}, which {role} does not see"
        return Finding("schema", ERROR, text, remedy)
    if purpose == "migrate" and seen["may_create"]:
        return Finding("schema", OK, "none yet, and this role may create it")
    remedy = f"{MIGRATE}, or start queue-orchestrator"
    if not seen["may_create"]:
        remedy += f"; this role needs GRANT CREATE ON SCHEMA {seen['schema']} for that"
    return Finding("schema", ERROR, "there is none", remedy)


def _version(conn: db.Connection, purpose: str) -> Finding:
    """Report a schema of another version than this code needs, or of another package."""
    required, newer = db.REQUIRED_VERSION, "upgrade queue_workflows here"
    if (of_others := ledger.of_others(conn)) is not None:
        return Finding("schema", ERROR, of_others, ledger.OF_OTHERS_REMEDY)
    found = statements.doctor.schema_version(conn)
    version, needs = int(found["version"]), int(found["needs"])
    if needs > required:
        text = f"at version {version}, which needs code that knows version {needs}"
        return Finding("schema", ERROR, f"{text}; this knows {required}", newer)
    if version < required:
        text = f"at version {version}, this code needs {required}"
        is_fine = purpose == "migrate"
        return Finding("schema", OK if is_fine else ERROR, text, "" if is_fine else MIGRATE)
    if version > required:
        text = f"at version {version}, this code knows {required} and may work on it"
        return Finding("schema", WARNING, text, newer)
    return Finding("schema", OK, f"at version {version}")


@_check("functions", ERROR)
def functions(conn: db.Connection) -> Iterable[Finding]:
    """Are functions and triggers as in this version?"""
    newer, installs = "upgrade queue_workflows here", "`queue-workflows migrate` installs them"
    return [
        Finding("functions", WARNING, each.text, newer)
        if each.is_newer
        else Finding("functions", ERROR, each.text, installs)
        for each in installed.problems(conn)[:SHOWN_BAD]
    ] or [Finding("functions", OK, "functions and triggers are those of this version")]


@_check("files, outputs, schema rights", ERROR)
def files(conn: db.Connection) -> Findings:
    """Are runs of roles that only submit confined to folders?

    Can nodes of this machine write theirs, and do all machines share them? May only some roles
    create functions there, and do ours belong to the owner of the tables?
    """
    knob = config.OUT_ROOTS.variables[0]
    if roots := confinement.roots():
        yield Finding("files", OK, f"runs keep theirs in {os.pathsep.join(roots)}")
    elif submitters := statements.permissions.submitters(conn):
        text = f"{', '.join(submitters)} may submit runs, and their out_dir may be any folder"
        remedy = f"set {knob} here and on every worker and orchestrator"
        yield Finding("files", WARNING, text, remedy)
    else:
        yield Finding("files", OK, "no role is limited to submitting runs")
    yield _outputs(statements.doctor.machines(conn))
    if name := statements.permissions.public_may_create(conn):
        text = f"every role may create functions in schema {name}, which triggers could call"
        remedy = f"as the owner: REVOKE CREATE ON SCHEMA {name} FROM PUBLIC"
        yield Finding("schema rights", WARNING, text, remedy)
    if (found := permissions.of_another_owner(conn)) is not None:
        yield Finding("schema rights", WARNING, *found)


def _outputs(machines: list[str]) -> Finding:
    """Check the folders that nodes write to, by writing there."""
    may_run = config.host_label() in machines or config.get_config().knows_nodes()
    knob = config.OUTPUTS_DIR.variables[0]
    try:
        default = confinement.outputs_folder()
    except errors.InvalidConfig as error:
        return Finding("outputs", ERROR, str(error))
    for folder in dict.fromkeys([default, *map(Path, confinement.roots())]):
        existing = next(each for each in (folder, *folder.parents) if os.access(each, os.F_OK))
        try:
            tempfile.TemporaryDirectory(prefix=".queue-workflows-", dir=existing).cleanup()
        except OSError as error:
            remedy = f"let this user (uid {os.geteuid()}) write there, or set {knob} to another one"
            text = f"nodes that take `out` fail here: {folder} cannot be written: "
            text += f"{error.strerror} ({existing})"
            if not may_run:
                text += " (no worker of nodes has run on this machine within a day)"
            return Finding("outputs", ERROR if may_run else WARNING, text, remedy)
    text = f"runs without an out_dir keep their files in {default}"
    if len(machines) < 2 or config.OUTPUTS_DIR.read():
        return Finding("outputs", OK, text)
    remedy = f"set {knob} to a folder that all of them share, on each"
    return Finding("outputs", WARNING, f"{text}, on each of {len(machines)} machines", remedy)


# --- work that waits ---------------------------------------------------------------------------


@_check("outbox", ERROR)
def outbox(conn: db.Connection, *, oldest: Row | None = None) -> Finding:
    """Is each due event dispatched within {OUTBOX_WARN_S:g} s?

    Over {OUTBOX_ERROR_S:g} s is an error.
    """
    found = statements.overview.open_events(conn) if oldest is None else oldest
    if (lag_s := found["lag_s"]) <= OUTBOX_WARN_S:
        return Finding("outbox", OK, f"lag {display.duration(lag_s)}")
    text = f"an event of run {found['run_id']} waits for {display.duration(lag_s)}"
    text += f" ({display.line(found['error'])})" if found["error"] else ""
    level = ERROR if lag_s > OUTBOX_ERROR_S else WARNING
    return Finding("outbox", level, text, "is a queue-orchestrator running? see its log")


@_check("runs", ERROR)
def runs(conn: db.Connection, *, late: list[Row] | None = None) -> Findings:
    """Is each run started within {WAIT_WARN_S:g} s?

    Does something move each running one forward within {LAPSED_WARN_S:g} s?
    """
    if stalled := statements.runs.stalled(conn, quiet_s=LAPSED_WARN_S, ids=None):
        text = f"run {min(stalled)} is running, but nothing moves it forward"
        text += f"; {len(stalled) - 1} more" if len(stalled) > 1 else ""
        yield Finding("runs", ERROR, text, "start queue-orchestrator, which continues or ends it")
    if late is None:
        late = statements.overview.late_runs(conn, patience_s=WAIT_WARN_S)
    if not late:
        yield Finding("runs", OK, "none waits to be started")
        return
    found = max(late, key=lambda row: row["wait_s"])
    text = f"run {found['id']} has not been started for {display.duration(found['wait_s'])}"
    remedy = "start queue-orchestrator with --app"
    if found["others"]:
        text += ", though others were started within the last minute"
        remedy = f"an orchestrator runs: wait, or `queue-workflows cancel {found['id']}`"
    yield Finding("runs", WARNING, text, remedy)


class BadRow(NamedTuple):
    """A row, its fault in a sentence, and the command that ends or removes it."""

    kind: str
    id: str
    text: str
    command: str


def found_bad(conn: db.Connection, limit: int) -> list[BadRow]:
    """Return failing, blocked, unreadable and out-of-range rows, at most `limit` per cause.

    In each table, EXAMINED live rows are searched for unusable times, counters and payloads.
    """
    rows = statements.bad_rows.stuck(conn, limit=limit, late_s=LATE_S)
    rows += statements.bad_rows.out_of_range(conn, limit=limit, examined=EXAMINED)
    # The id is one word of a shell command; the display escapes control characters.
    return [
        BadRow(
            row["kind"], row["id"], row["text"],
            f"queue-workflows {row['command']} {shlex.quote(row['id'])}",
        )
        for row in rows
    ]  # fmt: skip


@_check("bad rows", WARNING)
def bad_rows(conn: db.Connection) -> Iterable[Finding]:
    """Is each row readable and in range, so that it neither fails repeatedly nor is set aside?

    Of each table {EXAMINED:,} live rows are examined.
    """
    found = found_bad(conn, SHOWN_BAD)
    wrong = [(f"{row.kind} {row.id}: {row.text}", f"`{row.command}`") for row in found]
    return _each("bad rows", "none is failing, blocked, unreadable or out of range", wrong)


@_check("leases", ERROR)
def leases(conn: db.Connection) -> Finding:
    """Is each lapsed lease taken back within {LAPSED_WARN_S:g} s?"""
    found = statements.doctor.lapsed(conn)
    if not found["n"] or found["since_s"] <= LAPSED_WARN_S:
        return Finding("leases", OK, "no lapsed lease is left")
    text = (
        f"{display.counted(found['n'], 'job')} not taken back, {display.duration(found['since_s'])}"
    )
    return Finding("leases", ERROR, f"{text} after the lease lapsed", "start queue-orchestrator")


@_check("queues", WARNING)
def queues(conn: db.Connection, *, live: list[Row] | None = None) -> Iterable[Finding]:
    """Has each job that is due for {WAIT_WARN_S:g} s a live worker?"""
    wrong: list[tuple[str, str]] = []
    for row in waiting_reasons.live_queues(conn) if live is None else live:
        queue = row["queue"]
        if (row["ready_s"] or 0.0) <= WAIT_WARN_S or row["taking"]:
            continue
        text = f"{queue}: {display.counted(row['ready'], 'due job')}"
        if row["alive"]:
            serving = "its workers take none"
            remedy = f"`queue-worker-control --queue={queue} --on`"
        else:
            serving, remedy = "no live worker", f"start `queue-claim-worker --queue={queue}`"
        if row["paused"]:
            # A worker alone would not take any of them.
            wait = display.duration(row["ready_s"])
            text += f", the first for {wait}: {waiting_reasons.paused_text(row)}; also {serving}"
            remedy = f"`queue-workflows queues resume {shlex.quote(queue)}`, then {remedy}"
        else:
            text += f", {serving}" if row["alive"] else f" and {serving}"
        wrong.append((text, remedy))
    return _each("queues", "every queue with due jobs has a live worker", wrong)


@_check("versions", WARNING)
def versions(conn: db.Connection) -> Iterable[Finding]:
    """Is there a live worker for each version that due jobs need?"""
    stale_s = config.STALE_WORKER_AFTER_S.read()
    wrong: list[tuple[str, str]] = []
    for row in statements.doctor.missing_versions(conn, stale_s=stale_s, listed=SHOWN_BAD):
        jobs = ", ".join(display.line(job, 100) for job in row["jobs"])
        what = f"no live worker of queue {row['queue']} has {display.line(row['version'], 200)}"
        waits = f"jobs that need it wait, the first for {display.duration(row['wait_s'])}: {jobs}"
        remedy = "start a worker with this version, or `queue-workflows upgrade RUN`"
        wrong.append((f"{what}; {waits}", remedy))
    ok = "every version of a node that due jobs need has a live worker"
    return _each("versions", ok, wrong)


@_check("lock keys", WARNING)
def lock_keys(conn: db.Connection, *, live: list[Row] | None = None) -> Iterable[Finding]:
    """Is there a worker for each queue whose jobs lost their lock keys to others?"""
    remedy = (
        "start `queue-claim-worker --queue={0}`, `queue-workflows queues resume {0}` if it is "
        "paused, or `queue-workflows jobs cancel --queue {0}`"
    )
    rows = waiting_reasons.live_queues(conn) if live is None else live
    wrong = [
        (waiting_reasons.passed_over_text(row), remedy.format(shlex.quote(row["queue"])))
        for row in waiting_reasons.passed_over(rows)
    ]
    return _each("lock keys", "no queue without a worker has lost lock keys to others", wrong)


@_check("schedules", WARNING)
def schedules(conn: db.Connection) -> Iterable[Finding]:
    """Does each schedule fire in time and without an error?"""
    remedy = "`queue-workflows schedules list` has all of it"
    rows = schedule_api.troubled(conn=conn)
    wrong = [(f"{row['name']}: {schedule_api.problem(row)}", remedy) for row in rows]
    return _each("schedules", "none fails, is overdue, or was missed", wrong)


@_check("alerts", WARNING)
def alerts(conn: db.Connection) -> Finding:
    """Is each failure sent within {ALERT_WARN_S:g} s?"""
    found = statements.doctor.alerts(conn)
    if not found["n"] or found["wait_s"] <= ALERT_WARN_S:
        return Finding("alerts", OK, f"no failure waits for over {display.duration(ALERT_WARN_S)}")
    failures, waits = display.counted(found["n"], "failure"), display.duration(found["wait_s"])
    text = f"{failures} not sent yet, {waits} after the first"
    if found["seen_s"] is not None and found["seen_s"] <= ALERT_WARN_S:
        remedy = "see the schedulers' logs: a hook or a command may hang"
        return Finding("alerts", WARNING, f"{text}, though a scheduler sends them", remedy)
    remedy = (
        "start queue-scheduler with the app that calls set_on_failed(), or with "
        f"{config.ON_FAILED.variables[0]}; without both they are deleted after a day"
    )
    return Finding("alerts", WARNING, f"{text}: no scheduler sends them", remedy)


@_check("workers", WARNING)
def workers(conn: db.Connection) -> Iterable[Finding]:
    """Does each worker with jobs send heartbeats?"""
    stale_s = config.STALE_WORKER_AFTER_S.read()
    rows = statements.doctor.silent_workers(conn, stale_s=stale_s)
    gone = [f"{row['host_label']} {row['queue']}" for row in rows]
    text = f"silent while holding jobs: {', '.join(gone)}"
    wrong = [(text, "restart them; their leases give the jobs back")] if gone else []
    return _each("workers", "none is flagged dead", wrong)


# --- tables that are updated often -------------------------------------------------------------


@_check("dead rows", WARNING)
def dead_rows(conn: db.Connection) -> Finding:
    """Does autovacuum keep dead rows under {DEAD_ROWS_WARN:,}, or under half of a table?"""
    rows = statements.doctor.table_statistics(conn, tables=HOT_TABLES)
    bloated = [
        f"{row['name']} ({row['dead']} dead, {row['live']} live)"
        for row in rows
        if row["dead"] > DEAD_ROWS_WARN
        and row["dead"] > DEAD_SHARE_WARN * (row["dead"] + row["live"])
    ]
    if off := [row["name"] for row in rows if row["vacuum_off"]]:
        text = f"autovacuum is off for {', '.join(off)}"
        return Finding("dead rows", WARNING, text, "ALTER TABLE ... RESET (autovacuum_enabled)")
    if bloated:
        remedy = "VACUUM them, and see what holds vacuum back (transactions above)"
        return Finding("dead rows", WARNING, ", ".join(bloated), remedy)
    return Finding("dead rows", OK, f"{sum(row['dead'] for row in rows)} dead rows in all")


@_check("renewals", WARNING)
def renewals(conn: db.Connection) -> Finding:
    """Are renewals HOT updates, which no index slows down?"""
    found = statements.doctor.table_statistics(conn, tables=HOT_TABLES)
    rows = [row for row in found if row["name"] in RENEWED]
    used = [row for row in rows if row["updates"]]
    shares = ", ".join(f"{row['name']} {row['hot'] / row['updates']:.0%}" for row in used)
    text = f"HOT updates: {shares or 'no updates yet'}"
    cold = [row["name"] for row in rows if _are_cold(row)]
    pairs = [(table, column) for table, columns in RENEWED.items() for column in columns]
    tables, columns = [table for table, _ in pairs], [column for _, column in pairs]
    # Such indexes prevent renewals from being HOT updates.
    if named := statements.doctor.indexes_on_renewed(conn, tables=tables, columns=columns):
        text = f"renewals write columns that these indexes have: {', '.join(named)}"
        return Finding("renewals", WARNING, text, "drop these indexes")
    if cold:
        remedy = "look for long transactions and full pages: VACUUM, keep the fillfactor"
        return Finding("renewals", WARNING, f"{text}; too few for {', '.join(cold)}", remedy)
    return Finding("renewals", OK, text)


@_check("run inputs", OK)
def run_inputs(conn: db.Connection) -> Finding:
    """Are there few runs, or does an index find them by inputs?"""
    found = statements.doctor.input_index(conn)
    if found["is_there"]:
        return Finding("run inputs", OK, "an index finds runs by their inputs")
    if found["runs"] < MANY_RUNS:
        return Finding("run inputs", OK, "so few runs are searched without an index")
    text = f"a search by inputs reads {found['runs']:,} runs in steps; for frequent ones, "
    return Finding("run inputs", OK, text + found["statement"])


def _are_cold(row: dict[str, int]) -> bool:
    if row["updates"] < UPDATES_JUDGED:
        return False
    if str(row["name"]) == "workers":
        return row["hot"] < HOT_SHARE_WARN * row["updates"]
    return row["updates"] - row["hot"] > COLD_UPDATES_WARN * max(1, row["inserts"])
