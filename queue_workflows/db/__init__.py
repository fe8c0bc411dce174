"""Connect to the database: pools, transactions, LISTEN and the schema."""

from __future__ import annotations

from psycopg import Error, InterfaceError, OperationalError

from queue_workflows.db.database_url import db_url, describe
from queue_workflows.db.dedicated import DedicatedConnection
from queue_workflows.db.listen import Listener, Wake, listen
from queue_workflows.db.loading import load_json
from queue_workflows.db.migration_files import REQUIRED_VERSION
from queue_workflows.db.pool import (
    LOOP_LOCK_S,
    Connection,
    close_pool,
    connect,
    connection,
    cursor,
    get_pool,
    statement,
    transaction,
)
from queue_workflows.db.reachability import wait_until_reachable
from queue_workflows.db.readiness import wait_for_schema, wait_until_ready
from queue_workflows.db.schema import (
    bootstrap,
    current_schema_version,
    downgrade,
    pending,
)
from queue_workflows.db.scripts import BEGIN, COMMIT, ROLLBACK, Script, Statement, run
from queue_workflows.db.subscriptions import Subscriptions

__all__ = [
    "BEGIN",
    "COMMIT",
    "ROLLBACK",
    "LOOP_LOCK_S",
    "REQUIRED_VERSION",
    "Connection",
    "Error",
    "InterfaceError",
    "DedicatedConnection",
    "Listener",
    "OperationalError",
    "Script",
    "Statement",
    "Subscriptions",
    "Wake",
    "bootstrap",
    "close_pool",
    "connect",
    "connection",
    "current_schema_version",
    "cursor",
    "db_url",
    "describe",
    "downgrade",
    "get_pool",
    "listen",
    "load_json",
    "pending",
    "run",
    "statement",
    "transaction",
    "wait_for_schema",
    "wait_until_reachable",
    "wait_until_ready",
]
