"""StopRequest: signals become a flag, and nothing else of the process changes."""

from __future__ import annotations

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
    with service.Pool("waiters", 3, lambda _: woken.append(flag.wait(30))) as pool:
        flag.set()
        flag.set()
        until(lambda: not pool.alive)
    assert woken == [True] * 3
    assert select.select([flag], [], [], 0)[0] == [flag]


def test_a_signal_wakes_the_main_thread_out_of_an_endless_wait() -> None:
    with signals.StopRequest() as stop:
        waiting = threading.Event()

        def kill(_: threading.Event) -> None:
            waiting.wait(30)
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


# --- received by a thread ------------------------------------------------------------------------

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs SO_PASSCRED")


@linux
def test_the_signal_thread_receives_while_the_main_thread_is_in_c_code() -> None:
    lock = ctypes.create_string_buffer(64)  # zeros are an open one
    libc = ctypes.CDLL(None)
    heard: list[int] = []
    with signals.StopRequest(signal_thread=True) as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop.count == 2, "what the main thread does next comes after the request"

        def kill(_: threading.Event) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            try:
                until(lambda: stop.count > 2)
                heard.append(stop.count)
            finally:
                libc.pthread_mutex_unlock(lock)

        libc.pthread_mutex_lock(lock)
        with service.Pool("killer", 1, kill):
            libc.pthread_mutex_lock(lock)
        assert heard == [3], "the ear hears in order: of the first two it made no second requests"
        assert stop.count == 3, "its handler has run meanwhile, and counted it no second time"


@linux
def test_the_main_thread_goes_on_with_the_callback_done_though_the_ear_is_in_it_still() -> None:
    lock = ctypes.create_string_buffer(64)  # zeros are an open one
    libc = ctypes.CDLL(None)
    entered, over = threading.Event(), threading.Event()
    done: list[str] = []

    def callback() -> None:
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            over.wait(30)
        done.append(threading.current_thread().name)

    with signals.StopRequest(on_first=callback, signal_thread=True) as stop:

        def kill(_: threading.Event) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            entered.wait(30)
            libc.pthread_mutex_unlock(lock)

        libc.pthread_mutex_lock(lock)
        with service.Pool("killer", 1, kill):
            libc.pthread_mutex_lock(lock)
        assert entered.is_set()
        assert done == ["MainThread"]
        assert stop.count == 1
        over.set()
        until(lambda: len(done) == 2)
        assert stop.count == 1


def test_with_an_ear_each_signal_counts_once_and_all_is_put_back() -> None:
    calls: list[str] = []
    before = [signal.getsignal(s) for s in signals.SIGNALS]
    with signals.StopRequest(
        on_first=lambda: calls.append("first"),
        on_second=lambda: calls.append("second"),
        signal_thread=True,
    ) as stop:
        for count, signum in enumerate([*signals.SIGNALS, *signals.SIGNALS], 1):
            signal.raise_signal(signum)
            assert stop.count == count, "what the main thread does next comes after the callback"
    assert [*dict.fromkeys(calls)] == ["first", "second"]
    assert stop.count == 4
    assert signal.set_wakeup_fd(-1) == -1
    assert [signal.getsignal(s) for s in signals.SIGNALS] == before


@linux
def test_the_signals_of_a_forked_child_are_its_own() -> None:
    with signals.StopRequest(signal_thread=True) as stop:
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGTERM)
            os._exit(stop.count)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1, "the child heard it"
        signal.raise_signal(signal.SIGTERM)
        until(lambda: stop.count)
    assert stop.count == 1


@linux
def test_a_signal_counts_while_an_event_loop_has_the_descriptor_and_after() -> None:
    theirs, other = socket.socketpair()
    theirs.setblocking(False)
    with theirs, other, signals.StopRequest(signal_thread=True) as stop:
        ours = signal.set_wakeup_fd(theirs.fileno())
        signal.raise_signal(signal.SIGTERM)
        assert stop.count == 1
        assert signal.set_wakeup_fd(-1) == theirs.fileno()
        assert other.recv(2) == bytes([signal.SIGTERM])
        signal.raise_signal(signal.SIGTERM)
        assert stop.count == 2
        assert signal.set_wakeup_fd(ours) == ours, "the ear has its descriptor back"
        signal.raise_signal(signal.SIGTERM)
        until(lambda: stop.count == 3)
