"""Cancelling and retrying runs keeps everything that was completed."""

from __future__ import annotations

from typing import Any

import pytest

import queue_workflows
from queue_workflows import db, dispatcher, node_queue, run_store
from tests.support import flow, transitions

pytestmark = pytest.mark.usefixtures("invariants_hold")


def chain(toy: flow.Flow) -> str:
    """A started run a → b → c and x, a completed, b and x queued."""
    toy.dag(a="", x="", b="a", c="b")
    run_id = toy.started()
    flow.finish(run_id, "s/a", v=1)
    return run_id


# --- cancel


def test_cancel_run_cancels_what_waits_and_keeps_what_is_done(toy: flow.Flow) -> None:
    run_id = chain(toy)
    row = queue_workflows.cancel_run(run_id)
    assert row is not None
    assert (row["status"], row["finished_at"] is not None) == ("cancelled", True)
    assert flow.states(run_id) == {
        "s/a": "completed",
        "s/b": "cancelled",
        "s/x": "cancelled",
    }
    assert queue_workflows.cancel_run(run_id) is None
    assert queue_workflows.cancel_run("nope") is None


def test_a_queued_run_is_cancelled_before_it_starts(toy: flow.Flow) -> None:
    toy.dag(a="")
    run_id = toy.submit()
    queue_workflows.cancel_run(run_id)
    toy.look()
    assert (flow.status(run_id), flow.states(run_id)) == ("cancelled", {})


def test_cancel_job_of_a_done_node_leaves_its_run_alone(toy: flow.Flow) -> None:
    run_id = chain(toy)
    assert queue_workflows.cancel_job(flow.job(run_id, "s/a")["id"]) is None
    assert flow.status(run_id) == "running"


# --- run again


def test_an_apps_update_to_queued_runs_only_what_was_not_completed(
    toy: flow.Flow,
) -> None:
    ran: list[str] = []
    broken = [True]

    def b() -> None:
        ran.append("b")
        if broken:
            raise ValueError

    flow.body(lambda: ran.append("a"), "a")
    flow.body(b, "b")
    flow.body(lambda: ran.append("c"), "c")
    toy.dag(
        {"id": "a", "node": "a"},
        {"id": "b", "node": "b", "depends_on": ["a"]},
        {"id": "c", "node": "c", "depends_on": ["b"]},
    )
    run_id = toy.submit()
    toy.go()
    assert (flow.status(run_id), ran) == ("failed", ["a", "b"])
    broken.clear()
    with db.connection() as mine:
        mine.execute("UPDATE workflow_runs SET status = 'queued' WHERE id = %s", (run_id,))
    toy.go()
    row = flow.run(run_id)
    assert (row["status"], row["generation"], row["error"]) == ("completed", 1, None)
    assert ran == ["a", "b", "b", "c"]
    assert flow.job(run_id, "s/a")["generation"] == 0


@pytest.mark.parametrize("how", ["failed", "cancelled"])
def test_retry_run_opens_what_failed_or_was_cancelled(toy: flow.Flow, how: str) -> None:
    run_id = chain(toy)
    if how == "failed":
        flow.fail(run_id, "s/b")
    else:
        queue_workflows.cancel_run(run_id)
    row = queue_workflows.retry_run(run_id)
    assert (row["status"], row["generation"], row["error"]) == ("queued", 1, None)
    toy.look()
    assert flow.states(run_id) == {"s/a": "completed", "s/x": "queued", "s/b": "queued"}
    job = flow.job(run_id, "s/b")
    assert (job["error"], job["attempts"], job["generation"]) == (None, 0, 1)
    toy.go()
    assert flow.status(run_id) == "completed"
    assert flow.job(run_id, "s/a")["context_delta"] == {"v": 1}


def test_retry_run_from_a_node_runs_it_and_what_depends_on_it(toy: flow.Flow) -> None:
    toy.dag(a="", x="", b="a", c="b")
    run_id = toy.submit()
    toy.go()
    assert flow.status(run_id) == "completed"
    assert queue_workflows.retry_run(run_id, from_node="s/b")["status"] == "queued"
    toy.look()
    assert flow.states(run_id) == {
        "s/a": "completed", "s/x": "completed", "s/b": "queued", "s/c": "cancelled",
    }  # fmt: skip
    toy.go()
    assert flow.status(run_id) == "completed"
    claims = {node_id: job["claim_no"] for node_id, job in flow.jobs(run_id).items()}
    assert claims == {"s/a": 1, "s/x": 1, "s/b": 2, "s/c": 2}


def test_a_run_may_be_retried_from_a_node_again_and_again(toy: flow.Flow) -> None:
    toy.dag(a="", b="a")
    run_id = toy.submit()
    toy.go()
    for again in (2, 3):
        queue_workflows.retry_run(run_id, from_node="s/a")
        toy.go()
        assert flow.status(run_id) == "completed"
        assert {job["claim_no"] for job in flow.jobs(run_id).values()} == {again}


def test_a_skip_is_decided_again_from_the_node_that_is_retried(toy: flow.Flow) -> None:
    toy.dag({"id": "a", "node": "ok"}, {"id": "b", "node": "ok", "depends_on": ["a"],
             "skip_if": {"$from": "skip"}})  # fmt: skip
    run_id = toy.submit(context={"skip": True})
    toy.go()
    assert flow.states(run_id)["s/b"] == "skipped"
    run_store.update_run(run_id, context={"skip": False})
    queue_workflows.retry_run(run_id, from_node="s/a")
    toy.go()
    assert flow.states(run_id) == {"s/a": "completed", "s/b": "completed"}


def test_a_retry_waits_for_what_would_still_bring_an_old_result(toy: flow.Flow, conn: Any) -> None:
    toy.dag(a="", b="a")
    run_id = toy.started()
    flow.finish(run_id, "s/a")
    old = transitions.claim_node(conn)
    queue_workflows.cancel_run(run_id)
    with pytest.raises(ValueError, match=r"'s/b' .* still runs"):
        queue_workflows.retry_run(run_id, from_node="s/a")
    transitions.complete_node(conn, old)
    queue_workflows.retry_run(run_id, from_node="s/a")
    toy.go()
    assert flow.status(run_id) == "completed"


def test_a_node_that_outlived_its_cancelled_run_counts_for_the_reopened_one(
    toy: flow.Flow, conn: Any
) -> None:
    toy.dag(a="", b="a")
    run_id = toy.started()
    running = transitions.claim_node(conn)
    queue_workflows.cancel_run(run_id)
    queue_workflows.retry_run(run_id)
    toy.look()
    assert flow.states(run_id) == {"s/a": "running"}
    transitions.complete_node(conn, running, v=1)
    toy.look()
    assert flow.states(run_id) == {"s/a": "completed", "s/b": "queued"}


def test_a_run_that_waits_for_its_start_fails_by_whichever_event_is_of_its_generation(
    toy: flow.Flow, conn: Any
) -> None:
    toy.dag(a="", b="", c="b")
    run_id = toy.submit()
    toy.look()
    a, b = transitions.claim_node(conn), transitions.claim_node(conn)
    assert (a["node_id"], b["node_id"]) == ("s/a", "s/b")
    fail = {"error": "broke", "retry": False}
    transitions.fail(conn, b, **fail)
    toy.look()
    conn.execute("UPDATE workflow_runs SET status = 'queued'")
    toy.look()
    run_store.reenqueue_running_for_resume()
    b = transitions.claim_node(conn)
    assert b["node_id"] == "s/b"
    transitions.fail(conn, a, **fail)
    transitions.fail(conn, b, **fail)
    flow.dispatch_all()
    assert flow.status(run_id) == "failed"


def test_a_retry_from_a_node_requests_no_end_of_nodes_that_still_run(
    toy: flow.Flow, conn: Any
) -> None:
    run_id = chain(toy)
    x = transitions.claim_node(conn)
    assert x["node_id"] == "s/x"
    queue_workflows.cancel_job(x["id"])
    queue_workflows.retry_run(run_id, from_node="s/a")
    assert flow.job(run_id, "s/x")["cancel_requested_at"] is None
    transitions.hand_back(conn, x, reason="cancelled")
    toy.go()
    assert flow.status(run_id) == "completed"


def test_a_run_with_a_status_of_its_app_goes_on(toy: flow.Flow) -> None:
    run_id = chain(toy)
    run_store.update_run(run_id, status="rendering")
    assert flow.finish(run_id, "s/b") == 1
    assert flow.states(run_id)["s/c"] == "queued"
    run_store.update_run(run_id, status="running")
    toy.go()
    assert flow.status(run_id) == "completed"


# --- runs that an operator put back in line


def test_a_failure_that_comes_in_while_a_run_waits_to_resume_fails_it(
    toy: flow.Flow,
) -> None:
    run_id = chain(toy)
    node_queue.mark_failed(flow.job(run_id, "s/b")["id"], error="broke")
    assert run_store.reenqueue_running_for_resume() == 1
    flow.dispatch_all()
    assert flow.run(run_id)["error"] == "node s/b failed: broke"


def test_an_old_failure_does_not_fail_a_run_that_was_reopened(toy: flow.Flow, conn: Any) -> None:
    run_id = chain(toy)
    running = transitions.claim_node(conn)
    queue_workflows.cancel_run(run_id)
    node_queue.mark_failed(running["id"], error="too late")
    queue_workflows.retry_run(run_id)
    flow.dispatch_all()
    assert flow.status(run_id) == "queued"
    toy.go()
    assert flow.status(run_id) == "completed"


def test_an_old_failure_does_not_fail_a_run_that_has_started_again(
    toy: flow.Flow, conn: Any
) -> None:
    run_id = chain(toy)
    running = transitions.claim_node(conn)
    queue_workflows.cancel_run(run_id)
    node_queue.mark_failed(running["id"], error="too late")
    queue_workflows.retry_run(run_id)
    dispatcher.start_run(run_id)
    assert flow.job(run_id, running["node_id"])["status"] == "queued"
    flow.dispatch_all()
    assert flow.status(run_id) == "running"
    toy.go()
    assert flow.status(run_id) == "completed"


def test_a_node_that_parks_while_its_run_waits_to_resume_gets_its_spec(
    toy: flow.Flow,
) -> None:
    toy.define(flow.ask("q"), flow.step("s"), s=flow.nodes(a=""))
    run_id = toy.started()
    node_queue.mark_awaiting_input(flow.job(run_id, "q")["id"])
    flow.complete(run_id, "s/a")
    assert run_store.reenqueue_running_for_resume() == 1
    flow.dispatch_all()
    toy.look()
    assert flow.status(run_id) == "running"
    assert flow.job(run_id, "q")["input_spec"]["widget"] == "file_upload"
    dispatcher.resume_after_input(run_id, "q", 1)
    assert flow.status(run_id) == "completed"
