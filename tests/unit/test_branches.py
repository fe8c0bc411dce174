"""Branches: their documents, the arm of a value (against a slow reference), and how they look."""

from __future__ import annotations

import functools
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queue_workflows import check, config, declare, errors
from queue_workflows.declare import ask, branch, node, pipeline, workflow
from tests.support import planning, tabled
from tests.support.examples import examples
from tests.support.planning import FakeRun, ids

PIPELINE = {"nodes": [{"id": "one"}, {"id": "first"}, {"id": "two", "depends_on": ["first"]}]}


def step(**more: Any) -> dict[str, Any]:
    entry = {"id": "b", "kind": "branch", "pipeline": "p", "on": {"$from": "kind"}}
    return {**entry, "arms": {"x": "one", "y": "two"}, **more}


def expanded(entry: dict[str, Any], *steps: dict[str, Any]) -> dict[str, Any]:
    return planning.expand({"name": "w", "steps": [entry, *steps]}, lambda _: PIPELINE)


def test_a_branch_expands_to_its_arms_and_one_node_with_its_output() -> None:
    after = {"id": "s", "kind": "pipeline", "pipeline": "p", "depends_on": ["b"]}
    made = expanded(step(), after)
    assert made["version"] == 2
    nodes = {entry["id"]: entry for entry in made["nodes"]}
    assert nodes["b"]["choice"] == {
        "on": {"$from": "kind"},
        "arms": {"x": "b/one", "y": "b/two"},
        "other": None,
    }
    assert (nodes["b"]["deps"], nodes["s/one"]["deps"]) == (["b/one", "b/two"], ["b"])
    found = planning.read(made).nodes["b"].choice
    assert found is not None
    assert found.members == {"b/one": {"b/one"}, "b/two": {"b/first", "b/two"}}


def test_a_workflow_without_a_branch_keeps_its_version() -> None:
    assert expanded({"id": "s", "kind": "pipeline", "pipeline": "p"})["version"] == 1


def test_a_wrong_branch_is_refused_with_its_step() -> None:
    cases: list[Any] = [
        (step(arms={}), "'arms' has 0 arms"),
        (step(arms=None), "'arms': an object is needed"),
        (step(arms={"x": "gone", "y": "two"}), "arm 'x' names 'gone', which is not a node"),
        (step(arms={"x": "one"}), "node 'first' belongs to no arm"),
        (step(other="gone"), "arm 'other' names 'gone'"),
        (step(on=None), "'on' is missing"),
        (step(arms={"x" * 201: "one", "y": "two"}), "1 to 200 characters"),
    ]
    for entry, words in cases:
        with tabled.case(entry, words):
            with pytest.raises(errors.InvalidWorkflow, match=words) as refused:
                expanded(entry)
            assert "step 'b'" in str(refused.value)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("choice",), 7, "'choice': an object is needed"),
        (("choice", "arms"), {}, "0 arms"),
        (("choice", "arms"), {"x": "s/one"}, "arm 's/one' is not a node of this branch"),
        (("choice", "arms"), {"x": 1}, "must be text"),
        (("arm",), "gone", "unknown branch 'gone'"),
    ],
)
def test_a_forged_branch_is_refused(path: tuple[str, ...], value: Any, words: str) -> None:
    made = expanded(step(), {"id": "s", "kind": "pipeline", "pipeline": "p"})
    owner: Any = next(entry for entry in made["nodes"] if entry["id"] == "b")
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = value
    with pytest.raises(errors.InvalidWorkflow, match=words):
        planning.read(made)


ARM = st.sampled_from(["a", "b", "c", "d", "e"])


@settings(max_examples=examples(200))
@given(
    edges=st.dictionaries(ARM, st.lists(ARM, max_size=3), max_size=5),
    arms=st.dictionaries(st.sampled_from(["0", "1", "2", "true", "null"]), ARM, min_size=1),
    other=st.none() | ARM,
    value=st.sampled_from(["0", 0, 1, 2, True, None, 1.5, "z"]),
    order=st.randoms(use_true_random=False),
)
def test_what_runs_is_what_the_slow_reference_says(
    edges: dict[str, list[str]],
    arms: dict[str, str],
    other: str | None,
    value: Any,
    order: Any,
) -> None:
    deps = {each: sorted({dep for dep in edges.get(each, ()) if dep < each}) for each in "abcde"}
    needed = reference(deps, [*arms.values(), *([other] if other else [])])
    nodes = [{"id": each, "depends_on": deps[each]} for each in sorted(needed)]
    entry = step(arms=arms, **({"other": other} if other else {}))
    made = planning.expand({"name": "w", "steps": [entry]}, lambda _: {"nodes": nodes})
    run = FakeRun(planning.read(made), kind=value)
    plan = run.start()
    keys = {"True": "true", "None": "null", "1.5": ""}
    end = arms.get(keys.get(str(value), str(value)), other)
    if end is None:
        assert plan.failure is not None
        assert repr(value) in plan.failure[1]
        return
    while todo := [each for each, status in run.status.items() if status == "queued"]:
        node_id = order.choice(todo)
        run.finish(node_id, of=node_id)
        plan = run.after(node_id)
    assert plan.complete
    ran = {each.partition("/")[2] for each, status in run.status.items() if status == "completed"}
    assert ran - {""} == reference(deps, [end])
    assert run.delta["b"] == {"of": f"b/{end}"}


def reference(deps: dict[str, list[str]], ends: list[str]) -> set[str]:
    found = set(ends)
    while more := {dep for each in found for dep in deps[each]} - found:
        found |= more
    return found


def test_what_follows_a_branch_is_planned_with_it() -> None:
    after = {"id": "s", "kind": "pipeline", "pipeline": "q", "depends_on": ["b"]}
    load = {"p": PIPELINE, "q": {"nodes": [{"id": "n", "inputs": [
        {"name": "x", "from": "pipeline.x"}]}]}}  # fmt: skip
    after["inputs"] = {"x": {"$from": "b.file"}}
    made = planning.expand({"name": "w", "steps": [step(), after]}, load.__getitem__)
    run = FakeRun(planning.read(made), kind="x")
    run.start()
    run.finish("b/one", file="f")
    plan = run.after("b/one")
    assert [(row.node.id, row.status) for row in plan.rows] == [
        ("s/n", "queued"),
        ("b", "completed"),
    ]
    assert plan.rows[0].inputs == {"x": "f"}


def test_a_branch_that_is_skipped_skips_all_arms() -> None:
    run = FakeRun(planning.read(expanded(step(skip_if={"$from": "no"}))), no=True)
    plan = run.start()
    assert (ids(plan, "skipped"), plan.complete) == (["b/one", "b/first", "b/two", "b"], True)


# --- in Python


@node
def kind_of(name: str) -> str:
    return name


@node
def text(name: str) -> str:
    return name


@node
def record(name: str) -> dict[str, str]:
    return {"name": name}


@node
def nothing() -> None: ...


@node
def two(a: str, b: str) -> str:
    return a + b


@pytest.fixture(autouse=True)
def known() -> Generator[None]:
    declare.install(kind_of, text, record, nothing, two)
    yield
    config.reset_for_tests()


def built(make: Any, name: str = "w") -> dict[str, Any]:
    flow = declare.Workflow(make, name)
    return planning.expand(flow.document(), flow.pipelines().__getitem__)


def test_an_arm_is_given_what_the_value_was_selected_from() -> None:
    def make(first: Any) -> None:
        branch(first["kind"], {"a": text, True: lambda: two("x", first["b"]), 3: text}, id="b")

    nodes = {entry["id"]: entry for entry in built(make)["nodes"]}
    assert nodes["b/text"]["inputs"] == {"name": {"$from": "first"}}
    assert nodes["b/two"]["inputs"] == {"a": "x", "b": {"$from": "first.b"}}
    assert nodes["b"]["choice"]["arms"] == {"a": "b/text", "true": "b/two", "3": "b/text"}


def test_an_arm_with_a_default_of_its_own_keeps_it() -> None:
    def make(first: Any) -> None:
        arms = {key: lambda name=key: text(name) for key in ("a", "b")}
        arms["c"] = functools.partial(two, b="y")
        branch(first["kind"], arms, other=lambda first, name="c": two(name, first["b"]), id="b")

    nodes = {entry["id"]: entry for entry in built(make)["nodes"]}
    assert [nodes[name]["inputs"] for name in ("b/text", "b/text-2", "b/two", "b/two-2")] == [
        {"name": "a"}, {"name": "b"}, {"a": {"$from": "first"}, "b": "y"},
        {"a": "c", "b": {"$from": "first.b"}},
    ]  # fmt: skip


def test_the_value_itself_is_given_if_it_was_selected_from_nothing() -> None:
    def make(name: str) -> None:
        kind = kind_of(name)
        text.options("after")(branch(kind, {"a": text}, other=nothing))

    nodes = {entry["id"]: entry for entry in built(make)["nodes"]}
    assert nodes["branch/text"]["inputs"] == {"name": {"$from": "kind_of/kind_of.result"}}
    assert nodes["after/text"]["inputs"] == {"name": {"$from": "branch.result"}}
    assert nodes["after/text"]["deps"] == ["branch"]


def test_pipelines_are_arms_of_several_nodes() -> None:
    @pipeline
    def both(name: str) -> str:
        return two(text(name), text(name))

    def make(name: str) -> None:
        branch(name, {"a": both, "b": text}, id="b")

    made = built(make)
    assert [entry["id"] for entry in made["nodes"]] == [
        "b/text", "b/text-2", "b/two", "b/text-3", "b",
    ]  # fmt: skip
    assert made["nodes"][-1]["choice"]["arms"] == {"a": "b/two", "b": "b/text-3"}


def test_a_pipeline_in_an_arm_adds_its_policy_to_that_of_the_mapped_pipeline() -> None:
    @pipeline
    def both(name: str) -> str:
        return two(text(name), text(name))

    @pipeline
    def chosen(name: str) -> str:
        return branch(name, {"a": both.options(priority=7), "b": text}, id="b")

    def make(names: list[str]) -> None:
        chosen.options(retries=2).map(names)

    policies = {
        entry["id"]: entry.get("policy", {}) for entry in built(make)["nodes"][0]["map"]["body"]
    }
    kept = {name: (own.get("retries"), own.get("priority")) for name, own in policies.items()}
    assert kept == {
        **dict.fromkeys(("b/text", "b/text-2", "b/two"), (2, 7)),
        "b/text-3": (2, None), "b": (None, None),
    }  # fmt: skip


def test_a_pipeline_in_an_arm_is_no_step_that_could_wait_or_be_skipped() -> None:
    @pipeline
    def both(name: str) -> str:
        return two(text(name), text(name))

    cases: list[Any] = [
        lambda name: branch(name, {"a": both.options("own")}),
        lambda name: branch(name, {"a": both.options(skip_if=name == "x")}),
        lambda name: branch(name, {"a": both.options(after=[name])}),
    ]
    for make in cases:
        with pytest.raises(errors.InvalidWorkflow, match="'both' is not a step of its own"):
            built(make)


def test_a_branch_that_cannot_be_is_refused_with_the_remedy() -> None:
    cases: list[Any] = [
        (lambda name: branch("a", {"a": text}), "takes a value of the run, not 'a'"),
        (lambda name: branch(name, {}), "a branch needs an arm"),
        (lambda name: branch(name, {1.5: text}), "1.5 cannot be the key of an arm"),
        (lambda name: branch(name, {1: text, "1": text}), "'1' cannot be the key of an arm"),
        (lambda name: branch(name, {"a": "text"}), "'text' is no node, pipeline or function"),
        (lambda name: branch(name, {"a": two}), "two needs 'b'"),
        (lambda name: branch(name, {"a": lambda: 7}), "an arm returns the output of a node"),
        (lambda name: branch(name, {"a": lambda: name}), "an arm returns the output of a node"),
        (lambda name: branch(name, {"a": lambda: record(name)["name"]}), "select a part after"),
        (lambda name: branch(name, {"a": text, "b": record}), "dicts and other values"),
        (lambda name: branch(name, {"a": text}, after=text(name)), "takes a list of outputs"),
        (lambda name: branch(name, {"a": lambda: ask("q", "turnout")}), "cannot ask a person"),
        (
            lambda name: branch(name, {"a": lambda: branch(name, {"a": text})}),
            "called in a pipeline, an arm or a loop",
        ),
    ]
    for make, words in cases:
        with tabled.case(make, words), pytest.raises(errors.InvalidWorkflow, match=words):
            built(make)


def test_a_branch_outside_a_workflow_is_refused() -> None:
    with pytest.raises(errors.InvalidConfig, match=r"branch\(\) can only be called in"):
        branch("x", {"x": text})


# --- check and pictures


@workflow
def pictured(name: str) -> None:
    kind = kind_of(name)
    text.options("end")(branch(kind, {"a": text, "b": text}, other=kind_of, id="b"))


def test_the_tree_and_the_flowchart_show_values_and_arms() -> None:
    declare.install(pictured)
    report = check.workflow("pictured")
    assert report.ok, report.findings
    assert report.definition is not None
    tree = planning.tree(report.definition, report.needs)
    assert "|  `- b  has the output of the arm that is chosen" in tree
    assert any(
        "by kind_of/kind_of.result: a -> text, b -> text, other -> kind_of" in x for x in tree
    )
    chart = planning.chart(report.definition)
    assert 'n3{"b"}' in chart
    assert {'n0 -.->|"a, b"| n1', 'n0 -.->|"other"| n2', "n1 --> n3", "n3 --> n4"} <= set(chart)


def findings(*steps: dict[str, Any]) -> list[str]:
    for name in ("one", "first", "two"):
        config.register_node(name, nothing.function)
    report = check.document({"name": "w", "steps": list(steps)}, pipelines={"p": PIPELINE})
    return [str(finding) for finding in report.findings]


def test_check_finds_a_value_that_the_branch_does_not_wait_for() -> None:
    before = {"id": "s", "kind": "pipeline", "pipeline": "p"}
    assert findings(before, step(on={"$from": "s/one"})) == []
    assert findings(before, step(on={"$from": "s/one"}, depends_on=["s"])) == []
    (found,) = findings({**before, "depends_on": ["b"]}, step(on={"$from": "s/one"}))
    assert found.startswith("error: node 'b': its value: 'b/one' does not wait for 's/one'")
    (found,) = findings(step(), step(id="c", on={"$from": "b/one"}, depends_on=["b"]))
    assert "'b/one' may be left out by step 'b'" in found
    (found,) = findings(step(arm={}))
    assert "nothing reads the key 'arm'; write 'arms'" in found
