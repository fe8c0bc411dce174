"""Real children and signals: the supervisor restarts what exits and stops what must end."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path

import pytest

from queue_workflows.runtime import service, signals, supervisor
from tests.support import constants
from tests.support.wait import patience, until

SLEEP = ["sleep", "600"]
STUBBORN = "trap '' TERM; echo up >> up; while :; do sleep 0.05; done"
POLITE = "trap 'echo term >> log; exit 0' TERM; echo up >> up; while :; do sleep 0.05; done"


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def python(code: str) -> list[str]:
    return [sys.executable, "-ISc", code]


def is_gone(pid: int) -> bool:
    """Whether nothing runs under this pid any more; a zombie does not run."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def is_its_command(pid: int) -> bool:
    """Whether the child is past the wrapper; while it becomes another image there is no line."""
    line = Path(f"/proc/{pid}/cmdline").read_bytes()
    return bool(line) and b"-ISc" not in line


class Bench:
    """A supervisor that runs in a thread of its own, and what it reported."""

    def __init__(self, *specs: supervisor.ChildSpec, **options: object) -> None:
        self.exits: list[supervisor.Exit] = []
        options.setdefault("on_exit", self.exits.append)
        self.supervisor = supervisor.Supervisor(specs, **options)  # type: ignore[arg-type]
        self.stop = signals.StopRequest()
        self.codes: list[int] = []
        self.deadline_s = 5.0
        self.thread = service.Thread("supervisor", self._body)

    def _body(self, _: threading.Event) -> None:
        self.codes.append(self.supervisor.run(self.stop, deadline_s=self.deadline_s))

    def pid(self, name: str = "c") -> int:
        """The pid under which the child runs its command, waiting until it does."""

        def running() -> int | None:
            pid = self.supervisor.children().get(name)
            return pid if pid and is_its_command(pid) else None

        return until(running)

    def end(self) -> int:
        self.stop.request()
        return self.result()

    def result(self) -> int:
        until(lambda: not self.thread.alive)
        return self.codes[0]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Generator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(
        *specs: supervisor.ChildSpec, backoff_max_s: float | None = None, **options: object
    ) -> Bench:
        if backoff_max_s is not None:
            constants.put(monkeypatch, "runtime.supervisor.BACKOFF_MAX_S", backoff_max_s)
        made = Bench(*specs, **options)
        benches.append(made)
        return made

    yield make
    for made in benches:
        while made.thread.alive:
            made.stop.request()
            made.thread.stop(0.2)


def one(argv: Sequence[str], env: Mapping[str, str] | None = None) -> supervisor.ChildSpec:
    return supervisor.ChildSpec("c", argv, env)


def test_a_killed_child_is_reported_at_once_and_comes_back(bench: Callable[..., Bench]) -> None:
    run = bench(one(SLEEP), supervisor.ChildSpec("other", SLEEP))
    run.thread.start()
    first, other = run.pid(), run.pid("other")
    os.kill(first, signal.SIGKILL)
    until(lambda: run.exits)
    second = until(lambda: (p := run.pid()) != first and p)
    ended = run.exits[0]
    assert (ended.name, ended.pid, ended.code, ended.signal) == ("c", first, None, signal.SIGKILL)
    assert ended.max_rss_mb > 0
    assert 0 < ended.seconds < patience(10)
    assert run.supervisor.children() == {"c": second, "other": other}
    assert len(run.exits) == 1
    assert run.end() == 0
    assert is_gone(second)
    assert is_gone(other)


def test_the_report_precedes_the_restart(bench: Callable[..., Bench], tmp_path: Path) -> None:
    log = tmp_path / "log"

    def on_exit(ended: supervisor.Exit) -> None:
        with log.open("a") as file:
            file.write(f"exit {ended.code}\n")

    script = f"echo start >> {log}; exit 5"
    run = bench(one(shell(script)), on_exit=on_exit)
    run.thread.start()
    until(lambda: log.exists() and len(log.read_text().splitlines()) >= 4)
    assert log.read_text().splitlines()[:4] == ["start", "exit 5"] * 2


def test_an_error_of_the_callback_does_not_end_the_supervision(
    bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[supervisor.Exit] = []

    def on_exit(ended: supervisor.Exit) -> None:
        calls.append(ended)
        raise ValueError("no database")

    run = bench(one(shell("exit 1")), on_exit=on_exit)
    run.thread.start()
    until(lambda: len(calls) >= 2)
    assert run.end() == 0
    assert "ValueError: no database" in caplog.text


def test_the_pauses_between_restarts_grow_to_the_cap(
    bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    starts: list[float] = []

    def spawn(argv: Sequence[str], env: Mapping[str, str] | None) -> supervisor.Child:
        starts.append(time.monotonic())
        return supervisor.Child(argv, env)

    run = bench(one(["true"]), spawn=spawn, backoff_max_s=0.4)
    run.thread.start()
    until(lambda: len(starts) >= 4)
    pauses = [later - earlier for earlier, later in itertools.pairwise(starts)][:3]
    assert all(pause >= least for pause, least in zip(pauses, (0.2, 0.4, 0.4), strict=True))
    announced = [message.rpartition("restart in ")[2] for message in caplog.messages]
    assert [text for text in announced if text.endswith(" s")][:3] == ["0.2 s", "0.4 s", "0.4 s"]


def test_stop_ends_the_polite_by_sigterm_and_restarts_nothing(
    bench: Callable[..., Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = bench(one(shell(POLITE)))
    run.thread.start()
    until(Path("up").exists)
    assert run.end() == 0
    assert [(e.code, e.signal) for e in run.exits] == [(0, None)]
    assert Path("log").read_text() == "term\n"
    assert Path("up").read_text() == "up\n"
    assert run.supervisor.children() == {}


def test_what_ignores_sigterm_is_killed_at_the_deadline(
    bench: Callable[..., Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = bench(one(shell(STUBBORN)), supervisor.ChildSpec("polite", shell(POLITE)))
    run.deadline_s = 0.5
    run.thread.start()
    until(lambda: Path("up").exists() and Path("up").read_text() == "up\nup\n")
    began = time.monotonic()
    assert run.end() == 0
    assert 0.5 <= time.monotonic() - began < patience(4)
    assert {(e.name, e.code, e.signal) for e in run.exits} == {
        ("c", 0, None),
        ("polite", 0, None),
    }
    overdue = {e.name: e.overdue for e in run.exits}
    assert overdue == {"c": "did not stop within 0.5 s", "polite": None}


def test_a_second_request_is_passed_on(
    bench: Callable[..., Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = "trap 'echo t >> log; trap \"exit 7\" TERM' TERM; echo up >> up; "
    script += "while :; do sleep 0.05; done"
    run = bench(one(shell(script)))
    run.deadline_s = 60
    run.thread.start()
    until(Path("up").exists)
    run.stop.request()
    until(Path("log").exists)
    assert run.end() == 0
    assert [e.code for e in run.exits] == [7]


def test_a_stopped_waiting_child_is_not_started(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    constants.put(monkeypatch, "runtime.supervisor.FIRST_DELAY_S", 60.0)
    run = bench(one(["false"]), backoff_max_s=60.0)
    run.thread.start()
    until(lambda: run.exits)
    assert run.end() == 0
    assert len(run.exits) == 1


def test_three_usage_errors_and_it_gives_up(
    bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    run = bench(one(shell("exit 2")))
    run.thread.start()
    assert run.result() == 2
    assert run.supervisor.gave_up == ("c",)
    assert [e.code for e in run.exits] == [2, 2, 2]
    assert "given up after 3 refusals to start" in caplog.text


@pytest.mark.parametrize("fail_fast", [False, True])
def test_one_that_gave_up_ends_the_others_only_with_fail_fast(
    bench: Callable[..., Bench], fail_fast: bool
) -> None:
    run = bench(
        supervisor.ChildSpec("bad", shell("exit 2")),
        supervisor.ChildSpec("good", SLEEP),
        fail_fast=fail_fast,
    )
    run.thread.start()
    good = run.pid("good")
    until(lambda: run.supervisor.gave_up)
    if fail_fast:
        assert run.result() == 2
    else:
        assert run.supervisor.children() == {"good": good}
        assert run.end() == 0
    assert is_gone(good)
    assert run.supervisor.gave_up == ("bad",)


def test_a_command_that_does_not_exist_is_given_up(
    bench: Callable[..., Bench], capfd: pytest.CaptureFixture[str]
) -> None:
    run = bench(one(["/nowhere/at-all"]))
    run.thread.start()
    assert run.result() == 2
    assert "cannot run /nowhere/at-all: No such file or directory" in capfd.readouterr().err


def test_a_child_that_cannot_be_forked_is_tried_again(bench: Callable[..., Bench]) -> None:
    tries: list[int] = []

    def spawn(argv: Sequence[str], env: Mapping[str, str] | None) -> supervisor.Child:
        tries.append(1)
        if len(tries) <= 4:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return supervisor.Child(argv, env)

    run = bench(one(SLEEP), spawn=spawn, backoff_max_s=0.05)
    run.thread.start()
    assert run.pid()
    assert len(tries) == 5
    assert run.exits == []


def test_the_status_of_other_children_is_not_taken(bench: Callable[..., Bench]) -> None:
    run = bench(one(["true"]), backoff_max_s=0.05)
    with subprocess.Popen(["sh", "-c", "exit 9"]) as other:
        run.thread.start()
        until(lambda: len(run.exits) >= 3)
        assert other.wait(30) == 9


def test_a_status_that_another_took_is_an_unknown_end(
    bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    started: list[int] = []

    def spawn(argv: Sequence[str], env: Mapping[str, str] | None) -> supervisor.Child:
        made = supervisor.Child(argv, env)
        if not started:
            os.waitpid(made.pid, 0)
        started.append(made.pid)
        return made

    run = bench(one(["true"]), spawn=spawn)
    run.thread.start()
    until(lambda: run.exits)
    assert run.exits[0][:5] == ("c", started[0], None, None, 0)
    assert "with an unknown status; restart in" in caplog.text
    until(lambda: started[1:])


def test_without_pidfds_it_polls(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    run = bench(one(SLEEP))
    run.thread.start()
    first = run.pid()
    killed_at = time.monotonic()
    os.kill(first, signal.SIGKILL)
    until(lambda: run.exits)
    assert time.monotonic() - killed_at < patience(0.8)
    assert run.end() == 0


def test_it_does_not_wake_while_nothing_happens(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = bench(one(SLEEP))
    reaps: list[float] = []
    reap = run.supervisor._reap
    monkeypatch.setattr(run.supervisor, "_reap", lambda: (reaps.append(0), reap()))
    run.thread.start()
    run.pid()
    threading.Event().wait(0.5)  # the time over which it is watched
    assert len(reaps) <= 2


def test_a_request_is_obeyed_at_once(bench: Callable[..., Bench]) -> None:
    run = bench(one(SLEEP))
    run.thread.start()
    run.pid()
    began = time.monotonic()
    assert run.end() == 0
    assert time.monotonic() - began < patience(signals.RECHECK_S / 2)


def test_the_childs_size_is_its_own_and_not_that_of_the_largest_before_it(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    """It is never below that of this process, which forks it (getrusage(2))."""
    mark = tmp_path / "mark"
    code = (
        f"import os, signal, pathlib; mark = pathlib.Path({str(mark)!r}); size = 1 << 20\n"
        "if not mark.exists(): size *= 800; mark.touch()\n"
        "b = b'x' * size; os.kill(os.getpid(), signal.SIGSEGV)"
    )
    run = bench(one(python(code)))
    run.thread.start()
    until(lambda: run.exits[1:], timeout_s=30)
    large, small = run.exits[:2]
    assert (large.signal, small.signal) == (signal.SIGSEGV, signal.SIGSEGV)
    assert large.max_rss_mb > 800 > small.max_rss_mb


def test_a_child_gets_session_environment_and_default_signals(
    bench: Callable[..., Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEPT", "kept")
    out = tmp_path / "out"
    script = (
        f"echo $KEPT $ADDED $$ > {out}.part; cut -d' ' -f5,6 /proc/$$/stat >> {out}.part;"
        f"readlink /proc/$$/fd/0 >> {out}.part; grep SigIgn /proc/$$/status >> {out}.part;"
        f"mv {out}.part {out}; exec sleep 600"
    )
    run = bench(one(shell(script), {"ADDED": "added"}))
    run.thread.start()
    until(out.exists)
    first, ids, stdin, ignored = out.read_text().splitlines()
    pid = str(run.pid())
    assert first == f"kept added {pid}"
    assert ids == f"{pid} {pid}", "a process group and session of its own"
    assert stdin == "/dev/null"
    mask = int(ignored.split()[1], 16)
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        assert not mask & 1 << (signum - 1)


SUPERVISE = """
import sys
from queue_workflows.runtime import signals, supervisor
kids = supervisor.Supervisor([supervisor.ChildSpec("c", ["sleep", "600"])])
with signals.StopRequest() as stop:
    kids.start()
    print(kids.children()["c"], flush=True)
    sys.exit(kids.run(stop, deadline_s=5))
"""


@contextlib.contextmanager
def supervising() -> Generator[tuple[subprocess.Popen[bytes], int]]:
    """A supervisor in a process of its own, and the pid of its child."""
    command, pipe = [sys.executable, "-c", SUPERVISE], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        try:
            yield parent, pid
        finally:
            parent.kill()
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)


def test_children_die_with_a_killed_supervisor() -> None:
    with supervising() as (parent, pid):
        until(lambda: is_its_command(pid))
        parent.kill()
        until(lambda: is_gone(pid))


def test_children_do_not_read_our_stdin() -> None:
    with supervising() as (_, pid):
        assert Path(f"/proc/{pid}/fd/0").readlink() == Path("/dev/null")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_supervisor_stops_all(signum: signal.Signals) -> None:
    with supervising() as (parent, pid):
        parent.send_signal(signum)
        assert parent.wait(30) == 0
        assert is_gone(pid)


def test_a_child_whose_parent_died_first_does_not_start(tmp_path: Path) -> None:
    """As if the parent had gone between fork and prctl: the parent's pid is another one by then."""
    mark = tmp_path / "ran"
    wrapper = [sys.executable, "-ISc", supervisor._DIE_WITH_PARENT, str(os.getppid())]
    done = subprocess.run([*wrapper, "touch", str(mark)], timeout=20)
    assert done.returncode == -signal.SIGTERM
    assert not mark.exists()


def test_stop_without_run_ends_what_start_started() -> None:
    kids = supervisor.Supervisor([one(SLEEP)])
    assert kids.stop(1.0), "before anything was started"
    kids = supervisor.Supervisor([one(SLEEP)])
    kids.start()
    pidfd = os.pidfd_open(kids.children()["c"])
    try:
        assert kids.stop(5.0)
        assert select.select([pidfd], [], [], 0)[0]
        assert kids.stop(5.0)
    finally:
        os.close(pidfd)
