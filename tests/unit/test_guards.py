"""Guards as pure rules: when each reports a failure, when it must not, and which a job gets."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queue_workflows import config
from queue_workflows.telemetry.worker_usage import Sample
from queue_workflows.types import Row
from queue_workflows.worker import guards
from tests.support import tabled
from tests.support.examples import examples

T0 = 1000.0
LOAD_S = 1200.0
BEAT_S = 300.0
BUDGET_S = 8100.0
INTERVAL_S = 30.0
IDLE = Sample(0.0, 2000.0)
EDGE = Sample(5.0, 2000.0)
BUSY = Sample(5.5, 2000.0)
UNKNOWN = Sample(None, 2000.0)
Watched = guards.GpuHealth | guards.Stall


class Watcher:
    """A worker's checks with a fake clock: sample if a guard needs it, then check."""

    def __init__(self, guard: Watched, step_s: float = 0.5, found: Sample = IDLE) -> None:
        self.guard = guard
        self.step_s = step_s
        self.now = T0
        self.found = found
        self.taken: list[float] = []
        self.suspicions: list[str] = []

    def look(self) -> guards.Failure | None:
        if self.guard.wants_sample(self.now):
            self.taken.append(self.now)
            self.guard.sample(self.now, self.found)
        trip = self.guard.check(self.now)
        if isinstance(self.guard, guards.Stall) and (why := self.guard.suspicion(self.now)):
            self.suspicions.append(why)
        return trip

    def run(self, seconds: float, found: Sample | None = None) -> guards.Failure | None:
        """The first failure within that time, at `self.now`; else None."""
        self.found = found or self.found
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + self.step_s)
            if trip := self.look():
                return trip
        return None

    def beat(self) -> None:
        self.guard.beat(self.now)


def health(budget_s: float = BUDGET_S) -> Watcher:
    return Watcher(guards.GpuHealth(T0, budget_s), step_s=5.0)


def stall() -> Watcher:
    return Watcher(guards.Stall(T0))


def code(trip: guards.Failure | None) -> int | None:
    return trip.code if trip else None


# --- budget and lease --------------------------------------------------------------------------


def test_budget_fails_at_its_end_for_any_beats() -> None:
    guard = guards.Budget(T0, 10.0)
    guard.beat(T0 + 9)
    assert not guard.wants_sample(T0 + 9)
    assert guard.check(T0 + 9.9) is None
    trip = guard.check(T0 + 10)
    assert trip is not None
    assert (trip.code, trip.event) == (75, "budget_trip")


def test_lease_guard_fails_before_the_lease_lapses() -> None:
    guard = guards.LeaseEnd(T0, 600.0)
    assert guard.check(T0 + 597.9) is None
    assert code(guard.check(T0 + 598)) == 77
    guard.beat(T0 + 500)
    assert guard.check(T0 + 1000) is None
    assert code(guards.LeaseEnd(T0, 4.0).check(T0 + 3)) == 77


# --- GPU health --------------------------------------------------------------------------------


@pytest.mark.parametrize("idle", [IDLE, EDGE])
def test_health_fails_at_the_end_of_an_idle_first_window(idle: Sample) -> None:
    watcher = health()
    trip = watcher.run(LOAD_S + INTERVAL_S, idle)
    assert trip is not None
    assert (trip.code, trip.event) == (78, "gpu_health_trip")
    assert watcher.now == T0 + LOAD_S


def test_health_fails_one_window_after_a_beat() -> None:
    watcher = health()
    assert watcher.run(100) is None
    watcher.beat()
    assert code(watcher.run(BEAT_S + INTERVAL_S)) == 78
    assert watcher.now == T0 + 100 + BEAT_S


def test_health_samples_every_30_s_and_at_the_end_of_the_window() -> None:
    watcher = health()
    watcher.run(20)
    watcher.beat()
    assert code(watcher.run(BEAT_S)) == 78
    assert watcher.taken == [*(T0 + n * INTERVAL_S for n in range(1, 11)), T0 + 20 + BEAT_S]


def test_health_starts_again_with_a_busy_sample() -> None:
    watcher = health()
    watcher.beat()
    assert watcher.run(BEAT_S - INTERVAL_S) is None
    assert watcher.run(INTERVAL_S, BUSY) is None
    assert watcher.run(BEAT_S - 5, IDLE) is None
    assert code(watcher.run(INTERVAL_S)) == 78


def test_health_does_not_fail_on_a_gpu_that_got_busy_at_the_very_end() -> None:
    watcher = health()
    watcher.run(20)
    watcher.beat()
    assert watcher.run(BEAT_S - 10) is None
    assert watcher.run(10, BUSY) is None
    assert watcher.taken[-1] == T0 + 20 + BEAT_S


@pytest.mark.parametrize(("last_mb", "trips"), [(7120.0, 78), (7121.0, None), (0.0, 78)])
def test_health_takes_ram_that_moved_for_life(last_mb: float, trips: int | None) -> None:
    watcher = health()
    assert watcher.run(LOAD_S / 2, Sample(0.0, 2000.0)) is None
    assert code(watcher.run(LOAD_S / 2 + INTERVAL_S, Sample(0.0, last_mb))) == trips


def test_health_sees_ram_that_moved_in_small_steps() -> None:
    watcher = health()
    for step in range(200):
        assert watcher.run(30, Sample(0.0, 2000.0 + 300 * step)) is None


def test_health_sees_ram_that_moved_across_a_beat() -> None:
    watcher = health()
    watcher.run(35)
    watcher.beat()
    assert watcher.run(BEAT_S, Sample(0.0, 8000.0)) is None
    assert code(watcher.run(INTERVAL_S)) == 78


@pytest.mark.parametrize("unknown", [UNKNOWN, Sample(0.0, None), Sample(None, None)])
def test_health_leaves_a_job_that_it_cannot_see_to_the_clock(unknown: Sample) -> None:
    watcher = health()
    trip = watcher.run(BUDGET_S, unknown)
    assert trip is not None
    assert (trip.code, trip.event) == (75, "budget_trip")
    assert watcher.now == T0 + BUDGET_S


def test_health_reports_missing_readings_and_their_return() -> None:
    watcher = health()
    guard = watcher.guard
    assert isinstance(guard, guards.GpuHealth)
    watcher.run(60, UNKNOWN)
    assert not guard.is_blind(watcher.now)
    watcher.run(60)
    assert guard.is_blind(watcher.now)
    watcher.run(30, IDLE)
    assert not guard.is_blind(watcher.now)


def test_health_lets_a_job_that_is_busy_run_past_its_budget() -> None:
    watcher = health()
    watcher.step_s = 30.0
    assert watcher.run(3 * BUDGET_S, BUSY) is None
    assert watcher.run(120, UNKNOWN) is None


def test_a_busy_gpu_is_life_though_ram_is_unknown() -> None:
    watcher = health()
    assert watcher.run(2 * BUDGET_S, Sample(90.0, None)) is None


def test_health_bridges_one_unknown_sample() -> None:
    watcher = health()
    watcher.run(30)
    watcher.run(30, UNKNOWN)
    assert code(watcher.run(LOAD_S - 60, IDLE)) == 78


def test_health_waits_for_a_known_sample_at_the_end_of_the_window() -> None:
    watcher = health()
    assert watcher.run(LOAD_S - 5) is None
    assert watcher.run(25, UNKNOWN) is None
    assert code(watcher.run(INTERVAL_S, IDLE)) == 78
    assert watcher.now == T0 + LOAD_S + INTERVAL_S


def test_health_needs_three_samples_of_the_shortest_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_GPU_HEALTH_LOAD_GRACE_S", "2")
    watcher = Watcher(guards.GpuHealth(T0, BUDGET_S), step_s=2.0)
    assert code(watcher.run(20)) == 78
    assert watcher.now == T0 + 6


def test_health_counts_ram_of_its_window_alone() -> None:
    watcher = health()
    assert watcher.run(95, Sample(0.0, 2000.0)) is None
    assert watcher.run(30, Sample(0.0, 5000.0)) is None
    watcher.beat()
    assert code(watcher.run(BEAT_S, Sample(0.0, 8000.0))) == 78


def test_health_counts_no_window_with_a_hole() -> None:
    watcher = health()
    watcher.beat()
    watcher.run(120)
    watcher.run(120, UNKNOWN)
    assert watcher.run(BEAT_S, IDLE) is None
    assert code(watcher.run(60)) == 78


def test_health_does_not_fail_on_a_process_that_was_stopped_and_continues() -> None:
    watcher = health()
    watcher.beat()
    watcher.run(60)
    watcher.now += 10 * BEAT_S
    assert watcher.run(BEAT_S, IDLE) is None


def test_seconds_without_a_probe_add_up_against_the_budget() -> None:
    watcher = health(budget_s=1000.0)
    for _ in range(5):
        assert watcher.run(170, UNKNOWN) is None
        assert watcher.run(30, BUSY) is None
    assert code(watcher.run(200, UNKNOWN)) == 75


def test_a_sample_from_before_a_beat_does_not_count() -> None:
    guard = guards.GpuHealth(T0, BUDGET_S)
    for second in range(30, 1200, 30):
        guard.sample(T0 + second, IDLE)
    guard.beat(T0 + 1201)
    guard.sample(T0 + 1200, IDLE)
    assert guard.check(T0 + 1202) is None


class JudgedInTheMidst(guards.GpuHealth):
    """Is checked while it takes a sample, as by another thread."""

    trips: list[guards.Failure | None]

    def _has_moved(self, ram_mb: float | None) -> bool:
        self.trips.append(self.check(self._tried))
        return super()._has_moved(ram_mb)

    def _begin(self, now: float) -> None:
        self.trips.append(self.check(now))
        super()._begin(now)


def test_no_failure_is_decided_during_a_busy_sample() -> None:
    guard = JudgedInTheMidst(T0, BUDGET_S)
    guard.trips = []
    watcher = Watcher(guard, step_s=5.0)
    assert watcher.run(LOAD_S - 5) is None
    assert watcher.run(5, BUSY) is None
    assert watcher.taken[-1] == T0 + LOAD_S
    assert len(guard.trips) > 2
    assert not any(guard.trips)


def test_health_reads_its_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_GPU_HEALTH_LOAD_GRACE_S", "4")
    monkeypatch.setenv("QUEUE_WORKFLOWS_GPU_HEALTH_INTERVAL_S", "2")
    monkeypatch.setenv("QUEUE_WORKFLOWS_GPU_IDLE_PCT", "20")
    monkeypatch.setenv("QUEUE_WORKFLOWS_GPU_HEALTH_RAM_DELTA_MB", "10")
    watcher = Watcher(guards.GpuHealth(T0, BUDGET_S), found=Sample(20.0, 100.0))
    assert code(watcher.run(60)) == 78
    assert watcher.now == T0 + 4
    watcher = Watcher(guards.GpuHealth(T0, BUDGET_S), found=Sample(20.0, 100.0))
    watcher.beat()
    assert watcher.run(1) is None
    assert watcher.run(1.5, Sample(20.0, 111.0)) is None
    assert code(watcher.run(2)) == 78


life = st.sampled_from(["beat", "busy", "ram"])
silences = st.lists(st.tuples(st.integers(5, int(BEAT_S) - 30), life), min_size=3, max_size=25)


@given(silences)
@settings(max_examples=examples(60))
def test_health_never_fails_while_each_window_has_activity(events: list[tuple[int, str]]) -> None:
    watcher = health()
    ram_mb = 2000.0
    for silent_s, kind in events:
        assert watcher.run(silent_s, Sample(0.0, ram_mb)) is None
        if kind == "beat":
            watcher.beat()
            continue
        ram_mb += 6000.0 if kind == "ram" else 0.0
        assert watcher.run(INTERVAL_S, Sample(80.0 if kind == "busy" else 0.0, ram_mb)) is None


quiet = st.tuples(st.floats(0, 5), st.floats(0, 5000))


@given(
    st.one_of(st.none(), st.integers(0, 2000)),
    st.lists(quiet, min_size=1, max_size=10),
    st.sampled_from([0.5, 1.0, 3.0, 7.0]),
)
@settings(max_examples=examples(40))
def test_health_always_fails_on_a_fully_idle_window(
    beat_at: int | None, readings: list[tuple[float, float]], step_s: float
) -> None:
    watcher = health()
    watcher.step_s = 5.0
    if beat_at is not None:
        assert watcher.run(beat_at, BUSY) is None
        watcher.beat()
        # The readings begin with a window of their own.
        watcher.guard.sample(watcher.now, BUSY)
    watcher.step_s = step_s
    start, window_s = watcher.now, LOAD_S if beat_at is None else BEAT_S
    turn = 0
    trip = None
    while trip is None and watcher.now <= start + window_s + INTERVAL_S:
        trip = watcher.run(INTERVAL_S, Sample(*readings[turn % len(readings)]))
        turn += 1
    assert code(trip) == 78
    assert start + window_s <= watcher.now <= start + window_s + INTERVAL_S


@given(st.lists(st.sampled_from([IDLE, UNKNOWN, BUSY, None]), max_size=150))
@settings(max_examples=examples(60))
def test_health_fails_only_after_a_whole_idle_window(
    story: list[Sample | None],
) -> None:
    watcher = health(budget_s=1e9)
    watcher.step_s = INTERVAL_S
    watcher.beat()
    idle_since = watcher.now
    for found in story:
        if found is None:
            watcher.beat()
        trip = watcher.run(INTERVAL_S, found or IDLE)
        if found in (None, BUSY):
            idle_since = watcher.now - (INTERVAL_S if found is None else 0)
        if trip is not None:
            assert trip.code == 78
            assert watcher.now - idle_since >= BEAT_S
            return


# --- stall -------------------------------------------------------------------------------------


def test_stall_sleeps_until_the_first_beat() -> None:
    watcher = stall()
    assert watcher.run(5000) is None
    assert not watcher.taken
    assert not watcher.suspicions


def test_stall_fails_when_three_samples_confirm_it() -> None:
    watcher = stall()
    watcher.run(60)
    watcher.beat()
    trip = watcher.run(200)
    assert trip is not None
    assert (trip.code, trip.event) == (76, "stall_trip")
    assert watcher.taken == [T0 + 180, T0 + 181, T0 + 182]
    assert len(watcher.suspicions) == 1


def test_stall_takes_no_sample_before_the_time() -> None:
    watcher = stall()
    watcher.beat()
    assert watcher.run(119.5) is None
    assert not watcher.taken
    assert not watcher.suspicions


def test_a_beat_while_it_is_confirmed_resets_the_stall() -> None:
    watcher = stall()
    watcher.beat()
    assert watcher.run(121.5) is None
    assert len(watcher.taken) == 2
    watcher.beat()
    assert watcher.run(119.5) is None
    assert code(watcher.run(10)) == 76
    assert watcher.now == T0 + 121.5 + 122
    assert len(watcher.suspicions) == 2


@pytest.mark.parametrize(
    "denial",
    [BUSY, UNKNOWN, Sample(0.0, None), Sample(0.0, 2033.0), Sample(0.0, 1967.0)],
    ids=["busy", "unknown", "ram unknown", "ram grew", "ram shrank"],
)
def test_a_sample_that_does_not_confirm_calls_the_suspicion_off(denial: Sample) -> None:
    watcher = stall()
    watcher.beat()
    assert watcher.run(121) is None
    assert watcher.run(1, denial) is None
    assert len(watcher.taken) == 3
    assert watcher.run(119.5, IDLE) is None
    assert len(watcher.taken) == 3
    assert code(watcher.run(10)) == 76
    assert len(watcher.suspicions) == 1


@pytest.mark.parametrize("found", [BUSY, UNKNOWN])
def test_a_silent_handler_that_works_or_cannot_be_seen_goes_on(found: Sample) -> None:
    watcher = stall()
    watcher.beat()
    assert watcher.run(3600, found) is None
    assert len(watcher.suspicions) == 1


def test_samples_that_confirmed_one_stall_do_not_count_for_the_next() -> None:
    watcher = stall()
    watcher.beat()
    assert watcher.run(121.5) is None
    watcher.guard.sample(T0 + 122, IDLE)
    watcher.guard.beat(T0 + 122)
    for second in range(122, 250, 10):
        assert watcher.guard.check(T0 + second) is None


def test_samples_that_come_too_fast_confirm_once() -> None:
    guard = guards.Stall(T0)
    guard.check(T0)
    guard.beat(T0)
    for second in range(10, 130, 10):
        guard.check(T0 + second)
    for tenth in range(10):
        guard.sample(T0 + 120 + tenth / 10, IDLE)
    assert guard.check(T0 + 121) is None


def test_time_in_which_the_process_was_stopped_is_no_stall() -> None:
    watcher = stall()
    watcher.beat()
    assert watcher.run(60) is None
    watcher.now += 600
    assert watcher.run(119.5) is None
    assert code(watcher.run(10)) == 76


def test_stall_reads_its_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "STALL_TIMEOUT_S", 3.0)
    monkeypatch.setenv("QUEUE_WORKFLOWS_STALL_CONFIRM_SAMPLES", "5")
    monkeypatch.setenv("QUEUE_WORKFLOWS_STALL_CONFIRM_POLL_S", "2")
    watcher = stall()
    watcher.beat()
    assert code(watcher.run(60)) == 76
    assert watcher.taken == [T0 + 3, T0 + 5, T0 + 7, T0 + 9, T0 + 11]


def test_zero_confirming_samples_still_mean_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_STALL_CONFIRM_SAMPLES", "0")
    watcher = stall()
    watcher.beat()
    assert watcher.run(1000, BUSY) is None


@given(
    st.lists(
        st.tuples(st.integers(1, 200), st.sampled_from([IDLE, BUSY, UNKNOWN]), st.booleans()),
        max_size=25,
    )
)
@settings(max_examples=examples(50))
def test_stall_fails_only_after_120_s_without_a_beat_and_three_idle_samples(
    story: list[tuple[int, Sample, bool]],
) -> None:
    watcher = stall()
    watcher.step_s = 1.0
    watcher.look()
    beaten: float | None = None
    idle = 0
    for seconds, found, beats in story:
        for _ in range(seconds):
            before = len(watcher.taken)
            trip = watcher.run(1, found)
            if len(watcher.taken) > before:
                idle = idle + 1 if found == IDLE else 0
            if trip is not None:
                assert beaten is not None
                assert watcher.now - beaten >= 120
                assert idle >= 3
                return
        if beats:
            watcher.beat()
            beaten, idle = watcher.now, 0


@given(st.floats(0, 5), st.lists(st.floats(0, 16), min_size=3, max_size=3), st.integers(0, 500))
@settings(max_examples=examples(50))
def test_stall_always_fails_on_a_silent_idle_handler(
    use_pct: float, moves_mb: list[float], first: int
) -> None:
    watcher = stall()
    watcher.run(first)
    watcher.beat()
    assert watcher.run(119.5) is None
    trips = [watcher.run(1, Sample(use_pct, 2000.0 + moved)) for moved in moves_mb]
    assert [code(trip) for trip in trips] == [None, None, 76]


# --- which guards ------------------------------------------------------------------------------


def job(queue: str = "gpu", **values: object) -> Row:
    return {"queue": queue, "node_module": "paint", "required_model": None, **values}


def test_guards_of_a_job() -> None:
    cases: list[Any] = [
        (job(), [guards.GpuHealth, guards.Stall]),
        (job(required_model="paint-1"), [guards.GpuHealth, guards.Stall]),
        (job(required_model="film-1"), [guards.GpuHealth]),
        (job(timeout_s=60), [guards.GpuHealth, guards.Budget, guards.Stall]),
        (job("cpu"), [guards.Budget]),
        (job("cpu", node_module="__input__choose_one"), [guards.Budget]),
        ({"queue": "fetch", "task_name": "get"}, [guards.Budget]),
        ({"queue": "gpu", "task_name": "get"}, [guards.Budget]),
    ]
    for claimed, kinds in cases:
        with tabled.case(claimed, kinds):
            config.configure(video_model_ids={"film-1"})
            assert [type(guard) for guard in guards.guards_for(claimed, T0)] == kinds


@pytest.mark.parametrize(
    ("claimed", "budget_s"),
    [
        (job(), 8100),
        (job(required_model="film-1"), 1800),
        (job(timeout_s=60), 60),
        (job("cpu"), 2100),
        (job("cpu", node_module="__input__choose_one"), 120),
        ({"queue": "fetch"}, 7200),
        ({"queue": "load"}, 3600),
        ({"queue": "mail"}, 500),
        ({"queue": "cpu"}, 2100),
        ({"queue": "gpu"}, 8100),
        ({"queue": "gpu", "required_model": "film-1"}, 1800),
        # What plain SQL may say, and what no clock could keep.
        ({"queue": "load", "timeout_s": float("nan")}, 3600),
        ({"queue": "load", "timeout_s": -1.0}, 3600),
        ({"queue": "load", "timeout_s": 0.0}, 3600),
        ({"queue": "load", "timeout_s": float("inf")}, 366 * 86400),
        ({"queue": "load", "timeout_s": 1e300}, 366 * 86400),
    ],
)
def test_without_a_probe_every_job_ends_by_the_clock(claimed: Row, budget_s: float) -> None:
    config.configure(video_model_ids={"film-1"}, ingest_default_budget_s=500)
    assert guards.budget_for(claimed) == budget_s
    found = guards.guards_for(claimed, T0)

    def codes(now: float) -> set[int]:
        return {trip.code for guard in found if (trip := guard.check(now))}

    for guard in found:
        guard.sample(T0 + 30, UNKNOWN)
    assert not codes(T0 + budget_s - 1)
    assert codes(T0 + budget_s) == {75}
