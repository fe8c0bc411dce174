"""StopRequest: signals become a flag, and nothing else of the process changes."""

from __future__ import annotations

import os
import select
import signal
import threading

import pytest

from queue_workflows.runtime import service, signals
from tests.support.wait import until


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_flag_and_the_handlers_come_back(signum: signal.Signals) -> None:
    before = [signal.getsignal(s) for s in signals.SIGNALS]
    with signals.StopRequest() as stop:
        assert not stop.requested.is_set()
        assert stop.count == 0
        os.kill(os.getpid(), signum)
        assert stop.requested.wait(5)
        assert stop.requested.is_set()
        assert stop.count == 1
    assert [signal.getsignal(s) for s in signals.SIGNALS] == before


def test_the_callbacks_run_once_at_the_first_and_second_request() -> None:
    calls: list[str] = []
    with signals.StopRequest(
        on_first=lambda: calls.append("first"), on_second=lambda: calls.append("second")
    ) as stop:
        for _ in range(4):
            signal.raise_signal(signal.SIGTERM)
    assert calls == ["first", "second"]
    assert stop.count == 4


def test_a_second_signal_inside_the_first_callback_is_the_second() -> None:
    calls: list[str] = []

    def first() -> None:
        signal.raise_signal(signal.SIGINT)
        calls.append("first")

    with signals.StopRequest(on_first=first, on_second=lambda: calls.append("second")) as stop:
        signal.raise_signal(signal.SIGTERM)
    assert calls == ["second", "first"]
    assert stop.count == 2


def test_the_flag_wakes_every_waiter_and_is_readable() -> None:
    flag = signals.Flag()
    assert not flag.wait(0.0)
    assert select.select([flag], [], [], 0)[0] == []
    woken: list[bool] = []
    with service.Pool("waiters", 3, lambda _: woken.append(flag.wait(10))) as pool:
        flag.set()
        flag.set()
        until(lambda: not pool.alive)
    assert woken == [True] * 3
    assert select.select([flag], [], [], 0)[0] == [flag]


def test_a_signal_wakes_the_main_thread_out_of_an_endless_wait() -> None:
    with signals.StopRequest() as stop:
        waiting = threading.Event()

        def kill(_: threading.Event) -> None:
            waiting.wait(5)
            os.kill(os.getpid(), signal.SIGTERM)

        with service.Pool("killer", 1, kill):
            waiting.set()
            assert stop.requested.wait()


def test_outside_the_main_thread_it_only_takes_requests() -> None:
    before = [signal.getsignal(s) for s in signals.SIGNALS]
    seen: list[object] = []

    def body(_: threading.Event) -> None:
        with signals.StopRequest() as stop:
            seen.append([signal.getsignal(s) for s in signals.SIGNALS] == before)
            stop.request()
            seen.append(stop.requested.wait(0))

    with service.Pool("other", 1, body) as pool:
        until(lambda: not pool.alive)
    assert seen == [True, True]
    assert [signal.getsignal(s) for s in signals.SIGNALS] == before


def test_a_flag_gives_its_descriptors_back() -> None:
    flag = signals.Flag()
    reader = flag.fileno()
    del flag
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reader)
