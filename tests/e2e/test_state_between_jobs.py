"""Between two jobs an executor is as before the first; what cannot be undone ends it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support import code_app
from tests.support.commands import Command, Commands
from tests.support.wait import until
from tests.support.worker_views import charges, row, status, stopped

pytestmark = pytest.mark.usefixtures("code_tasks")


def worker(cli: Commands, *more: str) -> Command:
    options = ("--queue", code_app.QUEUE, "--app", "tests.support.code_app:setup")
    return cli.start("queue-claim-worker", *options, *more)


LEFT = {
    "stdout": ("import io, sys; sys.stdout = io.StringIO()", "import sys; found = sys.stdout.name"),
    "no stdin": ("import sys; sys.stdin = None", "import sys; found = sys.stdin is None"),
    "a file as stdout": (
        "import os; os.dup2(os.open('/dev/null', os.O_WRONLY), 1)",
        # Each job has a pipe of its own.
        "import os; found = os.readlink('/proc/self/fd/1').partition('[')[0]",
    ),
    "no stderr": (
        "import os; os.close(2)",
        "import os; found = os.path.exists('/proc/self/fd/2')",
    ),
    "a context variable": (
        "from tests.support import code_app; code_app.variable.set('set')",
        "from tests.support import code_app; found = code_app.variable.get()",
    ),
    "precision": (
        "import decimal; decimal.getcontext().prec = 3",
        "import decimal; found = decimal.getcontext().prec",
    ),
    "no event loop": (
        "import asyncio; asyncio.run(asyncio.sleep(0))",
        "import asyncio, warnings; warnings.simplefilter('ignore')\n"
        "try: asyncio.get_event_loop().close(); found = True\n"
        "except RuntimeError: found = False",
    ),
    "a limit": (
        "import resource as r\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (950, r.getrlimit(r.RLIMIT_NOFILE)[1]))",
        "import resource as r; found = r.getrlimit(r.RLIMIT_NOFILE)",
    ),
    "umask": ("import os; os.umask(0o77)", "import os; os.umask(found := os.umask(0))"),
    "folder": ("import os; os.chdir('/')", "import os; found = os.getcwd()"),
    "a variable": (
        "import os; os.environ['LEFT'] = 'x'",
        "import os; found = os.environ.get('LEFT')",
    ),
    "a time zone": (
        "import os, time; os.environ['TZ'] = 'LEFT-9'; time.tzset()",
        "import time; found = time.tzname",
    ),
    "no variables": (
        "import os; os.environ = {}",
        "import os; found = os.environ.get('PATH'), os.getenv('PATH')",
    ),
    "import path": ("import sys; sys.path.insert(0, '/left')", "import sys; found = sys.path"),
    "locale": (
        "import locale; locale.setlocale(locale.LC_ALL, 'C')",
        "import locale; found = locale.setlocale(locale.LC_ALL)",
    ),
    "a handler": (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_DFL)",
        "import signal; found = str(signal.getsignal(signal.SIGTERM)).split(' at ')[0]",
    ),
    "a timer": (
        "import signal; signal.setitimer(signal.ITIMER_PROF, 3600)",
        "import signal; found = signal.getitimer(signal.ITIMER_PROF)[0] > 0",
    ),
    "a blocked signal": (
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])",
        "import signal; found = signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, [])",
    ),
    "no collection": ("import gc; gc.disable()", "import gc; found = gc.isenabled()"),
    "rare collections": ("import gc; gc.set_threshold(0)", "import gc; found = gc.get_threshold()"),
    "long turns": (
        "import sys; sys.setswitchinterval(10.0)",
        "import sys; found = sys.getswitchinterval()",
    ),
    "small stacks": (
        "import threading; threading.stack_size(32 * 1024)",
        "import threading; found = threading.stack_size()",
    ),
    "any number of digits": (
        "import sys; sys.set_int_max_str_digits(0)",
        "import sys; found = sys.get_int_max_str_digits()",
    ),
    "recursion": (
        "import sys; sys.setrecursionlimit(200)",
        "import sys; found = sys.getrecursionlimit()",
    ),
    "CPUs": (
        "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])",
        "import os; found = sorted(os.sched_getaffinity(0))",
    ),
    "a trace function": (
        "import sys; sys.settrace(lambda *_: None)",
        "import sys; found = repr(sys.gettrace())",
    ),
    "a profiler": (
        "import sys; sys.setprofile(lambda *_: None)",
        "import sys; found = repr(sys.getprofile())",
    ),
    "hooks for errors": (
        "import sys, threading\nsys.excepthook = sys.unraisablehook = threading.excepthook = print",
        "import sys, threading\n"
        "hooks = sys.excepthook, sys.unraisablehook, threading.excepthook\n"
        "found = [each is print for each in hooks]",
    ),
    "a descriptor that signals wake": (
        "import os, signal; end = os.pipe()[1]; os.set_blocking(end, False)\n"
        "signal.set_wakeup_fd(end)",
        "import signal; found = signal.set_wakeup_fd(-1)",
    ),
    "a time limit": (
        "import socket; socket.setdefaulttimeout(0.001)",
        "import socket; found = socket.getdefaulttimeout()",
    ),
}
"""Code that leaves a state behind, and code that finds it."""


def test_a_job_finds_nothing_that_the_one_before_has_left(cli: Commands) -> None:
    """All in one worker, each with a look before and after."""
    looked: dict[str, list[str]] = {}
    for name, (leaves, looks) in LEFT.items():
        looked[name] = [code_app.enqueued(each) for each in (looks, leaves, looks)]
    running = worker(cli)
    for name, ids in looked.items():
        for each in ids:
            until(lambda each=each: status(each, "completed"))
            assert charges(each) == (1, 0, 0), name
        before, left, after = (row(each)["result"] for each in ids)
        assert before["found"] == after["found"], name
        assert before["pid"] == left["pid"] == after["pid"], name
    stopped(running)


SETS_LOOP = """
import asyncio
loop = asyncio.get_running_loop()
loop.set_debug(True)
loop.slow_callback_duration = 9.0
loop.set_exception_handler(print)
loop.set_task_factory(lambda loop, handler, **more: asyncio.Task(handler, loop=loop, **more))
"""
SEES_LOOP = """
import asyncio
loop = asyncio.get_running_loop()
factory = loop.get_task_factory()
found = [loop.get_debug(), loop.slow_callback_duration, str(loop.get_exception_handler()),
         getattr(factory, "__qualname__", None)]
"""


@pytest.mark.parametrize("more", [(), ("--slots", "2", "--async")], ids=["alone", "async"])
def test_a_handler_finds_the_event_loop_as_it_was(cli: Commands, more: tuple[str, ...]) -> None:
    running = worker(cli, *more)
    found: list[Any] = []
    for code in (SEES_LOOP, SETS_LOOP, SEES_LOOP):
        job_id = code_app.enqueued(code, in_loop=True)
        until(lambda job_id=job_id: status(job_id, "completed"))
        found.append((code_app.found(row(job_id)), row(job_id)["result"]["pid"]))
    assert found[0] == found[2]
    stopped(running)


CLOSES_STDOUT = "import sys; sys.stdout.close()"


@pytest.mark.parametrize("more", [(), ("--slots", "2", "--async")], ids=["alone", "async"])
def test_an_executor_ends_after_a_job_whose_state_cannot_be_undone(
    cli: Commands, more: tuple[str, ...]
) -> None:
    ids = [code_app.enqueued(each) for each in (CLOSES_STDOUT, *["found = 1"] * 20)]
    running = worker(cli, *more)
    until(lambda: all(status(each, "completed") for each in ids))
    pids = {row(each)["result"]["pid"] for each in ids[1:]}
    assert more or row(ids[0])["result"]["pid"] not in pids
    for each in ids:
        assert charges(each)[1:] == (0, 0)
    assert "its executor ends" in running.err
    stopped(running)


STARTS_TASK = """
import asyncio, builtins
async def counts():
    while True:
        builtins.counted = getattr(builtins, "counted", 0) + 1
        await asyncio.sleep(0.001)
builtins.kept = asyncio.create_task(counts())
await asyncio.sleep(0.01)
"""
SEES_TASK = """
import asyncio, builtins
before = builtins.counted
await asyncio.sleep(0.05)
found = builtins.counted - before, builtins.kept.cancelled()
"""
STUBBORN_TASK = """
import asyncio, builtins
async def stays():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass
builtins.kept = asyncio.create_task(stays())
await asyncio.sleep(0)
"""


@pytest.mark.parametrize("more", [(), ("--slots", "2", "--async")], ids=["alone", "async"])
def test_a_task_that_a_handler_has_started_ends_with_the_handler(
    cli: Commands, more: tuple[str, ...]
) -> None:
    first = code_app.enqueued(STARTS_TASK, in_loop=True)
    running = worker(cli, *more)
    until(lambda: status(first, "completed"))
    second = code_app.enqueued(SEES_TASK, in_loop=True)
    until(lambda: status(second, "completed"))
    assert code_app.found(row(second)) == [0, True]
    assert row(first)["result"]["pid"] == row(second)["result"]["pid"]
    stopped(running)


@pytest.mark.parametrize("more", [(), ("--slots", "2", "--async")], ids=["alone", "async"])
def test_an_executor_ends_after_a_task_that_does_not_end(
    cli: Commands, more: tuple[str, ...]
) -> None:
    first = code_app.enqueued(STUBBORN_TASK, in_loop=True)
    running = worker(cli, *more)
    until(lambda: status(first, "completed"))
    until(lambda: not Path(f"/proc/{row(first)['result']['pid']}").exists())
    second = code_app.enqueued("found = 2", in_loop=True)
    until(lambda: status(second, "completed"))
    assert charges(second)[1:] == (0, 0)
    stopped(running)


FAILS_WITH_LOCALS = """
import gc
gc.disable()
class Large: pass
async def fails():
    import builtins, weakref
    large = Large()
    builtins.left = weakref.ref(large)
    try:
        {}["missing"]
    except KeyError as error:
        kept = error
        raise ValueError("as it was asked to") from error
await fails()
"""


@pytest.mark.parametrize("more", [(), ("--slots", "2", "--async")], ids=["alone", "async"])
def test_the_variables_of_a_failed_async_handler_are_freed_at_once(
    cli: Commands, more: tuple[str, ...]
) -> None:
    first = code_app.enqueued(FAILS_WITH_LOCALS, in_loop=True, max_attempts=1)
    running = worker(cli, *more)
    until(lambda: status(first, "failed"))
    assert "as it was asked to" in row(first)["error"]
    second = code_app.enqueued("import builtins; found = builtins.left() is None", in_loop=True)
    until(lambda: status(second, "completed"))
    assert code_app.found(row(second)) is True
    stopped(running)


ENDS_LATER = """
import atexit, pathlib, threading, time
def writes():
    time.sleep(5.5)
    pathlib.Path({folder!r}, "thread").touch()
threading.Thread(target=writes).start()
atexit.register(lambda: pathlib.Path({folder!r}, "atexit").touch())
"""


@pytest.mark.parametrize("more", [(), ("--slots", "2", "--async")], ids=["alone", "async"])
def test_threads_and_exit_functions_of_handlers_run_to_their_end_as_the_worker_stops(
    cli: Commands, tmp_path: Path, more: tuple[str, ...]
) -> None:
    """The thread takes longer than a worker that is idle needs to leave."""
    job_id = code_app.enqueued(ENDS_LATER.format(folder=str(tmp_path)))
    running = worker(cli, *more)
    until(lambda: status(job_id, "completed"))
    stopped(running)
    assert sorted(os.listdir(tmp_path)) == ["atexit", "thread"]  # noqa: PTH208  names are enough


def test_a_thread_that_does_not_end_holds_a_worker_up_for_the_shutdown_timeout_alone(
    cli: Commands,
) -> None:
    code = "import threading; threading.Thread(target=threading.Event().wait).start()"
    job_id = code_app.enqueued(code)
    running = worker(cli, "--shutdown-timeout", "2")
    until(lambda: status(job_id, "completed"))
    stopped(running)
