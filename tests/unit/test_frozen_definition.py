"""What the engine reads of a run's stored definition, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from queue_workflows import errors
from queue_workflows.dag import graph

ENTRY: dict[str, Any] = {
    "id": "a", "module": "m", "queue": "cpu", "model": None, "deps": [], "inputs": {},
    "skip_if": None, "pipeline": None, "step": None,
}  # fmt: skip


def test_a_definition_of_a_million_nodes_is_refused_at_once() -> None:
    with pytest.raises(errors.InvalidWorkflow, match="1000000 nodes; at most 20000"):
        graph.read({"version": 1, "nodes": [ENTRY] * 1_000_000})


def test_a_stored_version_is_checked() -> None:
    made = {"version": 1, "workflow": "w", "nodes": [{**ENTRY, "version": 3}]}
    assert graph.read(made).nodes["a"].version_key == "m@3"
    assert graph.read({**made, "nodes": [ENTRY]}).nodes["a"].version_key is None
    for bad in ("3", -1, 2**40, True):
        with pytest.raises(errors.InvalidWorkflow, match="version must be"):
            graph.read({**made, "nodes": [{**ENTRY, "version": bad}]})
