"""Dispatch the events of finished nodes from the outbox in batches, one transaction per run."""

from __future__ import annotations

import functools
import logging
import time
from typing import NamedTuple

from queue_workflows import db
from queue_workflows.claim import recovery, row_isolation
from queue_workflows.dag import hooks, item_ids, payload, plan
from queue_workflows.db import statements
from queue_workflows.dispatch import advance, input_nodes, run_cache
from queue_workflows.types import Row

_log = logging.getLogger(__name__)
EVENTS_A_BATCH = 1000
PARTS_S = 1.0
"""Seconds for which a run with large values is dispatched before other runs get their turn."""
LIMIT_EXCEEDED = "54000"
"""The SQLSTATE of reading outputs that together exceed the size limit of a jsonb, 256 MB."""
RUNS_A_ROUND = 50
DISPATCH, EVENT = "dispatch of run", "event"


class _Done(NamedTuple):
    """The result of a batch, with new rows, parked nodes, and whether there may be more events.

    `events` is how many it has settled, 0 if it has only read the graph of the run.
    """

    rows: int = 0
    parked: list[Row] = []  # noqa: RUF012  never changed
    more: bool = False
    events: int = 0


def drain_run(
    run_id: str,
    *,
    begin: run_cache.Begin = db.transaction,
    nowait: bool = False,
    only: int | None = None,
) -> int:
    """Dispatch a run's open events, or `only` one; return the number of new rows.

    With `nowait`, it returns 0 at once if another dispatcher has locked the run, and leaves events
    open that need the app's hooks.
    """
    total, failed = 0, False
    most = run_cache.parts.get(run_id) or EVENTS_A_BATCH
    until = time.monotonic() + PARTS_S
    while True:
        try:
            done = _round(run_id, begin, nowait, only, most)
        except (db.OperationalError, *advance.NEVER_RUNS) as error:
            is_limit = isinstance(error, db.OperationalError) and error.sqlstate == LIMIT_EXCEEDED
            if most > 1 and (is_limit or isinstance(error, run_cache.TooLarge)):
                most = max(1, most // 8)  # fewer events may fit
                run_cache.parts.put(run_id, most)
                continue
            if failed or isinstance(error, db.OperationalError):
                raise
            if nowait:
                return total
            # The run has ended now, so the next round closes its remaining events.
            advance.fail(begin, run_id, str(error))
            failed = True
            continue
        total += done.rows
        if not done.more:
            if most < EVENTS_A_BATCH:
                run_cache.parts.drop(run_id)
            return total
        if done.events and most < EVENTS_A_BATCH:
            most = min(EVENTS_A_BATCH, most * 2)  # the next events may have small values
            run_cache.parts.put(run_id, most)
        # Events with large values take long, so other runs get a turn in between.
        if done.rows and most < EVENTS_A_BATCH and time.monotonic() >= until:
            return total


def _round(run_id: str, begin: run_cache.Begin, nowait: bool, only: int | None, most: int) -> _Done:
    try:
        done = _batch(run_id, begin, nowait, only, most)
    except BaseException:
        # The progress may hold skips that were rolled back.
        run_cache.forget(run_id)
        raise
    for event in () if nowait else done.parked:
        input_nodes.store_question(begin, run_id, event["node_id"], event["id"])
    return done


class _Events:
    """Open events of a run, by their effects."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        # An event whose node has changed since then is closed without effect.
        valid = [row for row in rows if row["kind"] == row["node_status"]]
        self.parked = [row for row in valid if row["kind"] == "awaiting_input"]
        self.of_items = [row for row in valid if item_ids.of_item(row["node_id"])]
        """Events of items' nodes, which are counted; a failure there does not fail the run."""
        own = [row for row in rows if not item_ids.of_item(row["node_id"])]
        self.failed = [row for row in own if row["kind"] == row["node_status"] == "failed"]
        done = [r for r in own if r["kind"] == "completed" and r["node_status"] in plan.DONE]
        self.finished = [*dict.fromkeys(row["node_id"] for row in done)]
        """The nodes of the definition that are done."""
        self.advance_nodes = bool(self.finished or self.of_items)
        """Whether they may make further nodes ready, in a running run."""


def _batch(run_id: str, begin: run_cache.Begin, nowait: bool, only: int | None, most: int) -> _Done:
    with begin() as conn:
        lock = statements.runs.lock_if_free if nowait else statements.runs.lock
        run = lock(conn, run_id=run_id)
        if run is None:
            return _Done()
        rows = statements.outbox.open_events(conn, run_id=run_id, only=only, limit=most)
        if not rows:
            return _Done()
        events = _Events(rows)
        failed = _fatal(conn, run, events.failed)
        progress: plan.Progress | None = None
        advances = failed is None and events.advance_nodes and advance.is_live(run)
        if advances:
            if nowait and (hooks.app_resolves() or not run["has_definition"]):
                return _Done()
            progress = None if hooks.app_resolves() else run_cache.recall(run)
        outside = advances and progress is None
        settled = _Done() if outside else _settle(conn, run, events, failed, progress)
    if outside:
        return _learn_without_lock(run_id, begin, events)
    full = len(rows) == most and not (nowait and settled.parked)
    return settled._replace(more=full or settled.more, events=len(rows))


def _fatal(conn: db.Connection, run: Row, failed: list[Row]) -> Row | None:
    """Return the first failure that ends the run.

    If the run waits for its start, only a failure in its generation counts.
    """
    if not advance.is_queued(run):
        return failed[0] if failed and advance.is_live(run) else None
    for event in failed:
        job = statements.nodes.get_by_node(conn, run_id=run["id"], node_id=event["node_id"])
        if job is not None and job["generation"] == run["generation"]:
            return event
    return None


def _settle(
    conn: db.Connection,
    run: Row,
    events: _Events,
    failed: Row | None,
    progress: plan.Progress | None,
) -> _Done:
    """Act on events under the lock and close them; parked ones stay open.

    A queued run ignores completed nodes, since its start sees them. `progress` must be given for a
    running run whose events make nodes ready; without it they would be closed without effect.
    """
    count, parked, more = 0, list[Row](), False
    if failed is not None:
        reason = advance.node_failure(failed["node_id"], failed["node_error"])
        statements.runs.fail(conn, run_id=run["id"], error=reason)
    elif progress is not None:
        parked = events.parked
        count, more = advance.write(conn, run, progress, events.finished, events.of_items)
    elif advance.is_live(run) or advance.is_queued(run):
        assert advance.is_queued(run) or not events.advance_nodes
        parked = events.parked
    kept = {event["id"] for event in parked}
    closed = [event["id"] for event in events.rows if event["id"] not in kept]
    statements.outbox.close(conn, events=closed, error=None)
    return _Done(count, parked, more)


def _learn_without_lock(run_id: str, begin: run_cache.Begin, events: _Events) -> _Done:
    """Read the run's graph, and plan with an app's resolver, outside any transaction."""
    with begin() as conn:
        run = statements.runs.head(conn, run_id=run_id)
    if run is None:
        return _Done()
    run_cache.learn(begin, run)
    if not hooks.app_resolves():
        return _Done(more=True)
    closed = [event["id"] for event in events.rows if event["kind"] != "awaiting_input"]
    count = advance.plan_and_write(
        begin,
        run_id,
        events.finished,
        expected=advance.is_live,
        settle=lambda conn: statements.outbox.close(conn, events=closed, error=None),
        events=events.of_items,
    )
    return _Done(count or 0, more=True)


def drain_outbox(
    *, begin: run_cache.Begin = db.transaction, rows: row_isolation.Isolation | None = None
) -> int:
    """Dispatch the open events of up to RUNS_A_ROUND runs, oldest first; return how many runs.

    If a dispatch fails, its run is retried event by event with back-off. After
    `recovery.MAX_FAILURES` the run fails with a message. A run for which not even that can be
    written is added to `rows`.
    """
    kept = rows or row_isolation.Isolation()
    aside = kept.aside(DISPATCH)
    # Runs that this process cannot continue must not use up the limit.
    with run_cache.reading(begin) as conn:
        ids = statements.outbox.runs_with_events(
            conn, undefined=hooks.has_provider(), set_aside=list(aside), limit=RUNS_A_ROUND
        )

    def drained(run_id: str) -> bool:
        try:
            drain_run(run_id, begin=begin)
        except hooks.NoProvider as error:
            _log.debug("%s", error)
            return False
        return True

    done = 0
    for run_id in ids:
        singly = functools.partial(_dispatch_one_by_one, begin, run_id)
        done += bool(kept.attempt(DISPATCH, run_id, functools.partial(drained, run_id), singly))
    return done


def _dispatch_one_by_one(begin: run_cache.Begin, run_id: str, error: BaseException, _: int) -> bool:
    """Dispatch a run's events one by one, so that only failing events are counted; return True."""
    described, extra = hooks.describe_error(error), {"run_id": run_id}
    _log.warning("dispatch of run %s failed: %s", run_id, described, extra=extra)
    with begin() as conn:
        events = statements.outbox.open_events(conn, run_id=run_id, only=None, limit=EVENTS_A_BATCH)
    singly = row_isolation.Isolation()
    for event in events:
        drain = functools.partial(drain_run, run_id, begin=begin, only=event["id"])
        count = functools.partial(_count_failure, begin, run_id, event)
        singly.attempt(EVENT, str(event["id"]), drain, count)
    return not singly.aside(EVENT)


def _count_failure(
    begin: run_cache.Begin, run_id: str, event: Row, error: BaseException, _: int
) -> bool:
    """Postpone the event, or fail its run after too many failures; return True."""
    told = error if isinstance(error, hooks.HookFailed) else hooks.describe_error(error)
    reason = payload.error_text(told)
    with begin() as conn:
        statements.runs.lock(conn, run_id=run_id)
        delay_s = row_isolation.backoff_s(event["attempts"] + 1)
        attempts = (
            statements.outbox.postpone(conn, event=event["id"], error=reason, after_s=delay_s) or 0
        )
        if attempts < recovery.MAX_FAILURES:
            return True
        message = (
            f"poison: dispatching {event['kind']} of node {event['node_id']} failed "
            f"{attempts} times: {reason}"
        )
        statements.outbox.close(conn, events=[event["id"]], error=reason)
        statements.runs.fail(conn, run_id=run_id, error=payload.error_text(message))
    _log.error("run %s: %s", run_id, message, extra={"run_id": run_id})
    return True
