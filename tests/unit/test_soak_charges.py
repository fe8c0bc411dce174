"""The soak's checks of charges for crashes, on constructed evidence."""

from __future__ import annotations

from typing import Any

import pytest

from tests.soak import (
    acknowledgements,
    check_charges,
    check_claims,
    evidence,
    fault_plan,
    faults,
    fleet,
    journal,
    workflows,
)

SEATS = {seat.name: seat for seat in fleet.SEATS}
SUPERVISED, UNSEEN, INLINE = "notes-1", "notes-2", "cpu-4"
WORKER, EXECUTOR = 77, 78
DIED = "killed by SIGKILL"


class Story:
    """The claim of a job by a seat from 10 s to 11 s, and a neighbour in another executor."""

    def __init__(self, seat: str, error: str | None = DIED, kind: str = "reclaimed") -> None:
        self.seat = SEATS[seat]
        self.faults: list[faults.Fault] = []
        self.lines: list[journal.Line] = []
        self.locked: list[evidence.Locked] = []
        self.events: list[evidence.Event] = []
        self.crash_count = int(error is not None)
        self.poison = "poison: took down 3 workers" if kind == "failed" else None
        self.event("claimed", 10.0)
        self.event(kind, 11.0, error)

    def event(self, kind: str, at: float, error: str | None = None) -> None:
        worker = f"{self.seat.label}:{WORKER}:machine:random"
        where = self.seat.label, self.seat.queues[0]
        self.events.append(
            evidence.Event("j", len(self.events), kind, 1, worker, *where, at, at, error)
        )

    def started(self, job: str, what: str, runs_in: int) -> None:
        self.lines.append(journal.Line("start", job, 1, "worker", WORKER, 10.9, what, runs_in))

    def hit(self, kind: str, *pids: int, seat: str = "", held: str = "") -> None:
        jobs = [faults.HeldJob("ingest", held, 1, long=False)] if held else []
        self.faults.append(faults.Fault(kind, seat or self.seat.name, 10.9, 10.9, pids, jobs))

    def seen(self) -> evidence.Evidence:
        none: dict[str, Any] = dict.fromkeys(
            ("runs", "fires", "off", "ended", "stuck", "invariants", "slow"), ()
        )
        job = {"crash_count": self.crash_count, "run_id": None, "error": self.poison}
        return evidence.Evidence(
            **none, jobs={"j": job}, events={"j": self.events}, lines=self.lines,
            books=acknowledgements.Acknowledgements(), faults=self.faults, locked=self.locked,
            time=None, began=0.0, ended_load=100.0,  # type: ignore[arg-type]
            by_job={"j": [line for line in self.lines if line.job == "j"]},
        )  # fmt: skip

    def charged(self) -> int:
        return len([*check_charges.charged(self.seen())])

    def missed(self) -> int:
        return len([*check_charges.missed(self.seen())])

    def taken(self) -> int:
        return len([*check_claims.crashes(self.seen())])


def test_a_crash_without_a_death_is_found() -> None:
    assert Story(SUPERVISED).charged() == 1


@pytest.mark.parametrize("kind", ["stop", "freeze", "restart", "off"])
def test_what_only_ends_a_lease_counts_no_crash(kind: str) -> None:
    story = Story(SUPERVISED)
    story.hit(kind, WORKER)
    assert story.charged() == 1


@pytest.mark.parametrize("error", [None, "its session is gone, and it has not renewed for 30 s"])
def test_a_lapse_is_no_crash(error: str | None) -> None:
    story = Story(SUPERVISED, error)
    story.crash_count = 0
    assert story.charged() == 0
    story.crash_count = 1  # a submitter has set it
    assert story.charged() == 1


@pytest.mark.parametrize(
    ("seat", "kind", "found"),
    [
        (SUPERVISED, "kill, supervised", 0),
        (SUPERVISED, faults.KILL_PARENT, 1),
        (UNSEEN, "kill, unseen", 1),
    ],
)
def test_only_a_parent_sees_a_worker_die(seat: str, kind: str, found: int) -> None:
    story = Story(seat)
    story.hit(kind, WORKER)
    assert story.charged() == found


@pytest.mark.parametrize(("held", "found"), [("j", 0), ("its neighbour", 1)])
def test_a_killed_executor_charges_the_job_that_it_ran_and_no_other(held: str, found: int) -> None:
    story = Story(UNSEEN)
    story.hit(fault_plan.KILL_EXECUTOR, EXECUTOR, held=held)
    assert story.charged() == found
    assert story.taken() == found


@pytest.mark.parametrize(("runs_in", "found"), [(EXECUTOR, 0), (EXECUTOR + 1, 1)])
def test_a_killed_executor_charges_a_job_that_has_just_written_its_last_line(
    runs_in: int, found: int
) -> None:
    story = Story(UNSEEN)
    story.started("j", "note", runs_in)
    story.hit(fault_plan.KILL_EXECUTOR, EXECUTOR, held="its neighbour")
    assert story.charged() == found


@pytest.mark.parametrize(("seat", "found"), [(UNSEEN, 0), ("notes-3", 1)])
def test_a_killed_launcher_charges_the_jobs_of_its_worker(seat: str, found: int) -> None:
    story = Story(UNSEEN)
    story.hit(fault_plan.KILL_LAUNCHER, EXECUTOR, seat=seat)
    assert story.charged() == found
    assert story.taken() == found


@pytest.mark.parametrize(
    ("seat", "what", "runs_in", "found"),
    [
        (SUPERVISED, "killed", EXECUTOR + 1, 1),
        (SUPERVISED, "killed", EXECUTOR, 0),  # both ran in one executor
        (SUPERVISED, workflows.KILLS_WORKER, EXECUTOR + 1, 0),
        (UNSEEN, workflows.KILLS_WORKER, EXECUTOR + 1, 1),
        (UNSEEN, workflows.KILLS_LAUNCHER, EXECUTOR + 1, 0),
    ],
)
def test_a_handler_charges_its_neighbours_if_its_parent_cannot_tell_them_apart(
    seat: str, what: str, runs_in: int, found: int
) -> None:
    story = Story(seat)
    story.started("j", "note", EXECUTOR)
    story.started("its neighbour", what, runs_in)
    assert story.charged() == found


@pytest.mark.parametrize(("job", "found"), [("j", 0), ("its neighbour", 1)])
def test_the_last_crash_of_a_job_is_its_own(job: str, found: int) -> None:
    story = Story(SUPERVISED, kind="failed")
    story.started(job, workflows.KILLS_WORKER, EXECUTOR)
    assert story.charged() == found


@pytest.mark.parametrize(
    ("seat", "what", "error", "found"),
    [
        (UNSEEN, "killed", None, 1),
        (UNSEEN, "killed", DIED, 0),
        (UNSEEN, workflows.KILLS_LAUNCHER, None, 1),
        (SUPERVISED, workflows.KILLS_WORKER, None, 1),
        (UNSEEN, workflows.KILLS_WORKER, None, 0),  # nobody saw it
        (INLINE, "killed", None, 0),
    ],
)
def test_a_handler_that_killed_its_process_unpunished_is_found(
    seat: str, what: str, error: str | None, found: int
) -> None:
    story = Story(seat, error)
    story.started("j", what, WORKER if seat == INLINE else EXECUTOR)
    assert story.missed() == found


@pytest.mark.parametrize(("kind", "pids"), [("freeze", (WORKER,)), ("restart", ())])
def test_a_fault_at_that_time_may_hide_who_was_at_fault(kind: str, pids: tuple[int, ...]) -> None:
    story = Story(UNSEEN, None)
    story.started("j", "killed", EXECUTOR)
    story.hit(kind, *pids)
    assert story.missed() == 0


@pytest.mark.parametrize(("until", "found"), [(10.5, 0), (2.0, 1)])
def test_a_job_whose_row_a_stranger_has_locked_may_lapse(until: float, found: int) -> None:
    story = Story(UNSEEN, None)
    story.locked = [evidence.Locked("j", 1.0, until), evidence.Locked("another", 1.0, 20.0)]
    assert story.taken() == found
