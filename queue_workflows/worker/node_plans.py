"""Plan what follows from completed nodes, from their results and the graphs that are known."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from queue_workflows import db, errors
from queue_workflows.dag import item_ids
from queue_workflows.db import statements
from queue_workflows.dispatch import fast_path, hooks, run_cache
from queue_workflows.engine import claims, outcomes
from queue_workflows.types import Row
from queue_workflows.worker import claimed_job

T = TypeVar("T")
_log = logging.getLogger(__name__)
Done = tuple[claimed_job.ClaimedJob, outcomes.Outcome]


def job_row(job: claimed_job.ClaimedJob) -> Row:
    """Return what the planner reads of a node: its ids and its run."""
    return {"run_id": job.run_id, "node_id": job.node_id, "run": job.run}


def learned(done: Sequence[Done]) -> db.Script[None]:
    """Read the graphs of the runs of completed nodes that this process does not know yet."""
    if hooks.app_resolves():
        return
    runs = [
        fast_path.run_of(job_row(job)) for job, _ in done if not item_ids.of_item(job.node_id or "")
    ]
    wanted = _best_effort(lambda: run_cache.unknown(runs))
    if wanted:
        given = {"ids": [run["id"] for run in wanted], "most": run_cache.SMALL_BYTES}
        rows = yield db.Statement(statements.runs.definition_texts, given)
        texts = {row["id"]: row["text"] for row in rows}
        _best_effort(lambda: run_cache.learned(wanted, texts))


def after(done: Sequence[Done]) -> list[claims.Ahead | None]:
    """Return what follows from each of these nodes; None: the orchestrator finds that out.

    The nodes of one run are planned together; the last of them has the plan.
    """
    found: list[claims.Ahead | None] = [None] * len(done)
    runs: dict[str | None, list[int]] = {}
    for place, (job, _) in enumerate(done):
        runs.setdefault(job.run_id, []).append(place)
    for places in runs.values():
        nodes = [(job_row(done[at][0]), done[at][1].result) for at in places]
        ahead = _best_effort(functools.partial(fast_path.plan, nodes))
        if ahead is not None:
            for at in places[:-1]:
                found[at] = ahead._replace(rows=None, complete=False)
            found[places[-1]] = ahead
    return found


def _best_effort(call: Callable[[], T]) -> T | None:
    """Return what it returns, or None: then the orchestrator does what a plan leaves undone."""
    try:
        return call()
    except errors.QueueWorkflowsError as error:
        _log.debug("a run is left to the orchestrator: %s", error)
    except Exception as error:  # noqa: BLE001  best effort: a hostile run must not end the worker
        _log.warning("a run is left to the orchestrator: %r", error)
    return None


def noted(done: Sequence[Done]) -> None:
    """Remember that these nodes were recorded as completed."""
    for job, _ in done:
        _best_effort(functools.partial(fast_path.note, job_row(job)))


def rows_planned(ahead: claims.Ahead | None) -> int:
    """Return how many nodes a plan queues."""
    return 0 if ahead is None or ahead.rows is None else len(json.loads(ahead.rows))
