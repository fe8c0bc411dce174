"""Who did what on request: which acts are recorded, by whom, and how they are listed."""

from __future__ import annotations

import asyncio
import getpass
import json
import socket
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest

import queue_workflows
from queue_workflows import (
    acts,
    dispatcher,
    errors,
    history,
    jobs,
    models,
    queues,
    runs,
    schedules,
    worker_control,
    workers,
)
from queue_workflows.client import AsyncClient
from tests.support import asgi_service, console, factories, rights, transitions

WHO: dict[str, str] = {"by": "ann", "reason": "the disk is full"}


def listed(**filters: Any) -> list[tuple[str, str, str]]:
    """Action, kind and subject of each act, the oldest first."""
    return [(row["action"], row["kind"], row["subject"]) for row in acts.list(**filters)][::-1]


def only() -> dict[str, Any]:
    (row,) = acts.list()
    return row


def failed_run(conn: Any, **columns: Any) -> str:
    return factories.run(conn, status="failed", **columns)


def failed_job(conn: Any, **columns: Any) -> str:
    return factories.ingest(conn, status="failed", **columns)["id"]


def schedule(conn: Any) -> str:
    queue_workflows.register_ingest_task("t", dict)
    schedules.add("nightly", "0 3 * * *", task_name="t", queue="load")
    factories.empty(conn, "operator_acts")
    return "nightly"


def gpu_worker(conn: Any) -> str:
    factories.insert(
        conn, "workers", worker_id="w1", host_label="box", queue="gpu", pid=1, state="idle"
    )
    return "box"


def paused(_: Any) -> str:
    queues.pause("load")
    return "load"


def asking(conn: Any) -> str:
    row = factories.node(
        conn, node_id="ask", node_module="__input__x", status="awaiting_input",
        input_spec={"widget": "x"},
    )  # fmt: skip
    return row["run_id"]


def provide(*nodes: str) -> None:
    """Provide a workflow of nodes that wait for nothing but the first."""
    listed = [{"id": one, "depends_on": [*nodes[:place]][:1]} for place, one in enumerate(nodes)]
    step = {"id": "s", "kind": "pipeline", "pipeline": "p"}
    queue_workflows.set_workflow_provider(
        {"w": {"name": "w", "steps": [step]}}.__getitem__,
        {"p": {"name": "p", "nodes": listed}}.__getitem__,
    )


Given = Callable[[Any], str]
ACTS: list[tuple[str, str, Given, Callable[[str], object]]] = [
    ("cancel", "run", factories.run, lambda one: runs.cancel(one, **WHO)),
    ("retry", "run", failed_run, lambda one: runs.retry(one, **WHO)),
    ("delete", "run", factories.run, lambda one: runs.delete(one, **WHO)),
    ("requeue", "run", factories.run, lambda _: runs.requeue_running(**WHO)),
    ("answer", "run", asking, lambda one: runs.answer(one, "ask", 1, **WHO)),
    ("cancel", "job", lambda conn: factories.ingest(conn)["id"],
     lambda one: jobs.cancel(one, **WHO)),
    ("retry", "job", failed_job, lambda one: jobs.retry(one, **WHO)),
    ("delete", "job", failed_job, lambda one: jobs.delete(one, **WHO)),
    ("cancel", "job", lambda conn: factories.ingest(conn)["id"],
     lambda one: jobs.cancel_many([one], **WHO)),
    ("retry", "job", failed_job, lambda one: jobs.retry_many([one], **WHO)),
    ("pause", "queue", lambda _: "load", lambda one: queues.pause(one, **WHO)),
    ("resume", "queue", paused, lambda one: queues.resume(one, **WHO)),
    ("limit", "queue", lambda _: "load", lambda one: queues.limit(one, rate="1/s", **WHO)),
    ("pause", "schedule", schedule, lambda one: schedules.pause(one, **WHO)),
    ("resume", "schedule", schedule, lambda one: schedules.resume(one, **WHO)),
    ("run now", "schedule", schedule, lambda one: schedules.run_now(one, **WHO)),
    ("remove", "schedule", schedule, lambda one: schedules.remove(one, **WHO)),
    ("off", "machine", lambda _: "box", lambda one: workers.disable(one, "gpu", **WHO)),
    ("off", "machine", lambda _: "box", lambda one: workers.drain(one, "gpu", **WHO)),
    ("on", "machine", lambda _: "box", lambda one: workers.enable(one, "gpu", **WHO)),
    ("load", "machine", gpu_worker, lambda one: models.load(one, "m", **WHO)),
    ("unload", "machine", gpu_worker, lambda one: models.unload(one, **WHO)),
]  # fmt: skip


@pytest.mark.parametrize(("action", "kind", "given", "act"), ACTS)
def test_each_act_is_recorded_with_its_actor_and_reason(
    conn: Any, action: str, kind: str, given: Given, act: Callable[[str], object]
) -> None:
    subject = given(conn)
    factories.empty(conn, "operator_acts")
    act(subject)
    row = only()
    assert (row["action"], row["kind"], row["subject"]) == (action, kind, subject)
    assert (row["actor"], row["reason"], row["via"]) == ("ann", "the disk is full", "python")
    login = factories.one(conn, "SELECT session_user::text")
    assert (row["login"], row["at"].tzinfo is not None) == (login, True)


def test_a_schedule_that_is_added_and_a_run_that_is_moved_are_acts(conn: Any) -> None:
    queue_workflows.register_ingest_task("t", dict)
    schedules.add("hourly", every="1h", task_name="t", queue="load", **WHO)
    provide("a")
    run_id = runs.submit("w")["id"]
    dispatcher.start_run(run_id)
    provide("a", "b")
    runs.upgrade(run_id, dry_run=True, **WHO)
    assert runs.upgrade(run_id, **WHO)["outcome"] == "moved"
    assert runs.upgrade(run_id, **WHO)["outcome"] == "same"
    assert listed() == [("add", "schedule", "hourly"), ("upgrade", "run", run_id)]
    assert (runs.get(run_id) or {})["upgrades"][0]["actor"] == "ann"


def test_the_detail_says_what_the_object_does_not(conn: Any) -> None:
    queues.pause("load", partition="p", until=timedelta(hours=1))
    queues.limit("load", max_running=3)
    workers.disable("box", "gpu", stop_policy="drain")
    workers.enable("box", "gpu")
    details = [row["detail"] for row in acts.list()][::-1]
    assert datetime.fromisoformat(details[0].pop("until")) > datetime.now(timezone.utc)
    assert details == [
        {"partition": "p"},
        {"limits": {"max_running": 3}},
        {"queue": "gpu", "policy": "drain"},
        {"queue": "gpu"},
    ]


def test_an_act_on_the_job_of_a_node_is_found_by_its_run_too(conn: Any) -> None:
    node = factories.node(conn)
    jobs.cancel(node["id"], by="ann")
    jobs.retry(node["id"], by="bob")
    for kind, subject in (("job", node["id"]), ("run", node["run_id"])):
        found = acts.list(kind=kind, subject=subject)
        assert [(row["actor"], row["detail"]) for row in found] == [
            ("bob", {"node": "n"}),
            ("ann", {"node": "n"}),
        ]


def test_many_jobs_are_an_act_for_each_that_was_changed(conn: Any) -> None:
    waiting, over = factories.ingest(conn)["id"], failed_job(conn)
    done = jobs.cancel_many([waiting, over, "nobody"], by="ann")
    assert [one["outcome"] for one in done] == ["cancelled", "refused", "unknown"]
    assert listed() == [("cancel", "job", waiting)]


# --- what is not recorded ------------------------------------------------------------------------


def test_what_was_not_carried_out_leaves_no_act(conn: Any) -> None:
    over, asks = failed_run(conn), asking(conn)
    assert runs.cancel(over) is None
    assert runs.cancel("nobody") is None
    assert not runs.delete("nobody")
    assert jobs.cancel("nobody") is None
    assert not jobs.delete("nobody")
    assert not queues.resume("load")
    running = factories.run(conn)
    refused: list[Callable[[], object]] = [
        lambda: runs.retry(running),
        lambda: runs.retry("nobody"),
        lambda: runs.answer(asks, "nobody", 1),
        lambda: jobs.retry("nobody"),
        lambda: queues.pause("nowhere"),
        lambda: queues.limit("load"),
        lambda: schedules.pause("none"),
        lambda: schedules.run_now("none"),
        lambda: workers.disable("box", "gpu", stop_policy="none"),
        lambda: models.load("nowhere", "m"),
    ]
    for act in refused:
        with pytest.raises(errors.QueueWorkflowsError):
            act()
    assert listed() == []


def test_a_schedule_that_is_held_back_leaves_no_act(conn: Any) -> None:
    name = schedule(conn)
    assert schedules.run_now(name) is not None
    assert schedules.run_now(name) is None
    assert listed() == [("run now", "schedule", name)]


def test_what_was_carried_out_is_recorded_also_if_the_state_was_there(conn: Any) -> None:
    for who in ("ann", "bob"):
        queues.pause("load", by=who)
    assert [row["actor"] for row in acts.list()] == ["bob", "ann"]
    assert queues.get("load")["paused_by"] == "bob"


def test_an_act_is_gone_with_its_transaction(conn: Any) -> None:
    run_id = factories.run(conn)
    with conn.transaction(force_rollback=True):
        runs.cancel(run_id, conn=conn, by="ann")
        assert factories.one(conn, "SELECT actor FROM operator_acts") == "ann"
    assert (runs.get(run_id) or {})["status"] == "running"
    assert listed() == []


def test_a_connection_in_autocommit_mode_has_act_and_change_in_one_transaction(conn: Any) -> None:
    run_id = factories.run(conn)
    same = "SELECT a.xmin = r.xmin FROM operator_acts a, workflow_runs r"
    runs.cancel(run_id, conn=conn)
    assert factories.one(conn, same)


def test_an_act_in_a_transaction_of_the_app_does_not_end_it(dsn: str, conn: Any) -> None:
    run_id = factories.run(conn)
    with psycopg.connect(dsn) as app:
        runs.cancel(run_id, conn=app)
        app.rollback()
    assert (runs.get(run_id) or {})["status"] == "running"
    assert listed() == []


# --- the actor -----------------------------------------------------------------------------------


def test_without_a_name_the_actor_is_the_role_of_the_database(conn: Any) -> None:
    queues.pause("load")
    assert only()["actor"].startswith(only()["login"])
    assert queues.get("load")["paused_by"] is None


def test_the_nearest_name_is_the_actor(conn: Any) -> None:
    with acts.acting("ann", reason="a test"):
        queues.pause("load")
        queues.pause("load", by="bob", reason="mine")
        with acts.acting("carla"):
            queues.pause("load")
    queues.pause("load")
    found = [(row["actor"], row["reason"]) for row in acts.list()][::-1]
    assert found[:3] == [("ann", "a test"), ("bob", "mine"), ("carla", "a test")]
    assert found[3][0] not in ("ann", "bob", "carla")


def test_the_name_of_one_act_is_not_that_of_the_next_in_a_transaction(conn: Any) -> None:
    with conn.transaction():
        conn.execute("SELECT set_config('queue_workflows.actor', 'the app', true)")
        queues.pause("load", by="ann", conn=conn)
        queues.pause("fetch", conn=conn)
    assert [row["actor"] for row in acts.list()] == ["the app", "ann"]


def test_the_history_of_a_job_names_the_same_actor(conn: Any) -> None:
    job = factories.ingest(conn)["id"]
    with acts.acting("ann"):
        jobs.cancel(job)
    found = history.events(job) or []
    assert [row["actor"] for row in found] == ["ann"]


def test_calls_on_an_event_loop_have_the_actor_of_their_task(conn: Any) -> None:
    run_ids = [factories.run(conn) for _ in range(2)]

    async def act(run_id: str, who: str) -> None:
        with acts.acting(who):
            await runs.cancel_async(run_id)

    async def both() -> None:
        await asyncio.gather(*(act(one, f"who {one}") for one in run_ids))

    asyncio.run(both())
    assert {row["subject"]: row["actor"] for row in acts.list()} == {
        one: f"who {one}" for one in run_ids
    }


HOSTILE = ["a\x00", "\ud800", "x" * 1001, 7, b"ann"]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("name", ["by", "reason"])
def test_a_name_or_reason_that_no_act_can_have_is_refused_before_any_write(
    conn: Any, name: str, text: Any
) -> None:
    run_id = factories.run(conn)
    given: dict[str, Any] = {name: text}
    with pytest.raises(errors.InvalidConfig, match=name):
        runs.cancel(run_id, **given)
    with pytest.raises(errors.InvalidConfig, match=name), acts.acting(**given):
        pass
    assert (runs.get(run_id) or {})["status"] == "running"


def test_texts_of_any_other_kind_are_stored_and_shown_as_one_line(conn: Any) -> None:
    who, why = "\u202e\x1b[31m'; DROP TABLE x --" + "é" * 170, "</script>\n%s{}" * 70
    queues.pause("load", by=who, reason=why)
    assert (only()["actor"], only()["reason"]) == (who, why)
    assert acts.list(actor=who) == [only()]
    shown = console.printed("acts")
    assert "\x1b" not in shown and len(shown.splitlines()) == 2
    assert json.loads(console.printed("acts", "--json"))[0]["reason"] == why


def test_secrets_are_masked(conn: Any) -> None:
    queues.pause("load", by="ann password=hunter2", reason="token=abcdefgh12345678")
    assert "hunter2" not in str(only())
    assert "abcdefgh12345678" not in str(only())


# --- lists ---------------------------------------------------------------------------------------


def test_acts_are_found_by_each_filter_page_by_page(conn: Any) -> None:
    for number in range(5):
        queues.pause("load", by=f"who {number % 2}")
    workers.enable("box", "gpu", by="who 1")
    conn.execute("INSERT INTO operator_acts (actor, action, kind, subject, at)"
                 " VALUES ('old', 'cancel', 'run', 'r', now() - interval '2 days')")  # fmt: skip
    assert len(acts.list()) == 7
    assert len(acts.list(actor="who 1")) == 3
    assert (
        listed(kind="machine", subject="box") == listed(action="on") == [("on", "machine", "box")]
    )
    assert len(acts.list(since=timedelta(days=1))) == 6
    assert len(acts.list(since=datetime.now(timezone.utc) - timedelta(days=3))) == 7
    assert acts.list(actor="a\x00") == []
    first = acts.list(limit=4)
    rest = acts.list(before=first[-1]["id"])
    assert [*first, *rest] == acts.list()
    with pytest.raises(errors.InvalidConfig, match="time zone"):
        acts.list(since=datetime(2026, 1, 1))


def test_a_subject_is_found_by_an_index(conn: Any) -> None:
    conn.execute(
        "INSERT INTO operator_acts (actor, action, kind, subject)"
        " SELECT 'a', 'cancel', 'run', n::text FROM generate_series(1, 20000) n"
    )
    conn.execute("ANALYZE operator_acts")
    plan = factories.column(
        conn, "EXPLAIN SELECT * FROM operator_acts WHERE kind = 'run' AND subject = '7'"
        " ORDER BY id DESC LIMIT 20")  # fmt: skip
    assert "operator_acts_subject_idx" in "\n".join(plan)


def test_commands_act_as_the_login_or_as_they_are_told(conn: Any) -> None:
    run_id = factories.run(conn)
    console.printed("cancel", run_id, "--reason", "too old")
    console.printed("queues", "pause", "load", "--by", "ann", "--reason", "a test")
    console.printed("queues", "resume", "load")
    assert (workers_console("--off"), workers_console("--on", "--requested-by", "bob")) == (0, 0)
    found = console.reply("acts")
    assert {row["via"] for row in found} == {"cli"}
    assert [row["actor"] for row in found][:-1] == [
        "bob", LOGIN, LOGIN, "ann"
    ]  # fmt: skip
    assert (found[-1]["subject"], found[-1]["reason"]) == (run_id, "too old")
    assert console.reply("acts", "--actor", "ann", "--since", "1h") == [found[3]]
    assert console.reply("acts", "--kind", "run", "--subject", run_id) == [found[4]]
    assert console.reply("acts", "--before", str(found[2]["id"]), "--limit", "1") == [found[3]]
    assert "cancel" in console.printed("acts", "--action", "cancel")
    assert "'\\udc80'" in console.refusal("cancel", run_id, "--by", "\udc80")


def workers_console(*argv: str) -> int:
    return worker_control.main(["--queue", "gpu", "--host", "box", *argv])


LOGIN = f"{getpass.getuser()}@{socket.gethostname()}"


# --- many at once --------------------------------------------------------------------------------


def test_many_runs_are_cancelled_each_with_its_outcome(conn: Any) -> None:
    first, second, over = factories.run(conn), factories.run(conn), failed_run(conn)
    waiting = factories.node(conn, first)
    done = runs.cancel_many([second, over, "nobody", "a\x00", first, second], by="ann")
    assert [(one["id"], one["outcome"], one["status"]) for one in done] == [
        (second, "cancelled", "running"), (over, "refused", "failed"),
        ("nobody", "unknown", None), ("a\x00", "unknown", None), (first, "cancelled", "running"),
    ]  # fmt: skip
    assert [one["reason"] for one in done[:3]] == [None, "it is failed", "there is no such run"]
    assert factories.reread(conn, waiting)["status"] == "cancelled"
    assert listed() == [("cancel", "run", second), ("cancel", "run", first)]
    assert {row["actor"] for row in acts.list()} == {"ann"}


def test_many_runs_are_retried_each_with_its_outcome(conn: Any) -> None:
    failed, running = failed_run(conn), factories.run(conn)
    completed = factories.run(conn, status="completed")
    done = runs.retry_many([running, failed, completed], reason="fixed")
    assert [one["outcome"] for one in done] == ["refused", "queued", "refused"]
    assert "only a finished one is retried" in done[0]["reason"]
    assert "name the node" in done[2]["reason"]
    assert (runs.get(failed) or {})["status"] == "queued"
    assert only()["reason"] == "fixed"


def test_many_runs_join_the_transaction_of_the_app(conn: Any) -> None:
    run_ids = [factories.run(conn) for _ in range(3)]
    with conn.transaction(force_rollback=True):
        done = runs.cancel_many(run_ids, conn=conn)
        assert [one["outcome"] for one in done] == ["cancelled"] * 3
        assert runs.retry_many(run_ids, conn=conn)[0]["outcome"] == "queued"
    assert {(runs.get(one) or {})["status"] for one in run_ids} == {"running"}
    assert listed() == []


def test_each_run_has_a_transaction_of_its_own(conn: Any) -> None:
    runs.cancel_many([factories.run(conn) for _ in range(5)])
    assert factories.one(conn, "SELECT count(DISTINCT xmin::text) FROM operator_acts") == 5


def test_nodes_are_retried_and_cancelled_with_their_runs(conn: Any) -> None:
    run_id = failed_run(conn)
    failed = [factories.node(conn, run_id, n, status="failed")["id"] for n in ("a", "b")]
    fine = factories.node(conn, run_id, "c", status="completed")["id"]
    of_running = factories.node(conn, node_id="d", status="failed")
    waiting = factories.node(conn, node_id="e")
    job = failed_job(conn)
    given = [failed[0], fine, job, failed[1], of_running["id"]]
    done = jobs.retry_many(given, by="ann")
    outcomes = ["queued", "refused", "queued", "queued", "refused"]
    assert [one["outcome"] for one in done] == outcomes
    assert "is running: only a finished one" in done[4]["reason"]
    row = runs.get(run_id) or {}
    assert (row["status"], row["generation"]) == ("queued", 1), "once for both nodes"
    assert sorted(listed()) == sorted(
        [*(("retry", "job", one) for one in (*failed, job)), ("retry", "run", run_id)]
    )
    factories.empty(conn, "operator_acts")
    done = jobs.cancel_many([waiting["id"], of_running["id"]])
    assert [one["outcome"] for one in done] == ["cancelled", "refused"]
    assert (runs.get(waiting["run_id"]) or {})["status"] == "cancelled"
    assert (runs.get(of_running["run_id"]) or {})["status"] == "running"
    assert listed() == [("cancel", "job", waiting["id"]), ("cancel", "run", waiting["run_id"])]
    assert jobs.delete_many([waiting["id"]])[0]["outcome"] == "refused"


def test_nodes_of_one_run_are_cancelled_in_one_transaction(conn: Any) -> None:
    run_id = factories.run(conn)
    waiting = [factories.node(conn, run_id, f"n{n}")["id"] for n in range(3)]
    running = transitions.claim_node(conn)["id"]
    waiting.remove(running)
    parked = factories.node(conn, run_id, "ask", status="awaiting_input")["id"]
    done = jobs.cancel_many([running, *waiting, parked])
    assert [one["outcome"] for one in done] == ["asked to stop", *["cancelled"] * 3]
    assert factories.one(conn, "SELECT count(DISTINCT xmin::text) FROM operator_acts") == 1
    assert jobs.cancel_many([running])[0]["outcome"] == "asked to stop"


def test_a_run_whose_nodes_are_in_several_batches_is_retried_once(
    conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "BATCH", 2)
    for run_id in ("a", "b"):
        failed_run(conn, id=run_id)
    nodes = [("a", "x"), ("b", "x"), ("a", "y")]
    given = [factories.node(conn, *where, status="failed")["id"] for where in nodes]
    assert [one["outcome"] for one in jobs.retry_many(given)] == ["queued"] * 3
    assert [(runs.get(one) or {})["generation"] for one in ("a", "b")] == [1, 1]


@pytest.mark.parametrize("act", [runs.cancel_many, runs.retry_many, jobs.cancel_many])
def test_nothing_is_done_for_a_wrong_id_or_name(conn: Any, act: Callable[..., object]) -> None:
    run_id, job_id = factories.run(conn), factories.ingest(conn)["id"]
    for ids, more in (([run_id, job_id, 7], {}), ([run_id, job_id], {"by": "a\x00"})):
        with pytest.raises(errors.InvalidConfig):
            act(ids, **more)
    assert (runs.get(run_id) or {})["status"] == "running"
    assert (jobs.get(job_id) or {})["status"] == "queued"
    assert act([]) == []


def test_a_command_takes_several_runs_and_jobs(conn: Any) -> None:
    first, second, job = factories.run(conn), factories.run(conn), factories.ingest(conn)["id"]
    shown = console.printed("cancel", first, job, second, "--by", "ann")
    assert shown == f"run {first}: cancelled\njob {job}: cancelled\nrun {second}: cancelled\n"
    done = console.command("retry", first, job, "nobody")
    assert (done.code, "nobody: there is no such job" in done.err) == (1, True)
    assert done.out == f"run {first}: queued\njob {job}: queued\n"
    found = console.reply("cancel", first, second)
    assert [one["outcome"] for one in found] == ["cancelled", "refused"]
    assert "several" in console.refusal("retry", first, second, "--from", "n")
    assert len(acts.list(actor="ann")) == 3


# --- over HTTP -----------------------------------------------------------------------------------


def test_requests_act_as_their_token_or_as_they_say(conn: Any) -> None:
    name, run_id, asks = schedule(conn), factories.run(conn), asking(conn)
    job, over = factories.ingest(conn)["id"], failed_run(conn)

    async def use(service: AsyncClient) -> list[Any]:
        await service.runs.cancel(run_id, by="ann", reason="too old")
        await service.runs.retry(over, by="ann")
        await service.runs.answer(asks, "ask", 1, by="ann")
        await service.jobs.cancel(job, reason="a test")
        await service.jobs.retry(job, by="ann")
        await service.queues.pause("load", by="ann", reason="a test")
        await service.queues.resume("load")
        await service.queues.limit("load", rate="1/s", by="ann")
        await service.schedules.pause(name)
        await service.schedules.resume(name, by="ann")
        await service.schedules.run_now(name, by="ann")
        first = await service.acts.list(limit=8)
        assert first == (await service.acts.list())[:8]
        found = await service.acts.list(kind="run", subject=run_id)
        assert await service.acts.list(actor="ann", action="cancel") == found
        return await service.acts.list(since=timedelta(hours=1))

    found = asgi_service.called(use)[::-1]
    token = "http (operate token)"
    assert [(row["action"], row["kind"], row["actor"]) for row in found] == [
        ("cancel", "run", "ann"), ("retry", "run", "ann"), ("answer", "run", "ann"),
        ("cancel", "job", token), ("retry", "job", "ann"), ("pause", "queue", "ann"),
        ("resume", "queue", token), ("limit", "queue", "ann"), ("pause", "schedule", token),
        ("resume", "schedule", "ann"), ("run now", "schedule", "ann"),
    ]  # fmt: skip
    assert {row["via"] for row in found} == {"http"}
    assert found[0]["reason"] == "too old"


def test_many_are_changed_over_http(conn: Any) -> None:
    run_ids, over = [factories.run(conn) for _ in range(2)], failed_run(conn)
    job, node = failed_job(conn), factories.node(conn, over, status="failed")["id"]

    async def use(service: AsyncClient) -> None:
        done = await service.runs.cancel_many([*run_ids, over], by="ann")
        assert [one["outcome"] for one in done] == ["cancelled", "cancelled", "refused"]
        assert [one["status"] for one in done] == ["running", "running", "failed"]
        done = await service.runs.retry_many(run_ids[:1])
        assert done[0]["outcome"] == "queued"
        done = await service.jobs.retry_many([job, node, "nobody"], by="bob")
        assert [one["outcome"] for one in done] == ["queued", "queued", "unknown"]
        done = await service.jobs.cancel_many([job], reason="no")
        assert (done[0]["outcome"], done[0]["status"]) == ("cancelled", "queued")
        assert (await service.jobs.cancel_many([job]))[0]["status"] == "canceled"
        for ids in ([], ["x"] * 501):
            with pytest.raises(errors.RequestRefused):
                await service.runs.cancel_many(ids)
        with pytest.raises(errors.UnknownJob):
            await service.jobs.retry(node)

    asgi_service.called(use)
    found = acts.list()
    assert {row["subject"] for row in found if row["actor"] == "ann"} == {*run_ids}
    assert {row["subject"] for row in found if row["actor"] == "bob"} == {job, node, over}


def test_a_token_to_submit_changes_many_as_it_changes_one(conn: Any) -> None:
    run_id, submitter = factories.run(conn), "a-token-that-submits-0123456789"

    async def use(service: AsyncClient) -> None:
        assert (await service.runs.cancel_many([run_id]))[0]["outcome"] == "cancelled"
        assert (await service.jobs.retry_many(["nobody"]))[0]["outcome"] == "unknown"

    asgi_service.called(use, submitter, token_submit=submitter)
    assert only()["actor"] == "http (submit token)"


@pytest.mark.parametrize(
    ("headers", "actor"),
    [
        ([(b"x-user", "änn".encode())], "änn"),
        ([], "somebody"),
        ([(b"x-user", b"")], "somebody"),
        ([(b"x-user", b"ann"), (b"x-user", b"bob")], None),
        ([(b"x-user", b"\xff")], None),
        ([(b"x-user", b"x" * 201)], None),
    ],
)
def test_the_person_whom_a_proxy_names_is_the_actor(
    conn: Any, headers: list[tuple[bytes, bytes]], actor: str | None
) -> None:
    async def use(service: AsyncClient) -> None:
        await service.queues.pause("load", by="somebody")

    if actor is None:
        with pytest.raises(errors.QueueWorkflowsError, match="HTTP 422"):
            asgi_service.called(use, headers=headers, app_user_header="X-User")
        assert listed() == []
    else:
        asgi_service.called(use, headers=headers, app_user_header="X-User")
        assert only()["actor"] == actor
    asgi_service.called(use, headers=headers)
    assert acts.list()[0]["actor"] == "somebody"


def test_a_token_to_read_lists_acts_and_does_none(conn: Any) -> None:
    run_id, reader = factories.run(conn), "a-token-that-reads-0123456789"
    queues.pause("load", by="ann")

    async def use(service: AsyncClient) -> None:
        assert [row["actor"] for row in await service.acts.list()] == ["ann"]
        with pytest.raises(errors.AccessDenied):
            await service.runs.cancel(run_id, by="ann")

    asgi_service.called(use, reader, token_read=reader)
    assert len(acts.list()) == 1


@pytest.mark.parametrize("text", ["", "a\x00", "\ud800", "x" * 1001, 7])
@pytest.mark.parametrize("name", ["by", "reason"])
def test_a_request_with_a_name_or_reason_that_no_act_can_have_is_refused(
    conn: Any, name: str, text: Any
) -> None:
    run_id = factories.run(conn)
    reply = asgi_service.post(f"/api/v1/runs/{run_id}/cancel", {name: text})
    assert reply.status_code == 422, reply.text
    assert (runs.get(run_id) or {})["status"] == "running"


# --- the table -----------------------------------------------------------------------------------


def test_an_app_that_acts_by_sql_may_record_it(conn: Any) -> None:
    conn.execute("INSERT INTO operator_acts (actor, action, kind, subject, reason)"
                 " VALUES ('ann', 'cancel', 'run', 'r1', 'wrong input')")  # fmt: skip
    assert (only()["via"], only()["subject"]) == ("sql", "r1")


def test_acts_are_kept_as_long_as_events(conn: Any) -> None:
    conn.execute("INSERT INTO operator_acts (actor, action, kind, subject, at)"
                 " SELECT 'a', 'cancel', 'run', n::text, now() - n * interval '1 day'"
                 " FROM unnest('{1, 29, 31, 90}'::int[]) n")  # fmt: skip
    assert history.prune()["acts"] == 2
    assert [row["subject"] for row in acts.list()] == ["29", "1"]


@pytest.mark.parametrize(
    "statement", ["UPDATE operator_acts SET actor = 'me'", "DELETE FROM operator_acts"]
)
def test_nobody_edits_acts(conn: Any, statement: str) -> None:
    queues.pause("load", by="ann")
    with pytest.raises(psycopg.Error, match="append-only"):
        conn.execute(statement.encode())
    assert only()["actor"] == "ann"


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("actor", ""), ("actor", "x" * 801), ("via", "smoke"), ("action", "x" * 101),
        ("kind", ""), ("subject", "x" * 1001), ("reason", "x" * 8001), ("at", "infinity"),
    ],
)  # fmt: skip
def test_the_table_bounds_what_an_app_writes(conn: Any, column: str, value: str) -> None:
    row = {"actor": "a", "action": "cancel", "kind": "run", "subject": "r"} | {column: value}
    with pytest.raises(psycopg.errors.CheckViolation):
        factories.insert(conn, "operator_acts", **row)


GUEST = "queue_workflows_guest"


@pytest.mark.parametrize("purpose", ["read", "submit"])
def test_who_may_only_read_or_submit_cannot_choose_the_login_or_time(
    conn: Any, purpose: str
) -> None:
    run_id = asking(conn)
    with conn.transaction(force_rollback=True):
        conn.execute(f"CREATE ROLE {GUEST}".encode())
        conn.execute(f"GRANT USAGE ON SCHEMA public TO {GUEST}".encode())
        conn.execute(f"SET LOCAL ROLE {GUEST}".encode())
        lacks = rights.lacking(conn, purpose)
        conn.execute("RESET ROLE")
        for statement in rights.grants(lacks, GUEST):
            conn.execute(statement.encode())
        conn.execute(f"SET LOCAL ROLE {GUEST}".encode())
        assert acts.list(conn=conn) == []
        if purpose == "submit":
            runs.answer(run_id, "ask", 1, by="ann", conn=conn)
            assert acts.list(conn=conn)[0]["action"] == "answer"
        for columns in ("login", "at", "id", *(["actor"] if purpose == "read" else [])):
            with pytest.raises(psycopg.errors.InsufficientPrivilege), conn.transaction():
                conn.execute(
                    f"INSERT INTO operator_acts ({columns}, action, kind, subject)"
                    " VALUES (DEFAULT, 'cancel', 'run', 'r')".encode()
                )
