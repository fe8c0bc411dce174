"""Expanding workflows: what the definition contains, and what is refused with which message."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from queue_workflows import errors
from tests.support import constants, planning, tabled
from tests.support.cpu import cpu_seconds
from tests.support.wait import patience

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
    return planning.expand({"name": "w", "steps": list(steps)}, known.__getitem__, **options)


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


def test_a_nodes_own_skip_if_wins_over_its_steps() -> None:
    own = {"nodes": [{"id": "own", "skip_if": {"$from": "mine"}}, {"id": "bare"}]}
    nodes = by_id(expand(step("s", "p", skip_if={"$from": "flag"}), pipelines={"p": own}))
    assert nodes["s/own"]["skip_if"] == {"$from": "mine"}
    assert nodes["s/bare"]["skip_if"] == {"$from": "flag"}


@pytest.mark.parametrize("empty", [None, False, {}, [], 0])
def test_an_empty_skip_if_of_a_node_leaves_it_to_its_steps(empty: Any) -> None:
    pipelines = {"p": {"nodes": [{"id": "n", "skip_if": empty}]}}
    for given, expected in [({"$from": "flag"}, {"$from": "flag"}), (empty, None), (None, None)]:
        (node,) = expand(step("s", "p", skip_if=given), pipelines=pipelines)["nodes"]
        assert node["skip_if"] == expected


def test_the_forms_of_from() -> None:
    cases: list[Any] = [
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
    ]
    for source, expected in cases:
        with tabled.case(source, expected):
            assert inputs_of(source, {"key": {"$from": "other.value"}}) == {"x": expected}


def test_a_key_that_the_step_does_not_give_is_none() -> None:
    assert inputs_of("pipeline.missing", {"key": 1}) == {"x": None}
    assert inputs_of("pipeline.key", {"key": None}) == {"x": None}


def test_a_from_that_is_none_of_the_forms_is_refused() -> None:
    cases: list[Any] = [
        "stranger", "stranger.x", "a.../x", "a./etc/passwd", "a.x/../../y", "a.", "pipeline.",
        "pipeline._siblings(a)", "pipeline._siblings([a, stranger])", "pipeline._other(1)",
        "pipeline._implicit({1, 2})", "pipeline._implicit(" + "[" * 5000 + "]" * 5000 + ")",
        "a.b\\c", "a.\x00"
    ]  # fmt: skip
    for source in cases:
        with tabled.case(source), pytest.raises(errors.InvalidWorkflow, match=r"'t'.*'x'"):
            inputs_of(source)


def test_paths_are_bound_to_the_runs_folder() -> None:
    template = {"p": {"$out": "s/a"}, "l": {"$out": ["s/a", "s/b/c"]}, "v": {"$from": "k"}, "n": 1}
    expected = {"p": "/o/s/a", "l": ["/o/s/a", "/o/s/b/c"], "v": {"$from": "k"}, "n": 1}
    assert planning.bind_paths(template, "/o", node_id="s/t") == expected
    assert planning.bind_paths(template, "/o/", node_id="s/t") == expected
    with pytest.raises(errors.InvalidWorkflow, match=r"'s/t'.*'p'.*out_dir"):
        planning.bind_paths(template, None, node_id="s/t")
    assert planning.bind_paths({"n": 1}, None, node_id="s/t") == {"n": 1}


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
        bound = planning.bind_paths(templates, None, node_id="s/t")["x"]
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
    assert planning.digest(shuffled) == planning.digest(expanded)
    assert planning.digest(expand(step("t", "fan"))) != planning.digest(expanded)
    assert len(planning.digest(expanded)) == 64


def test_a_pipeline_is_loaded_once_and_its_loaders_error_passes_through() -> None:
    asked: list[str] = []

    def load(name: str) -> dict[str, Any]:
        asked.append(name)
        if name == "gone":
            raise FileNotFoundError(name)
        return PIPELINES[name]

    steps = [step("a"), step("b"), step("c", "gone")]
    with pytest.raises(FileNotFoundError):
        planning.expand({"name": "w", "steps": steps}, load)
    assert asked == ["one", "gone"]


BAD_IDS = [
    "", "a/b", "/", "a[b", "a]", "a#1", "a\n", "a\t", "a\x00", "\x7f", "\u200b", "\ud800", "\xa0",
    "x" * 101, "é" * 101, "語" * 67, 10**100, -(10**99), 1.0, True, None, ["a"], {},
]  # fmt: skip


def test_ids_have_a_grammar() -> None:
    for bad in BAD_IDS:
        with tabled.case(bad):
            assert "is not an id" in refusal({**step("s"), "id": bad})
            assert "is not an id" in refusal(
                step("s", "p"), pipelines={"p": {"nodes": [{"id": bad}]}}
            )


def test_ids_that_are_fine() -> None:
    cases: list[Any] = [
        "a", "A-b_9", "-", "x" * 100, "pipeline", "a.b", "a b", ".", "..", "é", "語" * 66, "日 1.x",
        "a\\b", 5, 0, -3, 10**99
    ]  # fmt: skip
    for good in cases:
        with tabled.case(good):
            pipelines = {"p": {"nodes": [{"id": good}]}}
            (node,) = expand(step("s", "p"), pipelines=pipelines)["nodes"]
            assert (node["id"], node["module"]) == (f"s/{good}", str(good))
            after = step("t", depends_on=[good])
            nodes = by_id(expand({**step("s", "p"), "id": good}, after, pipelines=pipelines))
            assert [*nodes] == [f"{good}/{good}", "t/n"]
            assert nodes["t/n"]["deps"] == [f"{good}/{good}"]


def test_a_number_and_its_text_are_one_id() -> None:
    assert "is not an id" in refusal({**step("s"), "id": 10**5000})
    assert "two steps have the id '7'" in refusal(step("7"), {**step("s"), "id": 7})
    listed = {"p": {"nodes": [{"id": 1}, {"id": "2", "depends_on": [1, "1"]}]}}
    assert by_id(expand(step("s", "p"), pipelines=listed))["s/2"]["deps"] == ["s/1"]


def test_a_single_dependency_needs_no_list() -> None:
    listed = {"p": {"nodes": [{"id": "a"}, {"id": "b", "depends_on": "a"}]}}
    nodes = by_id(expand(step("s", "p"), step("t", depends_on="s"), pipelines=listed))
    assert (nodes["s/b"]["deps"], nodes["t/n"]["deps"]) == (["s/a"], ["s/b"])
    numbered = expand({**step("s"), "id": 4}, step("t", depends_on=4))
    assert by_id(numbered)["t/n"]["deps"] == ["4/n"]


def test_the_folders_of_dots_lead_nowhere_else() -> None:
    names = {".": "%2E", "..": "%2E%2E", "...": "...", "a..": "a..", ".a": ".a", "a.b": "a.b"}
    assert {name: planning.folder(name) for name in names} == names
    assert planning.folder("../a/./..") == "%2E%2E/a/%2E/%2E%2E"
    assert planning.folder("l/.#12/..#1") == "l/%2E#12/%2E%2E#1"
    listed = [{"id": ".."}, {"id": "t", "inputs": [{"name": "x", "from": ".."}]}]
    many = [{"name": "y", "from": "pipeline._siblings([.., .])"}, {"name": "z", "from": "...a"}]
    listed[1]["inputs"] += many
    made = expand({**step("s", "p"), "id": "."}, pipelines={"p": {"nodes": [{"id": "."}, *listed]}})
    assert by_id(made)["./t"]["inputs"] == {
        "x": {"$out": "%2E/%2E%2E"},
        "y": {"$out": ["%2E/%2E%2E", "%2E/%2E"]},
        "z": {"$out": "%2E/%2E%2E/a"},
    }


def test_a_sibling_may_have_dots_in_its_id() -> None:
    cases: list[Any] = [
        ("n.1", "s/n.1"),
        ("n.1.file.txt", "s/n.1/file.txt"),
        ("n.1.5", "s/n.1/5"),
        ("n.2", "s/n/2"),
        ("n.11", "s/n/11"),
        ("n", "s/n"),
        ("o.p.q", "s/o.p/q"),
        ("pipe.x", "s/pipe/x"),
    ]
    for source, path in cases:
        with tabled.case(source, path):
            siblings = [{"id": name} for name in ("n", "n.1", "o.p", "pipe")]
            taking = {"id": "t", "inputs": [{"name": "x", "from": source}]}
            made = expand(step("s", "p"), pipelines={"p": {"nodes": [*siblings, taking]}})
            assert by_id(made)["s/t"]["inputs"] == {"x": {"$out": path}}


def test_a_long_from_is_refused_at_once() -> None:
    def refused() -> None:
        with pytest.raises(errors.InvalidWorkflow, match="unknown sibling"):
            inputs_of("x" + "." * 300_000)

    assert cpu_seconds(refused) < patience(0.5)


def test_a_literal_of_any_length_is_taken() -> None:
    text = "x" * 300_000
    assert inputs_of(f"pipeline._implicit({text})") == {"x": text}
    assert inputs_of(f"pipeline._implicit({json.dumps([text])})") == {"x": [text]}


def test_the_keys_of_a_python_literal_are_those_of_json() -> None:
    found = inputs_of("pipeline._implicit({1: 'c', None: 'b', True: 2, 'k': {2.5: (3,)}})")
    assert found == {"x": {"1": 2, "null": "b", "k": {"2.5": [3]}}}
    assert inputs_of("pipeline._implicit({1: 'c', None: 'b'})") == {"x": {"1": "c", "null": "b"}}


@pytest.mark.parametrize(
    ("gpu", "queue"),
    [(True, "gpu"), (1, "gpu"), ("yes", "gpu"), (False, "cpu"), (0, "cpu"), ("", "cpu")],
)
def test_gpu_is_what_counts_as_true_and_a_model_needs_it(gpu: Any, queue: str) -> None:
    listed = {"p": {"nodes": [{"id": "n", "gpu": gpu, "model": "m"}]}}
    (node,) = expand(step("s", "p"), pipelines=listed)["nodes"]
    assert (node["queue"], node["model"]) == (queue, "m" if queue == "gpu" else None)
    (bare,) = expand(step("s", "p"), **_pipeline({"id": "n", "model": "m"}))["nodes"]
    assert (bare["queue"], bare["model"]) == ("cpu", None)


def test_of_inputs_with_one_name_the_last_counts_and_those_without_are_ignored() -> None:
    listed = [
        {"name": "x", "from": "pipeline._implicit(1)"},
        {"name": "y", "from": "pipeline._implicit(2)"},
        {"name": "x", "from": "pipeline._implicit(3)"},
        {"from": "nobody"},
        {"name": None, "from": 5},
        {"name": ""},
    ]
    (node,) = expand(step("s", "p"), **_pipeline({"id": "n", "inputs": listed}))["nodes"]
    assert node["inputs"] == {"x": 3, "y": 2}


def _pipeline(*nodes: Any) -> dict[str, Any]:
    return {"pipelines": {"p": {"nodes": list(nodes)}}}


REFUSED: list[tuple[str, Callable[[], str]]] = [
    ("no steps", lambda: refusal()),
    ("two steps.*'s'", lambda: refusal(step("s"), step("s"))),
    ("'s'.*unknown step 'x'", lambda: refusal(step("s", depends_on=["x"]))),
    ("'s' depends on itself", lambda: refusal(step("s", depends_on=["s"]))),
    ("cycle of steps: a -> b -> a", lambda: refusal(
        step("z", depends_on=["a"]), step("a", depends_on=["b"]), step("b", depends_on=["a"]))),
    ("no step makes nodes; a step is of kind 'pipeline', 'map'",
     lambda: refusal({**step("s"), "kind": "maps"})),
    ("no step makes nodes; .* kind", lambda: refusal({"id": "s"})),
    ("no step makes nodes", lambda: refusal({"id": "s", "kind": []}, {"id": "t", "kind": "node"})),
    ("'m': step 's'.*unknown kind 'maps'", lambda: refusal(
        {"id": "m", "kind": "map", "over": [], "steps": [{"id": "s", "kind": "maps"}]})),
    ("'m': step 's'.*unknown kind None", lambda: refusal(
        {"id": "m", "kind": "map", "over": [], "steps": [step("o"), {"id": "s"}]})),
    ("'m': step 's'.*unknown kind", lambda: refusal(
        {"id": "m", "kind": "map", "over": [], "steps": [step("o"), {"id": "s", "kind": []}]})),
    ("'s'.*'pipeline' is missing", lambda: refusal({"id": "s", "kind": "pipeline"})),
    ("'s'.*'pipeline' must be text", lambda: refusal(step("s", 5))),  # type: ignore[arg-type]
    ("'s'.*'widget' is missing", lambda: refusal({"id": "s", "kind": "input"})),
    ("'s'.*'target' must be text",
     lambda: refusal({"id": "s", "kind": "input", "widget": "w", "target": 5})),
    ("'s'.*set is not a JSON",
     lambda: refusal({"id": "s", "kind": "input", "widget": "w", "options": {1}})),
    ("'s'.*unknown step 'a'", lambda: refusal(step("s", depends_on="a"))),
    ("'s'.*unknown step 'o/gone'", lambda: refusal(step("o"), step("s", depends_on=["o/gone"]))),
    ("'s' depends on itself", lambda: refusal(step("s", depends_on=["s/n"]))),
    ("'s'.*'depends_on' must be a list, not dict", lambda: refusal(step("s", depends_on={"a": 1}))),
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
    ("'n'.*'node' must be text", lambda: refusal(step("s", "p"), **_pipeline(
        {"id": "n", "node": {}}))),
    ("'n'.*__input__", lambda: refusal(step("s", "p"), **_pipeline(
        {"id": "n", "node": "__input__x"}))),
    ("'n'.*'inputs' must be a list", lambda: refusal(step("s", "p"), **_pipeline(
        {"id": "n", "inputs": {}}))),
    ("'n'.*'name' must be text", lambda: refusal(step("s", "p"), **_pipeline(
        {"id": "n", "inputs": [{"name": 5, "from": "n"}]}))),
    (r"'n'.*named '\$from'", lambda: refusal(step("s", "p"), **_pipeline(
        {"id": "n", "inputs": [{"name": "$from", "from": "n"}]}))),
    ("'n'.*'x'.*'from' is missing", lambda: refusal(step("s", "p"), **_pipeline(
        {"id": "n", "inputs": [{"name": "x"}]}))),
    ("'n'.*'x'.*unknown sibling 'gone'", lambda: refusal(step("s", "p"), **_pipeline(
        {"id": "n", "inputs": [{"name": "x", "from": "gone"}, {"name": "x", "from": "n"}]}))),
    ("'n'.*'skip_if'.*object is not a JSON", lambda: refusal(step("s", "p"), **_pipeline(
        {"id": "n", "skip_if": object()}))),
    ("more than 20000 nodes.*'s5000'",
     lambda: refusal(*(step(f"s{number}", "fan") for number in range(6000)))),
]  # fmt: skip


def _deep(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"k": [value]}
    return value


def test_a_bad_workflow_is_refused_by_name_and_reason() -> None:
    for words, refused in REFUSED:
        with tabled.case(words, refused):
            message = refused()
            assert re.search(words, message), message


def test_what_is_no_workflow_at_all_is_refused() -> None:
    cases: list[Any] = [None, 5, "w", [], {}, {"steps": None}, {"steps": {}}, {"steps": "s"},
             {"steps": [None]}, {"name": 5, "steps": [{}]}, {"steps": [[]]}]  # fmt: skip
    for junk in cases:
        with tabled.case(junk), pytest.raises(errors.InvalidWorkflow):
            planning.expand(junk, PIPELINES.__getitem__)


JUNK = [None, 5, 1.5, True, "x", "", [], [5], [None], [[]], {}, {"k": 1}, ["n"], {1}, b"x"]
STEP_KEYS = ["id", "kind", "pipeline", "inputs", "depends_on", "skip_if", "widget", "target"]
NODE_KEYS = ["id", "node", "depends_on", "gpu", "model", "inputs", "skip_if"]


def test_a_wrong_type_anywhere_is_refused_or_fine_but_never_another_error() -> None:
    for junk in JUNK:
        with tabled.case(junk):

            def load(nodes: Any) -> Callable[[str], Any]:
                return lambda name: {"nodes": nodes}

            def attempt(one: Any, nodes: Any) -> None:
                try:
                    expanded = planning.expand(
                        {"name": "w", "steps": [one, step("other")]}, load(nodes)
                    )
                except errors.InvalidWorkflow:
                    return
                planning.read(json.loads(json.dumps(expanded)))

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
    constants.put(monkeypatch, "dag.graph.MAX_NODES_PER_RUN", 1)
    assert "more than 1 nodes" in refusal(step("a"), step("b"))
    mapped = {"id": "m", "kind": "map", "over": [], "pipeline": "fan"}
    assert "(reached in step 'm')" in refusal(mapped)


def test_a_chain_of_3000_nodes_expands_without_recursion_and_fast() -> None:
    nodes = [{"id": f"n{i}", "depends_on": [f"n{i - 1}"] if i else []} for i in range(3000)]
    pipelines = {"p": {"nodes": nodes}}
    assert cpu_seconds(lambda: expand(step("s", "p"), pipelines=pipelines)) < patience(0.5)


def test_a_long_cycle_is_named_in_short() -> None:
    nodes = [{"id": f"n{i}", "depends_on": [f"n{(i + 1) % 2000}"]} for i in range(2000)]
    message = refusal(step("s", "p"), pipelines={"p": {"nodes": nodes}})
    assert "n0 -> n1" in message and "..." in message and len(message) < 500


def test_the_folder_of_a_node_leads_nowhere_else_and_is_its_own() -> None:
    cases: list[Any] = [
        ("s 1/n.2", "s 1/n.2"),
        ("../..", "%2E%2E/%2E%2E"),
        ("./.#3", "%2E/%2E#3"),
        ("s/.scratch", "s/%2Escratch"),
        ("s/%2E", "s/%252E"),
        ("s/%252E", "s/%25252E"),
        ("s/%2Escratch", "s/%252Escratch"),
        ("50%/...", "50%/..."),
    ]
    for node_id, path in cases:
        with tabled.case(node_id, path):
            assert planning.folder(node_id) == path
