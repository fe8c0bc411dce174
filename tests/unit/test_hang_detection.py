"""When a parent kills a silent worker, with a fake clock and a fake GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from queue_workflows.engine import claims, job_tables
from queue_workflows.runtime import supervisor
from queue_workflows.telemetry.worker_usage import Sample
from queue_workflows.types import Row
from queue_workflows.worker import current_job, guards, hang_detection, shared_status
from tests.support.wait import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs memfd_create")
T0 = 1000.0
STALL_S = 120.0
CONFIRM_S = 3.0
LOAD_S = 1200.0
IDLE = Sample(0.0, 2000.0)
WHO = claims.Claimant("box:1:m:r", "box", "gpu")
JOB: Row = {"id": "j", "worker_id": WHO.worker_id, "claim_no": 7, "queue": "gpu"}
JOB |= {"node_module": "m", "required_model": None}
LEASE = job_tables.Lease(job_tables.NODE_JOBS, "j", WHO.worker_id, 7)


class Gpu:
    """A sampler that always finds the same."""

    def __init__(self) -> None:
        self.found = IDLE
        self.looks = 0

    def sample(self) -> Sample:
        self.looks += 1
        return self.found


class Worker:
    """One whose handler keeps the GIL from T0 on, and its parent a second at a time."""

    def __init__(self, own: shared_status.SharedStatus) -> None:
        self.board = own
        self.now = T0
        self.work = current_job.Work(
            job_tables.NODE_JOBS, JOB, guards.LeaseEnd(T0, 9e9), now_fn=lambda: self.now
        )
        self.work.on_activity = own.set_active
        self.gpu = Gpu()

    def begin(self) -> None:
        self.board.begin(self.account())
        self.board.beat(self.now, self.account())

    def account(self) -> Row:
        return shared_status.worker_record(WHO, self.work, shown=True)

    def case(self) -> hang_detection.HungWorker:
        return hang_detection.HungWorker(self.board.read(), sampler=self.gpu)  # type: ignore[arg-type]

    def judged(self, case: hang_detection.HungWorker, until: float) -> float | None:
        """When the parent decided to kill, in seconds after T0; None: not by then."""
        while self.now < T0 + until:
            self.now += 1
            case.check_guards(self.now)
            if case.decision is not None:
                return self.now - T0
        return None


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = shared_status.make()
    assert made is not None
    yield Worker(made)
    made.close()


def test_a_stall_is_confirmed_and_ended_when_the_worker_would_do_so(worker: Worker) -> None:
    worker.begin()
    worker.work.status(0.1)
    case = worker.case()
    assert worker.judged(case, 300) == pytest.approx(STALL_S + CONFIRM_S, abs=1)
    assert case.decision is not None
    assert case.decision.failure[:2] == (guards.EXIT_STALL, "stall_trip")
    assert case.decision[1:] == ("box", "gpu", LEASE, worker.now - T0)


def test_a_handler_that_never_reported_is_not_checked_for_stalls(worker: Worker) -> None:
    worker.begin()
    assert worker.judged(worker.case(), 600) is None


@pytest.mark.parametrize("found", [Sample(None, 2000.0), Sample(90.0, 2000.0)])
def test_a_busy_or_unreadable_gpu_ends_no_worker(worker: Worker, found: Sample) -> None:
    worker.begin()
    worker.work.status(0.1)
    worker.gpu.found = found
    assert worker.judged(worker.case(), 2000) is None


def test_the_window_of_the_gpu_guard_continues(worker: Worker) -> None:
    health = worker.work.guards[1]
    while worker.now < T0 + 1000:
        worker.now += 30
        health.sample(worker.now, IDLE)
    worker.begin()
    case = worker.case()
    assert worker.judged(case, 3000) == LOAD_S
    assert case.decision is not None
    assert case.decision.failure.code == guards.EXIT_GPU_HEALTH


def test_a_stopped_process_is_not_killed_for_a_stall(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_detection, "_PROC", tmp_path)
    stat = tmp_path / str(os.getpid()) / "stat"
    stat.parent.mkdir()
    stat.write_text("1 (a) b) T 1 1")
    worker.begin()
    worker.work.status(0.1)
    case = worker.case()
    assert worker.judged(case, 1000) is None
    assert worker.gpu.looks == 0
    stat.write_text("1 (a) b) R 1 1")
    assert worker.judged(case, 2000) == pytest.approx(1000 + STALL_S + CONFIRM_S, abs=2)


def test_a_stopped_process_is_known_from_one_that_runs() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        assert not hang_detection.is_stopped(child.pid)
        child.send_signal(signal.SIGSTOP)
        until(lambda: hang_detection.is_stopped(child.pid))
        child.kill()
    assert not hang_detection.is_stopped(child.pid)


def test_guards_of_an_earlier_job_are_not_carried_on(worker: Worker) -> None:
    worker.begin()
    worker.work.status(0.1)
    worker.board.begin()
    assert worker.judged(worker.case(), 2000) is None


def test_a_parent_that_slept_waits_before_it_takes_a_worker_for_silent() -> None:
    silence = hang_detection.SilencePeriod()
    assert not silence.is_silent(T0, T0)
    assert not silence.is_silent(T0, T0 + hang_detection.SILENT_S - 0.1)
    assert silence.is_silent(T0, T0 + hang_detection.SILENT_S)
    woken = T0 + 3600
    assert not silence.is_silent(T0, woken)
    assert not silence.is_silent(T0, woken + hang_detection.SILENT_S - 0.1)
    assert silence.is_silent(T0, woken + hang_detection.SILENT_S)


class Overseen:
    """A hang detector without its threads, and a worker that it observes."""

    def __init__(self) -> None:
        self.now = T0
        self.due = False
        self.subject = hang_detection.HangDetector(now_fn=lambda: self.now)
        self.spec = self.subject.attach_status(supervisor.ChildSpec("w", ["x"], {"A": "1"}))
        self.board = self.subject._workers["w"].status
        self.account = shared_status.worker_record(WHO, None, shown=False)

    def watch(self, seconds: float, pid: int | None = None) -> supervisor.Verdict | None:
        """The last decision within so many seconds."""
        verdict = None
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            verdict = self.subject.watch("w", pid or os.getpid(), self.due)
        return verdict

    def decide(self) -> None:
        (case,) = self.subject._hung_workers()
        case._decide(guards.Failure(79, hang_detection.OFF, "turned off"))


@pytest.fixture
def overseen() -> Iterator[Overseen]:
    made = Overseen()
    yield made
    made.subject.__exit__()


def test_a_child_inherits_its_shared_status(overseen: Overseen) -> None:
    (fd,) = overseen.spec.fds
    assert overseen.spec.env == {"A": "1", shared_status.VARIABLE: str(fd)}


def test_a_decision_to_kill_is_valid_while_the_worker_is_silent_during_the_same_job(
    overseen: Overseen,
) -> None:
    overseen.board.begin()
    overseen.board.beat(T0, overseen.account)
    assert overseen.watch(5) is None
    overseen.decide()
    assert overseen.watch(0.5) == (79, "turned off", overseen.subject._workers["w"].hung.decision)
    overseen.board.begin()
    assert overseen.watch(0.5) is None
    overseen.decide()
    overseen.board.beat(overseen.now, overseen.account)
    assert overseen.watch(0.5) is None


def test_a_silent_worker_that_had_its_time_to_stop_is_ended(overseen: Overseen) -> None:
    overseen.board.begin()
    overseen.board.beat(T0, overseen.account)
    assert overseen.watch(hang_detection.SILENT_S + 1) is None
    overseen.due = True
    verdict = overseen.watch(0.5)
    assert verdict is not None
    assert verdict[:2] == (0, "it was requested to stop, and did not")
    assert verdict.more.failure.event == hang_detection.STOPPED
    overseen.board.beat(overseen.now, overseen.account)
    assert overseen.watch(0.5) is None, "one that judges leaves by itself"


def test_a_guard_that_has_failed_comes_before_the_stop(overseen: Overseen) -> None:
    overseen.board.begin()
    overseen.board.beat(T0, overseen.account)
    overseen.watch(5)
    overseen.decide()
    overseen.due = True
    verdict = overseen.watch(0.5)
    assert verdict is not None
    assert verdict.code == 79


@pytest.mark.parametrize("kind", ["idle", "of another process", "that has judged never"])
def test_a_worker_that_is_left_alone(overseen: Overseen, kind: str) -> None:
    if kind != "idle":
        overseen.board.begin()
    overseen.board.beat(0.0 if kind == "that has judged never" else T0, overseen.account)
    overseen.watch(10, pid=1 if kind == "of another process" else None)
    assert overseen.subject._hung_workers() == []


def test_what_a_dead_worker_showed_is_forgotten(overseen: Overseen) -> None:
    overseen.board.begin()
    overseen.board.beat(T0, overseen.account)
    overseen.watch(5)
    overseen.decide()
    overseen.subject.ended("w")
    assert overseen.watch(0.5) is None
    assert overseen.board.read() == (0, 0, 0, None, False, {})


@pytest.mark.parametrize(("code", "fenced", "ran"), [
    (77, True, set[int]()), (77, False, {5}), (-9, True, {5}), (75, True, {5}),
    (0, True, set[int]()), (79, True, set[int]()), (0, False, {5}),
])  # fmt: skip
def test_jobs_of_a_worker_that_lost_the_database_are_not_charged(
    overseen: Overseen, code: int, fenced: bool, ran: set[int]
) -> None:
    overseen.board.enable_job_list()
    overseen.board.begin(seq=5)
    if fenced:
        overseen.board.fence()
    assert overseen.subject.ended("w", code) == ran
    assert not overseen.board.read().fenced, "that is over"


@pytest.mark.parametrize(
    ("code", "ran"), [(0, frozenset[int]()), (79, frozenset[int]()), (1, None)]
)
def test_a_worker_that_exited_on_request_with_no_job_running_is_charged_nothing(
    overseen: Overseen, code: int, ran: frozenset[int] | None
) -> None:
    overseen.board.begin()
    overseen.board.end()
    assert overseen.subject.ended("w", code) == ran


@pytest.mark.parametrize("code", [0, 79])
def test_a_handler_that_ends_its_process_is_no_exit_on_request(
    overseen: Overseen, code: int
) -> None:
    overseen.board.begin()
    assert overseen.subject.ended("w", code) is None
