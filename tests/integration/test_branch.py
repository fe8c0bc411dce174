"""A branch runs the arm of a value; its one output is the arm's, and the other arms are skipped."""

from __future__ import annotations

from typing import Any, TypedDict

import pytest

from queue_workflows import branch, db, declare, jobs, node, pipeline, runs, workflow
from tests.support import flow

pytestmark = pytest.mark.usefixtures("invariants_hold")


class Cut(TypedDict):
    kind: str
    name: str


class Made(TypedDict):
    file: str


CALLS: list[str] = []


@node
def cut(kind: str) -> Cut:
    return {"kind": kind, "name": "clip"}


@node
def encode(item: Cut) -> Made:
    CALLS.append("encode")
    return {"file": item["name"] + ".mp4"}


@node
def resize(item: Cut, width: int = 10) -> Made:
    CALLS.append("resize")
    if width < 0:
        raise ValueError("no width")
    return {"file": f"{item['name']}.{width}.jpg"}


@node
def keep_cut(item: Cut) -> Made:
    CALLS.append("keep_cut")
    return {"file": item["name"]}


@node
def note_file(file: str) -> str:
    return f"made {file}"


@pipeline
def small(item: Cut) -> Made:
    first = resize(item, 1)
    return resize.options("again", after=[first])(item, 2)


@workflow
def publish(kind: str) -> None:
    item = cut(kind)
    done = branch(item["kind"], {"film": encode, "still": small}, other=keep_cut, id="done")
    note_file(done["file"])


@workflow
def strict(kind: str) -> None:
    item = cut(kind)
    branch(item["kind"], {"film": encode, "still": lambda: resize(item, -1)}, id="done")


@pytest.fixture(autouse=True)
def known(toy: flow.Flow) -> None:
    del toy
    CALLS.clear()
    declare.install(cut, encode, resize, keep_cut, note_file, publish, strict)


def ended(name: str, **context: Any) -> str:
    return runs.submit(name, inputs=context)["id"]


EVERY = {
    "film": ("encode", "clip.mp4", ["encode"]),
    "still": ("again", "clip.2.jpg", ["resize", "resize"]),
    "book": ("keep_cut", "clip", ["keep_cut"]),
}


@pytest.mark.parametrize("kind", EVERY)
def test_the_arm_of_the_value_runs_and_its_output_is_the_branchs(toy: flow.Flow, kind: str) -> None:
    end, file, calls = EVERY[kind]
    run_id = ended("publish", kind=kind)
    toy.go()
    rows = flow.jobs(run_id)
    assert (flow.status(run_id), CALLS) == ("completed", calls)
    assert rows["done"]["context_delta"] == {"file": file} == rows[f"done/{end}"]["context_delta"]
    assert rows["done"]["inputs"] == {"value": kind}
    assert rows["note_file/note_file"]["context_delta"] == {"result": f"made {file}"}
    ran = {"done/resize", "done/again"} if kind == "still" else {f"done/{end}"}
    arms = {"done/encode", "done/resize", "done/again", "done/keep_cut"}
    states = flow.states(run_id)
    assert {each: states[each] for each in arms} == {
        each: "completed" if each in ran else "skipped" for each in arms
    }
    with db.connect() as conn:
        sent = conn.execute(
            "SELECT kind, processed_at IS NOT NULL AS done FROM workflow_dispatch_events"
            " WHERE run_id = %s AND node_id = 'done'",
            [run_id],
        ).fetchall()
    assert sent == [{"kind": "completed", "done": True}]


def test_a_value_without_an_arm_fails_the_run_and_names_value_and_arms(toy: flow.Flow) -> None:
    run_id = ended("strict", kind="book")
    toy.go()
    assert (flow.status(run_id), CALLS) == ("failed", [])
    assert flow.run(run_id)["error"] == (
        "branch 'done': no arm for 'book'; its arms are film, still: add one, or 'other' for every"
        " other value"
    )


def test_why_names_the_branch_that_skipped_a_node(toy: flow.Flow) -> None:
    run_id = ended("publish", kind="film")
    toy.go()
    found = jobs.explain(flow.job(run_id, "done/keep_cut")["id"])
    assert found is not None
    assert found["detail"] == "it is skipped: branch done has chosen another arm"


def test_retry_runs_the_failed_arm_again_and_no_other(toy: flow.Flow) -> None:
    run_id = ended("strict", kind="still")
    toy.go()
    assert (flow.status(run_id), CALLS) == ("failed", ["resize"])
    runs.retry(run_id)
    toy.go()
    assert (flow.status(run_id), CALLS) == ("failed", ["resize", "resize"])
    assert flow.states(run_id)["done/encode"] == "skipped"


def test_a_context_that_chooses_another_arm_needs_a_retry_from_the_branch(
    toy: flow.Flow,
) -> None:
    def step(**more: Any) -> dict[str, Any]:
        return {"id": "b", "kind": "branch", "pipeline": "p", "on": {"$from": "kind"}, **more}

    toy.define(step(arms={"x": "one", "y": "two"}), p=flow.nodes(one="", two=""))
    run_id = toy.started(context={"kind": "x"})
    assert flow.states(run_id) == {"b/one": "queued", "b/two": "skipped"}
    flow.complete(run_id, "b/one", made=1)
    with db.connect() as conn:
        conn.execute('UPDATE workflow_runs SET context = \'{"kind": "y"}\'')
    toy.go()
    assert (flow.status(run_id), flow.run(run_id)["error"]) == (
        "failed",
        "branch 'b': 'b/one' has run, and 'y' chooses 'b/two' now: the value has changed since; "
        "retry from 'b' chooses again",
    )
    runs.retry(run_id, from_node="b")
    toy.go()
    assert flow.status(run_id) == "completed"
    assert flow.states(run_id) == {"b/one": "skipped", "b/two": "completed", "b": "completed"}


def test_a_branch_that_is_the_last_node_completes_the_run(toy: flow.Flow) -> None:
    run_id = ended("strict", kind="film")
    toy.go()
    assert (flow.status(run_id), flow.run(run_id)["progress_pct"]) == ("completed", 100)
