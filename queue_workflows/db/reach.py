"""Where a DSN leads, and what a server's refusal to connect means."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from psycopg import pq

from queue_workflows import errors
from queue_workflows.db import pool

_DEFAULT_PORT = 5432
_MEANINGS = (
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
        """Whether it is a unix socket."""
        return self.host.startswith(("/", "@"))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.host}/.s.PGSQL.{self.port}" if self.local else f"{host}:{self.port}"


class Destination(NamedTuple):
    """What a DSN names; no targets where only libpq knows (a service, its default socket)."""

    targets: list[Target]
    user: str
    dbname: str
    sslmode: str
    probe_tls: bool
    """Whether a server can be asked for TLS beforehand."""


def destination(url: str) -> Destination:
    """Read a DSN, with what PGHOST and its like add. Raises `InvalidConfig` as `describe` does."""
    pool.describe(url)
    parts: dict[str, Any] = {
        option.keyword.decode(): option.val.decode()
        for option in pq.Conninfo.get_defaults()
        if option.val is not None
    }
    parts |= {
        option.keyword.decode(): option.val.decode()
        for option in pq.Conninfo.parse(url.encode())
        if option.val is not None
    }
    hosts = str(parts.get("hostaddr") or parts.get("host") or "").split(",")
    if any("@" in host[1:] for host in hosts):
        # Shown as a host it would be the rest of a password.
        raise errors.InvalidConfig(
            "the DSN cannot be read: a password with an @ in it is written %40 there, a / as %2F"
        )
    ports = str(parts.get("port") or _DEFAULT_PORT).split(",")
    if len(ports) == 1:
        ports *= len(hosts)
    targets = [
        Target(host, int(port or _DEFAULT_PORT))
        for host, port in zip(hosts, ports, strict=False)
        if host
    ]
    user = str(parts.get("user") or "")
    return Destination(
        targets=targets if len(targets) == len(hosts) else [],
        user=user,
        dbname=str(parts.get("dbname") or user),
        sslmode=str(parts.get("sslmode") or "prefer"),
        probe_tls=parts.get("sslnegotiation") != "direct",
    )


def meaning(message: str) -> str:
    """Which kind of refusal this is; `other` for words that nobody here knows.

    A failed connect has no SQLSTATE. With several hosts the last one's words are judged.
    """
    for name, pattern in _MEANINGS:
        if re.search(pattern, message):
            return name
    return "other"
