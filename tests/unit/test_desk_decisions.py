"""What a worker decides about its jobs in one situation each; `test_desk.py` has the orders."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Generator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psycopg
import pytest
from psycopg import pq

from queue_workflows import config, db
from queue_workflows.claim import claims, outcomes
from queue_workflows.db import link, statements
from queue_workflows.run import executors, launcher, wire
from queue_workflows.runtime import clock, exit_codes, kernel, signals
from queue_workflows.worker import (
    claimed_job,
    desk,
    guards,
    inline,
    job_logs,
    leases,
    process,
    queue_state,
    shapes,
)
from tests.support.executors import Job, task_row

STALL = guards.Failure(exit_codes.STALL, "stall_trip", "no beat")
DEATH = executors.Death("killed by SIGKILL", {}, False, "")
DONE = outcomes.Outcome("completed", 0.001)


class Place:
    """An executor with one job."""

    shared = False

    def __init__(self, job: claimed_job.ClaimedJob) -> None:
        self.jobs = {1: job}


class Runner:
    """Executors that record what is asked of them."""

    gives_back = False
    accepts = True

    def __init__(self, slots: int, killed: list[bool]) -> None:
        self.room = slots
        self.killed = killed
        self.interrupted: list[tuple[str, str]] = []
        self.unread: list[Callable[[], object]] = []
        """What the executors have sent and nobody has read."""
        self.answered: list[Any] = []
        """The executors whose questions were answered."""

    def start(self, job: Any, *, isolated: bool = False, shared: bool = False) -> None:
        self.room -= 1
        job.place = Place(job)

    def catch_up(self) -> None:
        while self.unread:
            self.unread.pop()()

    def interrupt(self, job: Any, reason: str) -> None:
        self.interrupted.append((job.id, reason))

    def kill(self, place: Any, signum: int, why: str) -> None:
        self.killed.append(signum == signal.SIGKILL)

    def answer(self, place: Any, number: int, answer: Any) -> None:
        self.answered.append(place)

    def recorded(self, job: Any, found: Any) -> None:
        """Do nothing about the end of a job."""


class World:
    """A worker of one ingest queue without a database, at a time that the test sets."""

    def __init__(self, *, slots: int = 1, ends_with_job: bool = False, queue: str = "load") -> None:
        self.now = 1000.0
        self.killed: list[bool] = []
        logs = job_logs.JobLogs(lambda _: None, lambda: self.now)
        self.desk = desk.Desk(
            lambda: None,
            lambda _: None,
            logs,
            ends_with_job=ends_with_job,
            now_fn=lambda: self.now,
        )
        self.runner = Runner(slots, self.killed)
        who = claims.Claimant("w:1:0:ex-1", "host", queue, 30.0)
        runner: Any = self.runner
        shape = shapes.Shape(slots, gpu=queue == "gpu")
        self.queue = queue_state.Queue(who, shape, runner)
        self.desk.queues.append(self.queue)
        self.leases = leases.Leases(
            self.desk, logs, hold=lambda _: True, ring=lambda: None, report=lambda: {"columns": {}},
            now_fn=lambda: self.now,
        )  # fmt: skip

    def request(self) -> link.Request:
        found = self.desk.next()
        assert found is not None
        return found

    def claimed(self) -> int:
        """How many jobs the next statement claims."""
        parameters: Any = next(self.request().script).parameters
        return parameters["claim"]

    def claim(
        self, *names: str, claim_no: int = 1, crashes: int = 0, timeout_s: float = 600
    ) -> None:
        """Let a claim find these jobs."""
        self.desk.look()
        rows = self.rows(*names, claim_no=claim_no, crashes=crashes, timeout_s=timeout_s)
        self.request().done(rows)

    def rows(
        self, *names: str, claim_no: int = 1, crashes: int = 0, timeout_s: float = 600
    ) -> list[tuple[bytes | None, ...]]:
        """Return the rows of a claim that finds these jobs."""
        texts = ([name, claim_no, crashes, timeout_s, "task"] for name in names)
        return [
            (*(str(each).encode() for each in text), *[None] * 4, b"{}", None, None, b"0")
            for text in texts
        ]

    def job(self, name: str) -> claimed_job.ClaimedJob:
        return self.queue.jobs[name]

    def ended(self, name: str, outcome: outcomes.Outcome = DONE) -> None:
        self.runner.room += 1
        self.desk.ended(self.job(name), outcome)
        self.desk.room()

    def died(self, name: str, death: executors.Death = DEATH) -> None:
        self.runner.room += 1
        self.desk.died(self.job(name), death)

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.desk.tick(self.now)

    def ask(self, name: str, first: int) -> None:
        """Let a handler send the part of its stream with this number."""
        request = {"op": "stream", "first": first, "names": [], "parts": []}
        question = {"no": first, "what": "step", "request": request}
        self.desk.asked(self.job(name), question)

    def write(self, rows: Sequence[Any] = ()) -> dict[str, Any]:
        """Write the next end of a job; return what the first statement of it is given."""
        request = self.request()
        script = request.script
        given: Any = next(script).parameters
        request.done(True)
        return given

    @property
    def to_write(self) -> list[str]:
        """The jobs whose ends are to be written, but completed ones."""
        return [each.job.id for each in self.desk._writes if each.ends]

    def renew(self, **rows: dict[str, Any]) -> None:
        """Renew the leases; only these rows are found."""
        self.leases.renew_now()
        request = self.leases.next()
        assert request is not None
        assert next(request.script).text == statements.claims.renew["ingest_jobs"].text
        known: dict[str, Any] = {"claim_no": 1, "cancel": False}
        request.done([claims.Renewal(name, **known | row) for name, row in rows.items()])


def recorded_by(request: link.Request) -> list[str]:
    """Return the ids of the jobs that a statement of claims records."""
    statement = next(request.script)
    own = statements.claims.ingest_rows.text, statements.claims.node_rows.text
    while statement.text not in own:
        statement = request.script.send([])
    given: Any = statement.parameters
    if "done" in given:
        return [each["id"] for each in json.loads(given["done"])]
    return [given["job"]]


@pytest.mark.parametrize("queue", ["load", "gpu"])
def test_each_of_several_completed_jobs_is_recorded(queue: str) -> None:
    """A statement of gpu nodes records one of them."""
    world = World(slots=3, queue=queue)
    names = {"a", "b", "c"}
    world.claim(*names)
    for name in names:
        world.ended(name)
    world.desk.stop(60.0)  # it claims no other
    recorded: list[str] = []
    while world.queue.jobs:
        request = world.request()
        recorded += recorded_by(request)
        request.done([])
    assert sorted(recorded) == sorted(names)


@pytest.mark.parametrize("off", [False, True], ids=["SIGTERM", "OFF"])
def test_a_handler_whose_begin_is_unread_is_not_taken_for_one_that_waits(off: bool) -> None:
    world = World(slots=2)
    world.claim("begun", "waits")
    for name in ("begun", "waits"):
        world.desk.waits(world.job(name))
    world.runner.unread.append(lambda: world.desk.started(world.job("begun")))
    if off:
        world.desk.switch(world.queue, "finish", hard=False)
    else:
        world.desk.stop(60.0)
    assert [job_id for job_id, _ in world.runner.interrupted] == ["waits"]


@pytest.mark.parametrize("off", [False, True], ids=["SIGTERM", "OFF"])
def test_a_job_that_is_found_to_wait_after_the_stop_goes_back(off: bool) -> None:
    world = World(slots=2)
    world.claim("runs", "waits")
    if off:
        world.desk.switch(world.queue, "finish", hard=False)
    else:
        world.desk.stop(60.0)
    assert not world.runner.interrupted
    world.desk.waits(world.job("waits"))
    assert [job_id for job_id, _ in world.runner.interrupted] == ["waits"]


def refused(sqlstate: str, kind: type[psycopg.Error] = psycopg.Error) -> psycopg.Error:
    """Return an error of the database with this state."""
    error = kind("refused")
    error.sqlstate = sqlstate  # type: ignore[misc]  its classes have it
    return error


def test_results_whose_record_takes_too_long_are_recorded_apart() -> None:
    world = World(slots=3)
    world.claim("a", "b", "c")
    for name in "abc":
        world.ended(name)
    world.desk.stop(60.0)
    request = world.request()
    assert sorted(recorded_by(request)) == ["a", "b", "c"]
    request.refused(refused("57014", psycopg.OperationalError))
    assert world.to_write == ["a", "b", "c"]


def test_one_of_many_results_that_is_locked_lets_the_others_be_recorded_in_few_statements() -> None:
    names = [f"j{number}" for number in range(100)]
    world = World(slots=len(names))
    world.claim(*names)
    for name in names:
        world.ended(name)
    world.desk.stop(60.0)
    recorded: list[list[str]] = []
    while [*world.queue.jobs] != ["j57"]:
        request = world.request()
        recorded.append(recorded_by(request))
        if "j57" in recorded[-1]:
            request.refused(refused(desk.LOCKED))
        else:
            request.done([])
    assert len(recorded) < 30
    assert sum("j57" in each for each in recorded) == 3


def test_an_error_that_a_trigger_raises_is_of_a_result_and_does_not_pass() -> None:
    """Its SQLSTATE may be that of a server which is not ready."""
    world = World(slots=2)
    world.claim("a", "b")
    for name in "ab":
        world.ended(name)
    world.desk.stop(60.0)
    raised: dict[int, bytes | None] = {pq.DiagnosticField.SOURCE_FUNCTION: b"exec_stmt_raise"}
    error = psycopg.errors.ObjectNotInPrerequisiteState("the app refuses a", info=raised)
    world.request().refused(error)
    assert sorted(world.to_write) == ["a", "b"]


@pytest.mark.parametrize(
    "error",
    [refused(desk.LOCKED), refused("25006", psycopg.OperationalError)],
    ids=["locked", "read-only"],
)
def test_what_is_written_about_a_job_keeps_its_order(error: psycopg.Error) -> None:
    world = World(slots=2)
    world.claim("a", "b")
    world.ask("a", 1)
    world.ask("a", 2)
    world.ask("b", 1)
    refusals, written = 2, list[str]()
    for _ in range(20):
        world.later(1.0)
        if (request := world.desk.next()) is None:
            continue
        given: Any = next(request.script).parameters
        if given["job"] == "a" and refusals:
            request.refused(error)
            refusals -= 1
            world.ask("a", 4 - refusals)
        else:
            request.done({})
            written.append(f"{given['job']}{given['first']}")
    assert sorted(written) == ["a1", "a2", "a3", "a4", "b1"]
    assert [each for each in written if each != "b1"] == ["a1", "a2", "a3", "a4"]


def test_writes_that_wait_for_a_lock_keep_their_order_beside_a_record() -> None:
    world = World(slots=3)
    world.claim("a", "b", "c")
    world.ask("a", 1)
    world.ask("a", 2)
    world.request().refused(refused(desk.LOCKED))
    world.ask("b", 1)
    world.request().done({})
    world.ended("c")
    world.later(desk.ASIDE_S)
    recording = world.request()
    assert recorded_by(recording) == ["c"]
    recording.done([])
    written: list[int] = []
    for _ in range(2):
        request = world.request()
        given: Any = next(request.script).parameters
        written.append(given["first"])
        request.done({})
    assert written == [1, 2]


def test_a_question_is_answered_although_its_job_has_ended() -> None:
    """A thread that the handler has left may wait for it."""
    world = World()
    world.claim("a")
    place = world.job("a").place
    request = {"op": "begin", "kind": "step", "name": "s", "key": ""}
    world.desk.asked(world.job("a"), {"no": 1, "what": "step", "request": request})
    world.ended("a")
    world.request().done({})
    assert world.runner.answered == [place]


def test_a_job_whose_lease_is_over_does_not_start() -> None:
    """The process was stopped. Its executors have ended, and another one takes their place."""
    world = World()
    world.claim("a", "b")
    world.now += 31.0
    world.died("a", DEATH._replace(by_deadline=True))
    world.desk.room()
    assert world.job("b").place is None
    assert world.to_write == ["a", "b"]


def test_a_result_whose_reply_is_lost_is_looked_for_before_it_is_recorded_again() -> None:
    world = World()
    world.claim("a")
    world.ended("a")
    world.request().lost()
    world.request().done([])  # claims that it does not know
    script = world.request().script
    assert next(script).text == statements.claims.has_recorded["ingest_jobs"].text
    assert script.send([]).text == statements.claims.ingest_rows.text


@pytest.mark.parametrize("row", [[], [{"recorded": 1}]])
def test_an_event_of_a_model_whose_reply_is_lost_is_written_again_unless_it_is_there(
    row: list[Any],
) -> None:
    world = World(queue="gpu")
    world.desk._models = mock.Mock(may_claim=True, is_changing=False)
    world.claim("a")
    world.desk.event(world.job("a"), "model_load_start", None)
    for lost in (True, False):
        request = world.request()
        script = request.script
        assert next(script).text == statements.claims.has_recorded["workflow_node_jobs"].text
        if row:
            with pytest.raises(StopIteration):
                script.send(row)
        else:
            add = statements.job_events.add["workflow_node_jobs"]
            assert script.send(row).text == add.text
        request.lost() if lost else request.done(None)
    assert world.desk.next() is None


def test_steps_that_follow_each_other_do_not_keep_a_result_from_being_recorded() -> None:
    """Whenever the worker may send a statement, a handler waits for an answer."""
    world = World(slots=2)
    world.claim("steps", "ends")
    world.ended("ends")
    request = {"op": "begin", "kind": "step", "name": "s", "key": ""}
    own = statements.claims.ingest_rows.text
    for number in range(1, 4):
        question = {"no": number, "what": "step", "request": request}
        world.desk.asked(world.job("steps"), question)
        sent = world.request()
        if next(sent.script).text == own:
            break
        sent.done({})
    assert number == 2


def test_the_ends_of_several_jobs_are_written_before_one_claim_for_all_their_places() -> None:
    world = World(slots=2)
    world.claim("a", "b")
    for name in "ab":
        world.ended(name, outcomes.Outcome("failed", 0.001))
    assert [world.write()["job"] for _ in "ab"] == ["a", "b"]
    assert world.claimed() == 2


def test_a_result_is_recorded_after_the_events_of_its_model() -> None:
    world = World(queue="gpu")
    models: Any = mock.Mock(may_claim=True, is_changing=False, ended=lambda _, outcome: outcome)
    world.desk._models = models
    world.claim("a")
    for name in ("model_load_start", "model_load_done"):
        world.desk.event(world.job("a"), name, None)
    world.ended("a")
    assert world.queue.done == []
    assert world.to_write == ["a"]


def test_what_the_database_refuses_for_now_does_not_keep_other_ends_from_being_written() -> None:
    world = World(slots=2)
    world.claim("a", "b")
    for name in "ab":
        world.ended(name, outcomes.Outcome("failed", 0.001))
    world.request().refused(psycopg.errors.QueryCanceled())
    world.later(desk.RETRY_FIRST_S)
    assert world.write()["job"] == "b"
    assert world.to_write == ["a"]


def test_a_claim_that_took_too_long_is_followed_by_one_of_fewer_jobs() -> None:
    """A trigger of the app may take some time for each row."""
    world = World(slots=8)
    wanted: list[int] = []
    for _ in range(3):
        request = world.request()
        given: Any = next(request.script).parameters
        wanted.append(given["claim"])
        request.refused(psycopg.errors.QueryCanceled())
        world.later(desk.RETRY_MAX_S)
    assert wanted == [8, 4, 2]
    world.request().done(world.rows("a"))
    assert world.claimed() == 2, "that of one job was quick enough"


def test_a_row_whose_claim_takes_too_long_each_time_stops_no_other() -> None:
    """A trigger of the app may be slow for it. It is postponed, as refused rows are."""
    known, world, sent = statements.claim_isolation, World(), list[Any]()
    world.request().refused(psycopg.errors.QueryCanceled())
    request = world.request()

    def run() -> None:
        sent.append(next(request.script))
        while True:
            if sent[-1].text == statements.claims.ingest_rows.text:
                sent.append(request.script.throw(psycopg.errors.QueryCanceled()))
            elif sent[-1].text == known.claimable["ingest_jobs"].text:
                sent.append(request.script.send([{"id": "slow"}, {"id": "other"}]))
            else:
                sent.append(request.script.send([]))

    with pytest.raises(psycopg.errors.QueryCanceled) as slow:
        run()
    postpone = known.postpone["ingest_jobs"].text
    assert [each.parameters["job"] for each in sent if each.text == postpone] == ["slow"]
    assert sent[-1] == db.COMMIT
    request.refused(slow.value)
    world.later(desk.RETRY_MAX_S)
    assert world.claimed() == 1


def test_an_end_that_takes_too_long_each_time_delays_no_other_job() -> None:
    """Its result may be large, or a trigger of the app may be slow for this row."""
    world = World(slots=2)
    world.claim("slow", "quick")
    world.ended("slow", outcomes.Outcome("failed", 0.001))
    world.request().refused(psycopg.errors.QueryCanceled())
    world.ended("quick")
    recording = world.request()
    assert recorded_by(recording) == ["quick"]
    recording.done(world.rows("next"))
    assert world.job("next").place is not None
    assert world.to_write == ["slow"]


def test_an_end_that_takes_too_long_each_time_is_given_up() -> None:
    world = World()
    world.claim("a")
    world.ended("a", outcomes.Outcome("failed", 0.001))
    for _ in range(desk.TIMEOUTS + desk.REFUSALS - 1):
        world.request().refused(psycopg.errors.QueryCanceled())
        world.later(desk.RETRY_MAX_S)
    charge: Any = next(world.request().script)
    assert charge.text == statements.recovery.count_crash["ingest_jobs"].text


def test_statements_that_were_slow_some_time_ago_do_not_make_a_slow_one_fail() -> None:
    world = World()
    world.claim("a")
    for number in range(1, desk.TIMEOUTS + 1):
        world.ask("a", number)
        world.request().refused(psycopg.errors.QueryCanceled())
        world.job("a").lease_end.beat(world.now)
        world.later(desk.ASIDE_S)
        world.request().done({})
    world.ask("a", desk.TIMEOUTS + 1)
    world.request().refused(psycopg.errors.QueryCanceled())
    assert len(world.runner.answered) == desk.TIMEOUTS, "the last one is tried again"


def test_results_that_cannot_be_recorded_for_now_are_limited() -> None:
    """For example, a trigger of the app needs a row that another session has locked."""
    world = World(slots=8)
    for number in range(4 * desk.MOST):
        world.later(0.001)
        if (request := world.desk.next()) is None:
            continue
        given: Any = next(request.script).parameters
        if given.get("claim"):
            names = [f"{number}-{place}" for place in range(given["claim"])]
            request.done(world.rows(*names))
            for name in names:
                world.ended(name, outcomes.Outcome("failed", 0.001))
        else:
            request.refused(psycopg.errors.LockNotAvailable())
    assert desk.MOST <= len(world.queue.jobs) < desk.MOST + 8


# Time limits and guards.


@pytest.mark.parametrize(
    ("code", "took", "kind"),
    [
        (exit_codes.BUDGET, 5.0, "timed_out"),
        (exit_codes.BUDGET, 4.9, "completed"),
        (exit_codes.STALL, 9.0, "completed"),
    ],
)
def test_a_decided_time_limit_holds_unless_the_result_was_complete_before_it(
    code: int, took: float, kind: str
) -> None:
    world = World()
    world.claim("a", timeout_s=5.0)
    job = world.job("a")
    world.desk.decide(job, "too long", lambda: iter(()), code=code)  # type: ignore[arg-type,return-value]
    world.ended("a", outcomes.Outcome("completed", took))
    assert [each.kind for _, each in world.queue.done] == (
        ["completed"] if kind == "completed" else []
    )
    assert world.to_write == ([] if kind == "completed" else ["a"])


def test_the_executor_is_killed_if_sigterm_does_not_end_it_and_its_worker_stays() -> None:
    world = World()
    world.claim("a", timeout_s=5.0)
    world.later(5.0)
    assert world.killed == [False]
    world.later(desk.TERM_S / 2)
    assert world.killed == [False]
    world.later(desk.TERM_S)
    assert world.killed == [False, True]
    world.died("a", DEATH._replace(killed_for="job a"))
    assert world.to_write == ["a"]
    assert not world.desk.stopping


def test_a_worker_that_ends_with_its_job_kills_at_once_and_leaves_once_it_has_ended() -> None:
    world = World(ends_with_job=True)
    world.claim("a", timeout_s=5.0)
    world.later(5.0)
    assert (world.killed, world.desk.stopping) == ([True], False)
    world.died("a", DEATH._replace(killed_for="job a"))
    assert (world.desk.stopping, world.desk.exit_code) == (True, exit_codes.BUDGET)


def test_such_a_worker_leaves_also_if_nothing_ends_the_executor() -> None:
    """A driver may keep a process in the kernel, where SIGKILL waits."""
    world = World(ends_with_job=True)
    world.claim("a", timeout_s=5.0)
    world.later(5.0)
    world.later(desk.TERM_S * 1.5)
    assert (world.desk.stopping, world.desk.exit_code) == (True, exit_codes.BUDGET)


def test_it_stays_if_the_handler_had_ended_and_only_its_record_takes_long() -> None:
    world = World(ends_with_job=True)
    world.claim("a", timeout_s=5.0)
    world.later(5.0)
    world.ended("a")
    world.later(desk.TERM_S * 5)
    assert not world.desk.stopping
    assert [job.id for job, _ in world.queue.done] == ["a"]


def test_a_guard_that_fails_after_the_handler_has_ended_ends_nothing() -> None:
    world = World()
    world.claim("a", timeout_s=5.0)
    world.ended("a")
    world.later(60.0)
    assert world.killed == []
    assert world.to_write == []


def test_a_stop_policy_of_one_queue_returns_no_job_of_another() -> None:
    world = World()
    runner: Any = Runner(1, world.killed)
    who = claims.Claimant("w:1:0:ex-2", "host", "fetch", 30.0)
    other = queue_state.Queue(who, shapes.Shape(1), runner)
    world.desk.queues.append(other)
    world.claim("a")
    world.request().done(world.rows("b"))
    world.desk.requeue("policy", lambda: None, world.queue)
    assert world.job("a").end is not None
    assert other.jobs["b"].end is None
    world.desk.requeue("policy", lambda: None)
    assert other.jobs["b"].end is not None


# Jobs that run alone.


def test_a_job_that_ran_alone_holds_up_no_other_while_its_row_is_locked() -> None:
    world = World()
    world.claim("a", crashes=2)
    world.ended("a", outcomes.Outcome("failed", 0.001))
    world.request().refused(psycopg.errors.LockNotAvailable())
    world.desk.look()
    assert world.claimed() == 1


@pytest.mark.parametrize("outcome", [DONE, outcomes.Outcome("failed", 0.001)])
def test_a_job_that_is_to_run_alone_waits_for_the_records_of_the_others(
    outcome: outcomes.Outcome,
) -> None:
    """Its parent charges it if it is all that the dead worker held."""
    world = World(slots=2)
    world.claim("a")
    world.claim("b", crashes=2)
    world.ended("a", outcome)
    assert world.job("b").place is None
    world.request().done([] if outcome is DONE else True)
    assert world.job("b").place is not None


@pytest.mark.parametrize(
    "error", [psycopg.errors.LockNotAvailable(), psycopg.errors.QueryCanceled()]
)
def test_a_job_that_is_to_run_alone_waits_for_no_row_that_is_locked_or_slow(
    error: psycopg.Error,
) -> None:
    """The row of the other job is locked by somebody else, or a trigger is slow for it."""
    world = World(slots=2)
    world.claim("a")
    world.claim("b", crashes=2)
    assert world.job("b").place is None
    world.ended("a", outcomes.Outcome("failed", 0.001))
    world.request().refused(error)
    assert world.job("b").place is not None


# Deaths.


def test_a_death_has_the_last_lines_of_its_own_job() -> None:
    """Async jobs run beside each other in one process."""
    world = World(slots=2)
    world.claim("a", "b")
    for name in "ab":
        world.desk.printed(world.job(name), f"of {name}\n".encode())
    with mock.patch.object(desk, "_charge") as charge:
        world.died("a")
        world.request()
    assert charge.call_args.args[2]["last_lines"] == ["of a"]


def test_only_the_job_that_ran_is_charged_for_a_death_and_the_others_wait() -> None:
    world = World(slots=3)
    world.claim("a", "b", "c")
    world.died("b")
    assert world.to_write == ["b"]
    assert [world.job(name).place is not None for name in "ac"] == [True, True]


@pytest.mark.parametrize("crashes", [0, 1])
def test_nothing_is_claimed_ahead_while_a_job_is_held_that_may_kill_the_worker(
    crashes: int,
) -> None:
    world = World()
    for _ in range(queue_state.ROUNDS):
        world.queue.window.ended(0.0001)
    world.claim("a", crashes=crashes)
    world.ended("a")
    assert (world.claimed() > 1) is (crashes == 0)


def test_nothing_is_claimed_ahead_while_a_job_is_held_whose_lease_has_lapsed_before() -> None:
    world = World()
    for _ in range(queue_state.ROUNDS):
        world.queue.window.ended(0.0001)
    world.desk.look()
    (row,) = world.rows("a")
    world.request().done([(*row[:-1], b"1")])
    assert world.job("a").lapse_count == 1
    world.ended("a")
    assert world.claimed() == 1


@pytest.mark.parametrize(
    ("text", "heard"),
    [("host:load", True), ("host:all", True), ("host:other", False), ("other:all", False)],
)
def test_a_switch_of_the_queue_or_of_its_whole_host_is_looked_at_at_once(
    text: str, heard: bool
) -> None:
    world = World()
    world.leases._control_at = 2000.0
    world.leases.notified("worker_control", text)
    assert (world.leases._control_at == 0.0) is heard


# Waiting jobs.


def test_a_job_that_waits_too_long_goes_back_and_none_is_claimed_ahead_after_it() -> None:
    world = World()
    for _ in range(queue_state.ROUNDS):
        world.queue.window.ended(0.0001)
    world.claim("a", "b")
    assert [job.id for job in world.queue.waiting] == ["b"]
    world.later(claimed_job.WAIT_S)
    assert not world.queue.waiting
    assert world.to_write == ["b"]
    assert world.queue.window.ahead == 0


def test_jobs_that_are_handed_back_since_they_waited_keep_no_slot_free() -> None:
    world = World()
    world.claim(*"abcd")
    world.later(claimed_job.WAIT_S)
    assert world.to_write == ["b", "c", "d"]
    world.ended("a")
    assert world.write()["jobs"] == ["b"]
    request = world.request()
    assert recorded_by(request) == ["a"]
    request.done(world.rows("b", claim_no=2))
    assert world.job("b").place is not None
    assert world.to_write == ["c", "d"]


def test_a_job_that_was_claimed_ahead_starts_even_if_its_claim_took_long() -> None:
    """Else a worker whose statements take long would hand back whatever it claims ahead."""
    world = World()
    request = world.request()
    world.now += 2 * claimed_job.WAIT_S
    request.done(world.rows("a", "b"))
    world.later(claimed_job.WAIT_S / 2)
    assert world.to_write == []
    world.ended("a")
    assert world.job("b").place is not None


def test_a_job_that_came_back_while_its_handler_still_runs_here_goes_back_again() -> None:
    world = World(slots=2)
    world.claim("a")
    before = world.job("a")
    world.claim("a", claim_no=2)
    assert world.to_write == ["a"]
    assert world.job("a") is before
    assert (before.end is not None, before.place is not None) == (True, True)
    assert before.end is not None
    assert before.end.make is None, "nothing is written about the claim that was lost"


def test_a_waiting_job_starts_as_soon_as_an_executor_is_free() -> None:
    world = World()
    world.claim("a", "b")
    world.ended("a")
    assert world.job("b").place is not None


def test_a_lost_claim_that_is_committed_late_is_given_back_too() -> None:
    """The server goes on with a statement whose client is gone."""
    world = World()
    world.request().lost()
    for wait_s in (0.0, desk.UNSURE_S):
        world.later(wait_s)
        request = world.request()
        assert next(request.script).text == statements.handback.strays["ingest_jobs"].text
        request.done([])
    world.later(desk.UNSURE_S)
    assert world.claimed() == 1


def test_a_lost_claim_that_cannot_be_given_back_for_now_stops_no_other() -> None:
    """A trigger of the app may be slow for its row, each time."""
    world = World()
    world.request().lost()
    strays = statements.handback.strays["ingest_jobs"].text
    asked: list[bool] = []
    for _ in range(20):
        world.later(1.0)
        if (request := world.desk.next()) is not None:
            asked.append(next(request.script).text == strays)
            request.refused(psycopg.errors.QueryCanceled()) if asked[-1] else request.done([])
    assert {True, False} == {*asked}
    assert asked.count(True) > 2


# Renewals.


def test_a_renewal_loses_cancels_and_keeps_waiting_and_running_jobs() -> None:
    world = World(slots=2)
    world.claim(*"abcde")
    world.renew(b={"cancel": True}, c={}, d={"cancel": True})
    assert world.killed == [True], "a was lost"
    assert world.job("a").end is not None
    assert world.runner.interrupted == [("b", "cancelled")]
    assert "e" not in world.queue.jobs, "it was lost before it started"
    assert world.to_write == ["d"], "it is handed back, which ends it as cancelled"
    assert [job.id for job in world.queue.waiting] == ["c"]


def test_a_lock_on_one_row_puts_off_its_lease_alone() -> None:
    world = World(slots=2)
    world.claim("a", "b")
    ends = world.job("b").lease_end.ends
    world.now += 5.0
    world.renew(a={}, b={"renewed": False})
    assert (world.job("a").lease_end.ends, world.job("b").lease_end.ends) == (ends + 5.0, ends)
    assert world.leases.due_at() <= world.now + leases.AGAIN_S


@pytest.mark.parametrize(
    "error",
    [
        psycopg.errors.RaiseException("the app's own trigger refuses it"),
        psycopg.errors.LockNotAvailable(),
        psycopg.errors.QueryCanceled(),
    ],
    ids=["refuses", "waits for a lock", "is slow"],
)
def test_one_row_whose_renewal_fails_by_a_trigger_of_the_app_stops_no_other(
    error: psycopg.Error,
) -> None:
    """Each lease is then renewed by a statement of its own."""
    world = World(slots=3)
    world.claim(*"abc")
    ends = world.job("b").lease_end.ends
    world.now += 5.0
    world.leases.renew_now()
    request = world.leases.next()
    assert request is not None
    script = request.script
    next(script)
    script.throw(error)
    row = {"claim_no": 1, "cancel": False, "renewed": True}
    script.send([row | {"id": "a"}])
    script.throw(error)
    with pytest.raises(StopIteration) as end:
        script.send([row | {"id": "c"}])
    request.done(end.value.value)
    assert [world.job(name).lease_end.ends - ends for name in "abc"] == [5.0, 0.0, 5.0]
    assert world.killed == []


def test_a_lease_that_is_renewed_holds_although_others_take_long_after_it() -> None:
    """Each statement about a slow row may take up to 5 s, and all of them as long as a lease."""
    slow = [f"slow-{number}" for number in range(6)]
    world = World(slots=8)
    world.claim("a", *slow)
    ends = world.job("a").lease_end.ends
    world.now += 5.0
    world.leases.renew_now()
    request = world.leases.next()
    assert request is not None
    script = request.script
    next(script)
    script.throw(psycopg.errors.QueryCanceled())
    script.send([{"id": "a", "claim_no": 1, "cancel": False, "renewed": True}])
    for _ in slow[1:]:
        world.later(4.5)
        script.throw(psycopg.errors.QueryCanceled())
    world.later(4.5)
    with pytest.raises(StopIteration) as end:
        script.throw(psycopg.errors.QueryCanceled())
    request.done(end.value.value)
    assert world.now > ends
    assert world.job("a").end is None
    assert world.job("a").lease_end.ends == ends + 5.0


def test_renewals_that_take_long_leave_time_to_read_a_switch() -> None:
    world = World()
    world.claim("a")
    world.leases.renew_now()
    request = world.leases.next()
    assert request is not None
    world.now += 11.0
    request.done([claims.Renewal("a", 1, False)])
    following = world.leases.next()
    assert following is not None
    assert next(following.script).text == statements.controls.off_policy.text


def test_a_worker_without_a_database_sleeps_until_a_time_that_does_not_depend_on_it() -> None:
    world = World()
    woken: list[float] = []
    world.leases._wake_at = woken.append
    world.leases.tick(world.now)
    assert world.leases.tick(world.now) > world.now + 1.0
    assert woken == []
    world.leases.next()
    assert world.now < woken[0] < world.now + 1.0, "the database is back"


def test_a_deadline_of_the_executors_that_could_not_be_sent_is_sent_again_at_once() -> None:
    """The launcher may have too many packets to read. The deadline that it knows is earlier."""
    world = World()
    world.claim("a")
    sent: list[float] = []
    refuses = [True, True, False]
    world.leases._hold = lambda until: not (sent.append(until) or refuses[len(sent) - 1])
    world.renew(a={})
    for _ in range(2):
        at = world.leases.tick(world.now)
        assert at < world.now + 1.0
        world.now = at
    world.leases.tick(world.now)
    assert sent == [sent[0]] * 3


def test_a_cursor_that_the_database_refuses_keeps_no_other_from_being_stored() -> None:
    world = World(slots=2)
    while (request := world.leases.next()) is not None:
        request.done([])
    world.claim("a", "b")
    for name in "ab":
        world.job(name).cursors["items", ""] = 5
    world.renew(a={}, b={})
    stored: list[list[str]] = []
    while (request := world.leases.next()) is not None:
        statement = next(request.script)
        if statement.text != statements.job_steps.store_cursors["ingest_jobs"].text:
            request.done([])
            continue
        given: Any = statement.parameters
        stored.append([*given["jobs"]])
        request.refused(refused("22003"))
    assert stored == [["a", "b"], ["a"], ["b"]]


def test_a_job_whose_record_is_in_flight_is_not_lost_by_a_renewal_that_misses_it() -> None:
    world = World(slots=2)
    world.claim("a")
    world.ended("a")
    recording = world.request()
    world.renew()
    assert world.job("a").is_over
    recording.done([])
    assert not world.queue.jobs


def test_the_first_job_of_many_does_not_keep_the_budget_of_the_one_before() -> None:
    world = World()
    world.claim("a", timeout_s=5.0)
    world.ended("a")
    world.claim("b", timeout_s=600)
    world.later(20.0)
    assert world.killed == []


@pytest.mark.parametrize("again", [False, True], ids=["one claim", "the next claim runs already"])
@pytest.mark.parametrize("heard", [False, True])
def test_a_cancel_during_the_claim_of_its_job_is_looked_for_once_the_job_is_known(
    heard: bool, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", "postgresql://nowhere/none")  # a log line names it
    world = World(slots=2)
    while (request := world.leases.next()) is not None:
        request.done([])
    claim = world.request()
    if heard:
        world.leases.notified("job_cancel", "a")
    assert world.leases.next() is None
    claim.done(world.rows("a"))
    if again:
        world.desk.look()
        assert world.claimed() == 1
    world.leases.tick(world.now)
    renewal = world.leases.next()
    assert (renewal is not None) is heard


@pytest.mark.parametrize("often", ["0", "-1"])
def test_a_setting_of_no_time_does_not_keep_the_worker_busy(
    often: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DB_URL", "CLAIM_POLL_S", "DL_HEARTBEAT_SEC", "WORKER_CONTROL_POLL_S"):
        value = "postgresql://nowhere/none" if name == "DB_URL" else often
        monkeypatch.setenv(f"QUEUE_WORKFLOWS_{name}", value)
    world = World()
    assert world.desk.tick(world.now) > world.now
    world.claim("a")
    for _ in range(10):
        if (request := world.leases.next()) is not None:
            request.done([])
    assert world.leases.next() is None
    assert world.leases.due_at() > world.now


# Exits.


def test_a_claim_that_did_not_get_its_locks_has_not_shown_that_the_queue_is_empty() -> None:
    """Else a worker with --burst, or `run_once`, would end. It claims again at its next poll."""
    world = World()
    world.later(0.0)
    world.request().refused(psycopg.errors.LockNotAvailable())
    assert world.desk.next() is None
    assert world.queue.looks
    world.later(config.CLAIM_POLL_S.read())
    world.request().done([])
    assert not world.queue.looks


def test_a_worker_that_stops_records_results_before_it_hands_back_what_waits() -> None:
    """Else the results are lost if the database is too slow for all of it."""
    world = World(slots=2)
    world.claim("a", "b", "c", "d")
    world.ended("a")
    world.desk.stop(60.0)
    assert world.to_write == ["d"]
    recording = world.request()
    assert recorded_by(recording) == ["a"]
    recording.done([])
    assert world.write()["jobs"] == ["d"]


@pytest.mark.parametrize("other", [False, True], ids=["alone", "beside another job"])
def test_a_worker_that_stops_waits_after_a_slow_write_only_if_it_has_others(other: bool) -> None:
    """Else it could reach the time of its exit before it tries the last write again."""
    world = World(slots=2)
    world.claim("slow", "other")
    for name in ["slow", "other"][: 1 + other]:
        world.ended(name, outcomes.Outcome("failed", 0.001))
    world.desk.stop(60.0)
    request = world.request()
    world.now += 5.0
    request.refused(psycopg.errors.QueryCanceled())
    world.later(desk.ASIDE_S)
    assert world.write()["job"] == ("other" if other else "slow")
    assert world.desk.next() is None


def test_an_exit_that_was_decided_is_not_put_off_by_a_second_decision() -> None:
    world = World()
    world.desk.leave(exit_codes.CONTROL)
    first = world.desk.exit_by
    world.now += 1.0
    world.desk.leave(exit_codes.BUDGET)
    world.desk.stop(60.0)
    assert (world.desk.exit_by, world.desk.exit_code) == (first, exit_codes.CONTROL)


def test_the_executors_of_a_stopped_worker_and_launcher_end_before_the_lease() -> None:
    """The kernel takes some time to kill a launcher and its executors."""
    assert leases.EARLY_S - launcher.GRACE_S >= 0.1 - 1e-9


# The timers of the kernel, where handlers run in the worker's process.


class Timer:
    """A death timer that records for how long it is armed."""

    made: dict[int, Timer] = {}  # noqa: RUF012  emptied by the fixture

    def __init__(self, code: int) -> None:
        self.left: float | None = None
        self.made[code] = self

    def set(self, until: float | None) -> None:
        self.left = None if until is None else until - clock.boot_s()

    def close(self) -> None:
        self.left = None


class Loop:
    """A loop that is not run."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> dict[int, Timer]:
    monkeypatch.setattr(kernel, "DeathTimer", Timer)
    monkeypatch.setattr(Timer, "made", {})
    return Timer.made


@pytest.fixture
def threads(timers: object) -> Generator[inline.InlineExecutors]:
    """The thread of an inline worker, with the exit that enables the timers."""
    loop: Any = Loop()
    made = inline.InlineExecutors(loop, None, loop, loop, on_exit=os._exit)
    yield made
    made.close()


def _started(threads: inline.InlineExecutors, *limits_s: float) -> None:
    job: Any = Job(task_row("t"), in_run=False)
    job.guards = [guards.Budget(clock.boot_s(), each) for each in limits_s]
    job.lease_end = guards.LeaseEnd(clock.boot_s(), 600.0)
    threads.start(job)


def _ended(threads: inline.InlineExecutors) -> None:
    body = wire.completed_body(DONE)
    threads._take(threads.place, wire.COMPLETED, threads.place.count, body)


def test_lease_and_time_limit_of_an_inline_job_are_armed_and_disarmed_with_its_end(
    timers: dict[int, Timer], threads: inline.InlineExecutors
) -> None:
    _started(threads, 30.0)
    threads.hold(clock.boot_s() + 20.0)
    assert timers[exit_codes.BUDGET].left == pytest.approx(30.0 + inline.LATE_S, abs=1.0)
    assert timers[exit_codes.LOST].left == pytest.approx(20.0, abs=1.0)
    _ended(threads)
    assert [each.left for each in timers.values()] == [None, None]
    threads.hold(clock.boot_s() + 20.0)
    assert timers[exit_codes.LOST].left is None, "an idle worker outlives any database"


def test_a_job_of_the_calling_thread_waits_for_no_fork(
    threads: inline.InlineExecutors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that waits has no time limit, and the thread never says that it is ready."""
    waited = list[Any]()
    monkeypatch.setattr(Job, "wait", waited.append)
    _started(threads, 10.0)
    assert not waited


@pytest.mark.parametrize("limits_s", [(), (2000.0,), (1.0, 2000.0)])
def test_a_job_does_not_inherit_the_shorter_time_limit_of_the_one_before(
    timers: dict[int, Timer], threads: inline.InlineExecutors, limits_s: tuple[float, ...]
) -> None:
    """The next job starts while the end of the one before is told."""
    _started(threads, 10.0)
    threads.place.jobs.clear()
    _started(threads, *limits_s)
    left = min(limits_s) + inline.LATE_S if limits_s else None
    assert timers[exit_codes.BUDGET].left == (left and pytest.approx(left, abs=1.0))


@pytest.mark.parametrize("others", [True, False])
def test_a_signal_wakes_the_loop_unless_the_app_has_a_loop_of_its_own(others: bool) -> None:
    """Python calls its handler only after a wait that began just after the signal."""
    (bell, rope), (theirs, end) = socket.socketpair(), socket.socketpair()
    own: Any = SimpleNamespace(_rope=rope)
    with bell, rope, theirs, end, signals.StopRequest() as stop:
        for each in (bell, rope, theirs, end):
            each.setblocking(False)
        before = end.fileno() if others else -1
        signal.set_wakeup_fd(before)
        try:
            with process.Worker._woken_by_signals(own):
                signal.raise_signal(signal.SIGTERM)
            assert (theirs if others else bell).recv(2) == bytes([signal.SIGTERM])
            assert stop.count == 1
        finally:
            assert signal.set_wakeup_fd(-1) == before
