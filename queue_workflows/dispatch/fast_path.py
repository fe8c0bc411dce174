"""Decide what follows from a node that a worker completes, without reading the database."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from queue_workflows import errors
from queue_workflows.dag import item_ids, payload
from queue_workflows.dispatch import advance, hooks, run_cache
from queue_workflows.engine import claims
from queue_workflows.types import Row


class _OwnReader(run_cache.NoKnowledge):
    """The knowledge of the completed nodes' results alone (JSON texts by node id)."""

    def __init__(self, results: Mapping[str, str]) -> None:
        self._results = results

    def context(self, heads: set[str] | None) -> dict[str, Any]:
        if not heads or not heads <= self._results.keys():
            raise run_cache.ReadNeeded
        return {head: json.loads(self._results[head]) for head in heads}


def _run_of(job: Row) -> Row:
    return {
        "id": job["run_id"],
        "generation": None,
        "revision": None,
        "born": None,
        **(job.get("run") or {}),
    }


def note(job: Row) -> None:
    """Remember that a claimed node was recorded as completed."""
    progress = run_cache.recall(_run_of(job))
    if progress is not None and not item_ids.of_item(job["node_id"]):
        progress.known.add(job["node_id"])


def plan_from_result(job: Row, result: str) -> claims.Ahead | None:
    """Return what follows from a claimed node with this result (JSON); None: read the database.

    Changes nothing. Call `note` after the commit.
    """
    return plan_from_results([(job, result)])


def plan_from_results(done: Sequence[tuple[Row, str]]) -> claims.Ahead | None:
    """Return what follows from these claimed nodes of one run, as `plan_from_result` does."""
    run = _run_of(done[0][0])
    results = {job["node_id"]: result for job, result in done}
    items = any(map(item_ids.of_item, results))
    progress = None if items or hooks.app_resolves() else run_cache.recall(run)
    # The second condition gives the same result as the plan for a fan's nodes, at less cost.
    if progress is None or advance.must_read(progress, *results):
        return None
    try:
        reader = _OwnReader(results)
        made = advance.make_plan(progress, run, reader, [*results], committed=False)
        if made.failure is not None or advance.has_maps(made):
            return None
        texts = list(payload.encode_plan(made.rows))
    except (run_cache.ReadNeeded, errors.InvalidPayload):
        return None
    if len(texts) > 1:
        return None
    return claims.Ahead(
        run["generation"], texts[0] if texts else None, made.complete, run["revision"]
    )
