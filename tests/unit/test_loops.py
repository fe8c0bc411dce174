"""Loops: their documents, how many rounds they take (against a slow reference), what is refused."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queue_workflows import check, config, declare, errors
from queue_workflows.declare import loop, node, pipeline, workflow
from tests.support import constants, planning, tabled
from tests.support.examples import examples
from tests.support.planning import FakeRun, ids

BODY = {"nodes": [{"id": "f", "inputs": [{"name": "x", "from": "pipeline.x"}]}]}


def step(**more: Any) -> dict[str, Any]:
    entry = {"id": "l", "kind": "loop", "pipeline": "p", "inputs": {"x": {"$from": "l"}}}
    ends = {"until": {"$from": "l.n", "$eq": 0}, "at_most": 3, "result": "f"}
    return {**entry, "start": {"$from": "begin"}, **ends, **more}


def expanded(entry: dict[str, Any], body: Any = BODY) -> dict[str, Any]:
    return planning.expand({"name": "w", "steps": [entry]}, lambda _: body)


def nodes_of(made: dict[str, Any]) -> dict[str, dict[str, Any]]:
    planning.read(made)
    return {entry["id"]: entry for entry in made["nodes"]}


def test_each_round_gets_the_state_of_the_round_before() -> None:
    found = nodes_of(expanded(step()))
    assert [*found] == ["l/f#1", "l/f#2", "l/f#3", "l"]
    assert [found[f"l/f#{n}"]["inputs"]["x"] for n in (1, 2, 3)] == [
        {"$from": "begin"},
        {"$from": "l/f#1"},
        {"$from": "l/f#2"},
    ]
    assert [found[each]["deps"] for each in found] == [[], ["l/f#1"], ["l/f#2"], ["l/f#3"]]
    assert found["l"]["loop"]["rounds"][1] == {
        "end": "l/f#2",
        "until": {"$from": "l/f#2.n", "$eq": 0},
    }


def test_a_part_of_a_constant_start_is_taken_when_it_is_expanded() -> None:
    found = nodes_of(expanded(step(start={"a": [1, 2]}, inputs={"x": {"$from": "l.a.1"}})))
    assert found["l/f#1"]["inputs"] == {"x": {"$value": 2}}
    assert found["l/f#2"]["inputs"] == {"x": {"$from": "l/f#1.a.1"}}


def test_nodes_of_a_round_wait_for_each_other_and_for_all_of_the_round_before() -> None:
    body = {
        "nodes": [
            {"id": "a", "inputs": [{"name": "x", "from": "pipeline.x"}]},
            {"id": "f", "depends_on": ["a"], "inputs": [{"name": "at", "from": "a.file"}]},
            {"id": "log", "depends_on": ["a"], "skip_if": {"$from": "l.quiet"}},
        ]
    }
    found = nodes_of(expanded(step(at_most=2), body))
    assert found["l/f#2"]["inputs"] == {"at": {"$out": "l/a#2/file"}}
    assert found["l/a#2"]["deps"] == ["l/f#1", "l/log#1"]
    assert found["l/log#2"]["deps"] == ["l/a#2"]
    assert found["l/log#2"]["skip_if"] == {"$from": "l/f#1.quiet"}
    assert found["l"]["deps"] == ["l/f#2", "l/log#2"]


@settings(max_examples=examples(200))
@given(
    states=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    at_most=st.integers(1, 8),
    must=st.booleans(),
)
def test_the_rounds_are_those_of_the_slow_reference(
    states: list[int], at_most: int, must: bool
) -> None:
    wanted = 0
    for wanted in range(1, at_most + 1):
        if states[(wanted - 1) % len(states)] == 0:
            break
    last = states[(wanted - 1) % len(states)]
    made = expanded(step(at_most=at_most, must=must, start={"n": 9}))
    run = FakeRun(planning.read(made))
    planned = run.start()
    ran = 0
    while todo := [each for each, status in run.status.items() if status == "queued"]:
        (node_id,) = todo
        ran += 1
        assert node_id == f"l/f#{ran}"
        run.finish(node_id, n=states[(ran - 1) % len(states)])
        planned = run.after(node_id)
    assert ran == wanted
    if must and last != 0:
        assert planned.failure is not None
        assert f"'until' does not hold after round {at_most}" in planned.failure[1]
        return
    assert planned.complete
    assert run.delta["l"] == {"n": last}
    assert len(run.status) == at_most + 1


def test_a_long_tail_is_skipped_without_reading_it() -> None:
    run = FakeRun(planning.read(expanded(step(at_most=1000))), begin=1)
    run.start()
    run.finish("l/f#1", n=0)
    reads = len(run.heads_read)
    planned = run.after("l/f#1")
    assert (len(ids(planned, "skipped")), planned.complete) == (999, True)
    assert len(run.heads_read) - reads <= 5


def test_an_until_that_is_not_there_fails_the_run() -> None:
    run = FakeRun(planning.read(expanded(step())), begin=1)
    run.start()
    run.finish("l/f#1", other=0)
    failure = run.after("l/f#1").failure
    assert failure is not None
    assert failure[1].startswith("loop 'l': 'until' of round 1: ")


def test_a_wrong_loop_is_refused_with_its_step() -> None:
    cases: list[Any] = [
        ({"at_most": None}, "'at_most' is needed"),
        ({"at_most": True}, "'at_most' is needed"),
        ({"at_most": 0}, "must be 1 to 1000"),
        ({"at_most": 1001}, "must be 1 to 1000"),
        ({"result": "gone"}, "'result' names 'gone'"),
        ({"result": None}, "'result' is missing"),
        ({"until": None}, "'until' is missing"),
        ({"must": 1}, "'must' must be true or false"),
        (
            {"start": {"a": {"$from": "x"}}, "inputs": {"x": {"$from": "l.a"}}},
            "'start' is made of several values",
        ),
        ({"start": {"a": 1}, "inputs": {"x": {"$from": "l.b"}}}, "'l.b' is not in 'start'"),
    ]
    for more, words in cases:
        with tabled.case(more, words):
            with pytest.raises(errors.InvalidWorkflow, match=words) as refused:
                expanded(step(**more))
            assert "step 'l'" in str(refused.value)


def test_a_loop_in_a_map_has_its_rounds_in_the_body() -> None:
    inner = {"result": {"$from": "l"}, "steps": [step(start={"$from": "item"}, at_most=2)]}
    made = expanded({"id": "m", "kind": "map", "over": [1], **inner})
    (node,) = made["nodes"]
    assert [each["id"] for each in node["map"]["body"]] == ["l/f#1", "l/f#2", "l"]
    assert planning.read(made).nodes["m"].map is not None


def test_a_wrong_loop_in_a_map_is_refused_with_its_step() -> None:
    over = {"id": "m", "kind": "map", "over": [1], "steps": [step(at_most=0)]}
    with pytest.raises(errors.InvalidWorkflow, match="step 'm': step 'l': 'at_most' must be 1 to"):
        expanded(over)


@pytest.mark.parametrize(
    ("node_id", "key", "value", "words"),
    [
        ("l", "loop", {"rounds": []}, "0 rounds"),
        ("l", "loop", {"rounds": [{"end": "gone"}]}, "'gone' is not a node of this loop"),
        ("l", "loop", {"rounds": [{"end": "l", "until": 1}]}, "'l' is not a node of this loop"),
        ("l", "loop", None, "unknown branch 'l'"),
        ("l/f#1", "round", 0, "'round' must be"),
        ("l/f#1", "id", "l/f#0", "is not"),
    ],
)
def test_a_forged_loop_is_refused(node_id: str, key: str, value: Any, words: str) -> None:
    made = expanded(step())
    next(entry for entry in made["nodes"] if entry["id"] == node_id)[key] = value
    with pytest.raises(errors.InvalidWorkflow, match=words):
        planning.read(made)


def test_a_forged_number_of_a_round_is_no_error_of_the_process() -> None:
    made = expanded(step())
    made["nodes"][1]["round"] = 900
    run = FakeRun(planning.read(made), begin=1)
    run.start()
    run.finish("l/f#1", n=0)
    assert ids(run.after("l/f#1"), "skipped") == ["l/f#2", "l/f#3"]
    assert constants.value("dag.loops.MAX_ROUNDS") == 1000


# --- in Python


@node
def improve(draft: dict[str, int], by: int = 1) -> dict[str, int]:
    return {"n": draft["n"] + by}


@node
def grow(n: int) -> int:
    return n + 1


@node
def is_good(draft: Any) -> bool:
    return bool(draft)


@node
def drops(x: Any) -> None:
    del x


@pytest.fixture(autouse=True)
def known() -> Generator[None]:
    declare.install(improve, grow, is_good, drops)
    yield
    config.reset_for_tests()


def built(make: Any) -> dict[str, dict[str, Any]]:
    flow = declare.Workflow(make, "w")
    return nodes_of(planning.expand(flow.document(), flow.pipelines().__getitem__))


def test_a_part_of_the_state_a_comparison_or_a_node_ends_a_loop() -> None:
    def make(first: Any) -> None:
        one = loop(improve, start=first, until=lambda r: r["n"], at_most=2, id="one")
        two = loop(grow, start=one["n"], until=lambda n: n == 3, at_most=2, id="two")
        loop(grow, start=two, until=is_good, at_most=2, id="three")

    found = built(make)
    assert found["one"]["loop"]["rounds"][0]["until"] == {"$from": "one/improve#1.n"}
    assert found["two/grow#1"]["inputs"] == {"n": {"$from": "one.n"}}
    assert found["two"]["loop"]["rounds"][1]["until"] == {
        "$from": "two/grow#2.result",
        "$eq": 3,
    }
    assert found["three/grow#1"]["inputs"] == {"n": {"$from": "two.result"}}
    assert found["three/is_good#2"]["inputs"] == {"draft": {"$from": "three/grow#2.result"}}
    assert found["three/grow#2"]["deps"] == ["three/is_good#1", "three/grow#1"]
    assert found["three"]["loop"]["rounds"][0]["until"] == {"$from": "three/is_good#1.result"}


def test_pipelines_and_functions_of_several_nodes_are_repeated() -> None:
    @pipeline
    def both(n: int) -> int:
        return grow(grow(n))

    def make(n: int) -> None:
        first = loop(both, start=n, until=lambda r: r == 4, at_most=2, id="a")
        loop(
            lambda draft: improve(draft, by=2),
            start={"n": 1},
            until=lambda r: r["n"] != 1,
            at_most=1,
            after=[first],
            id="b",
        )

    found = built(make)
    assert found["a/grow-2#2"]["inputs"] == {"n": {"$from": "a/grow#2.result"}}
    assert found["a/grow#2"]["inputs"] == {"n": {"$from": "a/grow-2#1.result"}}
    assert found["b/improve#1"]["inputs"] == {"draft": {"n": 1}, "by": 2}
    assert found["b/improve#1"]["deps"] == ["a"]


def test_a_loop_that_cannot_be_is_refused_with_the_remedy() -> None:
    cases: list[Any] = [
        (lambda n: loop(grow, start=n, until=lambda r: r > 3, at_most=2), "other conditions: a no"),
        (lambda n: loop(grow, start=n, until=lambda r: True, at_most=2), "until returned True"),
        (lambda n: loop(grow, start=n, until=lambda r: not r, at_most=2), "other conditions"),
        (lambda n: loop(lambda: grow(n), start=n, until=is_good, at_most=2), "takes the state"),
        (lambda n: loop(lambda k=n: grow(k), start=n, until=is_good, at_most=2), "takes the state"),
        (lambda n: loop(lambda x: n, start=n, until=is_good, at_most=2), "returns the output"),
        (lambda n: loop(drops, start=n, until=is_good, at_most=2), "returns the output"),
        (lambda n: loop(grow, start=n, until=is_good, at_most=0), "must be 1 to 1000"),
    ]
    for make, words in cases:
        with tabled.case(make, words), pytest.raises(errors.InvalidWorkflow, match=words):
            built(make)


@workflow
def polished(n: int) -> int:
    return loop(grow, start=n, until=is_good, at_most=5, id="best")


def test_check_and_the_pictures_show_one_round() -> None:
    declare.install(polished)
    report = check.workflow("polished")
    assert report.ok and not report.findings, report.findings
    assert report.definition is not None
    tree = planning.tree(report.definition)
    assert [line for line in tree if "#2" in line] == []
    assert "|  `- best  repeats these, at most 5 times" in tree
    assert any(line.strip().endswith("until best/is_good#1.result") for line in tree)
    chart = planning.chart(report.definition)
    assert 'n0 -.->|"again, at most 5"| n0' in chart
    assert "n1 --> n2" in chart


def test_check_finds_a_part_that_the_state_does_not_have() -> None:
    config.register_node("f", grow._function)  # pyright: ignore[reportPrivateUsage]
    entry = step(start=1, inputs={"n": {"$from": "l"}}, result="f.result")
    body = {"nodes": [{"id": "f", "inputs": [{"name": "n", "from": "pipeline.n"}]}]}
    report = check.document({"name": "w", "steps": [entry]}, pipelines={"p": body})
    assert report.findings == ()
    entry["until"] = {"$from": "l/f.wrong"}
    report = check.document({"name": "w", "steps": [entry]}, pipelines={"p": body})
    (found,) = report.findings
    assert "node 'l': 'until': 'l/f#1' has no output 'wrong'" in str(found)
