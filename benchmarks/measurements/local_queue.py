"""The in-process queue: no-op jobs beside a bare `queue.Queue`, and one check of the throttle."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks import results
from benchmarks.bench import Bench
from queue_workflows import local_queue
from queue_workflows.telemetry import pressure

ABOUT = """No-op jobs in ten threads, with a cooldown of 0 and single-job mode off, from a
`MemoryPlan`. Bare is a `queue.Queue` with as many threads that call the same function: no plan, no
checks for duplicates, no attempts, no time-outs, no statistics, no outcomes. All jobs are added
while the threads run. The two take turns. The row of CPU time divides by the processor seconds of
the process instead of by the time that passed, so that other load on the machine counts less.
`throttle check` reads RAM, swap and the cgroups once, and decides; a running queue does that every
5 s on a thread of its own, and its workers compare one flag."""
THREADS = 10
CHECKS = 200


class Speed(NamedTuple):
    """Jobs per second that passed, and per second of the processor."""

    wall: float
    cpu: float


class _Timer:
    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def speed(self, count: int) -> Speed:
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        return Speed(count / wall, count / cpu)


def _jobs(count: int) -> list[local_queue.Job]:
    return [local_queue.Job(str(number), "noop") for number in range(count)]


def _noop(_: local_queue.Job) -> None:
    return None


def bare(count: int) -> Speed:
    """Put and run `count` jobs."""
    jobs, todo = _jobs(count), queue.Queue[Any]()

    def work() -> None:
        while (job := todo.get()) is not None:
            _noop(job)

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    timer = _Timer()
    for job in jobs:
        todo.put(job)
    for _ in threads:
        todo.put(None)
    for thread in threads:
        thread.join()
    return timer.speed(count)


def ours(count: int) -> Speed:
    """Fetch and run `count` jobs of a plan."""
    plan = local_queue.MemoryPlan(_jobs(count))
    manager = local_queue.JobQueueManager(
        plan, _noop, workers=THREADS, single_job=False, grace_s=1000.0, stagger_s=0.0,
        cooldown_s=0.0, throttle=pressure.Throttle(pressure.Reading),
    )  # fmt: skip
    with manager:
        while manager.stats()["alive_workers"] < THREADS:
            time.sleep(0.01)
        timer = _Timer()
        manager.fetch_now()
        while manager.statistics.finished < count:
            time.sleep(0.002)
        return timer.speed(count)


def run(bench: Bench) -> Iterator[results.Row]:
    """Yield jobs per second, jobs per second of CPU, and the time of one check."""
    count = bench.pick(100_000, 50_000)
    by_ours: list[Speed] = []
    by_bare: list[Speed] = []
    ours(1000)
    for _ in bench.rounds(9, 3, full_s=40, quick_s=6):
        by_bare.append(bare(count))
        by_ours.append(ours(count))
    for name, place in (("", 0), (", per second of CPU", 1)):
        mine, theirs = [each[place] for each in by_ours], [each[place] for each in by_bare]
        yield results.Row(
            f"in-process queue, no-op jobs, {THREADS} threads{name}",
            results.middle(mine),
            "/s",
            results.middle(theirs),
            results.paired(mine, theirs),
            results.at_least(0.3) if place == 0 else None,
            f"{count:,} jobs a round, bare is a `queue.Queue`",
        )
    throttle, times = pressure.Throttle(pressure.Memory().read), list[float]()
    for _ in range(CHECKS):
        begun = time.perf_counter()
        throttle.check()
        times.append((time.perf_counter() - begun) * 1000)
    yield results.Row(
        "in-process queue, throttle check",
        results.middle(times),
        "ms",
        target=results.own_at_most(1.0),
        note="without GPUs, because reading them calls the driver",
    )
