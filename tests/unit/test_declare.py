"""Workflows declared in Python: the same definitions as JSON, and clear errors otherwise."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path
from typing import Any, TypedDict

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from queue_workflows import check, config, declare, errors, refs
from queue_workflows.declare import OFFERED, ask, filtered, node, pipeline, workflow
from tests.support import tabled
from tests.support.examples import examples


class Counted(TypedDict):
    words: int
    parts: list[dict[str, Any]]


@node
def count(text: str, least: int = 1) -> Counted:
    return {"words": len(text.split()), "parts": []}


@node(name="media.write", retries=3, timeout_s=60.0, retry_on=("OSError", errors.ClaimLost))
def write(words: int, out: Path = OFFERED) -> Path:
    return out / f"{words}.txt"


WRITES: dict[str, Any] = {
    "retries": 3, "timeout_s": 60.0, "retry_on": ["OSError", "queue_workflows.errors.ClaimLost"],
}  # fmt: skip


@node(model="lengths", priority=5)
def rank(texts: list[Any], model_handle: Any = OFFERED) -> list[Any]:
    return sorted(texts, key=model_handle)


@node
def tell(**said: Any) -> None: ...


@node(queue="gpu")
def loose(x: Any = None):
    return x


@pytest.fixture(autouse=True)
def known() -> Generator[None]:
    declare.install(count, write, rank, tell, loose)
    yield
    config.reset_for_tests()


def expanded(flow: declare.Workflow[..., Any]) -> dict[str, Any]:
    return expand(flow.document(), flow.pipelines())


def expand(document: Any, pipelines: dict[str, Any]) -> dict[str, Any]:
    found = check.document(document, pipelines=pipelines)
    if found.definition is None:
        raise errors.InvalidWorkflow(str(found.findings[0]))
    return found.definition


def twin(pipelines: dict[str, list[Any]], *steps: Any, name: str = "w") -> dict[str, Any]:
    made = {f"{name}.{step}": {"nodes": nodes} for step, nodes in pipelines.items()}
    return expand({"name": name, "steps": list(steps)}, made)


def step(step_id: str, inputs: Any = None, **more: Any) -> dict[str, Any]:
    given = {} if inputs is None else {"inputs": inputs}
    return {"id": step_id, "kind": "pipeline", "pipeline": f"w.{step_id}", **given, **more}


def takes(*names: str) -> list[dict[str, str]]:
    return [{"name": name, "from": f"pipeline.{name}"} for name in names]


def test_nodes_become_steps_that_wait_for_what_they_take() -> None:
    @workflow
    def w(text: str) -> None:
        counted = count.options("read")(text)
        write.options("tell")(words=counted["words"])

    assert expanded(w) == twin(
        {
            "read": [{"id": "count", "inputs": takes("text")}],
            "tell": [{"id": "write", "node": "media.write", "inputs": takes("words"), **WRITES}],
        },
        step("read", {"text": {"$from": "text"}}),
        step("tell", {"words": {"$from": "read/count.words"}}, depends_on=["read"]),
    )
    assert w.needs == ("text",)


def test_pipelines_questions_conditions_and_models_become_theirs() -> None:
    @pipeline
    def measure(texts: list[Any], lead: int) -> list[Any]:
        ranked = rank(texts)
        written = write.options("keep", skip_if=lead == 0)(words=lead)
        tell.options(after=[written])(best=ranked[0], lead={"is": lead, "was": 1})
        return ranked

    @workflow
    def w(text: str) -> None:
        counted = count(text)
        lead = ask(
            "choose", "turnout", int, prompt="Which?", target="lead",
            turnout_options=filtered(counted["parts"], {"kind:eq": "csv"}),
        )  # fmt: skip
        ranked = measure.options("m", skip_if=counted["words"] != 3)(counted["parts"], lead)
        loose.options("last", after=[ranked])()

    from_choose, parts = {"$from": "choose.lead"}, {"$from": "count/count.parts"}
    assert expanded(w) == twin(
        {
            "count": [{"id": "count", "inputs": takes("text")}],
            "m": [
                {"id": "rank", "gpu": True, "model": "lengths", "inputs": takes("texts"),
                 "priority": 5},
                {"id": "keep", "node": "media.write", **WRITES, "inputs": [
                    {"name": "words", "from": "pipeline.lead"}],
                    "skip_if": {"$from": "choose.lead", "$eq": 0}},
                {"id": "tell", "depends_on": ["rank", "keep"], "inputs": [
                    {"name": "best", "from": "pipeline.best"},
                    {"name": "lead", "from": "pipeline.both"}]},
            ],
            "last": [{"id": "loose", "gpu": True}],
        },
        step("count", {"text": {"$from": "text"}}),
        {"id": "choose", "kind": "input", "widget": "turnout", "prompt": "Which?",
         "turnout_options": {**parts, "$filter": {"kind:eq": "csv"}}, "target": "lead",
         "$answer_type": "integer",
         "depends_on": ["count"]},
        step("m", {"texts": parts, "lead": from_choose, "best": {"$from": "m/rank.result.0"},
                   "both": {"is": from_choose, "was": 1}}, depends_on=["count", "choose"],
             skip_if={"$from": "count/count.words", "$ne": 3}),
        step("last", depends_on=["m"]),
    )  # fmt: skip


def test_policy_stands_in_the_entry_under_its_own_names() -> None:
    @pipeline
    def both(n: int) -> None:
        write.options(retries=9)(n)
        write(n)
        count("a")

    @workflow
    def w(n: int) -> None:
        both.options(retries=1, lock_key="k", backoff={"kind": "linear"}, discard_on=[KeyError])(n)

    entries = {entry["id"]: entry for entry in w.pipelines()["w.both"]["nodes"]}
    kept = {
        "retries": 9, "timeout_s": 60.0,
        "retry_on": ["OSError", "queue_workflows.errors.ClaimLost"],
        "lock_key": "k", "backoff": {"kind": "linear"}, "discard_on": ["KeyError"],
    }  # fmt: skip
    assert entries["write"] == {
        "id": "write", "node": "media.write", **kept,
        "inputs": [{"name": "words", "from": "pipeline.write.words"}],
    }  # fmt: skip
    assert entries["write-2"]["retries"] == 3
    assert (entries["count"]["retries"], entries["count"]["lock_key"]) == (1, "k")
    with pytest.raises(errors.InvalidConfig, match=r"'media.write': unknown option 'retry'; known"):
        write.options(retry=1)  # pyright: ignore[reportCallIssue]


def test_options_are_added_to_those_that_a_function_has() -> None:
    @workflow
    def w() -> None:
        first = count("a")
        careful = write.options(retries=9, after=[first])
        careful.options("kept", lock_key="k")(1)

    made = w.document()["steps"][1]
    assert (made["id"], made["depends_on"]) == ("kept", ["count"])
    (entry,) = w.pipelines()["w.kept"]["nodes"]
    assert (entry["retries"], entry["lock_key"], entry["timeout_s"]) == (9, "k", 60.0)


def test_the_same_function_again_is_numbered() -> None:
    @workflow
    def w() -> None:
        for n in range(3):
            write(n)

    assert [entry["id"] for entry in w.document()["steps"]] == ["write", "write-2", "write-3"]


def test_what_looks_like_a_ref_stays_data_and_paths_become_text() -> None:
    ref = {"$from": "secret"}

    @workflow
    def w(a: Any) -> None:
        tell(x=ref, y={"in": ref, "a": a}, z=[ref], p=Path("a/b"), q={"$out": 1})

    inputs = expanded(w)["nodes"][0]["inputs"]
    assert inputs == {
        "x": {"$value": ref}, "y": {"in": {"$value": ref}, "a": {"$from": "a"}}, "z": [ref],
        "p": "a/b", "q": {"$out": {"$value": {"$out": 1}}},
    }  # fmt: skip


def test_what_the_engine_offers_needs_no_default() -> None:
    @node
    def bare(x: int, out: Path, inputs: dict[str, Any]) -> None: ...

    @workflow
    def w() -> None:
        bare(x=1)  # pyright: ignore[reportCallIssue]

    assert expanded(w)["nodes"][0]["inputs"] == {"x": 1}


def test_a_key_of_the_run_that_is_no_parameter() -> None:
    @workflow(name="other name")
    def w() -> None:
        count(text=declare.run_input("my-text", str))

    assert expanded(w)["nodes"][0]["inputs"] == {"text": {"$from": "my-text"}}
    assert (w.name, w.inputs()) == ("other name", {})


def greet(name: str) -> dict[str, str]:
    """Do what a node does; its author forgot to declare it."""
    return {"text": f"hello {name}"}


def each(names: Any) -> Any:
    return [greet(name) for name in names]


def greetings(name: Any) -> Any:
    return greet(name)


def wrong(build: Callable[..., Any]) -> str:
    made = declare.Workflow(build, "w")
    with pytest.raises(errors.InvalidWorkflow) as caught:
        made.document()
    return str(caught.value)


def inner() -> Any:
    return declare.Pipeline(lambda: declare.Pipeline(lambda: count("a"), "deep")(), "outer")()


def alien() -> Any:
    kept: list[Any] = []
    declare.Workflow(lambda: kept.append(count("a")), "first").document()
    return write(kept[0]["words"])


def hidden(a: Any) -> None:
    ask("a", "turnout")


def hidden_input() -> None:
    count(declare.run_input("q", str))
    ask("q", "turnout")


CASES: list[tuple[Callable[..., Any], str]] = [
    (lambda: count(txt="a"), "'count': got an unexpected keyword argument 'txt'; count takes text"),  # pyright: ignore[reportCallIssue]
    (lambda: count(), "'count': count needs 'text'"),  # pyright: ignore[reportCallIssue]
    (lambda: count("a")["word"], "'count/count' returns no 'word'; it returns parts, words"),  # pyright: ignore[reportTypedDictNotRequiredAccess, reportUnknownLambdaType, reportGeneralTypeIssues]
    (lambda: tell(a=[count("a")["words"]]), "'tell': input 'a': a list cannot hold the output"),
    (lambda: loose(x=tell()), "'tell/tell' returns nothing; use options(after=...)"),
    (lambda a: a > 1, "the run's 'a' has no value while the graph is built"),
    (lambda a: f"{a}", "has no value while the graph is built"),
    (lambda a: "%s" % a, "has no value while the graph is built"),  # noqa: UP031
    (lambda a: tell(x=f"{a!r}"), "step 'tell': '<a of a run to come>' shows an output"),
    (lambda a: tell(x={"deep": f"got {[a]}"}), "'got [<a of a run to come>]' shows an output"),
    (lambda a: tell(x={repr(a): 1}), "shows an output"),
    (lambda a: tell.options(lock_key=repr(a))(x=1), "shows an output"),
    (lambda a: ask("q", "turnout", prompt=f"{[a]}?"), "step 'q': '[<a of a run to come>]?'"),
    (lambda a: [*a], "has no value while the graph is built"),
    (lambda a: a.upper(), "has no value while the graph is built"),
    (lambda a: not a, "has no value while the graph is built"),
    (lambda a: a["x.y"], "select by a text without '.'"),
    (lambda a: (a == 1)["b"], "a condition has no members"),
    (lambda a, b: a == b, "an output of a node is used where only a constant is allowed"),
    (lambda: loose.options("x")(1) and None, "has no value while the graph is built"),
    (lambda: [count.options("x")("a"), count.options("x")("b")], "two steps have the id 'x'"),
    (lambda: count.options("v1.2")("a"), "the id 'v1.2' has a '.'"),
    (lambda: declare.Pipeline(lambda: count("a"), "a.b")(), "the id 'a.b' has a '.'"),
    (lambda: count.options(after=[3])("a"), "'after' takes results of calls of nodes"),
    (lambda: count.options(after="ab")("a"), "after=[...] takes a list"),
    (inner, "pipeline 'deep' is called in the pipeline of step 'outer'"),
    (lambda: declare.Pipeline(lambda: ask("q", "turnout"), "p")(), "a pipeline cannot ask"),
    (lambda: declare.Pipeline(lambda: None, "p")(), "pipeline 'p' calls no node"),
    (alien, "belongs to another graph"),
    (hidden, "the step 'a' and the run's 'a' have one name"),
    (hidden_input, "the step 'q' and the run's 'q' have one name"),
    (lambda: {}["gone"], "its function raised KeyError: 'gone' (test_declare.py, line "),
    (lambda a: greet(a), "; if greet() is a node, declare it by @node"),
    (lambda a: greetings(a)["text"], "; if greetings() or greet() is a node, declare it by @node"),
    (lambda a: greet.options(retries=2)(a), "; if greet() is a node, declare it by @node"),  # pyright: ignore[reportFunctionMemberAccess, reportUnknownMemberType, reportUnknownLambdaType]
    (lambda a: json.dumps(a), "TypeError: Object of type Handle is not JSON serializable (encoder"),
    (lambda a: each(a), "; if each() is a node, declare it by @node"),
    (lambda a: declare.branch(a, {"x": greet}), "; if greet() is a node, declare it by @node"),
    (lambda: each([]), "its function calls no node: a function that is to run later needs @node"),
    (lambda a: tell(x={"$from": a}), "is used where only a constant is allowed"),
]


def test_what_cannot_be_is_refused_with_its_place() -> None:
    for build, words in CASES:
        with tabled.case(build, words):
            said = wrong(build)
            assert words in said
            assert "'w'" in said or "'count'" in said


def test_declarations_that_cannot_be_are_refused_at_once() -> None:
    for body, words in [
        (lambda *a: a, "bound by name"),
        (len, "takes a function"),
    ]:
        with pytest.raises(errors.InvalidConfig, match=words):
            node(body)
    with pytest.raises(errors.InvalidConfig, match="needs queue='gpu'"):
        node(queue="cpu", model="m")(lambda: None)
    with pytest.raises(errors.UnknownQueue, match="'fast'"):
        node(queue="fast")(lambda: None)  # pyright: ignore[reportArgumentType, reportCallIssue]
    with pytest.raises(errors.InvalidConfig, match="'n' has a default"):
        workflow(lambda n=1: None)
    with pytest.raises(
        errors.InvalidConfig, match="can only be called in the function of a workflow"
    ):
        ask("a", "turnout")


def test_two_nodes_or_workflows_of_one_name_are_refused() -> None:
    def count() -> None: ...

    with pytest.raises(errors.InvalidConfig, match=r"two nodes are named 'count': .*name=\.\.\."):
        node(count)
    workflow(name="one")(lambda: None)
    with pytest.raises(errors.InvalidConfig, match="two workflows are named 'one'"):
        workflow(name="one")(count)


def test_outside_of_a_workflow_a_node_is_its_function(tmp_path: Path) -> None:
    assert count("a b")["words"] == 2
    assert write(3, out=tmp_path) == tmp_path / "3.txt"
    with pytest.raises(errors.InvalidConfig, match="filled by the worker"):
        OFFERED.mkdir()


def test_the_outputs_of_async_nodes_and_generators_are_known_by_their_annotation() -> None:
    @node
    async def fetched(n: int) -> int:
        return n + 1

    @node
    def told(n: int) -> Iterator[float]:
        yield n

    @node
    async def streamed(n: int) -> AsyncIterator[float]:
        yield 0.5

    def refused(name: str, output: str) -> list[str]:
        made = {
            "w.a": {"nodes": [{"id": name, "inputs": takes("n")}]},
            "w.b": {"nodes": [{"id": "loose", "inputs": takes("x")}]},
        }
        reader = step("b", {"x": {"$from": f"a/{name}.{output}"}}, depends_on=["a"])
        steps = [step("a", {"n": 1}), reader]
        return [*map(str, check.document({"name": "w", "steps": steps}, pipelines=made).findings)]

    assert (
        refused("fetched", "result") == refused("told", "any") == refused("streamed", "any") == []
    )
    assert "no output 'other'; its outputs are result" in "".join(refused("fetched", "other"))


def test_declared_workflows_come_before_the_providers_and_beside_them() -> None:
    @workflow
    def w() -> None:
        count("a")

    host = {"host": {"name": "host", "steps": []}}
    config.set_workflow_provider(host.__getitem__, {"p": {}}.__getitem__)
    found = config.get_config()
    assert found.workflow_loader and found.pipeline_schema_loader
    assert found.workflow_loader("w") == w.document()
    assert found.workflow_loader("host") is host["host"]
    assert found.pipeline_schema_loader("w.count") == w.pipelines()["w.count"]
    assert found.pipeline_schema_loader("p") == {}
    with pytest.raises(KeyError):
        found.pipeline_schema_loader("w.gone")


def test_install_brings_back_what_a_reset_forgot() -> None:
    flow = declare.workflow(name="back")(lambda: count("a"))
    config.reset_for_tests()
    assert config.get_config().workflow_loader is None
    declare.install(flow, count)
    assert set(config.get_config().node_map) == {"count"}
    load = config.get_config().workflow_loader
    assert load and load("back") == flow.document()
    with pytest.raises(errors.UnknownWorkflow, match="no workflow 'x' is declared; declared are"):
        load("x")
    with pytest.raises(errors.UnknownWorkflow, match="declared are back; did you mean 'back'"):
        load("bakc")


# Generated graphs: a plan of steps, spoken once in Python and once in JSON.

Plan = list[dict[str, Any]]
STORABLE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=3)
"""PostgreSQL stores no other text, and a definition with another one is refused."""


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Steps that refer to earlier ones by number; None: the run's context."""
    steps: Plan = []
    for number in range(draw(st.integers(1, 6))):
        earlier = st.one_of(st.none(), st.integers(0, number - 1)) if number else st.none()
        made: dict[str, Any] = {
            "kind": draw(st.sampled_from(["node", "group", "ask"])),
            "takes": draw(st.lists(earlier, max_size=3)),
            "after": sorted(draw(st.sets(st.integers(0, number - 1), max_size=2)))
            if number
            else [],
            "skip": draw(st.one_of(st.just("no"), earlier)),
            "literal": draw(st.one_of(st.integers(), STORABLE, st.just({"$from": "x"}))),
            "inner": draw(
                st.lists(st.lists(st.integers(0, 3), max_size=2), min_size=1, max_size=3)
            ),
        }
        steps.append(made)
    return steps


def in_python(plan: Plan) -> dict[str, Any]:
    @workflow
    def w(ctx: Any) -> None:
        made: list[Any] = []
        for number, each in enumerate(plan):
            outer = {
                f"i{at}": ctx if of is None else made[of] for at, of in enumerate(each["takes"])
            }
            options: dict[str, Any] = {"after": [made[of] for of in each["after"]]}
            if each["skip"] != "no":
                options["skip_if"] = (ctx if each["skip"] is None else made[each["skip"]]) == 1
            if each["kind"] == "node":
                call = loose.options(f"s{number}", **options)
                made.append(call(x={"all": outer, "own": each["literal"]})["k"])
            elif each["kind"] == "ask":
                made.append(ask(f"s{number}", "w", target="t", show=outer, **options))
            else:

                @pipeline
                def group(each: Any = each, outer: Any = outer) -> Any:
                    nodes: list[Any] = []
                    for of in each["inner"]:
                        refs = {f"n{at}": nodes[at]["k"] for at in of if at < len(nodes)}
                        nodes.append(loose(x={**outer, **refs, "own": each["literal"]}))
                    return nodes[-1]["k"]

                made.append(group.options(f"s{number}", **options)())

    return expanded(w)


def in_json(plan: Plan) -> dict[str, Any]:
    steps: list[Any] = []
    pipelines: dict[str, list[Any]] = {}
    outputs: list[str] = []

    def ref(of: int | None) -> dict[str, Any]:
        return {"$from": "ctx" if of is None else outputs[of]}

    for number, each in enumerate(plan):
        own = f"s{number}"
        literal = each["literal"]
        literal = {"$value": literal} if isinstance(literal, dict) else literal
        outer = {f"i{at}": ref(of) for at, of in enumerate(each["takes"])}
        waits = [f"s{of}" for of in each["takes"] if of is not None]
        entry: dict[str, Any] = {"id": own, "kind": "pipeline", "pipeline": f"w.{own}"}
        if each["skip"] != "no":
            entry["skip_if"] = {**ref(each["skip"]), "$eq": 1}
            waits += [] if each["skip"] is None else [f"s{each['skip']}"]
        nodes: list[dict[str, Any]] = []
        if each["kind"] == "ask":
            entry = {"id": own, "kind": "input", "widget": "w", "show": outer, "target": "t",
                     **{key: entry[key] for key in ("skip_if",) if key in entry}}  # fmt: skip
            outputs.append(f"{own}.t")
        elif each["kind"] == "node":
            entry["inputs"] = {"x": {"all": outer, "own": literal}}
            nodes = [{"id": "loose", "gpu": True, "inputs": takes("x")}]
            outputs.append(f"{own}/loose.k")
        else:
            names = ["loose", "loose-2", "loose-3"][: len(each["inner"])]
            entry["inputs"] = {}
            for at, of in enumerate(each["inner"]):
                used = [index for index in of if index < at]
                inner = {f"n{index}": {"$from": f"{own}/{names[index]}.k"} for index in used}
                entry["inputs"][f"in{at}"] = {**outer, **inner, "own": literal}
                nodes.append(
                    {
                        "id": names[at], "node": "loose", "gpu": True,
                        "depends_on": [names[index] for index in used],
                        "inputs": [{"name": "x", "from": f"pipeline.in{at}"}],
                    }
                )  # fmt: skip
            outputs.append(f"{own}/{names[-1]}.k")
        if nodes:
            pipelines[own] = nodes
        waits += [f"s{of}" for of in each["after"]]
        entry["depends_on"] = waits
        steps.append(entry)
    return twin(pipelines, *steps)


def settled(made: dict[str, Any]) -> dict[str, Any]:
    """A definition without the order of dependencies, which does not matter."""
    for each in made["nodes"]:
        each["deps"] = sorted(each["deps"])
        if each["step"]:
            each["step"]["depends_on"] = sorted(set(each["step"].get("depends_on", ())))
    return made


@settings(max_examples=examples(60))
@given(plan=plans())
def test_python_and_json_give_one_graph(plan: Plan) -> None:
    config.reset_for_tests()
    assert settled(in_python(plan)) == settled(in_json(plan))


@pytest.mark.parametrize("text", ["a\0", "\ud800"])
@pytest.mark.parametrize("said", [in_python, in_json])
def test_text_that_cannot_be_stored_is_refused_in_python_and_json(
    said: Callable[[Plan], Any], text: str
) -> None:
    config.reset_for_tests()
    step = {"kind": "node", "takes": [], "after": [], "skip": "no", "literal": text, "inner": [[]]}
    with pytest.raises(errors.InvalidWorkflow, match="'inputs': text with a NUL or half a surr"):
        said([step])


# --- results whose type is not said -----------------------------------------------------------

KEYS = st.sampled_from(["result", "$dict", "$dict$dict", "$dict$dict$dict", "a"])
RESULTS = st.recursive(
    st.booleans() | st.integers() | st.text(max_size=2) | st.none(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=4),
).filter(lambda value: value is not None)


@settings(max_examples=examples(400))
@given(value=RESULTS)
@example(value={"result": 5})
@example(value={"result": {"result": 5}})
@example(value={"result": 5, "$dict": True})
@example(value={"result": 5, "$dict": False, "$dict$dict": []})
def test_a_result_of_any_type_is_passed_on_as_it_was_returned(value: Any) -> None:
    @node(name="give")
    def give():
        return value

    @node
    def take(**given: Any) -> None: ...

    def passing() -> None:
        made: Any = give()
        keys = value.keys() if isinstance(value, dict) else ()
        take(made=made, **{f"k{number}": made[key] for number, key in enumerate(keys)})

    declared = declare.Workflow(passing, "passing")
    declare.install(give, take, declared)
    (given_step, taking_step) = declared.document()["steps"]
    stored = config.get_config().resolve_node_module("give").stored(value)
    assert "inputs" not in given_step
    found = refs.resolve_ref(taking_step["inputs"], {"give/give": stored})
    members = [*value.values()] if isinstance(value, dict) else []
    assert found == {"made": value} | {f"k{number}": each for number, each in enumerate(members)}
    assert isinstance(found["made"], type(value))
