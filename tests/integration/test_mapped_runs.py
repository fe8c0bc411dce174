"""A workflow mapped over a list is a child run for each item; both end and retry together."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from queue_workflows import branch, check, declare, node, runs, workflow
from queue_workflows import db as engine
from queue_workflows.cli import graph_text, retry, show
from queue_workflows.declare import FailedItem, failures
from queue_workflows.engine import failure_alerts
from tests.support import factories, flow, invariants

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


@pytest.fixture
def host(db: ModuleType) -> Iterator[flow.Flow]:
    made = flow.Flow()
    CALLS.clear()
    BAD.clear()
    ENDS.clear()
    declare.install(listing, small, large, kind, join, draw, album)
    yield made
    made.close()
    with engine.connect() as conn:
        assert invariants.broken(conn, slack_s=5) == []


def submit(names: list[str] = NAMES) -> str:
    return runs.submit("album", context={"names": names})["id"]


def go(host: flow.Flow, run_id: str) -> None:
    """Let orchestrator and workers do all work of a run; a look may make runs to start."""
    for _ in range(20):
        host.go()
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


def opened(host: flow.Flow, names: list[str] = NAMES) -> str:
    """Return a run whose map has opened its first items."""
    run_id = submit(names)
    host.look()
    flow.finish(run_id, "listing/listing", result=names)
    return run_id


def test_each_item_has_a_run_and_the_join_gets_the_outputs_in_order(host: flow.Flow) -> None:
    run_id = submit()
    go(host, run_id)
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    assert ENDS == [(["<a>", "<bbb>", "<c>"], [])]
    assert sorted(CALLS) == ["large b", "small a", "small c"]
    items = ["listing/listing", "draw", *(f"draw[{key}]/draw" for key in NAMES), "join/join"]
    assert flow.states(run_id) == dict.fromkeys(items, "completed")
    row = flow.run(children(run_id)["b"])
    assert (row["parent_run_id"], row["parent_node_id"]) == (run_id, "draw[b]/draw")
    assert row["context"] == {"name": "b", "width": 3}
    assert row["out_dir"] == f"{flow.run(run_id)['out_dir']}/draw[b]/draw"


def test_an_empty_list_makes_no_run(host: flow.Flow) -> None:
    run_id = submit([])
    go(host, run_id)
    assert (flow.status(run_id), ENDS, len(runs.list())) == ("completed", [([], [])], 1)


def test_at_once_bounds_the_open_runs(host: flow.Flow) -> None:
    run_id = opened(host)
    assert list(children(run_id)) == ["a", "b"]
    first = children(run_id)["a"]
    runs.cancel(first)
    host.look()
    assert list(children(run_id)) == NAMES
    assert flow.job(run_id, "draw[a]/draw")["error"] == f"run {first} was cancelled"


def test_a_failed_run_fails_its_item_and_the_join_is_told(host: flow.Flow) -> None:
    with engine.connect() as conn:
        failure_alerts.announce(conn, keep_s=600)
    BAD.add("c")
    run_id = submit()
    go(host, run_id)
    assert (flow.status(run_id), ENDS) == ("completed", [(["<a>", "<bbb>"], ["c"])])
    error = flow.job(run_id, "draw[c]/draw")["error"]
    assert error.startswith(f"run {children(run_id)['c']} failed: node branch/small failed")
    with engine.connect() as conn:
        assert not factories.column(conn, "SELECT subject FROM failure_alerts")


def test_too_many_failed_runs_fail_the_map_and_retry_retries_these_runs(host: flow.Flow) -> None:
    BAD.update("ac")
    run_id = submit()
    go(host, run_id)
    assert flow.status(run_id) == "failed"
    assert "2 of 3 items failed, 1 may; the first: a: run" in flow.run(run_id)["error"]
    before = children(run_id)
    BAD.clear()
    CALLS.clear()
    assert retry.retried(run_id)["outcome"] == "queued"
    go(host, run_id)
    assert (flow.status(run_id), ENDS) == ("completed", [(["<a>", "<bbb>", "<c>"], [])])
    assert children(run_id) == before
    assert {"small a", "small c"} <= set(CALLS)


def test_a_retry_from_an_item_makes_a_new_run_of_it_alone(host: flow.Flow) -> None:
    run_id = submit()
    go(host, run_id)
    before = children(run_id)
    CALLS.clear()
    assert retry.retried(run_id, from_node="draw[b]")["outcome"] == "queued"
    go(host, run_id)
    assert (flow.status(run_id), CALLS) == ("completed", ["large b"])
    after = children(run_id)
    assert [key for key in NAMES if before[key] != after[key]] == ["b"]
    assert ENDS == [(["<a>", "<bbb>", "<c>"], [])] * 2


def test_a_retry_from_the_list_drops_the_items_and_leaves_their_runs(host: flow.Flow) -> None:
    run_id = submit()
    go(host, run_id)
    before = children(run_id)
    assert retry.retried(run_id, from_node="listing/listing")["outcome"] == "queued"
    go(host, run_id)
    assert flow.status(run_id) == "completed"
    assert not {*before.values()} & {*children(run_id).values()}
    assert {flow.status(each) for each in before.values()} == {"completed"}


def test_cancel_of_the_parent_cancels_the_runs_of_its_items(host: flow.Flow) -> None:
    run_id = opened(host)
    host.look()
    before = children(run_id)
    assert runs.cancel(run_id) is not None
    assert {flow.status(each) for each in before.values()} == {"cancelled"}
    assert retry.retried(run_id)["outcome"] == "queued"
    go(host, run_id)
    assert flow.status(run_id) == "completed"
    assert {key: children(run_id)[key] for key in before} == before


def test_a_failed_map_cancels_the_runs_that_it_waits_for(host: flow.Flow) -> None:
    run_id = opened(host)
    for key in ("a", "c"):
        runs.cancel(children(run_id)[key])
        host.look()
    host.look()
    assert flow.status(run_id) == "failed"
    assert flow.status(children(run_id)["b"]) == "cancelled"


def test_steps_of_a_map_in_json_run_workflows(host: flow.Flow) -> None:
    ask = {"id": "go", "kind": "run", "workflow": "draw", "depends_on": ["pre"]}
    ask["inputs"] = {"name": {"$from": "pre/kind.name"}, "width": {"$from": "item.width"}}
    pre = flow.step("pre", "p", inputs={"name": {"$from": "item.name"}})
    mapped = {"id": "m", "kind": "map", "over": {"$from": "items"}, "key": "name"}
    mapped |= {"steps": [pre, ask], "result": {"$from": "go.result"}}
    given = [{"name": "name", "from": "pipeline.name"}]
    host.define(mapped, p=[{"id": "kind", "inputs": given}])
    items = [{"name": "b", "width": 2}, {"name": "a", "width": 1}]
    run_id = host.submit(context={"items": items})
    go(host, run_id)
    assert flow.job(run_id, "m")["context_delta"]["results"] == ["<bb>", "<a>"]
    assert {*flow.states(run_id)} >= {"m[a]/pre/kind", "m[a]/go"}


def test_a_map_that_only_starts_runs_does_not_wait_for_them(host: flow.Flow) -> None:
    inputs = {"name": {"$from": "item"}, "width": 1}
    step = {"id": "go", "kind": "run", "workflow": "draw", "wait": False, "inputs": inputs}
    host.define({"id": "m", "kind": "map", "over": ["a", "c"], "steps": [step]})
    run_id = host.started()
    host.look()
    results = flow.job(run_id, "m")["context_delta"]["results"]
    assert flow.status(run_id) == "completed"
    assert [{"result": made} for made in children(run_id).values()] == results
    host.go()
    assert {flow.status(each) for each in children(run_id).values()} == {"completed"}


def test_a_workflow_that_maps_itself_ends_by_the_depth(host: flow.Flow) -> None:
    step = {"id": "c", "kind": "run", "workflow": "w"}
    host.define({"id": "m", "kind": "map", "over": ["x"], "steps": [step]})
    run_id = host.started()
    for _ in range(40):
        host.look()
    assert {row["status"] for row in runs.list(limit=100)} == {"failed"}
    assert len(runs.list(limit=100)) == 9
    assert "child runs are nested deeper than 8" in flow.run(run_id)["error"]
    (found,) = check.workflow("w").findings
    assert "node 'm[...]/c': a cycle of child runs: w -> w" in str(found)


def test_check_draws_the_run_of_an_item_and_knows_its_workflow(host: flow.Flow) -> None:
    report = check.workflow("album")
    assert (report.ok, report.findings, report.needs) == (True, (), ("names",))
    assert report.definition is not None
    tree = list(graph_text.tree(report.definition, report.needs, unicode=True))
    assert "│     each: draw  runs workflow draw" in tree
    assert list(graph_text.mermaid(report.definition))[2:5] == [
        '    subgraph n1 ["draw, each item"]',
        '        n1_0[["draw"]]',
        "    end",
    ]
    step = {"id": "c", "kind": "run", "workflow": "gone"}
    host.define({"id": "m", "kind": "map", "over": ["x"], "steps": [step]})
    (found,) = check.workflow("w").findings
    assert "node 'm[...]/c': workflow 'gone' is not known here" in str(found)


def test_show_and_why_name_the_runs_of_items(host: flow.Flow, capsys: Any) -> None:
    run_id = opened(host)
    made = children(run_id)
    found = runs.explain(run_id)
    assert found is not None
    details = {each["name"]: each["detail"] for each in found["nodes"]}
    assert details["draw[a]/draw"] == f"it waits for its run {made['a']} (queued)"
    show.print_out(show.collect("run", run_id), as_json=False, full=False)
    page = capsys.readouterr().out
    assert "items of draw: 0/3 done" in page
    assert f"draw[a]/draw: waiting for run {made['a']}" in page
