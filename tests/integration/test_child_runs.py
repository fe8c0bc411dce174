"""A workflow called in a workflow is a run that a node waits for; both end and retry together."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from queue_workflows import check, db, declare, errors, history, jobs, node, runs, workflow
from tests.support import console, factories, flow, sweeps
from tests.support.wait import until

pytestmark = pytest.mark.usefixtures("invariants_hold")

CALLS: list[str] = []
BAD: set[str] = set()


@node
def first(name: str) -> str:
    CALLS.append(f"first {name}")
    return name.upper()


@node
def second(text: str) -> dict[str, str]:
    CALLS.append(f"second {text}")
    if text in BAD:
        raise ValueError(f"{text} is bad")
    return {"text": f"<{text}>"}


@node
def last(text: str) -> str:
    CALLS.append(f"last {text}")
    return text


@workflow
def inner(name: str) -> dict[str, str]:
    return second(first(name))


@workflow
def outer(name: str) -> str:
    return last(inner(name)["text"])


@workflow
def top(name: str) -> str:
    return outer(name)


@workflow
def sends(name: str) -> None:
    last(inner.start(name))


@pytest.fixture(autouse=True)
def known(toy: flow.Flow) -> None:
    del toy
    CALLS.clear()
    BAD.clear()
    declare.install(first, second, last, inner, outer, top, sends)


def submit(workflow_name: str = "outer", name: str = "a") -> str:
    return runs.submit(workflow_name, inputs={"name": name})["id"]


def child(run_id: str, node_id: str = "inner") -> str:
    found = flow.job(run_id, node_id)["child_run_id"]
    assert found is not None
    return found


def started(run_id: str, toy: flow.Flow) -> str:
    """Start a run and its child, whose first node is queued; return the child."""
    toy.look()
    found = child(run_id)
    toy.look()
    assert flow.states(found)["first/first"] == "queued"
    return found


# --- the way of a run


def test_the_node_waits_and_has_the_output_of_its_run(toy: flow.Flow) -> None:
    run_id = submit("top", name="a")
    toy.go()
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    middle = child(run_id, "outer")
    inside = child(middle)
    assert flow.job(run_id, "__output__")["context_delta"] == {"result": "<A>"}
    assert flow.job(middle, "inner")["context_delta"] == {"result": {"text": "<A>"}}
    row = flow.run(inside)
    assert (row["status"], row["workflow_name"], row["context"]) == (
        "completed",
        "inner",
        {"name": "a"},
    )
    assert (row["parent_run_id"], row["parent_node_id"]) == (middle, "inner")
    assert row["out_dir"] == f"{flow.run(run_id)['out_dir']}/outer/inner"
    assert CALLS == ["first a", "second A", "last <A>"]


def test_an_answer_does_not_end_a_node_that_waits_for_its_run(toy: flow.Flow, conn: Any) -> None:
    run_id = submit()
    started(run_id, toy)
    factories.insert(
        conn, "workflow_input_submissions", run_id=run_id, node_id="inner", value=json.dumps("no")
    )
    toy.go()
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    error = "SELECT error FROM workflow_input_submissions"
    assert factories.column(conn, error) == [
        f"node 'inner' of run {run_id!r} waits for a run: it takes no answer"
    ]


def test_a_child_has_the_priority_and_the_headers_of_its_parent(toy: flow.Flow) -> None:
    given: Any = {"priority": 7, "headers": {"tenant": "x"}}
    run_id = runs.submit("outer", inputs={"name": "a"}, **given)["id"]
    inside = flow.run(started(run_id, toy))
    assert (inside["priority"], inside["headers"]) == (7, {"tenant": "x"})
    assert flow.job(inside["id"], "first/first")["priority"] == 7


def test_dots_in_the_id_of_a_step_keep_its_run_in_the_folder_of_the_parent(toy: flow.Flow) -> None:
    toy.define({"id": "..", "kind": "run", "workflow": "inner", "inputs": {"name": "a"}})
    run_id = toy.started()
    inside = flow.run(child(run_id, ".."))
    assert inside["out_dir"] == f"{flow.run(run_id)['out_dir']}/%2E%2E"


def test_a_waiting_node_takes_no_slot(toy: flow.Flow) -> None:
    run_id = submit()
    started(run_id, toy)
    row = flow.job(run_id, "inner")
    assert (row["status"], row["worker_id"], row["claim_no"]) == ("awaiting_input", None, 0)
    assert toy.work() == 2  # the two nodes of the child


def test_start_makes_a_run_and_does_not_wait(toy: flow.Flow) -> None:
    run_id = submit("sends", name="a")
    toy.look()
    inside = child(run_id)
    assert flow.job(run_id, "last/last")["inputs"] == {"text": inside}
    flow.finish(run_id, "last/last", result=inside)
    assert (flow.status(run_id), flow.status(inside)) == ("completed", "running")
    toy.go()
    assert flow.status(inside) == "completed"


def test_a_parent_that_ends_leaves_a_started_run_alone(toy: flow.Flow) -> None:
    run_id = submit("sends", name="a")
    toy.look()
    runs.cancel(run_id)
    toy.go()
    assert (flow.status(run_id), flow.status(child(run_id))) == ("cancelled", "completed")


def test_a_skipped_call_makes_no_run(toy: flow.Flow) -> None:
    call = {"id": "c", "kind": "run", "workflow": "inner", "inputs": {"name": "a"}}
    toy.define({**call, "skip_if": {"$from": "no"}})
    run_id = toy.started(context={"no": True})
    assert (flow.status(run_id), flow.states(run_id)) == ("completed", {"c": "skipped"})
    assert len(runs.list()) == 1


# --- failure, cancel, retry


def test_a_failed_child_fails_the_node_with_its_error_and_retry_retries_the_child(
    toy: flow.Flow,
) -> None:
    BAD.add("A")
    run_id = submit()
    toy.go()
    inside = child(run_id)
    error = flow.run(run_id)["error"]
    assert error.startswith(f"node inner failed: run {inside} failed: node second/second failed")
    assert "A is bad" in error
    BAD.clear()
    CALLS.clear()
    runs.retry(run_id)
    toy.go()
    assert (flow.status(run_id), child(run_id)) == ("completed", inside)
    assert CALLS == ["second A", "last <A>"]


def test_a_retry_from_the_node_makes_a_new_run_if_the_child_has_completed(
    toy: flow.Flow,
) -> None:
    run_id = submit()
    toy.go()
    old = child(run_id)
    runs.retry(run_id, from_node="inner")
    toy.go()
    assert flow.status(run_id) == "completed"
    assert child(run_id) != old
    assert CALLS == ["first a", "second A", "last <A>"] * 2


def test_other_inputs_make_a_new_run(toy: flow.Flow) -> None:
    BAD.add("A")
    run_id = submit()
    toy.go()
    old = child(run_id)
    factories.execute('UPDATE workflow_runs SET context = \'{"name": "b"}\' WHERE id = %s', run_id)
    runs.retry(run_id)
    toy.go()
    assert (flow.status(run_id), flow.status(old)) == ("completed", "failed")
    assert child(run_id) != old


def test_cancel_of_the_parent_cancels_its_children(toy: flow.Flow) -> None:
    run_id = submit("top", name="a")
    toy.look()
    toy.look()
    middle = child(run_id, "outer")
    inside = started(middle, toy)
    assert runs.cancel(run_id) is not None
    assert {flow.status(each) for each in (run_id, middle, inside)} == {"cancelled"}
    assert flow.states(run_id) == {"outer": "cancelled"}
    assert flow.states(inside) == {"first/first": "cancelled"}
    assert factories.execute("SELECT FROM workflow_dispatch_events") == []
    runs.retry(run_id)
    toy.go()
    assert flow.status(run_id) == "completed"
    assert (child(run_id, "outer"), child(middle)) == (middle, inside)


def test_cancel_of_the_node_cancels_the_parent_and_the_child(toy: flow.Flow, conn: Any) -> None:
    run_id = submit()
    inside = started(run_id, toy)
    assert jobs.cancel(flow.job(run_id, "inner")["id"])
    sweeps.end_stalled(conn)
    assert (flow.status(run_id), flow.status(inside)) == ("cancelled", "cancelled")


def test_a_failure_beside_the_node_cancels_the_child(toy: flow.Flow) -> None:
    call = {"id": "c", "kind": "run", "workflow": "inner", "inputs": {"name": "a"}}
    toy.define(flow.step("s", "p"), call, p=flow.nodes(x=""))
    run_id = toy.started()
    flow.fail(run_id, "s/x")
    assert (flow.status(run_id), flow.status(child(run_id, "c"))) == ("failed", "cancelled")


def test_a_cancelled_child_fails_the_parent(toy: flow.Flow) -> None:
    run_id = submit()
    inside = started(run_id, toy)
    runs.cancel(inside)
    toy.look()
    assert (flow.status(run_id), flow.run(run_id)["error"]) == (
        "failed",
        f"node inner failed: run {inside} was cancelled",
    )


def test_a_child_that_was_retried_alone_is_waited_for_by_a_retry_of_the_parent(
    toy: flow.Flow,
) -> None:
    BAD.add("A")
    run_id = submit()
    toy.go()
    BAD.clear()
    inside = child(run_id)
    runs.retry(inside)
    runs.retry(run_id)
    toy.go()
    assert (flow.status(run_id), child(run_id)) == ("completed", inside)


def test_a_deleted_child_fails_the_parent(toy: flow.Flow) -> None:
    run_id = submit()
    inside = started(run_id, toy)
    assert runs.delete(inside)
    toy.look()
    assert flow.run(run_id)["error"] == f"node inner failed: run {inside} was deleted"


def test_a_child_without_its_parent_goes_on(toy: flow.Flow) -> None:
    run_id = submit()
    inside = started(run_id, toy)
    assert runs.delete(run_id)
    toy.go()
    assert flow.status(inside) == "completed"


def test_inputs_that_the_child_does_not_take_fail_the_parent(toy: flow.Flow) -> None:
    toy.define({"id": "c", "kind": "run", "workflow": "inner", "inputs": {"nmae": "a"}})
    run_id = toy.started()
    toy.go()
    assert "'name' missing; 'nmae' (did you mean 'name'?) unknown" in flow.run(run_id)["error"]


def test_a_child_that_calls_its_parent_ends_by_the_depth(toy: flow.Flow) -> None:
    toy.define({"id": "c", "kind": "run", "workflow": "w"})
    run_id = toy.started()
    for _ in range(20):
        toy.look()
    assert {row["status"] for row in runs.list(limit=100)} == {"failed"}
    assert len(runs.list(limit=100)) == 9
    error = flow.run(run_id)["error"]
    assert error.endswith("child runs are nested deeper than 8: does workflow w call itself?")


def test_an_upgrade_to_a_step_of_another_kind_leaves_nothing_of_the_old_one(
    toy: flow.Flow, conn: db.Connection
) -> None:
    def moved(step: dict[str, Any]) -> None:
        runs.cancel(run_id)
        runs.retry(run_id)
        toy.define(step)
        assert runs.upgrade(run_id)["outcome"] == "moved"

    call = {"id": "c", "kind": "run", "workflow": "inner", "inputs": {"name": "a"}}
    toy.define(call)
    run_id = toy.started()
    assert child(run_id, "c")
    moved(flow.ask("c", timeout_s=3600))
    toy.go()
    row = flow.job(run_id, "c")
    assert (row["status"], row["child_run_id"]) == ("awaiting_input", None)
    moved(call)
    toy.look()
    factories.execute("UPDATE workflow_input_timeouts SET due_at = now()")
    sweeps.expire_inputs(conn)
    assert (flow.states(run_id), flow.job(run_id, "c")["policy"]) == ({"c": "awaiting_input"}, None)
    toy.go()
    assert flow.status(run_id) == "completed"


# --- forged rows


def test_a_forged_child_ends_no_node_of_another_run(toy: flow.Flow) -> None:
    run_id = submit()
    inside = started(run_id, toy)
    factories.execute(
        "INSERT INTO workflow_runs (id, workflow_name, parent_run_id, parent_node_id)"
        " VALUES ('forged', 'inner', %s, 'inner')",
        run_id,
    )
    factories.execute("UPDATE workflow_runs SET status = 'completed' WHERE id = 'forged'")
    assert flow.states(run_id) == {"inner": "awaiting_input"}
    runs.cancel(run_id)
    assert flow.status(inside) == "cancelled"


def test_a_forged_node_cancels_and_retries_no_foreign_run(toy: flow.Flow) -> None:
    foreign = submit("inner", name="z")
    run_id = submit()
    started(run_id, toy)
    factories.execute(
        "UPDATE workflow_node_jobs SET child_run_id = %s WHERE node_id = 'inner'", foreign
    )
    runs.cancel(run_id)
    assert flow.status(foreign) == "running"
    runs.cancel(foreign)
    runs.retry(run_id)
    toy.go()
    assert (flow.status(run_id), flow.status(foreign)) == ("completed", "cancelled")


def test_forged_cycles_of_parents_end(toy: flow.Flow) -> None:
    run_id = submit()
    inside = started(run_id, toy)
    factories.execute(
        "UPDATE workflow_runs SET parent_run_id = %s, parent_node_id = 'first/first' WHERE id = %s",
        inside,
        run_id,
    )
    factories.execute(
        "UPDATE workflow_node_jobs SET child_run_id = %s, status = 'awaiting_input'"
        " WHERE run_id = %s",
        run_id,
        inside,
    )
    assert factories.execute("SELECT queue_workflows_run_depth(%s) AS n", run_id) == [{"n": 9}]
    runs.cancel(run_id)
    assert (flow.status(run_id), flow.status(inside)) == ("cancelled", "cancelled")


# --- together at once


def test_the_end_of_a_child_and_the_cancel_of_its_parent_do_not_deadlock(
    toy: flow.Flow,
) -> None:
    lost: list[str | None] = []
    for _ in range(10):
        run_id = submit()
        inside = started(run_id, toy)
        go = threading.Barrier(2)

        def end(run_id: str = inside, go: threading.Barrier = go) -> None:
            go.wait()
            try:
                factories.execute(
                    "UPDATE workflow_runs SET status = 'failed' WHERE id = %s", run_id
                )
            except db.Error as error:
                lost.append(error.sqlstate)

        ending = threading.Thread(target=end)
        ending.start()
        go.wait()
        runs.cancel(run_id)
        ending.join()
        until(lambda run_id=run_id: flow.status(run_id) in ("cancelled", "failed"))
    assert set(lost) <= {"QW002"}  # it was cancelled first


# --- before and after: check, show, why


def test_check_finds_cycles_unknown_workflows_and_deep_chains(toy: flow.Flow) -> None:
    def call(name: str) -> dict[str, Any]:
        return {"id": "c", "kind": "run", "workflow": name}

    toy.define(call("b"), name="a")
    toy.define(call("a"), name="b")
    toy.define(call("gone"), name="lost")
    for number in range(9):
        toy.define(call(f"n{number - 1}") if number else flow.step("s", "p"), name=f"n{number}")
    toy.pipelines["p"] = {"nodes": flow.nodes(x="")}
    (found,) = check.workflow("a").findings
    assert "a cycle of child runs: a -> b -> a" in str(found)
    (found,) = check.workflow("lost").findings
    assert "node 'c': workflow 'gone' is not known here" in str(found)
    assert check.workflow("n8").ok
    toy.define(call("n8"), name="n9")
    (found,) = check.workflow("n9").findings
    assert "child runs are nested 9 deep" in str(found)
    assert check.workflow("top").ok


def test_workflows_that_call_each_other_are_refused_in_python(toy: flow.Flow) -> None:
    del toy
    known: dict[str, Any] = {}

    def ping() -> None:
        known["pong"]()

    def pong() -> None:
        known["ping"]()

    known |= {"ping": declare.Workflow(ping, "ping"), "pong": declare.Workflow(pong, "pong")}
    with pytest.raises(errors.InvalidWorkflow, match="calls itself: ping -> pong -> ping"):
        known["ping"].document()
    with pytest.raises(errors.InvalidConfig, match=r"'inner'.*runs\.submit"):
        inner("a")


def test_show_and_why_name_parent_and_child(toy: flow.Flow) -> None:
    run_id = submit()
    inside = started(run_id, toy)
    found = runs.explain(run_id)
    assert found is not None
    assert (found["nodes"][0]["clause"], found["nodes"][0]["detail"]) == (
        "child",
        f"it waits for its run {inside} (running)",
    )
    assert f"inner: waiting for run {inside}" in console.printed("show", run_id)
    words = f"of node inner of run {run_id}: `queue-workflows show"
    assert words in console.printed("show", inside)
    shown = history.get_run(run_id)
    assert shown is not None
    json.dumps(shown, default=str)
    assert shown["nodes"][0]["child_run_id"] == inside


# --- alerts


def noted() -> list[tuple[str, str]]:
    """Return id and error of each run whose failure is noted for alerts."""
    rows = factories.execute(
        "SELECT subject, error FROM failure_alerts WHERE kind = 'run' ORDER BY id"
    )
    return [(row["subject"], row["error"]) for row in rows]


@pytest.fixture
def sender(toy: flow.Flow) -> None:
    del toy
    with db.connect() as conn:
        factories.alert_sender(conn)


@pytest.mark.usefixtures("sender")
def test_a_child_that_fails_is_one_alert_of_the_first_run(toy: flow.Flow) -> None:
    BAD.add("A")
    run_id = submit("top")
    toy.go()
    assert flow.status(run_id) == "failed"
    inside = child(child(run_id, "outer"))
    ((subject, error),) = noted()
    assert subject == run_id
    assert f"run {inside} failed: " in error
    assert "second/second" in error
    assert "A is bad" in error


@pytest.mark.usefixtures("sender")
def test_a_child_that_fails_is_an_alert_of_its_own_if_no_live_run_waits(toy: flow.Flow) -> None:
    BAD.add("A")
    run_id = submit("sends")
    toy.go()
    own = child(run_id)
    assert (flow.status(run_id), flow.status(own)) == ("completed", "failed")
    assert [subject for subject, _ in noted()] == [own]
    # A child that somebody retries after its parent has failed.
    run_id = submit("outer")
    toy.go()
    runs.retry(child(run_id))
    toy.go()
    assert [subject for subject, _ in noted()] == [own, run_id, child(run_id)]
    # A run that only claims to have a parent.
    forged = runs.submit("inner", inputs={"name": "a"})["id"]
    factories.execute(
        "UPDATE workflow_runs SET parent_run_id = 'x', parent_node_id = 'y' WHERE id = %s", forged
    )
    toy.go()
    assert noted()[-1][0] == forged
