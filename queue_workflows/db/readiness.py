"""Wait until the database replies, and has the schema and functions that this code works with."""

from __future__ import annotations

import logging
import math
import random
import re
import time
from collections.abc import Callable

import psycopg

from queue_workflows import errors
from queue_workflows.db import database_url, functions, ledger, pool, statements
from queue_workflows.types import SleepFn

_log = logging.getLogger(__name__)
AWAY_AGAIN_S = 30.0
"""Seconds between two log lines about a wait for the database."""
_REFUSED = re.compile(
    r"authentication failed for user|no password supplied|no pg_hba\.conf entry"
    r"|pg_hba\.conf rejects|is not permitted to log in|permission denied for database"
    r'|(?:role|database) ".*" does not exist'
)
"""Texts of errors that end a wait, since a failed connect has no SQLSTATE."""


def wait_until_reachable(
    *,
    stopped: Callable[[], bool] = lambda: False,
    pause: Callable[[float], object] = time.sleep,
    timeout_s: float | None = None,
) -> bool:
    """Block until the database replies; log every 30 s that it does not, and once that it does.

    Backs off with jitter from 0.2 s to 5 s. Returns False if `stopped()` became true first. Raises
    `DatabaseUnavailable` after `timeout_s`. With a timeout, it also raises at once for a wrong
    password, user or database name. Without one, it keeps waiting, since an operator may fix them.
    """
    url = database_url.db_url()
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    delay, log_at, logged = 0.2, -math.inf, False
    while not stopped():
        try:
            pool.connect(url=url, bare=True).close()
        except psycopg.OperationalError as error:
            reason = " ".join(str(error).split())
            refused = _REFUSED.search(reason) is not None
            if deadline is not None and (refused or time.monotonic() >= deadline):
                does = "refuses the connection" if refused else "does not answer"
                raise errors.DatabaseUnavailable(
                    f"{database_url.describe(url)} {does}: {reason}"
                ) from None
            if time.monotonic() >= log_at:
                _log.warning(
                    "%s does not answer, waiting for it: %s", database_url.describe(url), reason
                )
                log_at, logged = time.monotonic() + AWAY_AGAIN_S, True
            pause(delay * random.uniform(0.7, 1.3))  # noqa: S311  jitter
            delay = min(5.0, delay * 1.7)
        else:
            if logged:
                _log.warning("%s answers", database_url.describe(url))
            return True
    return False


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

    def check(conn: pool.Connection) -> tuple[int, str]:
        return _version(conn, version_table, min_version)

    return _wait(min_version, check, timeout_s, poll_s, sleep_fn or time.sleep)


def _wait(
    wanted: int,
    check: Callable[[pool.Connection], tuple[int, str]],
    timeout_s: float,
    poll_s: float,
    sleep: SleepFn,
) -> int:
    """Poll `check` until it returns no reason to wait; return the version that it returns then."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with pool.connect() as conn:
                version, reason = check(conn)
            if not reason:
                return version
        except psycopg.OperationalError as error:
            reason = str(error).strip()
        if time.monotonic() >= deadline:
            waited = f"after {timeout_s:g} s" if timeout_s else "yet"
            raise errors.SchemaTimeout(
                f"{database_url.describe()} has no schema version {wanted} {waited} ({reason}): "
                "run `queue-workflows migrate`, or start an orchestrator, which migrates too"
            )
        sleep(poll_s)


def _version(conn: pool.Connection, version_table: str, wanted: int) -> tuple[int, str]:
    """Return the version of a ledger, and why it is too low, or an empty text."""
    if version_table == ledger.NAME:
        ledger.refuse_others(conn)
    version = max(ledger.versions(conn, version_table), default=0)
    return version, "" if version >= wanted else f"it is at version {version}"


def _check_ready(conn: pool.Connection) -> tuple[int, str]:
    """Return the version, and why this code cannot work yet, or an empty text."""
    version, reason = _version(conn, ledger.NAME, ledger.REQUIRED_VERSION)
    if not reason and not functions.is_ready(conn):
        reason = "its functions are missing or of an older version"
    if not reason and statements.migrations.ledger_is_whole(conn, ledger=ledger.NAME):
        applied = ledger.read(conn, ledger.NAME)
        ledger.refuse_newer(ledger.NAME, ledger.REQUIRED_VERSION, applied)
    return version, reason


class _Stopped(Exception):
    """A stop was requested during the wait."""


def wait_until_ready(*, stopped: Callable[[], bool], pause: Callable[[float], object]) -> bool:
    """Block until the database replies and has the schema and functions; log once that it waits.

    Returns False if `stopped()` returned True first. Raises `SchemaTimeout` like `wait_for_schema`,
    and `SchemaTooNew` like `bootstrap`.
    """
    if not wait_until_reachable(stopped=stopped, pause=pause):
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
                ledger.REQUIRED_VERSION,
            )
        pause(seconds)
        if stopped():
            raise _Stopped

    try:
        _wait(ledger.REQUIRED_VERSION, _check_ready, 120, 0.5, wait)
    except _Stopped:
        return False
    return True
