"""Output of handlers reaches the worker, whole or with a count of losses, and delays nothing."""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import termios
from collections.abc import Callable, Generator

import pytest

from queue_workflows.executor import protocol, streams
from queue_workflows.runtime import entry_point
from tests.support import executor_app, executors
from tests.support.wait import until


def test_all_that_a_handler_printed_is_there_with_its_outcome(worker: executors.Worker) -> None:
    for number in range(20):
        key = worker.send_task("prints", {"n": number})
        while not any(each.key == key for each in worker.of(protocol.Outcome)):
            worker.take(worker.executor.jobs.receive())
        text = b"".join(data for _, data in worker.executor.out.drain()).decode()
        for part in (f"on stdout {number}\n", f"on stderr {number}\n", "a child\n", "an end"):
            assert part in text


def test_stdout_and_stderr_are_distinguished(worker: executors.Worker) -> None:
    worker.send_task("prints", {"n": 1})
    while not worker.of(protocol.Outcome):
        worker.take(worker.executor.jobs.receive())
    found = worker.executor.out.drain()
    assert b"".join(data for number, data in found if number == 2) == b"on stderr 1\n"
    assert b"on stdout 1\n" in b"".join(data for number, data in found if number == 1)


def test_a_drain_is_limited(worker: executors.Worker) -> None:
    worker.send_task("prints_much", {"mb": 1})
    until(lambda: streams_hold(worker, 60_000))
    assert 0 < sum(len(data) for _, data in worker.executor.out.drain(10_000)) <= 65_536


def streams_hold(worker: executors.Worker, size: int) -> bool:
    for fd in worker.executor.out.fds:
        held = fcntl.ioctl(fd, termios.FIONREAD, b"\0" * 4)
        if struct.unpack("i", held)[0] >= size:
            return True
    return False


def test_the_last_lines_of_a_killed_executor_are_kept(worker: executors.Worker) -> None:
    worker.send_task("prints_much", {"mb": 1000})
    until(lambda: streams_hold(worker, 60_000))
    worker.executor.kill()
    worker.death()
    assert worker.printed.count(b"x" * 99 + b"\n") > 500


def test_records_that_nothing_prints_are_sent_with_their_job(worker: executors.Worker) -> None:
    worker.task("logs")
    records = worker.of(protocol.Log)
    texts = [each.text for each in records]
    assert texts[0] == "a warning"
    assert texts[1].startswith("it failed\nTraceback")
    assert texts[1].endswith("ValueError: shown")
    assert {(each.key, each.name) for each in records} == {(1, "some_app")}


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
        assert {each.printed for each in worker.of(protocol.Log)} == {True}
        assert [each.level for each in worker.of(protocol.Log)] == [30, 40]
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
        until(lambda: worker.turn(0.05) or "own it failed" in worker.text)
        assert not worker.of(protocol.Log)


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


def test_a_reader_that_is_gone_costs_nothing() -> None:
    reader, writer = os.pipe()
    forward = streams.Forward(writer)
    os.close(reader)
    forward.add(b"x")
    forward.add(b"y")
    assert not forward.pending
    os.close(writer)
