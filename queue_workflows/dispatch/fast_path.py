"""Decide what follows from a node that a worker completes, without reading the database."""

from __future__ import annotations

import json
from typing import Any

from queue_workflows import errors
from queue_workflows.dag import payload
from queue_workflows.dispatch import advance, hooks, run_cache
from queue_workflows.engine import claims
from queue_workflows.types import Row


class _OwnReader(run_cache.NoKnowledge):
    """The knowledge of the completed node's result alone."""

    def __init__(self, node_id: str, result: str) -> None:
        self._node_id = node_id
        self._result = result

    def context(self, heads: set[str] | None) -> dict[str, Any]:
        if heads is None or heads != {self._node_id}:
            raise run_cache.ReadNeeded
        return {self._node_id: json.loads(self._result)}


def _run_of(job: Row) -> Row:
    return {"id": job["run_id"], "generation": None, "born": None, **(job.get("run") or {})}


def note(job: Row) -> None:
    """Remember that a claimed node was recorded as completed."""
    progress = run_cache.recall(_run_of(job))
    if progress is not None:
        progress.known.add(job["node_id"])


def plan_from_result(job: Row, result: str) -> claims.Ahead | None:
    """Return what follows from a claimed node with this result (JSON); None: read the database.

    Changes nothing. Call `note` after the commit.
    """
    run = _run_of(job)
    progress = None if hooks.app_resolves() else run_cache.recall(run)
    # The second condition gives the same result as the plan for a fan's nodes, at less cost.
    if progress is None or advance.must_read(progress, job["node_id"]):
        return None
    try:
        reader = _OwnReader(job["node_id"], result)
        made = advance.make_plan(progress, run, reader, [job["node_id"]], committed=False)
        if made.failure is not None:
            return None
        texts = list(payload.encode_plan(made.rows))
    except (run_cache.ReadNeeded, errors.InvalidPayload):
        return None
    if len(texts) > 1:
        return None
    return claims.Ahead(run["generation"], texts[0] if texts else None, made.complete)
