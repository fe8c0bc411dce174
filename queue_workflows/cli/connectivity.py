"""Test the connection to a DSN's server by plain sockets, and explain a refusal to connect."""

from __future__ import annotations

import errno
import os
import re
import socket
import struct
from typing import NamedTuple

from queue_workflows import errors
from queue_workflows.db import database_url

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
