"""Define `queue-workflows doctor`, `connect` and `audit`, which find faults and their remedies."""

from __future__ import annotations

import errno
import functools
import os
import platform
import re
import socket
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from queue_workflows import __version__, config, db, errors
from queue_workflows.admin import audit as invariants
from queue_workflows.admin import checks, permissions
from queue_workflows.admin.checks import ERROR, OK, WARNING, Finding, Findings
from queue_workflows.cli import command, define, output
from queue_workflows.db import database_url, statements
from queue_workflows.runtime import app_loading, clock, entry_point, masking
from queue_workflows.types import JsonDict

_PURPOSE = f"--for PURPOSE {'|'.join(permissions.PURPOSES)}  What the role is for."


@define.command("doctor", _PURPOSE, reads=False)
def doctor(purpose: str = "work", *, app: str | None, as_json: bool) -> define.Shown:
    """Check this machine, the server and unfinished work. Exit code 1 for an error."""
    entry_point.setup_logging("error")
    app_loading.load_app(app)
    found = _masked(_examine_all(purpose), lambda found: as_json or _print(found))
    counts = {level: sum(f.level == level for f in found) for level in (ERROR, WARNING)}
    listed = [finding._asdict() for finding in found]
    report = {"findings": listed, "errors": counts[ERROR], "warnings": counts[WARNING]}
    text = ", ".join(output.counted(n, word) for word, n in counts.items())
    return define.Shown(report, lambda: output.echo(text), int(counts[ERROR] > 0))


def _examine_all(purpose: str) -> Findings:
    """Yield every finding in order; end early if nothing further can be checked."""
    python = platform.python_version()
    yield Finding("package", OK, f"queue_workflows {__version__}, Python {python}")
    version, kind, libpq = checks.driver()
    text = f"psycopg {version} ({kind}), libpq {libpq // 10000}.{libpq % 10000}"
    if kind == "python":
        yield Finding("psycopg", WARNING, text, "install psycopg[binary], which is faster")
    else:
        yield Finding("psycopg", OK, text)
    try:
        with command.database(create=False) as words:
            began = time.monotonic()
            try:
                conn = db.connect()
            except db.OperationalError as error:
                text = f"{words} does not answer: {checks.reason(error)}"
                remedy = "is the server up, and are host, port, user and password right?"
                yield Finding("database", ERROR, text, remedy)
                return
            with conn:
                took_ms = (time.monotonic() - began) * 1000
                yield Finding("database", OK, f"{words} answers within {took_ms:.0f} ms")
                yield from checks.findings(conn, purpose)
    except errors.QueueWorkflowsError as error:
        yield Finding("database", ERROR, str(error))
    except db.OperationalError as error:
        yield Finding("database", ERROR, f"the connection was lost: {checks.reason(error)}")


def _masked(found: Findings, each: Callable[[Finding], object]) -> list[Finding]:
    """Return the findings without secrets, each after it was given to `each`."""
    safe: list[Finding] = []
    for finding in found:
        safe.append(Finding(*(masking.mask(part) for part in finding)))
        each(safe[-1])
    return safe


def _print(finding: Finding) -> None:
    """Print a finding, its remedy on the same line."""
    remedy = f"; {finding.remedy}" if finding.remedy else ""
    text = output.line(f"{finding.text}{remedy}", 1000)
    output.echo(f"{finding.level:7}  {finding.check:18}  {text}")


TIMEOUT_S = 5.0
SHOWN = 500
"""Characters of a remedy that are printed. A longer line is cut, and then it cannot be run."""
STEPS = (
    "name", "port", "tls", "login", "database", "server", "schema", "rights", "clock", "listen",
    "round trip",
)  # fmt: skip
"""The steps in the order of their checks."""


@define.command(
    "connect",
    "DSN  The database to check; default: the configured one, which `ps` does not show.",
    _PURPOSE,
    """--timeout SECONDS 0.1..  How long each step may take.
    --sql  Print only the GRANTs and REVOKEs, as an SQL script.""",
    reads=False,
)
def connect(
    dsn: str | None = None, purpose: str = "work", timeout: float = TIMEOUT_S, as_sql: bool = False,
    *, app: str | None, as_json: bool,
) -> int | define.Shown:  # fmt: skip
    """Check the connection to the database, step by step."""
    if as_sql and as_json:
        raise errors.InvalidConfig("--sql and --json cannot be used together")
    entry_point.setup_logging("error")
    app_loading.load_app(app)
    if dsn is not None:
        # Parse it before using it, so that an error names the argument and not a variable.
        db.describe(dsn)
        os.environ[config.db_url_variables()[0]] = dsn
    with command.database(create=False) as words:
        if as_sql:
            return _script(purpose)
        url = db.db_url()
        return _report(
            words, examine(url, purpose, timeout, _destination(url)), purpose, as_json=as_json
        )


def _script(purpose: str) -> int:
    """Print what gives this role the rights for a purpose, one statement a line."""
    with db.connect() as conn:
        seen = statements.doctor.schema_seen(conn)
        if seen["found"]:
            given = checks.rights_sql(conn, purpose, seen["role"])
        elif seen["elsewhere"]:
            # The catalog shows this role nothing of the tables before it has this right.
            usage = permissions.MissingRight("USAGE", "SCHEMA", seen["elsewhere"][0])
            given = permissions.grants([usage], seen["role"])
        else:
            raise errors.InvalidConfig(f"the database has no schema yet: {checks.MIGRATE}")
    for statement in given:
        output.echo(f"{statement};")
    return 0


def _report(words: str, steps: Findings, purpose: str, *, as_json: bool) -> define.Shown:
    def show(step: Finding) -> None:
        if len(step.remedy) > SHOWN:
            script = f"`queue-workflows connect --for {purpose} --sql`"
            step = step._replace(remedy=f"run what {script} prints, as the owner of the tables")
        _print(step)

    if not as_json:
        output.echo(words)
    found = _masked(steps, lambda step: as_json or show(step))
    failed = next((step.check for step in found if step.level == ERROR), None)
    seen = {step.check for step in found}
    left = [step for step in STEPS if step not in seen] if failed else []
    listed = [step._asdict() for step in found]
    return define.Shown(
        {"database": words, "failed": failed, "steps": listed, "not_reached": left},
        lambda: left and output.echo(f"not checked: {', '.join(left)}"),
        int(failed is not None),
    )


def examine(
    url: str, purpose: str, timeout_s: float, where: _Destination | None = None
) -> Findings:
    """Yield the steps in order, up to the first with level `error`."""
    for step in _steps(url, purpose, timeout_s, where or _destination(url)):
        yield step
        if step.level == ERROR:
            return


def _steps(url: str, purpose: str, timeout_s: float, where: _Destination) -> Findings:
    yield from _network(where, timeout_s)
    conn: db.Connection | None = None
    try:
        conn = db.connect(url=url, connect_s=max(2.0, timeout_s), timeout_s=max(1.0, timeout_s))
        with conn:
            ssl = ", with TLS" if conn.pgconn.ssl_in_use else ""
            yield Finding("login", OK, f"as {conn.info.user}{ssl}")
            yield Finding("database", OK, conn.info.dbname)
            yield checks.server(conn)
            yield checks.schema(conn, purpose)
            if purpose == "submit":
                knob = config.OUT_ROOTS.variables[0]
                where_set = "on workers and orchestrators: runs keep files there"
                yield Finding("files", OK, f"set {knob}=/folder[:/folder] {where_set}")
            yield checks.rights_of(conn, purpose)
            for check in (checks.clock, checks.listen, _round_trip):
                yield check(conn)
    except errors.InvalidConfig as error:
        yield Finding("database", ERROR, str(error))
    except db.Error as error:
        if conn is None:
            yield from _refused(where, " ".join(str(error).split()))
        else:
            remedy = "try again; see the server's log"
            yield Finding("server", ERROR, f"it broke off: {checks.reason(error)}", remedy)


# --- the way to the server ---------------------------------------------------------------------

TRIPS = 7
SLOW_TRIP_MS = 50.0
"""A worker needs two round trips or more per job, so 50 ms means less than ten jobs a second."""
_DEFAULT_PORT = 5432
_SSL_REQUEST = struct.pack("!ii", 8, 80877103)
"""PostgreSQL's SSLRequest message, which every server answers with one byte."""
_REFUSALS = (
    (r"no password supplied|fe_sendauth", "login",
     "put it in the DSN, in PGPASSWORD, or in ~/.pgpass (mode 0600)"),
    (r"(?:password|PAM|LDAP|RADIUS|SASL) authentication failed|no such user", "login",
     "as a superuser there: ALTER ROLE {user} PASSWORD '...' (or CREATE ROLE)"),
    (r"(?:Peer|Ident|GSSAPI|certificate|trust) authentication failed", "login",
     "its pg_hba.conf wants another kind of login; name a user with a password"),
    (r"no pg_hba\.conf entry|pg_hba\.conf rejects", "login",
     "add `host {dbname} {user} <address of this machine>/32 scram-sha-256` to its pg_hba.conf, "
     "and SELECT pg_reload_conf()"),
    (r'role ".*" does not exist|is not permitted to log in', "login",
     "as a superuser there: CREATE ROLE {user} LOGIN PASSWORD '...'"),
    (r'database ".*" does not exist|no such database|is not currently accepting', "database",
     "as a superuser there: CREATE DATABASE {dbname} OWNER {user}"),
    (r"permission denied for database", "database", "GRANT CONNECT ON DATABASE {dbname} TO {user}"),
    (r"too many (?:clients|connections)|connection slots|no more connections allowed", "login",
     "raise max_connections there; a worker holds two connections"),
    (r"database system is|not yet accepting connections", "login",
     "wait until it has started; see the server's log"),
    (r"session is (?:not )?read-only|server is (?:not )?in hot standby", "server",
     "no server of the DSN is what target_session_attrs wants"),
    (r"SSL|certificate|GSSAPI negotiation", "tls", "see sslmode and sslrootcert in the DSN"),
    (r"timeout expired|server closed the connection|could not receive data", "login",
     "it takes connections and does not answer: see the server's log"),
    ("", "login", "see the server's log"),
)  # fmt: skip
"""Words of a refused connection, the step that it ends, and the remedy; the first that fit count.

A failed connect has no SQLSTATE, only words. With several hosts the last one's words count. TLS
comes after the words of a server's answer: its "no pg_hba.conf entry" ends with "SSL encryption",
and libpq reports the tries with and without TLS together.
"""


class _Target(NamedTuple):
    """A server of a DSN: host (a name, an address, or the folder of a unix socket), and port."""

    host: str
    port: int

    @property
    def local(self) -> bool:
        """Return whether it is a unix socket."""
        return self.host.startswith(("/", "@"))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.host}/.s.PGSQL.{self.port}" if self.local else f"{host}:{self.port}"


class _Destination(NamedTuple):
    """The targets of a DSN; none if only libpq knows them (a service, its default socket)."""

    targets: list[_Target]
    user: str
    dbname: str
    sslmode: str
    probe_tls: bool
    """Whether a client can request TLS from the server before the login."""


def _destination(url: str) -> _Destination:
    """Return the servers of a DSN, with what PGHOST and the like add.

    Raises `InvalidConfig` for a DSN or a port that cannot be read.
    """
    parts = database_url.options(url)
    hosts = (parts.get("hostaddr") or parts.get("host") or "").split(",")
    if any("@" in host[1:] for host in hosts):
        # Such a host is part of a password and must not be printed.
        raise errors.InvalidConfig(
            "the DSN cannot be read: a password with an @ in it is written %40 there, a / as %2F"
        )
    ports = parts.get("port", "").split(",")
    for port in filter(None, ports):
        if not (port.isdecimal() and 0 < int(port) < 65536):
            # Not one of the DSN, whose ports are checked when it is read.
            raise errors.InvalidConfig(
                f"{port[:20]!r} is not a port: correct PGPORT, or the port in the service file"
            )
    if len(ports) == 1:
        ports *= len(hosts)
    each = zip(hosts, ports, strict=False)
    targets = [_Target(host, int(port or _DEFAULT_PORT)) for host, port in each if host]
    user = parts.get("user") or ""
    return _Destination(
        targets=targets if len(targets) == len(hosts) else [],
        user=user,
        dbname=parts.get("dbname") or user,
        sslmode=parts.get("sslmode") or "prefer",
        probe_tls=parts.get("sslnegotiation") != "direct",
    )


def _resolve(target: _Target) -> Finding:
    """Return the addresses of a host's name, or whether the folder of a unix socket exists."""
    if target.local:
        if target.host.startswith("@") or os.path.isdir(target.host):  # noqa: PTH112
            return Finding("name", OK, f"{target.host} is a folder of sockets")
        remedy = "is the server on this machine, and its socket there?"
        return Finding("name", ERROR, f"{target.host} is not a folder", remedy)
    try:
        found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        remedy = f"`getent hosts {target.host}` must answer: fix the name, DNS or /etc/hosts"
        return Finding("name", ERROR, f"{target.host} has no address here ({why})", remedy)
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    if addresses == [target.host]:
        return Finding("name", OK, f"{target.host} is an address")
    return Finding("name", OK, f"{target.host} is {', '.join(addresses)}")


def _probe_port(target: _Target, timeout_s: float) -> Finding:
    """Return whether anything accepts a connection at a target, or why nothing does."""
    try:
        _connected(target, timeout_s).close()
        return Finding("port", OK, f"{target} answers")
    except OSError as error:
        failure = error
    text = f"{target} does not answer ({failure.strerror})"
    remedy = "see the network between here and there"
    if target.local:
        remedy = "start the server, or name the folder of its socket and its port"
        if failure.errno == errno.EACCES:
            remedy = "let this user into the folder, or connect by TCP"
    elif isinstance(failure, TimeoutError):
        text = f"{target} does not answer within {timeout_s:g} s"
        remedy = "a firewall drops it, or the machine is down: open the port from here to there"
    elif failure.errno == errno.ECONNREFUSED:
        text = f"{target} refuses: nothing listens there"
        remedy = (
            "start the server; set listen_addresses in its postgresql.conf and restart it; is the "
            "port right?"
        )
    elif failure.errno in {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}:
        text = f"no route to {target} ({failure.strerror})"
        remedy = "put both machines in one network, or route between theirs"
    return Finding("port", ERROR, text, remedy)


def _connected(target: _Target, timeout_s: float) -> socket.socket:
    if not target.local:
        return socket.create_connection((target.host, target.port), timeout_s)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(f"{target.host}/.s.PGSQL.{target.port}".replace("@", "\0", 1))
    except BaseException:
        sock.close()
        raise
    return sock


def _network(where: _Destination, timeout_s: float) -> Findings:
    """Yield the steps before the login, about names and ports of the servers and TLS."""
    if not where.targets:
        yield Finding("name", OK, "no host is named: libpq's service or default socket")
        return
    step, good = _of_all(where.targets, _resolve)
    yield step
    step, good = _of_all(good, lambda each: _probe_port(each, timeout_s))
    yield step
    if good and not good[0].local and where.probe_tls and where.sslmode != "disable":
        yield _tls(good[0], where.sslmode, timeout_s)


def _of_all(
    targets: Sequence[_Target], probe: Callable[[_Target], Finding]
) -> tuple[Finding, list[_Target]]:
    """Return one step for all servers of the DSN, and the good ones; it fails if none is good."""
    found = [probe(target) for target in targets]
    good = [target for target, each in zip(targets, found, strict=True) if each.level == OK]
    step = next((each for each in found if each.level == ERROR), found[0])
    level = WARNING if step.level == ERROR and good else step.level
    return step._replace(level=level, text="; ".join(each.text for each in found)), good


def _tls(target: _Target, sslmode: str, timeout_s: float) -> Finding:
    """Ask a server by an SSLRequest whether it offers TLS."""
    offered: bool | None = None
    try:
        with _connected(target, timeout_s) as sock:
            sock.settimeout(timeout_s)
            sock.sendall(_SSL_REQUEST)
            offered = {b"S": True, b"N": False}.get(sock.recv(1))
    except TimeoutError:
        text = f"{target} accepts connections and sends nothing for {timeout_s:g} s"
        return Finding("tls", ERROR, text, "the server hangs, or it is not PostgreSQL")
    except OSError:
        pass  # it has closed the connection
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


def _refused(where: _Destination, message: str) -> Findings:
    """Yield the steps of a refused connection that passed, and the step that failed."""
    user = where.user or "of this account"
    step, remedy = refusal(message)
    if step == "database":
        yield Finding("login", OK, f"as {user}")
    yield Finding(step, ERROR, message, remedy.format(user=user, dbname=where.dbname))


def refusal(message: str) -> tuple[str, str]:
    """Return the step that a server's refusal to connect ends, and the form of the remedy."""
    return next((step, remedy) for words, step, remedy in _REFUSALS if re.search(words, message))


def _round_trip(conn: db.Connection) -> Finding:
    took: list[float] = []
    for _ in range(TRIPS):
        began = time.monotonic()
        statements.doctor.clock(conn)
        took.append((time.monotonic() - began) * 1000)
    median_ms = statistics.median(took)
    text = f"{median_ms:.2f} ms (fastest {min(took):.2f}, slowest {max(took):.2f})"
    if median_ms > SLOW_TRIP_MS:
        remedy = "run workers nearer to the server; each job takes two round trips and more"
        return Finding("round trip", WARNING, text, remedy)
    return Finding("round trip", OK, text)


# --- the invariants ----------------------------------------------------------------------------

OFFENDERS = 5
"""Rows shown for each broken invariant; a few are enough to start from."""
_MARKS = {"ok": "ok", "broken": "BROKEN", "unfinished": "UNFINISHED", "elsewhere": "-"}


@define.command("audit", "--since TIME  How far to look back: 90m, 24h, 7d, or `all`.", reads=False)
def audit(since: str = "24h", *, app: str | None) -> define.Shown:
    """Check the invariants; exit code 1 if one is broken.

    It only reads, and is safe on a live system.
    """
    span = clock.span(since)
    if span is None and since != "all":
        raise errors.InvalidConfig(f"--since {since} should look like 90m, 24h, 7d, or be `all`")
    with command.reading(app) as database, db.connect() as conn:
        since_s = None if span is None else span.total_seconds()
        values = invariants.parameters(conn, since_s=since_s, limit=OFFENDERS + 1)
        found = [_invariant(conn, each, values) for each in invariants.INVARIANTS]
        bad = checks.found_bad(conn, OFFENDERS)
    rows = [row._asdict() for row in bad]
    report = {"database": database, "since": since, "invariants": found, "bad_rows": rows}
    is_bad = any(each["state"] in ("broken", "unfinished") for each in found)
    return define.Shown(report, functools.partial(_show_audit, found, bad), int(is_bad))


def _invariant(conn: db.Connection, invariant: invariants.Invariant, values: JsonDict) -> JsonDict:
    """Check an invariant; return its entry of `--json`: its state, a note and its offenders."""
    began = time.monotonic()
    note, found, state = invariant.note, list[invariants.Offender](), "elsewhere"
    if invariant.statement is not None:
        outcome = invariants.check(conn, invariant, values)
        if isinstance(outcome, str):
            state, note = "unfinished", f"{outcome}: try a shorter --since"
        else:
            state, found = ("broken" if outcome else "ok"), outcome
    return {
        "invariant": invariant.number, "name": invariant.name, "sentence": invariant.sentence,
        "state": state, "note": note, "offenders": [each._asdict() for each in found[:OFFENDERS]],
        "more": len(found) > OFFENDERS, "seconds": round(time.monotonic() - began, 3),
    }  # fmt: skip


def _show_audit(found: list[JsonDict], bad: list[checks.BadRow]) -> None:
    """Print a line for each invariant, the offenders below it, and rows that break none."""
    for each in found:
        note = f" ({each['note']})" if each["note"] else ""
        mark = _MARKS[each["state"]]
        output.echo(f"invariant {each['invariant']:2}  {mark:10}  {each['sentence']}{note}")
        for offender in each["offenders"]:
            output.echo(f"          {output.line(offender['id'])}: {output.line(offender['text'])}")
        if each["more"]:
            output.echo("          ... and others")
    for row in bad:
        text = output.line(f"{row.kind} {row.id}: {row.text}; {row.command}", 1000)
        output.echo(f"bad row {text}")
