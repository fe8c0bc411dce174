"""Checking a workflow: each mistake is found, named with its node, and comes with a remedy."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any, TypedDict

import pytest

import queue_workflows
from queue_workflows import check, cli, config, declare, errors, model_registry
from tests.support import console, tabled
from tests.support.flow import step


class Counted(TypedDict):
    words: int


def count(text: str, least: int = 1) -> Counted:
    return {"words": len(text) + least}


def show(words: int, out: Path, inputs: dict[str, Any]) -> None: ...


def number(of: str) -> int:
    return len(of)


def handle(model_handle: Any) -> dict[str, Any]:
    return {"is": model_handle}


def positional(a: int, /) -> None: ...


def gather(**parts: Any) -> None: ...


@pytest.fixture(autouse=True)
def host() -> Generator[None]:
    for body in (count, show, number, handle, positional, gather):
        config.register_node(body.__name__, body)
    yield
    config.reset_for_tests()
    model_registry.clear_for_tests()


def node(node_id: str, *names: str, **more: Any) -> dict[str, Any]:
    inputs = [{"name": name, "from": f"pipeline.{name}"} for name in names]
    return {"id": node_id, **({"inputs": inputs} if names else {}), **more}


READ = step("read", "count", inputs={"text": {"$from": "text"}})
CHOOSE = {
    "id": "choose", "kind": "input", "widget": "turnout", "target": "lead",
    "turnout_options": {"$from": "read/count.words"}, "depends_on": ["read"],
}  # fmt: skip


def question(options: Any, **more: Any) -> dict[str, Any]:
    return {
        "id": "q", "kind": "input", "widget": "turnout", "turnout_options": options,
        "timeout_s": 60, **more,
    }  # fmt: skip


def ask_file(name: str) -> dict[str, Any]:
    return {
        "id": "q", "kind": "input", "widget": "file_upload", "accept": [".csv"],
        "timeout_s": 60, "default": name,
    }  # fmt: skip


PIPELINES: dict[str, Any] = {
    "count": {"nodes": [node("count", "text")]},
    "show": {"nodes": [node("show", "words")]},
}


def report(*steps: Any, pipelines: dict[str, Any] | None = None) -> check.Report:
    return check.document(
        {"name": "w", "steps": list(steps)}, pipelines=PIPELINES | (pipelines or {})
    )


def tell(**more: Any) -> dict[str, Any]:
    """A step that shows the ref `words`, after `read` by default."""
    words = more.pop("words", {"$from": "read/count.words"})
    return step("tell", "show", **{"depends_on": ["read"], "inputs": {"words": words}, **more})


def mapped(*steps: Any) -> dict[str, Any]:
    return {"id": "m", "kind": "map", "over": [1], "steps": list(steps)}


def one(*entries: Any) -> dict[str, Any]:
    return {"p": {"nodes": list(entries)}}


GOOD = (READ, CHOOSE, tell(words={"$from": "choose.lead"}, depends_on=["choose"]))


def test_a_correct_workflow_has_no_findings() -> None:
    found = report(*GOOD)
    assert (found.findings, found.ok, found.needs) == ((), True, ("text",))
    assert found.definition
    assert [each["id"] for each in found.definition["nodes"]] == [
        "read/count", "choose", "tell/show",
    ]  # fmt: skip
    assert check.definition(found.definition) == found


def test_each_mistake_is_an_error_with_a_remedy() -> None:
    cases: list[Any] = [
        ((tell(words=1, depends_on=["raed"]),), {}, "'w': step 'tell' depends on the unknown"),
        ((step("s", "gone"),), {}, "step 's': pipeline 'gone': no provider is set"),
        ((step("s", "p"),), one(node("nowhere")), "node 's/nowhere': node module 'nowhere' is not"),
        ((step("s", "p"),), one(node("count")), "node 's/count': 'count' needs 'text'"),
        ((step("s", "p", inputs={"text": 1, "leest": 1}),), one(node("count", "text", "leest")),
         "node 's/count': 'count' takes no 'leest'; did you mean 'least'?"),
        ((step("s", "p", inputs={"text": 1, "q": 1}),), one(node("count", "text", "q")),
         "'count' takes no 'q'; it takes text, least"),
        ((step("s", "p"),), one(node("positional")), "takes 'a' by position alone"),
        ((READ, tell(words=1, depends_on=[], skip_if={"$from": "read/count.words"})), {},
         "node 'tell/show': 'skip_if': 'tell/show' does not wait for 'read/count'"),
        (({**READ, "inputs": {"text": {"$from": "tell/show.a"}}, "depends_on": ["tell"]},
          tell(depends_on=[])), {},
         "node 'tell/show': input 'words': 'tell/show' does not wait for 'read/count'"),
        (({"id": "s", "kind": "pipline", "pipeline": "count"}, READ), {},
         "step 's': a step of kind 'pipline' makes no nodes, and is left out; did you mean 'pipel"),
        (({"id": "s", "pipeline": "count"}, READ), {},
         "step 's': a step of kind None makes no nodes, and is left out; a step is of kind 'pipe"),
        (({"id": "s", "kind": "node", "node": "gather"}, READ), {},
         "step 's': a step of kind 'node' makes no nodes, and is left out; a step is of kind 'pi"),
        ((step("s", "p"),), one(node("gather", inputs=[{"from": "pipeline.x"}])),
         "pipeline 'p': node 'gather': an input without a 'name' is not passed"),
        ((step("s", "p"),), one(node("gather", inputs=[{"name": []}, {"name": []}])),
         "pipeline 'p': node 'gather': an input without a 'name' is not passed"),
        ((step("s", "p", inputs={"x": 1}),), one(node("gather", "x", "x")),
         "pipeline 'p': node 'gather': two inputs have the name 'x', and the last one counts"),
        ((step("s", "p"),), one(node("gather", model="big")),
         "node 'gather': model 'big' is not loaded, since the node runs on cpu; add gpu: true"),
        ((step("s", "p"),), one(node("gather", model="big", gpu=0)), "model 'big' is not loaded"),
        ((READ, tell(words={"$from": "read/cuont.words"})), {}, "did you mean 'read/count'?"),
        ((READ, tell(words={"$from": "write/it.words"})), {}, "there is no node 'write/it'"),
        ((READ, tell(words={"$from": "read.words"})), {}, "names the step 'read', which has no"),
        ((READ, tell(words={"$from": "read/count.wrods"})), {},
         "'read/count' has no output 'wrods'; did you mean 'words'?"),
        ((READ, tell(words={"in": {"$from": "read/count.x"}})), {},
         "has no output 'x'; its outputs are words"),
        ((READ, CHOOSE, tell(words={"$from": "choose.led"}, depends_on=["choose"])), {},
         "'choose' has no output 'led'; did you mean 'lead'?"),
        ((READ, {**CHOOSE, "depends_on": []}), {},
         "node 'choose': 'turnout_options': 'choose' does not wait for 'read/count'"),
        ((step("s", "p", inputs={"of": "a"}), tell(words={"$from": "s/number.result"},
         depends_on=["s"])), one(node("number", "of")), "'s/number' has no output 'result'"),
        ((READ, tell(skip_if={"$from": "read/cont.words"})), {}, "'tell/show': 'skip_if': ref"),
        ((tell(words={"$from": "tell/show.a"}, depends_on=[]),), {}, "ref names the node itself"),
        ((READ, tell(words={"$from": "read/count.words", "$gt": 1})), {}, "unknown operator '$gt'"),
        ((READ, tell(words={"$from": "a", "$filter": {"x:matches": "(a+)+"}})), {}, "is refused"),
        ((READ, tell(words={"$from": 3})), {}, "$from takes a path like"),
        ((step("s", "p"),), one(node("gather", gpu=True, model="big")), "unknown model 'big'; reg"),
        ((step("s", "p"),), one(node("gather", queue="fast")), "unknown queue 'fast'"),
        ((step("s", "p"),), one(node("gather", queue="gpu")), "'queue': 'gpu' is not read"),
        ((question(["a", "b"], default="c"),), {}, "step 'q': 'default' does not take"),
        ((question(["a"], default="c", skip_if={"$from": "x"}),), {}, "it is one of \"a\""),
        ((ask_file("c.pdf"),), {}, "'default' does not take 'c.pdf': it accepts .csv"),
        ((question({"$from": "x"}, **{"$answer_type": "integer"}, default="none"),), {},
         "step 'q': 'default' does not take \"none\": its answer is of type integer"),
    ]  # fmt: skip
    for steps, pipelines, words in cases:
        with tabled.case(steps, pipelines, words):
            found = report(*steps, pipelines=pipelines)
            said = [str(each) for each in found.findings if each.level == "error"]
            assert any(words in line for line in said), said
            assert not found.ok
            assert all(each.remedy and each.at for each in found.findings)


def test_a_possible_mistake_is_a_warning() -> None:
    cases: list[Any] = [
        ((step("s", "count", inputs={"text": 1, "lest": 2}),), {},
         "step 's': no node of pipeline 'count' reads the input 'lest'; it reads text"),
        ((READ, {**READ, "id": "t", "depend_on": ["read"]}), {},
         "step 't': nothing reads the key 'depend_on'; write 'depends_on'"),
        ((step("s", "count"),), {},
         "node 's/count': 'count' needs 'text', and gets None; give it in the step's inputs"),
        ((step("s", "p"),), one(node("gather", skipif=1)), "node 'gather': nothing reads the key"),
        ((step(7, "p"),), one(node("gather")), "step 7: the id is a number, read as '7'"),  # type: ignore[arg-type]
        ((step("a b", "p"),), one(node("gather")), "step 'a b': the id 'a b' is hard to write"),
        ((step("s", "p"),), one(node("ż", node="gather")), "node 'ż': the id 'ż' is hard to write"),
        ((step("s", "p"),), one(node("a.b", node="gather")),
         "pipeline 'p': node 'a.b': no ref can name 'a.b', since dots separate the parts"),
        ((step("s", "p"),), one(node("..", node="gather")), "node '..': no ref can name '..'"),
        ((mapped({"id": "n.x", "kind": "node", "node": "gather"}),), {},
         "step 'n.x': no ref can name 'n.x'"),
        ((READ, step("s", "p", depends_on="read")), one(node("gather")),
         "step 's': 'depends_on' is 'read', read as a list of one"),
        ((step("s", "p"),), one(node("gather"), node("b", node="gather", depends_on="gather")),
         "node 'b': 'depends_on' is 'gather', read as a list of one"),
        ((step("s", "p"),), one(node("gather", gpu=1)), "node 'gather': 'gpu' is 1, read as True"),
        ((step("s", "p"),), one(node("gather", gpu="")), "'gpu' is '', read as False"),
        ((step("s", "p", skip_if={"$from": "x"}),), one(node("gather", skip_if=False)),
         "step 's': node 'gather' has an empty 'skip_if', so that the one of the step counts"),
        ((step("s", "p", inputs={"out": 1, "words": 2}),), one(node("show", "out", "words")),
         "node 's/show': 'show' gets the engine's 'out', not the input; rename the input"),
        ((READ, tell(words={"$from": "a", "$ne": 1, "$eq": 1})), {},
         "input 'words': ref 'a' has $eq and $ne, and only $eq counts; keep one of them"),
        ((READ, tell(words={"$from": "a", "$filter": {"x:eq": 1}, "$ne": []})), {},
         "ref 'a' has $filter and $ne, and only $filter counts"),
        ((step("s", "p", retries=3),), one(node("gather")),
         "step 's': nothing reads the key 'retries' here; write it in a node, or in 'defaults'"),
        ((step("s", "p"),), {"p": {"nodes": [node("gather")], "timeout_s": 3}},
         "pipeline 'p': nothing reads the key 'timeout_s' here"),
        ((step("s", "p"),), {"p": {"nodes": [node("gather")], "default": {"retries": 3}}},
         "pipeline 'p': nothing reads the key 'default'; write 'defaults'"),
        ((step("s", "p"),), one(node("gather", retry=3)),
         "node 'gather': nothing reads the key 'retry'; write 'retries'"),
        ((step("s", "p"),), one(node("gather", max_attempts=3)),
         "nothing reads the key 'max_attempts'; write 'retries' (one less: the first attempt"),
        ((step("s", "p"),), one(node("gather", timeout=3)), "'timeout'; write 'timeout_s'"),
        ((step("s", "p"),), one(node("gather", retry_delay=3)), "write 'backoff'"),
        ((step("s", "p", retry=3),), one(node("gather")),
         "step 's': nothing reads the key 'retry'; write 'retries' in a node, or in 'defaults'"),
        ((step("s", "p"),), {"p": {"nodes": [node("gather")], "lock": "x"}},
         "pipeline 'p': nothing reads the key 'lock'; write 'lock_key' in a node"),
        (({**READ}, {**question(["a"]), "widget": "turnuot"}), {},
         "step 'q': unknown widget 'turnuot'; did you mean 'turnout'?"),
        (({**READ}, {**question(["a"]), "widget": "map"}), {},
         "step 'q': unknown widget 'map'; register_input_widget() defines its input_spec"),
        (({**READ}, {**question(["a"]), "timeout": 5, "timeout_s": None}), {},
         "step 'q': nothing reads the key 'timeout'; write 'timeout_s'"),
        (({**CHOOSE, "turnout_options": None, "depends_on": []},), {}, "'turnout' offers nothing"),
        ((step("s", "p"),), one(node("handle")), "asks for model_handle, and gets None"),
        (({**READ, "skip_if": True}, tell()), {}, "'read/count' may be skipped, and then the run"),
        ((*GOOD[:2], tell(words={"$from": "chose.lead"})), {}, "did you mean the step 'choose'?"),
    ]  # fmt: skip
    for steps, pipelines, words in cases:
        with tabled.case(steps, pipelines, words):
            found = report(*steps, pipelines=pipelines)
            assert [each.level for each in found.findings] == ["warning"], found.findings
            assert words in str(found.findings[0])
            assert found.ok


def test_a_registered_widget_is_known_and_its_keys_are_its_own() -> None:
    config.register_input_widget("map", lambda _step, _run: {})
    own = {"id": "q", "kind": "input", "widget": "map", "timeout": 5, "sources": 1}
    assert report(READ, own).findings == ()
    typed = {**own, "timeout_s": 60, "default": "none", "$answer_type": "integer"}
    assert "its answer is of type integer" in str(report(READ, typed).findings[0])
    assert report(READ, {**typed, "default": None}).findings == ()
    meant = report(READ, {**own, "widget": "mapp"}).findings
    assert [each.remedy for each in meant] == ["did you mean 'map'?"]


def test_a_wrong_policy_key_is_refused_with_the_right_one() -> None:
    with pytest.raises(errors.InvalidConfig, match="did you mean 'retries'"):
        declare.node(max_retries=3)(lambda: None)  # type: ignore[call-overload]
    with pytest.raises(errors.InvalidConfig, match="did you mean 'timeout_s'"):
        queue_workflows.register_ingest_task("t", timeout=3)  # type: ignore[call-overload]
    for pipeline, right in (
        ({"nodes": [node("gather")], "defaults": {"retry": 3}}, "retries"),
        ({"nodes": [node("gather", backoff={"base": 3})]}, "base_s"),
    ):
        (found,) = report(step("s", "p"), pipelines={"p": pipeline}).findings
        assert found.level == "error"
        assert f"did you mean {right!r}?" in found.message


def test_the_node_that_an_input_names_needs_no_depends_on() -> None:
    found = report(tell(depends_on=[]), READ)
    assert found.findings == ()
    assert found.definition is not None
    assert found.definition["nodes"][0]["deps"] == ["read/count"]


def test_a_parameter_that_may_be_none_needs_no_input() -> None:
    def maybe(text: str | None, more: int = 1) -> None: ...

    config.register_node("maybe", maybe)
    assert report(step("s", "p"), pipelines=one(node("maybe", "text", "more"))).findings == ()


def test_unusual_but_correct_workflows_have_no_findings() -> None:
    skip = {"$from": "read/count.words", "$eq": 0}
    found = report(
        READ,
        step("a", "p", depends_on=["read"], skip_if=skip,
             inputs={"of": "x", "more": {"$value": 1}}),
        tell(words={"$from": "a/number"}, depends_on=["a"], skip_if=skip),
        {"id": "pick", "kind": "input", "widget": "choose_one", "source": {"$from": "read.files"},
         "depends_on": ["a"], "label": "a host's own key"},
        step("whole", "q", inputs={"words": 1, "more": 2}),
        pipelines={"p": {"nodes": [
            {"id": "number", "inputs": [{"name": "of", "from": "pipeline.of"}]},
            {"id": "gather", "depends_on": ["number"], "color": "red", "inputs": [
                {"name": "file", "from": "number.a.txt"}, {"name": "m", "from": "pipeline.more"}]},
        ]}, "q": {"nodes": [node("show", "words", "more")]}},
    )  # fmt: skip
    assert found.findings == ()


@pytest.mark.parametrize(
    "given",
    [
        question(["a", "b"], default="b"),
        question(["a"]),
        question({"$from": "read/count.words"}, default="c", depends_on=["read"]),
        {**question(["a"], default="c"), "timeout_s": None},
        {**question(["a"], default="c"), "widget": "choose_one", "source": ["a"]},
        ask_file("c.CSV"),
    ],
)
def test_a_default_that_a_person_could_give_is_no_finding(given: Any) -> None:
    config.register_input_widget("choose_one", lambda _step, _run: {"options": ["c"]})
    assert [str(each) for each in report(READ, given).findings if "default" in str(each)] == []


def test_models_come_from_the_registrar_and_its_error_is_shown() -> None:
    steps, pipelines = (step("s", "p"),), one(node("handle", gpu=True, model="big"))
    spec = model_registry.ModelSpec("big", loader=object)
    config.set_builtin_model_registrar(lambda: model_registry.register(spec))
    assert report(*steps, pipelines=pipelines).findings == ()
    config.set_builtin_model_registrar(lambda: 1 / 0)  # pyright: ignore[reportArgumentType]
    assert "raised ZeroDivisionError" in str(report(*steps, pipelines=pipelines).findings)


def forgotten(text: str) -> str:
    return text


def test_a_function_that_lacks_the_decorator_is_named() -> None:
    hint = f"; {__name__}.forgotten() is not declared by @node"
    words = f"node module 'forgotten' is not registered{hint}"
    config.get_config().app = f"{__name__}:setup"
    (found,) = report(step("s", "p"), pipelines=one(node("forgotten"))).findings
    assert words in str(found)
    with pytest.raises(errors.NodeNotFound, match=re.escape(words)):
        config.get_config().resolve_node_module("forgotten")
    (found,) = report(step("s", "p"), pipelines=one(node("cuont"))).findings
    assert "'cuont' is not registered; did you mean 'count'?" in str(found)
    config.set_node_resolver(lambda name: globals()[name])
    (found,) = report(step("s", "p"), pipelines=one(node("forgotten"))).findings
    assert f"'forgotten' has no run(){hint}" in str(found)


def test_a_module_that_does_not_import_is_shown_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "checked_nodes"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "broken.py").write_text("\nimport no_such_thing\n")
    (package / "garbled.py").write_text("def run(:\n")
    (package / "lazy.py").write_text("def __getattr__(name): raise OSError(name)\n")
    (package / "empty.py").write_text("")
    config.set_node_module_package("checked_nodes")
    nodes = [node(name) for name in ("broken", "garbled", "lazy", "empty", "gone")]
    said = [str(each) for each in report(step("s", "p"), pipelines=one(*nodes)).findings]
    for words, line in zip(
        [
            "ModuleNotFoundError: No module named 'no_such_thing' (broken.py, line 2)",
            "SyntaxError: invalid syntax (garbled.py, line 1)",
            "OSError: run (lazy.py, line 1)",
            "module 'empty' has no run()",
            "no module 'checked_nodes.gone'",
        ],
        said,
        strict=True,
    ):
        assert words in line


def test_refs_of_an_apps_own_resolver_are_not_checked() -> None:
    config.set_workflow_provider(dict, dict, resolve_ref=lambda value, context: value)
    assert report(READ, tell(words={"$from": "mine://x"})).findings == ()


def test_an_expanded_definition_is_checked_as_it_is() -> None:
    made = report(*GOOD).definition
    assert made
    assert check.definition(made).findings == ()
    made["nodes"][0]["queue"] = "fast"
    made["nodes"][0]["deps"] = ["tell/show"]
    assert "a cycle of nodes: read/count" in str(check.definition(made).findings)
    made["nodes"][0]["deps"] = []
    assert "unknown queue 'fast'" in str(check.definition(made).findings)
    assert "not an expanded definition" in str(
        check.definition({"version": 1, "nodes": [1]}).findings
    )


def test_a_provider_that_fails_is_a_finding_and_one_that_does_not_know_is_wrong_usage() -> None:
    with pytest.raises(errors.InvalidConfig, match="no workflow is declared and no provider"):
        check.workflow("w")

    def load(name: str) -> Any:
        return {"w": {"name": "w", "steps": [step("s", "p")]}}[name]

    config.set_workflow_provider(load, {}.__getitem__)
    with pytest.raises(errors.UnknownWorkflow, match="knows no workflow 'v'"):
        check.workflow("v")
    unknown = "step 's': the provider knows no pipeline 'p' (KeyError: 'p')"
    assert unknown in check.workflow("w").findings[0].message
    config.set_workflow_provider(lambda _: 1 / 0, {}.__getitem__)  # pyright: ignore[reportArgumentType]
    assert "loading workflow 'w': ZeroDivisionError" in str(check.workflow("w").findings)


TREE = """\
w: 4 nodes, from the run: text
├─ read/count  cpu
│     text = run.text
├─ choose  asks a person  (turnout)
│     after read/count
└─ two
   ├─ a  gpu  runs gather  model m
   │     after choose
   │     lead = choose.lead
   └─ b  cpu  runs gather
         after two/a
         file = out_dir/two/a/x.txt
         skipped if choose.lead == [1]
"""


def drawn() -> check.Report:
    nodes = [
        node("a", "lead", node="gather", gpu=True, model="m"),
        {"id": "b", "node": "gather", "depends_on": ["a"], "skip_if": {"$from": "choose.lead",
         "$eq": [1]}, "inputs": [{"name": "file", "from": "a.x.txt"}]},
    ]  # fmt: skip
    last = step("two", "p", depends_on=["choose"], inputs={"lead": {"$from": "choose.lead"}})
    return report(READ, CHOOSE, last, pipelines=one(*nodes))


def printed(path: Path, definition: Any, *arguments: str) -> list[str]:
    """Return what the command prints of a definition."""
    path.write_text(json.dumps(definition))
    return console.command("check", str(path), *arguments).out.splitlines()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "definition.json"


def test_the_tree_shows_what_each_node_waits_for_and_takes(file: Path) -> None:
    model_registry.register(model_registry.ModelSpec("m", loader=object))
    found = drawn().definition
    assert printed(file, found)[:-1] == TREE.splitlines()
    ascii_only = io.TextIOWrapper(io.BytesIO(), "ascii")
    with contextlib.redirect_stdout(ascii_only):
        cli.main(["check", str(file)])
    ascii_only.seek(0)
    lines = ascii_only.read().splitlines()
    assert (lines[1], lines[5]) == ("|- read/count  cpu", "`- two")


def test_the_tree_shows_policies(file: Path) -> None:
    listed = one(node("gather", retries=2, backoff={"base_s": 5}, lock_key="k"))
    made = report(step("s", "p"), pipelines=listed)
    last = printed(file, made.definition)[-2].strip()
    assert last == 'policy: retries 2, backoff {"base_s": 5.0}, lock_key "k"'


def test_a_join_of_many_stays_on_its_line(file: Path) -> None:
    many = [f"n{number}" for number in range(9)]
    nodes = [*(node(each, node="gather") for each in many), node("gather", depends_on=many)]
    made = report(step("s", "p"), pipelines=one(*nodes)).definition
    last = printed(file, made)[-2].strip()
    assert last == "after s/n0, s/n1, s/n2, s/n3, s/n4, s/n5 and 3 more"


def test_mermaid_has_a_node_each_and_an_edge_per_wait(file: Path) -> None:
    found = drawn().definition
    assert found
    found["nodes"][0]["id"] = 'a"<b>'
    found["nodes"][1]["deps"] = ['a"<b>']
    assert printed(file, found, "--format", "mermaid") == [
        "flowchart TD",
        '    n0["a#quot;#lt;b#gt;"]',
        '    n1[/"choose"/]',
        '    subgraph s2 ["two"]',
        '        n2[["a (m)"]]',
        '        n3["b"]',
        "    end",
        "    n0 --> n1",
        "    n1 --> n2",
        "    n2 -.-> n3",
    ]


def run(*arguments: str) -> console.Done:
    return console.command("check", *arguments)


def test_files_and_formats_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUEUE_WORKFLOWS_APP", raising=False)
    good = tmp_path / "good.json"
    good.write_text(json.dumps({"name": "w", "steps": GOOD, "pipelines": PIPELINES}))
    code, out, _ = run(str(good))
    assert (code, out.splitlines()[-1]) == (0, "w: no problems found")
    code, out, err = run(str(good), "--format", "json")
    shown = json.loads(out)
    assert (code, err, shown["ok"], shown["needs"]) == (0, "", True, ["text"])
    canonical = json.dumps(shown["definition"], sort_keys=True, separators=(",", ":"))
    assert shown["digest"] == hashlib.sha256(canonical.encode()).hexdigest()
    again = tmp_path / "expanded.json"
    for form in (shown, shown["definition"]):
        again.write_text(json.dumps(form))
        assert run(str(again))[0] == 0
    shown["definition"]["nodes"][0]["module"] = "gone"
    again.write_text(json.dumps(shown))
    code, out, _ = run(str(again))
    assert code == 1
    assert "error: node 'read/count': node module 'gone' is not registered" in out
    code, out, err = run(str(again), "--format", "mermaid")
    assert (code, out.startswith("flowchart TD"), "gone" in out, "'gone'" in err) == (
        1, True, False, True,
    )  # fmt: skip


def test_a_workflow_of_any_name_is_found_and_a_file_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = {"name": "media/cut", "steps": [READ]}
    named = {"media/cut": found, "cut.json": {**found, "name": "cut.json"}}
    config.set_workflow_provider(named.__getitem__, PIPELINES.__getitem__)
    for name in named:
        code, out, _ = run(name)
        assert (code, out.splitlines()[-1]) == (0, f"{name}: no problems found")
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "other").write_text(json.dumps({"name": "in the file", "steps": [READ]}))
    code, out, _ = run("media/other")
    assert (code, out.splitlines()[-1]) == (0, "in the file: no problems found")
    code, _, err = run("media/none")
    assert code == 2
    assert "knows no workflow 'media/none'" in err
    assert "media/none: No such file" in err


def written(node_id: str, module: str = "gather", **more: Any) -> dict[str, Any]:
    """A node of an expanded definition with no more than what it must have."""
    return {"id": node_id, "module": module, "queue": "cpu", "inputs": {}, **more}


SMALLEST = [written("a")]
LATER_ROUND = [
    written("s/x#2", arm="s", round=2),
    written("s", "__loop__", deps=["s/x#2"], loop={"rounds": [{"end": "s/x#2", "until": True}]}),
    written("s/y", arm="s", round=1),
]


@pytest.mark.parametrize("nodes", [SMALLEST, LATER_ROUND])
def test_a_definition_that_was_written_by_hand_is_drawn(
    file: Path, nodes: list[dict[str, Any]]
) -> None:
    made = {"version": 1, "workflow": "w", "nodes": nodes}
    assert printed(file, made)[0] == f"w: {len(nodes)} node{'s' if len(nodes) > 1 else ''}"
    assert printed(file, made, "--format", "mermaid")[0] == "flowchart TD"


def test_warnings_count_only_with_strict(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    doubtful = {**READ, "depend_on": []}
    path.write_text(json.dumps({"name": "w", "steps": [doubtful], "pipelines": PIPELINES}))
    code, out, _ = run(str(path))
    assert (code, out.splitlines()[-1]) == (0, "w: 1 warning")
    assert run(str(path), "--strict")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.json"], "nothing.json cannot be read: No such file"),
        (["text.json"], "text.json is not JSON"),
        (["deep.json"], "deep.json is not JSON"),
        (["list.json"], "list.json does not hold a JSON object"),
        (["other.json"], "other.json is neither a workflow"),
        (["w"], "no workflow is declared and no provider is set: check with --app"),
        ([], "name a workflow or a file"),
        (["w", "--app", "no_such_app"], "no module 'no_such_app'"),
        (["w", "--format", "png"], "none of tree, json, mermaid"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_2_and_one_line(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("QUEUE_WORKFLOWS_APP", raising=False)
    monkeypatch.chdir(tmp_path)
    texts = {"text.json": "{", "deep.json": "[" * 99_999, "list.json": "[]", "other.json": "{}"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_a_name_that_no_file_can_have_is_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUEUE_WORKFLOWS_APP", raising=False)
    code, out, err = run("a/" * 3000)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "cannot be read: File name too long" in err
