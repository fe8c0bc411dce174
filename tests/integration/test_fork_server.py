"""A console script that is forked sees the same as one that is executed, and ends the same way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support import fork_server
from tests.support.commands import Command, Commands, commands
from tests.support.wait import until

PROBE = """
import json, os, signal, sys, threading

def setup():
    own = {}
    for name in ("cmdline", "environ", "comm"):
        with open(f"/proc/self/{name}", "rb") as file:
            own[name] = [text for text in file.read().strip().decode().split("\\0") if text]
    own["cmdline"][0] = os.path.realpath(own["cmdline"][0])
    own["environ"].sort()
    streams = [sys.stdin, sys.stdout, sys.stderr]
    print(json.dumps({
        **own,
        "argv": sys.argv,
        "main": sys.modules["__main__"].__file__,
        "name": sys.modules["__main__"].__name__,
        "path": [os.path.realpath(each) for each in sys.path],
        "variables": dict(os.environ),
        "folder": os.getcwd(),
        "leads a session": os.getsid(0) == os.getpid() == os.getpgrp(),
        "streams": [
            [s.fileno(), s.encoding, s.errors, s.line_buffering, s.write_through] for s in streams
        ],
        "descriptors": sorted(os.listdir("/proc/self/fd")),
        "tests": sorted(name for name in sys.modules if name.partition(".")[0] == "tests"),
        "threads": threading.active_count(),
        "signals": [str(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGPIPE)],
        "mask": [str(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    }))
    sys.exit(7)
"""
ARGV = ("queue-claim-worker", "--queue", "a b", "--inline", "--app", "probe:setup")
NEW = {"PYTHONUTF8": "0"}
"""What a process reads when it starts, and so cannot be forked."""


@pytest.fixture
def starts(tmp_path: Path) -> Any:
    (tmp_path / "probe.py").write_text(PROBE)
    with commands(QUEUE_WORKFLOWS_DB_URL="postgresql://nobody@127.0.0.1:1/none") as made:
        yield made


def ended(starts: Commands, folder: Path, **env: str) -> tuple[dict[str, Any], Command]:
    done = starts.run(*ARGV, cwd=folder, QW_TEST_EMPTY="", QW_TEST_LINES="a\n=b ü", **env)
    assert done.process.returncode == 2, done.err
    assert "SystemExit: 7" in done.err
    return json.loads(done.out), done


def without(found: dict[str, Any]) -> dict[str, Any]:
    """Return what was found without what no two processes share."""
    for name in ("QW_TEST_COMMAND", *NEW):
        found["variables"].pop(name, None)
        found["environ"] = [text for text in found["environ"] if not text.startswith(f"{name}=")]
    return found


def test_a_forked_script_is_like_an_executed_one(starts: Commands, tmp_path: Path) -> None:
    forked, by_fork = ended(starts, tmp_path)
    executed, by_exec = ended(starts, tmp_path, **NEW)
    assert isinstance(by_fork.process, fork_server.Process)
    assert isinstance(by_exec.process, subprocess.Popen)
    assert f"QW_TEST_COMMAND={by_fork.mark}" in forked["environ"]
    assert without(forked) == without(executed)
    assert by_fork.err == by_exec.err


def test_a_signal_is_its_exit_code_and_nothing_is_left(starts: Commands) -> None:
    worker = starts.start(*ARGV[:2], "cpu", "--app", "tests.support.toy_app:setup")
    until(lambda: "does not answer" in worker.err)
    assert worker.process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        worker.process.wait(0.01)
    assert worker.process.pid in worker.family()
    worker.send(signal.SIGKILL)
    assert worker.wait() == -signal.SIGKILL
    assert not Path(f"/proc/{worker.process.pid}").exists()
    until(lambda: worker.family() == {})


def test_scripts_end_with_their_server(tmp_path: Path) -> None:
    log = tmp_path / "log"
    env = {**os.environ, "QUEUE_WORKFLOWS_DB_URL": "postgresql://nobody@127.0.0.1:1/none"}
    with fork_server.started() as server:
        role = server.role(
            *ARGV[:2], "cpu", "--app", "tests.support.toy_app:setup", env=env, log=log
        )
        until(lambda: "does not answer" in role.log)
    until(lambda: not Path(f"/proc/{role.pid}").exists())


def test_a_command_that_is_no_console_script_is_executed_not_forked(starts: Commands) -> None:
    done = starts.run("python", "-c", "import sys; print('hello'); sys.exit(3)")
    assert isinstance(done.process, subprocess.Popen)
    assert (done.process.returncode, done.out) == (3, "hello\n")
