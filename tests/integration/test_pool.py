"""A pool runs several jobs of several queues at once, each as in a worker with one job."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from queue_workflows import (
    claim_worker,
    config,
    errors,
    jobs,
)
from queue_workflows import db as engine
from queue_workflows import workers as workers_api
from queue_workflows.engine import claims
from queue_workflows.worker import claims_in_flight, guards
from tests.support import factories, invariants
from tests.support.wait import until

Row = dict[str, Any]
WORKERS = [{"queue": "load.a", "concurrency": 3}, {"queue": "load.b", "concurrency": 2}]


class Bodies:
    """Tasks: job `i` reports that it runs, and waits until it or all are released."""

    def __init__(self) -> None:
        self.began: list[int] = []
        self.ended: list[int] = []
        self.threads: set[str] = set()
        self.go = threading.Event()
        self.let: set[int] = set()
        self.raises: dict[int, BaseException] = {}
        self.most = 0

    def _began(self, i: int) -> None:
        self.began.append(i)
        self.threads.add(threading.current_thread().name)
        self.most = max(self.most, len(self.began) - len(self.ended))

    def stay(self, reason: str, args: Row) -> Row:
        self._began(args["i"])
        print(f"body {args['i']}")
        try:
            deadline = time.monotonic() + 60
            while args["i"] not in self.let and not self.go.wait(0.02):
                assert time.monotonic() < deadline
            if args["i"] in self.raises:
                raise self.raises[args["i"]]
        finally:
            self.ended.append(args["i"])
        return {"i": args["i"]}

    async def wait(self, reason: str, args: Row) -> Row:
        self._began(args["i"])
        print(f"body {args['i']}")
        try:
            while args["i"] not in self.let and not self.go.is_set():
                await asyncio.sleep(0.02)
            print(f"end {args['i']}")
        finally:
            self.ended.append(args["i"])
        return {"i": args["i"]}


@pytest.fixture
def conn(db: ModuleType) -> Generator[engine.Connection]:
    with engine.connect() as conn:
        yield conn
        assert invariants.broken(conn, slack_s=5) == []


@pytest.fixture
def bodies(conn: engine.Connection) -> Generator[Bodies]:
    made = Bodies()
    config.configure(ingest_queues={"load.a", "load.b"})
    config.register_ingest_task("stay", made.stay)
    config.register_ingest_task("wait", made.wait)
    config.register_ingest_task("quick", lambda reason, args: {"i": args["i"]})
    yield made
    made.go.set()


class Left:
    """The rows at the moment at which the pool would have exited, which it does not do here."""

    def __init__(self, conn: engine.Connection, bodies: Bodies) -> None:
        self.codes: list[int] = []
        self.jobs: dict[str, Row] = {}
        self._conn = conn
        self._bodies = bodies

    def __call__(self, code: int) -> None:
        if not self.codes:
            with engine.connect() as conn:
                self.jobs = {row["id"]: row for row in rows(conn)}
        self.codes.append(code)
        self._bodies.go.set()


def enqueue(queue: str, count: int, *, task: str = "stay", first: int = 0) -> list[str]:
    args = [{"i": i} for i in range(first, first + count)]
    return jobs.enqueue_many(task_name=task, queue=queue, args=args)


@contextmanager
def running(bodies: Bodies, workers: Any = WORKERS, **more: Any) -> Generator[Any]:
    subject = claim_worker.WorkerPool(workers, **{"host": "box", "on_exit": print, **more})
    thread = threading.Thread(target=subject.run_forever, name="test-pool")
    thread.start()
    try:
        yield subject
    finally:
        bodies.go.set()
        subject.stop()
        thread.join(30)
        assert not thread.is_alive()


def rows(conn: engine.Connection) -> list[Row]:
    return conn.execute("SELECT * FROM ingest_jobs ORDER BY seq").fetchall()


def states(conn: engine.Connection, queue: str | None = None) -> Counter[str]:
    return Counter(r["status"] for r in rows(conn) if queue in (None, r["queue"]))


def row_of(conn: engine.Connection, job_id: str) -> Row:
    return next(row for row in rows(conn) if row["id"] == job_id)


def events(conn: engine.Connection, job_id: str) -> list[str]:
    query = "SELECT event_type FROM ingest_job_events WHERE job_id = %s ORDER BY id"
    return factories.column(conn, query, job_id)


def uncounted(row: Row) -> tuple[Any, ...]:
    return row["status"], row["attempts"], row["crash_count"], row["watchdog_retries"]


BACK = ("queued", 0, 0, 0)
LISTENS = "SELECT FROM workers WHERE (detail ->> 'lock')::boolean"


# --- side by side -----------------------------------------------------------------------------


def test_as_many_run_at_once_as_configured_and_the_next_when_one_ends(
    conn: engine.Connection, bodies: Bodies
) -> None:
    enqueue("load.a", 5)
    enqueue("load.b", 5, first=10)
    with running(bodies) as subject:
        until(lambda: len(bodies.began) == 5)
        until(lambda: states(conn, "load.a") == {"running": 3, "queued": 2})
        assert states(conn, "load.b") == {"running": 2, "queued": 3}
        holders = {(row["queue"], row["worker_id"]) for row in rows(conn) if row["worker_id"]}
        assert holders == {*subject.worker_ids.items()}
        bodies.let = {1}
        until(lambda: 3 in bodies.began)
        bodies.go.set()
        until(lambda: states(conn) == {"completed": 10})
    assert bodies.most == 5
    assert Counter(bodies.began) == dict.fromkeys([0, 1, 2, 3, 4, 10, 11, 12, 13, 14], 1)
    assert len(bodies.threads) <= 5, "a thread is used again"
    assert all(events(conn, row["id"]) == ["claimed", "completed"] for row in rows(conn))
    assert all(row["result"]["i"] is not None for row in rows(conn))


def test_async_handlers_share_one_thread(conn: engine.Connection, bodies: Bodies) -> None:
    enqueue("load.a", 50, task="wait")
    with running(bodies, [{"queue": "load.a", "concurrency": 40}]):
        until(lambda: len(bodies.began) == 40)
        bodies.go.set()
        until(lambda: states(conn) == {"completed": 50})
    assert bodies.most == 40
    assert bodies.threads == {"worker-async"}


def test_a_pool_has_three_connections_however_much_it_runs(
    conn: engine.Connection, bodies: Bodies
) -> None:
    query = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
    )
    enqueue("load.a", 20)
    enqueue("load.b", 20, task="wait", first=20)
    before = factories.one(conn, query)
    workers = [{"queue": f"load.{each}", "concurrency": 20} for each in "ab"]
    with running(bodies, workers):
        until(lambda: len(bodies.began) == 40)
        until(lambda: conn.execute(LISTENS).fetchone() is not None)
        # The log of what they print is stored over a fourth now and then.
        assert factories.one(conn, query) - before <= 4


def test_one_statement_renews_all_that_runs(
    conn: engine.Connection, bodies: Bodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed: list[set[str]] = []
    renew = claims.renew

    def seen(conn: Any, leases: Any, **more: Any) -> Any:
        renewed.append({lease.job_id for lease in leases})
        return renew(conn, leases, **more)

    monkeypatch.setattr(claims, "renew", seen)
    ids = enqueue("load.a", 2) + enqueue("load.b", 2, first=10, task="wait")
    with running(bodies, lease_s=6):
        until(lambda: len(bodies.began) == 4)
        renewed.clear()
        before = {row["id"]: row["lease_expires_at"] for row in rows(conn)}
        until(lambda: all(row["lease_expires_at"] > before[row["id"]] for row in rows(conn)))
        until(lambda: {*ids} in renewed)
    assert {row["crash_count"] for row in rows(conn)} == {0}


def test_each_handler_has_a_log_of_its_own(conn: engine.Connection, bodies: Bodies) -> None:
    enqueue("load.a", 3)
    enqueue("load.b", 2, task="wait", first=10)
    with running(bodies):
        until(lambda: len(bodies.began) == 5)
        bodies.go.set()
        until(lambda: states(conn) == {"completed": 5})
    query = (
        "SELECT j.args ->> 'i' AS i, l.head FROM ingest_jobs j"
        " JOIN job_attempt_logs l ON l.job_id = j.id"
    )
    found = {int(row["i"]): row["head"] for row in conn.execute(query).fetchall()}
    assert found == {
        **{i: f"body {i}\n" for i in range(3)},
        **{i: f"body {i}\nend {i}\n" for i in (10, 11)},
    }


def test_what_does_not_complete_is_recorded_while_the_others_run(
    conn: engine.Connection, bodies: Bodies
) -> None:
    failed, snoozed, fine = enqueue("load.a", 3)
    bodies.raises = {0: OSError("no"), 1: errors.Snooze(3600)}
    bodies.let = {0, 1}
    with running(bodies):
        until(lambda: row_of(conn, failed)["status"] == "failed")
        until(lambda: row_of(conn, snoozed)["blocked_reason"] == "not_due")
        assert row_of(conn, fine)["status"] == "running"
    assert "OSError: no" in row_of(conn, failed)["error"]
    assert row_of(conn, snoozed)["attempts"] == 0


def test_a_hundred_short_jobs_each_run_once(conn: engine.Connection, bodies: Bodies) -> None:
    enqueue("load.a", 100, task="quick")
    enqueue("load.b", 100, task="quick", first=100)
    with running(bodies):
        until(lambda: states(conn) == {"completed": 200}, timeout_s=30)
    assert {row["claim_no"] for row in rows(conn)} == {1}


def test_a_word_that_comes_while_an_empty_claim_returns_is_not_lost(
    conn: engine.Connection, bodies: Bodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_CLAIM_POLL_S", "3600")
    monkeypatch.setenv("QUEUE_WORKFLOWS_POLL_ONLY", "1")
    step, told = claims.ingest_step, threading.Event()

    def late(own: Any, who: Any, **more: Any) -> Any:
        found = step(own, who, **more)
        if not told.is_set() and who.queue == "load.b" and more["claim"]:
            told.set()
            enqueue("load.b", 1, task="quick")
            word = frozenset({("ingest_job_ready", "load.b")})
            subject._loop._on_wake(engine.Wake("notify", word))
        return found

    monkeypatch.setattr(claims, "ingest_step", late)
    with running(bodies) as subject:
        until(lambda: states(conn) == {"completed": 1})


# --- one of many ------------------------------------------------------------------------------


def test_an_async_handler_that_is_cancelled_ends_at_its_await_and_no_other_notices(
    conn: engine.Connection, bodies: Bodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_WORKER_CONTROL_POLL_S", "0.2")
    left = Left(conn, bodies)
    ids = enqueue("load.a", 3, task="wait")
    with running(bodies, on_exit=left):
        until(lambda: len(bodies.began) == 3)
        jobs.cancel(ids[1])
        until(lambda: row_of(conn, ids[1])["status"] == "cancelled")
        assert bodies.ended == [1], "its `finally` has run"
        bodies.go.set()
        until(lambda: states(conn) == {"completed": 2, "cancelled": 1})
    assert left.codes == []
    assert events(conn, ids[1]) == ["claimed", "cancel_requested", "cancelled"]


def test_a_cancelled_error_without_a_cancel_is_a_failure(
    conn: engine.Connection, bodies: Bodies
) -> None:
    async def gives_up() -> None:
        raise asyncio.CancelledError

    config.register_ingest_task("gives_up", gives_up)
    (job_id,) = enqueue("load.a", 1, task="gives_up")
    with running(bodies):
        until(lambda: row_of(conn, job_id)["status"] == "failed")


async def exits_in_a_task() -> dict[str, Any]:
    async def exits() -> None:
        sys.exit(3)

    child = asyncio.create_task(exits())
    await asyncio.wait([child])
    return {"saw": type(child.exception()).__name__}


async def stops_the_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)


@pytest.mark.parametrize("ends", [exits_in_a_task, stops_the_loop])
def test_a_handler_that_ends_the_run_of_the_loop_ends_no_other(
    conn: engine.Connection, bodies: Bodies, ends: Callable[[], object]
) -> None:
    config.register_ingest_task("ends", ends)
    enqueue("load.a", 2, task="wait")
    with running(bodies):
        until(lambda: len(bodies.began) == 2)
        enqueue("load.b", 2, task="ends")
        until(lambda: states(conn, "load.b") == {"completed": 2})
        assert bodies.ended == []
        bodies.go.set()
        until(lambda: states(conn) == {"completed": 4})


def test_a_handler_that_cancels_all_tasks_of_the_loop_leaves_a_pool_that_works(
    conn: engine.Connection, bodies: Bodies
) -> None:
    async def cancels_all() -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    config.register_ingest_task("cancels_all", cancels_all)
    enqueue("load.a", 1, task="wait")
    with running(bodies):
        until(lambda: len(bodies.began) == 1)
        enqueue("load.b", 1, task="cancels_all")
        until(lambda: states(conn) == {"completed": 1, "failed": 1})
        bodies.go.set()
        enqueue("load.b", 1, task="wait", first=1)
        until(lambda: states(conn) == {"completed": 2, "failed": 1})


def interrupts() -> None:
    raise KeyboardInterrupt


async def interrupts_async() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("body", [interrupts, interrupts_async])
def test_an_interrupt_that_a_handler_raises_is_its_own_failure(
    conn: engine.Connection, bodies: Bodies, body: Callable[[], object]
) -> None:
    config.register_ingest_task("interrupts", body)
    enqueue("load.b", 3, task="interrupts")
    with running(bodies):
        until(lambda: states(conn) == {"failed": 3})
        enqueue("load.b", 3, task="quick")
        until(lambda: states(conn) == {"failed": 3, "completed": 3})


def cancel(conn: engine.Connection, job_id: str) -> None:
    jobs.cancel(job_id)


def take_away(conn: engine.Connection, job_id: str) -> None:
    conn.execute("UPDATE ingest_jobs SET status = 'queued' WHERE id = %s", (job_id,))


def overrun(conn: engine.Connection, job_id: str) -> None:
    """Its budget, given when it was queued, is over soon."""


@pytest.mark.parametrize(
    ("act", "code", "ends_as"),
    [
        (cancel, guards.EXIT_CONTROL, ("cancelled", 0, 0, 0)),
        (take_away, guards.EXIT_LOST, BACK),
        (overrun, guards.EXIT_BUDGET, ("failed", 0, 0, 1)),
    ],
)
def test_a_handler_that_has_to_be_stopped_charges_no_other_job(
    conn: engine.Connection,
    bodies: Bodies,
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[Any, str], None],
    code: int,
    ends_as: tuple[Any, ...],
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_CANCEL_GRACE_S", "0.2")
    monkeypatch.setenv("QUEUE_WORKFLOWS_WORKER_CONTROL_POLL_S", "0.2")
    left = Left(conn, bodies)
    one, two, three = enqueue("load.a", 3)
    (other,) = enqueue("load.b", 1, first=10, task="wait")
    if act is overrun:
        conn.execute("UPDATE ingest_jobs SET timeout_s = 0.3 WHERE id = %s", (two,))
    with running(bodies, on_exit=left):
        until(lambda: len(bodies.began) == 4)
        act(conn, two)
        until(lambda: left.codes)
    assert left.codes[0] == code
    assert uncounted(left.jobs[two]) == ends_as
    assert {uncounted(left.jobs[each]) for each in (one, three, other)} == {BACK}
    assert {left.jobs[each]["priority"] for each in (one, three, other)} == {100}


def test_a_job_whose_next_crash_is_its_last_runs_alone(
    conn: engine.Connection, bodies: Bodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueue("load.a", 1)
    (suspect,) = enqueue("load.a", 1, first=1)
    conn.execute("UPDATE ingest_jobs SET crash_count = 2 WHERE id = %s", (suspect,))
    with running(bodies):
        until(lambda: row_of(conn, suspect)["status"] == "running")
        enqueue("load.a", 3, first=2)
        enqueue("load.b", 1, first=10)
        assert bodies.began == [0]
        bodies.let = {0}
        until(lambda: bodies.began == [0, 1])
        until(lambda: states(conn) == {"completed": 1, "running": 1, "queued": 4})
        bodies.let = {0, 1}
        until(lambda: len(bodies.began) == 6)


def test_a_job_that_waits_to_run_alone_can_be_cancelled_and_handed_back(
    conn: engine.Connection, bodies: Bodies
) -> None:
    enqueue("load.a", 1)
    (suspect,) = enqueue("load.a", 1, first=1)
    conn.execute("UPDATE ingest_jobs SET crash_count = 2 WHERE id = %s", (suspect,))
    with running(bodies):
        until(lambda: row_of(conn, suspect)["status"] == "running")
        until(lambda: conn.execute(LISTENS).fetchone() is not None)
        jobs.cancel(suspect)
        until(lambda: row_of(conn, suspect)["status"] == "cancelled")
        enqueue("load.b", 1, first=10)
        until(lambda: bodies.began == [0, 10])


# --- switched off, stopped --------------------------------------------------------------------


def test_off_of_one_queue_leaves_the_other_at_work(
    conn: engine.Connection, bodies: Bodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_HEARTBEAT_INTERVAL_S", "0.2")
    left = Left(conn, bodies)
    enqueue("load.a", 1)
    with running(bodies, on_exit=left):
        until(lambda: bodies.began == [0])
        workers_api.disable("box", "load.a", stop_policy="drain")
        enqueue("load.a", 1, first=1)
        enqueue("load.b", 2, first=10)
        until(lambda: sorted(bodies.began) == [0, 10, 11])
        bodies.let = {0, 10}
        until(lambda: states(conn) == {"completed": 2, "running": 1, "queued": 1})
        until(lambda: state_of(conn, "load.a") == "parked")
        # Nothing of it runs, so that even this stops nothing.
        workers_api.disable("box", "load.a", stop_policy="hard")
        enqueue("load.b", 1, first=12)
        until(lambda: 12 in bodies.began)
        assert left.codes == []
        workers_api.enable("box", "load.a")
        until(lambda: 1 in bodies.began)


def state_of(conn: engine.Connection, queue: str) -> str:
    return factories.one(conn, "SELECT state FROM workers WHERE queue = %s", queue)


def test_a_hard_off_of_one_queue_hands_the_others_jobs_back_in_their_place(
    conn: engine.Connection, bodies: Bodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_WORKER_CONTROL_POLL_S", "0.2")
    left = Left(conn, bodies)
    (mine,) = enqueue("load.a", 1)
    (other,) = enqueue("load.b", 1, first=10)
    with running(bodies, on_exit=left):
        until(lambda: len(bodies.began) == 2)
        workers_api.disable("box", "load.a")
        until(lambda: left.codes)
    assert left.codes[0] == guards.EXIT_CONTROL
    assert [uncounted(left.jobs[each]) for each in (mine, other)] == [BACK, BACK]
    assert [left.jobs[each]["priority"] for each in (mine, other)] == [10, 100]


def test_each_queue_is_shown_as_a_worker_with_its_jobs(
    conn: engine.Connection, bodies: Bodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_HEARTBEAT_INTERVAL_S", "0.1")
    ids = enqueue("load.a", 2)
    query = "SELECT queue, state, job_ids FROM workers ORDER BY queue"
    with running(bodies) as subject:
        until(
            lambda: (
                [(*r.values(),) for r in conn.execute(query).fetchall()]
                == [("load.a", "busy", ids), ("load.b", "idle", [])]
            )
        )
        beats = "SELECT queue, concurrency FROM worker_heartbeats ORDER BY queue"
        assert [(*r.values(),) for r in conn.execute(beats).fetchall()] == [
            ("load.a", 3),
            ("load.b", 2),
        ]
        until(lambda: len(conn.execute(LISTENS).fetchall()) == 2)
        assert len(subject.worker_ids) == 2
    found = conn.execute(query).fetchall()
    assert {row["state"] for row in found} == {"stopped"}


def test_a_stop_drains_and_then_hands_back(conn: engine.Connection, bodies: Bodies) -> None:
    left = Left(conn, bodies)
    ids = enqueue("load.a", 4)
    enqueue("load.b", 1, first=10, task="wait")
    bodies.let = {0}
    with running(bodies, on_exit=left, shutdown_timeout_s=1.0) as subject:
        until(lambda: len(bodies.began) >= 4)
        subject.stop()
        until(lambda: left.codes)
    assert left.codes[0] == 0
    found = Counter(uncounted(row) for row in left.jobs.values())
    assert found[BACK] + found["completed", 0, 0, 0] == 5
    assert left.jobs[ids[1]]["claim_no"] == 1


BLOCKED = (
    "SELECT pid FROM pg_stat_activity"
    " WHERE datname = current_database() AND wait_event_type = 'Lock'"
)


def test_a_shutdown_and_a_renewal_do_not_wait_for_each_other(
    conn: engine.Connection, bodies: Bodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renewal that starts while the shutdown hands a job back delays no exit."""
    monkeypatch.setattr(claims_in_flight, "WRITING_S", 60.0)
    monkeypatch.setenv("QUEUE_WORKFLOWS_WORKER_CONTROL_POLL_S", "600")  # it renews too
    left = Left(conn, bodies)
    (job_id,) = enqueue("load.a", 1)
    with running(bodies, on_exit=left) as subject, engine.connect() as other:
        until(lambda: bodies.began and conn.execute(LISTENS).rowcount == 2)
        keeper = subject._keeper
        until(lambda: not keeper._loop._woken and not keeper._dedicated.waiting_s)
        with other.transaction():
            other.execute("SELECT FROM ingest_jobs WHERE id = %s FOR UPDATE", (job_id,))
            subject.stop_now()
            until(lambda: factories.column(conn, BLOCKED))
            keeper.wake("renew")
            until(subject._slots[0].in_flight._writing.locked)
        until(lambda: left.codes, timeout_s=20)
    assert left.codes[0] == 0
    assert uncounted(left.jobs[job_id]) == BACK


@pytest.mark.parametrize("task", ["record", "off"])
def test_the_lease_keeper_uses_its_connection_inside_the_lock_alone(
    conn: engine.Connection, bodies: Bodies, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_WORKER_CONTROL_POLL_S", "0.2")
    subject = claim_worker.WorkerPool(WORKERS, host="box", on_exit=lambda _: bodies.go.set())
    in_flight, keeper = subject._slots[0].in_flight, subject._keeper
    writing, waiting = in_flight.writing, list[tuple[str, float]]()

    @contextmanager
    def noted() -> Generator[None]:
        waiting.append((threading.current_thread().name, keeper._dedicated.waiting_s))
        with writing():
            yield

    monkeypatch.setattr(in_flight, "writing", noted)
    (job_id,) = enqueue("load.a", 1)
    thread = threading.Thread(target=subject.run_forever, name="test-pool")
    thread.start()
    until(lambda: bodies.began)
    if task == "off":
        workers_api.disable("box", "load.a")
    else:
        in_flight.return_all("test")
        keeper.wake("batch")
    until(lambda: "requeued" in events(conn, job_id))
    subject.stop()
    bodies.go.set()
    thread.join(30)
    assert {since_s for name, since_s in waiting if name == "lease-keeper"} == {0.0}


def test_a_stop_that_comes_right_before_a_claim_is_heeded(
    conn: engine.Connection, bodies: Bodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job_id,) = enqueue("load.b", 1, task="quick")
    subject = claim_worker.WorkerPool(WORKERS, host="box", on_exit=print)
    held = subject._loop._by_name["load.b"].in_flight
    writing = held.writing

    @contextmanager
    def stopped() -> Generator[None]:
        with writing():
            subject.stop()
            yield

    monkeypatch.setattr(held, "writing", stopped)
    subject.run_forever()
    assert row_of(conn, job_id)["claim_no"] == 0


def test_a_stopping_pool_waits_for_what_runs_without_a_busy_loop(
    conn: engine.Connection, bodies: Bodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueue("load.a", 1)
    with running(bodies) as subject:
        until(lambda: bodies.began)
        for seats in subject._loop._queues:
            monkeypatch.setattr(seats.claimer, "wait_s", 0.0)  # as while a limit is being set
            seats.may_claim = True
        turns, turn_all = list[float](), subject._loop._serve_all
        monkeypatch.setattr(
            subject._loop, "_serve_all", lambda: turns.append(time.monotonic()) or turn_all()
        )
        subject.stop()
        subject._loop._ready.set()
        until(lambda: turns and time.monotonic() > turns[0] + 0.3)
        assert len(turns) <= 5
        bodies.go.set()
    assert states(conn) == {"completed": 1}


# --- the database goes away -------------------------------------------------------------------


def test_a_claim_connection_that_is_cut_loses_and_doubles_nothing(
    conn: engine.Connection, bodies: Bodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, cut = claims.ingest_step, threading.Event()

    def cutting(own: Any, who: Any, **more: Any) -> Any:
        found = step(own, who, **more)
        if more.get("done") and found and not cut.is_set():
            cut.set()
            own.close()
            raise engine.OperationalError("the reply was lost")
        return found

    monkeypatch.setattr(claims, "ingest_step", cutting)
    enqueue("load.a", 20, task="quick")
    with running(bodies):
        until(lambda: states(conn) == {"completed": 20}, timeout_s=30)
    assert cut.is_set()
    finals = "SELECT count(*) FROM ingest_job_events WHERE event_type = 'completed' GROUP BY job_id"
    assert {*factories.column(conn, finals)} == {1}


def test_the_lease_keeper_records_results_while_the_pool_is_blocked(
    conn: engine.Connection, bodies: Bodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_up, go_on = threading.Event(), threading.Event()
    failing, other, fine = enqueue("load.a", 3)
    bodies.raises, bodies.let = {0: OSError("no"), 1: OSError("neither")}, {0}
    finish = claim_worker.pool.claimer.Claimer.finish

    def slow(self: Any, *given: Any, **more: Any) -> Any:
        held_up.set()
        assert go_on.wait(30)
        return finish(self, *given, **more)

    monkeypatch.setattr(claim_worker.pool.claimer.Claimer, "finish", slow)
    with running(bodies):
        assert held_up.wait(30)
        until(lambda: len(bodies.began) == 3)
        bodies.go.set()
        until(lambda: row_of(conn, fine)["status"] == "completed")
        until(lambda: row_of(conn, other)["status"] == "failed")
        go_on.set()
        until(lambda: row_of(conn, failing)["status"] == "failed")


def test_the_environment_names_the_queues(
    conn: engine.Connection, bodies: Bodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKERS_JSON", '[{"queue": "load.new"}]')
    with running(bodies, None) as subject:
        assert {*subject.worker_ids} == {"load.new"}
        assert "load.new" in config.get_config().ingest_queues
        assert "load.a" in config.get_config().ingest_queues
        enqueue("load.new", 1, task="quick")
        until(lambda: states(conn) == {"completed": 1})
