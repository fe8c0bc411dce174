"""Recover lapsed jobs, jobs of ended runs, stopped runs and unanswered inputs."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any, Final, cast

from queue_workflows import config, db, errors
from queue_workflows.claim import job_tables, recovery, row_isolation
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.dispatch import advance, input_nodes, run_cache
from queue_workflows.runtime import log_context
from queue_workflows.types import NowFn, Row, Unreadable

_log = logging.getLogger(__name__)
STALLED: Final = "stalled run"
RUNS: Final = 2000
"""How many running runs one pass checks at most."""
RUNS_AT_ONCE: Final = 20
"""How many of them one statement checks; it reads all nodes of each, which may be many."""
ORPHANS: Final = row_isolation.Duty(
    "cancel of node job",
    statements.cancellation.orphans,
    statements.cancellation.cancel[job_tables.NODE_JOBS.name],
    recovery.ENDING[job_tables.NODE_JOBS.name],
)
"""Cancels nodes that wait although their run is over, and leaves out rows that raise."""
TIMEOUT: Final = "end of the wait of node job"
ANSWER_GRACE_S: Final = 5.0
"""How long an answer that came in time may still wait to be taken before the next check."""


def recover_at_start(pause: Callable[[float], bool]) -> bool:
    """Reclaim lapsed and ownerless jobs before an orchestrator starts; touch no fresh lease.

    Counts no lapse, since it is unknown whether the database was available until now. Tries
    NODE_POOL_RECOVERY_RETRIES times and calls `pause(NODE_POOL_RECOVERY_BACKOFF_S)` between two
    tries. Returns False if `pause` returns True, which means to stop. Raises the last try's error.
    """
    left = max(1, config.NODE_POOL_RECOVERY_RETRIES.read())
    while True:
        left -= 1
        try:
            with db.statement() as conn:
                reclaim_all_lapsed(conn, had_s=0.0)
                cancel_orphans(conn)
        except db.Error as error:
            if not left:
                raise
            _log.warning("the recovery at start failed, %d tries left: %s", left, error)
            if pause(config.NODE_POOL_RECOVERY_BACKOFF_S.read()):
                return False
        else:
            return True


def reclaim_all_lapsed(
    conn: db.Connection, rows: row_isolation.Isolation | None = None, *, had_s: float | None = None
) -> None:
    """Take back all jobs whose lease has lapsed, one transaction per batch.

    Rows that raise are set aside in `rows`; None: for this call only. `had_s`: for how many seconds
    the caller has had the database without a break. A claim that was renewed last before that
    counts no lapse, as its worker could not renew either. None: every lapsed claim counts one.
    """
    kept = rows or row_isolation.Isolation()
    for table in (job_tables.NODE_JOBS, job_tables.INGEST_JOBS):
        if had_s is not None:
            while taken := recovery.hand_back_lapsed(conn, table, kept, had_s=had_s):
                _log_taken(taken, "lease lapsed while the database was away")
        while taken := recovery.reclaim_lapsed(conn, table, kept, had_s=had_s):
            _log_taken(taken, "lease lapsed")


def reclaim_lost_sessions(
    conn: db.Connection, silent_s: float, rows: row_isolation.Isolation
) -> None:
    """Take back jobs whose worker's session has ended and that were not renewed for `silent_s`."""
    for table in (job_tables.NODE_JOBS, job_tables.INGEST_JOBS):
        taken = recovery.reclaim_gone(conn, table, rows, silent_s)
        _log_taken(taken, "the session of its worker is gone")


def cancel_orphans(conn: db.Connection, rows: row_isolation.Isolation | None = None) -> None:
    """Cancel the jobs that were inserted while their run ended, one transaction per batch.

    `rows`: as in `reclaim_all_lapsed`.
    """
    kept = rows or row_isolation.Isolation()
    while kept.batch(conn, ORPHANS):
        pass


class StalledRuns:
    """Goes on with the running runs that plain SQL has stopped, or ends them with the reason.

    Such a run has no node, outbox event or answer that moves it forward, because a plain UPDATE or
    DELETE ended a node without an event. It ends as `jobs.cancel` and a failed node end it. The
    nodes after completed and skipped ones are queued.
    """

    def __init__(self, rows: row_isolation.Isolation, now_fn: NowFn = time.monotonic) -> None:
        self._rows = rows
        self._now = now_fn
        self.after = ""
        """The run that was checked last; if empty, the next pass begins with the first run."""

    def end(self, begin: run_cache.Begin, *, quiet_s: float, for_s: float) -> None:
        """Look at running runs for about `for_s`, and go on with the others at the next call.

        `quiet_s`: as in `runs.stalled`.
        """
        until = self._now() + for_s
        with run_cache.reading(begin) as conn:
            ids = statements.runs.running(conn, after=self.after, limit=RUNS)
        for start in range(0, len(ids), RUNS_AT_ONCE):
            part = ids[start : start + RUNS_AT_ONCE]
            self.after = part[-1]  # before it is tried: a part that takes too long stops no other
            with run_cache.reading(begin) as conn:
                found = statements.runs.stalled(conn, ids=list(part), quiet_s=quiet_s)
            aside = self._rows.aside(STALLED) if found else ()
            for run_id in found:
                if run_id not in aside:
                    end = functools.partial(_end_stalled, begin, run_id)
                    self._rows.attempt(STALLED, run_id, end)
            if self._now() >= until:
                break
        if not ids or (len(ids) < RUNS and self.after == ids[-1]):
            self.after = ""


def _end_stalled(begin: run_cache.Begin, run_id: str) -> None:
    if _is_ended(begin, run_id, go_on=True):
        return
    run_cache.forget(run_id)
    try:
        count = advance.plan_and_write(begin, run_id, None, expected=advance.is_live)
    except advance.NEVER_RUNS as error:
        advance.fail(begin, run_id, str(error))
        return
    if count == 0:  # None means that the run changed meanwhile, so the next sweep decides
        _is_ended(begin, run_id, go_on=False)


def _is_ended(begin: run_cache.Begin, run_id: str, *, go_on: bool) -> bool:
    """End a run that is stalled; return whether it is stalled no more.

    `go_on`: leave it unless a node of it failed, was cancelled or was deleted.
    """
    with begin() as conn:
        statements.runs.lock(conn, run_id=run_id)
        if not statements.runs.stalled(conn, ids=[run_id], quiet_s=0):
            return True
        found = statements.runs.stopper(conn, run_id=run_id)
        node_id, status = (found["node_id"], found["status"]) if found else ("?", "missing")
        if found and status == "failed":
            reason = advance.node_failure(node_id, found["error"])
        elif status in ("cancelled", "deleted"):
            reason = f"node {node_id} was {status}"
        elif go_on:
            return False
        else:
            reason = f"nothing moves it forward: node {node_id} is {status}"
        end = statements.runs.cancel if status == "cancelled" else statements.runs.fail
        end(conn, run_id=run_id, error=payload.error_text(reason))
    _log.warning("run %s had stopped: %s", run_id, reason, extra={"run_id": run_id})
    return True


def _log_taken(rows: list[Row], what: str) -> None:
    """Log the jobs that were taken back, and why."""
    for row in rows:
        name = f"ingest job {row['id']}"
        if "node_id" in row:
            name = f"node {row['node_id']} of run {row['run_id']}"
        _log.warning("%s: %s, now %s", name, what, row["status"], extra=log_context.ids_of_job(row))


# --- input nodes -------------------------------------------------------------------------------


def expire_inputs(conn: db.Connection, rows: row_isolation.Isolation | None = None) -> None:
    """Complete or fail every input node that is past its `timeout_s`, one transaction each.

    Rows that raise are set aside in `rows`; None: for this call only.
    """
    kept = rows or row_isolation.Isolation()
    timeouts = statements.input_timeouts
    while (job_id := timeouts.next_overdue(conn, set_aside=kept.aside(TIMEOUT))) is not None:
        kept.attempt(
            TIMEOUT,
            job_id,
            lambda job_id=job_id: _end_wait(conn, job_id),
            lambda error, failures, job_id=job_id: _give_up(conn, job_id, error, failures),
        )


def lock_overdue(conn: db.Connection, job_id: str) -> Row | None:
    """Lock a wait that is over until the transaction ends, and return its job.

    `answered`: an answer is in flight, or is being submitted; `over`: the job does not wait for an
    answer any more, or waits again. Returns None if the wait is not over, or another transaction
    holds it.
    """
    if statements.input_timeouts.lock_wait(conn, job=job_id) is None:
        return None
    # Before the statement that reads answers: `submit_input` holds the row of the job from the
    # insert of its answer to its commit.
    free = statements.input_timeouts.lock_job_if_free(conn, job=job_id) is not None
    return statements.input_timeouts.overdue(conn, job=job_id, free=free)


def _end_wait(conn: db.Connection, job_id: str) -> None:
    with conn.transaction():
        job = lock_overdue(conn, job_id)
        if job is None:
            return
        if job["answered"] and not job["over"]:
            statements.input_timeouts.extend_wait(conn, job=job_id, more_s=ANSWER_GRACE_S)
            return
        if not job["over"]:
            _expire(conn, job)
        statements.input_timeouts.end_wait(conn, job=job_id)


def _give_up(conn: db.Connection, job_id: str, error: BaseException, failures: int) -> bool:
    """Fail a node whose wait could not be ended in too many tries; return whether it was failed."""
    with conn.transaction():
        if not recovery.ENDING[job_tables.NODE_JOBS.name](conn, job_id, error, failures):
            return False
        statements.input_timeouts.end_wait(conn, job=job_id)
        return True


def _expire(conn: db.Connection, job: Row) -> None:
    found: Any = job["policy"]
    policy = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    seconds = policy.get("timeout_s")  # which a plain SQL writer may have set to anything
    is_number = isinstance(seconds, (int, float)) and abs(seconds) < 1e300
    error = f"nobody answered within {f'{seconds:g}' if is_number else f'{seconds!s:.80}'} s"
    default = None
    if isinstance(found, Unreadable):
        error = f"its policy cannot be read: {found.reason}"
    elif "default" in policy:
        try:
            default = input_nodes.answer_delta(job, policy["default"])
        except errors.InvalidPayload as refused:
            error = str(refused)
    error = payload.error_text(error)
    if default is not None:
        end = statements.input_answers.complete_node
        ended = end(conn, job=job["id"], result=default, by="timeout")
    else:
        ended = statements.input_timeouts.fail_node(conn, job=job["id"], error=error)
    if ended is not None:  # if None, an answer came first
        effect = "takes its default" if default is not None else "fails"
        name = f"node {job['node_id']} of run {job['run_id']}"
        _log.warning("%s: %s; it %s", name, error, effect, extra=log_context.ids_of_job(job))
