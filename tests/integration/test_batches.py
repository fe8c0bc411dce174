"""A worker with batches treats each job of a batch as if it had been claimed alone."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from queue_workflows import (
    claim_worker,
    config,
    jobs,
    node_queue,
    workers,
)
from queue_workflows import db as engine
from queue_workflows.engine import claims, handback
from queue_workflows.worker import batch, claims_in_flight, guards, lease_keeper, slot
from tests.support import commands, factories, hanging_app, invariants, transitions
from tests.support.commands import Commands
from tests.support.wait import until

Row = dict[str, Any]
QUEUE = "load"


class Bodies:
    """A task: job `i` reports that it runs; one of `stay` then waits until it is released."""

    def __init__(self) -> None:
        self.ran: list[int] = []
        self.stay: set[int] = set()
        self.started = threading.Event()
        self.release = threading.Event()
        self.pause_s = 0.0
        self.tell: Callable[[int], object] = lambda _: None

    def __call__(self, reason: str, args: Row) -> Row:
        self.ran.append(args["i"])
        self.tell(args["i"])
        self.release.wait(self.pause_s)
        if args["i"] in self.stay:
            self.started.set()
            assert self.release.wait(60)
        return {"i": args["i"]}


@pytest.fixture
def conn(db: ModuleType) -> Generator[engine.Connection]:
    with engine.connect() as conn:
        yield conn
        assert invariants.broken(conn, slack_s=5) == []


@pytest.fixture
def cli(db: ModuleType, dsn: str) -> Generator[Commands]:
    with commands.commands(QUEUE_WORKFLOWS_DB_URL=dsn) as made:
        yield made


@pytest.fixture
def bodies(conn: engine.Connection) -> Generator[Bodies]:
    made = Bodies()
    config.register_ingest_task("t", made)
    yield made
    made.release.set()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No handler counts as long, and no result as late, so that nothing else moves the batch."""
    monkeypatch.setattr(claims_in_flight, "LONG_S", 3600.0)
    monkeypatch.setattr(claims_in_flight, "TURN_S", 3600.0)
    monkeypatch.setattr(claims_in_flight, "FLUSH_AFTER_S", 3600.0)


def enqueue(count: int) -> list[str]:
    args = [{"i": i} for i in range(count)]
    return jobs.enqueue_many(task_name="t", queue=QUEUE, args=args)


def worker(size: int = 4, host: str = "box", **more: Any) -> claim_worker.ClaimWorker:
    return claim_worker.ClaimWorker(queue=QUEUE, host=host, batch=size, **more)


@contextmanager
def running(subject: claim_worker.ClaimWorker, bodies: Bodies) -> Generator[None]:
    """It works; at the end the handlers are let go, as it would leave the process for one."""
    thread = threading.Thread(target=subject.run_forever, name="test-worker")
    thread.start()
    try:
        yield
    finally:
        bodies.release.set()
        subject.stop()
        thread.join(30)
        assert not thread.is_alive()


def rows(conn: engine.Connection) -> list[Row]:
    return conn.execute("SELECT * FROM ingest_jobs ORDER BY seq").fetchall()


def states(conn: engine.Connection) -> list[str]:
    return [row["status"] for row in rows(conn)]


def are(conn: engine.Connection, *wanted: str) -> Callable[[], bool]:
    return lambda: states(conn) == [*wanted]


def events(conn: engine.Connection, job_id: str) -> list[str]:
    query = "SELECT event_type FROM ingest_job_events WHERE job_id = %s ORDER BY id"
    return factories.column(conn, query, job_id)


def renewed(conn: engine.Connection) -> None:
    """Wait for a renewal of the job that runs."""
    before = rows(conn)[0]["lease_expires_at"]
    until(lambda: rows(conn)[0]["lease_expires_at"] > before)


LISTENS = "SELECT FROM workers WHERE (detail ->> 'lock')::boolean"
"""The worker's session of life is the one that listens."""
CANCEL = "UPDATE ingest_jobs SET cancel_requested_at = now() WHERE id = %s"


# --- cancelled before its turn ----------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancel_job", "by SQL", "without notifications"])
def test_a_job_that_is_cancelled_before_it_begins_never_runs(
    conn: engine.Connection, bodies: Bodies, patient: None, monkeypatch: Any, how: str
) -> None:
    if how == "cancel_job":
        # The word alone is enough.
        monkeypatch.setattr(lease_keeper.LeaseKeeper, "_renew", lambda self: None)
    if how == "without notifications":
        monkeypatch.setenv("QUEUE_WORKFLOWS_POLL_ONLY", "1")
        monkeypatch.setenv("QUEUE_WORKFLOWS_WORKER_CONTROL_POLL_S", "0.1")
    bodies.stay = {0}
    ids = enqueue(4)
    with running(worker(), bodies):
        assert bodies.started.wait(30)
        if how == "cancel_job":
            until(lambda: conn.execute(LISTENS).fetchone() is not None)
            jobs.cancel(ids[2])
        else:
            conn.execute(CANCEL, (ids[2],))
        until(are(conn, "running", "running", "cancelled", "running"))
        bodies.release.set()
        until(are(conn, "completed", "completed", "cancelled", "completed"))
    assert bodies.ran == [0, 1, 3]
    assert events(conn, ids[2]) == ["claimed", "cancel_requested", "cancelled"]


def test_a_cancelled_running_job_of_a_batch_is_stopped_after_its_grace(
    conn: engine.Connection, bodies: Bodies, patient: None, monkeypatch: Any
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_CANCEL_GRACE_S", "0.2")
    codes: list[int] = []
    bodies.stay = {1}
    ids = enqueue(4)

    def leave(code: int) -> None:
        codes.append(code)
        bodies.release.set()

    with running(worker(on_exit=leave), bodies):
        assert bodies.started.wait(30)
        jobs.cancel(ids[1])
        until(are(conn, "completed", "cancelled", "completed", "completed"))
    assert codes[0] == guards.EXIT_CONTROL
    assert [row["crash_count"] for row in rows(conn)] == [0] * 4


def test_a_cancel_that_arrives_during_the_claim_of_a_batch_is_read_again(monkeypatch: Any) -> None:
    own = slot.Slot(lambda: transitions.who(QUEUE))
    subject = lease_keeper.LeaseKeeper([own], on_exit=lambda _: None)
    woken: list[tuple[str, ...]] = []
    monkeypatch.setattr(subject, "wake", lambda *tasks: woken.append(tasks))
    subject.enable_batches()
    sent_at = guards.LeaseEnd(1.0, 600.0)
    subject.add_claims(own.in_flight, [], sent_at, 1.0)
    assert woken == []
    subject.cancelled("a-job-of-this-claim")
    subject.add_claims(own.in_flight, [], sent_at, 1.0)
    assert woken == [("renew", "control")]


# --- turned off, stopped ----------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["drain", "pause"])
def test_off_hands_back_at_once_all_but_the_job_that_runs(
    conn: engine.Connection, bodies: Bodies, patient: None, policy: str
) -> None:
    bodies.stay = {0}
    ids = enqueue(4)
    with running(worker(), bodies):
        assert bodies.started.wait(30)
        workers.disable("box", QUEUE, stop_policy=policy)
        until(are(conn, "running", "queued", "queued", "queued"))
        found = rows(conn)
        assert {(r["crash_count"], r["attempts"], r["priority"]) for r in found} == {(0, 0, 100)}
        bodies.release.set()
        until(are(conn, "completed", "queued", "queued", "queued"))
        workers.enable("box", QUEUE)
        until(are(conn, *["completed"] * 4))
    assert bodies.ran == [0, 1, 2, 3]
    assert events(conn, ids[0]) == ["claimed", "completed"]
    assert events(conn, ids[3]) == ["claimed", "requeued", "claimed", "completed"]


def test_a_hard_off_records_what_is_done_and_hands_all_else_back(
    conn: engine.Connection, bodies: Bodies, patient: None
) -> None:
    left: list[tuple[int, list[Row]]] = []
    bodies.stay = {1}
    enqueue(4)

    def leave(code: int) -> None:
        left.append((code, rows(conn)))
        bodies.release.set()

    with running(worker(on_exit=leave), bodies):
        assert bodies.started.wait(30)
        workers.disable("box", QUEUE)
        until(lambda: left)
    code, found = left[0]
    assert code == guards.EXIT_CONTROL
    assert [row["status"] for row in found] == ["completed", "queued", "queued", "queued"]
    assert [row["crash_count"] for row in found] == [0] * 4
    assert [row["priority"] for row in found] == [100, 10, 100, 100]
    assert bodies.ran == [0, 1]


def test_a_stop_hands_back_at_once_all_but_the_job_that_runs(
    conn: engine.Connection, bodies: Bodies, patient: None
) -> None:
    bodies.stay = {1}
    ids = enqueue(4)
    subject = worker(shutdown_timeout_s=60)
    with running(subject, bodies):
        assert bodies.started.wait(30)
        subject.stop()
        until(lambda: states(conn)[1:] == ["running", "queued", "queued"])
        bodies.release.set()
    assert states(conn) == ["completed", "completed", "queued", "queued"]
    assert bodies.ran == [0, 1]
    assert [row["crash_count"] for row in rows(conn)] == [0] * 4
    assert events(conn, ids[3]) == ["claimed", "requeued"]


def test_a_stop_between_two_handlers_hands_back_what_has_not_begun(
    conn: engine.Connection, bodies: Bodies, patient: None, monkeypatch: Any
) -> None:
    # The lease keeper may end before it has checked.
    monkeypatch.setattr(lease_keeper.LeaseKeeper, "_write_back_due", lambda self: None)
    ids = enqueue(4)
    subject = worker()
    bodies.tell = lambda i: i == 1 and subject.stop()
    with running(subject, bodies):
        until(lambda: states(conn)[:2] == ["completed"] * 2)
    assert states(conn) == ["completed", "completed", "queued", "queued"]
    assert bodies.ran == [0, 1]
    assert events(conn, ids[3]) == ["claimed", "requeued"]


def test_an_exit_by_a_guard_records_finished_jobs_and_hands_back_the_rest(
    conn: engine.Connection, bodies: Bodies, patient: None
) -> None:
    left: list[tuple[int, list[str]]] = []
    bodies.stay = {1}
    ids = enqueue(4)
    conn.execute("UPDATE ingest_jobs SET timeout_s = 0.1 WHERE id = %s", (ids[1],))

    def leave(code: int) -> None:
        left.append((code, states(conn)))
        bodies.release.set()

    with running(worker(on_exit=leave), bodies):
        until(lambda: left)
    assert left[0] == (guards.EXIT_BUDGET, ["completed", "failed", "queued", "queued"])
    assert bodies.ran[:2] == [0, 1]


def test_a_result_after_the_time_limit_was_decided_is_dropped(
    conn: engine.Connection, bodies: Bodies, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies.stay = {1}
    ids = enqueue(3)
    conn.execute("UPDATE ingest_jobs SET timeout_s = 0.1 WHERE id = %s", (ids[1],))
    subject = worker()
    # The write of the decision is slower than the handler.
    monkeypatch.setattr(subject._keeper._shutdown, "end_by_guard", lambda *_: bodies.release.set())
    with running(subject, bodies):
        until(are(conn, "completed", "failed", "completed"))
    assert events(conn, ids[1]) == ["claimed", "failed", "budget_trip"]


def test_a_stop_waits_no_longer_for_a_database_that_is_away(
    conn: engine.Connection, bodies: Bodies, monkeypatch: Any
) -> None:
    real, left = claims.ingest_step, list[int]()

    def step(own: engine.Connection, who: transitions.Claimant, **more: Any) -> list[Row]:
        if more.get("done") and not left:
            raise engine.OperationalError("away")
        return real(own, who, **more)

    monkeypatch.setattr(claims, "ingest_step", step)
    enqueue(2)
    subject = worker(on_exit=left.append, shutdown_timeout_s=0.5)
    with running(subject, bodies):
        until(lambda: bodies.ran == [0, 1])
        subject.stop()
        until(lambda: left)
    assert left[0] == 0


def test_sigterm_gives_a_whole_batch_back(cli: Commands, tmp_path: Path, db: ModuleType) -> None:
    hanging_app.setup()
    args = {"folder": str(tmp_path)}
    ids = jobs.enqueue_many(task_name="deaf", queue="work", args=[args] * 3)
    subject = cli.start(
        *("queue-claim-worker", "--queue", "work", "--batch", "3", "--shutdown-timeout", "1"),
        *("--app", "tests.support.hanging_app:setup"),
    )
    until((tmp_path / "started").exists, timeout_s=30)
    subject.send(signal.SIGTERM)
    assert subject.wait() == 0, subject.err
    found = [node_queue.get_ingest_job(each) or {} for each in ids]
    assert [(row["status"], row["crash_count"], row["claim_no"]) for row in found] == (
        [("queued", 0, 1)] * 3
    )


# --- a handler that takes long --------------------------------------------------------------------


def test_behind_a_long_handler_results_are_recorded_and_others_take_the_rest(
    conn: engine.Connection, bodies: Bodies
) -> None:
    bodies.stay = {1}
    ids = enqueue(6)
    with running(worker(size=6), bodies):
        assert bodies.started.wait(30)
        until(are(conn, "completed", "running", *["queued"] * 4))
        assert {(r["crash_count"], r["attempts"], r["priority"]) for r in rows(conn)} == {
            (0, 0, 100)
        }
        with running(worker(size=6, host="other"), bodies):
            until(are(conn, "completed", "running", *["completed"] * 4))
        bodies.release.set()
        until(are(conn, *["completed"] * 6))
    assert bodies.ran == [0, 1, 2, 3, 4, 5]
    assert [row["result"]["i"] for row in rows(conn)] == bodies.ran
    assert [row["claimed_by"] for row in rows(conn)] == ["box"] * 2 + ["other"] * 4
    assert events(conn, ids[1]) == ["claimed", "completed"]
    assert events(conn, ids[2]) == ["claimed", "requeued", "claimed", "completed"]


def test_no_job_runs_or_is_recorded_twice_when_the_lease_keeper_takes_some(
    conn: engine.Connection, bodies: Bodies, monkeypatch: Any
) -> None:
    """It takes what it can as often as it can, against two workers whose handlers are short."""
    monkeypatch.setattr(claims_in_flight, "FLUSH_AFTER_S", 0.0)
    monkeypatch.setattr(claims_in_flight, "LONG_S", 0.0005)
    monkeypatch.setattr(lease_keeper, "BATCH_S", 0.0)
    monkeypatch.setenv("DL_HEARTBEAT_SEC", "0")
    monkeypatch.setattr(claims_in_flight, "WRITING_S", 60.0)
    monkeypatch.setattr(batch.Batch, "_next_size", lambda self, *_: self._size)
    writing, overlaps = set[str](), list[str]()

    def alone(worker_id: str, write: Callable[[], Any]) -> Any:
        if worker_id in writing:
            overlaps.append(worker_id)
        writing.add(worker_id)
        try:
            return write()
        finally:
            writing.discard(worker_id)

    step, renew = claims.ingest_step, claims.renew

    def recording(own: engine.Connection, who: transitions.Claimant, **more: Any) -> list[Row]:
        if not more.get("done"):
            return step(own, who, **more)
        return alone(who.worker_id, lambda: step(own, who, **more))

    def renewing(own: engine.Connection, leases: Any, **more: Any) -> list[claims.Renewal]:
        return alone(leases[0].worker_id, lambda: renew(own, leases, **more))

    monkeypatch.setattr(claims, "ingest_step", recording)
    monkeypatch.setattr(claims, "renew", renewing)
    bodies.pause_s, count = 0.002, 300
    enqueue(count)
    first, second = worker(size=9), worker(size=7, host="other")
    with running(first, bodies), running(second, bodies):
        until(lambda: set(states(conn)) == {"completed"}, timeout_s=60)
    assert overlaps == [], "they may lock the same rows, each in its own order"
    assert (
        first._keeper._jobs.slots[0].in_flight.claims()
        == second._keeper._jobs.slots[0].in_flight.claims()
        == {}
    )
    assert Counter(bodies.ran) == Counter(range(count))
    types = Counter(factories.column(conn, "SELECT event_type FROM ingest_job_events"))
    assert types["completed"] == count
    assert types["claimed"] == count + types["requeued"]
    assert types["requeued"] > 0


def test_a_result_whose_recording_got_no_answer_is_recorded_once(
    conn: engine.Connection, bodies: Bodies, monkeypatch: Any
) -> None:
    real, cut = claims.ingest_step, list[int]()

    def step(own: engine.Connection, who: transitions.Claimant, **more: Any) -> list[Row]:
        found = real(own, who, **more)
        if not who.queue and not cut:
            cut.append(len(more["done"]))
            own.close()
            raise engine.OperationalError("the reply was lost")
        return found

    monkeypatch.setattr(claims, "ingest_step", step)
    bodies.stay = {2}
    enqueue(4)
    with running(worker(), bodies):
        until(are(conn, "completed", "completed", "running", "queued"))
        assert cut == [2]
        bodies.release.set()
        until(are(conn, *["completed"] * 4))
    assert bodies.ran == [0, 1, 2, 3]
    assert [row["claim_no"] for row in rows(conn)] == [1, 1, 1, 2]


def test_a_result_that_the_server_refuses_holds_up_no_other(
    conn: engine.Connection, bodies: Bodies, patient: None, monkeypatch: Any
) -> None:
    conn.execute(
        "CREATE FUNCTION refuses() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " IF NEW.status = 'completed' AND NEW.args = '{\"i\": 1}' THEN"
        " RAISE EXCEPTION 'not this one'; END IF; RETURN NEW; END $$"
    )
    conn.execute(
        "CREATE TRIGGER refuses BEFORE UPDATE ON ingest_jobs"
        " FOR EACH ROW EXECUTE FUNCTION refuses()"
    )
    monkeypatch.setattr(claims_in_flight, "FLUSH_AFTER_S", 0.1)
    bodies.stay = {3}
    enqueue(4)
    try:
        with running(worker(), bodies):
            until(are(conn, "completed", "running", "completed", "running"))
            bodies.release.set()
            until(are(conn, "completed", "failed", "completed", "completed"))
    finally:
        conn.execute("DROP FUNCTION refuses CASCADE")
    assert bodies.ran == [0, 1, 2, 3]


def test_a_claim_that_is_lost_before_it_begins_does_not_run(
    conn: engine.Connection, bodies: Bodies, patient: None
) -> None:
    bodies.stay = {0}
    ids = enqueue(4)
    with running(worker(lease_s=1.5), bodies):
        assert bodies.started.wait(30)
        with conn.transaction():
            conn.execute(
                "UPDATE ingest_jobs SET lease_expires_at = now() - interval '1 s' WHERE id = %s",
                (ids[2],),
            )
            assert len(transitions.reclaim_lapsed(conn, "ingest")) == 1
        # The renewal that reports the loss may not be the one that is under way.
        renewed(conn)
        renewed(conn)
        conn.execute("UPDATE ingest_jobs SET status = 'cancelled' WHERE id = %s", (ids[2],))
        bodies.release.set()
        until(are(conn, "completed", "completed", "cancelled", "completed"))
    assert bodies.ran == [0, 1, 3]


def test_the_results_of_a_full_batch_are_recorded_while_the_next_one_runs(
    conn: engine.Connection, bodies: Bodies, patient: None, monkeypatch: Any
) -> None:
    real, by = claims.ingest_step, list[tuple[str, int, int]]()

    def step(own: engine.Connection, who: transitions.Claimant, **more: Any) -> list[Row]:
        found = real(own, who, **more)
        by.append((threading.current_thread().name, len(more.get("done", ())), len(found)))
        return found

    monkeypatch.setattr(claims, "ingest_step", step)
    bodies.stay = {4}
    enqueue(7)
    with running(worker(), bodies):
        assert bodies.started.wait(30)
        until(are(conn, *["completed"] * 4, *["running"] * 3))
        bodies.release.set()
        until(are(conn, *["completed"] * 7))
    assert {each for each in by if any(each[1:])} == {
        ("test-worker", 0, 4),
        ("lease-keeper", 4, 0),
        ("test-worker", 0, 3),
        ("test-worker", 3, 0),
    }


def test_a_batch_claimed_by_a_commit_whose_reply_was_lost_is_given_back(
    conn: engine.Connection, bodies: Bodies, monkeypatch: Any
) -> None:
    real, cut = claims.ingest_step, list[int]()

    def step(own: engine.Connection, who: transitions.Claimant, **more: Any) -> list[Row]:
        found = real(own, who, **more)
        if bodies.ran and found and not cut:
            cut.append(len(found))
            own.close()
            raise engine.OperationalError("the reply was lost")
        return found

    monkeypatch.setattr(claims, "ingest_step", step)
    enqueue(8)
    with running(worker(), bodies):
        until(are(conn, *["completed"] * 8))
    assert cut == [4]
    assert bodies.ran == [*range(8)]
    assert [(row["claim_no"], row["crash_count"]) for row in rows(conn)] == (
        [(1, 0)] * 4 + [(2, 0)] * 4
    )


def test_a_lost_claim_that_is_committed_late_is_given_back_too(
    conn: engine.Connection, bodies: Bodies, monkeypatch: Any
) -> None:
    real, release = claims.ingest_step, handback.release_strays
    cut, looks = list[int](), list[int]()

    def step(own: engine.Connection, who: transitions.Claimant, **more: Any) -> list[Row]:
        if bodies.ran and more.get("claim") and not cut:
            cut.append(1)
            own.close()
            raise engine.OperationalError("the reply was lost")
        return real(own, who, **more)

    def look(own: engine.Connection, table: Any, worker_id: str, keep: list[str]) -> list[Row]:
        found = release(own, table, worker_id, keep)
        looks.append(len(found))
        if len(looks) == 1:
            assert len(real(conn, transitions.who(QUEUE, worker_id), claim=4)) == 4
        return found

    monkeypatch.setattr(claims, "ingest_step", step)
    monkeypatch.setattr(handback, "release_strays", look)
    enqueue(8)
    with running(worker(), bodies):
        until(are(conn, *["completed"] * 8))
    assert looks == [0, 4]
    assert [row["crash_count"] for row in rows(conn)] == [0] * 8


def test_after_a_long_handler_less_is_claimed_until_handlers_are_short_again() -> None:
    subject = worker(size=100)._loop._batch
    assert subject is not None

    def paced(ran: int, seconds: float) -> int:
        subject._next = subject._next_size(ran, seconds)
        return subject._next

    assert paced(100, 0.02) == 100
    assert paced(30, 3 * claims_in_flight.LONG_S) == 10
    assert paced(1, 60.0) == 1
    assert [paced(1, 0.001) for _ in range(8)] == [2, 4, 8, 16, 32, 64, 100, 100]
