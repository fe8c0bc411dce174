"""What ends a job in an executor, and with it a worker that ends with its job."""

from __future__ import annotations

from typing import Any

import pytest

from queue_workflows.engine import job_tables
from queue_workflows.runtime import clock
from queue_workflows.worker import current_job, guards, slot_keeper

JOB = {"id": "j", "task_name": "t", "queue": "load", "worker_id": "w", "claim_no": 1}
STALL = guards.Failure(guards.EXIT_STALL, "stall_trip", "no beat")


class World:
    """A running job, a clock, the signals that its executor got, and the exit codes."""

    def __init__(self, *, ends_with_job: bool) -> None:
        self.now = clock.boot_s()
        self.killed: list[bool] = []
        self.left: list[int] = []
        self.announced: list[int] = []
        self.endings = slot_keeper.Endings(
            lambda _, now: self.killed.append(now), lambda: None, now_fn=lambda: self.now
        )
        if ends_with_job:
            self.endings.end_worker_by(self.left.append, self.announced.append)
        lease_end = guards.LeaseEnd(self.now, 600)
        table: Any = job_tables.INGEST_JOBS
        self.work = current_job.Work(table, JOB | {"timeout_s": 600}, lease_end)

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.endings.escalate([self.work])


def test_an_executor_is_killed_if_sigterm_does_not_end_it_and_its_worker_stays() -> None:
    world = World(ends_with_job=False)
    world.endings.end_by_guard(world.work, STALL)
    world.later(slot_keeper.TERM_S / 2)
    assert world.killed == [False]
    world.later(slot_keeper.TERM_S)
    assert (world.killed, world.left) == ([False, True], [])


def test_a_worker_that_ends_with_its_job_kills_at_once_and_leaves_once_it_has_ended() -> None:
    world = World(ends_with_job=True)
    world.endings.end_by_guard(world.work, STALL)
    assert (world.killed, world.left) == ([True], [])
    world.endings.ended(world.work)
    assert world.left == [guards.EXIT_STALL]


def test_such_a_worker_leaves_also_if_nothing_ends_the_executor() -> None:
    """A driver may keep a process in the kernel, where SIGKILL waits."""
    world = World(ends_with_job=True)
    world.endings.end_by_guard(world.work, STALL)
    world.later(slot_keeper.TERM_S / 2)
    assert world.left == []
    world.later(slot_keeper.TERM_S)
    assert world.left == [guards.EXIT_STALL]


def test_it_stays_if_the_handler_had_ended_and_only_its_record_takes_long() -> None:
    world = World(ends_with_job=True)
    world.endings.end_by_guard(world.work, STALL)
    world.work.settling = True
    world.later(slot_keeper.TERM_S * 5)
    assert world.left == []


@pytest.mark.parametrize("ends_with_job", [False, True])
def test_an_exit_is_announced_to_a_worker_that_ends_with_its_job(ends_with_job: bool) -> None:
    world = World(ends_with_job=ends_with_job)
    world.endings.announce(guards.EXIT_CONTROL)
    assert world.announced == ([guards.EXIT_CONTROL] if ends_with_job else [])
