"""Death timers with an exit code end real processes on time whatever their Python code does."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from queue_workflows.runtime import clock, kernel
from tests.support.wait import until

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(kernel.ctypes.PyDLL(None), "gnu_get_libc_version"),
    reason="timers that call a function are glibc's",
)

ON_TIME_S = 0.5
"""How much later than its time the process may be gone."""
PRELUDE = """
import ctypes, gc, logging, os, resource, threading, time, warnings
from pathlib import Path
from queue_workflows.runtime import clock, kernel

keep_gil = ctypes.PyDLL(None).sleep

def say_start():
    print(clock.boot_s(), flush=True)

def timers():
    return Path("/proc/self/timers").read_text().split().count("ID:")

def code_of(child):
    warnings.simplefilter("ignore")  # Python 3.12 warns of a fork beside threads
    pid = os.fork()
    if pid == 0:
        try:
            child()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def unreachable():
    keep_gil(15)
    os._exit(98)

def arm(timer, seconds):
    timer.set(clock.boot_s() + seconds)

timer75 = kernel.DeathTimer(75)
"""


class Ended(NamedTuple):
    """How a script ended, and how many seconds after its `say_start()`."""

    code: int
    after_s: float
    lines: list[str]
    err: str


@contextmanager
def started(script: str) -> Generator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(script)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def ended(script: str) -> Ended:
    with started(script) as process:
        out, err = process.communicate(timeout=30)
        end_s = clock.boot_s()
        start, *lines = out.splitlines() or ["nan"]
        return Ended(process.returncode, end_s - float(start), lines, err)


def assert_left(end: Ended, code: int, after_s: float) -> None:
    assert (end.code, end.err) == (code, "")
    assert after_s <= end.after_s <= after_s + ON_TIME_S


def test_it_exits_on_time_while_a_c_call_keeps_the_gil() -> None:
    end = ended("""
        def python_exit():
            time.sleep(0.3)
            os._exit(99)
        threading.Thread(target=python_exit, daemon=True).start()
        say_start()
        arm(timer75, 0.9)
        unreachable()
    """)
    assert_left(end, 75, 0.9)


def test_the_one_due_first_gives_the_code() -> None:
    end = ended("""
        timer77 = kernel.DeathTimer(77)
        say_start()
        arm(timer75, 60)
        arm(timer77, 0.4)
        unreachable()
    """)
    assert_left(end, 77, 0.4)


def test_arming_it_again_postpones_it() -> None:
    end = ended("""
        arm(timer75, 0.3)
        say_start()
        arm(timer75, 0.8)
        unreachable()
    """)
    assert_left(end, 75, 0.8)


@pytest.mark.parametrize("seconds", [0, -1])
def test_a_time_that_is_past_is_now(seconds: float) -> None:
    assert_left(ended(f"say_start(); arm(timer75, {seconds}); unreachable()"), 75, 0.0)


@pytest.mark.parametrize("stop", ["timer75.set(None)", "timer75.close()"])
def test_one_that_is_stopped_does_not_fire(stop: str) -> None:
    end = ended(f"arm(timer75, 0.2); {stop}; say_start(); keep_gil(1); os._exit(3)")
    assert (end.code, end.err) == (3, "")


def test_a_disarmed_one_can_be_armed_again() -> None:
    end = ended("""
        timer75.set(None)
        arm(timer75, 0.2)
        timer75.set(None)
        timer75.set(None)
        say_start()
        arm(timer75, 0.4)
        unreachable()
    """)
    assert_left(end, 75, 0.4)


def test_a_thread_that_is_gone_may_have_armed_it() -> None:
    end = ended("""
        say_start()
        thread = threading.Thread(target=arm, args=(timer75, 0.5))
        thread.start()
        thread.join()
        unreachable()
    """)
    assert_left(end, 75, 0.5)


def test_a_stopped_process_leaves_when_it_goes_on() -> None:
    with started("say_start(); arm(timer75, 0.4); unreachable()") as process:
        assert process.stdout
        start_s = float(process.stdout.readline())
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: clock.boot_s() > start_s + 0.8)
        assert process.poll() is None
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait(timeout=ON_TIME_S) == 75


def test_an_interpreter_that_hangs_at_its_exit_leaves_too() -> None:
    end = ended("""
        import atexit
        atexit.register(unreachable)
        say_start()
        arm(timer75, 0.4)
    """)
    assert_left(end, 75, 0.4)


def test_a_forked_child_has_its_own_timer_or_none() -> None:
    end = ended("""
        def outlive():
            print(timers(), flush=True)
            time.sleep(0.6)
            os._exit(5)

        def leave():
            arm(kernel.DeathTimer(76), 0.2)  # has the number here that the parent's has there
            unreachable()

        print(0, flush=True)
        arm(timer75, 60)
        print([code_of(child) for child in (outlive, leave)], timers(), flush=True)
        arm(timer75, 0.2)
        unreachable()
    """)
    assert (end.code, end.lines, end.err) == (75, ["0", "[5, 76] 1"], "")


def test_it_fires_as_soon_as_there_is_memory_for_its_thread() -> None:
    end = ended("""
        no_limit = resource.getrlimit(resource.RLIMIT_AS)
        say_start()
        arm(timer75, 0.2)
        resource.setrlimit(resource.RLIMIT_AS, (1 << 20, no_limit[1]))
        time.sleep(0.7)
        resource.setrlimit(resource.RLIMIT_AS, no_limit)
        unreachable()
    """)
    assert_left(end, 75, 0.7)


def test_no_timer_is_left_over_and_the_clock_counts_suspend() -> None:
    end = ended("""
        print(0, flush=True)
        arm(timer75, 60)
        arm(timer75, 60)
        print(timers(), "ClockID: 7" in Path("/proc/self/timers").read_text())
        for _ in range(20):
            closed = kernel.DeathTimer(76)
            arm(closed, 60)
            closed.close()
            closed.close()
        print(timers())
        timer75.close()
        print(timers())
    """)
    assert (end.code, end.lines, end.err) == (0, ["1 True", "1", "0"], "")


def test_it_heals_when_the_kernel_has_timers_again() -> None:
    end = ended("""
        limit = resource.getrlimit(resource.RLIMIT_SIGPENDING)
        resource.setrlimit(resource.RLIMIT_SIGPENDING, (0, limit[1]))
        logging.basicConfig(format="%(levelname)s")
        arm(timer75, 0)
        timer75.set(None)
        print(0, flush=True)
        arm(kernel.DeathTimer(77), 0)
        print(timers(), flush=True)
        resource.setrlimit(resource.RLIMIT_SIGPENDING, limit)
        arm(timer75, 0)
        unreachable()
    """)
    assert (end.code, end.lines, end.err) == (75, ["0"], "WARNING\n")


def test_without_glibc_no_timer_is_armed_and_one_line_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel, "_libc", lambda: None)
    kernel._warn_unavailable.cache_clear()
    with caplog.at_level(logging.INFO):
        for code in (75, 77):
            unavailable = kernel.DeathTimer(code)
            unavailable.set(clock.boot_s())
            unavailable.set(None)
            unavailable.close()
    kernel._warn_unavailable.cache_clear()
    assert [(record.levelname, "not glibc" in record.message) for record in caplog.records] == [
        ("WARNING", True)
    ]
