"""Wait until the database answers, and say what an error of it means."""

from __future__ import annotations

import logging
import math
import random
import re
import time
from collections.abc import Callable

import psycopg

from queue_workflows import errors
from queue_workflows.db import database_url, pool, statements
from queue_workflows.runtime import entry_point, error_log

_log = logging.getLogger(__name__)
AWAY_AGAIN_S = 30.0
"""Seconds between two log lines about a wait for the database."""
_REFUSED = re.compile(
    r"authentication failed for user|no password supplied|no pg_hba\.conf entry"
    r"|pg_hba\.conf rejects|is not permitted to log in|permission denied for database"
    r'|(?:role|database) ".*" does not exist'
)
"""Definite replies. A failed connect has no SQLSTATE; after any other error the wait continues."""
_GOING = ("57P01", "57P02", "57P03", "53300")
"""SQLSTATEs: administrator shutdown, crash shutdown, cannot connect now, too many connections."""


def wait_until_reachable(
    *,
    stopped: Callable[[], bool] = lambda: False,
    pause: Callable[[float], object] = time.sleep,
    timeout_s: float | None = None,
) -> bool:
    """Block until the database replies; log every 30 s that it does not, and once that it does.

    Backs off with jitter from 0.2 s to 5 s. Returns False if `stopped()` came true first. Raises
    `DatabaseUnavailable` after `timeout_s`. With a timeout it also raises at once for a wrong
    password, user or database name. Without one it waits for these too, since the server's side can
    fix them.
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


def _explain(error: Exception) -> errors.QueueWorkflowsError | None:
    """Return the message for a right that the server denied (SQLSTATE 42501)."""
    if not isinstance(error, psycopg.errors.InsufficientPrivilege):
        return None
    text = error.diag.message_primary or str(error)
    try:
        with pool.connect(bare=True) as conn:
            row = statements.sessions.role(conn)
    except psycopg.Error:
        row = None
    where = database_url.describe()
    role, schema = (row["role"], row["schema"]) if row else ("of this connection", "public")
    if denied := re.search(r"for schema (\S+)", text):
        return errors.DatabaseRefused(
            f"user {role} may not use or create tables in schema {denied[1]} of {where}: "
            f"GRANT USAGE, CREATE ON SCHEMA {denied[1]} TO {role}, or migrate as the owner"
        )
    return errors.DatabaseRefused(
        f"user {role} lacks a right on {where}: {text}: let the owner GRANT SELECT, INSERT, "
        f"UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema}, and USAGE ON ALL SEQUENCES IN SCHEMA "
        f"{schema}, TO {role}"
    )


def _outage(error: BaseException) -> str | None:
    """Return what is away if the server is gone, shutting down or absent; None for other errors."""
    if not isinstance(error, psycopg.OperationalError):
        return None
    state = error.sqlstate or ""
    return "the database" if not state or state.startswith("08") or state in _GOING else None


entry_point.explain_by(_explain)
error_log.name_outages_by(_outage)
