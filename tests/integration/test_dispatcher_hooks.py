"""The dispatcher with app code: providers, resolvers and builders that fail, wait or interfere."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

import queue_workflows
from queue_workflows import config, db, dispatcher, errors, node_queue, run_store
from tests.support import constants, factories, flow, timeouts, wait

STAYS_OPEN_S = 1.0


def open_transactions() -> int:
    """The open transactions of this process, as counted from inside app code.

    One that another thread opened for a moment, to renew a lease, ends by itself.
    """
    with db.connect() as conn:

        def look() -> set[tuple[Any, ...]]:
            rows = conn.execute(
                "SELECT pid, xact_start FROM pg_stat_activity WHERE datname = current_database()"
                " AND pid <> pg_backend_pid() AND starts_with(state, 'idle in transaction')"
            )
            return {tuple(row.values()) for row in rows}

        waiting = look()
        deadline = time.monotonic() + STAYS_OPEN_S
        while waiting and time.monotonic() < deadline:
            waiting &= look()
        return len(waiting)


def make_due(conn: Any) -> None:
    conn.execute("UPDATE workflow_runs SET available_at = now() WHERE available_at IS NOT NULL")
    conn.execute(
        "UPDATE workflow_dispatch_events SET available_at = now() WHERE available_at IS NOT NULL"
    )


def cancel_by_sql(run_id: str) -> None:
    with db.connect() as conn:
        conn.execute("UPDATE workflow_runs SET status = 'cancelled' WHERE id = %s", (run_id,))


# --- a provider that fails


class Broken:
    """A provider that raises this, and counts its calls."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.calls = 0

    def __call__(self, name: str) -> Any:
        self.calls += 1
        raise self.error


def test_a_providers_error_delays_its_run_and_is_poison_at_ten(
    toy: flow.Flow, conn: Any, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Broken(OSError("the share is away"))
    config.set_workflow_provider(broken, broken)
    run_id = toy.submit()
    waits: list[float] = []
    for attempt in range(1, 10):
        toy.look()
        toy.look()
        row = flow.run(run_id)
        assert (row["status"], row["start_attempts"], broken.calls) == ("queued", attempt, attempt)
        assert row["error"] == "loading workflow 'w': OSError: the share is away"
        waits.append((row["available_at"] - row["updated_at"]).total_seconds())
        make_due(conn)
    assert waits == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]
    toy.look()
    row = flow.run(run_id)
    assert row["status"] == "failed"
    assert row["error"].startswith("poison: the run could not start in 10 tries: loading workflow")


def test_a_providers_error_reaches_who_starts_the_run_as_an_error_of_the_package(
    toy: flow.Flow,
) -> None:
    broken = Broken(OSError("the share is away"))
    config.set_workflow_provider(broken, broken)
    run_id = toy.submit()
    with pytest.raises(errors.QueueWorkflowsError, match="'w': OSError: the share") as caught:
        dispatcher.start_run(run_id)
    assert isinstance(caught.value, RuntimeError) and caught.value.__cause__ is broken.error
    assert flow.status(run_id) == "queued"


def test_a_run_starts_once_its_provider_is_well_again(toy: flow.Flow, conn: Any) -> None:
    toy.dag(a="")
    broken = Broken(RuntimeError("not yet"))
    config.set_workflow_provider(broken, broken)
    run_id = toy.submit()
    toy.look()
    toy.provide()
    make_due(conn)
    toy.look()
    row = flow.run(run_id)
    assert (row["status"], row["error"]) == ("running", None)


@pytest.mark.parametrize(
    "error",
    [
        psycopg.OperationalError("the host's own database"),
        SystemExit(1),
        ValueError(),
        Exception("x"),
    ],
    ids=repr,
)
def test_a_provider_that_fails_for_one_run_does_not_keep_the_next_from_starting(
    toy: flow.Flow, error: BaseException
) -> None:
    toy.dag(a="")
    bad = toy.submit(workflow_name="bad", priority=1)
    good = toy.submit()

    def load(name: str) -> Any:
        if name == "bad":
            raise error
        return toy.workflows[name]

    config.set_workflow_provider(load, toy.pipelines.__getitem__)
    toy.look()
    assert (flow.status(bad), flow.status(good)) == ("queued", "running")
    assert type(error).__name__ in flow.run(bad)["error"]


def test_a_provider_whose_error_cannot_even_be_read_is_only_another_error(
    toy: flow.Flow,
) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    broken = Broken(Mute())
    config.set_workflow_provider(broken, broken)
    run_id = toy.submit()
    toy.look()
    assert "Mute (its text cannot be read)" in flow.run(run_id)["error"]


def test_without_a_provider_runs_stay_queued_and_one_warning_is_logged(
    toy: flow.Flow, caplog: pytest.LogCaptureFixture
) -> None:
    config.reset_for_tests()
    caplog.set_level(logging.WARNING)
    run_ids = [toy.submit(), toy.submit()]
    for _ in range(3):
        toy.look()
    assert {flow.status(run_id) for run_id in run_ids} == {"queued"}
    assert [r.getMessage() for r in caplog.records].count(caplog.records[0].getMessage()) == 1
    assert "no workflow provider" in caplog.text
    with pytest.raises(errors.InvalidConfig, match="--app"):
        dispatcher.start_run(run_ids[0])
    toy.dag(a="")
    toy.provide()
    toy.look()
    assert {flow.status(run_id) for run_id in run_ids} == {"running"}


def test_a_provider_that_does_not_know_a_run_does_not_end_it_once_another_has_started_it(
    toy: flow.Flow,
) -> None:
    toy.dag(a="")

    def late(name: str) -> Any:
        toy.provide()
        flow.start_queued()  # as another orchestrator does meanwhile
        raise KeyError(name)

    run_id = toy.submit()
    queue_workflows.set_workflow_provider(late, toy.pipelines.__getitem__)
    toy.look()
    assert (flow.status(run_id), flow.run(run_id)["error"]) == ("running", None)


def test_a_run_that_gets_another_workflow_while_it_starts_has_the_graph_of_that(
    toy: flow.Flow,
) -> None:
    toy.dag(a="")
    toy.define(flow.step("t"), name="other", t=flow.nodes(b=""))
    run_id = toy.submit()

    def slow(name: str) -> Any:
        run_store.update_run(run_id, workflow_name="other")
        return toy.workflows[name]

    queue_workflows.set_workflow_provider(slow, toy.pipelines.__getitem__)
    toy.look()
    toy.look()
    assert flow.states(run_id) == {"t/b": "queued"}


def test_a_slow_provider_lets_events_have_their_turn_between_the_starts(
    toy: flow.Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants.put(monkeypatch, "dispatch.advance.STARTS_S", 0.1)
    toy.dag(a="", b="a")
    under_way = toy.started()
    flow.complete(under_way, "s/a")
    toy.define(flow.step("s"), name="slow")
    for _ in range(5):
        toy.submit(workflow_name="slow")
    seen: list[str] = []

    def slow(name: str) -> Any:
        seen.append(flow.states(under_way).get("s/b", "waits"))
        time.sleep(0.11)
        return toy.workflows[name]

    queue_workflows.set_workflow_provider(slow, toy.pipelines.__getitem__)
    toy.look()
    assert seen == ["waits", *["queued"] * 4]


def test_a_check_ends_and_starts_others_although_an_app_has_locked_a_whole_round_of_runs(
    toy: flow.Flow, conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants.put(monkeypatch, "dispatch.advance.STARTS_A_ROUND", 2)
    toy.dag(a="")
    run_ids = [toy.submit() for _ in range(2)]
    thread = threading.Thread(target=toy.look, name="test-look")
    with db.connect() as mine, mine.transaction():
        mine.execute("SELECT FROM workflow_runs FOR UPDATE")
        other = toy.submit()
        thread.start()
        thread.join(wait.patience(20))
        has_ended, behind = not thread.is_alive(), flow.status(other)
    thread.join(wait.patience(30))
    assert (has_ended, behind) == (True, "running")
    make_due(conn)
    toy.look()
    assert {flow.status(run_id) for run_id in run_ids} == {"running"}


# --- events that cannot be dispatched


def park(run_id: str, node_id: str = "q") -> None:
    assert node_queue.mark_awaiting_input(flow.job(run_id, node_id)["id"]) is not None


def test_an_event_that_cannot_be_dispatched_is_poison_at_ten_and_fails_its_run(
    toy: flow.Flow, conn: Any
) -> None:
    calls: list[int] = []

    def build(step: Any, run: Any) -> Any:
        calls.append(1)
        raise ZeroDivisionError("no spec")

    config.register_input_widget("mine", build)
    toy.define(flow.ask("q", "mine"), flow.ask("p"))
    run_id = toy.submit()
    toy.look()
    park(run_id)
    for attempt in range(1, 10):
        toy.look()
        (event,) = node_queue.list_unprocessed_dispatch_events()
        assert (event["attempts"], flow.status(run_id)) == (attempt, "running")
        assert "building widget 'mine': ZeroDivisionError: no spec" in event["error"]
        assert event["available_at"] is not None
        make_due(conn)
    toy.look()
    assert node_queue.list_unprocessed_dispatch_events() == []
    row = flow.run(run_id)
    assert row["status"] == "failed"
    assert row["error"].startswith(
        "poison: dispatching awaiting_input of node q failed 10 times: building widget 'mine'"
    )
    assert flow.states(run_id) == {"q": "cancelled", "p": "cancelled"}
    assert len(calls) <= 20  # each time with its batch and then on its own


def test_one_bad_event_holds_up_neither_its_run_nor_another(toy: flow.Flow) -> None:
    def build(step: Any, run: Any) -> Any:
        raise ValueError("no spec")

    config.register_input_widget("bad", build)
    toy.define(
        flow.ask("q", "bad"), flow.ask("fine"), flow.step("s"),
        flow.step("t", depends_on=["s"]), s=flow.nodes(a=""), t=flow.nodes(b=""),
    )  # fmt: skip
    run_ids = [toy.submit(), toy.submit()]
    toy.look()
    for run_id in run_ids:
        park(run_id, "q")
        park(run_id, "fine")
        flow.complete(run_id, "s/a")
    toy.look()
    for run_id in run_ids:
        assert flow.states(run_id)["t/b"] == "queued"
        assert flow.job(run_id, "fine")["input_spec"]["widget"] == "file_upload"
        assert flow.job(run_id, "q")["input_spec"] is None


def test_a_run_that_an_app_has_locked_does_not_delay_the_others(
    toy: flow.Flow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    timeouts.shorten_lock_waits(monkeypatch, 0.1)
    toy.dag(a="", b="a")
    held, other = toy.submit(priority=1), toy.submit()
    with db.connection() as mine:
        mine.execute("UPDATE workflow_runs SET parcel_id = 'x' WHERE id = %s", (held,))
        toy.look()
        assert (flow.status(held), flow.status(other)) == ("queued", "running")
    toy.look()
    assert flow.status(held) == "running"
    for run_id in (held, other):
        flow.complete(run_id, "s/a")
    with db.connection() as mine:
        mine.execute("UPDATE workflow_runs SET parcel_id = 'y' WHERE id = %s", (held,))
        toy.look()
        assert (len(flow.jobs(held)), len(flow.jobs(other))) == (1, 2)
        assert {e["attempts"] for e in node_queue.list_unprocessed_dispatch_events()} == {0}

    def continued() -> bool:
        toy.look()
        return len(flow.jobs(held)) == 2

    wait.until(continued)
    assert "tried later" in caplog.text


# --- app code and transactions


SKIPS_NOTHING = ({"mine": 1}, {"mine": 0})


def test_no_app_code_ever_runs_inside_an_engine_transaction(toy: flow.Flow, tmp_path: Any) -> None:
    seen: dict[str, list[int]] = {}

    def watched(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            seen.setdefault(name, []).append(open_transactions())
            return act(*args)

        return call

    class Bracket:
        def __enter__(self) -> Any:
            seen.setdefault("enter", []).append(open_transactions())
            return watched("finalize", lambda delta: delta)

        def __exit__(self, *_: object) -> None:
            seen.setdefault("exit", []).append(open_transactions())

    def run_body(x: Any) -> dict[str, Any]:
        seen.setdefault("body", []).append(open_transactions())
        return {"v": x}

    config.set_workflow_provider(
        watched("workflow", toy.workflows.__getitem__),
        watched("pipeline", toy.pipelines.__getitem__),
        resolve_ref=watched(
            "resolve", lambda value, context: None if value in SKIPS_NOTHING else value
        ),
    )
    config.register_input_widget("mine", watched("widget", lambda step, run: {"mine": True}))
    config.set_invoke_context(watched("context", lambda job, run: Bracket()))
    config.set_on_node_completed(watched("completed", lambda job, run, delta: None))
    config.set_node_resolver(watched("resolver", lambda name: config.RegisteredNode(run_body)))
    wanted = [{"name": "x", "from": "pipeline.x"}]
    toy.define(
        flow.step("s", inputs={"x": 1}, skip_if={"mine": 1}),
        flow.ask("q", "mine", depends_on=["s"]),
        flow.ask("p", "choose_one", source={"mine": 2}),
        s=[
            {"id": "a", "inputs": wanted, "skip_if": False},
            {"id": "b", "depends_on": ["a"], "inputs": wanted, "skip_if": {"mine": 0}},
        ],
    )
    run_id = toy.submit(out_dir=str(tmp_path))
    toy.go()
    assert flow.states(run_id) == {
        "s/a": "completed", "p": "awaiting_input", "s/b": "completed", "q": "awaiting_input",
    }  # fmt: skip
    assert flow.job(run_id, "q")["input_spec"]["mine"] is True
    assert {name for name, counts in seen.items() if any(counts)} == set()
    assert {*seen} == {
        "workflow", "pipeline", "resolve", "widget", "context", "enter", "finalize", "exit",
        "completed", "resolver", "body",
    }  # fmt: skip


@pytest.mark.parametrize("when", ["start", "drain"])
def test_a_run_cancelled_while_the_apps_resolver_runs_is_not_written(
    toy: flow.Flow, when: str
) -> None:
    members = flow.nodes(a="", b="a")
    for member in members:
        member["inputs"] = [{"name": "x", "from": "pipeline.x"}]
    toy.define(flow.step("s", inputs={"x": 1}), s=members)
    run_id = toy.submit()
    armed = when == "start"

    def resolve(value: Any, context: Any) -> Any:
        if armed:
            cancel_by_sql(run_id)
        return value

    toy.provide(resolve_ref=resolve)
    toy.look()
    if when == "drain":
        armed = True
        flow.complete(run_id, "s/a")
        toy.look()
        assert node_queue.count_unprocessed_dispatch_events() == 0
    assert flow.status(run_id) == "cancelled"
    assert "s/b" not in flow.jobs(run_id)
    assert ("s/a" in flow.jobs(run_id)) == (when == "drain")


def test_a_run_cancelled_while_its_provider_thinks_is_not_written(toy: flow.Flow) -> None:
    toy.dag(a="")
    run_id = toy.submit()

    def load(name: str) -> Any:
        cancel_by_sql(run_id)
        return toy.workflows[name]

    config.set_workflow_provider(load, toy.pipelines.__getitem__)
    toy.look()
    assert (flow.status(run_id), flow.states(run_id)) == ("cancelled", {})


def test_a_run_cancelled_while_a_widget_is_built_gets_no_spec(toy: flow.Flow) -> None:
    def build(step: Any, run: Any) -> Any:
        cancel_by_sql(run["id"])
        return {"late": True}

    config.register_input_widget("mine", build)
    toy.define(flow.ask("q", "mine"))
    run_id = toy.submit()
    toy.look()
    park(run_id)
    toy.look()
    assert flow.job(run_id, "q")["status"] == "cancelled"
    assert flow.job(run_id, "q")["input_spec"] is None
    assert node_queue.count_unprocessed_dispatch_events() == 0


def test_a_run_reopened_while_the_apps_resolver_runs_is_planned_again(
    toy: flow.Flow,
) -> None:
    toy.dag({"id": "a", "skip_if": {"mine": 1}})
    run_id = toy.submit()
    turns: list[int] = []

    def resolve(value: Any, context: Any) -> Any:
        turns.append(1)
        if len(turns) == 1:
            cancel_by_sql(run_id)
            run_store.update_run(run_id, status="queued")
        return value != {"mine": 1}

    toy.provide(resolve_ref=resolve)
    toy.look()
    assert flow.status(run_id) == "queued"
    toy.look()
    job = flow.job(run_id, "s/a")
    assert (job["status"], job["generation"], len(turns)) == ("queued", 1, 2)


def test_an_apps_resolver_gets_the_whole_context_and_its_result_is_used(
    toy: flow.Flow,
) -> None:
    contexts: list[dict[str, Any]] = []

    def resolve(value: Any, context: Any) -> Any:
        contexts.append(dict(context))
        return context[value["@"]] if isinstance(value, dict) else value

    toy.provide(resolve_ref=resolve)
    members = flow.nodes(a="", b="a")
    members[1]["inputs"] = [{"name": "x", "from": "pipeline.x"}]
    toy.define(flow.step("s", inputs={"x": {"@": "s/a"}}), s=members)
    run_id = toy.submit(context={"k": 1})
    toy.look()
    flow.complete(run_id, "s/a", v=2)
    toy.look()
    job = flow.job(run_id, "s/b")
    assert (job["inputs"], job["input_template"]) == ({"x": {"v": 2}}, {"x": {"@": "s/a"}})
    assert contexts[-1] == {"k": 1, "s/a": {"v": 2}}


def test_an_apps_resolver_is_called_again_when_the_node_is_executed(
    toy: flow.Flow,
) -> None:
    toy.provide(resolve_ref=lambda value, context: context.get(str(value), value))
    seen: list[Any] = []
    flow.body(lambda x: seen.append(x), "see")
    wanted = [{"name": "x", "from": "pipeline.x"}]
    toy.define(
        flow.step("s", inputs={"x": "key"}),
        s=[{"id": "a", "node": "see", "inputs": wanted}],
    )
    run_id = toy.submit(context={"key": "then"})
    toy.look()
    run_store.update_run(run_id, context={"key": "now"})
    toy.work()
    job = flow.job(run_id, "s/a")
    assert (seen, job["inputs"], job["resolved_inputs"]) == (["now"], {"x": "then"}, {"x": "now"})


def test_what_an_apps_resolver_returns_must_be_storable(toy: flow.Flow) -> None:
    toy.provide(resolve_ref=lambda value, context: {1, 2})
    wanted = [{"name": "x", "from": "pipeline.x"}]
    toy.define(flow.step("s", inputs={"x": 1}), s=[{"id": "a", "inputs": wanted}])
    run_id = toy.submit()
    toy.look()
    row = flow.run(run_id)
    assert (row["status"], row["start_attempts"]) == ("failed", 0)
    assert "inputs of node 's/a'" in row["error"]


# --- the definition is frozen


def test_editing_a_workflow_does_not_change_a_run_in_flight(toy: flow.Flow) -> None:
    toy.dag(a="", b="a")
    before = toy.started()
    toy.dag(a="", c="a")
    after = toy.started()
    for run_id in (before, after):
        flow.forget(run_id)
        flow.finish(run_id, "s/a")
    assert [*flow.jobs(before)] == ["s/a", "s/b"]
    assert [*flow.jobs(after)] == ["s/a", "s/c"]
    assert flow.run(before)["definition_hash"] != flow.run(after)["definition_hash"]


def test_the_frozen_definition_is_a_copy_of_the_apps_definition(toy: flow.Flow) -> None:
    toy.dag(a="", b="a")
    run_id = toy.started()
    toy.pipelines["s"]["nodes"].append({"id": "late", "depends_on": ["b"]})
    flow.finish(run_id, "s/a")
    flow.finish(run_id, "s/b")
    assert flow.status(run_id) == "completed"


def test_a_process_without_provider_dispatches_a_frozen_run_to_its_end(
    toy: flow.Flow,
) -> None:
    ask = flow.ask("q", "choose_one", source={"$from": "s/a.options"}, depends_on=["s"])
    toy.define(flow.step("s"), ask, s=flow.nodes(a=""))
    run_id = toy.started()
    config.reset_for_tests()
    flow.forget(run_id)
    flow.complete(run_id, "s/a", options=["x"])
    toy.look()
    park(run_id)
    toy.look()
    assert flow.job(run_id, "q")["input_spec"]["options"] == ["x"]
    dispatcher.resume_after_input(run_id, "q", "x")
    assert flow.status(run_id) == "completed"


def test_runs_without_definition_do_not_hide_others_from_a_process_without_provider(
    toy: flow.Flow,
) -> None:
    toy.dag(a="", b="a")
    reopened, live = toy.started(priority=200), toy.started()
    flow.fail(reopened, "s/a")
    toy.look()
    run_store.update_run(reopened, status="queued")
    config.reset_for_tests()
    for run_id in (reopened, live):
        flow.forget(run_id)
    with db.connect() as conn:
        conn.execute(
            "INSERT INTO workflow_runs (id, workflow_name, status) SELECT 'u' || n, 'w',"
            " CASE WHEN n > 60 THEN 'running' ELSE 'queued' END FROM generate_series(1, 120) n"
        )
        conn.execute(
            "INSERT INTO workflow_node_jobs (run_id, node_id, node_module, queue, status)"
            " SELECT id, 'n', 'ok', 'cpu', 'completed' FROM workflow_runs"
            " WHERE id LIKE 'u%' AND status = 'running'"
        )
        conn.execute(
            "INSERT INTO workflow_dispatch_events (run_id, node_id, kind)"
            " SELECT run_id, 'n', 'completed' FROM workflow_node_jobs WHERE run_id LIKE 'u%'"
        )
    flow.complete(live, "s/a")
    toy.look()
    assert flow.states(reopened) == {"s/a": "queued"}
    assert flow.states(live) == {"s/a": "completed", "s/b": "queued"}
    assert node_queue.count_unprocessed_dispatch_events() == 60


def test_a_run_reopened_keeps_its_frozen_definition(toy: flow.Flow) -> None:
    toy.dag(a="", b="a")
    run_id = toy.started()
    flow.fail(run_id, "s/a")
    toy.dag(x="")
    run_store.update_run(run_id, status="queued")
    toy.look()
    assert flow.states(run_id) == {"s/a": "queued"}


def test_the_first_stored_of_two_concurrent_definitions_counts_in_both_processes(
    toy: flow.Flow,
) -> None:
    toy.dag(a="", b="a")
    run_id = toy.submit()
    calls: list[str] = []

    def load(name: str) -> Any:
        calls.append(name)
        if len(calls) == 1:
            # Meanwhile another process starts the run, with the workflow as it was edited.
            toy.dag(a="", c="a")
            with db.connect() as other:
                flow.start_on(other, run_id)
            flow.forget(run_id)
            toy.dag(a="", b="a")
        return toy.workflows[name]

    config.set_workflow_provider(load, toy.pipelines.__getitem__)
    assert dispatcher.start_run(run_id) == 0
    assert len(calls) == 2
    flow.finish(run_id, "s/a")
    assert [*flow.jobs(run_id)] == ["s/a", "s/c"]


def test_a_running_run_without_definition_gets_it_at_the_first_touch(
    toy: flow.Flow, conn: Any
) -> None:
    toy.dag(a="", b="a")
    run_id = factories.run(conn, workflow_name="w")
    factories.node(conn, run_id, "s/a", node_module="ok")
    flow.complete(run_id, "s/a")
    config.reset_for_tests()
    toy.look()
    assert len(node_queue.list_unprocessed_dispatch_events()) == 1
    assert node_queue.list_unprocessed_dispatch_events()[0]["attempts"] == 0
    toy.provide()
    toy.look()
    assert flow.states(run_id) == {"s/a": "completed", "s/b": "queued"}
    assert flow.run(run_id)["definition"] is not None


def test_a_round_of_runs_that_this_process_cannot_dispatch_ends(toy: flow.Flow, conn: Any) -> None:
    run_ids = [factories.run(conn) for _ in range(60)]  # A round takes fewer.
    for run_id in run_ids:
        factories.node(conn, run_id, "s/a")
        flow.complete(run_id, "s/a")
    config.reset_for_tests()
    toy.look()
    assert node_queue.count_unprocessed_dispatch_events() == len(run_ids)


def test_a_running_run_whose_workflow_is_gone_fails_with_the_reason(
    toy: flow.Flow, conn: Any
) -> None:
    run_id = factories.run(conn, workflow_name="gone")
    factories.node(conn, run_id, "s/a")
    flow.complete(run_id, "s/a")
    toy.look()
    assert flow.run(run_id)["error"].startswith("the provider knows no workflow 'gone'")
