"""Hold the advisory lock of a chain of migrations: one process at a time migrates."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext

from queue_workflows import config, errors
from queue_workflows.db import pool, statements

_log = logging.getLogger(__name__)
POLL_S = 0.1
LOGGED_S = 5.0


@contextmanager
def exclusive(
    version_table: str, stopped: Callable[[], bool] = lambda: False
) -> Generator[pool.Connection]:
    """Yield a connection without time-outs that holds the chain's advisory lock.

    Waits for the lock, and logs every LOGGED_S who holds it. Raises `MigrationFailed` when
    `stopped()` comes true first. With POLL_ONLY the connection is in a transaction, which holds the
    lock: through a pooler the next transaction may have another session.
    """
    is_local = config.POLL_ONLY.read()
    with pool.connect(limited=False) as conn:
        log_at = time.monotonic() + LOGGED_S
        while True:
            with conn.transaction() if is_local else nullcontext():
                if _try_lock(conn, version_table, is_local=is_local):
                    yield conn
                    if not is_local:
                        statements.migrations.unlock(conn)
                    break
            if stopped():
                raise errors.MigrationFailed("a stop was requested before the schema's lock came")
            if time.monotonic() >= log_at:
                log_at = time.monotonic() + LOGGED_S
                held_by = _holders(conn, version_table)
                _log.warning("another session holds the lock of the schema: %s", held_by)
            time.sleep(POLL_S)


def _try_lock(conn: pool.Connection, version_table: str, *, is_local: bool) -> bool:
    # A waiting pg_advisory_lock() blocks signals, and any role that may log in can hold it.
    return bool(statements.migrations.try_lock(conn, ledger=version_table, is_local=is_local))


def _holders(conn: pool.Connection, version_table: str) -> str:
    rows = statements.migrations.lock_holders(conn, ledger=version_table)
    return ", ".join(f"pid {row['pid']} of role {row['usename']}" for row in rows)
