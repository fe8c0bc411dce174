"""Output of handlers reaches the worker, whole or with a count of losses, and delays nothing."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import select
import signal
import struct
import termios
from collections.abc import Callable, Generator

import pytest

from queue_workflows.run import job_output as streams
from queue_workflows.runtime import entry_point, io_loop, logs
from tests.support import executor_app, executors
from tests.support.wait import until


def test_all_that_a_handler_printed_is_there_with_its_outcome(worker: executors.Worker) -> None:
    for number in range(20):
        job = worker.send_task("prints", {"n": number})
        worker.outcome(job)
        text = job.printed.decode()
        for part in (f"on stdout {number}\n", f"on stderr {number}\n", "a child\n", "an end"):
            assert part in text


def test_output_of_a_job_is_not_kept_for_the_next(worker: executors.Worker) -> None:
    first = worker.send_task("prints", {"n": 1})
    worker.outcome(first)
    second = worker.send_task("add", {"a": 1, "b": 1})
    worker.outcome(second)
    assert b"without an end" in first.printed
    assert not second.printed


def test_stdout_and_stderr_are_distinguished(worker: executors.Worker) -> None:
    found: list[tuple[int, bytes]] = []
    worker.write = lambda number, data: found.append((number, data))  # type: ignore[method-assign]
    worker.task("prints", {"n": 1})
    assert b"".join(data for number, data in found if number == 2) == b"on stderr 1\n"
    assert b"on stdout 1\n" in b"".join(data for number, data in found if number == 1)


@pytest.fixture
def logs_json() -> Generator[None]:
    """This process logs JSON."""
    handler = logging.NullHandler()
    handler.setFormatter(logs.JsonFormatter())
    logging.getLogger().addHandler(handler)
    yield
    logging.getLogger().removeHandler(handler)


@pytest.mark.usefixtures("logs_json")
def test_what_was_printed_before_the_launcher_tells_of_the_fork_is_json_with_its_pid(
    launcher: executors.Launched,
) -> None:
    with launcher.late():
        worker = executors.Worker(launcher, waits=False)
        job = worker.send_task("prints", {"n": 1})
        until(worker.place.out.ready)
        worker.turn(0)
    with contextlib.closing(worker):
        assert worker.outcome(job).kind == "completed"
        worker.kill()
        worker.death()  # the last line has no end
        lines = [json.loads(line) for line in worker.text.splitlines()]
    assert {"on stdout 1", "on stderr 1", "from a child", "without an end"} == {
        each["message"] for each in lines
    }
    assert {each["pid"] for each in lines} == {worker.pid}


def test_a_drain_is_limited() -> None:
    reader, writer = os.pipe()
    other = os.pipe()
    output = streams.Output(reader, other[0])
    os.write(writer, b"x" * 60_000)
    assert 0 < sum(len(data) for _, data in output.drain(10_000)) <= 65_536
    output.close()
    for fd in (writer, other[1]):
        os.close(fd)


def streams_hold(worker: executors.Worker, size: int) -> bool:
    for fd in worker.place.out.fds:
        held = fcntl.ioctl(fd, termios.FIONREAD, b"\0" * 4)
        if struct.unpack("i", held)[0] >= size:
            return True
    return False


def test_the_last_output_of_a_killed_executor_is_that_of_its_job(worker: executors.Worker) -> None:
    job = worker.send_task("prints_much", {"mb": 1000})
    until(lambda: streams_hold(worker, 60_000))
    os.kill(worker.pid, signal.SIGKILL)
    worker.death()
    assert worker.printed_text.count(b"x" * 99 + b"\n") > 500
    assert job.death is not None
    assert set(job.printed[-2000:]) == set(b"x\n")


def test_records_that_nothing_prints_are_sent_with_their_job(worker: executors.Worker) -> None:
    job = worker.send_task("logs")
    worker.outcome(job)
    texts = worker.logged
    assert texts[0] == "a warning"
    assert texts[1].startswith("it failed\nTraceback")
    assert texts[1].endswith("ValueError: shown")
    assert {each["name"] for each in worker.records} == {"some_app"}
    assert job.printed.startswith(b"a warning\nit failed\n")


@pytest.fixture
def ours() -> Generator[Callable[[], None]]:
    """Sets up logging as a worker's main function does, and nothing else logs."""
    root = logging.getLogger()
    handlers, level = [*root.handlers], root.level
    root.handlers.clear()
    entry_point.setup_logging("info")
    yield lambda: None
    root.handlers[:] = handlers
    root.setLevel(level)


def test_records_of_the_engines_logging_are_sent_to_the_worker(
    ours: object,
) -> None:
    with executors.launched(executor_app.load) as launcher, executors.forked(launcher) as worker:
        worker.task("logs")
        assert {each["printed"] for each in worker.records} == {True}
        assert [each["level"] for each in worker.records] == [30, 40]
        worker.turn(0)
        assert "a warning" not in worker.text


def logs_to_stderr() -> None:
    executor_app.load()
    stderr = os.fdopen(2, "w", 1, closefd=False)  # pytest has replaced sys.stderr
    logging.getLogger().handlers.clear()  # those of pytest
    logging.basicConfig(format="own %(message)s", stream=stderr)


def test_records_printed_by_the_apps_logging_are_output_only() -> None:
    with (
        executors.launched(logs_to_stderr) as launcher,
        executors.forked(launcher) as worker,
    ):
        worker.task("logs")
        worker.until(lambda: "own it failed" in worker.text)
        assert not worker.records


@pytest.fixture
def pipe() -> Generator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def test_forwarded_output_keeps_its_order(pipe: tuple[int, int]) -> None:
    forward = streams.Forward(pipe[1])
    parts = [b"%05d" % n * 100 for n in range(200)]
    found = b""
    for part in parts:
        forward.add(part)
        found += os.read(pipe[0], 65_536)
    while forward.pending:
        forward.flush()
        found += os.read(pipe[0], 65_536)
    assert found == b"".join(parts)
    assert forward.dropped == 0


def test_a_reader_that_sleeps_costs_output_and_no_time_or_memory(pipe: tuple[int, int]) -> None:
    forward = streams.Forward(pipe[1])
    for _ in range(1000):
        forward.add(b"x" * 1000)
    assert forward.pending
    kept = 1_000_000 - forward.dropped
    assert kept <= 65_536 + streams.BACKLOG_BYTES
    found = 0
    while found < kept:
        found += len(os.read(pipe[0], 65_536))
        forward.flush()
    assert not forward.pending


@contextlib.contextmanager
def stderr_into(writer: int) -> Generator[None]:
    """Let this process's stderr be a pipe; in a test, as pytest sets stderr before each one."""
    kept = os.dup(2)
    os.dup2(writer, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def test_only_the_thread_of_the_loop_waits_for_a_slow_reader(pipe: tuple[int, int]) -> None:
    """Any thread may log, and one of this process may do so meanwhile."""
    loop, posted = io_loop.IoLoop(), list[Callable[[], object]]()
    printer, found = streams.Printer(loop, posted.append), b""

    def is_printed() -> bool:
        nonlocal found
        if select.select([pipe[0]], [], [], 0)[0]:
            found += os.read(pipe[0], 65_536)
        return found.count(b"x") >= 100_000

    with stderr_into(pipe[1]):
        printer.write(2, b"x" * 100_000)
        assert not is_printed()
        assert found
        (wait,) = posted
        wait()
        loop.wake_at(0.0)
        loop.run(lambda now: now + 1.0, is_printed)
    loop.close()


def test_a_reader_that_is_gone_costs_nothing() -> None:
    reader, writer = os.pipe()
    forward = streams.Forward(writer)
    os.close(reader)
    forward.add(b"x")
    forward.add(b"y")
    assert not forward.pending
    os.close(writer)
