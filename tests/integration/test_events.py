"""Handlers sleep and wait for events without a worker, and an event that counts ends a wait."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import psycopg
import pytest

import queue_workflows
from queue_workflows import (
    db,
    errors,
    events,
    history,
    ingest_executor,
    jobs,
    node_executor,
    runs,
    steps,
)
from tests.hostile import roles
from tests.support import asgi_service, console, constants, factories, sweeps, transitions
from tests.support.factories import job
from tests.support.wait import until

Row = dict[str, Any]
pytestmark = pytest.mark.usefixtures("invariants_hold")


def queued(conn: db.Connection, task: Callable[..., Any]) -> None:
    queue_workflows.register_ingest_task("t", task)
    factories.ingest(conn)


def run(conn: db.Connection) -> str | None:
    """Run the job if it can be claimed."""
    claimed = _claimed(conn)
    return ingest_executor.execute_ingest_job(claimed[0]) if claimed else None


def _claimed(conn: db.Connection) -> list[Row]:
    return transitions.claim(conn, transitions.who("fetch"), promote=True)


def is_waiting(conn: db.Connection) -> bool:
    row = job(conn)
    return (row["status"], row["blocked_reason"], row["attempts"]) == ("queued", "not_due", 0)


def due_now(conn: db.Connection) -> None:
    """Let all the time of waits pass."""
    conn.execute("UPDATE job_steps SET due_at = now() WHERE state = 'waiting'")
    conn.execute("UPDATE ingest_jobs SET available_at = now() WHERE status = 'queued'")


def test_a_job_waits_uncounted_until_its_event_is_sent(conn: db.Connection) -> None:
    queued(conn, lambda reason: {"ok": steps.wait_for_event("approved", key="a")})
    assert run(conn) == "failed"
    assert is_waiting(conn)
    assert run(conn) is None
    assert events.send("approved", key="b", value=1) and events.send("other", key="a")
    assert run(conn) is None
    assert events.send("approved", key="a", value={"by": "ann"})
    assert run(conn) == "completed"
    assert job(conn)["result"] == {"ok": {"by": "ann"}}
    assert (job(conn)["attempts"], job(conn)["crash_count"], job(conn)["claim_no"]) == (0, 0, 2)
    why = "SELECT detail ->> 'reason' FROM ingest_job_events WHERE event_type = 'requeued'"
    assert factories.column(conn, why) == ["waits for event 'approved' (key 'a')"]


def test_an_event_that_was_sent_before_the_wait_counts_and_the_first_one_wins(
    conn: db.Connection,
) -> None:
    assert events.send("approved", value=[1])
    assert not events.send("approved", value=[2])
    queued(conn, lambda reason: steps.wait_for_event("approved"))
    assert run(conn) == "completed"
    assert job(conn)["result"] == {"result": [1]}
    assert [(row["name"], row["value"]) for row in events.list()] == [("approved", "[1]")]
    with pytest.raises(psycopg.errors.UniqueViolation):
        conn.execute("INSERT INTO events (name) VALUES ('approved')")


def swept() -> None:
    """Do what an orchestrator does about the notification of an event."""
    with sweeps.tasks() as orchestrator:
        orchestrator.wake_waiting()


def test_a_plain_insert_notifies_at_its_commit_and_a_rollback_does_not(
    conn: db.Connection, heard: Callable[[], list[tuple[str, str]]]
) -> None:
    queued(conn, lambda reason: steps.wait_for_event("approved", key="k"))
    run(conn)
    heard()
    with db.connect() as own, own.transaction(force_rollback=True):
        own.execute("INSERT INTO events (name, key) VALUES ('approved', 'k')")
    assert is_waiting(conn)
    with db.connect() as own, own.transaction():
        events.send("approved", key="k", value=True, conn=own)
        assert ("orchestrator_work", "sent") not in heard()
    assert ("orchestrator_work", "sent") in heard()
    swept()
    assert factories.one(conn, "SELECT resume_at <= now() FROM ingest_jobs")
    assert run(conn) == "completed"
    assert job(conn)["result"] == {"result": True}


def test_a_sender_wakes_only_those_who_wait_for_its_event(conn: db.Connection) -> None:
    for event in ("approved", "other"):
        held = transitions.claimed(conn, "ingest")
        assert transitions.begin_wait(conn, held, event) == "waiting"
        transitions.suspend(conn, held)
    conn.execute("INSERT INTO events (name) VALUES ('other')")
    events.send("approved")
    assert factories.column(conn, "SELECT name FROM job_steps WHERE state = 'waiting'") == ["other"]
    swept()


def test_an_event_is_sent_although_its_jobs_cannot_be_woken_yet(
    conn: db.Connection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    queued(conn, lambda reason: steps.wait_for_event("approved"))
    run(conn)
    db.close_pool()
    constants.put(monkeypatch, "db.pool.STATEMENT_TIMEOUT_S", 1.0)
    with db.connect() as other, other.transaction():
        other.execute("LOCK TABLE ingest_jobs")
        assert events.send("approved", value=1)
    assert "event 'approved' is stored" in caplog.text
    assert is_waiting(conn)
    swept()
    assert run(conn) == "completed"


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_a_wait_ends_at_its_time_limit_with_the_default(
    conn: db.Connection, is_async: bool
) -> None:
    def plain(reason: str) -> Any:
        return steps.wait_for_event("approved", timeout_s=3600, default={"ok": False})

    async def coroutine(reason: str) -> Any:
        return await steps.wait_for_event_async("approved", timeout_s=3600, default={"ok": False})

    queued(conn, coroutine if is_async else plain)
    run(conn)
    due = "SELECT available_at BETWEEN now() + interval '59 min' AND now() + interval '61 min'"
    assert factories.one(conn, f"{due} FROM ingest_jobs")
    due_now(conn)
    assert run(conn) == "completed"
    assert job(conn)["result"] == {"ok": False}


def test_an_event_after_the_time_limit_still_counts_if_the_job_has_not_run(
    conn: db.Connection,
) -> None:
    queued(conn, lambda reason: steps.wait_for_event("approved", timeout_s=3600, default=0))
    run(conn)
    events.send("approved", value=7)
    due_now(conn)
    run(conn)
    assert job(conn)["result"] == {"result": 7}


def test_a_wait_that_goes_on_keeps_the_time_of_its_first_call(conn: db.Connection) -> None:
    queued(conn, lambda reason: steps.wait_for_event("approved", timeout_s=3600))
    run(conn)
    conn.execute("UPDATE job_steps SET due_at = now() + interval '10 min'")
    conn.execute("UPDATE ingest_jobs SET available_at = now()")
    run(conn)
    assert is_waiting(conn)
    assert factories.one(conn, "SELECT resume_at < now() + interval '11 min' FROM ingest_jobs")


def test_an_event_of_the_name_of_a_sleep_does_not_end_it(conn: db.Connection) -> None:
    queued(conn, lambda reason: steps.sleep(hours=1))
    for _ in range(2):
        run(conn)
        assert is_waiting(conn)
        events.send(factories.one(conn, "SELECT name FROM job_steps"))
        assert run(conn) is None
        conn.execute("UPDATE ingest_jobs SET available_at = now()")
    due_now(conn)
    assert run(conn) == "completed"


@pytest.mark.parametrize("kind", transitions.KINDS)
def test_a_claim_that_is_lost_begins_no_wait_and_gives_nothing_up(
    conn: db.Connection, kind: transitions.Kind
) -> None:
    held = transitions.claimed(conn, kind)
    for other in ({"claim_no": held["claim_no"] + 1}, {"worker_id": "w2"}):
        assert transitions.begin_wait(conn, held | other, "approved") == "lost"
        assert transitions.suspend(conn, held | other) is None
    assert factories.one(conn, "SELECT count(*) FROM job_steps") == 0
    assert factories.reread(conn, held)["status"] == "running"


def test_the_first_of_several_waits_brings_a_job_back(conn: db.Connection) -> None:
    held = transitions.claimed(conn, "ingest")
    for event, after_s in (("approved", None), ("paid", 60.0), (None, 3600.0)):
        assert transitions.begin_wait(conn, held, event, after_s) == "waiting"
    transitions.suspend(conn, held)
    left = "SELECT extract(epoch FROM resume_at - now())::float8 FROM ingest_jobs"
    assert 0 < factories.one(conn, left) <= 60


@pytest.mark.parametrize("is_noted", [True, False])
def test_an_event_during_the_end_of_an_attempt_with_several_waits_is_not_missed(
    conn: db.Connection, is_noted: bool
) -> None:
    held = transitions.claimed(conn, "ingest")
    for event in ("approved", None):
        assert transitions.begin_wait(conn, held, event) == "waiting"
    if is_noted:
        events.send("approved")
        transitions.suspend(conn, held)
    else:
        with db.connect() as own, own.transaction():
            own.execute("SELECT FROM job_steps WHERE kind = 'event' FOR UPDATE")
            transitions.suspend(conn, held)
    soon = "SELECT resume_at < now() + interval '2 seconds' FROM ingest_jobs"
    assert factories.one(conn, soon)


def test_a_wait_without_an_end_is_looked_at_after_a_year(conn: db.Connection) -> None:
    held = transitions.claimed(conn, "ingest")
    transitions.begin_wait(conn, held, "approved", None)
    transitions.suspend(conn, held)
    assert factories.one(conn, "SELECT resume_at < now() + interval '367 days' FROM ingest_jobs")


def test_a_job_that_was_cancelled_while_it_ran_does_not_wait(conn: db.Connection) -> None:
    held = transitions.claimed(conn, "ingest")
    transitions.begin_wait(conn, held, "approved")
    jobs.cancel(held["id"])
    assert job(conn)["status"] == "running"
    transitions.suspend(conn, held)
    assert job(conn)["status"] == "cancelled"


def test_a_wait_that_is_over_is_read_by_later_attempts_and_not_written(
    conn: db.Connection,
) -> None:
    def task(reason: str) -> Any:
        found = steps.wait_for_event("approved")
        if queue_workflows.current_job().claim == 1:
            raise queue_workflows.Retry
        return found

    events.send("approved", value=1)
    queued(conn, task)
    conn.execute("UPDATE ingest_jobs SET max_attempts = 2")
    run(conn)
    before = conn.execute("SELECT * FROM job_steps").fetchall()
    conn.execute("DELETE FROM events")
    conn.execute("UPDATE ingest_jobs SET available_at = NULL")
    assert run(conn) == "completed"
    assert job(conn)["result"] == {"result": 1}
    assert conn.execute("SELECT * FROM job_steps").fetchall() == before


def test_an_event_does_not_shorten_the_back_off_of_a_later_attempt(conn: db.Connection) -> None:
    def task(reason: str) -> None:
        if queue_workflows.current_job().claim == 1:
            steps.wait_for_event("approved", timeout_s=3600)
        raise OSError("broke")

    queued(conn, task)
    conn.execute("UPDATE ingest_jobs SET max_attempts = 2")
    run(conn)
    assert is_waiting(conn)
    conn.execute("UPDATE ingest_jobs SET available_at = now()")
    run(conn)
    before = job(conn)
    assert (before["status"], before["attempts"], before["claim_no"]) == ("queued", 1, 2)
    assert events.send("approved")
    swept()
    assert job(conn)["available_at"] == before["available_at"]
    assert run(conn) is None


def test_an_event_is_sent_from_an_event_loop(conn: db.Connection, dsn: str) -> None:
    async def sent() -> list[bool]:
        async with await psycopg.AsyncConnection.connect(dsn) as own:
            mine = [await events.send_async("approved", key="own", value=1, conn=own)]
        return [*mine, *[await events.send_async("approved", value=7) for _ in range(2)]]

    assert asyncio.run(sent()) == [True, True, False]
    found = {(row["key"], row["value"]) for row in events.list("approved")}
    assert found == {("own", "1"), ("", "7")}
    queued(conn, lambda reason: steps.wait_for_event("approved"))
    assert run(conn) == "completed"
    assert job(conn)["result"] == {"result": 7}


def test_a_time_limit_of_zero_only_looks(conn: db.Connection) -> None:
    queued(conn, lambda reason: [steps.wait_for_event("a", timeout_s=0, default="none")] * 2)
    assert run(conn) == "completed"
    assert job(conn)["result"] == {"result": ["none", "none"]}


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_a_sleep_gives_the_job_back_until_its_time(conn: db.Connection, is_async: bool) -> None:
    ran: list[str] = []

    def plain(reason: str) -> str:
        steps.step("before", ran.append, "before")
        steps.sleep(hours=6)
        steps.sleep(minutes=1, key="short")
        return "done"

    async def coroutine(reason: str) -> str:
        await asyncio_step("before", ran)
        await steps.sleep_async(hours=6)
        await steps.sleep_async(60, key="short")
        return "done"

    queued(conn, coroutine if is_async else plain)
    for hours in (6, 1 / 60):
        assert run(conn) == "failed"
        assert is_waiting(conn)
        left = factories.one(
            conn, "SELECT extract(epoch FROM resume_at - now())::float8 FROM ingest_jobs"
        )
        assert hours * 3600 - 60 <= left <= hours * 3600
        assert run(conn) is None
        due_now(conn)
    assert run(conn) == "completed"
    assert (ran, job(conn)["attempts"]) == (["before"], 0)


async def asyncio_step(name: str, ran: list[str]) -> None:
    async def append() -> None:
        ran.append(name)

    await steps.step_async(name, append)


def test_a_handler_that_catches_every_error_does_not_end_its_own_wait(
    conn: db.Connection,
) -> None:
    def task(reason: str) -> str:
        try:
            steps.wait_for_event("approved")
        except Exception:
            return "swallowed"
        return "approved"

    queued(conn, task)
    run(conn)
    assert is_waiting(conn)


def test_a_node_waits_and_its_run_goes_on(conn: db.Connection) -> None:
    queue_workflows.register_node("asks", lambda: {"ok": steps.wait_for_event("approved")})
    factories.node(conn, node_module="asks", max_attempts=1)
    assert node_executor.execute_node(transitions.claim_node(conn)) == "failed"
    state = "SELECT status || ' ' || blocked_reason FROM workflow_node_jobs"
    assert factories.one(conn, state) == "queued not_due"
    events.send("approved", value=True)
    assert node_executor.execute_node(transitions.claim_node(conn)) == "completed"
    assert factories.one(conn, "SELECT context_delta FROM workflow_node_jobs") == {"ok": True}


def test_a_waiting_job_can_be_cancelled_and_an_event_leaves_it_alone(
    conn: db.Connection,
) -> None:
    queued(conn, lambda reason: steps.wait_for_event("approved"))
    run(conn)
    jobs.cancel(job(conn)["id"])
    events.send("approved")
    assert job(conn)["status"] == "cancelled"


def test_why_names_the_event(conn: db.Connection) -> None:
    queued(conn, lambda reason: steps.wait_for_event("approved", key="a", timeout_s=60))
    run(conn)
    said = "its handler waits for event 'approved' with key 'a' until "
    assert said in console.command("why", job(conn)["id"]).out


def test_an_event_sent_while_the_handler_ends_its_attempt_is_not_missed(
    conn: db.Connection,
) -> None:
    def task(reason: str) -> Any:
        try:
            return steps.wait_for_event("approved")
        except BaseException:
            events.send("approved", value=1)
            raise

    queued(conn, task)
    run(conn)
    soon = "SELECT resume_at < now() + interval '2 seconds' FROM ingest_jobs"
    assert factories.one(conn, soon)
    due_now(conn)
    assert run(conn) == "completed"


def test_the_sweep_wakes_for_an_event_whose_transaction_was_open_when_the_wait_began(
    conn: db.Connection,
) -> None:
    queued(conn, lambda reason: steps.wait_for_event("approved"))
    with db.connect() as own, own.transaction():
        events.send("approved", value=1, conn=own)
        assert run(conn) == "failed"
    assert is_waiting(conn)
    swept()
    assert run(conn) == "completed"


def test_the_service_wakes_for_a_plain_insert_where_no_orchestrator_runs(
    conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeps.soon(monkeypatch, "EVENTS_S")
    queued(conn, lambda reason: steps.wait_for_event("approved"))
    assert run(conn) == "failed"

    def send() -> None:
        conn.execute("INSERT INTO events (name) VALUES ('approved')")
        until(lambda: factories.one(conn, "SELECT resume_at <= now() FROM ingest_jobs"))

    asgi_service.streamed(opened=send, until=lambda _: True)
    assert run(conn) == "completed"


def test_an_open_transaction_with_an_event_holds_neither_a_job_nor_its_run(
    conn: db.Connection,
) -> None:
    queue_workflows.register_node("asks", lambda: {"ok": steps.wait_for_event("approved")})
    node = factories.node(conn, node_module="asks", max_attempts=1)
    queued(conn, lambda reason: steps.wait_for_event("approved"))
    run(conn)
    node_executor.execute_node(transitions.claim_node(conn))
    with db.connect() as own, own.transaction():
        own.execute("INSERT INTO events (name) VALUES ('approved')")
        conn.execute("SET lock_timeout = 1")
        jobs.cancel(job(conn)["id"], conn=conn)
        runs.cancel(node["run_id"], conn=conn)
        conn.execute("SET lock_timeout = 0")
    assert job(conn)["status"] == "cancelled"
    swept()


def test_a_job_that_a_session_keeps_locked_delays_the_wake_of_no_other(conn: db.Connection) -> None:
    for job_id in ("a", "b"):
        queue_workflows.register_ingest_task("t", lambda reason: steps.wait_for_event("approved"))
        factories.ingest(conn, id=job_id)
        assert run(conn) == "failed"
    with db.connect() as own, own.transaction():
        own.execute("SELECT FROM ingest_jobs WHERE id = 'a' FOR UPDATE")
        assert events.send("approved", value=1)
        assert run(conn) == "completed"
        assert run(conn) is None
    swept()
    assert run(conn) == "completed"


def test_a_transaction_that_is_about_to_end_the_wait_holds_no_worker_up(
    conn: db.Connection,
) -> None:
    queued(conn, lambda reason: steps.wait_for_event("approved"))
    run(conn)
    conn.execute("UPDATE ingest_jobs SET available_at = now()")
    claimed = _claimed(conn)  # as when its time came
    with db.connect() as own, own.transaction():
        events.send("approved", value=1, conn=own)
        assert ingest_executor.execute_ingest_job(claimed[0]) == "failed"
    swept()
    assert run(conn) == "completed"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: steps.wait_for_event(""), "the name of a step must be"),
        (lambda: steps.wait_for_event("a", key="x\ny"), "'key' must be"),
        (lambda: steps.wait_for_event("a", timeout_s=-1), "'timeout_s' must be 0 s to 366 days"),
        (lambda: steps.wait_for_event("a", timeout_s=math.nan), "'timeout_s' must be 0 s to"),
        (lambda: steps.wait_for_event("a", timeout_s="1"), "'timeout_s' must be a number"),
        (lambda: steps.wait_for_event("a", default={1}), "default of event 'a'"),
        (lambda: steps.sleep(-1), "the time to sleep must be 0 s to 366 days"),
        (lambda: steps.sleep(hours=1e9), "the time to sleep must be 0 s to 366 days"),
        (lambda: [steps.sleep(), steps.sleep()], "has been called before in this attempt"),
    ],
)
def test_bad_waits_are_refused_in_one_line(
    conn: db.Connection, call: Callable[[], Any], says: str
) -> None:
    queued(conn, lambda reason: call())
    assert run(conn) == "failed"
    assert says in job(conn)["error"]
    assert len(job(conn)["error"].splitlines()) == 1


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 101, 7])
def test_a_bad_name_of_an_event_is_refused(db: ModuleType, name: Any) -> None:
    with pytest.raises(errors.StepRefused):
        events.send(name)


def test_a_large_event_is_refused_in_one_line(
    conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = "x" * 10_000_000
    with pytest.raises(errors.InvalidPayload, match="more than the 1024 KiB"):
        events.send("a", value=large)
    line = console.refusal("events", "send", "a", "--value", json.dumps(large))
    assert "value of event 'a'" in line
    monkeypatch.setenv("QUEUE_WORKFLOWS_MAX_PAYLOAD_KB", "20000")
    with pytest.raises(errors.InvalidPayload, match="event 'a': its value is larger than 1 MiB"):
        events.send("a", value=large)
    with pytest.raises(errors.InvalidConfig, match='constraint "events_value_bound"'):
        events.send("a", value=[1e300] * 10_000)
    with pytest.raises(psycopg.errors.CheckViolation):
        conn.execute("INSERT INTO events (name, value) SELECT 'a', to_jsonb(repeat('x', 10000000))")
    assert events.list() == []


def test_events_are_sent_and_listed_by_commands(db: ModuleType) -> None:
    send = ("events", "send", "approved")
    sent = console.printed(*send, "--key", "k", "--value", '{"by": "ann"}')
    assert sent == "event approved (key k): sent\n"
    again = console.command(*send, "--key", "k")
    refused = "queue-workflows events send: event 'approved' with key 'k' was sent before\n"
    assert again == (1, "", refused)
    assert console.printed(*send) == "event approved: sent\n"
    assert "event 'approved' without a key was sent before" in console.command(*send).err
    assert "--value yes is not JSON" in console.refusal(*send, "--value", "yes")
    lines = console.printed("events", "list").splitlines()
    assert lines[2].split()[:2] == ["approved", "k"] and lines[2].endswith('{"by": "ann"}')
    assert json.loads(console.printed("events", "list", "other", "--json")) == []


def test_the_newest_events_are_listed_first(conn: db.Connection) -> None:
    for key in "012":
        events.send("approved", key=key)
    conn.execute("UPDATE events SET created_at = now() - key::int * interval '1 h'")
    assert [row["key"] for row in events.list(limit=2)] == ["0", "1"]


def test_old_events_are_deleted(conn: db.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    events.send("old")
    conn.execute("UPDATE events SET created_at = now() - interval '31 days'")
    events.send("new")
    monkeypatch.setenv("QUEUE_WORKFLOWS_NODE_EVENT_RETENTION_DAYS", "0")
    assert history.prune()["events"] == 0
    monkeypatch.delenv("QUEUE_WORKFLOWS_NODE_EVENT_RETENTION_DAYS")
    assert history.prune()["events"] == 1
    assert [row["name"] for row in events.list()] == ["new"]


def test_a_role_for_submit_sends_events_and_wakes_jobs_and_changes_nothing_else(
    conn: db.Connection, dsn: str
) -> None:
    queued(conn, lambda reason: steps.wait_for_event("approved"))
    run(conn)
    with (
        roles.role(dsn, "submit") as name,
        psycopg.connect(roles.as_role(dsn, name), autocommit=True) as own,
    ):
        for refused in (
            "INSERT INTO events (name, created_at) VALUES ('x', now())",
            "UPDATE events SET value = '1'",
            "DELETE FROM events",
            "INSERT INTO job_steps (job_table, job_id, kind, name, state, claim_no)"
            " VALUES ('ingest_jobs', 'x', 'step', 'x', 'done', 1)",
            "UPDATE job_steps SET state = 'done'",
            "SELECT queue_workflows_wake_waiting(NULL, NULL, 9)",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                own.execute(refused.encode())
        own.execute("INSERT INTO events (name, value) VALUES ('approved', '[5]')")
    swept()
    assert run(conn) == "completed"
    assert job(conn)["result"] == {"result": [5]}
