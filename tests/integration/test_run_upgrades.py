"""A run under way moves to today's code, or stays as it is and names the nodes that differ."""

from __future__ import annotations

from typing import Any

import pytest

from queue_workflows import config, db, dispatcher, errors, runs
from queue_workflows.declare import branch, loop, node, pipeline, workflow
from queue_workflows.types import Row
from tests.support import console, factories, flow, sweeps, transitions
from tests.support.worker_reports import report


def declare(versions: dict[str, int | None], *, more: bool = False) -> None:
    """Declare a workflow of three nodes in a row with these versions; `more`: a fourth one."""
    config.reset_for_tests()

    @node(version=versions.get("a"))
    def a(given: int) -> dict[str, Any]:
        return {"made": given}

    @node(version=versions.get("b"))
    def b(n: int) -> dict[str, Any]:
        return {"made": n}

    @node(version=versions.get("c"))
    def c(n: int) -> dict[str, Any]:
        return {"made": n}

    @workflow
    def chain(given: int) -> None:
        last = c(b(a(given)["made"])["made"])
        if more:
            c.options("again")(last["made"])


def who(*versions: str) -> transitions.Claimant:
    return transitions.who("cpu", versions=[*versions] or None)


def started(versions: dict[str, int | None]) -> str:
    declare(versions)
    run_id = runs.submit("chain", inputs={"given": 1})["id"]
    assert dispatcher.start_run(run_id) == 1
    return run_id


def jobs(conn: db.Connection, run_id: str) -> dict[str, tuple[str, str | None]]:
    return {
        row["node_id"]: (row["status"], row["required_version"])
        for row in conn.execute(
            "SELECT node_id, status, required_version FROM workflow_node_jobs WHERE run_id = %s",
            (run_id,),
        ).fetchall()
    }


def test_a_dry_run_names_the_nodes_that_no_live_worker_has(conn: db.Connection) -> None:
    def unknown(*live: transitions.Claimant, more: bool = True) -> list[str]:
        declare({"a": 1, "b": 1}, more=False)
        for each in live:
            report(conn, each)
        declare({"a": 2, "b": 1, "c": None}, more=more)
        return runs.upgrade(run_id, dry_run=True)["unknown"]

    run_id = started({"a": 1, "b": 1})
    assert unknown() == ["again/c", "a/a"]
    assert unknown(who("a@1", "b@1")) == ["a/a"]
    assert "no live worker knows these nodes" in console.printed("upgrade", run_id, "--dry-run")
    assert unknown(transitions.who("cpu", "w2", versions=["a@2"])) == []


def test_a_run_moves_with_its_queued_node_to_the_new_version(conn: db.Connection) -> None:
    run_id = started({"a": 1, "b": 1})
    assert jobs(conn, run_id) == {"a/a": ("queued", "a@1")}
    declare({"a": 2, "b": 1, "c": 5}, more=True)
    found = runs.upgrade(run_id, dry_run=True)
    assert (found["outcome"], found["added"], found["blocked"]) == ("would move", ["again/c"], [])
    assert {each["id"]: each["version_after"] for each in found["changed"]} == {"a/a": 2, "c/c": 5}
    assert found["edges_added"] == [["c/c", "again/c"]]
    assert jobs(conn, run_id) == {"a/a": ("queued", "a@1")}
    assert runs.upgrade(run_id, by="ann")["outcome"] == "moved"
    assert jobs(conn, run_id) == {"a/a": ("queued", "a@2")}
    run = runs.get(run_id)
    assert run is not None
    assert (run["revision"], run["status"], len(run["upgrades"])) == (1, "queued", 1)
    assert (run["upgrades"][0]["actor"], run["upgrades"][0]["nodes"]) == ("ann", 3)
    assert dispatcher.start_run(run_id) == 0
    assert runs.upgrade(run_id)["outcome"] == "same"
    assert transitions.claim(conn, who("a@1")) == []
    job = transitions.claim_node(conn, who("a@2"))
    transitions.complete_node(conn, job, made=1)
    flow.dispatch_all()
    assert jobs(conn, run_id)["b/b"] == ("queued", "b@1")


def test_a_worker_that_is_dead_or_of_another_queue_knows_no_node(conn: db.Connection) -> None:
    def unknown() -> list[str]:
        return runs.upgrade(run_id, dry_run=True)["unknown"]

    run_id = started({"a": 1})
    declare({"a": 2})
    report(conn, transitions.who("gpu", "w1", versions=["a@2"]))
    assert unknown() == ["a/a"]
    report(conn, transitions.who("cpu", "w2", versions=["a@2"]))
    assert unknown() == []
    conn.execute("UPDATE workers SET state = 'dead' WHERE worker_id = 'w2'")
    assert unknown() == ["a/a"]


def test_a_node_that_failed_moves_once_its_run_is_retried(conn: db.Connection) -> None:
    run_id = started({"a": 1})
    transitions.fail(conn, transitions.claim_node(conn, who("a@1")), retry=False)
    flow.dispatch_all()
    assert flow.status(run_id) == "failed"
    runs.retry(run_id)
    declare({"a": 2})
    assert runs.upgrade(run_id, dry_run=True)["blocked"] == []
    assert runs.upgrade(run_id)["outcome"] == "moved"
    dispatcher.start_run(run_id)
    assert jobs(conn, run_id) == {"a/a": ("queued", "a@2")}


@pytest.mark.parametrize("ended", [False, True])
def test_a_node_that_ended_or_runs_keeps_the_run(conn: db.Connection, ended: bool) -> None:
    run_id = started({"a": 1})
    job = transitions.claim_node(conn, who("a@1"))
    if ended:
        transitions.complete_node(conn, job, made=1)
    declare({"a": 2})
    before = runs.get(run_id)
    assert runs.upgrade(run_id, dry_run=True)["blocked"] == ["a/a"]
    with pytest.raises(errors.UpgradeRefused, match="a/a") as caught:
        runs.upgrade(run_id)
    assert caught.value.nodes == ["a/a"]
    assert runs.get(run_id) == before
    declare({"a": 1, "b": 7})
    assert runs.upgrade(run_id)["outcome"] == "moved"


@pytest.mark.parametrize("batch", [False, True])
def test_a_worker_that_planned_by_the_old_graph_is_fenced(conn: db.Connection, batch: bool) -> None:
    run_id = started({"a": 1, "b": 1})
    job = transitions.claim_node(conn, who("a@1"))
    assert job["run"]["revision"] == 0
    ahead = transitions.plan("b/b")  # of revision 0
    declare({"a": 1, "b": 2})
    assert runs.upgrade(run_id)["outcome"] == "moved"
    dispatcher.start_run(run_id)
    done: list[tuple[Row, Any]] = [(job, ahead)]
    if batch:
        done.insert(0, (transitions.claimed(conn, "node"), None))
    transitions.complete_with_plans(conn, done, who())
    assert "b/b" not in jobs(conn, run_id)
    flow.dispatch_all()
    assert jobs(conn, run_id)["b/b"] == ("queued", "b@2")


def declare_last(name: str) -> None:
    """Declare a workflow of two nodes, the second one of this id."""
    config.reset_for_tests()

    @node
    def a() -> dict[str, Any]:
        return {"made": 1}

    @node
    def b(n: int) -> dict[str, Any]:
        return {"made": n}

    @workflow
    def pair() -> None:
        b.options(name)(a()["made"])


def started_with_last(conn: db.Connection) -> str:
    """Return a run of two nodes whose first is completed and whose second, `x/b`, is queued."""
    declare_last("x")
    run_id = runs.submit("pair")["id"]
    dispatcher.start_run(run_id)
    transitions.complete_node(conn, transitions.claim_node(conn, who()), made=1)
    flow.dispatch_all()
    return run_id


def test_the_history_does_not_call_a_replaced_node_cancelled(conn: db.Connection) -> None:
    run_id = started_with_last(conn)
    declare_last("y")
    assert runs.upgrade(run_id)["outcome"] == "moved"
    dispatcher.start_run(run_id)
    assert {*jobs(conn, run_id)} == {"a/a", "y/b"}
    cancelled = "SELECT node_id FROM workflow_node_events WHERE event_type = 'cancelled'"
    assert factories.column(conn, cancelled) == []


@pytest.mark.parametrize("by_sql", [False, True])
def test_a_node_that_an_upgrade_removed_ends_no_run(conn: db.Connection, by_sql: bool) -> None:
    run_id = started_with_last(conn)
    if by_sql:
        conn.execute("DELETE FROM workflow_node_jobs WHERE node_id = 'x/b'")
    declare_last("y")
    assert runs.upgrade(run_id)["outcome"] == "moved"
    dispatcher.start_run(run_id)
    conn.execute("UPDATE workflow_node_jobs SET status = 'completed' WHERE node_id = 'y/b'")
    sweeps.end_stalled(conn)
    assert (flow.status(run_id), flow.run(run_id)["error"]) == ("completed", None)


def test_a_removed_node_that_was_to_run_again_leaves_no_job(conn: db.Connection) -> None:
    declare({}, more=True)
    run_id = runs.submit("chain", inputs={"given": 1})["id"]

    def finish(*node_ids: str) -> None:
        dispatcher.start_run(run_id)
        for node_id in node_ids:
            flow.finish(run_id, node_id, made=1)
        assert (flow.status(run_id), [*flow.states(run_id)]) == ("completed", [*node_ids])

    finish("a/a", "b/b", "c/c", "again/c")
    runs.retry(run_id, from_node="a/a")
    declare({})
    assert runs.upgrade(run_id)["outcome"] == "moved"
    finish("a/a", "b/b", "c/c")


def test_a_run_that_cannot_move_is_refused(conn: db.Connection) -> None:
    with pytest.raises(errors.UnknownJob, match="no run"):
        runs.upgrade("nowhere")
    declare({})
    fresh = runs.submit("chain", inputs={"given": 1})["id"]
    with pytest.raises(errors.InvalidConfig, match="has no frozen graph yet"):
        runs.upgrade(fresh)
    run_id = started({"a": 1})
    config.get_config().workflow_map.pop("chain")
    with pytest.raises((errors.UnknownWorkflow, errors.InvalidConfig)):
        runs.upgrade(run_id)
    runs.cancel(run_id)
    with pytest.raises(errors.InvalidConfig, match="is cancelled"):
        runs.upgrade(run_id)


def declare_map(version: int, *, at_once: int = 2) -> None:
    config.reset_for_tests()

    @node(version=version)
    def cut(item: str) -> dict[str, Any]:
        return {"item": item}

    @workflow
    def cuts(clips: list[str]) -> None:
        cut.map(clips, at_once=at_once)


def test_items_that_have_not_started_move_with_an_open_map(conn: db.Connection) -> None:
    declare_map(1)
    run_id = runs.submit("cuts", inputs={"clips": ["x", "y", "z"]})["id"]
    dispatcher.start_run(run_id)
    assert [pair for name, pair in jobs(conn, run_id).items() if "[" in name] == [
        ("queued", "cut@1")
    ] * 2
    declare_map(2)
    assert runs.upgrade(run_id)["outcome"] == "moved"
    dispatcher.start_run(run_id)
    job = transitions.claim_node(conn, who("cut@2"))
    transitions.complete_node(conn, job, item="x")
    flow.dispatch_all()
    assert [pair[1] for name, pair in jobs(conn, run_id).items() if "[" in name] == ["cut@2"] * 3
    declare_map(3)
    assert runs.upgrade(run_id, dry_run=True)["blocked"] == [job["node_id"]]
    declare_map(2, at_once=3)
    with pytest.raises(errors.UpgradeRefused, match="cut"):
        runs.upgrade(run_id)


def declare_deciding_map(cutting: int, improving: int, *, at_most: int = 2) -> None:
    config.reset_for_tests()

    @node(version=cutting)
    def cut(item: str) -> dict[str, Any]:
        return {"kind": item, "good": False}

    @node
    def keep_it(item: str) -> dict[str, Any]:
        return {"kind": item, "good": False}

    @node(version=improving)
    def improve(state: dict[str, Any]) -> dict[str, Any]:
        return state

    @pipeline
    def treat(item: str) -> dict[str, Any]:
        made = branch(item, {"x": lambda: cut(item)}, other=lambda: keep_it(item), id="made")
        more: Any = {"until": lambda state: state["good"], "at_most": at_most, "must": False}
        return loop(improve, start=made, id="best", **more)

    @workflow
    def treated(items: list[str]) -> None:
        treat.map(items, at_once=1)


def test_the_arms_and_rounds_of_items_move_with_an_open_map(conn: db.Connection) -> None:
    declare_deciding_map(1, 1)
    run_id = runs.submit("treated", inputs={"items": ["x", "y"]})["id"]
    dispatcher.start_run(run_id)
    declare_deciding_map(2, 1)
    assert runs.upgrade(run_id)["outcome"] == "moved"
    dispatcher.start_run(run_id)
    assert jobs(conn, run_id)["treat[x]/made/cut"] == ("queued", "cut@2")
    job = transitions.claim_node(conn, who("cut@2"))
    transitions.complete_node(conn, job, kind="x", good=False)
    flow.dispatch_all()
    assert jobs(conn, run_id)["treat[x]/best/improve#1"] == ("queued", "improve@1")
    declare_deciding_map(2, 2)
    assert runs.upgrade(run_id)["outcome"] == "moved"
    dispatcher.start_run(run_id)
    assert jobs(conn, run_id)["treat[x]/best/improve#1"] == ("queued", "improve@2")
    declare_deciding_map(3, 2)
    assert runs.upgrade(run_id, dry_run=True)["blocked"] == [job["node_id"]]
    declare_deciding_map(2, 2, at_most=3)
    with pytest.raises(errors.UpgradeRefused, match="treat"):
        runs.upgrade(run_id)


def test_the_command_shows_the_difference(conn: db.Connection) -> None:
    run_id = started({"a": 1})
    declare({"a": 2}, more=True)
    out = console.printed("upgrade", run_id, "--dry-run")
    assert "+ again/c" in out
    assert "~ a/a: version 1 to 2" in out
    assert f"run {run_id}: can move" in out


def test_show_prints_who_moved_a_run_and_what_differed(conn: db.Connection) -> None:
    run_id = started({"a": 1, "b": 1})
    declare({"a": 2, "b": 1}, more=True)
    runs.upgrade(run_id, by="ann\x1b[31m")
    lines = console.printed("show", run_id).splitlines()
    (line,) = [each for each in lines if each.startswith("moved")]
    at = factories.one(
        conn, "SELECT to_char((upgrades -> 0 ->> 'at')::timestamptz AT TIME ZONE 'UTC',"
        " 'YYYY-MM-DD HH24:MI:SS') FROM workflow_runs"
    )  # fmt: skip
    assert line == (
        f"moved to other code at {at} UTC by ann\\x1b[31m: +again/c, a/a: version 1 to 2"
    )
    conn.execute('UPDATE workflow_runs SET upgrades = \'[{"at": [], "added": 3}, null, 7]\'')
    assert console.printed("show", run_id).count("moved to other code") == 3
