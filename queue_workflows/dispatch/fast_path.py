"""Decide what follows from a node that a worker completes, from its result and the run's graph."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from queue_workflows import errors
from queue_workflows.dag import item_ids, payload
from queue_workflows.dispatch import advance, hooks, run_cache
from queue_workflows.engine import claims
from queue_workflows.types import Row

EMPTY = "{}"


class _OwnReader(run_cache.NoKnowledge):
    """The knowledge of the completed nodes' results alone (JSON texts by node id)."""

    def __init__(self, results: Mapping[str, str]) -> None:
        self._results = results

    def context(self, heads: set[str] | None) -> dict[str, Any]:
        # An empty result leaves the value that `run.context` may have under the node's id.
        if not heads or not all(self._results.get(head, EMPTY) != EMPTY for head in heads):
            raise run_cache.ReadNeeded
        return {head: json.loads(self._results[head]) for head in heads}


def run_of(job: Row) -> Row:
    """Return what identifies the run of a claimed node."""
    return {
        "id": job["run_id"],
        "generation": None,
        "revision": None,
        "born": None,
        **(job.get("run") or {}),
    }


def note(job: Row) -> None:
    """Remember that a claimed node was recorded as completed."""
    progress = run_cache.recall(run_of(job))
    if progress is not None and not item_ids.of_item(job["node_id"]):
        progress.known.add(job["node_id"])


def plan(done: Sequence[tuple[Row, str]]) -> claims.Ahead | None:
    """Return what follows from claimed nodes of one run with these results (JSON texts).

    None: the dispatcher decides, for example since other nodes matter, the graph is not known, or
    the run fails. Changes nothing: call `note` after the commit. Raises `UnreadableRow`.
    """
    run = run_of(done[0][0])
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
        texts = list(itertools.islice(payload.encode_plan(made.rows), 2))
    except (run_cache.ReadNeeded, errors.InvalidPayload):
        return None
    if len(texts) > 1:
        return None
    return claims.Ahead(
        run["generation"], texts[0] if texts else None, made.complete, run["revision"]
    )
