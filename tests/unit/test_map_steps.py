"""Steps of kind map: reading them, keys and ids of items, and the nodes of one item."""

from __future__ import annotations

import json
from typing import Any

import pytest

from queue_workflows import branch, check, errors, loop, node, pipeline, refs, workflow
from queue_workflows.cli import check as graphs
from queue_workflows.dag import definition, graph, item_ids, items, plan
from queue_workflows.declare import failures
from tests.support import tabled
from tests.support.planning import FakeRun

PIPELINES: dict[str, Any] = {
    "film": {
        "name": "film",
        "nodes": [
            {"id": "cut", "inputs": [{"name": "clip", "from": "pipeline.clip"}]},
            {
                "id": "encode",
                "depends_on": ["cut"],
                "inputs": [
                    {"name": "path", "from": "pipeline.path"},
                    {"name": "folder", "from": "cut.frames"},
                    {"name": "size", "from": "pipeline.size"},
                ],
            },
        ],
    },
    "two": {"name": "two", "nodes": [{"id": "a"}, {"id": "b"}]},
    "scan": {"name": "scan", "nodes": [{"id": "scan"}]},
}
FILMS: dict[str, Any] = {
    "id": "films",
    "kind": "map",
    "over": {"$from": "clips"},
    "key": "id",
    "pipeline": "film",
    "inputs": {
        "clip": {"$from": "item"},
        "path": {"$from": "cut.path"},
        "size": {"of": {"$from": "item.size"}, "most": {"$from": "size"}},
    },
}


def expand(**more: Any) -> dict[str, Any]:
    """Return the definition of a workflow with the map FILMS, changed by `more`."""
    step = {key: value for key, value in {**FILMS, **more}.items() if value is not ...}
    return definition.expand({"name": "w", "steps": [step]}, PIPELINES.__getitem__)


def test_a_definition_with_a_map_has_version_2_and_is_read_back() -> None:
    made = expand(may_fail=0.5, at_once=3)
    assert made["version"] == 2
    stored = json.loads(json.dumps(made))
    found = graph.read(stored).nodes["films"].map
    assert found is not None
    assert (found.key, found.at_once, found.may_fail) == ("id", 3, 0.5)
    assert (found.result, found.path, list(found.body.nodes)) == ("encode", (), ["cut", "encode"])
    plain = definition.expand(
        {"name": "w", "steps": [{"id": "s", "kind": "pipeline", "pipeline": "scan"}]},
        PIPELINES.__getitem__,
    )
    assert plain["version"] == 1


def test_a_bad_map_is_refused_by_step_and_reason() -> None:
    cases: list[Any] = [
        ({"over": ...}, "'over' is missing"),
        ({"pipeline": ...}, "either 'pipeline' or 'steps'"),
        ({"steps": []}, "either 'pipeline' or 'steps'"),
        ({"pipeline": ..., "steps": []}, "it has no steps"),
        ({"at_once": 0}, "'at_once' is a number of items, 1 to 100000, not 0"),
        ({"at_once": True}, "'at_once'"),
        ({"at_once": 1.5}, "'at_once'"),
        ({"may_fail": -1}, "'may_fail' is a number of items, or a share"),
        ({"may_fail": 1.5}, "'may_fail'"),
        ({"may_fail": True}, "'may_fail'"),
        ({"key": 1}, "'key' must be text"),
        ({"as": "a/b"}, "'as'"),
        ({"as": "cut"}, "a node of its body has the name 'cut' of the item"),
        ({"result": "encode"}, "'result' is one ref"),
        ({"result": {"$from": "nope"}}, "its body has no node 'nope'"),
        ({"pipeline": "two", "inputs": {}}, "2 nodes end its body: name the one"),
        (
            {
                "pipeline": ...,
                "steps": [{"id": "q", "kind": "input", "widget": "file_upload"}],
            },
            "a map cannot ask a person",
        ),
        ({"pipeline": ..., "steps": [{"id": "q", "kind": "note"}]}, "unknown kind 'note'"),
    ]
    for more, reason in cases:
        with tabled.case(more, reason):
            with pytest.raises(errors.InvalidWorkflow) as refused:
                expand(**more)
            assert "step 'films'" in str(refused.value)
            assert reason in str(refused.value)


def test_maps_nest_up_to_four_levels() -> None:
    def nested(levels: int) -> dict[str, Any]:
        inner = {key: value for key, value in FILMS.items() if key != "id"}
        for level in range(levels - 1):
            inner = {
                "kind": "map",
                "over": [],
                "as": f"i{level}",
                "steps": [{"id": "m", **inner}],
            }
        return {"name": "w", "steps": [{"id": "m", **inner}]}

    made = definition.expand(nested(4), PIPELINES.__getitem__)
    assert item_ids.node(graph.read(made), "m[a]/m[b]/m[c]/m[d]/cut") is not None
    with pytest.raises(errors.InvalidWorkflow, match="nested deeper than 4 levels"):
        definition.expand(nested(5), PIPELINES.__getitem__)


@pytest.mark.parametrize("broken", ["module", "result", "may_fail", "at_once", "body", "path"])
def test_a_forged_map_is_refused(broken: str) -> None:
    made = expand()
    if broken == "module":
        made["nodes"][0]["module"] = "other"
    else:
        made["nodes"][0]["map"][broken] = {"x": 1} if broken != "body" else [{"id": "../x"}]
    with pytest.raises(errors.InvalidWorkflow):
        graph.read(made)


def scope(key: str, item: Any) -> items.Scope:
    found = graph.read(expand()).nodes["films"].map
    assert found is not None
    return items.Scope(found, "films", key, item)


def planned(of: items.Scope, **context: Any) -> tuple[plan.NewNode, plan.Plan]:
    """Return the row of an item's node `cut`, and the plan after it."""
    run = FakeRun(of.of.body, item=of.item, **context)
    given: dict[str, Any] = {
        "progress": plan.Progress(of.of.body, of.prefix), "out_dir": f"/o/{of.id}",
    }  # fmt: skip
    (cut,) = run.start(**given).rows
    run.finish("cut", path="p")
    return cut, run.after("cut", **given)


def test_the_nodes_of_an_item_have_its_value_and_the_ids_of_its_nodes() -> None:
    item = {"id": "x.1", "size": 4}
    of = scope("x.1", item)
    cut, after = planned(of, size=9)
    (encode,) = after.rows
    assert items.ids(of) == [cut.id, encode.id] == ["films[x.1]/cut", "films[x.1]/encode"]
    assert (cut.inputs, encode.inputs) == (
        {"clip": item},
        {"path": "p", "folder": "/o/films[x.1]/cut/frames", "size": {"of": 4, "most": 9}},
    )
    assert items.bound(cut.template or {}, [of]) == {"clip": item}
    template = items.bound(encode.template or {}, [of])
    assert template == {
        "path": {"$from": "films[x.1]/cut.path"},
        "folder": "/o/films[x.1]/cut/frames",
        "size": {"of": {"$value": 4}, "most": {"$from": "size"}},
    }
    context = {"films[x.1]/cut": {"path": "p"}, "size": 9}
    assert {name: refs.resolve_ref(each, context) for name, each in template.items()} == (
        encode.inputs
    )
    assert json.loads(plan.encode_row(encode))["node_id"] == "films[x.1]/encode"


def test_an_item_that_looks_like_a_template_is_data() -> None:
    item = {"id": "a", "$from": "secret", "size": 1}
    cut, _ = planned(scope("a", item), size=9)
    assert cut.inputs == {"clip": item}
    given = items.bound(cut.template or {}, [scope("a", item)])["clip"]
    assert refs.resolve_ref(given, {"secret": 1}) == item


def test_a_ref_to_what_an_item_lacks_fails_when_it_is_resolved() -> None:
    cut, after = planned(scope("a", {"id": "a"}), size=9)
    assert cut.inputs == {"clip": {"id": "a"}}
    assert after.failure == (
        "films[a]/encode",
        "node 'films[a]/encode': input 'size': $from 'item.size': there is no 'size'",
    )


def test_ids_of_items_are_split() -> None:
    cases: list[Any] = [
        ("cut[clip-7]/encode", ("cut", "clip-7", "encode")),
        ("cut[clip-7]", ("cut", "clip-7", "")),
        ("a[b]/c[d.e]/f/g", ("a[b]/c", "d.e", "f/g")),
        ("cut/encode", None),
        ("cut", None),
        ("[x]", None),
        ("cut[]", None),
        ("cut]a[", None),
    ]
    for node_id, parts in cases:
        with tabled.case(node_id, parts):
            assert item_ids.split(node_id) == parts


def test_a_path_keeps_the_dots_of_an_items_key_together() -> None:
    assert refs.segments("cut[a.png]/enc.out.0") == ["cut[a.png]/enc", "out", "0"]
    assert refs.segments("a[x.y]/b[z.z]/c") == ["a[x.y]/b[z.z]/c"]
    assert refs.segments("list[0].x") == ["list[0]", "x"]
    assert refs.segments("a.b[0.1]") == ["a", "b[0", "1]"]


# --- in Python


@node(name="maps-scan")
def scan(count: int) -> list[int]:
    return list(range(count))


@node(name="maps-draw")
def draw(number: int, width: int = 1) -> str:
    return f"{number}x{width}"


@node(name="maps-frame")
def frame(picture: str) -> str:
    return picture


@node(name="maps-join")
def join(pictures: list[str], failed: list[Any]) -> int:
    return len(pictures) + len(failed)


@pipeline
def framed(number: int) -> str:
    return frame(draw(number))


@pytest.fixture(autouse=True)
def installed() -> None:
    for each in (scan, draw, frame, join):
        each.install()


def test_map_compiles_to_a_step_of_kind_map() -> None:
    @workflow(name="maps-compiled")
    def made(count: int) -> None:
        found = scan(count)
        pictures = draw.options("draws", retries=2).map(found, at_once=2, also={"width": 3})
        join(pictures, failures(pictures))
        framed.map(found, may_fail=0.5)

    _, draws, joined, both = made.document()["steps"]
    assert draws == {
        "id": "draws",
        "kind": "map",
        "over": {"$from": "scan/scan.result"},
        "at_once": 2,
        "result": {"$from": "draw.result"},
        "pipeline": "maps-compiled.draws",
        "inputs": {"draw.number": {"$from": "item"}, "draw.width": 3},
        "depends_on": ["scan"],
    }
    assert made.pipelines()["maps-compiled.draws"]["nodes"][0]["retries"] == 2
    assert joined["inputs"] == {
        "pictures": {"$from": "draws.results"},
        "failed": {"$from": "draws.failed"},
    }
    assert (both["may_fail"], both["result"]) == (0.5, {"$from": "frame.result"})
    report = check.workflow("maps-compiled")
    assert (report.ok, report.findings, report.needs) == (True, (), ("count",))
    assert report.definition is not None
    tree = list(graphs.tree(report.definition, report.needs, unicode=True))
    assert "├─ draws  for each item, 2 at once" in tree
    assert "│     each: draw  cpu  runs maps-draw" in tree
    assert list(graphs.mermaid(report.definition))[1:5] == [
        '    n0["scan/scan"]',
        '    subgraph n1 ["draws, each item"]',
        '        n1_0["draw"]',
        "    end",
    ]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda found: inner_leak(found), "exists for each item of a map"),
        (lambda found: failures(found), "failures.. takes the result of a call of map"),
        (lambda found: nested_map.map(found), "is mapped in a mapped pipeline.*`publish.map"),
        (lambda found: branch_in_loop.map(found), "step 'loop': branch.. is called in a pipeline"),
        (lambda found: leaking_arm.map(found), "has to return the output of a node"),
        (lambda found: same_id.map(found), "two steps have the id 'same_id'"),
        (lambda found: twice.map(found), "two steps have the id 'draw'"),
        (lambda found: twice_again.map(found), "two nodes have the id 'made'"),
        (lambda found: shadow(found), "'inner/draw' is in it and outside of it"),
        (lambda found: with_run.map(found), "workflow 'scans' is called in a mapped pipeline"),
        (lambda found: no_result.map(found), "has to return the output of a node"),
        (lambda found: empty.map(found), "its function calls no node"),
        (lambda found: draw.map(found, also={"nope": 1}), "nope"),
    ],
)
def test_a_wrong_map_is_refused_with_its_place(body: Any, reason: str) -> None:
    def made(count: int) -> None:
        body(scan(count))

    with pytest.raises(errors.InvalidWorkflow, match=reason):
        workflow(name="maps-wrong")(made).document()


def test_branches_and_loops_of_a_mapped_pipeline_compile_to_its_steps() -> None:
    @pipeline
    def both(number: int) -> Any:
        made = draw.options(retries=1)(number)
        chosen = with_branch_of(made, number)
        return loop(lambda s: frame(s), start=chosen, until=lambda s: s == "a", at_most=3)

    @workflow(name="maps-decides")
    def made(count: int) -> None:
        join(both.map(scan(count)), [])

    _, mapped, _ = made.document()["steps"]
    assert "pipeline" not in mapped
    assert "inputs" not in mapped
    assert mapped["result"] == {"$from": "loop.result"}
    plain, chosen, repeated = mapped["steps"]
    assert plain == {
        "id": "draw",
        "kind": "node",
        "node": "maps-draw",
        "retries": 1,
        "inputs": {"number": {"$from": "item"}},
    }
    assert (chosen["kind"], chosen["depends_on"]) == ("branch", ["draw"])
    assert (repeated["kind"], repeated["depends_on"]) == ("loop", ["branch"])
    report = check.workflow("maps-decides")
    assert (report.ok, report.findings, report.needs) == (True, (), ("count",))
    assert report.definition is not None
    body = report.definition["nodes"][1]["map"]["body"]
    assert [each["id"] for each in body] == [
        "draw", "branch/draw", "branch/draw-2", "branch",
        "loop/frame#1", "loop/frame#2", "loop/frame#3", "loop",
    ]  # fmt: skip
    assert graph.read(report.definition).nodes["both"].map is not None


LEAKED: list[Any] = []


@workflow
def scans(count: int) -> Any:
    return scan(count)


def with_branch_of(made: str, number: int) -> str:
    return branch(made, {"a": lambda: draw(number, 2)}, other=lambda: draw(number, 3))


@pipeline
def branch_in_loop(number: int) -> Any:
    def body(state: Any) -> Any:
        return branch(state, {"a": lambda: draw(number, 2)})

    return loop(body, start=number, until=lambda s: s, at_most=2)


@pipeline
def leaking_arm(number: int) -> Any:
    def arm() -> str:
        LEAKED.append(draw(number))
        return LEAKED[-1]

    branch(number, {1: arm})
    return LEAKED.pop()


@pipeline
def same_id(number: int) -> Any:
    return branch(number, {1: lambda: draw(number)}, id="same_id")


@pipeline
def twice(number: int) -> Any:
    return branch(draw(number), {"a": lambda: draw(number)}, id="draw")


@pipeline
def twice_again(number: int) -> Any:
    branch(number, {1: lambda: draw(number)}, id="made")
    return draw.options("made")(number)


@pipeline
def shadowing(number: int, outer: str) -> Any:
    frame(outer)
    return branch(number, {1: lambda: draw(number)}, id="inner")


def shadow(found: list[int]) -> None:
    @pipeline(name="inner")
    def inner() -> str:
        return draw(1)

    shadowing.map(found, also={"outer": inner()})


@pipeline
def with_run(number: int) -> Any:
    return scans(number)


@pipeline
def leaking(number: int) -> str:
    LEAKED.append(draw(number))
    return LEAKED[-1]


def inner_leak(found: list[int]) -> None:
    leaking.map(found)
    frame(LEAKED.pop())


@pipeline
def nested_map(number: int) -> list[str]:
    return draw.map(scan(number))


@pipeline
def no_result(number: int) -> str:
    draw(number)
    return "constant"


@pipeline
def empty(number: int) -> int:
    return number


def test_check_finds_wrong_inputs_and_refs_inside_a_map() -> None:
    step = {
        "id": "m",
        "kind": "map",
        "over": [1],
        "pipeline": "p",
        "inputs": {"nmber": {"$from": "item"}, "x": {"$from": "draw.reslt"}},
    }
    nodes = [
        {
            "id": "draw",
            "node": "maps-draw",
            "inputs": [{"name": "nmber", "from": "pipeline.nmber"}],
        },
        {
            "id": "frame",
            "node": "maps-frame",
            "inputs": [{"name": "picture", "from": "pipeline.x"}],
        },
    ]
    nodes[1]["depends_on"] = ["draw"]
    report = check.document(
        {"name": "w", "steps": [step]}, pipelines={"p": {"name": "p", "nodes": nodes}}
    )
    texts = [f"{found.at}: {found.message}" for found in report.findings]
    assert "node 'm[...]/draw': 'maps-draw' takes no 'nmber'" in texts
    assert "node 'm[...]/frame': input 'picture': 'draw' has no output 'reslt'" in texts
