"""Hostile runs: each fails with its reason, and delays no other run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from queue_workflows import db, declare, dispatcher, errors, run_store, runs, set_workflow_provider
from tests.support import factories, flow, rows_before_checks, tabled

DEEP = "[" * 1500 + "]" * 1500
DIGITS = "9" * 5000
BIRTHS = ("infinity", "-infinity", "294276-12-31 00:00Z", "4713-01-01 BC")


def set_column(conn: db.Connection, run_id: str, column: str, value: str) -> None:
    """Write a column of a run past its bounds, as an older database may hold it."""
    rows_before_checks.change(
        conn, "workflow_runs", run_id, **{column: rows_before_checks.quoted(value)}
    )


def definition(**deps: str) -> dict[str, Any]:
    """A definition as the engine freezes it."""
    return {
        "version": 1,
        "workflow": "w",
        "nodes": [
            {
                "id": node_id, "module": "ok", "queue": "cpu", "model": None,
                "deps": text.split(), "inputs": {}, "skip_if": None, "pipeline": "p", "step": None,
            }
            for node_id, text in deps.items()
        ],
    }  # fmt: skip


def test_a_birth_at_the_end_of_time_holds_up_no_start(toy: flow.Flow, conn: db.Connection) -> None:
    toy.dag(a="", b="a")
    bad_runs = [toy.submit(priority=1) for _ in BIRTHS]
    for bad_run, born in zip(bad_runs, BIRTHS, strict=True):
        set_column(conn, bad_run, "created_at", born)
    good_run = toy.submit()
    toy.go()
    assert [flow.status(each) for each in (*bad_runs, good_run)] == ["completed"] * 5


def test_a_context_that_is_no_object_fails_its_run_at_its_start(
    toy: flow.Flow, conn: db.Connection
) -> None:
    toy.dag(a="")
    contexts = ("[1]", '"x"', "1", "null")
    bad_runs = [toy.submit(priority=1) for _ in contexts]
    for bad_run, context in zip(bad_runs, contexts, strict=True):
        set_column(conn, bad_run, "context", context)
    good_run = toy.submit()
    toy.look()
    for found in map(flow.run, bad_runs):
        assert (found["status"], found["start_attempts"]) == ("failed", 0)
        assert "its inputs are a JSON" in found["error"] and "not an object" in found["error"]
    assert flow.status(good_run) == "running"


@pytest.mark.parametrize("value", [DEEP, DIGITS])
def test_a_context_that_cannot_be_loaded_fails_its_run_when_a_ref_reads_it(
    toy: flow.Flow, conn: db.Connection, value: str
) -> None:
    toy.define(
        flow.step("s", inputs={"x": {"$from": "big.x"}}),
        s=[{"id": "a", "node": "ok", "inputs": [{"name": "x", "from": "pipeline.x"}]}],
    )
    bad_run = toy.submit(priority=1)
    good_run = toy.submit(context={"big": {"x": 1}})
    set_column(conn, bad_run, "context", f'{{"big": {value}, "small": 1}}')
    toy.look()
    found = flow.run(bad_run)
    assert (found["status"], found["start_attempts"]) == ("failed", 0)
    assert "its inputs or outputs under 'big' cannot be read" in found["error"]
    assert flow.status(good_run) == "running"


@pytest.mark.parametrize(
    ("context", "reason"),
    [
        (f'{{"text": {DEEP}}}', "its inputs cannot be read: it is nested deeper than 200 levels"),
        (f'{{"text": {DIGITS}}}', "its inputs cannot be read: Exceeds the limit"),
        ("[1]", "its inputs are a JSON array, not an object"),
        ("null", "its inputs are a JSON null, not an object"),
    ],
)
def test_a_context_that_a_declared_workflow_cannot_read_fails_its_run_at_its_start(
    toy: flow.Flow, conn: db.Connection, context: str, reason: str
) -> None:
    @declare.node
    def shown(text: str) -> str:
        return text

    @declare.workflow
    def takes(text: str) -> None:
        shown(text)

    bad_run = run_store.insert_run(workflow_name="takes", context={"text": "x"})["id"]
    good_run = run_store.insert_run(workflow_name="takes", context={"text": "x"})["id"]
    set_column(conn, bad_run, "context", context)
    toy.look()
    found = flow.run(bad_run)
    assert (found["status"], found["start_attempts"]) == ("failed", 0)
    assert reason in found["error"]
    assert flow.status(good_run) == "running"


def test_a_context_that_turns_bad_fails_its_run_at_the_next_event(
    toy: flow.Flow, conn: db.Connection
) -> None:
    toy.define(
        flow.step("s", inputs={"x": {"$from": "big.x"}}),
        s=[
            {"id": "a", "node": "ok"},
            {
                "id": "b",
                "node": "ok",
                "depends_on": ["a"],
                "inputs": [{"name": "x", "from": "pipeline.x"}],
            },
        ],
    )
    run_id = toy.started(context={"big": {"x": 1}})
    set_column(conn, run_id, "context", "[1]")
    flow.complete(run_id, "s/a")
    toy.look()
    assert flow.status(run_id) == "failed"
    assert "its inputs are a JSON array" in flow.run(run_id)["error"]
    assert factories.one(conn, "SELECT attempts FROM workflow_dispatch_events") == 0


FORGED: dict[str, tuple[Any, str]] = {
    "text": ("x", "an object is needed"),
    "list": ([1], "an object is needed"),
    "null": (None, "an object is needed"),
    "no nodes": (definition(), "has no nodes"),
    "nodes of text": ({"version": 1, "nodes": "x"}, "must be a list"),
    "version": ({"version": 3, "nodes": []}, "version 3"),
    "cycle": (definition(a="b", b="a"), "a cycle of nodes: a -> b -> a"),
    "self": (definition(a="a"), "a cycle of nodes: a -> a"),
    "half cycle": (definition(s="", a="s b", b="a"), "a cycle of nodes"),
    "unknown dependency": (
        definition(a="zz"),
        "node 'a' depends on 'zz', which is not a node of it",
    ),
    "path": (definition(**{"../../x": ""}), "not a node id"),
    "duplicate": (
        {"version": 1, "nodes": [*definition(a="")["nodes"], *definition(a="")["nodes"]]},
        "two nodes have the id 'a'",
    ),
}


def changed(**fields: Any) -> dict[str, Any]:
    """A definition of one node, `a`, with these fields."""
    made = definition(a="")
    made["nodes"][0] |= fields
    return made


SHAPES = {
    "id": 5, "module": [], "queue": "moon", "model": "m", "deps": "x", "inputs": [1],
    "pipeline": {}, "step": "x", "policy": {"retries": "many"},
}  # fmt: skip
FORGED |= {f"bad {name}": (changed(**{name: value}), "node ") for name, value in SHAPES.items()}
FORGED["node of text"] = ({"version": 1, "nodes": ["x"]}, "node 1: an object is needed")
FORGED["escaping path"] = (changed(inputs={"x": {"$out": "../../etc"}}), "not a path below out_dir")
FORGED["marker"] = (changed(inputs={"x": {"$out": {}}}), "without '$value'")


@pytest.mark.parametrize("status", ["queued", "running"])
def test_forged_definitions_fail_their_runs_with_their_reasons(
    toy: flow.Flow, conn: db.Connection, status: str
) -> None:
    toy.dag(a="", b="a")
    good_run = toy.started()
    digest = flow.run(good_run)["definition_hash"]
    bad_runs = {
        name: factories.run(conn, mode="node", status=status, definition_hash=digest)
        for name in FORGED
    }
    for name, bad_run in bad_runs.items():
        conn.execute(
            "UPDATE workflow_runs SET definition = %s::jsonb WHERE id = %s",
            (json.dumps(FORGED[name][0]), bad_run),
        )
        if status == "running":
            # A worker has just completed its first node.
            factories.node(conn, bad_run, "a", status="completed")
            factories.insert(
                conn, "workflow_dispatch_events", run_id=bad_run, node_id="a", kind="completed"
            )
    toy.look()
    for name, bad_run in bad_runs.items():
        with tabled.case(name):
            found = flow.run(bad_run)
            assert (found["status"], found["start_attempts"]) == ("failed", 0)
            assert FORGED[name][1] in found["error"]
    toy.go()
    assert flow.status(good_run) == "completed"
    assert factories.one(conn, "SELECT max(attempts) FROM workflow_dispatch_events") == 0


@pytest.mark.parametrize("text", [DEEP, DIGITS, f'{{"version": 1, "nodes": [{DEEP}]}}'])
def test_a_definition_that_cannot_be_loaded_fails_its_run(
    toy: flow.Flow, conn: db.Connection, text: str
) -> None:
    toy.dag(a="")
    bad_run, good_run = toy.submit(priority=1), toy.submit()
    set_column(conn, bad_run, "definition", text)
    toy.look()
    assert "the run's stored definition cannot be read" in flow.run(bad_run)["error"]
    assert (flow.status(bad_run), flow.status(good_run)) == ("failed", "running")


def test_what_the_engine_freezes_passes_its_own_check(toy: flow.Flow) -> None:
    toy.define(
        flow.step("s", inputs={"x": {"$out": 1}}, skip_if={"$from": "gone"}),
        flow.ask("q", depends_on=["s"], timeout_s=5, default=[1]),
        s=[
            {"id": "a", "node": "ok", "retries": 2, "backoff": {"kind": "constant", "base_s": 1}},
            {
                "id": "b", "node": "ok", "depends_on": ["a"], "gpu": True, "model": "m",
                "inputs": [
                    {"name": "x", "from": "pipeline.x"},
                    {"name": "y", "from": "a.out.txt"},
                    {"name": "z", "from": "pipeline._siblings([a])"},
                    {"name": "l", "from": "pipeline._implicit({\"k\": [1, 2]})"},
                ],
            },
        ],
    )  # fmt: skip
    run_id = toy.started(out_dir="/tmp/x")
    flow.forget(run_id)  # So the stored definition is read and checked.
    assert flow.finish(run_id, "s/a") == 1
    assert list(flow.states(run_id)) == ["s/a", "s/b"], flow.run(run_id)["error"]
    nodes = flow.run(run_id)["definition"]["nodes"]
    assert [node["id"] for node in nodes] == ["s/a", "s/b", "q"]


def test_a_graph_is_known_by_its_content_not_by_the_hash_in_the_row(
    toy: flow.Flow, conn: db.Connection
) -> None:
    toy.dag(a="", b="a")
    first = toy.started()
    flow.finish(first, "s/a")
    digest = flow.run(first)["definition_hash"]
    forged = factories.run(
        conn, mode="node", status="queued", definition=definition(x=""), definition_hash=digest
    )
    toy.look()
    assert list(flow.jobs(forged)) == ["x"]


@pytest.mark.parametrize("text", [DEEP, '"x"', '{"version": 1, "nodes": [[]]}'])
def test_public_functions_raise_errors_of_the_library(
    toy: flow.Flow, conn: db.Connection, text: str
) -> None:
    calls: list[Callable[[str], object]] = [
        dispatcher.start_run,
        flow.dispatch,
        lambda run_id: dispatcher.on_node_completed(run_id, "a"),
        lambda run_id: dispatcher.on_node_awaiting_input(run_id, "a"),
        lambda run_id: dispatcher.resume_after_input(run_id, "a", 1),
        lambda run_id: runs.retry(run_id, from_node="a"),
        runs.cancel,
    ]
    for number, call in enumerate(calls):
        run_id = factories.run(conn, mode="node")
        factories.node(conn, run_id, "a", status="completed")
        set_column(conn, run_id, "definition", text)
        with tabled.case(number), contextlib.suppress(errors.QueueWorkflowsError):
            call(run_id)


def test_the_list_of_runs_reads_any_definition(toy: flow.Flow, conn: db.Connection) -> None:
    for text in (DEEP, '"x"', '{"nodes": 5}', '{"nodes": [1]}'):
        set_column(conn, factories.run(conn), "definition", text)
    assert sorted(str(row["nodes_total"]) for row in runs.list()) == [
        "1", "None", "None", "None",
    ]  # fmt: skip


def test_a_run_whose_row_cannot_be_written_delays_no_other(
    toy: flow.Flow, conn: db.Connection
) -> None:
    toy.dag(a="", b="a")
    stuck = [toy.submit(priority=1) for _ in range(60)]
    good_run = toy.submit()
    listed = ", ".join(f"'{each}'" for each in stuck)
    conn.execute(
        "CREATE FUNCTION app_guard() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " IF NEW.id = ANY (TG_ARGV) THEN RAISE EXCEPTION 'the app refuses this run'; END IF;"
        " RETURN NEW; END $$"
    )
    conn.execute(
        "CREATE TRIGGER app_guard BEFORE UPDATE ON workflow_runs FOR EACH ROW EXECUTE FUNCTION"
        f" app_guard({listed})".encode()
    )
    try:
        toy.look()
        toy.look()
        assert flow.status(good_run) == "running"
        assert {flow.status(each) for each in stuck} == {"queued"}
    finally:
        conn.execute("DROP FUNCTION app_guard() CASCADE")


@pytest.mark.parametrize("attempts", [32767, -32768])
def test_an_event_with_a_counter_at_its_end_holds_up_no_other(
    toy: flow.Flow, conn: db.Connection, attempts: int
) -> None:
    toy.dag(a="", b="a")
    bad_run, good_run = toy.started(), toy.started()

    def broken(run_id: str) -> Any:
        raise RuntimeError("no")

    conn.execute("UPDATE workflow_runs SET definition = NULL WHERE id = %s", (bad_run,))
    flow.forget(bad_run)
    for each in (bad_run, good_run):
        flow.complete(each, "s/a")
    rows_before_checks.change(
        conn, "workflow_dispatch_events", bad_run, key="run_id", attempts=str(attempts)
    )
    toy.workflows["w"] = None
    toy.provide()
    set_workflow_provider(broken, broken)
    toy.look()
    assert list(flow.states(good_run)) == ["s/a", "s/b"]
    want = {32767: "failed", -32768: "running"}
    assert flow.status(bad_run) == want[attempts]


@pytest.mark.parametrize("attempts", [2147483647, 1_000_000, -2147483648])
def test_a_count_of_starts_at_its_end_holds_up_no_other(
    toy: flow.Flow, conn: db.Connection, attempts: int
) -> None:
    def load(name: str) -> Any:
        if name == "broken":
            raise RuntimeError("no")
        return toy.workflows[name]

    toy.dag(a="")
    set_workflow_provider(load, toy.pipelines.__getitem__)
    bad_run, good_run = toy.submit(workflow_name="broken", priority=1), toy.submit()
    rows_before_checks.change(conn, "workflow_runs", bad_run, start_attempts=str(attempts))
    toy.look()
    assert flow.status(good_run) == "running"
    assert flow.status(bad_run) == ("queued" if attempts < 0 else "failed")
