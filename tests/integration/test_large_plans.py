"""Nodes with large inputs that become ready together are queued in several transactions."""

from __future__ import annotations

from typing import Any

import pytest

from queue_workflows import dispatcher
from tests.support import factories, flow


def fan(toy: flow.Flow, width: int, first: bool) -> None:
    """Define `width` nodes that each get the run's `big`, after a node `prep` unless `first`."""
    given = [{"name": "big", "from": "pipeline.big"}]
    nodes = [{"id": f"n{i}", "node": "ok", "inputs": given} for i in range(width)]
    prep = [] if first else flow.nodes(prep="")
    for node in nodes:
        node["depends_on"] = [] if first else ["prep"]
    toy.define(flow.step("t"), name="small", t=flow.nodes(a=""))
    toy.define(flow.step("s", inputs={"big": {"$from": "big"}}), s=[*prep, *nodes])


@pytest.mark.parametrize("first", [True, False])
def test_a_plan_that_is_too_large_for_one_transaction_is_written_in_parts(
    toy: flow.Flow, conn: Any, first: bool
) -> None:
    fan(toy, 40, first)
    run_id = toy.submit(context={"big": "x" * 900_000})
    other = toy.submit(workflow_name="small")
    if not first:
        toy.look()
        flow.complete(run_id, "s/prep")
    while len(flow.states(run_id)) < 40:
        before = len(flow.states(run_id))
        toy.look()
        assert len(flow.states(run_id)) > before
        assert flow.status(other) == "running"
    parts = "SELECT count(*) FROM workflow_node_jobs WHERE run_id = %s GROUP BY created_at"
    assert max(factories.column(conn, parts, run_id)) <= 19
    toy.go()
    assert set(flow.states(run_id).values()) == {"completed"}
    assert (flow.status(run_id), flow.status(other)) == ("completed", "completed")


def test_a_node_that_fails_between_two_parts_fails_the_run(toy: flow.Flow) -> None:
    fan(toy, 25, True)
    run_id = toy.submit(context={"big": "x" * 900_000})
    dispatcher.start_run(run_id)
    assert len(flow.states(run_id)) < 25
    flow.fail(run_id, "s/n0")
    toy.look()
    assert (flow.status(run_id), flow.run(run_id)["error"]) == ("failed", "node s/n0 failed: broke")
