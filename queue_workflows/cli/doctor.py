"""Define `queue-workflows doctor`: find what is wrong with an installation, and the remedies."""

from __future__ import annotations

import datetime
import os
import secrets
import shlex
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from queue_workflows import __version__, config, db, errors, schedules
from queue_workflows.admin import bad_rows, permissions
from queue_workflows.admin import doctor as facts
from queue_workflows.cli import command, fleet, options, output
from queue_workflows.dag import confinement, run_folder
from queue_workflows.db import development_chain, functions
from queue_workflows.engine import lock_queues
from queue_workflows.runtime import entry_point

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
OUTBOX_WARN_S, OUTBOX_ERROR_S = 10.0, 60.0
"""The orchestrator polls every second; a service manager restarts it within a minute."""
LAPSED_WARN_S = 60.0
"""Lapsed leases are swept every 5 s."""
WAIT_WARN_S = 30.0
"""Seconds that a worker needs to restart."""
DEAD_ROWS_WARN, DEAD_SHARE_WARN = 10_000, 0.5
"""Autovacuum starts at a fifth. At half of a large table it is too slow, or blocked."""
UPDATES_JUDGED = 1_000
"""With fewer updates a ratio is meaningless."""
HOT_SHARE_WARN = 0.5
"""Share of HOT updates of `workers`: all of them are renewals and should be HOT."""
COLD_UPDATES_WARN = 10.0
"""Updates per job that are not HOT: its claim and its end are two, each requeue adds two."""
CONNECTIONS_WARN, CONNECTIONS_ERROR = 0.8, 0.95
"""Above this, a restart of the fleet (three connections per worker) may fail."""

SHOWN_BAD = 20
"""Bad rows that are shown per kind."""

OK, WARNING, ERROR = "ok", "warning", "error"
DANGERS = {
    "fsync": "a crash of the machine may destroy the database",
    "full_page_writes": "a crash of the machine may leave torn pages",
    "synchronous_commit": "a crash of the server loses acknowledged commits",
}


class Finding(NamedTuple):
    """One line: what was checked, its level (`ok`, `warning`, `error`), and what to do."""

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

    def run_command() -> int:
        entry_point.setup_logging("error")
        config.load_app(app)
        found: list[Finding] = []
        for finding in examine():
            safe = Finding(*(entry_point.mask(part) for part in finding))
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

    command.execute("doctor", run_command, debug=debug)


def show(finding: Finding) -> None:
    """Print a finding, its remedy on the same line."""
    remedy = f"; {finding.remedy}" if finding.remedy else ""
    text = output.line(f"{finding.text}{remedy}", 1000)
    output.echo(f"{finding.level:7}  {finding.check:18}  {text}")


def examine() -> Iterator[Finding]:
    """Yield every finding in order; end early if nothing further can be checked."""
    yield Finding("package", OK, f"queue_workflows {__version__}, Python {facts.python_version()}")
    yield _driver()
    try:
        with command.database(create=False) as words:
            yield from _connection(words)
    except errors.QueueWorkflowsError as error:
        yield Finding("database", ERROR, str(error))
    except db.OperationalError as error:
        yield Finding("database", ERROR, f"the connection was lost: {facts.reason(error)}")


def _driver() -> Finding:
    version, kind, libpq = facts.driver()
    text = f"psycopg {version} ({kind}), libpq {libpq // 10000}.{libpq % 10000}"
    if kind == "python":
        return Finding("psycopg", WARNING, text, "install psycopg[binary], which is faster")
    return Finding("psycopg", OK, text)


def _connection(words: str) -> Iterator[Finding]:
    began = time.monotonic()
    try:
        conn = db.connect()
    except db.OperationalError as error:
        remedy = "is the server up, and are host, port, user and password right?"
        yield Finding("database", ERROR, f"{words} does not answer: {facts.reason(error)}", remedy)
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
            _functions, _files, _outbox, _runs, _bad_rows, _leases, _queues, _lock_keys, _schedules,
            _workers, _dead_rows, _renewals,
        ):  # fmt: skip
            yield from _guarded(check.__name__.lstrip("_").replace("_", " "), check, conn)


Check = Callable[[db.Connection], Iterator[Finding]]


def _guarded(name: str, check: Check, conn: db.Connection) -> Iterator[Finding]:
    """Yield the findings of a check, or one finding if the server refused it.

    Raises `db.Error` if the connection is lost.
    """
    try:
        yield from check(conn)
    except db.Error as error:
        if conn.closed or conn.broken:
            raise
        yield Finding(name, ERROR, f"cannot be read: {facts.reason(error)}", _remedy(error))


def _remedy(error: db.Error) -> str:
    """Return the remedy for a statement that the server refused."""
    if facts.is_undefined(error):
        return "run `queue-workflows migrate`, which installs what is missing"
    return "grant this role what it needs, or ask again when the server is less busy"


def server(conn: db.Connection) -> Iterator[Finding]:
    """Report a server that is too old, a standby, or read-only."""
    found = facts.server(conn)
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
    found = facts.settings(conn, [*DANGERS, "autovacuum", "track_counts"])
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
    """Report how far this machine's clock is from the server's."""
    offsets: list[tuple[float, float]] = []
    for _ in range(3):
        before = datetime.datetime.now(datetime.timezone.utc)
        there = facts.clock(conn)
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
    """Report whether a notification comes back to a listener."""
    channel = f"queue_workflows_doctor_{os.getpid()}_{secrets.token_hex(4)}"
    began, used = time.monotonic(), 0.0
    ear = db.listen(channel, poll_s=LISTEN_WAIT_S)
    wakes = iter(ear)
    try:
        wake = next(wakes)
        if wake.reason == "connected":
            began = time.monotonic()
            used = facts.notify(conn, channel)
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
    rows = facts.transactions(conn)
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
    found = facts.connections(conn)
    share = found["used"] / max(1, found["allowed"])
    text = f"{found['used']} of {found['allowed']} in use"
    level = ERROR if share >= CONNECTIONS_ERROR else WARNING if share >= CONNECTIONS_WARN else OK
    remedy = "" if level == OK else "raise max_connections; a worker holds up to three"
    yield Finding("connections", level, text, remedy)


def _schema(conn: db.Connection) -> Iterator[Finding]:
    version, required = db.current_schema_version(), db.REQUIRED_VERSION
    if version < required:
        text = f"at version {version}, this code needs {required}"
        yield Finding("schema", ERROR, text, "run `queue-workflows migrate`")
    elif development_chain.version(conn) is not None:
        text = f"at version {version} of a development build, this code needs {required}"
        yield Finding("schema", ERROR, text, "run `queue-workflows migrate`")
    elif version > required:
        text = f"at version {version}, this code knows {required}"
        yield Finding("schema", WARNING, text, "upgrade queue_workflows here")
    else:
        yield Finding("schema", OK, f"at version {version}")


def _functions(conn: db.Connection) -> Iterator[Finding]:
    problems = functions.problems(conn)
    for problem in problems[:SHOWN_BAD]:
        if problem.is_newer:
            yield Finding("functions", WARNING, problem.text, "upgrade queue_workflows here")
        else:
            yield Finding(
                "functions", ERROR, problem.text, "`queue-workflows migrate` installs them"
            )
    if not problems:
        yield Finding("functions", OK, "functions and triggers are those of this version")


def _rights(conn: db.Connection) -> Iterator[Finding]:
    if missing := permissions.missing(conn):
        others = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        text = f"this role lacks {', '.join(missing[:5])}{others}"
        yield Finding("rights", ERROR, text, "GRANT them, or connect as the role that has them")
    else:
        yield Finding("rights", OK, "may read and write every table that is there")


def _files(conn: db.Connection) -> Iterator[Finding]:
    knob = config.OUT_ROOTS.variables[0]
    if roots := confinement.roots():
        yield Finding("files", OK, f"runs keep theirs in {os.pathsep.join(roots)}")
    elif submitters := permissions.submitters(conn):
        text = f"{', '.join(submitters)} may submit runs, and their out_dir may be any folder"
        remedy = f"set {knob} here and on every worker and orchestrator"
        yield Finding("files", WARNING, text, remedy)
    else:
        yield Finding("files", OK, "no role may do no more than submit runs")
    yield _outputs(facts.machines(conn))
    if schema := permissions.public_may_create(conn):
        text = f"every role may create functions in schema {schema}, which triggers could call"
        remedy = f"as the owner: REVOKE CREATE ON SCHEMA {schema} FROM PUBLIC"
        yield Finding("schema rights", WARNING, text, remedy)


def _outputs(machines: int) -> Finding:
    text = f"runs without an out_dir keep their files in {run_folder.folder()}"
    if machines < 2 or config.OUTPUTS_DIR.read():
        return Finding("outputs", OK, text)
    remedy = f"set {config.OUTPUTS_DIR.variables[0]} to a folder that all of them share, on each"
    return Finding("outputs", WARNING, f"{text}, on each of {machines} machines", remedy)


def _outbox(conn: db.Connection) -> Iterator[Finding]:
    found = facts.outbox(conn)
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
    found = facts.waiting_runs(conn)
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
    found = facts.lapsed(conn)
    if not found["n"] or found["since_s"] <= LAPSED_WARN_S:
        yield Finding("leases", OK, "none is left lapsed")
        return
    text = f"{output.counted(found['n'], 'job')} not taken back, {output.seconds(found['since_s'])}"
    yield Finding("leases", ERROR, f"{text} after the lease lapsed", "start queue-orchestrator")


def _queues(conn: db.Connection) -> Iterator[Finding]:
    rows = [
        row
        for row in facts.unserved(conn, config.STALE_WORKER_AFTER_S.read())
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
    rows = lock_queues.unserved(conn)
    if not rows:
        yield Finding("lock keys", OK, "none passed over a queue that no worker serves")
    for row in rows:
        queue = shlex.quote(row["queue"])
        remedy = (
            f"start queue-claim-worker --queue={queue}, `queue-workflows queues resume {queue}` if"
            f" it is paused, or `queue-workflows jobs cancel --queue {queue}`"
        )
        yield Finding("lock keys", WARNING, fleet.unserved_text(row), remedy)


def _schedules(conn: db.Connection) -> Iterator[Finding]:
    rows = schedules.troubled(conn=conn)
    if not rows:
        yield Finding("schedules", OK, "none fails, is overdue, or was missed")
    for row in rows:
        text = f"{row['name']}: {schedules.problem(row)}"
        yield Finding("schedules", WARNING, text, "`queue-workflows schedules list` has all of it")


def _workers(conn: db.Connection) -> Iterator[Finding]:
    if gone := facts.dead_workers(conn, config.STALE_WORKER_AFTER_S.read()):
        text = f"silent while holding jobs: {', '.join(gone)}"
        yield Finding("workers", WARNING, text, "restart them; their leases give the jobs back")
    else:
        yield Finding("workers", OK, "none is flagged dead")


def _dead_rows(conn: db.Connection) -> Iterator[Finding]:
    rows = facts.table_statistics(conn)
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
    rows = [row for row in facts.table_statistics(conn) if row["name"] in facts.RENEWED]
    shares = ", ".join(
        f"{row['name']} {row['hot'] / row['updates']:.0%}" for row in rows if row["updates"]
    )
    text = f"HOT updates: {shares or 'no updates yet'}"
    cold = [row["name"] for row in rows if _renewals_are_cold(row)]
    if named := facts.indexes_on_renewed(conn):
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
