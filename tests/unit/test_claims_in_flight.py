"""The claims of a batch: which thread may do what with each job, and in which order."""

from __future__ import annotations

import pytest

from queue_workflows.engine import job_tables, outcomes
from queue_workflows.types import Row
from queue_workflows.worker import claims_in_flight, guards
from tests.support.clocks import Clock

END = guards.LeaseEnd(0.0, 600.0)


@pytest.fixture
def clock() -> Clock[float]:
    return Clock(1000.0)


@pytest.fixture
def subject(clock: Clock[float]) -> claims_in_flight.ClaimsInFlight:
    return claims_in_flight.ClaimsInFlight(now_fn=clock)


def job(job_id: str, claim_no: int = 1) -> Row:
    return {"id": job_id, "worker_id": "w", "claim_no": claim_no, "queue": "load", "seq": 1}


def lease(job_id: str, claim_no: int = 1) -> job_tables.Lease:
    return job_tables.lease_of(job_tables.INGEST_JOBS, job(job_id, claim_no))


def completed(subject: claims_in_flight.ClaimsInFlight) -> claims_in_flight.Done:
    work = subject.start_next()
    assert work is not None
    done = (work, outcomes.Outcome("completed", 0.0))
    subject.add_done(done)
    return done


def names(done: list[claims_in_flight.Done]) -> str:
    return "".join(work.job["id"] for work, _ in done)


def test_results_are_taken_once_and_in_claim_order_even_after_one_was_put_back(
    subject: claims_in_flight.ClaimsInFlight,
) -> None:
    subject.add([job(name) for name in "abcd"], END)
    completed(subject)
    completed(subject)
    first = subject.take_done()
    completed(subject)
    assert names(subject.take_done(1)) == "c"
    completed(subject)
    subject.put_back(first)
    assert names(subject.take_done(1)) == "a"
    assert names(subject.take_done()) == "bd"
    assert subject.take_done() == []


def test_a_result_waits_for_its_batch_but_not_for_long(
    subject: claims_in_flight.ClaimsInFlight, clock: Clock[float]
) -> None:
    subject.add([job("a"), job("b")], END)
    completed(subject)
    assert not subject.is_due()
    clock.now += claims_in_flight.FLUSH_AFTER_S
    assert subject.is_due()
    subject.put_back(subject.take_done())
    assert not subject.is_due(), "what the server refused is not tried again at once"


def test_nothing_waits_behind_a_long_handler(
    subject: claims_in_flight.ClaimsInFlight, clock: Clock[float]
) -> None:
    subject.add([job(name) for name in "abc"], END)
    subject.start_next()
    clock.now += claims_in_flight.LONG_S - 0.1
    assert not subject.is_due()
    clock.now += 0.2
    assert subject.is_due()
    assert subject.returning() == {"waited too long in its batch": [lease("b"), lease("c")]}
    assert subject.start_next() is None
    assert [*subject.claims()] == [lease("a"), lease("b"), lease("c")], "held until it is written"
    subject.remove([lease("b"), lease("c")])
    assert [*subject.claims()] == [lease("a")]
    assert not subject.is_due()


def test_nothing_waits_for_long_behind_many_handlers(
    subject: claims_in_flight.ClaimsInFlight, clock: Clock[float]
) -> None:
    subject.add([job(name) for name in "abcdefg"], END)
    for _ in range(4):
        completed(subject)
        clock.now += claims_in_flight.LONG_S - 0.3
    subject.take_done()
    assert not subject.is_due()
    clock.now += 0.3
    assert subject.is_due()
    assert [*subject.returning().values()] == [[lease(name) for name in "efg"]]
    assert subject.start_next() is None


def test_a_job_that_came_back_is_not_forgotten_with_its_claim_of_before(
    subject: claims_in_flight.ClaimsInFlight,
) -> None:
    subject.add([job("a")], END)
    subject.return_waiting("shutdown")
    subject.add([job("a", 2)], END)
    subject.remove([lease("a")])
    assert [*subject.claims()] == [lease("a", 2)]
    assert subject.returning() == {}
    work = subject.start_next()
    assert work is not None
    assert work.lease == lease("a", 2)


def test_a_renewal_applies_to_waiting_and_running_jobs(
    subject: claims_in_flight.ClaimsInFlight,
) -> None:
    subject.add([job(name) for name in "abcde"], END)
    done = completed(subject)
    work = subject.start_next()
    assert work is not None
    subject.renewed(
        claims_in_flight.RenewalResult([lease("a"), lease("c")], [lease("b"), lease("d")]), 7.0
    )
    assert (work.cancel.is_set(), work.stop_at) == (True, 7.0)
    assert subject.returning() == {"cancelled": [lease("d")]}
    assert [*subject.claims()] == [lease(name) for name in "abde"]
    assert subject.take_done() == [done], "whether it is lost its recording will find"
    after = subject.start_next()
    assert after is not None
    assert after.lease == lease("e")


def test_only_what_waits_is_cancelled_at_a_word(subject: claims_in_flight.ClaimsInFlight) -> None:
    long = "x" * 1200
    subject.add([job(name) for name in ("a", "b", long)], END)
    subject.start_next()
    assert not subject.cancel("a")
    assert subject.cancel("b")
    assert subject.cancel(long[:1000])
    assert subject.returning() == {"cancelled": [lease("b"), lease(long)]}
