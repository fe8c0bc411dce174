"""Random workflows end as a slow interpreter of the docs says, by each way through the engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import queue_workflows
from queue_workflows import claim_worker, node_executor, node_queue, refs, run_store
from tests.support import flow, reference
from tests.support.examples import examples

ROUNDS = 300


def ended(run_id: str, answers: dict[str, Any]) -> bool:
    """Answer what the run asks, and return whether it has ended."""
    run = flow.run(run_id)
    if run["status"] in ("running", "queued"):
        for job in node_queue.list_jobs_for_run(run_id):
            asked = job["status"] == "awaiting_input" and job["input_spec"] is not None
            if asked and job["child_run_id"] is None:
                queue_workflows.submit_input(run_id, job["node_id"], answers[job["node_id"]])
    return run["status"] in ("completed", "failed", "cancelled")


# --- the ways -------------------------------------------------------------------------------------


def ahead(toy: flow.Flow) -> None:
    """A worker that knows the graph queues what follows when it records a node."""
    toy.look()
    toy.work()


def forgetful(toy: flow.Flow) -> None:
    """A worker that does not know the graph dispatches what follows."""
    toy.look()
    with flow.unplanned():
        toy.work()


def reading(toy: flow.Flow) -> None:
    """A worker reads the graph of each run anew."""
    toy.look()
    flow.forget_all()
    toy.work()


def orchestrated(toy: flow.Flow) -> None:
    """Only an orchestrator acts on what a node returned."""
    toy.look()
    job = node_queue.claim_next_cpu_job()
    while job is not None:
        node_executor.execute_node(job)
        job = node_queue.claim_next_cpu_job()


def resolved_by_the_app(toy: flow.Flow) -> None:
    """The app has a resolver of its own."""
    queue_workflows.set_workflow_provider(
        *reference.provider(), resolve_ref=lambda value, context: refs.resolve_ref(value, context)
    )
    toy.look()
    toy.work()


def resumed(toy: flow.Flow) -> None:
    """The run is started anew after every few nodes, and keeps the nodes that are done."""
    toy.look()
    worker = claim_worker.ClaimWorker(queue="cpu", host="box")
    for _ in flow.runs(worker, 2):
        pass
    run_store.reenqueue_running_for_resume()


WAYS: list[Callable[[flow.Flow], None]] = [
    ahead, forgetful, reading, orchestrated, resolved_by_the_app, resumed,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@given(random=st.randoms(use_true_random=False))
@settings(
    max_examples=examples(50, quick=6),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_a_run_ends_as_the_docs_say(
    toy: flow.Flow, way: Callable[[flow.Flow], None], random: Random
) -> None:
    case = reference.case(random)
    reference.provide({"w": case})
    run_id = toy.submit(context=case.context)
    for _ in range(ROUNDS):
        way(toy)
        if ended(run_id, case.answers):
            break
    told = reference.difference(case, flow.run(run_id), node_queue.list_jobs_for_run(run_id))
    assert not told, json.dumps(case, indent=1) + "\n" + "\n".join(told)
