"""Branches and loops in a mapped pipeline decide for each item, and its end counts the outcome."""

from __future__ import annotations

import json
import re
from typing import Any, TypedDict

import pytest

from queue_workflows import (
    branch,
    check,
    cli,
    db,
    declare,
    errors,
    history,
    jobs,
    loop,
    node,
    pipeline,
    runs,
    workflow,
)
from queue_workflows.declare import FailedItem, failures
from tests.support import console, constants, flow


class Clip(TypedDict):
    name: str
    kind: str
    left: int


CALLS: list[str] = []
BAD: set[str] = set()
ENDS: list[tuple[list[str], dict[str, str]]] = []


def called(what: str) -> None:
    CALLS.append(what)
    if what in BAD:
        raise ValueError(f"{what} is bad")


@node(name="decide-probe")
def probe(name: str) -> Clip:
    """Return the clip `film-2`: of kind `film`, good after two rounds."""
    called(f"probe {name}")
    kind, _, left = name.partition("-")
    return {"name": name, "kind": kind, "left": int(left)}


@node(name="decide-encode")
def encode(clip: Clip) -> Clip:
    called(f"encode {clip['name']}")
    return {**clip, "kind": "encoded"}


@node(name="decide-resize")
def resize(clip: Clip) -> Clip:
    called(f"resize {clip['name']}")
    return {**clip, "kind": "resized"}


@node(name="decide-improve")
def improve(clip: Clip, by: int) -> Clip:
    left = clip["left"] - by
    called(f"improve {clip['name']} to {left}")
    return {**clip, "left": left}


@node(name="decide-note")
def note(clip: Clip) -> str:
    called(f"note {clip['name']}")
    return f"{clip['name']} {clip['kind']} {clip['left']}"


@node(name="decide-watch")
def watch(name: str) -> None:
    called(f"watch {name}")


@node(name="decide-join")
def join(made: list[str], failed: list[FailedItem]) -> None:
    ENDS.append((made, {each["key"]: each["error"] for each in failed}))


@pipeline
def produce(name: str, by: int) -> str:
    watch(name)
    clip = probe(name)
    done = branch(clip["kind"], {"film": encode, "still": resize}, id="done")
    best = loop(
        lambda clip: improve(clip, by),
        start=done,
        until=lambda clip: clip["left"] == 0,
        at_most=3,
        id="best",
    )
    return note(best)


@workflow(name="decide-clips")
def clips(names: list[str]) -> None:
    made = produce.map(names, at_once=2, may_fail=2, also={"by": 1})
    join(made, failures(made))


@pipeline
def tens(name: str) -> Clip:
    return loop(
        lambda clip: improve(clip, 1),
        start=probe(name),
        until=lambda clip: clip["left"] == 0,
        at_most=10,
        id="best",
    )


@workflow(name="decide-tens")
def ten_rounds(names: list[str]) -> None:
    tens.map(names)


@workflow(name="decide-strict")
def strict(names: list[str]) -> None:
    made = produce.map(names, also={"by": 1})
    join(made, failures(made))


pytestmark = pytest.mark.usefixtures("invariants_hold")


@pytest.fixture(autouse=True)
def known(toy: flow.Flow) -> None:
    del toy
    for each in (CALLS, BAD, ENDS):
        each.clear()
    declare.install(probe, encode, resize, improve, note, watch, join, clips, strict, ten_rounds)


def submit(*names: str, workflow: str = "decide-clips") -> str:
    return runs.submit(workflow, inputs={"names": list(names)})["id"]


def ended(toy: flow.Flow, *names: str, workflow: str = "decide-clips") -> str:
    run_id = submit(*names, workflow=workflow)
    toy.go()
    return run_id


def of_item(run_id: str, key: str) -> dict[str, str]:
    """Return the states of an item's nodes by their ids in it, but for what is always there."""
    start = f"produce[{key}]/"
    found = flow.states(run_id).items()
    return {name.removeprefix(start): state for name, state in found if name.startswith(start)}


def errors_of_last() -> dict[str, str]:
    return ENDS[-1][1]


def test_each_item_runs_its_arm_and_its_rounds(toy: flow.Flow) -> None:
    run_id = ended(toy, "film-2", "still-1", "film-3")
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    assert ENDS == [(["film-2 encoded 0", "still-1 resized 0", "film-3 encoded 0"], {})]
    assert of_item(run_id, "film-2") == {
        "watch": "completed",
        "probe": "completed",
        "done/encode": "completed",
        "done/resize": "skipped",
        "done": "completed",
        "best/improve#1": "completed",
        "best/improve#2": "completed",
        "best/improve#3": "skipped",
        "best": "completed",
        "note": "completed",
    }
    assert of_item(run_id, "still-1")["done/encode"] == "skipped"
    assert flow.job(run_id, "produce[film-2]/done")["inputs"] == {"value": "film"}
    assert flow.job(run_id, "produce[film-2]/best")["inputs"] == {"rounds": 2}
    # probe, encode or resize, watch and note for each item; two, one and three rounds
    assert len(CALLS) == len({*CALLS}) == 4 * 3 + 6


def test_an_orchestrator_goes_on_with_a_map_that_another_one_has_begun(toy: flow.Flow) -> None:
    run_id = submit("film-2", "still-1")
    for _ in range(20):
        flow.forget_all()
        toy.look()
        with flow.unplanned():
            toy.work()
    assert flow.status(run_id) == "completed", flow.states(run_id)
    assert ENDS == [(["film-2 encoded 0", "still-1 resized 0"], {})]


def test_what_cannot_be_decided_fails_its_item_alone(toy: flow.Flow) -> None:
    run_id = ended(toy, "film-9", "book-1", "still-1")
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    assert ENDS[-1][0] == ["still-1 resized 0"]
    assert errors_of_last() == {
        "film-9": "loop 'produce[film-9]/best': 'until' does not hold after round 3, and at_most is"
        " 3: raise it, or take the last state by must=False",
        "book-1": "branch 'produce[book-1]/done': no arm for 'book'; its arms are film, still: add"
        " one, or 'other' for every other value",
    }
    assert "note" not in of_item(run_id, "film-9")
    assert not [name for name in of_item(run_id, "book-1") if name.startswith(("done", "best"))]


def of_node(name: str, after: list[str] | None = None, **inputs: str) -> dict[str, Any]:
    """Return a step of kind node with its dependencies and the refs of its inputs."""
    refs = {key: {"$from": path} for key, path in inputs.items()}
    return {"id": name, "kind": "node", "node": name, "depends_on": after or [], "inputs": refs}


def define_sizes(toy: flow.Flow, over: list[dict[str, Any]], **options: Any) -> None:
    """Define a map of which an item needs `size`, and its first node's output `half`."""
    flow.body(lambda size: {"half": size // 2} if size else {}, "halve")
    flow.body(lambda half, by: {"all": half * by}, "times")
    steps = [
        of_node("halve", size="item.size"),
        of_node("times", ["halve"], half="halve.half", by="item.by"),
    ]
    of_map = {"id": "m", "kind": "map", "key": "id", "over": over, "steps": steps, **options}
    toy.define(of_map)


LACKING = [
    {"id": "full", "size": 8, "by": 3},
    {"id": "unsized", "by": 1},
    {"id": "empty", "size": 0, "by": 1},
    {"id": "bare", "size": 2},
]


def test_an_item_that_lacks_what_a_node_needs_fails_alone(
    toy: flow.Flow, capsys: pytest.CaptureFixture[str]
) -> None:
    define_sizes(toy, LACKING, may_fail=3)
    run_id = toy.submit()
    toy.go()
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    assert flow.states(run_id) == {
        "m": "completed",
        "m[full]/halve": "completed",
        "m[full]/times": "completed",
        "m[empty]/halve": "completed",
        "m[bare]/halve": "completed",
    }
    made = flow.job(run_id, "m")["context_delta"]
    assert (made["keys"], made["results"]) == (["full"], [{"all": 12}])
    of_size = "node 'm[unsized]/halve': input 'size': $from 'item.size': there is no 'size'"
    found = {
        "unsized": of_size,
        "empty": "node 'm[empty]/times': input 'half': $from 'halve.half': there is no 'half'",
        "bare": "node 'm[bare]/times': input 'by': $from 'item.by': there is no 'by'",
    }
    assert {each["key"]: each["error"] for each in made["failed"]} == found
    capsys.readouterr()
    assert cli.main(["show", run_id, "--item", "unsized"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"item unsized of m: failed: {of_size}"
    assert cli.main(["show", run_id, "--item", "full", "--json"]) == 0
    done = {"map_id": "m", "key": "full", "state": "done", "error": None}
    assert json.loads(capsys.readouterr().out)["items"] == [done]
    assert cli.main(["show", run_id, "--item", "full", "--follow", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["items"] == [done]
    assert cli.main(["show", run_id, "--item", "unsized", "--follow"]) == 0
    assert f"item unsized of m: failed: {of_size}" in capsys.readouterr().out.splitlines()


def test_the_items_that_had_not_ended_when_their_run_did_are_cancelled(
    toy: flow.Flow, capsys: pytest.CaptureFixture[str]
) -> None:
    run_id = submit("film-1", "film-2", "film-3")
    toy.look()
    runs.cancel(run_id)
    toy.go()
    assert flow.status(run_id) == "cancelled"
    for key in ("film-1", "film-3"):
        capsys.readouterr()
        assert cli.main(["show", run_id, "--item", key]) == 0
        assert f"item {key} of produce: cancelled" in capsys.readouterr().out.splitlines()


def test_an_item_needs_only_what_the_nodes_that_run_need(toy: flow.Flow) -> None:
    arms = [
        {"id": name, "node": name, "inputs": [{"name": key, "from": f"pipeline.{key}"}]}
        for name, key in (("halve", "size"), ("times", "half"))
    ]
    steps = [
        {**of_node("watch"), "skip_if": {"$from": "item.off"}},
        flow.step(
            "b", "arms", inputs={"size": {"$from": "item.size"}, "half": {"$from": "item.half"}}
        )
        | {"kind": "branch", "on": {"$from": "item.kind"}, "arms": {"a": "halve", "b": "times"}},
    ]
    flow.body(lambda size: {"got": size}, "halve")
    flow.body(lambda half: {"got": half}, "times")
    flow.body(flow.nothing, "watch")
    over = [
        {"id": "one", "kind": "a", "size": 1},
        {"id": "two", "kind": "b", "half": 2, "off": True},
        {"id": "three"},
    ]
    of_map = {"id": "m", "kind": "map", "key": "id", "over": over, "steps": steps, "may_fail": 1}
    toy.define(of_map | {"result": {"$from": "b"}}, arms=arms)
    run_id = toy.submit()
    toy.go()
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    made = flow.job(run_id, "m")["context_delta"]
    assert (made["keys"], made["results"]) == (["one", "two"], [{"got": 1}, {"got": 2}])
    assert [each["key"] for each in made["failed"]] == ["three"]
    assert "there is no 'kind'" in made["failed"][0]["error"]
    states = flow.states(run_id)
    assert (states["m[one]/watch"], states["m[two]/watch"]) == ("completed", "skipped")


def test_more_items_that_lack_a_field_than_may_fail_fail_the_run(toy: flow.Flow) -> None:
    define_sizes(toy, LACKING[:2])
    run_id = toy.submit()
    toy.go()
    assert flow.status(run_id) == "failed"
    assert flow.run(run_id)["error"].startswith(
        "node m failed: 1 of 2 items failed, 0 may; the first: unsized: node 'm[unsized]/halve': "
    )
    runs.retry(run_id)
    toy.go()
    assert flow.status(run_id) == "failed"


def test_an_item_whose_inputs_are_too_large_fails_alone(
    toy: flow.Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_MAX_PAYLOAD_KB", "64")
    larger = {"watch": "watch.text", "item": "item.text"}
    steps = [of_node("watch"), of_node("times", ["watch"], **larger), of_node("last", ["times"])]
    over = [{"id": name, "text": name * 20_000} for name in ("a", "b")]
    of_map = {"id": "m", "kind": "map", "key": "id", "over": over, "steps": steps}
    flow.body(flow.nothing, "last")
    toy.define(of_map | {"result": {"$from": "watch.size"}, "may_fail": 1})
    run_id = toy.submit()
    toy.look()
    for key, size in (("a", 50_000), ("b", 5)):
        flow.finish(run_id, f"m[{key}]/watch", text="x" * size, size=size)
    assert "m[a]/times" not in flow.states(run_id)
    for name in ("times", "last"):
        flow.finish(run_id, f"m[b]/{name}")
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    made = flow.job(run_id, "m")["context_delta"]
    assert made["keys"] == ["b"]
    (failed,) = made["failed"]
    assert failed["key"] == "a"
    assert failed["error"].startswith("inputs of node 'm[a]/times': 68 KiB of JSON, more than the")


def test_an_item_that_lacks_an_input_waits_for_its_open_nodes(
    toy: flow.Flow, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [of_node("halve"), of_node("watch"), of_node("times", ["halve"], half="halve.half")]
    over = ["a", "b"]
    toy.define(
        {"id": "m", "kind": "map", "over": over, "steps": steps, "may_fail": 1, "at_once": 1}
        | {"result": {"$from": "times"}}
    )
    run_id = toy.submit()
    toy.look()
    flow.finish(run_id, "m[a]/halve", other=1)
    capsys.readouterr()
    for key, state in (
        ("a", "fails when its open nodes end: node 'm[a]/times': input 'half': "),
        ("b", "waiting"),
    ):
        assert cli.main(["show", run_id, "--item", key]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if line.startswith(f"item {key} of m: {state}")], lines
    flow.finish(run_id, "m[a]/watch")
    assert "m[b]/halve" in flow.states(run_id)
    flow.finish(run_id, "m[b]/halve", half=1)
    flow.finish(run_id, "m[b]/watch")
    flow.finish(run_id, "m[b]/times")
    assert flow.status(run_id) == "completed"


def test_more_items_than_may_fail_fail_the_run(toy: flow.Flow) -> None:
    run_id = ended(toy, "still-1", "book-1", workflow="decide-strict")
    assert flow.status(run_id) == "failed"
    found = flow.run(run_id)["error"]
    assert found.startswith("node produce failed: 1 of 2 items failed, 0 may; the first: book-1: ")
    assert "no arm for 'book'" in found


def test_an_item_that_cannot_decide_waits_for_its_open_nodes(toy: flow.Flow) -> None:
    run_id = submit("book-1", "film-1", "film-2")
    toy.look()
    flow.finish(run_id, "produce[book-1]/probe", name="book-1", kind="book", left=1)
    assert of_item(run_id, "book-1") == {"watch": "queued", "probe": "completed"}
    assert of_item(run_id, "film-2") == {}  # The place is taken until the item has ended.
    flow.finish(run_id, "produce[book-1]/watch")
    assert [*of_item(run_id, "film-2")] == ["watch", "probe"]
    toy.go()
    assert "no arm for 'book'" in errors_of_last()["book-1"]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_failed_round_stops_the_rest_of_its_item(toy: flow.Flow, resumed: bool) -> None:
    run_id = submit("film-2", "film-1")
    toy.look()
    flow.finish(run_id, "produce[film-2]/probe", name="film-2", kind="film", left=2)
    flow.finish(run_id, "produce[film-2]/done/encode", name="film-2", kind="film", left=2)
    flow.fail(run_id, "produce[film-2]/best/improve#1", "no")
    assert of_item(run_id, "film-2")["watch"] == "queued"
    if resumed:
        runs.requeue_running()
    toy.go()
    assert errors_of_last() == {"film-2": "node produce[film-2]/best/improve#1 failed: no"}
    assert "best/improve#2" not in of_item(run_id, "film-2")
    assert "watch film-2" in CALLS


def test_an_event_that_is_dispatched_again_changes_nothing(toy: flow.Flow) -> None:
    run_id = ended(toy, "film-2", "book-1")
    before = flow.states(run_id), list(ENDS)
    for _ in range(2):
        with db.connect() as conn:
            conn.execute("UPDATE workflow_dispatch_events SET processed_at = NULL")
        flow.dispatch(run_id)
    assert (flow.states(run_id), ENDS) == before


# --- retry


def test_retry_goes_on_in_the_round_that_failed(toy: flow.Flow) -> None:
    BAD.add("improve film-3 to 1")
    run_id = ended(toy, "film-3", "still-1", workflow="decide-strict")
    assert flow.status(run_id) == "failed"
    assert of_item(run_id, "film-3")["best/improve#2"] == "failed"
    BAD.clear()
    CALLS.clear()
    runs.retry(run_id)
    toy.go()
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    again = [call for call in CALLS if "film-3" in call]
    assert again == ["improve film-3 to 1", "improve film-3 to 0", "note film-3"]
    assert ENDS[-1] == (["film-3 encoded 0", "still-1 resized 0"], {})


def test_retry_counts_an_item_again_that_could_not_decide(toy: flow.Flow) -> None:
    run_id = ended(toy, "film-9", "still-1", workflow="decide-strict")
    assert flow.status(run_id) == "failed"
    runs.retry(run_id)
    toy.go()
    assert "'until' does not hold after round 3" in flow.run(run_id)["error"]
    assert sum(call.startswith("improve film-9") for call in CALLS) == 3


FROM = {
    "produce[film-2]": ["probe", "watch", "encode", "improve", "improve", "note"],
    "produce[film-2]/probe": ["probe", "encode", "improve", "improve", "note"],
    "produce[film-2]/done": ["encode", "improve", "improve", "note"],
    "produce[film-2]/done/encode": ["encode", "improve", "improve", "note"],
    "produce[film-2]/best": ["improve", "improve", "note"],
    "produce[film-2]/best/improve#1": ["improve", "improve", "note"],
    "produce[film-2]/best/improve#2": ["improve", "note"],
    "produce[film-2]/note": ["note"],
}


@pytest.mark.parametrize("place", FROM)
def test_retry_from_a_place_in_an_item_repeats_it_and_what_follows(
    toy: flow.Flow, place: str
) -> None:
    run_id = ended(toy, "film-2", "still-1")
    CALLS.clear()
    runs.retry(run_id, from_node=place)
    toy.go()
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    assert all("film-2" in call for call in CALLS)
    assert sorted(call.split()[0] for call in CALLS) == sorted(FROM[place])
    assert ENDS[-1] == (["film-2 encoded 0", "still-1 resized 0"], {})


@pytest.mark.parametrize("place", ["produce[film-2]/done/nope", "produce[film-2]/best/improve#4"])
def test_retry_from_a_place_that_an_item_lacks_is_refused(toy: flow.Flow, place: str) -> None:
    run_id = ended(toy, "film-2")
    with pytest.raises(errors.UnknownJob, match="has no node"):
        runs.retry(run_id, from_node=place)


def test_cancel_ends_the_rounds_of_open_items_and_retry_goes_on(toy: flow.Flow) -> None:
    run_id = submit("film-1", "film-2")
    toy.look()
    flow.finish(run_id, "produce[film-2]/probe", name="film-2", kind="film", left=2)
    flow.finish(run_id, "produce[film-2]/done/encode", name="film-2", kind="x", left=2)
    runs.cancel(run_id)
    assert of_item(run_id, "film-2")["best/improve#1"] == "cancelled"
    runs.retry(run_id)
    toy.go()
    assert ENDS == [(["film-1 encoded 0", "film-2 x 0"], {})]


# --- what commands show


def test_why_names_the_branch_and_the_loop_that_left_a_node_out(toy: flow.Flow) -> None:
    run_id = ended(toy, "film-2")
    found = {
        place: jobs.explain(flow.job(run_id, f"produce[film-2]/{place}")["id"])
        for place in ("done/resize", "best/improve#3")
    }
    assert {place: each and each["detail"] for place, each in found.items()} == {
        "done/resize": "it is skipped: branch produce[film-2]/done has chosen another arm",
        "best/improve#3": "it is skipped: loop produce[film-2]/best has ended before this round",
    }


def test_check_draws_the_arms_and_one_round_of_an_item(toy: flow.Flow) -> None:
    del toy
    report = check.workflow("decide-clips")
    assert (report.ok, report.findings, report.needs) == (True, (), ("names",))
    assert report.definition is not None
    lines = console.printed("check", "decide-clips", "--format", "mermaid").splitlines()
    assert lines[1:14] == [
        '    subgraph n0 ["produce, each item"]',
        '        n0_0["watch"]',
        '        n0_1["probe"]',
        '        subgraph n0_s2 ["done"]',
        '            n0_2["encode"]',
        '            n0_3["resize"]',
        '            n0_4{"done"}',
        "        end",
        '        subgraph n0_s3 ["best"]',
        '            n0_5["improve#35;1"]',
        '            n0_6{"best"}',
        "        end",
        '        n0_7["note"]',
    ]
    assert '        n0_1 -.->|"film"| n0_2' in lines
    assert '        n0_5 -.->|"again, at most 3"| n0_5' in lines
    tree = console.printed("check", "decide-clips").splitlines()
    assert not [line for line in tree if "improve#2" in line]
    assert "│     each: best  repeats these, at most 3 times" in tree


def test_check_finds_what_an_arm_and_a_round_of_an_item_lack(toy: flow.Flow) -> None:
    arm = {"id": "x", "node": "decide-probe", "inputs": [{"name": "nme", "from": "pipeline.name"}]}
    steps = [
        {
            "id": "first",
            "kind": "node",
            "node": "decide-probe",
            "inputs": {"name": {"$from": "item"}},
        },
        flow.step("b", "p", inputs={"name": {"$from": "first.nope"}}, depends_on=["first"])
        | {"kind": "branch", "on": {"$from": "late.kind"}, "arms": {"x": "x"}},
        {"id": "late", "kind": "node", "node": "decide-probe", "retires": 3, "depends_on": ["b"]},
    ]
    toy.define({"id": "m", "kind": "map", "over": ["x"], "steps": steps}, p=[arm])
    found = "\n".join(str(each) for each in check.workflow("w").findings)
    assert "node 'm[...]/b/x': 'decide-probe' takes no 'nme'" in found
    assert "node 'm[...]/b/x': input 'nme': 'first' has no output 'nope'" in found
    assert "node 'm[...]/b': its value: 'b/x' does not wait for 'late'" in found
    assert "step 'late': nothing reads the key 'retires'" in found


# --- JSON


def test_steps_of_a_map_in_json_branch_and_repeat_also_in_inner_maps(toy: flow.Flow) -> None:
    flow.body(lambda n: {"n": n - 1, "over": n <= 1}, "lower")
    flow.body(lambda inputs: ENDS.append((inputs["found"], {})), "end")
    takes = [{"name": "n", "from": "pipeline.n"}]
    down = flow.step("down", "lower", inputs={"n": {"$from": "down.n"}}) | {
        "kind": "loop",
        "start": {"n": {"$from": "item"}},
        "until": {"$from": "down.over"},
        "result": "lower",
        "at_most": 4,
    }
    inner = {"id": "i", "kind": "map", "over": {"$from": "each.list"}, "steps": [down]}
    kind = flow.step("b", "p") | {"kind": "branch", "on": {"$from": "each.on"}, "arms": {"1": "x"}}
    outer = {
        "id": "m",
        "kind": "map",
        "as": "each",
        "key": "id",
        "over": [{"id": "a", "on": 1, "list": [1, 3]}, {"id": "b", "on": 2, "list": [2]}],
        "may_fail": 1,
        "steps": [inner | {"depends_on": ["b"], "result": {"$from": "down.n"}}, kind],
        "result": {"$from": "i.results"},
    }
    end = flow.step("end", inputs={"found": {"$from": "m"}}, depends_on=["m"])
    toy.define(
        outer,
        end,
        lower=[{"id": "lower", "inputs": takes}],
        p=flow.nodes(x=""),
        end=[{"id": "end", "inputs": [{"name": "found", "from": "pipeline.found"}]}],
    )
    down["start"] = {"n": {"$from": "item"}}
    run_id = toy.submit()
    toy.go()
    assert flow.status(run_id) == "failed"
    assert "'start' is made of several values" in flow.run(run_id)["error"]
    down |= {"start": {"$from": "item"}, "inputs": {"n": {"$from": "down"}}, "result": "lower.n"}
    down["until"] = {"$from": "down", "$eq": 0}
    inner["result"] = outer["steps"][0]["result"] = {"$from": "down.n"}
    run_id = toy.submit()
    toy.go()
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    found: Any = ENDS[0][0]
    assert (found["results"], found["keys"]) == ([[0, 0]], ["a"])
    assert "no arm for 2; its arms are 1" in found["failed"][0]["error"]
    assert flow.states(run_id)["m[a]/i[3]/down/lower#3"] == "completed"
    assert flow.states(run_id)["m[a]/i[1]/down/lower#2"] == "skipped"


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ({"id": "n", "kind": "node", "node": "__loop__"}, "kept for the engine"),
        ({"id": "n", "kind": "node", "inputs": {"$x": 1}}, "no input can be named '\\$x'"),
        ({"id": "n", "kind": "node", "model": 5, "gpu": True}, "'model' must be text"),
        ({"id": "n", "kind": "node", "retries": -1}, "'retries'"),
        ({"id": "item", "kind": "node"}, "has the name 'item' of the item"),
        ({"id": "n", "kind": "nodes"}, "in a map also of kind 'node'"),
        ({"id": "n", "kind": "node", "depends_on": ["gone"]}, "the unknown step 'gone'"),
    ],
)
def test_a_wrong_step_of_a_map_is_refused_with_its_place(
    toy: flow.Flow, step: dict[str, Any], words: str
) -> None:
    toy.define({"id": "m", "kind": "map", "over": [1], "steps": [step]})
    (found,) = check.workflow("w").findings
    assert re.search(words, str(found)), str(found)
    assert "step 'm'" in str(found)


def test_a_step_of_kind_node_makes_no_node_outside_of_a_map(toy: flow.Flow) -> None:
    toy.define({"id": "n", "kind": "node"})
    (found,) = check.workflow("w").findings
    assert "no step makes nodes" in str(found)
    assert "in a map also of kind 'node'" in str(found)
    toy.define({"id": "n", "kind": "node"}, flow.step("s"), s=flow.nodes(a=""))
    report = check.workflow("w")
    assert [str(each) for each in report.findings] == [
        "error: step 'n': a step of kind 'node' makes no nodes, and is left out; a step is of kind "
        "'pipeline', 'map', 'input', 'branch', 'loop' or 'run', and in a map also of kind 'node'"
    ]
    assert report.definition is not None
    assert [node["id"] for node in report.definition["nodes"]] == ["s/a"]


def test_the_model_of_a_node_on_cpu_is_not_loaded_in_a_map_either(toy: flow.Flow) -> None:
    step = {"id": "n", "kind": "node", "node": "ok", "model": "m"}
    toy.define({"id": "m", "kind": "map", "over": [1], "steps": [step]})
    (found,) = check.workflow("w").findings
    assert str(found).startswith("error: step 'n': model 'm' is not loaded, since the node runs on")
    run_id = toy.submit()
    toy.go()
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    assert flow.job(run_id, "m[1]/n")["required_model"] is None


def test_show_opens_an_item_with_its_rounds(
    toy: flow.Flow, capsys: pytest.CaptureFixture[str]
) -> None:
    BAD.add("improve film-3 to 1")
    run_id = ended(toy, "film-2", "film-3")

    def lines(*argv: str) -> list[str]:
        capsys.readouterr()
        assert cli.main(["show", run_id, *argv]) == 0
        return capsys.readouterr().out.splitlines()

    shown = lines()
    assert "items of produce: 1/2 done, 1 failed" in shown
    assert not [line for line in shown if line.startswith(("loop", "produce[film-2]"))]
    assert [line for line in shown if line.startswith("produce[film-3]")] == [
        "produce[film-3]/best/improve#2: failed"
    ]
    shown = lines("--item", "film-2")
    assert "loop produce[film-2]/best: 2 rounds of at most 3, last completed" in shown
    assert [line for line in shown if line.startswith("produce[film-2]/done")] == [
        "produce[film-2]/done/encode: completed",
        "produce[film-2]/done/resize: skipped",
        "produce[film-2]/done: completed",
    ]
    shown = lines("--item", "film-3")
    assert "loop produce[film-3]/best: 2 rounds of at most 3, last failed" in shown
    shown = lines("--node", "produce[film-3]/best/improve#1")
    assert not [line for line in shown if line.startswith("loop")]


def shown_nodes(
    run_id: str, capsys: pytest.CaptureFixture[str], *argv: str
) -> tuple[list[str], list[str]]:
    """Return the lines of nodes of items, and those of loops, that `show` prints."""
    capsys.readouterr()
    assert cli.main(["show", run_id, *argv]) == 0
    lines = capsys.readouterr().out.splitlines()
    nodes = [line for line in lines if re.match(r"\w+\[", line)]
    return nodes, [line for line in lines if line.startswith("loop")]


def test_show_of_an_item_leaves_out_the_rounds_after_its_last_one(
    toy: flow.Flow, capsys: pytest.CaptureFixture[str]
) -> None:
    run_id = ended(toy, "film-2", workflow="decide-tens")
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    assert flow.states(run_id)["tens[film-2]/best/improve#10"] == "skipped"
    nodes = ["probe", "best/improve#1", "best/improve#2", "best"]
    for options in ((), ("--full",)):
        assert shown_nodes(run_id, capsys, "--item", "film-2", *options) == (
            [f"tens[film-2]/{node}: completed" for node in nodes],
            ["loop tens[film-2]/best: 2 rounds of at most 10, last completed"],
        )
    skipped = "tens[film-2]/best/improve#3"
    assert shown_nodes(run_id, capsys, "--node", skipped) == ([f"{skipped}: skipped"], [])


def test_show_of_an_item_prints_its_undecided_branch_and_what_follows_as_waiting(
    toy: flow.Flow, capsys: pytest.CaptureFixture[str]
) -> None:
    run_id = submit("film-2")
    toy.look()

    def of_this() -> tuple[dict[str, str], str]:
        nodes, (loop_line,) = shown_nodes(run_id, capsys, "--item", "film-2")
        pairs = (line.removeprefix("produce[film-2]/").split(": ", 1) for line in nodes)
        return dict(pairs), loop_line.removeprefix("loop produce[film-2]/best: ")

    def finish(node_id: str) -> None:
        values = {"name": "film-2", "kind": "film", "left": 2}
        flow.finish(run_id, f"produce[film-2]/{node_id}", **values)

    later = dict.fromkeys(
        ["done/encode", "done/resize", "done", "best/improve#1", "best", "note"], "waiting"
    )
    begun = {"watch": "queued", "probe": "queued"}
    assert of_this() == (begun | later, "0 rounds of at most 3")
    for name, state in (("done", "waiting"), ("gone", None)):
        (node,) = (history.get_run(run_id, nodes=[f"produce[film-2]/{name}"]) or {})["nodes"] or [
            {"status": None}
        ]
        assert node["status"] == state
    assert cli.main(["show", run_id, "--node", "produce[film-3]/done"]) == 2
    finish("probe")
    finish("done/encode")
    found, loop_line = of_this()
    assert (found["done"], found["done/resize"], found["note"]) == (
        "completed",
        "skipped",
        "waiting",
    )
    assert [name for name in found if "#" in name] == ["best/improve#1"]
    assert loop_line == "1 round of at most 3, last running"
    flow.fail(run_id, "produce[film-2]/best/improve#1", "no")  # It waits for its node `watch`.
    found, loop_line = of_this()
    assert "waiting" not in found.values()
    assert loop_line == "1 round of at most 3, last failed"


def test_show_of_an_item_has_one_round_of_a_loop_that_is_skipped(
    toy: flow.Flow, capsys: pytest.CaptureFixture[str]
) -> None:
    flow.body(lambda n: {"n": n - 1}, "lower")
    down = flow.step("down", "lower", inputs={"n": {"$from": "down.n"}}) | {
        "kind": "loop",
        "start": {"n": 1},
        "until": {"$from": "down.n", "$eq": 0},
        "result": "lower",
        "at_most": 4,
        "skip_if": {"$from": "item.off"},
    }
    over = [{"id": "a", "off": True}, {"id": "b", "off": False}]
    each = {"id": "m", "kind": "map", "key": "id", "over": over, "steps": [down]}
    toy.define(each, lower=[{"id": "lower", "inputs": [{"name": "n", "from": "pipeline.n"}]}])
    run_id = toy.submit()
    toy.go()
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    assert shown_nodes(run_id, capsys, "--item", "a") == (
        ["m[a]/down/lower#1: skipped", "m[a]/down: skipped"],
        ["loop m[a]/down: 0 rounds of at most 4"],
    )
    assert shown_nodes(run_id, capsys, "--item", "b") == (
        ["m[b]/down/lower#1: completed", "m[b]/down: completed"],
        ["loop m[b]/down: 1 round of at most 4, last completed"],
    )


def test_the_end_of_a_followed_run_counts_items_as_show_does(
    toy: flow.Flow, capsys: pytest.CaptureFixture[str]
) -> None:
    run_id = ended(toy, "film-9", "book-1", "still-1")
    printed: list[list[str]] = []
    for options in ((), ("--follow",)):
        capsys.readouterr()
        assert cli.main(["show", run_id, *options]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert "items of produce: 1/3 done, 2 failed" in lines
        start = lines.index("items of produce: 1/3 done, 2 failed")
        printed.append(lines[start : start + 3])
    assert printed[0] == printed[1]
    assert [line[:11] for line in printed[0][1:]] == ["  film-9: l", "  book-1: b"]


CHAINS: dict[str, tuple[dict[str, float], str]] = {
    "the rounds of an item": (
        {"film-2]/best/improve#2": 4.0, "film-2]/done/encode": 3.0, "still-1]/done/resize": 6.5},
        "longest chain: 9 nodes, 7.5 s (produce[film-2]/probe ... join/join)",
    ),
    "the arm of an item": (
        {"film-2]/best/improve#2": 4.0, "still-1]/done/resize": 6.5},
        "longest chain: 8 nodes, 7.0 s (produce[still-1]/probe ... join/join)",
    ),
    "a node that no other of the item waits for": (
        {"film-2]/best/improve#2": 4.0, "still-1]/watch": 6.5},
        "longest chain: 3 nodes, 7.0 s (produce[still-1]/watch ... join/join)",
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_the_longest_chain_goes_through_the_item_that_took_longest(
    toy: flow.Flow, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run_id = ended(toy, "film-2", "still-1")
    seconds, line = CHAINS[name]
    with db.connect() as conn:
        conn.execute("UPDATE workflow_node_jobs SET seconds = 0")
        for node_id, took in ({"join/join": 0.5} | seconds).items():
            whole = node_id if node_id == "join/join" else f"produce[{node_id}"
            query = "UPDATE workflow_node_jobs SET seconds = %s WHERE node_id = %s"
            assert conn.execute(query, (took, whole)).rowcount == 1
    capsys.readouterr()
    assert cli.main(["show", run_id, "--follow"]) == 0
    assert line in capsys.readouterr().out.splitlines()


def test_an_item_whose_node_of_the_result_was_skipped_has_no_result(toy: flow.Flow) -> None:
    flow.body({"seen": True}, "watch")
    over = [{"id": "one", "off": False}, {"id": "two", "off": True}]
    steps = [{**of_node("watch"), "skip_if": {"$from": "item.off"}}]
    toy.define({"id": "m", "kind": "map", "key": "id", "over": over, "steps": steps})
    run_id = toy.submit()
    toy.go()
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    assert flow.states(run_id)["m[two]/watch"] == "skipped"
    assert flow.job(run_id, "m")["context_delta"] == {
        "results": [{"seen": True}],
        "keys": ["one"],
        "failed": [],
    }


# --- limits, and what an item keeps


def test_an_item_that_was_failing_when_the_run_ended_runs_again_by_retry(toy: flow.Flow) -> None:
    run_id = submit("film-2", "still-1", workflow="decide-strict")
    toy.look()
    for name in ("film-2", "still-1"):
        kind, _, left = name.partition("-")
        flow.finish(run_id, f"produce[{name}]/probe", name=name, kind=kind, left=int(left))
    flow.fail(run_id, "produce[film-2]/done/encode", "no")  # it waits for its node `watch`
    flow.finish(run_id, "produce[still-1]/watch")
    flow.fail(run_id, "produce[still-1]/done/resize", "no")
    assert flow.status(run_id) == "failed"
    runs.retry(run_id)
    toy.go()
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    assert ENDS == [(["film-2 encoded 0", "still-1 resized 0"], {})]


def test_the_rounds_of_all_items_count_for_the_limit_of_nodes(
    toy: flow.Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The body has 10 nodes, the graph 2.
    constants.put(monkeypatch, "dag.graph.MAX_NODES_PER_RUN", 22)
    run_id = ended(toy, "film-1", "film-2")
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    run_id = ended(toy, "film-1", "film-2", "film-3")
    assert flow.status(run_id) == "failed"
    assert "with its 3 items the run has 32 nodes; at most 22" in flow.run(run_id)["error"]


FORGED: dict[str, tuple[str, str, Any, str]] = {
    "an arm of no branch": ("probe", "arm", "gone", "unknown branch 'gone'"),
    "an arm that is no node": ("done", "choice", {"on": 1, "arms": {"film": "gone"}}, "'gone'"),
    "no arms": ("done", "choice", {"on": 1, "arms": {}}, "0 arms"),
    "a round of another loop": ("best", "loop", {"rounds": [{"end": "probe"}]}, "'probe' is not"),
    "no rounds": ("best", "loop", {"rounds": []}, "0 rounds"),
    "a bad number": ("best/improve#1", "round", -1, "'round' must be"),
    "a bad id": ("best/improve#1", "id", "best/improve#0", "is not"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_body_fails_the_run_with_the_reason(toy: flow.Flow, name: str) -> None:
    node_id, key, value, words = FORGED[name]
    run_id = submit("film-1")
    toy.look()
    with db.connect() as conn:
        row = conn.execute("SELECT definition FROM workflow_runs").fetchone()
        assert row is not None
        (body,) = (each["map"]["body"] for each in row["definition"]["nodes"] if "map" in each)
        next(each for each in body if each["id"] == node_id)[key] = value
        stored = json.dumps(row["definition"])
        conn.execute("UPDATE workflow_runs SET definition = %s", (stored,))
    flow.forget(run_id)
    toy.go()
    assert flow.status(run_id) == "failed"
    assert words in flow.run(run_id)["error"]


@pytest.mark.parametrize(("at_most", "outcome", "calls"), [(9, "completed", 9), (10, "failed", 0)])
def test_an_id_that_is_too_long_in_a_later_round_fails_the_run_before_the_item_begins(
    toy: flow.Flow, at_most: int, outcome: str, calls: int
) -> None:
    seen: list[int] = []
    flow.body(lambda n: seen.append(n) or {"n": n - 1}, "lower")
    low, down = "ß" * 100, "d" * 29
    step = flow.step(down, "low", inputs={"n": {"$from": f"{down}.n"}}) | {
        "kind": "loop",
        "start": {"n": 9},
        "until": {"$from": f"{down}.n", "$eq": 0},
        "result": low,
        "at_most": at_most,
    }
    for letter in "äöü":  # The id of round 9 has 1000 bytes, the most that a row takes.
        step = {"id": letter * 100, "kind": "map", "over": ["k" * 53], "steps": [step]}
    takes = [{"name": "n", "from": "pipeline.n"}]
    toy.define(step, low=[{"id": low, "node": "lower", "inputs": takes}])
    run_id = toy.submit()
    toy.go()
    assert (flow.status(run_id), len(seen)) == (outcome, calls), flow.run(run_id)["error"]
    assert ("an id of more than 1000 bytes" in str(flow.run(run_id)["error"])) == (not calls)


def test_a_policy_of_the_mapped_pipeline_is_that_of_its_arms_and_rounds(toy: flow.Flow) -> None:
    del toy

    @workflow(name="decide-again")
    def again(names: list[str]) -> None:
        produce.options(retries=2).map(names, also={"by": 1})

    found = check.workflow("decide-again").definition
    assert found is not None
    body = found["nodes"][0]["map"]["body"]
    kept = {each["id"] for each in body if each.get("policy", {}).get("retries") == 2}
    assert kept == {each["id"] for each in body} - {"done", "best"}
