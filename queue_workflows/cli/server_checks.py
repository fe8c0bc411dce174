"""Check the server: version, settings, clock, notifications, transactions and connections."""

from __future__ import annotations

import datetime
import os
import secrets
import time

from queue_workflows import config, db
from queue_workflows.admin import doctor as facts
from queue_workflows.cli import output
from queue_workflows.cli.findings import ERROR, OK, WARNING, Finding, Findings
from queue_workflows.db import statements

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
    pooled = facts.is_pooled(conn)
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
