"""A map runs a body of nodes for each item of a list, and hands on the list of results."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

import queue_workflows
from queue_workflows import cli, dispatcher, errors, node_queue, runs
from tests.support import console, constants, flow, transitions

pytestmark = pytest.mark.usefixtures("invariants_hold")


def over(**more: Any) -> dict[str, Any]:
    """Return a map step over the files of `scan`, with one node `thumb`."""
    step = {
        "id": "thumbs",
        "kind": "map",
        "over": {"$from": "scan/scan.files"},
        "pipeline": "thumb",
        "inputs": {"photo": {"$from": "item"}},
        "depends_on": ["scan"],
    }
    return step | more


def define(toy: flow.Flow, files: Any, **more: Any) -> list[Any]:
    """Define scan → map of thumb → sheet, and return the list that `sheet` fills."""
    seen: list[Any] = []
    flow.body(lambda: {"files": files}, "scan")
    flow.body(thumb, "thumb")
    flow.body(lambda inputs: seen.append((inputs["thumbs"], inputs["failed"])), "sheet")
    photo = {"id": "thumb", "inputs": [{"name": "photo", "from": "pipeline.photo"}]}
    given = [{"name": name, "from": f"pipeline.{name}"} for name in ("thumbs", "failed")]
    toy.define(
        flow.step("scan"),
        over(**more),
        flow.step(
            "sheet",
            depends_on=["thumbs"],
            inputs={
                "thumbs": {"$from": "thumbs.results"},
                "failed": {"$from": "thumbs.failed"},
            },
        ),
        scan=[{"id": "scan"}],
        thumb=[photo],
        sheet=[{"id": "sheet", "inputs": given}],
    )
    return seen


def thumb(inputs: dict[str, Any]) -> dict[str, Any]:
    name = inputs["photo"]["name"] if isinstance(inputs["photo"], dict) else inputs["photo"]
    if "bad" in str(name):
        raise ValueError(f"cannot read {name}")
    return {"of": name}


def test_each_item_has_a_node_and_the_join_gets_the_results_in_order(toy: flow.Flow) -> None:
    seen = define(toy, [{"name": "b.png"}, {"name": "a.png"}], key="name")
    run_id = toy.submit()
    toy.go()
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    assert seen == [([{"of": "b.png"}, {"of": "a.png"}], [])]
    assert flow.states(run_id) == dict.fromkeys(
        ["scan/scan", "thumbs", "thumbs[b.png]/thumb", "thumbs[a.png]/thumb", "sheet/sheet"],
        "completed",
    )
    assert flow.job(run_id, "thumbs[a.png]/thumb")["inputs"] == {"photo": {"name": "a.png"}}
    (listed,) = runs.list()
    assert (listed["nodes"], listed["nodes_total"]) == ({"completed": 5}, 5)


def test_an_empty_list_runs_the_join_with_an_empty_list(toy: flow.Flow) -> None:
    seen = define(toy, [])
    run_id = toy.submit()
    toy.go()
    assert (flow.status(run_id), seen) == ("completed", [([], [])])


# --- failures


def test_a_failed_item_fails_the_run_and_is_named(toy: flow.Flow) -> None:
    seen = define(toy, ["a", "bad", "c"])
    run_id = toy.submit()
    toy.go()
    error = flow.run(run_id)["error"]
    assert flow.status(run_id) == "failed"
    assert error == (
        "node thumbs failed: 1 of 3 items failed, 0 may; the first: bad: "
        "ValueError: cannot read bad"
    )
    assert seen == []


def test_the_first_item_of_the_list_that_failed_is_named(toy: flow.Flow) -> None:
    define(toy, ["b", "a"])
    run_id = toy.started()
    flow.finish(run_id, "scan/scan", files=["b", "a"])
    for key in ("a", "b"):
        job = flow.job(run_id, f"thumbs[{key}]/thumb")
        assert node_queue.mark_failed(job["id"], error=f"no {key}") is not None
    flow.dispatch(run_id)
    error = flow.run(run_id)["error"]
    assert error == "node thumbs failed: 2 of 2 items failed, 0 may; the first: b: no b"


@pytest.mark.parametrize("may_fail", [1, 0.34, 1.0])
def test_items_may_fail_and_the_join_is_told_which(toy: flow.Flow, may_fail: Any) -> None:
    seen = define(toy, ["a", "bad", "c"], may_fail=may_fail)
    run_id = toy.submit()
    toy.go()
    assert flow.status(run_id) == "completed"
    [(thumbs, failed)] = seen
    assert thumbs == [{"of": "a"}, {"of": "c"}]
    assert failed == [{"key": "bad", "error": "ValueError: cannot read bad"}]


@pytest.mark.parametrize(
    ("files", "more", "reason"),
    [
        ("a.png", {}, "map 'thumbs': a list is needed, not a text"),
        (None, {}, "map 'thumbs': a list is needed, not null"),
        (["a", "b", "a"], {}, "map 'thumbs': items 1 and 3 have the same key 'a'"),
        (["a\nb"], {}, "map 'thumbs': item 1: 'a\\nb' is no key: 1 to 100 printable characters"),
        (["a/b"], {}, "item 1: 'a/b' is no key"),
        (["x" * 101], {}, "is no key"),
        ([""], {}, "item 1: '' is no key"),
        ([{"name": "a"}], {}, "map 'thumbs': item 1 is an object: name the field"),
        ([{"of": "a"}], {"key": "name"}, "item 1 has no field 'name', which is the map's key"),
        ([1.5], {}, "item 1: its key is a number, not text or an integer"),
        ([True], {}, "item 1: its key is a boolean"),
        ([1, "1"], {}, "items 1 and 2 have the same key '1'"),
        (
            list(range(100_001)),
            {},
            "map 'thumbs': with its 100001 items the run has 100004 nodes; at most 20000",
        ),
    ],
)
def test_a_bad_list_fails_the_run_with_the_reason(
    toy: flow.Flow, files: Any, more: dict[str, Any], reason: str
) -> None:
    define(toy, files, **more)
    run_id = toy.submit()
    toy.go()
    assert flow.status(run_id) == "failed"
    assert reason in flow.run(run_id)["error"]


# --- the window


@pytest.mark.parametrize("at_once", [1, 3])
def test_at_once_bounds_the_open_items(toy: flow.Flow, at_once: int) -> None:
    define(toy, list(range(7)), at_once=at_once)
    run_id = toy.started()
    flow.finish(run_id, "scan/scan", files=list(range(7)))
    for number in range(7):
        queued = [
            node_id
            for node_id, state in flow.states(run_id).items()
            if node_id.startswith("thumbs[") and state == "queued"
        ]
        expected = range(number, min(7, number + at_once))
        assert queued == [f"thumbs[{index}]/thumb" for index in expected]
        flow.finish(run_id, f"thumbs[{number}]/thumb")
    assert flow.states(run_id)["sheet/sheet"] == "queued"


def test_without_at_once_items_follow_in_halves_of_the_window(
    toy: flow.Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants.put(monkeypatch, "dispatch.expansion.WINDOW", 4)
    define(toy, list(range(10)))
    run_id = toy.started()
    flow.finish(run_id, "scan/scan", files=list(range(10)))
    counts: list[int] = []
    for number in range(10):
        counts.append(sum(state == "queued" for state in flow.states(run_id).values()) - 1)
        flow.finish(run_id, f"thumbs[{number}]/thumb")
    assert counts == [4, 3, 4, 3, 4, 3, 4, 3, 2, 1]
    assert flow.states(run_id)["sheet/sheet"] == "queued"


# --- cancel, retry, resume


def test_retry_runs_the_failed_items_and_the_join_alone(toy: flow.Flow) -> None:
    ran: list[str] = []
    broken = [True]

    def body(inputs: dict[str, Any]) -> dict[str, Any]:
        ran.append(inputs["photo"])
        if broken and inputs["photo"] == "b":
            raise ValueError("no")
        return {"of": inputs["photo"]}

    seen = define(toy, ["a", "b", "c"])
    flow.body(body, "thumb")
    run_id = toy.submit()
    toy.go()
    assert flow.status(run_id) == "failed"
    broken.clear()
    before = list(ran)
    queue_workflows.runs.retry(run_id)
    toy.go()
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    assert set(ran[len(before) :]) == {"b", "c"} - (set(before) - {"b"})
    assert seen == [([{"of": "a"}, {"of": "b"}, {"of": "c"}], [])]


def test_retry_from_an_item_repeats_its_chain_and_the_join(toy: flow.Flow) -> None:
    ran: list[str] = []

    def body(inputs: dict[str, Any]) -> dict[str, Any]:
        ran.append(inputs["photo"])
        return {"of": inputs["photo"], "time": len(ran)}

    seen = define(toy, ["a", "b", "c"], at_once=1)
    flow.body(body, "thumb")
    run_id = toy.submit()
    toy.go()
    queue_workflows.runs.retry(run_id, from_node="thumbs[b]")
    toy.go()
    assert flow.status(run_id) == "completed"
    assert ran == ["a", "b", "c", "b"]
    assert [[thumb["time"] for thumb in thumbs] for thumbs, _ in seen] == [[1, 2, 3], [1, 4, 3]]
    with pytest.raises(queue_workflows.errors.UnknownJob, match="has no item 'nope'"):
        queue_workflows.runs.retry(run_id, from_node="thumbs[nope]")
    with pytest.raises(queue_workflows.errors.UnknownJob, match="no node"):
        queue_workflows.runs.retry(run_id, from_node="thumbs[a]/nope")


def test_the_node_or_item_that_was_perhaps_meant_is_named(toy: flow.Flow) -> None:
    define(toy, ["clip-7", "film-3", "song-1"])
    flow.body(lambda inputs: {"of": inputs["photo"]}, "thumb")
    run_id = toy.submit()
    toy.go()
    for node_id, meant in [
        ("scan/scn", "scan/scan"),
        ("thumbs[clp-7]", "thumbs[clip-7]"),
        ("thums[clip-7]", "thumbs[clip-7]"),
        ("thumbs[flim-3]/thumb", "thumbs[film-3]/thumb"),
        ("thumbs[film-3]/thmb", "thumbs[film-3]/thumb"),
    ]:
        words = f"did you mean '{meant}'?"
        with pytest.raises(queue_workflows.errors.UnknownJob) as refused:
            queue_workflows.runs.retry(run_id, from_node=node_id)
        key = meant.partition("[")[2].partition("]")[0]
        assert words in str(refused.value) or f"did you mean '{key}'?" in str(refused.value)
        with pytest.raises(queue_workflows.errors.UnknownJob) as refused:
            queue_workflows.streams.job_of_node(run_id, node_id)
        assert words in str(refused.value), node_id
        assert words in console.refusal("show", run_id, "--node", node_id)
        assert words in console.command("answer", run_id, node_id, "1").err
    assert "did you mean 'clip-7'?" in console.refusal("show", run_id, "--item", "clpi-7")
    far = console.refusal("show", run_id, "--item", "other")
    assert far.endswith(f"run {run_id} has no --item other\n")


@pytest.mark.parametrize("start", ["scan/scan", "thumbs"])
def test_retry_from_the_source_seals_a_new_list(toy: flow.Flow, start: str) -> None:
    files = ["a", "b"]
    seen = define(toy, files)
    run_id = toy.submit()
    toy.go()
    files[:] = ["b", "c"]
    queue_workflows.runs.retry(run_id, from_node=start)
    toy.go()
    assert flow.status(run_id) == "completed"
    names = [[thumb["of"] for thumb in thumbs] for thumbs, _ in seen]
    assert names == [["a", "b"], ["b", "c"] if start == "scan/scan" else ["a", "b"]]
    assert sum(node_id.startswith("thumbs[") for node_id in flow.states(run_id)) == 2


def test_a_retry_counts_the_nodes_of_a_map_once(
    toy: flow.Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The graph has 3 nodes, and the items as many.
    constants.put(monkeypatch, "dag.graph.MAX_NODES_PER_RUN", 8)
    broken = [True]

    def body(inputs: dict[str, Any]) -> dict[str, Any]:
        if broken and inputs["photo"] == "b":
            raise ValueError("no")
        return {"of": inputs["photo"]}

    define(toy, ["a", "b", "c"])
    flow.body(body, "thumb")
    run_id = toy.submit()
    toy.go()
    assert flow.status(run_id) == "failed"
    broken.clear()
    runs.retry(run_id)
    toy.go()
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]


def test_retry_runs_an_item_again_whose_failure_was_not_dispatched_yet(toy: flow.Flow) -> None:
    seen = define(toy, [1, 2], at_once=1, may_fail=1)
    run_id = toy.started()
    flow.finish(run_id, "scan/scan", files=[1, 2])
    flow.fail(run_id, "thumbs[1]/thumb", "no")
    node_queue.mark_failed(flow.job(run_id, "thumbs[2]/thumb")["id"], error="no")
    runs.cancel(run_id)
    runs.retry(run_id)
    dispatcher.start_run(run_id)
    toy.go()
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    assert seen == [([{"of": 1}, {"of": 2}], [])]


def test_a_retry_from_the_source_waits_for_an_item_that_still_runs(
    toy: flow.Flow, conn: Any
) -> None:
    define(toy, [1, 2])
    run_id = toy.started()
    flow.finish(run_id, "scan/scan", files=[1, 2])
    running = transitions.claim_node(conn)
    assert running["node_id"] == "thumbs[1]/thumb"
    runs.cancel(run_id)
    with pytest.raises(errors.InvalidConfig, match=r"'thumbs\[1\]/thumb' .* still runs"):
        runs.retry(run_id, from_node="scan/scan")
    transitions.hand_back(conn, running, reason="cancelled")
    runs.retry(run_id, from_node="scan/scan")
    toy.go()
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]


def test_cancel_ends_the_open_items(toy: flow.Flow) -> None:
    define(toy, [1, 2, 3], at_once=2)
    run_id = toy.started()
    flow.finish(run_id, "scan/scan", files=[1, 2, 3])
    queue_workflows.cancel_run(run_id)
    assert flow.states(run_id) == {
        "scan/scan": "completed",
        "thumbs": "cancelled",
        "thumbs[1]/thumb": "cancelled",
        "thumbs[2]/thumb": "cancelled",
    }
    queue_workflows.runs.retry(run_id)
    toy.go()
    assert flow.status(run_id) == "completed"


def test_a_resumed_run_counts_what_ended_while_it_waited(toy: flow.Flow) -> None:
    seen = define(toy, [1, 2, 3], at_once=2)
    run_id = toy.started()
    flow.finish(run_id, "scan/scan", files=[1, 2, 3])
    runs.requeue_running()
    flow.finish(run_id, "thumbs[1]/thumb", of=1)
    assert flow.status(run_id) == "queued"
    toy.go()
    assert flow.status(run_id) == "completed"
    assert [thumb["of"] for thumb in seen[0][0]] == [1, 2, 3]


# --- bodies of several nodes, and maps in maps


def test_the_nodes_of_an_item_follow_each_other(toy: flow.Flow) -> None:
    clips = [{"id": "x.1"}, {"id": "y"}]
    flow.body(lambda: {"clips": clips}, "scan")
    flow.body(lambda inputs: {"path": f"cut-{inputs['clip']}"}, "cut")
    flow.body(lambda inputs: {"path": f"{inputs['path']}-{inputs['size']}"}, "encode")
    step = {
        "id": "films",
        "kind": "map",
        "over": {"$from": "scan/scan.clips"},
        "key": "id",
        "at_once": 1,
        "depends_on": ["scan"],
        "pipeline": "film",
        "inputs": {
            "clip": {"$from": "item.id"},
            "path": {"$from": "cut.path"},
            "size": {"$from": "size"},
        },
        "result": {"$from": "encode.path"},
    }
    given = {"name": "clip", "from": "pipeline.clip"}
    more = [{"name": name, "from": f"pipeline.{name}"} for name in ("path", "size")]
    toy.define(
        flow.step("scan"),
        step,
        scan=[{"id": "scan"}],
        film=[
            {"id": "cut", "inputs": [given]},
            {"id": "encode", "inputs": more, "depends_on": ["cut"]},
        ],
    )
    run_id = toy.submit(context={"size": 4})
    toy.go()
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    assert list(flow.states(run_id)) == [
        "scan/scan",
        "films",
        "films[x.1]/cut",
        "films[x.1]/encode",
        "films[y]/cut",
        "films[y]/encode",
    ]
    assert flow.job(run_id, "films")["context_delta"] == {
        "results": ["cut-x.1-4", "cut-y-4"],
        "keys": ["x.1", "y"],
        "failed": [],
    }
    queue_workflows.runs.retry(run_id, from_node="films[y]/encode")
    toy.go()
    jobs = flow.jobs(run_id)
    assert flow.status(run_id) == "completed"
    assert {node: jobs[node]["claim_no"] for node in jobs if "[" in node} == {
        "films[x.1]/cut": 1,
        "films[x.1]/encode": 1,
        "films[y]/cut": 1,
        "films[y]/encode": 2,
    }


def nested(toy: flow.Flow, **more: Any) -> list[Any]:
    """Define a map over films with a map over the frames of each, and return what `end` gets."""
    seen: list[Any] = []
    films = [{"id": "f", "frames": [1, 2]}, {"id": "g", "frames": []}, {"id": "h", "frames": [7]}]
    flow.body(lambda: {"films": films}, "scan")
    flow.body(lambda inputs: {"at": f"{inputs['film']}{inputs['frame']}"}, "draw")
    flow.body(lambda inputs: {"sum": inputs["drawn"]}, "join")
    flow.body(lambda inputs: seen.append(inputs["all"]), "end")
    inner = {
        "id": "frames",
        "kind": "map",
        "over": {"$from": "film.frames"},
        "pipeline": "draw",
        "inputs": {"film": {"$from": "film.id"}, "frame": {"$from": "item"}},
        "result": {"$from": "draw.at"},
    }
    outer = {
        "id": "films",
        "kind": "map",
        "over": {"$from": "scan/scan.films"},
        "key": "id",
        "as": "film",
        "depends_on": ["scan"],
        "steps": [
            inner | more,
            flow.step("join", depends_on=["frames"], inputs={"drawn": {"$from": "frames.results"}}),
        ],
        "result": {"$from": "join/join.sum"},
    }
    end = flow.step("end", depends_on=["films"], inputs={"all": {"$from": "films.results"}})

    def takes(*names: str) -> list[dict[str, str]]:
        return [{"name": name, "from": f"pipeline.{name}"} for name in names]

    toy.define(
        flow.step("scan"),
        outer,
        end,
        scan=[{"id": "scan"}],
        draw=[{"id": "draw", "inputs": takes("film", "frame")}],
        join=[{"id": "join", "inputs": takes("drawn")}],
        end=[{"id": "end", "inputs": takes("all")}],
    )
    return seen


def test_maps_nest(toy: flow.Flow) -> None:
    seen = nested(toy)
    run_id = toy.submit()
    toy.go()
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    assert seen == [[["f1", "f2"], [], ["h7"]]]
    assert "films[f]/frames[2]/draw" in flow.states(run_id)
    queue_workflows.runs.retry(run_id, from_node="films[f]/frames[2]")
    toy.go()
    jobs = flow.jobs(run_id)
    assert flow.status(run_id) == "completed"
    again = {node for node, job in jobs.items() if job["claim_no"] == 2}
    assert again == {"films[f]/frames[2]/draw", "films[f]/join/join", "end/end"}


def test_the_items_of_inner_maps_count_for_the_limit_of_nodes_once(
    toy: flow.Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    nested(toy)
    # The graph has 3 nodes, the items of the outer map 6, and those of the inner maps 3.
    constants.put(monkeypatch, "dag.graph.MAX_NODES_PER_RUN", 11)
    run_id = toy.submit()
    toy.go()
    assert flow.status(run_id) == "failed"
    assert "with its 1 items the run has 12 nodes; at most 11" in flow.run(run_id)["error"]
    constants.put(monkeypatch, "dag.graph.MAX_NODES_PER_RUN", 12)
    run_id = toy.submit()
    toy.go()
    for _ in range(2):
        assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
        runs.retry(run_id, from_node="films[f]")
        toy.go()
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]


def test_a_failed_item_of_an_inner_map_fails_the_item_around_it(toy: flow.Flow) -> None:
    seen = nested(toy)

    def draw(inputs: dict[str, Any]) -> dict[str, Any]:
        if inputs["frame"] == 2:
            raise ValueError("dark")
        return {"at": inputs["frame"]}

    flow.body(draw, "draw")
    toy.workflows["w"]["steps"][1]["may_fail"] = 1
    run_id = toy.submit()
    toy.go()
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    assert seen == [[[], [7]]]
    [failed] = flow.job(run_id, "films")["context_delta"]["failed"]
    assert failed["key"] == "f"
    assert "films[f]/frames failed: 1 of 2 items failed, 0 may; the first: 2" in failed["error"]


def test_a_map_in_an_item_fails_once_none_of_its_items_is_open(toy: flow.Flow) -> None:
    inner = {"id": "frames", "kind": "map", "over": {"$from": "film.of"}, "pipeline": "draw"}
    outer = {
        "id": "films",
        "kind": "map",
        "over": {"$from": "given"},
        "as": "film",
        "key": "id",
        "steps": [inner],
    }
    toy.define(outer, draw=flow.nodes(draw=""))
    run_id = toy.started(context={"given": [{"id": 1, "of": ["x", "y"]}]})
    flow.fail(run_id, "films[1]/frames[x]/draw")
    assert flow.states(run_id)["films[1]/frames"] == "queued"
    assert flow.status(run_id) == "running"
    flow.finish(run_id, "films[1]/frames[y]/draw")
    assert flow.states(run_id)["films[1]/frames"] == "failed"
    assert flow.status(run_id) == "failed"


# --- what commands show


def test_show_collapses_a_map_and_opens_an_item(
    toy: flow.Flow, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [*(f"f{number}" for number in range(70)), "bad"]
    define(toy, files, may_fail=1)
    run_id = toy.submit()
    toy.go()
    capsys.readouterr()
    assert cli.main(["show", run_id]) == 0
    text = capsys.readouterr().out
    assert "completed, 73/74 nodes" in text
    assert "items of thumbs: 70/71 done, 1 failed\n  bad: ValueError: cannot read bad\n" in text
    assert "thumbs[bad]/thumb: failed" in text
    assert "thumbs[f1]/thumb" not in text
    assert "and 70 nodes more: --node NODE, --item KEY, --full or --json" in text
    assert cli.main(["show", run_id, "--item", "f1"]) == 0
    text = capsys.readouterr().out
    assert "thumbs[f1]/thumb: completed" in text
    assert "thumbs[f2]/thumb" not in text
    assert cli.main(["show", run_id, "--item", "nope"]) == 2


@pytest.mark.parametrize(
    ("bad", "line"),
    [
        # scan, draw, frames, join, films, end
        (None, "longest chain: 6 nodes, 5.0 s (scan/scan ... end/end)"),
        # scan, draw, films, end; no other node of the item has completed
        (2, "longest chain: 4 nodes, 5.0 s (scan/scan ... end/end)"),
    ],
)
def test_the_longest_chain_goes_through_the_items_of_inner_maps(
    toy: flow.Flow,
    db: ModuleType,
    capsys: pytest.CaptureFixture[str],
    bad: int | None,
    line: str,
) -> None:
    nested(toy)

    def draw(inputs: dict[str, Any]) -> dict[str, Any]:
        if inputs["frame"] == bad:
            raise ValueError("dark")
        return {"at": inputs["frame"]}

    flow.body(draw, "draw")
    run_id = toy.submit()
    toy.go()
    with db.connect() as conn:
        conn.execute(
            "UPDATE workflow_node_jobs SET seconds ="
            " CASE node_id WHEN 'films[f]/frames[1]/draw' THEN 5 WHEN 'films[h]/join/join' THEN 4"
            " ELSE 0 END"
        )
    capsys.readouterr()
    assert cli.main(["show", run_id, "--follow"]) == (1 if bad else 0)
    assert line in capsys.readouterr().out.splitlines()


def test_why_says_which_items_a_map_waits_for(toy: flow.Flow) -> None:
    define(toy, [1, 2, 3], at_once=2)
    run_id = toy.started()
    flow.finish(run_id, "scan/scan", files=[1, 2, 3])
    flow.finish(run_id, "thumbs[1]/thumb")
    found = queue_workflows.runs.explain(run_id)
    assert found is not None
    details = {node["name"]: node["detail"] for node in found["nodes"]}
    assert details["thumbs"] == "it waits for its items: 1 of 3 done, 2 open"
    assert details["sheet/sheet"] == "it waits for thumbs (queued)"
