"""Steps that run another workflow, and the output of a workflow: what is expanded and refused."""

from __future__ import annotations

from typing import Any

import pytest

from queue_workflows import errors
from tests.support import planning, tabled
from tests.support.planning import FakeRun, ids

NODES = {"nodes": [{"id": "n"}]}


def expanded(*steps: dict[str, Any], **more: Any) -> dict[str, Any]:
    return planning.expand({"name": "w", "steps": list(steps), **more}, lambda _: NODES)


def call(**more: Any) -> dict[str, Any]:
    return {"id": "c", "kind": "run", "workflow": "inner", **more}


def flow(step_id: str, *after: str) -> dict[str, Any]:
    return {"id": step_id, "kind": "pipeline", "pipeline": "p", "depends_on": list(after)}


def started(made: dict[str, Any], **context: Any) -> tuple[FakeRun, planning.Plan]:
    run = FakeRun(planning.read(made), **context)
    return run, run.start()


def test_a_call_waits_and_a_start_ends_with_the_id_of_its_run() -> None:
    made = expanded(call(inputs={"x": {"$from": "x"}}), call(id="s", wait=False), flow("z", "s"))
    assert made["version"] == 2
    _, planned = started(made, x=7)
    rows = {row.node.id: row for row in planned.rows}
    assert {key: row.status for key, row in rows.items()} == {
        "c": "awaiting_input",
        "s": "completed",
        "z/n": "queued",
    }
    assert rows["c"].inputs == {"x": 7}
    assert rows["c"].child is not None and rows["s"].child is not None
    assert rows["c"].child["workflow"] == "inner"
    assert rows["s"].result == {"result": rows["s"].child["id"]}
    text = planning.encode_row(rows["c"])
    assert rows["c"].child["id"] in text


def test_the_output_is_the_last_node_and_completes_the_run() -> None:
    made = expanded(flow("a"), flow("b"), output={"x": {"$from": "a/n.x"}, "y": 1})
    assert made["nodes"][-1]["deps"] == ["a/n", "b/n"]
    run, _ = started(made)
    run.finish("a/n", x=3)
    assert ids(run.after("a/n")) == []
    run.finish("b/n")
    planned = run.after("b/n")
    assert (ids(planned, "completed"), planned.complete) == (["__output__"], True)
    assert run.delta["__output__"] == {"x": 3, "y": 1}


def test_an_output_that_is_not_there_fails_the_run() -> None:
    run, _ = started(expanded(flow("a"), output={"x": {"$from": "a/n.x"}}))
    run.finish("a/n")
    failure = run.after("a/n").failure
    assert failure is not None
    assert "node '__output__': input 'x'" in failure[1]


def test_what_is_wrong_is_refused() -> None:
    cases: list[Any] = [
        ((call(workflow=None),), {}, "step 'c': 'workflow' is missing"),
        ((call(wait="no"),), {}, "step 'c': 'wait' must be true or false"),
        ((call(inputs=[]),), {}, "step 'c': 'inputs': an object is needed"),
        ((call(),), {"output": 7}, "'output': an object is needed"),
        ((flow("__output__"), call(id="__output__2")), {"output": {}}, ""),
        ((call(id="__output__"),), {"output": {}}, "no step can have the id '__output__'"),
        ((call(depends_on=["c"]),), {}, "depends on itself"),
    ]
    for steps, more, words in cases:
        with tabled.case(steps, more, words):
            if not words:
                expanded(*steps, **more)
                continue
            with pytest.raises(errors.InvalidWorkflow, match=words):
                expanded(*steps, **more)


@pytest.mark.parametrize("module", ["__run__w", "__start__w", "__output__", "__branch__"])
def test_no_node_of_a_pipeline_takes_the_place_of_the_engines(module: str) -> None:
    with pytest.raises(errors.InvalidWorkflow, match="is kept for the engine"):
        planning.expand(
            {"name": "w", "steps": [flow("s")]}, lambda _: {"nodes": [{"id": "n", "node": module}]}
        )


def test_pictures_name_the_workflow() -> None:
    made = expanded(call(), call(id="s", wait=False), output={})
    tree = planning.tree(made)
    assert "|- c  runs workflow inner" in tree
    assert "|- s  starts workflow inner" in tree
    assert "`- __output__  has the run's output" in tree
    assert 'n0[["c: inner"]]' in planning.chart(made)
