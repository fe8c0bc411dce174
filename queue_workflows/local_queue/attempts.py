"""Describe one attempt at a job, and the slot of a thread that runs one job at a time."""

from __future__ import annotations

import math
import os
import threading
from typing import Any, Protocol

from queue_workflows import errors
from queue_workflows.dag import payload
from queue_workflows.local_queue import job_queue, plan, statistics
from queue_workflows.runtime import service

ERROR_CHARS = 2000
forks: int = 0
"""How many forks are between this process and the one that was started; cheaper than a getpid."""


def _count_fork() -> None:
    global forks
    forks += 1


os.register_at_fork(after_in_child=_count_fork)


class Control(Protocol):
    """What can end a generator or an async function."""

    def interrupt(self, reason: str) -> None:
        """Let it end at its next yield or await."""
        ...


class Attempt:
    """One attempt at one job."""

    __slots__ = ("began", "control", "deadline", "ending", "job", "number", "stored", "wrong")

    def __init__(
        self,
        job: job_queue.Job,
        number: int,
        began: float,
        deadline: float,
        wrong: errors.InvalidConfig | None = None,
    ) -> None:
        self.job = job
        self.number = number
        self.began = began
        self.deadline = deadline
        self.wrong = wrong
        """Why its handler is not called at all."""
        self.control: Control | None = None
        self.ending = threading.Lock()
        """The first thread that acquires it decides how the attempt ends; it is never released."""
        self.stored = False
        """Whether the plan gets, or has got, its outcome from the thread that ran it."""


class Slot:
    """One slot for a thread, which runs one job at a time."""

    def __init__(self, number: int, start_at: float, counts: statistics.Cell) -> None:
        self.name = f"Worker-{number}"
        self.start_at = start_at
        self.counts = counts
        self.thread: service.Pool | None = None
        self.job: job_queue.Job | None = None
        """The job that its thread has taken, until it takes the next one."""
        self.attempt: Attempt | None = None
        self.abandoned = False
        """Whether its attempt was ended while its thread goes on."""
        self.ended_at: float | None = None
        """When its latest thread has ended as it should."""

    @property
    def alive(self) -> bool:
        """Return whether its thread runs."""
        return self.thread is not None and self.thread.alive


def limit_s(job: job_queue.Job, default_s: float | None) -> float:
    """Return how long an attempt may take; raise `InvalidConfig` for a `timeout_s` that is wrong.

    inf: as long as it likes.
    """
    found: Any = job.timeout_s
    if found is None:
        return math.inf if default_s is None else default_s
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not found > 0:
        raise errors.InvalidConfig(
            f"job {job.id!r}: timeout_s={found!r}: it must be a number of seconds above 0"
        )
    return found


def exit_code(error: BaseException | None) -> int:
    """Return with which code a process exits that ends by this error."""
    if isinstance(error, SystemExit) and isinstance(error.code, (int, type(None))):
        return (error.code or 0) & 0xFF
    return int(error is not None)


def described(error: BaseException) -> str:
    """Return an error as text for the plan and the statistics."""
    text = payload.error_text(error)
    if not isinstance(error, plan.NotCompleted):
        text = f"{type(error).__name__}: {text}"
    return text[:ERROR_CHARS]
