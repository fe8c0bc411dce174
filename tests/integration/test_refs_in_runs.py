"""What refs find while a run goes on, and what runs in which order, by each way of dispatching."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import queue_workflows
from queue_workflows import db, dispatcher, node_executor, node_queue, refs
from tests.support import factories, flow

Json = dict[str, Any]


def read(path: str, **more: Any) -> Json:
    return {"$from": path, **more}


def taking(node_id: str, *keys: str, **more: Any) -> Json:
    """A node with the handler `see` that takes the step's inputs of these names."""
    inputs = [{"name": key, "from": f"pipeline.{key}"} for key in keys]
    return {"id": node_id, "node": "see", "inputs": inputs, **more}


@pytest.fixture
def seen(toy: flow.Flow) -> list[Json]:
    """The inputs of each call of the handler `see`."""
    found: list[Json] = []
    flow.body(lambda inputs: found.append(inputs), "see")
    return found


# --- ways


def ahead(toy: flow.Flow, run_id: str) -> None:
    """A worker queues what follows when it records a result, if that is enough to plan it."""
    toy.go("cpu", "gpu")


def dispatched(toy: flow.Flow, run_id: str) -> None:
    """An orchestrator decides after each node."""
    with flow.unplanned():
        toy.go("cpu", "gpu")


def by_hand(toy: flow.Flow, run_id: str) -> None:
    """The app executes what it claims, and dispatches the run."""
    toy.look()
    while (job := node_queue.claim_next_cpu_job()) is not None:
        node_executor.execute_node(job)
        flow.dispatch(run_id)


Way = Callable[[flow.Flow, str], None]
WAYS = (ahead, dispatched, by_hand)
every_way = pytest.mark.parametrize("way", WAYS)


def ran(toy: flow.Flow, way: Way, **columns: Any) -> str:
    """A run of `w` that has ended; its id."""
    run_id = toy.submit(**columns)
    way(toy, run_id)
    return run_id


def ended(run_id: str) -> tuple[str, dict[str, str]]:
    return flow.status(run_id), flow.states(run_id)


# --- a node that is skipped leaves the context's own value


@every_way
def test_a_ref_to_a_node_that_is_skipped_finds_what_the_context_has(
    toy: flow.Flow, seen: list[Json], way: Way
) -> None:
    skipping = {"id": "a", "node": "see", "skip_if": read("no")}
    after = [
        {"id": "z", "node": "see"},
        {**skipping, "depends_on": ["z"]},
        taking("b", "x", depends_on=["a"]),
        {"id": "c", "node": "see", "depends_on": ["a"], "skip_if": read("s/a.v", **{"$eq": 5})},
    ]
    inputs = {"x": read("s/a.v")}
    for members in (after, [skipping, *after[2:]]):
        toy.define(flow.step("s", inputs=inputs), s=members)
        seen.clear()
        run_id = ran(toy, way, context={"no": True, "s/a": {"v": 5}})
        status, states = ended(run_id)
        assert status == "completed", flow.run(run_id)["error"]
        assert (states["s/a"], states["s/b"], states["s/c"]) == ("skipped", "completed", "skipped")
        assert seen[-1] == {"x": 5}
        assert len(seen) == len(members) - 2


@every_way
def test_without_a_value_in_the_context_a_skipped_node_has_none(
    toy: flow.Flow, seen: list[Json], way: Way
) -> None:
    members = [
        {"id": "z", "node": "see"},
        {"id": "a", "node": "see", "skip_if": True, "depends_on": ["z"]},
        {"id": "b", "node": "see", "depends_on": ["a"], "skip_if": read("s/a.v")},
    ]
    toy.define(flow.step("s"), s=members)
    run_id = ran(toy, way)
    assert ended(run_id) == (
        "completed",
        {"s/z": "completed", "s/a": "skipped", "s/b": "completed"},
    )
    toy.define(
        flow.step("s", inputs={"x": read("s/a.v")}),
        s=[*members[:2], taking("b", "x", depends_on=["a"])],
    )
    run_id = ran(toy, way)
    toy.look()
    assert flow.status(run_id) == "failed"
    assert "'s/a.v'" in flow.run(run_id)["error"]


# --- skip_if by a result


@every_way
@pytest.mark.parametrize(("found", "state"), [(0, "skipped"), (1, "completed")])
def test_the_result_of_the_node_before_decides_a_skip(
    toy: flow.Flow, seen: list[Json], way: Way, found: int, state: str
) -> None:
    flow.body({"found": found}, "search")
    toy.define(
        flow.step("s"),
        s=[
            {"id": "a", "node": "search"},
            {
                "id": "b",
                "node": "see",
                "depends_on": ["a"],
                "skip_if": read("s/a.found", **{"$eq": 0}),
            },
            {"id": "c", "node": "ok", "depends_on": ["b"]},
        ],
    )
    run_id = ran(toy, way)
    states = {"s/a": "completed", "s/b": state, "s/c": "completed"}
    assert ended(run_id) == ("completed", states)
    assert len(seen) == found


# --- inputs that the step does not give


@every_way
def test_an_input_that_the_step_does_not_give_is_none(toy: flow.Flow, way: Way) -> None:
    got: list[Any] = []
    flow.body(lambda opt: got.append(opt), "bare")
    flow.body(lambda opt=7: got.append(opt), "defaulted")
    flow.body(lambda inputs: got.append(inputs), "whole")
    wanted = [{"name": "opt", "from": "pipeline.opt"}]
    names = ("bare", "defaulted", "whole")
    toy.define(
        flow.step("s"),
        s=[
            {"id": name, "inputs": wanted, "depends_on": list(names[at - 1 : at] if at else ())}
            for at, name in enumerate(names)
        ],
    )
    run_id = ran(toy, way)
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    assert got == [None, 7, {"opt": None}]
    assert flow.job(run_id, "s/bare")["inputs"] == {"opt": None}


# --- refs that let a node wait


@every_way
def test_a_node_waits_for_the_nodes_that_its_inputs_name(
    toy: flow.Flow, seen: list[Json], way: Way
) -> None:
    flow.body({"v": 5}, "five")
    toy.define(
        flow.step("late", inputs={"x": read("s/a.v"), "y": read("m.results")}),
        {
            "id": "m",
            "kind": "map",
            "over": [1],
            "steps": [{"id": "n", "kind": "node", "node": "five", "inputs": {"k": read("s/a.v")}}],
        },
        {
            "id": "c",
            "kind": "branch",
            "on": read("s/a.v"),
            "arms": {"5": "yes", "6": "no"},
            "pipeline": "arms",
        },
        flow.step("s"),
        late=[taking("b", "x", "y")],
        arms=[taking("yes"), taking("no")],
        s=[{"id": "a", "node": "five"}],
    )
    run_id = ran(toy, way)
    toy.go()  # items of maps are the orchestrator's
    status, states = ended(run_id)
    assert status == "completed", flow.run(run_id)["error"]
    assert (states["c/yes"], states["c/no"]) == ("completed", "skipped")
    assert {"x": 5, "y": [{"v": 5}]} in seen
    assert flow.job(run_id, "s/a")["seq"] == min(row["seq"] for row in flow.jobs(run_id).values())


@every_way
def test_refs_in_a_circle_imply_nothing_and_find_the_context_or_fail_the_run(
    toy: flow.Flow, seen: list[Json], way: Way
) -> None:
    given = {"x": read("s/b.v"), "y": read("s/a.v")}
    toy.define(flow.step("s", inputs=given), s=[taking("a", "x"), taking("b", "y")])
    run_id = ran(toy, way, context={"s/a": {"v": 1}, "s/b": {"v": 2}})
    assert ended(run_id) == ("completed", {"s/a": "completed", "s/b": "completed"})
    assert sorted(seen, key=str) == [{"x": 2}, {"y": 1}]
    run_id = ran(toy, way)
    assert (flow.status(run_id), flow.states(run_id)) == ("failed", {})
    assert "'s/b.v'" in flow.run(run_id)["error"]


def test_a_step_waits_for_one_node_of_another(toy: flow.Flow) -> None:
    order: list[str] = []
    for name in ("first", "second", "other"):
        flow.body(lambda name=name: order.append(name), name)
    toy.define(
        flow.step("t", depends_on=["s/first"]),
        flow.step("s"),
        s=[{"id": "first"}, {"id": "second", "depends_on": ["first"], "gpu": True}],
        t=[{"id": "other"}],
    )
    run_id = toy.submit()
    toy.look()
    assert flow.states(run_id) == {"s/first": "queued"}
    toy.work()
    toy.look()
    toy.work()
    states = {"s/first": "completed", "s/second": "queued", "t/other": "completed"}
    assert flow.states(run_id) == states
    assert order == ["first", "other"]
    toy.go("gpu")
    assert flow.status(run_id) == "completed"


# --- steps of other kinds, ids


@every_way
def test_a_step_of_another_kind_is_passed_by(toy: flow.Flow, seen: list[Json], way: Way) -> None:
    toy.define(
        flow.step("s"),
        {"id": "note", "kind": "note", "depends_on": ["s"], "text": "for people"},
        {"id": "bare", "depends_on": ["note"]},
        flow.step("t", depends_on=["bare"], inputs={"x": read("s/a.v")}),
        s=[{"id": "a", "node": "five"}],
        t=[taking("b", "x")],
    )
    flow.body({"v": 5}, "five")
    run_id = toy.submit()
    toy.look()
    assert flow.states(run_id) == {"s/a": "queued"}
    way(toy, run_id)
    assert ended(run_id) == ("completed", {"s/a": "completed", "t/b": "completed"})
    assert seen == [{"x": 5}]


def test_a_workflow_without_nodes_fails_at_once(toy: flow.Flow) -> None:
    toy.define({"id": "note", "kind": "note"}, {"id": "bare", "depends_on": ["note"]})
    run_id = toy.submit()
    toy.look()
    assert ended(run_id) == ("failed", {})
    assert "no step makes nodes" in flow.run(run_id)["error"]


IDS: list[Any] = [
    "a.b",
    "c d",
    "żółć",
    "語",
    7,
    "..",
    ".",
    "%",
    "-",
    "a\\b",
    "it's",
    '"q"',
    "x" * 100,
]


@pytest.mark.parametrize(
    ("way", "step_id"), [(ahead, ".."), (dispatched, "żółć"), (by_hand, 7), (ahead, "x" * 100)]
)
def test_nodes_of_unusual_ids_run_and_have_folders_of_their_own(
    toy: flow.Flow, tmp_path: Path, way: Way, step_id: Any
) -> None:
    found: list[Path] = []

    def made(out: Path, before: Path | None, file: Path | None) -> None:
        if before is not None and file is not None:
            assert file.read_text() == before.name
            assert file.parent == before
        (out / "f.txt").write_text(out.name)
        found.append(out.relative_to(tmp_path))

    flow.body(made, "made")
    members: list[Json] = []
    for number, node_id in enumerate(IDS):
        entry: Json = {"id": node_id, "node": "made"}
        last = str(IDS[number - 1])
        if number:
            taken = {"before": last, "file": f"{last}.f.txt"}
            entry["inputs"] = [{"name": key, "from": text} for key, text in taken.items()]
            entry["depends_on"] = [IDS[number - 1]]
        else:
            names = ("before", "file")
            entry["inputs"] = [{"name": key, "from": f"pipeline.{key}"} for key in names]
        members.append(entry)
    toy.define({**flow.step("s"), "id": step_id}, s=members)
    run_id = ran(toy, way, out_dir=str(tmp_path))
    status, states = ended(run_id)
    assert status == "completed", flow.run(run_id)["error"]
    assert [*states] == [f"{step_id}/{node_id}" for node_id in IDS]
    encoded = {"..": "%2E%2E", ".": "%2E"}
    folders = [encoded.get(str(each), str(each)) for each in [step_id, *IDS]]
    assert found == [Path(folders[0]) / each for each in folders[1:]]


def test_the_rounds_of_unusual_ids_have_folders_of_their_own(
    toy: flow.Flow, tmp_path: Path
) -> None:
    def count(out: Path, before: Path | None, n: int) -> Json:
        if before is not None:
            assert before.parent == out.parent
            assert (before / "f").exists()
        (out / "f").touch()
        return {"n": n - 1}

    flow.body(count, "count")
    ids = [".", "..", "a.b", "end"]
    members: list[Json] = []
    for number, node_id in enumerate(ids):
        before = ids[number - 1] if number else "pipeline.none"
        inputs = [{"name": "before", "from": before}, {"name": "n", "from": "pipeline.n"}]
        members.append({"id": node_id, "node": "count", "inputs": inputs})
        members[-1]["depends_on"] = ids[number - 1] if number else []
    toy.define(
        {
            "id": "l",
            "kind": "loop",
            "pipeline": "p",
            "inputs": {"n": read("l.n")},
            "start": {"n": 2},
            "until": read("stop"),
            "result": "end",
            "at_most": 2,
            "must": False,
        },
        p=members,
    )
    run_id = ran(toy, ahead, out_dir=str(tmp_path), context={"stop": False})
    toy.go()
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    folders = ("%2E", "%2E%2E", "a.b", "end")
    names = [f"{name}#{number}" for number in (1, 2) for name in folders]
    assert sorted(path.name for path in (tmp_path / "l").iterdir()) == sorted(names)


def test_refs_find_the_results_of_unusual_ids(toy: flow.Flow, seen: list[Json]) -> None:
    flow.body({"v": 5}, "five")
    ids = ["c d", "żółć", 7, "it's", "%"]
    toy.define(
        {**flow.step("s"), "id": "x y"},
        flow.step("t", inputs={f"k{n}": read(f"x y/{each}.v") for n, each in enumerate(ids)}),
        s=[{"id": each, "node": "five"} for each in ids],
        t=[taking("b", *(f"k{n}" for n in range(len(ids))))],
    )
    run_id = ran(toy, ahead)
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    assert seen == [{f"k{n}": 5 for n in range(len(ids))}]


def test_a_question_of_an_unusual_id_is_asked_and_answered(
    toy: flow.Flow, seen: list[Json]
) -> None:
    toy.define(
        {**flow.ask("q"), "id": "żó 1"},
        flow.step("t", inputs={"x": read("żó 1.answer")}),
        t=[taking("b", "x")],
    )
    run_id = toy.submit()
    toy.go()
    assert flow.job(run_id, "żó 1")["input_spec"]["step_id"] == "żó 1"
    queue_workflows.submit_input(run_id, "żó 1", "yes")
    toy.go()
    assert flow.status(run_id) == "completed"
    assert seen == [{"x": "yes"}]


def test_a_node_on_cpu_loads_no_model_and_gpu_1_is_gpu(toy: flow.Flow) -> None:
    toy.define(
        flow.step("s"),
        s=[
            {"id": "a", "node": "ok", "model": "m"},
            {"id": "b", "node": "ok", "model": "m", "gpu": 1},
            {"id": "c", "node": "ok", "gpu": 0},
        ],
    )
    run_id = toy.started()
    placed = {key: (row["queue"], row["required_model"]) for key, row in flow.jobs(run_id).items()}
    assert placed == {"s/a": ("cpu", None), "s/b": ("gpu", "m"), "s/c": ("cpu", None)}
    assert toy.work() == 2


# --- empty results


@every_way
def test_an_empty_result_does_not_hide_the_value_of_the_context(
    toy: flow.Flow, seen: list[Json], way: Way
) -> None:
    kept = {"id": "d", "node": "see", "depends_on": ["a"], "skip_if": read("s/a.v", **{"$eq": 5})}
    toy.define(
        flow.step("s", inputs={"x": read("s/a.v"), "y": read("s/a")}),
        s=[
            {"id": "a", "node": "ok"},
            taking("b", "x", "y", depends_on=["a"]),
            kept,
            taking("e", "x", depends_on=["b"]),
        ],
    )
    run_id = ran(toy, way, context={"s/a": {"v": 5}})
    status, states = ended(run_id)
    assert status == "completed", flow.run(run_id)["error"]
    assert states["s/d"] == "skipped"
    assert seen == [{"x": 5, "y": {"v": 5}}, {"x": 5}]


@every_way
def test_a_skip_is_decided_by_the_context_behind_an_empty_result(
    toy: flow.Flow, seen: list[Json], way: Way
) -> None:
    kept = {"id": "d", "node": "see", "depends_on": ["a"], "skip_if": read("s/a.v", **{"$eq": 5})}
    toy.define(flow.step("s"), s=[{"id": "a", "node": "ok"}, kept])
    run_id = ran(toy, way, context={"s/a": {"v": 5}})
    assert ended(run_id) == ("completed", {"s/a": "completed", "s/d": "skipped"})
    run_id = ran(toy, way, context={"s/a": {"v": 6}})
    assert ended(run_id) == ("completed", {"s/a": "completed", "s/d": "completed"})
    assert seen == [{}]


@every_way
def test_the_whole_empty_result_of_a_node_is_an_empty_object(
    toy: flow.Flow, seen: list[Json], way: Way
) -> None:
    toy.define(
        flow.step("s", inputs={"x": read("s/a")}),
        s=[{"id": "a", "node": "ok"}, taking("b", "x", depends_on=["a"])],
    )
    run_id = ran(toy, way)
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    assert seen == [{"x": {}}]


@every_way
def test_a_result_that_is_not_empty_hides_the_value_of_the_context(
    toy: flow.Flow, seen: list[Json], way: Way
) -> None:
    flow.body({"w": 6}, "six")
    toy.define(
        flow.step("s", inputs={"x": read("s/a")}),
        s=[
            {"id": "a", "node": "six"},
            taking("b", "x", depends_on=["a"]),
            {"id": "c", "node": "see", "depends_on": ["a"], "skip_if": read("s/a.v")},
        ],
    )
    run_id = ran(toy, way, context={"s/a": {"v": 5}})
    assert flow.status(run_id) == "completed"
    assert flow.states(run_id)["s/c"] == "completed"
    assert {"x": {"w": 6}} in seen


def test_a_worker_reads_the_context_behind_an_empty_result_when_the_job_runs(
    toy: flow.Flow, seen: list[Json]
) -> None:
    toy.define(
        flow.step("s", inputs={"x": read("s/a.v"), "y": read("s/a")}),
        s=[{"id": "a", "node": "ok"}, taking("b", "x", "y", depends_on=["a"])],
    )
    run_id = toy.started(context={"s/a": {"v": 5}})
    flow.finish(run_id, "s/a")
    assert flow.job(run_id, "s/b")["inputs"] == {"x": 5, "y": {"v": 5}}
    with db.connection() as conn:
        conn.execute(
            """UPDATE workflow_runs SET context = '{"s/a": {"v": 6}}' WHERE id = %s""", (run_id,)
        )
    assert dispatcher.resolve_inputs_for_job(flow.job(run_id, "s/b")["id"]) == {
        "x": 6,
        "y": {"v": 6},
    }
    toy.work()
    assert seen == [{"x": 6, "y": {"v": 6}}]


@pytest.mark.parametrize("resolver", ["the app's", "ours"])
def test_the_context_of_a_run_has_empty_results_where_it_has_nothing_itself(
    toy: flow.Flow, resolver: str
) -> None:
    found: Json = {"s/a": {"v": 5}, "s/b": {"w": 1}, "s/c": {}, "s/d": None, "k": 2}
    contexts: list[Json] = []

    def resolve(value: Any, context: Json) -> Any:
        contexts.append(context)
        return refs.resolve_ref(value, context)

    toy.provide(resolve_ref=resolve if resolver == "the app's" else None)
    inputs = {name.replace("/", ""): read(name) for name in found}
    toy.define(
        flow.step("s"),
        flow.step("t", depends_on=["s"], inputs=inputs),
        s=flow.nodes(a="", b="", c="", d=""),
        t=[taking("e", *inputs)],
    )
    run_id = toy.started(context={"s/a": {"v": 5}, "s/b": 1, "s/d": None, "k": 2})
    for node_id, delta in {"s/a": {}, "s/b": {"w": 1}, "s/c": {}, "s/d": {}}.items():
        flow.finish(run_id, node_id, **delta)
    given = dict(zip(inputs, found.values(), strict=True))
    assert flow.job(run_id, "t/e")["inputs"] == given
    assert [context for context in contexts if context != found] == []
    assert bool(contexts) == (resolver == "the app's")
    query = "SELECT queue_workflows_context_of(%s, %s) AS found"
    (row,) = factories.execute(query, run_id, [*found, "s/none"])
    assert row["found"] == found


OWN: list[tuple[Any, Json]] = [
    ({"v": 1}, {"v": 1}),
    (5, {}),
    ("text", {}),
    ([1, 2], {}),
    (None, {}),
]


@pytest.mark.parametrize(
    ("way", "own", "output"),
    [(way, *OWN[0]) for way in WAYS] + [(ahead, *each) for each in OWN[1:]],
)
def test_a_branch_and_a_loop_end_behind_an_empty_result(
    toy: flow.Flow, way: Way, own: Any, output: Json
) -> None:
    toy.define(
        {
            "id": "c",
            "kind": "branch",
            "pipeline": "p",
            "on": read("on"),
            "arms": {"1": "f", "2": "g"},
        },
        {
            "id": "l",
            "kind": "loop",
            "pipeline": "q",
            "until": read("on"),
            "at_most": 2,
            "result": "f",
            "start": {},
        },
        p=[{"id": "f", "node": "ok"}, {"id": "g", "node": "ok"}],
        q=[{"id": "f", "node": "ok"}],
    )
    run_id = ran(toy, way, context={"on": 1, "c/f": own, "l/f#1": own})
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    assert flow.states(run_id)["l/f#2"] == flow.states(run_id)["c/g"] == "skipped"
    for node_id in ("c", "l"):
        assert flow.job(run_id, node_id)["context_delta"] == output


@every_way
@pytest.mark.parametrize("context", [{}, {"l/f#1": {"v": 1}}])
def test_rounds_that_return_nothing_count(toy: flow.Flow, way: Way, context: Json) -> None:
    toy.define(
        {
            "id": "l",
            "kind": "loop",
            "pipeline": "body",
            "until": read("stop"),
            "at_most": 3,
            "result": "f",
            "must": False,
            "start": {},
        },
        body=[{"id": "f", "node": "ok"}],
    )
    run_id = ran(toy, way, context={"stop": False, **context})
    status, states = ended(run_id)
    assert status == "completed", flow.run(run_id)["error"]
    assert states == dict.fromkeys(["l/f#1", "l/f#2", "l/f#3", "l"], "completed")
    assert flow.job(run_id, "l")["inputs"] == {"rounds": 3}


@every_way
def test_a_node_of_a_round_that_its_condition_skips_gives_way_to_the_context(
    toy: flow.Flow, seen: list[Json], way: Callable[[flow.Flow, str], None]
) -> None:
    flow.body({"v": 1}, "gives")
    loop = {
        "id": "lo", "kind": "loop", "pipeline": "round", "start": {}, "at_most": 2,
        "until": read("lo.v", **{"$eq": 1}), "result": "body",
        "inputs": {"o": read("lo/x")},
    }  # fmt: skip
    skipped = {"id": "x", "node": "gives", "skip_if": True}
    body = {**taking("body", "o", depends_on=["x"]), "node": "gives"}
    toy.define(loop, round=[skipped, body])
    run_id = toy.submit(context={"lo/x#1": "from the context", "lo/x#2": "never"})
    for _ in range(5):
        way(toy, run_id)
    assert (flow.status(run_id), flow.run(run_id)["error"]) == ("completed", None)
    assert flow.job(run_id, "lo/body#1")["inputs"] == {"o": "from the context"}
    assert flow.states(run_id)["lo/x#2"] == flow.states(run_id)["lo/body#2"] == "skipped"
