"""Define and recognize the `node_module` of child runs, and of the node with a run's output."""

from __future__ import annotations

RUN = "__run__"
"""Followed by a workflow's name: the node waits for a run of it, and has its output."""
START = "__start__"
"""The same, but the node ends at once, with the id of the run."""
OUTPUT = "__output__"
"""Module and id of the node that has the output of its run."""
MAX_DEPTH = 8
"""How many child runs may be nested below a run."""


def workflow_of(module: str) -> str | None:
    """Return the workflow of whose run a node of this module consists; None for other nodes."""
    for prefix in (RUN, START):
        if module.startswith(prefix):
            return module.removeprefix(prefix)
    return None


def is_engine(module: str) -> bool:
    """Return whether the engine itself ends nodes of this module."""
    return module == OUTPUT or workflow_of(module) is not None
