"""Expanding workflows: what the definition contains, and what is refused with which message."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from queue_workflows import errors
from queue_workflows.dag import bindings, definition, graph
from tests.support.cpu import cpu_seconds

PIPELINES: dict[str, Any] = {
    "one": {"name": "one", "nodes": [{"id": "n"}]},
    "fan": {
        "name": "fan",
        "nodes": [
            {"id": "src", "node": "media.load"},
            {"id": "left", "depends_on": ["src"], "gpu": True, "model": "m"},
            {"id": "right", "depends_on": ["src"], "skip_if": None},
            {"id": "alone", "gpu": True},
        ],
    },
}


def expand(*steps: Any, pipelines: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    known = PIPELINES | (pipelines or {})
    return definition.expand({"name": "w", "steps": list(steps)}, known.__getitem__, **options)


def step(step_id: str, pipeline: str = "one", **more: Any) -> dict[str, Any]:
    return {"id": step_id, "kind": "pipeline", "pipeline": pipeline, **more}


def by_id(expanded: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {node["id"]: node for node in expanded["nodes"]}


def refusal(*steps: Any, **options: Any) -> str:
    with pytest.raises(errors.InvalidWorkflow) as caught:
        expand(*steps, **options)
    return str(caught.value)


def inputs_of(source: Any, given: dict[str, Any] | None = None) -> dict[str, Any]:
    """The templates of a node with one input, from this source, in step `s`."""
    nodes = [{"id": "a"}, {"id": "b"}, {"id": "t", "inputs": [{"name": "x", "from": source}]}]
    expanded = expand(step("s", "p", inputs=given or {}), pipelines={"p": {"nodes": nodes}})
    return by_id(expanded)["s/t"]["inputs"]


def test_a_pipeline_step_becomes_its_nodes_in_declaration_order() -> None:
    expanded = expand(step("s", "fan"))
    assert (expanded["version"], expanded["workflow"]) == (1, "w")
    assert list(by_id(expanded)) == ["s/src", "s/left", "s/right", "s/alone"]
    assert by_id(expanded)["s/left"] == {
        "id": "s/left", "module": "left", "queue": "gpu", "model": "m", "deps": ["s/src"],
        "inputs": {}, "skip_if": None, "pipeline": "fan", "step": None,
    }  # fmt: skip
    assert by_id(expanded)["s/src"]["module"] == "media.load"
    assert [node["queue"] for node in expanded["nodes"]] == ["cpu", "gpu", "cpu", "gpu"]


def test_an_input_step_is_one_node_that_keeps_the_step_as_written() -> None:
    written = {"id": "ask", "kind": "input", "widget": "choose_one", "target": "pick",
               "source": {"$from": "x.files"}, "extra": [1]}  # fmt: skip
    (node,) = expand(written)["nodes"]
    assert node == {
        "id": "ask", "module": "__input__choose_one", "queue": "cpu", "model": None, "deps": [],
        "inputs": {"widget": "choose_one", "target": "pick"}, "skip_if": None, "pipeline": None,
        "step": written,
    }  # fmt: skip


def test_a_step_waits_for_every_leaf_and_its_sources_inherit_that() -> None:
    ask = {"id": "ask", "kind": "input", "widget": "w", "depends_on": ["s"]}
    nodes = by_id(expand(step("t", "fan", depends_on=["s", "ask"]), step("s", "fan"), ask))
    leaves = ["s/left", "s/right", "s/alone"]
    assert nodes["ask"]["deps"] == leaves
    assert nodes["t/src"]["deps"] == nodes["t/alone"]["deps"] == [*leaves, "ask"]
    assert nodes["t/left"]["deps"] == ["t/src"]


def test_a_nodes_own_skip_if_wins_over_its_steps_even_when_null() -> None:
    nodes = by_id(expand(step("s", "fan", skip_if={"$from": "flag"})))
    assert nodes["s/src"]["skip_if"] == {"$from": "flag"}
    assert nodes["s/right"]["skip_if"] is None


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("pipeline._implicit(5)", 5),
        ('pipeline._implicit({"a": [1, null]})', {"a": [1, None]}),
        ("pipeline._implicit({'a': (1, None)})", {"a": [1, None]}),
        ("pipeline._implicit(True)", True),
        ("pipeline._implicit(true)", True),
        ("pipeline._implicit('quoted')", "quoted"),
        ("pipeline._implicit(plain words (here))", "plain words (here)"),
        ("pipeline._implicit(NaN)", "NaN"),
        ("pipeline._implicit()", ""),
        ('pipeline._implicit({"$from": "x"})', {"$value": {"$from": "x"}}),
        ("pipeline._siblings([a, b])", {"$out": ["s/a", "s/b"]}),
        ("pipeline._siblings(['b'])", {"$out": ["s/b"]}),
        ("pipeline._siblings([])", {"$out": []}),
        ("a", {"$out": "s/a"}),
        ("a.mask.png", {"$out": "s/a/mask.png"}),
        ("a.sub/mask.png", {"$out": "s/a/sub/mask.png"}),
        ("pipeline.key", {"$from": "other.value"}),
    ],
)
def test_the_forms_of_from(source: str, expected: Any) -> None:
    assert inputs_of(source, {"key": {"$from": "other.value"}}) == {"x": expected}


def test_a_key_that_the_step_does_not_give_leaves_the_input_to_its_default() -> None:
    assert inputs_of("pipeline.missing", {"key": 1}) == {}
    assert inputs_of("pipeline.key", {"key": None}) == {"x": None}


@pytest.mark.parametrize(
    "source",
    ["stranger", "stranger.x", "a.../x", "a./etc/passwd", "a.x/../../y", "a.", "pipeline.",
     "pipeline._siblings(a)", "pipeline._siblings([a, stranger])", "pipeline._other(1)",
     "pipeline._implicit({1, 2})", "pipeline._implicit(" + "[" * 5000 + "]" * 5000 + ")",
     "a.b\\c", "a.\x00"],
)  # fmt: skip
def test_a_from_that_is_none_of_the_forms_is_refused(source: str) -> None:
    with pytest.raises(errors.InvalidWorkflow, match=r"'t'.*'x'"):
        inputs_of(source)


def test_paths_are_bound_to_the_runs_folder() -> None:
    template = {"p": {"$out": "s/a"}, "l": {"$out": ["s/a", "s/b/c"]}, "v": {"$from": "k"}, "n": 1}
    expected = {"p": "/o/s/a", "l": ["/o/s/a", "/o/s/b/c"], "v": {"$from": "k"}, "n": 1}
    assert bindings.bind_paths(template, "/o", node_id="s/t") == expected
    assert bindings.bind_paths(template, "/o/", node_id="s/t") == expected
    with pytest.raises(errors.InvalidWorkflow, match=r"'s/t'.*'p'.*out_dir"):
        bindings.bind_paths(template, None, node_id="s/t")
    assert bindings.bind_paths({"n": 1}, None, node_id="s/t") == {"n": 1}


@pytest.mark.parametrize(
    "mine",
    [{"$out": "s/a"}, {"$out": ["x"], "b": {"$from": "k"}}, {"$out": {"$value": 1}}, {"$out": None},
     {"deep": {"$out": "x"}}],
)  # fmt: skip
def test_an_apps_own_out_key_is_no_marker(mine: dict[str, Any]) -> None:
    for templates in (
        inputs_of("pipeline.key", {"key": mine}),
        inputs_of(f"pipeline._implicit({json.dumps(mine)})"),
    ):
        bound = bindings.bind_paths(templates, None, node_id="s/t")["x"]
        assert bound in (mine, {"$value": mine})


def test_the_definition_is_json_and_detached_from_the_apps_objects() -> None:
    inputs = {"key": {"list": [1]}}
    nodes = [{"id": "t", "inputs": [{"name": "x", "from": "pipeline.key"}]}]
    expanded = expand(step("s", "p", inputs=inputs), pipelines={"p": {"nodes": nodes}})
    inputs["key"]["list"].append(2)
    assert expanded["nodes"][0]["inputs"] == {"x": {"list": [1]}}
    assert json.loads(json.dumps(expanded)) == expanded


def test_the_digest_knows_content_and_not_key_order() -> None:
    expanded = expand(step("s", "fan"))
    shuffled = {key: expanded[key] for key in reversed(expanded)}
    assert definition.digest(shuffled) == definition.digest(expanded)
    assert definition.digest(expand(step("t", "fan"))) != definition.digest(expanded)
    assert len(definition.digest(expanded)) == 64


def test_a_pipeline_is_loaded_once_and_its_loaders_error_passes_through() -> None:
    asked: list[str] = []

    def load(name: str) -> dict[str, Any]:
        asked.append(name)
        if name == "gone":
            raise FileNotFoundError(name)
        return PIPELINES[name]

    steps = [step("a"), step("b"), step("c", "gone")]
    with pytest.raises(FileNotFoundError):
        definition.expand({"name": "w", "steps": steps}, load)
    assert asked == ["one", "gone"]


BAD_IDS = ["", "a.b", "a/b", "..", ".", "a b", "é", "a\n", "x" * 101, 5, None, ["a"], "a\x00"]


@pytest.mark.parametrize("bad", BAD_IDS)
def test_ids_have_a_grammar(bad: Any) -> None:
    assert "is not an id" in refusal({**step("s"), "id": bad})
    assert "is not an id" in refusal(step("s", "p"), pipelines={"p": {"nodes": [{"id": bad}]}})


@pytest.mark.parametrize("good", ["a", "A-b_9", "-", "x" * 100, "pipeline"])
def test_ids_that_are_fine(good: str) -> None:
    assert by_id(expand({**step("s"), "id": good})).keys() == {f"{good}/n"}


def _pipeline(*nodes: Any) -> dict[str, Any]:
    return {"pipelines": {"p": {"nodes": list(nodes)}}}


REFUSED: list[tuple[str, Callable[[], str]]] = [
    ("no steps", lambda: refusal()),
    ("two steps.*'s'", lambda: refusal(step("s"), step("s"))),
    ("'s'.*unknown step 'x'", lambda: refusal(step("s", depends_on=["x"]))),
    ("'s' depends on itself", lambda: refusal(step("s", depends_on=["s"]))),
    ("cycle of steps: a -> b -> a", lambda: refusal(
        step("z", depends_on=["a"]), step("a", depends_on=["b"]), step("b", depends_on=["a"]))),
    ("'s'.*unknown kind 'maps'", lambda: refusal({**step("s"), "kind": "maps"})),
    ("'s'.*unknown kind None", lambda: refusal({"id": "s"})),
    ("'s'.*unknown kind", lambda: refusal({"id": "s", "kind": []})),
    ("'s'.*'pipeline' is missing", lambda: refusal({"id": "s", "kind": "pipeline"})),
    ("'s'.*'pipeline' must be text", lambda: refusal(step("s", 5))),  # type: ignore[arg-type]
    ("'s'.*'widget' is missing", lambda: refusal({"id": "s", "kind": "input"})),
    ("'s'.*'target' must be text",
     lambda: refusal({"id": "s", "kind": "input", "widget": "w", "target": 5})),
    ("'s'.*set is not a JSON",
     lambda: refusal({"id": "s", "kind": "input", "widget": "w", "options": {1}})),
    ("'s'.*'depends_on' must be a list, not str", lambda: refusal(step("s", depends_on="a"))),
    ("'s'.*'depends_on' lists ids", lambda: refusal(step("s", depends_on=[{}]))),
    ("step 1.*object is needed, not str", lambda: refusal("s")),
    ("'s'.*'inputs'.*object", lambda: refusal(step("s", inputs=[]))),
    ("'s'.*'skip_if'.*number", lambda: refusal(step("s", skip_if=math.nan))),
    ("'s'.*'inputs'.*number", lambda: refusal(step("s", inputs={"a": 10**5000}))),
    ("'s'.*'inputs'.*NUL", lambda: refusal(step("s", inputs={"a": "\x00"}))),
    ("'s'.*'inputs'.*surrogate", lambda: refusal(step("s", inputs={"\ud800": 1}))),
    ("'s'.*'inputs'.*not a string", lambda: refusal(step("s", inputs={1: 2}))),
    ("'s'.*'inputs'.*too deep", lambda: refusal(step("s", inputs=_deep(3000)))),
    ("'s'.*'skip_if'.*too deep", lambda: refusal(step("s", skip_if=_deep(65)))),
    ("'p'.*no nodes", lambda: refusal(step("s", "p"), **_pipeline())),
    ("'p'.*'nodes' must be a list", lambda: refusal(
        step("s", "p"), pipelines={"p": {"nodes": {}}})),
    ("'p'.*object is needed, not null", lambda: refusal(step("s", "p"), pipelines={"p": None})),
    ("'p'.*node 1.*object", lambda: refusal(step("s", "p"), **_pipeline(5))),
    ("'p'.*two nodes.*'n'", lambda: refusal(step("s", "p"), **_pipeline({"id": "n"}, {"id": "n"}))),
    ("'p'.*'n'.*unknown node 'x'",
     lambda: refusal(step("s", "p"), **_pipeline({"id": "n", "depends_on": ["x"]}))),
    ("'p'.*'n' depends on itself",
     lambda: refusal(step("s", "p"), **_pipeline({"id": "n", "depends_on": ["n"]}))),
    ("'p'.*cycle of nodes: a -> b -> a", lambda: refusal(step("s", "p"), **_pipeline(
        {"id": "a", "depends_on": ["b"]}, {"id": "b", "depends_on": ["a"]}))),
    ("'n'.*model 'm' needs gpu", lambda: refusal(step("s", "p"), **_pipeline(
        {"id": "n", "model": "m"}))),
    ("'n'.*'gpu' must be", lambda: refusal(step("s", "p"), **_pipeline({"id": "n", "gpu": "yes"}))),
    ("'n'.*'node' must be text", lambda: refusal(step("s", "p"), **_pipeline(
        {"id": "n", "node": {}}))),
    ("'n'.*__input__", lambda: refusal(step("s", "p"), **_pipeline(
        {"id": "n", "node": "__input__x"}))),
    ("'n'.*'inputs' must be a list", lambda: refusal(step("s", "p"), **_pipeline(
        {"id": "n", "inputs": {}}))),
    ("'n'.*'name' is missing", lambda: refusal(step("s", "p"), **_pipeline(
        {"id": "n", "inputs": [{"from": "n"}]}))),
    (r"'n'.*named '\$from'", lambda: refusal(step("s", "p"), **_pipeline(
        {"id": "n", "inputs": [{"name": "$from", "from": "n"}]}))),
    ("'n'.*'x'.*'from' is missing", lambda: refusal(step("s", "p"), **_pipeline(
        {"id": "n", "inputs": [{"name": "x"}]}))),
    ("'n'.*two inputs.*'x'", lambda: refusal(step("s", "p"), **_pipeline(
        {"id": "n", "inputs": [{"name": "x", "from": "n"}] * 2}))),
    ("'n'.*'skip_if'.*object is not a JSON", lambda: refusal(step("s", "p"), **_pipeline(
        {"id": "n", "skip_if": object()}))),
    ("more than 3 nodes.*'s'", lambda: refusal(step("s", "fan"), max_nodes=3)),
]  # fmt: skip


def _deep(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"k": [value]}
    return value


@pytest.mark.parametrize(("words", "refused"), REFUSED, ids=[words for words, _ in REFUSED])
def test_a_bad_workflow_is_refused_by_name_and_reason(
    words: str, refused: Callable[[], str]
) -> None:
    message = refused()
    assert re.search(words, message), message


@pytest.mark.parametrize(
    "junk", [None, 5, "w", [], {}, {"steps": None}, {"steps": {}}, {"steps": "s"},
             {"steps": [None]}, {"name": 5, "steps": [{}]}, {"steps": [[]]}],
)  # fmt: skip
def test_what_is_no_workflow_at_all_is_refused(junk: Any) -> None:
    with pytest.raises(errors.InvalidWorkflow):
        definition.expand(junk, PIPELINES.__getitem__)


JUNK = [None, 5, 1.5, True, "x", "", [], [5], [None], [[]], {}, {"k": 1}, ["n"], {1}, b"x"]
STEP_KEYS = ["id", "kind", "pipeline", "inputs", "depends_on", "skip_if", "widget", "target"]
NODE_KEYS = ["id", "node", "depends_on", "gpu", "model", "inputs", "skip_if"]


@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_a_wrong_type_anywhere_is_refused_or_fine_but_never_another_error(junk: Any) -> None:
    def load(nodes: Any) -> Callable[[str], Any]:
        return lambda name: {"nodes": nodes}

    def attempt(one: Any, nodes: Any) -> None:
        try:
            expanded = definition.expand({"name": "w", "steps": [one, step("other")]}, load(nodes))
        except errors.InvalidWorkflow:
            return
        graph.Graph(json.loads(json.dumps(expanded)))

    good = {"id": "n", "inputs": [{"name": "x", "from": "n"}]}
    for key in STEP_KEYS:
        attempt({**step("s"), key: junk}, [good])
        attempt({"id": "s", "kind": "input", "widget": "w", key: junk}, [good])
    for key in NODE_KEYS:
        attempt(step("s"), [{**good, key: junk}])
    for key in ("name", "from"):
        attempt(step("s"), [{**good, "inputs": [{"name": "x", "from": "n", key: junk}]}])
    attempt(step("s"), junk)


def test_null_means_absent_for_what_is_optional() -> None:
    nodes = [{"id": "n", "node": None, "depends_on": None, "gpu": None, "model": None,
              "inputs": None, "skip_if": None}]  # fmt: skip
    (node,) = expand(
        step("s", "p", inputs=None, depends_on=None, skip_if=None),
        pipelines={"p": {"nodes": nodes}},
    )["nodes"]
    assert (node["module"], node["queue"], node["deps"], node["inputs"]) == ("n", "cpu", [], {})


def test_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = [{"id": f"n{i}"} for i in range(1100)]
    message = refusal(
        step("a", "p"), step("b", "p", depends_on=["a"]), pipelines={"p": {"nodes": wide}}
    )
    assert "'b'" in message and "joining node" in message
    monkeypatch.setenv("QUEUE_WORKFLOWS_MAX_PAYLOAD_KB", "1")
    taking = {"nodes": [{"id": "t", "inputs": [{"name": "x", "from": "pipeline.k"}]}]}
    message = refusal(step("s", "p", inputs={"k": "x" * 2000}), pipelines={"p": taking})
    assert "'s/t'" in message and "MAX_PAYLOAD_KB" in message
    monkeypatch.setenv("QUEUE_WORKFLOWS_MAX_NODES_PER_RUN", "1")
    assert "more than 1 nodes" in refusal(step("a"), step("b"))


def test_a_chain_of_3000_nodes_expands_without_recursion_and_fast() -> None:
    nodes = [{"id": f"n{i}", "depends_on": [f"n{i - 1}"] if i else []} for i in range(3000)]
    pipelines = {"p": {"nodes": nodes}}
    assert cpu_seconds(lambda: expand(step("s", "p"), pipelines=pipelines)) < 0.5


def test_a_long_cycle_is_named_in_short() -> None:
    nodes = [{"id": f"n{i}", "depends_on": [f"n{(i + 1) % 2000}"]} for i in range(2000)]
    message = refusal(step("s", "p"), pipelines={"p": {"nodes": nodes}})
    assert "n0 -> n1" in message and "..." in message and len(message) < 500
