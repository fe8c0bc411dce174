"""Check the way to a DSN's server step by step, and explain a refusal to connect."""

from __future__ import annotations

import errno
import os
import re
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from queue_workflows import db, errors
from queue_workflows.admin.checks import ERROR, OK, WARNING, Finding, Findings
from queue_workflows.db import database_url, statements

TRIPS = 7
SLOW_TRIP_MS = 50.0
"""A worker needs two round trips or more per job, so 50 ms means less than ten jobs a second."""
_DEFAULT_PORT = 5432
_SSL_REQUEST = struct.pack("!ii", 8, 80877103)
"""PostgreSQL's SSLRequest message, which every server answers with one byte."""
_REFUSALS = (
    ("tls", r"SSL|certificate|GSSAPI negotiation"),
    ("no_password", r"no password supplied|fe_sendauth"),
    ("password", r"(?:password|PAM|LDAP|RADIUS|SASL) authentication failed|no such user"),
    ("peer", r"(?:Peer|Ident|GSSAPI|certificate|trust) authentication failed"),
    ("rule", r"no pg_hba\.conf entry|pg_hba\.conf rejects"),
    ("role", r'role ".*" does not exist|is not permitted to log in'),
    ("no_database", r'database ".*" does not exist|no such database|is not currently accepting'),
    ("no_connect", r"permission denied for database"),
    ("full", r"too many (?:clients|connections)|connection slots|no more connections allowed"),
    ("starting", r"database system is|not yet accepting connections"),
    ("session", r"session is (?:not )?read-only|server is (?:not )?in hot standby"),
    ("silent", r"timeout expired|server closed the connection|could not receive data"),
)


class Target(NamedTuple):
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


class Destination(NamedTuple):
    """The targets of a DSN; none if only libpq knows them (a service, its default socket)."""

    targets: list[Target]
    user: str
    dbname: str
    sslmode: str
    probe_tls: bool
    """Whether a client can request TLS from the server before the login."""


class Reply(NamedTuple):
    """The answer to a probe: what was found, and a remedy, which is "" if nothing is wrong."""

    text: str
    remedy: str = ""


def destination(url: str) -> Destination:
    """Return the servers of a DSN, with what PGHOST and the like add.

    Raises `InvalidConfig` for a DSN that cannot be read.
    """
    parts = database_url.options(url)
    hosts = (parts.get("hostaddr") or parts.get("host") or "").split(",")
    if any("@" in host[1:] for host in hosts):
        # Such a host is part of a password and must not be printed.
        raise errors.InvalidConfig(
            "the DSN cannot be read: a password with an @ in it is written %40 there, a / as %2F"
        )
    ports = parts.get("port", "").split(",")
    if len(ports) == 1:
        ports *= len(hosts)
    each = zip(hosts, ports, strict=False)
    targets = [Target(host, int(port or _DEFAULT_PORT)) for host, port in each if host]
    user = parts.get("user") or ""
    return Destination(
        targets=targets if len(targets) == len(hosts) else [],
        user=user,
        dbname=parts.get("dbname") or user,
        sslmode=parts.get("sslmode") or "prefer",
        probe_tls=parts.get("sslnegotiation") != "direct",
    )


def refusal(message: str) -> str:
    """Return the kind of a server's refusal to connect; `other` for an unknown message.

    A failed connect has no SQLSTATE, so that its words are all there is. With several hosts the
    last one's words count.
    """
    return next((kind for kind, pattern in _REFUSALS if re.search(pattern, message)), "other")


def resolve(target: Target) -> Reply:
    """Return the addresses of a host's name, or whether the folder of a unix socket exists."""
    if target.local:
        if target.host.startswith("@") or os.path.isdir(target.host):  # noqa: PTH112
            return Reply(f"{target.host} is a folder of sockets")
        return Reply(
            f"{target.host} is not a folder", "is the server on this machine, and its socket there?"
        )
    try:
        found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        remedy = f"`getent hosts {target.host}` must answer: fix the name, DNS or /etc/hosts"
        return Reply(f"{target.host} has no address here ({why})", remedy)
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    if addresses == [target.host]:
        return Reply(f"{target.host} is an address")
    return Reply(f"{target.host} is {', '.join(addresses)}")


def probe_port(target: Target, timeout_s: float) -> Reply:
    """Return whether anything accepts a connection at a target, or why nothing does."""
    try:
        _connected(target, timeout_s).close()
    except OSError as error:
        return _no_connection(target, error, timeout_s)
    return Reply(f"{target} answers")


def offers_tls(target: Target, timeout_s: float) -> bool | None:
    """Return whether a server offers TLS; None if what replies is not PostgreSQL.

    Raises TimeoutError if it accepts the connection and sends nothing.
    """
    try:
        with _connected(target, timeout_s) as sock:
            sock.settimeout(timeout_s)
            sock.sendall(_SSL_REQUEST)
            return {b"S": True, b"N": False}.get(sock.recv(1))
    except TimeoutError:
        raise
    except OSError:
        return None


def _connected(target: Target, timeout_s: float) -> socket.socket:
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


def _no_connection(target: Target, error: OSError, timeout_s: float) -> Reply:
    """Return what went wrong, and a remedy."""
    text = f"{target} does not answer ({error.strerror})"
    remedy = "see the network between here and there"
    if target.local:
        remedy = "start the server, or name the folder of its socket and its port"
        if error.errno == errno.EACCES:
            remedy = "let this user into the folder, or connect by TCP"
    elif isinstance(error, TimeoutError):
        text = f"{target} does not answer within {timeout_s:g} s"
        remedy = "a firewall drops it, or the machine is down: open the port from here to there"
    elif error.errno == errno.ECONNREFUSED:
        text = f"{target} refuses: nothing listens there"
        remedy = (
            "start the server; set listen_addresses in its postgresql.conf and restart it; is the "
            "port right?"
        )
    elif error.errno in {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}:
        text = f"no route to {target} ({error.strerror})"
        remedy = "put both machines in one network, or route between theirs"
    return Reply(text, remedy)


# --- the steps of `connect` ---------------------------------------------------------------------


def network(where: Destination, timeout_s: float) -> Findings:
    """Yield the steps before the login, about names and ports of the servers and TLS."""
    if not where.targets:
        yield Finding("name", OK, "no host is named: libpq's service or default socket")
        return
    step, good = _of_all("name", where.targets, resolve)
    yield step
    step, good = _of_all("port", good, lambda each: probe_port(each, timeout_s))
    yield step
    if good and not good[0].local and where.probe_tls and where.sslmode != "disable":
        yield _tls(good[0], where.sslmode, timeout_s)


def _of_all(
    name: str,
    targets: Iterable[Target],
    probe: Callable[[Target], Reply],
) -> tuple[Finding, list[Target]]:
    """Return one step for all servers of the DSN, and the good ones; it fails if none is good."""
    replies = [(target, probe(target)) for target in targets]
    good = [target for target, reply in replies if not reply.remedy]
    text = "; ".join(reply.text for _, reply in replies)
    remedy = next((reply.remedy for _, reply in replies if reply.remedy), "")
    level = OK if not remedy else WARNING if good else ERROR
    return Finding(name, level, text, remedy), good


def _tls(target: Target, sslmode: str, timeout_s: float) -> Finding:
    try:
        offered = offers_tls(target, timeout_s)
    except TimeoutError:
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


def refused(where: Destination, message: str) -> Findings:
    """Yield the step that a refused connection failed at, and those before it that passed."""
    user, dbname = where.user or "of this account", where.dbname or where.user
    kind = refusal(message)
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
        "full": "raise max_connections there; a worker holds two connections",
        "starting": "wait until it has started; see the server's log",
        "session": "no server of the DSN is what target_session_attrs wants",
        "silent": "it takes connections and does not answer: see the server's log",
        "other": "see the server's log",
    }
    step = {"tls": "tls", "session": "server"}.get(kind, "login")
    if kind in {"no_database", "no_connect"}:
        yield Finding("login", OK, f"as {user}")
        step = "database"
    yield Finding(step, ERROR, message, remedies[kind])


def round_trip(conn: db.Connection) -> Finding:
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
