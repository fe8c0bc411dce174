"""The in-process queue on the ingest tables: claims, leases, results, OFF, cancel, hand-back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from queue_workflows import config, db, errors, jobs, local_queue, queues, steps, streams, workers
from tests.support import (
    clocks,
    factories,
    local_queue_app,
    memory_reports,
    rows_before_checks,
    transitions,
)
from tests.support.local_queue_app import QUEUE
from tests.support.wait import until

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]


@pytest.fixture
def conn(conn: db.Connection, invariants_hold: None) -> db.Connection:
    local_queue_app.setup()
    config.register_ingest_task("count", lambda *, n: {"n": n})
    return conn


class Handlers:
    """A function that stays until it is let go, and what is known of its calls."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.ended: list[str] = []
        self.go = threading.Event()
        self.raises: dict[int, BaseException] = {}
        self._lock = threading.Lock()
        self._now: set[str] = set()
        self.overlaps: list[str] = []

    def __call__(self, job: local_queue.Job) -> Row:
        with self._lock:
            self.overlaps += [job.id] if job.id in self._now else []
            self._now.add(job.id)
            self.began.append(job.id)
        try:
            assert self.go.wait(60)
            number = job.args["n"]
            if number in self.raises:
                raise self.raises[number]
            return {"n": number}
        finally:
            with self._lock:
                self._now.discard(job.id)
                self.ended.append(job.id)


@pytest.fixture
def handlers() -> Iterator[Handlers]:
    made = Handlers()
    yield made
    made.go.set()


@pytest.fixture
def started(conn: db.Connection, handlers: Handlers) -> Iterator[Callable[..., Any]]:
    """Start a manager on the queue; it is stopped, and its handlers let go, at the end."""
    with ExitStack() as stack:

        def start(execute: Any = handlers, *, plan: Row | None = None, **more: Any) -> Any:
            made = local_queue.IngestPlan(QUEUE, **{"host": "box"} | (plan or {}))
            manager = local_queue_app.manager(made, execute, **more)
            manager.start()
            stack.callback(manager.stop)
            return manager

        yield start
        handlers.go.set()


def enqueue(count: int = 1, **more: Any) -> list[str]:
    args = [{"n": number} for number in range(count)]
    return jobs.enqueue_many(task_name="count", queue=QUEUE, args=args, **more)


def row_of(conn: db.Connection, job_id: str) -> Row:
    found = conn.execute("SELECT * FROM ingest_jobs WHERE id = %s", (job_id,)).fetchone()
    assert found is not None
    return found


def states(conn: db.Connection) -> Counter[str]:
    return Counter(row["status"] for row in conn.execute("SELECT status FROM ingest_jobs"))


def test_jobs_run_in_threads_and_their_results_are_recorded_once(
    conn: db.Connection, started: Any, handlers: Handlers
) -> None:
    ids = enqueue(30)
    handlers.go.set()
    manager = started()
    until(lambda: states(conn) == {"completed": 30})
    assert [row_of(conn, each)["result"] for each in ids] == [{"n": n} for n in range(30)]
    assert Counter(handlers.began) == dict.fromkeys(ids, 1)
    assert all(factories.events(conn, each) == ["claimed", "completed"] for each in ids)
    until(lambda: manager.stats()["finished"] == 30)
    assert manager.stats()["active_jobs"] == 0


def test_a_job_that_comes_later_starts_at_once(
    conn: db.Connection, started: Any, handlers: Handlers
) -> None:
    handlers.go.set()
    started(fetch_every_s=1000.0)
    until(lambda: engine_listens(conn))
    (job_id,) = enqueue()
    until(lambda: row_of(conn, job_id)["status"] == "completed")


def test_a_delayed_job_starts_when_it_is_due(
    conn: db.Connection, started: Any, handlers: Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_CLAIM_POLL_S", "600")
    handlers.go.set()
    (job_id,) = enqueue()
    conn.execute(b"UPDATE ingest_jobs SET available_at = now() + interval '1 second'")
    started(fetch_every_s=1000.0)
    until(lambda: row_of(conn, job_id)["status"] == "completed")


def engine_listens(conn: db.Connection) -> bool:
    return bool(conn.execute("SELECT 1 FROM workers WHERE state = 'idle'").fetchone())


def test_the_registered_task_runs_and_knows_its_job(conn: db.Connection, started: Any) -> None:
    from queue_workflows import current_job

    def task(*, n: int) -> Row:
        return {"n": n, "attempt": current_job().attempt, "worker": current_job().worker}

    config.register_ingest_task("count", task)
    (job_id,) = enqueue(headers={"trace": "t"})
    manager = started(None)
    until(lambda: row_of(conn, job_id)["status"] == "completed")
    expected = {"n": 0, "attempt": 1, "worker": manager.plan.worker_id}
    assert row_of(conn, job_id)["result"] == expected


def test_args_that_are_no_object_reach_the_handler(conn: db.Connection, started: Any) -> None:
    given: list[Any] = []
    started(lambda job: given.append(job.args))
    for args in ("[1, 2]", '"text"', "5"):
        conn.execute(
            "INSERT INTO ingest_jobs (task_name, queue, args) VALUES ('count', %s, %s)",
            (QUEUE, args),
        )
    until(lambda: states(conn) == {"completed": 3})
    assert sorted(map(str, given)) == ["5", "[1, 2]", "text"]


def test_no_more_is_claimed_than_threads_can_run(
    conn: db.Connection, started: Any, handlers: Handlers
) -> None:
    enqueue(10)
    started(workers=3)
    until(lambda: len(handlers.began) == 3)
    assert states(conn) == {"running": 3, "queued": 7}
    handlers.go.set()
    until(lambda: states(conn) == {"completed": 10})


def test_a_failure_follows_the_policy_of_its_job(
    conn: db.Connection, started: Any, handlers: Handlers
) -> None:
    once, again, never = enqueue()[0], enqueue(max_attempts=2)[0], enqueue(max_attempts=9)[0]
    tried: list[str] = []

    def execute(job: local_queue.Job) -> Row:
        tried.append(job.id)
        if job.id == again and tried.count(again) == 2:
            return {"n": 2}
        raise errors.Discard("no use") if job.id == never else ValueError("wrong")

    soon = '{"backoff": {"kind": "constant", "base_s": 0}}'
    conn.execute("UPDATE ingest_jobs SET policy = %s::jsonb WHERE id = %s", (soon, again))
    manager = started(execute, max_attempts=1)
    until(lambda: states(conn) == {"failed": 2, "completed": 1}, timeout_s=60)
    assert row_of(conn, once)["error"] == "ValueError: wrong"
    assert row_of(conn, never)["error"].startswith("Discard: no use")
    assert Counter(tried) == {once: 1, again: 2, never: 1}
    until(lambda: manager.stats()["failed"] == 2)


def test_a_result_that_cannot_be_stored_fails_the_job(conn: db.Connection, started: Any) -> None:
    (job_id,) = enqueue()
    started(lambda _: {"wrong": object()})
    until(lambda: row_of(conn, job_id)["status"] == "failed")
    assert "result of job" in row_of(conn, job_id)["error"]


def test_leases_are_renewed_while_jobs_run_and_wait(
    conn: db.Connection, started: Any, handlers: Handlers
) -> None:
    enqueue(3)
    started(workers=1, plan={"limit": 3, "lease_s": 3.0})
    until(lambda: states(conn) == {"running": 3})
    began = {
        row["id"]: row["lease_expires_at"] for row in conn.execute("SELECT * FROM ingest_jobs")
    }
    until(
        lambda: all(
            row["lease_expires_at"] > began[row["id"]]
            for row in conn.execute("SELECT * FROM ingest_jobs")
        )
    )
    assert transitions.reclaim_lapsed(conn, "ingest") == []
    handlers.go.set()
    until(lambda: states(conn) == {"completed": 3})


def test_a_lost_lease_drops_the_late_result(
    conn: db.Connection, started: Any, handlers: Handlers
) -> None:
    (job_id,) = enqueue()
    manager = started(workers=1, plan={"lease_s": 3.0})
    until(lambda: handlers.began == [job_id])
    workers.set_control("box", QUEUE, desired_state="off", stop_policy="drain")
    # As the sweep does for a process that seems dead.
    with conn.transaction():  # a renewal between the two would undo the first
        conn.execute("UPDATE ingest_jobs SET lease_expires_at = now() - interval '1 s'")
        assert len(transitions.reclaim_lapsed(conn, "ingest")) == 1
    until(lambda: manager.stats()["abandoned_threads"] == 1)
    handlers.go.set()
    until(lambda: manager.stats()["late_results"] == 1)
    row = row_of(conn, job_id)
    assert (row["status"], row["result"]) == ("queued", None)
    assert "completed" not in factories.events(conn, job_id)
    # The process lives and has not stalled, so that no crash counts.
    until(lambda: row_of(conn, job_id)["crash_count"] == 0)


def test_a_cancelled_job_gets_its_grace_and_then_its_thread_is_abandoned(
    conn: db.Connection,
    started: Any,
    handlers: Handlers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_CANCEL_GRACE_S", "0.2")
    first, second = enqueue(2)
    manager = started(workers=1, plan={"limit": 2})
    until(lambda: handlers.began == [first])
    jobs.cancel(second)
    until(lambda: row_of(conn, second)["status"] == "cancelled")
    assert manager.stats()["abandoned_threads"] == 0
    jobs.cancel(first)
    until(lambda: row_of(conn, first)["status"] == "cancelled")
    until(lambda: manager.stats()["abandoned_threads"] == 1)
    assert handlers.began == [first]


def test_a_cancelled_generator_ends_at_its_next_yield(conn: db.Connection, started: Any) -> None:
    closed = threading.Event()

    def forever(*, n: int) -> Iterator[None]:
        try:
            while True:
                time.sleep(0.01)
                yield
        finally:
            closed.set()

    config.register_ingest_task("count", forever)
    (job_id,) = enqueue()
    manager = started(None)
    until(lambda: row_of(conn, job_id)["status"] == "running")
    jobs.cancel(job_id)
    until(closed.is_set)
    until(lambda: row_of(conn, job_id)["status"] == "cancelled")
    assert manager.stats()["abandoned_threads"] == 0


@pytest.mark.parametrize("policy", ["drain", "hard"])
def test_off_stops_claims_and_by_policy_hard_hands_the_running_job_back(
    conn: db.Connection, started: Any, handlers: Handlers, policy: str
) -> None:
    first, second = enqueue(2)
    manager = started(workers=1, plan={"limit": 2})
    until(lambda: handlers.began == [first])
    workers.set_control("box", QUEUE, desired_state="off", stop_policy=policy)
    until(lambda: row_of(conn, second)["status"] == "queued")
    if policy == "hard":
        until(lambda: row_of(conn, first)["status"] == "queued")
        until(lambda: manager.stats()["abandoned_threads"] == 1)
    handlers.go.set()
    until(lambda: handlers.ended == [first])
    if policy == "drain":
        until(lambda: row_of(conn, first)["status"] == "completed")
    assert row_of(conn, second)["status"] == "queued"
    assert row_of(conn, second)["attempts"] == 0
    workers.enable("box", QUEUE)
    until(lambda: states(conn) == {"completed": 2})
    assert handlers.overlaps == []


def test_off_by_policy_hard_ends_a_process_that_wants_that(
    conn: db.Connection, started: Any, handlers: Handlers
) -> None:
    (job_id,) = enqueue()
    codes: list[int] = []
    manager = started(workers=1, plan={"on_exit": codes.append})
    until(lambda: handlers.began == [job_id])
    workers.set_control("box", QUEUE, desired_state="off", stop_policy="hard")
    until(lambda: codes)
    assert codes == [79]
    row = row_of(conn, job_id)
    assert (row["status"], row["attempts"], row["crash_count"]) == ("queued", 0, 0)
    until(lambda: manager.stats()["abandoned_threads"] == 1)
    until(lambda: conn.execute("SELECT state FROM workers").fetchone() == {"state": "stopped"})


def test_a_stop_policy_of_the_app_runs_in_this_process(
    conn: db.Connection,
    started: Any,
    handlers: Handlers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[tuple[Any, ...]] = []

    def policy(worker: Any, *, on_exit: Any) -> None:
        called.append((worker.host, worker.queue, os.getpid()))
        worker.requeue_inflight_for_control("as the app wants")
        on_exit(3)

    monkeypatch.setitem(workers.STOP_POLICIES, "mine", policy)
    (job_id,) = enqueue()
    started(workers=1)
    until(lambda: handlers.began == [job_id])
    workers.set_control("box", QUEUE, desired_state="off", stop_policy="mine")
    until(lambda: row_of(conn, job_id)["status"] == "queued")
    assert called == [("box", QUEUE, os.getpid())]
    handlers.go.set()
    workers.enable("box", QUEUE)
    until(lambda: states(conn) == {"completed": 1})


def test_steps_streams_and_progress_of_a_job_are_stored(
    conn: db.Connection, started: Any, handlers: Handlers
) -> None:
    def task(*, n: int) -> Iterator[Any]:
        made = steps.step("double", lambda: 2 * n)
        streams.stream("text", "first")
        streams.stream("text", "second")  # too soon after the first to be sent by itself
        yield 0.5
        while not handlers.go.is_set():
            time.sleep(0.01)
            yield
        return {"made": made}

    config.register_ingest_task("count", task)
    job_id = enqueue(2)[1]
    started(None)
    until(lambda: row_of(conn, job_id)["progress"] == 0.5)
    parts = "SELECT count(*) FROM job_parts WHERE job_id = %s"
    until(lambda: factories.one(conn, parts, job_id) == 2)
    handlers.go.set()
    until(lambda: row_of(conn, job_id)["result"] == {"made": 2})


def test_a_job_that_waits_for_a_thread_uses_no_time_of_its_budget(
    conn: db.Connection, started: Any, handlers: Handlers
) -> None:
    first = enqueue()[0]
    second = enqueue(timeout_s=1)[0]
    started(workers=1, plan={"limit": 2, "lease_s": 3.0})
    until(lambda: handlers.began == [first] and states(conn) == {"running": 2})
    claimed = (
        "SELECT extract(epoch FROM clock_timestamp() - started_at) FROM ingest_jobs WHERE id = %s"
    )
    until(lambda: factories.one(conn, claimed, second) > 1.5)
    handlers.go.set()
    until(lambda: states(conn) == {"completed": 2})
    assert factories.events(conn, second) == ["claimed", "completed"]


def has_asked(conn: db.Connection, since: Any) -> bool:
    """Whether a process has looked for jobs since then."""
    query = (
        "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND query_start > %s"
        " AND pid <> pg_backend_pid() AND query LIKE '%%queue_workflows_ingest_step%%'"
    )
    return conn.execute(query, (since,)).fetchone() is not None


def test_a_paused_queue_is_not_claimed(
    conn: db.Connection, started: Any, handlers: Handlers
) -> None:
    handlers.go.set()
    queues.pause(QUEUE)
    enqueue(2)
    since = factories.one(conn, "SELECT clock_timestamp()")
    started()
    until(lambda: has_asked(conn, since))
    assert states(conn) == {"queued": 2}
    queues.resume(QUEUE)
    until(lambda: states(conn) == {"completed": 2})


def test_stop_hands_back_what_waits_and_what_does_not_end(
    conn: db.Connection, started: Any, handlers: Handlers
) -> None:
    ids = enqueue(3)
    manager = started(workers=1, plan={"limit": 3})
    until(lambda: handlers.began == [ids[0]])
    assert manager.stop(0.2) is False
    assert states(conn) == {"queued": 3}
    assert all(row_of(conn, each)["attempts"] == 0 for each in ids)
    state = conn.execute("SELECT state FROM workers").fetchone()
    assert state == {"state": "stopped"}
    handlers.go.set()
    until(lambda: handlers.ended == [ids[0]])
    assert states(conn) == {"queued": 3}


def test_stop_waits_for_a_job_that_ends_in_time(
    conn: db.Connection, started: Any, handlers: Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job_id,) = enqueue()
    manager = started(workers=1)
    until(lambda: handlers.began == [job_id])
    close = manager.queue.close

    def close_and_let_it_end() -> Any:
        left = close()
        handlers.go.set()
        return left

    monkeypatch.setattr(manager.queue, "close", close_and_let_it_end)
    assert manager.stop(30) is True
    assert row_of(conn, job_id)["status"] == "completed"


def test_a_time_out_of_the_manager_fails_the_attempt(
    conn: db.Connection, started: Any, handlers: Handlers
) -> None:
    (job_id,) = enqueue()
    manager = started(workers=1, timeout_s=0.2)
    until(lambda: row_of(conn, job_id)["status"] == "failed")
    assert row_of(conn, job_id)["error"] == "timed out after 0.2 s"
    handlers.go.set()
    until(lambda: manager.stats()["late_results"] == 1)
    assert row_of(conn, job_id)["status"] == "failed"


def test_the_budget_of_a_job_ends_its_attempt(
    conn: db.Connection, started: Any, handlers: Handlers
) -> None:
    (job_id,) = enqueue(timeout_s=1)
    started(workers=1)
    until(lambda: handlers.began == [job_id])
    until(lambda: "budget_trip" in factories.events(conn, job_id))
    assert row_of(conn, job_id)["status"] != "running" or len(handlers.began) > 1


def test_a_full_memory_hands_waiting_claims_back(conn: db.Connection, handlers: Handlers) -> None:
    ram = 10.0
    plan = local_queue.IngestPlan(QUEUE, host="box", limit=3)
    manager = local_queue.JobQueueManager(
        plan, handlers, workers=1, single_job=False, grace_s=0.0, stagger_s=0.0, cooldown_s=0.0,
        throttle=memory_reports.throttle(lambda: ram),
    )  # fmt: skip
    enqueue(3)
    with manager:
        until(lambda: states(conn) == {"running": 3} and len(handlers.began) == 1)
        ram = 95.0
        manager._supervisor.wake("memory")
        until(lambda: states(conn) == {"running": 1, "queued": 2})
        ram = 10.0
        manager._supervisor.wake("memory")
        handlers.go.set()
        until(lambda: states(conn) == {"completed": 3})
    assert handlers.overlaps == []


@pytest.mark.parametrize("counted", ["crash_count = 2", "lapse_count = 9"])
def test_a_job_whose_next_crash_or_lapse_is_its_last_runs_alone(
    conn: db.Connection, started: Any, handlers: Handlers, counted: str
) -> None:
    ids = enqueue(4)
    conn.execute(f"UPDATE ingest_jobs SET {counted} WHERE id = %s".encode(), (ids[1],))
    most: list[int] = []

    def execute(job: local_queue.Job) -> Row:
        if job.id == ids[1]:
            most.append(len(handlers.began) - len(handlers.ended))
        return handlers(job)

    started(execute, workers=4)
    until(lambda: len(handlers.began) == 3)
    assert ids[1] not in handlers.began
    handlers.go.set()
    until(lambda: states(conn) == {"completed": 4})
    assert most == [0]


@pytest.mark.parametrize(
    "wrong", [{"limit": 0}, {"limit": 1.5}, {"lease_s": 0.0}, {"lease_s": 1e9}]
)
def test_values_that_cannot_work_are_refused(conn: db.Connection, wrong: Row) -> None:
    with pytest.raises(errors.InvalidConfig):
        local_queue.IngestPlan(QUEUE, **wrong)


def test_only_ingest_queues_are_served(conn: db.Connection) -> None:
    with pytest.raises(errors.InvalidConfig, match="cpu"):
        local_queue.IngestPlan("cpu")
    with pytest.raises(errors.UnknownQueue):
        local_queue.IngestPlan("nope")


# --- Processes.


class Idle:
    """A manager that runs nothing."""

    accepts = True
    throttled_by: str | None = None

    def __init__(self) -> None:
        self.taken: list[local_queue.Job] = []
        self.queue, self.threads = local_queue.JobQueue(), self

    def take(self, job: local_queue.Job) -> None:
        self.taken.append(job)

    def abandon(self, job_id: str, reason: str) -> bool:
        del job_id, reason
        return False


@pytest.fixture
def opened(
    conn: db.Connection, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[local_queue.IngestPlan, Idle]]:
    """A plan whose manager takes nothing by itself; it reports often."""
    monkeypatch.setenv("QUEUE_WORKFLOWS_DL_HEARTBEAT_SEC", "0.05")
    plan, owner = local_queue.IngestPlan(QUEUE, host="box", limit=2), Idle()
    plan.open(cast("Any", owner))
    yield plan, owner
    plan.close()


def test_a_job_whose_lease_has_ended_does_not_start(opened: Any) -> None:
    plan, owner = opened
    enqueue(2)
    until(lambda: len(owner.taken) == 2)
    late, in_time = owner.taken
    late.held.job.lease_end.ends = clocks.boot_s() + 1  # the clock went on while it was stopped
    assert not plan.mark_running(late)
    assert plan.mark_running(in_time)


def test_jobs_behind_a_bad_row_wait_for_no_poll(
    conn: db.Connection, started: Any, handlers: Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_CLAIM_POLL_S", "600")
    handlers.go.set()
    rows_before_checks.put(
        conn, "ingest_jobs", id="'bad'", task_name="'count'", queue=f"'{QUEUE}'", priority="1",
        claim_no="9223372036854775807",
    )  # fmt: skip
    enqueue(5)
    started(workers=2, fetch_every_s=1000.0)
    until(lambda: states(conn) == {"failed": 1, "completed": 5})
    assert row_of(conn, "bad")["status"] == "failed"


def test_a_full_memory_shows_in_the_list_of_workers(opened: Any) -> None:
    _, owner = opened
    until(lambda: [row["state"] for row in workers.list()] == ["idle"])
    (found,) = workers.list()
    assert found["throttle"] is None
    owner.throttled_by = "RAM at 93.1 % (limit 90 %)"
    until(lambda: [row["state"] for row in workers.list()] == ["throttled"])
    (found,) = workers.list()
    assert found["throttle"] == "RAM at 93.1 % (limit 90 %)"


def test_it_waits_for_memory_that_a_job_of_another_worker_fills(
    conn: db.Connection, handlers: Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MEMORY_THROTTLE_THRESHOLD", "MEMORY_RESUME_THRESHOLD"):
        monkeypatch.setenv(name, "0.001")
    monkeypatch.setenv("MEMORY_CHECK_INTERVAL", "0.05")
    monkeypatch.setenv("QUEUE_WORKFLOWS_DL_HEARTBEAT_SEC", "0.05")
    memory_reports.other_worker(conn)
    handlers.go.set()
    manager = local_queue.JobQueueManager(
        local_queue.IngestPlan(QUEUE, host="box"), handlers, workers=1, single_job=False,
        grace_s=0.5, stagger_s=0.0, cooldown_s=0.0, fetch_every_s=0.05,
    )  # fmt: skip
    with manager:
        until(lambda: manager.throttled_by)
        (job_id,) = enqueue()
        seen = manager.stats()["throttle_seconds"].get("RAM", 0.0)
        until(lambda: manager.stats()["throttle_seconds"].get("RAM", 0.0) > seen + 0.5)
        assert row_of(conn, job_id)["status"] == "queued"
        conn.execute("UPDATE workers SET job_ids = '{}' WHERE worker_id = 'other'")
        until(lambda: row_of(conn, job_id)["status"] == "completed")


@pytest.fixture
def processes(dsn: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    made: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.local_queue_app", *arguments],
            cwd=ROOT,
            env={**os.environ, "QUEUE_WORKFLOWS_DB_URL": dsn, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        made.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in made:
        process.kill()
        process.wait(30)
        assert process.stdout is not None
        process.stdout.close()


def test_two_processes_side_by_side_run_each_job_once(
    conn: db.Connection, processes: Any, tmp_path: Path
) -> None:
    names = [f"job{number}" for number in range(60)]
    args = [{"folder": str(tmp_path), "name": name} for name in names]
    both = [processes(), processes()]
    jobs.enqueue_many(task_name="note", queue=QUEUE, args=args[:30])
    jobs.enqueue_many(task_name="note", queue=QUEUE, args=args[30:])
    until(lambda: states(conn) == {"completed": 60}, timeout_s=60)
    starts = {name: (tmp_path / name).read_text().splitlines() for name in names}
    assert all(len(pids) == 1 for pids in starts.values())
    for process in both:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_the_jobs_of_a_killed_process_are_recovered(
    conn: db.Connection, processes: Any, tmp_path: Path
) -> None:
    names = [f"job{number}" for number in range(4)]
    args = [{"folder": str(tmp_path), "name": name, "stay": True} for name in names]
    victim = processes()
    ids = jobs.enqueue_many(task_name="note", queue=QUEUE, args=args)
    until(lambda: all(lines_of(tmp_path / name) == 1 for name in names))
    until(lambda: states(conn) == {"running": 4})
    victim.kill()
    victim.wait(30)
    (tmp_path / "go").touch()
    taken: list[Row] = []

    def took_all() -> bool:
        # A row that a dying transaction still locks is left to the next call.
        taken.extend(transitions.reclaim_gone(conn, "ingest", 0.0))
        return len(taken) == 4

    until(took_all)
    at_work = {row["id"]: row for row in taken}
    processes()
    until(lambda: states(conn) == {"completed": 4}, timeout_s=60)
    counts = {(row["crash_count"], row["lapse_count"]) for row in map(at_work.get, ids)}
    assert counts == {(0, 1)}, "why the process ended is not known"
    assert [lines_of(tmp_path / name) for name in names] == [2] * 4


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_child_that_a_handler_forks_takes_no_claim_of_its_parent(
    conn: db.Connection, started: Any, tmp_path: Path
) -> None:
    journal, parent = tmp_path / "journal", os.getpid()

    def work(job: local_queue.Job) -> Row:
        with journal.open("a", encoding="ascii") as starts:
            starts.write(f"{job.args['n']}\n")
        if os.getpid() != parent:  # the child goes on as a worker
            os._exit(99)
        if job.args["n"] or (child := os.fork()):
            return {"code": None if job.args["n"] else os.waitpid(child, 0)[1]}
        sys.exit(0)

    ids = enqueue(4)
    started(work, plan={"limit": 4}, workers=1)
    until(lambda: states(conn) == {"completed": 4})
    assert sorted(journal.read_text().split()) == ["0", "1", "2", "3"]
    assert all(factories.events(conn, each) == ["claimed", "completed"] for each in ids)
