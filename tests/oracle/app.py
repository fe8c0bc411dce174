"""Define the app of the recorded workflows: `--app tests.oracle.app:setup`."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import queue_workflows
from queue_workflows import model_registry

FOLDER = Path(__file__).parent
JOURNAL = "QW_ORACLE_JOURNAL"
"""The file to which each call of a handler adds a line with its inputs as JSON."""


@functools.cache
def cases() -> dict[str, dict[str, Any]]:
    """Return the cases by id, each with its `context`."""
    read = json.loads((FOLDER / "cases.json").read_text())
    return {case["id"]: {"context": read["context"], **case} for case in read["cases"]}


@functools.cache
def expected() -> dict[str, dict[str, Any]]:
    """Return how 0.3.0 ended each case: `{"run", "nodes", "outputs"}` by the case's id."""
    return json.loads((FOLDER / "expected.json").read_text())


@functools.cache
def differences() -> dict[str, Any]:
    """Return the cases that end differently on purpose, and the line of the guide for each reason.

    `{"reasons": {reason: line}, "cases": {id: {"reason", "run", "nodes", "outputs"}}}`. Nodes and
    outputs are left out where they depend on when the run fails.
    """
    return json.loads((FOLDER / "differences.json").read_text())


def load_workflow(name: str) -> dict[str, Any]:
    return cases()[name]["workflow"]


def pipeline_schema(name: str) -> dict[str, Any]:
    return _pipelines()[name]


@functools.cache
def _pipelines() -> dict[str, Any]:
    return {name: flow for case in cases().values() for name, flow in case["pipelines"].items()}


def note(module: str, inputs: dict[str, Any]) -> None:
    """Add a line to the journal in one write; what JSON cannot carry appears by its text."""
    path = os.environ.get(JOURNAL)
    if path is None:
        return
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(fd, (json.dumps({"module": module, "in": inputs}, default=str) + "\n").encode())
    finally:
        os.close(fd)


def _models() -> None:
    model_registry.register(model_registry.ModelSpec(id="m1", loader=lambda: "HANDLE1"))
    model_registry.register(model_registry.ModelSpec(id="m2", loader=lambda: {"h": 2}))
    model_registry.register(model_registry.ModelSpec(id="mbad", loader=_no_weights))


def _no_weights() -> None:
    raise RuntimeError("no weights")


def setup() -> None:
    queue_workflows.set_node_module_package("tests.oracle.nodes")
    queue_workflows.set_workflow_provider(load_workflow, pipeline_schema)
    queue_workflows.set_builtin_model_registrar(_models)
