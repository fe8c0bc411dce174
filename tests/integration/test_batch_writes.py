"""What the lease keeper of a worker with batches writes beside the loop that runs its handlers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from queue_workflows import db
from queue_workflows.engine import claims, handback
from queue_workflows.types import Row
from queue_workflows.worker import batch, claims_in_flight, guards, lease_keeper, slot
from tests.support import factories, timeouts, transitions
from tests.support.batch_worker import (
    QUEUE,
    Bodies,
    are,
    enqueue,
    events,
    rows,
    running,
    states,
    worker,
)
from tests.support.wait import until

pytestmark = pytest.mark.usefixtures("invariants_hold")


def test_a_result_after_the_time_limit_was_decided_is_dropped(
    conn: db.Connection, bodies: Bodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts.keep_batches_in_order(monkeypatch)
    bodies.stay = {1}
    ids = enqueue(3)
    conn.execute("UPDATE ingest_jobs SET timeout_s = 0.1 WHERE id = %s", (ids[1],))
    # The write of the decision is slower than the handler.
    timeouts.hold_guards(monkeypatch, lambda _: bodies.release.set())
    with running(worker(), bodies):
        until(are(conn, "completed", "failed", "completed"))
    assert events(conn, ids[1]) == ["claimed", "failed", "budget_trip"]


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


def test_no_job_runs_or_is_recorded_twice_when_the_lease_keeper_takes_some(
    conn: db.Connection, bodies: Bodies, monkeypatch: Any
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

    def recording(own: db.Connection, who: claims.Claimant, **more: Any) -> list[Row]:
        if not more.get("done"):
            return step(own, who, **more)
        return alone(who.worker_id, lambda: step(own, who, **more))

    def renewing(own: db.Connection, leases: Any, **more: Any) -> list[claims.Renewal]:
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


def test_a_lost_claim_that_is_committed_late_is_given_back_too(
    conn: db.Connection, bodies: Bodies, monkeypatch: Any
) -> None:
    real, release = claims.ingest_step, handback.release_strays
    cut, looks = list[int](), list[int]()

    def step(own: db.Connection, who: claims.Claimant, **more: Any) -> list[Row]:
        if bodies.ran and more.get("claim") and not cut:
            cut.append(1)
            own.close()
            raise db.OperationalError("the reply was lost")
        return real(own, who, **more)

    def look(own: db.Connection, table: Any, worker_id: str, keep: list[str]) -> list[Row]:
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
