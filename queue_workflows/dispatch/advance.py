"""Start and advance runs by planning the ready nodes and writing the plan under the run's lock."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

from queue_workflows import config, db, errors
from queue_workflows.claim import recovery, row_isolation
from queue_workflows.dag import confinement, hooks, payload, plan
from queue_workflows.db import statements
from queue_workflows.dispatch import expansion, run_cache
from queue_workflows.types import TERMINAL_RUN_STATUSES, Row, Unreadable

_log = logging.getLogger(__name__)
STARTS, STARTS_A_ROUND, STARTS_S = "start of run", 50, 1.0
"""The last one: seconds of starts, each with calls of the app, before events get their turn."""
State: TypeAlias = Callable[[Row], bool]
NEVER_RUNS = (
    errors.InvalidWorkflow,
    errors.UnknownWorkflow,
    errors.UnreadableRow,
    errors.ArgsRefused,
    errors.FolderRefused,
)
"""Errors of a run's definition, context, inputs or `out_dir`, which fail it without a retry."""

# The threads of a process share the progress. A thread that waits for this lock must not hold a
# pooled connection, since the lock's holder could need one. So under the run's lock, all reads use
# the transaction's own connection.
_planning = threading.Lock()


def is_queued(run: Row) -> bool:
    """Return whether a run waits for its start by this app."""
    return run["mode"] == "node" and run["status"] == "queued"


def is_live(run: Row) -> bool:
    """Return whether a run was started and has not ended; a status of the app's own counts, too."""
    return run["mode"] == "node" and run["status"] not in TERMINAL_RUN_STATUSES | {"queued"}


def make_plan(
    progress: plan.Progress,
    run: Row,
    reader: plan.Reader,
    finished: list[str] | None,
    *,
    committed: bool = True,
) -> plan.Plan:
    """Return the plan after these finished nodes, or at the start of a run if None.

    Raises `UnreadableRow` for values that are nested deeper than Python can follow, and
    `FolderRefused` at the start of a run whose `out_dir` OUT_ROOTS does not allow.
    """
    if finished is None:
        confinement.check(run["out_dir"])
    resolver, out_dir = config.get_config().get_resolve_ref(), run["out_dir"]
    try:
        with _planning:
            return plan.plan(
                progress, finished, reader, resolver, out_dir=out_dir, committed=committed
            )
    except RecursionError:
        raise errors.UnreadableRow("its definition or context is nested too deep") from None


def plan_as_text(
    progress: plan.Progress,
    run: Row,
    reader: run_cache.Reader,
    finished: list[str] | None,
    *,
    committed: bool = True,
) -> tuple[str | None, bool] | None:
    """Return the rows of a plan as JSON, or None without rows, and whether it completes the run.

    Returns None instead of a pair if `reader` lacks data, if the plan needs several statements or
    opens a map, which only `write` can do, and if the run fails.
    """
    try:
        made = make_plan(progress, run, reader, finished, committed=committed)
        if made.failure is not None or any(row.node.map is not None for row in made.rows):
            return None
        texts = list(itertools.islice(payload.arrays(map(plan.encode_row, made.rows)), 2))
    except (run_cache.ReadNeeded, errors.InvalidPayload):
        return None
    return None if len(texts) > 1 else (texts[0] if texts else None, made.complete)


def write(
    conn: db.Connection,
    run: Row,
    progress: plan.Progress,
    finished: list[str] | None,
    events: Sequence[Row] = (),
    made: plan.Plan | None = None,
) -> tuple[int, bool]:
    """Write the plan `made`, or one made from `finished` nodes, and count the items in `events`.

    The caller has locked the run; a queued run is started. Returns the number of new rows, and
    whether a map has ended, which left an event. The run fails if the inputs of a node cannot be
    stored or, outside of items, resolved, and if a map cannot take its list. Raises `TooLarge` if
    the write is too large for one transaction, but fewer nodes and events may fit.
    """
    run_id, is_part, count = run["id"], len(finished or ()) + len(events) > 1, 0
    if run["out_dir"] is None:
        run = confinement.given(run)
        statements.runs.set_out_dir(conn, run_id=run_id, out_dir=run["out_dir"])
    if finished is None:
        _check_context(conn, run_id)
        statements.outbox.close_failures(conn, run_id=run_id, before=run["generation"])
    if made is None:
        reader = run_cache.Reader(run_cache.in_open_transaction(conn), run_id)
        made = make_plan(progress, run, reader, finished)
    if is_queued(run):
        statements.runs.start(conn, run_id=run_id)
    expanding = expansion.Expansion(conn, run, progress.graph)
    try:
        if made.failure is not None:
            raise errors.InvalidPayload(made.failure[1])
        expanding.write(made.rows, resumed=finished is None)
        expanding.advance(events)
    except errors.InvalidPayload as error:
        if is_part and isinstance(error, run_cache.TooLarge):
            raise
        statements.runs.fail(conn, run_id=run_id, error=payload.error_text(error))
    else:
        count = expanding.rows
        if made.complete:
            statements.runs.complete(conn, run_id=run_id)
    return count, expanding.ended


def plan_and_write(
    begin: run_cache.Begin,
    run_id: str,
    finished: list[str] | None,
    *,
    expected: State,
    settle: Callable[[db.Connection], object] = lambda _: None,
    nowait: bool = False,
    head: Row | None = None,
    events: Sequence[Row] = (),
) -> int | None:
    """Plan from `finished` and write it, with `settle` in the same transaction.

    Returns the number of new rows, or None without a write if the run is not as `expected`, its
    generation has changed, or it is locked and `nowait` is set. An app's resolver runs before the
    run is locked, the built-in one under the lock. `head`, if given, is the run's row. `events`
    concern items of maps. Its length: on each exit the cached progress must match the rows.
    """
    with run_cache.reading(begin) as conn:
        run = head or statements.runs.head(conn, run_id=run_id)
    if run is None or not expected(run):
        return None
    run, made, count = confinement.given(run), None, None
    identity = run_cache.identity(run)
    try:
        progress, unfrozen = run_cache.prepare(begin, run)
        if finished is None and unfrozen is not None:
            inputs = _checked_inputs(begin, run)
            count = _start_fresh(begin, run, progress, unfrozen, inputs)
            if count is None:
                progress = plan.Progress(progress.graph)
        if count is None:
            if hooks.app_resolves():
                made = make_plan(progress, run, run_cache.Reader(begin, run_id), finished)
            with begin() as conn:
                lock = statements.runs.lock_if_free if nowait else statements.runs.lock
                locked = lock(conn, run_id=run_id)
                if (
                    locked is not None
                    and expected(locked)
                    and run_cache.identity(locked) == identity
                    and (unfrozen is None or run_cache.freeze(conn, run, unfrozen))
                ):
                    count, _ = write(conn, locked, progress, finished, events, made)
                    settle(conn)
    except BaseException:
        # The progress may hold skips that were rolled back.
        run_cache.forget(run_id)
        raise
    if count is not None and unfrozen is not None:
        run_cache.keep(run, progress)
    return count


def _checked_inputs(begin: run_cache.Begin, run: Row) -> dict[str, Any] | None:
    """Return the checked inputs of a workflow declared here, or None for any other workflow.

    Raises `ArgsRefused` for inputs that it does not take, since a plain SQL INSERT does not check
    them, and `UnreadableRow` for inputs that cannot be loaded or are not an object.
    """
    declared = config.get_config().workflow_map.get(run["workflow_name"])
    if declared is None:
        return None
    with run_cache.reading(begin) as conn:
        context = statements.runs.context(conn, run_id=run["id"])
        if not isinstance(context, (dict, Unreadable)):
            _check_context(conn, run["id"])
    if isinstance(context, Unreadable):
        raise errors.UnreadableRow(f"its inputs cannot be read: {context.reason}")
    declared.check_inputs(context)
    return cast("dict[str, Any]", context)


def _start_fresh(
    begin: run_cache.Begin,
    run: Row,
    progress: plan.Progress,
    made: run_cache.Definition,
    inputs: dict[str, Any] | None,
) -> int | None:
    """Start a run in one statement, and return the new rows; None if it takes more than that."""
    if hooks.app_resolves() or run["generation"]:
        return None

    def known(_: set[str] | None) -> dict[str, Any]:
        return inputs or {}  # the plan takes the members that it needs

    context = None if inputs is None else known
    with run_cache.reading(begin) as conn:
        reading = run_cache.in_open_transaction(conn)
        none = set[str]()
        reader = run_cache.Reader(reading, run["id"], done=none, present=none, context=context)
        rows, complete = plan_as_text(progress, run, reader, None) or (None, False)
        if rows is None or complete:
            return None
        # The statement does nothing if the run has changed since the plan read its inputs.
        return statements.runs.start_fresh(
            conn,
            run_id=run["id"],
            generation=run["generation"],
            born=run["born"],
            definition=made.text,
            digest=made.digest,
            nodes=rows,
            out_dir=run["out_dir"],
            version=run["version"],
        )


def _check_context(conn: db.Connection, run_id: str) -> None:
    """Raise `UnreadableRow` for inputs in which no ref can be resolved."""
    kind = statements.runs.context_type(conn, run_id=run_id)
    if kind != "object":
        raise errors.UnreadableRow(f"its inputs are a JSON {kind}, not an object")


def fail(begin: run_cache.Begin, run_id: str, reason: str, expected: State = bool) -> None:
    """Fail a run that has not ended and is as `expected`, which also cancels its waiting nodes."""
    with begin() as conn:
        run = statements.runs.lock(conn, run_id=run_id)
        if run is not None and expected(run):
            statements.runs.fail(conn, run_id=run_id, error=payload.error_text(reason))


def node_failure(node_id: str, error: str | None) -> str:
    """Return the run's error for a failed node."""
    return payload.error_text(f"node {node_id} failed: {error or 'no error was given'}")


# --- starts -----------------------------------------------------------------------------------


def start_run(run_id: str, *, begin: run_cache.Begin = db.transaction) -> int:
    """Freeze the definition, queue the first nodes, set the run to running; return the new rows.

    Accepts a queued run, and one that an app inserted as `running` without a definition. Returns 0
    for any other run, so a repeated call is harmless. A definition that cannot run fails the run,
    with the node and the reason in its `error`. Changes nothing if it raises `NoProvider` or
    `HookFailed`.
    """
    return _start(run_id, begin, nowait=False, expected=_is_unstarted) or 0


def _is_unstarted(run: Row) -> bool:
    undefined = run["status"] == "running" and not run["has_definition"]
    return is_queued(run) or (run["mode"] == "node" and undefined)


def _start(
    run_id: str,
    begin: run_cache.Begin,
    *,
    nowait: bool,
    head: Row | None = None,
    expected: State = is_queued,
) -> int | None:
    """Return the number of new rows; None if the run is not as `expected`, or locked (`nowait`)."""
    run_cache.forget(run_id)
    try:
        return plan_and_write(begin, run_id, None, expected=expected, nowait=nowait, head=head)
    except NEVER_RUNS as error:
        fail(begin, run_id, str(error), expected)  # another orchestrator may have started it
        return 0


def start_queued(
    *, begin: run_cache.Begin = db.transaction, rows: row_isolation.Isolation | None = None
) -> tuple[int, list[str], bool]:
    """Start queued runs that are due.

    Return how many started, the ids of runs without a provider here, and whether more may be due.
    A start that raises (other than not-found) delays its run with back-off. After
    `recovery.MAX_FAILURES` the run fails. A run that cannot even be delayed is added to `rows`. A
    run whose row is locked keeps its place for the next round.
    """
    kept = rows or row_isolation.Isolation()
    able = hooks.has_provider()
    started, waiting, until = 0, list[str](), time.monotonic() + STARTS_S
    if not able:
        with run_cache.reading(begin) as conn:
            waiting = statements.runs.undefined(conn, limit=1)

    more = True
    # If an app has locked all runs of a round, the ones behind them start in a second round.
    for look in (statements.runs.startable, statements.runs.startable_if_free):
        if started or not more:
            break
        with run_cache.reading(begin) as conn:
            heads = look(conn, undefined=able, set_aside=kept.aside(STARTS), limit=STARTS_A_ROUND)
        for head in itertools.takewhile(lambda _: time.monotonic() < until, heads):
            start = functools.partial(_start, head["id"], begin, nowait=True, head=head)
            delay = functools.partial(_delay, begin, head["id"])
            started += kept.attempt(STARTS, head["id"], start, delay) is not None
        more = len(heads) == STARTS_A_ROUND or time.monotonic() >= until
    return started, waiting, started > 0 and more


def _delay(begin: run_cache.Begin, run_id: str, error: BaseException, _: int) -> bool:
    """Delay a run that could not start, or fail it after its last try. Return True."""
    reason = payload.error_text(error)
    with begin() as conn:
        run = statements.runs.lock(conn, run_id=run_id)
        if run is None or not is_queued(run):
            return True
        delay_s = row_isolation.backoff_s(run["start_attempts"] + 1)
        failed = statements.runs.delay_start(conn, run_id=run_id, error=reason, after_s=delay_s)
        if failed >= recovery.MAX_FAILURES:
            message = f"poison: the run could not start in {failed} tries: {reason}"
            statements.runs.fail(conn, run_id=run_id, error=payload.error_text(message))
    _log.warning(
        "run %s could not start (try %d): %s", run_id, failed, reason, extra={"run_id": run_id}
    )
    return True
