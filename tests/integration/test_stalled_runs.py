"""A run that plain SQL has stopped ends with the reason, or goes on, within a sweep."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from queue_workflows import db, node_queue, runs
from tests.support import asgi_service, factories, findings, flow, sweeps, transitions
from tests.support.invariants import LIVENESS, breaches
from tests.support.wait import until

LATER = "finished_at = now() - interval '5 min'"


def sweep(conn: Any, run_id: str) -> tuple[str, str | None]:
    """Return state and error of a run after a sweep; before it, `audit` and `doctor` name it."""
    assert flow.status(run_id) == "running"
    assert [found.id for found in breaches(conn)[LIVENESS]] == [run_id]
    named = f"run {run_id} is running, but nothing moves it forward"
    assert findings.doctors("runs")[:3] == ("runs", findings.ERROR, named)
    sweeps.end_stalled(conn)
    assert LIVENESS not in breaches(conn)
    run = flow.run(run_id)
    return run["status"], run["error"]


def update(conn: Any, changes: str, where: str = "status <> 'completed'") -> None:
    """Change node jobs as an app may."""
    conn.execute(f"UPDATE workflow_node_jobs SET {changes} WHERE {where}".encode())


@pytest.mark.parametrize(
    ("statement", "ends"),
    [
        ("status = 'cancelled'", ("cancelled", "node s/a was cancelled")),
        (f"status = 'cancelled', {LATER}", ("cancelled", "node s/a was cancelled")),
        ("status = 'failed', error = 'no disk'", ("failed", "node s/a failed: no disk")),
        (None, ("failed", "node s/a was deleted")),
    ],
)
@pytest.mark.parametrize("state", ["queued", "running", "delayed"])
def test_a_run_ends_with_its_only_live_node(
    toy: flow.Flow, conn: Any, state: str, statement: str | None, ends: tuple[str, str]
) -> None:
    toy.dag(a="", b="a")
    run_id = toy.started()
    if state == "running":
        update(conn, "status = 'running', claimed_by = 'old'")
    elif state == "delayed":
        update(conn, "available_at = now() + interval '1 h'")
    if statement is None:
        conn.execute("DELETE FROM workflow_node_jobs")
    else:
        update(conn, statement)
    assert sweep(conn, run_id) == ends
    runs.retry(run_id)
    toy.go()
    assert flow.states(run_id) == {"s/a": "completed", "s/b": "completed"}
    assert flow.status(run_id) == "completed"


@pytest.mark.parametrize("status", ["completed", "skipped"])
def test_a_run_goes_on_after_a_node_that_plain_sql_ended(
    toy: flow.Flow, conn: Any, status: str
) -> None:
    toy.dag(a="", b="a")
    run_id = toy.started()
    update(conn, f"status = '{status}'")
    assert sweep(conn, run_id) == ("running", None)
    assert flow.states(run_id) == {"s/a": status, "s/b": "queued"}
    update(conn, f"status = '{status}'")
    assert sweep(conn, run_id) == ("completed", None)


def test_a_run_goes_on_after_its_event_was_deleted(toy: flow.Flow, conn: Any) -> None:
    toy.dag(a="", b="a")
    run_id = toy.started()
    flow.complete(run_id, "s/a")
    conn.execute("DELETE FROM workflow_dispatch_events")
    update(conn, LATER, "true")
    assert sweep(conn, run_id) == ("running", None)
    toy.go()
    assert flow.status(run_id) == "completed"


def test_a_request_to_end_a_running_node_ends_its_run(toy: flow.Flow, conn: Any) -> None:
    toy.dag(a="")
    run_id = toy.started()
    job = transitions.claim_node(conn)
    update(conn, "cancel_requested_at = now()")
    transitions.hand_back(conn, job, reason="asked")
    update(conn, LATER)
    assert sweep(conn, run_id) == ("cancelled", "node s/a was cancelled")


def test_a_run_whose_queued_nodes_were_cancelled_ends(toy: flow.Flow, conn: Any) -> None:
    toy.dag(a="", b="")
    run_id = toy.started()
    assert node_queue.cancel_queued_jobs_for_run(run_id) == 2
    update(conn, LATER)
    assert sweep(conn, run_id) == ("cancelled", "node s/a was cancelled")


@pytest.mark.parametrize(
    ("changes", "ends"),
    [
        ("status = 'cancelled'", ("cancelled", "node ask was cancelled")),
        ("status = 'completed', context_delta = '{\"answer\": 7}'", ("completed", None)),
        ("status = 'skipped'", ("completed", None)),
    ],
)
def test_a_node_that_waits_for_an_answer_ends_its_run(
    toy: flow.Flow, conn: Any, changes: str, ends: tuple[str, str | None]
) -> None:
    toy.define(flow.ask("ask"))
    run_id = toy.started()
    toy.go()
    assert flow.states(run_id) == {"ask": "awaiting_input"}
    sweeps.end_stalled(conn)
    assert flow.status(run_id) == "running"
    update(conn, changes)
    assert sweep(conn, run_id) == ends


def maps(toy: flow.Flow, **more: Any) -> str:
    """Start a run of a map with a map in each of its two items; return its id."""
    inner = {"id": "frames", "kind": "map", "over": {"$from": "film.of"}, "pipeline": "draw"}
    outer = {"id": "films", "kind": "map", "over": {"$from": "given"}, "as": "film"}
    toy.define(outer | {"key": "id", "steps": [inner | more]}, draw=flow.nodes(draw=""))
    run_id = toy.started(context={"given": [{"id": 1, "of": ["x", "y"]}, {"id": 2, "of": ["z"]}]})
    assert flow.status(run_id) == "running", flow.run(run_id)["error"]
    return run_id


DRAWS = "node_id LIKE '%/draw'"


@pytest.mark.parametrize(
    ("changes", "status", "error"),
    [
        ("status = 'completed'", "completed", ""),
        ("status = 'skipped'", "completed", ""),
        ("status = 'cancelled'", "cancelled", "/draw was cancelled"),
        ("status = 'failed', error = 'no disk'", "failed", "/draw failed: no disk"),
        (None, "failed", "/draw was deleted"),
    ],
)
def test_items_that_plain_sql_ends_are_counted(
    toy: flow.Flow, conn: Any, changes: str | None, status: str, error: str
) -> None:
    run_id = maps(toy)
    if changes is None:
        conn.execute(f"DELETE FROM workflow_node_jobs WHERE {DRAWS}".encode())
    else:
        update(conn, changes, DRAWS)
    found = sweep(conn, run_id)
    if found[0] == "running":
        toy.go()
        found = flow.status(run_id), flow.run(run_id)["error"]
    assert (found[0], error in (found[1] or "")) == (status, True), found


def test_a_failed_item_that_may_fail_ends_no_run(toy: flow.Flow, conn: Any) -> None:
    run_id = maps(toy, may_fail=1.0)
    update(conn, "status = 'failed'", DRAWS)
    assert sweep(conn, run_id) == ("running", None)
    toy.go()
    assert flow.status(run_id) == "completed"


@pytest.mark.parametrize("rest", ["node", "map"])
def test_a_tolerated_failure_ends_no_run_that_stops_elsewhere(
    toy: flow.Flow, conn: Any, rest: str
) -> None:
    films = {"id": "m", "kind": "map", "over": {"$from": "given"}, "as": "film"}
    films |= {"pipeline": "draw", "may_fail": 0.5}
    scenes = {"id": "z", "kind": "map", "over": {"$from": "given"}, "pipeline": "cut"}
    last = scenes if rest == "map" else flow.step("z", "cut")
    toy.define(films, last, draw=flow.nodes(draw=""), cut=flow.nodes(cut=""))
    run_id = toy.started(context={"given": [1, 2]})
    first, second = (name for name in flow.states(run_id) if name.endswith("/draw"))
    flow.fail(run_id, first)
    flow.complete(run_id, second)
    toy.look()
    assert flow.states(run_id)["m"] == "completed"
    update(conn, "status = 'completed'", "node_id LIKE '%/cut'")
    update(conn, LATER, "finished_at IS NOT NULL")
    found = sweep(conn, run_id)
    toy.look()
    assert (found[1], flow.status(run_id)) == (None, "completed")


@pytest.mark.parametrize("then", ["revision = revision + 1", "status = 'queued'"])
def test_a_run_that_changes_while_it_is_planned_again_is_left_to_the_next_sweep(
    toy: flow.Flow, conn: Any, then: str
) -> None:
    members = flow.nodes(a="", b="a")
    members[1]["inputs"] = [{"name": "x", "from": "pipeline.x"}]
    toy.define(flow.step("s", inputs={"x": 1}), s=members)
    run_id = toy.started()
    update(conn, f"status = 'completed', {LATER}")
    armed = True

    def resolve(value: Any, context: Any) -> Any:
        if armed:
            conn.execute(f"UPDATE workflow_runs SET {then} WHERE id = %s".encode(), (run_id,))
        return value

    toy.provide(resolve_ref=resolve)
    sweeps.end_stalled(conn)
    assert (flow.status(run_id), flow.run(run_id)["error"]) in [("running", None), ("queued", None)]
    armed = False
    sweeps.end_stalled(conn)
    toy.look()
    assert flow.states(run_id) == {"s/a": "completed", "s/b": "queued"}


@pytest.mark.parametrize(
    ("changes", "ends"),
    [
        ("status = 'cancelled'", ("cancelled", "node inner was cancelled")),
        ("status = 'completed'", ("completed", None)),
        (
            "child_run_id = NULL",
            ("failed", "nothing moves it forward: node inner is awaiting_input"),
        ),
    ],
)
def test_a_node_that_waits_for_its_run_ends_with_plain_sql(
    toy: flow.Flow, conn: Any, changes: str, ends: tuple[str, str | None]
) -> None:
    toy.define({"id": "inner", "kind": "run", "workflow": "v"})
    toy.define(flow.step("s"), name="v", s=flow.nodes(a=""))
    run_id = toy.started()
    sweeps.end_stalled(conn)
    assert flow.states(run_id) == {"inner": "awaiting_input"}
    update(conn, changes, "node_id = 'inner'")
    assert sweep(conn, run_id) == ends


def test_a_child_that_stands_still_ends_and_its_parent_with_it(toy: flow.Flow, conn: Any) -> None:
    toy.define({"id": "inner", "kind": "run", "workflow": "v"})
    toy.define(flow.step("s"), name="v", s=flow.nodes(a=""))
    run_id = toy.started()
    toy.look()
    child = flow.job(run_id, "inner")["child_run_id"]
    update(conn, "status = 'cancelled'", "node_id = 's/a'")
    assert sweep(conn, child) == ("cancelled", "node s/a was cancelled")
    toy.look()
    assert flow.run(run_id)["error"] == f"node inner failed: run {child} was cancelled"


def test_a_run_with_a_live_node_a_late_event_or_an_answer_is_left_alone(
    toy: flow.Flow, conn: Any
) -> None:
    toy.dag(a="", b="")
    run_id = toy.started()
    update(conn, "status = 'completed', finished_at = now()", "node_id = 's/a'")
    sweeps.end_stalled(conn)
    update(conn, "status = 'completed', finished_at = now()", "node_id = 's/b'")
    sweeps.end_stalled(conn, quiet_s=60)
    assert flow.status(run_id) == "running"
    sweeps.end_stalled(conn)
    assert flow.status(run_id) == "completed"


def interval(tasks: Any) -> float:
    """Return in how many seconds an orchestrator sweeps again."""
    return next(task.every_s() for task in tasks.tasks() if task.name == "stalled")


def test_a_pass_goes_on_where_the_last_one_ended(toy: flow.Flow, conn: Any) -> None:
    toy.dag(a="")
    ids = sorted(toy.started() for _ in range(50))
    with sweeps.tasks(itertools.count().__next__) as tasks:
        tasks.end_stalled()
        assert interval(tasks) == 5.0
    update(conn, f"status = 'cancelled', {LATER}")
    sweep_some = sweeps.short_passes(conn)
    ended: list[int] = []
    with db.connect() as other, other.transaction():
        other.execute("LOCK workflow_dispatch_events")
        conn.execute("SET statement_timeout = '100 ms'")
        with pytest.raises(db.Error, match="timeout"):
            sweep_some()
    conn.execute("RESET statement_timeout")
    for _ in range(4):
        sweep_some()
        ended.append(sum(flow.status(run_id) == "cancelled" for run_id in ids))
    assert ended == [20, 30, 50, 50]
    assert flow.status(toy.started()) == "running"


def test_the_orchestrator_sweeps(toy: flow.Flow, conn: Any) -> None:
    toy.dag(a="")
    run_id = toy.started()
    update(conn, "status = 'cancelled'")
    with sweeps.tasks() as tasks:
        tasks.end_stalled()
    assert flow.status(run_id) == "cancelled"
    assert interval(tasks) == 30.0


def test_the_service_leaves_a_stalled_run_to_an_orchestrator(
    toy: flow.Flow, conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may lack the app's `resolve_ref`."""
    sweeps.soon(monkeypatch, "STALLED_S")
    toy.dag(a="", b="a")
    run_id = toy.started()
    update(conn, f"status = 'completed', {LATER}")

    def take_back() -> None:
        for _ in range(5):
            job = factories.ingest(conn)
            transitions.claim_ingest(conn)
            factories.change(conn, job, "lease_expires_at = now()")
            until(lambda job=job: factories.reread(conn, job)["status"] == "queued")
            factories.change(conn, job, "status = 'cancelled'")

    settings = {"dl_reaper_period_sec": 0.05}
    asgi_service.streamed(opened=take_back, until=lambda _: True, **settings)
    assert flow.states(run_id) == {"s/a": "completed"}
    sweeps.end_stalled(conn)
    assert flow.states(run_id) == {"s/a": "completed", "s/b": "queued"}
