"""A worker runs jobs and sees how they end, whatever its process has inherited or its app set."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest

from tests.support import code_app, commands, constants
from tests.support.commands import Command, Commands
from tests.support.wait import until
from tests.support.worker_views import alive, charges, row, status, stopped

pytestmark = pytest.mark.usefixtures("code_tasks")

WORKER = ("queue-claim-worker", "--queue", code_app.QUEUE, "--app", "tests.support.code_app:setup")
DIES = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
WAITS = "import pathlib, time\nwhile not pathlib.Path({path!r}).exists(): time.sleep(0.01)"
PARENT = "import os; found = os.getppid()"


def waits(path: Path) -> str:
    return WAITS.format(path=str(path))


def runs_and_sees_a_death(running: Command) -> None:
    """A job runs, the death of another is charged, and SIGTERM stops the worker."""
    dead = code_app.enqueued(DIES)
    until(lambda: status(dead, "failed"))
    assert charges(dead) == (1, 0, 1)
    assert "killed by SIGKILL" in row(dead)["error"]
    failing = code_app.enqueued("import subprocess; found = subprocess.run(['false']).returncode")
    until(lambda: status(failing, "completed"))
    assert code_app.found(row(failing)) == 1
    stopped(running)


ONE_CRASH = constants.env({"claim.recovery.MAX_CRASHES": 1})
INHERITED = {
    "SIGCHLD ignored": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "SIGTERM and SIGINT ignored": "[signal.signal(each, signal.SIG_IGN) for each in (2, 15)]",
    "all blocked": "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
    "stdin and stdout closed": "os.closerange(0, 2)",
    "all closed": "os.closerange(0, 3)",
    "a subreaper": "ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)",
}
EXECUTES = "import ctypes, os, signal, sys; {}; os.execvp(sys.argv[1], sys.argv[1:])"
"""A shell cannot do most of it, and `subprocess` resets some."""


@pytest.mark.parametrize("what", INHERITED)
@pytest.mark.parametrize("more", [(), ("--supervise",)], ids=["alone", "supervised"])
def test_a_worker_runs_with_what_it_has_inherited(
    cli: Commands, tmp_path: Path, what: str, more: tuple[str, ...]
) -> None:
    cli.env |= ONE_CRASH
    runs_and_sees_a_death(cli.start(*executed(EXECUTES.format(INHERITED[what])), *more))


def executed(code: str) -> tuple[str, ...]:
    """Return the command of a worker that a process with this code becomes."""
    return "python", "-c", code, commands.script(WORKER[0]), *WORKER[1:]


AT_IMPORT = {
    "SIGCHLD ignored": "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "a handler that reaps": (
        "import os, signal\n"
        "def reap(*_):\n"
        "    try:\n"
        "        while os.waitpid(-1, os.WNOHANG)[0]: pass\n"
        "    except ChildProcessError: pass\n"
        "signal.signal(signal.SIGCHLD, reap)"
    ),
    "a thread that reaps": (
        "import os, threading, time\n"
        "def reap():\n"
        "    while True:\n"
        "        try: os.wait()\n"
        "        except ChildProcessError: time.sleep(0.01)\n"
        "threading.Thread(target=reap, daemon=True).start()"
    ),
    "a forked child that returns": "import os; os.fork()",
    "a child of libc that returns": "import ctypes; ctypes.CDLL(None).fork()",
    "a child of libc that raises": "import ctypes; 1 / ctypes.CDLL(None).fork()",
    "a thread, and a child of libc": (
        "import ctypes, threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "ctypes.CDLL(None).fork()"
    ),
}
"""Each executor loads an app itself that starts a thread."""


@pytest.mark.parametrize("more", [(), ("--async",)], ids=["slots", "async"])
@pytest.mark.parametrize("what", AT_IMPORT)
def test_a_worker_sees_deaths_whatever_its_app_does_at_import(
    cli: Commands, what: str, more: tuple[str, ...]
) -> None:
    cli.env |= {**ONE_CRASH, code_app.AT_IMPORT: AT_IMPORT[what]}
    running = cli.start(*WORKER, "--slots", "2", *more)
    done = [code_app.enqueued("found = 1", in_loop=bool(each % 2)) for each in range(10)]
    for each in done:
        until(lambda each=each: status(each, "completed"))
        assert charges(each) == (1, 0, 0)
    dead = code_app.enqueued(DIES)
    until(lambda: status(dead, "failed"))
    assert charges(dead) == (1, 0, 1)
    stopped(running)


def test_handlers_get_the_app_s_own_handler_of_sigchld(cli: Commands) -> None:
    cli.env[code_app.AT_IMPORT] = (
        "import builtins, signal\n"
        "builtins.ended = []\n"
        "signal.signal(signal.SIGCHLD, lambda *_: builtins.ended.append(1))"
    )
    running = cli.start(*WORKER)
    job_id = code_app.enqueued(
        "import builtins, subprocess; subprocess.run(['true']); found = builtins.ended"
    )
    until(lambda: status(job_id, "completed"))
    assert code_app.found(row(job_id)) == [1]
    stopped(running)


def test_a_launcher_that_adopts_orphans_reaps_them(cli: Commands) -> None:
    cli.env[code_app.AT_IMPORT] = "import ctypes; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)"
    running = cli.start(*WORKER)
    orphans = code_app.enqueued(
        "import os, subprocess\n"
        "for _ in range(20): subprocess.run(['sh', '-c', 'true & exit'])\n"
        "found = os.getppid()"
    )
    until(lambda: status(orphans, "completed"))
    launcher = code_app.found(row(orphans))
    dead = code_app.enqueued(DIES, max_attempts=1)
    until(lambda: charges(dead)[2] > 0)
    until(lambda: not zombies_of(launcher))
    stopped(running)


def zombies_of(parent: int) -> list[int]:
    """Return the children of a process that nobody has reaped."""
    return [pid for pid in children(parent) if not alive(pid)]


def children(parent: int) -> list[int]:
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat.parent.name))
        except OSError:
            continue
    return found


REFUSES_FORKS = """
import mmap, os, pathlib
real = {call}
def call(*given):
    path = pathlib.Path({path!r})
    if path.exists():
        raise OSError({number}, os.strerror({number}))
    return real(*given)
{call} = call
"""


@pytest.mark.parametrize(
    ("call", "name"), [("os.fork", "EAGAIN"), ("os.fork", "ENOMEM"), ("mmap.mmap", "ENOMEM")]
)
def test_a_fork_that_is_refused_for_a_while_cuts_no_job_and_is_tried_again(
    cli: Commands, tmp_path: Path, call: str, name: str
) -> None:
    refused, go = tmp_path / "refused", tmp_path / "go"
    number = getattr(errno, name)
    cli.env[code_app.AT_IMPORT] = REFUSES_FORKS.format(call=call, path=str(refused), number=number)
    running = cli.start(*WORKER, "--slots", "2")
    neighbour = code_app.enqueued(waits(go))
    until(lambda: status(neighbour, "running"))
    launcher = code_app.enqueued(PARENT)
    until(lambda: status(launcher, "completed"))
    refused.touch()
    dead = code_app.enqueued("import os; os._exit(3)")
    until(lambda: charges(dead)[2] > 0)
    until(lambda: "can be forked" in running.err)
    late = code_app.enqueued(PARENT)
    assert alive(code_app.found(row(launcher)))
    refused.unlink()
    until(lambda: status(late, "completed"))
    assert code_app.found(row(late)) == code_app.found(row(launcher))
    assert charges(late)[1:] == (0, 0)
    go.touch()
    until(lambda: status(neighbour, "completed"))
    assert charges(neighbour) == (1, 0, 0)
    stopped(running)


LOADS_FOR_EVER = """
import pathlib, threading, time
threading.Thread(target=threading.Event().wait, daemon=True).start()
path = pathlib.Path({path!r})
while path.exists():
    time.sleep(0.01)
path.touch()
"""
"""With its thread each executor loads the app for itself, and not before the file is gone."""


@pytest.mark.parametrize("more", [(), ("--async",)], ids=["alone", "async"])
def test_a_job_whose_executor_does_not_load_the_app_fails_at_its_time_limit(
    cli: Commands, tmp_path: Path, more: tuple[str, ...]
) -> None:
    path = tmp_path / "loaded"
    cli.env[code_app.AT_IMPORT] = LOADS_FOR_EVER.format(path=str(path))
    running = cli.start(*WORKER, "--slots", "1", *more)
    late = code_app.enqueued("found = 1", timeout_s=0.5)
    until(lambda: status(late, "failed"))
    assert "ran longer than its budget" in row(late)["error"]
    path.unlink()
    after = code_app.enqueued("found = 1", timeout_s=60)
    until(lambda: status(after, "completed"))
    assert charges(after) == (1, 0, 0)
    stopped(running)


REFUSES_THREADS = """
import pathlib, threading
real = threading.Thread.start
def start(self):
    if pathlib.Path({path!r}).exists():
        raise RuntimeError("can't start new thread")
    return real(self)
threading.Thread.start = start
"""


@pytest.mark.parametrize("more", [(), ("--slots", "2", "--async")], ids=["alone", "async"])
def test_an_executor_that_cannot_start_a_thread_costs_its_job_nothing(
    cli: Commands, tmp_path: Path, more: tuple[str, ...]
) -> None:
    refused = tmp_path / "refused"
    cli.env[code_app.AT_IMPORT] = REFUSES_THREADS.format(path=str(refused))
    cli.env |= ONE_CRASH
    running = cli.start(*WORKER, *more)
    first = code_app.enqueued(PARENT)
    until(lambda: status(first, "completed"))
    refused.touch()
    dead = code_app.enqueued("import os; os._exit(3)")
    until(lambda: charges(dead)[2] > 0)
    late = code_app.enqueued(PARENT)
    until(lambda: "can't start new thread" in running.err)
    until(lambda: status(late, "queued"))
    refused.unlink()
    until(lambda: status(late, "completed"))
    assert charges(late)[1:] == (0, 0)
    assert code_app.found(row(late)) == code_app.found(row(first))
    stopped(running)


def test_a_job_waits_while_its_executor_cannot_start_a_thread_for_it(
    cli: Commands, tmp_path: Path
) -> None:
    refused, go = tmp_path / "refused", tmp_path / "go"
    cli.env[code_app.AT_IMPORT] = REFUSES_THREADS.format(path=str(refused))
    running = cli.start(*WORKER, "--slots", "2", "--async")
    begins = f"import asyncio, os, pathlib; pathlib.Path({str(tmp_path / 'begun')!r}).touch()"
    waiting = f"{begins}\nwhile not os.path.exists({str(go)!r}): await asyncio.sleep(0.01)"
    neighbour = code_app.enqueued(waiting, in_loop=True)
    until((tmp_path / "begun").exists)
    refused.touch()
    late = code_app.enqueued("found = 1")
    until(lambda: row(late)["claim_no"] > 1)
    refused.unlink()
    until(lambda: status(late, "completed"))
    assert charges(late)[1:] == (0, 0)
    go.touch()
    until(lambda: status(neighbour, "completed"))
    assert charges(neighbour) == (1, 0, 0)
    stopped(running)


@pytest.mark.parametrize("who", ["worker", "launcher"])
def test_without_descriptors_no_executor_starts_and_no_job_is_charged(
    cli: Commands, tmp_path: Path, who: str
) -> None:
    go = tmp_path / "go"
    running = cli.start(*WORKER, "--slots", "2")
    neighbour, parent = code_app.enqueued(waits(go)), code_app.enqueued(PARENT)
    until(lambda: status(neighbour, "running") and status(parent, "completed"))
    launcher = code_app.found(row(parent))
    pid = launcher if who == "launcher" else running.process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = {int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()}
    free = min({*range(len(used) + 1)} - used)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, hard))
    dead = code_app.enqueued("import os; os._exit(3)", max_attempts=1)
    until(lambda: charges(dead)[2] > 0)
    until(lambda: "can be forked" in running.err)
    assert alive(launcher)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    late = code_app.enqueued(PARENT)
    until(lambda: status(late, "completed"))
    assert code_app.found(row(late)) == launcher
    assert charges(late)[1:] == (0, 0)
    go.touch()
    until(lambda: status(neighbour, "completed"))
    assert charges(neighbour) == (1, 0, 0)
    stopped(running)


IS_TRACED = """
import ctypes, os, pathlib, time
ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_long(-1), 0, 0, 0)  # anybody may, under Yama too
pathlib.Path({path!r}).write_text(str(os.getpid()))
time.sleep(3600)
"""
ATTACHES = """
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
found = libc.ptrace(0x4206, {pid}, None, None)  # PTRACE_SEIZE
open({path!r}, "w").close()
time.sleep(3600)
"""


def test_the_time_limit_of_a_job_that_is_traced_by_another_is_recorded(
    cli: Commands, tmp_path: Path
) -> None:
    """Its status is the tracer's to read first, and the launcher must not wait for that."""
    seized = tmp_path / "seized"
    running = cli.start(*WORKER, "--slots", "2")
    pid_at = tmp_path / "pid"
    traced = code_app.enqueued(IS_TRACED.format(path=str(pid_at)), timeout_s=4, max_attempts=1)
    until(lambda: pid_at.exists() and pid_at.read_text())
    tracer = code_app.enqueued(ATTACHES.format(pid=pid_at.read_text(), path=str(seized)))
    until(seized.exists)
    pid = int(pid_at.read_text())
    assert "TracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text()
    until(lambda: status(traced, "failed"))
    assert charges(traced)[2] == 0
    assert not alive(pid)
    launcher = next(each for each in children(running.process.pid))
    before = cpu_s(launcher)
    done = [code_app.enqueued("found = 1") for _ in range(3)]
    for each in done:
        until(lambda each=each: status(each, "completed"))
    assert cpu_s(launcher) - before < 1.0
    assert status(tracer, "running")
    stopped(running)


def cpu_s(pid: int) -> float:
    """Return the seconds of CPU that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


FORKS = {
    "fork of libc": "pid = __import__('ctypes').CDLL(None).fork()",
    "os.fork": "pid = __import__('os').fork()",
}
ENDS = {
    "returns": "found = pid",
    "raises": "1 / pid",
    "exits": "import sys; sys.exit() if not pid else None; found = pid",
    "asks": "import queue_workflows as q; q.current_job().report(0.5); found = pid",
}


@pytest.mark.parametrize("fork", FORKS)
@pytest.mark.parametrize("ends", ENDS)
def test_a_child_that_a_handler_forks_and_lets_go_on_disturbs_no_job(
    cli: Commands, fork: str, ends: str
) -> None:
    code = f"{FORKS[fork]}\n{ENDS[ends]}"
    ids = [code_app.enqueued(code) for _ in range(3)]
    running = cli.start(*WORKER)
    ids += [code_app.enqueued("found = 1") for _ in range(20)]
    until(lambda: all(status(each, "completed") for each in ids))
    assert {charges(each) for each in ids} == {(1, 0, 0)}
    assert len({row(each)["result"]["pid"] for each in ids}) == 1
    if ends != "raises":
        until(lambda: not any(alive(code_app.found(row(each))) for each in ids[:3]))
    stopped(running)


@pytest.mark.parametrize("fork", FORKS)
def test_a_child_of_an_async_handler_does_not_serve_the_event_loop_of_its_parent(
    cli: Commands, tmp_path: Path, fork: str
) -> None:
    """Each other handler goes on in one process alone."""
    go, seen = tmp_path / "go", tmp_path / "seen"
    neighbour = code_app.enqueued(
        "import asyncio, os, pathlib\n"
        f"while not pathlib.Path({str(go)!r}).exists():\n"
        "    await asyncio.sleep(0.01)\n"
        f"with open({str(seen)!r}, 'a') as out: print(os.getpid(), file=out)",
        in_loop=True,
    )
    running = cli.start(*WORKER, "--slots", "4", "--async")
    until(lambda: status(neighbour, "running"))
    code = f"import asyncio\n{FORKS[fork]}\nawait asyncio.sleep(0 if pid else 3600)\nfound = pid"
    forking = code_app.enqueued(code, in_loop=True)
    until(lambda: status(forking, "completed"))
    go.touch()
    until(lambda: status(neighbour, "completed"))
    until(lambda: not alive(code_app.found(row(forking))))
    assert seen.read_text().split() == [str(row(neighbour)["result"]["pid"])]
    assert charges(neighbour) == charges(forking) == (1, 0, 0)
    stopped(running)


LEAVES_ORPHANS = """
import subprocess
for _ in range({count}):
    subprocess.run(["sh", "-c", "sleep 0.2 & exit"], check=True)
"""


@pytest.mark.parametrize("more", [(), ("--supervise",)], ids=["alone", "supervised"])
def test_process_1_of_a_container_keeps_no_zombies_and_passes_signals_on(
    cli: Commands, more: tuple[str, ...]
) -> None:
    unshare = shutil.which("unshare")
    assert unshare is not None
    alone = ("--pid", "--fork", "--mount-proc")
    mapped = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    worker = commands.script(WORKER[0]), *WORKER[1:], *more
    running = cli.start(unshare, *mapped, *alone, *worker)
    job_id = code_app.enqueued(LEAVES_ORPHANS.format(count=200))
    until(lambda: status(job_id, "completed"))
    (init,) = children(running.process.pid)
    until(lambda: not zombies_of(init))
    os.kill(init, signal.SIGTERM)
    assert running.wait() == 0, running.err
