"""Fork role processes from a process that has imported the engine once.

What it forks is a process of its own, which lives and dies as a console script does.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.support.wait import until

ROLES = ("queue-claim-worker", "queue-orchestrator", "queue-scheduler")
ROOT = Path(__file__).parents[2]


def serve() -> None:
    """Answer requests on stdin: fork a role, or tell how one ended. Ends with stdin."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    found = metadata.entry_points(group="console_scripts")
    mains = {entry.name: entry.load() for entry in found if entry.name in ROLES}
    alive: set[int] = set()
    for text in sys.stdin:
        request = json.loads(text)
        if "argv" in request:
            pid = os.fork()
            if pid == 0:
                _become(**request)
                # What the interpreter does at its end costs 0.1 s, and nothing of the engine.
                os._exit(mains[request["argv"][0]](request["argv"][1:]))
            alive.add(pid)
            answer: int | None = pid
        else:
            pid, status = os.waitpid(request["pid"], os.WNOHANG)
            alive.discard(pid)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _become(argv: list[str], env: dict[str, str], log: str) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    sys.argv = argv
    for stream, path, flags in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY)):
        fd = os.open(path, flags | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, stream)
        os.close(fd)
    os.dup2(1, 2)


class Role:
    """A role's process."""

    def __init__(self, server: ForkServer, pid: int, log: Path) -> None:
        self.pid = pid
        self._server = server
        self._log = log
        self._code: int | None = None

    def ended(self) -> int | None:
        """Return its exit code, minus the signal that killed it; None while it runs."""
        if self._code is None:
            self._code = self._server.ask(pid=self.pid)
        return self._code

    def wait(self, timeout_s: float = 30.0) -> int:
        until(lambda: self.ended() is not None, timeout_s=timeout_s, every_s=0.002)
        assert self._code is not None
        return self._code

    def stop(self) -> int:
        """Send SIGTERM, and return its exit code."""
        if self.ended() is None:
            os.kill(self.pid, signal.SIGTERM)
        return self.wait()

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""


class ForkServer:
    """Forks roles out of a process of their own that has these modules; for one thread."""

    def __init__(self, *modules: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import {__name__} as own; own.serve()", *modules],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ask(self, **request: Any) -> Any:
        into, out = self._process.stdin, self._process.stdout
        assert into is not None and out is not None
        into.write(json.dumps(request) + "\n")
        into.flush()
        return json.loads(out.readline())

    def start(self, *argv: str, env: Mapping[str, str], log: Path) -> Role:
        """Start a role's console script in this environment, with its output in `log`."""
        pid = self.ask(argv=argv, env=dict(env), log=str(log))
        return Role(self, pid, log)

    def close(self) -> None:
        """End it with every role that still runs."""
        self._process.communicate()
        assert self._process.returncode == 0


@contextlib.contextmanager
def started(*modules: str) -> Generator[ForkServer]:
    """Yield a `ForkServer` for a `with` block."""
    made = ForkServer(*modules)
    try:
        yield made
    finally:
        made.close()
