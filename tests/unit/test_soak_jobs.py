"""The soak's checks of ingest jobs, on constructed evidence."""

from __future__ import annotations

from typing import Any

import pytest

from tests.soak import (
    acknowledgements,
    check_claims,
    check_jobs,
    evidence,
    fault_plan,
    faults,
    fleet,
    journal,
    observer,
    tasks,
)

POOL = next(seat for seat in fleet.SEATS if seat.name == "pool-1")
PID = 77


class Story:
    """Jobs that were claimed and ran, in seconds; the database's clock is the journal's."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.events: dict[str, list[evidence.Event]] = {}
        self.lines: list[journal.Line] = []
        self.faults: list[faults.Fault] = []
        self.books = acknowledgements.Acknowledgements()
        self._place = 0

    def job(self, name: str, **more: Any) -> None:
        self.events[name] = []
        self.jobs[name] = {
            "family": "ingest", "what": "note", "queue": tasks.CALLS, "seq": len(self.jobs) + 1,
            "key": None, "lock_key": None, "partition": None, "status": "completed",
            "attempts": 0, "max_attempts": 1, "crash_count": 0, "lapse_count": 0, "reason": "load",
            "epoch": 0.0, "run_id": None, "error": None, **more,
        }  # fmt: skip

    def event(self, name: str, kind: str, at: float, claim: int = 1) -> None:
        self._place += 1
        worker = f"{POOL.label}:{PID}:machine:random"
        queue = self.jobs[name]["queue"]
        self.events[name].append(
            evidence.Event(name, self._place, kind, claim, worker, POOL.label, queue, at, at)
        )

    def line(self, word: str, name: str, at: float, claim: int = 1) -> None:
        what = self.jobs[name]["what"]
        self.lines.append(journal.Line(word, name, claim, "worker", PID, at, what))

    def ran(self, name: str, since: float, until: float, claim: int = 1) -> None:
        """Claimed and run to its end."""
        self.event(name, "claimed", since - 0.01, claim)
        self.line("start", name, since, claim)
        self.line("end", name, until, claim)
        self.event(name, "completed", until + 0.01, claim)

    def seen(self) -> evidence.Evidence:
        known: dict[str, Any] = dict.fromkeys(
            ("runs", "fires", "off", "stuck", "invariants", "slow"), ()
        )
        return evidence.Evidence(
            **known,
            jobs=self.jobs,
            events=self.events,
            lines=self.lines,
            books=self.books,
            faults=self.faults,
            ended=[],
            time=None,  # type: ignore[arg-type]
            began=0.0,
            ended_load=100.0,
            by_job={name: [x for x in self.lines if x.job == name] for name in self.jobs},
        )


def test_a_key_has_one_job_and_the_first_request_created_it() -> None:
    story = Story()
    story.job("one", key="k")
    story.books.keys["k"] = [("one", True), ("one", False)]
    assert not [*check_jobs.keyed(story.seen())]
    story.books.keys["k"] = [("one", False)]
    assert len([*check_jobs.keyed(story.seen())]) == 1
    story.books.unheard.add("k")  # its requester got no reply
    assert not [*check_jobs.keyed(story.seen())]
    story.books.keys["k"] = [("one", True), ("one", True)]
    assert len([*check_jobs.keyed(story.seen())]) == 1


def test_two_jobs_of_a_key_a_key_taken_over_and_an_undone_job_are_found() -> None:
    story = Story()
    story.job("one", key="k")
    story.job("two", key="k")
    assert len([*check_jobs.keyed(story.seen())]) == 1
    story.books.undone.add("two")
    story.books.taken.append("k")
    assert len([*check_jobs.keyed(story.seen())]) == 3


@pytest.mark.parametrize(("since", "found"), [(2.1, 0), (1.9, 1)])
def test_handlers_of_a_lock_key_that_run_at_once_are_found(since: float, found: int) -> None:
    story = Story()
    story.job("first", lock_key="k")
    story.job("second", lock_key="k")
    story.ran("first", 1.0, 2.0)
    story.ran("second", since, 3.0)
    assert len([*check_jobs.locked(story.seen())]) == found


def test_a_handler_counts_no_longer_than_its_claim() -> None:
    """A stopped process continues when it is woken; `outlived` checks that."""
    story = Story()
    story.job("first", lock_key="k")
    story.job("second", lock_key="k")
    story.event("first", "claimed", 0.9)
    story.line("start", "first", 1.0)
    story.event("first", "reclaimed", 8.0)
    story.ran("second", 8.1, 9.0)
    story.line("beat", "first", 8.5)
    assert not [*check_jobs.locked(story.seen())]


def test_a_job_that_overtakes_in_a_lock_queue_is_found() -> None:
    story = Story()
    story.job("first", lock_key="k", seq=1)
    story.job("second", lock_key="k", seq=2)
    story.ran("second", 1.0, 2.0)
    story.ran("first", 3.0, 4.0)
    assert len([*check_jobs.locked(story.seen())]) == 1
    story.jobs["second"]["reason"] = "hostile"  # its priority may be higher
    assert not [*check_jobs.locked(story.seen())]


def line() -> Story:
    """A younger job overtook one that was queued at 10 s; it got its turn after 14.5 s."""
    story = Story()
    story.job("zeroth", lock_key="k")
    story.job("first", lock_key="k", epoch=10.0)
    story.job("second", lock_key="k", queue=tasks.NOTES)
    story.ran("zeroth", 14.5, 16.0)
    story.ran("second", 20.0, 21.0)
    story.ran("first", 30.0, 31.0)
    return story


@pytest.mark.parametrize(
    ("queue", "at", "found"),
    [
        (tasks.CALLS, 15.0, 0),
        (tasks.CALLS, 9.5, 1),  # it did not wait yet
        (tasks.CALLS, 20.5, 1),  # the younger one was claimed already
        (tasks.NOTES, 15.0, 1),  # that is the queue of the other one
    ],
)
def test_a_job_in_a_queue_without_workers_may_be_overtaken(
    queue: str, at: float, found: int
) -> None:
    seen = line().seen()
    seen.unserved.append((queue, at))
    assert len([*check_jobs.locked(seen)]) == found


@pytest.mark.parametrize(
    ("polls", "found"),
    [((9.7, 20.2), 0), ((9.7,), 1), ((20.2,), 1), ((8.5, 20.2), 1), ((9.7, 21.5), 1)],
)
def test_a_queue_without_workers_before_and_after_a_short_wait_had_none_in_between(
    polls: tuple[float, ...], found: int
) -> None:
    seen = line().seen()
    seen.unserved += [(tasks.CALLS, at) for at in polls]
    assert len([*check_jobs.locked(seen)]) == found


@pytest.mark.parametrize(
    ("at", "found"), [(9.4, 0), (10.1, 0), (10.6, 0), (9.1, 1), (11.1, 1)], ids=str
)
def test_a_queue_may_be_without_workers_until_the_polls_beside_the_one_that_says_so(
    at: float, found: int
) -> None:
    story = Story()
    story.job("first", lock_key="k", epoch=10.0)
    story.job("second", lock_key="k", queue=tasks.NOTES)
    story.ran("second", 10.2, 11.0)
    story.ran("first", 12.0, 13.0)
    seen = story.seen()
    seen.unserved.append((tasks.CALLS, at))
    assert len([*check_jobs.locked(seen)]) == found


@pytest.mark.parametrize(
    ("polls", "found"),
    [
        ([14.0, 14.5, 16.0, 16.5], 0),
        ([14.0, 14.9, 15.9, 16.8], 1),  # it polled all the time
        ([5.0, 9.5, 10.2, 11.0], 1),  # the job did not wait yet
        ([20.0, 20.9, 25.0], 1),  # the younger one was claimed already
        ([15.0], 1),  # it began to poll then
    ],
)
def test_a_job_may_be_overtaken_while_the_observer_was_starved(
    polls: list[float], found: int
) -> None:
    seen, watching = line().seen(), observer.Observer([])
    for at in polls:
        watching.note_poll(at, [])
    seen.blind += watching.blind
    assert len([*check_jobs.locked(seen)]) == found


@pytest.mark.parametrize(
    ("queue", "partition", "since", "until", "found"),
    [
        (tasks.CALLS, None, 15.0, 16.0, 0),
        (tasks.CALLS, "red", 15.0, 16.0, 1),
        (tasks.NOTES, None, 15.0, 16.0, 1),
        (tasks.CALLS, None, 1.0, 4.0, 1),
        (tasks.CALLS, None, 25.0, 27.0, 1),
    ],
)
def test_a_job_in_a_paused_queue_may_be_overtaken(
    queue: str, partition: str | None, since: float, until: float, found: int
) -> None:
    story = line()
    story.books.pauses.append(acknowledgements.Pause(queue, partition, since, until))
    assert len([*check_jobs.locked(story.seen())]) == found


@pytest.mark.parametrize(("at", "found"), [(9.0, 0), (4.0, 1)])
def test_a_job_that_waits_again_is_overtaken_no_more(at: float, found: int) -> None:
    story = Story()
    for name in ("first", "second", "third"):
        story.job(name, lock_key="k")
    for since, name in ((10.0, "second"), (20.0, "third"), (30.0, "first")):
        story.ran(name, since, since + 1)
    seen = story.seen()
    seen.unserved.append((tasks.CALLS, at))
    assert len([*check_jobs.locked(seen)]) == found


@pytest.mark.parametrize(("most", "found"), [(tasks.MOST, 0), (tasks.MOST + 1, 1)])
def test_more_handlers_of_a_partition_than_its_limit_are_found(most: int, found: int) -> None:
    story = Story()
    for number in range(most):
        story.job(f"j{number}", partition="red")
        story.ran(f"j{number}", 1.0 + number / 10, 2.0)
    assert len([*check_jobs.crowded(story.seen())]) == found


@pytest.mark.parametrize(("last", "found"), [(10.0 + tasks.PERIOD_S, 0), (11.9, 1)])
def test_a_start_too_many_in_a_period_is_found(last: float, found: int) -> None:
    story = Story()
    for number in range(tasks.METER + 1):
        story.job(f"j{number}", partition=tasks.METERED)
        story.event(f"j{number}", "claimed", last if number == tasks.METER else 10.0 + number / 9)
    assert len([*check_jobs.hurried(story.seen())]) == found


@pytest.mark.parametrize(
    ("pause", "found"),
    [
        (acknowledgements.Pause(tasks.CALLS, None, 4.0, 6.0), 1),
        (acknowledgements.Pause(tasks.CALLS, "red", 4.0, 6.0), 1),
        (acknowledgements.Pause(tasks.CALLS, "blue", 4.0, 6.0), 0),
        (acknowledgements.Pause(tasks.FEEDS, None, 4.0, 6.0), 0),
        (acknowledgements.Pause(tasks.CALLS, None, 5.1, 6.0), 0),
        (acknowledgements.Pause(tasks.CALLS, None, 4.0, 6.0, sure=False), 0),
    ],
)
def test_a_claim_while_its_queue_or_partition_is_paused_is_found(
    pause: acknowledgements.Pause, found: int
) -> None:
    story = Story()
    story.job("j", partition="red")
    story.event("j", "claimed", 5.0)
    story.books.pauses.append(pause)
    assert len([*check_jobs.paused(story.seen())]) == found


@pytest.mark.parametrize(
    ("job", "again", "found"),
    [
        ({"attempts": 2, "max_attempts": 3}, 2, 0),
        ({"attempts": 3, "max_attempts": 3, "status": "failed"}, 2, 0),
        ({"attempts": 2, "max_attempts": 3}, 1, 1),  # something else was counted
        ({"attempts": 3, "max_attempts": 2, "status": "failed"}, 2, 1),
        ({"attempts": 2, "max_attempts": 3, "status": "failed", "what": "hopeless"}, 1, 1),
        ({"attempts": 1, "max_attempts": 3, "status": "failed", "crash_count": 3}, 1, 0),
    ],
)
def test_attempts_that_are_miscounted_or_too_many_are_found(
    job: dict[str, Any], again: int, found: int
) -> None:
    story = Story()
    story.job("j", **job)
    for claim in range(1, again + 1):
        story.event("j", "retried", claim, claim)
    assert len([*check_jobs.attempts(story.seen())]) == found


@pytest.mark.parametrize(("counted", "found"), [(0, 0), (1, 1)])
def test_a_timeout_is_no_attempt(counted: int, found: int) -> None:
    story = Story()
    story.job("j", status="failed", attempts=counted, max_attempts=3, what="hopeless")
    for kind in ("claimed", "failed", "budget_trip"):
        story.event("j", kind, 1.0)
    assert len([*check_jobs.attempts(story.seen())]) == found


@pytest.mark.parametrize(("waited", "found"), [(tasks.AGAIN_S, 0), (tasks.AGAIN_S - 0.1, 1)])
def test_an_attempt_that_did_not_wait_is_found(waited: float, found: int) -> None:
    story = Story()
    story.job("j", attempts=1, max_attempts=2)
    story.event("j", "retried", 3.0)
    story.ran("j", 3.0 + waited, 4.0, claim=2)
    assert len([*check_jobs.attempts(story.seen())]) == found


@pytest.mark.parametrize(
    ("kind", "stopped", "runs_in", "found"),
    [
        ("stop", PID, PID, 0),
        ("stop", PID, PID + 1, 1),
        (fault_plan.STOP_EXECUTOR, PID + 1, PID + 1, 0),
        (fault_plan.STOP_EXECUTOR, PID + 2, PID + 1, 1),
    ],
    ids=["itself", "its worker", "its executor", "another executor"],
)
def test_only_a_process_that_was_stopped_may_act_after_its_claim(
    kind: str, stopped: int, runs_in: int, found: int
) -> None:
    story = Story()
    story.job("j")
    story.event("j", "claimed", 10.0)
    story.event("j", "reclaimed", 17.0)
    late = journal.Line("beat", "j", 1, "worker", PID, 20.0, "long", runs_in)
    story.lines = [late._replace(word="start", at=10.1), late]
    story.faults = [faults.Fault(kind, POOL.name, 11.0, 19.5, (stopped,))]
    assert len([*check_claims.outlived(story.seen())]) == found
