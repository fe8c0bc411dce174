"""The soak's check of how soon a dead worker's job is claimed again, on constructed evidence."""

from __future__ import annotations

from typing import Any

import pytest

from tests.soak import acknowledgements, check_recovery, evidence, faults, fleet, report, tasks

DEAD = next(seat for seat in fleet.SEATS if seat.name == "notes-2")
OTHER = next(seat for seat in fleet.SEATS if seat.name == "notes-1")
KILLED_AT = 100.0
TAKEN_AT = KILLED_AT + fleet.LEASE_S
LATE_AT = KILLED_AT + check_recovery.limit_s(DEAD.care) + 3.0


class Story:
    """A job whose worker was killed, taken back in time and claimed again too late."""

    def __init__(self) -> None:
        self.events: dict[str, list[evidence.Event]] = {}
        self.ended: list[fleet.Ended] = []
        self.event("late", "claimed", KILLED_AT - 1, "dead", DEAD)
        self.event("late", "reclaimed", TAKEN_AT, "dead", DEAD)
        self.event("late", "claimed", LATE_AT, "third", OTHER, claim=2)
        self.event("late", "completed", LATE_AT + 1, "third", OTHER, claim=2)

    def event(
        self, job: str, kind: str, at: float, who: str, seat: fleet.Seat, claim: int = 1
    ) -> None:
        pid = 7 if who.startswith("idle") else 8
        worker = f"{seat.label}:{pid}:machine:{who}"
        place = sum(len(events) for events in self.events.values())
        self.events.setdefault(job, []).append(
            evidence.Event(job, place, kind, claim, worker, seat.label, tasks.NOTES, at, at)
        )

    def ran(self, job: str, since: float, until: float, who: str) -> None:
        self.event(job, "claimed", since, who, OTHER)
        self.event(job, "completed", until, who, OTHER)

    def seen(self) -> evidence.Evidence:
        known: dict[str, Any] = dict.fromkeys(
            ("runs", "fires", "off", "stuck", "invariants", "slow"), ()
        )
        job = {"lock_key": None, "partition": None, "queue": tasks.NOTES}
        kill = faults.Fault("kill, unseen", DEAD.name, KILLED_AT, KILLED_AT, (8,))
        kill.held.append(faults.HeldJob("ingest", "late", 1, long=False))
        return evidence.Evidence(
            **known,
            jobs=dict.fromkeys(self.events, job),
            events=self.events,
            lines=[],
            books=acknowledgements.Acknowledgements(),
            faults=[kill],
            ended=self.ended,
            time=None,  # type: ignore[arg-type]
            began=0.0,
            ended_load=1000.0,
        )

    def late(self) -> list[str]:
        return [*check_recovery.late(self.seen())]


def test_a_next_claim_is_late_when_somebody_was_idle_all_the_while() -> None:
    story = Story()
    story.ran("before", 50, 51, "idle")
    story.ran("after", 200, 201, "idle")
    assert [line for line in story.late() if "was claimed again after" in line]


def test_a_worker_that_ran_something_else_was_not_idle() -> None:
    story = Story()
    story.ran("before", 50, TAKEN_AT + 1, "idle")
    story.ran("after", 200, 201, "idle")
    assert not story.late()


def test_two_processes_of_one_pid_are_not_one_that_was_idle_in_between() -> None:
    story = Story()
    story.ran("before", 50, 51, "idle-first")
    story.ran("after", 200, 201, "idle-second")
    assert not story.late()


def test_the_history_of_a_job_that_a_finding_names_is_printed() -> None:
    story = Story()
    name = "0" * 36
    story.events[name] = story.events["late"]
    lines = [*report.stories(story.seen(), {"lost": [], "late": [f"1.0 s: job {name}: too late"]})]
    assert lines[0] == f"job {name}:"
    kinds = [line.split(" s  ")[1].split(",")[0] for line in lines[1:]]
    assert kinds == ["claimed", "reclaimed", "claimed", "completed"]


@pytest.mark.parametrize("order", [("cpu-1", "cpu-2"), ("cpu-2", "cpu-1")])
def test_a_claim_belongs_to_the_process_that_ended_next(order: tuple[str, str]) -> None:
    seats = [next(seat for seat in fleet.SEATS if seat.name == name) for name in order]
    story = Story()
    story.ended += [fleet.Ended(160, seats[1].name, 8, None, 9)]
    story.ended += [fleet.Ended(60, seats[0].name, 8, None, 9)]
    for at, seat in zip((50, 150), seats, strict=True):
        claim = evidence.Event("job", 0, "claimed", 1, "box-a:8:m:r", "box-a", "cpu", at, at)
        assert story.seen().seat(claim) == seat
