"""StopRequest: signals become a flag, and nothing else of the process changes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
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
        assert stop.requested.wait(30)
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
    with contextlib.ExitStack() as stack:
        for number in range(3):
            waiter = service.Thread(f"waiter{number}", lambda _: woken.append(flag.wait(30)))
            stack.enter_context(waiter)
        flag.set()
        flag.set()
        until(lambda: len(woken) == 3)
    assert woken == [True] * 3
    assert select.select([flag], [], [], 0)[0] == [flag]


def test_a_signal_wakes_the_main_thread_out_of_an_endless_wait() -> None:
    with signals.StopRequest() as stop:
        waiting = threading.Event()

        def kill(_: threading.Event) -> None:
            waiting.wait(30)
            os.kill(os.getpid(), signal.SIGTERM)

        with service.Thread("killer", kill):
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

    with service.Thread("other", body) as thread:
        until(lambda: not thread.alive)
    assert seen == [True, True]
    assert [signal.getsignal(s) for s in signals.SIGNALS] == before


def test_a_flag_gives_its_descriptors_back() -> None:
    flag = signals.Flag()
    reader = flag.fileno()
    del flag
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reader)


# --- received by another thread ------------------------------------------------------------------

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs SO_PASSCRED")


@linux
def test_another_thread_receives_signals_while_the_main_thread_is_in_c_code() -> None:
    lock = ctypes.create_string_buffer(64)  # zeros are an open one
    libc = ctypes.CDLL(None)
    heard: list[int] = []
    with signals.StopRequest() as stop, signals.Wakeups() as wakeups:

        def kill(_: threading.Event) -> None:
            try:
                until(lambda: lock.raw[0] == 2)  # of glibc: taken, and somebody waits
                os.kill(os.getpid(), signal.SIGTERM)
                until(lambda: wakeups.received() == 1)
                heard.append(stop.count)
            finally:
                libc.pthread_mutex_unlock(lock)

        libc.pthread_mutex_lock(lock)
        with service.Thread("killer", kill):
            libc.pthread_mutex_lock(lock)
        assert heard == [0], "the main thread had not received it"
        assert stop.count == 1
        signal.raise_signal(signal.SIGINT)
        assert wakeups.received() == 2
    assert signal.set_wakeup_fd(-1) == -1


@linux
def test_the_signals_of_a_forked_child_are_its_own() -> None:
    with signals.StopRequest() as stop, signals.Wakeups() as wakeups:
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGTERM)
            os._exit(stop.count)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1, "the child received it"
        assert select.select([wakeups], [], [], 30)[0], "the byte of the child is there"
        assert wakeups.received() == 0
        signal.raise_signal(signal.SIGTERM)
        assert wakeups.received() == 1


@linux
def test_an_event_loop_keeps_the_descriptor_and_is_succeeded() -> None:
    theirs, other = socket.socketpair()
    theirs.setblocking(False)
    with theirs, other, signals.StopRequest(), signals.Wakeups() as wakeups:
        signal.set_wakeup_fd(theirs.fileno())
        wakeups.take()
        signal.raise_signal(signal.SIGTERM)
        assert other.recv(2) == bytes([signal.SIGTERM])
        assert wakeups.received() == 0
        signal.set_wakeup_fd(-1)
        wakeups.take()
        signal.raise_signal(signal.SIGTERM)
        assert wakeups.received() == 1
