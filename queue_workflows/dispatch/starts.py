"""Starting runs: freeze the definition, queue the first nodes, flip the status."""

from __future__ import annotations

import logging

from queue_workflows import config, db
from queue_workflows.dispatch import advance, hooks, knowledge
from queue_workflows.store import payload, runs
from queue_workflows.types import Row

_log = logging.getLogger(__name__)
RETRY_FIRST_S = 0.5
RETRY_MAX_S = 60.0
BUSY = frozenset({"55P03", "40P01", "40001"})
"""SQLSTATEs of a run that somebody else holds: lock not available, deadlock, serialization."""
SERVER = ("08", "25", "53", "57P")
"""SQLSTATE classes of the server's trouble: connection, read-only, resources, shutdown."""


def backoff_s(failures: int) -> float:
    """Seconds to wait after that many failures in a row."""
    return min(RETRY_MAX_S, RETRY_FIRST_S * 2.0 ** min(failures - 1, 30))


def is_busy(error: Exception) -> bool:
    """Whether a database error says "later", and no more than that."""
    return getattr(error, "sqlstate", None) in BUSY


def is_outage(error: Exception) -> bool:
    """Whether a database error is no fault of the run: the server is away, full or read-only.

    What else it refuses (a value too large, a statement too slow) counts against the run, or one
    such run would hold up all others for ever.
    """
    if not isinstance(error, db.Error):
        return False
    return error.sqlstate is None or error.sqlstate.startswith(SERVER)


def start_run(run_id: str, *, begin: knowledge.Begin = db.transaction) -> int:
    """Freeze the definition, queue the first nodes, and flip the run to running; how many new rows.

    Idempotent: 0 for a run that is not queued. A definition that cannot run fails the run, with the
    node and the reason in its `error`. Raises `NoProvider` and `HookFailed` with nothing changed.
    """
    return _start(run_id, begin, nowait=False) or 0


def _start(
    run_id: str, begin: knowledge.Begin, *, nowait: bool, head: Row | None = None
) -> int | None:
    """How many rows are new; None for a run that is not queued, or `nowait` and locked."""
    knowledge.forget(run_id)
    try:
        return advance.advance(
            begin, run_id, None, expected=advance.is_queued, nowait=nowait, head=head
        )
    except advance.NEVER_RUNS as error:
        advance.fail(begin, run_id, str(error))
        return 0


def start_queued(
    *, begin: knowledge.Begin = db.transaction, limit: int = 50
) -> tuple[int, list[str]]:
    """Start the queued runs that are due; how many have left the queue, and some without provider.

    A provider's error (other than not-found) delays its run with back-off; at DISPATCH_MAX_ATTEMPTS
    the run fails. A run whose row is locked keeps its place for the next round.
    """
    able = hooks.has_provider()
    with knowledge.reading(begin) as conn:
        heads = runs.startable(conn, limit, undefined=able)
    started, waiting = 0, list[str]()
    if not able:
        with knowledge.reading(begin) as conn:
            waiting = runs.undefined(conn, 1)
    for head in heads:
        run_id = head["id"]
        try:
            started += _start(run_id, begin, nowait=True, head=head) is not None
        except hooks.NoProvider:
            waiting.append(run_id)
        except Exception as error:
            if is_outage(error):
                raise
            if is_busy(error):
                _log.warning("run %s starts later: %s", run_id, str(error).strip())
            else:
                _delay(begin, run_id, error)
    return started, waiting


def _delay(begin: knowledge.Begin, run_id: str, error: Exception) -> None:
    reason = payload.error_text(error)
    with begin() as conn:
        run = runs.lock(conn, run_id)
        if run is None or not advance.is_queued(run):
            return
        failed = run["start_attempts"] + 1
        runs.delay(conn, run_id, error=reason, after_s=backoff_s(failed))
        if failed >= config.DISPATCH_MAX_ATTEMPTS.read():
            message = f"poison: the run could not start in {failed} tries: {reason}"
            runs.fail(conn, run_id, payload.error_text(message))
    _log.warning("run %s could not start (try %d): %s", run_id, failed, reason)
