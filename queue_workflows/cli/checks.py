"""List the checks of the server and its tables, and of the way to it, for `doctor` and `connect`.

Each yields findings with a level, and with a remedy if something is wrong.
"""

from __future__ import annotations

import datetime
import os
import secrets
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from queue_workflows import config, db
from queue_workflows.admin import doctor as facts
from queue_workflows.admin import permissions
from queue_workflows.cli import output
from queue_workflows.db import connectivity, statements
from queue_workflows.runtime import masking

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
"""Above this, a restart of the fleet (three connections per worker) may fail."""
DANGERS = {
    "fsync": "a crash of the machine may destroy the database",
    "full_page_writes": "a crash of the machine may leave torn pages",
    "synchronous_commit": "a crash of the server loses acknowledged commits",
}
DEAD_ROWS_WARN, DEAD_SHARE_WARN = 10_000, 0.5
"""Autovacuum starts at a fifth. At half of a large table it is too slow, or blocked."""
UPDATES_JUDGED = 1_000
"""With fewer updates a ratio is meaningless."""
HOT_SHARE_WARN = 0.5
"""Share of HOT updates of `workers`: all of them are renewals and should be HOT."""
COLD_UPDATES_WARN = 10.0
"""Updates per job that are not HOT: its claim and its end are two, each requeue adds two."""


class Finding(NamedTuple):
    """One line: what was checked, its level (`ok`, `warning`, `error`), and what to do."""

    check: str
    level: str
    text: str
    remedy: str = ""


Findings: TypeAlias = Iterator[Finding]


def show(finding: Finding) -> None:
    """Print a finding, its remedy on the same line."""
    remedy = f"; {finding.remedy}" if finding.remedy else ""
    text = output.line(f"{finding.text}{remedy}", 1000)
    output.echo(f"{finding.level:7}  {finding.check:18}  {text}")


def masked(found: Findings, each: Callable[[Finding], object]) -> list[Finding]:
    """Return the findings without secrets, each after it was given to `each`."""
    safe: list[Finding] = []
    for finding in found:
        safe.append(Finding(*(masking.mask(part) for part in finding)))
        each(safe[-1])
    return safe


# --- the way to the server --------------------------------------------------------------------


def network(where: connectivity.Destination, timeout_s: float) -> Findings:
    """Yield the steps before the login: the names and ports of the servers, and TLS."""
    if not where.targets:
        yield Finding("name", OK, "no host is named: libpq's service or default socket")
        return
    step, good = _of_all(
        "name", [(target, connectivity.resolve(target)) for target in where.targets]
    )
    yield step
    step, good = _of_all(
        "port", [(target, connectivity.probe_port(target, timeout_s)) for target in good]
    )
    yield step
    if not good:
        return
    target = good[0]
    if not target.local and where.probe_tls and where.sslmode != "disable":
        yield _tls(target, where.sslmode, timeout_s)


def _of_all(
    name: str, replies: list[tuple[connectivity.Target, connectivity.Reply]]
) -> tuple[Finding, list[connectivity.Target]]:
    """Return one step for all servers of the DSN, and the good ones; it fails if none is good."""
    good = [target for target, reply in replies if not reply.remedy]
    text = "; ".join(reply.text for _, reply in replies)
    remedy = next((reply.remedy for _, reply in replies if reply.remedy), "")
    level = OK if not remedy else WARNING if good else ERROR
    return Finding(name, level, text, remedy), good


def _tls(target: connectivity.Target, sslmode: str, timeout_s: float) -> Finding:
    try:
        offered = connectivity.offers_tls(target, timeout_s)
    except connectivity.NoReply:
        text = f"{target} accepts connections and sends nothing for {timeout_s:g} s"
        return Finding("tls", ERROR, text, "the server hangs, or it is not PostgreSQL")
    if offered is None:
        text = f"the server at {target} is not PostgreSQL"
        return Finding("tls", ERROR, text, "name the port of the server or of its pooler")
    if offered:
        return Finding("tls", OK, f"offered, sslmode={sslmode}")
    if sslmode.startswith(("require", "verify")):
        remedy = "set ssl = on in its postgresql.conf, or sslmode=prefer in the DSN"
        return Finding("tls", ERROR, f"sslmode={sslmode}, and the server offers none", remedy)
    if target.host in {"127.0.0.1", "::1", "localhost"}:
        return Finding("tls", OK, "none, on this machine")
    text = "none: what is sent and received can be read on the way"
    return Finding("tls", WARNING, text, "set ssl = on in its postgresql.conf")


def refused(where: connectivity.Destination, message: str) -> Findings:
    """Yield the step that a refused connection failed at, and those before it that passed."""
    user, dbname = where.user or "of this account", where.dbname or where.user
    kind = connectivity.refusal(message)
    remedies = {
        "tls": "see sslmode and sslrootcert in the DSN",
        "no_password": "put it in the DSN, in PGPASSWORD, or in ~/.pgpass (mode 0600)",
        "password": f"as a superuser there: ALTER ROLE {user} PASSWORD '...' (or CREATE ROLE)",
        "peer": "its pg_hba.conf wants another kind of login; name a user with a password",
        "rule": (
            f"add `host {dbname} {user} <address of this machine>/32 scram-sha-256` to its "
            "pg_hba.conf, and SELECT pg_reload_conf()"
        ),
        "role": f"as a superuser there: CREATE ROLE {user} LOGIN PASSWORD '...'",
        "no_database": f"as a superuser there: CREATE DATABASE {dbname} OWNER {user}",
        "no_connect": f"GRANT CONNECT ON DATABASE {dbname} TO {user}",
        "full": "raise max_connections there; a worker holds up to three connections",
        "starting": "wait until it has started; see the server's log",
        "session": "no server of the DSN is what target_session_attrs wants",
        "silent": "it takes connections and does not answer: see the server's log",
        "other": "see the server's log",
    }
    if kind in {"no_database", "no_connect"}:
        yield Finding("login", OK, f"as {user}")
        step = "database"
    else:
        step = {"tls": "tls", "session": "server"}.get(kind, "login")
    yield Finding(step, ERROR, message, remedies[kind])


# --- the server --------------------------------------------------------------------------------


def server(conn: db.Connection) -> Findings:
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


def settings(conn: db.Connection) -> Findings:
    """Report settings that endanger the data or slow down the queue."""
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


def clock(conn: db.Connection) -> Findings:
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


def listen(conn: db.Connection) -> Findings:
    """Report whether a notification comes back to a listener."""
    if config.POLL_ONLY.read():
        text = f"{config.POLL_ONLY.variables[0]} is set: all processes poll, through a pooler too"
        yield Finding("listen", OK, text)
        return
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
    # A pooler answers if another process than the announced one executes.
    pooled = statements.doctor.backend_pid(conn) != conn.info.backend_pid
    if wake.reason != "notify" and pooled:
        text = f"a pooler in transaction mode is in between: no notification in {LISTEN_WAIT_S:g} s"
        remedy = (
            f"set {config.POLL_ONLY.variables[0]}=1 for every process that connects through it, "
            "or name the server itself in the DSN, or a pooler in session mode"
        )
        yield Finding("listen", ERROR, text, remedy)
    elif wake.reason != "notify":
        remedy = "connect directly, or through a pooler in session mode; until then workers poll"
        yield Finding("listen", WARNING, f"no notification within {LISTEN_WAIT_S:g} s", remedy)
    elif used > NOTIFY_QUEUE_WARN:
        remedy = "end the oldest transaction of a session that listens"
        yield Finding("listen", WARNING, f"the server's queue is {used:.0%} full", remedy)
    else:
        way = ", through a pooler" if pooled else ""
        yield Finding("listen", OK, f"a notification came back within {took_ms:.1f} ms{way}")


def transactions(conn: db.Connection) -> Findings:
    """Report the oldest open transaction if it is too old, or idle."""
    rows = statements.doctor.transactions(conn)
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


def connections(conn: db.Connection) -> Findings:
    """Report how many of the server's connections are in use."""
    found = statements.doctor.connections(conn)
    share = found["used"] / max(1, found["allowed"])
    text = f"{found['used']} of {found['allowed']} in use"
    level = ERROR if share >= CONNECTIONS_ERROR else WARNING if share >= CONNECTIONS_WARN else OK
    remedy = "" if level == OK else "raise max_connections; a worker holds up to three"
    yield Finding("connections", level, text, remedy)


def rights(conn: db.Connection, purpose: str) -> Findings:
    """Report the rights that this role lacks for a purpose, or has and does not need."""
    lacks = permissions.lacking(conn, purpose)
    excess = permissions.excessive(conn, purpose)
    if not lacks and not excess:
        yield Finding("rights", OK, f"all that it takes to {purpose}")
        return
    role = statements.doctor.schema_seen(conn)["role"]
    parts = [
        f"{verb} {_listed([f'{one.right} on {one.name}' for one in found])}"
        for verb, found in (("lacks", lacks), ("need not have", excess))
        if found
    ]
    text = f"to {purpose}, {role} {' and '.join(parts)}"
    yield Finding("rights", ERROR, text, "; ".join(rights_sql(conn, purpose, role)))


def rights_sql(conn: db.Connection, purpose: str, role: str) -> list[str]:
    """Return the statements that give a role the rights for a purpose, and no others."""
    # A REVOKE on a table removes the rights to its columns too, so the GRANTs come after it.
    return [
        *permissions.revokes(permissions.excessive(conn, purpose)),
        *permissions.grants(permissions.lacking(conn, purpose), role),
    ]


def _listed(found: list[str]) -> str:
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return f"{', '.join(found[:5])}{more}"


# --- tables that are updated often -------------------------------------------------------------


def dead_rows(conn: db.Connection) -> Findings:
    """Report tables that autovacuum leaves bloated, and those for which it is off."""
    rows = statements.doctor.table_statistics(conn, tables=facts.HOT_TABLES)
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


def renewals(conn: db.Connection) -> Findings:
    """Report renewals that are no HOT updates, and the indexes that make them so."""
    rows = [
        row
        for row in statements.doctor.table_statistics(conn, tables=facts.HOT_TABLES)
        if row["name"] in facts.RENEWED
    ]
    shares = ", ".join(
        f"{row['name']} {row['hot'] / row['updates']:.0%}" for row in rows if row["updates"]
    )
    text = f"HOT updates: {shares or 'no updates yet'}"
    cold = [row["name"] for row in rows if _are_cold(row)]
    if named := facts.indexes_on_renewed(conn):
        text = f"renewals write what is indexed by {', '.join(named)}"
        yield Finding("renewals", WARNING, text, "drop these indexes")
    elif cold:
        remedy = "look for long transactions and full pages: VACUUM, keep the fillfactor"
        yield Finding("renewals", WARNING, f"{text}; too few for {', '.join(cold)}", remedy)
    else:
        yield Finding("renewals", OK, text)


def _are_cold(row: dict[str, int]) -> bool:
    if row["updates"] < UPDATES_JUDGED:
        return False
    if str(row["name"]) == "workers":
        return row["hot"] < HOT_SHARE_WARN * row["updates"]
    return row["updates"] - row["hot"] > COLD_UPDATES_WARN * max(1, row["inserts"])
