"""Start a launcher and executors for tests without a database, as a worker does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import warnings
from collections.abc import Callable, Generator
from typing import Any
from unittest import mock

from queue_workflows.claim import outcomes
from queue_workflows.run import executors, launcher, loaded_app
from queue_workflows.runtime import clock, forking, io_loop
from queue_workflows.worker import claimed_job
from tests.support.wait import until

LIMIT_S = 30.0
LauncherLost, apply = launcher.LauncherLost, loaded_app.apply
"""The error of a launcher that has ended; what a worker does with what its app has registered."""


class Launched:
    """A launcher that has loaded its app, and the loop of its worker."""

    def __init__(self, found: launcher.Launcher, registered: loaded_app.Registered) -> None:
        self.launcher, self.registered = found, registered
        self.loop = io_loop.IoLoop()
        self.workers: list[Worker] = []
        self.packets: list[dict[str, Any]] = []
        self.lost: launcher.LauncherLost | None = None
        self.loop.read(found.fileno(), self._received)

    def _received(self) -> None:
        try:
            packets = self.launcher.receive()
        except launcher.LauncherLost as error:
            self.lost = error
            self.loop.forget(self.launcher.fileno())
            return
        self.packets += packets
        for packet in packets:
            for each in self.workers:
                if "died" in packet:
                    each.executors.died(packet)
                else:
                    each.executors.forked(packet)

    @contextlib.contextmanager
    def late(self) -> Generator[None]:
        """Receive what the launcher says in this block at its end."""
        self.loop.forget(self.launcher.fileno())
        yield
        self.loop.read(self.launcher.fileno(), self._received)

    def turn(self, timeout_s: float = 1.0) -> None:
        """Act on what is there, after a wait of at most `timeout_s` for anything."""
        turns = iter([False, True])
        self.loop.wake_at(clock.boot_s() + timeout_s)
        self.loop.run(self._tick, lambda: next(turns))

    def _tick(self, now: float) -> float:
        return min((each.executors.tick(now) for each in self.workers), default=now + 1.0)

    def died(self, pid: int) -> dict[str, Any] | None:
        """Return what the launcher says of the end of this process, if it has ended."""
        return next((each for each in self.packets if each.get("died") == pid), None)


@contextlib.contextmanager
def launched(
    load: Callable[[], object], *, model_cache: Any = lambda: None, alone: bool = True
) -> Generator[Launched]:
    """A launcher that loads by this function; it and its executors have ended afterwards.

    `alone`: it closes the descriptors that it inherited from pytest.
    """
    # A hostile handler must not write into the channel of pytest-xdist.
    inherited = _descriptors() if alone else {}

    def load_alone() -> None:
        for fd, file in inherited.items():
            with contextlib.suppress(OSError):  # a thread has closed it since
                if _file(fd) == file:  # else the launcher has received another one by this number
                    os.close(fd)
        load()

    # pytest's own threads run here, which is harmless.
    tests_pid, unsafe = os.getpid(), forking.unsafe

    def ours() -> str | None:
        return None if os.getpid() == tests_pid else unsafe()

    with warnings.catch_warnings(), mock.patch.object(forking, "unsafe", ours):
        warnings.simplefilter("ignore", DeprecationWarning)
        loaded, registered = launcher.Launcher.load(loaded_app.App(load_alone, model_cache))
    found = Launched(loaded, registered)
    try:
        yield found
    finally:
        found.loop.close()
        loaded.close()


def forbids_a_fork() -> str | None:
    """Return why this process must not fork a launcher, or None."""
    return forking.unsafe()


def _descriptors() -> dict[int, tuple[int, int]]:
    """The files of this process by descriptor, but stdin, stdout and stderr."""
    found: dict[int, tuple[int, int]] = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  a Path per name is no number
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            found[int(name)] = _file(int(name))
    return {fd: file for fd, file in found.items() if fd > 2}


def _file(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def task_row(name: str, args: dict[str, Any] | None = None, **columns: Any) -> dict[str, Any]:
    """The row of a claimed ingest job."""
    return {
        "id": f"job-of-{name}", "task_name": name, "queue": "load", "reason": "tick",
        "args": args or {}, "claim_no": 1, "attempts": 0, "worker_id": "w",
    } | columns  # fmt: skip


def node_row(module: str, inputs: dict[str, Any] | None = None, **columns: Any) -> dict[str, Any]:
    """The row of a claimed node job."""
    return {
        "id": f"job-of-{module}", "run_id": "run", "node_id": f"step/{module}",
        "node_module": module, "queue": "cpu", "inputs": inputs or {}, "input_template": None,
        "ref_heads": [], "required_model": None, "claim_no": 1, "attempts": 0, "worker_id": "w",
        "claimed_by": "h", "run": {"id": "run", "out_dir": None},
    } | columns  # fmt: skip


class Job:
    """A job as executors know it."""

    def __init__(self, row: dict[str, Any], *, in_run: bool) -> None:
        self.id: str = row["id"]
        self.body = json.dumps(row).encode()
        self.in_run = in_run
        self.key = 0
        self.place: executors.Executor | None = None
        self.has_started = True
        self.ids: dict[str, str | int] = {"job_id": self.id}
        self.outcome: outcomes.Outcome | None = None
        self.death: executors.Death | None = None
        self.reports: list[str | None] = []
        self.events: list[str] = []
        self.asked: list[str] = []
        self.starts = 0
        self.printed = b""
        self.cursors: dict[tuple[str, str], int] = {}

    def beat(self, now: float, progress: str | None = None) -> None:
        self.reports.append(progress)

    def wait(self) -> None:
        """Ignore it; `started` follows."""


class Worker:
    """One executor as its worker sees it: what it sent, printed, and how it died."""

    def __init__(self, launched_: Launched, *, shared: bool = False, waits: bool = True) -> None:
        """`waits`: until the launcher has said that it is forked."""
        self.launched = launched_
        own: Any = self
        self.executors = executors.Executors(
            launched_.loop,
            launched_.launcher,
            own,
            own,
            slots=1000 if shared else 1,
            shared=shared,
        )
        self.jobs: list[Job] = []
        self.ended_jobs: list[Job] = []
        self.records: list[dict[str, Any]] = []
        self.models: list[dict[str, Any]] = []
        self.printed_text = bytearray()
        self.keep_printed = True
        self.printed_bytes = 0
        self.answers: dict[str, Any] | None = {}
        """What it answers; None: nothing, ever."""
        launched_.workers.append(self)
        place = self.executors._fork(shared=shared)  # before a job needs it
        assert place is not None
        self.place = place
        self.executors.closing = True  # it is not replaced
        if waits:
            self.until(lambda: self.pid)

    @property
    def pid(self) -> int:
        """Return its pid, or 0."""
        return self.place.pid

    # --- What a test does.

    def send_task(self, name: str, args: dict[str, Any] | None = None, **columns: Any) -> Job:
        """Start an ingest job."""
        return self._start(Job(task_row(name, args, **columns), in_run=False))

    def send_node(self, module: str, inputs: dict[str, Any] | None = None, **columns: Any) -> Job:
        """Start a node."""
        return self._start(Job(node_row(module, inputs, **columns), in_run=True))

    def _start(self, job: Job) -> Job:
        self.jobs.append(job)
        self.executors.start(job, shared=self.place.shared)
        assert job.place is self.place
        return job

    def task(
        self, name: str, args: dict[str, Any] | None = None, **columns: Any
    ) -> outcomes.Outcome:
        """Run an ingest job; return its outcome."""
        return self.outcome(self.send_task(name, args, **columns))

    def node(self, module: str, inputs: Any = None, **columns: Any) -> outcomes.Outcome:
        """Run a node; return its outcome."""
        return self.outcome(self.send_node(module, inputs, **columns))

    def outcome(self, job: Job) -> outcomes.Outcome:
        """Wait for the outcome of this job."""
        deadline = time.monotonic() + LIMIT_S
        while job.outcome is None:
            assert job.death is None, f"{job.death}; printed: {self.text}"
            assert not self.place.lost, f"{self.place.lost}; printed: {self.text}"
            assert time.monotonic() < deadline, f"no outcome of {job.id}; printed: {self.text}"
            self.turn()
        return job.outcome

    def interrupt(self, job: Job, reason: str) -> None:
        """Let the handler of a job end."""
        self.executors.interrupt(job, reason)

    def kill(self) -> None:
        """End the process by SIGKILL."""
        self.executors.kill(self.place, signal.SIGKILL, "the test")

    def turn(self, timeout_s: float = 1.0) -> None:
        """Act on what is there, after a wait of at most `timeout_s` for anything."""
        self.launched.turn(timeout_s)

    def until(self, condition: Callable[[], object]) -> None:
        """Turn until this is true."""
        until(lambda: condition() or self.turn(0.05) or condition(), timeout_s=LIMIT_S)

    def death(self) -> dict[str, Any]:
        """Wait for the end of the process; return the packet of the launcher about it."""
        self.until(lambda: self.launched.died(self.pid))
        found = self.launched.died(self.pid)
        assert found is not None
        return found

    @property
    def text(self) -> str:
        """What it printed."""
        return self.printed_text.decode(errors="replace")

    @property
    def logged(self) -> list[str]:
        """The texts of the records that it sent."""
        return [each["text"] for each in self.records]

    def close(self) -> None:
        """Kill it if it lives."""
        if self.launched.died(self.pid) is None and self.launched.lost is None:
            self.kill()
            self.death()
        self.launched.workers.remove(self)
        self.executors.close()

    # --- The owner of `run.executors.Executors`.

    def ended(self, job: Job, outcome: outcomes.Outcome) -> None:
        job.outcome, job.place = outcome, None
        self.ended_jobs.append(job)

    def died(self, job: Job, death: executors.Death) -> None:
        job.death = death

    def asked(self, job: Job, question: dict[str, Any]) -> None:
        what = question["what"]
        job.asked.append(what)
        if self.answers is not None:
            error = None if what in self.answers else "nothing is known of it"
            self.answer(question["no"], self.answers.get(what), error)

    def answer(self, number: int, value: Any, error: str | None = None) -> None:
        """Answer a question of a handler."""
        self.executors.answer(self.place, number, claimed_job.answered(value, error))

    def printed(self, job: Job, data: bytes) -> None:
        if self.keep_printed:
            job.printed += data

    def event(self, job: Job, event_type: str, elapsed_s: float | None) -> None:
        job.events.append(event_type)

    def started(self, job: Job) -> None:
        job.starts += 1

    def waits(self, job: Job) -> None:
        """Ignore it; `started` follows."""

    def model(self, model: dict[str, Any]) -> None:
        self.models.append(model)

    def changed(self, error: str | None) -> None:
        """Ignore it; the state of the model says it."""

    def room(self) -> None:
        """Ignore it; a test starts its jobs itself."""

    # --- As `run.job_output.Printer`.

    def write(self, number: int, data: bytes) -> None:
        self.printed_bytes += len(data)
        if self.keep_printed:
            self.printed_text += data

    def record(self, pid: int, record: dict[str, Any]) -> None:
        self.records.append(record)


@contextlib.contextmanager
def forked(launched_: Launched, *, shared: bool = False) -> Generator[Worker]:
    """An executor of this launcher, dead afterwards."""
    found = Worker(launched_, shared=shared)
    try:
        yield found
    finally:
        found.close()
