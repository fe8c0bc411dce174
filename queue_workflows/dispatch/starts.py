"""Start runs: freeze the definition, queue the first nodes, set the status to running."""

from __future__ import annotations

import functools
import logging

from queue_workflows import config, db
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.dispatch import advance, hooks, run_cache
from queue_workflows.engine import row_isolation
from queue_workflows.types import Row

_log = logging.getLogger(__name__)
STARTS = "start of run"


def start_run(run_id: str, *, begin: run_cache.Begin = db.transaction) -> int:
    """Freeze the definition, queue the first nodes, set the run to running; return the new rows.

    Accepts a queued run, and one that an app inserted as `running` without a definition. Returns 0
    for any other, so a repeated call is harmless. A definition that cannot run fails the run, with
    the node and the reason in its `error`. Raises `NoProvider` and `HookFailed` with nothing
    changed.
    """
    return _start(run_id, begin, nowait=False, expected=_is_unstarted) or 0


def _is_unstarted(run: Row) -> bool:
    undefined = run["status"] == "running" and not run["has_definition"]
    return advance.is_queued(run) or (run["mode"] == "node" and undefined)


def _start(
    run_id: str,
    begin: run_cache.Begin,
    *,
    nowait: bool,
    head: Row | None = None,
    expected: advance.State = advance.is_queued,
) -> int | None:
    """Return the number of new rows.

    None if the run is not as `expected`, or locked with `nowait`.
    """
    run_cache.forget(run_id)
    try:
        return advance.advance(begin, run_id, None, expected=expected, nowait=nowait, head=head)
    except advance.NEVER_RUNS as error:
        advance.fail(begin, run_id, str(error))
        return 0


def start_queued(
    *,
    begin: run_cache.Begin = db.transaction,
    limit: int = 50,
    rows: row_isolation.Isolation | None = None,
) -> tuple[int, list[str]]:
    """Start the queued runs that are due.

    Return how many left the queue, and some without provider. A start that raises (other than
    not-found) delays its run with back-off. After DISPATCH_MAX_ATTEMPTS the run fails. A run that
    cannot even be delayed is added to `rows`. A run whose row is locked keeps its place for the
    next round.
    """
    kept = rows or row_isolation.Isolation()
    able = hooks.has_provider()
    with run_cache.reading(begin) as conn:
        heads = statements.runs.startable(
            conn, undefined=able, set_aside=list(kept.aside(STARTS)), limit=limit
        )
    started, waiting = 0, list[str]()
    if not able:
        with run_cache.reading(begin) as conn:
            waiting = statements.runs.undefined(conn, limit=1)
    for head in heads:
        left = kept.attempt(
            STARTS,
            head["id"],
            functools.partial(_left_queue, begin, head, waiting),
            lambda error, _, run_id=head["id"]: _delay(begin, run_id, error),
        )
        started += bool(left)
    return started, waiting


def _left_queue(begin: run_cache.Begin, head: Row, waiting: list[str]) -> bool:
    try:
        return _start(head["id"], begin, nowait=True, head=head) is not None
    except hooks.NoProvider:
        waiting.append(head["id"])
        return False


def _delay(begin: run_cache.Begin, run_id: str, error: BaseException) -> bool:
    """Delay a run that could not start, or fail it after its last try. Return True."""
    reason = payload.error_text(error)
    with begin() as conn:
        run = statements.runs.lock(conn, run_id=run_id)
        if run is None or not advance.is_queued(run):
            return True
        delay_s = row_isolation.backoff_s(run["start_attempts"] + 1)
        failed = (
            statements.runs.delay_start(conn, run_id=run_id, error=reason, after_s=delay_s) or 0
        )
        if failed >= config.DISPATCH_MAX_ATTEMPTS.read():
            message = f"poison: the run could not start in {failed} tries: {reason}"
            statements.runs.fail(conn, run_id=run_id, error=payload.error_text(message))
    _log.warning(
        "run %s could not start (try %d): %s", run_id, failed, reason, extra={"run_id": run_id}
    )
    return True
