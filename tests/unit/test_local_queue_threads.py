"""The in-process queue under real threads: nothing twice at once, nothing lost, true refusals."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from queue_workflows import errors, local_queue
from tests.support import clocks, memory_reports
from tests.support.examples import examples
from tests.support.wait import until

Job = local_queue.Job
NAMES = "abcdef"
WORKERS = 8
ADDERS = 4
LAST = 1 << 60


class Added(NamedTuple):
    """One call of `add`: when it began and ended, in ticks, and what it returned."""

    name: str
    force: bool
    began: int
    ended: int
    refusal: local_queue.Refusal | None


class Life(NamedTuple):
    """One run of a job: its ticks. Each pair is the call that made the change."""

    name: str
    get: tuple[int, int]
    end: tuple[int, int]
    for_good: bool


class _Thread:
    def __init__(self, target: Any) -> None:
        self.thread = threading.Thread(target=target)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.thread.join(30)
        assert not self.thread.is_alive()


class Burst:
    """Threads that add, run and end jobs of a queue side by side, and what each of them saw."""

    def __init__(self, queue: local_queue.JobQueue, for_good: set[str]) -> None:
        self.queue = queue
        self.for_good = for_good
        self.tick = itertools.count()  # `next` of it is atomic
        self.added: list[Added] = []
        self.lives: list[Life] = []
        self.overlaps: list[str] = []
        self._running: set[str] = set()
        self._adding = ADDERS
        self._lock = threading.Lock()

    def run(self, calls: list[list[tuple[str, bool]]]) -> None:
        with ExitStack() as threads:
            for _ in range(WORKERS):
                threads.enter_context(_Thread(self._work))
            for mine in calls:
                threads.enter_context(_Thread(lambda mine=mine: self._add(mine)))

    def _add(self, calls: list[tuple[str, bool]]) -> None:
        for name, force in calls:
            began = next(self.tick)
            refusal = self.queue.add(Job(name, "task"), force=force)
            self.added.append(Added(name, force, began, next(self.tick), refusal))
        with self._lock:
            self._adding -= 1

    def _work(self) -> None:
        while True:
            over = self._adding == 0  # before the last try
            began = next(self.tick)
            job = self.queue.get(0.001)
            got = next(self.tick)
            if job is None:
                if over:
                    return
                continue
            with self._lock:
                self.overlaps += [job.id] if job.id in self._running else []
                self._running.add(job.id)
            time.sleep(0)
            with self._lock:
                self._running.discard(job.id)
            for_good = job.id in self.for_good
            ending = next(self.tick)
            (self.queue.done if for_good else self.queue.release)(job.id)
            self.lives.append(Life(job.id, (began, got), (ending, next(self.tick)), for_good))


class ThreadsMachine(RuleBasedStateMachine):
    """Bursts of threads on one queue; after each, every answer is compared with what happened."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = clocks.Clock(1000.0)
        self.queue = local_queue.JobQueue(now_fn=self.clock)
        self.ended_at: dict[str, float] = {}

    @rule(seconds=st.sampled_from([0.0, 15.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(
        calls=st.lists(
            st.lists(st.tuples(st.sampled_from(NAMES), st.booleans()), max_size=12),
            min_size=ADDERS,
            max_size=ADDERS,
        ),
        for_good=st.sets(st.sampled_from(NAMES)),
    )
    def burst(self, calls: list[list[tuple[str, bool]]], for_good: set[str]) -> None:
        burst = Burst(self.queue, for_good)
        burst.run(calls)
        assert burst.overlaps == []
        accepted = [each for each in burst.added if each.refusal is None]
        assert Counter(each.name for each in accepted) == Counter(x.name for x in burst.lives)
        for name in NAMES:
            self._judge(
                sorted(each for each in burst.added if each.name == name),
                sorted((each for each in burst.lives if each.name == name), key=lambda x: x.get[1]),
            )
        for name in {each.name for each in accepted}:
            self.ended_at.pop(name, None)
            if name in for_good:
                self.ended_at[name] = self.clock.now

    def _judge(self, added: list[Added], lives: list[Life]) -> None:
        """Check each answer against the lives of its job: the n-th is of the n-th accepted."""
        accepted = sorted((x for x in added if x.refusal is None), key=lambda each: each.ended)
        window_s = (self.ended_at.get(added[0].name, -100.0) if added else 0.0) + 30
        recent = window_s > self.clock.now
        for each in added:
            during = (each.began, each.ended)
            may_wait = any(
                _meet(during, (one.began, life.get[1]))
                for one, life in zip(accepted, lives, strict=True)
                if one is not each
            )
            may_run = any(_meet(during, (life.get[0], life.end[1])) for life in lives)
            may_be_over = recent or any(
                life.for_good and life.end[0] < each.ended for life in lives
            )
            if each.refusal is None:
                surely_there = any(
                    one.ended < each.began and each.ended < life.end[0]
                    for one, life in zip(accepted, lives, strict=True)
                    if one is not each
                )
                surely_over = recent or any(
                    life.for_good and life.end[1] < each.began for life in lives
                )
                assert not surely_there, (each, lives)
                assert each.force or not surely_over or self._forced(each, accepted), each
            elif each.refusal.reason == "queued":
                assert may_wait, (each, lives)
            elif each.refusal.reason == "active":
                assert may_run, (each, lives)
            else:
                assert each.refusal.reason == "processed" and not each.force
                assert may_be_over, (each, lives)
                assert each.refusal.wait_s is not None and 0 < each.refusal.wait_s <= 30

    @staticmethod
    def _forced(each: Added, accepted: list[Added]) -> bool:
        """Return whether a forced add may have ended the window before this one."""
        return any(one.force and one.began < each.ended for one in accepted)

    @invariant()
    def nothing_is_left(self) -> None:
        assert (self.queue.queued, self.queue.active) == ([], [])


def _meet(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


TestThreadsMachine = ThreadsMachine.TestCase
TestThreadsMachine.settings = hypothesis_settings(
    max_examples=examples(12),
    stateful_step_count=8,
)

KINDS = ["works", "fails once", "fails", "discards", "exits", "is refused once", "is stored late"]


class Plan(local_queue.MemoryPlan):
    """A plan in memory that refuses a start, or an outcome, once for some jobs."""

    def __init__(self, kinds: dict[str, str]) -> None:
        super().__init__(Job(name, "task") for name in kinds)
        self.kinds = kinds
        self._seen: set[tuple[str, str]] = set()
        self._guard = threading.Lock()

    def _first(self, what: str, job: Job) -> bool:
        with self._guard:
            seen = (what, job.id) in self._seen
            self._seen.add((what, job.id))
        return not seen

    def mark_running(self, job: Job, /) -> bool:
        if self.kinds[job.id] == "is refused once" and self._first("start", job):
            return False
        return super().mark_running(job)

    def mark_done(self, job: Job, result: Any, /) -> None:
        if self.kinds[job.id] == "is stored late" and self._first("end", job):
            raise OSError("the disk is full")
        super().mark_done(job, result)


@given(kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=25))
@hypothesis_settings(max_examples=examples(10))
def test_every_job_of_a_manager_ends_as_it_should_and_none_runs_twice_at_once(
    kinds: list[str],
) -> None:
    by_name = {f"{number}": kind for number, kind in enumerate(kinds)}
    plan, runs, overlaps = Plan(by_name), Counter[str](), list[str]()
    running: set[str] = set()
    lock = threading.Lock()

    def execute(job: Job) -> str:
        with lock:
            overlaps.extend([job.id] if job.id in running else [])
            running.add(job.id)
            runs[job.id] += 1
            run = runs[job.id]
        time.sleep(0)
        with lock:
            running.discard(job.id)
        kind = by_name[job.id]
        if kind == "discards":
            raise errors.Discard("no use")
        if kind == "exits":
            raise SystemExit(1)
        if kind == "fails" or (kind == "fails once" and run == 1):
            raise ValueError(kind)
        return kind

    manager = local_queue.JobQueueManager(
        plan, execute, workers=8, single_job=False, grace_s=0.0, stagger_s=0.0, cooldown_s=0.0,
        fetch_every_s=0.01, throttle=memory_reports.throttle(),
    )  # fmt: skip
    with manager:
        until(
            lambda: all(
                entry is not None and entry.state in ("completed", "failed")
                for entry in map(plan.entry, by_name)
            )
        )
        until(lambda: manager.stats()["active_jobs"] == 0)
    most = {"fails once": 2, "fails": 3, "exits": 3}
    assert overlaps == []
    assert runs == {name: most.get(kind, 1) for name, kind in by_name.items()}
    ends = {"fails": "failed", "discards": "failed", "exits": "failed"}
    for name, kind in by_name.items():
        entry = plan.entry(name)
        assert entry is not None and entry.state == ends.get(kind, "completed"), (kind, entry)
    found = manager.stats()
    assert found["finished"] == sum(kind not in ends for kind in kinds)
    assert found["failed"] == sum(kind in ends for kind in kinds)
    assert found["tasks"]["task"]["ended"] == sum(runs.values())
    assert found["unstored_outcomes"] == 0
