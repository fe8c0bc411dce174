"""A workflow mapped over a list is a child run for each item; both end and retry together."""

from __future__ import annotations

import pytest

from queue_workflows import branch, check, db, declare, node, runs, workflow
from queue_workflows.declare import FailedItem, failures
from tests.support import console, factories, flow

pytestmark = pytest.mark.usefixtures("invariants_hold")

NAMES = ["a", "b", "c"]
CALLS: list[str] = []
BAD: set[str] = set()
ENDS: list[tuple[list[str], list[str]]] = []


@node
def listing(names: list[str]) -> list[str]:
    return names


@node
def small(name: str) -> str:
    CALLS.append(f"small {name}")
    if name in BAD:
        raise ValueError(f"{name} is bad")
    return f"<{name}>"


@node
def large(name: str, width: int) -> str:
    CALLS.append(f"large {name}")
    return f"<{name * width}>"


@node
def kind(name: str) -> dict[str, str]:
    return {"name": name, "kind": "large" if name == "b" else "small"}


@node
def join(made: list[str], failed: list[FailedItem]) -> None:
    ENDS.append((made, [each["key"] for each in failed]))


@workflow
def draw(name: str, width: int) -> str:
    found = kind(name)
    arms = {"large": lambda: large(found["name"], width), "small": lambda: small(found["name"])}
    return branch(found["kind"], arms)


@workflow
def album(names: list[str]) -> None:
    made = draw.map(listing(names), at_once=2, may_fail=1, also={"width": 3})
    join(made, failures(made))


@pytest.fixture(autouse=True)
def known(toy: flow.Flow) -> None:
    del toy
    for each in (CALLS, BAD, ENDS):
        each.clear()
    declare.install(listing, small, large, kind, join, draw, album)


def submit(names: list[str] = NAMES) -> str:
    return runs.submit("album", inputs={"names": names})["id"]


def go(toy: flow.Flow, run_id: str) -> None:
    """Let orchestrator and workers do all work of a run; a look may make runs to start."""
    for _ in range(20):
        toy.go()
        if flow.status(run_id) in ("completed", "failed"):
            return
    raise AssertionError("the run does not end")


def children(run_id: str) -> dict[str, str]:
    """Return the run of each item by its key."""
    found = flow.jobs(run_id)
    return {
        node_id.partition("[")[2].partition("]")[0]: job["child_run_id"]
        for node_id, job in found.items()
        if "[" in node_id
    }


def opened(toy: flow.Flow, names: list[str] = NAMES) -> str:
    """Return a run whose map has opened its first items."""
    run_id = submit(names)
    toy.look()
    flow.finish(run_id, "listing/listing", result=names)
    return run_id


def test_each_item_has_a_run_and_the_join_gets_the_outputs_in_order(toy: flow.Flow) -> None:
    run_id = submit()
    go(toy, run_id)
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    assert ENDS == [(["<a>", "<bbb>", "<c>"], [])]
    assert sorted(CALLS) == ["large b", "small a", "small c"]
    items = ["listing/listing", "draw", *(f"draw[{key}]/draw" for key in NAMES), "join/join"]
    assert flow.states(run_id) == dict.fromkeys(items, "completed")
    row = flow.run(children(run_id)["b"])
    assert (row["parent_run_id"], row["parent_node_id"]) == (run_id, "draw[b]/draw")
    assert row["context"] == {"name": "b", "width": 3}
    assert row["out_dir"] == f"{flow.run(run_id)['out_dir']}/draw[b]/draw"


def test_an_empty_list_makes_no_run(toy: flow.Flow) -> None:
    run_id = submit([])
    go(toy, run_id)
    assert (flow.status(run_id), ENDS, len(runs.list())) == ("completed", [([], [])], 1)


def test_at_once_bounds_the_open_runs(toy: flow.Flow) -> None:
    run_id = opened(toy)
    assert list(children(run_id)) == ["a", "b"]
    first = children(run_id)["a"]
    runs.cancel(first)
    toy.look()
    assert list(children(run_id)) == NAMES
    assert flow.job(run_id, "draw[a]/draw")["error"] == f"run {first} was cancelled"


def test_a_failed_run_fails_its_item_and_the_join_is_told(toy: flow.Flow) -> None:
    with db.connect() as conn:
        factories.alert_sender(conn)
    BAD.add("c")
    run_id = submit()
    go(toy, run_id)
    assert (flow.status(run_id), ENDS) == ("completed", [(["<a>", "<bbb>"], ["c"])])
    error = flow.job(run_id, "draw[c]/draw")["error"]
    assert error.startswith(f"run {children(run_id)['c']} failed: node branch/small failed")
    with db.connect() as conn:
        assert not factories.column(conn, "SELECT subject FROM failure_alerts")


def test_too_many_failed_runs_fail_the_map_and_retry_retries_these_runs(toy: flow.Flow) -> None:
    BAD.update("ac")
    run_id = submit()
    go(toy, run_id)
    assert flow.status(run_id) == "failed"
    assert "2 of 3 items failed, 1 may; the first: a: run" in flow.run(run_id)["error"]
    before = children(run_id)
    BAD.clear()
    CALLS.clear()
    runs.retry(run_id)
    go(toy, run_id)
    assert (flow.status(run_id), ENDS) == ("completed", [(["<a>", "<bbb>", "<c>"], [])])
    assert children(run_id) == before
    assert {"small a", "small c"} <= set(CALLS)


def test_a_retry_from_an_item_makes_a_new_run_of_it_alone(toy: flow.Flow) -> None:
    run_id = submit()
    go(toy, run_id)
    before = children(run_id)
    CALLS.clear()
    runs.retry(run_id, from_node="draw[b]")
    go(toy, run_id)
    assert (flow.status(run_id), CALLS) == ("completed", ["large b"])
    after = children(run_id)
    assert [key for key in NAMES if before[key] != after[key]] == ["b"]
    assert ENDS == [(["<a>", "<bbb>", "<c>"], [])] * 2


def test_a_retry_from_the_list_drops_the_items_and_leaves_their_runs(toy: flow.Flow) -> None:
    run_id = submit()
    go(toy, run_id)
    before = children(run_id)
    runs.retry(run_id, from_node="listing/listing")
    go(toy, run_id)
    assert flow.status(run_id) == "completed"
    assert not {*before.values()} & {*children(run_id).values()}
    assert {flow.status(each) for each in before.values()} == {"completed"}


def test_cancel_of_the_parent_cancels_the_runs_of_its_items(toy: flow.Flow) -> None:
    run_id = opened(toy)
    toy.look()
    before = children(run_id)
    assert runs.cancel(run_id) is not None
    assert {flow.status(each) for each in before.values()} == {"cancelled"}
    runs.retry(run_id)
    go(toy, run_id)
    assert flow.status(run_id) == "completed"
    assert {key: children(run_id)[key] for key in before} == before


def test_a_failed_map_cancels_the_runs_that_it_waits_for(toy: flow.Flow) -> None:
    run_id = opened(toy)
    for key in ("a", "c"):
        runs.cancel(children(run_id)[key])
        toy.look()
    toy.look()
    assert flow.status(run_id) == "failed"
    assert flow.status(children(run_id)["b"]) == "cancelled"


def test_steps_of_a_map_in_json_run_workflows(toy: flow.Flow) -> None:
    ask = {"id": "go", "kind": "run", "workflow": "draw", "depends_on": ["pre"]}
    ask["inputs"] = {"name": {"$from": "pre/kind.name"}, "width": {"$from": "item.width"}}
    pre = flow.step("pre", "p", inputs={"name": {"$from": "item.name"}})
    mapped = {"id": "m", "kind": "map", "over": {"$from": "items"}, "key": "name"}
    mapped |= {"steps": [pre, ask], "result": {"$from": "go.result"}}
    given = [{"name": "name", "from": "pipeline.name"}]
    toy.define(mapped, p=[{"id": "kind", "inputs": given}])
    items = [{"name": "b", "width": 2}, {"name": "a", "width": 1}]
    run_id = toy.submit(context={"items": items})
    go(toy, run_id)
    assert flow.job(run_id, "m")["context_delta"]["results"] == ["<bb>", "<a>"]
    assert {*flow.states(run_id)} >= {"m[a]/pre/kind", "m[a]/go"}


def test_a_map_that_only_starts_runs_does_not_wait_for_them(toy: flow.Flow) -> None:
    inputs = {"name": {"$from": "item"}, "width": 1}
    step = {"id": "go", "kind": "run", "workflow": "draw", "wait": False, "inputs": inputs}
    toy.define({"id": "m", "kind": "map", "over": ["a", "c"], "steps": [step]})
    run_id = toy.started()
    toy.look()
    results = flow.job(run_id, "m")["context_delta"]["results"]
    assert flow.status(run_id) == "completed"
    assert [{"result": made} for made in children(run_id).values()] == results
    toy.go()
    assert {flow.status(each) for each in children(run_id).values()} == {"completed"}


def test_a_workflow_that_maps_itself_ends_by_the_depth(toy: flow.Flow) -> None:
    step = {"id": "c", "kind": "run", "workflow": "w"}
    toy.define({"id": "m", "kind": "map", "over": ["x"], "steps": [step]})
    run_id = toy.started()
    for _ in range(40):
        toy.look()
    assert {row["status"] for row in runs.list(limit=100)} == {"failed"}
    assert len(runs.list(limit=100)) == 9
    assert "child runs are nested deeper than 8" in flow.run(run_id)["error"]
    (found,) = check.workflow("w").findings
    assert "node 'm[...]/c': a cycle of child runs: w -> w" in str(found)


def test_check_draws_the_run_of_an_item_and_knows_its_workflow(toy: flow.Flow) -> None:
    report = check.workflow("album")
    assert (report.ok, report.findings, report.needs) == (True, (), ("names",))
    tree = console.printed("check", "album").splitlines()
    assert "│     each: draw  runs workflow draw" in tree
    assert console.printed("check", "album", "--format", "mermaid").splitlines()[2:5] == [
        '    subgraph n1 ["draw, each item"]',
        '        n1_0[["draw"]]',
        "    end",
    ]
    step = {"id": "c", "kind": "run", "workflow": "gone"}
    toy.define({"id": "m", "kind": "map", "over": ["x"], "steps": [step]})
    (found,) = check.workflow("w").findings
    assert "node 'm[...]/c': workflow 'gone' is not known here" in str(found)


def test_show_and_why_name_the_runs_of_items(toy: flow.Flow) -> None:
    run_id = opened(toy)
    made = children(run_id)
    found = runs.explain(run_id)
    assert found is not None
    details = {each["name"]: each["detail"] for each in found["nodes"]}
    assert details["draw[a]/draw"] == f"it waits for its run {made['a']} (queued)"
    page = console.printed("show", run_id)
    assert "items of draw: 0/3 done" in page
    assert f"draw[a]/draw: waiting for run {made['a']}" in page
