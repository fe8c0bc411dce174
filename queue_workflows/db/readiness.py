"""Wait until the database has the schema and the functions that this code works with."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import psycopg

from queue_workflows import errors
from queue_workflows.db import (
    database_url,
    functions,
    ledger,
    migration_files,
    pool,
    reachability,
    schema,
)
from queue_workflows.types import SleepFn

_log = logging.getLogger(__name__)


def wait_for_schema(
    min_version: int,
    *,
    version_table: str = ledger.NAME,
    timeout_s: float = 120,
    poll_s: float = 0.5,
    sleep_fn: SleepFn | None = None,
) -> int:
    """Block until the ledger has `min_version` and the database replies; return the version.

    Raises `SchemaTimeout` (a TimeoutError) after `timeout_s`, and `SchemaTooNew` at once if a later
    version of 0.3.0's line has migrated our own ledger.
    """

    def check() -> tuple[int, str]:
        if version_table == ledger.NAME:
            _refuse_others()
        version = schema.current_schema_version(version_table=version_table)
        return version, "" if version >= min_version else f"it is at version {version}"

    return _wait(
        f"no schema version {min_version}", check, timeout_s, poll_s, sleep_fn or time.sleep
    )


def _wait(
    wanted: str,
    check: Callable[[], tuple[int, str]],
    timeout_s: float,
    poll_s: float,
    sleep: SleepFn,
) -> int:
    """Poll `check` until it returns no reason to wait; return the version that it returns then."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            version, reason = check()
            if not reason:
                return version
        except psycopg.OperationalError as error:
            reason = str(error).strip()
        if time.monotonic() >= deadline:
            raise errors.SchemaTimeout(
                f"{database_url.describe()}: {wanted} within {timeout_s:g} s "
                f"({reason}); `queue-workflows migrate` or an orchestrator brings it"
            )
        sleep(poll_s)


def _refuse_others() -> None:
    with pool.connect() as conn:
        ledger.refuse_others(conn)


def _check_ready() -> tuple[int, str]:
    """Return the version, and why this code cannot work yet: "" if it can."""
    _refuse_others()
    version = schema.current_schema_version()
    if version < migration_files.REQUIRED_VERSION:
        return version, f"it is at version {version}"
    with pool.connect() as conn:
        if not functions.is_ready(conn):
            return version, "its functions are missing or of an older version"
    schema.refuse_newer()  # here: an outage during this check is waited for, too
    return version, ""


class _Stopped(Exception):
    """A stop was requested during the wait."""


def wait_until_ready(*, stopped: Callable[[], bool], pause: Callable[[float], object]) -> bool:
    """Block until the database replies and has the schema and functions; log once that it waits.

    Returns False if `stopped()` came true first. Raises `SchemaTimeout`, as `wait_for_schema` does,
    and `SchemaTooNew` as `bootstrap` does.
    """
    if not reachability.wait_until_reachable(stopped=stopped, pause=pause):
        return False
    logged = False

    def wait(seconds: float) -> None:
        nonlocal logged
        if not logged:
            logged = True
            _log.warning(
                "%s: waiting for schema version %d (run `queue-workflows migrate` or start an "
                "orchestrator)",
                database_url.describe(),
                migration_files.REQUIRED_VERSION,
            )
        pause(seconds)
        if stopped():
            raise _Stopped

    try:
        _wait(f"no schema version {migration_files.REQUIRED_VERSION}", _check_ready, 120, 0.5, wait)
    except _Stopped:
        return False
    return True
