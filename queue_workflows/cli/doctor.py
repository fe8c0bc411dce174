"""`queue-workflows doctor`: what is wrong with an installation, and what to do about it."""

from __future__ import annotations

import datetime
import os
import secrets
import shlex
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from queue_workflows import __version__, config, db, errors
from queue_workflows.cli import command, fleet, options, output
from queue_workflows.dag import confinement, outputs
from queue_workflows.runtime import process
from queue_workflows.store import bad_rows, health, lock_keys

MIN_SERVER = 140000
"""PostgreSQL 14, the oldest that the tests run on."""
CLOCK_WARN_S = 5.0
"""Nothing is decided by a host's clock, but logs that differ more cannot be read side by side."""
LISTEN_WAIT_S = 5.0
"""A notification takes milliseconds; the listener itself gives up on a connection after 4 s."""
NOTIFY_QUEUE_WARN = 0.5
"""PostgreSQL itself warns at half of the queue; when it is full, writers fail."""
TRANSACTION_WARN_S = 300.0
"""Engine transactions end within 5 s; meanwhile vacuum removes nothing that died since."""
IDLE_WARN_S = 60.0
"""Nobody works for a minute inside a transaction without asking anything: it was forgotten."""
OUTBOX_WARN_S, OUTBOX_ERROR_S = 10.0, 60.0
"""The orchestrator looks every second; its services restart within a minute."""
LAPSED_WARN_S = 60.0
"""Lapsed leases are swept every 5 s."""
WAIT_WARN_S = 30.0
"""A worker that restarts is back by then, and so its absence is no accident."""
DEAD_ROWS_WARN, DEAD_SHARE_WARN = 10_000, 0.5
"""Autovacuum starts at a fifth; at half of a large table it does not keep up, or is held back."""
UPDATES_JUDGED = 1_000
"""Fewer updates say nothing about a ratio."""
HOT_SHARE_WARN = 0.5
"""Of the updates of `workers`, which are all renewals and should all be HOT."""
COLD_UPDATES_WARN = 10.0
"""Updates a job that are not HOT: its claim and its end are two, each time taken back two more."""
CONNECTIONS_WARN, CONNECTIONS_ERROR = 0.8, 0.95
"""Beyond, a restart of the fleet (three connections a worker) may not get in."""

SHOWN_BAD = 20
"""Bad rows shown of each kind: enough to start from."""

OK, WARNING, ERROR = "ok", "warning", "error"
DANGERS = {
    "fsync": "a crash of the machine may destroy the database",
    "full_page_writes": "a crash of the machine may leave torn pages",
    "synchronous_commit": "a crash of the server loses acknowledged commits",
}


class Finding(NamedTuple):
    """One line: what was looked at, how it is (`ok`, `warning`, `error`), and what to do."""

    check: str
    level: str
    text: str
    remedy: str = ""


def doctor(
    app: options.App = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Look for what is wrong here and on the server. Exit code 1 for an error."""

    def body() -> int:
        process.setup_logging("error")
        config.load_app(app)
        found: list[Finding] = []
        for finding in examine():
            safe = Finding(*(process.mask(part) for part in finding))
            found.append(safe)
            if not as_json:
                show(safe)
        counts = {level: sum(f.level == level for f in found) for level in (ERROR, WARNING)}
        if as_json:
            findings = [finding._asdict() for finding in found]
            output.dump(
                {"findings": findings, "errors": counts[ERROR], "warnings": counts[WARNING]}
            )
        else:
            errors_, warnings = (output.counted(n, word) for word, n in counts.items())
            output.echo(f"{errors_}, {warnings}")
        return int(counts[ERROR] > 0)

    command.execute("doctor", body, debug=debug)


def show(finding: Finding) -> None:
    """Print a finding, its remedy on the same line."""
    remedy = f"; {finding.remedy}" if finding.remedy else ""
    text = output.line(f"{finding.text}{remedy}", 1000)
    output.echo(f"{finding.level:7}  {finding.check:18}  {text}")


def examine() -> Iterator[Finding]:
    """Every finding in order; ends early where nothing further can be asked."""
    yield Finding("package", OK, f"queue_workflows {__version__}, Python {health.python_version()}")
    yield _driver()
    try:
        with command.database(create=False) as words:
            yield from _reached(words)
    except errors.QueueWorkflowsError as error:
        yield Finding("database", ERROR, str(error))
    except db.OperationalError as error:
        yield Finding("database", ERROR, f"the connection was lost: {health.reason(error)}")


def _driver() -> Finding:
    version, kind, libpq = health.driver()
    text = f"psycopg {version} ({kind}), libpq {libpq // 10000}.{libpq % 10000}"
    if kind == "python":
        return Finding("psycopg", WARNING, text, "install psycopg[binary], which is faster")
    return Finding("psycopg", OK, text)


def _reached(words: str) -> Iterator[Finding]:
    began = time.monotonic()
    try:
        conn = db.connect()
    except db.OperationalError as error:
        remedy = "is the server up, and are host, port, user and password right?"
        yield Finding("database", ERROR, f"{words} does not answer: {health.reason(error)}", remedy)
        return
    with conn:
        took_ms = (time.monotonic() - began) * 1000
        yield Finding("database", OK, f"{words} answers within {took_ms:.0f} ms")
        for check in (server, _settings, clock, listen, _transactions, _connections, _rights):
            yield from _guarded(check.__name__.lstrip("_").replace("_", " "), check, conn)
        schema = list(_guarded("schema", _schema, conn))
        yield from schema
        if any(finding.level == ERROR for finding in schema):
            yield Finding("tables", WARNING, "not looked at: the schema comes first")
            return
        for check in (
            _files, _outbox, _runs, _bad_rows, _leases, _queues, _lock_keys, _workers, _dead_rows,
            _renewals,
        ):  # fmt: skip
            yield from _guarded(check.__name__.lstrip("_").replace("_", " "), check, conn)


Check = Callable[[db.Connection], Iterator[Finding]]


def _guarded(name: str, check: Check, conn: db.Connection) -> Iterator[Finding]:
    """The findings of a check; a refusal of the server's is one too. A lost connection raises."""
    try:
        yield from check(conn)
    except db.Error as error:
        if conn.closed or conn.broken:
            raise
        remedy = "grant this role what it needs, or ask again when the server is less busy"
        yield Finding(name, ERROR, f"cannot be read: {health.reason(error)}", remedy)


def server(conn: db.Connection) -> Iterator[Finding]:
    """Too old, a standby, read-only."""
    found = health.server(conn)
    text = f"PostgreSQL {found['version']}, role {found['role']}"
    if found["version_num"] < MIN_SERVER:
        yield Finding("server", ERROR, text, "upgrade to PostgreSQL 14 or later")
    elif found["standby"]:
        yield Finding("server", ERROR, f"{text}: a standby", "name the primary in the DSN")
    elif found["read_only"]:
        remedy = "turn default_transaction_read_only off for this role and database"
        yield Finding("server", ERROR, f"{text}: read-only", remedy)
    else:
        yield Finding("server", OK, text)


def _settings(conn: db.Connection) -> Iterator[Finding]:
    found = health.settings(conn, [*DANGERS, "autovacuum", "track_counts"])
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


def clock(conn: db.Connection) -> Iterator[Finding]:
    """How far this host's clock is from the server's."""
    offsets: list[tuple[float, float]] = []
    for _ in range(3):
        before = datetime.datetime.now(datetime.timezone.utc)
        there = health.clock(conn)
        after = datetime.datetime.now(datetime.timezone.utc)
        trip_s = (after - before).total_seconds()
        offsets.append((trip_s, (there - before).total_seconds() - trip_s / 2))
    offset_s = min(offsets)[1]
    text = f"the server is {abs(offset_s):.2f} s {'ahead' if offset_s >= 0 else 'behind'}"
    if abs(offset_s) > CLOCK_WARN_S:
        remedy = "let both follow a time server; jobs are not affected, logs are"
        yield Finding("clock", WARNING, text, remedy)
    else:
        yield Finding("clock", OK, text)


def listen(conn: db.Connection) -> Iterator[Finding]:
    """Whether a notification comes back to a listener of ours."""
    channel = f"queue_workflows_doctor_{os.getpid()}_{secrets.token_hex(4)}"
    began, used = time.monotonic(), 0.0
    ear = db.listen(channel, poll_s=LISTEN_WAIT_S)
    wakes = iter(ear)
    try:
        wake = next(wakes)
        if wake.reason == "connected":
            began = time.monotonic()
            used = health.notify(conn, channel)
            wake = next(wakes)
    finally:
        ear.close()
        next(wakes, None)
    took_ms = (time.monotonic() - began) * 1000
    if wake.reason != "notify":
        remedy = "connect directly, or through a pooler in session mode; until then workers poll"
        yield Finding("listen", WARNING, f"no notification within {LISTEN_WAIT_S:g} s", remedy)
    elif used > NOTIFY_QUEUE_WARN:
        remedy = "end the oldest transaction of a session that listens"
        yield Finding("listen", WARNING, f"the server's queue is {used:.0%} full", remedy)
    else:
        yield Finding("listen", OK, f"a notification came back within {took_ms:.1f} ms")


def _transactions(conn: db.Connection) -> Iterator[Finding]:
    rows = health.transactions(conn)
    idle = [row for row in rows if (row["idle_s"] or 0.0) > IDLE_WARN_S]
    if not rows:
        yield Finding("transactions", OK, "none is open")
        return
    worst = max(idle, key=lambda row: row["idle_s"]) if idle else rows[0]
    text = f"the oldest is open for {output.seconds(worst['age_s'])}: {worst['what']}"
    if idle:
        text = f"{worst['what']} has been idle in one for {output.seconds(worst['idle_s'])}"
    if idle or worst["age_s"] > TRANSACTION_WARN_S:
        yield Finding("transactions", WARNING, text, "end it: vacuum waits for it, and locks may")
    else:
        yield Finding("transactions", OK, text)


def _connections(conn: db.Connection) -> Iterator[Finding]:
    found = health.connections(conn)
    share = found["used"] / max(1, found["allowed"])
    text = f"{found['used']} of {found['allowed']} in use"
    level = ERROR if share >= CONNECTIONS_ERROR else WARNING if share >= CONNECTIONS_WARN else OK
    remedy = "" if level == OK else "raise max_connections; a worker holds up to three"
    yield Finding("connections", level, text, remedy)


def _schema(conn: db.Connection) -> Iterator[Finding]:
    del conn
    version, required = db.current_schema_version(), db.REQUIRED_VERSION
    if version < required:
        text = f"at version {version}, this code needs {required}"
        yield Finding("schema", ERROR, text, "run `queue-workflows migrate`")
    elif version > required:
        text = f"at version {version}, this code knows {required}"
        yield Finding("schema", WARNING, text, "upgrade queue_workflows here")
    else:
        yield Finding("schema", OK, f"at version {version}")


def _rights(conn: db.Connection) -> Iterator[Finding]:
    if missing := health.missing_rights(conn):
        others = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        text = f"this role lacks {', '.join(missing[:5])}{others}"
        yield Finding("rights", ERROR, text, "GRANT them, or connect as the role that has them")
    else:
        yield Finding("rights", OK, "may read and write every table that is there")


def _files(conn: db.Connection) -> Iterator[Finding]:
    knob = config.OUT_ROOTS.variables[0]
    if roots := confinement.roots():
        yield Finding("files", OK, f"runs keep theirs in {os.pathsep.join(roots)}")
    elif submitters := health.submitters(conn):
        text = f"{', '.join(submitters)} may submit runs, and their out_dir may be any folder"
        remedy = f"set {knob} here and on every worker and orchestrator"
        yield Finding("files", WARNING, text, remedy)
    else:
        yield Finding("files", OK, "no role may do no more than submit runs")
    yield _outputs(health.machines(conn))
    if schema := health.public_may_create(conn):
        text = f"every role may create functions in schema {schema}, which triggers could call"
        remedy = f"as the owner: REVOKE CREATE ON SCHEMA {schema} FROM PUBLIC"
        yield Finding("schema rights", WARNING, text, remedy)


def _outputs(machines: int) -> Finding:
    text = f"runs without an out_dir keep their files in {outputs.folder()}"
    if machines < 2 or config.OUTPUTS_DIR.read():
        return Finding("outputs", OK, text)
    remedy = f"set {config.OUTPUTS_DIR.variables[0]} to a folder that all of them share, on each"
    return Finding("outputs", WARNING, f"{text}, on each of {machines} machines", remedy)


def _outbox(conn: db.Connection) -> Iterator[Finding]:
    found = health.outbox(conn)
    lag_s = found["lag_s"]
    if lag_s is None or lag_s <= OUTBOX_WARN_S:
        yield Finding("outbox", OK, f"lag {output.seconds(lag_s or 0.0)}")
        return
    text = f"an event of run {found['run_id']} waits for {output.seconds(lag_s)}"
    if found["error"]:
        text += f" ({output.line(found['error'])})"
    level = ERROR if lag_s > OUTBOX_ERROR_S else WARNING
    yield Finding("outbox", level, text, "is a queue-orchestrator running? see its log")


def _runs(conn: db.Connection) -> Iterator[Finding]:
    found = health.waiting_runs(conn)
    wait_s = found["wait_s"]
    if wait_s is None or wait_s <= WAIT_WARN_S:
        yield Finding("runs", OK, "none waits to be started")
        return
    text = f"run {found['run_id']} has not been started for {output.seconds(wait_s)}"
    remedy = "start queue-orchestrator with --app"
    if found["others"]:
        text += ", though others were started within the last minute"
        remedy = f"an orchestrator runs: wait, or `queue-workflows cancel {found['run_id']}`"
    yield Finding("runs", WARNING, text, remedy)


def _bad_rows(conn: db.Connection) -> Iterator[Finding]:
    """Report failing, blocked, unreadable and out-of-range rows with the command that ends each."""
    rows = [*bad_rows.stuck(conn, SHOWN_BAD), *bad_rows.out_of_range(conn, SHOWN_BAD)]
    if not rows:
        yield Finding("bad rows", OK, "none is failing, blocked, unreadable or out of range")
    for row in rows:
        yield Finding("bad rows", WARNING, f"{row.kind} {row.id}: {row.text}", f"`{row.command}`")


def _leases(conn: db.Connection) -> Iterator[Finding]:
    found = health.lapsed(conn)
    if not found["n"] or found["since_s"] <= LAPSED_WARN_S:
        yield Finding("leases", OK, "none is left lapsed")
        return
    text = f"{output.counted(found['n'], 'job')} not taken back, {output.seconds(found['since_s'])}"
    yield Finding("leases", ERROR, f"{text} after the lease lapsed", "start queue-orchestrator")


def _queues(conn: db.Connection) -> Iterator[Finding]:
    rows = [
        row
        for row in health.unserved(conn, config.STALE_WORKER_AFTER_S.read())
        if row["wait_s"] > WAIT_WARN_S
    ]
    if not rows:
        yield Finding("queues", OK, "every queue with due jobs has a live worker")
    for row in rows:
        text = f"{row['queue']}: {output.counted(row['n'], 'due job')} and no live worker"
        remedy = f"start queue-claim-worker --queue={row['queue']}"
        if row["alive"]:
            text = f"{row['queue']}: {output.counted(row['n'], 'due job')}, its workers take none"
            remedy = f"queue-worker-control --queue={row['queue']} --on"
        yield Finding("queues", WARNING, text, remedy)


def _lock_keys(conn: db.Connection) -> Iterator[Finding]:
    rows = lock_keys.unserved(conn)
    if not rows:
        yield Finding("lock keys", OK, "none passed over a queue that no worker serves")
    for row in rows:
        queue = shlex.quote(row["queue"])
        remedy = (
            f"start queue-claim-worker --queue={queue}, `queue-workflows queues resume {queue}` if"
            f" it is paused, or `queue-workflows jobs cancel --queue {queue}`"
        )
        yield Finding("lock keys", WARNING, fleet.unserved_text(row), remedy)


def _workers(conn: db.Connection) -> Iterator[Finding]:
    if gone := health.dead_workers(conn, config.STALE_WORKER_AFTER_S.read()):
        text = f"silent while holding jobs: {', '.join(gone)}"
        yield Finding("workers", WARNING, text, "restart them; their leases give the jobs back")
    else:
        yield Finding("workers", OK, "none is flagged dead")


def _dead_rows(conn: db.Connection) -> Iterator[Finding]:
    rows = health.table_statistics(conn)
    bloated = [
        f"{row['name']} ({row['dead']} dead, {row['live']} live)"
        for row in rows
        if row["dead"] > DEAD_ROWS_WARN
        and row["dead"] > DEAD_SHARE_WARN * (row["dead"] + row["live"])
    ]
    if off := [row["name"] for row in rows if row["vacuum_off"]]:
        text = f"autovacuum is off for {', '.join(off)}"
        yield Finding("dead rows", WARNING, text, "ALTER TABLE ... RESET (autovacuum_enabled)")
    elif bloated:
        remedy = "VACUUM them, and see what holds vacuum back (transactions above)"
        yield Finding("dead rows", WARNING, ", ".join(bloated), remedy)
    else:
        yield Finding("dead rows", OK, f"{sum(row['dead'] for row in rows)} in all")


def _renewals(conn: db.Connection) -> Iterator[Finding]:
    rows = [row for row in health.table_statistics(conn) if row["name"] in health.RENEWED]
    shares = ", ".join(
        f"{row['name']} {row['hot'] / row['updates']:.0%}" for row in rows if row["updates"]
    )
    text = f"HOT updates: {shares or 'no updates yet'}"
    cold = [row["name"] for row in rows if _renewals_are_cold(row)]
    if named := health.indexes_on_renewed(conn):
        text = f"renewals write what is indexed by {', '.join(named)}"
        yield Finding("renewals", WARNING, text, "drop these indexes")
    elif cold:
        remedy = "look for long transactions and full pages: VACUUM, keep the fillfactor"
        yield Finding("renewals", WARNING, f"{text}; too few for {', '.join(cold)}", remedy)
    else:
        yield Finding("renewals", OK, text)


def _renewals_are_cold(row: dict[str, int]) -> bool:
    if row["updates"] < UPDATES_JUDGED:
        return False
    if str(row["name"]) == "workers":
        return row["hot"] < HOT_SHARE_WARN * row["updates"]
    return row["updates"] - row["hot"] > COLD_UPDATES_WARN * max(1, row["inserts"])
