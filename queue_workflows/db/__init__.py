"""Connect to the database: pools, transactions, LISTEN and the schema.

Modules that only processes and operators need are loaded on their first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, cast

import psycopg
from psycopg import Error, InterfaceError, OperationalError

from queue_workflows.db import pool
from queue_workflows.db.database_url import db_url, describe
from queue_workflows.db.pool import (
    LOOP_LOCK_S,
    PAGE_CONNECTIONS,
    Connection,
    DedicatedConnection,
    close_pool,
    connect,
    connection,
    cursor,
    get_pool,
    is_psycopg,
    read_only,
    set_local,
)
from queue_workflows.db.scripts import BEGIN, COMMIT, ROLLBACK, Script, Statement, run
from queue_workflows.runtime.stored_json import load_json

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from queue_workflows.db.app_connections import call_async, fetch_async
    from queue_workflows.db.ledger import REQUIRED_VERSION
    from queue_workflows.db.notifications import Listener, Subscriptions, Wake, listen
    from queue_workflows.db.readiness import wait_for_schema, wait_until_reachable, wait_until_ready
    from queue_workflows.db.schema import bootstrap, current_schema_version, downgrade, pending

_LATER = {
    "app_connections": ("call_async", "fetch_async"),
    "ledger": ("REQUIRED_VERSION",),
    "notifications": ("Listener", "Subscriptions", "Wake", "listen"),
    "readiness": ("wait_for_schema", "wait_until_reachable", "wait_until_ready"),
    "schema": ("bootstrap", "current_schema_version", "downgrade", "pending"),
}

__all__ = [
    "BEGIN", "COMMIT", "LOOP_LOCK_S", "PAGE_CONNECTIONS", "REQUIRED_VERSION", "ROLLBACK",
    "Connection", "DedicatedConnection", "Error", "InterfaceError", "Listener", "OperationalError",
    "Script", "Statement", "Subscriptions", "Wake", "bootstrap", "call_async", "close_pool",
    "connect", "connection", "current_schema_version", "cursor", "db_url", "describe", "downgrade",
    "fetch_async", "get_pool", "is_psycopg", "listen", "load_json", "pending", "read_only", "run",
    "set_local", "statement", "transaction", "wait_for_schema", "wait_until_reachable",
    "wait_until_ready",
]  # fmt: skip


def transaction(conn: Any = None, *, async_twin: str = "") -> AbstractContextManager[Connection]:
    """Return an engine transaction: with timeouts, committed on a clean exit, else rolled back.

    With `conn`, a connection of psycopg, SQLAlchemy or Django with any row factory, join the
    caller's transaction, without opening, committing or rolling it back. Raises `UnknownConnection`
    before any statement; for an asynchronous connection its message recommends `async_twin`.
    """
    if conn is None:
        return pool.own_transaction()
    if isinstance(conn, psycopg.Connection):
        return pool.Joined(cast("Connection", conn))
    # Imported late, since few apps have such a connection.
    from queue_workflows.db import app_connections

    return app_connections.adapted(conn, async_twin)


def statement(conn: Any = None) -> AbstractContextManager[Connection]:
    """Return `transaction` for a single statement, which commits itself: no BEGIN, no COMMIT."""
    return pool.Lent() if conn is None else transaction(conn)


def __getattr__(name: str) -> Any:
    """Load the module of a name on the first use of the name."""
    for module, names in _LATER.items():
        if name in names:
            found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
