"""Plan the next nodes of runs from the results of completed nodes and the cached graphs."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from queue_workflows import db, errors
from queue_workflows.claim import claims, outcomes
from queue_workflows.dag import hooks, item_ids
from queue_workflows.db import statements
from queue_workflows.dispatch import advance, run_cache
from queue_workflows.worker import claimed_job

T = TypeVar("T")
EMPTY = "{}"
_log = logging.getLogger(__name__)
Done = tuple[claimed_job.ClaimedJob, outcomes.Outcome]


def learned(done: Sequence[Done]) -> db.Script[None]:
    """Read the graphs of completed nodes' runs that this process has not cached yet."""
    if hooks.app_resolves():
        return
    runs = [job.run for job, _ in done if not item_ids.of_item(job.node_id or "")]
    wanted = _best_effort(lambda: run_cache.unknown(runs))
    if wanted:
        ids, most = [run["id"] for run in wanted], run_cache.SMALL_BYTES
        rows = yield from statements.runs.definition_texts.script(ids=ids, most=most)
        texts = {row["id"]: row["text"] for row in rows}
        _best_effort(lambda: run_cache.learned(wanted, texts))


def after(done: Sequence[Done]) -> list[claims.Ahead | None]:
    """Return a plan for each of these nodes, or None where the orchestrator has to make it.

    The nodes of one run are planned together; the plan is at the last of them.
    """
    found: list[claims.Ahead | None] = [None] * len(done)
    runs: dict[str | None, list[int]] = {}
    for place, (job, _) in enumerate(done):
        runs.setdefault(job.run_id, []).append(place)
    for places in runs.values():
        ahead = _best_effort(functools.partial(plan_ahead, [done[at] for at in places]))
        if ahead is not None:
            for at in places[:-1]:
                found[at] = ahead._replace(rows=None, complete=False)
            found[places[-1]] = ahead
    return found


def plan_ahead(done: Sequence[Done]) -> claims.Ahead | None:
    """Return the plan after these nodes of one run, made from their results alone.

    Returns None if the orchestrator has to decide, for example because the results of other nodes
    matter, the graph is not cached, or the run fails. Call `noted` after the commit. Raises
    `UnreadableRow`.
    """
    run = done[0][0].run
    results = {job.node_id or "": outcome.result for job, outcome in done}
    items = any(map(item_ids.of_item, results))
    progress = None if items or hooks.app_resolves() else run_cache.recall(run)
    if progress is None:
        return None

    def context(heads: set[str] | None) -> dict[str, Any]:
        # An empty result keeps the value that `run.context` has under the node's id, if any.
        if not heads or not all(results.get(head, EMPTY) != EMPTY for head in heads):
            raise run_cache.ReadNeeded
        return {head: json.loads(results[head]) for head in heads}

    reader = run_cache.Reader(None, run["id"], context=context)
    planned = advance.plan_as_text(progress, run, reader, [*results], committed=False)
    return None if planned is None else claims.Ahead(run["generation"], *planned, run["revision"])


def _best_effort(call: Callable[[], T]) -> T | None:
    """Return the result of `call`, or None if it fails, so that the orchestrator plans."""
    try:
        return call()
    except errors.QueueWorkflowsError as error:
        _log.debug("the orchestrator plans a run, as this worker cannot: %s", error)
    except Exception as error:  # noqa: BLE001  best effort: a hostile run must not end the worker
        _log.warning("the orchestrator plans a run, as this worker cannot: %r", error)
    return None


def noted(job: claimed_job.ClaimedJob) -> None:
    """Remember that a node was recorded as completed."""

    def note() -> None:
        progress = run_cache.recall(job.run)
        if progress is not None and not item_ids.of_item(job.node_id or ""):
            progress.known.add(job.node_id or "")

    _best_effort(note)
