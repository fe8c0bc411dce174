"""Find the DSN of this process, parse it, and describe its database without the password."""

from __future__ import annotations

import os
import re
from typing import Any

import psycopg
import psycopg.conninfo
from psycopg import pq

from queue_workflows import config, errors

CONNECT_TIMEOUT_S = 10
"""Default timeout in seconds for opening a connection, which is longer than a busy server needs and
short enough for loops that retry."""
_UNKNOWN_OPTION = re.compile(r'invalid (?:URI query parameter|connection option)[: ]+"(\w+)"')
_SECRET_BEFORE = re.compile(r"pass\w*\s*=|://\w*:\D[^@]*$", re.IGNORECASE)


def db_url() -> str:
    """Return the DSN from the environment, or the embedded server's if that is requested.

    Raises `DatabaseUrlMissing`, which names the variable and explains the embedded server, and
    `InvalidConfig` for a DSN beside `--db`, which names a database of the embedded server.
    """
    url, name = config.database_url(), config.get_config().embedded_db
    if url is not None and name:
        raise errors.InvalidConfig(
            f"--db {name} names a database of the embedded server, and "
            f"{' or '.join(config.db_url_variables())} is set to a server of yours: leave one of "
            "them out"
        )
    if url is not None:
        return url
    if config.embedded_wanted():
        from queue_workflows.db import databases

        return databases.url()
    raise errors.DatabaseUrlMissing(
        f"no database: set {' or '.join(config.db_url_variables())} to a PostgreSQL DSN, or ask "
        "for the embedded server with --embedded, configure(embedded=True) or "
        "QUEUE_WORKFLOWS_EMBEDDED=1"
    )


def describe(url: str | None = None) -> str:
    """Return the name of the database without a password: `name at host:port`."""
    parts = parsed(url or db_url())
    host = parts.get("host") or "the default socket"
    port = f":{parts['port']}" if parts.get("port") else ""
    return f"database {parts.get('dbname') or parts.get('user') or 'default'} at {host}{port}"


def parsed(url: str) -> dict[str, Any]:
    """Return the parts of a DSN. Raises `InvalidConfig` without the DSN, which has a password."""
    try:
        parts = dict(psycopg.conninfo.conninfo_to_dict(url))
    except psycopg.ProgrammingError as error:
        # The parser's own message would contain the DSN with its password.
        raise _unreadable(url, _unknown_option(url, str(error))) from None
    for port in str(parts.get("port") or "").split(","):
        if port and not (port.isdecimal() and 0 < int(port) < 65536):
            # If a password contains a slash, its start is parsed as the port.
            named = "" if "@" in url else f": {port[:20]!r} is not a port"
            raise _unreadable(url, named)
    return parts


def keywords(url: str) -> str:
    """Return a DSN as the keywords and values that psql takes. Raises `InvalidConfig`."""
    return psycopg.conninfo.make_conninfo(**parsed(url))


def _unknown_option(url: str, message: str) -> str:
    """Return the option that the parser does not know, unless it may be part of the password."""
    found = _UNKNOWN_OPTION.search(message)
    before, name, after = url.rpartition(found[1] if found else url)
    if found is None or not name or "@" in after or _SECRET_BEFORE.search(before):
        return ""
    return f": {found[1]!r} is not an option of PostgreSQL"


def _unreadable(url: str, why: str) -> errors.InvalidConfig:
    variables = [name for name in config.db_url_variables() if os.environ.get(name) == url]
    return errors.InvalidConfig(
        f"the DSN{f' in {variables[0]}' if variables else ''} cannot be read{why}: it should look "
        "like postgresql://user:password@host:5432/name, with %2F for a / in the password and %40 "
        "for an @"
    )


def options(url: str) -> dict[str, str]:
    """Return the options of a DSN and of PGHOST and similar variables. Raises `InvalidConfig`."""
    parsed(url)
    found = [*pq.Conninfo.get_defaults(), *pq.Conninfo.parse(url.encode())]
    return {each.keyword.decode(): each.val.decode() for each in found if each.val is not None}


def conninfo(url: str, *, first: int = 0, **forced: Any) -> str:
    """Return the DSN with our defaults for options that it lacks, and with `forced` options.

    With several hosts, the one at index `first` (modulo their number) comes first.

    The encoding is always UTF-8, despite the DSN, PGCLIENTENCODING and PGOPTIONS, since a handler
    may return and raise any character.
    """
    defaults: dict[str, Any] = {
        "connect_timeout": CONNECT_TIMEOUT_S,
        "keepalives_idle": 10,
        "keepalives_interval": 3,
        "keepalives_count": 3,
        "tcp_user_timeout": 12000,
        "application_name": "queue_workflows",
    }
    forced["client_encoding"] = "UTF8"
    parts = parsed(url)
    for key in ("host", "hostaddr", "port"):
        each = str(parts.get(key) or "").split(",")
        if len(each) > 1:
            at = first % len(each)
            parts[key] = ",".join(each[at:] + each[:at])
    return psycopg.conninfo.make_conninfo(**(defaults | parts | forced))
