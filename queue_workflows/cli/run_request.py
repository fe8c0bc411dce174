"""Check what `queue-workflows run` is asked for, and insert the run."""

from __future__ import annotations

import contextlib
import uuid
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from queue_workflows import config, errors, runs
from queue_workflows.cli import input_option
from queue_workflows.dag import graph
from queue_workflows.dispatch import hooks
from queue_workflows.types import JsonDict, Run

DEFAULT_OUT = Path("queue-workflows-out")
"""Parent of the folders of runs without one; created when a node asks for its folder."""
ITEMS = 8
"""How often the body of a map counts, since the number of its items is not known yet."""


class Request:
    """A validated request for a run; `out_dir` None: a folder of its own, named by its id."""

    def __init__(
        self,
        *,
        workflow: str,
        inputs: JsonDict,
        out_dir: Path | None,
        priority: int,
        queues: dict[str, int],
    ) -> None:
        self.workflow = workflow
        self.inputs = inputs
        self.out_dir = out_dir
        self.priority = priority
        self.queues = queues

    def insert(self) -> Run:
        """Insert the run and return its row. Raises `InvalidPayload` before any write."""
        run_id = str(uuid.uuid4())
        return runs.submit(
            self.workflow,
            run_id=run_id,
            out_dir=str(self.out_dir or DEFAULT_OUT.absolute() / run_id),
            priority=self.priority,
            inputs=self.inputs,
        )


def inputs_of(workflow: str, given: Iterable[str]) -> JsonDict:
    """Return the run's inputs, checked if the app declares the workflow in Python."""
    declared = config.get_config().workflow_map.get(workflow)
    if declared is None:
        return input_option.inputs(given)
    found = input_option.inputs(given, declared.accepts_input)
    try:
        declared.check_inputs(found)
    except errors.ArgsRefused as error:
        raise errors.ArgsRefused(f"{error}; inputs are given by --input KEY=VALUE") from None
    return found


def folder(out: Path | None) -> Path | None:
    """Create the folder and return it, absolute. Raises `InvalidConfig` if it cannot be used."""
    if out is None:
        return None
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise errors.InvalidConfig(f"--out {out} cannot be used: {error.strerror}") from None
    return out.resolve()


def used_queues(workflow: str, *, app: str | None) -> dict[str, int]:
    """Return how many nodes of the workflow go to each queue; one cpu node without a provider.

    Those of its maps and of its child runs count too, the body of a map ITEMS times.

    Raises `UnknownWorkflow`, `InvalidWorkflow`, and `InvalidConfig` for an app without provider.
    """
    try:
        made = hooks.expand({"id": workflow, "workflow_name": workflow})
    except hooks.NoProvider:
        if app is None:
            return {"cpu": 1}
        raise errors.InvalidConfig(
            f"workflow {workflow!r}: --app {app} sets no workflow provider (set_workflow_provider)"
        ) from None
    except errors.UnknownWorkflow as error:
        hint = errors.hint(workflow, config.get_config().workflow_map)
        text = str(error).removesuffix(hint) + (hint or f"; is --app {app} the one that has it?")
        raise errors.UnknownWorkflow(text) from error
    found, graphs, known = Counter[str](), [(made["nodes"], 1)], {workflow}
    while graphs:
        nodes, times = graphs.pop()
        for node in nodes:
            found[node["queue"]] += times
            if settings := node.get("map"):
                graphs.append((settings["body"], times * ITEMS))
            child = graph.workflow_of(node["module"])
            if child is not None and child not in known:
                known.add(child)
                # A child that cannot be read fails its node, which says why.
                with contextlib.suppress(errors.QueueWorkflowsError):
                    below = hooks.expand({"id": child, "workflow_name": child})
                    graphs.append((below["nodes"], times))
    return dict(found)
