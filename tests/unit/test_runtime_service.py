"""Service, Loop, Follow and Thread: when they run, what they survive, how they stop."""

from __future__ import annotations

import logging
import math
import queue
import threading

import pytest

from queue_workflows import errors
from queue_workflows.runtime import service
from tests.support.clocks import Clock
from tests.support.wait import until


@pytest.fixture
def clock() -> Clock[float]:
    return Clock(1000.0)


class Source:
    """Yields what is put, raises what is an exception, ends at close()."""

    def __init__(self, *items: object) -> None:
        self.items: queue.Queue[object] = queue.Queue()
        self.opened = 0
        self.closed = 0
        for item in items:
            self.items.put(item)

    def __iter__(self):
        self.opened += 1
        while (item := self.items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def close(self) -> None:
        self.closed += 1
        self.items.put(None)


def waiter(name: str = "waiter") -> service.Thread:
    return service.Thread(name, lambda stop: stop.wait())


def test_stop_ends_the_named_daemon_thread_and_may_come_again() -> None:
    one = waiter("one")
    one.start()
    assert [t.daemon for t in threading.enumerate() if t.name == "one"] == [True]
    assert one.alive
    assert one.stop()
    assert not one.alive
    assert one.stop()


def test_a_service_starts_only_once() -> None:
    with waiter() as one, pytest.raises(RuntimeError, match="waiter was started before"):
        one.start()
    with pytest.raises(RuntimeError):
        one.start()


def test_stop_before_start_wins() -> None:
    one = waiter()
    assert one.stop()
    one.start()
    assert not one.alive


def test_stop_reports_a_thread_that_does_not_end(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    stuck = service.Thread("stuck", lambda _: release.wait())
    stuck.start()
    assert not stuck.stop(timeout_s=0.01)
    assert stuck.alive
    release.set()
    assert stuck.stop()


def test_stop_from_the_own_thread_requests_and_does_not_wait() -> None:
    answers: list[bool] = []
    loop = service.Loop("own", [service.Task("t", 60, lambda: answers.append(loop.stop()))])
    loop.start()
    until(lambda: answers)
    assert answers == [False]
    assert loop.stop()


def test_tasks_run_at_once_then_at_their_intervals(clock: Clock[float]) -> None:
    ran: list[str] = []
    loop = service.Loop(
        "l",
        [
            service.Task("a", 2.0, lambda: ran.append("a")),
            service.Task("b", lambda: 3.0, lambda: ran.append("b")),
        ],
        now_fn=clock,
    )
    assert loop.run_due() == 2.0
    assert ran == ["a", "b"]
    clock.now += 1.5
    assert loop.run_due() == 0.5
    assert ran == ["a", "b"]
    clock.now += 0.5
    assert loop.run_due() == 1.0
    assert ran == ["a", "b", "a"]
    clock.now += 1.0
    assert loop.run_due() == 1.0
    assert ran == ["a", "b", "a", "b"]


def test_late_and_long_runs_do_not_move_the_later_ones(clock: Clock[float]) -> None:
    def run() -> None:
        ran.append(clock.now)
        clock.now += took

    ran: list[float] = []
    loop = service.Loop("l", [service.Task("t", 10.0, run)], now_fn=clock)
    took = 0.0
    loop.run_due()
    clock.now += 10.5
    took = 3.0
    assert loop.run_due() == pytest.approx(6.5)
    clock.now += 6.5
    took = 25.0
    assert loop.run_due() == pytest.approx(5.0)
    clock.now += 5.0
    loop.run_due()
    assert ran == pytest.approx([1000.0, 1010.5, 1020.0, 1050.0])


def test_a_changed_interval_counts_from_the_next_run(clock: Clock[float]) -> None:
    every = [5.0]
    loop = service.Loop("l", [service.Task("t", lambda: every[0], lambda: None)], now_fn=clock)
    assert loop.run_due() == 5.0
    every[0] = 7.0
    clock.now += 5.0
    assert loop.run_due() == 7.0


@pytest.mark.parametrize("every", [0.0, -1.0])
def test_an_interval_of_nothing_is_no_busy_loop(clock: Clock[float], every: float) -> None:
    loop = service.Loop("l", [service.Task("t", every, lambda: None)], now_fn=clock)
    assert loop.run_due() == pytest.approx(service.MIN_EVERY_S)


def test_wake_runs_the_named_tasks_at_once(clock: Clock[float]) -> None:
    ran: list[str] = []
    names = ("a", "b")
    loop = service.Loop(
        "l", [service.Task(n, math.inf, lambda n=n: ran.append(n)) for n in names], now_fn=clock
    )
    assert loop.run_due() == math.inf
    ran.clear()
    loop.wake("b")
    loop.wake("b")
    assert loop.run_due() == math.inf
    assert ran == ["b"]
    loop.wake()
    loop.run_due()
    assert ran == ["b", "a", "b"]
    with pytest.raises(ValueError, match="l has no task c"):
        loop.wake("c")


def test_a_wake_during_the_run_is_not_lost(clock: Clock[float]) -> None:
    ran: list[int] = []

    def run() -> None:
        ran.append(1)
        if len(ran) == 1:
            loop.wake("t")

    loop = service.Loop("l", [service.Task("t", 60, run)], now_fn=clock)
    assert loop.run_due() == 0.0
    assert loop.run_due() == 60.0
    assert len(ran) == 2


def test_wake_wakes_the_waiting_thread() -> None:
    ran: queue.Queue[int] = queue.Queue()
    with service.Loop("l", [service.Task("t", math.inf, lambda: ran.put(1))]) as loop:
        ran.get(timeout=30)
        loop.wake("t")
        ran.get(timeout=30)


def test_a_wake_between_the_last_check_and_the_wait_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: queue.Queue[int] = queue.Queue()
    loop = service.Loop("l", [service.Task("t", math.inf, lambda: ran.put(1))])
    run_due = loop.run_due

    def late_wake() -> float:
        pause_s = run_due()
        monkeypatch.undo()
        loop.wake("t")
        return pause_s

    monkeypatch.setattr(loop, "run_due", late_wake)
    with loop:
        for _ in range(2):
            ran.get(timeout=30)


def test_the_thread_waits_until_the_next_task_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: queue.Queue[float] = queue.Queue()
    loop = service.Loop("l", [service.Task("t", 0.05, lambda: None)])
    run_due = loop.run_due
    monkeypatch.setattr(loop, "run_due", lambda: passes.put(pause := run_due()) or pause)
    with loop:
        assert passes.get(timeout=30) > 0.01
        for _ in range(3):
            passes.get(timeout=30)
    assert passes.qsize() <= 2


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3), KeyError("k")])
def test_a_task_that_raises_runs_again_and_stops_no_other(
    clock: Clock[float], caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    ran: list[str] = []

    def fail() -> None:
        ran.append("bad")
        raise error

    tasks = [service.Task("bad", 1, fail), service.Task("good", 1, lambda: ran.append("good"))]
    loop = service.Loop("l", tasks, now_fn=clock)
    assert loop.run_due() == 1.0
    clock.now += 1
    loop.run_due()
    assert ran == ["bad", "good"] * 2
    assert f"l: bad failed: {type(error).__name__}" in caplog.text


def test_the_thread_survives_what_a_task_raises() -> None:
    ran: queue.Queue[int] = queue.Queue()

    def fail() -> None:
        ran.put(1)
        raise SystemExit(1)

    with service.Loop("l", [service.Task("bad", 0.01, fail)]) as loop:
        for _ in range(3):
            ran.get(timeout=30)
        assert loop.alive


def test_the_same_error_is_logged_once_a_minute_with_its_count(
    clock: Clock[float], caplog: pytest.LogCaptureFixture
) -> None:
    texts = ["port 5432 away", "port 9876 away", "other"]

    def fail() -> None:
        raise OSError(texts[0])

    loop = service.Loop("l", [service.Task("t", 1, fail)], now_fn=clock)
    for _ in range(30):
        loop.run_due()
        clock.now += 1
        texts[:2] = reversed(texts[:2])
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info
    texts[0] = texts[2]
    loop.run_due()
    assert len(caplog.records) == 2
    clock.now += service.QUIET_S
    texts[0] = "port 5432 away"
    loop.run_due()
    assert "failed (29 more since the last line): OSError: port" in caplog.records[-1].message


class Away(Exception):
    """The exception that stands for an outage here."""


def test_an_outage_is_one_line_and_its_tracebacks_are_for_debugging(
    clock: Clock[float], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "_outage_names", [])
    errors.name_outages_by(lambda error: "the shop" if isinstance(error, Away) else None)
    caplog.set_level(logging.DEBUG)
    fails: dict[str, Exception] = {}

    def run(name: str) -> None:
        if name in fails:
            raise fails[name]

    def said(level: int) -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.levelno >= level]

    tasks = [service.Task(name, 1, lambda name=name: run(name)) for name in ("a", "b", "well")]
    loop = service.Loop("l", tasks, now_fn=clock)
    for text in ("it\nclosed", "it is closed", "it opens"):
        fails.update(a=Away(text), b=Away(text))
        loop.run_due()
        clock.now += 1
    (line,) = said(logging.WARNING)
    assert line.message == "l: a waits for the shop: it closed"
    assert not line.exc_info
    assert len([record for record in caplog.records if record.exc_info]) == 6
    fails.clear()
    loop.run_due()
    clock.now += 1
    fails.update(b=Away("again"), a=ValueError("ours"))
    loop.run_due()
    ours, again = said(logging.WARNING)[1:]
    assert again.message == "l: b waits for the shop: again"
    assert ours.message == "l: a failed: ValueError: ours"
    assert ours.exc_info


def test_an_interval_that_raises_falls_back(clock: Clock[float]) -> None:
    def every_s() -> float:
        raise ValueError("no number")

    loop = service.Loop("l", [service.Task("t", every_s, lambda: None)], now_fn=clock)
    assert loop.run_due() == service.FALLBACK_EVERY_S


def test_a_stop_inside_a_pass_leaves_the_other_tasks_alone(clock: Clock[float]) -> None:
    ran: list[str] = []
    tasks = [
        service.Task("stop", 1, lambda: loop.stop()),
        service.Task("other", 1, lambda: ran.append("other")),
    ]
    loop = service.Loop("l", tasks, now_fn=clock)
    loop.run_due()
    assert ran == []


def test_two_tasks_of_one_name_are_refused() -> None:
    task = service.Task("t", 1, lambda: None)
    with pytest.raises(ValueError, match="two tasks share a name"):
        service.Loop("l", [task, task])


def test_follow_acts_on_each_item_and_stop_closes_the_source() -> None:
    source, seen = Source("a", "b"), []
    follow = service.Follow("f", source, seen.append)
    follow.start()
    until(lambda: len(seen) == 2)
    assert follow.alive
    assert follow.stop()
    assert follow.stop()
    assert (seen, source.closed) == (["a", "b"], 1)


def test_follow_goes_on_after_an_error_of_act(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[object] = []

    def act(item: object) -> None:
        seen.append(item)
        if item == "bad":
            raise SystemExit(1)

    source = Source("bad", "good")
    with service.Follow("f", source, act):
        until(lambda: seen == ["bad", "good"])
    assert source.opened == 1
    assert "f: an item failed: SystemExit: 1" in caplog.text


def test_follow_iterates_again_after_an_error_of_the_source(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, seen = Source(OSError("gone"), "a"), []
    with service.Follow("f", source, seen.append):
        until(lambda: seen)
    assert source.opened == 2
    assert "f: its source failed: OSError: gone" in caplog.text


def test_follow_backs_off_longer_each_time_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(*[OSError("gone") for _ in range(12)], "item", OSError("gone"))
    follow = service.Follow("f", source, lambda _: None)
    pauses: queue.Queue[float] = queue.Queue()
    monkeypatch.setattr(follow._stopping, "wait", lambda s: pauses.put(s))
    with follow:
        waits = [pauses.get(timeout=30) for _ in range(13)]
    assert all(0 < pause <= service.BACKOFF_MAX_S for pause in waits)
    assert waits[0] <= service.BACKOFF_FIRST_S
    assert min(waits[6:12]) >= service.BACKOFF_MAX_S / 2
    assert waits[12] <= service.BACKOFF_FIRST_S, "an item ends the row of failures"


def test_follow_stops_in_the_middle_of_its_pause() -> None:
    class Broken:
        def __iter__(self):
            raise OSError("gone")

    follow = service.Follow("f", Broken(), lambda _: None)
    follow._failures = 16
    with follow:
        until(lambda: follow._failures > 16)
        assert follow.stop(1.0)


def test_follow_can_be_stopped_by_what_it_calls() -> None:
    answers: list[bool] = []
    follow = service.Follow("f", Source("a", "b"), lambda _: answers.append(follow.stop()))
    follow.start()
    until(lambda: answers)
    assert follow.stop()
    assert answers == [False]


def test_follow_logs_when_its_source_ends(caplog: pytest.LogCaptureFixture) -> None:
    with service.Follow("f", ["a"], lambda _: None) as follow:
        until(lambda: not follow.alive)
    assert caplog.record_tuples == [
        (service.logger.name, logging.WARNING, "f: its source has ended")
    ]


def test_follow_refuses_a_generator() -> None:
    with pytest.raises(TypeError, match="cannot be iterated again"):
        service.Follow("f", (item for item in "ab"), lambda _: None)


def test_a_close_that_raises_does_not_stop_the_stop(caplog: pytest.LogCaptureFixture) -> None:
    class Bad(Source):
        def close(self) -> None:
            super().close()
            raise OSError("late")

    follow = service.Follow("f", Bad(), lambda _: None)
    follow.start()
    assert follow.stop()
    assert "f: closing its source failed: OSError: late" in caplog.text
