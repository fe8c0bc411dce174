"""Nodes with large inputs never make a transaction long: they come in parts, or fail their run."""

from __future__ import annotations

from typing import Any

import pytest

from queue_workflows import declare, node, runs, workflow
from tests.support import factories, flow, timeouts

pytestmark = pytest.mark.usefixtures("invariants_hold")

BIG = "x" * 900_000
PART = 16
"""Tests of many transactions write a part of these sizes, and lower the limit as much."""
TRANSACTIONS = (
    "SELECT sum(length(inputs::text)) FROM workflow_node_jobs WHERE run_id = %s"
    " GROUP BY created_at ORDER BY 1 DESC"
)


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many bytes of JSON a transaction may write now."""
    return timeouts.write_less_at_once(monkeypatch, PART)


def given(node_id: str, *deps: str) -> dict[str, Any]:
    """Return a node that gets the run's `big`."""
    inputs = [{"name": "big", "from": "pipeline.big"}]
    return {"id": node_id, "node": "ok", "inputs": inputs, "depends_on": list(deps)}


def submit(toy: flow.Flow, *members: dict[str, Any], big: str = BIG) -> tuple[str, str]:
    """Submit a run of these nodes that has `big`, and one that has nothing to do with it."""
    toy.define(flow.step("t"), name="small", t=flow.nodes(a=""))
    toy.define(flow.step("s", inputs={"big": {"$from": "big"}}), s=list(members))
    return toy.submit(context={"big": big}), toy.submit(workflow_name="small")


def mapped(toy: flow.Flow, over: str, *around: Any) -> str:
    """Submit a run whose step `m` maps a node that gets the run's `big` over a list of it."""
    body = {"id": "m", "kind": "map", "over": {"$from": over}, "inputs": {"big": {"$from": "big"}}}
    step = body | {"pipeline": "draw", "as": "one", "key": "id"}
    for name, items in around:
        step = {"id": name, "kind": "map", "over": {"$from": items}, "key": "id", "steps": [step]}
    toy.define(step, draw=[given("draw")])
    items = [{"id": f"i{n}"} for n in range(96)]
    big = BIG[: len(BIG) // PART]
    return toy.submit(context={"big": big, "items": items[:12], "many": items})


@pytest.mark.parametrize("first", [True, False])
def test_nodes_that_are_too_large_together_fail_their_run_and_no_other(
    toy: flow.Flow, conn: Any, first: bool
) -> None:
    deps = () if first else ("prep",)
    prep = [] if first else flow.nodes(prep="")
    run_id, other = submit(toy, *prep, *(given(f"n{n}", *deps) for n in range(1000)))
    toy.look()
    if not first:
        flow.complete(run_id, "s/prep")
        toy.look()
    assert (flow.status(run_id), flow.run(run_id)["error"]) == (
        "failed",
        "1000 nodes become ready together (s/n0, s/n1, s/n2, ...): with the inputs of 75 of them a "
        "transaction would write 68 MB of JSON, at most 67 MB; keep the large value in a file or "
        "an artifact and pass its path, or map over smaller items",
    )
    assert factories.column(conn, TRANSACTIONS, run_id) == ([] if first else [2])
    assert flow.status(other) == "running"


def test_child_runs_count_twice_as_they_copy_the_inputs(toy: flow.Flow) -> None:
    declare.install(takes_large, large_child, large_parent)
    run_id = runs.submit("large_parent", inputs={"big": BIG})["id"]
    toy.look()
    assert flow.status(run_id) == "failed"
    assert "with the inputs of 38 of them" in flow.run(run_id)["error"]


@node
def takes_large(big: str) -> None:
    del big


@workflow
def large_child(big: str) -> None:
    takes_large(big)


@workflow
def large_parent(big: str) -> None:
    for _ in range(40):
        large_child(big)


def test_what_follows_from_many_events_comes_in_parts_and_survives_a_restart(
    toy: flow.Flow, conn: Any, most: int
) -> None:
    pairs = [(flow.nodes(**{f"a{n}": ""}), given(f"b{n}", f"a{n}")) for n in range(90)]
    nodes = [each for (a,), b in pairs for each in (a, b)]
    run_id, other = submit(toy, *nodes, big=BIG[: len(BIG) // PART])
    toy.look()
    with flow.unplanned():
        for n in range(90):
            flow.complete(run_id, f"s/a{n}")
    flow.complete(other, "t/a")
    assert flow.dispatch_all() == 2
    assert flow.status(other) == "completed"
    while len(flow.states(run_id)) < 180:
        assert flow.dispatch_all() == 1
    sizes = factories.column(conn, TRANSACTIONS, run_id)
    assert sum(sizes) > most > max(sizes)
    assert len(sizes) <= 5  # the start, then more events in each transaction
    runs.requeue_running()
    toy.look()
    assert (flow.status(run_id), flow.run(run_id)["error"]) == ("running", None)
    toy.go()
    assert flow.status(run_id) == "completed"


@pytest.mark.parametrize("restarts", [False, True])
def test_outputs_that_one_plan_cannot_read_together_fail_the_run_and_no_other(
    toy: flow.Flow, conn: Any, restarts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """160 outputs of 0.9 MB are 144 MB, of which a join needs small fields; a part of that here."""
    most = timeouts.read_less_at_once(monkeypatch, PART)
    toy.define(flow.step("t"), name="small", t=flow.nodes(a=""))
    small = [{"name": f"n{n}", "from": f"pipeline.n{n}"} for n in range(160)]
    steps = [flow.step(f"a{n}", "one") for n in range(160)]
    inputs = {f"n{n}": {"$from": f"a{n}/x.n"} for n in range(160)}
    after = [each["id"] for each in steps]
    steps.append(flow.step("y", "two", depends_on=after, inputs=inputs))
    toy.define(*steps, one=flow.nodes(x=""), two=[{"id": "y", "node": "ok", "inputs": small}])
    run_id = toy.started()
    other = toy.submit(workflow_name="small")
    with flow.unplanned():
        for n in range(160):
            flow.complete(run_id, f"a{n}/x", n=n)
    enlarge(conn, run_id, 900_000 // PART)
    if restarts:
        runs.requeue_running()
    toy.look()
    assert (flow.status(run_id), flow.run(run_id)["error"]) == (
        "failed",
        "the inputs and outputs that its next nodes refer to are larger together than the "
        f"{most / 1e6:.0f} MB of JSON that are read at once; keep a large value in a file or an "
        "artifact and pass its path",
    )
    assert flow.status(other) == "running"


def enlarge(conn: Any, run_id: str, size: int) -> None:
    with conn.transaction():
        conn.execute("SET LOCAL statement_timeout = 0")  # 280 MB take long on a busy machine
        conn.execute(
            "UPDATE workflow_node_jobs SET context_delta = context_delta || jsonb_build_object("
            "'t', repeat('x', %s)) WHERE run_id = %s AND status = 'completed'",
            (size, run_id),
        )


@pytest.mark.parametrize(
    ("count", "size"), [(80, 900_000), pytest.param(70, 4_000_000, marks=pytest.mark.slow)]
)
def test_events_of_nodes_with_large_outputs_are_dispatched_in_parts(
    toy: flow.Flow,
    conn: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    size: int,
) -> None:
    """80 outputs of 0.9 MB are more than one value is loaded of, 280 MB more than a jsonb holds."""
    timeouts.wait_for_statements(monkeypatch, 100.0)
    steps = [flow.step(f"a{n}", "one") for n in range(count)]
    for n in range(count):
        inputs = {"n": {"$from": f"a{n}/x.n"}}
        steps.append(flow.step(f"b{n}", "two", depends_on=[f"a{n}"], inputs=inputs))
    takes = {"id": "y", "node": "ok", "inputs": [{"name": "n", "from": "pipeline.n"}]}
    toy.define(*steps, one=flow.nodes(x=""), two=[takes])
    run_id = toy.started()
    with flow.unplanned():
        for n in range(count):
            flow.complete(run_id, f"a{n}/x", n=n)
    enlarge(conn, run_id, size)
    while len(flow.states(run_id)) < 2 * count:
        assert flow.dispatch_all() == 1
    assert caplog.messages == []
    if size < 1_000_000:
        runs.requeue_running()  # a start plans from all outputs at once
        toy.look()
        assert (flow.status(run_id), flow.run(run_id)["error"]) == ("running", None)
    assert flow.job(run_id, "b7/y")["inputs"] == {"n": 7}


def test_a_map_opens_its_items_in_parts(toy: flow.Flow, conn: Any, most: int) -> None:
    toy.define(flow.step("t"), name="small", t=flow.nodes(a=""))
    other = toy.submit(workflow_name="small")
    run_id = mapped(toy, "many")
    toy.look()
    assert flow.status(other) == "running"
    assert 1 < len(flow.states(run_id)) < 60
    flow.fail(run_id, next(each for each in flow.states(run_id) if each != "m"))
    assert flow.status(run_id) == "failed"
    runs.retry(run_id)
    toy.go()
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    assert len(flow.states(run_id)) == 97
    sizes = factories.column(conn, TRANSACTIONS, run_id)
    assert sum(sizes) > most > max(sizes)


@pytest.mark.parametrize("first", [True, False])
def test_items_that_only_start_child_runs_open_in_parts(
    toy: flow.Flow, conn: Any, most: int, first: bool
) -> None:
    one = {"id": "one", "kind": "run", "workflow": "small", "wait": False}
    one["inputs"] = {"big": {"$from": "big"}}
    step = {"id": "m", "kind": "map", "over": {"$from": "items"}, "steps": [one]}
    toy.define(flow.step("t"), name="small", t=flow.nodes(a=""))
    toy.define(*([] if first else [flow.step("t")]), step | ({} if first else {"depends_on": "t"}))
    items = [f"i{n}" for n in range(2 * most // len(BIG) * PART)]
    run_id = toy.submit(context={"big": BIG[: len(BIG) // PART], "items": items})
    toy.go()
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    children = "SELECT count(*) FROM workflow_runs WHERE parent_run_id IS NOT NULL"
    assert factories.column(conn, children) == [len(items)]


def test_items_that_fit_alone_but_not_together_open_one_after_the_other(
    toy: flow.Flow, most: int
) -> None:
    """The first nodes of the two items take 32 MB and 41 MB, of at most 67 MB, or parts of it."""
    sizes = {"i1": BIG[: 210_000 // PART], "i2": BIG[: 275_000 // PART]}  # twice in each row
    takes = {"node": "ok", "inputs": [{"name": "big", "from": "pipeline.big"}]}
    body = [{"id": f"n{n}", **takes} for n in range(75)]
    step = {"id": "m", "kind": "map", "over": {"$from": "items"}, "as": "one", "key": "id"}
    step |= {"pipeline": "draw", "inputs": {"big": {"$from": "one.big"}}}
    toy.define(step | {"result": {"$from": "n74"}}, draw=body)
    items = [{"id": key, "big": big} for key, big in sizes.items()]
    run_id = toy.submit(context={"items": items})
    toy.look()
    assert (flow.status(run_id), flow.run(run_id)["error"]) == ("running", None)
    assert len(flow.states(run_id)) == 76
    toy.go()
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    assert len(flow.states(run_id)) == 151


def test_the_maps_in_the_items_of_a_map_count_for_it(toy: flow.Flow, conn: Any, most: int) -> None:
    run_id = mapped(toy, "items", ("out", "items"))
    toy.go()
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    assert len(flow.states(run_id)) == 1 + 12 + 144
    sizes = factories.column(conn, TRANSACTIONS, run_id)
    assert sum(sizes) > most > max(sizes)


@pytest.mark.slow
def test_results_that_no_json_value_holds_fail_the_map(
    toy: flow.Flow, conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts.wait_for_statements(monkeypatch, 100.0)
    toy.define(
        {"id": "m", "kind": "map", "over": {"$from": "items"}, "pipeline": "draw"},
        draw=flow.nodes(draw=""),
    )
    run_id = toy.submit(context={"items": [1, 2, 3, 4, 5]})
    toy.look()
    for key in (1, 2, 3, 4, 5):
        flow.complete(run_id, f"m[{key}]/draw")
    enlarge(conn, run_id, 55_000_000)

    toy.look()
    assert flow.status(run_id) == "failed"
    assert "map 'm': the results of its items are 262144 KiB" in flow.run(run_id)["error"]
